"""The plain-torch references on a GPU: the same bytes as on the CPU, and nothing that waits for the host."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mxep.quant import MXFormat, MXTensor, ScaleMode, quantize, quantize_both, requantize
from quant import exact
from quant.exact import FORMATS, MODES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TILES = (-2, -1)
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)
all_modes = pytest.mark.parametrize("mode", MODES)


def on_both(fn: Callable[[Tensor], MXTensor | Tensor], x: Tensor) -> None:
    """fn gives the same bytes on the GPU, and the host never waits for it."""
    on_gpu, want = x.cuda(), fn(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = fn(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = [(got, want)]
    if isinstance(want, MXTensor):
        assert isinstance(got, MXTensor)
        assert got.axis == want.axis
        parts = [(got.qdata, want.qdata), (got.scale, want.scale)]
    for a, b in parts:
        assert a.device.type == "cuda"
        assert a.stride() == b.stride()
        assert torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    hostile = exact.hostile_rows()
    bits = torch.randint(-(2**31), 2**31, (256, 64), generator=generator).int()
    return [
        torch.nn.functional.pad(hostile, (0, 0, 0, -len(hostile) % 32)),
        bits.view(torch.float32),
        (bits >> 16).short().view(torch.bfloat16),
        torch.randn(64, 96, generator=generator, dtype=torch.bfloat16),
    ]


@both_formats
@all_modes
def test_quantize_has_the_same_bytes_on_a_gpu(fmt: MXFormat, mode: ScaleMode) -> None:
    for x in inputs():
        for axis in (-1, -2, TILES):
            on_both(lambda x, axis=axis: quantize(x, fmt=fmt, mode=mode, axis=axis), x)
        on_both(lambda x: quantize(x, fmt=fmt, mode=mode, block=None), x)
        on_both(lambda x: quantize_both(x, fmt=fmt, mode=mode)[1], x)


@both_formats
@all_modes
def test_requantize_has_the_same_bytes_on_a_gpu(fmt: MXFormat, mode: ScaleMode) -> None:
    for x in inputs():
        for axis in (-1, -2):
            on_both(lambda x, axis=axis: requantize(quantize(x, fmt=fmt), axis=axis, mode=mode), x)


def indexed(x: Tensor) -> MXTensor:
    mx = quantize(x)
    index = torch.arange(-1, 31, dtype=torch.int32, device=x.device)
    return MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=index)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: quantize(x).dequantize(),
        lambda x: quantize(x, axis=TILES).along(-2).materialize(),
        lambda x: indexed(x).materialize(),
        lambda x: indexed(x).dequantize(torch.float32),
        lambda x: requantize(indexed(x), axis=-2),
        lambda x: requantize(indexed(x), axis=-2, group_ends=torch.full((1,), 32, dtype=torch.int32, device=x.device)),
    ],
)
def test_the_rest_has_the_same_bytes_on_a_gpu(fn: Callable[[Tensor], MXTensor | Tensor]) -> None:
    on_both(fn, inputs()[-1])


def test_a_step_of_quantization_is_captured_in_a_graph_and_replayed() -> None:
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16)
    requantize(quantize(x), axis=-2).dequantize()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = requantize(quantize(x), axis=-2).dequantize()
    x.copy_(torch.randn(64, 96, device="cuda", dtype=torch.bfloat16))
    graph.replay()
    assert torch.equal(out, requantize(quantize(x), axis=-2).dequantize())


def test_it_moves_to_a_gpu_and_back() -> None:
    mx = indexed(torch.randn(64, 96, dtype=torch.bfloat16))
    there = mx.to("cuda")
    assert there.device.type == there.scale.device.type == there.row_index.device.type == "cuda"
    assert torch.equal(there.cpu().dequantize(), mx.dequantize())
    assert torch.equal(there.dequantize().cpu(), mx.dequantize())
