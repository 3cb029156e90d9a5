"""Section "host" of bench=layer: what a layer costs the host that launches it, call by call, at a small shape.

    ms, fwd ms    forward and backward; forward alone: the host's clock around calls back to back, which wait for the
                  device only between stretches; median over rounds of the slowest rank
    caller's ms   forward and backward, with backward in the caller's thread instead of autograd's
    launches      kernels, copies and fills of a forward and backward
    allocations   by torch's allocator
    ops           operators called, those within others included

The GPU is nearly idle, so what is timed is the host alone, but where sizes are read from the device (all_to_all, the
baseline). Counts are the profiler's and the allocator's, each of one call that is not timed. On a CPU the
operators' own work is in the figures, so they say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from mxep.gemm import grouped_mm

from ..collective import FailedOnRanks, from_all_ranks, on_all_ranks
from ..rank import Rank
from ..results import Row
from ..timer import Alternative, Call, Timer, failure, nothing
from . import gemm_cases
from .comms_cases import BLOCK
from .layer_cases import BASELINE, MX, Case, Layer, Problem, Shape
from .layer_stages import profiled
from .run import Bench

NAMES = (BASELINE, "bf16/symmetric", "fp8/symmetric", MX, "mxfp8/all_to_all", "mxfp8/local")
PRODUCT = "grouped_mm mxfp8, bf16 a"

Calls = tuple[Call, Call, Call]
"""Forward, forward and backward, check."""


def rows(bench: Bench, shape: Shape, names: Iterable[str], opened: ExitStack) -> Iterator[Row]:
    """shape.experts: of a rank. opened: closes what is made. Collective."""
    made: dict[str, Calls] = {}
    found: dict[str, Row] = {name: {} for name in (*names, PRODUCT)}
    for name in found:
        make = _product if name == PRODUCT else _layer
        try:
            made[name] = on_all_ranks(lambda make=make, name=name: make(bench, shape, name, opened))  # type: ignore[misc]
        except FailedOnRanks as error:
            found[name] = failure(error)
    calls = {f"{kind}{name}": (name, kind, made[name][i]) for name in made for i, kind in enumerate(("fwd ", ""))}
    calls |= {f"caller's {name}": (name, "caller's ", _in_callers_thread(made[name][1])) for name in made}
    timed = Timer(bench.device, seconds=0.0, rounds=7, host=True).compare(
        {key: Alternative(lambda call=call: [call], check=made[name][2]) for key, (name, _, call) in calls.items()}  # type: ignore[misc]
    )
    for key, (name, kind, call) in calls.items():
        row = found[name]
        if "us" in timed[key] and kind == "caller's ":
            row[f"{kind}ms"] = timed[key]["us"] / 1e3
        elif "us" in timed[key]:
            counted = from_all_ranks(lambda call=call: counts(call, bench.device))[0]  # type: ignore[misc]
            row |= {f"{kind}ms": timed[key]["us"] / 1e3} | {f"{kind}{what}": count for what, count in counted.items()}
        else:
            row |= timed[key]
    yield from ({"what": name, **row} for name, row in found.items())


def _in_callers_thread(step: Call) -> Call:
    def call() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return step()

    return call


def _layer(bench: Bench, shape: Shape, name: str, opened: ExitStack) -> Calls:
    rank, case = bench.rank, Case(name)
    if name.endswith("/local"):  # every rank has all experts that there are, as many as a rank has elsewhere
        rank = Rank(0, 1, rank.device)
    problem = Problem(rank, shape._replace(experts=shape.experts * rank.world_size), 0.0, bench.seed)
    layer: Layer = case.make(problem)
    opened.callback(layer.close)
    return layer.forward, layer.step, layer.check


def _product(bench: Bench, shape: Shape, name: str, opened: ExitStack) -> Calls:
    """(T K, D) by (e, 2F, D), T K rounded up."""
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    sizes = -(-shape.tokens * shape.top_k // BLOCK) * BLOCK, 2 * shape.hidden, shape.dim, shape.experts
    p = gemm_cases.Problem.gaussian(sizes, generator)
    a, w = p.a.requires_grad_(), p.w.requires_grad_()

    def forward() -> torch.Tensor:
        return grouped_mm(a, w, p.offs, recipe="mxfp8")

    return forward, lambda: torch.autograd.grad(forward(), (a, w), p.dy), nothing


def counts(call: Callable[[], object], device: torch.device) -> Row:
    """Of one call; allocations on a GPU only. Collective, if the call is."""
    cuda = device.type == "cuda"
    events = profiled(call, 1, device, ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else []))
    launched = [
        each.device_type == DeviceType.CUDA and not getattr(each, "is_user_annotation", False) for each in events
    ]
    ops = [
        each.device_type == DeviceType.CPU and "::" in each.name and not each.name.startswith("autograd::")
        for each in events
    ]
    row: Row = {"launches": sum(launched), "ops": sum(ops)}
    if cuda:
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        call()
        row["allocations"] = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    return row
