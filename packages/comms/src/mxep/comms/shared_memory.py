"""SharedMemoryTransport: processes of one user on one machine map each other's memory.

A buffer is an anonymous file (memfd). Its peers open it through ``/proc/<pid>/fd/<n>`` and map it, then all descriptors
are closed. From then on only the mappings hold the memory. It is gone with the last process, even after a crash, and
never has a name in the file system.

The barrier: each rank owns one 64-bit signal in the signal pad of every peer, and writes the number of the barrier
there. The number only grows. The rank waits until every signal of its own pad shows that number or a later one. A
signal has one writer, so no atomic is needed. But a peer must not see the signal before the stores that precede it. x86
keeps the order of stores and of loads. Other machines are refused.

Before the signal, each rank writes its op id (`Layout.op_id`) into one of two rows in turn. Two are enough: a peer may
be in the next barrier already, but not in the one after that. Ranks with different op ids raise PeersDisagree. The
upper half of that word is the number of the exchange's dispatch, which is compared in the same way.
"""

import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist

from .layout import differ, step_of
from .transport import PeersDisagree, PeerTimeout, SymmetricBuffer, Transport, gather_objects

POLLS = 200
LONGEST_NAP = 1e-3


class SharedMemoryTransport(Transport):
    """A :class:`Transport` for CPU tensors.

    Args:
        group: ranks on this machine; None is the default group, or this process alone without one.
        timeout: seconds that a barrier waits for a peer; None: the timeout of the group's own collectives.

    Collective. Raises RuntimeError on other systems than Linux on x86-64, and if ranks are on several machines, in
    several containers or of several users.
    """

    access = "host"

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> None:
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            got = f"{platform.system()} on {platform.machine()}"
            raise RuntimeError(
                f"SharedMemoryTransport: got {got}, wanted Linux on x86_64 (its barrier needs its order)"
            )
        super().__init__(group, torch.device("cpu"), timeout)
        self._check_one_machine()
        self._counter = 0
        pads = [pad.view(torch.int64).view(3, -1).numpy() for pad in self.allocate(3 * self.world_size * 8).peers]
        self._signals = [pad[0] for pad in pads]
        self._op_ids = [pad[1:] for pad in pads]

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        fd = os.memfd_create("mxep")
        try:
            os.fchmod(fd, 0o600)
            os.truncate(fd, nbytes)
            paths = gather_objects(f"/proc/{os.getpid()}/fd/{fd}", self.group)
            # torch.from_file closes its own descriptor and leaves the mapping.
            peers = [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
            gather_objects(None, self.group)  # nobody closes before all have mapped
        finally:
            os.close(fd)
        return SymmetricBuffer(
            self.rank, peers, torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64, device="cpu")
        )

    def barrier(self, step: str, signal_pad: SymmetricBuffer | None = None, op_id: int = 0, dispatch: int = 0) -> None:
        self.check()
        self.signal(op_id, dispatch)
        # Acquire: a peer's stores before its signal are visible once the signal is.
        if not self._wait():
            seen = self._signals[self.rank].tolist()
            missing = {peer: number for peer, number in enumerate(seen) if number < self._counter}
            raise self._failed(PeerTimeout(self.rank, missing, step, self._counter, self.timeout, self.group))
        found = self._op_ids[self.rank][self._counter % 2].tolist()
        op_ids, dispatches = [word & 0xFFFFFFFF for word in found], [word >> 32 for word in found]
        if any(each != op_id for each in op_ids):
            raise self._failed(PeersDisagree.over(self.rank, op_ids))
        if any(differ(each, dispatch) for each in dispatches):
            raise self._failed(PeersDisagree.over_dispatches(self.rank, step_of(op_id), dispatches))

    def signal(self, op_id: int, dispatch: int = 0) -> None:
        """Enter the next barrier without waiting there."""
        self._counter += 1
        # Release: the stores of this exchange are older than the signal, and x86 shows them in that order.
        for op_ids, signals in zip(self._op_ids, self._signals):
            op_ids[self._counter % 2, self.rank] = dispatch << 32 | op_id
            signals[self.rank] = self._counter

    def _failed(self, error: RuntimeError) -> RuntimeError:
        self._unusable = f"unusable after: {error}"
        return error

    def close(self) -> None:
        super().close()
        self._signals, self._op_ids = [], []

    def _wait(self) -> bool:
        """True if all ranks arrive within the timeout. Yields the core first, then naps, longer and longer."""
        signals = self._signals[self.rank]
        for _ in range(POLLS):
            if (signals >= self._counter).all():
                return True
            os.sched_yield()
        limit = time.monotonic() + self.timeout
        nap = 2e-5
        while not (signals >= self._counter).all():
            if time.monotonic() > limit:
                return bool((signals >= self._counter).all())
            time.sleep(nap)
            nap = min(1.5 * nap, LONGEST_NAP)
        return True

    def _check_one_machine(self) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machines = gather_objects((boot, os.stat("/proc/self/ns/pid").st_ino, os.getuid()), self.group)
        for rank, machine in enumerate(machines):
            if machine != machines[0]:
                raise RuntimeError(
                    "SharedMemoryTransport: wanted all ranks on one machine, in one container, of one user; "
                    f"got rank {rank} elsewhere than rank 0"
                )
