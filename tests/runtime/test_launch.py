"""What the short key of a launch tells apart is what Triton compiles other kernels for."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from mxep.runtime import launch
from mxep.runtime.record import set_up


def facts(*args: Any) -> tuple[Any, ...]:
    return launch._reader(*map(type, args))(*args)[0]


def specialization(x: Any) -> str:
    """What Triton's own key has of an int."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    return str(native_specialize_impl(BaseBackend, x, False, True, True))


EDGES = (0, 2**31, 2**63, -(2**31))
INTS = [*(edge + more for edge in EDGES for more in (-16, -1, 0, 1)), 2, 15, 16, 17]


@pytest.mark.parametrize("one", INTS)
def test_ints_for_which_triton_compiles_other_kernels_have_other_keys(one: int) -> None:
    for other in INTS:
        if specialization(one) != specialization(other):
            assert facts(one) != facts(other), (one, other)


def test_tensors_of_another_dtype_or_alignment_have_other_keys() -> None:
    x = torch.zeros(64, dtype=torch.float32)
    first = -x.data_ptr() // 4 % 4
    aligned, other = x[first:], x[first + 1 :]
    assert facts(aligned) != facts(other)
    assert facts(aligned) == facts(x[first + 4 :])
    assert facts(aligned) != facts(aligned.view(torch.int32))
    assert facts(None) != facts(aligned)


def test_a_kernel_is_launched_as_it_was_compiled_for_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An int beyond int32 does not get the kernel that was compiled for a small one."""
    ran: list[tuple[str, tuple[Any, ...]]] = []

    class Compiled(launch.CompiledKernel):
        function, packed_metadata = 0, None

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, *args: Any) -> None:
            ran.append((self.name, args[9:]))

    class Kernel(JITFunction):
        arg_names = ("n", "BLOCK")

        def __init__(self) -> None:
            pass

        def __getitem__(self, grid: Any) -> Any:
            return lambda n, BLOCK: ran.append(("compiled", (n, BLOCK))) or Compiled(f"for {n}")

    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "is_profiled", lambda: False)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    kernel = Kernel()
    for n in (32, 64, 2**31, 2**31 + 16, 1):
        launch.launch(kernel, (1,), n, BLOCK=4)
    large = [("compiled", (2**31, 4)), (f"for {2**31}", (2**31 + 16, 4))]
    assert ran == [("compiled", (32, 4)), ("for 32", (64, 4)), *large, ("compiled", (1, 4))]


class Slow(JITFunction):
    """A kernel that compiles when it is told to."""

    params, arg_names = (), ()

    def __init__(self) -> None:
        self.may_end, self.order = threading.Event(), list[str]()

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> Any:
        assert self.may_end.wait(10)
        self.order.append(f"compiled in {threading.current_thread().name[:12]}")
        return SimpleNamespace(run=None)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self.order.append("launched")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    monkeypatch.setattr(launch, "_begin_thread", lambda _: None)
    monkeypatch.setattr(launch, "_ahead", {})


@pytest.mark.usefixtures("gpu")
def test_a_rehearsal_compiles_in_another_thread_and_the_first_launch_waits_for_it() -> None:
    kernel, x = Slow(), torch.zeros(4)
    with launch.rehearsal():
        launch.launch(kernel, (1,), x.to("meta"))
        launch.launch(kernel, (1,), x.to("meta"))
    assert kernel.order == []
    threading.Timer(0.05, kernel.may_end.set).start()
    launch.launch(kernel, (1,), x)
    assert kernel.order == ["compiled in mxep-compile", "launched"]
    assert not launch._ahead


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_could_not_be_compiled_ahead_is_launched_as_ever() -> None:
    class Fails(Slow):
        def warmup(self, *args: Any, grid: Any, **constants: Any) -> Any:
            raise RuntimeError("no compiler")

    kernel = Fails()
    with launch.rehearsal():
        launch.launch(kernel, (1,), torch.zeros(4, device="meta"))
    launch.launch(kernel, (1,), torch.zeros(4))
    assert kernel.order == ["launched"]


@pytest.mark.usefixtures("gpu")
def test_code_that_sets_something_up_launches_even_in_a_rehearsal() -> None:
    kernel = Slow()
    with launch.rehearsal(), set_up():
        launch.launch(kernel, (1,), torch.zeros(4))
    assert kernel.order == ["launched"]
