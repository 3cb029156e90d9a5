"""What the exchanges of a transport share: two buffers, the last one's stream, graphs. `workspace.py` says how."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .layout import NEW
from .one_thread import OneThread

if TYPE_CHECKING:
    from .transport import SymmetricBuffer, Transport


@dataclass(eq=False)
class Arena:
    """What all workspaces of a transport share.

    Attributes:
        device: the transport's.
        buffers: two, of one size, that exchanges alternate between; none before the first workspace.
        exchanges: how many began. dispatches: how many brought tables, between CPUs; a device counts by itself.
        new_dispatch: what the next new dispatch sends, see `Transport.announce`.
        signal_pad: of a barrier that moves no rows, where exchanges run on a stream.
        stream: that the last exchange began on. in_flight: tensors that it uses, until it is over. done: when it is.
        capture: the CUDA graph's that the last exchange is part of, 0 if none. was_captured: whether any was.
        replaced: smaller buffers that graphs store to.
        refused: why this rank refused an exchange, after which there are no more.
        users: who opened the transport together and have not closed it, counted by whoever shares it.
        thread: which makes the exchanges.
    """

    device: torch.device
    buffers: tuple[SymmetricBuffer, ...] = ()
    exchanges: int = 0
    dispatches: int = 0
    new_dispatch: int = NEW
    signal_pad: SymmetricBuffer | None = None
    stream: torch.cuda.Stream | None = None
    in_flight: object = None
    done: torch.cuda.Event | None = None
    capture: int = 0
    was_captured: bool = False
    replaced: tuple[SymmetricBuffer, ...] = ()
    refused: str | None = None
    users: int = 0
    thread: OneThread = field(default_factory=OneThread)

    def graph_state(self, transport: Transport) -> tuple[SymmetricBuffer, bool] | None:
        """What a record of the next exchanges holds for: what the first stores to, and whether there are graphs whose
        launches nobody counts, so that each exchange begins with a barrier.

        None where exchanges are no kernels, one is in flight, or the last was on another stream. Raises as
        ``transport.check()``.
        """
        if transport.access != "kernels" or self.refused is not None or not self.buffers:
            return None
        self.thread.claim()
        transport.check()
        if self.in_flight is not None or self.stream not in (None, current_stream(self.device.index)):
            return None
        return self.buffers[self.exchanges % 2], self.was_captured

    def launched(self, exchanges: int) -> None:
        """A record of so many exchanges was played on the current stream."""
        self.exchanges += exchanges
        self.stream = current_stream(self.device.index)


def current_stream(device_index: int) -> torch.cuda.Stream:
    """As `torch.cuda.current_stream`, which makes a new object at every call."""
    return _stream(*torch._C._cuda_getCurrentStream(device_index))


@functools.lru_cache(256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
