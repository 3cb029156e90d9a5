"""Token dispatchers by name. They bring tokens to experts, and results back."""

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
    name: str | TokenDispatcher | Dispatch,
    num_experts: int,
    *,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    **fields: Unpack[DispatchFields],
) -> TokenDispatcher:
    """The dispatcher of a name and limits, or of a :class:`Dispatch`. Layers that ask for the same share one object.

    A group of one rank exchanges nothing, so it gets a :class:`LocalDispatcher` for every name.
    A dispatcher is shared until something was dispatched. Layers made later get another, on all ranks alike: the old
    one might live on some ranks only. All symmetric dispatchers of a group share their memory in any case.

    dtype: widest dtype of rows on the wire. Raises ValueError as Dispatch does, and if a dispatcher to share serves
    another number of experts.
    """
    given = name if isinstance(name, Dispatch) else None
    how = Dispatch.of(given, fields if isinstance(name, Dispatch) else {**fields, "dispatcher": name})
    if isinstance(how.dispatcher, TokenDispatcher):
        if how.dispatcher.num_experts != num_experts:
            raise ValueError(f"the dispatcher serves {how.dispatcher.num_experts} experts, the layer has {num_experts}")
        how.dispatcher.uses += 1
        return how.dispatcher
    kind, limits = how.dispatcher, how.limits
    sizes: dict[str, Any] = {"group": group, "capacity": limits["capacity"]}
    if kind != "local" and ranks_of(group) == 1:
        sizes |= {"max_tokens": limits["max_tokens"], "stands_in_for": kind}
        if kind == "all_to_all":  # it has neither limit
            sizes["capacity"] = sizes["max_tokens"] = None
        kind = "local"
    elif kind not in ("local", "all_to_all"):
        sizes |= {"dim": dim, "dtype": dtype, "max_tokens": limits["max_tokens"], "timeout": limits["timeout"]}
    if kind == "hierarchical":
        sizes |= {key: limits[key] for key in NODES}
    made: TokenDispatcher = KINDS[kind](num_experts, **sizes)
    twin = unused_twin(made)
    if twin is None:
        made.shared = True
        return made
    twin.uses += 1
    return twin


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group. None: the default group, or this process alone if there is none."""
    return dist.get_world_size(group) if dist.is_initialized() else 1
