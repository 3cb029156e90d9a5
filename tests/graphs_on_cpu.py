"""Replays without a GPU: a stand-in for a CUDA graph, so that what decides for one is tested everywhere."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from mxep.gemm import quantize_weights_once
from mxep.runtime import replay


class GraphOnCPU:
    """Stands for a graph: gives what the function gave when it was captured, whatever it is launched with."""

    def __init__(self, function: Any, given: list[Any], capturing: Any) -> None:
        with capturing():
            self.results = function()

    def launch(self, given: list[Any], addresses: tuple[int, ...]) -> list[Any]:
        assert addresses == tuple(0 if x is None else x.data_ptr() for x in given)
        return [None if x is None else x.clone() for x in self.results]


class MovingGraphOnCPU(GraphOnCPU):
    """One that computes: the function runs again, over the tensors it was captured with, which lend their memory."""

    def __init__(self, function: Any, given: list[Any], capturing: Any) -> None:
        self.function, self.given = function, list(given)
        self.names = inspect.getclosurevars(function).nonlocals  # whose lists are emptied, or are to stay as they are
        self.tensors = list(self.names["tensors"])
        with replay.no_replays():
            super().__init__(function, given, capturing)

    def launch(self, given: list[Any], addresses: tuple[int, ...]) -> list[Any]:
        lent = [(mine.data, theirs.data, mine.clone()) for mine, theirs in zip(self.given, given) if mine is not None]
        for mine, theirs, _ in lent:
            mine.copy_(theirs.clone())
        joined = list(self.names["joined"])
        self.names["tensors"][:] = self.tensors
        with replay.no_replays():
            self.results = self.function()
        self.names["joined"][:] = joined
        results = super().launch(given, addresses)
        for mine, theirs, before in lent:
            theirs.copy_(mine.clone())
            mine.copy_(before)
        return results


def assert_alike(got: list[list[Any]], wanted: list[list[Any]]) -> None:
    """Lists of tensors and None, bit for bit."""
    for one, other in zip(got, wanted, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def assert_replays_are_alike(step: Callable[[Any], list[Any]], batches: list[Any], *, held: bool) -> None:
    """With and without graphs. held: with weights that `quantize_weights_once` holds."""
    with replay.no_replays():
        wanted = [step(x) for x in batches]
    with quantize_weights_once() if held else nullcontext():
        assert_alike([step(x) for x in batches], wanted)


@contextmanager
def replays_on_the_cpu(monkeypatch: pytest.MonkeyPatch, graph: type = GraphOnCPU) -> Iterator[None]:
    """The CPU stands for a GPU."""
    monkeypatch.setattr(replay, "LEAST_DEVICE", -1)
    monkeypatch.setattr(replay, "MovingGraph", graph)
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    monkeypatch.setattr(replay, "_is_capturing", lambda: False)
    monkeypatch.setattr(replay, "_allocated", lambda device: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    replay._reader.cache_clear()
    yield
    replay._reader.cache_clear()
