"""What a layer costs on ranks that nobody has here: us by stage, wire bytes by leg, bytes of memory. See `estimate`.

    results of bench=layer + work of stages (layer_cases) --fit--> us of each stage per byte, flop and time   (Rates)

    stages      of MXFP8 from its profile; of bf16's products and SwiGLU, and of NCCL's all-to-all, from the baseline's
    legs        ranks of a group lie side by side: the first on NVLink, the others across the network, where a leg has
                the share of its speed that NCCL had on NVLink. An all-to-all, and puts, take as long as the slower leg
    sustained   products are slower in a long run than in a profile's few steps: one factor a recipe, from times
    overlap     of symmetric's dispatch and the quantization of weights beside it
    routing     is even: of K experts of E a token needs a rank of e with probability 1 - C(E - e, K) / C(E, K).
                imbalance: load of the busiest rank over the mean, for products and their rows

T tokens a rank, D model dim, F hidden dim, E experts, K a token, e of a rank, N = T K pairs, R rows that fit, W ranks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from mxep.comms import Capacity
from mxep.comms.layout import ALIGNMENT, round_up
from mxep.comms.layout import Layout as Buffer
from mxep.ep.dispatchers.hierarchical import share_of_node, slots_per_node
from mxep.ep.formats import keeps_rows
from mxep.gemm import Recipe
from mxep.gemm.kernels import HOPPER_BLOCK_K
from mxep.integration.config import ConfigError
from mxep.integration.report import Row
from mxep.quant.shapes import padded_rows

from .layer_cases import BASELINE, MX, WIRE, Case, Problem, Shape, row_bytes, work

MOST_RANKS = 512
TILE = 128  # rows of a product's tile: half of one is lost in each group
RENAMED = {"push": "dispatch", "return": "combine", "split fold": "fold for wgrad", "standard bf16": BASELINE}
"""Names in results of 21 November 2026 -> names now."""


@dataclass(frozen=True)
class Layout:
    """A layer over W ranks, and its Traffic (comms) of an even routing: rows on average.

    what: a case of bench=layer, or recipe/nvshmem. imbalance: load of the busiest rank over the mean. node: ranks that
    NVLink connects. nodes_per_token: the most nodes of a token, where a router limits them, of hierarchical.
    """

    shape: Shape
    ranks: int
    what: str
    capacity: Capacity = dataclasses.field(default_factory=Capacity.worst_case)
    imbalance: float = 1.0
    node: int = MOST_RANKS
    nodes_per_token: int | None = None

    @staticmethod
    def of(row: Row) -> Layout:
        """Of a row of results."""
        return Layout(Shape(*row["shape"]), row["ranks"], row["what"])

    @property
    def case(self) -> Case:
        return Case(self.what)

    @property
    def near(self) -> int:
        """Ranks of this node."""
        return min(self.ranks, self.node)

    @property
    def nodes(self) -> int:
        return self.ranks // self.near

    @property
    def most_pairs(self) -> float:
        return self.imbalance * self.shape.tokens * self.shape.top_k

    @property
    def needs(self) -> float:
        """Probability that a token has an expert of a rank."""
        others = self.shape.experts * (self.ranks - 1) // self.ranks
        return 1 - math.comb(others, self.shape.top_k) / math.comb(self.shape.experts, self.shape.top_k)

    def leaving(self, *, combine: bool = False) -> tuple[float, float]:
        others = self.ranks - 1
        return self.shape.tokens * others * self.needs, self.shape.tokens * self.shape.top_k * others / self.ranks

    @property
    def slots(self) -> int:
        """N C of hierarchical: rows that a rank sends to all nodes, its own included, used or not."""
        nodes, shape = self.nodes, self.shape
        share = share_of_node(nodes, min(self.nodes_per_token or nodes, nodes), shape.experts // nodes, shape.top_k)
        return nodes * slots_per_node(self.capacity, shape.tokens, share)

    @property
    def problem(self) -> Problem:
        """Of meta tensors: what layer_cases asks for."""
        (tokens, dim, hidden, _, top_k), own = self.shape, self.shape.experts // self.ranks
        sizes = {"ids": (tokens, top_k), "x": (tokens, dim), "w13": (own, 2 * hidden, dim), "w2": (own, dim, hidden)}
        tensors = {name: torch.empty(size, device="meta", dtype=torch.float32) for name, size in sizes.items()}
        return cast(Problem, SimpleNamespace(shape=self.shape, traffic=self, **tensors))

    @property
    def rows(self) -> tuple[int, int]:
        """Bytes of a row on the wire, dispatched and combined. nvshmem puts whole 16 bytes."""
        dim, multiple = self.shape.dim, ALIGNMENT if self.case.dispatcher == "nvshmem" else 1
        return round_up(row_bytes(self.case.recipe, dim), multiple), round_up(row_bytes("bf16", dim), multiple)

    @property
    def wire(self) -> list[list[float]]:
        """Bytes that a rank sends in a step over [NVLink, the network], dispatched and combined, forward and backward
        together, on average; as many come back to it. Signals do not count, nor tables but those of nvshmem."""
        (tokens, _, _, _, top_k), others = self.shape, (self.near - 1, self.ranks - self.near)
        each = tokens * (top_k / self.ranks if self.case.dispatcher == "all_to_all" else self.needs)
        legs, tables = [each * n for n in others], (0, 0)
        if self.case.dispatcher == "hierarchical":  # ranks of a node share what came; all slots of other nodes cross
            legs = [each * (self.ranks - self.nodes), self.slots // self.nodes * (self.nodes - 1)]
        elif self.case.dispatcher == "nvshmem":  # whole, to each rank: ids, weights, T; weights' gradients
            tables = 8 * tokens * top_k + 4, 4 * tokens * top_k
        return [[2 * row * leg + table * n for leg, n in zip(legs, others)] for row, table in zip(self.rows, tables)]

    @property
    def copied(self) -> float:
        """Bytes that a dispatcher reads and writes around its collectives or puts.

        all_to_all: gathers, joins, splits, sums. Each way a row is copied three times. Sums read a row for each pair,
        write min(K, W) a token, read these. hierarchical: joins, gathers, sums. nvshmem: rows and sums that are staged.
        """
        (tokens, _, _, _, top_k), (row, back), pairs = self.shape, self.rows, self.shape.tokens * self.shape.top_k
        sums = pairs + 2 * tokens * min(top_k, self.ranks) + tokens
        one_way = {
            "all_to_all": 6 * pairs * (row + back) + sums * back,
            "hierarchical": (tokens + self.slots) * (2 * row + back),
            "nvshmem": 2 * tokens * (row + self.ranks * self.needs * back),
        }
        return 2 * one_way.get(self.case.dispatcher, 0.0)


def terms(layout: Layout, slower: float = 1.0) -> dict[str, tuple[float, ...]]:
    """What each stage must do: bytes, flops, times, which each have a factor in us. slower: 450 GB/s over NVLink's."""
    case, p, rows, shape = layout.case, layout.problem, layout.most_pairs, layout.shape
    of_work = case if case.baseline else Case(f"{MX}, {case.suffix}" if case.kept or case.kept_in_fp8 else MX)
    todo: dict[str, tuple[float, ...]] = {stage: (amount,) for stage, (_, amount) in work(p, of_work).items()}
    todo["GEMMs"] = (todo["GEMMs"][0] * (1 + TILE / 2 * len(p.w2) / rows),)
    if case.baseline:
        return todo | {"NCCL": (*todo["NCCL"], 1.0), "gap": (1.0,)}
    tokens_bytes = 2.0 * shape.dim * (layout.slots if case.dispatcher == "hierarchical" else shape.tokens)
    out, back = ((near * slower, tokens_bytes) for near, _ in layout.wire)
    todo |= {"dispatch": out, "combine": back, "rest": (1.0,)}
    todo["gather + fold"] = (*todo["gather + fold"], 1.0)
    if case.recipe == "bf16":
        todo = {stage: todo[stage] for stage in ("GEMMs", "dispatch", "combine", "rest")}
        todo |= {"SwiGLU": (18.0 * rows * shape.hidden,), "gather + fold": (8.0 * rows * shape.dim, 1.0)}
    return todo


@dataclass(frozen=True)
class Rates:
    """us per unit of work by (case that was fitted, stage); sustained, overlap: see the module. host: us of a step's
    launches by case, the least that it can take eagerly."""

    us: Mapping[tuple[str, str], tuple[float, ...]]
    sustained: Mapping[str, float]
    overlap: float
    host: Mapping[str, float]

    def stages(self, layout: Layout, nvlink: float = WIRE, network: float = WIRE) -> dict[str, float]:
        """us of a step by stage, "overlap" below zero: of symmetric alone. GB/s of a GPU in each direction."""
        case, slower = layout.case, (WIRE / nvlink, WIRE / network)
        todo = terms(layout, slower[0])
        sent = [slow * sum(leg) for slow, leg in zip(slower, zip(*layout.wire))]  # as if all went over 450 GB/s
        if case.dispatcher == "all_to_all":
            del todo["dispatch"], todo["combine"]
            todo |= {"NCCL": (max(sent), 1.0), "gap": (1.0,)}
        elif case.dispatcher == "hierarchical":
            todo["NCCL"] = (sent[1], 1.0)
        elif case.dispatcher == "local":
            del todo["dispatch"]
        if layout.copied:
            todo["permute + pointwise"] = (layout.copied,)
        found = {stage: sum(a * b for a, b in zip(n, self._us(case, stage))) for stage, n in todo.items()}
        if case.dispatcher == "nvshmem":  # puts to both at once, through the network at NCCL's share
            for stage, (_, far) in zip(("dispatch", "combine"), layout.wire):
                found[stage] = max(found[stage], self._us(case, "NCCL")[0] * far * slower[1])
        found["GEMMs"] *= self.sustained.get(BASELINE if case.baseline else case.recipe, self.sustained["mxfp8"])
        if "quantize weights" in found and case.dispatcher == "symmetric":
            found["overlap"] = -self.overlap * min(found["quantize weights"], found["dispatch"])
        if (wait := self.host.get(layout.what, 0.0) - sum(found.values())) > 0:
            found["host"] = wait
        return found

    def _us(self, case: Case, stage: str) -> tuple[float, ...]:
        plain = case.baseline or (case.recipe == "bf16" and stage in ("GEMMs", "SwiGLU"))
        return self.us[BASELINE if plain or (MX, stage) not in self.us else MX, stage]


def read(files: Iterable[str]) -> list[Row]:
    """All rows of results that bench=layer wrote, with "section", "commit", names as they are now."""
    rows = []
    for results in (json.loads(Path(file).read_text()) for file in files):
        for run in results.get("runs", [results]):
            for section, found in run["sections"].items():
                for row in found:
                    names = {key: RENAMED.get(row[key], row[key]) for key in ("what", "stage") if key in row}
                    rows.append({**row, **names, "section": section, "commit": run.get("commit") or ""})
    return rows


def fit(rows: Sequence[Row], without: str | None = None) -> Rates:
    """On profiles, and times on most GPUs, of even routing, not of the model `without`. ValueError if there is none."""
    rows = [row for row in rows if not row.get("skew") and row["model"] != without and "error" not in row]
    profiles: dict[tuple[str, Layout], dict[str, float]] = {}
    for row in rows:
        if row["section"] == "stages" and "us" in row:
            profiles.setdefault((row["model"], Layout.of(row)), {})[row["stage"]] = row["us"]
    us: dict[tuple[str, str], tuple[float, ...]] = {}
    for what in (MX, BASELINE):
        seen = [(terms(layout), found) for (_, layout), found in profiles.items() if layout.what == what]
        if not seen:
            raise ConfigError(
                f"estimate.rates: no section stages of {what} but of {without}: wanted what bench=layer wrote"
            )
        for todo, found in seen:
            found["rest"] = sum(found[stage] for stage in found.keys() - todo.keys() - {"sum", "busy", "whole"})
            found["gap"] = found["whole"] - found["busy"]
        for stage in seen[0][0]:
            us[what, stage] = _least_squares([todo[stage] for todo, _ in seen], [found[stage] for _, found in seen])
    mx = [found for (_, layout), found in profiles.items() if layout.what == MX]
    beside = [(one["sum"] - one["busy"]) / min(one["dispatch"], one["quantize weights"]) for one in mx]
    host = {row["what"]: 1e3 * row["caller's ms"] for row in rows if row["section"] == "host" and "caller's ms" in row}
    rates, sustained = Rates(us, {"mxfp8": 1.0}, statistics.median(beside), {}), {"mxfp8": 1.0}
    most = max(layout.ranks for _, layout in profiles)
    for name, what in (("mxfp8", MX), ("bf16", "bf16/symmetric"), (BASELINE, BASELINE)):
        factors = []
        for row in rows:
            if row["section"] == "layer" and row["what"] == what and row["ranks"] == most and "ms" in row:
                found = rates.stages(Layout.of(row))
                factors.append(1 + (1e3 * row["ms"] - sum(found.values())) / found["GEMMs"])
        sustained |= {name: statistics.median(factors)} if factors else {}
    return dataclasses.replace(rates, sustained=sustained, host=host)


def _least_squares(amounts: Sequence[tuple[float, ...]], us: Sequence[float]) -> tuple[float, ...]:
    """Factors of least relative error, none below zero."""
    scaled = torch.tensor(amounts, dtype=torch.float64) / torch.tensor(us, dtype=torch.float64)[:, None]
    norms = scaled.norm(dim=0).clamp_min(1e-300)
    kept = list(range(scaled.shape[1]))
    while True:
        columns = scaled[:, kept] / norms[kept]
        found = torch.linalg.lstsq(columns, torch.ones(len(us), 1, dtype=torch.float64), driver="gelsd").solution[:, 0]
        if len(kept) == 1 or (found >= 0).all():
            factors = dict(zip(kept, (found / norms[kept]).tolist()))
            return tuple(factors.get(i, 0.0) for i in range(scaled.shape[1]))
        kept.remove(kept[int(found.argmin())])


@dataclass(frozen=True)
class Memory:
    """Bytes of a layer of bf16 weights on Hopper.

    kept: until its backward. work: besides at its peak, with all gradients and the output. buffers: of exchanges.
    """

    kept: float
    work: float
    buffers: float


def memory(layout: Layout) -> Memory:
    """Of one layer of a layout."""
    (tokens, dim, hidden, experts, top_k), ranks, capacity = layout.shape, layout.ranks, layout.capacity
    own, recipe, dispatcher = experts // ranks, Recipe.named(layout.case.whole_recipe), layout.case.dispatcher
    quantized, align, pairs = recipe.scaling != "none", recipe.group_alignment, tokens * top_k
    sources, crossing = 1 if dispatcher == "local" else ranks, layout.slots if dispatcher == "hierarchical" else 0
    slots = layout.near * crossing or sources * tokens
    if dispatcher == "all_to_all":  # with room for a 32nd more, on average
        slots = math.ceil(layout.imbalance * pairs * 33 / 32)
        rows = round_up(slots + own * (align - 1), align)
    elif capacity.kind == "exact":  # half of the padding, on average
        rows = round_up(math.ceil(layout.imbalance * pairs) + own * (align - 1) // 2, align)
    else:
        rows = capacity.rows(sources, tokens, top_k, num_local_experts=own, alignment=align)
    row = dim + dim // (recipe.block_size or dim) if quantized else 2 * dim
    copied = dispatcher in ("symmetric", "hierarchical", "nvshmem")
    saved = (rows if not quantized or keeps_rows(rows, slots, copied=copied) else slots) * row
    gate_up, of_forward = 4 * rows * hidden, 2 * rows * dim  # besides at forward's peak
    if recipe.saved_gate_up == "fp8":
        gate_up, of_forward = rows * (2 * hidden + 1), max(gate_up, of_forward)
    h, d_h = rows * (hidden + 1 if quantized else 2 * hidden), 2 * rows * hidden
    plan = 8 * rows + 4 * slots * (1 if dispatcher == "all_to_all" else top_k)
    plan += 4 * (crossing * (top_k + 1) + tokens * layout.nodes) if crossing else 0
    plan += 4 * tokens * (2 * top_k + min(top_k, ranks) * (top_k + 1)) * (dispatcher == "all_to_all")
    amax = 4 * own * (dim + hidden) * quantized
    kept = saved + gate_up + plan + amax
    folded = padded_rows(rows, own, HOPPER_BLOCK_K) if quantized else 0
    # Backward, in order: what is left of what is kept, what there is besides, and what was allocated until then. out is
    # the caller's all the while.
    w, d_rows, out = own * dim * hidden, 2 * rows * dim, 2 * tokens * dim
    d_gate_up = d_h if quantized else 2 * d_h  # quantized: in d_h's place
    d_y = (rows * (dim + 1), 0, folded * (dim + hidden)) if quantized else (d_rows,) * 3  # for d_h, then, for wgrad
    d_slots = slots * row if quantized and not copied else 0  # of d_out
    colwise = 2 * w * quantized  # of gate_up_proj
    swiglu = h + d_gate_up * (not quantized)
    # Beside the last weight gradient: dx, and its rows where an exchange may still hold them.
    late = 2 * (tokens + 2 * crossing) * dim + d_rows * (dispatcher in ("all_to_all", "nvshmem"))
    operands = folded * (2 * hidden + dim)
    forward = kept + h + of_forward + 1.5 * colwise  # where there is no out yet
    first = 1.5 * colwise + d_slots + d_y[0] + d_h
    backward = [(kept, first, first)]
    backward += [(kept, colwise + d_slots + d_y[1] + d_h + swiglu, swiglu)]
    # Then down_proj's gradient, dx's rows, the gradient of gate_up_proj.
    first = colwise + d_slots + d_y[2] + d_gate_up + max(h, 2 * w) + h * (not quantized)
    backward += [(saved + plan, first, folded * (dim + hidden) + 2 * w)]
    backward += [(saved + plan, 2 * w + colwise + d_gate_up + d_rows, d_rows)]
    last = 6 * w + late + operands + d_gate_up * (not quantized)
    backward += [(saved + plan, 2 * w + late + operands + d_gate_up, out + operands)]
    backward += [(plan if quantized else saved + plan, last, 4 * w)]
    if dispatcher == "all_to_all":  # rows gathered, joined, received and split
        backward.insert(4, (saved + plan, d_gate_up + d_rows + 8 * pairs * dim + 2 * w, 0))
    still, besides, _ = zip(*backward)
    called = max(forward, *(out + a + b for a, b in zip(still, besides)))
    of_node = Buffer(layout.near if crossing else ranks, crossing or tokens, top_k, round_up(2 * dim, ALIGNMENT)).nbytes
    buffers = 2 * of_node * copied if dispatcher != "nvshmem" else 4 * round_up(of_node, 16 * ALIGNMENT)  # and staging
    return Memory(kept, called - kept, buffers)
