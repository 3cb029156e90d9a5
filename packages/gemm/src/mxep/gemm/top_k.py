"""top_k: chooses a token's experts and their weights from its logits, in a router after `fp32_linear`.

    logits (T, E) -> scores (softmax or sigmoid) -> the K best -> their scores, divided by their sum
                     or choice -----------------^

CUDA takes one kernel forward and one backward. Backward keeps ids, weights and chosen logits (T, K), not all logits.

T tokens, E experts, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mxep.runtime.op import op

_DEVICE = "cuda"
"""Device type of the ops. Other devices use torch's functions."""


def top_k(logits: Tensor, k: int, score: str = "softmax", *, choice: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(expert_ids (T, K) int32, best first, weights (T, K) fp32 that sum to 1, differentiable, on CUDA once).

    logits: (T, E) fp32. score: "softmax" over all experts, or "sigmoid" of each.
    choice: (T, E) fp32. Its largest are chosen instead of the best scores. An example is scores plus a bias.
    Logits are compared, not scores. Their order is the same, but scores may round to the same number, or to 0.
    Among equal choices the larger logit is taken, among equal logits the lower id. A NaN logit comes first, whatever
    its choice, and makes the token's weights NaN. A NaN choice comes next. All devices agree.
    Raises ValueError for another dtype, shape or score, or k not in 1..E.
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
    """Scores (T, E) of logits."""
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def _plain(logits: Tensor, choice: Tensor | None, k: int, score: str) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, weights, chosen logits). Weights come from logits, so scores that underflow have a sum and gradients."""
    ids = best_first(logits.detach(), choice)[:, :k]
    chosen = logits.gather(1, ids)
    return ids.int(), (chosen if score == "softmax" else F.logsigmoid(chosen)).softmax(-1), chosen


def best_first(logits: Tensor, choice: Tensor | None = None) -> Tensor:
    """All experts of each token, ids (T, E) int64, in the order in which `top_k` takes them."""
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


@op("mxep::top_k", fake=_empty_top_k, launcher="mxep.gemm.kernels.top_k:top_k")
def top_k_op(logits: Tensor, choice: Tensor | None, k: int, softmax: bool) -> tuple[Tensor, Tensor, Tensor]:
    """logits, choice (T, E) fp32 -> ids (T, K) int32, weights (T, K), chosen logits (T, K)."""
    return _plain(logits, choice, k, "softmax" if softmax else "sigmoid")


@op(
    "mxep::top_k_backward",
    fake=lambda d_weights, weights, ids, chosen, experts, softmax: weights.new_empty((weights.shape[0], experts)),
    launcher="mxep.gemm.kernels.top_k:top_k_backward",
)
def top_k_backward_op(
    d_weights: Tensor, weights: Tensor, ids: Tensor, chosen: Tensor, experts: int, softmax: bool
) -> Tensor:
    """(T, experts) fp32, zero except at ids."""
    d_chosen = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    if not softmax:
        d_chosen = d_chosen * (-chosen).sigmoid()
    return d_chosen.new_zeros(weights.shape[0], experts).scatter_(1, ids.long(), d_chosen)
