"""Helpers: ranks under torchrun, times over all ranks, memory, a JSON file of results, one rank's failure on all ranks.

Does not import hydra."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.integration.mesh import all_gather
from mxep.integration.results import provenance, shortened, write_json

T = TypeVar("T")
GIB = 1 << 30


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def started_ranks() -> Iterator[torch.device]:
    """Open a process group for the ranks that torchrun started, if there are several. Yields this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if several:
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    yield device
    if several:
        dist.destroy_process_group()


def gradients(out: Tensor | Sequence[Tensor], leaves: Sequence[Tensor], d_out: Tensor | Sequence[Tensor]) -> list[Any]:
    """The gradients of leaves, by `backward` as in a training loop. It leaves no `.grad`.

    `torch.autograd.grad` would take mxep 16 us more per leaf (`mxep.gemm.product.is_wanted`; a CPU of 2 cores).
    """
    torch.autograd.backward(out, d_out)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def synchronize() -> None:
    """Wait for this rank's GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    gc.collect()
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds(call: Callable[[], object]) -> float:
    """The slowest rank's time for a call that all ranks begin together, until its GPU is done. Collective."""
    synchronize()
    if ranks() > 1:
        dist.barrier()
        synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return max(all_gather(time.perf_counter() - began))


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the intervals (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def save(file: str | Path | None, rows: Sequence[dict[str, Any]], commit: str | None = None, **about: Any) -> None:
    """Write rows with their provenance and `about`, on rank 0, if there is a file. commit: where there is no git."""
    if file and rank() == 0:
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        write_json(provenance(command, commit) | {"ranks": ranks()} | about | {"rows": rows}, [Path(file)])


def run(measure: Callable[[torch.device], Iterable[dict[str, Any]]]) -> None:
    """Print each row of measure(device) as it comes, and write all so far into the command's file, if it names one."""
    rows = []
    with started_ranks() as device:
        for row in measure(device):
            rows.append(shortened(row))
            if rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
            save(next(iter(sys.argv[1:]), None), rows)


class FailedOnRanks(RuntimeError):
    """Raised on all ranks when something failed on some. unsupported: this machine cannot do it."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


def all_gather_tensor(tensor: Tensor) -> Tensor:
    """(W, ...): all ranks' tensors of one shape. Collective."""
    if not dist.is_initialized():
        return tensor[None]
    flat = tensor.contiguous().view(torch.uint8)
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return torch.stack(found).view(tensor.dtype)


def from_all_ranks(fn: Callable[[], T]) -> list[T]:
    """`fn()` of every rank. If it raises on one rank, all raise FailedOnRanks. Collective."""
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
    """`fn()` of this rank. If it raises on one rank, all raise FailedOnRanks. Collective."""
    kept: list[T] = []
    from_all_ranks(lambda: kept.append(fn()))
    return kept[0]


def describe(error: Exception) -> str:
    """An exception in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
