"""A CUDA graph whose arguments and results lie elsewhere at each launch."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxep.quant import quantize
from mxep.runtime import graph
from mxep.runtime.driver import NotCaptured
from mxep.runtime.graph import MovingGraph
from mxep.runtime.pools import idle_bytes
from mxep.runtime.replay import replayed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def extent(x: Tensor) -> Any:
    return graph._Source(*graph._extent(x), x.is_contiguous(), set())


def test_an_address_is_of_what_it_lies_in() -> None:
    x, y = torch.zeros(8), torch.zeros(4)
    sources = [extent(x), extent(y)]
    assert graph._source_of(y.data_ptr(), 0, sources) == (1, 0)
    assert graph._source_of(x.data_ptr() + 12, 0, sources) == (0, 12)
    assert graph._source_of(x.data_ptr() - 1, 0, sources) is None
    assert graph._source_of(0, 0, [*sources, extent(torch.zeros(0))]) is None


def test_an_address_is_no_results_in_nodes_from_before_it_was_made() -> None:
    x = torch.zeros(8)
    sources = [graph._Source(*graph._extent(x), None, {7})]
    assert graph._source_of(x.data_ptr(), 7, sources) is None
    assert graph._source_of(x.data_ptr(), 8, sources) == (0, 0)


def test_a_part_of_a_structure_that_could_be_a_small_integer_is_an_address_only_where_a_tensor_begins() -> None:
    boundary = 0x7FCD_0000_0000
    sources = [graph._Source(boundary - 64, boundary + (1 << 30), True, set())]
    assert graph._source_of(boundary + 80, 0, sources, {boundary - 64}) is None, "80, and 0x7fcd of the stack"
    assert graph._source_of(boundary + 80, 0, sources) == (0, 144), "a parameter of 8 bytes has no gaps"
    assert graph._source_of(boundary + graph.SMALL, 0, sources, set()) == (0, 64 + graph.SMALL)
    assert graph._source_of(boundary - 64, 0, sources, {boundary - 64}) == (0, 0)
    with pytest.raises(NotCaptured, match="small integer"):
        graph._source_of(boundary + 80, 0, sources, {boundary + 80})


def test_where_tensors_begin_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "captured_nodes", lambda stream: set())
    x = torch.zeros(4, 6)
    with graph._Allocations(0, [x]) as allocations:
        later = x[2:] + 1
    assert allocations.begins >= {x[2:].data_ptr(), later.data_ptr()}


def test_of_arguments_side_by_side_in_memory_the_one_that_begins_there_is_meant() -> None:
    rows = torch.zeros(4, 6)
    left, right = rows.split([4, 2], 1)
    sources = [extent(left), extent(right)]
    assert graph._source_of(right.data_ptr(), 0, sources) == (1, 0)
    with pytest.raises(NotCaptured, match="overlap"):
        graph._source_of(right.data_ptr() + 4, 0, sources)
    assert graph._source_of(right.data_ptr() + 4, 0, [extent(right), extent(right)]) == (0, 4)


def test_of_an_argument_that_begins_within_another_nobody_knows_which_is_meant() -> None:
    x = torch.zeros(4, 6)
    with pytest.raises(NotCaptured, match="overlap"):
        graph._source_of(x[1:].data_ptr(), 0, [extent(x), extent(x[1:])])
    assert graph._source_of(x.data_ptr(), 0, [extent(x), extent(x)]) == (0, 0), "they are one at each launch"
    _, sources = graph._places([x, x[:, :4], None], [], {})
    assert [source.form for source in sources] == [True, False, None]


def test_a_machine_without_a_driver_leaves_no_half_made_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(graph, "driver", missing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for _ in range(2):  # what __del__ raises fails the test, too
        with pytest.raises(OSError, match="libcuda"):
            MovingGraph(list, [], nullcontext)


def test_a_graph_is_destroyed_where_a_capture_of_another_thread_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *_: self.calls.append(name)

    fake = Driver()
    for place in ("mxep.runtime.driver.driver", "mxep.runtime.graph.driver"):
        monkeypatch.setattr(place, lambda: fake)
    graph._destroy(ctypes.c_void_p(), ctypes.c_void_p())
    assert fake.calls == [], "of a capture that failed there is none"
    graph._destroy(ctypes.c_void_p(1), ctypes.c_void_p(2))
    exchange = "cuThreadExchangeStreamCaptureMode"
    assert fake.calls == [exchange, "cuGraphExecDestroy", "cuGraphDestroy", exchange]


def test_results_are_made_or_given_or_views_of_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "captured_nodes", lambda stream: {1})
    x, y = torch.randn(4, 6), torch.randn(3)
    with graph._Allocations(0, [x, None, y]) as allocations:
        made = x * 2
        raw = torch.empty(24, dtype=torch.uint8)
        results = [made, x, None, x[1:3], raw.view(torch.float32)[2:4], made.t(), y.view(torch.int32)]
    places, sources = graph._places([x, None, y], results, allocations.nodes_before)
    assert all(source.without == {1} for source in sources[3:]), "what is given is not made"
    assert [source.form for source in sources[3:]] == [(torch.float32, (4, 6)), (torch.uint8, (24,))]
    for one, other in zip(results, places, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            got = other.of([x, None, y, made, raw])
            assert (got.data_ptr(), got.stride(), got.dtype) == (one.data_ptr(), one.stride(), one.dtype)
    with pytest.raises(NotCaptured, match="neither made nor in one argument"):
        graph._places([x], [torch.zeros(3)], allocations.nodes_before)


def test_a_result_is_found_whatever_part_of_its_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: set[int] = set()
    monkeypatch.setattr(graph, "captured_nodes", lambda stream: set(nodes))
    behind = torch.randn(9)[3:]
    with graph._Allocations(0, [behind]) as allocations:
        made = torch.zeros(4, 6)
        nodes.add(1)
        results = [made[:2], made[1], behind[2:4], made.view(-1)]
        turned = torch.zeros(3, 3).t()
    places, sources = graph._places([behind], [*results, turned, turned.t()], allocations.nodes_before)
    assert [(source.form, source.without) for source in sources[1:]] == [
        ((torch.uint8, (96,)), set()),  # what views it later makes it no younger
        ((torch.uint8, (36,)), {1}),
    ]
    raw = made.untyped_storage(), turned.untyped_storage()
    tensors = [behind, *(torch.empty(0, dtype=torch.uint8).set_(storage) for storage in raw)]
    for one, other in zip([*results, turned, turned.t()], places, strict=True):
        assert other is not None
        got = other.of(tensors)
        assert (got.data_ptr(), got.shape, got.stride()) == (one.data_ptr(), one.shape, one.stride())
    with pytest.raises(NotCaptured, match="nor in one argument"):
        graph._places([behind, behind[1:]], [behind[2:]], {})


def test_a_results_own_nodes_are_not_from_before_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: set[int] = set()

    class Captured(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nodes.add(len(nodes))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(graph, "captured_nodes", lambda stream: set(nodes))
    with Captured(), graph._Allocations(0, []) as allocations:
        first = torch.zeros(3, 3)
        second = first + 1
    places, sources = graph._places([], [first, second, second.t()], allocations.nodes_before)
    assert [source.without for source in sources] == [set(), {0}]
    assert [None if place is None else place.form for place in places[:2]] == [None, None]
    assert places[2] is not None
    assert places[2].of([first, second]).stride() == (1, 3)


class Driver:
    """Stands for CUDA's: one node, of a kernel with parameters of these sizes, or a copy between these memories."""

    def __init__(self, kind: int, sizes: Sequence[int] = (), words: Sequence[int] = ()) -> None:
        self.kind, self.sizes, self.words = kind, sizes, words
        self.parameters = [(ctypes.c_char * size)() for size in sizes]
        self.pointers = (ctypes.c_void_p * max(1, len(sizes)))(*map(ctypes.addressof, self.parameters))

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        params._obj.func = 1
        params._obj.kernelParams = self.pointers
        return 0

    def cuGraphMemcpyNodeGetParams(self, node: Any, words: Any) -> int:
        words[: len(self.words)] = self.words
        return 0

    def cuPointerGetAttribute(self, found: Any, attribute: int, address: Any) -> int:
        found._obj.value = 1 if address.value == 77 else 2  # the host's, or the device's
        return 0


def node_of(monkeypatch: pytest.MonkeyPatch, fake: Driver) -> graph.Node:
    monkeypatch.setattr("mxep.runtime.driver.driver", lambda: fake)
    monkeypatch.setattr("mxep.runtime.driver._sizes_of_parameters", lambda params: fake.sizes)
    return graph.Node.of(1)


def test_of_a_tensor_map_only_the_first_word_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of(monkeypatch, Driver(0, (8, 128, 4, 24)))
    assert node.addresses == {0: True, 1: True, **dict.fromkeys(range(2, 17)), **dict.fromkeys(range(17, 21), False)}
    base = 0x7FCC_F000_0000  # of an argument over 0x7fcd00000000
    node.words[:6] = [7, base, 0, 0x8000046010, 0, 0x7FCD_0000_07FF]  # the map of 32718 x 2048
    patches, _ = graph._patches([node], [graph._Source.of_bytes(base, 1 << 30)], [], {base})
    assert [patch[1] for patch in patches] == [1]
    node.words[5] = 0x7FCD_0040_0000  # or of 32718 x 4194305; or an address, in 128 bytes of another structure
    for sources, temporaries in (
        ([graph._Source.of_bytes(base, 1 << 30)], []),
        ([], [graph._Source.of_bytes(base, 1 << 30)]),
    ):
        with pytest.raises(NotCaptured, match="two sizes of a tensor map"):
            graph._patches([node], sources, temporaries, {base})


@pytest.mark.parametrize("source", [1, 2, 3, 4])
@pytest.mark.parametrize("target", [1, 2, 3, 4])
@pytest.mark.parametrize("unified", [77, 88])
def test_a_copy_that_touches_the_host_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, source: int, target: int, unified: int
) -> None:
    words = [0] * 25
    words[4], words[6], words[15], words[17] = (5 << 32) + source, unified, target, 88
    fake = Driver(1, words=words)
    if all(kind == 2 or (kind == 4 and address == 88) for kind, address in ((source, unified), (target, 88))):
        assert node_of(monkeypatch, fake).addresses == {6: True, 17: True}
    else:
        with pytest.raises(NotCaptured, match="memory that is not the device's"):
            node_of(monkeypatch, fake)


def test_an_address_in_a_segment_of_the_pool_is_a_temporarys() -> None:
    first, second = temporaries = [graph._Source.of_bytes(1 << 21, 1 << 21), graph._Source.of_bytes(3 << 21, 1 << 20)]
    assert graph._temporary_of((1 << 21) + 8, temporaries, None) == first
    assert graph._temporary_of(3 << 21, temporaries, {3 << 21}) == second
    assert [graph._temporary_of(word, temporaries, None) for word in (0, 2 << 21, (3 << 21) + (1 << 20))] == [None] * 3


def test_small_segments_share_a_tensor_and_large_ones_have_their_own() -> None:
    small, large = 2 << 20, graph.SHARED + 1
    places, tensors = graph._laid_out([graph._Source.of_bytes(1 << 40, n) for n in (small, large, small, large)])
    assert places == [(2, 0), (0, 0), (2, small), (1, 0)]
    assert [each.form for each in tensors] == [(torch.uint8, (n,)) for n in (large, large, 2 * small)]
    assert graph._laid_out([]) == ([], [])


def test_a_temporarys_address_that_could_be_a_small_integer_is_not_guessed() -> None:
    boundary = 0x7FCD_0000_0000
    there = [graph._Source.of_bytes(boundary - 64, 1 << 30)]
    assert graph._temporary_of(boundary + 80, there, None) == there[0], "a parameter of 8 bytes has no gaps"
    assert graph._temporary_of(boundary + 80, there, {boundary + 80}) == there[0], "a tensor begins there"
    assert graph._temporary_of(boundary + graph.SMALL, there, set()) == there[0]
    with pytest.raises(NotCaptured, match="small integer"):
        graph._temporary_of(boundary + 80, there, set())


@pytest.mark.parametrize("shared", [0, 1 << 12], ids=["apart", "together"])
def test_a_launch_writes_where_its_arguments_results_and_temporaries_lie(
    monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    """A result in the second segment, where a temporary was before; node 9 is from then. No GPU: nothing runs."""
    x, first, second = torch.zeros(4), 1 << 40, 1 << 41
    result = graph._Source(second + 1024, second + 1040, (torch.float32, (4,)), {9})
    words = {1: [x.data_ptr() + 4, second + 1024, first + 64, 7], 9: [second + 1024, second + 8]}
    nodes = {i: graph.Node(i, 0, (ctypes.c_uint64 * 4)(*of), None, dict.fromkeys(range(len(of)), True))
             for i, of in words.items()}  # fmt: skip

    def captured(self: MovingGraph, *_: Any) -> Any:
        self._written, self._results, self._device = [], [graph._Place(1, None)], torch.device("cpu", 0)
        of_pool = [graph._Source.of_bytes(start, 1 << 12) for start in (first, 1 << 39, second)]
        return [extent(x), result], {x.data_ptr()}, of_pool

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuGraphLaunch=lambda *_: 0))
    monkeypatch.setattr(graph, "SHARED", shared)
    for name in ("driver", "call"):
        monkeypatch.setattr(graph, name, lambda *_: None)
    for name in ("relaxed", "capture_pool"):
        monkeypatch.setattr(graph, name, nullcontext)
    monkeypatch.setattr(graph, "nodes_of", lambda _: [1, 9])
    monkeypatch.setattr(graph.Node, "of", nodes.get)
    monkeypatch.setattr(graph.Node, "updater", lambda self, exec_: lambda: 0)
    monkeypatch.setattr(MovingGraph, "_capture", captured)
    moving, y, empty, there = MovingGraph(list, [x], nullcontext), torch.ones(4), torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *of, **how: there.append(empty(*of, **how)) or there[-1])
    for _ in range(2):
        there.clear()
        (made,) = moving.launch([y], [y.data_ptr()])
        assert made is not None
        argument, of_result, temporary, other = nodes[1].words
        assert (argument, of_result, other) == (y.data_ptr() + 4, made.data_ptr(), 7)
        assert [each.nbytes for each in there] == [16, 8192] if shared else [16, 4096, 4096], (
            "nobody is in the third segment"
        )
        one, two = there[1].data_ptr(), there[1].data_ptr() + 4096 if shared else there[2].data_ptr()
        assert temporary == one + 64
        assert list(nodes[9].words)[:2] == [two + 1024, two + 8]


def test_who_is_left_of_what_was_made_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "captured_nodes", lambda stream: set())
    x = torch.zeros(3)
    with graph._Allocations(0, [x]) as allocations:
        kept, gone = x + 1, x * 2
        del gone
    assert allocations.alive(()) == [kept.data_ptr()]
    assert allocations.alive({kept.untyped_storage()._cdata}) == []


def test_what_reads_from_the_device_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "captured_nodes", lambda stream: set())
    x = torch.ones(3)
    for function in (lambda: x.sum().item(), lambda: x[x > 0], x.clone().t_):
        with graph._Allocations(0, [x]), pytest.raises(NotCaptured, match="reads from the device, or changes"):
            function()


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def several(x: Tensor, y: Tensor) -> list[Any]:
    early = x * 2
    total = early.sum(0)
    del early  # whose memory a result may get
    late = torch.empty_like(x).copy_(y)
    zeros = torch.zeros(64, device="cuda")
    both = torch.cat([x, y])
    return [
        total,
        late,
        zeros + total.sum(),
        both[4:],
        x,
        None,
        y[1:],
        zeros,
        late.t(),
        x.max(1)[1],
        both.view(torch.int32),
    ]


def grouped(x: Tensor, y: Tensor) -> list[Any]:
    offs = torch.arange(1, 5, device="cuda", dtype=torch.int32) * 16
    a, w = x.bfloat16(), y.bfloat16().view(4, 16, 256)
    return [torch._grouped_mm(a, w.mT, offs), a, w]


def scans(x: Tensor, y: Tensor) -> list[Any]:
    return [torch.topk(x, 3)[0], x.cumsum(0), y.sort(1)[1], y.amax(0)]


def nested(x: Tensor, y: Tensor) -> list[Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = y * y
    a = x + 1
    torch.cuda.current_stream().wait_stream(side)
    return [a + z, z]


@needs_gpu
@pytest.mark.parametrize("function", [several, grouped, scans, nested])
def test_a_launch_computes_with_other_tensors(function: Callable[..., list[Any]]) -> None:
    def make() -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2, 64, 256, device="cuda")
        return x.clone(), y.clone()

    with torch.no_grad():
        first = make()
        function(*first)
        captured = MovingGraph(lambda: function(*first), first, nullcontext)
        kept = []
        for _ in range(4):
            given = make()
            garbage = torch.full((1 << 24,), 0xFF, dtype=torch.uint8, device="cuda")
            del garbage
            got = captured.launch(given, [x.data_ptr() for x in given])
            kept.append((given, got))
        for given, got in kept:
            for one, other in zip(got, function(*given), strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.stride() == other.stride() and torch.equal(one, other))


@needs_gpu
def test_a_copy_from_the_host_is_not_captured_and_one_of_the_device_is() -> None:
    x, there = torch.randn(64, device="cuda"), torch.ones(64, pin_memory=True)
    with torch.no_grad():
        with pytest.raises(NotCaptured, match="memory that is not the device's"):
            MovingGraph(lambda: [x + torch.empty_like(x).copy_(there, non_blocking=True)], [x], nullcontext)
        captured = MovingGraph(lambda: [torch.empty_like(x).copy_(x)], [x], nullcontext)
        y = torch.randn(64, device="cuda")
        (copied,) = captured.launch([y], [y.data_ptr()])
    assert copied is not None
    assert torch.equal(copied, y)


@needs_gpu
def test_memory_of_a_users_pool_is_not_the_graphs() -> None:
    @replayed
    def function(tensors: list[Any]) -> list[Any]:
        (x,) = tensors
        large = x * 2
        return [(large + 1).sum(0)]

    x, users = torch.randn(512, 1024, device="cuda"), torch.cuda.MemPool()
    with torch.no_grad(), torch.cuda.use_mem_pool(users):
        for _ in range(3):
            function([x])
        theirs = [torch.full((512, 1024), 7.0, device="cuda") for _ in range(8)]
        (got,) = function([x])
    assert torch.equal(got, (x * 2 + 1).sum(0))
    assert all((each == 7).all() for each in theirs)


@needs_gpu
def test_a_graph_has_memory_for_temporaries_only_while_it_is_launched() -> None:
    """Of functions whose launches take no structures, in which an address could be a small integer by chance."""
    x = torch.randn(1 << 14, 1 << 14, device="cuda", dtype=torch.bfloat16)
    quantize(x)  # which compiles
    torch.cuda.empty_cache()
    idle, reserved, temporary = idle_bytes(0), torch.cuda.memory_reserved(), x.numel()
    with torch.no_grad():
        captured = MovingGraph(lambda: [(quantize(x), quantize(x))[1].scale], [x], nullcontext)
    assert (idle_bytes(0), torch.cuda.memory_reserved()) == (idle, reserved)
    allocated = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        (got,) = captured.launch([x], [x.data_ptr()])
        most = torch.cuda.max_memory_allocated() - allocated
        assert 2 * temporary <= most < 2 * temporary + (64 << 20), "two of them, and what torch rounds up"
        del got
        assert torch.cuda.memory_allocated() == allocated


@needs_gpu
def test_what_a_launch_makes_for_itself_is_nobody_elses_in_another_launch() -> None:
    def function(x: Tensor) -> list[Any]:
        first = x * 2
        second = first + 1
        del first
        third = second * second
        del second
        return [third.cumsum(0) + third.sort(1)[0], third.amax(1)]

    given = [torch.randn(512, 1024, device="cuda") for _ in range(4)]
    with torch.no_grad():
        captured = MovingGraph(lambda: function(given[0]), [given[0]], nullcontext)
        others = []
        for x in given:
            got = captured.launch([x], [x.data_ptr()])
            others.append([torch.full((512, 1024), 7.0, device="cuda") for _ in range(6)])  # where temporaries were
            for one, other in zip(got, function(x), strict=True):
                assert torch.equal(one, other)
    assert all((each == 7).all() for of_launch in others for each in of_launch)


@needs_gpu
def test_a_result_with_memory_for_itself_takes_none_of_the_temporaries() -> None:
    x = torch.randn(1 << 22, device="cuda")
    with torch.no_grad():
        captured = MovingGraph(lambda: [x + 1, x * 2], [x], nullcontext)
        kept = MovingGraph(lambda: [(x + 1) * 2], [x], nullcontext)
    assert [shape for _, shape in captured._made] == [tuple(x.shape)] * 2
    (_, result), (_, temporary) = kept._made
    assert (result, x.nbytes <= temporary[0] < 2 * x.nbytes) == (tuple(x.shape), True)


@needs_gpu
def test_a_function_that_keeps_what_it_makes_is_not_captured() -> None:
    x, kept = torch.ones(4, device="cuda"), []

    def function() -> list[Any]:
        kept.append(x * 2)
        return [x + 1]

    with torch.no_grad(), pytest.raises(NotCaptured, match="keeps a tensor"):
        MovingGraph(function, [x], nullcontext)


@needs_gpu
def test_a_launch_tells_autograd_of_what_it_wrote_to() -> None:
    x, total = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    with torch.no_grad():
        captured = MovingGraph(lambda: [total.add_(x) * 1], [x, total], nullcontext)
        other = torch.zeros(8, device="cuda")
        before = other._version, x._version
        captured.launch([x, other], [x.data_ptr(), other.data_ptr()])
    assert other.tolist() == [1.0] * 8
    assert total.tolist() == [0.0] * 8
    assert (other._version, x._version) == (before[0] + 1, before[1])


@needs_gpu
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: [x * x.sum().item()], "reads from the device"),
        (lambda x: torch.cuda.current_stream().synchronize(), "error"),
    ],
)
def test_what_cannot_be_captured_leaves_no_trace(function: Callable[..., Any], why: str) -> None:
    x = torch.ones(4, device="cuda")
    with torch.no_grad(), pytest.raises(Exception, match=why):
        MovingGraph(lambda: function(x), [x], nullcontext)
    assert torch.randn(4, device="cuda").isfinite().all()
    with torch.no_grad():
        (y,) = MovingGraph(lambda: [x + 1], [x], nullcontext).launch([x], [x.data_ptr()])
    assert y.tolist() == [2.0] * 4
