"""The CUDA moves on a machine without one: the same kernels, interpreted, on the shared memory of CPU processes."""

import torch

from mxep.comms import SharedMemoryTransport
from mxep.comms.kernels import sums
from mxep.comms.moves import KernelMoves
from mxep.comms.symmetric_memory import Record

PROGRAMS = 3


class InterpretedTransport(KernelMoves, SharedMemoryTransport):
    """Kernels' moves; memory and host barriers of shared memory."""

    def __init__(self, *args, timeout: float = 60.0, **kwargs) -> None:
        super().__init__(*args, timeout=timeout, **kwargs)
        self.clock = False
        sums.CHUNK_BYTES = 1024  # so that few tokens make many chunks
        self.max_sms = PROGRAMS
        self.record = Record(self.world_size, pinned=False)
        self.state = torch.tensor([0, int(timeout * 1e9), self.record.words.data_ptr()])

    def check(self) -> None:
        super().check()
        self.record.check(self.rank, self.timeout)
