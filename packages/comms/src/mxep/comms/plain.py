"""PlainExchange: exchanges in plain torch, for memory that the host can reach. Kernels must equal it bit for bit.

    dispatch_tables    ids (T, K), weights (T, K) and T       -> entry (this rank) of every rank's tables
    dispatch           token t                                -> slot (this rank, t) of each rank that needs it
    combine            the sum of slot (r, t)'s rows          -> slot (this rank, t) of rank r, which sums over ranks

After each, this rank has all ranks' stores, and all ranks have this rank's. `kernels/exchange.py` and `puts.py` have
the same methods.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import ALIGNMENT, Layout, round_up
from .plan import RoutingPlan, narrow_ids
from .rows import sum_slots
from .shared_memory import SharedMemoryTransport
from .transport import SymmetricBuffer


class PlainExchange:
    """Exchanges of one workspace. ``num_sms`` is ignored."""

    def __init__(self, transport: SharedMemoryTransport, layout: Layout, experts_per_rank: int) -> None:
        self.transport, self.layout, self.experts_per_rank = transport, layout, experts_per_rank
        self.rank = transport.rank

    def refuse(self, buffer: SymmetricBuffer, tokens: int) -> None:
        """Tell the peers that this rank will not come; they raise PeersDisagree. Waits for nobody.

        tokens: size of the batch that does not fit; 0 for another reason.
        """
        self._count()
        self.transport.signal(self.layout.op_id("refused", tokens))

    def dispatch_tables(self, buffer: SymmetricBuffer, expert_ids: Tensor, weights: Tensor, number: Tensor) -> None:
        """Store the tables on all ranks, and set ``number`` to the dispatch's number."""
        layout, tokens = self.layout, expert_ids.shape[0]
        ids = narrow_ids(expert_ids)
        for peer in buffer.peers:
            layout.ids(peer)[self.rank, :tokens] = ids
            layout.values(peer)[self.rank, :tokens] = weights
            layout.num_tokens(peer)[self.rank] = tokens
        self._meet("dispatch_tables", layout.top_k)
        arena = self.transport.arena
        arena.dispatches += 1
        number.fill_(arena.dispatches)

    def dispatch(
        self,
        buffer: SymmetricBuffer,
        payload: Sequence[Tensor],
        expert_ids: Tensor,
        num_sms: int | None = None,
        number: Tensor | None = None,
    ) -> None:
        """number: number of the repeated dispatch, or `Workspace.new_dispatch`; None: unknown."""
        packed = _pack([part[: len(expert_ids)] for part in payload])
        slot = self.rank * self.layout.max_tokens + torch.arange(len(packed), dtype=torch.int64, device="cpu")
        owner = owners(expert_ids, self.experts_per_rank)
        for destination, peer in enumerate(buffer.peers):
            needed = (owner == destination).any(1)
            self._store(peer, slot[needed], packed[needed])
        self._count()
        self._meet("dispatch", width_of(payload), number)

    def combine(
        self,
        buffer: SymmetricBuffer,
        rows: Tensor,
        row_values: Tensor | None,
        plan: RoutingPlan,
        expert_ids: Tensor,
        out: Tensor,
        values: Tensor | None,
    ) -> None:
        layout, local, width = self.layout, buffer.local, rows.shape[1] * rows.itemsize
        packed = _pack([sum_slots(rows, plan.slot_rows).view(torch.uint8)])
        slot = self.rank * layout.max_tokens + torch.arange(layout.max_tokens, dtype=torch.int64, device="cpu")
        # A slot with only dropped rows sends zeros: the token's rank cannot know of the drop and expects a sum.
        was_sent = (plan.slot_rows != -1).any(1)
        padded = None if row_values is None else torch.cat((row_values, row_values.new_zeros(1)))
        for rank, peer in enumerate(buffer.peers):
            of_rank = slice(rank * layout.max_tokens, (rank + 1) * layout.max_tokens)
            sent = was_sent[of_rank]
            self._store(peer, slot[sent], packed[of_rank][sent])
            if padded is not None:
                row = plan.slot_rows[of_rank][sent]
                layout.values(peer)[self.rank, sent] = padded[torch.where(row >= 0, row, len(padded) - 1)]
        self._count()
        self._meet("combine", width, plan.dispatch)
        arrived = layout.rows(local)[:, :width].view(rows.dtype)
        owner = owners(expert_ids, self.experts_per_rank)
        out[: len(owner)] = sum_slots(arrived, self._slots_of(owner))
        if values is not None:
            table = layout.values(local)[:, : expert_ids.shape[0]]
            found = torch.where(owner >= 0, table.gather(0, owner.clamp_min(0).long()[None])[0], 0.0)
            values[: len(owner)] = found

    def _count(self) -> None:
        self.transport.check()  # may raise; after it, nothing keeps peers from being told
        self.transport.arena.exchanges += 1

    def _meet(self, step: str, number: int, dispatch: Tensor | None = None) -> None:
        name = f"{step}, exchange {self.transport.arena.exchanges - 1}"
        of = 0 if dispatch is None else int(dispatch)
        self.transport.barrier(name, op_id=self.layout.op_id(step, number), dispatch=of)

    def _store(self, peer: Tensor, index: Tensor, packed: Tensor) -> None:
        """Store row i of ``packed`` (N, n) into row ``index[i]`` of a peer, in words of 8 bytes."""
        rows = self.layout.rows(peer)[:, : packed.shape[1]]
        rows.view(torch.int64).index_copy_(0, index, packed.view(torch.int64))

    def _slots_of(self, owner: Tensor) -> Tensor:
        """(T, W) int32: slot for rank r's sum of token t, -1 if no expert of t is on r."""
        ranks = torch.arange(self.layout.world_size, dtype=torch.int32, device="cpu")
        token = torch.arange(len(owner), dtype=torch.int32, device="cpu")
        needed = (owner[:, :, None] == ranks).any(1)
        return torch.where(needed, ranks * self.layout.max_tokens + token[:, None], -1)


def width_of(payload: Sequence[Tensor]) -> int:
    """Bytes per row."""
    return sum(part.shape[1] for part in payload)


def owners(expert_ids: Tensor, experts_per_rank: int) -> Tensor:
    """Rank that owns each id, -1 for -1."""
    return expert_ids.div(experts_per_rank, rounding_mode="floor")


def _pack(payload: Sequence[Tensor]) -> Tensor:
    """Join parts (N, n_i) uint8 to (N, n) uint8, with n rounded up to 16 bytes."""
    width = width_of(payload)
    gap = payload[0].new_zeros(len(payload[0]), round_up(width, ALIGNMENT) - width)
    return torch.cat((*payload, gap), 1)
