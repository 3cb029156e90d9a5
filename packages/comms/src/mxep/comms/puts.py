"""The moves of a medium that takes puts by PE (the number NVSHMEM gives a process), not stores to addresses.

    stage     rows that go out, side by side in `staging`, memory of ours that no peer touches
    put       row i of it -> each of its destinations; bytes [0, n) of a row arrive in order and alone
    meet      all puts of ours have landed; signal; wait for all signals (`kernels/signals.py` has words and records)

    verb                 staged                                       destinations of a row
    put_tables           the own place in the own tables              (W,)  the same place on every other rank
    put_rows             token t                                      (W,)  slot (my rank, t) of ranks that need it
    put_rows_to_groups   token t                                      (K,)  row rows[t, k] of the owner
    return_sums          sum of slot (r, t); numbers of rank r        (1,)  slot (my rank, t), place (my rank) of rank r

A destination is one int64: PE << 40 | byte in the buffer, -1 for none. Staging is as large as its buffer and laid out
like it. It is written anew only after the last move on that buffer has met, so after its puts have left it.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import ALIGNMENT, round_up
from .moves import Move, owners, width_of
from .plan import RoutingPlan, narrow_ids
from .transport import SymmetricBuffer

PE_SHIFT = 40
TABLES, ROWS = 0, 1
"""Channels: which of the buffer's signals, and of its own counters."""


@dataclass(frozen=True)
class StagedBuffer(SymmetricBuffer):
    """A buffer that peers put into, and what this rank puts from. ``peers`` of other ranks may be empty tensors.

    Attributes:
        staging: uint8 (nbytes,), symmetric memory too.
    """

    staging: Tensor


class PutMoves:
    """Moves as puts; a medium brings ``_put`` and ``_meet``.

    Attributes:
        bases: (W,) int64 on the device, each rank's PE << 40.
    """

    rank: int
    bases: Tensor

    def _put(self, move: Move, source: Tensor, destinations: Tensor, *, groups: int = 1) -> None:
        """Row i of ``source`` (N, n) uint8 to all ``destinations[i]`` (N, J) int64.

        groups: the rows are so many runs of equal length, to be taken in turns.
        """
        raise NotImplementedError

    def _meet(self, move: Move, channel: int, signature: int) -> None:
        raise NotImplementedError

    def refuse(self, move: Move, tokens: int) -> None:
        with contextlib.suppress(RuntimeError):  # which says what we know
            for channel in (ROWS, TABLES):
                self._meet(move, channel, move.signature("refused", tokens))

    def put_tables(self, move: Move, expert_ids: Tensor, weights: Tensor) -> None:
        layout, local = move.layout, move.buffer.local
        pairs = expert_ids.numel()
        ids = layout.ids(local)[self.rank].view(-1)[:pairs]
        values = layout.values(local)[self.rank].view(-1)[:pairs]
        count = layout.num_tokens(local)[self.rank : self.rank + 1]
        ids.copy_(narrow_ids(expert_ids.reshape(-1), layout.world_size * move.experts_per_rank))
        values.copy_(weights.reshape(-1))
        count.fill_(len(expert_ids))
        for table in (ids, values, count):
            elsewhere = self.bases + (table.data_ptr() - local.data_ptr())
            elsewhere[self.rank].fill_(-1)  # not "= -1", which copies from the host
            self._put(move, table.view(torch.uint8).view(1, -1), elsewhere[None])
        self._meet(move, TABLES, move.signature("put_tables", layout.top_k))

    def put_rows(self, move: Move, payload: Sequence[Tensor], expert_ids: Tensor) -> None:
        layout = move.layout
        owner = _owners(move, expert_ids)
        ranks = torch.arange(layout.world_size, device=owner.device)
        needed = (owner[:, :, None] == ranks).any(1)
        slot = self.rank * layout.max_tokens + torch.arange(len(owner), device=owner.device)
        there = torch.where(needed, self.bases + layout.rows_start + slot[:, None] * layout.row_bytes, -1)
        self._put(move, _stage(move, payload), there)
        self._meet(move, ROWS, move.signature("put_rows", width_of(payload)))

    def put_rows_to_groups(
        self, move: Move, payload: Sequence[Tensor], expert_ids: Tensor, rows: Tensor, plan: RoutingPlan
    ) -> None:
        from .kernels.staged import zero_padding

        owner = _owners(move, expert_ids)
        byte = move.layout.rows_start + rows.long() * move.layout.row_bytes
        there = torch.where((owner >= 0) & (rows >= 0), self.bases[owner.clamp_min(0)] + byte, -1)
        source = _stage(move, payload)
        self._put(move, source, there)
        # Padding is nobody's but ours.
        own = move.layout.rows(move.buffer.local)[: plan.max_rows, : source.shape[1]]
        zero_padding(own.view(torch.int64), plan.offs, plan.group_sizes)
        self._meet(move, ROWS, move.signature("put_rows_to_groups", width_of(payload)))

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
        from .kernels.staged import stage_sums, sum_home

        layout, local, staging = move.layout, move.buffer.local, _staging(move)
        first_home = self.bases + layout.rows_start + self.rank * layout.max_tokens * layout.row_bytes
        there = stage_sums(rows, row_values, plan, layout, first_home, staging)
        sums = layout.rows(staging)[: layout.num_slots, : round_up(rows.shape[1] * rows.itemsize, ALIGNMENT)]
        # In turns: ranks whose slots come first would be everybody's first destination.
        self._put(move, sums, there[:, None], groups=layout.world_size)
        if row_values is not None:
            # Whole places: their receivers look only where a slot was sent.
            source = layout.values(staging).view(layout.world_size, -1).view(torch.uint8)
            place = layout.values_start + self.rank * source.shape[1]
            self._put(move, source, (self.bases + place)[:, None])
        self._meet(move, ROWS, move.signature("return_sums", rows.shape[1] * rows.itemsize))
        sum_home(layout, local, expert_ids, move.experts_per_rank, out, values)


def _owners(move: Move, expert_ids: Tensor) -> Tensor:
    """int64: the rank of each id, -1 where it is not an expert's."""
    owner = owners(expert_ids, move.experts_per_rank).long()
    return torch.where(owner < move.layout.world_size, owner, -1).clamp_min(-1)


def _staging(move: Move) -> Tensor:
    assert isinstance(move.buffer, StagedBuffer)
    return move.buffer.staging


def _stage(move: Move, payload: Sequence[Tensor]) -> Tensor:
    """Parts (T, n_i) side by side in the staging -> (T, n), n rounded up to 16 bytes; what fills it up is anything."""
    staged = move.layout.rows(_staging(move))[: len(payload[0]), : round_up(width_of(payload), ALIGNMENT)]
    offset = 0
    for part in payload:
        width = part.shape[1]
        flat = part.contiguous().view(-1)  # in words: one row is contiguous whatever its stride
        word = torch.int64 if math.gcd(8, offset, width, flat.storage_offset()) == 8 else torch.uint8
        place = staged[:, offset : offset + width].view(word)
        place.copy_(flat.view(word).view(place.shape))
        offset += width
    return staged
