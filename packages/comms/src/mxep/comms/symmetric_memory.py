"""SymmetricMemoryTransport: CUDA devices of one NVLink domain, over torch's symmetric memory.

Thin: torch allocates, exchanges handles and has a barrier kernel on the current stream. That barrier releases what
earlier kernels of the stream stored and acquires what the peers' did. Multicast is never used.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from .transport import SymmetricBuffer, check_agreement


class SymmetricMemoryTransport:
    """A :class:`Transport` for CUDA tensors. All moves of a transport belong on one stream, or on ordered ones.

    Args:
        group: ranks of one NVLink domain; None is the default group.
        device: this rank's device; None is the current one.
        timeout: seconds that a barrier waits for a peer. A barrier is a kernel, so its time runs out on the device: it
            prints the rank that it waited for and traps, and the next CUDA call of this process raises.

    Collective. Raises RuntimeError without CUDA or without a process group.
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
        if not dist.is_initialized():
            raise RuntimeError("SymmetricMemoryTransport: got no process group, wanted init_process_group before it")
        self.group: dist.ProcessGroup | None = group
        self._group = group or dist.distributed_c10d._get_default_group()
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        self.timeout = timeout
        # Read by torch when it maps a buffer; cuMulticastCreate must never be called.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._buffers: list[SymmetricBuffer] = []
        self._closed = False
        # An allocation of its own, no piece of torch's pool: pieces share a signal pad, so barriers of two transports
        # on two streams could take each other's signals.
        pad = _SymmetricMemory.empty_strided_p2p((16,), (1,), torch.uint8, self.device)
        self._signals = symm_mem.rendezvous(pad, self._group)

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        check_agreement("allocate", {"nbytes": nbytes}, self.group)
        mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        handle = symm_mem.rendezvous(mine, self._group)
        # get_remote_tensor, not get_buffer: torch may have cut the tensor from a larger segment, and only the former
        # adds the tensor's place in it.
        peers = [
            mine if rank == self.rank else handle.get_remote_tensor(rank, (nbytes,), torch.uint8)
            for rank in range(self.world_size)
        ]
        pointers = torch.tensor([peer.data_ptr() for peer in peers], device=self.device)
        buffer = SymmetricBuffer(self.rank, peers, pointers)
        self._buffers.append(buffer)
        self.barrier("allocate")  # no peer stores before this rank's zeroes have landed
        return buffer

    def barrier(self, step: str) -> None:
        if self._closed:
            raise RuntimeError(f"transport of rank {self.rank}: closed")
        self._signals.barrier(channel=0, timeout_ms=int(self.timeout * 1000))

    def close(self) -> None:
        self._closed = True
        for buffer in self._buffers:
            buffer.peers.clear()
        self._buffers = []
