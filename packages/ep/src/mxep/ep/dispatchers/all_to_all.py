"""AllToAllDispatcher: collectives with split sizes known to the host. Any fabric, any backend; the baseline.

    dispatch    rows sorted by destination rank, one per (token, expert): bytes, id, weight   all-to-all
    redispatch  the same rows' other bytes, same order                                        all-to-all
    combine     the same rows, the other way, then the sum                                    all-to-all

One exchange of sizes and its device-to-host copy a dispatch, none on the ways back. Received rows lie in
(source rank, token, list) order and are the slots of a plan with one source, so experts see the rows that the other
dispatchers bring, in the same order.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import Capacity, gather_rows, narrow_ids, sum_slots

from .base import Payload, Routing, TokenDispatcher
from .handles import Done, Handle


@dataclass(frozen=True)
class AllToAllRouting(Routing):
    """Routing plus what the collectives need on the host.

    Attributes:
        order: (N,) int64, ``token * K + k`` of each row sent, by destination rank.
        sent, received: number of rows to and from each rank.
    """

    order: Tensor
    sent: list[int]
    received: list[int]

    def wire_rows(self) -> Tensor:
        return (self.expert_ids >= 0).sum()


class AllToAllDispatcher(TokenDispatcher):
    """See :class:`TokenDispatcher`. Buffers have the exact size of each step, so ``capacity`` is not consulted."""

    def dispatch(
        self, payload: Payload, expert_ids: Tensor, weights: Tensor, *, alignment: int, overlap: bool = False
    ) -> Handle[tuple[Payload, Routing]]:
        expert_ids = narrow_ids(expert_ids, self.num_experts)
        wrong = (expert_ids < -1) | (expert_ids >= self.num_experts)
        found = expert_ids[wrong].unique().tolist() if expert_ids.device.type == "cpu" else []
        expert_ids = torch.where(wrong, -1, expert_ids)
        flat = expert_ids.flatten()
        rank = torch.where(flat >= 0, flat.div(self.num_local_experts, rounding_mode="floor"), self.world_size)
        counts = torch.bincount(rank, minlength=self.world_size + 1)[: self.world_size]
        width = sum(part.shape[1] for part in payload)
        sent, received, invalid, widths = self._exchange_sizes(counts, wrong.sum(), width)
        if set(widths) != {width}:  # as of recipes that ranks have picked by other max_tokens
            raise ValueError(f"payload: got rows of {widths} bytes, by rank, wanted the same on all ranks")
        if any(invalid) and expert_ids.device.type == "cpu":
            whose = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(invalid) if n)
            raise ValueError(f"expert ids must lie in -1..{self.num_experts - 1}, got others: {whose} {found or ''}")
        order = rank.argsort(stable=True)[: sum(sent)]

        token = order.div(expert_ids.shape[1], rounding_mode="floor")
        outgoing = [part[token] for part in payload]
        outgoing += [table.reshape(-1, 1)[order].view(torch.uint8) for table in (expert_ids, weights)]
        *slots, ids, weight = self._all_to_all(outgoing, sent, received)
        plan = self._plan(
            ids.view(torch.int32)[None],
            weight.view(torch.float32)[None],
            torch.full((1,), len(ids), dtype=torch.int32, device=ids.device),
            alignment=alignment,
            capacity=Capacity.exact(),
            invalid=sum(invalid),
        )
        routing = AllToAllRouting(plan, expert_ids, self.num_local_experts, order, sent, received)
        return Done((tuple(slots), routing))

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        assert isinstance(routing, AllToAllRouting)
        token = routing.order.div(routing.expert_ids.shape[1], rounding_mode="floor")
        return Done(self._all_to_all([part[token] for part in payload], routing.sent, routing.received))

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        assert isinstance(routing, AllToAllRouting)
        row_of_slot = routing.plan.slot_rows[:, 0]
        outgoing = [rows.contiguous().view(torch.uint8)]
        if row_values is not None:
            outgoing.append(row_values[:, None].view(torch.uint8))
        returned, *values = self._all_to_all(
            list(gather_rows(tuple(outgoing), row_of_slot)), routing.received, routing.sent
        )
        out = self._sum_rows(returned.view(rows.dtype), routing)
        if not values:
            return Done((out, None))
        back = torch.zeros(routing.expert_ids.numel(), device=out.device, dtype=torch.float32)
        back[routing.order] = values[0].view(torch.float32)[:, 0]
        return Done((out, back.view(routing.expert_ids.shape)))

    def _sum_rows(self, returned: Tensor, routing: AllToAllRouting) -> Tensor:
        """Two gathers-and-sums: a token's rows of one rank, in its list's order, then the ranks' sums in rank order."""
        ids = routing.expert_ids
        tokens, top_k = ids.shape
        position = torch.full((ids.numel(),), -1, dtype=torch.int32, device=ids.device)
        position[routing.order] = torch.arange(len(returned), dtype=torch.int32, device=ids.device)
        rank = torch.where(ids >= 0, ids.div(self.num_local_experts, rounding_mode="floor"), self.world_size)
        again = (rank[:, :, None] == rank[:, None, :]).tril(-1).any(2)
        # Each token's ranks in order, world_size behind the last.
        ranks = rank.masked_fill(again, self.world_size).sort(1).values[:, : min(top_k, self.world_size)]
        rows = torch.where(ranks[:, :, None] == rank[:, None], position.view(tokens, 1, top_k), -1)
        of_rank = sum_slots(returned, rows.view(-1, top_k))
        place = torch.arange(ranks.numel(), device=ids.device).view_as(ranks)
        return sum_slots(of_rank, torch.where(ranks < self.world_size, place, -1).int())

    def _exchange_sizes(self, counts: Tensor, wrong: Tensor, width: int) -> list[list[int]]:
        """(sent, received) rows by rank, on the host: NCCL's all-to-all takes them from there. Third and fourth, what
        every rank gave as ``wrong``, a 0-d tensor, and ``width``.
        """
        outgoing = torch.stack((counts, wrong.expand_as(counts), torch.full_like(counts, width)), 1)
        incoming = outgoing
        if self.world_size > 1:
            incoming = torch.empty_like(outgoing)
            dist.all_to_all_single(incoming, outgoing, group=self.group)
        sizes: list[list[int]] = torch.stack((counts, *incoming.unbind(1))).tolist()
        return sizes

    def _all_to_all(self, payload: list[Tensor], sent: list[int], received: list[int]) -> Payload:
        """Rows (sum(sent), n_i) bytes -> (sum(received), n_i), in one collective."""
        if self.world_size == 1:
            return tuple(payload)
        outgoing = torch.cat(payload, 1)
        incoming = outgoing.new_empty(sum(received), outgoing.shape[1])
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self.group)
        arrived = incoming.split([part.shape[1] for part in payload], 1)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in arrived)
