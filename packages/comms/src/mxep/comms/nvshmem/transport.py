"""NvshmemTransport: connects CUDA devices over torch's NVSHMEM backend, by puts to PEs (NVSHMEM's process ranks).

It is meant for ranks on several hosts. It has run between the GPUs of one host. Between hosts it never ran.

Torch starts NVSHMEM with the first allocation. The PEs are the ranks of the default group, and all of them must take
part in an allocation. There is no rendezvous, because no rank needs the address of another. Multicast stays off. Memory
is kept until the process ends, because freeing it is collective and would wait forever for lost peers.

A process has one backend of symmetric memory for its whole life. So a process with an NvshmemTransport cannot have a
SymmetricMemoryTransport.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import itertools
import math
import os
import re
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from mxep.comms.layout import ALIGNMENT, PE_SHIFT, Layout, round_up
from mxep.comms.symmetric_memory import CudaTransport
from mxep.comms.transport import SymmetricBuffer, check_agreement, gather_objects, signal_pad_bytes

# Ids of allocations. Torch does not free an allocation with an id. Global, because ids must be unique in the process.
_ALLOCATION = itertools.count(0x6D78_6570)


@dataclass(frozen=True, eq=False)
class StagedBuffer(SymmetricBuffer):
    """A buffer that peers put into. ``peers`` has empty tensors for the other ranks.

    staging: source of this rank's puts, of the same size and layout.
    """

    staging: Tensor = field(kw_only=True)


class NvshmemTransport(CudaTransport):
    """A :class:`Transport` for CUDA tensors, one rank per GPU.

    Every buffer has a staging area of the same size, so it needs twice the memory of SymmetricMemoryTransport. The
    first transport of a process compiles two kernels. Each takes some 10 s if it is not in Triton's cache.

    Args:
        group: a process group with all ranks of the default group. None: the default group.
        device: this rank's device. None: the current device.
        timeout: seconds that a barrier waits for a peer, as in SymmetricMemoryTransport. The constructor and `allocate`
            wait for other ranks up to the timeout of the process group instead.

    Attributes:
        bases: (W,) int64 on the device, each rank's PE << PE_SHIFT.

    Collective. Raises RuntimeError without CUDA and without a process group. Raises RuntimeError on every rank if any
    rank has no NVSHMEM, no device library of the same version, or another backend of symmetric memory in use. Raises
    ValueError if the group lacks ranks of the default group.
    """

    access = "puts"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("NvshmemTransport: got no CUDA device; on CPU use SharedMemoryTransport")
        if not dist.is_initialized():
            raise RuntimeError("NvshmemTransport: got no process group, wanted init_process_group before it")
        check_group(dist.get_world_size(group), dist.get_world_size())
        super().__init__(group, device, timeout)
        failure = None
        try:
            self._prepare()
        except Exception as error:
            failure = error
        # Ranks compare failures here, because the first allocation would wait forever for a rank that raised.
        for rank, message in enumerate(gather_objects(None if failure is None else str(failure), group)):
            if message is not None:
                raise RuntimeError(f"NvshmemTransport: rank {rank}: {message}") from failure
        pes = [dist.get_global_rank(group, rank) if group else rank for rank in range(self.world_size)]
        self.pes = torch.tensor(pes, dtype=torch.int32, device=self.device)
        self.bases = self.pes.long() << PE_SHIFT
        self._signal_pad = self._empty(signal_pad_bytes(self.world_size))
        self._agree()
        with torch.cuda.device(self.device):
            for kernel in (self._put_kernel, self._meet_kernel):
                init_nvshmem_state(kernel)

    def _allocate(self, nbytes: int) -> StagedBuffer:
        padded = round_up(nbytes, 16 * ALIGNMENT)
        block = self._empty(2 * padded)
        local, staging = block[:nbytes], block[padded:][:nbytes]
        self._agree()
        peers = [local if rank == self.rank else local.new_empty(0) for rank in range(self.world_size)]
        # For every PE, NVSHMEM takes the address of this rank's own buffer.
        pointers = torch.full((self.world_size,), local.data_ptr(), dtype=torch.int64, device=self.device)
        return StagedBuffer(self.rank, peers, pointers, staging=staging)

    def barrier(self, step: str) -> None:
        self.check()
        with torch.cuda.device(self.device):
            self.meet(self._signal_pad, 0, 0, self.world_size * 8)

    def exchange(self, layout: Layout, experts_per_rank: int, num_sms: int | None) -> Any:
        from .exchange import PutExchange  # imports Triton

        return PutExchange(self, layout, experts_per_rank, num_sms)

    def put(
        self, buffer: StagedBuffer, source: Tensor, destinations: Tensor, num_sms: int | None, groups: int = 1
    ) -> None:
        """Put row i of ``source`` to each of ``destinations[i]``.

        source: (N, n) uint8. destinations: (N, J) int64, encoded as `PE_SHIFT` explains.
        groups: the rows are divided into this many equal runs, and consecutive puts take rows of different runs.
        """
        programs = min(num_sms or self.max_sms, self.max_sms)
        # Program i makes puts i, i + programs, ... If the numbers have no common divisor, these go to different ranks.
        while math.gcd(programs, max(destinations.shape[1], groups)) > 1:
            programs -= 1
        self._kernels.put(self._put_kernel, programs, source, buffer.local, destinations, groups)

    def meet(self, buffer: Tensor, channel: int, op_id: int, counters_start: int) -> None:
        """Wait until all puts of all ranks have landed. buffer: this rank's own."""
        numbers = op_id, channel, self.rank, counters_start
        self._kernels.meet(self._meet_kernel, buffer, self.pes, self.state, *numbers)

    def _prepare(self) -> None:
        """Do the part of the set-up that may fail on a single rank."""
        from . import exchange

        self._kernels, library = exchange, device_library()
        with torch.cuda.device(self.device):
            self._put_kernel = exchange.compile_put(library)
            self._meet_kernel = exchange.compile_meet(library, self.world_size)
        check_versions(device_version(self._meet_kernel.asm["ptx"]), host_version(), library)
        # Two programs per multiprocessor.
        self.max_sms = 2 * torch.cuda.get_device_properties(self.device).multi_processor_count
        choose_backend(self.device)

    def _empty(self, nbytes: int) -> Tensor:
        """Allocate zeroed memory that is never freed."""
        block = _SymmetricMemory.empty_strided_p2p(
            (nbytes,), (1,), torch.uint8, self.device, alloc_id=next(_ALLOCATION)
        ).zero_()
        torch.cuda.synchronize(self.device)
        self._last = block.data_ptr()
        return block

    def _agree(self) -> None:
        """Wait until all ranks have zeroed the last block. Raises if its offset in the heap differs between ranks."""
        check_agreement("allocate", {"offset in the heap": self._last - self._signal_pad.data_ptr()}, self.group)


def check_group(ranks: int, world_size: int) -> None:
    if ranks != world_size:
        raise ValueError(
            f"NvshmemTransport: got a group of {ranks} of the job's {world_size} ranks, wanted all of them: "
            "NVSHMEM allocates on all. Use SymmetricMemoryTransport for a group on one NVLink domain"
        )


def choose_backend(device: torch.device) -> None:
    """Choose NVSHMEM as torch's backend of symmetric memory. Raises RuntimeError if another backend is in use."""
    os.environ["NVSHMEM_DISABLE_NVLS"] = "1"  # read when NVSHMEM starts; multicast is never used
    used = symm_mem.get_backend(device)
    if used == "NVSHMEM":
        return
    try:
        symm_mem.set_backend("NVSHMEM")
    except RuntimeError as error:
        raise RuntimeError(
            f"got symmetric memory of backend {used} in this process already, wanted NVSHMEM; torch keeps the first: "
            "use NvshmemTransport alone, in a process without SymmetricMemoryTransport and its like"
        ) from error


def device_library() -> str:
    """Path of NVSHMEM's device library. If it is not found, raises RuntimeError with the command that installs it."""
    if not symm_mem.is_nvshmem_available():
        raise RuntimeError(
            f"got torch {torch.__version__} without NVSHMEM, wanted a build with it; use SymmetricMemoryTransport"
        )
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    try:
        return str(NvshmemLibFinder.find_device_library())
    except RuntimeError as error:
        if "NVSHMEM_LIB_DIR" not in os.environ and (library := _library_of_architecture()):
            return library
        raise RuntimeError(f"{error}; {_what_to_install()} or set NVSHMEM_LIB_DIR to its folder") from error


def _library_of_architecture() -> str | None:
    """Path of the device library for the newest architecture that this device can run; Hopper's without a device.

    NVSHMEM 3.7 has one device library per architecture, and torch 2.15 does not find them. None if there is none.
    """
    folder = Path(sysconfig.get_path("purelib"), "nvidia", "nvshmem", "lib")
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    found = {int(path.stem.rpartition("_")[2]): str(path) for path in folder.glob("libnvshmem_device_sm_*.bc")}
    return found.get(max((sm for sm in found if sm <= 10 * major + minor), default=0))


def device_version(ptx: str) -> str | None:
    """Version of the device library that was linked into a kernel, read from its PTX. None if it is not found."""
    found = re.search(r"nvshmemi_device_lib_version_d\[12\] = \{([\d, ]+)\}", ptx)
    if found is None:
        return None
    data = bytes(map(int, found[1].split(","))).ljust(12, b"\0")
    return ".".join(str(int.from_bytes(data[i : i + 4], "little")) for i in (0, 4, 8))


def host_version() -> str | None:
    """Version of the host library that torch has loaded. None if it cannot be asked."""
    numbers = [ctypes.c_int() for _ in range(3)]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libnvshmem_host.so.3").nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
        return ".".join(str(number.value) for number in numbers)
    return None


def check_versions(device: str | None, host: str | None, library: str) -> None:
    """Raise RuntimeError if the versions of device and host library differ, because NVSHMEM would refuse them."""
    if device is not None and host is not None and device != host:
        raise RuntimeError(
            f"got NVSHMEM's device library {device} ({library}), wanted {host} as the host library that torch loaded; "
            f"{_what_to_install()}"
        )


@functools.cache
def init_nvshmem_state(kernel: object) -> None:
    """Let NVSHMEM initialise its state in the module of a compiled kernel, which would read garbage otherwise."""
    from torch._C._distributed_c10d import _nvshmemx_cumodule_init

    kernel._init_handles()  # type: ignore[attr-defined]
    _nvshmemx_cumodule_init(kernel.module)  # type: ignore[attr-defined]


def _what_to_install() -> str:
    cuda = (torch.version.cuda or "13").split(".")[0]
    listed = [r.split(";")[0].strip() for r in importlib.metadata.requires("torch") or [] if "nvidia-nvshmem" in r]
    wanted = f" (torch asks for {listed[0]})" if listed else ""
    return f"pip install mxep-comms[nvshmem-cu{cuda}]{wanted}"
