"""bench=comms: the exchange of mxep.comms on all ranks, compared with the library's all-to-all in one run.

    headline   a few shapes, with all SMs and with FEW
    skew       expert i has probability proportional to 1 / (i + 1)

us          median over rounds of the slowest rank, barriers included; dispatch includes tables and plan
wire GB/s   payload that leaves the busiest sender / us; ids, tables and signals do not count
of wire     share of 450 GB/s, NVLink of an H200 in each direction by its data sheet
x bf16      how many times as fast as the all-to-all of the same pairs in bf16

The all-to-all is NCCL's on GPUs and gloo's on CPU ranks, at its best: sizes are known, and permuting rows does not
count. It moves one row for each (token, expert) pair. The hosts enqueue the calls during a pause after a barrier, so
no rank waits for its host.

T tokens a rank, D elements of a row, E experts, K experts a token, W ranks. A row of MXFP8 is D qdata and D/32 scales.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    Capacity,
    RoutingPlan,
    SharedMemoryTransport,
    SymmetricMemoryTransport,
    Transport,
    Workspace,
    combine,
    dispatch,
    make_plan,
)
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank
from mxep.integration.report import Row

from .script import Bench, FailedOnRanks, all_gather_tensor, free_memory, on_all_ranks, table
from .timer import Alternative, Timer

FEW = 32
"""SMs of a caller that overlaps the exchange with other kernels."""
TIMEOUT = 30.0
PAUSE = 1_000_000  # cycles, half a millisecond: longer than the launch of a graph
WIRE = 450.0
"""GB/s a direction, NVLink of an H200 by its data sheet."""
SKEWS = {"headline": 0.0, "skew": 1.0}
"""Section -> exponent of the experts' popularity."""

SHAPES = dict.fromkeys(SKEWS, (1, 32, 1, 1))
SIZES = "tokens, dim, experts, top-k"
FIGURES = "us, wire GB/s, of wire, x bf16"
TITLE = "x: how many times as fast as the library's all-to-all, its sizes known, nothing permuted"
SECTIONS = {name: table(f"{name}; {TITLE}", "shape, what", FIGURES) for name in SKEWS}


def open_transport(rank: Rank) -> Transport:
    """Collective."""
    kind = SymmetricMemoryTransport if rank.device.type == "cuda" else SharedMemoryTransport
    return kind(timeout=TIMEOUT)


def measure(bench: Bench) -> Iterator[tuple[str, Row]]:
    """Measure all sections. Collective, with the same rows on all ranks."""
    if bench.rank.world_size < 2:
        raise ConfigError("bench=comms wants at least 2 ranks, got 1: parallel.ranks=N")
    bench.ceilings["NVLink GB/s"] = WIRE
    for name in bench.report.sections:
        for shape in (Shape(*sizes) for sizes in bench.config.shapes.get(name, ())):
            about = {"shape": list(shape), "ranks": bench.rank.world_size, "skew": SKEWS[name]}
            for what, row in _rows(bench, name, shape).items():
                yield name, {**about, "what": what, **row}
            free_memory()


def _rows(bench: Bench, section: str, shape: Shape) -> dict[str, Row]:
    if shape.experts % bench.rank.world_size:
        return {"all": {"note": f"{shape.experts} experts are not the same number on each rank"}}
    peer = "NCCL" if bench.device.type == "cuda" else "gloo"
    try:  # each shape has its own transport, as a failure ends it
        with contextlib.closing(on_all_ranks(lambda: open_transport(bench.rank))) as transport:
            p = on_all_ranks(lambda: Problem(bench.rank, shape, SKEWS[section], bench.seed))
            timer = make_timer(bench.device, functools.partial(transport.barrier, "bench"))
            rows = timer.compare(_alternatives(p, transport, section, peer))
    except FailedOnRanks as error:
        return {"all": {"error": str(error)}}
    us = {name: row["us"] for name, row in rows.items() if "us" in row}
    for name in us:
        bf16 = f"{peer} bf16, combine" if "combine" in name else f"{peer} bf16"
        by_token, by_pair = p.traffic.leaving(combine="combine" in name)
        row_bytes = shape.dim + shape.dim // BLOCK if "mxfp8" in name else 2 * shape.dim
        sent = (by_pair if peer in name else by_token) * row_bytes
        rate = sent / us[name] / 1e3
        rows[name] |= {"wire GB/s": rate, "of wire": rate / WIRE, "wire bytes": sent}
        rows[name] |= {"x bf16": us[bf16] / us[name]} if bf16 in us else {}
    return rows


def make_timer(device: torch.device, barrier: Callable[[], object]) -> Timer:
    """A timer that stops all measurements at the first failure, because a failure ends the transport."""

    def start() -> None:
        barrier()
        if device.type == "cuda":
            torch.cuda._sleep(PAUSE)

    return Timer(device, seconds=0.02, rounds=7, start=start, shared=True)


def _alternatives(p: Problem, transport: Transport, section: str, peer: str) -> dict[str, Alternative]:
    """Calls to compare, by name. Raises FailedOnRanks."""
    found = {}
    for suffix, num_sms in {"": None, **({f", {FEW} SMs": FEW} if section == "headline" else {})}.items():
        exchange = on_all_ranks(functools.partial(Exchange, p, transport, num_sms))
        for name, call in CALLS.items():
            one = functools.partial(call, exchange)
            found[name + suffix] = Alternative(functools.partial(list, [one]), check=transport.check)
    bf16 = Collective(p)
    peers = {f"{peer} bf16": bf16.dispatch, f"{peer} bf16, combine": bf16.combine}
    return found | {name: Alternative(functools.partial(list, [call])) for name, call in peers.items()}


BLOCK = 32  # elements that share a scale; groups are padded to a multiple of it
SLACK = 1.25  # least capacity of a plan, as a multiple of the balanced load


class Shape(NamedTuple):
    """T, D, E, K."""

    tokens: int
    dim: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Traffic:
    """Rows [from][to] between ranks. tokens: a row for each token that a rank needs. pairs: a row for each (token,
    expert) pair."""

    tokens: list[list[int]]
    pairs: list[list[int]]

    @staticmethod
    def of(ids: Tensor, experts: int) -> Traffic:
        """ids: (W, T, K) of all ranks."""
        owner = ids.div(experts // len(ids), rounding_mode="floor")
        masks = [owner == rank for rank in range(len(ids))]
        tokens = torch.stack([mask.any(2).sum(1) for mask in masks], 1)
        return Traffic(tokens.tolist(), torch.stack([mask.sum((1, 2)) for mask in masks], 1).tolist())

    @property
    def most_pairs(self) -> int:
        """Pairs of the busiest rank's experts."""
        return max(map(sum, zip(*self.pairs)))

    def capacity(self, pairs: int) -> float:
        """Capacity of a plan, as a multiple of the balanced load (`pairs` a rank): SLACK, or more if needed."""
        return max(SLACK, self.most_pairs / pairs)

    def leaving(self, *, combine: bool = False) -> tuple[int, int]:
        """The most rows that leave a rank: (by tokens, by pairs)."""
        ranks = range(len(self.tokens))

        def most(rows: list[list[int]]) -> int:
            return max(sum(rows[r][q] if combine else rows[q][r] for r in ranks if r != q) for q in ranks)

        return most(self.tokens), most(self.pairs)


def routing(tokens: int, experts: int, top_k: int, skew: float, generator: torch.Generator) -> Tensor:
    """(T, K) int32, K different experts for each token. Expert i has a weight of 1 / (i + 1) ** skew.

    They are drawn without replacement: the K largest of log-weight plus Gumbel noise.
    """
    uniform = torch.rand(tokens, experts, generator=generator, device=generator.device, dtype=torch.float32)
    popularity = -skew * torch.arange(1, experts + 1, device=generator.device, dtype=torch.float32).log()
    return (popularity - (-uniform.clamp_min(1e-20).log()).log()).topk(top_k, 1).indices.int()


class Routed:
    """Tokens of one shape on this rank. ids: (T, K) int32. weights: (T, K) fp32, a token's sum to 1. capacity: no row
    overflows, as a multiple of the balanced load. Collective if there are several ranks."""

    def __init__(self, rank: Rank, tokens: int, experts: int, top_k: int, skew: float, seed: int) -> None:
        self.rank, self.ranks, self.device = rank.rank, rank.world_size, rank.device
        self.generator = torch.Generator(self.device).manual_seed(1000 * (seed + 1) + self.rank)
        self.options: dict[str, Any] = {"generator": self.generator, "device": self.device}
        self.ids = routing(tokens, experts, top_k, skew, self.generator)
        scores = torch.rand(self.ids.shape, dtype=torch.float32, **self.options) + 0.1
        self.weights = scores / scores.sum(1, keepdim=True)
        self.local_experts = experts // self.ranks
        self.traffic = Traffic.of(all_gather_tensor(self.ids) if self.ranks > 1 else self.ids[None], experts)
        self.capacity = self.traffic.capacity(self.ids.numel())


class Problem(Routed):
    """Payloads of bench=comms. mxfp8: qdata and scales. bf16: rows, as bytes."""

    def __init__(self, rank: Rank, shape: Shape, skew: float, seed: int) -> None:
        tokens, dim, experts, top_k = self.shape = shape
        super().__init__(rank, tokens, experts, top_k, skew, seed)
        widths = dim, dim // BLOCK
        self.mxfp8 = [torch.randint(256, (tokens, n), dtype=torch.uint8, **self.options) for n in widths]
        self.bf16 = [torch.randn(tokens, dim, **self.options, dtype=torch.float32).bfloat16().view(torch.uint8)]


class Exchange:
    """mxep.comms with its own workspace. Collective. num_sms: as for Workspace."""

    def __init__(self, p: Problem, transport: Transport, num_sms: int | None = None) -> None:
        self.problem: Problem = p
        tokens, dim, experts, top_k = p.shape
        capacity, sizes = Capacity.factor(p.capacity), {"num_local_experts": p.local_experts, "alignment": BLOCK}
        self.how: dict[str, Any] = sizes | {"capacity": capacity, "num_experts": experts}
        self.how["first_expert"] = p.rank * p.local_experts
        of = {"max_tokens": tokens, "top_k": top_k, "dim": dim, "num_experts": experts}
        self.workspace = Workspace(transport, **of, num_sms=num_sms)
        _, self.plan = self.dispatch(p.mxfp8)
        rows = capacity.rows(p.ranks, tokens, top_k, **sizes)
        self.rows = torch.randn(rows, dim, dtype=torch.bfloat16, **p.options)

    def dispatch(self, payload: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], RoutingPlan]:
        """A first dispatch. The plan is made while rows are in flight."""
        handle = dispatch(self.workspace, payload, self.problem.ids, self.problem.weights, async_op=True)
        assert handle.tables is not None
        plan = make_plan(*handle.tables, **self.how)
        return handle.wait(), plan

    def combine(self) -> tuple[Tensor, Tensor | None]:
        return combine(self.workspace, self.rows, self.plan, self.problem.ids).wait()


class Collective:
    """Sends a bf16 row per (token, expert) pair to the expert's rank and back."""

    def __init__(self, p: Problem) -> None:
        self.sizes = [row[p.rank] for row in p.traffic.pairs], p.traffic.pairs[p.rank]  # received, sent
        owner = p.ids.flatten().div(p.local_experts, rounding_mode="floor")
        tokens = owner.argsort(stable=True) // p.shape.top_k  # of all pairs, by the rank that owns the expert
        self.sent = p.bf16[0][tokens].view(torch.bfloat16)
        self.received = self.sent.new_empty(sum(self.sizes[0]), self.sent.shape[1])

    def dispatch(self) -> Tensor:
        dist.all_to_all_single(self.received, self.sent, *self.sizes)
        return self.received

    def combine(self) -> Tensor:
        """Return the rows of `dispatch` to their ranks."""
        dist.all_to_all_single(self.sent, self.received, self.sizes[1], self.sizes[0])
        return self.sent


CALLS: dict[str, Callable[[Exchange], object]] = {
    "dispatch mxfp8": lambda e: e.dispatch(e.problem.mxfp8),
    "dispatch bf16": lambda e: e.dispatch(e.problem.bf16),
    "combine bf16": lambda e: e.combine(),
}
"""Name -> the call to time."""
