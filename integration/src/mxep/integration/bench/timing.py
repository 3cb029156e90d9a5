"""How long a call takes on the GPU, and what to compare that with.

    time_us      the call captured n times into a CUDA graph, so that no launch waits for the host; events around a
                 replay; the median of several
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
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

LAUNCHES = 10  # in a graph, at least
REPEATS = 7
WARM = 0.02  # seconds: clocks fall while kernels compile
EMPTY_LAUNCHES = 50
COPY_BYTES = 1 << 30
L2_SIZES = 4  # bytes that must pass, in L2 caches, before a set of inputs comes again


@dataclass(frozen=True)
class Launch:
    """A Triton kernel as it was launched."""

    kernel: str
    grid: tuple[int, ...]
    num_warps: int


def time_us(fn: Callable[..., object], inputs: Sequence[tuple[Any, ...]] = ((),), *, launches: int = LAUNCHES) -> float:
    """Microseconds that `fn(*args)` takes, args taken from `inputs` in turn: at least `launches` calls in a graph."""
    for _ in range(2):  # compiles; a capture cannot
        fn(*inputs[0])
    torch.cuda.synchronize()
    sets = len(inputs)
    calls = -(-launches // sets) * sets
    graph = torch.cuda.CUDAGraph()
    results: deque[object] = deque(maxlen=sets)  # as long as one is here, its memory is not written again
    with torch.cuda.graph(graph):
        for i in range(calls):
            results.append(fn(*inputs[i % sets]))
    start = time.monotonic()
    while time.monotonic() - start < WARM:
        graph.replay()
        torch.cuda.synchronize()
    return statistics.median(_events_us(graph.replay) for _ in range(REPEATS)) / calls


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


def _events_us(fn: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    us: float = start.elapsed_time(end) * 1e3
    return us
