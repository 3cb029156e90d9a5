"""Ranks as a grid: `ep` ranks that share one set of experts, and `dp` such sets.

    rank = dp_index * ep + ep_index

The loss is the mean over all ranks' tokens. Gradients of parameters on every rank (attention, norms, router, shared
experts) are averaged over all ranks. An expert's gradient is already the mean over its ep group, and is averaged over
the dp group. So gradients equal those of one process with the whole batch. Experts that are spread over ranks are
DTensors, and each rank holds its own experts.

`all_gather` gathers values of the host. Without a process group there is one rank.
"""

from __future__ import annotations

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


def reduce_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Make gradients those of the mean loss over all ranks. Collective."""
    experts = {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    for p in model.parameters():
        group = mesh.dp if p in experts or isinstance(p, DTensor) else dist.group.WORLD
        if p.grad is not None and (ranks := dist.get_world_size(group)) > 1:
            dist.all_reduce(local(p.grad), group=group)
            p.grad /= ranks


T = TypeVar("T")


def all_gather(value: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
