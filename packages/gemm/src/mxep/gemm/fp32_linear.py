"""fp32_linear: x w^T with fp32 accuracy on bf16 tensor cores, for routers: their logits decide a token's experts.

    forward  out (T, E) fp32 = x w^T      one kernel each, on sums of bf16 terms (`kernels.fp32_linear`); a kernel with
    backward dx (T, D) bf16  = dy w       few tiles splits them into parts and adds these up
             dw (E, D)       = dy^T x

Backward keeps only x and w. torch's fp32 GEMM runs outside the tensor cores, on an fp32 copy of x.

T tokens, D in features, E out features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from mxep.gemm.partial_backward import is_wanted
from mxep.runtime.op import op

_DEVICE = "cuda"
"""Device type of the ops. Other devices use torch's GEMMs."""


def fp32_linear(x: Tensor, w: Tensor) -> Tensor:
    """(T, E) fp32: x.float() @ w.float().T, with or without autocast. Gradients have the dtypes of x and w.

    x: (T, D) floating point. w: (E, D) floating point.
    Tensor cores are used on CUDA for plain tensors, x bf16 and w fp32 or bf16. It is then differentiable once and has
    no torch.func support. The errors of out and of an fp32 dw are below the bound of an fp32 GEMM. A bf16 dx or dw is
    the rounded sum of two terms per operand. Before that rounding dx is off by at most 3 * 2^-16 of the sum of
    |dy| |w|, dw by at most 2^-16 of the sum of |dy| |x|. Inf, and values that round to Inf in bf16, give NaN.
    All other inputs use torch's own GEMM. Raises ValueError for shapes that do not fit.
    """
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"shapes: got x {tuple(x.shape)}, w {tuple(w.shape)}, want x (T, D) and w (E, D)")
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return fp32_linear(x, w)
    fits = x.dtype == torch.bfloat16 and w.dtype in (torch.float32, torch.bfloat16) and x.device == w.device
    if fits and x.device.type == _DEVICE and type(x) in (Tensor, Parameter) and type(w) in (Tensor, Parameter):
        out: Tensor = _FP32Linear.apply(x, w)  # type: ignore[no-untyped-call]
        return out
    return x.float() @ w.float().t()


class _FP32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        dx, dw = ctx.needs_input_grad
        ctx.save_for_backward(x if dw else None, w if dx else None)
        ctx.dtypes = x.dtype, w.dtype
        out: Tensor = linear_op(x, w)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        dx = None if w is None or not is_wanted(ctx, 0) else dgrad_op(dy, w, ctx.dtypes[0])
        dw = None if x is None or not is_wanted(ctx, 1) else wgrad_op(dy, x, ctx.dtypes[1])
        return dx, dw


@op(
    "mxep::fp32_linear",
    fake=lambda x, w: x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32),
    launcher="mxep.gemm.kernels.fp32_linear:fp32_linear",
)
def linear_op(x: Tensor, w: Tensor) -> Tensor:
    """x (T, D) bf16, w (E, D) fp32 or bf16 -> (T, E) fp32."""
    return x.float() @ w.float().t()


@op(
    "mxep::fp32_dgrad",
    fake=lambda dy, w, dtype: w.new_empty((dy.shape[0], w.shape[1]), dtype=dtype),
    launcher="mxep.gemm.kernels.fp32_linear:fp32_dgrad",
)
def dgrad_op(dy: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """dy (T, E) fp32, w (E, D) fp32 or bf16 -> (T, D) `dtype`."""
    return (dy @ w.float()).to(dtype)


@op(
    "mxep::fp32_wgrad",
    fake=lambda dy, x, dtype: x.new_empty((dy.shape[1], x.shape[1]), dtype=dtype),
    launcher="mxep.gemm.kernels.fp32_linear:fp32_wgrad",
)
def wgrad_op(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy (T, E) fp32, x (T, D) bf16 -> (E, D) `dtype`."""
    return (dy.t() @ x.float()).to(dtype)
