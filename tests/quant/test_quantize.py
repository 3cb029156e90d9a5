"""Quantization to the byte, against the float64 derivation in exact.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxep.quant import (
    E4M3,
    E5M2,
    MXFormat,
    MXTensor,
    ScaleMode,
    quantize,
    quantize_columns_with_amax,
    quantize_with_amax,
)
from quant import exact
from quant.exact import FORMATS, MODES, assert_bytes, raw
from quant.inputs import assert_same, gaussian
from quant.opchecks import check_op

TILES = (-2, -1)
ALL_CODES = torch.arange(256, dtype=torch.uint8)
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)
all_modes = pytest.mark.parametrize("mode", MODES)


@both_formats
@all_modes
def test_hostile_blocks_match_float64(fmt: MXFormat, mode: ScaleMode) -> None:
    x = exact.hostile_rows()
    qdata, byte = exact.quantize_rows(fmt, mode, x)
    for mx in (quantize(x, fmt=fmt, mode=mode), quantize(x.mT, fmt=fmt, mode=mode, axis=-2).mT):
        assert_bytes(mx.scale, byte)
        assert_bytes(mx.qdata, qdata)


@both_formats
@all_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_bits_match_float64(fmt: MXFormat, mode: ScaleMode, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (512, 64), generator=generator).int()
    x = bits.view(torch.float32) if dtype is torch.float32 else (bits >> 16).short().view(dtype)
    spread = x.isfinite().view(-1, 32).all(1)
    assert spread.any()
    assert not spread.all()
    mx = quantize(x, fmt=fmt, mode=mode)
    qdata, byte = exact.quantize_rows(fmt, mode, x)
    assert_bytes(mx.scale, byte)
    assert_bytes(mx.qdata, qdata)


@both_formats
@all_modes
def test_every_pair_of_codes_in_a_block_matches_float64(fmt: MXFormat, mode: ScaleMode) -> None:
    """All 128 magnitudes as the largest element beside all 256 qdata, smaller and larger, and halves between qdata."""
    table = torch.from_numpy(exact.code_values(fmt)).float()
    table = table[table.isfinite()]
    between = (table[1:] + table[:-1]) / 2
    others = torch.cat([table, between, between * 1.0001])
    others = torch.nn.functional.pad(others, (0, -others.numel() % 31)).view(1, -1, 31)
    anchors = table[:: 1 if fmt is E4M3 else 2].abs().unique()
    blocks = torch.cat([anchors.view(-1, 1, 1).expand(-1, others.shape[1], 1), others.expand(len(anchors), -1, 31)], -1)
    x = blocks.reshape(-1, 32)
    mx = quantize(x, fmt=fmt, mode=mode)
    qdata, byte = exact.quantize_rows(fmt, mode, x)
    assert_bytes(mx.scale, byte)
    assert_bytes(mx.qdata, qdata)


def all_codes_and_scales(fmt: MXFormat) -> MXTensor:
    """(256, 256): row b holds the 256 qdata with scale byte b."""
    return MXTensor.from_qdata_and_scales(
        ALL_CODES.repeat(256, 1).view(fmt.dtype), ALL_CODES.view(256, 1).repeat(1, 8), torch.float32
    )


@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_codes_with_all_scales_dequantize_exactly(fmt: MXFormat, dtype: torch.dtype) -> None:
    mx = all_codes_and_scales(fmt)
    values = torch.from_numpy(exact.values(fmt, raw(mx.qdata), raw(mx.scale)[:, :1]))
    # fp32 holds every value or overflows, so going by it rounds to the other dtypes once.
    torch.testing.assert_close(mx.dequantize(dtype), values.float().to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values.float().double()[:240].nan_to_num(), values[:240].nan_to_num())


@both_formats
def test_every_code_and_scale_that_fp32_holds_survives_a_round_trip(fmt: MXFormat) -> None:
    """RCEIL never changes values: a block's largest code asks for a scale at most its own, and nothing saturates."""
    values = all_codes_and_scales(fmt).dequantize()
    blocks = values[values.isfinite().view(256, 8, 32).all(2).repeat_interleave(32, 1)].view(-1, 32)
    assert len(blocks) > 1500
    again = quantize(blocks, fmt=fmt).dequantize()
    assert torch.equal(again.view(torch.int32), blocks.view(torch.int32))


shapes = st.tuples(
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(0, 3).map(lambda n: 32 * n),
    st.integers(0, 3).map(lambda n: 32 * n),
).map(lambda parts: (*parts[0], parts[1], parts[2]))


@settings(max_examples=40, deadline=None)
@given(shape=shapes, fmt=st.sampled_from(FORMATS), mode=st.sampled_from(MODES), seed=st.integers(0, 99))
def test_the_axes_agree_for_any_shape(shape: tuple[int, ...], fmt: MXFormat, mode: ScaleMode, seed: int) -> None:
    x = gaussian(*shape, seed=seed, dtype=torch.bfloat16)
    rows = quantize(x, fmt=fmt, mode=mode)
    columns = quantize(x, fmt=fmt, mode=mode, axis=-2)
    assert rows.scale.shape == (*shape[:-1], shape[-1] // 32)
    assert columns.scale.shape == (*shape[:-2], shape[-2] // 32, shape[-1])
    assert rows.shape == columns.shape == rows.qdata.shape == columns.qdata.shape == shape
    assert_same(columns, quantize(x.mT, fmt=fmt, mode=mode).mT)
    if x.shape[-2] and x.shape[-1]:
        by_row, amax = quantize_with_amax(x, fmt=fmt, mode=mode)
        by_column = quantize_columns_with_amax(x, amax, fmt=fmt, mode=mode)
        for axis, by_amax in ((-1, by_row), (-2, by_column)):
            alone = quantize(x, fmt=fmt, mode=mode, axis=axis, block_size=None)
            assert_same(by_amax, alone)
            assert by_amax.block_size == alone.block_size
            if x.numel():  # where nothing lies has no meaning
                assert by_amax.qdata.stride() == alone.qdata.stride()
                assert by_amax.scale.stride() == alone.scale.stride()
    if x.numel():
        assert_bytes(rows.qdata, exact.quantize_rows(fmt, mode, x)[0])


def test_three_dimensional_weights_are_their_matrices_one_by_one() -> None:
    x = gaussian(3, 64, 96, dtype=torch.bfloat16)
    for axis in (-1, -2, TILES):
        whole = quantize(x, axis=axis)
        for i in range(3):
            assert_same(whole[i], quantize(x[i], axis=axis))


@pytest.mark.parametrize(("axis", "twin"), [(1, -1), (0, -2), ((0, 1), TILES), ((-1, -2), TILES), ([0, 1], TILES)])
def test_positive_axes_are_the_negative_ones(axis: int, twin: int) -> None:
    x = gaussian(64, 32)
    assert_same(quantize(x, axis=axis), quantize(x, axis=twin))


def test_columns_and_rows_are_stored_along_their_blocks() -> None:
    x = gaussian(64, 96)
    assert quantize(x).qdata.stride() == (96, 1)
    columns = quantize(x, axis=-2)
    assert columns.qdata.stride() == (1, 64)
    assert columns.scale.is_contiguous()


def test_strided_and_broadcast_inputs_quantize_like_their_copies() -> None:
    buffer = gaussian(64, 200)
    for x in (buffer[::2, 8:72], buffer[:, :64].mT, gaussian(1, 64).expand(32, 64)):
        for axis in (-1, -2, TILES):
            mx, of_copy = quantize(x, axis=axis), quantize(x.contiguous(), axis=axis)
            assert_same(mx, of_copy)
            assert mx.qdata.stride() == of_copy.qdata.stride()
            assert mx.scale.stride() == of_copy.scale.stride()


@both_formats
@all_modes
def test_a_tile_shares_the_scale_of_its_largest_element(fmt: MXFormat, mode: ScaleMode) -> None:
    w = gaussian(64, 96)
    w[40, 70] = float("nan")
    tiles = quantize(w, fmt=fmt, mode=mode, axis=TILES)
    flat = w.view(2, 32, 3, 32).transpose(1, 2).reshape(6, 1024)
    qdata, byte = exact.quantize_rows(fmt, mode, flat, block_size=1024)
    assert_bytes(tiles.scale, byte.reshape(2, 3))
    assert_bytes(tiles.qdata, qdata.reshape(2, 3, 32, 32).transpose(0, 2, 1, 3).reshape(64, 96))


@both_formats
@all_modes
@pytest.mark.parametrize("axis", [-1, -2])
def test_without_blocks_a_whole_row_or_column_has_one_scale(fmt: MXFormat, mode: ScaleMode, axis: int) -> None:
    x = gaussian(40, 24)
    mx = quantize(x, fmt=fmt, mode=mode, axis=axis, block_size=None)
    qdata, byte = exact.quantize_rows(fmt, mode, x if axis == -1 else x.mT.contiguous(), block_size=x.shape[axis])
    assert mx.block_size == x.shape[axis]
    assert_bytes(mx.qdata if axis == -1 else mx.qdata.mT, qdata)
    assert_bytes(mx.scale if axis == -1 else mx.scale.mT, byte)


def test_columns_come_later_than_rows_by_the_columns_amax() -> None:
    x = gaussian(3, 40, 24, dtype=torch.bfloat16)
    _, amax = quantize_with_amax(x)
    assert torch.equal(amax, x.float().abs().amax(-2))
    for wrong in (amax[0], amax[:, :1], amax.bfloat16(), amax.to("meta")):
        with pytest.raises(ValueError, match=r"amax: got .*want torch.float32 \(3, 24\) on cpu"):
            quantize_columns_with_amax(x, wrong)


def test_a_nan_takes_its_whole_row_and_column_and_no_more() -> None:
    x = gaussian(3, 40, 24, dtype=torch.bfloat16)
    x[1, 5, 7] = float("nan")
    by_row, amax = quantize_with_amax(x)
    for by_column in (quantize_columns_with_amax(x, amax), quantize(x, axis=-2, block_size=None)):
        rows, columns = by_row.dequantize().isnan(), by_column.dequantize().isnan()
        assert rows[1, 5].all()
        assert columns[1, :, 7].all()
        assert (rows.sum(), columns.sum()) == (24, 40)


def test_blocks_may_have_another_length() -> None:
    x = gaussian(8, 256)
    qdata, byte = exact.quantize_rows(E4M3, ScaleMode.RCEIL, x, block_size=128)
    mx = quantize(x, block_size=128)
    assert_bytes(mx.qdata, qdata)
    assert_bytes(mx.scale, byte)


def test_rceil_and_e4m3_are_the_defaults() -> None:
    x = gaussian(4, 64)
    assert_same(quantize(x), quantize(x, fmt=E4M3, mode=ScaleMode.RCEIL, axis=-1, block_size=32))
    by_row, amax = quantize_with_amax(x)
    assert_same(by_row, quantize_with_amax(x, fmt=E4M3, mode=ScaleMode.RCEIL)[0])
    assert_same(
        quantize_columns_with_amax(x, amax), quantize_columns_with_amax(x, amax, fmt=E4M3, mode=ScaleMode.RCEIL)
    )


@pytest.mark.parametrize("axis", [-1, -2, TILES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_gradient_passes_unchanged_in_the_dtype_of_x(axis: int, dtype: torch.dtype) -> None:
    x = gaussian(32, 64, dtype=dtype).requires_grad_()
    mx = quantize(x, axis=axis)
    assert mx.dtype == dtype
    assert mx.requires_grad
    weight = gaussian(32, 64, seed=1, dtype=dtype)
    (mx.dequantize() * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("block_size", [32, None])
def test_the_gradients_of_both_orientations_add_up(block_size: int | None) -> None:
    x = gaussian(32, 64).requires_grad_()
    rows, columns = (quantize(x, axis=axis, block_size=block_size) for axis in (-1, -2))
    (rows.dequantize() + 2 * columns.dequantize()).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(4, 33), {}, r"\(4, 33\).*multiple of the block, 32"),
        (torch.zeros(33, 32), {"axis": -2}, r"\(33, 32\).*axis -2.*32"),
        (torch.zeros(32, 48), {"axis": TILES}, r"\(32, 48\).*axis -1"),
        (torch.zeros(32), {}, r"\(32,\).*two axes"),
        (torch.zeros(2, 32, 32), {"axis": 0}, r"axis: got 0.*last two, or both"),
        (torch.zeros(32, 32), {"axis": 2}, r"axis: got 2"),
        (torch.zeros(32, 32), {"axis": (-1, -1)}, r"axis: got \(-1, -1\)"),
        (torch.zeros(32, 32), {"axis": TILES, "block_size": None}, r"block_size: got None for 2-D blocks"),
        (torch.zeros(32, 32), {"block_size": 0}, r"block_size: got 0"),
        (torch.zeros(32, 32), {"block_size": -32}, r"block_size: got -32"),
        (torch.zeros(32, 0), {"block_size": None}, r"block_size: got 0.*\(32, 0\)"),
        (torch.zeros(32, 32, dtype=torch.int32), {}, r"got dtype torch.int32.*bfloat16"),
        (torch.zeros(32, 32, dtype=torch.float64), {}, r"got dtype torch.float64"),
        (torch.zeros(32, 32, dtype=torch.uint8).view(torch.float8_e4m3fn), {}, r"got dtype torch.float8_e4m3fn"),
        (torch.zeros(32, 32), {"mode": "rceiling"}, r"mode: got 'rceiling'.*rceil"),
        (torch.zeros(32, 32), {"fmt": torch.float8_e4m3fn}, r"fmt: got torch.float8_e4m3fn.*E4M3 or E5M2"),
    ],
)
def test_bad_input_names_got_and_wanted(x: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(x, **options)


def test_quantizing_twice_or_columns_without_elements_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"got an MXTensor.*requantize"):
        quantize(quantize(torch.zeros(32, 32)))
    with pytest.raises(ValueError, match=r"block_size: got 0 for shape \(0, 32\)"):
        quantize_with_amax(torch.zeros(0, 32))


OPS = torch.ops.mxep


@pytest.mark.parametrize("op", ["quantize_rows", "quantize_columns", "quantize_2d"])
def test_opcheck_quantize(op: str) -> None:
    x = gaussian(2, 64, 96, dtype=torch.bfloat16)
    for layout, fmt in ((x, E4M3), (x.mT, E5M2)):
        torch.library.opcheck(getattr(OPS, op).default, (layout, fmt.dtype, "rceil", 32))


def test_opcheck_quantize_into_room() -> None:
    x = gaussian(5, 96, dtype=torch.bfloat16)
    opcheck = torch.library.opcheck
    # Rows behind x's hold anything, so a trace's are others.
    opcheck(
        OPS.quantize_into_room.default, (x, 16, E4M3.dtype, "rceil", 32), test_utils=["test_schema", "test_faketensor"]
    )


@pytest.mark.parametrize("block_size", [32, None])
@pytest.mark.parametrize("rows", [0, 1, 5, 16])
def test_rows_with_room_for_more_have_the_bytes_of_those_without(rows: int, block_size: int | None) -> None:
    x = gaussian(rows, 96, dtype=torch.bfloat16)
    got, want = quantize(x, block_size=block_size, room=16), quantize(x, block_size=block_size)
    assert got.shape == (16, 96)
    assert torch.equal(got.qdata[:rows].view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(got.scale[:rows].view(torch.uint8), want.scale.view(torch.uint8))


@pytest.mark.parametrize(("shape", "axis", "room"), [((5, 96), -1, 4), ((1, 5, 96), -1, 16), ((64, 96), -2, 64)])
def test_room_is_for_rows_and_holds_them_all(shape: tuple[int, ...], axis: int, room: int) -> None:
    with pytest.raises(ValueError, match=rf"quantize: got room={room} for x .*, axis {axis}, want x"):
        quantize(gaussian(*shape), axis=axis, room=room)


def test_opcheck_whole_rows_and_columns() -> None:
    x = gaussian(2, 48, 40)
    torch.library.opcheck(OPS.quantize_per_row.default, (x, None, None, E4M3.dtype, "rceil"))
    for z in (None, x[0]):
        torch.library.opcheck(OPS.quantize_joined_rows.default, (x[0], x[1, :, :24], z, E4M3.dtype, "rceil"))
    torch.library.opcheck(OPS.quantize_per_column.default, (x, None, None, x.abs().amax(-2), E4M3.dtype, "rceil"))


@pytest.mark.parametrize("index", [None, torch.tensor([1, -1, 0], dtype=torch.int32)])
def test_opcheck_dequantize_and_materialize(index: Tensor | None) -> None:
    mx = quantize(gaussian(4, 64), fmt=E5M2)
    check_op(OPS.dequantize.default, mx.qdata, mx.scale, 1, 32, index, torch.bfloat16)
    check_op(OPS.materialize.default, mx.qdata, mx.scale, index)


def test_opcheck_expand_scale() -> None:
    check_op(OPS.expand_scale.default, quantize(gaussian(64, 64), axis=TILES).scale, 32)
