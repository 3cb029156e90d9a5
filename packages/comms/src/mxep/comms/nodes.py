"""Assigns slots on other nodes to the tokens that cross to them, and makes their tables. All nodes have equal slots.

T tokens, K experts a token, N nodes. A node's block is B = C + 1 slots: a header, then C for tokens.
"""

import torch
from torch import Tensor

from mxep.runtime.op import ANY_GPU, op


@op(
    "mxep::plan_slots",
    fake=lambda expert_ids, weights, counts, num_nodes, num_slots, experts_per_node, num_experts: (
        expert_ids.new_empty(expert_ids.shape),
        expert_ids.new_empty(expert_ids.shape[0], num_nodes),
        expert_ids.new_empty(num_nodes * (num_slots + 1)),
        expert_ids.new_empty(expert_ids.shape[0], 8 * expert_ids.shape[1], dtype=torch.uint8),
    ),
    launcher="mxep.comms.kernels.nodes:plan_slots",
    mutates_args=("counts",),
    capability=ANY_GPU,
)
def plan_slots(
    expert_ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    num_nodes: int,
    num_slots: int,
    experts_per_node: int,
    num_experts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give each token a slot on each node that it needs. If more than C tokens need one, C evenly spread ones go.

    expert_ids: (T, K) int32, -1 is not routed. weights: (T, K) fp32. num_slots: C, at least 1. counts: (3,) int64,
    updated: the most tokens that need one node, the pairs without a slot, the invalid ids.

    Results:
        ids: (T, K) int32, -1 for invalid ones.
        slots: (T, N) int32, -1 where a token has none.
        tokens: (N B,) int32 token of each slot, -1 for headers and unused slots.
        tables: (T, 8 K) uint8, ids + 1 and weights of each token. Unused slots are 0, so ids are shifted by 1.
    """
    wrong = (expert_ids < -1) | (expert_ids >= num_experts)
    ids = torch.where(wrong, -1, expert_ids)
    of_node = torch.arange(num_nodes, device=ids.device, dtype=torch.int64)
    here = ids.div(experts_per_node, rounding_mode="floor")[:, :, None] == of_node  # (T, K, N)
    needed = here.any(1)
    before, total = needed.cumsum(0) - needed.long(), needed.sum(0).clamp_min(num_slots)
    # If not all tokens fit, evenly spread ones do.
    place = (before * num_slots + total // 2) // total
    fits = needed & (place < ((before + 1) * num_slots + total // 2) // total)
    slots = torch.where(fits, of_node * (num_slots + 1) + 1 + place, -1)  # after the header
    # Tokens without a slot write into an extra slot that is cut off.
    all_slots = num_nodes * (num_slots + 1)
    token = torch.arange(len(ids), dtype=torch.int32, device=ids.device)[:, None].expand(slots.shape)
    tokens = token.new_full((all_slots + 1,), -1)
    tokens.scatter_(0, torch.where(fits, slots, all_slots).flatten(), token.flatten())
    lost = (here & (needed & ~fits)[:, None]).sum()
    counts[0] = torch.maximum(counts[0], needed.sum(0).max())
    counts[1:] += torch.stack((lost, wrong.sum()))
    tables = torch.cat((ids + 1, weights.detach().view(torch.int32)), 1).view(torch.uint8)
    return ids, slots.int(), tokens[:-1].clone(), tables


@op(
    "mxep::read_tables",
    fake=lambda tables, first_expert, num_experts: (
        tables.new_empty(tables.shape[0], tables.shape[1] // 8, dtype=torch.int32),
        tables.new_empty(tables.shape[0], tables.shape[1] // 8, dtype=torch.float32),
    ),
    launcher="mxep.comms.kernels.nodes:read_tables",
    capability=ANY_GPU,
)
def read_tables(tables: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Read tables (R, 8 K) uint8 of :func:`plan_slots` -> ids (R, K) int32, weights (R, K) fp32. Ids count from
    first_expert on; other experts' ids become -1."""
    ids, weights = tables.view(torch.int32).chunk(2, 1)
    ids = ids - (1 + first_expert)
    valid = (ids >= 0) & (ids < num_experts)
    return torch.where(valid, ids, -1), weights.clone(memory_format=torch.contiguous_format).view(torch.float32)


@op(
    "mxep::pick_values",
    fake=lambda values, slots, ids, experts_per_node: values.new_empty(ids.shape),
    launcher="mxep.comms.kernels.nodes:pick_values",
    capability=ANY_GPU,
)
def pick_values(values: Tensor, slots: Tensor, ids: Tensor, experts_per_node: int) -> Tensor:
    """Value (T, K) of each pair's slot, 0 without one. values (N B, K) fp32 of slots, slots (T, N), ids (T, K)."""
    node = ids.div(experts_per_node, rounding_mode="floor").clamp_min(0)
    slot = slots.gather(1, node.long())
    of_pairs = values.gather(0, slot.clamp_min(0).long())
    return torch.where((ids >= 0) & (slot >= 0), of_pairs, 0.0)
