"""A function of tensors that is written down once and then done without its Python."""

import ctypes
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mxep.quant import MXTensor, quantize, swiglu_quantize
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
        return []

    tape, target = tape_of(function, torch.ones(1), torch.zeros(1)), torch.zeros(1)
    before = target._version
    tape([torch.ones(1), target])
    assert target.item() == 1
    assert target._version == before + 1


ELSEWHERE = torch.ones(3)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda tensors: [tensors[0] * tensors[0].sum().item()], "reads from the device"),
        (lambda tensors: [tensors[0][tensors[0] > 0]], "reads from the device"),
        (lambda tensors: [tensors[0] + ELSEWHERE], "comes from elsewhere"),
    ],
    ids=["item", "mask", "global"],
)
def test_what_cannot_be_replayed_says_why(function: Any, why: str) -> None:
    recording = Recorder([torch.ones(3)], CPU)
    with recording:
        results = function([torch.ones(3)])
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
