"""AllToAllDispatcher uses all-to-all collectives with split sizes, on any fabric and torch backend. It is the baseline.

    dispatch    one all-to-all of rows sorted by destination rank, one row per (token, expert): bytes, id, weight
    redispatch  one all-to-all of other bytes, in the same order of rows
    combine     one all-to-all that returns the rows; then each token's rows are summed

The host must know split sizes. Only a dispatch exchanges them, with a device-to-host copy. Received rows are ordered by
source rank, then token, then position in the token's expert_ids. They are the slots of a plan with one sender. So
experts get the same rows in the same order as with the other dispatchers. Receive buffers are rounded up, so that
shapes repeat and steps between exchanges are replayed.

The rows that a rank sends to another begin with a header row. In the plan, it is a pair without an expert.

    header   number of the dispatch * 4 + step (1 dispatch, 2 redispatch, 3 combine), int32; other bytes are 0. A new
             dispatch has no number yet, so its header has its layer's number (`TokenDispatcher.begin`)

Each receiver compares the headers with its own. Different headers reveal a rank that leaves out an exchange, or makes
exchanges in another order. Sizes would not reveal it: the hierarchical dispatcher, which uses headers, too, has blocks
of one size. The number is part of the plan on the device, so CUDA graphs can contain all of this. A mismatch raises at
once on CPUs. On GPUs the host reads it without a sync, at the next exchange or in `check()`.

T tokens of this rank, K experts per token, E experts in all, W ranks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    Capacity,
    PeersDisagree,
    compare_headers,
    describe_dispatch,
    gather_rows,
    join_rows,
    narrow_ids,
    plan_all_to_all,
    sum_slots,
)
from mxep.runtime.lengths import room_for
from mxep.runtime.replay import replayed

from .base import Done, Handle, Payload, Routing, TokenDispatcher
from .groups import made_to_stay

STEPS = "", "dispatch", "redispatch", "combine"


class Headers:
    """Compares a dispatcher's headers. ranks: for each block of received rows, the rank that sent it."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._found: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """By device, (found, copy for the host). found: (1 + W,) int32: 0, or 1 and the headers of the first mismatch.
        """
        self._new: dict[tuple[torch.device, int], Tensor] = {}

    def new(self, number: int, device: torch.device) -> Tensor:
        """Make a (1,) int32 tensor of this number, to send in a header."""
        if (device, number) not in self._new:
            made = made_to_stay(device, lambda: torch.full((1,), number, dtype=torch.int32, device=device))
            self._new[device, number] = made
        return self._new[device, number]

    def compare(self, rows: Tensor, sizes: Tensor, number: Tensor, step: str) -> None:
        """Compare received headers with this rank's. If they differ, raise PeersDisagree, on CUDA later in `check`.

        rows: (R, n) uint8, which consist of W blocks. number: (1,) int32.
        sizes: (W, any) int64, with each block's number of rows in the first column."""
        device = rows.device
        if device not in self._found:
            self._found[device] = made_to_stay(device, lambda: self._make(device))
        found, seen = self._found[device]
        _compare(rows, sizes, number, found, step=STEPS.index(step))
        if device.type == "cuda":
            seen.copy_(found, non_blocking=True)
        else:
            self.check()

    def check(self) -> None:
        """Raise PeersDisagree for a mismatch that has reached the host. Does not wait for the device."""
        for _, seen in self._found.values():
            differ, *words = seen.tolist() if int(seen.numpy()[0]) else [0]
            if differ:
                found = (f"rank {rank} at {_said(word)}" for rank, word in zip(self.ranks, words))
                raise PeersDisagree(f"rank {self.rank} met peers in other exchanges: {', '.join(found)}")

    def _make(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found = torch.zeros(1 + len(self.ranks), dtype=torch.int32, device=device)
        return found, torch.zeros_like(found, device="cpu", pin_memory=True) if device.type == "cuda" else found


def _said(word: int) -> str:
    number, step = word >> 2, word & 3
    return f"{STEPS[step]} of {describe_dispatch(number)}" if STEPS[step] else "none of this layer's"


@replayed
def _compare(rows: Tensor, sizes: Tensor, number: Tensor, found: Tensor, *, step: int) -> Tensor:
    """Compare headers, and write the first mismatch to found (1 + W,), see `Headers`."""
    compare_headers(rows, sizes, number, found, step)
    return found


@dataclass(frozen=True)
class AllToAllRouting(Routing):
    """A Routing, with the order of rows and the sizes of the collectives.

    Attributes:
        token, position, rows, sums: indices of sent and returned rows, see `plan_all_to_all`.
        sent: for each rank, the number of rows sent to it, including the header.
        received: for each rank, the number of rows received from it, including the header.
        sizes: (W, 3) int64 on the device, the sizes that were sent. The first column has the numbers of `sent`.
        sizes_received: likewise for `received`.
    """

    token: Tensor
    position: Tensor
    rows: Tensor
    sums: Tensor
    sent: list[int]
    received: list[int]
    sizes: Tensor
    sizes_received: Tensor

    def wire_rows(self) -> Tensor:
        return (self.expert_ids >= 0).sum()


class AllToAllDispatcher(TokenDispatcher):
    """See :class:`TokenDispatcher`. Buffers are allocated with each step's size, so ``capacity`` is ignored."""

    borrows = True
    """True so that slots are copied: they are columns of the received rows, and their copies are dense."""
    recomputes = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers = Headers(self.rank, list(range(self.world_size)))

    def dispatch(
        self, payload: Payload, expert_ids: Tensor, weights: Tensor, *, alignment: int, overlap: bool = False
    ) -> Handle[tuple[Payload, Routing]]:
        self.claim()
        width = sum(widths_of(payload))
        planned = _plan_rows(
            narrow_ids(expert_ids),
            weights,
            experts_per_rank=self.num_local_experts,
            num_ranks=self.world_size,
            width=width,
        )
        sizes, routed, token, tables, position, rows, sums = planned
        sent, received, invalid, widths, sizes_received = self._exchange_sizes(sizes)
        if set(widths) != {width}:  # e.g. because ranks picked recipes by different max_tokens
            raise ValueError(f"payload: got rows of {widths} bytes, by rank, wanted the same on all ranks")
        if any(invalid) and expert_ids.device.type == "cpu":
            wrong = expert_ids[(expert_ids < -1) | (expert_ids >= self.num_experts)]
            whose = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(invalid) if n)
            found = wrong.unique().tolist() or ""
            raise ValueError(f"expert ids must lie in -1..{self.num_experts - 1}, got others: {whose} {found}")
        count = 0
        if self._shared_state is not None:
            self._shared_state.dispatches += 1
            count = self._shared_state.dispatches % 2**29
        number = torch.full((1,), count, dtype=torch.int32, device=expert_ids.device)
        room = self.world_size + room_for(sum(received) - self.world_size)
        header = self._headers.new(self.new_dispatch, expert_ids.device)
        way = sent, received, sizes_received, room
        arrived = self._all_to_all(payload, token, tables, *way, header, "dispatch")
        *slots, ids, weight = split_columns(arrived, [*widths_of(payload), 4, 4])
        ids, weight = gather_rows((ids, weight), None)
        plan = self._plan(
            ids.view(torch.int32)[None],
            weight.view(torch.float32)[None],
            torch.full((1,), sum(received), dtype=torch.int32, device=ids.device),
            alignment=alignment,
            capacity=Capacity.worst_case(),  # each slot has one pair, so this adds only padding
            invalid=sum(invalid),
        )
        plan = dataclasses.replace(plan, dispatch=number)
        places = token, position, rows, sums, sent, received, sizes, sizes_received
        routing = AllToAllRouting(plan, routed, self.num_local_experts, *places)
        return Done((tuple(slots), routing))

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        assert isinstance(routing, AllToAllRouting)
        self.claim()
        way = routing.sent, routing.received, routing.sizes_received, len(routing.plan.slot_rows)
        arrived = self._all_to_all(payload, routing.token, None, *way, routing.plan.dispatch, "redispatch")
        return Done(split_columns(arrived, widths_of(payload)))

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        assert isinstance(routing, AllToAllRouting)
        self.claim()
        payload = [rows.contiguous().view(torch.uint8)]
        if row_values is not None:
            payload.append(row_values[:, None].view(torch.uint8))
        way = routing.received, routing.sent, routing.sizes, len(routing.token)
        arrived = self._all_to_all(payload, routing.plan.slot_rows[:, 0], None, *way, routing.plan.dispatch, "combine")
        returned, *values = split_columns(arrived, widths_of(payload))
        if not returned.is_contiguous():  # `sum_slots` reads dense rows
            (returned,) = gather_rows((returned,), None)
        # Sum a token's rows from one rank in the order of its expert_ids, then the ranks' sums in rank order.
        out = sum_slots(sum_slots(returned.view(rows.dtype), routing.rows), routing.sums)
        if not values:
            return Done((out, None))
        (of_pairs,) = gather_rows(values, routing.position.flatten())
        return Done((out, of_pairs.view(torch.float32).view(routing.position.shape)))

    def _sent(self) -> int:
        return 0 if self._shared_state is None else self._shared_state.collectives

    def _exchange_sizes(self, outgoing: Tensor) -> tuple[list[int], list[int], list[int], list[int], Tensor]:
        """Exchange the (W, 3) sizes of outgoing rows, and copy them to the host, as NCCL's all-to-all needs them there.

        Returns, as one list each with an entry per rank: rows to it, rows from it, its invalid ids, its row width.
        Returns also the received sizes (W, 3), on the device.
        """
        incoming = outgoing
        if self.world_size > 1:
            incoming = torch.empty_like(outgoing)
            self._collective(incoming, outgoing)
        sent, received, invalid, widths = torch.cat((outgoing[:, :1], incoming), 1).t().tolist()
        return sent, received, invalid, widths, incoming

    def _all_to_all(
        self,
        payload: Sequence[Tensor],
        index: Tensor,
        table: Tensor | None,
        sent: list[int],
        received: list[int],
        sizes_received: Tensor,
        room: int,
        number: Tensor | None,
        step: str,
    ) -> Tensor:
        """Send the first sum(sent) rows of `join_rows`. Returns (room, n) with sum(received) received rows first."""
        if self.world_size == 1:
            return join_rows(payload, index, table)  # one rank needs no room
        assert number is not None
        self._headers.check()
        outgoing = join_rows(payload, index, table, number, STEPS.index(step))
        incoming = outgoing.new_empty(room, outgoing.shape[1])
        of_ranks = incoming[: sum(received)], outgoing[: sum(sent)], received, sent
        self._collective(*of_ranks)
        self._headers.compare(incoming, sizes_received, number, step)
        return incoming

    def _collective(
        self, incoming: Tensor, outgoing: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> None:
        if self._shared_state is not None:
            self._shared_state.collectives += 1
        try:
            dist.all_to_all_single(incoming, outgoing, received, sent, group=self.group)
        except RuntimeError as error:  # from gloo; NCCL's watchdog ends the process instead
            if told := self.told():
                raise RuntimeError(f"{error}{told}") from error
            raise

    def check(self) -> None:
        for counts in self._counts.values():
            counts.tolist()  # waits for all exchanges
        self._headers.check()
        super().check()


def widths_of(payload: Sequence[Tensor]) -> list[int]:
    return [part.shape[1] for part in payload]


@replayed
def _plan_rows(
    ids: Tensor, weights: Tensor, *, experts_per_rank: int, num_ranks: int, width: int
) -> tuple[Tensor, ...]:
    return (*plan_all_to_all(ids, weights, experts_per_rank, num_ranks, width),)


def split_columns(rows: Tensor, widths: Sequence[int]) -> Payload:
    """Split the columns of rows (N, n) into views (N, n_i)."""
    return tuple(rows[:, : sum(widths)].split(list(widths), 1))
