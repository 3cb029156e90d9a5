"""SharedMemoryTransport: processes of one user on one machine map each other's memory.

A buffer is an anonymous file (memfd). Its peers open it through ``/proc/<pid>/fd/<n>`` and map it, then all descriptors
are closed: from then on only the mappings hold the memory, so it is gone with the last process, a crash included, and
it never has a name in the file system.

The barrier: each rank owns one 64-bit word in the signal pad of every peer and writes the number of the barrier there,
which only grows. It waits until its own pad shows that number, or a later one, in every word. A word has one writer, so
no atomic is needed, but a peer must not see the word before the stores that precede it: x86 keeps stores in order, and
loads; other machines are refused.

Beside the word, and before it, each rank writes what it is doing (`moves.signature`), into one of two places in turn: a
peer may be in the next barrier already, but not in the one after that. Ranks that do not the same are told.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from .moves import PlainMoves, disagreement
from .transport import Arena, PeerTimeout, SymmetricBuffer, check_agreement, gather_objects

WORD = 8
SPINS = 200
LONGEST_NAP = 1e-3


class SharedMemoryTransport(PlainMoves):
    """A :class:`Transport` for CPU tensors.

    Args:
        group: ranks on this machine; None is the default group, or this process alone if there is none.
        timeout: seconds that a barrier waits for a peer.

    Collective. Raises RuntimeError where it cannot work: not Linux on x86-64, or ranks on several machines, in several
    containers or of several users.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0) -> None:
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            got = f"{platform.system()} on {platform.machine()}"
            raise RuntimeError(
                f"SharedMemoryTransport: got {got}, wanted Linux on x86_64 (its barrier needs its order)"
            )
        group = (group or dist.group.WORLD) if dist.is_initialized() else None
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.device = torch.device("cpu")
        self.stream: torch.cuda.Stream | None = None
        self.group = group
        self.timeout = timeout
        self._check_one_machine()
        self.arena = Arena()
        self._buffers: list[SymmetricBuffer] = []
        self._unusable: str | None = None
        self._counter = 0
        self.signals = self.allocate(3 * self.world_size * WORD)
        pads = [pad.view(torch.int64).view(3, -1).numpy() for pad in self.signals.peers]
        self._words = [pad[0] for pad in pads]
        self._signatures = [pad[1:] for pad in pads]

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        check_agreement("allocate", {"nbytes": nbytes}, self.group)
        fd = os.memfd_create("mxep")
        try:
            os.fchmod(fd, 0o600)
            os.truncate(fd, nbytes)
            places = gather_objects(f"/proc/{os.getpid()}/fd/{fd}", self.group)
            # torch.from_file closes its own descriptor and leaves the mapping.
            peers = [torch.from_file(place, shared=True, size=nbytes, dtype=torch.uint8) for place in places]
            gather_objects(None, self.group)  # nobody closes before all have mapped
        finally:
            os.close(fd)
        buffer = SymmetricBuffer(self.rank, peers, torch.tensor([peer.data_ptr() for peer in peers]))
        self._buffers.append(buffer)
        return buffer

    def barrier(self, step: str, pad: SymmetricBuffer | None = None, signature: int = 0) -> None:
        self.check()
        self.signal(signature)
        mine, turn = self._words[self.rank], self._counter % 2
        # Acquire: what a peer stored before its word is visible once the word is.
        if not _wait(self._all_here, self.timeout):
            missing = {peer: int(mine[peer]) for peer in range(self.world_size) if mine[peer] < self._counter}
            raise self._failed(PeerTimeout(self.rank, missing, step, self._counter, self.timeout))
        seen = self._signatures[self.rank][turn].tolist()
        if any(its != signature for its in seen):
            raise self._failed(disagreement(self.rank, seen))

    def signal(self, signature: int) -> None:
        self._counter += 1
        # Release: the stores of this move are older than the word, and x86 shows them in that order.
        for signatures, words in zip(self._signatures, self._words):
            signatures[self._counter % 2, self.rank] = signature
            words[self.rank] = self._counter

    def _failed(self, error: RuntimeError) -> RuntimeError:
        self._unusable = f"unusable after: {error}"
        return error

    def check(self) -> None:
        if self._unusable:
            raise RuntimeError(f"transport of rank {self.rank}: {self._unusable}")

    def free(self, buffer: SymmetricBuffer) -> None:
        buffer.peers.clear()
        self._buffers = [each for each in self._buffers if each is not buffer]

    def close(self) -> None:
        self._unusable = "closed"
        self._words, self._signatures = [], []
        for buffer in self._buffers:
            self.free(buffer)

    def _all_here(self) -> bool:
        return bool((self._words[self.rank] >= self._counter).all())

    def _check_one_machine(self) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        places = gather_objects((boot, os.stat("/proc/self/ns/pid").st_ino, os.getuid()), self.group)
        for rank, place in enumerate(places):
            if place != places[0]:
                raise RuntimeError(
                    "SharedMemoryTransport: wanted all ranks on one machine, in one container, of one user; "
                    f"got rank {rank} elsewhere than rank 0"
                )


def _wait(done: Callable[[], bool], timeout: float) -> bool:
    """Whether ``done()`` came true within ``timeout`` seconds: yields the core first, then naps, longer and longer."""
    for _ in range(SPINS):
        if done():
            return True
        os.sched_yield()
    limit = time.monotonic() + timeout
    nap = 2e-5
    while not done():
        if time.monotonic() > limit:
            return done()
        time.sleep(nap)
        nap = min(1.5 * nap, LONGEST_NAP)
    return True
