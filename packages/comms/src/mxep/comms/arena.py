"""Arena: state that all workspaces of a transport share. `workspace.py` explains its use."""

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
    """State that all workspaces of a transport share.

    Attributes:
        device: the transport's device.
        buffers: two buffers of one size, used in turn; empty before the first workspace.
        exchanges: exchanges begun. dispatches: dispatches with tables, counted here on CPU only.
        new_dispatch: number that the next new dispatch sends, see `Transport.announce`.
        signal_pad: signal pad of barriers that move no rows; None on CPU.
        stream: stream on which the last exchange began. in_flight: tensors it still uses. done: event at its end.
        capture: id of the CUDA graph capture with the last exchange, 0 if none. was_captured: True after any capture.
        replaced: smaller, older buffers that captured graphs still store to.
        refused: reason why this rank refused an exchange. No exchange follows a refusal.
        users: users that opened the transport together and have not closed it. The code that shares it counts them.
        thread: guard that admits one thread to exchanges.
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
        """State that a record of the next exchanges depends on: the first exchange's buffer, and was_captured.

        After a capture nobody counts the graph's launches, so each exchange begins with a barrier. None if no record
        can be played: exchanges are not kernels, none has a buffer, one was refused or is in flight, or the last ran on
        another stream. Raises like ``transport.check()``.
        """
        if transport.access != "kernels" or self.refused is not None or not self.buffers:
            return None
        self.thread.claim()
        transport.check()
        if self.in_flight is not None or self.stream not in (None, current_stream(self.device.index)):
            return None
        return self.buffers[self.exchanges % 2], self.was_captured

    def launched(self, exchanges: int) -> None:
        """Count the exchanges of a record that was just played on the current stream."""
        self.exchanges += exchanges
        self.stream = current_stream(self.device.index)


def current_stream(device_index: int) -> torch.cuda.Stream:
    """Cached `torch.cuda.current_stream`, which makes a new object per call."""
    return _stream(*torch._C._cuda_getCurrentStream(device_index))


@functools.lru_cache(256)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
