"""Where a step's time goes: its kernels as the profiler sees them, summed up by stage, beside what each stage must do.

    us          of a stage's kernels, one after the other, in one step; mean over ranks
    bytes, flop that the stage must move or compute, by the formulas below; wire bytes where it is bound by those
    share       of the ceiling: rate over that of a copy, of a dense product, or over 450 GB/s
    left us     what a stage at its ceiling would save

    sum         of all stages            whole   from the first kernel's start to the last one's end
    busy        when any kernel ran      sum - busy is what overlaps, whole - busy what nobody uses

A kernel's stage follows from its name, by the first pattern of STAGES that it has; what has none is "other", and the
row says which. The profiler looks at few steps, at higher clocks than sustained ones: shares count, not sums.

R valid rows of the rank that has most, N = T K pairs, S rows on the wire; the rest as in layer_counts.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .comms_cases import BLOCK
from .comms_timing import gathered
from .layer_cases import Case, Problem
from .layer_counts import WIRE, wire_bytes
from .layer_timing import synchronize
from .tables import Row
from .timing import Call

STEPS = 3
OTHERS = 3  # names that a row of "other" lists

STAGES: tuple[tuple[str, str], ...] = (
    (r"nccl", "NCCL"),
    (r"swiglu|silu|sigmoid", "SwiGLU"),
    (r"rows_and_column_magnitudes|column_magnitudes|quantize_long|quantize_tile", "quantize weights"),
    (r"dispatch_kernel|dispatch_tables", "push"),
    (r"combine_kernel|stage_sums|sum_arrived|sum_slots", "return"),
    (r"barrier_kernel|meet_kernel", "barriers"),
    (r"count_kernel|place_kernel|pad_index|invert_kernel", "plan"),
    (r"tops_kernel|halves_kernel|turn_kernel", "split fold"),
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
    """us: by stage; sum, whole and busy as above; others: names of what has no stage, the longest first."""

    us: Mapping[str, float]
    sum: float
    whole: float
    busy: float
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
    per_step = {stage: time / steps for stage, time in us.items()}
    whole = (until - events[0].start) / steps
    names = sorted(others, key=lambda name: -others[name])[:OTHERS]
    return Breakdown(per_step, sum(per_step.values()), whole, busy / steps, names)


def profiled(call: Call, device: torch.device) -> list[Event]:
    """The kernels of STEPS calls; on a CPU, its outermost operators. Collective, if the call is."""
    cuda = device.type == "cuda"
    call()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as seen:
        if cuda:
            gathered(None)  # profilers take their time to start, and the first barrier of a step would count the wait
        for _ in range(STEPS):
            call()
        synchronize(device)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    return [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type == wanted
        and not getattr(event, "is_user_annotation", False)
        and (cuda or event.cpu_parent is None)
    ]


Work = tuple[str, float]
"""("bytes", "flop" or "wire bytes", how many)."""


def work(p: Problem, case: Case) -> dict[str, Work]:
    """What stages must do in a step of a case; those that are not named have no formula."""
    if not case.standard and not case.name.startswith("mxfp8/symmetric"):
        return {"GEMMs": ("flop", _flop(p))}
    out, home = wire_bytes(p, case)
    return _standard_work(p, out + home) if case.standard else _our_work(p, case, out, home)


def _flop(p: Problem) -> float:
    return 18.0 * p.most_rows * p.shape.dim * p.shape.hidden


def _standard_work(p: Problem, wire: int) -> dict[str, Work]:
    rows, pairs = p.most_rows, p.ids.numel()
    dim, hidden, tokens = p.shape.dim, p.shape.hidden, p.shape.tokens
    return {
        "GEMMs": ("flop", _flop(p)),
        "NCCL": ("wire bytes", wire),
        # Forward: gate and up read, h written; backward: these and d_h read, both gradients written.
        "SwiGLU": ("bytes", 16 * rows * hidden),
        # Spread, grouped, back and summed: 12 N D + 4 T D bytes forward, 14 N D + 4 T D backward.
        "permute + pointwise": ("bytes", 26 * pairs * dim + 8 * tokens * dim),
    }


def _our_work(p: Problem, case: Case, out: int, home: int) -> dict[str, Work]:
    rows, dim, hidden = p.most_rows, p.shape.dim, p.shape.hidden
    weights = p.w13.numel() + p.w2.numel()
    found: dict[str, Work] = {
        "GEMMs": ("flop", _flop(p)),
        "push": ("wire bytes", out),
        "return": ("wire bytes", home),
        # x and d_out: bf16 read, qdata and scales written.
        "quantize": ("bytes", 2 * p.x.numel() * (3 + 1 / BLOCK)),
        # Rows of x and of d_out: qdata and scales read, qdata written.
        "gather + fold": ("bytes", 2 * rows * dim * (2 + 1 / BLOCK)),
        # Forward: gate and up read, qdata written; backward: these and d_h read, qdata of both gradients written.
        "SwiGLU": ("bytes", 13 * rows * hidden),
        # Codes of both operands of both weight gradients, read and written.
        "split fold": ("bytes", 2 * rows * (2 * dim + 3 * hidden)),
        # bf16 read twice, since a column's scale needs all its rows first; qdata of both orientations written.
        "quantize weights": ("bytes", weights * 6 / (4 if case.kept else 1)),
    }
    return {stage: each for stage, each in found.items() if each[1]}


def ceiling(kind: str, case: Case, ceilings: Mapping[str, float]) -> float | None:
    """Of a work's rate, in 1e12 a second."""
    if kind == "wire bytes":
        return WIRE / 1e3
    dense = f"dense {'bf16' if case.recipe == 'bf16' else 'fp8'} TF"
    return ceilings.get("copy TB/s" if kind == "bytes" else dense)


def rows(p: Problem, case: Case, seen: Sequence[Breakdown], ceilings: Mapping[str, float]) -> list[Row]:
    """One for each stage, and for sum, busy and whole. seen: each rank's, of the same case."""
    mean: Callable[[Callable[[Breakdown], float]], float] = lambda get: sum(map(get, seen)) / len(seen)  # noqa: E731
    stages = dict.fromkeys(stage for each in seen for stage in each.us)
    us = {stage: mean(lambda each, stage=stage: each.us.get(stage, 0.0)) for stage in stages}  # type: ignore[misc]
    todo = work(p, case)
    found: list[Row] = []
    for stage in sorted(us, key=lambda stage: -us[stage]):
        row: Row = {"stage": stage, "us": us[stage], "of sum": us[stage] / sum(us.values())}
        if stage in todo:
            kind, amount = todo[stage]
            row[kind] = amount
            if (rate := ceiling(kind, case, ceilings)) is not None:
                least = amount / rate / 1e6
                row |= {"share": least / us[stage], "left us": us[stage] - least}
        if stage == "other":
            row["note"] = ", ".join(dict.fromkeys(name for each in seen for name in each.others))[:200]
        found.append(row)
    totals = {
        "sum": mean(lambda each: each.sum),
        "busy": mean(lambda each: each.busy),
        "whole": mean(lambda each: each.whole),
    }
    return found + [{"stage": name, "us": value} for name, value in totals.items()]
