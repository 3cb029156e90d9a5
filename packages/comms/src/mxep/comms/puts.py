"""PutExchange: exchanges by puts to PEs instead of stores to addresses.

    stage     outgoing rows, side by side in the buffer's staging area
    put       row i of it -> each of its destinations; only bytes [0, n) of a row travel, in order
    meet      all puts of this rank have landed; signal; wait for all signals (`kernels/signals.py`)
    compare   the dispatch numbers that came along with rows

    step               staged                                       destinations of a row
    dispatch_tables    this rank's entry of its own tables          (W,)  the same entry on every other rank
    dispatch           token t                                      (W,)  slot (this rank, t) of ranks that need it
    combine            sum of slot (r, t); values of rank r         (1,)  slot and entry (this rank, t) of rank r

An exchange writes the staging area only after the last exchange on that buffer has met: its puts have left by then.
"""

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels.signals import compare
from .kernels.staged import stage_sums, sum_arrived_slots
from .layout import ALIGNMENT, ROWS, TABLES, Layout, round_up
from .nvshmem import NvshmemTransport
from .plain import owners, width_of
from .plan import RoutingPlan, narrow_ids
from .transport import StagedBuffer


class PutExchange:
    """Exchanges of one workspace. `plain.py` specifies each method. num_sms: as in `kernels/exchange.py`."""

    def __init__(self, transport: NvshmemTransport, layout: Layout, experts_per_rank: int, num_sms: int | None) -> None:
        self.transport, self.layout, self.experts_per_rank = transport, layout, experts_per_rank
        self.rank, self.num_sms = transport.rank, num_sms

    def refuse(self, buffer: StagedBuffer, tokens: int) -> None:
        with contextlib.suppress(RuntimeError):  # an error tells this rank nothing new
            for channel in (ROWS, TABLES):
                self._meet(buffer, channel, "refused", tokens)
        self.transport.arena.exchanges += 1

    def dispatch_tables(self, buffer: StagedBuffer, expert_ids: Tensor, weights: Tensor, number: Tensor) -> None:
        layout, local = self.layout, buffer.local
        tokens, top_k = expert_ids.shape
        ids = layout.ids(local)[self.rank].view(-1)[: tokens * top_k]
        values = layout.values(local)[self.rank].view(-1)[: tokens * top_k]
        count = layout.num_tokens(local)[self.rank : self.rank + 1]
        ids.copy_(narrow_ids(expert_ids.reshape(-1)))
        values.copy_(weights.reshape(-1))
        count.fill_(tokens)
        for table in (ids, values, count):
            others = self.transport.bases + (table.data_ptr() - local.data_ptr())
            others[self.rank].fill_(-1)  # not "= -1", which copies from the host
            self.transport.put(buffer, table.view(torch.uint8).view(1, -1), others[None], self.num_sms)
        self._meet(buffer, TABLES, "dispatch_tables", layout.top_k)
        dispatches = self.transport.state[3:]
        dispatches.add_(1).bitwise_and_(2**31 - 1)
        number.copy_(dispatches)

    def dispatch(
        self,
        buffer: StagedBuffer,
        payload: Sequence[Tensor],
        expert_ids: Tensor,
        num_sms: int | None = None,
        number: Tensor | None = None,
    ) -> None:
        layout, owner = self.layout, owners(expert_ids, self.experts_per_rank)
        ranks = torch.arange(layout.world_size, device=owner.device, dtype=torch.int64)
        needed = (owner[:, :, None] == ranks).any(1)
        slot = self.rank * layout.max_tokens + torch.arange(len(owner), device=owner.device, dtype=torch.int64)
        offs = layout.rows_start + slot[:, None] * layout.row_bytes
        destinations = torch.where(needed, self.transport.bases + offs, -1)
        num_sms = min(filter(None, (num_sms, self.num_sms)), default=None)
        self.transport.put(buffer, self._stage(buffer, payload), destinations, num_sms)
        self._meet_with_rows(buffer, "dispatch", width_of(payload), number)

    def combine(
        self,
        buffer: StagedBuffer,
        rows: Tensor,
        row_values: Tensor | None,
        plan: RoutingPlan,
        expert_ids: Tensor,
        out: Tensor,
        values: Tensor | None,
    ) -> None:
        layout, staging = self.layout, buffer.staging
        width, bases = rows.shape[1] * rows.itemsize, self.transport.bases
        first_slot = bases + layout.rows_start + self.rank * layout.max_tokens * layout.row_bytes
        destinations = stage_sums(rows, row_values, plan, layout, first_slot, staging)
        sums = layout.rows(staging)[: layout.num_slots, : round_up(width, ALIGNMENT)]
        # In turns: otherwise all ranks would begin with the slots of the first rank.
        self.transport.put(buffer, sums, destinations[:, None], self.num_sms, groups=layout.world_size)
        if row_values is not None:
            # Whole entries: receivers read only the slots that were sent.
            source = layout.values(staging).view(layout.world_size, -1).view(torch.uint8)
            entry = layout.values_start + self.rank * source.shape[1]
            self.transport.put(buffer, source, (bases + entry)[:, None], self.num_sms)
        self._meet_with_rows(buffer, "combine", width, plan.dispatch)
        sum_arrived_slots(layout, buffer.local, expert_ids, self.experts_per_rank, out, values)

    def _meet_with_rows(self, buffer: StagedBuffer, step: str, width: int, number: Tensor | None) -> None:
        """Send the dispatch number, meet and compare. number: number of the rows' dispatch."""
        layout, word = self.layout, self.layout.dispatches(buffer.staging)[:1]
        if number is None:
            word.zero_()
        else:
            word.copy_(number)
        there = self.transport.bases + (layout.dispatches_start + 8 * self.rank)
        self.transport.put(buffer, word.view(torch.uint8)[None], there[None], self.num_sms)
        self._meet(buffer, ROWS, step, width)
        self.transport.arena.exchanges += 1
        op_id = layout.op_id(step, width)
        compare(buffer.local, number, self.transport.state, layout.counters_start, op_id, layout.world_size)

    def _meet(self, buffer: StagedBuffer, channel: int, step: str, number: int) -> None:
        self.transport.meet(buffer, channel, self.layout.op_id(step, number), self.layout.counters_start)

    def _stage(self, buffer: StagedBuffer, payload: Sequence[Tensor]) -> Tensor:
        """Copy parts (T, n_i) side by side into the staging -> (T, n), with n rounded up to 16 bytes."""
        staged = self.layout.rows(buffer.staging)[: len(payload[0]), : round_up(width_of(payload), ALIGNMENT)]
        offset = 0
        for part in payload:
            width = part.shape[1]
            flat = part.contiguous().view(-1)  # flat, because one row is contiguous whatever its stride
            word = torch.int64 if math.gcd(8, offset, width, flat.storage_offset()) == 8 else torch.uint8
            target = staged[:, offset : offset + width].view(word)
            target.copy_(flat.view(word).view(target.shape))
            offset += width
        return staged
