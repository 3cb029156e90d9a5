"""Block FP8: read and written, at any size, against float64; and as MXFP8 where its scales are powers of two."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mxep.quant import (
    E2M1,
    E4M3,
    E5M2,
    BlockFP8,
    MXTensor,
    fold_with_stats,
    quantize,
    quantize_blocks,
    rescale_blocks,
    to_mxfp8,
)
from mxep.quant.formats import power_of_two
from quant import exact
from quant.exact import assert_bytes, raw

E8M0 = torch.float8_e8m0fnu
SCALES = (torch.float32, torch.bfloat16, torch.float16, E8M0)
SIZES = [((256, 384), (128, 128)), ((576, 192), (128, 128)), ((160, 192), (128, 128)), ((70, 100), (32, 32))]
SIZES += [((5, 96), (1, 96)), ((5, 96), (5, 96)), ((3, 7), (128, 128)), ((2, 130, 64), (128, 128))]
CASES = [(*size, SCALES[(i + j) % 4]) for i, size in enumerate(SIZES) for j in (0, 1)]
every_size = pytest.mark.parametrize(("shape", "block", "scale_dtype"), CASES)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1), generator=torch.Generator().manual_seed(seed))


def scale_values(scale: Tensor) -> np.ndarray:
    return (power_of_two(scale.view(torch.uint8)) if scale.dtype == E8M0 else scale).double().numpy()


def at_each_element(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    row, column = np.arange(shape[-2]) // block[0], np.arange(shape[-1]) // block[1]
    return scale[..., row[:, None], column[None, :]]


@every_size
def test_dequantizing_is_the_product_rounded_once(
    shape: tuple[int, ...], block: tuple[int, int], scale_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    grid = *shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1])
    if scale_dtype == E8M0:
        scale = torch.randint(0, 240, grid, dtype=torch.uint8, generator=generator).view(E8M0)
    else:
        scale = (torch.rand(grid, generator=generator) * 1e-3).to(scale_dtype)
    weight = BlockFP8(codes.view(E4M3.dtype), scale, block)
    values = exact.code_values(E4M3)[codes.numpy()] * at_each_element(scale_values(scale), shape, block)
    in_fp32 = torch.from_numpy(values).float()
    assert torch.equal(weight.dequantize(torch.float32).nan_to_num(9), in_fp32.nan_to_num(9))
    assert torch.equal(weight.dequantize().nan_to_num(9), in_fp32.bfloat16().nan_to_num(9))
    assert weight.dequantize().is_contiguous()
    assert weight.shape == shape


@every_size
def test_quantizing_equals_the_definition(
    shape: tuple[int, ...], block: tuple[int, int], scale_dtype: torch.dtype
) -> None:
    x = gaussian(*shape)
    x[..., : block[0], : block[1]] *= 1e-3
    got = quantize_blocks(x, block_size=block, scale_dtype=scale_dtype)
    rows, columns = math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1])
    assert got.scale.shape == (*shape[:-2], rows, columns)
    assert got.scale.dtype == scale_dtype
    values = x.double().numpy()
    for i in range(rows):
        for j in range(columns):
            part = values[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            want = np.abs(part).max((-2, -1)) / 448
            if scale_dtype == E8M0:
                want = 2.0 ** np.ceil(np.log2(want))
            else:
                want = np.maximum(want, torch.finfo(scale_dtype).smallest_normal)
            want = torch.from_numpy(np.asarray(want)).float().to(torch.float32 if scale_dtype == E8M0 else scale_dtype)
            np.testing.assert_array_equal(scale_values(got.scale)[..., i, j], want.double().numpy())
    divided = x / torch.from_numpy(at_each_element(scale_values(got.scale), shape, block)).float()
    assert_bytes(got.qdata, exact.nearest_codes(E4M3, divided.double().numpy()))


def test_zero_blocks_get_scale_1_and_a_block_with_nan_or_inf_becomes_nan() -> None:
    x = torch.ones(6, 4)
    x[:2], x[2, 1], x[5, 3] = 0.0, torch.nan, torch.inf
    for scale_dtype in SCALES:
        weight = quantize_blocks(x, block_size=(2, 4), scale_dtype=scale_dtype)
        assert scale_values(weight.scale)[0, 0] == 1.0
        assert np.isnan(scale_values(weight.scale)[1:]).all()
        assert raw(weight.qdata)[2:].tolist() == [[0x7F] * 4] * 4
        values = weight.dequantize()
        assert not values[:2].any()
        assert bool(values[2:].isnan().all())


def test_the_smallest_and_the_largest_values_keep_a_scale() -> None:
    x = torch.tensor([[2.0**-149, 2.0**-140, 3e38, -3e38]])
    for scale_dtype in (torch.float32, torch.bfloat16, E8M0):
        weight = quantize_blocks(x, block_size=(1, 2), scale_dtype=scale_dtype)
        values = weight.dequantize(torch.float32)
        assert bool(values.isfinite().all())
        assert values[0, 2] > 2.7e38
        assert values[0, 1] <= 2.0**-139


def test_scales_in_fp16_stay_normal_where_values_are_small() -> None:
    """amax / 448 is 0 in fp16 for the first block, and has two bits for the second."""
    x = torch.tensor([[1e-6, 0.0, 4e-5, -3e-5]])
    values = quantize_blocks(x, block_size=(1, 2), scale_dtype=torch.float16).dequantize(torch.float32)
    assert values[0, 1] == 0
    # Half a step of E4M3: 2**-4 of a value, or half of 2**-9, times 2**-14, for the smallest.
    assert ((values - x).abs() <= x.abs() / 16 + 2.0**-24).all()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, E8M0])
def test_power_of_two_scales_are_seen_in_any_dtype(scale_dtype: torch.dtype) -> None:
    weight = quantize_blocks(gaussian(300, 320), scale_dtype=E8M0)
    stored = power_of_two(weight.scale.view(torch.uint8)).to(scale_dtype) if scale_dtype != E8M0 else weight.scale
    again = BlockFP8(weight.qdata, stored)
    exponents = again.scale_exponents()
    assert exponents is not None
    assert_bytes(exponents, raw(weight.scale))
    mx = to_mxfp8(again, dtype=torch.float32)
    assert (mx.shape, mx.format, mx.block_size, mx.scale.shape) == ((300, 320), E4M3, 32, (300, 10))
    assert torch.equal(mx.dequantize(), again.dequantize(torch.float32))
    assert mx.qdata.data_ptr() == weight.qdata.data_ptr()


def test_ends_of_the_range_of_exponents() -> None:
    scale = torch.tensor([[2.0**-127, 2.0**127, torch.nan, 1.0]])
    exponents = BlockFP8(torch.zeros(1, 4).to(E4M3.dtype), scale, (1, 1)).scale_exponents()
    assert exponents is not None
    assert raw(exponents).tolist() == [[0, 254, 255, 127]]
    for other in (2.0**-128, 3.0, 0.0, -1.0, torch.inf):
        assert BlockFP8(torch.zeros(1, 1).to(E4M3.dtype), torch.tensor([[other]]), (1, 1)).scale_exponents() is None


def test_experts_with_e8m0_scales_fold_exactly_in_range() -> None:
    weight = quantize_blocks(gaussian(2, 160, 192), scale_dtype=E8M0)
    mx = to_mxfp8(weight)
    folded, stats = fold_with_stats(mx)
    exact_rows = stats.exact
    assert exact_rows.shape == (2, 160)
    same = (folded.dequantize(torch.float32) == weight.dequantize(torch.float32)).all(-1)
    assert torch.equal(same, exact_rows)
    assert bool(exact_rows.any())


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_rescaled_blocks_fold_and_say_what_they_cost(scale_dtype: torch.dtype) -> None:
    x = gaussian(2, 160, 192)
    weight = quantize_blocks(x, scale_dtype=scale_dtype)
    rescaled, snr = rescale_blocks(weight)
    assert rescaled.scale.dtype == E8M0
    assert (rescaled.shape, rescaled.block_size) == (weight.shape, weight.block_size)
    before, after = weight.dequantize(torch.float32).double(), rescaled.dequantize(torch.float32).double()
    for expert in range(2):
        want = 10 * math.log10(float(before[expert].square().sum() / (after[expert] - before[expert]).square().sum()))
        assert float(snr[expert]) == pytest.approx(want)
        assert 29 < want < 36  # E4M3's rounding: its steps are 2**-4 to 2**-3 of a value
    assert to_mxfp8(rescaled).shape == (2, 160, 192)


def test_an_expert_of_zeros_is_rescaled_without_loss() -> None:
    _, snr = rescale_blocks(quantize_blocks(torch.stack([torch.zeros(64, 64), gaussian(64, 64)])))
    assert snr[0] == torch.inf
    assert 29 < snr[1] < 36


def test_power_of_two_scales_are_rescaled_to_themselves() -> None:
    weight = quantize_blocks(gaussian(70, 96), scale_dtype=E8M0)
    stored = BlockFP8(weight.qdata, power_of_two(weight.scale.view(torch.uint8)))
    rescaled, snr = rescale_blocks(stored)
    assert_bytes(rescaled.scale, raw(weight.scale))
    assert rescaled.qdata is weight.qdata
    assert (snr.shape, float(snr)) == ((), math.inf)


def test_mxfp8_itself_is_returned_as_it_is() -> None:
    for fmt in (E4M3, E5M2):
        mx = quantize(gaussian(4, 64), fmt=fmt)
        same = to_mxfp8(mx, dtype=torch.bfloat16)
        assert (same.qdata.data_ptr(), same.format, same.dtype) == (mx.qdata.data_ptr(), fmt, torch.bfloat16)


def test_bad_arguments_say_what_they_got() -> None:
    codes, scale = torch.zeros(576, 64).to(E4M3.dtype), torch.ones(5, 1)
    for make, text in (
        (lambda: BlockFP8(codes.float(), scale), "expected qdata of torch.float8_e4m3fn, got torch.float32"),
        (lambda: BlockFP8(codes, scale.int()), "expected a scale of .*, got torch.int32"),
        (
            lambda: BlockFP8(codes, scale[:4]),
            r"expected a scale of shape \(5, 1\) for qdata \(576, 64\) .* got \(4, 1\)",
        ),
        (lambda: BlockFP8(codes, scale.to("meta")), "expected a scale on cpu, got meta"),
        (lambda: BlockFP8(codes, scale, (0, 128)), r"block_size: expected \(rows, columns\), both positive, got \(0"),
        (lambda: BlockFP8(codes[0], scale), r"expected qdata \(..., N, K\), got shape \(64,\)"),
        (lambda: BlockFP8(codes, scale).dequantize(torch.float64), "dequantize: expected dtype"),
        (lambda: quantize_blocks(torch.ones(4)), r"expected x \(..., N, K\), got shape \(4,\)"),
        (lambda: quantize_blocks(torch.ones(4, 4), scale_dtype=torch.int8), "expected scale_dtype"),
        (lambda: quantize_blocks(torch.ones(4, 4).int()), "got dtype torch.int32"),
        (lambda: to_mxfp8(BlockFP8(codes, scale * 3)), "expected power-of-two scales, got others in torch.float32"),
        (lambda: to_mxfp8(BlockFP8(codes[:, :40], scale)), "expected K and block columns in multiples of 32, got 40"),
        (lambda: to_mxfp8(torch.ones(4)), "expected an MXTensor or BlockFP8, got a Tensor"),  # type: ignore[arg-type]
        (lambda: to_mxfp8(BlockFP8(codes, scale), dtype=torch.float64), "to_mxfp8: expected dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            make()


def test_an_mxfp4_tensor_keeps_axis_and_index() -> None:
    mx = quantize(gaussian(4, 64), fmt=E2M1)
    indexed = MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=torch.tensor([3, -1], dtype=torch.int32))
    wide = to_mxfp8(indexed)
    assert wide.row_index is not None
    assert torch.equal(wide.dequantize(), indexed.dequantize())


def test_the_transpose_has_the_transposed_values_and_blocks() -> None:
    x = quantize_blocks(torch.randn(2, 96, 160), block_size=(32, 128))
    assert x.mT.block_size == (128, 32)
    assert torch.equal(x.mT.dequantize(), x.dequantize().mT)


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
def test_copies_have_the_same_bytes_in_other_memory(scale_dtype: torch.dtype) -> None:
    x = quantize_blocks(gaussian(2, 130, 64), scale_dtype=scale_dtype)
    again = copy.deepcopy(x)
    assert (again.block_size, again.scale.dtype) == (x.block_size, scale_dtype)
    assert (raw(again.qdata) == raw(x.qdata)).all()
    assert torch.equal(again.scale_values(), x.scale_values())
    assert again.qdata.data_ptr() != x.qdata.data_ptr()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_blocks_of_whole_rows_become_scales_of_rows(rows: int) -> None:
    blocks = quantize_blocks(gaussian(3, 5, 96), block_size=(rows, 96), scale_dtype=torch.bfloat16)
    got = blocks.by_rows()
    assert (got.block_size, tuple(got.scale.shape), got.scale.dtype) == ((1, 96), (3, 5, 1), torch.float32)
    assert torch.equal(got.dequantize(torch.float32), blocks.dequantize(torch.float32))
