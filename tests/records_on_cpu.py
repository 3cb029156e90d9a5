"""Records without a GPU: the CPU stands for one, and a record's steps are done one by one, over poisoned memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from mxep.gemm import quantize_weights_once
from mxep.runtime import graph, record, replay


def poisoned(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    """Memory in which every byte is wrong: NaN in all float formats, -1 in integers."""
    x = torch.empty_strided(shape, strides, dtype=dtype)
    x.untyped_storage().fill_(0xFF)
    return x


@contextmanager
def replays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU stands for a GPU; what a player allocates is poisoned.

    References read what decides their course, which kernels leave on the device: a test's routings have to be one.
    """
    monkeypatch.setattr(record, "_NEVER", set())
    monkeypatch.setattr(replay, "LEAST_DEVICE", -1)
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    monkeypatch.setattr(replay, "_is_capturing", lambda: False)
    monkeypatch.setattr(graph, "_allocator", lambda device: poisoned)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    replay._reader.cache_clear()
    try:
        yield
    finally:
        replay._reader.cache_clear()


def assert_alike(got: list[list[Any]], wanted: list[list[Any]]) -> None:
    """Lists of tensors and None, bit for bit."""
    for one, other in zip(got, wanted, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def assert_replays_are_alike(step: Callable[[Any], list[Any]], batches: list[Any], *, held: bool) -> None:
    """With and without records. held: with weights that `quantize_weights_once` holds."""
    with replay.no_replays():
        wanted = [step(x) for x in batches]
    with quantize_weights_once() if held else nullcontext():
        assert_alike([step(x) for x in batches], wanted)
