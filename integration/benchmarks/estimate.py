"""task=estimate: what a stack of MoE layers would take on machines that nobody has here. Needs no GPU.

    layouts   recipe x dispatcher x EP: a step's ms of one layer, wire bytes, memory of a rank, tokens/s of the stack
    stages, memory   of each recipe's best layout: most tokens/s of those that have room
    time_errors, memory_errors   every measured row (model, GPUs) beside its estimate; times by factors that were
              fitted on the other models

Costs are of `estimate_costs`. Besides:

    gradients   of experts are reduced over their copies, in a ring, beside micro-batches: the longer counts
    FSDP        weights, gradients and the optimizer over copies of experts. Weights are gathered for forward and again
                for backward of each micro-batch, a layer beside the next one's; gradients are scattered once a step
    pipeline    S stages of M micro-batches take (M + S - 1) / M times as long as one; the first keeps min(S, M) of them
    memory      weights and gradients in bf16, the optimizer, what backward keeps of each layer, what one layer needs
                besides, and exchange buffers, which all share. Nothing but experts, no library's
    over        more than a rank may take: never the best
    ~           no measurement covers it: the letters are in docs/guides/scaling.md. j, a part of the job's
                ranks where NVSHMEM takes all, is there to compare with, never the best
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxep.comms import Capacity
from mxep.ep.moe import rows_per_expert
from mxep.integration.config import ConfigError
from mxep.integration.model import make_capacity
from mxep.integration.report import Report, Row, Section
from mxep.integration.schema import CASES, ESTIMATES, KEPT_IN_FP8, SIZE_NAMES, Config, moe_layers, sizes_of

from .estimate_costs import MOST_RANKS, Layout, Rates, fit, memory, read
from .layer_cases import BASELINE, WIRE, Shape

GIB = 1 << 30
RATES = Path(__file__).parents[2] / "docs" / "results"
BOUNDS = ("worst_case", "exact")  # capacities that a case of bench=layer names
MEASURED_RANKS, MEASURED_ROWS = 4, 2048  # most ranks, fewest rows an expert, of what was fitted
_OFF = {"off": "+.1%"}
_SECTIONS = (
    Section(
        "ms and MB sent of a layer by layout and EP; ~: extrapolated (docs/guides/scaling.md)",
        ("layout",),
        {"ms": ".2f", "NVL MB": ".0f", "net MB": ".0f", "GiB": ".0f", "ktok/s": ".0f"},
    ),
    Section("best layouts: us of a layer's step", ("layout", "stage"), {"us": ".0f", "of step": ".0%"}),
    Section("best layouts: GiB of a rank", ("layout", "what"), {"GiB": ".2f"}),
    Section(
        "time of rows, by factors fitted on the other models", ("model", "what"), _OFF | {"ms": ".2f", "est.": ".2f"}
    ),
    Section("memory of rows in the allocator", ("model", "what"), _OFF | {"GiB": ".2f", "est.": ".2f"}),
)
SECTIONS = dict(zip(ESTIMATES, _SECTIONS))


def estimate(config: Config) -> Report:
    """What `config.estimate` names. ConfigError for a model or rates that cannot be used."""
    begin, wanted = time.monotonic(), config.estimate
    with _json_of("estimate.rates"):
        rows = read(wanted.rates or [str(RATES / f"{name}-h200.json") for name in ("eager", "host", "layer")])
        rates = fit(rows)
    with _json_of("estimate.model"):
        shape, layers = model_of(config)
    if wanted.layers is None and wanted.pipeline_stages > layers:
        raise ConfigError(
            f"estimate.pipeline_stages: got {wanted.pipeline_stages}, wanted at most {layers}, the model's MoE layers"
        )
    layers = wanted.layers or math.ceil(layers / wanted.pipeline_stages)
    speeds = {"NVLink GB/s": wanted.nvlink, "network GB/s": wanted.network, "GiB": wanted.memory}
    sections = {name: SECTIONS[name].empty() for name in wanted.sections or SECTIONS}
    report = Report(f"mxep estimate, {wanted.nodes} x {wanted.gpus_per_node} GPUs", speeds, sections)
    found = [{"layers": layers, "shape": list(shape), **row} for row in layouts(config, rates, shape, layers)]
    for section in report.sections:
        made = errors(section, rows) if section.endswith("errors") else _of_best(section, found)
        for row in found if section == "layouts" else made:
            report.add(section, row)
    report.about["sentence"] = sentence(found, config)
    report.remarks = textwrap.wrap(report.about["sentence"], 80)
    report.seconds = time.monotonic() - begin
    return report


def sentence(found: list[Row], config: Config) -> str:
    """The layout with most tokens/s of those that have room, and the next one."""
    can_run = sorted((row for row in found if row["dispatcher"] != "nvshmem"), key=lambda row: -row["ktok/s"])
    fit = [row for row in can_run if "best" in row or row["GiB"] <= config.estimate.memory]
    if not fit:
        least = min(can_run, key=lambda row: row["GiB"])
        more = "more GPUs, pipeline stages, or fewer tokens a rank"
        return f"Nothing fits in {config.estimate.memory:g} GiB; the least is {_said(least, config)}: take {more}"
    best = fit[0]
    others = [row for row in fit if row["recipe"] == best["recipe"] and row is not best]
    others = others or fit[1:]
    after = f"; next best: {_said(others[0], config)}" if others else "; no other layout fits"
    return f"{_said(best, config)}{after}"


def _said(row: Row, config: Config) -> str:
    wanted, ep = config.estimate, row["EP"]
    where = "inside a node" if ep <= wanted.gpus_per_node else f"over {ep // wanted.gpus_per_node} nodes"
    copies = wanted.gpus_per_node * wanted.nodes // wanted.pipeline_stages // ep
    what = f"{copies} {'copy' if copies == 1 else 'copies'}{' sharded by FSDP2' * row['fsdp']}"
    stages = f", {wanted.pipeline_stages} pipeline stages" * (wanted.pipeline_stages > 1)
    fits = "fits with" if row["GiB"] <= wanted.memory else "takes"
    kind = f"{row['recipe']}/{row['dispatcher']}"
    return f"EP {ep} {where}, {what}{stages}, {fits} {_room(row['GiB'])} ({kind}, {row['ktok/s']:.0f} ktok/s)"


def _room(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{math.ceil(gib * 1024)} MiB"


@contextlib.contextmanager
def _json_of(key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        message = f"{key}: {type(error).__name__}: {error}: wanted JSON as docs/guides/scaling.md says"
        raise ConfigError(message) from error


def model_of(config: Config) -> tuple[Shape, int]:
    """Shape and number of MoE layers: of a config.json of transformers, or its folder, or without one of `model`."""
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


def layouts(config: Config, rates: Rates, shape: Shape, layers: int) -> Iterator[Row]:
    """Rows of all layouts, the best of each recipe marked."""
    wanted = config.estimate
    node, world = wanted.gpus_per_node, wanted.gpus_per_node * wanted.nodes // wanted.pipeline_stages
    sizes = [ep for ep in range(1, min(world, MOST_RANKS) + 1) if not (world % ep or shape.experts % ep)]
    bounds = make_capacity(config), wanted.imbalance, node, config.dispatcher.nodes_per_token
    for recipe in wanted.recipes:
        found, (base, _, change) = [], recipe.partition("_")
        for ep in (ep for ep in sizes if not (node % ep if ep <= node else ep % node)):
            kinds = ("symmetric" if ep <= node else "hierarchical", "all_to_all", "nvshmem") if ep > 1 else ("local",)
            found += [
                _row(
                    config,
                    rates,
                    Layout(shape, ep, ", ".join(filter(None, (f"{base}/{kind}", change))), *bounds),
                    layers,
                )
                for kind in kinds
            ]
        can_run = [row for row in found if row["dispatcher"] != "nvshmem"]  # whose times are lower bounds
        if fit := [row for row in can_run if row["GiB"] <= wanted.memory]:
            best = max(fit, key=lambda row: row["ktok/s"])
            best |= {"best": True, "note": f"best {best['note']}".strip()}
        yield from found


def _row(config: Config, rates: Rates, layout: Layout, layers: int) -> Row:
    """Of a layout whose states are whole on each rank, or sharded over its copies, as `estimate.fsdp` says."""
    wanted = config.estimate
    whole = _row_of(config, rates, layout, layers, fsdp=False)
    copies = wanted.gpus_per_node * wanted.nodes // wanted.pipeline_stages // layout.ranks
    if copies == 1 or wanted.fsdp is False or (wanted.fsdp is None and whole["GiB"] <= wanted.memory):
        return whole
    return _row_of(config, rates, layout, layers, fsdp=True)


def _row_of(config: Config, rates: Rates, layout: Layout, layers: int, *, fsdp: bool) -> Row:
    wanted, shape, ep, dispatcher = config.estimate, layout.shape, layout.ranks, layout.case.dispatcher
    node, world = wanted.gpus_per_node, wanted.gpus_per_node * wanted.nodes // wanted.pipeline_stages
    stages = rates.stages(layout, wanted.nvlink, wanted.network)
    ms = sum(stages.values()) / 1e3
    weights = 3 * shape.experts // ep * shape.dim * shape.hidden
    replicas, near = world // ep, max(1, node // ep)
    once = 2 * weights * (replicas - 1) / replicas  # bytes of a gather, or a scatter, in bf16 that a rank sends
    ring = once * ((2 * wanted.micro_batches + 1) if fsdp else 2)
    lanes = [ring / wanted.nvlink if near > 1 else 0.0, ring / near / wanted.network if replicas > near else 0.0]
    grad_ms = rates.us[BASELINE, "NCCL"][0] * WIRE * max(lanes) / 1e3 / wanted.micro_batches
    of_layer = memory(layout)
    parameters = {"weights": 2, "gradients": 2, "optimizer": wanted.optimizer_bytes}
    shards, gathered = (replicas, 3) if fsdp else (1, 0)  # two layers' weights and the gradients of one are whole
    sizes = {name: float(layers * weights * size) / shards for name, size in parameters.items()}
    in_flight = min(wanted.pipeline_stages, wanted.micro_batches)
    sizes |= {"kept": in_flight * layers * of_layer.kept, "work": of_layer.work}
    sizes |= {"gathered": float(gathered * 2 * weights)} if fsdp else {}
    sizes |= {"buffers": of_layer.buffers}
    gib = sum(sizes.values()) / GIB
    few_rows = rows_per_expert(shape.tokens, shape.top_k, ep, shape.experts) < MEASURED_ROWS
    marks = {"a": dispatcher == "all_to_all", "e": ep > MEASURED_RANKS, "n": ep > node}
    marks |= {"f": layout.case.recipe == "fp8", "r": few_rows}
    marks |= {"g": grad_ms > ms, "h": dispatcher == "hierarchical", "p": dispatcher == "nvshmem"}
    marks["j"] = dispatcher == "nvshmem" and ep < world
    note = "".join(mark for mark, holds in marks.items() if holds)
    row = {"layout": f"{layout.what} {ep}", "recipe": layout.case.whole_recipe, "dispatcher": dispatcher, "EP": ep}
    row |= zip(("NVL MB", "net MB"), (sum(leg) / 1e6 for leg in zip(*layout.wire)))
    row |= {"ms": ms, "grad ms": grad_ms, "GiB": gib, "fsdp": fsdp}
    waiting = (wanted.micro_batches + wanted.pipeline_stages - 1) / wanted.micro_batches
    return row | {
        "ktok/s": shape.tokens * world / layers / max(ms, grad_ms) / waiting,
        "note": " ".join(filter(None, ["fsdp" * fsdp, "over" * (gib > wanted.memory), note and f"~{note}"])),
        "stages": stages,
        "memory": {name: size / GIB for name, size in sizes.items()},
    }


def _of_best(section: str, found: list[Row]) -> Iterator[Row]:
    for row in found:
        if row.get("best"):
            labels = {"layout": row["layout"]}
            for name, value in row[section].items():
                figures = {"us": value, "of step": value / 1e3 / row["ms"]} if section == "stages" else {"GiB": value}
                yield labels | {"stage" if section == "stages" else "what": name} | figures


def errors(section: str, rows: list[Row]) -> Iterator[Row]:
    """Of all rows of sections layer, skew, eager and memory that there is a formula for."""
    fitted: dict[str, Rates] = {}
    for row in rows:
        what, _, suffix = (name := row.get("what", "")).partition(", ")
        capacity, skewed = row.get("capacity"), bool(row.get("skew"))
        formula = (what in CASES and suffix in ("", "kept", KEPT_IN_FP8, *BOUNDS)) or name == BASELINE
        if row["section"] not in ("layer", "skew", "eager", "memory") or not formula or (skewed and not capacity):
            continue
        model, ranks, quantized_once = row["model"], row["ranks"], suffix == "kept"
        fits = Capacity(suffix) if suffix in BOUNDS else Capacity.factor(capacity or 1.0)
        imbalance = capacity if skewed and capacity else 1.0
        layout = dataclasses.replace(Layout.of(row), capacity=fits, imbalance=imbalance)
        notes = ["skew"] * skewed + [f"T {layout.shape.tokens}"] * (row["section"] == "eager")
        out: Row = {"model": f"{model}, {ranks}", "what": name, "note": " ".join(notes)}
        out |= {"section": row["section"], "shape": list(layout.shape), "commit": row["commit"]}
        if section == "time_errors" and "ms" in row:
            if model not in fitted:
                fitted[model] = fit(rows, without=model)
            ms = sum(fitted[model].stages(layout).values()) / 1e3
            yield out | {"ms": row["ms"], "est.": ms, "off": ms / row["ms"] - 1}
        unlike = quantized_once or name == BASELINE or not row.get("graphs GiB", 0) < 0.01  # graphs had a pool once
        if section == "memory_errors" and "peak GiB" in row and not unlike:
            found = memory(layout)
            here = found.buffers if ranks == 1 else 0.0  # which are no peers' then, and torch's
            wanted = (found.kept + found.work + here) / GIB
            gib = row["peak GiB"] - row["outside GiB"]
            yield out | {"GiB": gib, "est.": wanted, "off": wanted / gib - 1}


def draw(results: dict[str, Any], file: Path) -> None:
    """Tokens/s over EP, a line for each recipe and dispatcher; hollow where memory is short."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="EP", ylabel="thousand tokens/s", title=results["what"])
    rows = results["sections"]["layouts"]
    for name in dict.fromkeys((row["recipe"], row["dispatcher"]) for row in rows):
        line = [row for row in rows if (row["recipe"], row["dispatcher"]) == name]
        points = [row["EP"] for row in line], [row["ktok/s"] for row in line]
        (drawn,) = axes.plot(*points, label="/".join(name), marker="o")
        over = [i for i, row in enumerate(line) if "over" in row["note"]]
        axes.plot(*points, "o", markevery=over, color="white", mec=drawn.get_color())
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(file)
