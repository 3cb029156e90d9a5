"""What a record has of a function, and what makes it none: played on the CPU over poisoned memory."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.runtime import record
from mxep.runtime.graph import Player
from mxep.runtime.memory import order_of, packed
from mxep.runtime.record import Call, Copy, Fill, Made, Record, Recorder, Step, View, fixed, set_up
from mxep.runtime.replay import replayed
from records_on_cpu import replays_on_the_cpu


@pytest.fixture(autouse=True)
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    never = record._NEVER
    with torch.no_grad(), replays_on_the_cpu(monkeypatch):
        monkeypatch.setattr(record, "_NEVER", never)
        yield


def recorded(function: Callable[..., list[Any]], *given: Tensor) -> tuple[Record | None, str]:
    """The record of a call, or why there is none."""
    with Recorder(given) as recorder:
        results = function(*given)
    return recorder.finish(results), recorder.why


def steps_of(function: Callable[..., list[Any]], *given: Tensor) -> list[str]:
    """The kinds of steps of a call."""
    found, why = recorded(function, *given)
    assert found is not None, why
    return [type(step.what).__name__ for step in found.steps]


def test_allocations_and_views_are_no_steps() -> None:
    def function(x: Tensor) -> list[Any]:
        empties = torch.empty(3), x.new_empty(2), torch.empty_like(x), torch.empty_strided((2, 2), (1, 2))
        return [*empties, x.view(-1)[2:], x.t(), x.detach()]

    assert steps_of(function, torch.zeros(4, 4)) == []


@pytest.mark.parametrize(
    ("make", "pattern", "size"),
    [
        (lambda: torch.zeros(5), 0, 1),
        (lambda: torch.full((5,), -1, dtype=torch.int64), 0xFFFFFFFF, 4),
        (lambda: torch.full((5,), 1.0), 0x3F800000, 4),
        (lambda: torch.empty(0).new_full((5,), 2.0), 0x40000000, 4),
        (lambda: torch.ones(5, dtype=torch.bfloat16), 0x3F80, 2),
        (lambda: torch.full((5,), True), 1, 1),
        (lambda: torch.full((5,), 200, dtype=torch.int32), 200, 4),
        (lambda: torch.full((5,), -0.0), 0x80000000, 4),
    ],
)
def test_what_one_pattern_fills_is_a_fill(make: Callable[[], Tensor], pattern: int, size: int) -> None:
    found, why = recorded(lambda x: [make()], torch.zeros(1))
    assert found is not None, why
    ((fill, _),) = found.steps
    assert isinstance(fill, Fill)
    assert (fill.pattern, fill.size) == (pattern, size)
    (got,) = Player(found, torch.device("cpu")).play([torch.zeros(1)], [0])
    assert got is not None
    assert torch.equal(got, make())
    assert got.dtype == make().dtype


def test_what_no_pattern_fills_is_called() -> None:
    assert steps_of(lambda x: [torch.full((3,), 1, dtype=torch.int64)], torch.zeros(1)) == ["Call"]
    assert steps_of(lambda x: [x[:, ::2].zero_()], torch.zeros(4, 4)) == ["Call"]


def test_copies_of_bytes_as_they_lie_are_copies_and_others_are_called() -> None:
    x = torch.randn(4, 6)
    assert steps_of(lambda x: [x.clone(), torch.empty_like(x).copy_(x), x.t().clone()], x) == ["Copy"] * 3
    assert steps_of(lambda x: [x.t().contiguous()], x) == ["Call"]
    assert steps_of(lambda x: [x.bfloat16()], x) == ["Call"]
    assert steps_of(lambda x: [torch.empty(6, 6).copy_(x[:1])], x) == ["Call"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x @ y, (x @ y)[1:], x],
        lambda x, y: [torch.cat([x, y]).t().contiguous()[1:3], None, y[2:]],
        lambda x, y: [torch.sort(x)[0], torch.sort(y, 0)[1], x.clone().fill_diagonal_(3)],
        lambda x, y: [x.add_(1), y.mul_(2).sum(0, keepdim=True) + torch.ones(4)],
        lambda x, y: [torch.stack([x.relu(), y]).view(torch.int32), torch.empty(2, 0), x[:0]],
        lambda x, y: [x.chunk(2)[1].clone(), *torch.split(x + y, 2)],
    ],
)
def test_plays_have_the_bits_of_the_function(function: Callable[..., list[Any]]) -> None:
    played = replayed(function)
    for _ in range(5):
        given = [torch.randn(4, 4) for _ in range(2)]
        others = [x.clone() for x in given]
        for got, want in zip(played(*given), function(*others), strict=True):
            assert (got is None) == (want is None)
            assert got is None or (torch.equal(got, want) and got.stride() == want.stride() and got.dtype == want.dtype)
        assert all(map(torch.equal, given, others))
    assert played.replays == 3


def test_what_is_written_gets_another_version() -> None:
    played = replayed(lambda x, y: [x.add_(1), y + 1])
    for _ in range(4):
        x, y = torch.zeros(3), torch.zeros(3)
        before = x._version, y._version
        played(x, y)
        assert (x._version > before[0], y._version > before[1]) == (True, False)


def test_halves_of_one_memory_are_told_apart() -> None:
    """Two arguments in one storage: what is written to one of them is of that one."""
    played = replayed(lambda x, y: [x.zero_(), y[1:].fill_(2)])
    whole = torch.ones(16)
    halves = [(whole[:8], whole[8:]), (whole[8:], whole[:8])] * 2
    for first, second in [*halves, (torch.ones(8), torch.ones(8))]:
        whole.fill_(1)
        played(first, second)
        assert first.tolist() == [0.0] * 8
        assert second.tolist() == [1.0] + [2.0] * 7


def test_arguments_that_overlap_make_no_record_where_it_matters() -> None:
    whole = torch.zeros(8)
    assert recorded(lambda x, y: [x[2:4] + 1], whole[:6], whole[2:])[0] is None
    assert recorded(lambda x, y: [x + y], whole[:6], whole[2:])[0] is not None
    assert recorded(lambda x, y: [x + 1], whole, whole)[0] is not None


OUTSIDE = torch.ones(4)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: [x * x.sum().item()], "_local_scalar_dense.default reads from the device"),
        (lambda x: [x[x > 0]], "reads from the device"),
        (lambda x: [x.clone().resize_(2)], "changes what a tensor is"),
        (lambda x: [x + OUTSIDE], "a tensor (4,) of torch.float32 is neither given, nor made, nor fixed"),
        (lambda x: [torch.as_strided(x, (4,), (1,), 8)], "a tensor (4,) lies in no arguments, want one"),
        (lambda x: [x.to("meta")], "is of another device"),
    ],
)
def test_what_no_record_can_show_makes_none(function: Callable[..., list[Any]], why: str) -> None:
    found, said = recorded(function, torch.ones(16)[:4])
    assert found is None
    assert why in said


def test_what_outlives_the_call_is_given_or_makes_no_record() -> None:
    kept = []

    def function(x: Tensor) -> list[Any]:
        kept.append(x + 1)
        return [kept[-1] * 2]

    assert recorded(function, torch.zeros(4)) == (None, "it keeps a tensor that it makes, and does not give it")
    assert recorded(lambda x: [kept[0] if kept.append(x + 1) else kept[-1]], torch.zeros(4))[0] is not None


def test_memory_that_stays_is_kept_alive_by_the_record() -> None:
    counter = torch.zeros(1)
    fixed(counter)
    played = replayed(lambda x: counter.add_(x).clone())
    assert [played(torch.ones(1)).item() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert played.replays == 3
    (kind,) = played._kinds.values()
    assert [x.data_ptr() for x in kind.player._fixed] == [counter.data_ptr()]


def test_set_up_is_done_once_and_in_no_record() -> None:
    made: list[Tensor] = []

    @replayed
    def function(x: Tensor) -> Tensor:
        if not made:
            with set_up():
                made.append(torch.arange(4.0) + 1)
                fixed(*made)
        return x * made[0]

    for _ in range(4):
        assert function(torch.full((4,), 2.0)).tolist() == [2, 4, 6, 8]
    assert (function.replays, len(made)) == (2, 1)


def test_other_threads_are_in_no_record() -> None:
    def function(x: Tensor) -> list[Any]:
        thread = threading.Thread(target=lambda: torch.zeros(3).add_(1))
        thread.start()
        thread.join()
        return [x + 1]

    assert steps_of(function, torch.zeros(2)) == ["Call"]


def test_random_ops_draw_anew_at_each_play() -> None:
    played = replayed(torch.rand_like)
    torch.manual_seed(0)
    got = [played(torch.zeros(4)) for _ in range(4)]
    torch.manual_seed(0)
    assert all(torch.equal(x, torch.rand(4)) for x in got)


def view(source: int, nbytes: int) -> View:
    return View(source, 0, torch.uint8, (nbytes,), (1,))


def test_memory_is_shared_only_where_the_graph_has_an_order() -> None:
    """1 -> 2 -> 3 on one stream, 4 beside them from 1 on: source i is written by step i and read by the next."""
    sizes = {1: 1000, 2: 1000, 3: 2000, 4: 1000}
    steps = [
        Step(Fill(view(1, 1000), 0, 0, 1), frozenset()),
        Step(Copy(view(2, 1000), view(1, 1000)), frozenset([0])),
        Step(Copy(view(3, 2000), view(2, 1000)), frozenset([1])),
        Step(Fill(view(4, 1000), 0, 0, 1), frozenset([0])),
    ]
    made = [Made(sizes[i], -1) for i in sizes]
    of = Record(steps, 1, made, [], [], [])
    orders = order_of(of, {1: [0, 1], 2: [1, 2], 3: [2], 4: [3]})
    starts, nbytes = packed(range(4), {k: -(-each.nbytes // 512) * 512 for k, each in enumerate(made)}, orders)
    assert starts[0] == starts[2] != starts[1], "1 is read before 3 is written"
    assert starts[3] not in (starts[1], starts[2]), "4 is written beside them"
    assert nbytes == 4 * 1024


def test_a_graphs_memory_is_that_which_is_alive_at_once() -> None:
    def function(x: Tensor) -> list[Any]:
        for _ in range(5):
            x = torch.empty_like(x).copy_(x)
        return [x[:1].clone()]

    found, why = recorded(function, torch.zeros(1000))
    assert found is not None, why
    player = Player(found, torch.device("cpu"))
    (piece,) = player._pieces
    assert sum(shape[0] for _, dtype, shape, _ in piece.makes if dtype == torch.uint8) == 2 * 4096


def test_what_only_one_piece_uses_is_free_behind_it() -> None:
    def function(x: Tensor) -> list[Any]:
        first = torch.empty(1000).fill_(1)
        second = first.cumsum(0)
        return [second.cumsum(0)]

    found, why = recorded(function, torch.zeros(1000))
    assert found is not None, why
    assert [type(step.what) for step in found.steps] == [Fill, Call, Call]
    player = Player(found, torch.device("cpu"))
    assert [len(piece.drops) for piece in player._pieces] == [0, 1, 1]


def test_records_hold_no_arguments_and_no_results() -> None:
    played = replayed(lambda x: [x + 1, torch.zeros(3)])
    x = torch.zeros(4)
    for _ in range(4):
        results = played(x)
    refs = [weakref.ref(x), *map(weakref.ref, results)]
    del x, results
    assert [ref() for ref in refs] == [None] * 3
