"""SymmetricMemoryTransport: CUDA devices of one NVLink domain, over torch's symmetric memory.

torch allocates and exchanges handles; barriers and moves are kernels of ours on the peers' pointers. Multicast is never
used.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from .moves import STEPS, KernelMoves, disagreement
from .transport import (
    Arena,
    PeerTimeout,
    SymmetricBuffer,
    check_agreement,
    cuda_device,
    gather_objects,
    pad_bytes,
)


class Record:
    """What a kernel writes when a wait has failed, in memory that the host reads without waiting for the device.

    words: (3 + W,) int64: whether it is written, channel, the word waited for, the words seen of each rank. A word is
    epoch << 32 | signature, see `kernels/signals.py`.
    """

    def __init__(self, world_size: int, *, pinned: bool) -> None:
        self.words = torch.zeros(3 + world_size, dtype=torch.int64, pin_memory=pinned)

    def check(self, rank: int, limit: float) -> None:
        """Raise what is written."""
        if not self.words[0]:
            return
        _, _, word, *seen = self.words.tolist()
        step, epoch = STEPS[(word >> 24) & 7], word >> 32
        # Epochs wrap around at 2^31: behind is who is less than half a turn behind.
        missing = {peer: its >> 32 for peer, its in enumerate(seen) if (epoch - (its >> 32)) % 2**32 in range(1, 2**31)}
        if missing:
            raise PeerTimeout(rank, missing, step, epoch, limit)
        raise disagreement(rank, [its & 0xFFFFFFFF for its in seen])


class SymmetricMemoryTransport(KernelMoves):
    """A :class:`Transport` for CUDA tensors.

    Args:
        group: ranks of one NVLink domain; None is the default group, or this process alone if there is none.
        device: this rank's device; None is the current one.
        timeout: seconds that a barrier waits for a peer, on the device, by its clock. A wait that fails does not stop
            the stream: what comes after computes with whatever is there, :meth:`check` and the next move raise.

    Collective. A rank alone takes plain memory. Raises RuntimeError without CUDA.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("SymmetricMemoryTransport: got no CUDA device; on CPU use SharedMemoryTransport")
        self.group = (group or dist.group.WORLD) if dist.is_initialized() else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.world_size = 1 if self.group is None else self.group.size()
        self.device = cuda_device(device)
        if self.world_size > 1 and (backend := symm_mem.get_backend(self.device)) not in (None, "CUDA"):
            raise RuntimeError(
                f"SymmetricMemoryTransport: got backend {backend} of torch's symmetric memory, wanted CUDA; a process "
                "has one for life (NvshmemTransport and TORCH_SYMMMEM choose NVSHMEM): use another process"
            )
        self.timeout = timeout
        self.clock = True
        # The least of all: ranks must cut the rows that go home into the same chunks.
        here = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.max_sms = min(gather_objects(here, self.group))
        # First come, first served would put a move's few programs behind all of what runs beside it.
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(self.device, priority=-1)
        # Read by torch when it maps a buffer; cuMulticastCreate must never be called.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.record = Record(self.world_size, pinned=True)
        self.state = torch.tensor([0, int(timeout * 1e9), self.record.words.data_ptr()], device=self.device)
        self.arena = Arena()
        self._buffers: list[SymmetricBuffer] = []
        self._closed = False
        self._signals = self._map(pad_bytes(self.world_size))

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        check_agreement("allocate", {"nbytes": nbytes}, self.group)
        self._buffers.append(self._map(nbytes))
        return self._buffers[-1]

    def barrier(self, step: str, pad: SymmetricBuffer | None = None) -> None:
        from .kernels.signals import barrier

        self.check()
        with torch.cuda.device(self.device):
            barrier((pad or self._signals).pointers, self.state, self.rank, self.clock)

    def check(self) -> None:
        if self._closed:
            raise RuntimeError(f"transport of rank {self.rank}: closed")
        self.record.check(self.rank, self.timeout)

    def free(self, buffer: SymmetricBuffer) -> None:
        buffer.peers.clear()
        self._buffers = [each for each in self._buffers if each is not buffer]

    def close(self) -> None:
        self._closed = True
        for buffer in self._buffers:
            self.free(buffer)

    def _map(self, nbytes: int) -> SymmetricBuffer:
        """Zeroed before any peer can store to it: rendezvous ends when all have come, and they come with zeroes."""
        group = None if self.world_size == 1 else self.group  # a process alone needs nobody's memory
        mine = (torch if group is None else symm_mem).empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        torch.cuda.synchronize(self.device)  # the zeroes are there, not only on their way; all earlier moves are over
        if group is None:
            return SymmetricBuffer(0, [mine], torch.tensor([mine.data_ptr()], device=self.device))
        handle = symm_mem.rendezvous(mine, group)
        # get_remote_tensor, not get_buffer: torch may have cut the tensor from a larger segment, and only the former
        # adds the tensor's place in it.
        peers = [
            mine if rank == self.rank else handle.get_remote_tensor(rank, (nbytes,), torch.uint8)
            for rank in range(self.world_size)
        ]
        pointers = torch.tensor([peer.data_ptr() for peer in peers], device=self.device)
        return SymmetricBuffer(self.rank, peers, pointers)
