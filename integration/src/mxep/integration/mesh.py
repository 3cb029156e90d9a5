"""Ranks as a grid: `ep` ranks that share one set of experts, and `dp` such sets.

    rank = dp_index * ep + ep_index

The loss is the mean over all ranks' tokens. Gradients of parameters on every rank (attention, norms, router, shared
experts) are averaged over all ranks. An expert's gradient is already the mean over its ep group, and is averaged over
the dp group. So gradients equal those of one process with the whole batch. Experts that are spread over ranks are
DTensors, and each rank holds its own experts.

Host collectives gather values, and raise one rank's failure on all ranks. Without a process group there is one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mxep.ep import Experts
from mxep.ep.dtensors import local_tensor


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the grid. ep: ranks that share one set of experts with it. dp: ranks that hold the same
    experts. Both are dimensions of grid."""

    rank: int
    ranks: int
    ep: dist.ProcessGroup
    dp: dist.ProcessGroup
    grid: DeviceMesh

    @staticmethod
    def make(ep: int, device: torch.device) -> Mesh:
        """Collective over the default group. ``ep`` must divide the number of ranks."""
        ranks = dist.get_world_size()
        grid = init_device_mesh(device.type, (ranks // ep, ep), mesh_dim_names=("dp", "ep"))
        return Mesh(dist.get_rank(), ranks, grid.get_group("ep"), grid.get_group("dp"), grid)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``: a view, detached."""
    return local_tensor(tensor).detach()


def part(tensor: Tensor) -> tuple[slice, ...]:
    """Slices that cut this rank's part from the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets))


def share(own: Tensor, like: Tensor) -> Tensor:
    """A tensor that is spread over ranks like ``like``, with ``own`` as this rank's part."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False)


def reduce_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Make gradients those of the mean loss over all ranks. Collective."""
    experts = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    for p in model.parameters():
        group = mesh.dp if p in experts or isinstance(p, DTensor) else dist.group.WORLD
        if p.grad is not None and (ranks := dist.get_world_size(group)) > 1:
            dist.all_reduce(local(p.grad), group=group)
            p.grad /= ranks


T = TypeVar("T")


class FailedOnRanks(RuntimeError):
    """Raised on all ranks when something failed on some. unsupported: this machine cannot do it."""

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
