"""Transports of CUDA played on a CPU: kernels interpreted, puts as copies, ranks of one process in any order."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mxep.comms import NvshmemTransport, SharedMemoryTransport, SymmetricMemoryTransport
from mxep.comms.kernels import exchange, signals
from mxep.comms.layout import PE_SHIFT, step_of
from mxep.comms.nvshmem import StagedBuffer
from mxep.comms.symmetric_memory import FaultRecord
from mxep.comms.transport import SymmetricBuffer, Transport, signal_pad_bytes
from schedule import Schedule


class _Recorded(SharedMemoryTransport):
    """Memory and host barriers of shared memory, and the record of faults that kernels write."""

    def __init__(self, *args: Any, timeout: float = 60.0, **kwargs: Any) -> None:
        super().__init__(*args, timeout=timeout, **kwargs)
        self.record = FaultRecord(self.world_size, pinned=False)
        self.state = self.record.state(timeout, self.device)

    def check(self) -> None:
        super().check()
        if hasattr(self, "record"):
            self.record.check(self.rank, self.timeout)


class InterpretedTransport(_Recorded):
    """Exchanges of kernels, interpreted."""

    access = "kernels"
    exchange = SymmetricMemoryTransport.exchange
    clock = False
    max_sms = 3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        exchange.CHUNK_BYTES = 1024  # so that few tokens make many chunks


class PlayedTransport(_Recorded):
    """Exchanges by puts. Rank r is PE W - 1 - r: whoever takes one for the other misroutes. Staging starts as NaN."""

    access = "puts"
    exchange = NvshmemTransport.exchange

    @property
    def bases(self) -> Tensor:
        return torch.arange(self.world_size).flip(0) << PE_SHIFT

    def _allocate(self, nbytes: int) -> StagedBuffer:
        buffer = super()._allocate(nbytes)
        staging = torch.full((nbytes,), 255, dtype=torch.uint8)
        return StagedBuffer(**{f.name: getattr(buffer, f.name) for f in fields(buffer)}, staging=staging)

    def put(
        self, buffer: StagedBuffer, source: Tensor, destinations: Tensor, num_sms: int | None, groups: int = 1
    ) -> None:
        assert source.dtype == torch.uint8
        assert len(source) == len(destinations)
        assert len(source) % groups == 0
        for row, of_row in zip(source, destinations.tolist()):
            for destination in of_row:
                if destination >= 0:
                    rank, byte = self.world_size - 1 - (destination >> PE_SHIFT), destination % (1 << PE_SHIFT)
                    buffer.peers[rank][byte : byte + len(row)] = row

    def meet(self, buffer: Tensor, channel: int, op_id: int, counters_start: int) -> None:
        self.barrier(step_of(op_id), op_id=op_id)


@dataclass
class Ranks:
    """The memory that they share. programs: how many multiprocessors each has."""

    schedule: Schedule
    world_size: int
    programs: int
    memory: list[list[Tensor]] = field(default_factory=list)
    allocated: Counter[int] = field(default_factory=Counter)

    def allocate(self, rank: int, nbytes: int) -> list[Tensor]:
        """The n-th allocation of any rank is of all; whoever comes first makes it."""
        number = self.allocated[rank]
        self.allocated[rank] += 1
        if number == len(self.memory):
            self.memory.append([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.world_size)])
            for peer, memory in enumerate(self.memory[number]):
                self.schedule.watch(memory, f"rank {peer}'s buffer {number}")
        assert self.memory[number][0].nbytes == nbytes
        return self.memory[number]

    def run(self, body: Callable[["ScheduledContext"], Any]) -> list[Any]:
        """`body` on every rank, in one of all orders."""
        contexts = [ScheduledContext(self, rank, self.world_size) for rank in range(self.world_size)]
        return self.schedule.run(*[lambda context=context: body(context) for context in contexts])


@dataclass(frozen=True)
class ScheduledContext:
    """As much of `ranks.Context` as bodies of tests ask for."""

    ranks: Ranks
    rank: int
    world_size: int
    group: None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def read(self) -> Callable[..., None]:
        return self.ranks.schedule.read

    def transport(self, kind: None = None, **options: Any) -> "ScheduledTransport":
        return ScheduledTransport(self.ranks, self.rank)


class ScheduledTransport(Transport):
    """One rank's. A wait has no limit: if nothing can come any more the schedule says so."""

    access = "kernels"
    exchange = SymmetricMemoryTransport.exchange
    clock = False

    def __init__(self, ranks: Ranks, rank: int) -> None:
        super().__init__(None, torch.device("cpu"), 0.0)
        self.rank, self.world_size, self.max_sms = rank, ranks.world_size, ranks.programs
        self.record = FaultRecord(self.world_size, pinned=False)
        self.state = self.record.state(2**62 / 1e9, self.device)
        self._ranks = ranks
        self._signal_pad = self._allocate(signal_pad_bytes(self.world_size))

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        peers = self._ranks.allocate(self.rank, nbytes)
        return SymmetricBuffer(self.rank, peers, torch.tensor([peer.data_ptr() for peer in peers]))

    def free(self, buffer: SymmetricBuffer) -> None:
        pass

    def barrier(self, step: str) -> None:
        signals.barrier(self._signal_pad.pointers, self.state, self.rank, self.clock)

    def check(self) -> None:
        self.record.check(self.rank, 0)
