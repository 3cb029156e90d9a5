"""The two backends in plain torch: reference, the definition that other backends are tested against, and dequant.

reference multiplies group by group, in fp32, from dequantized operands:

    rows of g -> fp32 (., K)   w[g] -> fp32 (N, K)   ->   rows @ w[g].T in fp32, + bias[g]   ->   rounded to out_dtype

fp32 holds every qdata element times its scale exactly. So the only errors are those of the fp32 sum and of the last
rounding. With fp64 operands (recipe "bf16" only) everything is fp64. reference reads offs on the host. On a GPU this is
a sync, so there it serves only to check other backends. Its ops take an operand as three arguments: qdata, scale and
row index of an MXTensor, or a plain tensor, None and None. A BlockFP8 weight is passed as qdata and fp32 scales.

dequant converts every operand to bf16 (exact: a number of qdata has at most 4 significant bits) and calls torch's
grouped mm, on any device, or for a linear torch's plain GEMM. On GPUs of compute capability 9 and 10 dequant does not
sync. On other devices torch's grouped mm reads offs. Unlike in reference, an fp32 result is rounded to bf16 once more,
fp32 operands of recipe "bf16" are rounded to bf16, and bias is added after the GEMM's rounding. dequant also
dequantizes rows past the last group, so their row indices must be -1 or valid.

M rows, N out features, K in features, G groups.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mxep.gemm.backends.base import AlongTokens, Backend
from mxep.gemm.frozen import FP8_BLOCK
from mxep.quant import BlockFP8, MXTensor, group_of_rows
from mxep.runtime.op import op

Parts = tuple[Tensor, Tensor | None, Tensor | None]


class Reference(Backend):
    """See the module's docstring; `Backend` has the contract."""

    name = "reference"
    recordable = True
    bf16_is_torchs = False

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = grouped_mm_reference(*parts_of(a), *parts_of(w)[:2], offs, bias, out_dtype)
        return out

    def wgrad_product(self, operands: AlongTokens, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        dw: Tensor = grouped_wgrad_reference(*parts_of(operands.dy), *parts_of(operands.a), offs, out_dtype, scale)
        return dw


def parts_of(x: Tensor | BlockFP8) -> Parts:
    """(qdata, scale, row_index) of an MXTensor, (qdata, scale, None) of BlockFP8, (x, None, None) of a plain x."""
    if isinstance(x, BlockFP8):
        return x.qdata, x.scale, None
    return (x.qdata, x.scale, x.row_index) if isinstance(x, MXTensor) else (x, None, None)


@op(
    "mxep::grouped_mm_reference",
    fake=lambda a, a_scale, a_index, w, w_scale, offs, bias, out_dtype: a.new_empty(
        (num_rows(a, a_index), w.shape[1]), dtype=out_dtype
    ),
)
def grouped_mm_reference(
    a: Tensor, a_scale: Tensor | None, a_index: Tensor | None, w: Tensor, w_scale: Tensor | None, offs: Tensor | None,
    bias: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`Backend.forward` of a (M, K) and w (G, N, K)."""
    out = a.new_empty((num_rows(a, a_index), w.shape[1]), dtype=out_dtype)
    bounds = _bounds(offs, len(out))
    values = values_of_rows((a, a_scale, a_index), bounds[-1])
    for g, rows in _groups(bounds):
        w_g = values_of_rows((w[g], None if w_scale is None else w_scale[g], None), w.shape[1]).to(values.dtype)
        product = _product(values[rows], w_g.mT)
        out[rows] = product if bias is None else product + bias[g]
    return out


@op(
    "mxep::grouped_wgrad_reference",
    fake=lambda dy, dy_scale, dy_index, a, a_scale, a_index, offs, out_dtype, scale: a.new_empty(
        (_num_groups(offs), dy.shape[1], a.shape[1]), dtype=out_dtype
    ),
)
def grouped_wgrad_reference(
    dy: Tensor, dy_scale: Tensor | None, dy_index: Tensor | None, a: Tensor, a_scale: Tensor | None,
    a_index: Tensor | None, offs: Tensor | None, out_dtype: torch.dtype, scale: float,
) -> Tensor:  # fmt: skip
    """`Backend.wgrad` of dy (M, N) and a (M, K)."""
    dw = a.new_zeros((_num_groups(offs), dy.shape[1], a.shape[1]), dtype=out_dtype)
    bounds = _bounds(offs, num_rows(a, a_index))
    a_values = values_of_rows((a, a_scale, a_index), bounds[-1])
    dy_values = values_of_rows((dy, dy_scale, dy_index), bounds[-1]).to(a_values.dtype)
    for g, rows in _groups(bounds):
        dw[g] = _product(dy_values[rows].mT, a_values[rows]) * scale
    return dw


def values_of_rows(parts: Parts, rows: int) -> Tensor:
    """Dequantize the first `rows` rows of a 2-D operand. Returns (rows, columns) fp32, or fp64 for fp64."""
    x, scale, index = parts
    if scale is None:
        return x[:rows] if x.dtype == torch.float64 else x[:rows].float()
    if scale.dtype == torch.float32:
        n, k = x.shape
        one = {(n, 1): (1, k), (1, k): (n, 1)}  # one scale per row, or per column if transposed
        return BlockFP8(x, scale, one.get((*scale.shape,), FP8_BLOCK)).dequantize(torch.float32)
    block_rows = 1 if index is not None or rows == 0 else x.shape[0] // scale.shape[0]
    block_cols = x.shape[1] // scale.shape[1]
    if index is not None:
        index = index[:rows]
    else:
        x, scale = x[:rows], scale[: rows // block_rows]
    axis = -1 if block_rows == 1 else -2 if block_cols == 1 else (-2, -1)
    return MXTensor(x, scale, index, axis, max(block_rows, block_cols), torch.float32).dequantize()


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # it would round the operands to bf16
        return a @ b


def num_rows(x: Tensor, index: Tensor | None) -> int:
    """Number of rows of an operand: the length of its row index if it has one, else x.shape[0]."""
    return x.shape[0] if index is None else index.shape[0]


def _num_groups(offs: Tensor | None) -> int:
    return 1 if offs is None else offs.shape[0]


def _bounds(offs: Tensor | None, rows: int) -> list[int]:
    """Ends of the groups as numbers: offs, or [rows] if offs is None."""
    return [rows] if offs is None else offs.tolist()


def _groups(bounds: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield (g, slice of g's rows) for every group g that has rows."""
    start = 0
    for g, end in enumerate(bounds):
        if end > start:
            yield g, slice(start, end)
        start = end


ALIGNMENT = 8
"""N and K must be multiples of this many bf16 elements: torch's grouped mm needs rows in multiples of 16 bytes."""


class Dequant(Backend):
    """See the module's docstring; `Backend` has the contract."""

    name = "dequant"
    recordable = True

    def unsupported_reason(self, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"torch's grouped mm runs on cpu and cuda, not on {device.type}; use backend 'reference'"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "torch's grouped mm wants compute capability 8.0 or newer; use backend 'reference'"
        return None

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        if offs is None:
            a, w_t = as_bf16(a), as_bf16(w)[0].mT
            if bias is not None and bias.dtype == a.dtype:
                return in_dtype(torch.addmm(bias, a, w_t), out_dtype)
            out = a @ w_t
            return in_dtype(out if bias is None else out + bias, out_dtype)
        check_alignment(*w.shape[1:])
        out = _grouped_mm(as_bf16(a), as_bf16(w).mT, offs, out_dtype)
        return out if bias is None else in_dtype(out + bias[group_of_row(offs, len(out))], out_dtype)

    def dgrad(self, dy: Tensor, w: Tensor, offs: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        if offs is None:
            return in_dtype(as_bf16(dy) @ as_bf16(w)[0], out_dtype)
        check_alignment(*w.shape[1:])
        return _grouped_mm(as_bf16(dy), as_bf16(w), offs, out_dtype)

    def wgrad_product(self, operands: AlongTokens, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        y, x = as_bf16(operands.dy), as_bf16(operands.a)
        if scale != 1:  # scale the narrower operand: fewer elements than the result
            y, x = (y * scale, x) if y.shape[1] <= x.shape[1] else (y, x * scale)
        if offs is None:
            return in_dtype(y.mT @ x, out_dtype).unsqueeze(0)
        check_alignment(y.shape[1], x.shape[1])
        return _grouped_mm(y.mT, x, offs, out_dtype)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    return in_dtype(torch.nn.functional.grouped_mm(a, b, offs=offs), dtype)


def in_dtype(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast out to dtype if it has another. torch.compile (2.11) gives the alias of a no-op cast a gradient of 0."""
    return out if out.dtype == dtype else out.to(dtype)


def as_bf16(x: Tensor | BlockFP8) -> Tensor:
    if isinstance(x, MXTensor | BlockFP8):
        return x.dequantize(torch.bfloat16)
    if x.dtype == torch.float64:
        raise ValueError("got torch.float64, want bf16 or fp32 for torch's grouped mm: use backend 'reference'")
    x = x.to(torch.bfloat16)
    transposed = x.ndim == 3 and x.mT.is_contiguous()  # weights stored (G, K, N), which torch accepts
    return x if transposed else x.contiguous()


def check_alignment(n: int, k: int) -> None:
    if n % ALIGNMENT or k % ALIGNMENT:
        raise ValueError(
            f"backend 'dequant': got N={n}, K={k}, want multiples of {ALIGNMENT} (16 bytes of bf16): "
            "pad them or use backend 'reference'"
        )


def group_of_row(offs: Tensor, num_rows: int) -> Tensor:
    """Group of every row, (M,). Rows past the last group count as rows of the last group."""
    return group_of_rows(offs, num_rows).clamp_(max=len(offs) - 1)
