"""SymmetricMemoryTransport: CUDA devices of one NVLink domain, over torch's symmetric memory.

Torch allocates the memory and exchanges handles of it between ranks. Barriers and exchanges are kernels of this
package. They store to the addresses of peers and never use multicast. Waits for peers are on the device. If a wait
fails, the kernel writes a fault record, which the host reads.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from mxep.runtime.record import fixed

from .layout import Layout, step_of
from .transport import PeersDisagree, PeerTimeout, SymmetricBuffer, Transport, gather_objects, signal_pad_bytes


class FaultRecord:
    """Record of a failed wait, in memory that a kernel writes and the host reads without a sync.

    values: (3 + W,) int64. [0]: 1 once the record is written. [1]: channel of the wait. [2]: expected signal. Then the
        signal seen from each of the W ranks. A signal is epoch << 32 | op id, see `kernels/signals.py`. If the channel
        is -1, the ranks' dispatches differ, and the last W entries are their dispatch numbers.
    """

    def __init__(self, world_size: int, *, pinned: bool) -> None:
        self.values = torch.zeros(3 + world_size, dtype=torch.int64, pin_memory=pinned, device="cpu")
        self._written = self.values.numpy()

    def state(self, timeout: float, device: torch.device) -> torch.Tensor:
        """Create the state that waits in kernels use: (4,) int64 on the device.

        Its entries are: 1 after a failed wait, else 0; time limit in ns; address of this record; dispatches counted.
        """
        return torch.tensor([0, int(timeout * 1e9), self.values.data_ptr(), 0], device=device, dtype=torch.int64)

    def check(self, rank: int, limit: float, group: dist.ProcessGroup | None = None) -> None:
        """Raise PeerTimeout or PeersDisagree if a failure is recorded. limit: seconds. group: whose notes are read."""
        if not self._written[0]:
            return
        _, channel, signal, *seen = self.values.tolist()
        if channel < 0:
            raise PeersDisagree.over_dispatches(rank, step_of(signal), seen)
        epoch = signal >> 32
        # Epochs are 32-bit and wrap around, so a rank counts as late if its epoch is behind by less than 2^31.
        missing = {peer: its >> 32 for peer, its in enumerate(seen) if (epoch - (its >> 32)) % 2**32 in range(1, 2**31)}
        if missing:
            raise PeerTimeout(rank, missing, step_of(signal), epoch, limit, group)
        raise PeersDisagree.over(rank, [its & 0xFFFFFFFF for its in seen])


class CudaTransport(Transport):
    """Base class of transports for CUDA tensors.

    state: result of :meth:`FaultRecord.state`. max_sms: maximum multiprocessors of an exchange.
    clock: True: waits measure time by the GPU's clock. False: they count polls, for Triton's interpreter.
    """

    state: torch.Tensor
    max_sms: int
    clock = True

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str | None, timeout: float | None
    ) -> None:
        super().__init__(group, cuda_device(device), timeout)
        # High priority, because the few programs of an exchange would otherwise queue behind all other kernels.
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.record = FaultRecord(self.world_size, pinned=True)
        self.state = self.record.state(self.timeout, self.device)
        fixed(self.state)

    def check(self) -> None:
        super().check()
        self.record.check(self.rank, self.timeout, self.group)


def cuda_device(device: torch.device | str | None) -> torch.device:
    given = torch.device("cuda" if device is None else device)
    return torch.device("cuda", torch.cuda.current_device()) if given.index is None else given


class SymmetricMemoryTransport(CudaTransport):
    """A :class:`Transport` for CUDA tensors.

    Args:
        group: process group of ranks in one NVLink domain. None: the default group, or a single process if there is
            none.
        device: this rank's device. None: the current device.
        timeout: seconds that a barrier waits for a peer. None: the timeout of the group's own collectives. After a
            failed wait the stream goes on and computes with invalid data, until the next exchange or :meth:`check`
            raises.

    Collective. Raises RuntimeError without CUDA.
    """

    access = "kernels"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("SymmetricMemoryTransport: got no CUDA device; on CPU use SharedMemoryTransport")
        super().__init__(group, device, timeout)
        if self.world_size > 1 and (backend := symm_mem.get_backend(self.device)) not in (None, "CUDA"):
            raise RuntimeError(
                f"SymmetricMemoryTransport: got backend {backend} of torch's symmetric memory, wanted CUDA; a process "
                "has one for life (NvshmemTransport and TORCH_SYMMMEM choose NVSHMEM): use another process"
            )
        # The minimum over all ranks, because they must cut the rows of a combine into the same chunks.
        here = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.max_sms = min(gather_objects(here, self.group))
        # Torch reads this variable when it maps a buffer. With it torch does not call cuMulticastCreate.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._signal_pad = self.allocate(signal_pad_bytes(self.world_size))

    def barrier(self, step: str) -> None:
        from .kernels.signals import barrier

        self.check()
        with torch.cuda.device(self.device):
            barrier(self._signal_pad.pointers, self.state, self.rank, self.clock)

    def exchange(self, layout: Layout, experts_per_rank: int, num_sms: int | None) -> Any:
        from .kernels.exchange import KernelExchange  # imports Triton

        return KernelExchange(self, layout, experts_per_rank, num_sms)

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        """Allocate zeroed memory. Each rank zeroes its memory before the rendezvous, so before a peer stores to it."""
        group = None if self.world_size == 1 else self.group  # plain memory is enough for a single rank
        local = (torch if group is None else symm_mem).empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize(self.device)  # after this, zeros are written and all earlier exchanges have ended
        if group is None:
            return SymmetricBuffer(0, [local], torch.tensor([local.data_ptr()], device=self.device, dtype=torch.int64))
        handle = symm_mem.rendezvous(local, group)
        # get_buffer would ignore the offset of a tensor that torch cut from a larger segment.
        peers = [
            local if rank == self.rank else handle.get_remote_tensor(rank, (nbytes,), torch.uint8)
            for rank in range(self.world_size)
        ]
        pointers = torch.tensor([peer.data_ptr() for peer in peers], device=self.device, dtype=torch.int64)
        return SymmetricBuffer(self.rank, peers, pointers)
