"""Requantization to the byte: as if the exact values had been quantized the other way."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxep.quant import E4M3, E5M2, MXFormat, MXTensor, ScaleMode, quantize, requantize
from quant import exact, inputs
from quant.exact import FORMATS, MODES, assert_bytes, raw
from quant.inputs import assert_same
from quant.opchecks import check_op

TILES = (-2, -1)
ALL_CODES = torch.arange(256, dtype=torch.uint8)
both_formats = pytest.mark.parametrize("fmt", FORMATS, ids=repr)
all_modes = pytest.mark.parametrize("mode", MODES)

gaussian = functools.partial(inputs.gaussian, dtype=torch.bfloat16)


def random_bytes(fmt: MXFormat, rows: int, columns: int, *, scales: tuple[int, int]) -> MXTensor:
    """Random qdata, NaN and Inf among them, with random scale bytes in [scales)."""
    generator = torch.Generator().manual_seed(5)
    qdata = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8)
    byte = torch.randint(*scales, (rows, columns // 32), generator=generator).to(torch.uint8)
    return MXTensor.from_qdata_and_scales(qdata.view(fmt.dtype), byte)


def exact_values(mx: MXTensor) -> exact.Floats:
    """Values (R, D) of row-blocked qdata as fp32 has them: what it cannot hold is Inf."""
    qdata = raw(mx.qdata).reshape(mx.shape[0], -1, 32)
    values = exact.values(mx.format, qdata, raw(mx.scale)[..., None]).reshape(mx.shape)
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(np.float64)


def assert_requantized(mx: MXTensor, fmt: MXFormat, mode: ScaleMode) -> None:
    values = exact_values(mx).T
    qdata, byte = exact.quantize_blocks(fmt, mode, values.reshape(len(values), -1, 32))
    got = requantize(mx, fmt=fmt, mode=mode).mT
    assert_bytes(got.scale, byte[..., 0])
    assert_bytes(got.qdata, qdata.reshape(values.shape))


@all_modes
@pytest.mark.parametrize("scales", [(0, 256), (0, 24), (100, 140), (236, 256)])
def test_requantize_matches_float64_for_random_codes_and_scales(mode: ScaleMode, scales: tuple[int, int]) -> None:
    fmt = FORMATS[(MODES.index(mode) + scales[0] // 50) % 2]
    mx = random_bytes(fmt, 256, 64, scales=scales)
    mx.qdata.view(torch.uint8)[:, 32:] &= 0xBB  # half of the columns without NaN and Inf
    assert_requantized(mx, fmt, mode)


@all_modes
@pytest.mark.parametrize(("source", "target"), [(E4M3, E5M2), (E5M2, E4M3)])
def test_requantize_into_the_other_format_matches_float64(source: MXFormat, target: MXFormat, mode: ScaleMode) -> None:
    assert_requantized(random_bytes(source, 64, 64, scales=(90, 150)), target, mode)


def all_codes_and_scales(fmt: MXFormat) -> MXTensor:
    """(256, 256): row b holds the 256 qdata with scale byte b."""
    return MXTensor.from_qdata_and_scales(ALL_CODES.repeat(256, 1).view(fmt.dtype), ALL_CODES.view(256, 1).repeat(1, 8))


@both_formats
@all_modes
def test_requantizing_twice_changes_nothing_for_all_codes_and_scales(fmt: MXFormat, mode: ScaleMode) -> None:
    once = requantize(all_codes_and_scales(fmt), mode=mode)
    assert_same(requantize(once, mode=mode), once)


@both_formats
def test_rceil_keeps_every_value_when_the_blocks_stay(fmt: MXFormat) -> None:
    mx = all_codes_and_scales(fmt).mT
    values = mx.dequantize(torch.float32)
    fits = values.isfinite().view(8, 32, 256).all(1).repeat_interleave(32, 0)
    again = requantize(mx).dequantize(torch.float32)
    assert torch.equal(again[fits].view(torch.int32), values[fits].view(torch.int32))


def test_codes_past_the_range_of_fp32_become_nan_as_the_inf_they_dequantize_to() -> None:
    mx = quantize(torch.full((32, 32), exact.FP32_MAX))
    assert mx.dequantize().isinf().all()  # 256 * 2**120
    assert requantize(mx).dequantize().isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    rest=st.lists(st.integers(0, 2), max_size=2),
    rows=st.integers(0, 3),
    columns=st.integers(1, 3),
    source=st.sampled_from([-1, -2, TILES]),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 99),
)
def test_requantize_is_quantizing_the_dequantized_values(
    rest: list[int], rows: int, columns: int, source: int, mode: ScaleMode, seed: int
) -> None:
    mx = quantize(gaussian(*rest, 32 * rows, 32 * columns, seed=seed), axis=source)
    got = requantize(mx, mode=mode)
    assert_same(got, quantize(mx.dequantize(torch.float32), axis=-2, mode=mode))
    assert got.dtype == torch.bfloat16
    assert got.block_size == 32


def test_row_scaled_codes_can_be_requantized() -> None:
    mx = quantize(gaussian(64, 96), block_size=None)
    assert_same(requantize(mx), quantize(mx.dequantize(torch.float32), axis=-2))


def test_columns_come_out_contiguous_along_the_tokens() -> None:
    got = requantize(quantize(gaussian(64, 96)))
    assert got.qdata.stride() == (1, 64)
    assert got.scale.is_contiguous()


def test_a_row_index_is_gathered_on_the_way() -> None:
    mx = quantize(gaussian(8, 64))
    index = torch.randint(-1, 8, (64,), generator=torch.Generator().manual_seed(1)).int()
    indexed = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=index)
    got = requantize(indexed)
    assert got.row_index is None
    assert_same(got, requantize(indexed.materialize()))


@pytest.mark.parametrize("ends", [[64, 64, 96], [0, 0, 0], [32, 96, 160]])
@pytest.mark.parametrize("indexed", [False, True])
def test_rows_past_the_last_group_are_not_read(ends: list[int], indexed: bool) -> None:
    mx = quantize(gaussian(160, 64))
    valid = ends[-1]
    want = requantize(mx[:valid])
    if indexed:
        index = torch.arange(160, dtype=torch.int32)
        index[valid:] = 10**9
        mx = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=index)
    else:
        mx.qdata.view(torch.uint8)[valid:] = 0x7F
        mx.scale.view(torch.uint8)[valid:] = 255
    got = requantize(mx, offs=torch.tensor(ends, dtype=torch.int32))
    assert got.shape == (160, 64)
    assert_same(got[:valid], want)


def test_the_gradient_passes_unchanged() -> None:
    mx = quantize(gaussian(32, 64)).requires_grad_()
    weight = gaussian(32, 64, seed=1)
    (requantize(mx).dequantize() * weight).sum().backward()
    assert type(mx.grad) is Tensor
    assert torch.equal(mx.grad, weight)


def test_bad_input_names_got_and_wanted() -> None:
    mx = quantize(torch.zeros(40, 64))
    with pytest.raises(ValueError, match=r"got a Tensor.*quantize it"):
        requantize(torch.zeros(32, 32))
    with pytest.raises(ValueError, match=r"got shape \(40, 64\).*axis -2 a multiple of the block, 32"):
        requantize(mx)
    mx = mx[:32]
    with pytest.raises(ValueError, match=r"fmt: got torch.float8_e5m2"):
        requantize(mx, fmt=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"mode: got 'up'"):
        requantize(mx, mode="up")
    with pytest.raises(ValueError, match=r"offs: got torch.int64"):
        requantize(mx, offs=torch.tensor([32]))
    with pytest.raises(ValueError, match=r"offs\[-1\].* 41"):
        requantize(mx, offs=torch.tensor([41], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"offs\[-1\] 31.*multiple of 32"):
        requantize(mx, offs=torch.tensor([31], dtype=torch.int32))


def test_opcheck_requantize() -> None:
    mx, index, ends = quantize(gaussian(64, 96)), torch.arange(-1, 63).int(), torch.tensor([32, 32]).int()
    for vectors in ((None, None), (index, ends)):
        check_op(torch.ops.mxep.requantize.default, mx.qdata, mx.scale, 1, 32, *vectors, E5M2.dtype, "floor")
