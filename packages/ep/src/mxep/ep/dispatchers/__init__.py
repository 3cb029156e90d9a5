"""Token dispatchers bring tokens to experts, and results back. `make_dispatcher` makes one from a `Dispatch`.

These two lines make the same layer:

    MoE(64, 32, 8, 2, dispatch=Dispatch("hierarchical", capacity=1.25, max_tokens=4096))
    MoE(64, 32, 8, 2, dispatcher="hierarchical", capacity=1.25, max_tokens=4096)
"""

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, cast

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

_CLASSES: dict[str, Any] = {
    "local": LocalDispatcher,
    "all_to_all": AllToAllDispatcher,
    "symmetric": SymmetricDispatcher,
    "hierarchical": HierarchicalDispatcher,
    "nvshmem": NvshmemDispatcher,
}
DISPATCHERS = tuple(_CLASSES)
NODES = "ranks_per_node", "nodes_per_token"
_LACKS = {"local": NODES, "all_to_all": ("timeout", *NODES), "symmetric": NODES, "hierarchical": (), "nvshmem": NODES}
"""Options that each dispatcher refuses. local accepts any timeout, because it never waits."""


class DispatchFields(TypedDict, total=False):
    """The fields of :class:`Dispatch`, for functions that take them by keyword."""

    dispatcher: str | TokenDispatcher
    capacity: Capacity | float | None
    max_tokens: int | None
    timeout: float | None
    ranks_per_node: int | None
    nodes_per_token: int | None


@dataclass(frozen=True)
class Dispatch:
    """How tokens reach experts and return: a dispatcher and its limits. They are checked when this object is made.

    Attributes:
        dispatcher: one of the names :data:`DISPATCHERS`, or a dispatcher object to share between layers. A shared
            object has its own limits, so none may be given here. A group of one rank uses "local", whatever the name.
        capacity: limit for the rows of a rank's experts. A number c means ``Capacity.factor(c)``. None means
            ``Capacity.worst_case()``. "all_to_all" ignores it: its buffers have each step's size, and it drops no row.
        max_tokens: maximum tokens that a rank brings to one call, equal on all ranks. None: the most tokens that any
            rank brings to the first batch. Before a batch with more tokens, all ranks must call :meth:`MoE.reserve`.
            Otherwise it raises ValueError. "local" and "all_to_all" have no such limit and take more tokens, too.
        timeout: maximum seconds to wait for a peer, for all layers of the group. None: the process group's timeout,
            which all_to_all always uses.
        ranks_per_node, nodes_per_token: only for "hierarchical", see :class:`HierarchicalDispatcher`.

    Raises ValueError if a value is out of range or NaN, if the dispatcher does not have a given limit, and if a limit
    is given together with a dispatcher object.
    """

    dispatcher: str | TokenDispatcher = "symmetric"
    capacity: Capacity | float | None = None
    max_tokens: int | None = None
    timeout: float | None = None
    ranks_per_node: int | None = None
    nodes_per_token: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dispatcher, TokenDispatcher) and self.dispatcher not in DISPATCHERS:
            names = ", ".join(DISPATCHERS)
            raise ValueError(f"dispatcher: expected one of {names}, or a TokenDispatcher, got {self.dispatcher!r}")
        if self.capacity is not None:
            object.__setattr__(self, "capacity", Capacity.of(self.capacity))
        for name in ("max_tokens", *NODES):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, numbers.Integral) and value >= 1):
                raise ValueError(f"{name}: expected a whole number, at least 1, got {value!r}")
        if self.timeout is not None and not (_is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise ValueError(f"timeout: expected seconds, more than 0, got {self.timeout!r}")
        given = {name: value for name, value in self.limits.items() if value is not None}
        if isinstance(self.dispatcher, TokenDispatcher):
            if given:
                raise ValueError(
                    f"a dispatcher to share has its own limits: expected none beside it, got {_said(given)}"
                )
            return
        lacks = {name: value for name, value in given.items() if name in _LACKS[self.dispatcher]}
        if lacks:
            having = ", ".join(name for name in DISPATCHERS if not lacks.keys() & set(_LACKS[name]))
            raise ValueError(
                f"dispatcher {self.dispatcher!r} has no {', '.join(lacks)}: got {_said(lacks)}, expected none; "
                f"{having} would take it"
            )

    @property
    def limits(self) -> dict[str, Any]:
        """All fields except ``dispatcher``, by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "dispatcher"}

    @staticmethod
    def of(dispatch: "Dispatch | None", fields: DispatchFields) -> "Dispatch":
        """Return `dispatch`, or make a Dispatch of `fields`, for functions that take either of them as arguments.

        Raises ValueError if both are given, and TypeError for a keyword that is no field.
        """
        names = {field.name for field in dataclasses.fields(Dispatch)}
        unknown = [name for name in fields if name not in names]
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
        if dispatch is None:
            return Dispatch(**fields)
        if not isinstance(dispatch, Dispatch):
            raise ValueError(f"dispatch: expected a Dispatch, got {dispatch!r}: the keyword for that is dispatcher")
        if given := [name for name, value in fields.items() if value is not None]:
            raise ValueError(f"dispatch: expected it or its fields, got both: set {', '.join(given)} in it")
        return dispatch

    def times(self, rows_per_token: int) -> "Dispatch":
        """The same Dispatch for a layer that sends each token rows_per_token times: max_tokens is multiplied by it."""
        if self.max_tokens is None:
            return self
        return dataclasses.replace(self, max_tokens=self.max_tokens * rows_per_token)


def _said(limits: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in limits.items())


def _is_number(value: object, kind: type = numbers.Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and not math.isnan(cast(float, value))


def make_dispatcher(
    name: str | TokenDispatcher | Dispatch,
    num_experts: int,
    *,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    **fields: Unpack[DispatchFields],
) -> TokenDispatcher:
    """Return a dispatcher for a name and limits, or for a :class:`Dispatch`. Equal arguments give one shared object.

    After a dispatcher's first dispatch, equal arguments give a new object, because the old one might be gone on some
    ranks. Symmetric dispatchers of a group share their memory even then. A group of one rank exchanges nothing, so it
    gets a :class:`LocalDispatcher` for every name.

    dtype: widest dtype of rows that are sent. Raises ValueError as Dispatch does. Also raises it if `name` is a
    dispatcher object for another number of experts, or for narrower rows.
    """
    how = Dispatch.of(name, fields) if isinstance(name, Dispatch) else Dispatch.of(None, {**fields, "dispatcher": name})
    if isinstance(how.dispatcher, TokenDispatcher):
        if how.dispatcher.num_experts != num_experts:
            raise ValueError(f"the dispatcher serves {how.dispatcher.num_experts} experts, the layer has {num_experts}")
        widest, row_dtype = how.dispatcher.dim, how.dispatcher.row_dtype
        if widest and row_dtype and widest * row_dtype.itemsize < dim * torch.bfloat16.itemsize:
            raise ValueError(
                f"the dispatcher has room for rows of {widest} elements of {row_dtype}, the layer's have {dim}: "
                f"make the dispatcher with dim={dim}"
            )
        how.dispatcher.uses += 1
        return how.dispatcher
    kind, limits = how.dispatcher, how.limits
    sizes: dict[str, Any] = {"group": group, "capacity": limits["capacity"]}
    if kind != "local" and (not dist.is_initialized() or dist.get_world_size(group) == 1):
        sizes |= {"max_tokens": limits["max_tokens"], "stands_in_for": kind}
        if kind == "all_to_all":  # it has neither limit
            sizes["capacity"] = sizes["max_tokens"] = None
        kind = "local"
    elif kind not in ("local", "all_to_all"):
        sizes |= {"dim": dim, "dtype": dtype, "max_tokens": limits["max_tokens"], "timeout": limits["timeout"]}
    if kind == "hierarchical":
        sizes |= {key: limits[key] for key in NODES}
    made: TokenDispatcher = _CLASSES[kind](num_experts, **sizes)
    twin = unused_twin(made)
    if twin is None:
        made.shared = True
        return made
    twin.uses += 1
    return twin
