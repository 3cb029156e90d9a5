"""The CUDA exchange on a machine without one: the same kernels, interpreted, on the shared memory of CPU processes."""

from mxep.comms import SharedMemoryTransport, SymmetricMemoryTransport
from mxep.comms.kernels import exchange
from mxep.comms.symmetric_memory import FaultRecord

PROGRAMS = 3


class InterpretedTransport(SharedMemoryTransport):
    """Exchanges of kernels; memory and host barriers of shared memory."""

    access = "kernels"
    exchange = SymmetricMemoryTransport.exchange
    clock = False
    max_sms = PROGRAMS

    def __init__(self, *args, timeout: float = 60.0, **kwargs) -> None:
        super().__init__(*args, timeout=timeout, **kwargs)
        exchange.CHUNK_BYTES = 1024  # so that few tokens make many chunks
        self.record = FaultRecord(self.world_size, pinned=False)
        self.state = self.record.state(timeout, self.device)

    def check(self) -> None:
        super().check()
        if hasattr(self, "record"):
            self.record.check(self.rank, self.timeout)
