"""Folding, against a float64 derivation: value * 2^-d rounded to the nearest code, over all qdata and all shifts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxep.quant import E4M3, E5M2, MXFormat, MXTensor, fold, fold_with_stats, quantize
from mxep.quant.fold import shift_qdata
from quant.exact import FORMATS, Bytes, Floats, assert_bytes, code_values, nearest_codes, raw, values
from quant.inputs import gaussian, hostile
from quant.opchecks import check_op

both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)
NAN = 255


def tensor_of(raw: Bytes, scale: Bytes, fmt: MXFormat = E4M3, **changes: object) -> MXTensor:
    qdata = torch.from_numpy(raw.copy()).view(fmt.dtype)
    return MXTensor.from_qdata_and_scales(qdata, torch.from_numpy(scale.copy()), **changes)  # type: ignore[arg-type]


def codes_of(fmt: MXFormat, moved: Floats) -> Bytes:
    """Codes of the values `moved`: NaN and Inf are 0x7f."""
    qdata = np.full(moved.shape, 0x7F, np.uint8)
    finite = np.isfinite(moved)
    qdata[finite] = nearest_codes(fmt, moved[finite])
    return qdata


def folded_in_float64(mx: MXTensor) -> tuple[Bytes, Bytes]:
    """qdata and scales of `fold`, row by row, from the definition."""
    table = code_values(mx.format)
    qdata, scales = raw(mx.qdata).copy(), raw(mx.scale).astype(int)
    out_scale = np.zeros((qdata.shape[0], 1), np.uint8)
    for r, scale in enumerate(scales):
        blocks = qdata[r].reshape(-1, mx.block_size)
        if (scale == NAN).any():
            blocks[:], out_scale[r] = 0x7F, NAN
            continue
        nonzero = (blocks & 0x7F).any(1)
        out_scale[r] = scale[nonzero].max(initial=0)
        for i in np.flatnonzero(nonzero):
            blocks[i] = codes_of(mx.format, table[blocks[i]] * 2.0 ** (scale[i] - int(out_scale[r, 0])))
    return qdata, out_scale


@both_formats
def test_every_code_under_every_shift_is_the_nearest_code(fmt: MXFormat) -> None:
    every = np.arange(256, dtype=np.uint8)
    one = np.full(32, raw(torch.ones(1).to(fmt.dtype))[0], np.uint8)
    row = np.concatenate([every, one])
    shifts = np.arange(0, 128)
    wanted = [np.concatenate([codes_of(fmt, code_values(fmt) * 2.0**-d), one]) for d in shifts]
    for low in (0, 1, 126):  # the byte of the 256 qdata; that of the top block lies d above
        scale = np.full((len(shifts), 9), low, np.uint8)
        scale[:, 8] = low + shifts
        folded = fold(tensor_of(np.tile(row, (len(shifts), 1)), scale, fmt))
        assert_bytes(folded.qdata, np.stack(wanted))
        assert_bytes(folded.scale, scale[:, 8:])


def test_the_example_of_shift_qdata() -> None:
    qdata = torch.full((4,), 0x41, dtype=torch.uint8).view(E4M3.dtype)
    assert raw(shift_qdata(qdata, torch.tensor([0, 1, 9, 19]))).tolist() == [0x41, 0x39, 0x02, 0x00]


@both_formats
def test_all_flush_at_the_first_shift_that_the_docs_name_and_not_before(fmt: MXFormat) -> None:
    last = {"E4M3": 19, "E5M2": 33}[fmt.name]
    largest = int(nearest_codes(fmt, np.array([fmt.max]))[0])
    scale = np.array([[100, 100 + last - 1], [100, 100 + last]], np.uint8)
    folded = raw(fold(tensor_of(np.full((2, 64), largest, np.uint8), scale, fmt)).qdata)
    assert (folded[0, :32] == 1).all()
    assert (folded[1, :32] == 0).all()


@settings(deadline=None, max_examples=60)
@given(
    fmt=st.sampled_from(FORMATS),
    rows=st.integers(0, 9),
    blocks=st.integers(1, 12),
    spread=st.sampled_from([1, 8, 40, 120]),
    seed=st.integers(0, 2**30),
)
def test_fold_equals_the_float64_derivation(fmt: MXFormat, rows: int, blocks: int, spread: int, seed: int) -> None:
    mx = MXTensor.from_qdata_and_scales(*hostile(fmt, (rows, 32 * blocks), seed=seed, spread=spread))
    folded = fold(mx)
    qdata, scale = folded_in_float64(mx)
    assert_bytes(folded.qdata, qdata)
    assert_bytes(folded.scale, scale)
    assert (folded.block_size, folded.axis, folded.dtype) == (mx.shape[1], -1, mx.dtype)


def test_folding_along_columns_is_folding_the_turned_tensor() -> None:
    w = gaussian(3, 64, 96) * torch.logspace(-6, 6, 64).view(1, 64, 1)
    columns = fold(quantize(w, axis=-2))
    transposed = fold(quantize(w.mT.contiguous()))
    assert columns.axis == -2
    assert columns.shape == w.shape
    assert columns.scale.shape == (3, 1, 96)
    assert columns.qdata.mT.is_contiguous()
    assert_bytes(columns.qdata.mT, raw(transposed.qdata))
    assert_bytes(columns.scale.mT, raw(transposed.scale))


def test_folding_weights_is_folding_each() -> None:
    w = quantize(gaussian(3, 8, 128) * torch.logspace(-9, 9, 128))
    folded = fold(w)
    for g in range(3):
        assert_bytes(folded.qdata[g], raw(fold(w[g]).qdata))  # type: ignore[arg-type]


@both_formats
def test_folding_twice_is_folding_once_and_one_block_is_no_change(fmt: MXFormat) -> None:
    once = fold(MXTensor.from_qdata_and_scales(*hostile(fmt, (20, 128), seed=1)))
    twice = fold(once)
    assert_bytes(twice.qdata, raw(once.qdata))
    assert_bytes(twice.scale, raw(once.scale))


def test_the_row_index_is_applied_and_minus_one_is_a_zero_row() -> None:
    mx = MXTensor.from_qdata_and_scales(*hostile(E4M3, (6, 96), seed=2))
    index = torch.tensor([5, -1, 0, 5], dtype=torch.int32)
    padded = torch.cat([mx.qdata.view(torch.uint8), torch.zeros(6, 32, dtype=torch.uint8)], 1).view(E4M3.dtype)
    strided = padded[:, :96]  # rows of a wider buffer, as slots are
    indexed = MXTensor.from_qdata_and_scales(strided, mx.scale, torch.float32, row_index=index)
    folded = fold(indexed)
    wanted = fold(mx)
    assert folded.row_index is None
    assert folded.dtype == torch.float32
    assert_bytes(folded.qdata, np.where((index < 0)[:, None], 0, raw(wanted.qdata)[index]).astype(np.uint8))
    assert_bytes(folded.scale, np.where((index < 0)[:, None], 0, raw(wanted.scale)[index]).astype(np.uint8))


@pytest.mark.parametrize("ends", [[0, 0], [3, 3], [2, 5], [0, 8]])
@pytest.mark.parametrize("indexed", [False, True])
def test_rows_past_the_last_group_do_not_matter(ends: list[int], indexed: bool) -> None:
    mx = quantize(gaussian(8, 128) * torch.logspace(-4, 4, 128))
    valid = ends[-1]
    index = torch.randperm(8, generator=torch.Generator().manual_seed(0)).int() if indexed else None
    source = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, mx.dtype, row_index=index)
    wanted, stats = fold_with_stats(source[:valid])  # type: ignore[arg-type]
    qdata, scale = (part.view(torch.uint8).clone() for part in (mx.qdata, mx.scale))
    if index is None:
        qdata[valid:], scale[valid:] = 0x7F, NAN
    else:
        index = index.clone()
        index[valid:] = 10**9
    poisoned = MXTensor.from_qdata_and_scales(qdata.view(E4M3.dtype), scale, mx.dtype, row_index=index)
    offs = torch.tensor(ends, dtype=torch.int32)
    folded, got = fold_with_stats(poisoned, offs=offs)
    assert folded.shape == (8, 128)
    assert_bytes(folded.qdata[:valid], raw(wanted.qdata))
    assert_bytes(folded.scale[:valid], raw(wanted.scale))
    assert (got.changed, got.flushed) == (stats.changed, stats.flushed)
    assert torch.equal(got.spread[:valid], stats.spread)


@both_formats
def test_folding_is_exact_within_the_range_that_the_docs_name_and_close_beyond(fmt: MXFormat) -> None:
    exact_binades, bottom = {"E4M3": (13.8, -9), "E5M2": (28.8, -16)}[fmt.name]
    amax = torch.logspace(0, -45, 4096, base=2.0)
    rows = gaussian(16, 4096).sign() * amax * torch.logspace(0, 5, 16, base=2.0).view(-1, 1)
    mx = quantize(rows, fmt=fmt)
    before, folded = mx.dequantize(torch.float32), fold(mx)
    after = folded.dequantize(torch.float32)
    safe = rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-exact_binades
    assert torch.equal(before[safe], after[safe])
    unit = torch.from_numpy(2.0 ** (raw(folded.scale).astype(np.float64) - 127))
    assert ((before - after).abs().double() <= unit * 2.0 ** (bottom - 1)).all()
    assert not torch.equal(before, after)


def test_folded_mx_is_row_scaled_fp8_but_for_subnormals() -> None:
    x = gaussian(256, 4096)
    folded, row_scaled = fold(quantize(x)), quantize(x, block_size=None)
    assert_bytes(folded.scale, raw(row_scaled.scale))
    differ = (raw(folded.qdata) != raw(row_scaled.qdata)).mean()
    assert differ < 1e-4  # 2.6e-5 in NUMERICS.md


@both_formats
def test_stats_count_what_changed_what_flushed_and_how_far_blocks_are_apart(fmt: MXFormat) -> None:
    mx = MXTensor.from_qdata_and_scales(*hostile(fmt, (40, 128), seed=3, spread=60))
    folded, stats = fold_with_stats(mx)
    plain = fold(mx)
    assert_bytes(folded.qdata, raw(plain.qdata))
    assert_bytes(folded.scale, raw(plain.scale))
    with np.errstate(invalid="ignore"):
        before = values(fmt, raw(mx.qdata).reshape(40, -1, 32), raw(mx.scale)[..., None]).reshape(40, -1)
        after = values(fmt, raw(folded.qdata), raw(folded.scale))
    counted = ~np.isnan(after)
    assert stats.changed == (counted & (before != after)).sum()
    assert stats.flushed == (counted & (before != 0) & (after == 0)).sum()
    assert 0 < int(stats.flushed) < int(stats.changed)
    assert (stats.changed.dtype, stats.flushed.dtype, stats.spread.dtype) == (torch.int64, torch.int64, torch.int32)
    nonzero = (raw(mx.qdata).reshape(40, -1, 32) & 0x7F).any(-1)
    for row in range(40):
        scale = raw(mx.scale)[row].astype(int)
        counts = (scale != NAN).all() and nonzero[row].any()
        assert int(stats.spread[row]) == (np.ptp(scale[nonzero[row]]) if counts else 0)


def test_stats_of_ordinary_rows_and_of_one_far_outlier() -> None:
    x = torch.ones(3, 64)
    x[1, 0] = 2.0**12  # the second block moves by 12, and 1.0 = 256 * 2^-8 keeps its one bit
    x[2, 0] = 2.0**20  # by 20: all of the first block's other ones are gone already, the second's follow
    _, stats = fold_with_stats(quantize(x))
    assert stats.spread.tolist() == [0, 12, 20]
    assert (int(stats.changed), int(stats.flushed)) == (32, 32)


def test_fold_ops_pass_opcheck() -> None:
    mx = quantize(gaussian(6, 128) * torch.logspace(-4, 4, 128))  # no NaN: opcheck compares values
    index = torch.tensor([3, -1, 1, 0], dtype=torch.int32)
    ends = torch.tensor([1, 3], dtype=torch.int32)
    for row_index in (None, index):
        check_op(torch.ops.mxep.fold, mx.qdata, mx.scale, row_index, ends)
    w = quantize(gaussian(2, 4, 64), fmt=E5M2)
    check_op(torch.ops.mxep.fold, w.qdata, w.scale, None, None)


def test_bad_arguments_say_what_they_got_and_what_is_wanted() -> None:
    mx = quantize(gaussian(64, 256))
    with pytest.raises(ValueError, match="got a Tensor, want an MXTensor"):
        fold(gaussian(2, 32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got 2-D blocks, want .*along"):
        fold(quantize(gaussian(64, 64), axis=(-2, -1)))
    with pytest.raises(ValueError, match=r"got torch\.int64 .*want int32"):
        fold(mx, offs=torch.tensor([64]))
    with pytest.raises(ValueError, match="got offs for axis -2, want axis -1"):
        fold_with_stats(quantize(gaussian(64, 32), axis=-2), offs=torch.tensor([64], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"got shape \(2, 4, 32\), want \(rows, columns\)"):
        fold(quantize(gaussian(2, 4, 32)), offs=torch.tensor([4], dtype=torch.int32))
    with pytest.raises(ValueError, match="got 65, want 0 to 64"):
        fold(mx, offs=torch.tensor([65], dtype=torch.int32))
