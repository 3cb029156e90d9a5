"""Workspaces: sizes that ranks agree on, buffers that make room, and what graphs and streams change.

Streams and kernels are played on the CPU: which buffer is next, and when ranks meet before an exchange.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxep.comms import Workspace, dispatch
from mxep.comms import transport as transports
from mxep.comms import workspace as workspaces
from mxep.comms.transport import SymmetricBuffer, Transport
from ranks import Context, distributed


@distributed(1, 2)
def test_smaller_buffers_make_room_for_larger_ones_and_their_views_stay(ctx: Context):
    transport = ctx.transport()
    sizes = {"top_k": 1, "dim": 16, "num_experts": ctx.world_size}
    small = Workspace(transport, max_tokens=2, **sizes)
    old = small.transport.buffers
    part = torch.full((2, 16), 7 + ctx.rank, dtype=torch.uint8, device=ctx.device)
    ids = torch.full((2, 1), ctx.world_size - 1, dtype=torch.int32, device=ctx.device)
    (arrived,) = dispatch(small, (part,), ids).wait()
    before = arrived.clone()
    larger = Workspace(transport, max_tokens=4, **sizes)
    assert larger.transport.buffers is small.transport.buffers is not old
    assert Workspace(transport, max_tokens=3, **sizes).transport.buffers is larger.transport.buffers
    for _ in range(3):
        dispatch(larger, (part + 1,), ids).wait()
        (again,) = dispatch(small, (part,), ids).wait()
        assert torch.equal(again, before) or ctx.rank < ctx.world_size - 1
    assert torch.equal(arrived, before)
    assert small.transport.exchanges == larger.transport.exchanges == 7


@distributed(2)
def test_ranks_that_disagree_on_sizes_are_both_named(ctx: Context):
    transport = ctx.transport()
    sizes = {"max_tokens": 4, "top_k": 2, "dim": 16, "num_experts": 4}
    with pytest.raises(ValueError, match="ranks disagree on top_k: got 3 on rank 1, wanted 2 as on rank 0"):
        Workspace(transport, **{**sizes, "top_k": 2 + ctx.rank})
    with pytest.raises(ValueError, match="ranks disagree on num_sms: got 9 on rank 1, wanted 8 as on rank 0"):
        Workspace(transport, **sizes, num_sms=8 + ctx.rank)
    with pytest.raises(ValueError, match="allocate: ranks disagree on nbytes: got 1 on rank 1, wanted 0 as on rank 0"):
        transport.allocate(ctx.rank)
    with pytest.raises(ValueError, match="num_experts: got 5, wanted a multiple of 2 ranks"):
        Workspace(transport, **{**sizes, "num_experts": 5})
    with pytest.raises(ValueError, match="dim: got 0, wanted a whole number, at least 1"):
        Workspace(transport, **{**sizes, "dim": 0})
    with pytest.raises(ValueError, match=r"max_tokens: got 1\.5, wanted a whole number, at least 0"):
        Workspace(transport, **{**sizes, "max_tokens": 1.5})
    with pytest.raises(ValueError, match="row_bytes: got 16777201, wanted at most 16777200"):
        Workspace(transport, **{**sizes, "row_bytes": 2**24 - 15})


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

    def barrier(self, step: str) -> None:
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
        monkeypatch.setattr(transports, "current_stream", lambda index: self.stream)
        monkeypatch.setattr(workspaces, "current_stream", lambda index: self.stream)
        monkeypatch.setattr(workspaces, "capture_of", lambda stream: self.capture)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.transport: Any = Kernels()
        self.transport.stream = Stream()
        self.workspace = self.make(max_tokens=4)

    def make(self, **sizes: int) -> Workspace:
        return Workspace(self.transport, top_k=1, dim=16, num_experts=1, **sizes)

    def exchanges(self, count: int) -> int:
        """How many barriers so many exchanges begin with."""
        before = len(self.transport.barriers)
        for _ in range(count):
            self.workspace.begin("dispatch")
            self.transport.exchanges += 1  # as its kernel's launcher does
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
    assert played.transport.barriers == [f"dispatch, exchange {i}" for i in (3, 6, 7)]
    with played.users_capture():
        played.capture = 9
        assert played.exchanges(2) == 1, "another capture"


def test_exchanges_of_records_are_counted_by_who_plays_them(played: Played) -> None:
    played.exchanges(3)
    transport, stream = played.transport, played.stream
    for plays in (1, 2, 3):
        transport.launched(2)
        assert (transport.exchanges, transport.last_stream) == (3 + 2 * plays, stream)
    played.stream = Stream()
    transport.launched(1)
    assert (transport.exchanges, transport.last_stream) == (10, played.stream)


def test_a_record_holds_for_the_buffer_that_is_next_and_for_whether_users_have_captured(played: Played) -> None:
    states = []
    for _ in range(4):
        states.append(played.transport.graph_state())
        played.exchanges(1)
    one, other = played.workspace.transport.buffers
    assert [(state[0] is one, state[0] is other, state[1]) for state in states] == [
        (True, False, False),
        (False, True, False),
    ] * 2
    played.make(max_tokens=64)  # brings other buffers
    assert played.transport.graph_state()[0] is played.transport.buffers[0]
    assert played.transport.graph_state() not in states
    with played.users_capture():
        played.exchanges(1)
    played.exchanges(1)
    assert played.transport.graph_state() == (played.transport.buffers[0], True)


def test_there_is_no_record_of_exchanges_that_others_may_be_in_the_way_of(played: Played) -> None:
    transport = played.transport
    assert transport.graph_state() is not None
    played.exchanges(1)
    assert transport.graph_state() is not None
    stream, played.stream = played.stream, Stream()
    assert transport.graph_state() is None, "the last was on another stream"
    played.stream = stream
    transport.in_flight = object()
    assert transport.graph_state() is None
    transport.in_flight = None
    transport.refused = "too many tokens"
    assert transport.graph_state() is None
    transport.refused = None
    transport.access = "puts"
    assert transport.graph_state() is None
    del transport.access
    buffers, transport.buffers = transport.buffers, ()
    assert transport.graph_state() is None
    transport.buffers = buffers
    assert transport.graph_state() is not None
    transport.in_flight = object()
    transport.close()
    with pytest.raises(RuntimeError, match="closed"):
        transport.graph_state()
    assert (transport.buffers, transport.replaced, transport.in_flight) == ((), (), None), "it holds no memory"


def test_an_exchange_comes_after_the_last_on_another_stream_and_not_after_a_captures(played: Played) -> None:
    """What an exchange holds is let go of on the stream that it began on, and on the one that goes on with it."""
    transport, first = played.transport, played.stream
    played.exchanges(1)
    transport.done, transport.in_flight = "over", object()
    played.stream = Stream()
    played.exchanges(1)
    assert (first.waited_for, played.stream.waited_for) == (["over"], ["over", first])
    transport.done = None
    with played.users_capture():
        played.exchanges(1)
        assert not played.stream.waited_for, "events do not cross"
    played.exchanges(1)
    assert played.stream.waited_for == ["over", first]


def test_what_is_in_flight_across_the_start_or_end_of_a_capture_is_refused(played: Played) -> None:
    played.exchanges(1)
    played.transport.in_flight = object()
    with played.users_capture():
        for _ in range(2):  # it is there until someone waits
            with pytest.raises(RuntimeError, match="exchange 0: in flight while a capture starts or ends, wanted wait"):
                played.exchanges(1)
        played.workspace.join()
        played.exchanges(1)
        played.transport.in_flight = object()
    with pytest.raises(RuntimeError, match="in flight while a capture starts or ends"):
        played.exchanges(1)
    played.exchanges(1)  # what was in flight is gone with its capture
