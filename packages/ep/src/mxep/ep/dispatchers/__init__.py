"""Token dispatchers, by name: how tokens reach experts and come home."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mxep.comms import Capacity

from .all_to_all import AllToAllDispatcher
from .base import Routing, TokenDispatcher
from .local import LocalDispatcher
from .symmetric import SymmetricDispatcher

__all__ = [
    "DISPATCHERS",
    "AllToAllDispatcher",
    "LocalDispatcher",
    "Routing",
    "SymmetricDispatcher",
    "TokenDispatcher",
    "make_dispatcher",
]

DISPATCHERS = ("local", "all_to_all", "symmetric")


def make_dispatcher(
    name: str,
    num_experts: int,
    *,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    capacity: Capacity | None = None,
    max_tokens: int | None = None,
) -> TokenDispatcher:
    """The dispatcher called ``name``, one of :data:`DISPATCHERS`. Raises ValueError on another name."""
    if name == "symmetric":
        return SymmetricDispatcher(
            num_experts, dim=dim, dtype=dtype, group=group, capacity=capacity, max_tokens=max_tokens
        )
    if name == "all_to_all":
        return AllToAllDispatcher(num_experts, group=group, capacity=capacity)
    if name == "local":
        return LocalDispatcher(num_experts, group=group, capacity=capacity)
    raise ValueError(f"unknown dispatcher {name!r}, one of {', '.join(DISPATCHERS)}")
