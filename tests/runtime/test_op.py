"""`@op` and `launch`: what calls a kernel without the dispatcher's and Triton's cost does what they would have done."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.runtime.launch import launch
from mxep.runtime.op import op

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@op("mxep_test::times", fake=lambda x, factor: x.new_empty(x.shape))
def times(x: Tensor, factor: int) -> Tensor:
    """x * factor"""
    return x * factor


@op("mxep_test::put", fake=lambda x, to: None, mutates_args=("to",))
def put(x: Tensor, to: Tensor) -> None:
    to.copy_(x)


@op("mxep_test::pick", fake=lambda x, index: x.new_empty(x.shape), launcher="nowhere:pick")
def pick(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


@triton.jit
def times_kernel(x_ptr, y_ptr, extra_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + i, mask=i < n) * factor
    if extra_ptr is not None:
        y += tl.load(extra_ptr + i, mask=i < n)
    tl.store(y_ptr + i, y, mask=i < n)


def test_plain_tensors_call_the_reference_and_all_else_the_op() -> None:
    x = torch.arange(4.0)
    called: list[Tensor] = []
    plain, times.reference = times.reference, lambda x, factor: called.append(x) or plain(x, factor)
    try:
        assert torch.equal(times(x, 3), x * 3)
        assert len(called) == 1
        with torch.no_grad():
            times(torch.nn.Parameter(x), 3)
        assert len(called) == 2
        with torch.enable_grad():
            assert "mxep_test_times" in str(times(x.clone().requires_grad_(), 3).grad_fn)
        with torch._subclasses.FakeTensorMode() as mode:
            assert times(mode.from_tensor(x), 3).shape == (4,)
        assert len(called) == 2
    finally:
        times.reference = plain


def test_tensors_of_two_devices_reach_no_kernel() -> None:
    """Kernels get addresses: the host's would be an illegal access, after which the process has no device."""
    with torch._subclasses.FakeTensorMode():
        x, index = torch.empty(4, 32, device="cuda:0"), torch.empty(4, dtype=torch.int32)
    for args in ((x, index), (index, x)):
        with pytest.raises(ValueError, match=r"got device (cpu|cuda:0), want one for all tensors"):
            pick._launch(*args)


def test_an_op_is_one_node_of_a_graph() -> None:
    x = torch.arange(4.0)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: times(x, 2) + 1, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), x * 2 + 1)
    assert "mxep_test.times" in graphs[0].code


def test_what_an_op_writes_is_written() -> None:
    to = torch.zeros(4)
    put(torch.ones(4), to)
    assert to.tolist() == [1.0] * 4
    torch.library.opcheck(put.opdef, (torch.ones(4), torch.zeros(4)))
    torch.library.opcheck(times.opdef, (torch.ones(4), 3))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_launch_is_the_launch_of_triton_whatever_it_specializes_for(device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("not interpreted")
    wide = torch.randn(3, 4096, device=device)
    for _ in range(2):  # compiled, then found
        for first, n, factor, extra in (
            (0, 4000, 3, None),
            (1, 4001, 1, wide[1]),
            (0, 4096, 16, wide[2]),
            (3, 17, -5, None),
        ):
            y = torch.full((4096,), float("nan"), device=device)
            x = wide[0, first:]
            count = min(n, len(x))
            launch(times_kernel, (16,), x, y, extra, count, factor, BLOCK=256, num_warps=4)
            wanted = x[:count] * factor + (0 if extra is None else extra[:count])
            torch.testing.assert_close(y[:count], wanted)
            assert y[count:].isnan().all()


def test_an_op_with_a_default_is_refused() -> None:
    """torch drops arguments that equal their default, and places would no longer say which is which."""
    with pytest.raises(AssertionError, match="torch leaves out what has its default"):

        @op("mxep_test::with_default", fake=lambda x, factor: x.new_empty(x.shape))
        def with_default(x: Tensor, factor: int = 2) -> Tensor:
            return x * factor
