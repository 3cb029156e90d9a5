"""The kernels that pick, pad and swizzle rows equal their references bit for bit: on a GPU, or interpreted without."""

import pytest
import torch
from torch import Tensor

from mxep.quant import E4M3, groups, ops
from mxep.quant.kernels import groups as kernels
from quant.poison import poisoned_allocations as poisoned_allocations
from quant.test_quantize_kernels import DEVICE, assert_same, numbers

MANY = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(0)).mul_(torch.arange(300) > 70).tolist()
HOW = E4M3.dtype, "rceil"


def on_device(*args: object) -> list[object]:
    return [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]


def index_of(rows: int, stored: int, *, dead: int = 0) -> Tensor:
    """(rows,) int32 of rows of `stored`, some -1; the last `dead` point where nobody may look."""
    index = torch.randint(-1, stored, (rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(rows))
    index[rows - dead :] = 1 << 30
    return index


def ends_of(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def assert_same_in_groups(got: tuple[Tensor, ...], want: tuple[Tensor, ...], ends: Tensor) -> None:
    """Codes up to the last group's end, scales up to its last tile of 128 rows; what follows is unspecified."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    tiles = int(((sizes + 127) // 128).sum())
    qdata, scale = ((parts[0][: int(ends[-1])], parts[1][: 128 * tiles]) for parts in (got, want))
    assert_same(qdata, scale)


@pytest.mark.parametrize("columns", [32, 96, 1056])
def test_materialize_picks_codes_and_scales(columns: int) -> None:
    qdata, scale = ops.quantize_rows(numbers(20, columns), *HOW, 32)
    index = index_of(37, 20)
    assert_same(kernels.materialize(*on_device(qdata, scale, index)), ops.materialize(qdata, scale, index))


def test_materialize_picks_rows_with_one_scale_and_rows_of_a_buffer() -> None:
    qdata, scale = ops.quantize_rows(numbers(20, 96), *HOW, 96)
    index = index_of(37, 20)
    assert_same(kernels.materialize(*on_device(qdata, scale, index)), ops.materialize(qdata, scale, index))
    slots = torch.randint(0, 256, (20, 144), dtype=torch.uint8)
    moved = slots.to(DEVICE)
    got, want = (
        op(each[:, :96].view(E4M3.dtype), each[:, 128:131].view(torch.float8_e8m0fnu), index.to(each.device))
        for op, each in ((kernels.materialize, moved), (ops.materialize, slots))
    )
    assert_same(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64], ids=str)
def test_pad_and_unpad_move_rows_of_any_dtype(dtype: torch.dtype) -> None:
    x = (torch.randn(20, 7) * 9).to(dtype)
    index = torch.full((40,), -1, dtype=torch.int32)
    index[torch.randperm(40)[:18]] = torch.randperm(20, dtype=torch.int32)[:18]
    padded = groups._pad_rows(x, index)
    for got, want in (
        (kernels.pad_rows(*on_device(x, index)), padded),
        (kernels.unpad_rows(*on_device(padded, index, 20)), groups._unpad_rows(padded, index, 20)),
    ):
        assert_same((got.view(torch.uint8),), (want.view(torch.uint8),))


@pytest.mark.parametrize("sizes", [[3, 0, 2], [0, 0], [5], [130, 1, 0, 40], MANY], ids=len)
@pytest.mark.parametrize("alignment", [1, 32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_pad_index_spreads_groups(sizes: list[int], alignment: int, dtype: torch.dtype) -> None:
    group_sizes = torch.tensor(sizes, dtype=dtype)
    args = group_sizes, sum(sizes) + 3, alignment
    got, want = kernels.pad_index(*on_device(*args)), groups._pad_index(*args)
    assert_same(tuple(x.view(torch.uint8) for x in got), tuple(x.view(torch.uint8) for x in want))


@pytest.mark.parametrize("sizes", [[3, 0, 2], [0], [130, 1, 0, 40], MANY], ids=len)
@pytest.mark.parametrize("first", [0, 4, 1000])
def test_ends_of_the_groups_before_and_behind_a_row(sizes: list[int], first: int) -> None:
    offs = ends_of(*sizes)
    before, behind = want = groups.split_ends(offs, first)
    assert before.tolist() == [min(first, end) for end in offs.tolist()]
    assert behind.tolist() == [max(0, end - first) for end in offs.tolist()]
    assert all(map(torch.equal, (x.cpu() for x in kernels.split_ends(offs.to(DEVICE), first)), want))


@pytest.mark.parametrize("shape", [(128, 128), (130, 96), (2, 5, 32), (40, 5)], ids=str)
def test_scales_are_swizzled(shape: tuple[int, ...]) -> None:
    scale = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert_same((kernels.swizzle_scales(scale.to(DEVICE), None),), (groups._swizzle(scale, None),))
    transposed = scale.mT
    got = kernels.swizzle_scales(scale.to(DEVICE).mT, None)
    assert_same((got,), (groups._swizzle(transposed, None),))


def test_scales_are_swizzled_group_by_group() -> None:
    scale = torch.randint(0, 256, (480, 6), dtype=torch.uint8)
    ends = ends_of(32, 32, 256, 320)
    got, want = kernels.swizzle_scales(*on_device(scale, ends)), groups._swizzle(scale, ends)
    assert_same((got[: 128 * 4],), (want[: 128 * 4],))


def test_gather_swizzled() -> None:
    qdata, scale = ops.quantize_rows(numbers(50, 160), *HOW, 32)
    args = qdata, scale, index_of(140, 50), None
    assert_same(kernels.gather_swizzled(*on_device(*args)), groups._gather_swizzled(*args))
    args = qdata, scale, None, None
    assert_same(kernels.gather_swizzled(*on_device(*args)), groups._gather_swizzled(*args))
    ends = ends_of(0, 160, 192)
    args = qdata, scale, index_of(256, 50, dead=64), ends
    got, want = kernels.gather_swizzled(*on_device(*args)), groups._gather_swizzled(*args)
    assert_same_in_groups(got, want, ends)


def test_nothing_to_pick() -> None:
    qdata, scale = ops.quantize_rows(numbers(8, 32)[:0], *HOW, 32)
    none = torch.empty(0, dtype=torch.int32)
    for shape in ((0, 4), (2, 0, 5), (0, 3, 5), (3, 0)):
        nothing = torch.zeros(shape, dtype=torch.uint8)
        assert_same((kernels.swizzle_scales(nothing.to(DEVICE), None),), (groups._swizzle(nothing, None),))
    for empty in (kernels.swizzle_scales(*on_device(scale, ends_of(0, 0))), *kernels.gather_swizzled(
        *on_device(qdata, scale, none, ends_of(0))
    )):  # fmt: skip
        assert empty.shape[0] in (0, 128, 256)
    assert_same(kernels.materialize(*on_device(qdata, scale, none)), ops.materialize(qdata, scale, none))
    assert kernels.pad_rows(*on_device(torch.empty(0, 4), index_of(3, 1) * 0 - 1)).cpu().equal(torch.zeros(3, 4))
