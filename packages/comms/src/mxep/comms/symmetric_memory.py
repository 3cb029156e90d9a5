"""SymmetricMemoryTransport: CUDA devices of one NVLink domain, over torch's symmetric memory.

torch allocates memory and exchanges handles. Barriers and exchanges are this package's kernels on the peers' pointers.
Multicast is never used.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from .cuda import CudaTransport
from .transport import SymmetricBuffer, gather_objects, signal_pad_bytes


class SymmetricMemoryTransport(CudaTransport):
    """A :class:`Transport` for CUDA tensors.

    Args:
        group: ranks of one NVLink domain; None is the default group, or this process alone without one.
        device: this rank's device; None is the current one.
        timeout: seconds that a barrier waits for a peer, by the device's clock; None: the timeout of the group's own
            collectives. A failed wait does not stop the stream. Later kernels compute with invalid data, and
            :meth:`check` and the next exchange raise.

    Collective. A single rank uses plain memory. Raises RuntimeError without CUDA.
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
        # The minimum over ranks, because all must cut the rows of a combine into the same chunks.
        here = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.max_sms = min(gather_objects(here, self.group))
        # torch reads this when it maps a buffer. cuMulticastCreate must never be called.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._signal_pad = self._allocate(signal_pad_bytes(self.world_size))

    def barrier(self, step: str, signal_pad: SymmetricBuffer | None = None) -> None:
        from .kernels.signals import barrier

        self.check()
        with torch.cuda.device(self.device):
            barrier((signal_pad or self._signal_pad).pointers, self.state, self.rank, self.clock)

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        """Allocate memory that is zero before any peer can store to it: each rank zeroes its own before rendezvous."""
        group = None if self.world_size == 1 else self.group  # a single rank needs plain memory only
        local = (torch if group is None else symm_mem).empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize(self.device)  # the zeroes are written, all earlier exchanges are over
        if group is None:
            return SymmetricBuffer(0, [local], torch.tensor([local.data_ptr()], device=self.device, dtype=torch.int64))
        handle = symm_mem.rendezvous(local, group)
        # get_remote_tensor adds the tensor's offset, needed if torch cut the tensor from a larger segment. get_buffer
        # does not.
        peers = [
            local if rank == self.rank else handle.get_remote_tensor(rank, (nbytes,), torch.uint8)
            for rank in range(self.world_size)
        ]
        pointers = torch.tensor([peer.data_ptr() for peer in peers], device=self.device, dtype=torch.int64)
        return SymmetricBuffer(self.rank, peers, pointers)
