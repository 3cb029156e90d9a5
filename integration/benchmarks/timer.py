"""Time calls: a round robin of alternatives, in one process or on all ranks.

- prepare: Warm up, capture a CUDA graph of calls that take the sets of inputs in turn, and check its results.
- measure: In each round, time a stretch of each alternative: as many replays as fill `seconds`, between two events.
  Each round has another order, the same on all ranks. `us` is the median over rounds of the slowest rank's time per
  call; `spread` is the longest round / the shortest - 1. On CPUs a stretch makes each call once.

At its power limit, a chip's speed depends on how warm the previous calls left it. So each stretch first warms the chip
for LEAD_SECONDS, and the order changes. Inputs that would fit the L2 cache come in several sets (`rotations`), so that
a call finds nothing in the cache, as in a model.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mxep.integration.report import Row

from .script import FailedOnRanks, from_all_ranks, on_all_ranks, synchronize

GRAPH_SECONDS = 0.02
LEAD_SECONDS = 0.2
REPEATS = 10  # calls of a stretch of host time
COPY_BYTES = 1 << 30
COPIES = 10
L2_SIZES = 4  # bytes between two uses of a set of inputs, in L2 caches

Call = Callable[[], Any]


@contextlib.contextmanager
def capturing(**options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """`torch.cuda.graph` with a new graph. An error inside is raised unchanged."""
    graph = torch.cuda.CUDAGraph()
    raised: BaseException | None = None
    try:
        with torch.cuda.graph(graph, **options):
            try:
                yield graph
            except BaseException as error:
                raised = error
                raise
    except Exception:
        if raised is None:
            raise
    if raised is not None:  # the end of a failed capture raises, too, without the reason
        raise raised


def nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Alternative:
    """One of several calls to compare.

    make: prepares and returns the calls, one for each set of inputs, to run in turn. Raises ImportError or
        NotImplementedError if they cannot run here.
    graph: whether calls run in a CUDA graph. False: the host launches them.
    seconds: length of a stretch, instead of the timer's.
    check: raises errors that happened on the device.
    inspect: called with the last result before timing. Collective, may raise FailedOnRanks.
    """

    make: Callable[[], Sequence[Call]]
    graph: bool = True
    seconds: float | None = None
    check: Call = nothing
    inspect: Callable[[Any], None] | None = None


@dataclass
class Run:
    """An alternative, ready to be timed. calls: number of calls in a `replay`. repeats, lead: timed replays of a
    stretch, and untimed ones before them. kept: the calls, which hold the operands; a graph does not."""

    alternative: Alternative
    replay: Call
    calls: int
    repeats: int
    kept: Sequence[Call]
    lead: int = 0


@dataclass
class Timer:
    """Times alternatives.

    seconds: length of a stretch. start: called on all ranks before a stretch. graph_calls: most calls in a graph. host:
    measure the host time of REPEATS calls without a graph. shared: a failure in a round ends all alternatives.
    """

    device: torch.device
    seconds: float
    rounds: int
    start: Call = nothing
    graph_calls: int = 200
    host: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        self.cuda = self.device.type == "cuda"
        # Graphs never run at the same time, so they share memory. A pool ends with its last graph.
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._pool: Any = None

    def compare(self, alternatives: Mapping[str, Alternative]) -> dict[str, Row]:
        """Time alternatives. Returns a row for each: us and spread, or a note or an error. Collective."""
        ready: dict[str, Run] = {}
        rows: dict[str, Row] = {name: {} for name in alternatives}
        for name, alternative in alternatives.items():
            try:
                ready[name] = self.prepare(alternative)
            except FailedOnRanks as error:
                rows[name] = failure(error)
        return rows | self.measure(ready)

    def prepare(self, alternative: Alternative) -> Run:
        """Warm up and capture. Collective. Raises FailedOnRanks."""
        run = Run(alternative, nothing, 1, REPEATS if self.host and self.cuda else 1, ())
        result = on_all_ranks(lambda: self._warm(run))
        if self.cuda and not self.host and alternative.graph:
            result = None  # it may be large: free it
            us = max(from_all_ranks(lambda: self._stretch(run)))
            try:
                result = self._capture(run, max(1, min(self.graph_calls, round(GRAPH_SECONDS * 1e6 / us))))
            except FailedOnRanks:
                self._graphs.clear()  # a pool in which a capture failed cannot be used again
                raise
        if alternative.inspect is not None:  # before another call changes the result
            alternative.inspect(result)
        if self.cuda and not self.host:
            us = max(from_all_ranks(lambda: self._stretch(run)))
            run.repeats = max(1, round((alternative.seconds or self.seconds) * 1e6 / us / run.calls))
            run.lead = min(run.repeats, math.ceil(LEAD_SECONDS * 1e6 / us / run.calls))
        return run

    def _warm(self, run: Run) -> Any:
        """Make the calls of `run` and warm them up without a graph. Returns the last result."""
        calls = run.kept = run.alternative.make()
        result = None

        def replay() -> None:
            for call in calls:
                call()

        run.replay, run.calls = replay, len(calls)
        replay()  # compiles
        for call in calls:
            result = call()
        synchronize()
        run.alternative.check()
        return result if run.alternative.inspect else None

    def _capture(self, run: Run, count: int) -> Any:
        """Capture a graph of at least `count` calls for `run`, and replay it once. Returns the last result."""
        calls, sets, alternative = run.kept, len(run.kept), run.alternative
        total = -(-count // sets) * sets
        results: deque[Any] = deque(maxlen=sets)  # keeps their memory from reuse

        def capture() -> torch.cuda.CUDAGraph:
            gc.collect()
            torch.cuda.synchronize()
            self._pool = self._pool if self._graphs else torch.cuda.graph_pool_handle()
            with capturing(pool=self._pool) as graph:
                for i in range(total):
                    results.append(calls[i % sets]())
            return graph

        def first() -> None:
            graph.replay()
            torch.cuda.synchronize()
            alternative.check()

        graph = on_all_ranks(capture)
        self._graphs.add(graph)
        on_all_ranks(first)
        run.replay, run.calls = graph.replay, total
        return results[-1] if alternative.inspect else None

    def measure(self, runs: Mapping[str, Run]) -> dict[str, Row]:
        """Time runs, failed ones no further. Returns a row for each. Collective. If `shared`, raises FailedOnRanks."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        rows: dict[str, Row] = {}
        for turn in range(self.rounds):
            for name in random.Random(turn).sample(list(runs), len(runs)):
                if name in rows:
                    continue
                try:
                    run = runs[name]
                    times[name].append(max(from_all_ranks(lambda run=run: self._stretch(run))))  # type: ignore[misc]
                except FailedOnRanks as error:
                    if self.shared:
                        raise
                    rows[name] = failure(error)
        for name, us in times.items():
            if name not in rows:
                rows[name] = {"us": statistics.median(us), "spread": max(us) / min(us) - 1}
        return rows

    def _stretch(self, run: Run) -> float:
        """Time a stretch on this rank, in us per call."""
        synchronize()
        if self.host or not self.cuda:
            self.start()
            begin = time.perf_counter()
            for _ in range(run.repeats):
                run.replay()
            us = (time.perf_counter() - begin) * 1e6
            synchronize()
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(run.lead):
                run.replay()
            self.start()
            start.record()
            for _ in range(run.repeats):
                run.replay()
            end.record()
            torch.cuda.synchronize()
            us = start.elapsed_time(end) * 1e3
        run.alternative.check()
        return us / run.repeats / run.calls


def failure(error: FailedOnRanks) -> Row:
    return {"note" if error.unsupported else "error": str(error)}


def copy_tb_s(timer: Timer) -> float:
    """TB/s, read and written, of a plain copy outside a graph. In a graph it is a memcpy node, which is slower: 2.77
    instead of 4.25 TB/s on an H200."""
    a = torch.ones(COPY_BYTES, dtype=torch.uint8, device=timer.device)
    b = torch.empty_like(a)
    row = timer.compare({"copy": Alternative(lambda: [lambda: b.copy_(a)] * COPIES, graph=False)})["copy"]
    return float(2 * COPY_BYTES / row["us"] / 1e6)


def rotations(nbytes: int, device: torch.device) -> int:
    """Number of sets of inputs and outputs, `nbytes` each, after which the first has left the L2 cache."""
    if device.type != "cuda":
        return 1
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, -(-L2_SIZES * cache // nbytes))
