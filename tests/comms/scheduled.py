"""The CUDA exchanges of several ranks in one process, interleaved by a schedule: plain memory is the peers' memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mxep.comms import SymmetricMemoryTransport
from mxep.comms.kernels import signals
from mxep.comms.symmetric_memory import FaultRecord
from mxep.comms.transport import SymmetricBuffer, Transport, signal_pad_bytes
from schedule import Schedule


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

    def barrier(self, step: str, signal_pad: SymmetricBuffer | None = None) -> None:
        signals.barrier((signal_pad or self._signal_pad).pointers, self.state, self.rank, self.clock)

    def check(self) -> None:
        self.record.check(self.rank, 0)
