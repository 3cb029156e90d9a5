"""bench=layer: mxep.ep's layer on all ranks, forward and backward, compared with the baseline in bf16, in one run.

- layer: Balanced routing. mxep's steps are replays of one CUDA graph.
- eager: Steps launched by the host, as in a training loop.
- stages: Kernels by stage, as the profiler sees them in a few steps. Clocks are then higher than sustained ones, so
  compare shares, not sums.
- skew: Expert i has probability proportional to 1 / (i + 1).
- memory: Peak memory, and memory kept for backward, by capacity.
- host: Host time of calls back to back, at a small shape named "host".

ms, fwd ms     forward and backward; forward alone. Medians over sustained stretches, of the slowest rank
x bf16         how many times as fast as the baseline in bf16
TF             flops of valid rows / ms
floor ms       least possible time (layer_cases). of floor: floor ms / ms
dB             SNR of output and gradients against the baseline's, the least over tensors and ranks. A case below its
               bound fails
peak GiB       most memory of a step, without operands and parameters, in and outside of torch's allocator
outside GiB    the part outside: peers' memory, libraries' buffers
kept GiB       in the allocator between forward and backward, without operands, parameters and the output
launches       kernels, copies and fills of forward and backward

us             time of a stage's kernels in one step, mean over ranks
sum            time of all stages. busy: while any kernel runs. whole: from the first kernel's start to the last's end
bytes, flop    least work of the stage (layer_cases.work); wire bytes if they bound it
share          the stage's rate / its ceiling: a copy, a dense GEMM, or 450 GB/s
left us        time that the stage would save at its ceiling
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mxep.integration.mesh import all_gather
from mxep.integration.metrics import snr
from mxep.integration.report import Row
from mxep.integration.verify import Results as Tensors

from .gemm import ceilings
from .layer_cases import BASELINE, BASELINES, MX, NAMES, Case, Layer, Problem, Shape, floor_ms, flop, make, rate, work
from .script import (
    ANY,
    GIB,
    Bench,
    FailedOnRanks,
    busy,
    free_memory,
    from_all_ranks,
    models,
    on_all_ranks,
    synchronize,
    table,
)
from .timer import Alternative, Call, Run, Timer, failure

CASES_OF = {
    "layer": (*BASELINES, MX, f"{MX}, kept", "fp8/symmetric", "bf16/symmetric"),
    "eager": (BASELINE, MX, "fp8/symmetric", "bf16/symmetric"),
    "stages": (BASELINE, MX),
    "memory": (BASELINE, MX, f"{MX}, worst_case", f"{MX}, recompute"),
    "skew": (BASELINE, MX, "bf16/symmetric"),
    "host": (BASELINE, "bf16/symmetric", "fp8/symmetric", MX, "mxfp8/all_to_all", "mxfp8/local"),
}
"""Section -> its default cases."""
HOST = "host"  # name of section host's shapes, which count a rank's experts
FORWARD_SECONDS = 0.5

CASES = NAMES
SHAPES = {ANY: (1, 32, 32, 1, 1)}
SIZES = "tokens, dim, hidden dim, experts, top-k"
TIMES = "fwd ms, ms, x bf16, TF, floor ms, of floor, dB"
SECTIONS = {
    "layer": table(f"layer; x: how many times as fast as {BASELINE}", "model, what", TIMES),
    "eager": table(f"eager; x: how many times as fast as {BASELINE}", "model, what", TIMES),
    "stages": table("stages; share: of what bounds it", "model, what, stage", "us, of sum, share, left us"),
    "memory": table("memory", "model, what", "peak GiB, outside GiB, kept GiB"),
    "skew": table(f"skew; x: how many times as fast as {BASELINE}", "model, what", TIMES),
    "host": table("host: what a call costs it, eagerly", "shape, what", "fwd ms, ms, launches"),
}


def measure(bench: Bench) -> Iterator[tuple[str, Row]]:
    """Yield (section, row), model by model. Collective, with the same rows on all ranks."""
    if bench.report.sections.keys() - {HOST}:
        # The slowest rank's. All ranks measure them at the same time, as they also compute at the same time.
        bench.ceilings.update(ceilings(Timer(bench.device, seconds=0.15, rounds=4)))
    for about, shape in models(bench, Shape):
        for name in bench.report.sections:
            if (name == HOST) == (about["model"] == HOST):
                skew = {} if name == HOST else {"skew": float(name == "skew")}
                for row in _section(bench, name, shape):
                    yield name, about | skew | row
                free_memory()


def _section(bench: Bench, section: str, shape: Shape) -> Iterator[Row]:
    names = tuple(dict.fromkeys((BASELINE, *(bench.config.cases or CASES_OF[section]))))  # compared with the first
    ranks, timer = bench.rank.world_size, Timer(bench.device, seconds=1.5, rounds=3, graph_calls=1)
    if section == HOST:
        timer = Timer(bench.device, seconds=0.0, rounds=7, host=True)
        shape = shape._replace(experts=shape.experts * ranks)
    if shape.experts % ranks:
        yield {"what": "all", "note": f"{shape.experts} experts are not the same number on each rank"}
        return
    try:
        skew = float(section == "skew")
        p = on_all_ranks(lambda: Problem(bench.rank, shape, skew, bench.seed, bench.ranks_per_node))
        with contextlib.ExitStack() as opened:
            at = At(bench, p, timer, opened, section)
            if section not in (one_by_one := {"stages": _stages, "memory": _memory}):
                yield from _timed(at, names)
                return
            for name in names:
                try:
                    with contextlib.ExitStack() as closed:  # so that shared memory counts for each layer
                        for row in one_by_one[section](replace(at, opened=closed), Case(name)):
                            yield {"what": name, **row}
                except FailedOnRanks as error:
                    yield {"what": name, **failure(error)}
    except FailedOnRanks as error:
        yield {"what": "all", **failure(error)}


@dataclass(frozen=True)
class At:
    """Inputs for measuring a section's cases. opened: closes the layers that `make` returned."""

    bench: Bench
    p: Problem
    timer: Timer
    opened: contextlib.ExitStack
    section: str

    def make(self, case: Case) -> Layer:
        """Make the case's layer. Collective. Raises FailedOnRanks."""
        layer = on_all_ranks(lambda: make(self.p, case))
        self.opened.callback(layer.close)
        return layer

    def prepare(
        self, layer: Layer, call: Call, inspect: Callable[[Tensors], None] | None = None, seconds: float | None = None
    ) -> Run:
        """Prepare a layer for timing, in a graph if possible. Collective. Raises FailedOnRanks."""
        graph = layer.in_graph and self.section != "eager"
        return self.timer.prepare(Alternative(lambda: [call], graph, seconds, layer.check, inspect))


def _timed(at: At, names: tuple[str, ...]) -> Iterator[Row]:
    rows: dict[str, Row] = {name: {"what": name} for name in names}
    layers: dict[str, Layer] = {}
    runs: dict[str, Run] = {}
    reference: list[Tensors] = []
    for name, row in rows.items():
        case = Case(name)
        try:
            layer = at.make(case)
            row |= {"capacity": at.p.capacity} if case.bounded else {}
            step = at.prepare(layer, layer.step, functools.partial(_compare, case, reference, row))
            runs |= {f"fwd {name}": at.prepare(layer, layer.forward, seconds=FORWARD_SECONDS), name: step}
            layers[name] = layer
        except FailedOnRanks as error:
            if name == BASELINE:
                raise
            row |= failure(error)
    reference.clear()
    free_memory()
    timed = at.timer.measure(runs)
    base = rows[BASELINE]
    for name, row in rows.items():
        for what, column, ratio in ((f"fwd {name}", "fwd ms", "x fwd"), (name, "ms", "x bf16")):
            found = timed.get(what, {})
            row |= {key: value for key, value in found.items() if key != "us"}
            if "us" in found:
                row[column] = found["us"] / 1e3 / (layers[name].micro_batches if column == "ms" else 1)
                row |= {ratio: base[column] / row[column]} if column in base else {}
        if "ms" in row:
            row["TF"] = flop(at.p.shape, at.p.ids.numel()) / row["ms"] / 1e9
            if (floor := floor_ms(at.p.shape, at.p.ranks, at.p.traffic, Case(name), at.bench.ceilings)) is not None:
                row |= {"floor ms": floor, "of floor": floor / row["ms"]}
            if at.section == HOST:  # after many calls: the first ones are captured
                row["launches"] = from_all_ranks(functools.partial(launches, layers[name].step, at.bench.device))[0]
        yield row


def _compare(case: Case, reference: list[Tensors], row: Row, got: Tensors) -> None:
    """Add to the row each tensor's least SNR over ranks. The first call is the baseline's, which becomes the reference.

    Raises FailedOnRanks if an SNR is below the case's bound. Collective.
    """
    if not reference:
        reference.append(got)
        return
    found = from_all_ranks(lambda: {name: snr(one, getattr(got, name)) for name, one in vars(reference[0]).items()})
    row["snr dB"] = {name: min(theirs[name] for theirs in found) for name in found[0]}
    row["dB"] = min(row["snr dB"].values())
    if not row["dB"] >= case.least_snr:
        raise FailedOnRanks(f"wanted {case.least_snr:g} dB at least against {BASELINE}, got {row['snr dB']}")


def _stages(at: At, case: Case) -> Iterator[Row]:
    step = at.prepare(layer := at.make(case), layer.step)
    seen = from_all_ranks(functools.partial(breakdown_of, step.replay, at.bench.device))
    yield from stage_rows(at.p, case, seen, at.bench.ceilings)


def _memory(at: At, case: Case) -> Iterator[Row]:
    layer = at.make(case)
    row = on_all_ranks(functools.partial(memory_of, layer.out, layer.step, at.bench.device))
    yield ({"capacity": at.p.capacity} if case.bounded else {}) | (row or {"note": "memory is measured on GPUs"})


def memory_of(forward: Callable[[], torch.Tensor], step: Call, device: torch.device) -> Row:
    """Memory of a step launched by the host, after warm-up, in GiB above the memory in use before; {} on a CPU."""
    if device.type != "cuda":
        return {}
    free_memory()
    allocated, outside = torch.cuda.memory_allocated(), _outside()
    for _ in range(4):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    added = max(0, _outside() - outside)
    peak = torch.cuda.max_memory_allocated() - allocated + added
    row: Row = {"peak GiB": peak / GIB, "outside GiB": added / GIB}
    allocated = torch.cuda.memory_allocated()
    out = forward()
    return row | {"kept GiB": (torch.cuda.memory_allocated() - allocated - out.nbytes) / GIB}


def _outside() -> int:
    """Bytes in use on the current GPU outside of torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


STEPS = 3
TOTALS = ("sum", "busy", "whole")

STAGES: tuple[tuple[str, str], ...] = (
    (r"nccl", "NCCL"),
    (r"swiglu|silu|sigmoid", "SwiGLU"),
    (r"quantize_rows_with_amax|column_amax|quantize_long|quantize_tile|quantize_2d", "quantize weights"),
    (r"dispatch_kernel|dispatch_tables|put_kernel", "dispatch"),
    (r"combine_kernel|stage_sums|sum_arrived|sum_slots", "combine"),
    (r"barrier_kernel|meet_kernel", "barriers"),
    (r"count_kernel|place_kernel|pad_index|invert_kernel", "plan"),
    (r"max_scales_kernel|split_kernel|shift_transpose", "fold for wgrad"),
    (r"fold_kernel|gather_kernel|pick_kernel", "gather + fold"),
    (r"quantize_blocks", "quantize"),
    (r"grouped_mm|gemm|cutlass|_mm\b|addmm|nvjet|xmma", "GEMMs"),
    (r"float8|fp8|scale_and_cast|rowwise|colwise", "quantize"),
    (r"memcpy|memset", "copies"),
    (r"triton_|index|sort|radix|scatter|gather|cub|searchsorted|repeat|elementwise|scan|reduce", "permute + pointwise"),
)
"""Pattern in a kernel's name (case is ignored) -> stage."""


Event = tuple[float, float, str]
"""Start and end of a kernel, in us, and its name."""


def stage_of(name: str) -> str:
    return next((stage for pattern, stage in STAGES if re.search(pattern, name, re.IGNORECASE)), "other")


def breakdown(events: Iterable[Event], steps: int = 1) -> tuple[dict[str, float], list[str]]:
    """Return (us of one step by stage and by TOTALS, names of kernels without a stage, the longest first).

    Raises ValueError without events.
    """
    us: dict[str, float] = collections.defaultdict(float)
    others: dict[str, float] = collections.defaultdict(float)
    spans = []
    for start, end, name in events:
        spans.append((start, end))
        us[stage_of(name)] += end - start
        if stage_of(name) == "other":
            others[name] += end - start
    if not spans:
        raise ValueError("the profiler saw no kernels")
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    us |= {"sum": sum(us.values()), "busy": busy(spans), "whole": whole}
    return {stage: time / steps for stage, time in us.items()}, sorted(others, key=lambda name: -others[name])


def profiled(call: Call, steps: int, device: torch.device, *activities: ProfilerActivity) -> list[Any]:
    """The profiler's events of `steps` calls. Collective if the call is."""
    call()
    synchronize()
    with profile(activities=activities, acc_events=True) as seen:
        if device.type == "cuda":
            all_gather(None)  # else the step's first barrier would count the wait for slower profilers
        for _ in range(steps):
            call()
        synchronize()
    return [event for event in seen.events() or () if not getattr(event, "is_user_annotation", False)]


def breakdown_of(call: Call, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """`breakdown` of the kernels in STEPS calls; on a CPU of the outermost operators of one call, as listing is slow.
    Collective if the call is."""
    cuda = device.type == "cuda"
    activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if cuda else (ProfilerActivity.CPU, DeviceType.CPU)
    steps = STEPS if cuda else 1
    events = profiled(call, steps, device, activity)
    seen = [each for each in events if each.device_type == kind and (cuda or each.cpu_parent is None)]
    return breakdown(((each.time_range.start, each.time_range.end, each.name) for each in seen), steps)


def stage_rows(
    p: Problem, case: Case, seen: Sequence[tuple[dict[str, float], list[str]]], ceilings: Mapping[str, float]
) -> Iterator[Row]:
    """Yield a row for each stage and for TOTALS. seen: each rank's breakdown of this case."""
    stages = dict.fromkeys(stage for us, _ in seen for stage in us)
    us = {stage: sum(each.get(stage, 0.0) for each, _ in seen) / len(seen) for stage in stages}
    todo = work(p.shape, p.ranks, p.traffic, case)
    for stage in (*sorted(us.keys() - TOTALS, key=lambda stage: -us[stage]), *TOTALS):
        row: Row = {"stage": stage, "us": us[stage]}
        if stage not in TOTALS:
            row["of sum"] = us[stage] / us["sum"]
        if stage in todo:
            kind, row[kind] = todo[stage][0], todo[stage][1]
            if (ceiling := rate(kind, case, ceilings)) is not None:
                least = row[kind] / ceiling / 1e6
                row |= {"share": least / us[stage], "left us": us[stage] - least}
        if stage == "other":
            row["note"] = ", ".join(dict.fromkeys(name for _, others in seen for name in others))[:200]
        yield row


def launches(call: Call, device: torch.device) -> int:
    """Count a call's kernels, copies and fills on a GPU. Collective if the call is."""
    events = profiled(call, 1, device, ProfilerActivity.CUDA) if device.type == "cuda" else []
    return sum(each.device_type == DeviceType.CUDA for each in events)
