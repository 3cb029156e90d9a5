"""The split fold kernels give the bytes of the reference: formats, blocks, indices, strides, groups, tiles."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from mxep.quant import MXFormat
from mxep.quant.kernels import fold as kernels
from quant.exact import FORMATS
from quant.inputs import ends_of, slots
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)
E4M3, E5M2 = FORMATS
SMALL = {"WGRAD_TILE": (32, 64), "WGRAD_WARPS": 1}


def operand(
    rows: int, columns: int, block: int = 32, fmt: MXFormat = E4M3, seed: int = 0, spread: int = 12
) -> tuple[Tensor, Tensor]:
    """Any qdata, scales up to `spread` binades apart, now and then a zero row or a NaN block."""
    rng = np.random.default_rng(seed)
    qdata = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    scale = rng.integers(120 - spread, 121, (rows, columns // block), dtype=np.uint8)
    zero = rng.random(rows) < 0.1
    qdata[zero], scale[zero] = 0, 0
    scale[rng.random(scale.shape) < 0.05 / max(scale.shape[1], 1)] = 255
    return torch.from_numpy(qdata).view(fmt.dtype), torch.from_numpy(scale).view(torch.float8_e8m0fnu)


def indices(rows: int, stored: int, valid: int, seed: int = 0) -> Tensor:
    index = torch.from_numpy(np.random.default_rng(seed).integers(-1, stored, rows, dtype=np.int32))
    index[valid:] = 10**9  # neither read nor written
    return index


def check(*args: Tensor | None, alignment: int = 1, **tuning: Any) -> None:
    """The kernels' result on DEVICE against the op's on the CPU: exponents, offs and valid columns bit for bit."""
    want = torch.ops.mxep.fold_for_wgrad(*args, alignment)
    on_device = [arg if arg is None else arg.to(DEVICE) for arg in args]
    with mock.patch.multiple(kernels, **SMALL | tuning):
        got = kernels.fold_for_wgrad(*on_device, alignment)  # type: ignore[arg-type]
    for a, b in zip(got, want):
        assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, True)
    assert torch.equal(got[2].cpu(), want[2])
    assert torch.equal(got[3].cpu(), want[3])
    valid = int(want[3][-1])
    for a, b in zip(got[:2], want[:2]):
        bad = (a.cpu().view(torch.uint8)[:, :valid] != b.view(torch.uint8)[:, :valid]).nonzero()
        assert not len(bad), f"{len(bad)} bytes differ, first at {bad[0].tolist()}"


@both_formats
def test_every_code_under_every_shift(fmt: MXFormat) -> None:
    y_format = E5M2 if fmt is E4M3 else E4M3
    qdata = torch.arange(256, dtype=torch.uint8).expand(72, 256).view(fmt.dtype)
    scale = (60 + torch.arange(72)[:, None] - torch.arange(8)).to(torch.uint8).view(torch.float8_e8m0fnu)
    y, y_scale = operand(72, 32, 32, y_format, spread=0)
    large = {"WGRAD_TILE": (64, 128), "WGRAD_WARPS": 4}
    check(qdata, scale, None, y, y_scale, None, ends_of(40, 32), **large)
    check(y, y_scale, None, qdata, scale, None, ends_of(72), **large)


@pytest.mark.parametrize(
    ("sizes", "indexed", "align"),
    [
        *(((32, 0, 64), True, 24), ((0, 0), True, 24), ((3, 5, 1, 0, 22), True, 1), ((3, 5, 1, 0, 22), False, 16)),
        *(((96,), True, 1), ((96,), False, 24), ((0, 1), False, 16)),
    ],
)
def test_groups_of_any_size_at_any_alignment(sizes: tuple[int, ...], indexed: bool, align: int) -> None:
    rows, valid = 96, sum(sizes)
    x, y = operand(rows, 96, seed=1), operand(rows, 64, 64, E5M2, seed=2)
    x_index = indices(rows, rows, valid) if indexed else None
    y_index = indices(rows, rows, valid, 1) if indexed else None
    check(*x, x_index, *y, y_index, ends_of(*sizes), alignment=align)


def test_many_groups() -> None:
    sizes = np.random.default_rng(0).integers(0, 3, 70)
    rows = int(sizes.sum()) + 8 - int(sizes.sum()) % 8
    for align in (1, 4):
        check(*operand(rows, 32), None, *operand(rows, 32, 32, seed=1), None, ends_of(*sizes.tolist()), alignment=align)


@pytest.mark.parametrize("rows", [40, 36, 33])
def test_rows_that_are_no_multiple_of_a_pack_or_a_tile(rows: int) -> None:
    check(*operand(rows, 96), None, *operand(rows, 32, seed=1), None, ends_of(rows - 3, 2))


@pytest.mark.parametrize(
    ("block_size", "columns"), [(128, 384), (64, 192), (16, 48), (24, 48), (7, 21), (96, 96), (1, 5)]
)
def test_blocks_of_any_length(block_size: int, columns: int) -> None:
    check(*operand(16, columns, block_size), None, *operand(16, 32, seed=1), None, ends_of(7, 9))
    check(*operand(16, 32, seed=1), None, *operand(16, columns, block_size), None, ends_of(7, 9))


@pytest.mark.parametrize("spare", [0, 1, 2, 4, 13])
def test_slots_at_any_address(spare: int) -> None:
    x, y = slots(*operand(11, 96), spare), slots(*operand(13, 64, 32, E5M2, seed=1), spare)
    ends = ends_of(17, 7)
    check(*x, indices(32, 11, 24), *y, indices(32, 13, 24, 1), ends)
    x = x[0][:, 32:], x[1][:, 1:]
    check(*x, indices(32, 11, 24), *y, indices(32, 13, 24, 1), ends)


@pytest.mark.parametrize(
    ("tile", "group_m", "programs"),
    [((32, 32), 2, 3), ((32, 32), 3, 1000), ((64, 64), 1, 1), ((64, 64), 2, 3), ((32, 128), 64, 2)],
)
def test_any_tile_in_any_order(tile: tuple[int, int], group_m: int, programs: int) -> None:
    x, y = operand(56, 160, seed=3), operand(56, 64, seed=4)
    tuning = {"WGRAD_TILE": tile, "GROUP_M": group_m, "WGRAD_PROGRAMS_PER_SM": programs, "SCALE_ELEMENTS": 64}
    check(*x, None, *y, None, ends_of(14, 37), **tuning)


def test_no_rows_and_no_columns() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    check(*operand(0, 32), None, *operand(0, 64), None, ends_of(0, 0))
    check(*operand(8, 32), none, *operand(8, 64), none, ends_of(0))
    check(*operand(8, 0), None, *operand(8, 64), None, ends_of(8))
