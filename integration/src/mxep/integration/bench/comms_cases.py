"""What bench=comms times at one shape: moves of mxep.comms, and the collective of the same bytes.

    ours        dispatch (tables, rows, plan, barriers), again (rows alone), plan, return, direct
    collective  all_to_all_single, one row for each (token, expert) pair: split sizes known on the host beforehand, rows
                permuted already, nothing unpermuted after: its best case

T tokens a rank, D elements of a row, E experts, K experts a token, W ranks. A row of MXFP8 is D qdata and D/32 scales.
What goes from rank s to rank r: tokens[s][r] rows of ours, a row for each token that r needs; pairs[s][r] rows of the
collective. Payload counts, tables and signals do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    Capacity,
    GroupedRows,
    RoutingPlan,
    Slots,
    Transport,
    Workspace,
    combine,
    dispatch,
    dispatch_to_rows,
    gather_rows,
    make_plan,
)

BLOCK = 32  # elements that share a scale; groups are padded to as many rows
SLACK = 1.25  # of the balanced load, the capacity that plans have room for, unless the routing needs more

Tables = tuple[Tensor, Tensor, Tensor]


class Shape(NamedTuple):
    """T, D, E, K."""

    tokens: int
    dim: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Traffic:
    """Rows from each rank to each, by whom and to whom."""

    tokens: list[list[int]]
    pairs: list[list[int]]

    @staticmethod
    def of(ids: Tensor, ranks: int, experts: int) -> Traffic:
        """ids: (W, T, K) of all ranks."""
        owner = ids.div(experts // ranks, rounding_mode="floor")
        to = [owner == rank for rank in range(ranks)]
        tokens = torch.stack([there.any(2).sum(1) for there in to], 1)
        pairs = torch.stack([there.sum((1, 2)) for there in to], 1)
        return Traffic(tokens.tolist(), pairs.tolist())

    @staticmethod
    def leaving(rows: list[list[int]], *, home: bool = False) -> int:
        """Rows that leave the rank which sends most; home: on their way back."""
        ranks = range(len(rows))
        return max(sum(rows[r][q] if home else rows[q][r] for r in ranks if r != q) for q in ranks)


def routing(shape: Shape, skew: float, generator: torch.Generator) -> Tensor:
    """(T, K) int32, K different experts a token; expert i is as likely as 1 / (i + 1) ** skew.

    Drawn without replacement: the K largest of log-probability plus Gumbel noise.
    """
    uniform = torch.rand(shape.tokens, shape.experts, generator=generator, device=generator.device)
    rank_of_expert = torch.arange(1, shape.experts + 1, device=generator.device)
    noise = -(-uniform.clamp_min(1e-20).log()).log()
    return (noise - skew * rank_of_expert.log()).topk(shape.top_k, 1).indices.int()


class Problem:
    """Operands of one shape on this rank. Collective."""

    def __init__(self, transport: Transport, shape: Shape, skew: float, seed: int) -> None:
        self.transport, self.shape = transport, shape
        self.rank, self.ranks, self.device = transport.rank, transport.world_size, transport.device
        generator = torch.Generator(self.device).manual_seed(1000 * (seed + 1) + self.rank)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        self.generator = generator
        self.ids = routing(shape, skew, generator)
        self.weights = torch.rand(self.ids.shape, **options)
        widths = shape.dim, shape.dim // BLOCK
        self.mxfp8 = [torch.randint(256, (shape.tokens, n), dtype=torch.uint8, **options) for n in widths]
        self.bf16 = [torch.randn(shape.tokens, shape.dim, **options).bfloat16().view(torch.uint8)]
        self.all_ids = everyone(self.ids)
        self.traffic = Traffic.of(self.all_ids, self.ranks, shape.experts)

    @property
    def local_experts(self) -> int:
        return self.shape.experts // self.ranks

    @property
    def first_expert(self) -> int:
        return self.rank * self.local_experts

    @cached_property
    def capacity(self) -> Capacity:
        """The same on all ranks; no row is left out."""
        most = max(sum(column) for column in zip(*self.traffic.pairs))
        return Capacity.factor(max(SLACK, most / self.ids.numel()))

    def plan_of(self, tables: Tables) -> RoutingPlan:
        return make_plan(
            *tables,
            first_expert=self.first_expert,
            num_local_experts=self.local_experts,
            alignment=BLOCK,
            capacity=self.capacity,
            num_experts=self.shape.experts,
        )


class Ours:
    """Moves of mxep.comms on a workspace of their own. Collective. num_sms: see Workspace."""

    def __init__(self, problem: Problem, *, num_sms: int | None = None, direct: bool = False) -> None:
        self.problem = problem
        tokens, dim, experts, top_k = problem.shape
        rows = problem.capacity.rows(
            problem.ranks, tokens, top_k, num_local_experts=problem.local_experts, alignment=BLOCK
        )
        self.workspace = Workspace(
            problem.transport,
            max_tokens=tokens,
            top_k=top_k,
            dim=dim,
            num_experts=experts,
            direct_rows=rows if direct else 0,
            num_sms=num_sms,
        )
        handle = dispatch(self.workspace, problem.mxfp8, problem.ids, problem.weights, async_op=True)
        assert handle.tables is not None
        ids, weights, num_tokens = handle.tables
        self.tables = ids.clone(), weights.clone(), num_tokens.clone()
        handle.wait()
        self.plan = problem.plan_of(self.tables)
        options: dict[str, Any] = {"generator": problem.generator, "device": problem.device}
        self.rows = torch.randn(rows, dim, dtype=torch.bfloat16, **options)
        self.values = torch.rand(rows, **options)

    def dispatch(self, payload: Sequence[Tensor]) -> tuple[Slots, RoutingPlan]:
        """Everything that a first move needs: the plan is made while rows travel."""
        handle = dispatch(self.workspace, payload, self.problem.ids, self.problem.weights, async_op=True)
        assert handle.tables is not None
        plan = self.problem.plan_of(handle.tables)
        return handle.wait(), plan

    def again(self, payload: Sequence[Tensor]) -> Slots:
        """A move whose plan is there."""
        return dispatch(self.workspace, payload, self.problem.ids)

    def make_plan(self) -> RoutingPlan:
        return self.problem.plan_of(self.tables)

    def back(self, values: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return combine(self.workspace, self.rows, self.plan, self.problem.ids, row_values=values)

    def direct(self) -> GroupedRows:
        p = self.problem
        return dispatch_to_rows(self.workspace, p.mxfp8, p.ids, p.weights, alignment=BLOCK, capacity=p.capacity)

    def grouped(self) -> tuple[Tensor, ...]:
        """What direct brings, by slots and a gather."""
        slots, plan = self.dispatch(self.problem.mxfp8)
        return gather_rows(slots.payload, plan.row_slot, plan.offs)


class Collective:
    """Rows of `payload`, side by side, of each (token, expert) pair to the expert's rank and home again."""

    def __init__(self, problem: Problem, payload: Sequence[Tensor], dtype: torch.dtype) -> None:
        p = problem
        self.sends, self.receives = p.traffic.pairs[p.rank], [row[p.rank] for row in p.traffic.pairs]
        tokens = pairs_by_owner(p.ids, p.local_experts)
        self.sent = torch.cat([part[tokens] for part in payload], 1).view(dtype)
        self.received = self.sent.new_empty(sum(self.receives), self.sent.shape[1])

    def out(self) -> Tensor:
        dist.all_to_all_single(self.received, self.sent, self.receives, self.sends)
        return self.received

    def home(self) -> Tensor:
        """The rows that `out` brought, back to where they lay."""
        dist.all_to_all_single(self.sent, self.received, self.sends, self.receives)
        return self.sent


def pairs_by_owner(ids: Tensor, experts_per_rank: int) -> Tensor:
    """(T * K,) int64: the tokens of all pairs, ordered by the rank that owns the expert."""
    owner = ids.flatten().div(experts_per_rank, rounding_mode="floor")
    return owner.argsort(stable=True) // ids.shape[1]


def everyone(mine: Tensor) -> Tensor:
    """(W, ...) of all ranks' tensors of one shape. Collective."""
    words = mine.contiguous().view(torch.uint8)
    found = [torch.empty_like(words) for _ in range(dist.get_world_size())]
    dist.all_gather(found, words)
    return torch.stack(found).view(mine.dtype)


@dataclass(frozen=True)
class Alternative:
    """A call to be timed.

    rows: that leave the rank which sends most. pairs: that would, one for each (token, expert). row_bytes: of each.
    graph: "must", "may" (timed without one where it cannot be captured) or "never" be in a CUDA graph.
    """

    call: Callable[[], object]
    rows: int = 0
    pairs: int = 0
    row_bytes: int = 0
    graph: str = "must"


def moves(ours: Ours, *, every: bool, suffix: str = "") -> dict[str, Alternative]:
    """The moves on slots. every: those, too, that a sweep does without."""
    p = ours.problem
    out = Traffic.leaving(p.traffic.tokens), Traffic.leaving(p.traffic.pairs)
    home = Traffic.leaving(p.traffic.tokens, home=True), Traffic.leaving(p.traffic.pairs, home=True)
    mx, bf16 = sum(part.shape[1] for part in p.mxfp8), 2 * p.shape.dim
    found = {
        "dispatch mxfp8": Alternative(lambda: ours.dispatch(p.mxfp8), *out, mx),
        "dispatch bf16": Alternative(lambda: ours.dispatch(p.bf16), *out, bf16),
        "return bf16": Alternative(ours.back, *home, bf16),
    }
    if every:
        found["dispatch mxfp8, again"] = Alternative(lambda: ours.again(p.mxfp8), *out, mx)
        found["return bf16, values"] = Alternative(lambda: ours.back(ours.values), *home, bf16)
    return {name + suffix: alternative for name, alternative in found.items()}


def direct_moves(ours: Ours) -> dict[str, Alternative]:
    """Straight to expert-major rows, and the same rows by slots and a gather."""
    p = ours.problem
    rows, pairs = Traffic.leaving(p.traffic.tokens), Traffic.leaving(p.traffic.pairs)
    mx = sum(part.shape[1] for part in p.mxfp8)
    return {
        "direct mxfp8": Alternative(ours.direct, pairs, pairs, mx),
        "slots + gather mxfp8": Alternative(ours.grouped, rows, pairs, mx),
    }


def collectives(bf16: Collective, mx: Collective, traffic: Traffic, name: str) -> dict[str, Alternative]:
    """name: of the library behind them."""
    out, home = Traffic.leaving(traffic.pairs), Traffic.leaving(traffic.pairs, home=True)
    wide, narrow = (each.sent.shape[1] * each.sent.itemsize for each in (bf16, mx))
    return {
        f"{name} bf16": Alternative(bf16.out, out, out, wide, "may"),
        f"{name} 8-bit": Alternative(mx.out, out, out, narrow, "may"),
        f"{name} bf16, home": Alternative(bf16.home, home, home, wide, "may"),
    }
