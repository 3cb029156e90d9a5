"""Ops on a GPU: the CPU's bytes, nothing that waits for the host, graphs, compile, tensors past 2^31.

Kernels by themselves, in every format and mode: the test_*_kernels.py beside this file, which a GPU runs too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from host_sync import no_host_sync
from mxep.quant import (
    E4M3,
    E5M2,
    MXTensor,
    SwiGLU,
    fold,
    fold_for_wgrad,
    fold_with_stats,
    group_sums,
    pad_groups,
    quantize,
    quantize_columns_with_amax,
    quantize_with_amax,
    requantize,
    scale_columns,
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
    swizzle_scales,
    unpad_groups,
)
from mxep.quant.activation import sigmoid_pair
from quant import exact
from quant.exact import parts
from quant.inputs import gaussian

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

TILES = (-2, -1)
ROWS, LIVE = 160, 96
ENDS = torch.tensor([32, 32, 96], dtype=torch.int32)


def row_scaled(seed: int, width: int, **how: Any) -> MXTensor:
    return quantize(gaussian(ROWS, width, seed=seed) * torch.logspace(-5, 5, ROWS)[:, None], block_size=None, **how)


def valid(part: Tensor) -> Tensor:
    """What may be looked at: rows (or, for the transposed results of fold_for_wgrad, columns) of the groups."""
    if part.ndim and part.shape[0] == ROWS:
        part = part[:LIVE]
    elif part.ndim == 2 and part.shape[1] == ROWS:
        part = part[:, :LIVE]
    return part.flatten().view(torch.uint8).cpu()


def by_column(x: Tensor, **how: Any) -> MXTensor:
    """A scale a column, of the amax that quantizing the rows gave."""
    return quantize_columns_with_amax(x, quantize_with_amax(x, **how)[1], **how)


hostile = exact.hostile_rows()
hostile = torch.nn.functional.pad(hostile, (0, 0, 0, -len(hostile) % 32))
x = gaussian(ROWS, 256) * torch.logspace(-6, 6, 256)
gate_up, weight, d_h = (
    gaussian(ROWS, 256).bfloat16() * 8,
    gaussian(ROWS, seed=1),
    gaussian(ROWS, 128, seed=2).bfloat16(),
)
index = torch.randint(-1, ROWS, (ROWS,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
qdata = quantize(x)
indexed = MXTensor.from_qdata_and_scales(qdata.qdata, qdata.scale, row_index=index)
noise = torch.randint(0, 256, (384, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))

CLAMPED = SwiGLU(1.702, 7.0, 1.0, interleaved=True)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        f"quantize along {axis}": (lambda x, axis=axis: quantize(x, fmt=E5M2, mode="floor", axis=axis), (hostile,))
        for axis in (-1, -2, TILES)
    },
    "quantize per row": (lambda x: quantize(x, block_size=None), (hostile,)),
    "quantize with amax": (lambda x: quantize_with_amax(x)[0], (hostile,)),
    "quantize columns with amax": (by_column, (gate_up,)),
    "dequantize": (lambda mx: mx.dequantize(torch.float32), (indexed,)),
    "materialize": (lambda mx: mx.materialize(), (indexed,)),
    "materialize columns": (lambda x: quantize(x, axis=TILES).along(-2).materialize(), (gate_up,)),
    "requantize": (
        lambda mx, ends: requantize(mx, offs=ends),
        (indexed, torch.tensor([32, 32, ROWS], dtype=torch.int32)),
    ),
    "sigmoid": (sigmoid_pair, (torch.cat([gaussian(100_000) * 30, torch.tensor([torch.inf, -torch.inf, 0.0])]),)),
    "fold": (lambda mx, ends: fold(mx, offs=ends), (qdata, ENDS)),
    "fold indexed": (lambda mx, ends: fold(mx, offs=ends), (indexed, ENDS)),
    "fold E5M2": (lambda mx: fold(mx), (quantize(x, fmt=E5M2),)),
    "scale_columns": (lambda mx, ends, factor: scale_columns(mx, factor, offs=ends), (indexed, ENDS, x[:3].abs())),
    "fold_with_stats": (lambda mx, ends: fold_with_stats(mx, offs=ends), (indexed, ENDS)),
    "fold_for_wgrad": (fold_for_wgrad, (row_scaled(5, 64), row_scaled(6, 96, fmt=E5M2), ENDS)),
    "fold_for_wgrad of slots": (fold_for_wgrad, (indexed, quantize(gaussian(ROWS, 96, seed=7), fmt=E5M2), ENDS)),
    "swiglu": (lambda *a: swiglu(a[0], a[1], offs=a[2]), (gate_up, weight, ENDS)),
    "swiglu_quantize": (lambda *a: swiglu_quantize(a[0], a[1], offs=a[2]), (gate_up, weight, ENDS)),
    "swiglu_backward": (lambda *a: swiglu_backward(*a[:3], offs=a[3], with_h=True), (d_h, gate_up, weight, ENDS)),
    "swiglu_backward_quantize": (
        lambda *a: swiglu_backward_quantize(*a[:3], offs=a[3], h_fmt=E4M3),
        (d_h, gate_up, weight, ENDS),
    ),
    "swiglu_backward_quantize, overwriting": (
        lambda d, *a: swiglu_backward_quantize(
            d.clone(), *a[:2], offs=a[2], fmt=E5M2, folded=True, overwrite=True, h_fmt=E4M3
        ),
        (d_h, gate_up, weight, ENDS),
    ),
    "swiglu_backward_quantize, clamped": (
        lambda *a: swiglu_backward_quantize(*a[:3], offs=a[3], folded=True, h_fmt=E4M3, activation=CLAMPED),
        (d_h, gate_up, weight, ENDS),
    ),
    "group_sums": (group_sums, (gate_up, ENDS)),
    "group_sums quantized": (group_sums, (qdata, ENDS)),
    "swizzle": (swizzle_scales, (noise[:ROWS],)),
    "pad_groups": (lambda x, sizes: pad_groups(x, sizes, alignment=32), (x, torch.tensor([30, 0, 70]))),
    "unpad_groups": (lambda y, index: unpad_groups(y, index, num_rows=ROWS), (x, torch.arange(ROWS).int().flip(0))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_bytes_of_the_cpu_and_does_not_wait(case: str) -> None:
    function, args = CASES[case]
    want = parts(function(*args))
    gpu_args = tree_map(lambda a: a.to("cuda"), args)
    function(*gpu_args)  # the first call may load kernels
    with no_host_sync():
        result = function(*gpu_args)
    got = parts(result)
    assert len(got) == len(want) == len(tree_leaves(got))
    for a, b in zip(got, want):
        assert a.device.type == "cuda"
        assert torch.equal(valid(a), valid(b))


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
    mx = indexed
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
