"""What a layer costs on ranks that nobody has here: us by stage, wire bytes by leg, bytes of memory. See `estimate`.

    results of bench=layer + work of stages (layer_work) --fit--> us of each stage per byte, flop and time   (Rates)

    stages      of MXFP8 from its profile; of bf16's products and SwiGLU, and of NCCL's all-to-all, from the baseline's
    sustained   products are slower in a long run than in a profile's few steps: one factor a recipe, from times
    overlap     of a dispatch and the quantization of weights beside it
    routing     is even: of K experts of E a token needs a rank of e with probability 1 - C(E - e, K) / C(E, K).
                imbalance: load of the busiest rank over the mean, for products and their rows

T tokens a rank, D model dim, F hidden dim, E experts, K a token, e of a rank, N = T K pairs, R rows that fit, W ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
from mxep.comms.layout import ALIGNMENT, Layout, round_up
from mxep.ep.dispatchers.hierarchical import share_of_node, slots_per_node
from mxep.ep.saved import keeps_rows
from mxep.gemm import Recipe
from mxep.gemm.kernels import HOPPER_BLOCK_K
from mxep.quant.replay import MOST_BYTES
from mxep.quant.shapes import padded_rows

from .bench.layer_cases import BASELINE, MX, Case, Problem, Shape
from .bench.layer_work import row_bytes, wire_bytes, work
from .results import Row

TILE = 128  # rows of a product's tile: half of one is lost in each group
RENAMED = {"push": "dispatch", "return": "combine", "split fold": "fold for wgrad", "standard bf16": BASELINE}
"""Names in results of 21 November 2026 -> names now."""


@dataclass(frozen=True)
class Expected:
    """Traffic (comms_cases) of an even routing: rows on average, the busiest rank's `imbalance` times as many."""

    shape: Shape
    ranks: int
    imbalance: float = 1.0

    @property
    def most_pairs(self) -> float:
        return self.imbalance * self.shape.tokens * self.shape.top_k

    def needs(self, ranks: int) -> float:
        """Probability that a token has an expert on any of `ranks` ranks."""
        experts, others = self.shape.experts, self.shape.experts * (self.ranks - ranks) // self.ranks
        return 1 - math.comb(others, self.shape.top_k) / math.comb(experts, self.shape.top_k)

    def leaving(self, *, combine: bool = False) -> tuple[float, float]:
        others = self.ranks - 1
        return self.shape.tokens * others * self.needs(1), self.shape.tokens * self.shape.top_k * others / self.ranks


def problem(shape: Shape, ranks: int, imbalance: float = 1.0) -> Problem:
    """Of meta tensors and expected traffic: what layer_work asks for."""
    tokens, dim, hidden, experts, top_k = shape
    meta, own = functools.partial(torch.empty, device="meta"), experts // ranks
    made = {"ids": meta(tokens, top_k), "x": meta(tokens, dim), "traffic": Expected(shape, ranks, imbalance)}
    weights = {"w13": meta(own, 2 * hidden, dim), "w2": meta(own, dim, hidden)}
    return cast(Problem, SimpleNamespace(shape=shape, **made, **weights))


Terms = dict[str, tuple[float, ...]]
"""Stage -> amounts, each of which has a factor in us."""


def terms(p: Problem, what: str, slower: float = 1.0) -> Terms:
    """What the stages of a case must do: bytes, flops, times. slower: 450 GB/s over the speed of NVLink."""
    case, tokens_bytes, rows, dim = Case(what), 2.0 * p.x.numel(), p.traffic.most_pairs, p.shape.dim
    todo: Terms = {stage: (amount,) for stage, (_, amount) in work(p, case if case.baseline else _as_mx(case)).items()}
    todo["GEMMs"] = (todo["GEMMs"][0] * (1 + TILE / 2 * len(p.w2) / rows),)
    if case.baseline:
        nccl = todo.get("NCCL", (0.0,))[0]
        return todo | {"NCCL": (nccl, 1.0), "gap": (1.0,)}
    out, back = wire_bytes(p, case.recipe)
    todo |= {"dispatch": (out * slower, tokens_bytes), "combine": (back * slower, tokens_bytes), "rest": (1.0,)}
    todo["gather + fold"] = (*todo["gather + fold"], 1.0)
    if case.recipe == "bf16":
        todo = {stage: todo[stage] for stage in ("GEMMs", "dispatch", "combine", "rest")}
        todo |= {"SwiGLU": (18.0 * rows * p.shape.hidden,), "gather + fold": (8.0 * rows * dim, 1.0)}
    return todo


def _as_mx(case: Case) -> Case:
    return Case(f"{MX}, kept" if case.kept else MX)


def moved(shape: Shape, ranks: int, recipe: str) -> float:
    """Bytes that the all_to_all dispatcher reads and writes around its collectives: gathers, joins, splits, sums.

    Each way a row is copied three times. Sums read a row for each pair, write min(K, W) a token, read these.
    """
    tokens, dim, _, _, top_k = shape
    pairs, row = tokens * top_k, row_bytes(recipe, dim)
    sums = pairs + 2 * tokens * min(top_k, ranks) + tokens
    return 2 * (6 * pairs * row + 6 * pairs * 2 * dim + sums * 2 * dim)


def crossed(shape: Shape, nodes: int, slots: int, recipe: str) -> float:
    """Bytes that the hierarchical dispatcher reads and writes around its collectives: joins, gathers, sums.

    slots: of all nodes, N C.
    """
    tokens, dim, *_ = shape
    return 2 * (2 * (tokens + slots) * row_bytes(recipe, dim) + (slots + tokens) * 2 * dim) if nodes > 1 else 0.0


def slots_of(shape: Shape, nodes: int, capacity: Capacity, nodes_per_token: int | None = None) -> int:
    """N C: rows that a rank sends to all nodes, its own included, used or not."""
    most = min(nodes_per_token or nodes, nodes)
    return nodes * slots_per_node(
        capacity, shape.tokens, share_of_node(nodes, most, shape.experts // nodes, shape.top_k)
    )


@dataclass(frozen=True)
class Rates:
    """us per unit of work by (case that was fitted, stage); sustained, overlap: see the module. host: us of a step's
    launches by case, the least that it can take eagerly."""

    us: Mapping[tuple[str, str], tuple[float, ...]]
    sustained: Mapping[str, float]
    overlap: float
    host: Mapping[str, float]

    def stages(
        self, shape: Shape, ranks: int, what: str, imbalance: float = 1.0, *, slower: float = 1.0, sent: float = 0.0,
        nodes: int = 1, slots: int = 0,
    ) -> dict[str, float]:  # fmt: skip
        """us of a step by stage, "overlap" below zero. sent: bytes of all-to-alls, as if all went over 450 GB/s.

        nodes, slots: of the hierarchical dispatcher (`slots_of`), none of whose overlap is counted.
        """
        p, case = problem(shape, ranks, imbalance), Case(what)
        dispatcher, todo = case.dispatcher, terms(p, what, slower)
        if dispatcher == "all_to_all":
            del todo["dispatch"], todo["combine"]
            todo |= {"NCCL": (sent, 1.0), "permute + pointwise": (moved(shape, ranks, case.recipe),), "gap": (1.0,)}
        elif dispatcher == "hierarchical":
            rows, copied = shape.tokens * (ranks - nodes) * Expected(shape, ranks).needs(1), 2.0 * slots * shape.dim
            todo |= {"dispatch": (2 * rows * row_bytes(case.recipe, shape.dim) * slower, copied)}
            todo |= {"combine": (2 * rows * row_bytes("bf16", shape.dim) * slower, copied), "NCCL": (sent, 1.0)}
            todo["permute + pointwise"] = (crossed(shape, nodes, slots, case.recipe),)
        elif dispatcher == "local":
            del todo["dispatch"]
        found = {stage: sum(a * b for a, b in zip(n, self._us(case, stage))) for stage, n in todo.items()}
        found["GEMMs"] *= self.sustained.get(BASELINE if case.baseline else case.recipe, self.sustained["mxfp8"])
        if "quantize weights" in found and "dispatch" in found and nodes == 1:
            found["overlap"] = -self.overlap * min(found["quantize weights"], found["dispatch"])
        if (wait := self.host.get(what, 0.0) - sum(found.values())) > 0:
            found["host"] = wait
        return found

    def _us(self, case: Case, stage: str) -> tuple[float, ...]:
        plain = case.baseline or stage in ("NCCL", "gap", "permute + pointwise")
        of_baseline = plain or (case.recipe == "bf16" and stage in ("GEMMs", "SwiGLU"))
        return self.us[BASELINE if of_baseline else MX, stage]


def read(files: Iterable[str]) -> list[Row]:
    """All rows of results that bench=layer wrote, with "section", "commit", names as they are now."""
    rows = []
    for file in files:
        results = json.loads(Path(file).read_text())
        for run in results.get("runs", [results]):
            for section, found in run["sections"].items():
                for row in found:
                    names = {key: RENAMED.get(row[key], row[key]) for key in ("what", "stage") if key in row}
                    rows.append({**row, **names, "section": section, "commit": run.get("commit") or ""})
    return rows


def fit(rows: Sequence[Row], without: str | None = None) -> Rates:
    """On profiles, and times on most GPUs, of even routing, not of the model `without`. ValueError if there is none."""
    rows = [row for row in rows if not row.get("skew") and row["model"] != without and "error" not in row]
    profiles: dict[tuple[str, str, Shape, int], dict[str, float]] = {}
    for row in rows:
        if row["section"] == "stages" and "us" in row:
            key = row["what"], row["model"], Shape(*row["shape"]), row["ranks"]
            profiles.setdefault(key, {})[row["stage"]] = row["us"]
    us: dict[tuple[str, str], tuple[float, ...]] = {}
    for what in (MX, BASELINE):
        seen = [(terms(problem(key[2], key[3]), what), found) for key, found in profiles.items() if key[0] == what]
        if not seen:
            raise ValueError(
                f"estimate.rates: no section stages of {what} but of {without}: wanted what bench=layer wrote"
            )
        for todo, found in seen:
            found["rest"] = sum(found[stage] for stage in found.keys() - todo.keys() - {"sum", "busy", "whole"})
            found["gap"] = found["whole"] - found["busy"]
        for stage in seen[0][0]:
            us[what, stage] = _least_squares([todo[stage] for todo, _ in seen], [found[stage] for _, found in seen])
    mx = [found for key, found in profiles.items() if key[0] == MX]
    beside = [(one["sum"] - one["busy"]) / min(one["dispatch"], one["quantize weights"]) for one in mx]
    host = {row["what"]: 1e3 * row["caller's ms"] for row in rows if row["section"] == "host" and "caller's ms" in row}
    rates = Rates(us, dict.fromkeys(("mxfp8", "bf16", BASELINE), 1.0), statistics.median(beside), {})
    sustained: dict[str, float] = {}
    most = max(key[3] for key in profiles)
    for name, what in (("mxfp8", MX), ("bf16", "bf16/symmetric"), (BASELINE, BASELINE)):
        factors = []
        for row in rows:
            if row["section"] == "layer" and row["what"] == what and row["ranks"] == most and "ms" in row:
                found = rates.stages(Shape(*row["shape"]), row["ranks"], what)
                factors.append(1 + (1e3 * row["ms"] - sum(found.values())) / found["GEMMs"])
        sustained |= {name: statistics.median(factors)} if factors else {}
    return dataclasses.replace(rates, sustained={"mxfp8": 1.0} | sustained, host=host)


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


def memory(
    shape: Shape, ranks: int, what: str, capacity: Capacity, imbalance: float = 1.0, *, how: str = "replayed",
    nodes: int = 1, nodes_per_token: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """Bytes of a layer of bf16 weights on Hopper: "kept" until its backward, "work" besides at its peak, "buffers", and
    "graphs", the pool of replays, at least. work has the layer's gradients and its output.

    how: passes are "replayed": what they do not return lies in the pool, and arguments stay to their end. Or they are
    "called"; or "captured" in this step, with temporaries beside the rest; "passes captured": their steps were before.
    What would allocate more than MOST_BYTES is refused: of a pass its steps are replayed, whose pool is not counted.
    nodes, nodes_per_token: of the hierarchical dispatcher.
    """
    tokens, dim, hidden, experts, top_k = shape
    case, own = Case(what), experts // ranks
    recipe, dispatcher = Recipe.named(case.recipe), case.dispatcher
    quantized, align, pairs = recipe.scaling != "none", recipe.group_alignment, tokens * top_k
    sources = 1 if dispatcher == "local" else ranks
    crossing = slots_of(shape, nodes, capacity, nodes_per_token) if dispatcher == "hierarchical" else 0
    slots = {"all_to_all": pairs, "hierarchical": ranks // nodes * crossing}.get(dispatcher, sources * tokens)
    if dispatcher == "all_to_all" or capacity.kind == "exact":
        rows = round_up(math.ceil(imbalance * pairs) + own * (align - 1) // 2, align)  # half of the padding, on average
    else:
        rows = capacity.rows(sources, tokens, top_k, num_local_experts=own, alignment=align)
    row = dim + dim // (recipe.block_size or dim) if quantized else 2 * dim
    copied = dispatcher in ("symmetric", "hierarchical")
    saved = (rows if not quantized or keeps_rows(rows, slots, copied=copied) else slots) * row
    gate_up, h, d_h = 4 * rows * hidden, rows * (hidden + 1 if quantized else 2 * hidden), 2 * rows * hidden
    plan = 8 * rows + 4 * slots * (1 if dispatcher == "all_to_all" else top_k)
    plan += 4 * (crossing * (top_k + 1) + tokens * nodes) if crossing else 0
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
    late = 2 * (tokens + 2 * crossing) * dim + (d_rows if dispatcher != "local" else 0)  # dx leaves beside the last
    operands = folded * (2 * hidden + dim)
    forward = kept + h + d_rows + 1.5 * colwise - out  # which has no out yet
    backward = [(kept, 1.5 * colwise + d_slots + d_y[0] + d_h, 1.5 * colwise + d_slots + d_y[0] + d_h)]
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
    still, besides, each = zip(*backward)
    allocated = [0.0, *itertools.accumulate(each)]
    in_steps = dispatcher not in ("local", "symmetric")
    refused = not in_steps and allocated[-1] > MOST_BYTES
    gathered = rows * (dim + 1) if quantized else 0 if saved == rows * row else d_rows  # rows that are dropped before h
    forward_fits = forward + out + gathered <= MOST_BYTES
    if how == "called":
        peak = max(forward, *map(sum, zip(still, besides)))
    elif in_steps or refused:
        peak = max(kept + d_rows + 1.5 * colwise, kept + 1.5 * colwise + d_slots + d_rows + d_gate_up + 2 * w)
        peak = max(peak, saved + plan + d_gate_up + 6 * w + late + operands * (how == "captured"))
        if dispatcher == "all_to_all" or operands + 4 * w > MOST_BYTES:
            peak = max(peak, *map(sum, zip(still[4:], besides[4:])))
    else:
        peak = kept + 6 * w + out
    if how in ("captured", "passes captured") and not in_steps:  # until it is refused
        peak = max(peak, forward, *(kept + b for b, n in zip(besides, allocated) if n <= MOST_BYTES))
    graphs = max(forward + out if forward_fits else 0, 0 if refused else max(besides))  # and of steps
    of_node = ranks // nodes
    layout = Layout(of_node, slots // of_node, top_k, round_up(2 * dim, ALIGNMENT))
    found = {"kept": kept, "work": peak + out - kept, "buffers": 2 * layout.nbytes if copied else 0}
    return found | {"graphs": graphs if how == "replayed" else 0}


def legs(
    shape: Shape, ranks: int, node: int, what: str, capacity: Capacity | None = None, nodes_per_token: int | None = None
) -> tuple[float, float]:
    """Wire bytes of a step that a rank sends over NVLink and over the network, on average; as many come back to it.

    hierarchical: all slots of the other nodes cross, as many as the capacity, the worst case unless given, leaves.
    """
    recipe, dispatcher = what.split("/")
    inside, row = min(ranks, node), 2 * (row_bytes(recipe, shape.dim) + row_bytes("bf16", shape.dim))
    traffic = Expected(shape, ranks)
    if dispatcher == "hierarchical":
        nodes = ranks // inside
        slots = slots_of(shape, nodes, capacity or Capacity.worst_case(), nodes_per_token)
        across = slots // nodes * (nodes - 1)
        return shape.tokens * row * (ranks - nodes) * traffic.needs(1), row * across
    each = shape.top_k / ranks if dispatcher == "all_to_all" else traffic.needs(1)
    return shape.tokens * row * each * (inside - 1), shape.tokens * row * each * (ranks - inside)
