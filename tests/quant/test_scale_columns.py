"""scale_columns multiplies rows by their group's factors in fp32, and rounds once. The kernel has the op's bytes."""

import pytest
import torch
from torch import Tensor

from mxep.quant import MXFormat, MXTensor, quantize, scale_columns
from mxep.quant.kernels import fold as kernels
from quant.exact import FORMATS
from quant.inputs import assert_same, ends_of, gaussian, hostile, slots
from quant.opchecks import check_op
from quant.poison import poisoned_allocations as poisoned_allocations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)


def factors(groups: int, width: int, spread: int = 12) -> Tensor:
    """Not powers of two, up to 2^spread apart, so that another group's or column's shows."""
    return gaussian(groups, width).abs().add(0.1) * 2.0 ** -torch.randint(0, spread, (groups, width)).float()


def check(qdata: Tensor, scale: Tensor, index: Tensor | None, offs: Tensor | None) -> None:
    """The kernel's results on DEVICE against the op's on the CPU: valid rows bit for bit."""
    factor = factors(1 if offs is None else len(offs), qdata.shape[1])
    want = torch.ops.mxep.scale_columns(qdata, scale, index, offs, factor)
    got = kernels.fold(*(x if x is None else x.to(DEVICE) for x in (qdata, scale, index, offs, factor)))
    valid = None if offs is None else int(offs[-1])
    for a, b in zip(got, want):
        assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, True)
        assert torch.equal(a[:valid].view(torch.uint8).cpu(), b[:valid].view(torch.uint8))


@both_formats
@pytest.mark.parametrize("block_size", [32, None])
def test_it_quantizes_the_products_of_values_and_factors(fmt: MXFormat, block_size: int | None) -> None:
    x, offs, factor = (
        quantize(gaussian(40, 96), fmt=fmt, block_size=block_size),
        ends_of(0, 7, 20, 0, 13),
        factors(5, 96),
    )
    group = torch.arange(5).repeat_interleave(torch.tensor([0, 7, 20, 0, 13]))
    values = x.dequantize(torch.float32) * factor[group]
    assert_same(scale_columns(x, factor, offs=offs), quantize(values, fmt=fmt, block_size=None))
    assert_same(
        scale_columns(x, factor[:1]), quantize(x.dequantize(torch.float32) * factor[0], fmt=fmt, block_size=None)
    )


def test_an_example() -> None:
    """448 * 1.5 = 672 is above 448, so the row gets scale 2. 672 / 2 = 336 is between 320 and 352, and even is 320."""
    x = MXTensor.from_qdata_and_scales(
        torch.tensor([[448.0, 2.0]]).to(torch.float8_e4m3fn), torch.tensor([[127]]).byte(), block_size=2
    )
    got = scale_columns(x, torch.tensor([[1.5, 3.0]]))
    assert got.scale.view(torch.uint8).tolist() == [[128]]
    assert got.dequantize(torch.float32).tolist() == [[640.0, 6.0]]


@both_formats
@pytest.mark.parametrize("ends", [[0, 0], [3, 3], [7, 40], [1, 1, 11, 57]])
@pytest.mark.parametrize("width", [32, 224, 576])
def test_the_kernel_takes_indexed_slots_in_groups(fmt: MXFormat, ends: list[int], width: int) -> None:
    index = torch.randint(-1, 20, (57,), generator=torch.Generator().manual_seed(0)).int()
    index[3] = -1
    index[ends[-1] :] = 10**9  # neither read nor written
    qdata, scale = slots(*hostile(fmt, (20, width)))
    check(qdata, scale, index, torch.tensor(ends, dtype=torch.int32))
    check(qdata, scale, index[: ends[-1]], None)


@both_formats
def test_the_kernel_takes_rows_of_one_scale_and_none(fmt: MXFormat) -> None:
    qdata, scale = hostile(fmt, (13, 96), 96)
    check(qdata, scale, None, ends_of(4, 0, 9))
    check(qdata, scale, None, None)
    check(qdata[:0], scale[:0], None, ends_of(0, 0))


@pytest.mark.parametrize("tuning", [(512, 256, 1), (4096, 512, 3)])
def test_the_kernel_takes_any_tile(tuning: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("TILE_ELEMENTS", "WARP_ELEMENTS", "PROGRAMS_PER_SM"), tuning):
        monkeypatch.setattr(kernels, name, value)
    check(*hostile(FORMATS[0], (37, 256)), None, ends_of(8, 0, 23))


def test_it_is_an_op() -> None:
    mx = quantize(gaussian(9, 64))
    args = mx.qdata, mx.scale, torch.tensor([3, -1, 8]).int(), ends_of(1, 2), factors(2, 64)
    check_op(torch.ops.mxep.scale_columns, *args)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: scale_columns(x, torch.ones(1, 64).bfloat16()),
            r"fp32 factor \(1, 64\), got .* torch.bfloat16 \(1, 64\)",
        ),
        (lambda x: scale_columns(x, torch.ones(1, 64), offs=ends_of(1, 2)), r"fp32 factor \(2, 64\), got .* \(1, 64\)"),
        (lambda x: scale_columns(x.mT, torch.ones(1, 32)), "expected blocks along the rows of a matrix"),
        (lambda x: scale_columns(quantize(gaussian(32, 64), fmt="E2M1"), torch.ones(1, 64)), "E2M1"),
    ],
)
def test_what_it_does_not_take(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(quantize(gaussian(32, 64)))
