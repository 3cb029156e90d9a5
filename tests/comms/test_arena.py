"""What exchanges of a transport share when CUDA graphs make some of them: which buffer is next, when ranks meet before.

On the CPU: streams and kernels are played.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxep.comms import arena as arenas
from mxep.comms import workspace as workspaces
from mxep.comms.arena import Arena
from mxep.comms.transport import SymmetricBuffer, Transport
from mxep.comms.workspace import Workspace


class Kernels(Transport):
    """Exchanges by kernels of a process alone; barriers are written down."""

    access = "kernels"

    def __init__(self) -> None:
        super().__init__(None, torch.device("cpu"), 1.0)
        self.barriers: list[str] = []

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        return SymmetricBuffer(0, [torch.zeros(nbytes, dtype=torch.uint8)], torch.zeros(1, dtype=torch.int64))

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
        monkeypatch.setattr(workspaces, "_make_exchange", lambda *_: SimpleNamespace())
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

    def counted(self, count: int) -> int:
        """As `exchanges`, of a graph within `capturing`."""
        outside, self.stream, self.capture = self.stream, Stream(), 9
        with self.arena.capturing():
            barriers = self.exchanges(count)
        self.stream, self.capture = outside, 0
        return barriers


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_until_a_user_captures_nobody_meets_before_an_exchange(played: Played) -> None:
    assert played.exchanges(3) == 0
    assert played.counted(2) == 0
    assert not played.arena.was_captured, "whoever launches such a graph says so"
    assert played.exchanges(2) == 0


def test_after_a_users_capture_a_graph_meets_as_often_as_a_peer_without_one(played: Played) -> None:
    with played.users_capture():
        assert played.exchanges(3) == 1
    assert played.exchanges(2) == 2
    assert played.counted(2) == 2
    assert played.exchanges(2) == 2


def test_a_capture_makes_no_exchange_and_launches_are_counted(played: Played) -> None:
    played.exchanges(3)
    played.arena.done, stream = object(), played.stream  # type: ignore[assignment]
    assert played.counted(2) == 0
    arena = played.arena
    assert (arena.exchanges, arena.stream, arena.done, arena.in_flight) == (3, stream, None, None)
    for launches in (1, 2, 3):
        played.arena.launched(2)
        assert (arena.exchanges, arena.stream) == (3 + 2 * launches, stream)
    played.stream = Stream()
    played.arena.launched(1)
    assert (arena.exchanges, arena.stream) == (10, played.stream)


def test_what_a_capture_leaves_is_put_right_if_it_fails(played: Played) -> None:
    played.exchanges(1)
    arena, stream = played.arena, played.stream
    capturing = played.arena.capturing()
    capturing.__enter__()
    assert arena.launches_are_counted
    assert arena.stream is None
    played.exchanges(1)
    arena.in_flight = arena.done = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the function's"):
        capturing.gen.throw(ValueError("the function's"))
    assert not arena.launches_are_counted
    assert (arena.exchanges, arena.stream, arena.done, arena.in_flight) == (1, stream, None, None)


def test_a_graph_holds_for_the_buffer_that_is_next_and_for_whether_users_have_captured(played: Played) -> None:
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


def test_there_is_no_graph_of_exchanges_that_others_may_be_in_the_way_of(played: Played) -> None:
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
