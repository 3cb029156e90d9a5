"""The dequant backend: every operand becomes bf16, torch's grouped mm does the rest. Any device. No host sync on GPUs
of compute capability 9 and 10; on others torch's grouped mm is a loop that reads offs.

    qdata * scale -> bf16 (exact: a number of qdata has at most 4 significant bits) -> grouped mm, fp32 inside, bf16 out

Compared with `reference`, a result is rounded to bf16 once more if out_dtype is fp32, and fp32 operands of recipe
"bf16" are rounded to bf16. Bias is added after the GEMM's rounding. The backend saves bytes in communication and in
saved tensors, but multiplies at bf16 speed. It dequantizes the whole capacity, not only valid rows, so row indices past
the last group must be -1 or valid. One group of all rows, a linear, is torch's plain GEMM, which never syncs.
"""

import torch
from torch import Tensor

from mxep.gemm.backends.base import AlongTokens, Backend
from mxep.quant import MXTensor, group_of_rows
from mxep.runtime.op import mode_listens

ALIGNMENT = 8
"""torch's grouped mm needs rows of 16 bytes: N and K in multiples of 8 bf16."""


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
            a, w_t = _bf16(a), _bf16(w)[0].mT
            if bias is not None and bias.dtype == a.dtype:
                return in_dtype(torch.addmm(bias, a, w_t), out_dtype)
            out = a @ w_t
            return in_dtype(out if bias is None else out + bias, out_dtype)
        _check_alignment(*w.shape[1:])
        out = _grouped_mm(_bf16(a), _bf16(w).mT, offs, out_dtype)
        return out if bias is None else in_dtype(out + bias[group_of_row(offs, len(out))], out_dtype)

    def dgrad(self, dy: Tensor, w: Tensor, offs: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        if offs is None:
            return in_dtype(_bf16(dy) @ _bf16(w)[0], out_dtype)
        _check_alignment(*w.shape[1:])
        return _grouped_mm(_bf16(dy), _bf16(w), offs, out_dtype)

    def wgrad_product(self, operands: AlongTokens, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        y, x = _bf16(operands.dy), _bf16(operands.a)
        if scale != 1:  # scale the narrower operand: fewer elements than the result
            y, x = (y * scale, x) if y.shape[1] <= x.shape[1] else (y, x * scale)
        if offs is None:
            return in_dtype(y.mT @ x, out_dtype).unsqueeze(0)
        _check_alignment(y.shape[1], x.shape[1])
        return _grouped_mm(y.mT, x, offs, out_dtype)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    if not torch.compiler.is_compiling():
        mode_listens()  # a mode may count FLOPs, and has no formula for torch's own op
    return in_dtype(torch.nn.functional.grouped_mm(a, b, offs=offs), dtype)


def in_dtype(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast only if needed: compiling, torch 2.11 treats a no-op cast's alias as another tensor with gradient 0."""
    return out if out.dtype == dtype else out.to(dtype)


def _bf16(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        raise ValueError("got torch.float64, want bf16 or fp32 for torch's grouped mm: use backend 'reference'")
    if isinstance(x, MXTensor):
        return x.dequantize(torch.bfloat16)
    x = x.to(torch.bfloat16)
    transposed = x.ndim == 3 and x.mT.is_contiguous()  # weights stored (G, K, N), which torch accepts
    return x if transposed else x.contiguous()


def _check_alignment(n: int, k: int) -> None:
    if n % ALIGNMENT or k % ALIGNMENT:
        raise ValueError(
            f"backend 'dequant': got N={n}, K={k}, want multiples of {ALIGNMENT} (16 bytes of bf16): "
            "pad them or use backend 'reference'"
        )


def group_of_row(offs: Tensor, num_rows: int) -> Tensor:
    """Group of every row, (M,). Rows past the last group count as the last group's."""
    return group_of_rows(offs, num_rows).clamp_(max=len(offs) - 1)
