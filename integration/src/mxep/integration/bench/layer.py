"""bench=layer: the layer of mxep.ep on all ranks, forward and backward, beside the standard bf16 one, in one run.

    layer    every case of layer_cases, balanced routing
    stages   kernels of ours and of the standard layer, by stage (layer_stages)
    skew     some cases, where expert i is as likely as 1 / (i + 1)
    memory   peak memory of ours by capacity; in use: over the standard layer's

ms, fwd ms     forward and backward; forward alone: medians of sustained stretches, the slowest rank's (layer_timing)
x bf16         how many times as fast as the standard bf16 layer; in JSON also x fwd, forward alone
TF             flops of valid rows over ms (layer_counts)
peak GiB       most memory of a step above operands and parameters, in the allocator and outside of it
floor ms       least time, of which the formula is in layer_counts; of floor: floor over ms
dB             of the output and the gradients against the standard bf16 layer's, the least of all tensors and ranks,
               checked on what is timed and before that; a case below its bound fails

Each row is a JSON line as soon as it is there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mxep.ep import CASES
from mxep.quant import BLOCK

from ..config import ConfigError
from ..rank import Rank
from ..reference import Results as Tensors
from ..schema import BenchConfig
from . import layer_stages as stages
from .comms_timing import FailedTogether, gathered, together
from .gemm import ceilings
from .layer_cases import CASE_NAMES, MX, STANDARD, SUFFIXES, Case, Layer, Problem, Shape
from .layer_counts import floor_ms, useful_flop
from .layer_timing import Memory, Run, Sustained, free_memory, prepare, round_robin
from .layer_verify import compared
from .tables import Results, Row, Section

SKEWS = {"layer": 0.0, "stages": 0.0, "memory": 0.0, "skew": 1.0}
"""Section -> exponent of the experts' popularity; also all sections there are."""
TIMED = ("layer", "skew")
CASES_OF = {
    "layer": CASE_NAMES,
    "stages": (MX, STANDARD),
    "memory": (STANDARD, MX, f"{MX}, worst_case", f"{MX}, exact"),
    "skew": (STANDARD, MX, "bf16/symmetric"),
}
"""Section -> its cases where the config names none."""
FORWARD_SECONDS = 0.5  # of a stretch of forward alone


def check(config: BenchConfig) -> None:
    """ConfigError for devices, sections, cases, models, shapes or folders that there are not."""
    if config.device not in ("cuda", "cpu"):
        raise ConfigError(f"bench.device: got {config.device!r}, wanted cuda or cpu")
    names = (STANDARD, "standard fp8", *(f"{case}{suffix}" for case in CASES for suffix in SUFFIXES))
    known = {"sections": tuple(SKEWS), "models": tuple(config.shapes), "cases": names}
    for key, wanted in known.items():
        for name in getattr(config, key) or ():
            if name not in wanted:
                raise ConfigError(f"bench.{key}: got {name!r}, wanted some of {'; '.join(wanted)}")
    for model, shapes in config.shapes.items():
        for shape in shapes:
            fits = len(shape) == 5 and min(shape) >= 1 and not any(size % BLOCK for size in shape[1:3])
            if not fits or shape[4] > shape[3]:
                wanted_sizes = f"tokens, dim and hidden dim in {BLOCK}s, experts and top-k of them"
                raise ConfigError(f"bench.shapes.{model}: got {list(shape)}, wanted {wanted_sizes}")
    if config.picture is not None and not Path(config.picture).absolute().parent.is_dir():
        raise ConfigError(f"bench.picture: no such folder: {Path(config.picture).parent}")
    if config.picture is not None and "stages" not in (config.sections or SKEWS):
        raise ConfigError("bench.picture: wants section stages, which bench.sections leaves out")


def measure_on_rank(rank: Rank, config: BenchConfig, seed: int, say: Callable[[str], None]) -> Results:
    """All sections, model by model; `say` gets each row when it is there. Collective, the same on all ranks."""
    bench = Bench(rank, seed, config.cases, _ceilings(rank))
    sections = {name: _section(name) for name in config.sections or SKEWS}
    for model in config.models or config.shapes:
        for shape in (Shape(*sizes) for sizes in config.shapes[model]):
            if rank.device.type == "cuda":
                # The standard layer is compiled for the widths of a shape; another's would make them variables.
                importlib.import_module("torch._dynamo").reset()
            for skew in dict.fromkeys(SKEWS[name] for name in sections):
                names = [name for name in sections if SKEWS[name] == skew]
                about = {"model": model, "shape": list(shape), "ranks": rank.world_size, "skew": skew}
                for name, row in bench.rows(names, shape, skew):
                    row = {key: _short(value) for key, value in {**about, **row}.items()}
                    sections[name].rows.append(row)
                    say(json.dumps({"section": name, **row}))
    return Results(f"mxep.ep, {rank.world_size} ranks", bench.ceilings, sections)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _ceilings(rank: Rank) -> dict[str, float]:
    """The least of all ranks, which measure at the same time, as they work."""
    everyone = gathered(together(lambda: ceilings(rank.device)))
    return {name: min(theirs[name] for theirs in everyone) for name in everyone[0]}


@dataclass
class Ready:
    """A case at a shape, verified, or why it is not. row: what is known of it before it is timed."""

    case: Case
    row: Row = field(default_factory=dict)
    layer: Layer | None = None
    step: Run | None = None
    forward: Run | None = None


@dataclass(frozen=True)
class Bench:
    """What a visit to a shape needs. cases: names, None for those of the sections. ceilings: as gemm has them."""

    rank: Rank
    seed: int
    cases: list[str] | None
    ceilings: dict[str, float]

    def rows(self, sections: list[str], shape: Shape, skew: float) -> Iterator[tuple[str, Row]]:
        """(section, row) of all sections of one routing: layers are made once. Collective."""
        if shape.experts % self.rank.world_size:
            note = {"what": "all", "note": f"{shape.experts} experts are not the same number on each rank"}
            yield from ((name, dict(note)) for name in sections)
            return
        with ExitStack() as open_layers:
            open_layers.callback(free_memory, self.rank.device)
            try:
                yield from self._visit(sections, shape, skew, open_layers)
            except FailedTogether as error:
                yield from ((name, {"what": "all", "error": str(error)}) for name in sections)

    def _visit(
        self, sections: list[str], shape: Shape, skew: float, open_layers: ExitStack
    ) -> Iterator[tuple[str, Row]]:
        problem = together(lambda: Problem(self.rank, shape, skew, self.seed))
        pool = Pool(self.rank.device)
        reference = None
        ready: dict[str, Ready] = {}
        names = {section: self._names(section) for section in sections}
        for name in dict.fromkeys((STANDARD, *(name for section in sections for name in names[section]))):
            wanted = {section for section in sections if name in names[section]}
            ready[name] = made = self._prepare(Case.named(name), problem, reference, pool, open_layers, wanted)
            if name == STANDARD:
                if made.step is None:
                    raise FailedTogether(f"{name}: {made.row.get('error')}")
                reference, made.step.result = made.step.result, None
        reference = None
        free_memory(self.rank.device)
        for section in sections:
            of_section = {name: ready[name] for name in names[section]}
            if section in TIMED:
                found = self._timed(problem, of_section)
            elif section == "memory":
                found = self._memory(of_section)
            else:
                found = (row for each in of_section.values() for row in self._stages(problem, each))
            yield from ((section, row) for row in found)

    def _names(self, section: str) -> tuple[str, ...]:
        """The standard layer first, which others are compared with, but where it stands beside ours."""
        if section == "stages":
            return tuple(name for name in CASES_OF[section] if not self.cases or name in (STANDARD, *self.cases))
        return tuple(dict.fromkeys((STANDARD, *(self.cases or CASES_OF[section]))))

    def _prepare(
        self,
        case: Case,
        problem: Problem,
        reference: Tensors | None,
        pool: Pool,
        open_layers: ExitStack,
        sections: set[str],
    ) -> Ready:
        """Made, its memory measured, in a graph, compared, as its sections want it. Collective."""
        ready = Ready(case, {"what": case.name})
        if not case.standard and not case.name.endswith(("worst_case", "exact")):
            ready.row["capacity"] = problem.capacity
        device = problem.device
        try:
            layer, missing = together(lambda: _made(case, problem))
            if layer is None:
                ready.row["note"] = missing
                return ready
            open_layers.callback(layer.close)
            memory = Memory(device)
            together(lambda: memory.measure(layer.step))
            if memory.peak is not None and memory.outside is not None:
                ready.row |= {"peak GiB": memory.peak + memory.outside, "outside GiB": memory.outside}
            if sections == {"memory"} and reference is not None:
                return ready
            options = {"in_graph": layer.in_graph, "pool": pool.handle}
            step = prepare(layer.step, layer, device, **options)
            if step.note is not None:
                ready.row["note"] = step.note
                pool.renew()
            if reference is not None:
                snr = compared(reference, step.result)
                ready.row |= {"snr dB": snr, "dB": min(snr.values())}
                if not min(snr.values()) >= case.least_snr:
                    ready.row["error"] = f"wanted {case.least_snr:g} dB at least against {STANDARD}, got {snr}"
                    return ready
            if reference is not None:
                step.result = None
            if sections & set(TIMED):
                options = {"in_graph": layer.in_graph and step.note is None, "pool": pool.handle}
                ready.forward = prepare(layer.forward, layer, device, seconds=FORWARD_SECONDS, **options)
                ready.forward.result = None
            ready.layer, ready.step = layer, step
        except FailedTogether as error:
            ready.row["error" if "NotImplementedError" not in str(error) else "note"] = str(error)
        return ready

    def _timed(self, problem: Problem, ready: Mapping[str, Ready]) -> Iterator[Row]:
        runs: dict[str, Run] = {}
        for name, each in ready.items():
            runs |= {key: run for key, run in ((name, each.step), (f"{name} fwd", each.forward)) if run is not None}
        timings = round_robin(runs, self.rank.device)
        rows = {name: self._figures(problem, each, timings) for name, each in ready.items()}
        for row in rows.values():
            for column, ratio in (("ms", "x bf16"), ("fwd ms", "x fwd")):
                if column in row and column in rows[STANDARD]:
                    row[ratio] = rows[STANDARD][column] / row[column]
            yield row

    def _memory(self, ready: Mapping[str, Ready]) -> Iterator[Row]:
        base = ready[STANDARD].row.get("peak GiB")
        for each in ready.values():
            keys = ("what", "capacity", "peak GiB", "outside GiB", "note", "error")
            row = {key: each.row[key] for key in keys if key in each.row}
            if base and "peak GiB" in row:
                row["in use"] = row["peak GiB"] / base
            elif "error" not in row and "peak GiB" not in row:
                row.setdefault("note", "memory is measured on GPUs")
            yield row

    def _figures(self, p: Problem, ready: Ready, timings: Mapping[str, Sustained | FailedTogether]) -> Row:
        row, layer = dict(ready.row), ready.layer
        step, forward = timings.get(ready.case.name), timings.get(f"{ready.case.name} fwd")
        if isinstance(forward, FailedTogether):
            row["error"] = f"forward: {forward}"
        if isinstance(step, FailedTogether):
            row["error"] = str(step)
        if layer is None or not isinstance(step, Sustained):
            return row
        row["ms"] = step.ms / layer.micro_batches
        if isinstance(forward, Sustained):
            row["fwd ms"] = forward.ms
        row |= {"MHz": step.mhz, "W": step.watts}
        row["TF"] = useful_flop(p) / row["ms"] / 1e9
        if (floor := floor_ms(p, ready.case, self.ceilings)) is not None:
            row |= {"floor ms": floor, "of floor": floor / row["ms"]}
        return row

    def _stages(self, problem: Problem, ready: Ready) -> Iterator[Row]:
        case, run = ready.case, ready.step
        if run is None:
            kept: Row = {key: ready.row[key] for key in ("note", "error") if key in ready.row}
            yield {"what": case.name, "stage": "all", **kept}
            return
        call = run.call
        try:
            events = together(lambda: stages.profiled(call, problem.device))
            seen = gathered(together(lambda: stages.breakdown(events, stages.STEPS)))
        except FailedTogether as error:
            yield {"what": case.name, "stage": "all", "error": str(error)}
            return
        for row in stages.rows(problem, case, seen, self.ceilings):
            yield {"what": case.name, **row}


class Pool:
    """Memory that graphs of one shape share, as they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.renew()

    def renew(self) -> None:
        """After a capture that failed in it."""
        self.handle: Any = torch.cuda.graph_pool_handle() if self.cuda else None


def _made(case: Case, problem: Problem) -> tuple[Layer | None, str | None]:
    """The layer, or why there cannot be any."""
    try:
        return case.make(problem, case.name), None
    except (ImportError, NotImplementedError) as error:
        return None, str(error)


def _section(name: str) -> Section:
    if name == "stages":
        title = "stages: kernels of a step by stage; share: of what bounds the stage"
        figures = {"us": ".0f", "of sum": ".0%", "share": ".2f", "left us": ".0f"}
        return Section(title, ("model", "what", "stage"), figures)
    if name == "memory":
        title = "memory: above operands and parameters, peers' memory included; in use: over standard bf16"
        return Section(title, ("model", "what"), {"peak GiB": ".2f", "outside GiB": ".2f", "in use": ".2f"})
    title = f"{name}; x: how many times as fast as {STANDARD}"
    figures = {"fwd ms": ".2f", "ms": ".2f", "x bf16": ".2f", "TF": ".0f", "peak GiB": ".2f"}
    figures |= {"floor ms": ".2f", "of floor": ".2f", "MHz": ".0f", "W": ".0f", "dB": ".1f"}
    return Section(title, ("model", "what"), figures)
