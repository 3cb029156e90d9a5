"""On a GPU: fold, swizzle, SwiGLU and padding give the CPU's bytes, and the host waits for nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
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
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
    swizzle_scales,
    unpad_groups,
)
from mxep.quant.activation import sigmoid_pair
from quant.exact import parts
from quant.inputs import gaussian

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

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
    "sigmoid": (sigmoid_pair, (torch.cat([gaussian(100_000) * 30, torch.tensor([torch.inf, -torch.inf, 0.0])]),)),
    "fold": (lambda mx, ends: fold(mx, offs=ends), (qdata, ENDS)),
    "fold indexed": (lambda mx, ends: fold(mx, offs=ends), (indexed, ENDS)),
    "fold E5M2": (lambda mx: fold(mx), (quantize(x, fmt=E5M2),)),
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
