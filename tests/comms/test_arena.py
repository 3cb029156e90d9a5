"""What exchanges of a transport share when CUDA graphs make some of them: which buffer is next, when ranks meet before.

On the CPU: streams and kernels are played.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxep.comms import transport as arenas
from mxep.comms import workspace as workspaces
from mxep.comms.transport import Arena, SymmetricBuffer, Transport
from mxep.comms.workspace import Workspace


class Kernels(Transport):
    """Exchanges by kernels of a process alone; barriers are written down."""

    access = "kernels"

    def __init__(self) -> None:
        super().__init__(None, torch.device("cpu"), 1.0)
        self.barriers: list[str] = []

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        return SymmetricBuffer(0, [torch.zeros(nbytes, dtype=torch.uint8)], torch.zeros(1, dtype=torch.int64))

    def exchange(self, *_: Any) -> SimpleNamespace:
        return SimpleNamespace()

    def barrier(self, step: str, signal_pad: SymmetricBuffer | None = None) -> None:
        assert signal_pad is not None
        self.barriers.append(step)


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)

    wait_event = wait_stream


class Played:
    """A workspace, on a stream and in a capture that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capture = Stream(), 0
        monkeypatch.setattr(arenas, "current_stream", lambda index: self.stream)
        monkeypatch.setattr(workspaces, "current_stream", lambda index: self.stream)
        monkeypatch.setattr(workspaces, "capture_of", lambda stream: self.capture)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.transport: Any = Kernels()
        self.transport.stream = Stream()
        self.workspace = self.make(max_tokens=4)

    def make(self, **sizes: int) -> Workspace:
        return Workspace(self.transport, top_k=1, dim=16, num_experts=1, **sizes)

    @property
    def arena(self) -> Arena:
        arena: Arena = self.transport.arena
        return arena

    def exchanges(self, count: int) -> int:
        """How many barriers so many exchanges begin with."""
        before = len(self.transport.barriers)
        for _ in range(count):
            self.workspace.begin("dispatch")
            self.arena.exchanges += 1  # as its kernel's launcher does
        return len(self.transport.barriers) - before

    @contextmanager
    def users_capture(self) -> Iterator[None]:
        outside, self.stream, self.capture = self.stream, Stream(), 7
        yield
        self.stream, self.capture = outside, 0


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_until_a_user_captures_nobody_meets_before_an_exchange(played: Played) -> None:
    assert played.exchanges(3) == 0
    with played.users_capture():
        assert played.exchanges(3) == 1
    assert played.exchanges(2) == 2


def test_exchanges_of_records_are_counted_by_who_plays_them(played: Played) -> None:
    played.exchanges(3)
    arena, stream = played.arena, played.stream
    for plays in (1, 2, 3):
        arena.launched(2)
        assert (arena.exchanges, arena.stream) == (3 + 2 * plays, stream)
    played.stream = Stream()
    arena.launched(1)
    assert (arena.exchanges, arena.stream) == (10, played.stream)


def test_a_record_holds_for_the_buffer_that_is_next_and_for_whether_users_have_captured(played: Played) -> None:
    states = []
    for _ in range(4):
        states.append(played.arena.graph_state(played.transport))
        played.exchanges(1)
    one, other = played.workspace.arena.buffers
    assert [(state[0] is one, state[0] is other, state[1]) for state in states] == [
        (True, False, False),
        (False, True, False),
    ] * 2
    played.make(max_tokens=64)  # brings other buffers
    assert played.arena.graph_state(played.transport)[0] is played.arena.buffers[0]
    assert played.arena.graph_state(played.transport) not in states
    with played.users_capture():
        played.exchanges(1)
    played.exchanges(1)
    assert played.arena.graph_state(played.transport) == (played.arena.buffers[0], True)


def test_there_is_no_record_of_exchanges_that_others_may_be_in_the_way_of(played: Played) -> None:
    transport, arena = played.transport, played.arena
    assert arena.graph_state(transport) is not None
    played.exchanges(1)
    assert arena.graph_state(transport) is not None
    stream, played.stream = played.stream, Stream()
    assert arena.graph_state(transport) is None, "the last was on another stream"
    played.stream = stream
    arena.in_flight = object()
    assert arena.graph_state(transport) is None
    arena.in_flight = None
    arena.refused = "too many tokens"
    assert arena.graph_state(transport) is None
    arena.refused = None
    transport.access = "puts"
    assert arena.graph_state(transport) is None
    del transport.access
    buffers, arena.buffers = arena.buffers, ()
    assert arena.graph_state(transport) is None
    arena.buffers = buffers
    assert arena.graph_state(transport) is not None
    transport.close()
    with pytest.raises(RuntimeError, match="closed"):
        arena.graph_state(transport)


def test_an_exchange_comes_after_the_last_on_another_stream_and_not_after_a_captures(played: Played) -> None:
    played.exchanges(1)
    first, played.stream = played.stream, Stream()
    played.exchanges(1)
    assert played.stream.waited_for == [first]
    with played.users_capture():
        played.exchanges(1)
        assert not played.stream.waited_for, "events do not cross"
    played.exchanges(1)
    assert played.stream.waited_for == [first]
