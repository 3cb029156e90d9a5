"""LoRA for groups of rows, y += (scale * rows A^T) B^T, and its gradients, by three kinds of GEMM.

    forward   inner   = scale rows A^T   lora_shrink    backward   d_inner = scale dy B   lora_shrink with B^T
              y      += inner B^T        lora_expand               d_rows += d_inner A    lora_expand with A^T
                                                                   d_B     = dy^T inner   lora_wgrad
                                                                   d_A     = d_inner^T rows

rows (M, K) and dy (M, N) are passed as three arguments: qdata, scale and row index of an MXTensor. Each scale covers 32
elements or a whole row. An unquantized tensor is passed as the tensor, None and None. A kernel reads each row once,
through the row index if there is one.

Sums are fp32. Operands are rounded to the dtype of inner, bf16 or fp32. E4M3 and E5M2 with power-of-two scales fit bf16
without an error.

offs (G,) int32 are inclusive cumulative group sizes. Rows from offs[-1] on are neither read nor written.

M rows, K in features, N out features, r rank, G groups. A (G, r, K), B (G, N, r), inner (M, r).
"""

import torch
from torch import Tensor

from mxep.gemm.backends.reference import num_rows, values_of_rows
from mxep.runtime.op import op


@op(
    "mxep::lora_shrink",
    fake=lambda x, x_scale, x_index, A, offs, scale, dtype: x.new_empty(
        (num_rows(x, x_index), A.shape[1]), dtype=dtype
    ),
    launcher="mxep.gemm.kernels.lora:lora_shrink",
)
def lora_shrink(
    x: Tensor, x_scale: Tensor | None, x_index: Tensor | None, A: Tensor, offs: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """Compute scale * x[rows of g] @ A[g].T for each group g. A: (G, r, K), any strides. Returns (M, r) in dtype."""
    out = x.new_zeros((num_rows(x, x_index), A.shape[1]), dtype=dtype)
    values, ends = values_of_rows((x, x_scale, x_index), int(offs[-1])), offs.tolist()
    for g, rows in enumerate(_rows_of_groups(ends)):
        out[rows] = (_in(values[rows], dtype) @ _in(A[g], dtype).mT * scale).to(dtype)
    return out


@op(
    "mxep::lora_expand",
    fake=lambda *_: None,
    launcher="mxep.gemm.kernels.lora:lora_expand",
    mutates_args=("out",),
)
def lora_expand(out: Tensor, inner: Tensor, B: Tensor, offs: Tensor) -> None:
    """Add inner[rows of g] @ B[g].T to out (M, N) for each group g, rounding once. B: (G, N, r), any strides."""
    for g, rows in enumerate(_rows_of_groups(offs.tolist())):
        product = inner[rows].float() @ _in(B[g], inner.dtype).mT
        out[rows] = (out[rows].float() + product).to(out.dtype)


@op(
    "mxep::lora_wgrad",
    fake=lambda *_: None,
    launcher="mxep.gemm.kernels.lora:lora_wgrad",
    mutates_args=("out",),
)
def lora_wgrad(
    out: Tensor, inner: Tensor, x: Tensor, x_scale: Tensor | None, x_index: Tensor | None, offs: Tensor, scale: float
) -> None:
    """Write scale * inner[rows of g].T @ x[rows of g] to out (G, r, K), any strides, zeros if g is empty."""
    values, ends = values_of_rows((x, x_scale, x_index), int(offs[-1])), offs.tolist()
    for g, rows in enumerate(_rows_of_groups(ends)):
        out[g] = (inner[rows].float().mT @ _in(values[rows], inner.dtype) * scale).to(out.dtype)


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to dtype, and return the rounded numbers as fp32."""
    return x.to(dtype).float()


def _rows_of_groups(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends)]
