"""Transports: how ranks reach each other's memory.

allocate(n)     rank 0: [ n bytes ]   rank 1: [ n bytes ]   ...   each rank has the addresses of all of them
barrier(step)   no rank leaves before all have entered; stores made before it are visible after it
check()         raises known failures of earlier barriers
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.runtime.record import fixed

from .arena import Arena, current_stream
from .failures import told_failures
from .layout import NEW, describe_dispatch, step_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SymmetricBuffer:
    """A buffer of the same size on every rank.

    Attributes:
        rank: this rank.
        peers: uint8 (nbytes,), one per rank; ``peers[rank]`` is local. Empty once the buffer is freed.
        pointers: int64 (W,) on the transport's device, the peers' addresses, for kernels.
        views: cached views of the local bytes.
    """

    rank: int
    peers: list[Tensor]
    pointers: Tensor
    views: dict[Any, Any] = field(default_factory=dict)

    @property
    def local(self) -> Tensor:
        return self.peers[self.rank]

    def free(self) -> None:
        self.peers.clear()
        self.views.clear()


@dataclass(frozen=True, eq=False)
class StagedBuffer(SymmetricBuffer):
    """A buffer that peers put into, with staging for this rank's puts. Other ranks' ``peers`` may be empty tensors.

    Attributes:
        staging: uint8 (nbytes,) symmetric memory with the buffer's layout. No peer touches it.
    """

    staging: Tensor = field(kw_only=True)


class Transport(ABC):
    """Base of the transports. allocate and barrier are collective: all ranks call them in the same order.

    Attributes:
        access: how peers' memory is written: by the "host", by "kernels" that store to its address, or by "puts".
        rank, world_size: of ``group``. device: device of the buffers. group: None for a process alone.
        stream: stream of asynchronous exchanges; None on CPU. All workspaces share it, so that exchanges run one after
            another. A kernel that waits on every multiprocessor must never block the one that its peers wait for.
        timeout: most seconds to wait for a peer, by default those of the process group.
        arena: state that its workspaces share.
        new_dispatch: (1,) int32 on the device, number that the next new dispatch sends (`layout.new_dispatch`).
    """

    access: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float | None) -> None:
        self.group = (group or dist.group.WORLD) if dist.is_initialized() else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.world_size = 1 if self.group is None else self.group.size()
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.timeout = timeout_of(self.group, device) if timeout is None else timeout
        self.arena = Arena(device)
        self.new_dispatch = torch.full((1,), NEW, dtype=torch.int32, device=device)
        fixed(self.new_dispatch)
        self._buffers: list[SymmetricBuffer] = []
        self._unusable: str | None = None

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Allocate a zeroed buffer. Raises ValueError if the ranks ask for different sizes."""
        check_agreement("allocate", {"nbytes": nbytes}, self.group)
        buffer = self._allocate(nbytes)
        fixed(*buffer.peers, buffer.pointers)
        self._buffers.append(buffer)
        return buffer

    @abstractmethod
    def _allocate(self, nbytes: int) -> SymmetricBuffer: ...

    @abstractmethod
    def barrier(self, step: str, signal_pad: SymmetricBuffer | None = None) -> None:
        """Wait for all ranks. Raises PeerTimeout; its message names ``step``.

        signal_pad: buffer of :func:`signal_pad_bytes` to meet over. Barriers that may run at once, on two streams, need
        one each.
        """

    def announce(self, new_dispatch: int) -> None:
        """Set the number that new dispatches send from now on.

        It is written at once, for a record of exchanges that may be played next: one record serves many layers. A
        dispatch outside of records writes it again, in the order of its stream or of the captured graph.
        """
        arena = self.arena
        arena.new_dispatch = new_dispatch
        if self.stream is None or torch.cuda.is_current_stream_capturing():
            return
        if arena.stream in (None, current_stream(self.device.index)):
            self.new_dispatch.fill_(new_dispatch)

    def free(self, buffer: SymmetricBuffer) -> None:
        """Release a buffer without an exchange in flight. Local; views that are still held stay valid."""
        buffer.free()
        self._buffers = [each for each in self._buffers if each is not buffer]

    def check(self) -> None:
        """Raise PeerTimeout or PeersDisagree if an earlier barrier is known to have failed. Waits for nothing."""
        if self._unusable:
            raise RuntimeError(f"transport of rank {self.rank}: {self._unusable}")

    def close(self) -> None:
        """Release all buffers. Local; views that are still held stay valid."""
        self._unusable = "closed"
        for buffer in self._buffers:
            self.free(buffer)


class PeerTimeout(RuntimeError):
    """Some ranks did not enter a barrier in time. The transport is unusable afterwards.

    Attributes:
        missing: ranks of the group that did not arrive. step: operation of the other ranks.
        counter: number of the barrier. limit: seconds waited.
    """

    def __init__(
        self,
        rank: int,
        missing: Mapping[int, int],
        step: str,
        counter: int,
        limit: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        late = ", ".join(f"rank {peer} (last seen at barrier {seen})" for peer, seen in missing.items())
        why = ""
        if step == "barrier":  # exchanges begin with one after a graph was captured
            why = ": if those ranks have captured no CUDA graph of their layers, capture on all ranks or on none"
        told = "" if group is None else told_failures(group, missing)
        super().__init__(f"rank {rank} waited {limit:g} s at {step}, barrier {counter}, for {late}{why}{told}")
        self.missing = tuple(missing)
        self.step, self.counter, self.limit = step, counter, limit


class PeersDisagree(RuntimeError):
    """Ranks met in different exchanges, or with rows of different widths. The transport is unusable afterwards."""

    @classmethod
    def over(cls, rank: int, op_ids: Sequence[int]) -> "PeersDisagree":
        """The error for ``rank`` if ranks met with these op ids."""
        for peer, op_id in enumerate(op_ids):
            if step_of(op_id) == "refused":
                tokens = op_id & 0xFFFFFF
                why = "invalid expert ids"
                if tokens:
                    why = f"{tokens} tokens, more than max_tokens: {how_to_make_room(tokens)}"
                return cls(f"rank {rank} met a peer that refused to dispatch: rank {peer} brought {why}")
        marks = {op_id >> 27 for op_id in op_ids}
        found = (
            f"rank {peer} at {step_of(op_id)} with rows of {op_id & 0xFFFFFF} bytes"
            + (f" in layout {op_id >> 27}" if len(marks) > 1 else "")
            for peer, op_id in enumerate(op_ids)
        )
        return cls(f"rank {rank} met peers in other exchanges: {', '.join(found)}")

    @classmethod
    def over_dispatches(cls, rank: int, step: str, dispatches: Sequence[int]) -> "PeersDisagree":
        """The error for ``rank`` if ranks met in one exchange with these dispatch numbers."""
        found = (f"rank {peer} of {describe_dispatch(number)}" for peer, number in enumerate(dispatches))
        why = "ranks ran forwards or backwards in another order, or one left out or repeated an exchange"
        return cls(f"rank {rank} met peers in a {step} of other dispatches: {', '.join(found)}: {why}")


def batch_too_large(tokens: int, max_tokens: int) -> str:
    """Message about a batch that is too large, and how to make room."""
    return f"batch: got {tokens} tokens, wanted at most max_tokens = {max_tokens}: {how_to_make_room(tokens)}"


def how_to_make_room(tokens: int) -> str:
    cure = f"set max_tokens={tokens} or more, on all ranks, where the layer or workspace is made"
    return f"{cure}, or call reserve({tokens}) of a layer made without it"


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Timeout in seconds of a group's own collectives on a device. torch's default is 600 for NCCL, 1800 for gloo."""
    if group is None:
        return dist.default_pg_timeout.total_seconds()  # nobody is waited for
    served = [each for each in group._device_types if each.type == device.type] or group._device_types
    options: Any = group._get_backend(served[0]).options
    return float(options._timeout.total_seconds())


def signal_pad_bytes(world_size: int) -> int:
    """Bytes of a barrier's signal pad: a signal for each rank, and the local counter."""
    return (world_size + 1) * 8


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in rank order; only this one without a process group. For set-up only."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_agreement(what: str, values: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Raise the same ValueError on every rank if the ranks hold different values."""
    first, *others = gather_objects(dict(values), group)
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{what}: ranks disagree on {name}: got {theirs[name]} on rank {rank}, wanted {value} as on rank 0"
                )
