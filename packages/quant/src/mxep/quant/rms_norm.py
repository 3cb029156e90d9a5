"""RMSNorm and quantization in one pass: what a block's q, k and v, or gate and up, all read.

    forward    rstd = 1 / sqrt(mean(x^2) + eps)            fp32, a number for each row, kept for backward
               h = (x * rstd) * weight                     fp32, quantized: qdata and scales are all that is written
    backward   g = dy * weight;  n = x * rstd
               dx = (g - n * mean(g * n)) * rstd           rounded once to x's dtype
               d_weight = sum of dy * n over rows          in RMS_NORM_PARTS parts, in order

Sums over a row are `mxep.quant.swiglu.tree_sum`, a mean is such a sum times 1/D rounded to fp32, roots and quotients
are rounded to nearest, and no multiplication is fused with an addition: so kernels have the reference's bits. So have
the parts of d_weight, of which part p has rows p, p + RMS_NORM_PARTS, ...; torch adds them up, in an order of its own.

R rows, D row length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxep.quant.checks import check_block, check_format, check_mode, check_values
from mxep.quant.formats import BLOCK, E4M3, MXFormat, ScaleMode
from mxep.quant.ops import quantize_rows
from mxep.quant.shapes import RMS_NORM_PARTS, empty_rows
from mxep.quant.swiglu import tree_sum
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    fmt: MXFormat | str = E4M3,
    mode: ScaleMode | str = ScaleMode.RCEIL,
    block_size: int | None = BLOCK,
) -> MXTensor:
    """RMSNorm of x (..., D) over D times weight (D,), quantized along D from its fp32 value: shape and dtype are x's.

    Bitwise `quantize(h, ...)` of the module's h; None: one scale a row. x, weight: bf16, fp32 or fp16.
    Differentiable in x and weight, once. The gradient may be an MXTensor. Not for torch.compile, where no MXTensor with
    a gradient can leave a graph: norm there, and let products quantize.
    ValueError for other dtypes or shapes, or a D that `block_size` does not divide.
    """
    check_values("rms_norm_quantize", x)
    if weight.shape != x.shape[-1:] or weight.device != x.device or not weight.is_floating_point():
        got = f"{weight.dtype} {tuple(weight.shape)} on {weight.device}"
        raise ValueError(f"weight: got {got}, want floating point (D,) = ({x.shape[-1]},) on {x.device}")
    how = check_format(fmt), check_mode(mode), check_block(block_size, -1, x)
    mx: MXTensor = _RMSNormQuantize.apply(x, weight, float(eps), *how)  # type: ignore[no-untyped-call]
    return mx


class _RMSNormQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, mode: str, block_size: int
    ) -> MXTensor:
        rows = x.reshape(-1, x.shape[-1])
        qdata, scale, rstd = rms_norm_quantize_op(rows, weight, eps, dtype, mode, block_size)
        ctx.save_for_backward(x, weight, rstd)
        qdata, scale = qdata.view(x.shape), scale.view(*x.shape[:-1], scale.shape[-1])
        return MXTensor(qdata, scale, None, -1, block_size, x.dtype, trusted=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = dy.dequantize() if isinstance(dy, MXTensor) else dy
        rows = [t.reshape(-1, x.shape[-1]) for t in (dy, x)]
        dx, parts = rms_norm_backward_op(*rows, weight, rstd)
        return dx.view(x.shape), parts.sum(0).to(weight.dtype), None, None, None, None


def _reciprocal_of_length(x: Tensor) -> float:
    """1/D as fp32 has it."""
    return float(torch.tensor(1.0 / x.shape[-1], dtype=torch.float32, device="cpu"))


@op(
    "mxep::rms_norm_quantize",
    fake=lambda x, weight, eps, dtype, mode, block_size: (
        *empty_rows(x, dtype, block_size),
        x.new_empty(x.shape[0], dtype=torch.float32),
    ),
    launcher="mxep.quant.kernels.rms_norm:rms_norm_quantize",
)
def rms_norm_quantize_op(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, mode: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, D), weight (D,) -> qdata (R, D) `dtype`, scale (R, D/block_size) e8m0, rstd (R,) fp32."""
    values = x.float()
    mean = tree_sum(values * values) * _reciprocal_of_length(x)
    # torch's sqrt of fp32 is not rounded to nearest on every CPU (one in six numbers on one with AVX-512).
    rstd = 1.0 / torch.sqrt((mean + torch.tensor(eps, dtype=torch.float32, device="cpu")).double()).float()
    h = (values * rstd.unsqueeze(-1)) * weight.float()
    return *quantize_rows.reference(h, dtype, mode, block_size), rstd


@op(
    "mxep::rms_norm_backward",
    fake=lambda dy, x, weight, rstd: (
        x.new_empty(x.shape),
        x.new_empty((RMS_NORM_PARTS, x.shape[1]), dtype=torch.float32),
    ),
    launcher="mxep.quant.kernels.rms_norm:rms_norm_backward",
)
def rms_norm_backward_op(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dy, x (R, D), weight (D,), rstd (R,) -> dx (R, D) in x's dtype, (RMS_NORM_PARTS, D) fp32, parts of d_weight."""
    dy, scale = dy.float(), rstd.unsqueeze(-1)
    n, g = x.float() * scale, dy * weight.float()
    mean = tree_sum(g * n) * _reciprocal_of_length(x)
    dx = (g - n * mean.unsqueeze(-1)) * scale
    terms = torch.nn.functional.pad(dy * n, (0, 0, 0, -len(x) % RMS_NORM_PARTS)).view(-1, RMS_NORM_PARTS, x.shape[1])
    parts = terms.new_zeros(RMS_NORM_PARTS, x.shape[1])
    for each in terms:
        parts += each
    return dx.to(x.dtype), parts
