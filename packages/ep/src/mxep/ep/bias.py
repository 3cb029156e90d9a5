"""Biases of experts: the down-projection's bias, and scaled gradients of biases.

    out (T, D) = sum over k of weights[t, k] * (down_proj[id] h + down_bias[id])

The layer's routing weight multiplies before the down-projection, so its bias is added where the weights are, to a
token's sum: S @ down_bias, with S (T, E) the weights by expert. That is a product a hundredth of the layer's size, and
its gradients take d_out as it is, unquantized. A token without experts has none, as its d_out may be NaN. 0 times NaN
is NaN, so what is not finite stays out of the products: the token's whole row, or the expert's, is NaN then, no other.
Ranks that share experts gather the bias, (E, D), and reduce its gradient: torch's own collectives. gate_up's is added
by the kernel of the weight gradient (`mlp.py`).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor


def add_down_bias(
    out: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    bias: Tensor,
    *,
    scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """out (T, D) plus the weighted sum of the biases (e, D) of each token's experts. scale: of the bias's gradient.

    expert_ids: (T, K); ids outside 0 .. E-1 add nothing. weights: (T, K) fp32. group: the ranks that share the experts,
    e of E each; None if this process has all.
    """
    whole = scaled_gradient(bias, scale).float()
    if group is not None:
        whole = _Gathered.apply(whole, group)  # type: ignore[no-untyped-call]
    num_experts = whole.shape[0]
    here = (expert_ids >= 0) & (expert_ids < num_experts)
    by_expert = weights.new_zeros(len(weights), num_experts)
    ids = expert_ids.clamp(0, num_experts - 1).long()
    by_expert = by_expert.scatter_add(1, ids, torch.where(here, weights, 0.0))
    operands = out, by_expert.to(out.dtype), whole.to(out.dtype), ids, here
    return _AddBias.apply(*operands)  # type: ignore[no-any-return,no-untyped-call]


def scaled_gradient(x: Tensor, scale: float) -> Tensor:
    """x, with its gradient multiplied by scale."""
    if scale == 1.0:
        return x
    scaled: Tensor = _ScaledGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class _AddBias(torch.autograd.Function):
    """out (T, D) + by_expert (T, E) @ bias (E, D). ids: (T, K) experts. routed: (T, K), True for routed pairs."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, by_expert: Tensor, bias: Tensor, ids: Tensor, routed: Tensor) -> Tensor:
        ctx.save_for_backward(by_expert, bias, ids, routed)
        bad = ~bias.isfinite().all(1)
        tokens = (bad[ids] & routed).any(1, keepdim=True)
        operands = by_expert.masked_fill(tokens, math.nan), bias.masked_fill(bad[:, None], 0.0)
        with torch.autocast(out.device.type, enabled=False):  # autocast would round out, too
            return torch.addmm(out, *operands)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        by_expert, bias, ids, routed = ctx.saved_tensors
        _, needs_weights, needs_bias, *_ = ctx.needs_input_grad
        bad = ~d_out.isfinite().all(1, keepdim=True)
        d_by_expert = d_bias = None
        with torch.autocast(d_out.device.type, enabled=False):
            if needs_weights:  # only elements of routed pairs are read
                d_by_expert = d_out @ bias.t()
            if needs_bias:
                spoilt = ids.new_zeros(len(bias)).scatter_add(0, ids.flatten(), (bad & routed).flatten().long())
                d_bias = by_expert.t() @ d_out.masked_fill(bad, 0.0)
                d_bias = d_bias.masked_fill(spoilt[:, None] > 0, math.nan)
        return d_out, d_by_expert, d_bias, None, None


class _Gathered(torch.autograd.Function):
    """(e, D) of each rank -> (E, D), by ops that a graph takes. torch's wrappers of them change names by version."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
        return wait_tensor(gathered)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        to = "sum", ctx.group.size(), ctx.group.group_name
        return wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(grad.contiguous(), *to)), None
