"""Records as CUDA graphs: what their nodes are, and that nobody notices: needs a GPU."""

import ctypes
import functools
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.ep import MoE
from mxep.ep.dispatchers import LocalDispatcher
from mxep.runtime import graph
from mxep.runtime.graph import RELAXED, KernelParams, Player, call, driver, relaxed
from mxep.runtime.record import Launch, Recorder
from mxep.runtime.replay import no_replays, replayed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
T, DIM, HIDDEN_DIM, EXPERTS, TOP_K = 200, 256, 128, 8, 2


def make_layer(recipe: str = "mxfp8") -> MoE:
    torch.manual_seed(0)
    return MoE(DIM, HIDDEN_DIM, EXPERTS, TOP_K, recipe=recipe, dispatcher="local", device="cuda")


def run(layer: MoE, x: Tensor, d_out: Tensor) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out = layer(x)
    out.backward(d_out)
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]  # type: ignore[list-item, union-attr]


def batch(tokens: int = T) -> Tensor:
    return torch.randn(2, tokens, DIM, device="cuda", dtype=torch.bfloat16)


def sizes_of(params: KernelParams) -> list[int]:
    """Bytes of a kernel's parameters, as the driver knows them."""
    sizes, offset, size = list[int](), ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        at = ctypes.c_size_t(len(sizes))
        if driver().cuFuncGetParamInfo(ctypes.c_void_p(params.func), at, ctypes.byref(offset), ctypes.byref(size)):
            return sizes
        sizes.append(size.value)


def kernels_of(handle: ctypes.c_void_p) -> list[tuple[Any, ...]]:
    """Of each kernel of a graph, in order of its function: grid, block, shared memory, and its parameters' bytes."""
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    found = []
    for node in nodes:
        kind = ctypes.c_int()
        call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == 0:
            params = KernelParams()
            call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
            values = [ctypes.string_at(params.kernelParams[i], size) for i, size in enumerate(sizes_of(params))]
            sizes = [getattr(params, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ"]
            found.append((params.func, *sizes, params.sharedMemBytes, values))
    return found


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32", "mxfp8_e5m2", "fp8", "mxfp8_gate_up_fp8"])
def test_nodes_have_the_parameters_that_tritons_launcher_passes(recipe: str) -> None:
    """Each kernel of a layer's record, and the same one captured as Triton launches it."""
    layer, checked = make_layer(recipe), 0
    for _ in range(2):
        run(layer, *batch())
    records = [kind.record for each in layer.dispatcher.passes.values() for kind in each._kinds.values()]
    assert len(records) == 2
    memory = torch.zeros(1 << 25, dtype=torch.uint8, device="cuda")  # stands for all that moves
    for record in records:
        held = [*[memory] * (record.given + len(record.made)), T]
        for step in record.steps:
            if not isinstance(what := step.what, Launch):
                continue
            alone = [step._replace(after=frozenset())]
            work, called = graph._Graph(alone, [0], record, {}), graph._Called(alone, record, {})
            work._build([memory.data_ptr()] * (len(held) - 1) + [T])
            args = [graph.for_triton(called._getter(x)(held)) for x in what.args]
            captured, stream = ctypes.c_void_p(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                handle = ctypes.c_void_p(stream.cuda_stream)
                call("cuStreamBeginCapture_v2", handle, ctypes.c_int(RELAXED))
                what.kernel[what.grid](*args, **what.constants)
                call("cuStreamEndCapture", handle, ctypes.byref(captured))
            (ours,), (theirs,) = kernels_of(work._graph), kernels_of(captured)
            assert ours == theirs, what.kernel
            checked += 1
            driver().cuGraphDestroy(captured)
    assert checked >= 25


def test_another_thread_that_synchronizes_gets_no_error() -> None:
    layer, errors, stop = make_layer(), [], threading.Event()

    def synchronize() -> None:
        while not stop.is_set():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=synchronize)
    thread.start()
    try:
        for tokens in range(100, 140, 4):
            for _ in range(3):
                run(layer, *batch(tokens))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert all(each.replays for each in layer.dispatcher.passes.values())


def test_a_users_pool_and_recorded_memory_history_leave_replays_on() -> None:
    layer, pool = make_layer(), torch.cuda.MemPool()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        given = batch()
        with torch.cuda.use_mem_pool(pool):
            got = [run(layer, *given) for _ in range(4)]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert [each.replays for each in layer.dispatcher.passes.values()] == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(got[0], got[-1]))
    del got, given
    gc.collect()


@pytest.mark.parametrize("setting", ["backend:cudaMallocAsync", "expandable_segments:True"])
def test_other_allocators_replay(setting: str) -> None:
    program = f"""
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = {setting!r}
import torch
from mxep.ep import MoE
layer = MoE(256, 128, 8, 2, recipe="mxfp8", dispatcher="local", device="cuda")
x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
def step():
    layer.zero_grad()
    layer(x).float().pow(2).sum().backward()
    return [p.grad.clone() for p in layer.parameters()]
got = [step() for _ in range(4)]
assert [each.replays for each in layer.dispatcher.passes.values()] == [2, 2]
assert all(torch.equal(a, b) for a, b in zip(got[0], got[3]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_threads_and_streams_play_one_layer(recipe: str) -> None:
    layer, streams = make_layer(recipe), [torch.cuda.Stream() for _ in range(2)]
    batches = [batch(T - 8 * (i % 2)) for i in range(6)]
    with no_replays(), torch.no_grad():
        wanted = [layer(x) for x, _ in batches]
    torch.cuda.synchronize()
    wrong = []

    def work(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(40):
                for (x, _), want in zip(batches, wanted):
                    if not torch.equal(layer(x), want):
                        wrong.append(stream)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (*streams, streams[0])]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert next(iter(layer.dispatcher.passes.values())).replays > 600


def test_a_play_takes_no_more_memory_than_the_function() -> None:
    torch.manual_seed(0)
    layer = MoE(1024, 512, 16, 4, recipe="mxfp8", dispatcher=LocalDispatcher(16), device="cuda")
    x, d_out = torch.randn(2, 8192, 1024, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for context in (no_replays, torch.enable_grad):
        with context():
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                run(layer, x, d_out)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.02 * peaks[0], peaks


def test_a_users_capture_on_another_thread_survives_a_first_play() -> None:
    """In torch's strictest mode, which other threads' forbidden calls end."""
    layer, started, done = make_layer(), threading.Event(), threading.Event()
    static = torch.zeros(4, device="cuda")
    x, d_out = batch()
    for _ in range(2):
        run(layer, x, d_out)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            captured.capture_begin(capture_error_mode="global")
            static.add_(1)
            started.set()
            done.wait(60)
            captured.capture_end()

    thread = threading.Thread(target=capture)
    memory = torch.empty(1 << 25, dtype=torch.uint8, device="cuda")
    thread.start()
    started.wait(60)
    with torch.no_grad():
        player = [Player(kind.record, x.device) for p in layer.dispatcher.passes.values() for kind in p._kinds.values()]
        work = player[0]._pieces[0].work
        with relaxed():
            work._build([memory.data_ptr()] * player[0]._bases)
        del work, player
        gc.collect()
    done.set()
    thread.join()
    captured.replay()
    assert static.tolist() == [1.0] * 4


def test_a_launch_updates_only_the_nodes_whose_memory_moved() -> None:
    @replayed
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x).copy_(x), torch.empty_like(y).copy_(y)

    x, y, other = torch.randn(3, 1 << 20, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            function(x, y)
        (kind,) = function._kinds.values()
        work, updated = kind.player._pieces[0].work, []

        def counted(node: int, update: Callable[[], int]) -> int:
            updated.append(node)
            return update()

        work._updates = {node: functools.partial(counted, node, each) for node, each in work._updates.items()}
        for given, moved in (((x, y), []), ((x, other), [1]), ((x, other), []), ((other, y), [0, 1])):
            for wanted, got in zip(given, function(*given)):
                assert torch.equal(got, wanted)
            del wanted, got
            assert updated == moved
            updated.clear()


def test_kernels_on_two_streams_keep_their_order_in_the_graph() -> None:
    """A side stream that waits and is waited for, as an exchange's: an edge each, and the slab follows them."""
    from mxep.runtime.record import record_event, wait_event

    side, begun, ended = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    @replayed
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        main = torch.cuda.current_stream()
        first = torch.empty_like(x).copy_(x)
        record_event(begun, main)
        with torch.cuda.stream(side):
            wait_event(side, begun)
            aside = torch.empty_like(x).copy_(first)
            record_event(ended, side)
        beside = torch.empty_like(x).copy_(first)
        wait_event(main, ended)
        return torch.empty_like(x).copy_(aside), torch.empty_like(x).copy_(beside)

    with torch.no_grad():
        for i in range(5):
            x = torch.randn(1 << 20, device="cuda")
            for got in function(x):
                assert torch.equal(got, x)
            if i == 1:
                (kind,) = function._kinds.values()
                assert [sorted(step.after) for step in kind.record.steps] == [[], [0], [0], [1, 2], [3]]
    assert function.replays == 3


def test_a_kernel_that_torch_launches_is_called_again() -> None:
    with torch.no_grad(), Recorder([x := torch.randn(4, 4, device="cuda")]) as recorder:
        y = x @ x
    found = recorder.finish([y])
    assert found is not None
    (got,) = Player(found, x.device).play([2 * x], [0])
    assert got is not None
    torch.testing.assert_close(got, 4 * (x @ x))
