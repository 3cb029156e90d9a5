"""How long a call takes on the GPU, and what to compare that with.

    time_us      the call captured n times into a CUDA graph, so that no launch waits for the host; events around a
                 replay; the median of several
    round_robin  the same for alternatives that are to be compared: replays long enough to fill the chip's power budget,
                 in turn, shuffled anew every round, as a clock depends on who ran before
    copy_tb_s    the ceiling of what moves memory: b.copy_(a), outside a graph. A copy captured in one becomes a memcpy
                 node, which is much slower: 2.77 instead of 4.25 TB/s on an H200
    recorded     the Triton kernels that a call launches
    empty_us     kernels of the same grids and warps with nothing in them: what starting them costs
    compiled_us  the same call through torch.compile

Inputs that would fit the L2 cache come in several sets, which a graph takes in turn, each with outputs of its own: a
call finds nothing there, as in a model, where others ran in between. So a small shape's time is that from memory to
memory, and holds what a graph needs between two kernels, as the time of its empty kernels does.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..graph import capturing
from .meter import Read, open_meter

LAUNCHES = 10  # in a graph, at least
REPEATS = 7
WARM = 0.02  # seconds: clocks fall while kernels compile
EMPTY_LAUNCHES = 50
COPY_BYTES = 1 << 30
L2_SIZES = 4  # bytes that must pass, in L2 caches, before a set of inputs comes again
REPLAY = 0.15  # seconds of a replay in a round robin
ROUNDS = 4

Call = Callable[[], object]


@dataclass(frozen=True)
class Launch:
    """A Triton kernel as it was launched."""

    kernel: str
    grid: tuple[int, ...]
    num_warps: int


def time_us(fn: Callable[..., object], inputs: Sequence[tuple[Any, ...]] = ((),), *, launches: int = LAUNCHES) -> float:
    """Microseconds that `fn(*args)` takes, args taken from `inputs` in turn: at least `launches` calls in a graph."""
    calls = [functools.partial(fn, *args) for args in inputs]
    for _ in range(2):  # compiles; a capture cannot
        calls[0]()
    graph, captured = capture(calls, launches)
    start = time.monotonic()
    while time.monotonic() - start < WARM:
        graph.replay()
        torch.cuda.synchronize()
    return statistics.median(_events_us(graph.replay) for _ in range(REPEATS)) / captured


@dataclass(frozen=True)
class Timing:
    """us: microseconds a call. mhz, watts: SM clock and board power meanwhile, None where they cannot be read."""

    us: float
    mhz: float | None = None
    watts: float | None = None


def round_robin(
    alternatives: Mapping[str, Callable[[], Sequence[Call]]], device: torch.device
) -> dict[str, Timing | Exception]:
    """Each alternative's median over ROUNDS, or the exception that it ended with, in the order given.

    An alternative gives calls, which are taken in turn. On a CPU they run once a round, timed by the host's clock.
    """
    prepare = _graphed if device.type == "cuda" else _ungraphed
    ready: dict[str, tuple[Callable[[], float], int]] = {}
    failed: dict[str, Exception] = {}
    read = open_meter(device)
    samples: dict[str, list[Read]] = {name: [] for name in alternatives}
    for name, make in alternatives.items():
        try:
            ready[name] = prepare(make(), read, samples[name])
        except Exception as error:
            failed[name] = error.with_traceback(None)  # which would hold on to tensors
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(ROUNDS):
        # Whoever follows a cool neighbour is faster: neighbours change.
        for name in random.Random(turn).sample(list(ready), len(ready)):
            run, calls = ready[name]
            times[name].append(run() / calls)
    timings = {name: Timing(statistics.median(us), *_median(samples[name])) for name, us in times.items()}
    return {name: failed[name] if name in failed else timings[name] for name in alternatives}


def _median(samples: Sequence[Read]) -> tuple[float | None, ...]:
    return tuple(statistics.median(each) for each in zip(*samples)) or (None, None)


def _graphed(
    calls: Sequence[Call], read: Callable[[], Read] | None, samples: list[Read]
) -> tuple[Callable[[], float], int]:
    """(a replay's microseconds, how many calls it has); it adds what the meter reads meanwhile to `samples`."""
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    us = _events_us(calls[0])
    graph, captured = capture(calls, max(1, round(REPLAY * 1e6 / us)))
    graph.replay()

    def run(kept: Sequence[Call] = calls) -> float:  # the graph does not hold the operands
        return _events_us(graph.replay, (lambda: samples.append(read())) if read else None)

    return run, captured


def _ungraphed(calls: Sequence[Call], read: object, samples: object) -> tuple[Callable[[], float], int]:
    calls[0]()

    def run() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e6

    return run, len(calls)


def capture(calls: Sequence[Call], launches: int, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of at least `launches` calls, taken from `calls` in turn, and how many it has.

    pool: of memory, shared with graphs that never run beside it; None for its own.
    """
    sets = len(calls)
    count = -(-launches // sets) * sets
    torch.cuda.synchronize()
    results: deque[object] = deque(maxlen=sets)  # as long as one is here, its memory is not written again
    with capturing(pool=pool) as graph:
        for i in range(count):
            results.append(calls[i % sets]())
    return graph, count


def copy_tb_s(nbytes: int = COPY_BYTES) -> float:
    """TB/s, read and written, of a plain copy of `nbytes` on the device."""
    a = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)

    def copies() -> None:
        for _ in range(LAUNCHES):
            b.copy_(a)

    copies()
    torch.cuda.synchronize()
    return 2 * nbytes * LAUNCHES / statistics.median(_events_us(copies) for _ in range(REPEATS)) / 1e6


def rotations(nbytes: int) -> int:
    """Sets of inputs and outputs, `nbytes` each, that it takes for none to be in L2 when its turn comes again."""
    cache: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, -(-L2_SIZES * cache // nbytes))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Every Triton kernel launched inside the block, in order."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=warmup, **kwargs)
        launches.append(Launch(kernel.metadata.name, tuple(grid), kernel.metadata.num_warps))
        return kernel

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


@triton.jit  # type: ignore[untyped-decorator]
def empty_kernel() -> None:
    pass


def empty_us(launches: Sequence[Launch]) -> float:
    """Microseconds that empty kernels of the grids and warps of `launches` take, one after the other."""
    return _empty_us(tuple((launch.grid, launch.num_warps) for launch in launches))


@functools.cache
def _empty_us(launches: tuple[tuple[tuple[int, ...], int], ...]) -> float:
    def empty() -> None:
        for grid, num_warps in launches:
            empty_kernel[grid](num_warps=num_warps)

    return time_us(empty, launches=EMPTY_LAUNCHES)


def compiled_us(fn: Callable[..., object], inputs: Sequence[tuple[Any, ...]]) -> float | str:
    """`time_us` of `fn` under torch.compile (default mode, static shapes), or why it does not compile or run."""
    try:
        torch._dynamo.reset()
        return time_us(torch.compile(fn, dynamic=False), inputs)
    except Exception as error:
        return describe(error)


def describe(error: Exception) -> str:
    """An exception in a line: its type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _events_us(fn: Callable[[], object], meanwhile: Callable[[], object] | None = None) -> float:
    """Microseconds between events around `fn`; `meanwhile` is called again and again until they are over."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    while meanwhile is not None and not end.query():
        meanwhile()
        time.sleep(0.004)
    torch.cuda.synchronize()
    us: float = start.elapsed_time(end) * 1e3
    return us
