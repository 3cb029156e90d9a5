"""RoutingPlan: which received token goes to which row, with the rows in expert order.

Each receiver computes its plan alone, from the routing tables of all senders. A slot holds one received token. A pair
is one (token, expert) choice. Letters: W senders of up to T_max tokens each, K experts per token, S = W * T_max slots,
R_max rows, e experts of this rank ("local experts"), E experts in all.

Example: two ranks with T_max = 2 send to this rank. It owns experts 0 and 1, K = 2, and groups are padded to 4:

    expert_ids   rank 0: token 0 [1, 0]  token 1 [5, 1]     rank 1: token 0 [0, -1]  (num_tokens 1)
    flat index           0  1          2  3                         4   5      6  7 (not sent)

    row          0   1   2   3 | 4   5   6   7
    expert       0   0   .   . | 1   1   .   .
    row_slot     0   2  -1  -1 | 0   1  -1  -1     slot = source rank * T_max + token, -1 is padding
    slot_rows    [4, 0]  [-1, 5]  [1, -1]  [-1, -1]
    offs   4   8            group_sizes  2  2

The rows of an expert are ordered by (source rank, token, k), which is the order of the flat index slot * K + k.

**Rows that do not fit.** If the padded groups need more than R_max rows, each expert keeps at most L rows. L is the
largest cap with which the padded groups fit. Every expert then shares its rows between the source ranks: it gives one
row to each rank in turn, in rank order, and skips ranks without further pairs. Each rank keeps its first pairs. Example
with three experts of 7, 2 and 4 pairs, two source ranks, R_max = 8, groups padded to 2:

    expert               0         1       2
    pairs                7         2       4       padded: 8 + 2 + 4 = 14 rows, more than 8
    rows kept, L = 2     2         2       2       L = 3 or 4 would need 4 + 2 + 4 rows; rows 6 and 7 stay empty
    pairs of rank 0, 1   6, 1      0, 2    1, 3
    rows of rank 0, 1    1, 1      0, 2    1, 1

So a busy expert takes no rows from other experts, and a rank with many tokens takes no rows from other ranks.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxep.runtime.bundle import Bundle
from mxep.runtime.lengths import Length
from mxep.runtime.op import ANY_GPU, op

from .layout import ANY_ID, num_owners, round_up

PlanTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
DROPPED = -2
"""Value in ``slot_rows`` of a (token, expert) pair that is for this rank, but got no row because it did not fit."""


class CapacityExceeded(RuntimeError):
    """Rows did not fit the capacity and were dropped. All ranks of the group raise it, so that all skip the step."""


@dataclass(frozen=True)
class Capacity:
    """Rule that decides R_max, the number of rows of a plan. Create it with one of two constructors.

    With S slots, K experts per token, e local experts and groups padded to a multiple of m rows:

    - :meth:`worst_case`: S * min(K, e) rows, plus e * (m - 1) rows of padding. All rows fit. The only exception: K > e,
      and a token names an expert twice.
    - :meth:`factor` (c): c times the balanced load T_max * K, plus padding, and at most the worst case. `overflow` says
      what happens with rows that do not fit:
      "raise": they are dropped and counted, and the layer raises CapacityExceeded.
      "drop": they are dropped and counted. The module's docstring says which rows are dropped.
      "recompute": none are dropped, because R_max is the worst case. c bounds only the rows that a layer keeps from
      forward to backward (`kept_rows`). Backward recomputes the other rows.

    Raises ValueError for values out of range.
    """

    kind: str
    load: float = 0.0
    overflow: str = "raise"

    def __post_init__(self) -> None:
        if self.kind not in ("worst_case", "factor"):
            raise ValueError(f"Capacity: got {self.kind!r}, wanted worst_case() or factor(c)")
        number = isinstance(self.load, numbers.Real) and not isinstance(self.load, bool)
        if self.kind == "factor" and not (number and 0 < self.load < math.inf):
            raise ValueError(f"Capacity.factor: got {self.load!r}, wanted a positive number")
        if self.overflow not in ("raise", "drop", "recompute"):
            raise ValueError(f"Capacity.factor: got overflow={self.overflow!r}, wanted 'raise', 'drop' or 'recompute'")
        object.__setattr__(self, "load", float(self.load))

    @staticmethod
    def of(given: "Capacity | float | None") -> "Capacity":
        """Convert to a Capacity: None to the worst case, a number to a factor. Raises ValueError for other types."""
        if given is None:
            return Capacity.worst_case()
        if isinstance(given, Capacity):
            return given
        if not isinstance(given, numbers.Real) or isinstance(given, bool) or math.isnan(given):
            raise ValueError(f"capacity: expected a Capacity, or a factor such as 1.25, got {given!r}")
        return Capacity.factor(float(given))

    @staticmethod
    def worst_case() -> "Capacity":
        return Capacity("worst_case")

    @staticmethod
    def factor(load: float, overflow: str = "raise") -> "Capacity":
        return Capacity("factor", load, overflow)

    def rows(self, num_sources: int, max_tokens: int, top_k: int, *, num_local_experts: int, alignment: int) -> int:
        """R_max, a multiple of ``alignment``."""
        of = Capacity.worst_case() if self.overflow == "recompute" else self
        return of.kept_rows(num_sources, max_tokens, top_k, num_local_experts=num_local_experts, alignment=alignment)

    def kept_rows(
        self, num_sources: int, max_tokens: int, top_k: int, *, num_local_experts: int, alignment: int
    ) -> int:
        """Rows that a layer keeps for backward, a multiple of ``alignment``. R_max unless overflow is "recompute"."""
        padding = num_local_experts * (alignment - 1)
        worst = round_up(num_sources * max_tokens * min(top_k, num_local_experts) + padding, alignment)
        if self.kind == "worst_case":
            return worst
        balanced = math.ceil(self.load * max_tokens * top_k)
        return min(worst, round_up(balanced + padding, alignment))

    @staticmethod
    def enough(needed: int, max_tokens: int, top_k: int, *, num_local_experts: int, alignment: int) -> float:
        """Smallest factor c, rounded up to two decimals, with which ``needed`` padded rows fit."""
        unpadded = needed - (num_local_experts + 1) * (alignment - 1)  # + 1, because R_max is rounded up
        return max(1, math.ceil(100 * unpadded / max(1, max_tokens * top_k))) / 100

    def __str__(self) -> str:
        if self.kind != "factor":
            return "Capacity.worst_case()"
        overflow = "" if self.overflow == "raise" else f", overflow={self.overflow!r}"
        return f"Capacity.factor({self.load:g}{overflow})"


@dataclass(frozen=True)
class RoutingPlan(Bundle):
    """A plan, on the device of the tables given to `make_plan`. Letters as in the module's docstring.

    Attributes:
        row_slot: (R_max,) int32 slot of each row, -1 for padding rows.
        row_weight: (R_max,) fp32 routing weight of each row, 0 for padding rows.
        slot_rows: (S, K) int32 row of each pair. -1: the pair is not for this rank. -2 (DROPPED): it is for this rank,
            but its row did not fit.
        offs: (e,) int32 inclusive cumulative sum of the padded group sizes, dropped rows excluded. At most R_max.
        group_sizes: (e,) int32 rows of each expert, without padding, dropped rows included.
        counts: (2 * O + 1,) int64: `needed`, `overflow` and `invalid`, for O owners of experts. If O = W, counts are
            equal on all ranks, because each rank has the tables of all senders.
        num_tokens: (W,) int32 tokens of each sender.
        alignment: group sizes are padded to a multiple of it.
        dispatch: (1,) int32 number of the dispatch that brought the tables, equal on all ranks. Redispatches and
            combines compare it with the numbers of the peers. None: unknown, and then it must be None on all ranks.
    """

    row_slot: Tensor
    row_weight: Tensor
    slot_rows: Tensor
    offs: Tensor
    group_sizes: Tensor
    counts: Tensor
    num_tokens: Tensor
    alignment: int
    dispatch: Tensor | None = None

    @property
    def needed(self) -> Tensor:
        """(O,) int64 padded rows that each owner of experts needs. O = W ranks, or 1 (this rank) if E is unknown."""
        return self.counts[: len(self.counts) // 2]

    @property
    def overflow(self) -> Tensor:
        """(O,) int64 rows that did not fit on each owner of experts."""
        return self.counts[len(self.counts) // 2 : -1]

    @property
    def invalid(self) -> Tensor:
        """() int64 number of ids outside [-1, num_experts) in the tables of all senders. On the CPU such ids raise."""
        return self.counts[-1]

    @property
    def max_rows(self) -> int:
        """R_max, the number of rows of the plan."""
        return self.row_slot.shape[0]

    def kept_rows(self, capacity: Capacity) -> int:
        """`capacity.kept_rows` for the sizes of this plan."""
        (slots, top_k), sources, experts = self.slot_rows.shape, len(self.num_tokens), len(self.group_sizes)
        sizes = {"num_local_experts": experts, "alignment": self.alignment}
        return capacity.kept_rows(sources, slots // sources, top_k, **sizes)


def make_plan(
    expert_ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor,
    *,
    first_expert: int,
    num_local_experts: int,
    alignment: int,
    capacity: Capacity | float | None = None,
    num_experts: int | None = None,
    running: Tensor | None = None,
    blocks: int = 1,
    max_tokens: int | None = None,
) -> RoutingPlan:
    """Plan the rows of experts first_expert .. first_expert + num_local_experts - 1.

    Args:
        expert_ids: (W, T_max, K) int32, tables of W senders. -1 and experts of other ranks are ignored.
        weights: (W, T_max, K) fp32 routing weights.
        num_tokens: (W,) int32, number of tokens of each sender. Table entries of further tokens are not read.
        alignment: groups are padded to a multiple of it. Experts without rows get no padding.
        capacity: decides R_max. None: :meth:`Capacity.worst_case`.
        num_experts: E. Ids outside [-1, E) are invalid. If E is a multiple of num_local_experts, `counts` has all
            owners of experts. None: only ids below -1 are invalid.
        running: totals of `counts` over several plans, updated in place: the maximum for `needed`, sums for `overflow`
            and `invalid`.
        blocks: B, a divisor of T_max. Each table consists of B blocks of T_max / B tokens, and each block is a source
            of its own when sources share the rows that fit. Block b of table w is source b * W + w.
        max_tokens: a T_max for the shapes of the results that is larger than that of the table. Needs a single table.
            The plan uses no more rows than without it.

    Raises ValueError for wrong shapes or dtypes, and for invalid ids in CPU tables.
    """
    _check_tables(expert_ids, weights, num_tokens)
    for name, value in (("alignment", alignment), ("num_local_experts", num_local_experts)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, wanted at least 1")
    if num_experts is not None and first_expert + num_local_experts > num_experts:
        raise ValueError(f"experts {first_expert} to {first_expert + num_local_experts - 1}: got {num_experts} in all")
    tables, tokens, top_k = expert_ids.shape
    if max_tokens is not None and (tables != 1 or blocks != 1 or max_tokens < tokens):
        got = f"{max_tokens} for {tables} tables of {tokens} tokens, {blocks} blocks"
        raise ValueError(f"max_tokens: got {got}, wanted one table of no more, one block")
    if blocks < 1 or tokens % blocks:
        raise ValueError(f"blocks: got {blocks}, wanted a divisor of T_max = {tokens}")
    bound = ANY_ID if num_experts is None else num_experts
    if expert_ids.is_cpu and type(expert_ids) is Tensor:  # a fake tensor has no ids to check
        check_ids(expert_ids[_live(expert_ids, num_tokens)], bound)

    capacity = Capacity.of(capacity)
    of = {"num_local_experts": num_local_experts, "alignment": alignment}
    limit = max_rows = capacity.rows(tables, max_tokens or tokens, top_k, **of)
    if max_tokens is not None:
        limit = Length(tokens, lambda tokens: capacity.rows(1, tokens, top_k, **of))
    sizes = first_expert, num_local_experts, alignment, max_rows, bound
    fields: PlanTensors = plan_rows(
        expert_ids, weights, num_tokens, *sizes, blocks, max_tokens or tokens, limit, running
    )
    return RoutingPlan(*fields, alignment=alignment)


def narrow_ids(expert_ids: Tensor) -> Tensor:
    """Convert ids to int32. They are clamped before, so that no int64 id wraps around into a valid int32 id."""
    return expert_ids if expert_ids.dtype == torch.int32 else expert_ids.clamp(-(2**31), 2**31 - 1).int()


def check_ids(expert_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError if an id is outside [-1, num_experts). Call it only for CPU tensors: on CUDA it would sync."""
    wrong = expert_ids[(expert_ids < -1) | (expert_ids >= num_experts)]
    if len(wrong):
        raise ValueError(f"expert ids: got {sorted(set(wrong.tolist()))}, wanted -1 (not routed) to {num_experts - 1}")


def _fake_plan(expert_ids: Tensor, weights: Tensor, num_tokens: Tensor, *sizes: Any) -> PlanTensors:
    _, num_local_experts, _, max_rows, num_experts, _, max_tokens, *_ = sizes
    slots = expert_ids.shape[0] * max_tokens
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
    alignment: int, max_rows: int, num_experts: int, blocks: int, max_tokens: int, limit: int, running: Tensor | None,
) -> PlanTensors:  # fmt: skip
    """Returns the seven tensors of a RoutingPlan, in the order of its fields. limit: usable rows, at most max_rows."""
    num_tables, tokens, top_k = expert_ids.shape
    if behind := max_tokens - tokens:
        expert_ids, weights = pad(expert_ids, (0, 0, 0, behind), value=-1), pad(weights, (0, 0, 0, behind))
    pairs = expert_ids.numel()
    local = _local_ids(expert_ids, num_tokens, first_expert, num_local_experts)
    # Pairs are grouped by (expert, source), in the order of the rows.
    sources = num_tables * blocks
    source = torch.arange(sources, dtype=torch.int64, device=local.device)
    group = local * sources + source[:, None].expand(-1, max_tokens // blocks * top_k).flatten()
    of_sources = _group_sizes(torch.where(local >= 0, group, -1), num_local_experts * sources).view(-1, sources)
    sizes = of_sources.sum(1)
    kept = _capped(sizes, alignment, limit)
    padded = _round_up(kept, alignment)
    ends = padded.cumsum(0)
    in_rank_order = source.view(num_tables, blocks).t().flatten()
    shares = torch.empty_like(of_sources)
    shares[:, in_rank_order] = _shares(of_sources[:, in_rank_order], kept)
    starts = (ends - padded)[:, None] + shares.cumsum(1) - shares
    row_of_pair = _rows_of_pairs(torch.where(local >= 0, group, -1), *map(Tensor.flatten, (of_sources, shares, starts)))

    # Pairs without a row write into an extra row, which is cut off. Padding rows read an extra pair with weight 0.
    flat = torch.arange(pairs, dtype=torch.int64, device=expert_ids.device)
    pair_of_row = local.new_full((max_rows + 1,), pairs)
    pair_of_row = pair_of_row.scatter_(0, torch.where(row_of_pair >= 0, row_of_pair, max_rows), flat)[:max_rows]
    row_slot = torch.where(pair_of_row < pairs, pair_of_row.div(top_k, rounding_mode="floor"), -1)
    row_weight = torch.cat((weights.flatten(), weights.new_zeros(1)))[pair_of_row]

    wrong = _live(expert_ids, num_tokens) & ((expert_ids < -1) | (expert_ids >= num_experts))
    owners = num_owners(num_experts, num_local_experts)
    first, counted = (0, num_experts) if owners > 1 else (first_expert, num_local_experts)
    sizes_of = _group_sizes(_local_ids(expert_ids, num_tokens, first, counted), counted).view(owners, -1)
    overflow = (sizes_of - _capped(sizes_of, alignment, limit)).sum(1)
    counts = torch.cat((_round_up(sizes_of, alignment).sum(1), overflow, wrong.sum()[None]))
    if running is not None:
        running[owners:] += counts[owners:]
        running[:owners] = torch.maximum(running[:owners], counts[:owners])
    slot_rows = row_of_pair.int().view(-1, top_k)
    return row_slot.int(), row_weight, slot_rows, ends.int(), sizes.int(), counts, num_tokens.clone()


def _live(expert_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """(W, T_max, K) bool, True for pairs of the first num_tokens tokens of each sender."""
    token = torch.arange(expert_ids.shape[1], dtype=torch.int64, device=expert_ids.device)
    return (token < num_tokens[:, None])[:, :, None].expand(expert_ids.shape)


def _local_ids(expert_ids: Tensor, num_tokens: Tensor, first_expert: int, num_local_experts: int) -> Tensor:
    """(S * K,) int64 local expert of each pair, counted from first_expert; -1 if its expert is on another rank."""
    local = expert_ids.long() - first_expert
    here = _live(expert_ids, num_tokens) & (local >= 0) & (local < num_local_experts)
    return torch.where(here, local, -1).flatten()


def _group_sizes(local: Tensor, num_local_experts: int) -> Tensor:
    """(e,) int64 number of pairs of each local expert. Not by bincount, which would sync."""
    counts = local.new_zeros(num_local_experts + 1)
    return counts.scatter_add_(0, torch.where(local >= 0, local, num_local_experts), torch.ones_like(local))[:-1]


def _capped(sizes: Tensor, alignment: int, max_rows: int) -> Tensor:
    """Cap group sizes (..., e) at L, a multiple of ``alignment``, so that the padded sizes fit in max_rows."""
    tiles = _round_up(sizes, alignment).div(alignment, rounding_mode="floor")
    level = _level(tiles, torch.full_like(tiles[..., 0], max_rows // alignment)) * alignment
    return torch.minimum(sizes, level[..., None])


def _shares(of_sources: Tensor, kept: Tensor) -> Tensor:
    """Share the rows that each expert keeps between the sources.

    of_sources: (e, sources) pairs of each source. kept: (e,) rows that each expert keeps.
    Returns (e, sources), the rows that each source keeps.
    """
    level = _level(of_sources, kept)[:, None]
    shares = torch.minimum(of_sources, level)
    more = of_sources > level
    return shares + (more & (more.cumsum(1) <= (kept - shares.sum(1))[:, None]))


def _level(sizes: Tensor, room: Tensor) -> Tensor:
    """Largest level with min(sizes, level).sum(-1) <= room. If all sizes fit, a level of at least max(sizes).

    sizes: (..., n). room: (...). Returns (...).
    min(sizes, level).sum() is the minimum over i of: the sum of the i smallest sizes, plus (n - i) * level. It is at
    most `room` if that holds for any i. So the result is the largest level that any i allows.
    """
    ascending = sizes.sort(-1).values
    others = torch.arange(sizes.shape[-1], 0, -1, dtype=torch.int64, device=sizes.device)
    return (room[..., None] - (ascending.cumsum(-1) - ascending)).div(others, rounding_mode="floor").amax(-1)


def _rows_of_pairs(group: Tensor, sizes: Tensor, shares: Tensor, starts: Tensor) -> Tensor:
    """Row of each pair, (S * K,). A group is the pairs of one expert and one source.

    Args:
        group: (S * K,) group of each pair. -1: none, and its row is -1.
        sizes: number of pairs of each group.
        shares: number of pairs of each group that get a row. Later pairs get DROPPED.
        starts: row of the first pair of each group.
    """
    groups = sizes.shape[0]
    # A stable sort keeps the flat order within each group. Pairs without a group get the largest number and come last.
    group, order = torch.where(group >= 0, group, groups).sort(stable=True)
    of_groups = torch.stack((shares, starts, sizes.cumsum(0) - sizes))
    share, start, first = torch.cat((of_groups, of_groups.new_zeros(3, 1)), 1)[:, group]
    place = torch.arange(len(group), dtype=torch.int64, device=group.device) - first
    rows = torch.where(place < share, start + place, DROPPED)
    return torch.empty_like(rows).scatter_(0, order, torch.where(group < groups, rows, -1))


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
