"""What makes a kind of calls, and what a function does that is recorded in its first call of one."""

import operator
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mxep.quant import MXParts, MXTensor, quantize
from mxep.runtime import graph, record, replay
from mxep.runtime.bundle import Bundle, Operands, build, count, take_apart
from mxep.runtime.replay import Replayed, replayed
from records_on_cpu import replays_on_the_cpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_the_cpu_the_function_is_called() -> None:
    calls = []

    @replayed
    def function(x: Any, *, factor: int) -> Any:
        calls.append(type(x))
        return x

    x = MXParts.of(quantize(torch.randn(4, 64).bfloat16()))
    for _ in range(4):
        got = function(x, factor=3)
        assert isinstance(got, MXParts)
        assert got.qdata is x.qdata
    assert calls == [MXTensor] * 4
    assert function.replays == 0


@pytest.fixture
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with torch.no_grad(), replays_on_the_cpu(monkeypatch):
        yield


def test_the_second_call_of_a_kind_is_recorded_and_later_ones_are_played(replays_on_cpu: None) -> None:
    calls = []

    @replayed
    def function(x: Tensor, bias: Tensor | None, *, factor: float) -> tuple[Any, Tensor | None]:
        calls.append(factor)
        return quantize(x * factor), None if bias is None else x + bias

    bias = torch.randn(64)
    for kind in ((4, 2.0, None), (4, 3.0, None), (8, 2.0, None), (4, 2.0, bias), (4, 2.0, torch.randn(128)[::2])):
        rows, factor, given = kind
        x = torch.randn(rows, 64).bfloat16()
        want, other = function.direct(x, given, factor=factor)
        calls.clear()
        for _ in range(5):
            got, plain = function(x.clone(), given, factor=factor)
            assert torch.equal(got.join().dequantize(), want.join().dequantize())
            assert (plain is None) == (other is None)
            assert plain is None or torch.equal(plain, other)
        assert len(calls) == 2, kind
    assert function.replays == 5 * 3
    assert not function.refused


def test_kinds_that_come_again_are_kept(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_RECORDS", 3)
    function = replayed(lambda x: x + 1)
    for _ in range(3):
        function(torch.zeros(7))
    for size in range(20, 40):
        function(torch.zeros(size))
        function(torch.zeros(7))
    assert len(function._kinds) == 3
    assert function.replays == 1 + 20, "what came again was kept"


def test_replays_can_be_paused(replays_on_cpu: None) -> None:
    function = replayed(lambda x: x + 1)
    for _ in range(4):
        function(torch.zeros(2))
    with replay.no_replays(), replay.no_replays():
        function(torch.zeros(2))
    assert function.replays == 2
    function(torch.zeros(2))
    assert function.replays == 3


def test_what_tells_two_calls_apart(replays_on_cpu: None) -> None:
    x, other = torch.zeros(4, 4), torch.zeros(4, 4)
    mx = [MXParts.of(quantize(torch.randn(4, 64).bfloat16(), block_size=size)) for size in (32, 64)]
    calls = [
        [x, other, None],
        [x, None, other],
        [x, x, None],
        [x, x.t(), None],
        [x, torch.zeros(4, 8)[:, ::2], None],
        [x, other.int(), None],
        *[[x, value] for value in (0.0, -0.0, 0, False, 1, True, 1.0)],
        [mx[0]],
        [mx[1]],
        [mx[0]._replace(dtype=torch.float32)],
        [*mx[0][:3]],
    ]
    function = replayed(lambda *args: None)
    for number, call in enumerate(calls, 1):
        function(*call)
        assert len(function._kinds) == number
    assert function.replays == 0


def test_calls_of_one_kind_may_have_other_tensors_and_an_equal_nan(replays_on_cpu: None) -> None:
    function = replayed(lambda x, y, factor: (x + y) * factor)
    x, y, z = (torch.zeros(4) for _ in range(3))
    for given in ([x, y], [y, z], [z, x]):
        function(*given, float("nan"))
    assert (function.replays, len(function._kinds)) == (1, 1)


def test_where_a_tensor_begins_is_told_apart_to_32_bytes(replays_on_cpu: None) -> None:
    function, x = replayed(lambda x: x + 1), torch.zeros(64)
    first = -x.data_ptr() // 4 % 8  # where 32 bytes begin
    for start in (0, 8, 16, 24, 4, 12):
        function(x[first + start :][:8])
    assert (function.replays, len(function._kinds)) == (2, 2)


def test_inference_tensors_are_a_kind_of_their_own(replays_on_cpu: None) -> None:
    with torch.inference_mode():
        made = torch.zeros(4)
    function = replayed(lambda x, y: x + y)
    for x in (torch.zeros(4), torch.zeros(4), torch.zeros(4), made):
        function(x, torch.ones(4))
    assert (function.replays, len(function._kinds)) == (1, 2)


SETTINGS = {
    "_get_deterministic_algorithms": True,
    "_get_deterministic_fill_uninitialized_memory": False,
    "_get_fp32_precision_getter": "tf32",
    "_get_cublas_allow_bf16_reduced_precision_reduction": (False, True),
    "_get_cublas_allow_fp16_reduced_precision_reduction": (False, True),
    "_get_cublas_allow_fp16_accumulation": True,
    "_get_sm_carveout_experimental": 8,
    "_get_blas_preferred_backend": 2,
}


@pytest.mark.parametrize("what", ["stream", "autocast", "its dtype", "inference mode", *SETTINGS])
def test_a_setting_by_which_torch_chooses_kernels_makes_another_kind(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    function, context = replayed(lambda x: x + 1), nullcontext()
    if what == "its dtype":
        monkeypatch.setattr(torch._C, "_is_any_autocast_enabled", lambda: True)
    for _ in range(4):
        function(torch.zeros(4))
    if what == "stream":
        monkeypatch.setattr(replay, "_stream", lambda device: 1)
    elif what == "autocast":
        context = torch.autocast("cpu", torch.bfloat16)
    elif what == "its dtype":
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float64)
    elif what == "inference mode":
        context = torch.inference_mode()
    else:
        monkeypatch.setattr(torch._C, what, lambda *args: SETTINGS[what])
    x = torch.zeros(4)
    with context:
        function(x)
    assert (function.replays, len(function._kinds)) == (2, 2)


def test_where_somebody_listens_the_function_is_called(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    function, x = replayed(lambda x: x + 1), torch.zeros(4)
    for _ in range(3):
        function(x)
    assert function.replays == 1
    with torch.enable_grad():
        function(x)
    with FlopCounterMode(display=False):
        function(x)
    for name, value in (
        ("_is_capturing", lambda: True),
        ("_launch", lambda: SimpleNamespace(is_profiled=lambda: True)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(replay, name, value)
            function(x)
    assert function.replays == 1
    assert len(function._kinds) == 1
    function(x)
    assert function.replays == 2


def test_an_error_of_a_first_call_leaves_replays_as_they_were(replays_on_cpu: None) -> None:
    function = replayed(lambda x: x + 1)
    with pytest.raises(ValueError, match="none"):
        replayed(lambda x: x.view(int("none")))(torch.zeros(2))
    for _ in range(3):
        function(torch.zeros(2))
    assert function.replays == 1


def test_errors_of_the_function_come_through(replays_on_cpu: None) -> None:
    def function(x: Tensor) -> Tensor:
        raise ValueError("x: got nothing")

    for _ in range(3):
        with pytest.raises(ValueError, match="x: got nothing"):
            replayed(function)(torch.ones(2))


@needs_gpu
def test_where_gradients_or_modes_listen_the_function_is_called() -> None:
    @replayed
    def function(x: Tensor) -> Tensor:
        return x * 2

    x = torch.ones(4, device="cuda", requires_grad=True)
    for _ in range(4):
        y = function(x)
        assert y.requires_grad
    assert function.replays == 0
    with torch.no_grad():
        for _ in range(4):
            function(x)
    assert function.replays == 2
    with torch.no_grad(), FlopCounterMode(display=False):
        function(x)
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(captured):
        y = function(x)
    captured.replay()
    assert y.tolist() == [2.0] * 4
    assert function.replays == 2


def test_a_function_that_cannot_be_recorded_is_called_and_tried_less_and_less_often(
    replays_on_cpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    tries, calls = [], 0

    @replayed
    def function(x: Tensor) -> Tensor:
        if record.here.recorder is not None:
            tries.append(calls)
            if len(tries) < 4:
                record.refuse("set-up")
        return x + 1

    for calls in range(1, 17):
        assert function(torch.zeros(4)).tolist() == [1.0] * 4
        assert function.refused == (["set-up"] if 2 <= calls < 9 else [])
    assert tries == [2, 3, 5, 9]
    assert function.replays == 7
    assert [each.levelname for each in caplog.records] == ["WARNING"], "told once"
    assert "function is called, not replayed: set-up" in caplog.text


def test_what_stands_in_the_way_of_a_play_leaves_the_call_to_the_function(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = replayed(lambda x: x + 1)
    for error in (torch.OutOfMemoryError("full"), RuntimeError("error 1")):

        def fail(*how: Any, error: Exception = error) -> None:
            raise error

        for _ in range(3):
            function(torch.zeros(4))
        with monkeypatch.context() as patch:
            patch.setattr(graph.Player, "play", fail)
            assert function(torch.zeros(4)).tolist() == [1.0] * 4
    assert function.refused == ["RuntimeError: error 1"]
    function(torch.zeros(4))
    function(torch.zeros(4))
    assert function.refused == []
    assert function.replays == 1 + 3 + 1, "an OutOfMemoryError is forgotten, what else failed is recorded anew"


def test_an_error_behind_a_part_of_a_play_comes_through(replays_on_cpu: None) -> None:
    """Its first op may have added to a gradient: nothing is done twice."""

    @replayed
    def function(total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        total.add_(1)
        return total, torch.index_select(x, 0, x.long())

    total = torch.zeros(1)
    for _ in range(3):
        function(total, torch.zeros(3))
    with pytest.raises(IndexError):
        function(total, torch.full((3,), 7.0))
    assert total.item() == 4


def test_what_else_decides_is_asked_and_told(replays_on_cpu: None) -> None:
    class Counting(Replayed):
        now: Any = "a"
        plays = 0

        def state(self) -> Any:
            return self.now

        def launched(self) -> None:
            self.plays += 1

    function = Counting(lambda x: x + 1)
    for state in ("a", "b", None, None, None, "a", "a"):
        function.now = state
        function(torch.zeros(2))
    assert (function.plays, function.replays, len(function._kinds)) == (1, 1, 2)


def test_functions_within_one_that_is_recorded_are_part_of_its_record(replays_on_cpu: None) -> None:
    part = replayed(lambda x: x + 1)
    whole = replayed(lambda x: part(part(x)))
    for _ in range(4):
        assert whole(torch.zeros(2)).tolist() == [2.0, 2.0]
    assert (whole.replays, part.replays) == (2, 0)
    assert not part._kinds, "nor are they kinds of their own where the whole came once"


def test_a_backend_of_a_users_own_says_itself_that_it_is_recordable(replays_on_cpu: None) -> None:
    class Silent:
        recordable = False

    class Ours(Silent):
        recordable = True

    class Derived(Ours):
        """Which may start kernels of its own."""

    for kind, replays in ((Silent, 0), (Ours, 2), (Derived, 0), (int, 2)):
        function, static = replayed(lambda x, how: x + 1), kind()
        for _ in range(4):
            function(torch.zeros(2), static)
        assert function.replays == replays, kind


@dataclass(frozen=True)
class Pair(Operands):
    x: Tensor
    y: Any
    name: str = "pair"


def test_bundles_come_and_go_as_they_are_and_their_other_fields_decide(replays_on_cpu: None) -> None:
    function = replayed(lambda pair, rest: Pair(pair.x + rest[0], (pair.y, None), pair.name))
    for name in ("one", "other"):
        for _ in range(4):
            x, y, z = torch.randn(3, 2)
            got = function(Pair(x, y, name), (z,))
            assert isinstance(got, Pair)
            assert torch.equal(got.x, x + z)
            assert got.y == (y, None)
            assert got.name == name
    assert (function.replays, len(function._kinds)) == (4, 2)


def test_memory_of_fields_that_a_function_releases_is_free_before_it_ends(replays_on_cpu: None) -> None:
    @replayed
    def function(pair: Pair) -> Tensor:
        h = pair.x * 2
        if early:
            pair.release("x")
        return h.cumsum(0)

    for early in (True, False):
        function._kinds.clear()
        for _ in range(3):
            function(Pair(torch.zeros(4), None))
        (kind,) = function._kinds.values()
        assert kind.donated == ([0] if early else [])
    given = Pair(torch.zeros(4), None)
    gone = weakref.ref(given.x)
    function(given)
    assert given.x is None
    assert gone() is None, "a play empties the bundle"


def test_what_a_failed_play_has_emptied_the_function_gets_again(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = replayed(lambda pair: pair.x + 1)
    for _ in range(3):
        function(Pair(torch.zeros(2), None))
    monkeypatch.setattr(graph.Player, "play", mock.Mock(side_effect=torch.OutOfMemoryError("full")))
    assert function(Pair(torch.ones(2), None)).tolist() == [2.0, 2.0]


def test_forms_and_tensors_make_an_object_again() -> None:
    mx = MXParts.of(quantize(torch.randn(4, 64).bfloat16()))
    for x in (None, torch.zeros(2), Pair(torch.ones(1), (mx, -0.0, [True, None]), "a"), mx, (), 1.5, torch.bfloat16):
        tensors, form = take_apart(x)
        again = build(form, iter(tensors))
        assert count(form) == len(tensors)
        assert take_apart(again)[1] == form
        assert all(map(operator.is_, take_apart(again)[0], tensors))
        assert hash(form) == hash(take_apart(again)[1])
    for one, other in ((0.0, -0.0), (1, True), ((1,), [1])):
        assert take_apart(one)[1] != take_apart(other)[1]


@dataclass(frozen=True)
class Kept(Bundle):
    x: Tensor


def test_a_bundle_that_is_no_operands_is_not_emptied(replays_on_cpu: None) -> None:
    """A caller may keep it, as a module its frozen weight."""
    function, kept = replayed(lambda kept, pair: kept.x + pair.x), Kept(torch.ones(3))
    for _ in range(4):
        assert function(kept, Pair(torch.ones(3), kept)).tolist() == [2.0] * 3
    assert function.replays == 2
    assert kept.x.tolist() == [1.0] * 3
