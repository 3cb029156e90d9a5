"""RoutingPlan: which slot feeds which expert-major row. Each receiver makes it alone, from the senders' tables.

Two ranks of T_max = 2 send to this one, which owns experts 0 and 1; K = 2, groups are padded to 4:

    expert_ids   rank 0: token 0 [1, 0]  token 1 [5, 1]     rank 1: token 0 [0, -1]  (num_tokens 1)
    flat index           0  1          2  3                         4   5      6  7 (not sent)

    row          0   1   2   3 | 4   5   6   7
    expert       0   0   .   . | 1   1   .   .
    row_slot     0   2  -1  -1 | 0   1  -1  -1     slot = source rank * T_max + token, -1 is padding
    slot_rows    [4, 0]  [-1, 5]  [1, -1]  [-1, -1]
    offs   4   8            group_sizes  2  2

Rows of an expert are ordered by (source rank, token, place in the token's list): by the flat index, slot * K + k.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .capacity import ANY_ID, Capacity, num_owners
from .op import ANY_GPU, op

DROPPED = -2
"""In ``slot_rows``: this (token, expert) pair is for this rank, but its row did not fit the capacity."""

PlanTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class RoutingPlan:
    """A plan; all tensors on the tables' device. R_max rows, S = W * T_max slots, e local experts.

    Attributes:
        row_slot: (R_max,) int32 the row's slot, -1 on padding.
        row_weight: (R_max,) fp32 routing weight, 0 on padding.
        slot_rows: (S, K) int32 row of each pair; -1: not for this rank, -2 (DROPPED): for this rank, but did not fit.
        offs: (e,) int32 inclusive cumulative sum of the padded group sizes, at most R_max.
        group_sizes: (e,) int32 rows of each expert, without padding and before any were dropped.
        counts: (2 O + 1,) int64 what every rank finds alike, as it has the tables of all senders: of the O owners of
            experts in turn the padded rows that they need, then the rows that did not fit R_max; then invalid ids.
        num_tokens: (W,) int32 tokens of each sender.
        alignment: what the groups are padded to.
    """

    row_slot: Tensor
    row_weight: Tensor
    slot_rows: Tensor
    offs: Tensor
    group_sizes: Tensor
    counts: Tensor
    num_tokens: Tensor
    alignment: int

    @property
    def needed(self) -> Tensor:
        """(O,) int64 padded rows of each owner, had all fitted. O is W where E is known, else only this rank counts."""
        return self.counts[: len(self.counts) // 2]

    @property
    def overflow(self) -> Tensor:
        """(O,) int64 rows of each owner that did not fit its R_max, which is the same on all."""
        return self.counts[len(self.counts) // 2 : -1]

    @property
    def invalid(self) -> Tensor:
        """() int64 ids outside [-1, num_experts), of all senders; always 0 on CPU, where they raise."""
        return self.counts[-1]

    @property
    def max_rows(self) -> int:
        """R_max."""
        return self.row_slot.shape[0]


def make_plan(
    expert_ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor,
    *,
    first_expert: int,
    num_local_experts: int,
    alignment: int,
    capacity: Capacity | None = None,
    num_experts: int | None = None,
    running: Tensor | None = None,
) -> RoutingPlan:
    """Plan the rows of experts first_expert .. first_expert + num_local_experts - 1.

    Args:
        expert_ids: (W, T_max, K) int32, the tables of W senders; -1 is not routed, other ranks' experts are left out.
        weights: (W, T_max, K) fp32.
        num_tokens: (W,) int32, tokens of each sender; the tables past them are not read.
        alignment: every group is padded to it; an expert without rows takes none.
        capacity: bound on rows, default :meth:`Capacity.worst_case`. Only ``exact`` reads from the device.
        num_experts: E, the bound that makes an id invalid; None checks only for ids below -1. A multiple of
            num_local_experts, where owners have equal shares: then overflow is counted for all of them.
        running: what earlier plans counted, as ``counts``, which is updated: the most rows needed, sums of the others.

    Raises ValueError on wrong shapes or dtypes, and on invalid ids in CPU tables.
    """
    _check_tables(expert_ids, weights, num_tokens)
    if alignment < 1 or num_local_experts < 1:
        name, value = ("alignment", alignment) if alignment < 1 else ("num_local_experts", num_local_experts)
        raise ValueError(f"{name}: got {value}, wanted at least 1")
    if num_experts is not None and first_expert + num_local_experts > num_experts:
        raise ValueError(f"experts {first_expert} to {first_expert + num_local_experts - 1}: got {num_experts} in all")
    bound = ANY_ID if num_experts is None else num_experts
    if expert_ids.is_cpu and type(expert_ids) is Tensor:  # a fake tensor has no ids
        check_ids(expert_ids[_live(expert_ids, num_tokens)], bound)

    capacity = Capacity.worst_case() if capacity is None else capacity
    if capacity.kind == "exact":
        local = _local_ids(expert_ids, num_tokens, first_expert, num_local_experts)
        max_rows = int(_round_up(_group_sizes(local, num_local_experts), alignment).sum())
    else:
        max_rows = capacity.rows(*expert_ids.shape, num_local_experts=num_local_experts, alignment=alignment)
    sizes = first_expert, num_local_experts, alignment, max_rows, bound
    exact = capacity.kind == "exact"
    fields: PlanTensors = plan_rows(expert_ids, weights, num_tokens, *sizes, None if exact else running)
    plan = RoutingPlan(*fields, alignment=alignment)
    if exact:
        plan.overflow.zero_()  # whose R_max is not ours
        if running is not None:
            _count(plan.counts, running)
    return plan


def narrow_ids(expert_ids: Tensor, num_experts: int) -> Tensor:
    """The ids as int32, the tensor itself if it is. Clamped first: no invalid int64 wraps around into a valid id."""
    return expert_ids if expert_ids.dtype == torch.int32 else expert_ids.clamp(-2, num_experts).int()


def check_ids(expert_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError if an id lies outside [-1, num_experts). A host sync: for CPU tensors."""
    wrong = expert_ids[(expert_ids < -1) | (expert_ids >= num_experts)]
    if len(wrong):
        raise ValueError(f"expert ids: got {sorted(set(wrong.tolist()))}, wanted -1 (not routed) to {num_experts - 1}")


def _fake_plan(expert_ids: Tensor, weights: Tensor, num_tokens: Tensor, *sizes: Any) -> PlanTensors:
    _, num_local_experts, _, max_rows, num_experts, *_ = sizes
    slots = expert_ids.shape[0] * expert_ids.shape[1]
    counts = 2 * num_owners(num_experts, num_local_experts) + 1
    return (
        expert_ids.new_empty(max_rows),
        weights.new_empty(max_rows),
        expert_ids.new_empty(slots, expert_ids.shape[2]),
        expert_ids.new_empty(num_local_experts),
        expert_ids.new_empty(num_local_experts),
        expert_ids.new_empty(counts, dtype=torch.int64),
        torch.empty_like(num_tokens),
    )


@op(
    "mxep::make_plan",
    fake=_fake_plan,
    launcher="mxep.comms.kernels.plan:make_plan",
    mutates_args=("running",),
    capability=ANY_GPU,
)
def plan_rows(
    expert_ids: Tensor, weights: Tensor, num_tokens: Tensor, first_expert: int, num_local_experts: int,
    alignment: int, max_rows: int, num_experts: int, running: Tensor | None,
) -> PlanTensors:  # fmt: skip
    """The tensors of a RoutingPlan, in its order, from tables as :func:`make_plan` takes them."""
    top_k = expert_ids.shape[2]
    pairs = expert_ids.numel()
    local = _local_ids(expert_ids, num_tokens, first_expert, num_local_experts)
    sizes = _group_sizes(local, num_local_experts)
    padded = _round_up(sizes, alignment)
    ends = padded.cumsum(0)
    row_of_pair = _rows_of_pairs(local, sizes, ends - padded)
    dropped = row_of_pair >= max_rows
    row_of_pair = torch.where(dropped, DROPPED, row_of_pair)

    # Pairs without a row write into one more row, which is cut off; padding has one more pair, of weight 0.
    flat = torch.arange(pairs, device=expert_ids.device, dtype=torch.int64)
    pair_of_row = local.new_full((max_rows + 1,), pairs)
    pair_of_row = pair_of_row.scatter_(0, torch.where(row_of_pair >= 0, row_of_pair, max_rows), flat)[:max_rows]
    row_slot = torch.where(pair_of_row < pairs, pair_of_row.div(top_k, rounding_mode="floor"), -1)
    row_weight = torch.cat((weights.flatten(), weights.new_zeros(1)))[pair_of_row]

    wrong = _live(expert_ids, num_tokens) & ((expert_ids < -1) | (expert_ids >= num_experts))
    owners = num_owners(num_experts, num_local_experts)
    first, counted = (0, num_experts) if owners > 1 else (first_expert, num_local_experts)
    sizes_of = _group_sizes(_local_ids(expert_ids, num_tokens, first, counted), counted).view(owners, -1)
    padded_of = _round_up(sizes_of, alignment)
    live_ends = padded_of.cumsum(1) - padded_of + sizes_of
    overflow = torch.minimum((live_ends - max_rows).clamp_min(0), sizes_of).sum(1)
    counts = torch.cat((padded_of.sum(1), overflow, wrong.sum()[None]))
    if running is not None:
        _count(counts, running)
    return (
        row_slot.int(),
        row_weight,
        row_of_pair.int().view(-1, top_k),
        ends.clamp(max=max_rows).int(),
        sizes.int(),
        counts,
        num_tokens.clone(),
    )


def _count(counts: Tensor, running: Tensor) -> None:
    owners = len(counts) // 2
    running[owners:] += counts[owners:]
    running[:owners] = torch.maximum(running[:owners], counts[:owners])


def _live(expert_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """(W, T_max, K) bool: pairs of tokens that were sent."""
    token = torch.arange(expert_ids.shape[1], device=expert_ids.device, dtype=torch.int64)
    return (token < num_tokens[:, None])[:, :, None].expand(expert_ids.shape)


def _local_ids(expert_ids: Tensor, num_tokens: Tensor, first_expert: int, num_local_experts: int) -> Tensor:
    """(S * K,) int64: index of the local expert of each pair, -1 if it has none."""
    local = expert_ids.long() - first_expert
    here = _live(expert_ids, num_tokens) & (local >= 0) & (local < num_local_experts)
    return torch.where(here, local, -1).flatten()


def _group_sizes(local: Tensor, num_local_experts: int) -> Tensor:
    """(e,) int64: how many pairs each local expert has. Not bincount, which syncs."""
    counts = local.new_zeros(num_local_experts + 1)
    return counts.scatter_add_(0, torch.where(local >= 0, local, num_local_experts), torch.ones_like(local))[:-1]


def _rows_of_pairs(local: Tensor, sizes: Tensor, starts: Tensor) -> Tensor:
    """(S * K,) int64 row of each pair, -1 of those without an expert; an expert's rows begin at its start."""
    experts = sizes.shape[0]
    # A stable sort by expert keeps the flat order within each; -1 (another rank's) sorts last.
    expert, order = torch.where(local >= 0, local, experts).sort(stable=True)
    shift = torch.cat((starts - (sizes.cumsum(0) - sizes), starts.new_zeros(1)))
    place = torch.arange(len(local), device=local.device, dtype=torch.int64)
    return torch.full_like(local, -1).scatter_(0, order, torch.where(expert < experts, place + shift[expert], -1))


def _round_up(sizes: Tensor, alignment: int) -> Tensor:
    return (sizes + alignment - 1).div(alignment, rounding_mode="floor") * alignment


def _check_tables(expert_ids: Tensor, weights: Tensor, num_tokens: Tensor) -> None:
    if expert_ids.dim() != 3 or expert_ids.dtype != torch.int32:
        got = f"{expert_ids.dtype} {tuple(expert_ids.shape)}"
        raise ValueError(f"expert_ids: got {got}, wanted torch.int32 (W, T_max, K)")
    if weights.shape != expert_ids.shape or weights.dtype != torch.float32:
        got, wanted = f"{weights.dtype} {tuple(weights.shape)}", f"torch.float32 {tuple(expert_ids.shape)}"
        raise ValueError(f"weights: got {got}, wanted {wanted}")
    if num_tokens.shape != expert_ids.shape[:1] or num_tokens.dtype != torch.int32:
        got, wanted = f"{num_tokens.dtype} {tuple(num_tokens.shape)}", f"torch.int32 ({expert_ids.shape[0]},)"
        raise ValueError(f"num_tokens: got {got}, wanted {wanted}")
    if not expert_ids.device == weights.device == num_tokens.device:
        devices = {str(table.device) for table in (expert_ids, weights, num_tokens)}
        raise ValueError(f"tables: got devices {', '.join(sorted(devices))}, wanted one")
