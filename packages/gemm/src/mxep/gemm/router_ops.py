"""The two operations of a router: `fp32_linear` computes logits in fp32 accuracy, `top_k` chooses experts by them.

fp32_linear runs on bf16 tensor cores. It has fp32 accuracy, because logits decide a token's experts.

    forward  out (T, E) fp32 = x w^T
    backward dx (T, D) bf16  = dy w
             dw (E, D)       = dy^T x

Each of the three is one kernel. It splits fp32 operands into sums of bf16 numbers (`kernels.router_ops`). torch's fp32
GEMM would run outside the tensor cores, on an fp32 copy of x.

    logits (T, E) -> scores (softmax or sigmoid) -> the K best -> their scores, divided by their sum
                     or choice -----------------^

On CUDA, top_k has one forward kernel and one backward kernel. Forward saves the chosen experts' ids, weights and
logits, (T, K) each.

T tokens, D in features, E out features or experts, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn import functional as F

from mxep.gemm.product import is_wanted
from mxep.runtime.op import op

_DEVICE = "cuda"
"""Device type of the ops. Other devices use torch's GEMMs."""


def fp32_linear(x: Tensor, w: Tensor) -> Tensor:
    """x.float() @ w.float().T with fp32 accuracy, with or without autocast. Gradients have the dtypes of x and w.

    Args:
        x: (T, D) floating point.
        w: (E, D) floating point.

    Returns (T, E) fp32. Raises ValueError for shapes that do not fit.

    If both are plain CUDA tensors, x is bf16, and w is fp32 or bf16, the GEMMs run on tensor cores. The result is then
    differentiable once and does not support torch.func. Inf, and numbers that round to Inf in bf16, give NaN. All other
    inputs use torch's own GEMM.

    Errors on tensor cores, with dy the incoming gradient: those of the result and of an fp32 dw are below the bound of
    an fp32 GEMM. A bf16 dx or dw is computed from 16 bits of each fp32 operand. Before its rounding to bf16, this costs
    dx at most 3 * 2^-16 * sum(|dy| * |w|), and dw at most 2^-16 * sum(|dy| * |x|).
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
    launcher="mxep.gemm.kernels.router_ops:fp32_linear",
)
def linear_op(x: Tensor, w: Tensor) -> Tensor:
    """x (T, D) bf16, w (E, D) fp32 or bf16 -> x w^T (T, E) fp32."""
    return x.float() @ w.float().t()


@op(
    "mxep::fp32_dgrad",
    fake=lambda dy, w, dtype: w.new_empty((dy.shape[0], w.shape[1]), dtype=dtype),
    launcher="mxep.gemm.kernels.router_ops:fp32_dgrad",
)
def dgrad_op(dy: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """dy (T, E) fp32, w (E, D) fp32 or bf16 -> dy w (T, D) in `dtype`."""
    return (dy @ w.float()).to(dtype)


@op(
    "mxep::fp32_wgrad",
    fake=lambda dy, x, dtype: x.new_empty((dy.shape[1], x.shape[1]), dtype=dtype),
    launcher="mxep.gemm.kernels.router_ops:fp32_wgrad",
)
def wgrad_op(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy (T, E) fp32, x (T, D) bf16 -> dy^T x (E, D) in `dtype`."""
    return (dy.t() @ x.float()).to(dtype)


def top_k(logits: Tensor, k: int, score: str = "softmax", *, choice: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose K experts per token, and weight them by their normalized scores.

    Args:
        logits: (T, E) fp32.
        k: K, the number of experts per token, 1 to E.
        score: "softmax" over all experts, or "sigmoid" of each logit.
        choice: (T, E) fp32, such as scores plus a bias. If given, the experts with the largest choice are chosen.
            Otherwise the experts with the best scores are chosen.

    Returns:
        expert_ids: (T, K) int32, best first.
        weights: (T, K) fp32. Each token's weights sum to 1. They are differentiable in logits, on CUDA only once.

    Raises ValueError for another dtype, shape, score or k.

    Experts are ranked by logits, because different logits may have equal scores after rounding. If choices are equal,
    the larger logit wins. If logits are equal, too, the lower id wins. A NaN logit ranks above all others, whatever its
    choice, and makes the token's weights NaN. A NaN choice ranks next. All devices give the same ids.
    """
    for name, x in (("logits", logits), ("choice", choice)):
        if x is not None and (x.dim() != 2 or x.dtype != torch.float32 or x.shape != logits.shape):
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, want torch.float32 (T, E)")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must lie in 1..{logits.shape[1]}, got {k}")
    if logits.device.type == _DEVICE and type(logits) is Tensor:
        expert_ids, weights = _TopK.apply(logits, choice, k, score == "softmax")  # type: ignore[no-untyped-call]
        return expert_ids, weights
    expert_ids, weights, _ = _plain(logits, choice, k, score)
    return expert_ids, weights


def scores_of(logits: Tensor, score: str) -> Tensor:
    """Scores (T, E) of logits (T, E). score: "softmax" or "sigmoid"."""
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def _plain(logits: Tensor, choice: Tensor | None, k: int, score: str) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, weights, chosen logits), each (T, K). Weights are a softmax of logits, or of their log-sigmoids.

    Scores may underflow to 0. Their weights would have no sum to divide by, and no gradients."""
    ids = best_first(logits.detach(), choice)[:, :k]
    chosen = logits.gather(1, ids)
    return ids.int(), (chosen if score == "softmax" else F.logsigmoid(chosen)).softmax(-1), chosen


def best_first(logits: Tensor, choice: Tensor | None = None) -> Tensor:
    """Ids (T, E) int64 of all experts, for each token in the order in which `top_k` chooses them."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices  # NaN first
    if choice is None:
        return order
    ranked = choice.masked_fill(logits.isnan(), torch.nan).gather(1, order)
    return order.gather(1, ranked.sort(dim=-1, descending=True, stable=True).indices)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, choice: Tensor | None, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
        ids, weights, chosen = top_k_op(logits, choice, k, softmax)
        ctx.save_for_backward(ids, weights, chosen)
        ctx.experts, ctx.softmax = logits.shape[1], softmax
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, d_weights: Tensor) -> tuple[Tensor | None, ...]:
        ids, weights, chosen = ctx.saved_tensors
        return top_k_backward_op(d_weights, weights, ids, chosen, ctx.experts, ctx.softmax), None, None, None


def _empty_top_k(logits: Tensor, choice: Tensor | None, k: int, softmax: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = logits.shape[0], k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape), logits.new_empty(shape)


@op("mxep::top_k", fake=_empty_top_k, launcher="mxep.gemm.kernels.router_ops:top_k")
def top_k_op(logits: Tensor, choice: Tensor | None, k: int, softmax: bool) -> tuple[Tensor, Tensor, Tensor]:
    """logits, choice (T, E) fp32 -> ids (T, K) int32, weights (T, K) fp32, chosen logits (T, K) fp32."""
    return _plain(logits, choice, k, "softmax" if softmax else "sigmoid")


@op(
    "mxep::top_k_backward",
    fake=lambda d_weights, weights, ids, chosen, experts, softmax: weights.new_empty((weights.shape[0], experts)),
    launcher="mxep.gemm.kernels.router_ops:top_k_backward",
)
def top_k_backward_op(
    d_weights: Tensor, weights: Tensor, ids: Tensor, chosen: Tensor, experts: int, softmax: bool
) -> Tensor:
    """Gradient of the logits: (T, experts) fp32, zero except at the chosen experts' ids."""
    d_chosen = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    if not softmax:
        d_chosen = d_chosen * (-chosen).sigmoid()
    return d_chosen.new_zeros(weights.shape[0], experts).scatter_(1, ids.long(), d_chosen)
