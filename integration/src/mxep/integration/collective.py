"""Collectives of the host: every rank's values, and failures that all ranks must raise.

Without a process group a process is the only rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class FailedOnRanks(RuntimeError):
    """Something failed on some ranks, and all of them know. unsupported: it cannot be had here, which is no fault."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


def all_gather(value: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_gather_tensor(tensor: Tensor) -> Tensor:
    """(W, ...): all ranks' tensors of one shape. Collective."""
    if not dist.is_initialized():
        return tensor[None]
    flat = tensor.contiguous().view(torch.uint8)
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return torch.stack(found).view(tensor.dtype)


def from_all_ranks(fn: Callable[[], T]) -> list[T]:
    """`fn()` of every rank; FailedOnRanks on all of them if it raises on one. Collective."""
    value, failure = None, None
    try:
        value = fn()
    except Exception as error:
        unsupported = isinstance(error, (ImportError, NotImplementedError)) or getattr(error, "unsupported", False)
        failure = (str(error) if unsupported else describe(error)), unsupported
    answers = all_gather((value, failure))
    for rank, (_, theirs) in enumerate(answers):
        if theirs is not None:
            where = "" if theirs[1] or not dist.is_initialized() else f"rank {rank}: "
            raise FailedOnRanks(f"{where}{theirs[0]}", unsupported=theirs[1])
    return [theirs for theirs, _ in answers]  # type: ignore[misc]


def on_all_ranks(fn: Callable[[], T]) -> T:
    """`fn()` of this rank; FailedOnRanks as of `from_all_ranks`. The result is not sent. Collective."""
    kept: list[T] = []
    from_all_ranks(lambda: kept.append(fn()))
    return kept[0]


def describe(error: Exception) -> str:
    """An exception in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
