"""AllToAllDispatcher: collectives with split sizes known to the host. Any fabric, any backend; the baseline.

    dispatch    rows sorted by destination rank, one per (token, expert): bytes, id, weight   all-to-all
    redispatch  the same rows' other bytes, same order                                        all-to-all
    combine     the same rows, the other way, then the sum                                    all-to-all

Before each rank's rows goes one that says which exchange it is (`headers.py`), to the plan a pair without an expert.
One exchange of sizes and its device-to-host copy a dispatch, none on the ways back. Received rows lie in
(source rank, token, list) order and are the slots of a plan with one source, so experts see the rows that the other
dispatchers bring, in the same order. There is room for a few more (`_room`), so that shapes come again and steps
between exchanges are replayed.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import Capacity, gather_rows, narrow_ids, sum_slots
from mxep.runtime.replay import replayed

from .base import Payload, Routing, TokenDispatcher
from .handles import Done, Handle
from .headers import Headers


@dataclass(frozen=True)
class AllToAllRouting(Routing):
    """Routing plus the way of each row, and on the host what the collectives need there.

    Attributes:
        token: (W + T K,) int32, of each row sent, by destination rank, -1 of headers, then of pairs not sent.
        position: (T, K) int32, of each pair among these rows, -1 for none.
        rows: (T P, K) int32, for each of a token's P = min(K, W) ranks in order the row of each pair, -1 of others.
        sums: (T, P) int32, which sums of these are a token's, -1 behind its last rank.
        sent, received: number of rows to and from each rank, headers included.
        heads, heads_received: (W,) int64, the headers' rows among those sent, and received.
    """

    token: Tensor
    position: Tensor
    rows: Tensor
    sums: Tensor
    sent: list[int]
    received: list[int]
    heads: Tensor
    heads_received: Tensor

    def wire_rows(self) -> Tensor:
        return (self.expert_ids >= 0).sum()


class AllToAllDispatcher(TokenDispatcher):
    """See :class:`TokenDispatcher`. Buffers are as large as each step needs, so ``capacity`` is not consulted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers = Headers(self.rank, list(range(self.world_size)))

    def dispatch(
        self, payload: Payload, expert_ids: Tensor, weights: Tensor, *, alignment: int, overlap: bool = False
    ) -> Handle[tuple[Payload, Routing]]:
        self.claim()
        width = sum(_widths(payload))
        planned = _plan_rows([narrow_ids(expert_ids), weights], self.num_local_experts, self.world_size, width)
        sizes, routed, token, tables, position, rows, sums, heads = planned
        sent, received, invalid, widths, heads_received = self._exchange_sizes(sizes)
        if set(widths) != {width}:  # as of recipes that ranks have picked by other max_tokens
            raise ValueError(f"payload: got rows of {widths} bytes, by rank, wanted the same on all ranks")
        if any(invalid) and expert_ids.device.type == "cpu":
            wrong = expert_ids[(expert_ids < -1) | (expert_ids >= self.num_experts)]
            whose = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(invalid) if n)
            found = wrong.unique().tolist() or ""
            raise ValueError(f"expert ids must lie in -1..{self.num_experts - 1}, got others: {whose} {found}")
        exchanges = self._exchanges
        if exchanges is not None:
            exchanges.dispatches += 1
        count = 0 if exchanges is None else exchanges.dispatches % 2**29
        number = torch.full((1,), count, dtype=torch.int32, device=expert_ids.device)
        outgoing, ways = _joined(payload, token, tables), (sent, received, heads, heads_received)
        room = self.world_size + _room(sum(received) - self.world_size)
        header = self._headers.new(self.new_dispatch, expert_ids.device)
        arrived = self._all_to_all(outgoing, *ways, room, header, "dispatch")
        *slots, ids, weight = _parts(arrived, [*_widths(payload), 4, 4])
        plan = self._plan(
            ids.view(torch.int32)[None],
            weight.view(torch.float32)[None],
            torch.full((1,), sum(received), dtype=torch.int32, device=ids.device),
            alignment=alignment,
            capacity=Capacity.worst_case(),  # of one pair a slot: no more than its padding
            invalid=sum(invalid),
        )
        plan = dataclasses.replace(plan, dispatch=number)
        way = token, position, rows, sums, sent, received, heads, heads_received
        routing = AllToAllRouting(plan, routed, self.num_local_experts, *way)
        return Done((tuple(slots), routing))

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        assert isinstance(routing, AllToAllRouting)
        self.claim()
        outgoing, room = _joined(payload, routing.token), len(routing.plan.slot_rows)
        way = routing.sent, routing.received, routing.heads, routing.heads_received
        arrived = self._all_to_all(outgoing, *way, room, routing.plan.dispatch, "redispatch")
        return Done(_parts(arrived, _widths(payload)))

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        assert isinstance(routing, AllToAllRouting)
        self.claim()
        payload = [rows.contiguous().view(torch.uint8)]
        if row_values is not None:
            payload.append(row_values[:, None].view(torch.uint8))
        outgoing, room = _joined(payload, routing.plan.slot_rows[:, 0]), len(routing.token)
        way = routing.received, routing.sent, routing.heads_received, routing.heads
        arrived = self._all_to_all(outgoing, *way, room, routing.plan.dispatch, "combine")
        returned, *values = _parts(arrived, _widths(payload))
        # A token's rows of one rank, in its list's order, then the ranks' sums in rank order.
        out = sum_slots(sum_slots(returned.view(rows.dtype), routing.rows), routing.sums)
        if not values:
            return Done((out, None))
        (of_pairs,) = gather_rows(values, routing.position.flatten())
        return Done((out, of_pairs.view(torch.float32).view(routing.position.shape)))

    def _sent(self) -> int:
        return 0 if self._exchanges is None else self._exchanges.collectives

    def _exchange_sizes(self, outgoing: Tensor) -> tuple[list[int], list[int], list[int], list[int], Tensor]:
        """(W, 3), what goes to each rank -> on the host: rows to each, and what came from each, by column; and on the
        device the first row from each.

        NCCL's all-to-all takes sizes from there.
        """
        incoming = outgoing
        if self.world_size > 1:
            incoming = torch.empty_like(outgoing)
            self._collective(incoming, outgoing)
        sent, received, invalid, widths = torch.cat((outgoing[:, :1], incoming), 1).t().tolist()
        return sent, received, invalid, widths, incoming[:, 0].cumsum(0) - incoming[:, 0]

    def _all_to_all(
        self,
        outgoing: Tensor,
        sent: list[int],
        received: list[int],
        heads: Tensor,
        heads_received: Tensor,
        room: int,
        number: Tensor | None,
        step: str,
    ) -> Tensor:
        """Bytes, of which the first sum(sent) rows go -> (room, n), whose first sum(received) rows come."""
        if self.world_size == 1:
            return outgoing  # whatever the room
        assert number is not None
        self._headers.check()
        self._headers.mark(outgoing, heads, number, step)
        incoming = outgoing.new_empty(room, outgoing.shape[1])
        of_ranks = incoming[: sum(received)], outgoing[: sum(sent)], received, sent
        self._collective(*of_ranks)
        self._headers.compare(incoming, heads_received, number, step)
        return incoming

    def _collective(
        self, incoming: Tensor, outgoing: Tensor, received: list[int] | None = None, sent: list[int] | None = None
    ) -> None:
        if self._exchanges is not None:
            self._exchanges.collectives += 1
        try:
            dist.all_to_all_single(incoming, outgoing, received, sent, group=self.group)
        except RuntimeError as error:  # of gloo; NCCL's watchdog ends the process instead
            if told := self.told():
                raise RuntimeError(f"{error}{told}") from error
            raise

    def check(self) -> None:
        for counts in self._counts.values():
            counts.tolist()  # all exchanges are over
        self._headers.check()
        super().check()


def _widths(payload: Sequence[Tensor]) -> list[int]:
    return [part.shape[1] for part in payload]


def _room(rows: int) -> int:
    """How many there is room for: at most a 16th more."""
    step = 1 << max(0, rows.bit_length() - 5)
    return -(-rows // step) * step


@replayed
def _plan_rows(tensors: list[Tensor], experts_per_rank: int, num_ranks: int, width: int) -> list[Tensor]:
    """[expert_ids (T, K), weights (T, K)] -> what a dispatch sends, and where what returns belongs.

    sizes (W, 3) int64, for each rank: rows to it, invalid ids here, `width`. ids: (T, K), -1 for invalid ones. Of all
    pairs by destination rank, a header before each rank's, those to none last: token, and tables (W + T K, 8) uint8,
    their ids and weights. Then position, rows, sums and heads of an `AllToAllRouting`.
    """
    ids, weights = tensors
    top_k = ids.shape[1]
    wrong = (ids < -1) | (ids >= experts_per_rank * num_ranks)
    ids = torch.where(wrong, -1, ids)
    rank = torch.where(ids >= 0, ids.div(experts_per_rank, rounding_mode="floor"), num_ranks)
    headers = torch.arange(num_ranks, dtype=rank.dtype, device=rank.device)
    ordered, order = torch.cat((headers, rank.flatten())).sort(stable=True)
    first = torch.searchsorted(ordered, torch.arange(num_ranks + 1, dtype=rank.dtype, device=rank.device))
    counts = first.diff()
    sizes = torch.stack((counts, wrong.sum().expand_as(counts), torch.full_like(counts, width)), 1)
    tables = torch.stack((ids.flatten(), weights.flatten().view(torch.int32)), 1)
    no_pairs = tables.new_zeros(num_ranks, 2)
    no_pairs[:, 0].fill_(-1)
    tables = torch.cat((no_pairs, tables)).index_select(0, order)
    pairs = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    position = torch.empty_like(pairs).scatter_(0, order, pairs)[num_ranks:].view(ids.shape)
    position = torch.where(ids >= 0, position, -1)
    # Each token's ranks in order, num_ranks behind the last.
    again = (rank[:, :, None] == rank[:, None]).tril(-1).any(2)
    of_token = rank.masked_fill(again, num_ranks).sort(1).values[:, : min(top_k, num_ranks)]
    rows = torch.where(of_token[:, :, None] == rank[:, None], position[:, None], -1).view(-1, top_k)
    sums = torch.arange(of_token.numel(), dtype=torch.int32, device=ids.device).view_as(of_token)
    sums = torch.where(of_token < num_ranks, sums, -1)
    token = (order - num_ranks).div(top_k, rounding_mode="floor").clamp_min(-1).int()
    return [sizes, ids, token, tables.view(torch.uint8), position, rows, sums, first[:-1].clone()]


def _joined(payload: Sequence[Tensor], index: Tensor, *others: Tensor) -> Tensor:
    """Rows of bytes (R, n_i), index (N,), others (N, n) -> (N, sum of n): rows of the payload, zeros for -1; others."""
    rows = *gather_rows(payload, index), *others
    return torch.cat(rows, 1) if len(rows) > 1 else rows[0]


def _parts(rows: Tensor, widths: Sequence[int]) -> Payload:
    """(N, n) -> its parts (N, n_i)."""
    if len(widths) == 1:
        return (rows,)
    # `contiguous` takes a part of one row for dense, wherever it begins.
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, 1))
