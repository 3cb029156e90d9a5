"""SharedMemoryTransport: processes of one user on one machine map each other's memory.

A buffer is an anonymous file (memfd). Peers open it through ``/proc/<pid>/fd/<n>`` and map it. Then all descriptors are
closed, and only the mappings hold the memory. So it is freed when the last process ends, even after a crash.

The barrier. Barriers are numbered 1, 2, ... Each rank writes the number of the barrier into its own 64-bit signal in
the signal pad of every peer. Then it waits until every signal in its own pad shows this number or a later one. A signal
has only one writer, so no atomic is needed. But no peer may see a signal before the stores that precede it. x86
guarantees this, because it keeps the order of stores and the order of loads. Other machines are refused.

Before the signal, each rank writes a 64-bit word with its op id (`Layout.op_id`) in the lower half and its dispatch
number in the upper half. The word goes into one of two rows, which barriers use in turn. Two rows are enough, because a
peer may be one barrier ahead, but not two. Ranks raise PeersDisagree if op ids or dispatch numbers differ.

PlainExchange makes exchanges in plain torch, for memory that the host can reach. It is the reference: `KernelExchange`
and `PutExchange` have the same methods and must equal it bit for bit. Methods, each of which ends with a barrier:

    dispatch_tables    ids (T, K), weights (T, K) and T       -> entry (this rank) of every rank's tables
    dispatch           token t                                -> slot (this rank, t) of each rank that needs it
    combine            sum of the rows of slot (r, t)         -> slot (this rank, t) of rank r, which sums over ranks

T tokens on this rank, K experts per token.
"""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import ALIGNMENT, Layout, differ, round_up, step_of
from .plan import RoutingPlan, narrow_ids
from .rows import sum_slots
from .transport import PeersDisagree, PeerTimeout, SymmetricBuffer, Transport, gather_objects

POLLS = 200
LONGEST_NAP = 1e-3


class SharedMemoryTransport(Transport):
    """A :class:`Transport` for CPU tensors.

    Args:
        group: process group of ranks on this machine. None: the default group, or a single process if there is none.
        timeout: seconds that a barrier waits for a peer. None: the timeout of the group's own collectives.

    Collective. Raises RuntimeError unless all ranks run on one Linux x86-64 machine, in one container, as one user.
    """

    access = "host"

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> None:
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            got = f"{platform.system()} on {platform.machine()}"
            raise RuntimeError(
                f"SharedMemoryTransport: got {got}, wanted Linux on x86_64 (its barrier needs its order)"
            )
        super().__init__(group, torch.device("cpu"), timeout)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machines = gather_objects((boot, os.stat("/proc/self/ns/pid").st_ino, os.getuid()), self.group)
        for rank, machine in enumerate(machines):
            if machine != machines[0]:
                raise RuntimeError(
                    "SharedMemoryTransport: wanted all ranks on one machine, in one container, of one user; "
                    f"got rank {rank} elsewhere than rank 0"
                )
        self._counter = 0
        pads = [pad.view(torch.int64).view(3, -1).numpy() for pad in self.allocate(3 * self.world_size * 8).peers]
        self._signals = [pad[0] for pad in pads]
        self._op_ids = [pad[1:] for pad in pads]

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        fd = os.memfd_create("mxep")
        try:
            os.fchmod(fd, 0o600)
            os.truncate(fd, nbytes)
            paths = gather_objects(f"/proc/{os.getpid()}/fd/{fd}", self.group)
            # torch.from_file closes the descriptor that it opened, and keeps the mapping.
            peers = [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
            gather_objects(None, self.group)  # waits until all ranks have mapped the file
        finally:
            os.close(fd)
        return SymmetricBuffer(
            self.rank, peers, torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64, device="cpu")
        )

    def barrier(self, step: str, op_id: int = 0, dispatch: int = 0) -> None:
        self.check()
        self.signal(op_id, dispatch)
        # Acquire: if a peer's signal is visible, so are its stores before the signal.
        if not self._wait():
            seen = self._signals[self.rank].tolist()
            missing = {peer: number for peer, number in enumerate(seen) if number < self._counter}
            raise self._failed(PeerTimeout(self.rank, missing, step, self._counter, self.timeout, self.group))
        found = self._op_ids[self.rank][self._counter % 2].tolist()
        op_ids, dispatches = [word & 0xFFFFFFFF for word in found], [word >> 32 for word in found]
        if any(each != op_id for each in op_ids):
            raise self._failed(PeersDisagree.over(self.rank, op_ids))
        if any(differ(each, dispatch) for each in dispatches):
            raise self._failed(PeersDisagree.over_dispatches(self.rank, step_of(op_id), dispatches))

    def exchange(self, layout: Layout, experts_per_rank: int, num_sms: int | None) -> "PlainExchange":
        return PlainExchange(self, layout, experts_per_rank)

    def signal(self, op_id: int, dispatch: int = 0) -> None:
        """Enter the next barrier without waiting for the other ranks."""
        self._counter += 1
        # Release: on x86 this exchange's stores become visible before the signal.
        for op_ids, signals in zip(self._op_ids, self._signals):
            op_ids[self._counter % 2, self.rank] = dispatch << 32 | op_id
            signals[self.rank] = self._counter

    def _failed(self, error: RuntimeError) -> RuntimeError:
        self._unusable = f"unusable after: {error}"
        return error

    def close(self) -> None:
        super().close()
        self._signals, self._op_ids = [], []

    def _wait(self) -> bool:
        """Wait for the signals of all ranks. Returns True if they arrive within the timeout.

        First it polls and yields the core after each poll, then it sleeps between polls, longer and longer.
        """
        signals = self._signals[self.rank]
        for _ in range(POLLS):
            if (signals >= self._counter).all():
                return True
            os.sched_yield()
        limit = time.monotonic() + self.timeout
        nap = 2e-5
        while not (signals >= self._counter).all():
            if time.monotonic() > limit:
                return bool((signals >= self._counter).all())
            time.sleep(nap)
            nap = min(1.5 * nap, LONGEST_NAP)
        return True


class PlainExchange:
    """Exchanges of one workspace. Arguments are those of `dispatch` and `combine` in `workspace.py`, already checked.

    ``num_sms`` is ignored.
    """

    def __init__(self, transport: SharedMemoryTransport, layout: Layout, experts_per_rank: int) -> None:
        self.transport, self.layout, self.experts_per_rank = transport, layout, experts_per_rank
        self.rank = transport.rank

    def refuse(self, buffer: SymmetricBuffer, tokens: int) -> None:
        """Tell the peers that this rank skips the exchange, without waiting for them.

        tokens: size of a batch that is too large, or 0 if the batch has invalid ids.
        """
        self._count()
        self.transport.signal(self.layout.op_id("refused", tokens))

    def dispatch_tables(self, buffer: SymmetricBuffer, expert_ids: Tensor, weights: Tensor, number: Tensor) -> None:
        """Store this rank's tables on all ranks, and write the dispatch number to ``number``, (1,) int32."""
        layout, tokens = self.layout, expert_ids.shape[0]
        ids = narrow_ids(expert_ids)
        for peer in buffer.peers:
            layout.ids(peer)[self.rank, :tokens] = ids
            layout.values(peer)[self.rank, :tokens] = weights
            layout.num_tokens(peer)[self.rank] = tokens
        self._meet("dispatch_tables", layout.top_k)
        self.transport.dispatches += 1
        number.fill_(self.transport.dispatches)

    def dispatch(
        self, buffer: SymmetricBuffer, payload: Sequence[Tensor], expert_ids: Tensor,
        num_sms: int | None = None, number: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Store each token into the slots of the ranks that need it.

        number: (1,) int32, the dispatch number of the plan for a redispatch, else that of `Workspace.new_dispatch`.
            None: unknown.
        """
        packed = _pack([part[: len(expert_ids)] for part in payload])
        slot = self.rank * self.layout.max_tokens + torch.arange(len(packed), dtype=torch.int64, device="cpu")
        owner = owners(expert_ids, self.experts_per_rank)
        for destination, peer in enumerate(buffer.peers):
            needed = (owner == destination).any(1)
            self._store(peer, slot[needed], packed[needed])
        self._count()
        self._meet("dispatch", width_of(payload), number)

    def combine(
        self, buffer: SymmetricBuffer, rows: Tensor, row_values: Tensor | None, plan: RoutingPlan, expert_ids: Tensor,
        out: Tensor, values: Tensor | None,
    ) -> None:  # fmt: skip
        layout, local, width = self.layout, buffer.local, rows.shape[1] * rows.itemsize
        packed = _pack([sum_slots(rows, plan.slot_rows).view(torch.uint8)])
        slot = self.rank * layout.max_tokens + torch.arange(layout.max_tokens, dtype=torch.int64, device="cpu")
        # If all rows of a slot were dropped, zeros are sent: the token's rank does not know of it and reads the slot.
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
            values[: len(owner)] = torch.where(owner >= 0, table.gather(0, owner.clamp_min(0).long()[None])[0], 0.0)

    def _count(self) -> None:
        self.transport.check()  # may raise; after it nothing can fail before the signal
        self.transport.exchanges += 1

    def _meet(self, step: str, number: int, dispatch: Tensor | None = None) -> None:
        name = f"{step}, exchange {self.transport.exchanges - 1}"
        of = 0 if dispatch is None else int(dispatch)
        self.transport.barrier(name, op_id=self.layout.op_id(step, number), dispatch=of)

    def _store(self, peer: Tensor, index: Tensor, packed: Tensor) -> None:
        """Store row i of ``packed`` (N, n) uint8 into row ``index[i]`` of a peer's buffer, in words of 8 bytes."""
        rows = self.layout.rows(peer)[:, : packed.shape[1]]
        rows.view(torch.int64).index_copy_(0, index, packed.view(torch.int64))

    def _slots_of(self, owner: Tensor) -> Tensor:
        """(T, W) int32. Entry [t, r] is the slot with rank r's sum of token t, or -1 if r owns no expert of t."""
        ranks = torch.arange(self.layout.world_size, dtype=torch.int32, device="cpu")
        token = torch.arange(len(owner), dtype=torch.int32, device="cpu")
        needed = (owner[:, :, None] == ranks).any(1)
        return torch.where(needed, ranks * self.layout.max_tokens + token[:, None], -1)


def width_of(payload: Sequence[Tensor]) -> int:
    return sum(part.shape[1] for part in payload)


def owners(expert_ids: Tensor, experts_per_rank: int) -> Tensor:
    """Rank that owns each expert, in the shape and dtype of expert_ids. -1 for id -1."""
    return expert_ids.div(experts_per_rank, rounding_mode="floor")


def _pack(payload: Sequence[Tensor]) -> Tensor:
    """Concatenate parts (N, n_i) uint8 to (N, n) uint8. Rows are padded with zeros to a multiple of 16 bytes."""
    width = width_of(payload)
    gap = payload[0].new_zeros(len(payload[0]), round_up(width, ALIGNMENT) - width)
    return torch.cat((*payload, gap), 1)
