"""A function of tensors that is written down once and then done without its Python."""

import ctypes
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mxep.quant import MXTensor, quantize, replay, swiglu_quantize
from mxep.quant.recorder import recorder
from mxep.quant.replay import MXParts, each_time, replayed
from mxep.quant.tape import Recorder

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def launch_copy(source: Tensor, target: Tensor, nbytes: int) -> None:
    """Stands for a kernel that copies: by addresses, as kernels do."""

    def run(x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *args: Any) -> None:
        _, _, _, one, other, count, factor = args
        assert (x, y, z, function, metadata, factor) == (2, 1, 1, 7, "metadata", "constant")
        ctypes.memmove(other, one, count)

    compiled = SimpleNamespace(function=7, packed_metadata="metadata", run=run)
    run(2, 1, 1, 0, 7, "metadata", None, None, None, source.data_ptr(), target.data_ptr(), nbytes, "constant")
    if (mode := recorder()) is not None:
        mode.launched(compiled, (2, 1, 1), (source, target, nbytes), ("constant",))


def tape_of(function: Any, *tensors: Any) -> Any:
    recording = Recorder(list(tensors), CPU)
    with recording:
        results = function(list(tensors))
    tape = recording.tape(results)
    assert recording.failed is None, recording.failed
    return tape


def test_a_tape_does_what_ran_with_other_tensors() -> None:
    def function(tensors: list[Any]) -> list[Any]:
        x, _, y = tensors
        rows = torch.empty(4, 6)
        launch_copy(x, rows, 96)
        rows[1:3].add_(y)
        back = torch.empty_like(rows)
        launch_copy(rows[2:], back[1:], 48)
        launch_copy(x, back, 24)
        back[3].fill_(5.0)
        return [rows.t(), back, None, x, back.view(torch.int32)[1:2, 2:4]]

    tape = tape_of(function, torch.randn(4, 6), None, torch.randn(2, 6))
    for _ in range(2):
        tensors = [torch.randn(4, 6), None, torch.randn(2, 6)]
        wanted = function(list(tensors))
        given = list(tensors)
        got = tape(given)
        assert not given, "the tape owns its tensors"
        assert got[3] is tensors[0]
        assert got[2] is None
        for one, other in zip(got, wanted):
            assert (one is None) == (other is None)
            assert one is None or (one.stride() == other.stride() and torch.equal(one, other))


def test_a_tape_lets_go_of_what_it_has_used() -> None:
    seen = []

    def probe() -> Tensor:
        seen.append(gone() is None)
        return torch.zeros(())

    def function(tensors: list[Any]) -> list[Any]:
        early = each_time(probe)
        y = tensors.pop() + early
        return [y + each_time(probe)]

    x = torch.ones(3)
    gone = weakref.ref(x)
    tape, given = tape_of(function, x), [torch.ones(3)]
    gone = weakref.ref(given[0])
    seen.clear()
    tape(given)
    assert seen == [False, True]


def test_a_tape_has_mxtensors_taken_apart() -> None:
    def function(tensors: list[Any]) -> list[Any]:
        qdata, scale = tensors
        return [MXParts.of(MXTensor(qdata.clone(), scale.clone(), None, -1, 32, torch.bfloat16))]

    x = quantize(torch.randn(4, 64).bfloat16())
    (got,) = tape_of(function, x.qdata, x.scale)([x.qdata, x.scale])
    assert torch.equal(got.join().dequantize(), x.dequantize())


def test_a_tape_asks_each_time_for_what_others_hand_out() -> None:
    pool = [torch.full((1,), float(i)) for i in range(9)]

    def function(tensors: list[Any]) -> list[Any]:
        return [tensors[0] + each_time(pool.pop)]

    tape = tape_of(function, torch.zeros(1))
    assert [tape([torch.zeros(1)])[0].item() for _ in range(3)] == [7.0, 6.0, 5.0]


def test_a_tape_tells_autograd_of_what_it_wrote_to() -> None:
    def function(tensors: list[Any]) -> list[Any]:
        launch_copy(tensors[0], tensors[1], 4)
        torch.autograd.graph.increment_version(tensors[1])
        if (mode := recorder()) is not None:
            mode.wrote(tensors[1])
        return []

    tape, target = tape_of(function, torch.ones(1), torch.zeros(1)), torch.zeros(1)
    before = target._version
    tape([torch.ones(1), target])
    assert target.item() == 1
    assert target._version == before + 1


def test_a_tape_makes_views_in_all_forms() -> None:
    def function(tensors: list[Any]) -> list[Any]:
        x, y = tensors
        raw = torch.empty(8, dtype=torch.uint8)
        raw.fill_(1)
        big = torch.empty(4, 4)
        big.zero_()
        low = torch.empty(4, 4)
        low.t().copy_(x[:4, :4])
        odd = torch.empty_strided((2, 3), (1, 2)).copy_(y.view(3, 2).t())
        return [raw.view(torch.int32), big[:2], y.view(torch.uint8)[4:], low, odd]

    def make() -> list[Tensor]:
        return [torch.randn(5, 4)[1:], torch.randn(9)[3:]]

    tape, given = tape_of(function, *make()), make()
    for one, other in zip(tape(list(given)), function(list(given)), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


def test_a_tape_takes_several_results_and_lists() -> None:
    def function(tensors: list[Any]) -> list[Any]:
        (x,) = tensors
        return [x.max(1)[0], *torch.topk(x, 2), torch.cat([x, x]), *torch.unbind_copy(x)]

    tape, x = tape_of(function, torch.randn(4, 4)), torch.randn(4, 4)
    for one, other in zip(tape([x]), function([x]), strict=True):
        assert torch.equal(one, other)


def test_a_view_of_an_argument_is_not_the_argument() -> None:
    x = torch.ones(3, requires_grad=True)
    (got,) = tape_of(lambda tensors: [tensors[0].detach()], torch.ones(3))([x])
    assert got is not x
    assert got.data_ptr() == x.data_ptr()


def test_arguments_that_overlap_are_refused() -> None:
    buffer = torch.zeros(8)
    for function, tensors in (
        (lambda given: [given[0].as_strided((8,), (1,)) + 0], (buffer[:4], buffer[4:])),
        (lambda given: [given[0][2:4].add_(1)], (buffer, buffer[2:4])),
        (lambda given: [given[0] + given[1]], (buffer, buffer)),
    ):
        recording, given = Recorder(list(tensors), CPU), list(tensors)
        with recording:
            results = function(given)
        assert recording.tape(results) is None


ELSEWHERE = torch.ones(3)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda tensors: [tensors[0] * tensors[0].sum().item()], "reads from the device"),
        (lambda tensors: [tensors[0][tensors[0] > 0]], "reads from the device"),
        (lambda tensors: [tensors[0] + ELSEWHERE], "comes from elsewhere"),
        (lambda tensors: [each_time(torch.neg, tensors[0]) + 0], "each_time got a tensor"),
        (lambda tensors: [tensors[0].t_() + 0], "changes what a tensor is"),
    ],
    ids=["item", "mask", "global", "each_time", "t_"],
)
def test_what_cannot_be_replayed_says_why(function: Any, why: str) -> None:
    given = [torch.ones(3)]
    recording = Recorder(given, CPU)
    with recording:
        results = function(given)
    assert recording.tape(results) is None
    assert recording.failed is not None
    assert why in recording.failed


def test_on_the_cpu_the_function_is_called() -> None:
    calls = []

    @replayed
    def function(tensors: list[Any], factor: int) -> list[Any]:
        calls.append(type(tensors[0]))
        return [tensors[0]]

    x = MXParts.of(quantize(torch.randn(4, 64).bfloat16()))
    for _ in range(4):
        (got,) = function([x], 3)
        assert isinstance(got, MXParts)
        assert got.qdata is x.qdata
    assert calls == [MXTensor] * 4
    assert function.replays == 0


@pytest.fixture
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU stands for a GPU, torch's ops for kernels."""
    monkeypatch.setattr(replay, "LEAST_DEVICE", -1)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    replay._reader.cache_clear()
    with torch.no_grad():
        yield
    replay._reader.cache_clear()


def test_the_third_call_of_a_kind_is_a_replay(replays_on_cpu: None) -> None:
    calls = []

    @replayed
    def function(tensors: list[Any], factor: float) -> list[Any]:
        calls.append(factor)
        x, bias = tensors
        return [quantize(x * factor), None if bias is None else x + bias]

    bias = torch.randn(64)
    for kind in ((4, 2.0, None), (4, 3.0, None), (8, 2.0, None), (4, 2.0, bias), (4, 2.0, torch.randn(128)[::2])):
        rows, factor, given = kind
        calls.clear()
        for _ in range(4):
            x = torch.randn(rows, 64).bfloat16()
            got, plain = function([x, given], factor)
            want, other = function.direct([x, given], factor)
            assert torch.equal(got.join().dequantize(), want.join().dequantize())
            assert (plain is None) == (other is None)
            assert plain is None or torch.equal(plain, other)
        assert len(calls) == 4 + 2, kind
    assert not function.refused


def test_autocast_and_inference_are_kinds_of_their_own(replays_on_cpu: None) -> None:
    @replayed
    def function(tensors: list[Any]) -> list[Any]:
        x = tensors[0] @ tensors[0]
        with torch.autocast("cpu", enabled=False):
            return [x, tensors[0] @ tensors[0]]

    for _ in range(3):
        x = torch.randn(4, 4)
        for got, want in zip(function([x]), function.direct([x]), strict=True):
            assert got.dtype == want.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            for got, want in zip(function([x]), function.direct([x]), strict=True):
                assert got.dtype == want.dtype
                assert torch.equal(got, want)
        with torch.inference_mode():
            assert all(got.is_inference() for got in function([x]))
    assert function.replays == 3


def test_kinds_that_came_once_make_room_for_others(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_TAPES", 3)
    function = replayed(lambda tensors: [tensors[0] + 1])
    for _ in range(2):
        function([torch.zeros(7)])
    for size in range(20, 40):
        function([torch.zeros(size)])
    assert len(function._tapes) == 3
    assert torch.equal(function([torch.zeros(7)])[0], torch.ones(7))
    assert function.replays == 1, "what came again was kept"


def test_what_was_refused_is_called_as_ever(replays_on_cpu: None) -> None:
    function = replayed(lambda tensors: [tensors[0] * tensors[0].sum().item()])
    for value in (1.0, 2.0, 3.0, 4.0):
        assert function([torch.full((2,), value)])[0].tolist() == [2 * value * value] * 2
    assert function.replays == 0
    assert len(function.refused) == 1


def test_errors_of_the_function_come_through_and_leave_nothing(replays_on_cpu: None) -> None:
    @replayed
    def function(tensors: list[Any]) -> list[Any]:
        if fails:
            raise ValueError("x: got nothing")
        return [tensors[0] * 2]

    for fails in (False, True, True, False, False, False):
        if fails:
            with pytest.raises(ValueError, match="x: got nothing"):
                function([torch.ones(2)])
        else:
            assert torch.equal(function([torch.ones(2)])[0], torch.full((2,), 2.0))
    assert function.replays == 2


@needs_gpu
def test_a_replay_has_the_bits_of_the_function() -> None:
    calls = []

    @replayed
    def function(tensors: list[Any], mode: str) -> list[Any]:
        calls.append(mode)
        gate_up, offs = tensors
        return [swiglu_quantize(gate_up, None, offs=offs), gate_up.float().sum(0)]

    offs = torch.tensor([32, 96], dtype=torch.int32, device="cuda")
    kept = []
    for i in range(8):
        gate_up = torch.randn(96 if i % 2 else 128, 512, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            want = function.function([gate_up, offs], "x")
            garbage = torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device="cuda")
            del garbage
            got = function([gate_up, offs], "x")
        assert torch.equal(got[0].qdata[:96].view(torch.uint8), want[0].qdata[:96].view(torch.uint8))
        assert torch.equal(got[0].scale[:96].view(torch.uint8), want[0].scale[:96].view(torch.uint8))
        assert torch.equal(got[1], want[1])
        kept.append(got)
    assert function.replays == 4, "two of each shape went before"
    assert len(calls) == 8 + 4


@needs_gpu
def test_where_gradients_or_modes_listen_the_function_is_called() -> None:
    @replayed
    def function(tensors: list[Any]) -> list[Any]:
        return [tensors[0] * 2]

    x = torch.ones(4, device="cuda", requires_grad=True)
    for _ in range(4):
        (y,) = function([x])
        assert y.requires_grad
    assert function.replays == 0
    with torch.no_grad():
        for _ in range(4):
            function([x])
    assert function.replays == 2
    with torch.no_grad(), FlopCounterMode(display=False):
        function([x])
    assert function.replays == 2
