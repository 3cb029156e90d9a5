"""What the differentiable functions ask of a token dispatcher, and the handle that leads home.

A dispatcher moves bytes and plans rows; it knows one number about formats, the multiple that groups are padded to.
Three moves, used twice each way:

    send       tokens out, with their ids and weights; makes the plan   (dispatch forward)
    resend     tokens out again along that plan                         (combine backward)
    give_back  rows home, summed                                        (combine forward, dispatch backward)

T tokens of this rank, K experts a token, D model dim, E experts in all, e local experts, W ranks,
S slots: what the local plan indexes (tokens themselves, received rows, or symmetric-memory slots).
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import Capacity, CapacityExceeded, RoutingPlan, make_plan

from ..recomputation import recomputing

Parts = tuple[Tensor, ...]

DISPATCHERS_BY_NUMBER: weakref.WeakValueDictionary[int, TokenDispatcher] = weakref.WeakValueDictionary()
"""By ``dispatcher.number``: how ops of a compiled graph, which take no objects, find theirs."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Routing:
    """One dispatch, remembered: enough to go the way again and to go home.

    Attributes:
        plan: which slot feeds which expert-major row on this rank.
        expert_ids: (T, K) int32, this rank's own tokens.
        experts_per_rank: e.
    """

    plan: RoutingPlan
    expert_ids: Tensor
    experts_per_rank: int

    def stats(self) -> dict[str, Tensor]:
        """Counts as 0-d int64 tensors on the device, no host sync.

        ``routed``: (token, expert) pairs of this rank's tokens. ``sent``: rows this rank's tokens put on the wire,
        those to itself included. ``live``: rows this rank's experts compute, padding included. ``padding``: of these.
        """
        live = self.plan.group_ends[-1].long()
        return {
            "routed": (self.expert_ids >= 0).sum(),
            "sent": self.wire_rows(),
            "live": live,
            "padding": live - (self.plan.row_slot >= 0).sum(),
        }

    def wire_rows(self) -> Tensor:
        """Rows this rank's tokens put on the wire, 0-d int64: one per distinct (token, destination rank)."""
        ids = self.expert_ids
        rank = torch.where(ids >= 0, ids.div(self.experts_per_rank, rounding_mode="floor"), -1).sort(-1).values
        first = torch.ones_like(rank, dtype=torch.bool)
        first[:, 1:] = rank[:, 1:] != rank[:, :-1]
        return (first & (rank >= 0)).sum()


class TokenDispatcher(ABC):
    """Base of the three dispatchers.

    Args:
        num_experts: E, a multiple of the group's size; rank r owns experts ``r * e .. (r + 1) * e - 1``.
        group: the expert-parallel process group. None: the default group if one is initialised, else this process.
        capacity: bound on expert-major rows, :meth:`Capacity.worst_case` unless given.

    Several layers may share a dispatcher as long as every rank calls it in the same order.
    """

    def __init__(
        self, num_experts: int, *, group: dist.ProcessGroup | None = None, capacity: Capacity | None = None
    ) -> None:
        distributed = dist.is_initialized() and self.spans_ranks
        self.group = group
        self.rank = dist.get_rank(group) if distributed else 0
        self.world_size = dist.get_world_size(group) if distributed else 1
        if num_experts % self.world_size:
            raise ValueError(
                f"num_experts must be a multiple of the {self.world_size} ranks of the group, got {num_experts}"
            )
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.world_size
        self.capacity = Capacity.worst_case() if capacity is None else capacity
        self._lost: Tensor | None = None
        self.number = next(_numbers)
        DISPATCHERS_BY_NUMBER[self.number] = self

    spans_ranks = True
    borrows = False
    """Whether slots are the dispatcher's, and written again by a later move."""
    row_dtype: torch.dtype | None = None
    """The widest dtype of rows that there is room for; None: any."""

    def __deepcopy__(self, memo: object) -> Self:
        # Copies of a layer share its dispatcher, as layers may: neither process groups nor peers' memory can be copied.
        return self

    def static_tokens(self, num_tokens: int) -> tuple[int, int] | None:
        """(senders, the most tokens of each) of a send of ``num_tokens``, where that is known without running it."""
        return None

    @abstractmethod
    def send(self, parts: Parts, expert_ids: Tensor, weights: Tensor, *, multiple: int) -> tuple[Parts, Routing]:
        """Tokens to their experts' ranks.

        Args:
            parts: uint8 (T, n_i) each, the bytes of a row cut in parts.
            expert_ids: (T, K) int32. weights: (T, K) fp32.
            multiple: groups are padded to it.

        Returns the parts as slots (S, n_i), until the next move if the dispatcher ``borrows``, and the routing.
        """

    def start_send(
        self, parts: Parts, expert_ids: Tensor, weights: Tensor, *, multiple: int
    ) -> Callable[[], tuple[Parts, Routing]]:
        """:meth:`send`, begun; what it returns waits for it. Where moves can run aside, they do meanwhile."""
        result = self.send(parts, expert_ids, weights, multiple=multiple)
        return lambda: result

    @abstractmethod
    def resend(self, parts: Parts, routing: Routing) -> Parts:
        """The same move for other bytes, no planning: (T, n_i) each -> slots (S, n_i), as of send."""

    def start_resend(self, parts: Parts, routing: Routing) -> Callable[[], Parts]:
        """:meth:`resend`, begun, as `start_send` begins `send`."""
        result = self.resend(parts, routing)
        return lambda: result

    @abstractmethod
    def give_back(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows home: ``rows`` (R_max, D) -> (T, D), each token's rows summed in fp32 in a fixed order.

        Per destination rank a token's rows are summed in its list's order and rounded to the rows' dtype, then the
        ranks' sums in rank order, whatever the dispatcher: over the same ranks they agree bit for bit.
        ``row_values`` (R_max,) fp32 come back as (T, K), 0 where nothing was routed.
        """

    def start_give_back(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """:meth:`give_back`, begun, as `start_send` begins `send`."""
        result = self.give_back(rows, routing, row_values)
        return lambda: result

    def check(self) -> None:
        """Raise what was counted since the last check. It reads from the device: call it once a step, not in the layer.

        Raises CapacityExceeded if rows did not fit ``capacity``, ValueError if expert ids were out of range.
        """
        if self._lost is None:
            return
        overflow, invalid = self._lost.tolist()
        self._lost.zero_()
        if overflow:
            raise CapacityExceeded(
                f"rank {self.rank}: {overflow} rows did not fit {self.capacity}; the step is not usable, "
                "raise the factor or use Capacity.worst_case()"
            )
        if invalid:
            raise ValueError(f"rank {self.rank}: {invalid} expert ids outside -1..{self.num_experts - 1}")

    def _check_ids(self, expert_ids: Tensor) -> Tensor:
        """Ids with those out of range made -1: an error at once on the CPU, counted for :meth:`check` elsewhere."""
        wrong = (expert_ids < -1) | (expert_ids >= self.num_experts)
        if expert_ids.device.type == "cpu" and bool(wrong.any()):
            raise ValueError(
                f"expert ids must lie in -1..{self.num_experts - 1}, got {expert_ids[wrong].unique().tolist()}"
            )
        self._count(torch.zeros_like(wrong.sum()), wrong.sum())
        return torch.where(wrong, -1, expert_ids)

    def _plan(
        self, ids: Tensor, weights: Tensor, num_tokens: Tensor, *, multiple: int, capacity: Capacity
    ) -> RoutingPlan:
        plan = make_plan(
            ids,
            weights,
            num_tokens,
            first_expert=self.rank * self.num_local_experts,
            num_local_experts=self.num_local_experts,
            multiple=multiple,
            capacity=capacity,
            num_experts=self.num_experts,
        )
        self._count(plan.overflow, plan.invalid)
        return plan

    def _count(self, overflow: Tensor, invalid: Tensor) -> None:
        if recomputing():
            return
        if self._lost is None:
            with torch.inference_mode(False):
                self._lost = torch.zeros(2, dtype=torch.int64, device=overflow.device)
        self._lost += torch.stack((overflow, invalid))
