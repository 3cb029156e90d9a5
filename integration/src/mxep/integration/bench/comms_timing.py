"""How long a collective call takes: ranks start together on the device, and the slowest counts.

    on each rank   barrier on the device | a pause | event | n calls, in a CUDA graph | event
    a figure       median over rounds of the ranks' largest time, over n

The pause, on the device too, is for the hosts to enqueue what follows: no rank starts before the others, and none waits
for its own host. Alternatives take turns, shuffled anew each round and on all ranks alike. CPU ranks make the calls as
they are, by the host's clock.

Inputs are not rotated: the smallest shapes find them in the L2 cache, as after the kernel that made them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from mxep.comms import Transport

from .comms_cases import Alternative
from .timing import Call, capture, describe

REPLAY = 0.02  # seconds of a replay
CALLS = 4, 200  # in it, at least and at most
PAUSE = 1_000_000  # cycles, half a millisecond: longer than the launch of a graph
ROUNDS = 7

T = TypeVar("T")


class FailedTogether(RuntimeError):
    """Something failed on some ranks, and all of them know."""


@dataclass(frozen=True)
class Timing:
    """us: microseconds a call. note: how it was timed, where that was not in a graph."""

    us: float
    note: str | None = None


def together(fn: Callable[[], T]) -> T:
    """`fn()` on all ranks, or FailedTogether on all of them if it raises on one. Collective."""
    value, failure = None, None
    try:
        value = fn()
    except Exception as error:
        failure = describe(error)
    for rank, theirs in enumerate(gathered(failure)):
        if theirs is not None:
            raise FailedTogether(f"rank {rank}: {theirs}")
    return value  # type: ignore[return-value]


def round_robin(alternatives: Mapping[str, Alternative], transport: Transport) -> dict[str, Timing | FailedTogether]:
    """Each alternative's time, or why it has none, in the order given. Collective.

    Raises FailedTogether if one that was ready fails in the end, which leaves the transport unusable.
    """
    ready: dict[str, _Replay] = {}
    failed: dict[str, FailedTogether] = {}
    for name, alternative in alternatives.items():
        try:
            ready[name] = _prepare(alternative, transport)
        except FailedTogether as error:
            failed[name] = error.with_traceback(None)  # which would hold on to tensors
    per_rank = gathered(together(lambda: _rounds(ready, transport)))
    found: dict[str, Timing | FailedTogether] = {}
    for name in alternatives:
        if name in failed:
            found[name] = failed[name]
        else:
            slowest = [max(rounds) for rounds in zip(*(theirs[name] for theirs in per_rank))]
            found[name] = Timing(statistics.median(slowest), ready[name].note)
    return found


@dataclass(frozen=True)
class _Replay:
    """`run` makes `calls` calls."""

    run: Call
    calls: int
    note: str | None = None


def _rounds(ready: Mapping[str, _Replay], transport: Transport) -> dict[str, list[float]]:
    """Microseconds of each, of every round, on this rank."""
    times: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(ROUNDS):
        for name in random.Random(turn).sample(list(ready), len(ready)):
            times[name].append(_measure(ready[name].run, transport) / ready[name].calls)
    transport.check()
    return times


def _prepare(alternative: Alternative, transport: Transport) -> _Replay:
    """Raises FailedTogether."""
    call, cuda = alternative.call, transport.device.type == "cuda"

    def warm() -> None:
        for _ in range(2):  # compiles
            call()
        if cuda:
            torch.cuda.synchronize()
        transport.check()

    together(warm)
    least, most = CALLS if cuda else (2, 2)
    us = max(gathered(together(lambda: _measure(call, transport))))
    count = min(most, max(least, round(REPLAY * 1e6 / us)))
    note = None
    if cuda and alternative.graph != "never":
        try:
            return _captured(call, count, transport)
        except FailedTogether as error:
            if alternative.graph == "must":
                raise
            note = f"without a graph: {error}"

    def calls() -> None:
        for _ in range(count):
            call()

    return _Replay(calls, count, note)


def _captured(call: Call, count: int, transport: Transport) -> _Replay:
    def attempt() -> torch.cuda.CUDAGraph:
        graph, _ = capture([call], count)
        return graph

    graph = together(attempt)
    together(lambda: _measure(graph.replay, transport))
    return _Replay(graph.replay, count)


def _measure(run: Call, transport: Transport) -> float:
    """Microseconds of `run`, from when all ranks are ready."""
    if transport.device.type != "cuda":
        transport.barrier("bench")
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    transport.barrier("bench")
    torch.cuda._sleep(PAUSE)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    us: float = start.elapsed_time(end) * 1e3
    return us


def gathered(mine: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
