"""Ranks as a grid: `ep` ranks that share one set of experts, and `dp` such sets.

    rank = dp_index * ep + ep_index

The loss is the mean over all ranks' tokens. What every rank holds (attention, norms, router, shared experts) has a
gradient from its own tokens: summed over all ranks, divided by their number. An expert's gradient already holds the
tokens of all ranks of its ep group (they came to it): summed over the dp group, divided by the same number. Then one
process with the whole batch would compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


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


class Gradients:
    """The gradients of a model as two flat buffers, one for experts and one for the rest; each ``p.grad`` is a view.

    So a step reduces, measures and scales each with one call. Makes every ``p.grad``: never set them to None.
    """

    def __init__(self, model: nn.Module, expert_parameters: set[str], mesh: Mesh) -> None:
        self.mesh = mesh
        named = dict(model.named_parameters())
        self.experts = _flat_gradients([p for name, p in named.items() if name in expert_parameters])
        self.rest = _flat_gradients([p for name, p in named.items() if name not in expert_parameters])

    def zero(self) -> None:
        self.experts.zero_()
        self.rest.zero_()

    def reduce(self) -> None:
        """Make every gradient that of the mean loss over all ranks."""
        if self.mesh.ranks == 1:
            return
        dist.all_reduce(self.rest)
        if dist.get_world_size(self.mesh.dp) > 1:
            dist.all_reduce(self.experts, group=self.mesh.dp)
        self.rest /= self.mesh.ranks
        self.experts /= self.mesh.ranks

    def clip(self, limit: float) -> Tensor:
        """Scale all gradients so that their norm over all parameters of all ranks is at most ``limit``.

        Returns the norm before, 0-d fp32, the same on every rank. No host sync.
        """
        squares = self.experts.square().sum()
        if dist.get_world_size(self.mesh.ep) > 1:
            dist.all_reduce(squares, group=self.mesh.ep)
        norm = (squares + self.rest.square().sum()).sqrt()
        scale = (limit / norm.clamp_min(1e-12)).clamp_max(1.0)
        self.experts *= scale
        self.rest *= scale
        return norm


def _flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    device = parameters[0].device
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=device)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = piece.view(p.shape)
    return flat
