"""Transports: how ranks reach each other's memory.

allocate(n)     rank 0: [ n bytes ]   rank 1: [ n bytes ]   ...   each rank has the addresses of all of them
barrier(step)   no rank leaves before all have entered; what was stored before it is visible after it
check()         raises what is known of barriers that failed
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import step_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SymmetricBuffer:
    """The same number of bytes on every rank.

    Attributes:
        rank: this rank.
        peers: uint8 (nbytes,) one for each rank; ``peers[rank]`` is local. Empty once the buffer is freed.
        pointers: int64 (W,) on the transport's device, the peers' addresses, for kernels.
        views: of the local bytes, kept by who reads them.
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
    """A buffer that peers put into, and what this rank puts from. ``peers`` of other ranks may be empty tensors.

    Attributes:
        staging: uint8 (nbytes,), symmetric memory too, laid out as the buffer. No peer touches it.
    """

    staging: Tensor = field(kw_only=True)


@dataclass(eq=False)
class Arena:
    """What all workspaces of a transport share; `workspace.py` says how.

    Attributes:
        buffers: two, of one size, that exchanges alternate between; none before the first workspace.
        exchanges: how many began.
        signal_pad: of a barrier that moves no rows, where exchanges run on a stream.
        stream: that the last exchange began on. in_flight: tensors that it uses, until it is over. done: when it is.
        capture: the CUDA graph's that the last exchange is part of, 0 if none. was_captured: whether any was.
        replaced: smaller buffers that graphs store to.
        refused: why this rank refused an exchange, after which there are no more.
        users: who opened the transport together and have not closed it, counted by whoever shares it.
        launches_are_counted: within `capturing`.
    """

    buffers: tuple[SymmetricBuffer, ...] = ()
    exchanges: int = 0
    signal_pad: SymmetricBuffer | None = None
    stream: torch.cuda.Stream | None = None
    in_flight: object = None
    done: torch.cuda.Event | None = None
    capture: int = 0
    was_captured: bool = False
    replaced: tuple[SymmetricBuffer, ...] = ()
    refused: str | None = None
    users: int = 0
    launches_are_counted: bool = False


class Transport(ABC):
    """Base of the transports. allocate and barrier are collective: all ranks call them, in one order.

    Attributes:
        access: how a peer's memory is written: by the "host", by "kernels" that store to its address, or by "puts".
        rank, world_size: of ``group``. device: where buffers are. group: None for a process alone.
        stream: of exchanges that the caller does not wait for, those of all its workspaces one after the other: a
            kernel that waits on every multiprocessor must never keep out the one that its peers wait for. None on CPU.
        timeout: seconds that a wait for a peer takes at most. arena: what its workspaces share.
    """

    access: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> None:
        self.group = (group or dist.group.WORLD) if dist.is_initialized() else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.world_size = 1 if self.group is None else self.group.size()
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.timeout = timeout
        self.arena = Arena()
        self._buffers: list[SymmetricBuffer] = []
        self._unusable: str | None = None

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """A zeroed buffer. Raises ValueError if the ranks ask for different sizes."""
        check_agreement("allocate", {"nbytes": nbytes}, self.group)
        self._buffers.append(self._allocate(nbytes))
        return self._buffers[-1]

    @abstractmethod
    def _allocate(self, nbytes: int) -> SymmetricBuffer: ...

    @abstractmethod
    def barrier(self, step: str, signal_pad: SymmetricBuffer | None = None) -> None:
        """Wait for all ranks; ``step`` says in an error what they were doing. Raises PeerTimeout.

        signal_pad: of :func:`signal_pad_bytes`, to meet over. Barriers that may run at once, on two streams, need one
        each.
        """

    def free(self, buffer: SymmetricBuffer) -> None:
        """Let go of a buffer that no exchange is in flight in. Local; views that are still held stay valid."""
        buffer.free()
        self._buffers = [each for each in self._buffers if each is not buffer]

    def check(self) -> None:
        """Raise PeerTimeout or PeersDisagree if that is known of a barrier that is past. Waits for nothing."""
        if self._unusable:
            raise RuntimeError(f"transport of rank {self.rank}: {self._unusable}")

    def graph_state(self) -> tuple[SymmetricBuffer, bool] | None:
        """What a graph of the next exchanges holds for, whose launches the host counts: what the first stores to, and
        whether there are graphs whose launches nobody counts, so that each exchange begins with a barrier.

        None where exchanges are no kernels, one is in flight, or the last was on another stream. Raises as
        :meth:`check`.
        """
        arena = self.arena
        if self.access != "kernels" or arena.refused is not None or not arena.buffers:
            return None
        self.check()
        if arena.in_flight is not None or arena.stream not in (None, current_stream(self.device.index)):
            return None
        return arena.buffers[arena.exchanges % 2], arena.was_captured

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Exchanges within are captured, not made: `launched` counts those of each launch."""
        arena = self.arena
        exchanges, stream = arena.exchanges, arena.stream
        arena.stream = arena.done = None  # of before the capture
        arena.launches_are_counted = True
        try:
            yield
        finally:
            arena.launches_are_counted = False
            arena.exchanges, arena.stream, arena.done, arena.in_flight = exchanges, stream, None, None

    def launched(self, exchanges: int) -> None:
        """A graph of so many exchanges was launched on the current stream."""
        self.arena.exchanges += exchanges
        self.arena.stream = current_stream(self.device.index)

    def close(self) -> None:
        """Let go of all buffers. Local; views that are still held stay valid."""
        self._unusable = "closed"
        for buffer in self._buffers:
            self.free(buffer)


class PeerTimeout(RuntimeError):
    """Some ranks did not enter a barrier in time. The transport cannot be used any more.

    Attributes:
        missing: ranks of the group that did not arrive. step: what the others were doing.
        counter: number of the barrier. limit: seconds that were waited.
    """

    def __init__(self, rank: int, missing: Mapping[int, int], step: str, counter: int, limit: float) -> None:
        late = ", ".join(f"rank {peer} (last seen at barrier {seen})" for peer, seen in missing.items())
        super().__init__(f"rank {rank} waited {limit:g} s at {step}, barrier {counter}, for {late}")
        self.missing = tuple(missing)
        self.step, self.counter, self.limit = step, counter, limit


class PeersDisagree(RuntimeError):
    """Ranks met in different exchanges, or with rows of different widths. The transport cannot be used any more."""

    @classmethod
    def over(cls, rank: int, op_ids: Sequence[int]) -> "PeersDisagree":
        """What to raise on ``rank`` where ranks met with these op ids."""
        for peer, op_id in enumerate(op_ids):
            if step_of(op_id) == "refused":
                tokens = op_id & 0xFFFFFF
                why = "invalid expert ids"
                if tokens:
                    cure = f"set max_tokens={tokens} or more, on all ranks, where the layer or workspace is made"
                    why = f"{tokens} tokens, more than max_tokens: {cure}"
                return cls(f"rank {rank} met a peer that refused to dispatch: rank {peer} brought {why}")
        marks = {op_id >> 27 for op_id in op_ids}
        found = (
            f"rank {peer} at {step_of(op_id)} with rows of {op_id & 0xFFFFFF} bytes"
            + (f" in layout {op_id >> 27}" if len(marks) > 1 else "")
            for peer, op_id in enumerate(op_ids)
        )
        return cls(f"rank {rank} met peers in other exchanges: {', '.join(found)}")


def current_stream(device_index: int) -> torch.cuda.Stream:
    """As `torch.cuda.current_stream`, which makes a new object at every call."""
    return _stream(*torch._C._cuda_getCurrentStream(device_index))


@functools.lru_cache(256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def signal_pad_bytes(world_size: int) -> int:
    """What a barrier meets over: a signal for each rank, and the local counter."""
    return (world_size + 1) * 8


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in rank order; just this one where there is no process group. For set-up only."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_agreement(what: str, values: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Raise the same ValueError on every rank if the ranks do not hold the same values."""
    first, *others = gather_objects(dict(values), group)
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{what}: ranks disagree on {name}: got {theirs[name]} on rank {rank}, wanted {value} as on rank 0"
                )
