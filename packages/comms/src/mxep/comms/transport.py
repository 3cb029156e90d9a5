"""Transports: how ranks reach each other's memory.

allocate(n)     every rank allocates n bytes, and every rank gets the addresses of all these buffers
barrier(step)   no rank leaves before all have entered; stores of any rank before it are visible to all after it
check()         raises if an earlier barrier is known to have failed

If a rank raises, its peers time out. So the rank leaves a note in the process group's store, and peers quote the note:

rank 1   raises MemoryError in its layer, before an exchange      `tell_failure` writes the note
rank 0   times out                                                `told_failures`: "rank 1 raised MemoryError: ..."
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.runtime.record import fixed

from .layout import NEW, Layout, describe_dispatch, step_of

T = TypeVar("T")
GRACE = 5.0
"""Seconds to wait for an answer from the process group's store, whose host may be down."""


@dataclass(frozen=True, eq=False)
class SymmetricBuffer:
    """A buffer of the same size on every rank.

    Attributes:
        rank: this rank.
        peers: one tensor (nbytes,) uint8 per rank. ``peers[rank]`` is this rank's own memory. An empty list once freed.
        pointers: (W,) int64 on the transport's device, the addresses of all ranks' buffers, for kernels.
        views: cache of views of this rank's own memory.
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


def current_stream(device_index: int) -> torch.cuda.Stream:
    """`torch.cuda.current_stream` without creating a new object in each call."""
    return _stream(*torch._C._cuda_getCurrentStream(device_index))


@functools.lru_cache(256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class Transport(ABC):
    """Base class of transports. `allocate` and `barrier` are collective: all ranks call them in the same order.

    Attributes:
        access: how a rank writes to the memory of peers. "host": the host stores to it. "kernels": kernels store to its
            addresses. "puts": kernels call NVSHMEM.
        rank, world_size: those of ``group``.
        device: device of the buffers.
        group: the process group, or None for a single process without one.
        stream: stream of asynchronous exchanges, shared by all workspaces. None on the CPU. Exchanges run one after
            another on it, because two at the same time could deadlock: on one rank the first may fill all
            multiprocessors, on a peer the second, and each waits for the other rank.
        timeout: maximum seconds to wait for a peer. Default: the process group's timeout.
        users: number of open users of this transport, counted by the code that shares it.
        new_dispatch: (1,) int32 on the device, the dispatch number that the next new dispatch sends, see
            `layout.new_dispatch`. next_dispatch: the same number on the host, see `announce`.

    State shared by all workspaces. `workspace.py` explains how it is used:
        buffers: two buffers of equal size, used in turn. Empty before the first workspace.
        exchanges: number of exchanges that have begun.
        dispatches: number of dispatches with tables. Counted only on the CPU.
        last_stream: the current stream when the last exchange began.
        in_flight: tensors that the last exchange may still use. None if no exchange is in flight.
        done: event at the end of the last exchange that ran on `stream`.
        capture: id of the CUDA graph capture that contains the last exchange, 0 if none.
        was_captured: True once any exchange was captured.
        replaced: older, smaller buffers, kept because captured graphs still store to them.
        refused: reason why this rank refused an exchange. No exchange is possible after a refusal.
    """

    access: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float | None) -> None:
        self.group = (group or dist.group.WORLD) if dist.is_initialized() else None
        self.rank = 0 if self.group is None else self.group.rank()
        self.world_size = 1 if self.group is None else self.group.size()
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.timeout = timeout_of(self.group, device) if timeout is None else timeout
        self.new_dispatch = torch.full((1,), NEW, dtype=torch.int32, device=device)
        fixed(self.new_dispatch)
        self.buffers: tuple[SymmetricBuffer, ...] = ()
        self.replaced: tuple[SymmetricBuffer, ...] = ()
        self.exchanges = self.dispatches = self.users = self.capture = 0
        self.next_dispatch, self.was_captured = NEW, False
        self.last_stream: torch.cuda.Stream | None = None
        self.in_flight: object = None
        self.done: torch.cuda.Event | None = None
        self.refused: str | None = None
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
    def barrier(self, step: str) -> None:
        """Wait for all ranks. step: name of the operation, for the message of a PeerTimeout.

        On CUDA it is a kernel of the current stream. Barriers on different streams must not run at the same time.
        """

    @abstractmethod
    def exchange(self, layout: Layout, experts_per_rank: int, num_sms: int | None) -> Any:
        """Create the object that makes a workspace's exchanges. It has the methods of `shared_memory.PlainExchange`."""

    def announce(self, new_dispatch: int) -> None:
        """Set the dispatch number that new dispatches send from now on.

        The number is written to the device at once. Layers may share a record, and its replays only read the number. A
        dispatch that is not replayed writes the number again (`Workspace.new_dispatch`).
        """
        self.next_dispatch = new_dispatch
        if self.stream is None or torch.cuda.is_current_stream_capturing():
            return
        if self.last_stream in (None, current_stream(self.device.index)):
            self.new_dispatch.fill_(new_dispatch)

    def graph_state(self) -> tuple[SymmetricBuffer, bool] | None:
        """State on which recorded launches (`mxep.runtime.record`) of the next exchanges depend.

        Returns (buffer of the next exchange, was_captured), or None if records cannot be replayed now. That is the case
        if exchanges are not kernels, there are no buffers yet, an exchange was refused, an exchange is in flight, or
        the last exchange began on another stream. Raises as `check` does.
        """
        if self.access != "kernels" or self.refused is not None:
            return None
        self.check()
        if (
            not self.buffers
            or self.in_flight is not None
            or self.last_stream not in (None, current_stream(self.device.index))
        ):
            return None
        return self.buffers[self.exchanges % 2], self.was_captured

    def launched(self, exchanges: int) -> None:
        """Count exchanges that a record just replayed on the current stream."""
        self.exchanges += exchanges
        self.last_stream = current_stream(self.device.index)

    def free(self, buffer: SymmetricBuffer) -> None:
        """Release a buffer that no exchange in flight uses. Not collective. Views that are still held stay valid."""
        buffer.free()
        self._buffers = [each for each in self._buffers if each is not buffer]

    def check(self) -> None:
        """Raise PeerTimeout or PeersDisagree if an earlier barrier is known to have failed. Does not wait."""
        if self._unusable:
            raise RuntimeError(f"transport of rank {self.rank}: {self._unusable}")

    def close(self) -> None:
        """Release all buffers. Not collective. Views that are still held stay valid."""
        self._unusable = "closed"
        for buffer in self._buffers:
            self.free(buffer)
        self.buffers = self.replaced = ()  # NVSHMEM's hold more memory than what `free` releases
        self.in_flight = None


class PeerTimeout(RuntimeError):
    """Some ranks did not enter a barrier in time. The transport is unusable afterwards.

    Attributes:
        missing: ranks of the group that did not arrive.
        step: operation in which this rank waited.
        counter: number of the barrier.
        limit: seconds that this rank waited.
    """

    def __init__(
        self, rank: int, missing: Mapping[int, int], step: str, counter: int, limit: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        late = ", ".join(f"rank {peer} (last seen at barrier {seen})" for peer, seen in missing.items())
        why = ""
        if step == "barrier":  # exchanges begin with one after a graph was captured
            why = ": if those ranks have captured no CUDA graph of their layers, capture on all ranks or on none"
        told = "" if group is None else told_failures(group, missing)
        super().__init__(f"rank {rank} waited {limit:g} s at {step}, barrier {counter}, for {late}{why}{told}")
        self.missing = tuple(missing)
        self.step, self.counter, self.limit = step, counter, limit


class PeersDisagree(RuntimeError):
    """Ranks made different exchanges, or sent rows of different widths. The transport is unusable afterwards."""

    @classmethod
    def over(cls, rank: int, op_ids: Sequence[int]) -> PeersDisagree:
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
    def over_dispatches(cls, rank: int, step: str, dispatches: Sequence[int]) -> PeersDisagree:
        found = (f"rank {peer} of {describe_dispatch(number)}" for peer, number in enumerate(dispatches))
        why = "ranks ran forwards or backwards in another order, or one left out or repeated an exchange"
        return cls(f"rank {rank} met peers in a {step} of other dispatches: {', '.join(found)}: {why}")


def batch_too_large(tokens: int, max_tokens: int) -> str:
    """Error message for a batch that is too large, with the cure."""
    return f"batch: got {tokens} tokens, wanted at most max_tokens = {max_tokens}: {how_to_make_room(tokens)}"


def how_to_make_room(tokens: int) -> str:
    cure = f"set max_tokens={tokens} or more, on all ranks, where the layer or workspace is made"
    return f"{cure}, or call reserve({tokens}) of a layer made without it"


def tell_failure(group: dist.ProcessGroup | None, error: BaseException | str, *, over: bool = False) -> str:
    """Write a note about the error that this rank raised, or remove it. Returns the note's text.

    error: the exception, or the text that an earlier call returned. An earlier note of this rank is overwritten.
    over: True: remove the note, if it still has the text of `error`.
    """
    key = f"mxep/raised/{dist.get_rank(group)}"
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"[:1000]

    def tell() -> None:
        store = _store(group)
        if not over:
            store.set(key, f"{time.time()} {text}")
        elif store.check([key]) and store.get(key).decode().partition(" ")[2] == text:
            store.delete_key(key)

    _ask(tell)
    return text


def told_failures(group: dist.ProcessGroup | None, ranks: Iterable[int]) -> str:
    """Read the notes of `ranks`, for the end of an error message. "" if there are none or the store does not answer."""
    notes: list[str] = []

    def read() -> None:
        store = _store(group)
        for rank in ranks:
            if store.check([key := f"mxep/raised/{rank}"]):
                when, _, text = store.get(key).decode().partition(" ")
                notes.append(f"; rank {rank} raised {text} ({time.time() - float(when):.0f} s ago)")

    _ask(read)
    return "".join(notes)


def _ask(question: Callable[[], object]) -> None:
    def ask() -> None:
        with contextlib.suppress(RuntimeError, KeyError):  # the store or the group no longer exists
            question()

    thread = threading.Thread(target=ask, daemon=True)  # daemon, because a store on a dead host blocks it forever
    thread.start()
    thread.join(GRACE)


def _store(group: dist.ProcessGroup | None) -> Any:
    found = group or dist.group.WORLD
    assert found is not None
    return dist.distributed_c10d._world.pg_map[found][1]


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Timeout in seconds of a group's own collectives on a device. Torch's defaults: 600 for NCCL, 1800 for gloo."""
    if group is None:
        return dist.default_pg_timeout.total_seconds()  # a single process waits for no peer
    served = [each for each in group._device_types if each.type == device.type] or group._device_types
    options: Any = group._get_backend(served[0]).options
    return float(options._timeout.total_seconds())


def signal_pad_bytes(world_size: int) -> int:
    """Bytes of a barrier's signal pad: one int64 signal per rank and one int64 counter."""
    return (world_size + 1) * 8


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """All ranks' values in rank order, or only this rank's without a process group. Slow, so only for set-up."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_agreement(what: str, values: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Raise the same ValueError on every rank if `values` differ between ranks."""
    first, *others = gather_objects(dict(values), group)
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{what}: ranks disagree on {name}: got {theirs[name]} on rank {rank}, wanted {value} as on rank 0"
                )
