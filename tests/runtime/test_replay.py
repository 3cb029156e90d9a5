"""A function of tensors that is a CUDA graph from its second call of a kind on."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from graphs_on_cpu import replays_on_the_cpu
from mxep.quant import MXTensor, quantize, swiglu_quantize
from mxep.quant.parts import MXParts
from mxep.runtime import replay
from mxep.runtime.driver import NotCaptured
from mxep.runtime.pools import idle_bytes
from mxep.runtime.replay import Replayed, replayed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
    with torch.no_grad(), replays_on_the_cpu(monkeypatch):
        yield


def test_from_the_second_call_of_a_kind_on_a_graph_is_launched(replays_on_cpu: None) -> None:
    calls = []

    @replayed
    def function(tensors: list[Any], factor: float) -> list[Any]:
        calls.append(factor)
        x, bias = tensors
        return [quantize(x * factor), None if bias is None else x + bias]

    bias = torch.randn(64)
    for kind in ((4, 2.0, None), (4, 3.0, None), (8, 2.0, None), (4, 2.0, bias), (4, 2.0, torch.randn(128)[::2])):
        rows, factor, given = kind
        x = torch.randn(rows, 64).bfloat16()
        want, other = function.direct([x, given], factor)
        calls.clear()
        for _ in range(4):
            got, plain = function([x.clone(), given], factor)
            assert torch.equal(got.join().dequantize(), want.join().dequantize())
            assert (plain is None) == (other is None)
            assert plain is None or torch.equal(plain, other)
        assert len(calls) == 2, kind
    assert function.replays == 5 * 3
    assert not function.refused


def test_streams_autocast_and_inference_are_kinds_of_their_own(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = replayed(lambda tensors: [tensors[0] + 1])
    x, kinds = torch.zeros(4), 0
    for context in (nullcontext, lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode):
        with context():
            function([x])
        kinds += 1
        assert len(function._kinds) == kinds
    monkeypatch.setattr(replay, "_stream", lambda device: 1)
    function([x])
    assert len(function._kinds) == kinds + 1
    assert function.replays == 0


def test_kinds_that_came_once_make_room_for_others(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_GRAPHS", 3)
    function = replayed(lambda tensors: [tensors[0] + 1])
    for _ in range(2):
        function([torch.zeros(7)])
    for size in range(20, 40):
        function([torch.zeros(size)])
    assert len(function._kinds) == 3
    assert torch.equal(function([torch.zeros(7)])[0], torch.ones(7))
    assert function.replays == 2, "what came again was kept"


def test_arguments_that_are_one_tensor_are_a_kind_of_their_own(replays_on_cpu: None) -> None:
    function = replayed(lambda tensors: [tensors[0] + tensors[1]])
    x, y, z = (torch.zeros(4) for _ in range(3))
    for given in ([x, y], [y, z], [x, x], [z, z]):
        function(given)
    assert function.replays == 2
    assert len(function._kinds) == 2


def test_where_a_tensor_begins_is_told_apart_to_32_bytes(replays_on_cpu: None) -> None:
    function, x = replayed(lambda tensors: [tensors[0] + 1]), torch.zeros(64)
    first = -x.data_ptr() // 4 % 8  # where 32 bytes begin
    for start in (0, 8, 16, 4, 12):
        function([x[first + start :][:8]])
    assert len(function._kinds) == 2
    assert function.replays == 3


def test_replays_can_be_paused(replays_on_cpu: None) -> None:
    function = replayed(lambda tensors: [tensors[0] + 1])
    for _ in range(3):
        function([torch.zeros(2)])
    with replay.no_replays(), replay.no_replays():
        function([torch.zeros(2)])
    assert function.replays == 2
    function([torch.zeros(2)])
    assert function.replays == 3


def test_what_tells_two_calls_apart(replays_on_cpu: None) -> None:
    x, other = torch.zeros(4, 4), torch.zeros(4, 4)
    mx = [MXParts.of(quantize(torch.randn(4, 64).bfloat16(), block_size=size)) for size in (32, 64)]
    calls = [
        [x, other, None],
        [x, None, other],
        [x, x.t(), None],
        [x, torch.zeros(4, 8)[:, ::2], None],
        [x, other.int(), None],
        [mx[0]],
        [mx[1]],
    ]
    calls += [[mx[0]._replace(dtype=torch.float32)], [*mx[0][:3]]]
    function = replayed(lambda tensors: [])
    for count, call in enumerate(calls, 1):
        function(call)
        assert len(function._kinds) == count
    assert function.replays == 0


def test_where_somebody_listens_the_function_is_called(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    function, x = replayed(lambda tensors: [tensors[0] + 1]), torch.zeros(4)
    for _ in range(2):
        function([x])
    assert function.replays == 1
    with torch.enable_grad():
        function([x])
    with FlopCounterMode(display=False):
        function([x])
    for name, value in (
        ("_is_capturing", lambda: True),
        ("_launch", lambda: SimpleNamespace(is_profiled=lambda: True)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(replay, name, value)
            function([x])
    assert function.replays == 1
    assert len(function._kinds) == 1
    function([x])
    assert function.replays == 2


def test_what_could_not_be_captured_is_tried_again_less_and_less_often(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tries, calls = replay.MovingGraph, [], 0

    def capture(*args: Any) -> Any:
        tries.append(calls)
        if len(tries) < 4:
            raise RuntimeError("CUDA error: transient")
        return made(*args)

    monkeypatch.setattr(replay, "MovingGraph", capture)
    function = replayed(lambda tensors: [tensors[0] + 1])
    for calls in range(1, 17):
        assert function([torch.zeros(4)])[0].tolist() == [1.0] * 4
        assert function.refused == (["RuntimeError: CUDA error: transient"] if 2 <= calls < 9 else [])
    assert tries == [2, 3, 5, 9]
    assert function.replays == 8


def test_memory_of_another_thread_refuses_no_kind_for_ever(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([0, 2 * replay.MOST_BYTES])  # before and after the first call; nothing afterwards
    monkeypatch.setattr(replay, "_allocated", lambda device: next(counts, 0))
    function = replayed(lambda tensors: [tensors[0] + 1])
    for _ in range(4):
        function([torch.zeros(4)])
    assert function.replays == 2
    assert not function.refused


def test_after_a_failed_capture_its_temporaries_are_gone_when_memory_is_freed(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Tensor]] = []

    @replayed
    def function(tensors: list[Any]) -> list[Any]:
        temporary = torch.zeros(8)
        made.append(weakref.ref(temporary))
        if len(made) == 2:
            raise torch.OutOfMemoryError("full")
        return [tensors[0] + 1]

    alive: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(made[1]() is not None))
    for _ in range(2):
        function([torch.zeros(4)])
    assert alive == [False]
    assert function.replays == 1


def test_after_a_launch_that_failed_the_function_is_called(replays_on_cpu: None) -> None:
    class Broken:
        def launch(self, *given: Any) -> list[Any]:
            raise RuntimeError("a graph's launch: got error 1 of CUDA's driver")

    function = replayed(lambda tensors: [tensors[0] + 1])
    for _ in range(2):
        function([torch.zeros(4)])
    ((key, kept),) = function._kinds.items()
    function._kinds[key] = kept._replace(graph=Broken())
    assert function([torch.zeros(4)])[0].tolist() == [1.0] * 4
    assert function.refused == ["RuntimeError: a graph's launch: got error 1 of CUDA's driver"]
    function([torch.zeros(4)])
    assert function.replays == 2, "another graph was captured"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_get_deterministic_algorithms", True),
        ("_get_deterministic_fill_uninitialized_memory", False),
        ("_get_fp32_precision_getter", "tf32"),
        ("_get_cublas_allow_bf16_reduced_precision_reduction", (False, True)),
        ("_get_cublas_allow_fp16_reduced_precision_reduction", (False, True)),
        ("_get_cublas_allow_fp16_accumulation", True),
        ("_get_sm_carveout_experimental", 8),
        ("_get_blas_preferred_backend", 2),
    ],
)
def test_a_setting_by_which_torch_chooses_kernels_makes_another_kind(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    function = replayed(lambda tensors: [tensors[0] + 1])
    for _ in range(3):
        function([torch.zeros(4)])
    monkeypatch.setattr(torch._C, name, lambda *args: value)
    function([torch.zeros(4)])
    assert (function.replays, len(function._kinds)) == (2, 2)


def test_the_dtype_of_autocast_makes_another_kind(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_is_any_autocast_enabled", lambda: True)
    function = replayed(lambda tensors: [tensors[0] + 1])
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device, dtype=dtype: dtype)
        function([torch.zeros(4)])
    assert (function.replays, len(function._kinds)) == (1, 2)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), (0, False)])
def test_equal_values_of_other_signs_and_types_are_kinds_of_their_own(
    replays_on_cpu: None, one: Any, other: Any
) -> None:
    function = replayed(lambda tensors, factor: [tensors[0] * factor])
    for factor in (one, one, other):
        got = function([torch.ones(2)], factor)[0]
        assert got.signbit().tolist() == (torch.ones(2) * factor).signbit().tolist()
    assert (function.replays, len(function._kinds)) == (1, 2)


def test_a_factor_that_is_not_a_number_is_one_kind(replays_on_cpu: None) -> None:
    function = replayed(lambda tensors, factor: [tensors[0] * factor])
    for _ in range(4):
        function([torch.ones(2)], float("nan"))
    assert (function.replays, len(function._kinds)) == (3, 1)


def test_inference_tensors_are_a_kind_of_their_own(replays_on_cpu: None) -> None:
    with torch.inference_mode():
        made = torch.zeros(4)
    function = replayed(lambda tensors: [tensors[0] + tensors[1]])
    for x in (torch.zeros(4), torch.zeros(4), made):
        function([x, torch.ones(4)])
    assert (function.replays, len(function._kinds)) == (1, 2)


class Full:
    """A graph for whose results there is no memory, the first time."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.full = graph, True

    def launch(self, *given: Any) -> list[Any]:
        if self.full:
            self.full = False
            raise torch.OutOfMemoryError("full")
        return self.graph.launch(*given)


def test_a_launch_for_which_memory_is_short_is_the_functions(replays_on_cpu: None) -> None:
    calls = []

    @replayed
    def function(tensors: list[Any]) -> list[Any]:
        calls.append(len(tensors))
        (x,) = tensors
        tensors.clear()
        return [x + 1]

    for _ in range(2):
        function([torch.zeros(4)])
    ((key, kept),) = function._kinds.items()
    function._kinds[key] = kept._replace(graph=Full(kept.graph))
    before = function.replays
    for launches, called in ((0, 3), (1, 3), (2, 3)):
        assert torch.equal(function([torch.zeros(4)])[0], torch.ones(4))
        assert (function.replays - before, len(calls)) == (launches, called)


@pytest.mark.parametrize("always", [False, True])
def test_a_capture_for_which_memory_is_short_is_made_once_more(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    function, captures, emptied = replayed(lambda tensors: [tensors[0] + 1]), [], []
    made = replay.MovingGraph

    def capture(*args: Any) -> Any:
        captures.append(len(emptied))
        if always or len(captures) == 1:
            raise torch.OutOfMemoryError("full")
        return made(*args)

    monkeypatch.setattr(replay, "MovingGraph", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    for _ in range(4):
        assert torch.equal(function([torch.zeros(4)])[0], torch.ones(4))
    assert captures == ([0, 1, 1, 2] if always else [0, 1]), "after what torch had cached went"
    assert function.replays == (0 if always else 3)
    assert function.refused == (["OutOfMemoryError: full"] if always else [])


def test_what_cannot_be_captured_is_called_as_ever(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise NotCaptured("it reads from the device")

    monkeypatch.setattr(replay, "MovingGraph", refuse)
    function = replayed(lambda tensors: [tensors[0] * tensors[0].sum().item()])
    for value in (1.0, 2.0, 3.0, 4.0):
        assert function([torch.full((2,), value)])[0].tolist() == [2 * value * value] * 2
    assert function.replays == 0
    assert function.refused == ["NotCaptured: it reads from the device"]


def test_what_allocates_too_much_is_never_captured(replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, calls = [0], []

    def function(tensors: list[Any], nbytes: int) -> list[Any]:
        calls.append(nbytes)
        allocated[0] += nbytes
        return [tensors[0] + 1]

    monkeypatch.setattr(replay, "_allocated", lambda device: allocated[0])
    both = replayed(function)
    for nbytes in (replay.MOST_BYTES, replay.MOST_BYTES + 1):
        calls.clear()
        for _ in range(4):
            assert both([torch.zeros(2)], nbytes)[0].tolist() == [1.0, 1.0]
        assert len(calls) == (2 if nbytes == replay.MOST_BYTES else 4)
    assert both.replays == 3
    assert both.refused == [f"it allocates {replay.MOST_BYTES + 1} bytes, more than {replay.MOST_BYTES}"]


def test_the_parts_of_what_is_refused_are_graphs_but_where_the_whole_is_measured_again(
    replays_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated = [0]
    monkeypatch.setattr(replay, "_allocated", lambda device: allocated[0])

    @replayed
    def part(tensors: list[Any]) -> list[Any]:
        allocated[0] += replay.MOST_BYTES  # a graph of it would allocate nothing here
        return [tensors[0] + 1]

    whole = replayed(lambda tensors: part(part(tensors)))
    replays = []
    for _ in range(9):
        whole([torch.zeros(2)])
        replays.append(part.replays)
    assert whole.replays == 0
    assert replays == [0, 0, 2, 2, 4, 6, 8, 8, 10], "the whole is measured in calls 1, 2, 4 and 8"


def test_a_part_of_one_shape_is_replayed_where_the_whole_has_another_at_each_call(replays_on_cpu: None) -> None:
    part = replayed(lambda tensors: [tensors[0] + 1])
    whole = replayed(lambda tensors: [*part([tensors[0]]), tensors[1] * 2])
    for n in range(1, 6):
        assert whole([torch.zeros(2), torch.ones(n)])[0].tolist() == [1.0, 1.0]
    assert (whole.replays, part.replays) == (0, 3)


def test_an_error_of_a_first_call_leaves_replays_as_they_were(replays_on_cpu: None) -> None:
    function = replayed(lambda tensors: [tensors[0] + 1])
    with pytest.raises(ValueError, match="none"):
        replayed(lambda tensors: [tensors[0].view(int("none"))])([torch.zeros(2)])
    for _ in range(2):
        function([torch.zeros(2)])
    assert function.replays == 1


def test_errors_of_the_function_come_through(replays_on_cpu: None) -> None:
    def function(tensors: list[Any]) -> list[Any]:
        raise ValueError("x: got nothing")

    for _ in range(3):
        with pytest.raises(ValueError, match="x: got nothing"):
            replayed(function)([torch.ones(2)])


def test_what_else_decides_is_asked_and_told(replays_on_cpu: None) -> None:
    class Counting(Replayed):
        now: Any = "a"
        seen: list[str]

        def state(self, *static: Any) -> Any:
            return self.now

        @contextmanager
        def capturing(self, *static: Any) -> Iterator[None]:
            self.seen.append("capturing")
            yield

        def launched(self, *static: Any) -> None:
            self.seen.append("launched")

    function = Counting(lambda tensors: [tensors[0] + 1])
    function.seen = []
    for state in ("a", "b", None, None, None, "a"):
        function.now = state
        function([torch.zeros(2)])
    assert function.seen == ["capturing", "launched"]
    assert function.replays == 1


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
    assert function.replays == 6, "one of each shape went before"
    assert len(calls) == 8 + 4


@needs_gpu
def test_what_allocates_too_much_leaves_no_memory_behind() -> None:
    function = replayed(lambda tensors: [(torch.cat([tensors[0]] * 2) + 1)[:1].clone()])
    x = torch.zeros(replay.MOST_BYTES // 4, dtype=torch.uint8, device="cuda")  # 4 of which it allocates, and a byte
    before = idle_bytes(0)
    with torch.no_grad():
        for _ in range(3):
            function([x])
    assert function.replays == 0
    assert len(function.refused) == 1
    assert "bytes, more than" in function.refused[0]
    assert idle_bytes(0) == before


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
    assert function.replays == 3
    with torch.no_grad(), FlopCounterMode(display=False):
        function([x])
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(captured):
        (y,) = function([x])
    captured.replay()
    assert y.tolist() == [2.0] * 4
    assert function.replays == 3
