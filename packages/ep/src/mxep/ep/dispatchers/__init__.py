"""Token dispatchers, by name: how tokens reach experts, and results return."""

from typing import Any

import torch
import torch.distributed as dist

from mxep.comms import Capacity

from .all_to_all import AllToAllDispatcher
from .base import Routing, TokenDispatcher, find_dispatcher, unused_twin
from .hierarchical import HierarchicalDispatcher
from .local import LocalDispatcher
from .symmetric import NvshmemDispatcher, SymmetricDispatcher

__all__ = [
    "DISPATCHERS",
    "AllToAllDispatcher",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "NvshmemDispatcher",
    "Routing",
    "SymmetricDispatcher",
    "TokenDispatcher",
    "find_dispatcher",
    "make_dispatcher",
]

KINDS: dict[str, Any] = {
    "local": LocalDispatcher,
    "all_to_all": AllToAllDispatcher,
    "symmetric": SymmetricDispatcher,
    "hierarchical": HierarchicalDispatcher,
    "nvshmem": NvshmemDispatcher,
}
DISPATCHERS = tuple(KINDS)


def make_dispatcher(
    name: str,
    num_experts: int,
    *,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    capacity: Capacity | None = None,
    max_tokens: int | None = None,
    timeout: float | None = None,
    ranks_per_node: int | None = None,
    nodes_per_token: int | None = None,
) -> TokenDispatcher:
    """The dispatcher called ``name``, one of :data:`DISPATCHERS`: one object for layers that ask for the same.

    It is shared until something was dispatched: layers that are made later get another, on all ranks alike, which one
    that only some of them still hold could not be. All symmetric ones of a group share their memory in any case.

    timeout: see :class:`SymmetricDispatcher`; all_to_all has its process group's. ranks_per_node,
    nodes_per_token: see :class:`HierarchicalDispatcher`; others have none. Raises ValueError on another name.
    """
    if name not in DISPATCHERS:
        raise ValueError(f"unknown dispatcher {name!r}, one of {', '.join(DISPATCHERS)}")
    sizes: dict[str, Any] = {"group": group, "capacity": capacity}
    if name not in ("local", "all_to_all"):
        sizes |= {"dim": dim, "dtype": dtype, "max_tokens": max_tokens, "timeout": timeout}
    if name == "hierarchical":
        sizes |= {"ranks_per_node": ranks_per_node, "nodes_per_token": nodes_per_token}
    made: TokenDispatcher = KINDS[name](num_experts, **sizes)
    twin = unused_twin(made)
    if twin is None:
        made.shared = True
        return made
    twin.uses += 1
    return twin
