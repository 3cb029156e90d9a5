"""Ranks as a grid: `ep` ranks that share one set of experts, and `dp` such sets.

    rank = dp_index * ep + ep_index

The loss is the mean over all ranks' tokens. What every rank holds (attention, norms, router, shared experts) has the
gradient of this rank's loss: averaged over all ranks. An expert's gradient is already that of the mean over its ep
group, whose tokens came to it: averaged over the dp group. So all are what one process with the whole batch has.

Experts are DTensors where several ranks share them, each of which holds its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mxep.ep import clip_grad_norm_
from mxep.ep.shares import local_tensor


@dataclass(frozen=True)
class Mesh:
    """rank of ranks; `ep`: the group that shares experts with this rank; `dp`: the group that holds the same ones."""

    rank: int
    ranks: int
    ep: dist.ProcessGroup
    dp: dist.ProcessGroup

    @staticmethod
    def make(ep: int, device: torch.device) -> Mesh:
        """Collective over the default group. ValueError unless ``ep`` divides the number of ranks."""
        ranks = dist.get_world_size()
        if ranks % ep:
            raise ValueError(f"the number of ranks must be a multiple of ep = {ep}, got {ranks}")
        grid = init_device_mesh(device.type, (ranks // ep, ep), mesh_dim_names=("dp", "ep"))
        return Mesh(dist.get_rank(), ranks, grid.get_group("ep"), grid.get_group("dp"))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``; no copy, no gradient."""
    return local_tensor(tensor).detach()


def share(own: Tensor, like: Tensor) -> Tensor:
    """A tensor that is spread over ranks as ``like`` is, of which this one holds ``own``."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False)


class Gradients:
    """The gradients of a model as two flat buffers, one for experts and one for the rest; each ``p.grad`` is a view.

    So a step clears and reduces each with one call. Makes every ``p.grad``: never set them to None.
    """

    def __init__(self, model: nn.Module, expert_parameters: set[str], mesh: Mesh) -> None:
        self.mesh = mesh
        named = dict(model.named_parameters())
        self.parameters = list(named.values())
        self.experts = _flat_gradients([p for name, p in named.items() if name in expert_parameters])
        self.rest = _flat_gradients([p for name, p in named.items() if name not in expert_parameters])

    def zero(self) -> None:
        self.experts.zero_()
        self.rest.zero_()

    def reduce(self) -> None:
        """Make every gradient that of the mean loss over all ranks."""
        for gradients, group in ((self.rest, dist.group.WORLD), (self.experts, self.mesh.dp)):
            if (ranks := dist.get_world_size(group)) > 1:
                dist.all_reduce(gradients, group=group)
                gradients /= ranks

    def clip(self, limit: float) -> Tensor:
        """Scale all gradients so that their norm over all parameters of all ranks is at most ``limit``.

        Returns the norm before, 0-d fp32, the same on every rank. No host sync.
        """
        return clip_grad_norm_(self.parameters, limit)


def _flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    own = [local(p) for p in parameters]
    flat = torch.zeros(sum(p.numel() for p in own), dtype=torch.float32, device=own[0].device)
    for p, mine, piece in zip(parameters, own, flat.split([p.numel() for p in own])):
        p.grad = share(piece.view(mine.shape), p)
    return flat
