"""CudaTransport: the base of the transports between CUDA devices, where the device waits and writes what failed."""

import torch
import torch.distributed as dist

from mxep.runtime.record import fixed

from .layout import step_of
from .transport import PeersDisagree, PeerTimeout, Transport


class FaultRecord:
    """What a kernel writes when a wait has failed, in memory that the host reads without waiting for the device.

    values: (3 + W,) int64: whether it is written, channel, the signal waited for, the signals seen of each rank. A
    signal is epoch << 32 | op id, see `kernels/signals.py`. Channel -1: what follows are the ranks' dispatches.
    """

    def __init__(self, world_size: int, *, pinned: bool) -> None:
        self.values = torch.zeros(3 + world_size, dtype=torch.int64, pin_memory=pinned, device="cpu")
        self._written = self.values.numpy()

    def state(self, timeout: float, device: torch.device) -> torch.Tensor:
        """(4,) int64 on the device, for waits: whether one has failed, the limit in ns, this record's address; and how
        many dispatches brought tables."""
        return torch.tensor([0, int(timeout * 1e9), self.values.data_ptr(), 0], device=device, dtype=torch.int64)

    def check(self, rank: int, limit: float, group: dist.ProcessGroup | None = None) -> None:
        """Raise what is written. group: whose late ranks may have told why."""
        if not self._written[0]:
            return
        _, channel, signal, *seen = self.values.tolist()
        if channel < 0:
            raise PeersDisagree.over_dispatches(rank, step_of(signal), seen)
        epoch = signal >> 32
        # Epochs wrap around at 2^31: behind is who is less than half a turn behind.
        missing = {peer: its >> 32 for peer, its in enumerate(seen) if (epoch - (its >> 32)) % 2**32 in range(1, 2**31)}
        if missing:
            raise PeerTimeout(rank, missing, step_of(signal), epoch, limit, group)
        raise PeersDisagree.over(rank, [its & 0xFFFFFFFF for its in seen])


class CudaTransport(Transport):
    """Base of the transports of CUDA tensors.

    Attributes:
        state: of the fault record, (4,) int64 on the device. clock: whether kernels have a GPU's clock to wait by.
        max_sms: multiprocessors that an exchange may use.
    """

    state: torch.Tensor
    max_sms: int
    clock = True

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str | None, timeout: float | None
    ) -> None:
        super().__init__(group, cuda_device(device), timeout)
        # First come, first served would put an exchange's few programs behind all other kernels in flight.
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.record = FaultRecord(self.world_size, pinned=True)
        self.state = self.record.state(self.timeout, self.device)
        fixed(self.state)

    def check(self) -> None:
        super().check()
        self.record.check(self.rank, self.timeout, self.group)


def cuda_device(device: torch.device | str | None) -> torch.device:
    """With an index, as tensors have it; the current one if none is given."""
    given = torch.device("cuda" if device is None else device)
    return torch.device("cuda", torch.cuda.current_device()) if given.index is None else given
