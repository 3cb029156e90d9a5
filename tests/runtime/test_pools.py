"""The memory of captures goes back to the device, and nothing of it ends the process.

What could, runs in a process of its own: torch aborts, and does not raise.
"""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mxep.runtime import pools
from mxep.runtime.driver import NotCapturedNow
from mxep.runtime.graph import MovingGraph
from mxep.runtime.replay import Replayed, replayed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Allocator:
    """Torch's bookkeeping of pools, as far as captures use it. Raises where torch would end the process or assert.

    cached: segments that nobody uses. theirs: a user's pool that goes before ours.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uses: dict[Any, int] = {}
        self.open: list[Any] = []
        self.segments: list[dict[str, Any]] = []
        self.theirs: Any = None
        self.emptied = self.address = 0
        for name, function in {
            "_cuda_beginAllocateCurrentThreadToPool": self.begin,
            "_cuda_endAllocateToPool": lambda index, pool: self.open.remove(pool),
            "_cuda_releasePool": self.release,
        }.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)
        monkeypatch.setattr(pools, "_pools", set())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(self.uses) + 1))
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: list(self.segments))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(data_ptr=lambda: self.allocate(1 << 21)))

    def begin(self, index: int, pool: Any) -> None:
        assert self.uses.get(pool) != 0, "a pool that was released is gone"
        self.uses[pool] = self.uses.get(pool, 0) + 1
        self.open.append(pool)

    def release(self, index: int, pool: Any) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0

    def allocate(self, nbytes: int, allocated: int = 0) -> int:
        self.address += 1 << 32
        pool = self.theirs or self.open[0]
        sizes = {"total_size": nbytes, "allocated_size": allocated}
        self.segments += [{"address": self.address, "segment_pool_id": pool, "device": 0, **sizes}]
        return self.address

    def empty_cache(self) -> None:
        assert self.open, "while a pool is in use the rest stays cached"
        assert not gc.isenabled()
        self.emptied += 1
        used = (each for each in self.segments if each["allocated_size"] or self.uses.get(each["segment_pool_id"]))
        self.segments = [*used]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_behind_a_capture_its_memory_is_the_devices(allocator: Allocator) -> None:
    for _ in range(2):
        with pools.capture_pool(0) as pool:
            assert not gc.isenabled()
            allocator.allocate(1 << 30)
            assert [nbytes for _, nbytes in pools.scratch()] == [1 << 21, 1 << 30]
            assert [each["segment_pool_id"] for each in allocator.segments] == [pool] * 2
        assert (allocator.segments, allocator.open, {*allocator.uses.values()}) == ([], [], {0})
        assert gc.isenabled()


def test_a_capture_that_fails_leaves_no_memory_either(allocator: Allocator) -> None:
    with pytest.raises(ValueError, match="its own"), pools.capture_pool(0):
        raise ValueError("its own")
    assert (allocator.segments, allocator.open, gc.isenabled()) == ([], [], True)


def test_where_another_pool_goes_before_nothing_is_captured_and_nothing_freed(allocator: Allocator) -> None:
    allocator.theirs = 0, 99
    with pytest.raises(NotCapturedNow, match="another pool"), pools.capture_pool(0):
        raise AssertionError("is not reached")
    assert (allocator.emptied, allocator.open, gc.isenabled()) == (0, [], True)
    assert {*allocator.uses.values()} == {0}


def test_what_a_library_keeps_is_scratch_memory_of_later_captures_as_long_as_it_is_there(allocator: Allocator) -> None:
    with pools.capture_pool(0):
        workspace = allocator.allocate(1 << 25, allocated=1 << 25)
    with pools.capture_pool(0):
        assert (workspace, 1 << 25) in pools.scratch()
    allocator.segments = []  # cleared
    with pools.capture_pool(0) as pool:
        assert [nbytes for _, nbytes in pools.scratch()] == [1 << 21]
        assert pools._pools == {pool}


def test_a_tensor_that_a_function_keeps_is_no_scratch_memory(allocator: Allocator) -> None:
    with pools.capture_pool(0) as pool:
        kept = allocator.allocate(1 << 25, allocated=1 << 25)
        pools.forget(pool)
    with pools.capture_pool(0):
        assert kept not in dict(pools.scratch())


def test_garbage_is_left_to_who_has_paused_its_collection(allocator: Allocator) -> None:
    gc.disable()
    try:
        with pools.capture_pool(0):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def function_of(weight: Tensor | None = None) -> Replayed:
    """A function with temporaries of 2 and 4 MiB; with a weight also one that takes a workspace of cuBLAS."""

    def function(tensors: list[Any]) -> list[Any]:
        (x,) = tensors
        large = torch.cat([x, x]) * 2
        return [(large + 1).sum(0) if weight is None else (large @ weight).sum(0)]

    return replayed(function)


def check(function: Replayed, times: int = 1) -> None:
    for _ in range(times):
        x = torch.randn(512, 1024, device="cuda")
        with torch.no_grad():
            (got,) = function([x])
            (wanted,) = function.function([x])
        assert torch.equal(got, wanted)


def warm() -> Replayed:
    function = function_of()
    check(function, 3)
    assert (function.replays, function.refused) == (2, [])
    return function


def a_graph_goes_while_a_user_captures() -> None:
    function, captured, x = warm(), torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    cycle = [function]
    cycle.append(cycle)  # type: ignore[arg-type]
    with torch.cuda.graph(captured):
        y = x * 2
        del function, cycle
        gc.collect()
        y = y + 1
    captured.replay()
    assert y.tolist() == [3.0] * 4
    warm()


def a_step_is_captured_while_graphs_are_warm() -> None:
    function, captured, x = warm(), torch.cuda.CUDAGraph(), torch.randn(512, 1024, device="cuda")
    with torch.no_grad(), torch.cuda.graph(captured):
        (y,) = function([x])
    for _ in range(3):
        check(function)
        x.normal_()
        captured.replay()
        assert torch.equal(y, function.function([x])[0])


def a_users_pool_is_in_use() -> None:
    function, users = warm(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(users):
        del function
        gc.collect()
        other = function_of()
        check(other, 4)
        assert other.refused == []
        before = other.replays  # none, where torch lets the user's pool go before that of a capture
    check(other, 2)
    assert other.replays == before + 2


def a_users_pool_is_in_use_in_another_thread() -> None:
    opened, done = threading.Event(), threading.Event()

    def other() -> None:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            x = torch.ones(1 << 20, device="cuda")
            opened.set()
            done.wait(60)
            del x

    thread = threading.Thread(target=other)
    thread.start()
    assert opened.wait(60)
    warm()
    gc.collect()
    warm()
    done.set()
    thread.join()


def another_thread_captures() -> None:
    opened, done, captured = threading.Event(), threading.Event(), torch.cuda.CUDAGraph()
    function, x = warm(), torch.ones(4, device="cuda")
    check(late := function_of(), 1)
    results = []

    def other() -> None:
        # In mode "global" a launch of any of our graphs ends the capture, too.
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            results.append(x * 2)
            opened.set()
            done.wait(60)
            results.append(results[0] + 1)

    thread, given = threading.Thread(target=other), torch.randn(512, 1024, device="cuda")
    torch.cuda.synchronize()
    thread.start()
    assert opened.wait(60)
    with torch.no_grad():
        got = [late([given])[0], function([given])[0]]
    function = None  # type: ignore[assignment]
    gc.collect()
    done.set()
    thread.join()
    captured.replay()
    assert results[1].tolist() == [3.0] * 4
    assert late.replays == 1
    assert torch.equal(*got)


def two_threads_capture() -> None:
    failed: list[Exception] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    warm()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def a_users_pool_is_garbage_when_a_capture_begins() -> None:
    def function(tensors: list[Any]) -> list[Any]:
        y = tensors[0] + 1
        made = [[i] for i in range(100_000)]  # for which garbage is collected
        return [y * len(made)]

    busy = replayed(function)
    check(busy)
    gc.collect()
    cycle: list[Any] = [torch.cuda.MemPool()]
    cycle.append(cycle)
    del cycle
    check(busy)
    assert busy.replays == 1


def memory_waits_for_another_stream() -> None:
    side, x = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")
    check(function := function_of())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 28)
        x.add_(1)
    x.record_stream(side)
    del x
    check(function, 2)
    assert (function.replays, function.refused) == (2, [])
    torch.cuda.synchronize()
    warm()


def workspaces_are_cleared() -> None:
    """The first capture makes a workspace, and the later ones find it."""
    functions = [function_of(torch.randn(1024, 1024 - 8 * i, device="cuda")) for i in range(3)]
    for function in functions:
        check(function, 3)
        assert (function.replays, function.refused) == (2, [])
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    held = [torch.full((1 << 23,), 7.0, device="cuda") for _ in range(8)]
    for function in functions:
        check(function, 3)
    assert all((each == 7).all() for each in held)
    check(late := function_of(torch.randn(1024, 512, device="cuda")), 4)
    assert late.replays == 3


def a_compilers_graphs_are_recorded() -> None:
    function, weight = warm(), torch.randn(1024, 1024, device="cuda")
    step = torch.compile(lambda x: torch.relu(x @ weight) + 1, mode="reduce-overhead")
    with torch.no_grad():
        for i in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            y = step(x := torch.randn(512, 1024, device="cuda")).clone()
            check(function)
            check(function_of(weight), 1 + i % 3)
            gc.collect()
            assert torch.allclose(y, torch.relu(x @ weight) + 1, atol=1e-2, rtol=1e-2)


def the_process_ends_in_a_users_pool() -> None:
    globals()["kept"] = warm()
    opened = threading.Event()

    def other() -> None:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            opened.set()
            threading.Event().wait()

    threading.Thread(target=other, daemon=True).start()
    assert opened.wait(60)


def the_process_ends_with_graphs_in_a_cycle() -> None:
    function = warm()
    globals()["kept"] = cycle = [function]
    cycle.append(cycle)  # type: ignore[arg-type]


HAZARDS: list[Callable[[], None]] = [
    a_graph_goes_while_a_user_captures,
    a_step_is_captured_while_graphs_are_warm,
    a_users_pool_is_in_use,
    a_users_pool_is_in_use_in_another_thread,
    another_thread_captures,
    two_threads_capture,
    a_users_pool_is_garbage_when_a_capture_begins,
    memory_waits_for_another_stream,
    workspaces_are_cleared,
    a_compilers_graphs_are_recorded,
    the_process_ends_in_a_users_pool,
    the_process_ends_with_graphs_in_a_cycle,
]


@needs_gpu
@pytest.mark.parametrize("hazard", [each.__name__ for each in HAZARDS])
def test_the_process_goes_on_where(hazard: str) -> None:
    ran = subprocess.run([sys.executable, __file__, hazard], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-4000:]
    assert "Exception ignored" not in ran.stderr, ran.stderr[-4000:]
    assert "passed" in ran.stdout


@needs_gpu
@pytest.mark.skipif(torch.__version__ >= "2.12", reason="torch empties its own cache, too")
def test_a_capture_leaves_what_others_have_cached() -> None:
    x = torch.randn(512, 1024, device="cuda")
    cached = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del cached
    with torch.no_grad():
        function_of().function([x])
        reserved = torch.cuda.memory_reserved()
        assert MovingGraph(lambda: [(x * 2 + 1).sum(0)], [x], nullcontext).launch([x], [x.data_ptr()])
    assert torch.cuda.memory_reserved() == reserved


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("passed", flush=True)
