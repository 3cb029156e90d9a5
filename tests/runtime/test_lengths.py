"""Batches of changing length: the room they have, and one record for all lengths of a room, played on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.runtime import record
from mxep.runtime.launch import launch
from mxep.runtime.lengths import Length, first_rows, room_for
from mxep.runtime.replay import Replayed
from records_on_cpu import replays_on_the_cpu


@pytest.fixture(autouse=True)
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with torch.no_grad(), replays_on_the_cpu(monkeypatch):
        yield


def test_a_room_is_little_more_than_its_tokens_and_there_are_few() -> None:
    rooms = [room_for(tokens) for tokens in range(1, 16385)]
    for tokens, room in enumerate(rooms, 1):
        assert room >= tokens
        assert room - tokens < (16 if tokens < 512 else 64 if tokens < 1024 else tokens / 16 + 1)
        assert room_for(room) == room
    assert rooms == sorted(rooms)
    assert len(set(rooms)) == 32 + 8 + 4 * 16
    assert [room_for(tokens) for tokens in (1, 511, 512, 513, 1023, 1025)] == [16, 512, 512, 576, 1024, 1088]


def test_first_rows_are_no_view_to_autograd() -> None:
    x = torch.arange(12.0).view(4, 3)
    first = first_rows(x, 2)
    assert torch.equal(first, x[:2])
    assert first.data_ptr() == x.data_ptr()
    assert not first._is_view()
    assert first_rows(x, 4) is x


class Scale:
    """A kernel: out (room, D), of which the first `rows` become factor * x; and the last of them."""

    __name__ = "scale"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(x: Tensor, out: Tensor, rows: int, last: int, factor: float) -> None:
            with record.set_up():  # what a kernel does is no op
                out[:rows] = factor * x.reshape(-1, out.shape[1])[:rows]
            assert last == rows - 1

        return run


class OfLengths(Replayed):
    def moving(self, **static: Any) -> tuple[int, ...]:
        return (0,)


def scaled(x: Tensor, *, room: int, factor: float) -> tuple[Tensor, Tensor]:
    """factor * x (T, D) as (room, D), and T."""
    out, count = x.new_empty(room, x.shape[1]), torch.empty(1, dtype=torch.int32)
    launch(Scale(), (1,), x, out, Length(len(x)), Length(len(x), lambda tokens: tokens - 1), factor)
    record.fill(count, Length(len(x)))
    return out, count


def test_lengths_of_a_room_share_a_record() -> None:
    function = OfLengths(scaled)
    for call, tokens in enumerate((5, 9, 16, 1, 7)):
        x = torch.randn(tokens, 3)
        out, count = function(x, room=16, factor=2.0)
        assert torch.equal(out[:tokens], 2 * x), tokens
        assert out.shape == (16, 3)
        assert count.tolist() == [tokens]
        assert function.replays == max(0, call - 1)
    assert not function.refused


def test_without_tokens_that_move_each_length_has_a_record_of_its_own() -> None:
    function = Replayed(scaled)
    for turn in range(3):
        for tokens in (5, 9):
            x = torch.randn(tokens, 3)
            out, count = function(x, room=16, factor=2.0)
            assert torch.equal(out[:tokens], 2 * x), (turn, tokens)
            assert count.tolist() == [tokens]
    assert function.replays == 2


def test_tokens_that_lie_apart_are_not_of_that_kind() -> None:
    function = OfLengths(scaled)
    for _ in range(4):
        x = torch.randn(5, 6)[:, ::2]
        assert torch.equal(function(x, room=16, factor=2.0)[0][:5], 2 * x)
    assert function.replays == 0


@pytest.mark.parametrize(
    "reads", [lambda x: x + 1, lambda x: x.clone(), lambda x: torch.zeros(9, 3).copy_(x[:1]), lambda x: x[:1].zero_()]
)
def test_an_op_that_reads_tokens_makes_no_record(reads: Callable[[Tensor], Tensor]) -> None:
    """It has a size, which would be that of all plays."""
    function = OfLengths(reads)
    for _ in range(3):
        function(torch.randn(4, 3))
    assert function.replays == 0
    assert "whose rows change from call to call" in function.refused[0]
