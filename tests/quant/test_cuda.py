"""Ops on a GPU: the same bytes as on the CPU, nothing that waits for the host, graphs, compile, tensors past 2^31."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import triton
from torch import Tensor

from host_sync import no_host_sync
from mxep.quant import (
    MXFormat,
    MXTensor,
    ScaleMode,
    fold,
    quantize,
    quantize_columns_with_amax,
    quantize_with_amax,
    requantize,
    swiglu_quantize,
)
from quant import exact
from quant.exact import FORMATS, MODES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TILES = (-2, -1)
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)
all_modes = pytest.mark.parametrize("mode", MODES)


def on_both(fn: Callable[[Tensor], MXTensor | Tensor], x: Tensor) -> None:
    """fn gives the same bytes on the GPU, and the host never waits for it."""
    on_gpu, want = x.cuda(), fn(x)
    with no_host_sync():
        got = fn(on_gpu)
    parts = [(got, want)]
    if isinstance(want, MXTensor):
        assert isinstance(got, MXTensor)
        assert got.axis == want.axis
        parts = [(got.qdata, want.qdata), (got.scale, want.scale)]
    for a, b in parts:
        assert a.device.type == "cuda"
        assert a.stride() == b.stride()
        assert torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def by_column(x: Tensor, **how: Any) -> MXTensor:
    """A scale a column, of the amax that quantizing the rows gave."""
    return quantize_columns_with_amax(x, quantize_with_amax(x, **how)[1], **how)


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
        on_both(lambda x: quantize(x, fmt=fmt, mode=mode, block_size=None), x)
        on_both(lambda x: quantize_with_amax(x, fmt=fmt, mode=mode)[0], x)
        on_both(lambda x: by_column(x, fmt=fmt, mode=mode), x)


@both_formats
@all_modes
def test_requantize_has_the_same_bytes_on_a_gpu(fmt: MXFormat, mode: ScaleMode) -> None:
    for x in inputs():
        on_both(lambda x: requantize(quantize(x, fmt=fmt), mode=mode), x)


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
        lambda x: requantize(indexed(x)),
        lambda x: requantize(indexed(x), offs=torch.full((1,), 32, dtype=torch.int32, device=x.device)),
    ],
)
def test_the_rest_has_the_same_bytes_on_a_gpu(fn: Callable[[Tensor], MXTensor | Tensor]) -> None:
    on_both(fn, inputs()[-1])


def test_a_step_of_quantization_is_captured_in_a_graph_and_replayed() -> None:
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16)
    requantize(quantize(x)).dequantize()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = requantize(quantize(x)).dequantize()
    x.copy_(torch.randn(64, 96, device="cuda", dtype=torch.bfloat16))
    graph.replay()
    assert torch.equal(out, requantize(quantize(x)).dequantize())


def test_it_moves_to_a_gpu_and_back() -> None:
    mx = indexed(torch.randn(64, 96, dtype=torch.bfloat16))
    there = mx.to("cuda")
    assert there.device.type == there.scale.device.type == there.row_index.device.type == "cuda"
    assert torch.equal(there.cpu().dequantize(), mx.dequantize())
    assert torch.equal(there.dequantize().cpu(), mx.dequantize())


def test_one_compiled_graph_serves_every_row_count() -> None:
    def step(x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        h = swiglu_quantize(x, weight, offs=ends)
        folded, transposed = fold(h, offs=ends), requantize(h, offs=ends)
        rows, columns = quantize(x), quantize(x, axis=-2)
        return tuple(part for mx in (h, folded, transposed, rows, columns) for part in (mx.qdata, mx.scale))

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    compiled_once = 0
    for rows in (64, 96, 160):
        x, weight = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16), torch.rand(rows, device="cuda")
        ends = torch.tensor([32, rows], dtype=torch.int32, device="cuda")
        for got, want in zip(compiled(x, weight, ends), step(x, weight, ends)):
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        compiled_once = compiled_once or counter.frame_count  # 2: floats made it start again
        assert counter.frame_count == compiled_once


def test_a_new_row_count_compiles_no_kernel_again() -> None:
    def step(rows: int) -> None:
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        ends = torch.tensor([32, rows], dtype=torch.int32, device="cuda")
        h = swiglu_quantize(x, torch.rand(rows, device="cuda"), offs=ends)
        fold(h, offs=ends)
        requantize(quantize(x), offs=ends)
        quantize(x, axis=-2)

    step(64)
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **kwargs: compiled.append(kwargs["repr"])
    try:
        for rows in (96, 160, 416, 1056):
            step(rows)
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    assert compiled == []


@pytest.mark.parametrize("axis", [-1, -2, TILES], ids=str)
def test_more_elements_than_31_bits_count(axis: int) -> None:
    x = torch.empty(1 << 19, 1 << 12, device="cuda", dtype=torch.bfloat16).normal_()
    x = torch.cat([x, x[:64]])  # 2^31 and a bit
    assert x.numel() > 1 << 31
    mx, tail = quantize(x, axis=axis), quantize(x[-64:], axis=axis)
    last = mx[-64:]
    for got, want in ((last.qdata, tail.qdata), (last.scale, tail.scale)):  # type: ignore[attr-defined]
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    first = quantize(x[:64], axis=axis)
    assert torch.equal(mx[:64].qdata.contiguous().view(torch.uint8), first.qdata.contiguous().view(torch.uint8))  # type: ignore[attr-defined]


def test_whole_rows_and_columns_of_more_elements_than_31_bits_count() -> None:
    """A later batch is beyond 2^31; weights of two models' sizes keep every byte."""
    for shape in ((513, 1024, 4096), (2, 4096, 7168), (3, 7168, 2048)):
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
        for got, axis in ((quantize_with_amax(x)[0], -1), (by_column(x), -2)):
            for batch in (0, -1):
                want = quantize(x[batch], axis=axis, block_size=None)
                for one, other in ((got.qdata[batch], want.qdata), (got.scale[batch], want.scale)):
                    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
