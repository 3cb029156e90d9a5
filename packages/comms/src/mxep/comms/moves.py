"""The stores of a move, and its barrier, in the two ways there are: plain torch, and kernels on the peers' pointers.

    put_tables          my ids (T, K), weights (T, K) and T    -> place (my rank) of every rank's tables
    put_rows            token t                                -> slot (my rank, t) of each rank that needs it
    put_rows_to_groups  token t                                -> row rows[t, k] of the owner of its k-th expert
    return_sums         the sum of slot (r, t)'s rows          -> slot (my rank, t) of rank r, which sums over ranks

After each, what all ranks stored in the move is here, and what we stored is there.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layout import ALIGNMENT, Layout, round_up
from .plan import RoutingPlan, narrow_ids
from .rows import sum_slots
from .transport import PeersDisagree, SymmetricBuffer

if TYPE_CHECKING:
    from .kernels.launch import Launch

STEPS = ("barrier", "put_tables", "put_rows", "put_rows_to_groups", "return_sums", "refused")
"""Kinds of moves; kernels know them by number. "refused": by this rank, whose peers should not wait for it."""


def signature(step: str, number: int, mark: int = 0) -> int:
    """What ranks that meet must agree on: the kind of move, the bytes of its rows, and the layout's mark below 16.

    number: less than 2^24. Of put_tables it is K, of a refusal the tokens that there was no room for, 0 for ids that
    are none.
    """
    return mark << 27 | STEPS.index(step) << 24 | number


def disagreement(rank: int, signatures: Sequence[int]) -> PeersDisagree:
    """What to raise on ``rank`` where ranks met with these signatures."""
    for peer, each in enumerate(signatures):
        if STEPS[(each >> 24) & 7] == "refused":
            tokens = each & 0xFFFFFF
            why = "expert ids that are none"
            if tokens:
                why = f"{tokens} tokens, more than max_tokens: set max_tokens={tokens} or more, on all ranks"
            return PeersDisagree(f"rank {rank} met a peer that refused to send: rank {peer} brought {why}")
    marks = {each >> 27 for each in signatures}
    everyone = (
        f"rank {peer} at {STEPS[(each >> 24) & 7]} with rows of {each & 0xFFFFFF} bytes"
        + (f" in layout {each >> 27}" if len(marks) > 1 else "")
        for peer, each in enumerate(signatures)
    )
    return PeersDisagree(f"rank {rank} met peers in other moves: {', '.join(everyone)}")


@dataclass(frozen=True)
class Move:
    """One move under way. ``signature(step, number)``: what ranks must agree on in it.

    Attributes:
        buffer: whose peers are stored to. layout: of the buffer. experts_per_rank: e.
        name: for errors, "send_rows, move 3". num_sms: bound on programs, None: what the device has.
    """

    buffer: SymmetricBuffer
    layout: Layout
    experts_per_rank: int
    name: str
    num_sms: int | None = None

    def signature(self, step: str, number: int) -> int:
        return signature(step, number, self.layout.mark)


class PlainMoves:
    """Moves in plain torch, for memory that the host can reach: what kernels must equal to the bit."""

    rank: int

    def barrier(self, step: str, pad: SymmetricBuffer | None = None, signature: int = 0) -> None:
        raise NotImplementedError

    def signal(self, signature: int) -> None:
        """Enter the next barrier, and do not wait there."""
        raise NotImplementedError

    def refuse(self, move: Move, tokens: int) -> None:
        self.signal(move.signature("refused", tokens))

    def put_tables(self, move: Move, expert_ids: Tensor, weights: Tensor) -> None:
        layout = move.layout
        ids = narrow_ids(expert_ids, layout.world_size * move.experts_per_rank)
        for peer in move.buffer.peers:
            layout.ids(peer)[self.rank, : len(ids)] = ids
            layout.values(peer)[self.rank, : len(expert_ids)] = weights
            layout.num_tokens(peer)[self.rank] = len(expert_ids)
        self.barrier(move.name, signature=move.signature("put_tables", layout.top_k))

    def put_rows(self, move: Move, payload: Sequence[Tensor], expert_ids: Tensor) -> None:
        packed = _pack(payload)
        slot = self.rank * move.layout.max_tokens + torch.arange(len(packed))
        owner = owners(expert_ids, move.experts_per_rank)
        for destination, peer in enumerate(move.buffer.peers):
            needed = (owner == destination).any(1)
            _store(move.layout, peer, slot[needed], packed[needed])
        self.barrier(move.name, signature=move.signature("put_rows", width_of(payload)))

    def put_rows_to_groups(
        self, move: Move, payload: Sequence[Tensor], expert_ids: Tensor, rows: Tensor, plan: RoutingPlan
    ) -> None:
        packed = _pack(payload)
        owner = owners(expert_ids, move.experts_per_rank)
        for destination, peer in enumerate(move.buffer.peers):
            for chosen, row in zip(owner.unbind(1), rows.unbind(1)):
                there = (chosen == destination) & (row >= 0)
                _store(move.layout, peer, row[there].long(), packed[there])
        # Padding is nobody's but ours.
        own = move.layout.rows(move.buffer.local)[: plan.max_rows, : packed.shape[1]]
        own.masked_fill_(plan.row_source[:, None] < 0, 0)
        self.barrier(move.name, signature=move.signature("put_rows_to_groups", width_of(payload)))

    def return_sums(
        self,
        move: Move,
        rows: Tensor,
        row_values: Tensor | None,
        plan: RoutingPlan,
        expert_ids: Tensor,
        out: Tensor,
        values: Tensor | None,
    ) -> None:
        layout = move.layout
        packed = _pack([sum_slots(rows, plan.slot_rows).view(torch.uint8)])
        slot = self.rank * layout.max_tokens + torch.arange(layout.max_tokens)
        # A slot whose rows were all dropped sends its zeroes: the owner, who cannot know, waits for a sum from here.
        was_sent = (plan.slot_rows != -1).any(1)
        numbers = None if row_values is None else torch.cat((row_values, row_values.new_zeros(1)))
        for owner, peer in enumerate(move.buffer.peers):
            mine = slice(owner * layout.max_tokens, (owner + 1) * layout.max_tokens)
            sent = was_sent[mine]
            _store(layout, peer, slot[sent], packed[mine][sent])
            if numbers is not None:
                row = plan.slot_rows[mine][sent]
                layout.values(peer)[self.rank, sent] = numbers[torch.where(row >= 0, row, len(numbers) - 1)]
        self.barrier(move.name, signature=move.signature("return_sums", rows.shape[1] * rows.itemsize))
        local = move.buffer.local
        arrived = layout.rows(local)[:, : rows.shape[1] * rows.itemsize].view(rows.dtype)
        out.copy_(sum_slots(arrived, home_slots(layout, expert_ids, move.experts_per_rank)))
        if values is not None:
            where = owners(expert_ids, move.experts_per_rank)
            table = layout.values(local)[:, : len(expert_ids)]
            values.copy_(torch.where(where >= 0, table.gather(0, where.clamp_min(0).long()[None])[0], 0.0))


class KernelMoves:
    """Moves as kernels that store to ``buffer.pointers`` and meet at their end.

    Attributes:
        state: (3,) int64 on the device, see `kernels/signals.py`. clock: whether kernels have a GPU's clock, that is,
            run on one. max_sms: how many can run at once.
    """

    rank: int
    device: torch.device
    state: Tensor
    clock: bool
    max_sms: int

    def refuse(self, move: Move, tokens: int) -> None:
        from .kernels.signals import refuse

        with self._launch(move, "refused") as launch:
            refuse(launch.pointers, launch.rank, launch.signature(tokens), move.layout)

    def put_tables(self, move: Move, expert_ids: Tensor, weights: Tensor) -> None:
        from .kernels.put import put_tables

        with self._launch(move, "put_tables") as launch:
            put_tables(launch, expert_ids, weights, move.experts_per_rank)

    def put_rows(self, move: Move, payload: Sequence[Tensor], expert_ids: Tensor) -> None:
        from .kernels.put import put_rows

        with self._launch(move, "put_rows") as launch:
            put_rows(launch, payload, expert_ids, move.experts_per_rank)

    def put_rows_to_groups(
        self, move: Move, payload: Sequence[Tensor], expert_ids: Tensor, rows: Tensor, plan: RoutingPlan
    ) -> None:
        from .kernels.put import put_rows

        with self._launch(move, "put_rows_to_groups") as launch:
            groups = {"rows": rows, "offs": plan.offs, "group_sizes": plan.group_sizes}
            put_rows(launch, payload, expert_ids, move.experts_per_rank, **groups)

    def return_sums(
        self,
        move: Move,
        rows: Tensor,
        row_values: Tensor | None,
        plan: RoutingPlan,
        expert_ids: Tensor,
        out: Tensor,
        values: Tensor | None,
    ) -> None:
        from .kernels.sums import return_sums

        e = move.experts_per_rank
        with self._launch(move, "return_sums") as launch:
            return_sums(launch, rows, row_values, plan.slot_rows, plan.num_tokens, expert_ids, e, out, values)

    @contextlib.contextmanager
    def _launch(self, move: Move, step: str) -> "Iterator[Launch]":
        from .kernels.launch import Launch

        programs = min(move.num_sms or self.max_sms, self.max_sms)
        where = move.layout, self.rank, move.buffer.pointers, self.state
        with torch.cuda.device(self.device) if self.clock else contextlib.nullcontext():
            yield Launch(*where, step, programs, self.clock)


def width_of(payload: Sequence[Tensor]) -> int:
    """Bytes of a row."""
    return sum(part.shape[1] for part in payload)


def owners(expert_ids: Tensor, experts_per_rank: int) -> Tensor:
    """The rank of each id, -1 for -1."""
    return expert_ids.div(experts_per_rank, rounding_mode="floor")


def home_slots(layout: Layout, expert_ids: Tensor, experts_per_rank: int) -> Tensor:
    """(T, W) int32: where rank r's sum of own token t arrives; -1 if no expert of t is on r."""
    ranks = torch.arange(layout.world_size, dtype=torch.int32)
    token = torch.arange(len(expert_ids), dtype=torch.int32)
    was_there = (owners(expert_ids, experts_per_rank)[:, :, None] == ranks).any(1)
    return torch.where(was_there, ranks * layout.max_tokens + token[:, None], -1)


def _pack(payload: Sequence[Tensor]) -> Tensor:
    """Parts (N, n_i) uint8 -> (N, n) uint8, side by side, n rounded up to 16 bytes."""
    width = width_of(payload)
    gap = payload[0].new_zeros(len(payload[0]), round_up(width, ALIGNMENT) - width)
    return torch.cat((*payload, gap), 1)


def _store(layout: Layout, peer: Tensor, index: Tensor, packed: Tensor) -> None:
    """Row i of ``packed`` (N, n) into row ``index[i]`` of a peer, in words of 8 bytes."""
    rows = layout.rows(peer)[:, : packed.shape[1]]
    rows.view(torch.int64).index_copy_(0, index, packed.view(torch.int64))
