"""Interface of token dispatchers, and the routing that `combine` takes.

A dispatcher sends bytes and plans rows. It knows nothing of formats except the alignment of groups. It has three
exchanges:

    dispatch    sends tokens to their experts' ranks, with ids and weights, and makes the plan   (forward)
    redispatch  sends other bytes of the same tokens, by the plan of dispatch                    (backward of combine)
    combine     sends rows back to their tokens' ranks, and sums them          (forward; backward of dispatch)

Each returns a handle. If the dispatcher can, it runs the exchange on a communication stream until `wait()`.

T tokens of this rank, K experts per token, D model dim, E experts in all, e local experts, W ranks, R_max maximum rows
of this rank's experts, S slots that the plan reads rows from: the tokens, received rows, or symmetric memory.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    NEW,
    Capacity,
    CapacityExceeded,
    PeersDisagree,
    PeerTimeout,
    RoutingPlan,
    Transport,
    make_plan,
    new_dispatch,
    tell_failure,
    told_failures,
)
from mxep.runtime.bundle import Bundle
from mxep.runtime.lengths import room_for
from mxep.runtime.record import fixed
from mxep.runtime.replay import Replayed, replayed

from ..dtensors import checked_group
from .groups import made_to_stay, state_of


def installed_version() -> str:
    try:
        return importlib.metadata.version("mxep-ep")
    except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
        return "0+unknown"


_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Handle(Protocol[_T_co]):
    """An exchange in flight."""

    def wait(self) -> _T_co:
        """Return the exchange's result. The current stream waits for it, but the host does not. Call it once."""


class Done(NamedTuple, Generic[_T]):
    """The handle of a finished exchange."""

    result: _T

    def wait(self) -> _T:
        return self.result


class Later(Generic[_T]):
    """A handle whose ``wait`` runs the last steps of the exchange, then frees their tensors."""

    def __init__(self, finish: Callable[[], _T]) -> None:
        self._steps = [finish]

    def wait(self) -> _T:
        return self._steps.pop()()


Payload = tuple[Tensor, ...]
"""The bytes of N rows: one or several uint8 tensors (N, n_i), such as qdata and scales."""
LEAST_DEVICE_WITH_ROOMS = 0
"""Batches of varying length share shapes on devices with at least this index. The CPU has -1, and replays nothing."""

_dispatchers: weakref.WeakValueDictionary[str, "TokenDispatcher"] = weakref.WeakValueDictionary()
"""Live dispatchers by ``key``."""


def find_dispatcher(key: str) -> "TokenDispatcher":
    """Return the live dispatcher with this ``key``. Raises KeyError if it is gone.

    Ops of compiled graphs take the key instead of an object."""
    return _dispatchers[key]


def unused_twin(made: "TokenDispatcher") -> "TokenDispatcher | None":
    """Return a live dispatcher like `made` that may be shared and has not dispatched yet, or None."""
    for each in _dispatchers.values():
        # A later group may have the name of a destroyed one.
        alike = each.shapes == made.shapes and each.group is made.group
        if each is not made and each.shared and alike and each.uses and not each.used:
            return each
    return None


def check_reserved(most: int, max_tokens: int | None) -> None:
    """Raise ValueError if `most`, the number of tokens to reserve, exceeds max_tokens."""
    if max_tokens is not None and most > max_tokens:
        raise ValueError(f"reserve: got {most} tokens, wanted at most the max_tokens = {max_tokens} of this layer")


@dataclass(frozen=True)
class Routing(Bundle):
    """What `redispatch` and `combine` need to know about a dispatch.

    Attributes:
        plan: assigns slots to expert-major rows on this rank.
        expert_ids: (T, K) int32, for this rank's tokens.
        experts_per_rank: e.
        room: number of rows that `combine` returns, at least T. None: T.
    """

    plan: RoutingPlan
    expert_ids: Tensor
    experts_per_rank: int
    room: int | None = dataclasses.field(default=None, kw_only=True)

    def stats(self) -> dict[str, Tensor]:
        """Counts as 0-d int64 tensors on the device, without a host sync.

        ``routed``: (token, expert) pairs of this rank's tokens. ``sent``: rows that this rank sends, also to itself.
        ``computed``: rows of this rank's GEMMs. ``padding``: how many of these are padding.
        ``dropped``: rows that did not fit the capacity. ``invalid``: expert ids out of range.
        ``dropped`` and ``invalid`` are sums over all ranks, equal on each.
        """
        computed = self.plan.offs[-1].long()
        return {
            "routed": (self.expert_ids >= 0).sum(),
            "sent": self.wire_rows(),
            "computed": computed,
            "padding": computed - (self.plan.row_slot >= 0).sum(),
            "dropped": self.plan.overflow.sum(),
            "invalid": self.plan.invalid,
        }

    def wire_rows(self) -> Tensor:
        """Number of rows that this rank sends, 0-d int64: one per distinct (token, destination rank)."""
        ids = self.expert_ids
        rank = torch.where(ids >= 0, ids.div(self.experts_per_rank, rounding_mode="floor"), -1).sort(-1).values
        first = torch.ones_like(rank, dtype=torch.bool)
        first[:, 1:] = rank[:, 1:] != rank[:, :-1]
        return (first & (rank >= 0)).sum()


class TokenDispatcher(ABC):
    """Base of the dispatchers.

    Args:
        num_experts: E, a multiple of the group's size; rank r owns experts ``r * e .. (r + 1) * e - 1``.
        group: the expert-parallel process group. None: the default group if initialised, else this process alone.
        capacity: limit for the rows of a rank's experts, default :meth:`Capacity.worst_case`.
        sizes: other arguments of the subclass that determine shapes, by name.

    Layers may share a dispatcher if every rank calls them in the same order. In a group of several ranks, only one
    thread may call dispatchers. A second thread raises RuntimeError.

    Attributes:
        shapes: text with everything that determines shapes. It is the same in every run.
        key: `shapes`, with a number appended if another live dispatcher has the same. :func:`find_dispatcher` takes it.
        uses: number of users that have not closed the dispatcher.
        passes: recorded passes of its layers. Their CUDA graphs use the dispatcher's memory, so closing it frees them.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        group: dist.ProcessGroup | None = None,
        capacity: Capacity | float | None = None,
        sizes: dict[str, object] | None = None,
    ) -> None:
        group = checked_group(group)
        self.group = (group or dist.group.WORLD) if self.spans_ranks and dist.is_initialized() else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.world_size = 1 if self.group is None else self.group.size()
        self._shared_state = state_of(self.group) if self.world_size > 1 else None
        if not hasattr(num_experts, "__index__") or num_experts < 1 or num_experts % self.world_size:
            ranks = f"the {self.world_size} ranks of the group"
            raise ValueError(f"num_experts must be a multiple of {ranks}, at least 1, got {num_experts!r}")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.world_size
        self.capacity = Capacity.of(capacity)
        self.passes: dict[Callable[..., Any], Replayed] = {}
        self._counts: dict[torch.device, Tensor] = {}
        """By device, counts of all plans since the last check: the maximum of rows needed, sums of the other counts."""
        self._room = (0, 0, 0, 0)
        """(T_max, K, alignment, R_max) of the largest plan, with T_max the most tokens of any rank."""
        facts: dict[str, object] = {"mxep": installed_version()}  # part of the key in compilers' disk caches
        facts |= {"group": self.group and self.group.group_name, "world_size": self.world_size}
        facts |= {"num_experts": num_experts, "capacity": repr(self.capacity)} | (sizes or {})
        self.shapes = f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"
        # Live dispatchers with the same shapes need different keys, because their exchanges are separate.
        names = (self.shapes if n == 1 else f"{self.shapes} #{n}" for n in itertools.count(1))
        self.key = next(name for name in names if name not in _dispatchers)
        _dispatchers[self.key] = self
        self.uses = 1

    spans_ranks = True
    used = False
    """True after the first dispatch."""
    rehearsed = False
    """True after a layer has compiled its kernels ahead of time (`rehearse.py`)."""
    shared = False
    """True if :func:`make_dispatcher` made it and may share it between layers."""
    borrows = False
    """True if slots lie in the dispatcher's memory, where a later exchange overwrites them."""
    slots_are_tokens = False
    """True if slots are the payload itself, so that backward can make rows again from x."""
    in_graphs = False
    """True if exchanges need nothing from the host and a Routing contains only a plan: see :meth:`graph_state`."""
    has_rooms = False
    """True if `dispatch` has an argument ``room``. It is not inherited: each class must set it itself."""
    new_dispatch = NEW
    """Number of layer and failures that the next dispatch sends to peers, see `begin`."""
    _told: tuple[int, str] | None = None
    """(exchanges begun by then, text) of the last note of a failure to peers. None: no note is left."""
    blocks = 1
    """Number of blocks in each sender's tokens; each comes from another rank: see :func:`mxep.comms.make_plan`."""
    dim: int | None = None
    row_dtype: torch.dtype | None = None
    """Widest D, and widest dtype, of rows that fit the buffers. None: any."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={self.world_size}, capacity={self.capacity})"

    def __deepcopy__(self, memo: object) -> Self:
        # Copies of a layer share its dispatcher, because process groups and peers' memory cannot be copied.
        self.uses += 1
        return self

    of_this_process: tuple[str, ...] = ("passes",)
    """Names of dicts that pickling empties, because CUDA graphs and mapped memory belong to one process."""

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError(f"{type(self).__name__} of a process group cannot be pickled: save the layer's state_dict")
        return {**self.__dict__, **{name: {} for name in self.of_this_process}}

    def number_layer(self) -> int:
        """Return a new layer's number for `begin`, from 1 on; 0 without peers. Resets the count of failures. All ranks
        must make the layers of a group in one order."""
        if self._shared_state is None:
            return 0
        self._shared_state.failures = 0
        self._shared_state.layers += 1
        return self._shared_state.layers

    def begin(self, layer: int) -> None:
        """Declare to which layer the next dispatch belongs; 0: a layer without a number. If two ranks declare different
        numbers other than 0, the dispatch raises PeersDisagree. Raises RuntimeError as `claim` does."""
        if self._shared_state is not None:
            self.claim()
            self.new_dispatch = new_dispatch(layer, self._shared_state.failures)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager for a pass, or a part of one. If it raises, peers are told, because they may wait for this
        rank until their timeout.

        If a pass fails after it has sent something, peers may complete it. If this rank then repeats the pass alone,
        peers notice: the next dispatch's number includes this rank's number of failures (not for layer 0).
        """
        if self._shared_state is None:
            yield
            return
        sent = self._sent()
        try:
            yield
        except (PeerTimeout, PeersDisagree):
            raise
        except BaseException as error:
            self._shared_state.failures += self._sent() != sent
            self._told = self._sent(), tell_failure(self.group, error)
            raise

    def _sent(self) -> int:
        """Number of exchanges that this rank has begun."""
        return 0

    def told(self) -> str:
        """Notes of peers' errors, to be appended to an error message."""
        return told_failures(self.group, range(self.world_size))

    def claim(self) -> None:
        """Check that no second thread makes exchanges, else raise. Call it before each."""
        if self._shared_state is not None:
            self._shared_state.claim()

    def close(self) -> None:
        """Count one user less. If none is left, free the memory shared with peers. The dispatcher is then unusable.

        Users are: the code that made it, each layer that :func:`make_dispatcher` gives it to, each copy of a layer. All
        ranks must call close equally often.
        """
        self.uses -= 1
        if self.uses < 1:
            self.passes.clear()

    def check_usable(self, made_alone: bool) -> None:
        """Raise if the dispatcher is closed, or was made before there was a process group."""
        if self.uses < 1:
            raise RuntimeError("dispatcher: closed")
        if made_alone:
            raise ValueError(
                "the dispatcher was made for a process alone, and there is a process group now: initialise it before "
                "making the layer"
            )

    def reserve(self, max_tokens: int, device: torch.device | str) -> None:
        """Make room for dispatches of up to ``max_tokens`` tokens per rank: see :meth:`MoE.reserve`. Room never
        shrinks. Dispatchers that allocate buffers at each step do nothing."""
        self.claim()
        if max_tokens < 0:
            raise ValueError(f"reserve: got {max_tokens} tokens, wanted at least 0")
        if self._shared_state is not None:
            self._shared_state.failures = 0  # on all ranks, which repeat the step

    def room_for(self, x: Tensor, per_token: int = 1) -> int | None:
        """Number of rows to pad an eager call with x (T, D) to, so that batches of varying length share shapes.

        None: use the batch's own size. The result depends only on T, the device and `_most_rows`.
        per_token: number of rows of x per token of the caller.
        """
        tokens = len(x)
        if not type(self).__dict__.get("has_rooms") or not tokens or x.get_device() < LEAST_DEVICE_WITH_ROOMS:
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        most = self._most_rows(x.device)
        if most is None:
            return None
        return min(most, per_token * room_for(tokens // per_token)) if tokens <= most else None

    def _most_rows(self, device: torch.device) -> int | None:
        """Maximum tokens that an exchange has room for. None: not known yet."""
        return None

    def static_tokens(self, num_tokens: int) -> tuple[int, int] | None:
        """(number of senders, maximum tokens of each) for a dispatch of ``num_tokens``. None: not known before it."""
        return None

    @abstractmethod
    def dispatch(
        self, payload: Payload, expert_ids: Tensor, weights: Tensor, *, alignment: int, overlap: bool = False
    ) -> Handle[tuple[Payload, Routing]]:
        """Send tokens to their experts' ranks.

        Args:
            payload: one or several uint8 (T, n_i).
            expert_ids: (T, K) int32. weights: (T, K) fp32.
            alignment: each expert's rows are padded to a multiple of it.
            overlap: True if the caller runs other work before ``wait()``.
            room: only if `has_rooms`: the result of `room_for`. The payload may then have `room` rows, and `combine`
                returns `room` rows. Rows from T on are unspecified.

        The handle returns (slots, routing). slots: the received payload, uint8 (S, n_i) each. If the dispatcher
        ``borrows``, they are valid until the next exchange.
        """

    @abstractmethod
    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        """Send other bytes (T, n_i) of the same tokens, by the plan of `dispatch`. The handle returns (S, n_i) each."""

    @abstractmethod
    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        """Send rows (R_max, D) back to their tokens' ranks, and sum each token's rows in fp32 in a fixed order.

        The handle returns the sums (T, D), and row_values (R_max,) fp32 as (T, K), 0 for pairs without a row, or None.
        A token's rows on one rank are summed in the order of its expert_ids, and rounded to the rows' dtype. The ranks'
        sums are then summed in rank order. All dispatchers give the same bits, except the hierarchical one, which also
        rounds the sum of each node.
        """

    def graph_state(self) -> Hashable | None:
        """State, besides tensors, on which a recorded exchange depends. None: no record can be replayed now."""
        return None

    @property
    def recomputes(self) -> bool:
        """True if a layer may save only a part of gate_up (a capacity of overflow="recompute")."""
        return self.capacity.overflow == "recompute"

    def kept_rows(self, routing: Routing) -> int:
        """Number of rows of gate_up that a layer saves for backward."""
        return routing.plan.kept_rows(self.capacity) if self.recomputes else routing.plan.max_rows

    def launched(self, exchanges: int) -> None:  # noqa: B027  a dispatcher without peers counts nothing
        """Count the exchanges of a record that was replayed."""

    def check(self) -> None:
        """Raise errors counted since the last check: see :meth:`MoE.check`."""
        found = [counts.tolist() for counts in self._all_counts()]
        for transport in self._transports():
            transport.check()
        for each, counts in zip(found, self._counts.values()):
            counts.zero_()
            owners = len(each) // 2
            if any(each[owners:-1]) and self.capacity.overflow == "raise":
                raise CapacityExceeded(self._what_did_not_fit(each[:owners], each[owners:-1]))
            if each[-1]:
                raise ValueError(f"rank {self.rank}: {each[-1]} expert ids outside -1..{self.num_experts - 1}")
        if self._told is not None and self._sent() > self._told[0]:  # peers took part in an exchange since then
            tell_failure(self.group, self._told[1], over=True)
            self._told = None

    def counts(self) -> dict[str, Tensor]:
        """Counts since the last check, as 0-d int64 tensors on the device, without a host sync.

        ``dropped``: rows that did not fit the capacity. ``invalid``: expert ids out of range. Both cover all ranks and
        are equal on each. A checkpoint's recomputation counts again. Collective with the hierarchical dispatcher.
        """
        first, *others = self._all_counts() or [torch.zeros(3, dtype=torch.int64, device="cpu")]
        total = sum((each.to(first.device) for each in others), first)
        return {"dropped": total[len(total) // 2 : -1].sum(), "invalid": total[-1].clone()}

    def _all_counts(self) -> list[Tensor]:
        """`_running_counts` of each device, the same on all ranks."""
        return list(self._counts.values())

    def _transports(self) -> tuple[Transport, ...]:
        return ()

    def _what_did_not_fit(self, needed: list[int], overflow: list[int]) -> str:
        max_tokens, top_k, alignment, max_rows = self._room
        lost = ", ".join(
            f"{rows} on rank {rank}, which needed {needed[rank]}" for rank, rows in enumerate(overflow) if rows
        )
        cure = "a token names an expert twice"
        if self.capacity.kind == "factor" and not self.recomputes:
            sizes = {"num_local_experts": self.num_local_experts, "alignment": alignment}
            enough = Capacity.enough(max(needed), max_tokens, top_k, **sizes)
            cure = f"Capacity.factor({enough:g}) would have been enough"
        return f"rows did not fit {self.capacity}, {max_rows} on each rank: {lost}; the step is not usable, {cure}"

    def _running_counts(self, device: torch.device, owners: int) -> Tensor:
        """(2 * owners + 1,) int64, to which plans on this device add `RoutingPlan.counts`."""
        self.used = True
        if device not in self._counts:
            zeros = functools.partial(torch.zeros, 2 * owners + 1, dtype=torch.int64, device=device)
            self._counts.setdefault(device, made_to_stay(device, zeros))  # setdefault: another thread may be faster
            fixed(self._counts[device])
        return self._counts[device]

    def _plan(
        self,
        ids: Tensor,
        weights: Tensor,
        num_tokens: Tensor,
        *,
        alignment: int,
        capacity: Capacity,
        invalid: int = 0,
        max_tokens: int | None = None,
    ) -> RoutingPlan:
        """invalid: number of invalid ids that were removed before. max_tokens: see `make_plan`."""
        total = self._running_counts(ids.device, self.world_size)
        sizes: dict[str, Any] = {"first_expert": self.rank * self.num_local_experts, "num_experts": self.num_experts}
        sizes |= {"num_local_experts": self.num_local_experts, "alignment": alignment, "capacity": capacity}
        sizes |= {"blocks": self.blocks, "max_tokens": max_tokens}
        plan: RoutingPlan = _plan(ids, weights, num_tokens, total, **sizes, invalid=invalid)
        tokens, top_k = ids.shape[1:]
        max_rows = plan.max_rows
        if max_tokens is not None:  # the actual number of tokens decides how many rows fit
            max_rows = capacity.rows(1, tokens, top_k, num_local_experts=self.num_local_experts, alignment=alignment)
        self._room = max(self._room, (tokens, top_k, alignment, max_rows))
        return plan


@replayed
def _plan(
    ids: Tensor, weights: Tensor, num_tokens: Tensor, running: Tensor, *, invalid: int, **sizes: Any
) -> RoutingPlan:
    """Call `make_plan`, which adds to `running`, the dispatcher's counts. The plan has no dispatch number yet."""
    plan = make_plan(ids, weights, num_tokens, **sizes, running=running)
    if invalid:
        plan.counts[-1] += invalid
        running[-1] += invalid
    return dataclasses.replace(plan, dispatch=None)
