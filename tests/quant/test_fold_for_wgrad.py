"""Split fold, against the product in float64: exact where shifts are small, close where data is ordinary."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from mxep.quant import E4M3, E5M2, MXFormat, MXTensor, WgradOperands, fold, fold_for_wgrad, quantize
from quant.exact import FORMATS, assert_bytes, code_values, nearest_codes, raw
from quant.inputs import ends_of, gaussian
from quant.opchecks import check_op

Floats = NDArray[np.float64]


def row_scaled(rows: Tensor, shifts: list[int] | Tensor | None = None, fmt: MXFormat = E4M3) -> MXTensor:
    """rows quantized with one scale each, then the scale byte of row r raised by shifts[r]."""
    mx = quantize(rows, block_size=None, fmt=fmt)
    if shifts is None:
        return mx
    byte = mx.scale.view(torch.uint8).int() + torch.as_tensor(shifts, dtype=torch.int32)[:, None]
    return MXTensor.from_qdata_and_scales(mx.qdata, byte.to(torch.uint8), mx.dtype, block_size=None)


def decoded(mx: MXTensor) -> Floats:
    """The values of mx in float64, its index applied."""
    byte = raw(mx.scale).astype(np.float64).repeat(mx.block_size, 1)
    values = code_values(mx.format)[raw(mx.qdata)] * np.where(byte == 255, np.nan, 2.0 ** (byte - 127))
    if mx.row_index is None:
        return values
    index = mx.row_index.numpy()
    return np.where(index[:, None] < 0, 0.0, values[index])


def exact_products(x: MXTensor, y: MXTensor, offs: Tensor) -> Floats:
    """(G, N, K): the products of the operands as they are, in float64."""
    ends = [0, *offs.tolist()]
    dx, dy = decoded(x), decoded(y)
    return np.stack([dy[a:b].T @ dx[a:b] for a, b in pairwise(ends)])


def products(split: WgradOperands, x: MXTensor, y: MXTensor, offs: Tensor) -> Floats:
    """(G, N, K): 2^exponent * y_t @ x_t.T of the folded qdata, in float64."""
    ends = [0, *offs.tolist()]
    x_t, y_t = code_values(x.format)[raw(split.x_t)], code_values(y.format)[raw(split.y_t)]
    scale = 2.0 ** split.exponent.double().numpy()
    return np.stack([s * (y_t[:, a:b] @ x_t[:, a:b].T) for s, a, b in zip(scale, ends, ends[1:])])


def snr(got: Floats, want: Floats) -> float:
    return float(20 * np.log10(np.linalg.norm(want) / max(np.linalg.norm(got - want), 1e-300)))


def test_the_worked_example_of_the_docstring() -> None:
    def operand(values: list[float], exponents: list[int]) -> MXTensor:
        qdata = torch.tensor(values).view(-1, 1).to(E4M3.dtype)
        scale = torch.tensor(exponents, dtype=torch.uint8).view(-1, 1)
        return MXTensor.from_qdata_and_scales(qdata, scale, block_size=None)

    x = operand([1.5, 3.0, 0.0, 1.0], [127, 125, 0, 126])
    y = operand([2.0, 1.0, 0.0, 4.0], [130, 127, 0, 127])
    split = fold_for_wgrad(x, y, ends_of(4))
    assert split.exponent.tolist() == [3]
    assert split.x_t.float().tolist() == [[1.5, 0.75, 0.0, 0.25]]
    assert split.y_t.float().tolist() == [[2.0, 0.125, 0.0, 1.0]]
    assert products(split, x, y, ends_of(4)).item() == 26.75
    assert exact_products(x, y, ends_of(4)).item() == 26.75


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    spare=st.integers(0, 5),
    x_format=st.sampled_from(FORMATS),
    y_format=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**30),
)
def test_the_product_is_exact_when_shifts_are_small(
    sizes: list[int], spare: int, x_format: MXFormat, y_format: MXFormat, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = sum(sizes) + spare

    def operand(columns: int, fmt: MXFormat) -> MXTensor:
        values = torch.from_numpy(rng.choice([-448, -26, 0, 0.5, 3, 240, 448], (rows, columns))).float()
        values[:, 0] = 448  # so that a row's scale is that of its exponent, and no shift is larger than 12
        return row_scaled(values, torch.from_numpy(rng.integers(-3, 4, rows)), fmt)

    x, y = operand(7, x_format), operand(5, y_format)
    ends = ends_of(*sizes)
    split = fold_for_wgrad(x, y, ends)
    assert (split.x_t.shape, split.y_t.shape, split.exponent.shape) == ((7, rows), (5, rows), (len(sizes),))
    assert (split.x_t.dtype, split.y_t.dtype, split.exponent.dtype) == (x_format.dtype, y_format.dtype, torch.int32)
    assert split.x_t.is_contiguous()
    assert split.y_t.is_contiguous()
    np.testing.assert_array_equal(products(split, x, y, ends), exact_products(x, y, ends))


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    blocks=st.integers(1, 4),
    block=st.sampled_from([1, 6, 32]),
    x_format=st.sampled_from(FORMATS),
    y_format=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**30),
)
def test_the_product_of_indexed_blocks_is_exact_when_shifts_are_small(
    sizes: list[int], blocks: int, block: int, x_format: MXFormat, y_format: MXFormat, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    index = torch.from_numpy(rng.integers(-1, 5, sum(sizes) + 2).astype(np.int32))

    def operand(fmt: MXFormat) -> MXTensor:
        qdata = torch.from_numpy(rng.choice([-448.0, 0.0, 3.0, 240.0], (5, blocks * block)))
        scale = torch.from_numpy(rng.integers(125, 129, (5, blocks), dtype=np.uint8))
        return MXTensor.from_qdata_and_scales(qdata.float().to(fmt.dtype), scale, block_size=block, row_index=index)

    x, y, ends = operand(x_format), operand(y_format), ends_of(*sizes)
    split = fold_for_wgrad(x, y, ends)
    np.testing.assert_array_equal(products(split, x, y, ends), exact_products(x, y, ends))


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_there_is_one_rounding(fmt: MXFormat) -> None:
    """Blocks whose shift is split between fold and split fold would round twice; here the sum of both counts."""
    qdata = torch.arange(256, dtype=torch.uint8).repeat(24, 1).view(fmt.dtype)
    scale = torch.full((24, 8), 60, dtype=torch.uint8)
    scale[:, 3] = 60 + torch.arange(24)  # the top of each row; E comes from the last row
    other = MXTensor.from_qdata_and_scales(qdata[:, :1], torch.full((24, 1), 60, dtype=torch.uint8), block_size=1)
    split = fold_for_wgrad(MXTensor.from_qdata_and_scales(qdata, scale), other, ends_of(24))
    table = code_values(fmt)
    shift = np.arange(24)[:, None].repeat(8, 1)
    shift[:, 3] = 0
    shift += ((23 - np.arange(24)) // 2)[:, None]
    moved = table[raw(qdata)] * 2.0 ** -shift.repeat(32, 1)
    finite = np.isfinite(moved)
    wanted = np.full(moved.shape, 0x7F, np.uint8)
    wanted[finite] = nearest_codes(fmt, moved[finite])
    assert_bytes(split.x_t.T.contiguous(), wanted)


@pytest.mark.parametrize("spread_of_norms", [0.0, 1.0])
def test_ordinary_data_keeps_77_db(spread_of_norms: float) -> None:
    """NUMERICS.md, section 5: tokens whose norms vary by an ordinary log-normal factor, too."""
    x, y = gaussian(1024, 96, seed=1), gaussian(1024, 64, seed=2)
    x = x * torch.exp(spread_of_norms * gaussian(1024, 1, seed=3))
    y = y * torch.exp(spread_of_norms * gaussian(1024, 1, seed=4))
    mx, my = quantize(x), fold(quantize(y))
    ends = ends_of(384, 0, 640)
    split = fold_for_wgrad(mx, my, ends)
    got, want = products(split, mx, my, ends), exact_products(mx, my, ends)
    assert snr(got[0], want[0]) > 77
    assert snr(got[2], want[2]) > 77
    assert not got[1].any()
    assert split.exponent.tolist()[1] == 0


def test_a_token_gives_half_of_its_shift_to_each_operand_and_the_odd_binade_to_y() -> None:
    x = row_scaled(torch.full((5, 2), 448.0), [0, -1, -2, -5, -40])
    y = row_scaled(torch.full((5, 3), 448.0))
    split = fold_for_wgrad(x, y, ends_of(5))
    assert split.exponent.tolist() == [0]
    assert split.x_t.float()[0].tolist() == [448.0, 448.0, 224.0, 112.0, 0.0]
    assert split.y_t.float()[0].tolist() == [448.0, 224.0, 224.0, 56.0, 0.0]


def test_zero_rows_have_byte_0_and_do_not_lift_the_exponent() -> None:
    x, y = torch.ones(4, 32), torch.ones(4, 32)
    x[1], y[2] = 0.0, -0.0
    mx, my = row_scaled(x, [0, 0, 60, 0]), row_scaled(y, [0, 60, 0, 0])  # the partners of zero rows are huge
    split = fold_for_wgrad(mx, my, ends_of(4))
    byte = int(raw(mx.scale)[0, 0]) + int(raw(my.scale)[0, 0])
    assert split.exponent.tolist() == [byte - 254]
    assert torch.equal(split.x_t.float()[:, [0, 3]], mx.qdata.float().T[:, [0, 3]])
    np.testing.assert_array_equal(products(split, mx, my, ends_of(4)), exact_products(mx, my, ends_of(4)))


def test_a_group_of_padding_rows_is_zero() -> None:
    x = row_scaled(torch.ones(2, 32))
    index = torch.full((4,), -1, dtype=torch.int32)
    padding = MXTensor.from_qdata_and_scales(x.qdata, x.scale, block_size=None, row_index=index)
    split = fold_for_wgrad(padding, padding, ends_of(4))
    assert split.exponent.tolist() == [-254]
    assert not raw(split.x_t).any()


@pytest.mark.parametrize("block_size", [32, None])
def test_the_index_picks_rows_on_the_way(block_size: int | None) -> None:
    x, y = quantize(gaussian(6, 64), block_size=block_size), quantize(gaussian(6, 32, seed=1), block_size=block_size)
    index = torch.tensor([3, -1, 0, 5, 5], dtype=torch.int32)
    padded = torch.cat([x.qdata.view(torch.uint8), torch.full((6, 16), 0x7F, dtype=torch.uint8)], 1)
    slots = padded[:, :64].view(E4M3.dtype)  # rows of a wider buffer
    xi = MXTensor.from_qdata_and_scales(slots, x.scale, block_size=block_size, row_index=index)
    yi = MXTensor.from_qdata_and_scales(y.qdata, y.scale, block_size=block_size, row_index=index.flip(0))
    got, want = (fold_for_wgrad(a, b, ends_of(2, 3)) for a, b in ((xi, yi), (xi.materialize(), yi.materialize())))
    assert_bytes(got.x_t, raw(want.x_t))
    assert_bytes(got.y_t, raw(want.y_t))
    assert torch.equal(got.exponent, want.exponent)


def test_a_row_of_byte_0_that_is_not_zero_counts() -> None:
    tiny = row_scaled(torch.full((2, 32), 2.0**-126))
    assert (raw(tiny.scale) == 0).all()
    split = fold_for_wgrad(tiny, row_scaled(torch.full((2, 32), 448.0)), ends_of(2))
    assert split.exponent.tolist() == [-127]
    assert torch.equal(split.x_t.float(), tiny.qdata.float().T)


@pytest.mark.parametrize("which", ["x", "y", "both"])
def test_a_nan_row_makes_nan_of_its_group_and_of_nothing_else(which: str) -> None:
    x, y = gaussian(9, 32, seed=5), gaussian(9, 64, seed=6)
    ends = ends_of(3, 4, 2)
    clean = fold_for_wgrad(row_scaled(x), row_scaled(y), ends)
    if which != "y":
        x[4, 7] = float("nan")
    if which != "x":
        y[4, 7] = float("inf")
    y[4, 40] = 0.0
    mx, my = row_scaled(x), row_scaled(y)
    split = fold_for_wgrad(mx, my, ends)
    got = products(split, mx, my, ends)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    without = row_scaled(x[others]), row_scaled(y[others])
    wanted = fold_for_wgrad(*without, ends_of(3, 3, 2))
    assert split.exponent.tolist() == wanted.exponent.tolist()
    assert_bytes(split.x_t[:, others].contiguous(), raw(wanted.x_t))
    assert_bytes(split.y_t[:, others].contiguous(), raw(wanted.y_t))
    assert clean.exponent[[0, 2]].tolist() == split.exponent[[0, 2]].tolist()


def test_the_extremes_of_the_scale_bytes_fit_the_exponent() -> None:
    qdata = torch.ones(2, 1).to(E4M3.dtype)
    for byte, exponent in ((254, 254), (0, -254)):
        mx = MXTensor.from_qdata_and_scales(qdata, torch.full((2, 1), byte, dtype=torch.uint8), block_size=None)
        assert fold_for_wgrad(mx, mx, ends_of(2)).exponent.tolist() == [exponent]


@pytest.mark.parametrize("sizes", [(2, 3), (0, 0), (0, 5), (8, 0)])
def test_rows_past_the_last_group_do_not_matter(sizes: tuple[int, ...]) -> None:
    x, y = gaussian(8, 32, seed=7), gaussian(8, 32, seed=8) * torch.logspace(-3, 3, 8).view(-1, 1)
    ends, valid = ends_of(*sizes), sum(sizes)
    wanted = fold_for_wgrad(row_scaled(x), row_scaled(y), ends)
    x[valid:], y[valid:] = float("nan"), float("nan")
    got = fold_for_wgrad(row_scaled(x), row_scaled(y), ends)
    assert torch.equal(got.exponent, wanted.exponent)
    assert_bytes(got.x_t[:, :valid].contiguous(), raw(wanted.x_t)[:, :valid])
    assert_bytes(got.y_t[:, :valid].contiguous(), raw(wanted.y_t)[:, :valid])


def test_aligned_groups_begin_at_multiples_and_end_in_zeros() -> None:
    x, y = row_scaled(gaussian(13, 64, seed=1)), quantize(gaussian(13, 32, seed=2))
    ends = ends_of(5, 0, 4, 3)
    plain, aligned = fold_for_wgrad(x, y, ends), fold_for_wgrad(x, y, ends, alignment=4)
    assert plain.offs.tolist() == [5, 5, 9, 12]
    assert aligned.offs.tolist() == [8, 8, 12, 16]
    assert aligned.x_t.shape == (64, 28)
    assert torch.equal(aligned.exponent, plain.exponent)
    for a, p in ((aligned.x_t, plain.x_t), (aligned.y_t, plain.y_t)):
        a, p = a.view(torch.uint8), p.view(torch.uint8)
        wanted = torch.cat((p[:, :5], torch.zeros_like(p[:, :3]), p[:, 5:9], p[:, 9:12], torch.zeros_like(p[:, :1])), 1)
        assert torch.equal(a[:, :16], wanted)


def test_split_fold_passes_opcheck() -> None:
    x, y = quantize(gaussian(8, 64)), row_scaled(gaussian(9, 64, seed=1), fmt=E5M2)
    index = torch.tensor([3, -1, 1, 0, 8, 2, 2, 5], dtype=torch.int32)
    check_op(torch.ops.mxep.fold_for_wgrad, x.qdata, x.scale, None, y.qdata, y.scale, index, ends_of(3, 2), 16)


def test_bad_arguments_say_what_they_got_and_what_is_wanted() -> None:
    x, y = row_scaled(gaussian(8, 64)), quantize(gaussian(8, 64))
    with pytest.raises(ValueError, match=r"x: got MXTensor\(.*want a tensor blocked along its rows"):
        fold_for_wgrad(quantize(gaussian(32, 64), axis=-2), y, ends_of(8))
    with pytest.raises(ValueError, match=r"y: got a Tensor, want an MXTensor"):
        fold_for_wgrad(x, gaussian(8, 64), ends_of(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="y: got 7 rows, want 8"):
        fold_for_wgrad(x, row_scaled(gaussian(7, 64)), ends_of(8))
    with pytest.raises(ValueError, match=r"got torch\.int64 .*want int32"):
        fold_for_wgrad(x, y, ends_of(8).long())
    with pytest.raises(ValueError, match="got 9, want 0 to 8"):
        fold_for_wgrad(x, y, ends_of(9))
    with pytest.raises(ValueError, match="alignment: got 0, want 1 or more"):
        fold_for_wgrad(x, y, ends_of(8), alignment=0)
