"""CudaTransport: base of the transports between CUDA devices. The device waits and records failed waits."""

import torch
import torch.distributed as dist

from mxep.runtime.record import fixed

from .layout import step_of
from .transport import PeersDisagree, PeerTimeout, Transport


class FaultRecord:
    """Record of a failed wait. A kernel writes it into memory that the host reads without a sync.

    values: (3 + W,) int64: written flag, channel, expected signal, signal seen from each rank. A signal is
    epoch << 32 | op id, see `kernels/signals.py`. Channel -1 means that dispatches differ: their numbers follow.
    """

    def __init__(self, world_size: int, *, pinned: bool) -> None:
        self.values = torch.zeros(3 + world_size, dtype=torch.int64, pin_memory=pinned, device="cpu")
        self._written = self.values.numpy()

    def state(self, timeout: float, device: torch.device) -> torch.Tensor:
        """(4,) int64 on the device, for waits: failed flag, limit in ns, address of this record, number of dispatches
        with tables."""
        return torch.tensor([0, int(timeout * 1e9), self.values.data_ptr(), 0], device=device, dtype=torch.int64)

    def check(self, rank: int, limit: float, group: dist.ProcessGroup | None = None) -> None:
        """Raise the recorded failure, if any. group: its store may hold the late ranks' reasons."""
        if not self._written[0]:
            return
        _, channel, signal, *seen = self.values.tolist()
        if channel < 0:
            raise PeersDisagree.over_dispatches(rank, step_of(signal), seen)
        epoch = signal >> 32
        # Epochs wrap around at 2^31: a rank is late if it is less than half a turn behind.
        missing = {peer: its >> 32 for peer, its in enumerate(seen) if (epoch - (its >> 32)) % 2**32 in range(1, 2**31)}
        if missing:
            raise PeerTimeout(rank, missing, step_of(signal), epoch, limit, group)
        raise PeersDisagree.over(rank, [its & 0xFFFFFFFF for its in seen])


class CudaTransport(Transport):
    """Base of the transports of CUDA tensors.

    Attributes:
        state: :meth:`FaultRecord.state`, (4,) int64 on the device. clock: True if kernels wait by a GPU's clock.
        max_sms: most multiprocessors that an exchange may use.
    """

    state: torch.Tensor
    max_sms: int
    clock = True

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str | None, timeout: float | None
    ) -> None:
        super().__init__(group, cuda_device(device), timeout)
        # At normal priority an exchange's few programs would queue behind all other kernels in flight.
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.record = FaultRecord(self.world_size, pinned=True)
        self.state = self.record.state(self.timeout, self.device)
        fixed(self.state)

    def check(self) -> None:
        super().check()
        self.record.check(self.rank, self.timeout, self.group)


def cuda_device(device: torch.device | str | None) -> torch.device:
    """The device with an index, as tensors have it; the current device if none is given."""
    given = torch.device("cuda" if device is None else device)
    return torch.device("cuda", torch.cuda.current_device()) if given.index is None else given
