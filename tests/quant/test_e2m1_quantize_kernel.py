"""The kernel that quantizes to E2M1 gives the bytes of the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fences import fenced
from fences import fences as fences
from mxep.quant import E2M1, ScaleMode
from mxep.quant.kernels import e2m1 as kernels
from quant import exact
from quant.exact import MODES, assert_bytes, raw
from quant.inputs import gaussian
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(x: Tensor, mode: ScaleMode = ScaleMode.RCEIL, block_size: int = 32) -> None:
    want = torch.ops.mxep.quantize_rows(x, E2M1.dtype, mode.value, block_size)
    got = kernels.quantize_e2m1(x.to(DEVICE), mode.value, block_size)
    for a, b in zip(got, want):
        assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, True)
        assert_bytes(a.cpu(), raw(b))


@pytest.mark.parametrize("mode", MODES)
def test_hostile_blocks_in_every_mode(mode: ScaleMode) -> None:
    check(exact.hostile_rows(), mode)
    check(gaussian(37, 96) * 2.0 ** torch.arange(-120, 130, 7)[:36].repeat(2)[:37, None], mode)


def test_every_tie_and_both_neighbours() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 0.5, 1.0, 6.0])
    near = torch.cat([middles, *(torch.nextafter(middles, torch.tensor(to)) for to in (0.0, 8.0))])
    x = torch.zeros(2 * len(near), 32)
    x[:, 0], x[:, 5] = 4.0, torch.cat([near, -near])  # FLOOR makes the scale 1 up to 8
    check(x, ScaleMode.FLOOR)
    assert set(raw(torch.ops.mxep.quantize_rows(x, E2M1.dtype, "floor", 32)[1]).ravel().tolist()) == {127}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_in_any_dtype(dtype: torch.dtype) -> None:
    check(gaussian(3, 5, 2880, dtype=torch.float32).to(dtype))


@pytest.mark.parametrize("block_size", [2, 16, 24, 90, 128])
def test_blocks_of_any_even_length(block_size: int) -> None:
    check(gaussian(7, 3 * block_size), block_size=block_size)


def test_long_blocks_are_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LONGEST", 64)
    x = gaussian(5, 200)
    x[2, 190] = torch.nan
    check(x, block_size=200)


def test_views_and_nothing(fences: Callable[[], list[tuple[int, ...]]]) -> None:
    check(gaussian(64, 40).mT)
    check(gaussian(12, 64)[::3])
    check(gaussian(0, 64))
    kernels.quantize_e2m1(fenced(gaussian(3, 96)).to(DEVICE), "rceil", 32)
    assert fences() == []
