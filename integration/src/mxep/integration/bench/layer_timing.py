"""Sustained time of steps that take tens of milliseconds, on all ranks: what bench=layer's figures are.

    a stretch   on each rank: barrier | event | as many calls as fill SECONDS, enqueued without a pause | event
    a figure    median over rounds of the ranks' largest time, a call

Ours are replays of one CUDA graph a step; a capture that fails is said, and the step is timed launched by the host.
Alternatives take turns, shuffled anew each round and on all ranks alike: at the limit of its power a chip is as fast as
its neighbours in time left it cool. A thread reads clock and power meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .comms_timing import FailedTogether, gathered, together
from .layer_cases import Layer
from .meter import Read, open_meter
from .timing import Call, capture

SECONDS = 1.5
ROUNDS = 3
READ_EVERY = 0.05  # seconds
GIB = 1 << 30


@dataclass(frozen=True)
class Sustained:
    """ms: of a call. mhz, watts: SM clock and board power, medians over all ranks; None where they cannot be read."""

    ms: float
    mhz: float | None = None
    watts: float | None = None


@dataclass
class Run:
    """A call, ready.

    check: raises what went wrong on the device. note: how it runs, where not as wanted. graph: None if the host
    launches it. result: of the first call after `reset`; a graph's is its memory.
    """

    call: Call
    check: Call
    seconds: float
    note: str | None = None
    graph: torch.cuda.CUDAGraph | None = None
    result: Any = None
    samples: list[Read] = field(default_factory=list)


def prepare(
    fn: Callable[[], Any],
    layer: Layer,
    device: torch.device,
    *,
    in_graph: bool,
    pool: Any,
    seconds: float = SECONDS,
) -> Run:
    """`fn`, a call of the layer, warmed up, and run from a graph if it is made for one. Collective.

    Raises FailedTogether.
    """
    check = layer.check

    def warm() -> Any:
        fn()
        layer.reset()
        result = fn()
        synchronize(device)
        check()
        return result

    result = together(warm)
    run = Run(fn, check, seconds, result=result)
    if device.type != "cuda" or not in_graph:
        return run
    del result
    run.result = None
    holder: list[Any] = []

    def recorded() -> None:
        holder[:] = [fn()]

    try:
        graph, _ = together(lambda: capture([recorded], 1, pool))
    except FailedTogether as error:
        run.note = f"not in a graph: {error}"
        run.result = together(warm)
        return run

    def first() -> None:
        layer.reset()
        graph.replay()
        synchronize(device)
        check()

    together(first)
    run.call, run.graph, run.result = graph.replay, graph, holder[0]
    return run


def round_robin(runs: Mapping[str, Run], device: torch.device) -> dict[str, Sustained | FailedTogether]:
    """Each run's time, or why it failed; that ends its turns, not the others'. Collective."""
    read = open_meter(device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, FailedTogether] = {}
    counts = {name: _calls(run, device, failed, name) for name, run in runs.items()}
    for turn in range(ROUNDS if device.type == "cuda" else 1):
        for name in random.Random(turn).sample(list(runs), len(runs)):
            if name in failed:
                continue
            run = runs[name]
            try:
                ms = together(lambda run=run, name=name: _stretch(run, counts[name], device, read))  # type: ignore[misc]
                times[name].append(max(gathered(ms)))
            except FailedTogether as error:
                failed[name] = error.with_traceback(None)
    return {name: failed.get(name) or _sustained(times[name], runs[name]) for name in runs}


def _calls(run: Run, device: torch.device, failed: dict[str, FailedTogether], name: str) -> int:
    if device.type != "cuda":
        return 1
    try:
        ms = max(gathered(together(lambda: _stretch(run, 2, device, None))))
    except FailedTogether as error:
        failed[name] = error.with_traceback(None)
        return 0
    return max(1, round(run.seconds * 1e3 / ms) + 1)


def _sustained(times: list[float], run: Run) -> Sustained:
    samples = [sample for theirs in gathered(run.samples) for sample in theirs]
    return Sustained(statistics.median(times), *(statistics.median(each) for each in zip(*samples)))


def _stretch(run: Run, count: int, device: torch.device, read: Callable[[], Read] | None) -> float:
    """Milliseconds of a call, on this rank."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            run.call()
        run.check()
        return (time.perf_counter() - begin) * 1e3 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _metered(read, run.samples):
        start.record()
        for _ in range(count):
            run.call()
        end.record()
        torch.cuda.synchronize()
    run.check()
    ms: float = start.elapsed_time(end) / count
    return ms


@contextlib.contextmanager
def _metered(read: Callable[[], Read] | None, samples: list[Read]) -> Iterator[None]:
    """Reads on a thread, as the host may be busy launching."""
    if read is None:
        yield
        return
    over = threading.Event()

    def poll() -> None:
        while not over.wait(READ_EVERY):
            samples.append(read())

    thread = threading.Thread(target=poll, name="meter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass
class Memory:
    """Of a layer, in GiB above what is there when this is made: its operands.

    peak: most that the allocator held in a step. outside: what was taken without it: peers' memory, libraries' buffers.
    """

    device: torch.device
    peak: float | None = None
    outside: float | None = None

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            free_memory(self.device)
            self._before, self._outside_before = torch.cuda.memory_allocated(), self._outside()

    def measure(self, step: Callable[[], object]) -> None:
        """step: launched by the host, once warmed up."""
        if self.device.type != "cuda":
            step()
            return
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        self.peak = (torch.cuda.max_memory_allocated() - self._before) / GIB
        self.outside = max(0, self._outside() - self._outside_before) / GIB

    @staticmethod
    def _outside() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
