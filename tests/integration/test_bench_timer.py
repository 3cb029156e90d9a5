"""Graphs: who captures sees the error that broke the capture, as it was raised."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from benchmarks.timer import capturing


@contextlib.contextmanager
def broken_graph(graph: object) -> Iterator[None]:
    """`torch.cuda.graph`, whose end raises if the capture failed."""
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def raise_while_handling_another() -> None:
    try:
        raise KeyError("an earlier one, which was handled")
    except KeyError:
        raise ValueError("what broke the capture")  # noqa: B904


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", broken_graph)


def test_a_failed_capture_raises_what_broke_it_and_keeps_its_context(no_gpu: None):
    with pytest.raises(ValueError, match="what broke the capture") as error, capturing():
        raise_while_handling_another()
    assert isinstance(error.value.__context__, KeyError)
    assert "raise_while_handling_another" in [frame.name for frame in error.traceback]


def test_an_interrupt_within_a_capture_stays_one(no_gpu: None):
    with pytest.raises(KeyboardInterrupt), capturing():
        raise KeyboardInterrupt


def test_a_capture_that_cannot_end_says_so(no_gpu: None):
    with pytest.raises(RuntimeError, match="operation failed"), capturing():
        pass


def test_a_capture_that_cannot_begin_says_so(no_gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: raise_while_handling_another())
    with pytest.raises(ValueError, match="what broke the capture"), capturing():
        raise AssertionError("not reached")
