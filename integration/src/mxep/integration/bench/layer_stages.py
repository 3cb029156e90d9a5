"""Where a step's time goes: its kernels as the profiler sees them, summed up by stage, beside what each stage must do.

    us          of a stage's kernels, one after the other, in one step; mean over ranks
    bytes, flop that the stage must move or compute (layer_work.work); wire bytes where it is bound by those
    share       of the ceiling: rate over that of a copy, of a dense product, or over 450 GB/s
    left us     what a stage at its ceiling would save

    sum         of all stages            whole   from the first kernel's start to the last one's end
    busy        when any kernel ran      sum - busy is what overlaps, whole - busy what nobody uses

A kernel's stage follows from its name, by the first pattern of STAGES that it has; what has none is "other", and the
row says which. The profiler looks at few steps, at higher clocks than sustained ones: shares count, not sums.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ..collective import all_gather
from ..results import Row
from ..timer import Call, synchronize
from .layer_cases import Case, Problem
from .layer_work import rate, work

STEPS = 3
OTHERS = 3  # names that a row of "other" lists
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
"""Pattern in a kernel's name, whatever its case -> stage."""


@dataclass(frozen=True)
class Event:
    """A kernel's name, and when it ran, us."""

    name: str
    start: float
    end: float


def stage_of(name: str) -> str:
    return next((stage for pattern, stage in STAGES if re.search(pattern, name, re.IGNORECASE)), "other")


@dataclass(frozen=True)
class Breakdown:
    """us: by stage, and TOTALS. others: names of what has no stage, the longest first."""

    us: Mapping[str, float]
    others: Sequence[str] = ()


def breakdown(events: Iterable[Event], steps: int = 1) -> Breakdown:
    """Of `steps` steps; figures are of one. ValueError without events."""
    events = sorted(events, key=lambda event: event.start)
    if not events:
        raise ValueError("the profiler saw no kernels")
    us: dict[str, float] = collections.defaultdict(float)
    others: dict[str, float] = collections.defaultdict(float)
    busy, until = 0.0, float("-inf")
    for event in events:
        stage = stage_of(event.name)
        us[stage] += event.end - event.start
        if stage == "other":
            others[event.name] += event.end - event.start
        busy += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    us = us | {"sum": sum(us.values()), "busy": busy, "whole": until - events[0].start}
    names = sorted(others, key=lambda name: -others[name])[:OTHERS]
    return Breakdown({stage: time / steps for stage, time in us.items()}, names)


def profiled(call: Call, steps: int, device: torch.device, *activities: ProfilerActivity) -> list[Any]:
    """The profiler's events of `steps` calls. Collective, if the call is."""
    call()
    synchronize(device)
    with profile(activities=activities, acc_events=True) as seen:
        if device.type == "cuda":
            all_gather(None)  # profilers take their time to start, and the first barrier of a step would count the wait
        for _ in range(steps):
            call()
        synchronize(device)
    return list(seen.events() or ())


def breakdown_of(call: Call, device: torch.device) -> Breakdown:
    """Of kernels in STEPS calls; on a CPU, where listing takes long, of the outermost operators in one. Collective, if
    the call is."""
    cuda = device.type == "cuda"
    activity, wanted = (ProfilerActivity.CUDA, DeviceType.CUDA) if cuda else (ProfilerActivity.CPU, DeviceType.CPU)
    steps = STEPS if cuda else 1
    events = [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in profiled(call, steps, device, activity)
        if event.device_type == wanted
        and not getattr(event, "is_user_annotation", False)
        and (cuda or event.cpu_parent is None)
    ]
    return breakdown(events, steps)


def rows(p: Problem, case: Case, seen: Sequence[Breakdown], ceilings: Mapping[str, float]) -> Iterator[Row]:
    """One for each stage, and for TOTALS. seen: each rank's, of the same case."""
    stages = dict.fromkeys(stage for each in seen for stage in each.us)
    us = {stage: sum(each.us.get(stage, 0.0) for each in seen) / len(seen) for stage in stages}
    todo = work(p, case)
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
            row["note"] = ", ".join(dict.fromkeys(name for each in seen for name in each.others))[:200]
        yield row


def counts(call: Call, device: torch.device) -> Row:
    """Of one call: launches (kernels, copies and fills), allocations by torch's allocator, and ops, those within others
    included. Launches and allocations on a GPU only. Collective, if the call is."""
    cuda = device.type == "cuda"
    events = profiled(call, 1, device, ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else []))
    kernels = [each for each in events if each.device_type == DeviceType.CUDA]
    names = [each.name for each in events if each.device_type == DeviceType.CPU]
    row: Row = {"launches": sum(not getattr(each, "is_user_annotation", False) for each in kernels)}
    row["ops"] = sum("::" in name and not name.startswith("autograd::") for name in names)
    if cuda:
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        call()
        row["allocations"] = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    return row
