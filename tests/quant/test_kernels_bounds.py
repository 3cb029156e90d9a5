"""Whatever offs holds, no kernel writes outside its buffers."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fences import fenced
from fences import fences as fences
from mxep.quant import E4M3, quantize
from mxep.quant.kernels import e2m1, fold, groups, requantize, swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
R, D = 64, 64
TO = (E4M3.dtype, "rceil")


def mx() -> tuple[Tensor, Tensor]:
    x = quantize(torch.ones(R, D, device=DEVICE))
    return fenced(x.qdata.view(torch.uint8)).view(E4M3.dtype), fenced(x.scale)


def values() -> Tensor:
    return fenced(torch.ones(R, D, device=DEVICE, dtype=torch.bfloat16))


def index(valid: int = R) -> Tensor:
    """Behind the valid rows it points far outside, which reading would show."""
    rows = torch.arange(R, device=DEVICE, dtype=torch.int32)
    return fenced(torch.where(rows < valid, rows, 1 << 30))


def in_small_tiles(*args: Any) -> Any:
    with mock.patch.multiple(fold, WGRAD_TILE=(32, 64), WGRAD_WARPS=1):
        return fold.fold_for_wgrad(*args)


READERS: dict[str, Callable[..., Any]] = {
    "fold": lambda ends, index: fold.fold(*mx(), index, ends),
    "fold_for_wgrad": lambda ends, index: in_small_tiles(*mx(), index, *mx(), index, ends, 32),
    "requantize": lambda ends, index: requantize.requantize(*mx(), 1, 32, index, ends, *TO),
    "gather_swizzled": lambda ends, index: groups.gather_swizzled(*mx(), index, ends),
}
"""Kernels that read an index."""
KERNELS: dict[str, Callable[..., Any]] = READERS | {
    "fold_for_wgrad aligned to 1": lambda ends, index: in_small_tiles(*mx(), index, *mx(), None, ends, 1),
    "swiglu": lambda ends, _: swiglu.swiglu(values(), None, ends, torch.bfloat16, None, 0, False),
    "swiglu_quantize": lambda ends, _: swiglu.swiglu(values(), None, ends, *TO, 32, False),
    "swiglu_backward": lambda ends, _: swiglu.swiglu_backward(
        values()[:, : D // 2], values(), None, ends, values(), None, 0, False, torch.bfloat16
    ),
    "swiglu_backward of two parts": lambda ends, _: swiglu.swiglu_backward(
        values()[:, : D // 2], values()[:32], None, ends, values(), None, 0, False, torch.bfloat16, rest=values()[32:]
    ),
    "group_sums": lambda ends, _: groups.group_sums(*mx(), 32, ends),
}


@pytest.mark.parametrize("ends", [(32, 64, 256), (-64, 160, 32)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_group_ends_make_a_kernel_write_outside_its_buffers(
    kernel: str, ends: tuple[int, ...], fences: Callable[[], list[tuple[int, ...]]]
) -> None:
    KERNELS[kernel](torch.tensor(ends, dtype=torch.int32, device=DEVICE), index())
    assert fences() == []


@pytest.mark.parametrize("columns", [32, 96, 160])
def test_expanding_mxfp4_writes_its_rows_alone(columns: int, fences: Callable[[], list[tuple[int, ...]]]) -> None:
    x = quantize(torch.ones(5, columns, device=DEVICE), fmt="E2M1")
    x.scale.view(torch.uint8)[::2, 0] -= 20  # rows of both ways
    folded, _ = e2m1.fold_e2m1(fenced(x.qdata.view(torch.uint8)).view(x.qdata.dtype), fenced(x.scale))
    assert folded.shape == (5, columns)
    assert fences() == []


@pytest.mark.parametrize("last", [32, 33, 39, 63])
@pytest.mark.parametrize("kernel", READERS)
def test_no_kernel_reads_the_index_behind_the_last_group(kernel: str, last: int) -> None:
    ends = torch.tensor([5, 5, last], dtype=torch.int32, device=DEVICE)
    READERS[kernel](ends, index(last))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
