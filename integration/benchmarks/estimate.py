"""task=estimate: time, bytes and memory of a stack of MoE layers on any machine. Needs no GPU.

    recipe x dispatcher x EP: ms of a layer's step, bytes sent, memory of a rank, tokens/s of the stack

Times are rough. A stage's time is its work (layer_cases.work) times the median us per byte or flop in profiles of
bench=layer. A step's time is the sum of its stages times a factor for its recipe: the median of measured steps / sums
of their stages.

- Ranks of a group are adjacent. all_to_all takes as long as the slower of NVLink and network. The network reaches the
  share of its nominal speed that NCCL reached on NVLink.
- Routing is even: A token needs a rank with e of E experts with probability 1 - C(E - e, K) / C(E, K).
- Gradients of experts are reduced over their copies in a ring, while micro-batches compute. The longer of both counts.
- FSDP shards weights, gradients and optimizer over the copies of experts. Weights are gathered for forward and again
  for backward of each micro-batch. Gradients are scattered once a step.
- Memory counts experts only: weights and gradients in bf16, the optimizer, the tensors each layer keeps for backward,
  one layer's temporaries, and the exchange buffers, which all layers share. Libraries' memory does not count.

T tokens a rank, D model dim, F hidden dim, E experts, K a token, e of a rank, N = T K pairs, R rows that fit, W ranks.
"""

from __future__ import annotations

import collections
import json
import math
import statistics
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from mxep.comms import Capacity
from mxep.comms.layout import Layout as Buffer
from mxep.comms.layout import round_up
from mxep.ep.dispatchers.hierarchical import share_of_node, slots_per_node
from mxep.ep.formats import keeps_rows
from mxep.ep.moe import rows_per_expert
from mxep.gemm import Recipe
from mxep.gemm.kernels import HOPPER_BLOCK_K
from mxep.integration.config import ConfigError
from mxep.integration.model import make_capacity
from mxep.integration.report import Report, Row, Section
from mxep.integration.schema import SIZE_NAMES, Config, sizes_of
from mxep.quant.shapes import padded_rows

from .comms import WIRE, Traffic
from .layer_cases import BASELINE, MX, Case, Shape, row_bytes, work
from .script import GIB

RATES = Path(__file__).parents[2] / "docs" / "results"
# Most ranks and fewest rows an expert in profiles, most ranks of a layout.
MEASURED_RANKS, MEASURED_ROWS, MOST_RANKS = 4, 2048, 512
TABLE = Section(
    "ms and MB sent of a layer by layout and EP; ~: extrapolated (docs/guides/scaling.md)",
    ("layout",),
    {"ms": ".2f", "NVL MB": ".0f", "net MB": ".0f", "GiB": ".0f", "ktok/s": ".0f"},
)


@dataclass(frozen=True)
class Layout:
    """A layer over W ranks. It stands in for comms.Traffic, with mean numbers of rows for even routing.

    what: a case of bench=layer. node: ranks that NVLink connects. nodes_per_token: most nodes of a token's experts, if
    the router limits them; for hierarchical.
    """

    shape: Shape
    ranks: int
    what: str
    capacity: Capacity = field(default_factory=Capacity.worst_case)
    node: int = MOST_RANKS
    nodes_per_token: int | None = None

    @property
    def case(self) -> Case:
        return Case(self.what)

    @property
    def near(self) -> int:
        """Ranks of this node."""
        return min(self.ranks, self.node)

    @property
    def most_pairs(self) -> int:
        return self.shape.tokens * self.shape.top_k

    @property
    def needs(self) -> float:
        """Probability that a token has an expert on a given rank."""
        others = self.shape.experts * (self.ranks - 1) // self.ranks
        return 1 - math.comb(others, self.shape.top_k) / math.comb(self.shape.experts, self.shape.top_k)

    def leaving(self, *, combine: bool = False) -> tuple[float, float]:
        others = self.ranks - 1
        return self.shape.tokens * others * self.needs, self.shape.tokens * self.shape.top_k * others / self.ranks

    @property
    def slots(self) -> int:
        """Rows that a rank sends to all nodes, its own included, with hierarchical. Unused slots count."""
        nodes, shape = self.ranks // self.near, self.shape
        share = share_of_node(nodes, min(self.nodes_per_token or nodes, nodes), shape.experts // nodes, shape.top_k)
        return nodes * slots_per_node(self.capacity, shape.tokens, share)

    @property
    def wire(self) -> tuple[float, float]:
        """Mean bytes that a rank sends in a step: (over NVLink, over the network). It receives as many."""
        shape, nodes, dispatcher = self.shape, self.ranks // self.near, self.case.dispatcher
        row = 2 * (row_bytes(self.case.recipe, shape.dim) + row_bytes("bf16", shape.dim))
        each = shape.tokens * (shape.top_k / self.ranks if dispatcher == "all_to_all" else self.needs)
        if dispatcher == "hierarchical":  # ranks of a node share the rows that arrive; all slots of other nodes cross
            return row * each * (self.ranks - nodes), row * self.slots / nodes * (nodes - 1)
        return row * each * (self.near - 1), row * each * (self.ranks - self.near)

    @property
    def work(self) -> dict[str, float]:
        """Stage -> bytes or flop; for "rest" and "gap" a factor of their measured times."""
        case, rows, shape = self.case, self.most_pairs, self.shape
        like = case if case.baseline else Case(f"{MX}, {case.suffix}" if case.kept or case.kept_in_fp8 else MX)
        traffic = cast(Traffic, self)
        todo = {stage: float(amount) for stage, (_, amount) in work(shape, self.ranks, traffic, like).items()}
        todo["GEMMs"] *= 1 + TILE / 2 * (shape.experts // self.ranks) / rows
        if case.baseline:
            return todo | {"gap": 1.0}
        sums = 2 * shape.dim * (self.slots if case.dispatcher == "hierarchical" else shape.tokens)
        sent = self.wire[0] / (row_bytes(case.recipe, shape.dim) + row_bytes("bf16", shape.dim))
        todo |= {"dispatch": sent * row_bytes(case.recipe, shape.dim), "rest": 1.0}
        todo["combine"] = sent * row_bytes("bf16", shape.dim) + 2 * sums
        if case.recipe == "bf16":
            todo = {stage: todo[stage] for stage in ("GEMMs", "dispatch", "combine", "rest")}
            todo |= {"SwiGLU": 18.0 * rows * shape.hidden, "gather + fold": 8.0 * rows * shape.dim}
        return todo


TILE = 128  # rows of a GEMM's tile: each group wastes half a tile


@dataclass(frozen=True)
class Rates:
    """us: (case, stage) -> us per byte or flop. steps: recipe -> measured steps / sums of their stages. host: case ->
    us of a step's launches, the least time of an eager step."""

    us: Mapping[tuple[str, str], float]
    steps: Mapping[str, float]
    host: Mapping[str, float]

    def stages(self, layout: Layout, nvlink: float = WIRE, network: float = WIRE) -> dict[str, float]:
        """us of a step by stage. nvlink, network: GB/s of a GPU in each direction."""
        case, shape, todo = layout.case, layout.shape, layout.work
        near, far = (sent * WIRE / speed for sent, speed in zip(layout.wire, (nvlink, network)))
        for stage in ("dispatch", "combine") if not case.baseline else ():
            todo[stage] *= WIRE / nvlink
        copied, pairs = 0.0, shape.tokens * shape.top_k
        row, back = row_bytes(case.recipe, shape.dim), row_bytes("bf16", shape.dim)
        if case.dispatcher == "all_to_all":  # in each direction a row is copied three times, and summed
            del todo["dispatch"], todo["combine"]
            todo |= {"NCCL": max(near, far), "gap": 1.0}
            sums = pairs + 2 * shape.tokens * min(shape.top_k, layout.ranks) + shape.tokens
            copied = 2 * (6 * pairs * (row + back) + sums * back)
        elif case.dispatcher == "hierarchical":
            todo["NCCL"] = far
            copied = 2 * (shape.tokens + layout.slots) * (2 * row + back)
        if copied:
            todo["permute + pointwise"] = copied
        step = self.steps.get(BASELINE if case.baseline else case.recipe, self.steps.get("mxfp8", 1.0))
        found = {stage: step * amount * self._us(case, stage) for stage, amount in todo.items()}
        if (wait := self.host.get(layout.what, 0.0) - sum(found.values())) > 0:
            found["host"] = wait
        return found

    def _us(self, case: Case, stage: str) -> float:
        plain = case.baseline or (case.recipe == "bf16" and stage in ("GEMMs", "SwiGLU"))
        return self.us[BASELINE if plain or (MX, stage) not in self.us else MX, stage]


def read(files: Iterable[str]) -> list[Row]:
    """All rows in results of bench=layer, with their "section"."""
    results = [json.loads(Path(file).read_text()) for file in files]
    runs = [run for result in results for run in result.get("runs", [result])]
    return [row | {"section": section} for run in runs for section, rows in run["sections"].items() for row in rows]


def fit(rows: Sequence[Row]) -> Rates:
    """Medians over profiles, and over steps on the most GPUs, with even routing. Raises ConfigError without any."""
    rows = [row for row in rows if not row.get("skew") and "error" not in row]
    profiles: dict[Layout, dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        if row["section"] == "stages" and "us" in row and row["what"] in (MX, BASELINE):
            profiles[Layout(Shape(*row["shape"]), row["ranks"], row["what"])][row["stage"]] = row["us"]
    ratios: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for layout, found in profiles.items():
        todo = layout.work
        found["gap"] = found["whole"] - found["busy"]
        found["rest"] = sum(us for stage, us in found.items() if stage not in (*todo, "sum", "busy", "whole", "gap"))
        for stage, amount in todo.items():
            ratios[layout.what, stage].append(found[stage] / amount)
    if {MX, BASELINE} - {what for what, _ in ratios}:
        wanted = f"{MX} and {BASELINE}"
        raise ConfigError(f"estimate.rates: no section stages of {wanted}: wanted what bench=layer wrote")
    # NCCL: the fastest, as few bytes measure latency.
    us = {key: min(each) if key[1] == "NCCL" else statistics.median(each) for key, each in ratios.items()}
    rates = Rates(us, {}, {})
    most, steps = max(layout.ranks for layout in profiles), {}
    for name, what in (("mxfp8", MX), ("bf16", "bf16/symmetric"), (BASELINE, BASELINE)):
        timed = [row for row in rows if row["section"] == "layer" and row["what"] == what and "ms" in row]
        layouts = {row["ms"]: Layout(Shape(*row["shape"]), most, what) for row in timed if row["ranks"] == most}
        if layouts:
            steps[name] = statistics.median(1e3 * ms / sum(rates.stages(one).values()) for ms, one in layouts.items())
    host = {row["what"]: 1e3 * row["ms"] for row in rows if row["section"] == "host" and "ms" in row}
    return Rates(rates.us, steps, host)


class Memory(NamedTuple):
    """Bytes of a layer with bf16 weights on Hopper. kept: from forward to backward. work: added at the peak, gradients
    and output included. buffers: of exchanges."""

    kept: float
    work: float
    buffers: float


def memory(layout: Layout) -> Memory:
    (tokens, dim, hidden, experts, top_k), ranks, capacity = layout.shape, layout.ranks, layout.capacity
    own, recipe, dispatcher = experts // ranks, Recipe.named(layout.case.whole_recipe), layout.case.dispatcher
    quantized, align, pairs = recipe.scaling != "none", recipe.group_alignment, tokens * top_k
    sources, crossing = 1 if dispatcher == "local" else ranks, layout.slots if dispatcher == "hierarchical" else 0
    slots = layout.near * crossing or sources * tokens
    if dispatcher == "all_to_all":  # with room for a 32nd more, on average
        slots = math.ceil(pairs * 33 / 32)
        rows = round_up(slots + own * (align - 1), align)
    else:
        rows = capacity.rows(sources, tokens, top_k, num_local_experts=own, alignment=align)
    few = rows
    if capacity.overflow == "recompute" and dispatcher != "all_to_all":
        few = capacity.kept_rows(sources, tokens, top_k, num_local_experts=own, alignment=align)
    row = dim + dim // (recipe.block_size or dim) if quantized else 2 * dim
    copied = dispatcher in ("symmetric", "hierarchical")
    into_wgrad = (rows if not quantized or keeps_rows(rows, slots, copied=copied) else slots) * row
    again = dispatcher == "local" and (not quantized or top_k > 1)  # backward gathers rows from x again
    saved = 0 if again else into_wgrad if quantized or few == rows else slots * row
    gate_up, at_peak = 4 * rows * hidden, 2 * rows * dim  # at_peak: other bytes at forward's peak
    if recipe.saved_gate_up == "fp8" or few < rows:
        at_peak = max(gate_up, at_peak)
        gate_up = few * (2 * hidden + 1 if recipe.saved_gate_up == "fp8" else 4 * hidden)
    h, d_h = rows * (hidden + 1 if quantized else 2 * hidden), 2 * rows * hidden
    plan = 8 * rows + 4 * slots * (1 if dispatcher == "all_to_all" else top_k)
    plan += 4 * (crossing * (top_k + 1) + tokens * (ranks // layout.near)) if crossing else 0
    plan += 4 * tokens * (2 * top_k + min(top_k, ranks) * (top_k + 1)) * (dispatcher == "all_to_all")
    amax = 4 * own * (dim + hidden) * quantized
    kept = saved + gate_up + plan + amax
    folded = padded_rows(rows, own, HOPPER_BLOCK_K) if quantized else 0
    # Steps of backward, in order: (bytes still kept from forward, other bytes). The caller holds `out` throughout.
    w, d_rows, out = own * dim * hidden, 2 * rows * dim, 2 * tokens * dim
    d_gate_up = d_h if quantized else 2 * d_h  # quantized: in d_h's place
    d_y = (rows * (dim + 1), 0, folded * (dim + hidden)) if quantized else (d_rows,) * 3  # for d_h, then, for wgrad
    d_slots = slots * row if quantized and not copied else 0  # of d_out
    colwise = 2 * w * quantized  # of gate_up_proj
    swiglu = h + d_gate_up * (not quantized)
    early = into_wgrad * (few < rows and (again or not quantized))  # rows made again from x or slots, for `rest`
    rest, rowwise = 4 * (rows - few) * hidden, 2 * w * quantized * (few < rows)  # of gate_up, and its weight
    rest_in_fp8 = max((dim + 1) * quantized, (2 * hidden + 1) * (recipe.saved_gate_up == "fp8")) * (rows - few)
    # Live during the last weight gradient: dx, and its rows if an exchange may still hold them.
    late = 2 * (tokens + 2 * crossing) * dim + d_rows * (dispatcher == "all_to_all")
    operands = folded * (2 * hidden + dim)
    forward = kept + h + at_peak + 1.5 * colwise  # before out is allocated and after slots are freed
    backward = [
        (kept + early, 1.5 * colwise + rowwise + d_slots + d_y[0] + d_h),
        (kept + early, colwise + rowwise + d_slots + d_y[1] + d_h + rest + rest_in_fp8),
        (kept + early, colwise + d_slots + d_y[1] + d_h + rest + swiglu),
        # Then down_proj's gradient, dx's rows, the gradient of gate_up_proj.
        (saved + early + plan, colwise + d_slots + d_y[2] + d_gate_up + max(h, 2 * w) + h * (not quantized)),
        (saved + early + plan, 2 * w + colwise + d_gate_up + d_rows),
        (into_wgrad + plan, 2 * w + late + operands + d_gate_up),
        (plan if quantized else into_wgrad + plan, 6 * w + late + operands + d_gate_up * (not quantized)),
    ]
    if dispatcher == "all_to_all":  # rows gathered, joined, received and split
        backward.append((saved + plan, d_gate_up + d_rows + 8 * pairs * dim + 2 * w))
    called = max(forward, *(out + left + besides for left, besides in backward))
    buffer = Buffer(layout.near if crossing else ranks, crossing or tokens, top_k, round_up(2 * dim, 16)).nbytes
    return Memory(kept, called - kept, 2 * buffer * copied)


def estimate(config: Config) -> Report:
    """Estimate the config's model. Raises ConfigError for a model or rates that cannot be used."""
    begin, wanted, key = time.monotonic(), config.estimate, "estimate.rates"
    try:
        rates = fit(read(wanted.rates or [str(RATES / f"{name}-h200.json") for name in ("host", "layer")]))
        key = "estimate.model"
        shape, layers = model_of(config)
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        message = f"{key}: {type(error).__name__}: {error}: wanted JSON as docs/guides/scaling.md says"
        raise ConfigError(message) from error
    layers = wanted.layers or layers
    speeds = {"NVLink GB/s": wanted.nvlink, "network GB/s": wanted.network, "GiB": wanted.memory}
    report = Report(f"mxep estimate, {wanted.nodes} x {wanted.gpus_per_node} GPUs", speeds, {"layouts": TABLE.empty()})
    found = [{"layers": layers, "shape": list(shape), **row} for row in layouts(config, rates, shape, layers)]
    for row in found:
        report.add("layouts", row)
    report.about["sentence"] = sentence(found, config)
    report.remarks = textwrap.wrap(report.about["sentence"], 80)
    report.seconds = time.monotonic() - begin
    return report


def sentence(found: list[Row], config: Config) -> str:
    """A sentence on the layout with the most tokens/s among those that fit into memory."""
    node, least = config.estimate.gpus_per_node, min(found, key=lambda row: row["GiB"])
    fit = [row for row in found if row["GiB"] <= config.estimate.memory]
    best = max(fit, key=lambda row: row["ktok/s"]) if fit else least
    where = "inside a node" if best["EP"] <= node else f"over {best['EP'] // node} nodes"
    copies = node * config.estimate.nodes // best["EP"]
    gib = f"{best['GiB']:.1f} GiB" if best["GiB"] >= 0.1 else f"{math.ceil(best['GiB'] * 1024)} MiB"
    said = (
        f"EP {best['EP']} {where}, {copies} {'copy' if copies == 1 else 'copies'}{' sharded by FSDP2' * best['fsdp']}"
    )
    said += f", {'fits with' if fit else 'takes'} {gib} ({best['layout']}, {best['ktok/s']:.0f} ktok/s)"
    cure = "take more GPUs, or fewer tokens a rank"
    return said if fit else f"Nothing fits in {config.estimate.memory:g} GiB; the least is {said}: {cure}"


def model_of(config: Config) -> tuple[Shape, int]:
    """Shape and number of MoE layers, from a config.json of transformers or its folder; without one, from `model`."""
    tokens, model = config.estimate.tokens, config.model
    if config.estimate.model is None:
        return Shape(tokens, model.dim, model.hidden_dim, model.experts, model.top_k), model.layers
    file = Path(config.estimate.model)
    found = json.loads((file / "config.json" if file.is_dir() else file).read_text())
    found = found.get("text_config") or found
    sizes = sizes_of(found)
    if missing := [key for key in ("dim", "layers", "experts", "top_k", "hidden_dim") if key not in sizes]:
        names = " or ".join(SIZE_NAMES[missing[0]])
        raise ConfigError(f"estimate.model: {file} has no {names}: wanted one of an MoE model")
    shape = Shape(tokens, sizes["dim"], sizes["hidden_dim"], sizes["experts"], sizes["top_k"])
    return shape, moe_layers(found, sizes["layers"])


def moe_layers(found: Mapping[str, Any], layers: int) -> int:
    """How many of ``layers`` layers have experts."""
    every = found.get("decoder_sparse_step") or found.get("interleave_moe_layer_step") or 1
    dense = {*range(found.get("first_k_dense_replace") or 0), *(found.get("mlp_only_layers") or ())}
    sparse = [i for i in range(layers) if i not in dense and not (i + 1) % every]
    return len(found.get("moe_layers") or sparse)


def layouts(config: Config, rates: Rates, shape: Shape, layers: int) -> Iterator[Row]:
    """Yield rows of all layouts. The best one of each recipe is marked."""
    wanted = config.estimate
    node, world = wanted.gpus_per_node, wanted.gpus_per_node * wanted.nodes
    sizes = [ep for ep in range(1, min(world, MOST_RANKS) + 1) if not (world % ep or shape.experts % ep)]
    bounds = make_capacity(config), node, config.dispatcher.nodes_per_token
    for recipe in wanted.recipes:
        found, (base, _, change) = [], recipe.partition("_")
        for ep in (ep for ep in sizes if not (node % ep if ep <= node else ep % node)):
            for kind in ("symmetric" if ep <= node else "hierarchical", "all_to_all") if ep > 1 else ("local",):
                what = ", ".join(filter(None, (f"{base}/{kind}", change)))
                found.append(_row(config, rates, Layout(shape, ep, what, *bounds), layers))
        if fit := [row for row in found if row["GiB"] <= wanted.memory]:
            best = max(fit, key=lambda row: row["ktok/s"])
            best |= {"best": True, "note": f"best {best['note']}".strip()}
        yield from found


def _row(config: Config, rates: Rates, layout: Layout, layers: int, *, fsdp: bool = False) -> Row:
    """The row of a layout. fsdp: shard weights, gradients and optimizer over copies of experts."""
    wanted, shape, ep, dispatcher = config.estimate, layout.shape, layout.ranks, layout.case.dispatcher
    node, world = wanted.gpus_per_node, wanted.gpus_per_node * wanted.nodes
    stages = rates.stages(layout, wanted.nvlink, wanted.network)
    ms = sum(stages.values()) / 1e3
    weights = 3 * shape.experts // ep * shape.dim * shape.hidden
    replicas, near = world // ep, max(1, node // ep)
    once = 2 * weights * (replicas - 1) / replicas  # bytes that a rank sends in a gather or a scatter, bf16
    ring = once * ((2 * wanted.micro_batches + 1) if fsdp else 2)
    lanes = [ring / wanted.nvlink if near > 1 else 0.0, ring / near / wanted.network if replicas > near else 0.0]
    grad_ms = rates.us[BASELINE, "NCCL"] * WIRE * max(lanes) / 1e3 / wanted.micro_batches
    layer, parameters = memory(layout), {"weights": 2, "gradients": 2, "optimizer": wanted.optimizer_bytes}
    sizes = {name: float(layers * weights * size) / (replicas if fsdp else 1) for name, size in parameters.items()}
    sizes |= {"kept": layers * layer.kept, "work": layer.work}
    sizes |= {"gathered": 6.0 * weights} if fsdp else {}  # two layers' weights and the gradients of one are whole
    sizes |= {"buffers": layer.buffers}
    gib = sum(sizes.values()) / GIB
    if replicas > 1 and not fsdp and (wanted.fsdp or (wanted.fsdp is None and gib > wanted.memory)):
        return _row(config, rates, layout, layers, fsdp=True)
    few_rows = rows_per_expert(shape.tokens, shape.top_k, ep, shape.experts) < MEASURED_ROWS
    unlike = ep > MEASURED_RANKS or few_rows or dispatcher != "symmetric" or layout.case.recipe == "fp8"
    row = {"layout": f"{layout.what} {ep}", "recipe": layout.case.whole_recipe, "dispatcher": dispatcher, "EP": ep}
    row |= {name: sent / 1e6 for name, sent in zip(("NVL MB", "net MB"), layout.wire)}
    row |= {"ms": ms, "grad ms": grad_ms, "GiB": gib, "fsdp": fsdp}
    return row | {
        "ktok/s": shape.tokens * world / layers / max(ms, grad_ms),
        "note": " ".join(filter(None, ["fsdp" * fsdp, "over" * (gib > wanted.memory), "~" * unlike])),
        "stages": stages,
        "memory": {name: size / GIB for name, size in sizes.items()},
    }
