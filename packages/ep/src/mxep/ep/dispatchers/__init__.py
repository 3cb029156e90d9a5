"""Token dispatchers, by name: how tokens reach experts, and results return."""

from typing import Any, Unpack

import torch
import torch.distributed as dist

from .all_to_all import AllToAllDispatcher
from .base import Routing, TokenDispatcher, find_dispatcher, unused_twin
from .dispatch import DISPATCHERS, NODES, Dispatch, DispatchFields
from .hierarchical import HierarchicalDispatcher
from .local import LocalDispatcher
from .symmetric import NvshmemDispatcher, SymmetricDispatcher

__all__ = [
    "DISPATCHERS",
    "AllToAllDispatcher",
    "Dispatch",
    "DispatchFields",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "NvshmemDispatcher",
    "Routing",
    "SymmetricDispatcher",
    "TokenDispatcher",
    "find_dispatcher",
    "make_dispatcher",
]

KINDS: dict[str, Any] = dict(
    zip(
        DISPATCHERS,
        (LocalDispatcher, AllToAllDispatcher, SymmetricDispatcher, HierarchicalDispatcher, NvshmemDispatcher),
        strict=True,
    )
)


def make_dispatcher(
    dispatch: str | TokenDispatcher | Dispatch,
    num_experts: int,
    *,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    **fields: Unpack[DispatchFields],
) -> TokenDispatcher:
    """The dispatcher of a :class:`Dispatch`, or of one's name and limits: one object for layers that ask for the same.

    A group of one rank exchanges nothing: its dispatcher is a :class:`LocalDispatcher`, whatever the name.
    It is shared until something was dispatched: layers that are made later get another, on all ranks alike, which one
    that only some of them still hold could not be. All symmetric ones of a group share their memory in any case.

    dtype: the widest that rows travel in. Raises ValueError as Dispatch does, and where a dispatcher to share serves
    another number of experts.
    """
    if isinstance(dispatch, Dispatch):
        how = Dispatch.of(dispatch, fields)
    else:
        how = Dispatch.of(None, {**fields, "dispatcher": dispatch})
    if isinstance(how.dispatcher, TokenDispatcher):
        if how.dispatcher.num_experts != num_experts:
            raise ValueError(f"the dispatcher serves {how.dispatcher.num_experts} experts, the layer has {num_experts}")
        how.dispatcher.uses += 1
        return how.dispatcher
    name, limits = how.dispatcher, how.limits
    sizes: dict[str, Any] = {"group": group, "capacity": limits["capacity"]}
    if name != "local" and ranks_of(group) == 1:
        sizes |= {"max_tokens": limits["max_tokens"], "stands_in_for": name}
        if name == "all_to_all":  # which keeps to neither
            sizes["capacity"] = sizes["max_tokens"] = None
        name = "local"
    elif name not in ("local", "all_to_all"):
        sizes |= {"dim": dim, "dtype": dtype, "max_tokens": limits["max_tokens"], "timeout": limits["timeout"]}
    if name == "hierarchical":
        sizes |= {key: limits[key] for key in NODES}
    made: TokenDispatcher = KINDS[name](num_experts, **sizes)
    twin = unused_twin(made)
    if twin is None:
        made.shared = True
        return made
    twin.uses += 1
    return twin


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """How many ranks a group has; None: the default group if there is one, else this process alone."""
    return dist.get_world_size(group) if dist.is_initialized() else 1
