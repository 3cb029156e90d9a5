"""Auxiliary losses of one layer's router, to be added to a model's loss.

    load_balancing_loss = E * sum over e of f_e P_e             keeps experts equally busy (Fedus et al., "Switch
                                                                Transformers", 2021)
    router_z_loss = mean over tokens of logsumexp(logits)^2     keeps logits small (Zoph et al., "ST-MoE", 2022)

f_e: expert e's share of the rows. P_e: its mean score; only P_e has a gradient. A model averages the losses of its
layers. It must not sum f_e and P_e over layers first: if each layer uses a few experts of its own, the sums are
balanced.

T tokens, E experts in all, K experts per token.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor
from torch.nn import functional as F

from .shares import checked_group


def load_balancing_loss(
    logits: Tensor, expert_ids: Tensor, *, score: str = "softmax", group: dist.ProcessGroup | None = None
) -> Tensor:
    """0-d fp32: 1 at perfect balance, up to E / K if all tokens choose the same experts. No host sync.

    logits: (T, E), differentiable, such as `Router.last_logits`. expert_ids: (T, K) int32 or int64. Ids outside
    0 .. E-1 are not counted, nor are tokens without valid ids, such as padding. score: "softmax", or "sigmoid" divided
    by its sum over the token's experts. group: f_e counts the rows of all its ranks, by one all-reduce of E counts. All
    ranks must call it, also those without tokens. The mean of the ranks' losses is then the whole batch's, if all have
    as many tokens.

    Raises ValueError for another score, or sizes that do not fit.
    """
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
    if logits.dim() != 2 or expert_ids.dim() != 2 or logits.shape[0] != expert_ids.shape[0]:
        shapes = f"{tuple(logits.shape)} and {tuple(expert_ids.shape)}"
        raise ValueError(f"logits and expert_ids must be (T, E) and (T, K), got {shapes}")
    num_experts = logits.shape[1]
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = expert_ids.clamp(0, num_experts - 1).flatten().long()
    counts = torch.zeros(num_experts, device=logits.device, dtype=torch.float32).scatter_add_(
        0, ids, valid.flatten().float()
    )
    if (group := checked_group(group)) is not None:
        counts = wait_tensor(torch.ops._c10d_functional.all_reduce(counts, "sum", group.group_name))
    routed = valid.any(1, keepdim=True)
    logits = torch.where(routed, logits.float(), 0.0)  # uncounted logits may be NaN
    scores = (logits if score == "softmax" else F.logsigmoid(logits)).softmax(-1)
    products = counts * torch.where(routed, scores, 0.0).sum(0)
    return products.sum() * (num_experts / (counts.sum() * routed.sum()).clamp_min(1))


def router_z_loss(logits: Tensor) -> Tensor:
    """0-d fp32: the mean over tokens of the squared logsumexp. logits: (T, E), differentiable.

    Tokens with only -inf logits, which `Router` gives to padding, are not counted.
    """
    padding = (logits == float("-inf")).all(-1, keepdim=True)
    z = logits.float().masked_fill(padding, 0.0).logsumexp(-1).masked_fill(padding[..., 0], 0.0)
    return z.square().sum() / (~padding).sum().clamp_min(1)
