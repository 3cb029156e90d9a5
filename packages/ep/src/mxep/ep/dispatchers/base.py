"""Interface of token dispatchers, and the routing that `combine` takes.

A dispatcher transports bytes and plans rows. It knows nothing of formats except the alignment of groups. Exchanges:

    dispatch    tokens to their experts, with their ids and weights; makes the plan   (forward)
    redispatch  other bytes of the same tokens, by the plan of dispatch               (backward of combine)
    combine     rows back to their tokens' ranks, summed                              (forward; backward of dispatch)

Each returns a handle. If the dispatcher can, it runs the exchange on a communication stream until `wait()`.

T tokens of this rank, K experts per token, D model dim, E experts in all, e local experts, W ranks,
S slots that the local plan indexes (tokens themselves, received rows, or symmetric-memory slots).
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
from .groups import exchanges_of, made_to_stay


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
        """Return the exchange's result. The current stream waits for it, the host does not. Call it once."""


class Done(NamedTuple, Generic[_T]):
    """A handle of an exchange that is over."""

    result: _T

    def wait(self) -> _T:
        return self.result


class Later(Generic[_T]):
    """A handle that runs the last steps of its exchange in ``wait``, then frees their tensors."""

    def __init__(self, finish: Callable[[], _T]) -> None:
        self._steps = [finish]

    def wait(self) -> _T:
        return self._steps.pop()()


Payload = tuple[Tensor, ...]
"""uint8 (N, n_i) each: the bytes of N rows, cut into parts."""
LEAST_DEVICE_WITH_ROOMS = 0
"""Index of the first device on which batches of varying length share shapes. -1 is the CPU, which replays nothing."""

_dispatchers: weakref.WeakValueDictionary[str, "TokenDispatcher"] = weakref.WeakValueDictionary()
"""Live dispatchers by ``key``."""


def find_dispatcher(key: str) -> "TokenDispatcher":
    """The live dispatcher with this ``key``, which ops of compiled graphs take instead of an object. Raises KeyError if
    it is gone."""
    return _dispatchers[key]


def unused_twin(made: "TokenDispatcher") -> "TokenDispatcher | None":
    """A live, shareable dispatcher like `made` that has not dispatched yet, or None."""
    for each in _dispatchers.values():
        # Names of groups are reused after a group is destroyed.
        alike = each.shapes == made.shapes and each.group is made.group
        if each is not made and each.shared and alike and each.uses and not each.used:
            return each
    return None


def check_reserved(most: int, max_tokens: int | None) -> None:
    """Raise ValueError if `most`, the tokens to reserve, exceeds the dispatcher's max_tokens."""
    if max_tokens is not None and most > max_tokens:
        raise ValueError(f"reserve: got {most} tokens, wanted at most the max_tokens = {max_tokens} of this layer")


@dataclass(frozen=True)
class Routing(Bundle):
    """Metadata of a dispatch, for `redispatch` and `combine`.

    Attributes:
        plan: assigns slots to expert-major rows on this rank.
        expert_ids: (T, K) int32, for this rank's tokens.
        experts_per_rank: e.
        room: rows of the results of `combine`, at least T; None: T.
    """

    plan: RoutingPlan
    expert_ids: Tensor
    experts_per_rank: int
    room: int | None = dataclasses.field(default=None, kw_only=True)

    def stats(self) -> dict[str, Tensor]:
        """Counts as 0-d int64 tensors on the device, no host sync.

        ``routed``: (token, expert) pairs of this rank's tokens. ``sent``: rows that this rank's tokens put on the wire,
        including those to itself. ``computed``: rows of this rank's GEMMs, ``padding`` included. ``dropped``: rows of
        all ranks that did not fit the capacity. ``invalid``: ids out of range, of all ranks' tokens. The last two are
        the same on all ranks.
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
        """Rows that this rank's tokens put on the wire, 0-d int64: one per distinct (token, destination rank)."""
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
        capacity: bound on expert-major rows, default :meth:`Capacity.worst_case`.
        sizes: a subclass's other arguments that fix shapes, by name.

    Layers may share a dispatcher if every rank calls them in the same order. In a group of several ranks, one thread
    calls all dispatchers. A second thread raises RuntimeError.

    Attributes:
        shapes: all that fixes shapes, as text, the same in every run.
        key: the shapes, with a number if another live dispatcher has the same. :func:`find_dispatcher` takes it.
        uses: number of users that have not closed it.
        passes: recorded passes of the layers it serves. Their CUDA graphs use its memory, so closing it frees them.
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
        self._exchanges = exchanges_of(self.group) if self.world_size > 1 and self.group is not None else None
        if not hasattr(num_experts, "__index__") or num_experts < 1 or num_experts % self.world_size:
            ranks = f"the {self.world_size} ranks of the group"
            raise ValueError(f"num_experts must be a multiple of {ranks}, at least 1, got {num_experts!r}")
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.world_size
        self.capacity = Capacity.of(capacity)
        self.passes: dict[Callable[..., Any], Replayed] = {}
        self._counts: dict[torch.device, Tensor] = {}
        """Counts of plans since the last check: the most rows needed, sums of the others."""
        self._room = (0, 0, 0, 0)
        """T_max, K, alignment and R_max of the largest plan."""
        facts: dict[str, object] = {"mxep": installed_version()}  # a compiler's disk cache knows ops by these
        facts |= {"group": self.group and self.group.group_name, "world_size": self.world_size}
        facts |= {"num_experts": num_experts, "capacity": repr(self.capacity)} | (sizes or {})
        self.shapes = f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"
        # Live dispatchers of the same shapes need different names, because their exchanges are separate.
        names = (self.shapes if n == 1 else f"{self.shapes} #{n}" for n in itertools.count(1))
        self.key = next(name for name in names if name not in _dispatchers)
        _dispatchers[self.key] = self
        self.uses = 1

    spans_ranks = True
    used = False
    """True once anything was dispatched."""
    rehearsed = False
    """True once a layer was asked to compile its kernels ahead (`rehearse.py`)."""
    shared = False
    """True if :func:`make_dispatcher` made it and may share it between layers."""
    borrows = False
    """True if slots are the dispatcher's memory, which a later exchange overwrites."""
    slots_are_tokens = False
    """True if slots are the payload itself, so that backward can make rows again from x."""
    in_graphs = False
    """True if exchanges need nothing from the host, and a routing is only a plan: see :meth:`graph_state`."""
    has_rooms = False
    """True if `dispatch` takes ``room``. Each class states it itself, because a derived class need not."""
    new_dispatch = NEW
    """Number that the next dispatch sends, see `begin`."""
    _told: tuple[int, str] | None = None
    """Exchanges begun when peers were told of a failure, and the note's text; None: no note is left."""
    blocks = 1
    """Number of blocks in each sender's tokens. Each block has its own source: see :func:`mxep.comms.make_plan`."""
    row_dtype: torch.dtype | None = None
    """Widest dtype of rows that buffers have room for; None: any."""

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
        """Number of a new layer, for `begin`: from 1 on, or 0 without peers. All ranks must make a group's layers in
        one order. It resets the count of failures."""
        if self._exchanges is None:
            return 0
        self._exchanges.failures = 0
        self._exchanges.layers += 1
        return self._exchanges.layers

    def begin(self, layer: int) -> None:
        """Declare that the next dispatch belongs to this layer, or to one without a number (0). The dispatch raises
        PeersDisagree if two ranks give different numbers other than 0. Raises RuntimeError as `claim` does."""
        if self._exchanges is not None:
            self.claim()
            self.new_dispatch = new_dispatch(layer, self._exchanges.failures)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a pass, or a part of one. If it raises, tell peers, which may wait for this rank until their timeout.

        Peers may complete a pass that failed here after it had sent something. The next dispatch's number includes the
        number of failures (not for layer 0), so peers notice if only this rank repeats the pass.
        """
        if self._exchanges is None:
            yield
            return
        sent = self._sent()
        try:
            yield
        except (PeerTimeout, PeersDisagree):
            raise
        except BaseException as error:
            self._exchanges.failures += self._sent() != sent
            self._told = self._sent(), tell_failure(self.group, error)
            raise

    def _sent(self) -> int:
        """Number of exchanges that this rank has begun."""
        return 0

    def told(self) -> str:
        """Notes of errors that peers raised, as the end of a message."""
        return told_failures(self.group, range(self.world_size))

    def claim(self) -> None:
        """Call before anything that peers take part in. Raises on a second thread: `mxep.comms.OneThread`."""
        if self._exchanges is not None:
            self._exchanges.thread.claim()

    def close(self) -> None:
        """Remove one user. With the last user, memory shared with peers is freed. All ranks must call it equally often.

        Users are its maker, each layer that :func:`make_dispatcher` gives it to, and each copy of a layer. Without
        users it is unusable.
        """
        self.uses -= 1
        if self.uses < 1:
            self.passes.clear()

    def check_usable(self, made_alone: bool) -> None:
        """Raise if it is closed, or was made before there was a process group."""
        if self.uses < 1:
            raise RuntimeError("dispatcher: closed")
        if made_alone:
            raise ValueError(
                "the dispatcher was made for a process alone, and there is a process group now: initialise it before "
                "making the layer"
            )

    def reserve(self, max_tokens: int, device: torch.device | str) -> None:
        """Make room for calls with up to ``max_tokens`` of the dispatcher's tokens per rank, as :meth:`MoE.reserve`
        does. Room never shrinks. Dispatchers with buffers of each step's size do nothing."""
        self.claim()
        if max_tokens < 0:
            raise ValueError(f"reserve: got {max_tokens} tokens, wanted at least 0")
        if self._exchanges is not None:
            self._exchanges.failures = 0  # on all ranks, which repeat the step

    def room_for(self, x: Tensor, per_token: int = 1) -> int | None:
        """Rows reserved for an eager call with x (T, D), if batches of varying length share shapes; None: use the
        batch's own sizes. The result follows from T, the device and the most tokens that the dispatcher has room for.

        per_token: rows of x per token of the caller.
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
        """Maximum tokens that an exchange has room for; None: not known yet."""
        return None

    def static_tokens(self, num_tokens: int) -> tuple[int, int] | None:
        """(senders, most tokens of each) of a dispatch of ``num_tokens``. None: known only after the dispatch."""
        return None

    @abstractmethod
    def dispatch(
        self, payload: Payload, expert_ids: Tensor, weights: Tensor, *, alignment: int, overlap: bool = False
    ) -> Handle[tuple[Payload, Routing]]:
        """Send tokens to their experts' ranks.

        Args:
            payload: uint8 (T, n_i) each.
            expert_ids: (T, K) int32. weights: (T, K) fp32.
            alignment: groups are padded to multiples of it.
            overlap: let other work run before ``wait()``.
            room: only if `has_rooms`: the result of `room_for`. The payload may then have that many rows, and `combine`
                returns that many. Rows past T are unspecified.

        Returns the payload as slots (S, n_i), valid until the next exchange if the dispatcher ``borrows``, and the
        routing.
        """

    @abstractmethod
    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        """Repeat the exchange for other bytes, without planning: (T, n_i) each -> slots (S, n_i) as in `dispatch`."""

    @abstractmethod
    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        """Return rows to their tokens' ranks: ``rows`` (R_max, D) -> (T, D), summed per token in fp32 in a fixed order.

        For each rank, a token's rows are summed in its list's order and rounded to the rows' dtype. The ranks' sums are
        then summed in rank order. Dispatchers over the same ranks agree bit for bit, except the hierarchical one: it
        rounds a node's sum, too. ``row_values`` (R_max,) fp32 return as (T, K), 0 where nothing was routed.
        """

    def graph_state(self) -> Hashable | None:
        """State on which a record of exchanges depends, besides tensors. None: no record can be replayed now."""
        return None

    @property
    def recomputes(self) -> bool:
        """True if a layer may save fewer rows than it has (a capacity of overflow="recompute")."""
        return self.capacity.overflow == "recompute"

    def kept_rows(self, routing: Routing) -> int:
        """Number of rows of gate_up that a layer saves for backward."""
        return routing.plan.kept_rows(self.capacity) if self.recomputes else routing.plan.max_rows

    def launched(self, exchanges: int) -> None:  # noqa: B027  a dispatcher without peers counts nothing
        """Count the exchanges of a record that was replayed."""

    def check(self) -> None:
        """Raise failures counted since the last check: see :meth:`MoE.check`."""
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
        if self._told is not None and self._sent() > self._told[0]:  # peers have met this rank since then
            tell_failure(self.group, self._told[1], over=True)
            self._told = None

    def counts(self) -> dict[str, Tensor]:
        """Counts since the last check, as 0-d int64 tensors on the device, no host sync.

        ``dropped``: rows that did not fit the capacity. ``invalid``: expert ids out of range. Both cover all ranks and
        are the same on each. A checkpoint's recomputation counts again. Collective with the hierarchical dispatcher.
        """
        first, *others = self._all_counts() or [torch.zeros(3, dtype=torch.int64, device="cpu")]
        total = sum((each.to(first.device) for each in others), first)
        return {"dropped": total[len(total) // 2 : -1].sum(), "invalid": total[-1].clone()}

    def _all_counts(self) -> list[Tensor]:
        """`RoutingPlan.counts` by device, the same on all ranks."""
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
        """(2 owners + 1,) int64 to which plans on this device add their counts."""
        self.used = True
        if device not in self._counts:
            zeros = functools.partial(torch.zeros, 2 * owners + 1, dtype=torch.int64, device=device)
            self._counts.setdefault(device, made_to_stay(device, zeros))  # another thread may have been faster
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
        """invalid: number of ids that are no longer in the tables. max_tokens: see `make_plan`."""
        total = self._running_counts(ids.device, self.world_size)
        sizes: dict[str, Any] = {"first_expert": self.rank * self.num_local_experts, "num_experts": self.num_experts}
        sizes |= {"num_local_experts": self.num_local_experts, "alignment": alignment, "capacity": capacity}
        sizes |= {"blocks": self.blocks, "max_tokens": max_tokens}
        plan: RoutingPlan = _plan(ids, weights, num_tokens, total, **sizes, invalid=invalid)
        tokens, top_k = ids.shape[1:]
        max_rows = plan.max_rows
        if max_tokens is not None and capacity.kind != "exact":  # the actual tokens decide how many rows fit
            max_rows = capacity.rows(1, tokens, top_k, num_local_experts=self.num_local_experts, alignment=alignment)
        self._room = max(self._room, (tokens, top_k, alignment, max_rows))
        return plan


@replayed
def _plan(
    ids: Tensor, weights: Tensor, num_tokens: Tensor, running: Tensor, *, invalid: int, **sizes: Any
) -> RoutingPlan:
    """`make_plan`. It adds to running, the dispatcher's counts. The plan has no dispatch number yet."""
    plan = make_plan(ids, weights, num_tokens, **sizes, running=running)
    if invalid:
        plan.counts[-1] += invalid
        running[-1] += invalid
    return dataclasses.replace(plan, dispatch=None)
