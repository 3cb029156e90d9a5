"""E2M1 (MXFP4): codes, packing and scales against float64 derivations, and an MXTensor that holds them."""

import io
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mxep.gemm import grouped_mm
from mxep.quant import (
    E2M1,
    E4M3,
    MXTensor,
    ScaleMode,
    fold_for_wgrad,
    format_of,
    gather_swizzled,
    group_sums,
    pad_groups,
    quantize,
    requantize,
    swiglu_backward_quantize,
    to_mxfp8,
)
from mxep.quant import formats as subject
from quant import exact
from quant.exact import MODES, Bytes, Floats, assert_bytes, raw
from quant.inputs import gaussian
from quant.opchecks import check_op

E8M0 = torch.float8_e8m0fnu
CODES = torch.arange(16, dtype=torch.uint8)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GPT_OSS_K = 2880
every_mode = pytest.mark.parametrize("mode", MODES)
both_axes = pytest.mark.parametrize("axis", [-1, -2])


def nearest_codes(x: Floats) -> Bytes:
    """Code of each x by its definition: the least distance, of two equal ones the even code, in rationals."""

    def nearest(value: float) -> int:
        size = Fraction(abs(value))
        return min(range(8), key=lambda code: (abs(Fraction(VALUES[code]) - size), code % 2))

    return np.vectorize(nearest, otypes=[np.uint8])(x) + 8 * np.signbit(x).astype(np.uint8)


def quantized_in_float64(mode: ScaleMode, x: Tensor, block: int = 32) -> tuple[Bytes, Bytes]:
    """Packed bytes (..., K/2) and scale bytes (..., K/block)."""
    blocks = x.double().numpy().reshape(*x.shape[:-1], -1, block)
    with np.errstate(invalid="ignore"):
        scale = exact.scale_of_amax(E2M1, mode, np.abs(blocks).max(-1, keepdims=True))
    bad = scale == 255
    codes = nearest_codes(np.where(bad, 0.0, blocks) * 2.0 ** (127 - scale.astype(np.float64)))
    codes = np.where(bad, 7, codes).reshape(x.shape)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), scale[..., 0]


def tensor_of(packed: Tensor, scale: Tensor, **how: Any) -> MXTensor:
    return MXTensor.from_qdata_and_scales(packed.view(E2M1.dtype), scale, torch.float32, **how)


def test_the_format_describes_its_dtype() -> None:
    assert (E2M1.max, E2M1.max_exponent, E2M1.elements_per_byte) == (6.0, 2, 2)
    assert format_of(torch.float4_e2m1fn_x2) is E2M1


def test_all_sixteen_codes_have_the_values_of_their_fields() -> None:
    assert subject.decode_e2m1(CODES).tolist() == [*VALUES, *(-value for value in VALUES)]
    assert subject.decode_e2m1(CODES)[8].signbit()
    for code in range(8):
        exponent, mantissa = code >> 1, code & 1
        assert VALUES[code] == (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    assert torch.equal(subject.encode_e2m1(subject.decode_e2m1(CODES)), CODES)


def test_encoding_is_the_nearest_code_everywhere() -> None:
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = [torch.nextafter(between, torch.tensor(to)) for to in (torch.inf, 0.0)]
    x = torch.cat([torch.arange(-800, 801) / 100, gaussian(2000) * 3, *near, torch.tensor([1e30, 2.0**-149, 0.0])])
    x = torch.cat([x, -x])
    assert_bytes(subject.encode_e2m1(x), nearest_codes(x.double().numpy()))
    assert subject.encode_e2m1(torch.tensor([torch.inf, -torch.inf, torch.nan])).tolist() == [7, 15, 7]


def test_the_even_element_lies_in_the_low_four_bits() -> None:
    assert raw(subject.pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8))).tolist() == [0x21, 0x0F]
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = subject.unpack(every.view(E2M1.dtype))
    assert codes.shape == (4, 128)
    assert_bytes(subject.pack(codes), raw(every))


@every_mode
def test_quantize_equals_the_float64_derivation(mode: ScaleMode) -> None:
    for x in (exact.hostile_rows(), gaussian(40, 96), gaussian(3, 5, 64, dtype=torch.bfloat16)):
        packed, scale = quantized_in_float64(mode, x)
        mx = quantize(x, fmt=E2M1, mode=mode)
        assert_bytes(mx.qdata, packed)
        assert_bytes(mx.scale, scale)


@every_mode
def test_quantizing_around_every_threshold_of_a_scale(mode: ScaleMode) -> None:
    middles = torch.tensor([m * 2.0**e for m in (1.0, 1.25, 1.5, 1.75) for e in (-149 + 23, -130 + 23, -20, 0, 1, 125)])
    near = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, torch.inf)]
    x = torch.zeros(3 * len(middles), 32)
    x[:, 7] = torch.cat([middles, *near])
    packed, scale = quantized_in_float64(mode, x)
    mx = quantize(x, fmt=E2M1, mode=mode)
    assert_bytes(mx.scale, scale)
    assert_bytes(mx.qdata, packed)
    if mode == ScaleMode.RCEIL:
        assert bool((mx.dequantize().abs().amax(1) >= x[:, 7] * 0.8).all()), "saturated"


def test_dequantizing_every_code_under_every_scale() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)[:, None]
    want = subject.decode_e2m1(subject.unpack(packed.view(E2M1.dtype))).double().numpy()
    byte = raw(scale).astype(np.float64)
    want = want * np.where(byte == 255, np.nan, 2.0 ** (byte - 127))
    got = tensor_of(packed, scale).dequantize()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.double().numpy(), want.astype(np.float32).astype(np.float64))
    assert got[0].abs().max() == 6 * 2.0**-127  # byte 0 is 2**-127, a subnormal of fp32


def test_gpt_oss_bytes_are_taken_as_they_lie() -> None:
    """blocks (E, N, K/32, 16) and scales (E, N, K/32), K = 2880, which is no multiple of 128."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, GPT_OSS_K // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (2, 6, GPT_OSS_K // 32), dtype=torch.uint8, generator=generator)
    mx = tensor_of(blocks.flatten(-2), scales)
    assert mx.shape == (2, 6, GPT_OSS_K)
    low, high = blocks & 15, blocks >> 4
    value = torch.tensor([*VALUES, *(-value for value in VALUES)])
    want = torch.stack([value[low.int()], value[high.int()]], -1).flatten(-2) * 2.0 ** (scales.float() - 127)[..., None]
    assert torch.equal(mx.dequantize(), want.flatten(-2))
    assert mx.qdata.data_ptr() == blocks.data_ptr()


@both_axes
def test_a_tensor_of_it_moves_and_cuts_as_others_do(axis: int) -> None:
    mx = quantize(gaussian(2, 64, 96), fmt=E2M1, axis=axis)
    values = mx.dequantize()
    assert (mx.shape, mx.dtype, mx.format, mx.axis) == ((2, 64, 96), torch.float32, E2M1, axis)
    assert mx.qdata.shape == ((2, 64, 48) if axis == -1 else (2, 32, 96))
    assert values.is_contiguous()
    for got, want in (
        (mx.mT, values.mT),
        (mx[1], values[1]),
        (mx[:, 32:], values[:, 32:]),
        (mx[..., 32:96], values[..., 32:96]),
        (mx.split([32, 64], 2)[1], values[..., 32:]),
        (torch.cat([mx, mx], 1), torch.cat([values, values], 1)),
        (torch.cat([mx, mx], 2), torch.cat([values, values], 2)),
        (mx.index_select(0, torch.tensor([1, 0])), values.flip(0)),
        (mx.clone(), values),
        (mx.mT.materialize(), values.mT),
        (mx.to("cpu", copy=True), values),
        (torch.empty_like(mx).copy_(mx), values),
    ):
        assert isinstance(got, MXTensor)
        assert got.shape == want.shape
        assert torch.equal(got.dequantize(), want)
    assert repr(mx).startswith("MXTensor(shape=(2, 64, 96), E2M1, ")


def test_columns_are_rows_of_the_transposed_tensor() -> None:
    x = gaussian(64, 48)
    a, b = quantize(x, fmt=E2M1, axis=-2), quantize(x.mT, fmt=E2M1).mT
    assert_bytes(a.qdata, raw(b.qdata))
    assert_bytes(a.scale, raw(b.scale))
    assert a.shape == b.shape == (64, 48)


def test_a_transposed_tensor_is_made_contiguous() -> None:
    mx = quantize(gaussian(64, 96), fmt=E2M1).mT
    for made in (mx.contiguous(), mx.to(mx.device, copy=True, memory_format=torch.contiguous_format)):
        assert made.qdata.is_contiguous()
        assert torch.equal(made.dequantize(), mx.dequantize())


@both_axes
def test_it_may_have_no_elements_along_its_blocks(axis: int) -> None:
    mx = quantize(torch.empty(0, 0), fmt=E2M1, axis=axis)
    assert mx.dequantize().shape == to_mxfp8(mx).dequantize().shape == (0, 0)


def test_rows_by_an_index_views_and_one_scale_a_row() -> None:
    mx = quantize(gaussian(6, 64), fmt=E2M1)
    values = mx.dequantize()
    picked = mx.with_parts(mx.qdata, mx.scale, torch.tensor([5, -1, 0], dtype=torch.int32))
    assert picked.shape == (3, 64)
    want = torch.stack([values[5], torch.zeros(64), values[0]])
    assert torch.equal(picked.dequantize(), want)
    assert torch.equal(picked.materialize().dequantize(), want)
    assert torch.equal(mx.view(2, 3, 64).dequantize(), values.view(2, 3, 64))
    assert quantize(gaussian(6, 90), fmt=E2M1, block_size=None).scale.shape == (6, 1)


def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    mx, file = quantize(gaussian(4, 64), fmt=E2M1), io.BytesIO()
    torch.save(mx, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert (again.format, again.shape) == (E2M1, (4, 64))
    assert_bytes(again.qdata, raw(mx.qdata))


def test_gradients_pass_straight_through_eager_and_compiled() -> None:
    def loss(x: Tensor) -> Tensor:
        return (quantize(x, fmt="E2M1", mode="floor").dequantize() * torch.arange(64)).sum()

    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x = gaussian(3, 64).requires_grad_()
        fn(x).backward()
        assert torch.equal(x.grad, torch.arange(64.0).expand(3, 64))  # type: ignore[arg-type]


def test_ops_pass_opcheck() -> None:
    mx = quantize(gaussian(4, 64), fmt=E2M1)
    check_op(torch.ops.mxep.quantize_rows.default, gaussian(2, 3, 64), E2M1.dtype, "floor", 32)
    check_op(torch.ops.mxep.dequantize.default, mx.qdata, mx.scale, 1, 32, None, torch.bfloat16)
    index = torch.tensor([3, -1], dtype=torch.int32)
    check_op(torch.ops.mxep.dequantize.default, mx.qdata, mx.scale, 1, 32, index, torch.float32)


def test_bad_arguments_say_what_they_got() -> None:
    mx = quantize(gaussian(32, 64), fmt=E2M1)
    with pytest.raises(ValueError, match=r"got shape \(2, 48\), want axis -1 a multiple of the block, 32"):
        quantize(gaussian(2, 48), fmt=E2M1)
    with pytest.raises(ValueError, match=r"block_size: got 33 for E2M1, want an even number"):
        quantize(gaussian(2, 33), fmt=E2M1, block_size=None)
    with pytest.raises(ValueError, match=r"axis: got 2-D blocks of E2M1, want -1 or -2"):
        quantize(gaussian(32, 32), fmt=E2M1, axis=(-2, -1))
    with pytest.raises(ValueError, match=r"quantize: got room=64 for E2M1"):
        quantize(gaussian(32, 32), fmt=E2M1, room=64)
    with pytest.raises(
        ValueError,
        match=r"scales: got .* of shape \(32, 1\) on .*, want .* of shape \(32, 2\) on cpu for qdata \(32, 64\)",
    ):
        MXTensor.from_qdata_and_scales(mx.qdata, mx.scale[:, :1])
    with pytest.raises(ValueError, match=r"got shape \(32, 48\), want axis -1 a multiple of the block, 32"):
        MXTensor.from_qdata_and_scales(mx.qdata[:, :24], mx.scale[:, :1])
    with pytest.raises(ValueError, match=r"qdata|no MX format stores its qdata as torch.uint8"):
        MXTensor.from_qdata_and_scales(mx.qdata.view(torch.uint8), mx.scale)
    with pytest.raises(ValueError, match=r"slice of an MXTensor along its blocked axis -1: got \[0:16:1\]"):
        mx[:, :16]


def test_what_takes_a_byte_an_element_refuses_it() -> None:
    mx, offs = quantize(gaussian(32, 64), fmt=E2M1), torch.tensor([32], dtype=torch.int32)
    row_scaled = quantize(gaussian(32, 64), fmt=E2M1, block_size=None)
    for use, name in (
        (lambda: requantize(mx), "requantize"),
        (lambda: fold_for_wgrad(mx, mx, offs), "x"),
        (lambda: gather_swizzled(mx), "gather_swizzled"),
        (lambda: swiglu_backward_quantize(gaussian(32, 32), row_scaled), "gate_up"),
    ):
        with pytest.raises(ValueError, match=f"{name}: got E2M1, want E4M3 or E5M2"):
            use()
    with pytest.raises(ValueError, match=r"fmt: got E2M1, want E4M3 or E5M2"):
        requantize(quantize(gaussian(32, 64)), fmt=E2M1)
    with pytest.raises(ValueError, match=r"a: got MXTensor\(.*E2M1"):
        grouped_mm(mx, gaussian(1, 32, 64), offs, recipe="mxfp8")
    with pytest.raises(NotImplementedError, match="want shape, format"):
        mx.copy_(quantize(gaussian(32, 64), fmt=E4M3))


def test_groups_are_summed_and_padded_as_values_are() -> None:
    mx, offs = quantize(gaussian(32, 64), fmt=E2M1), torch.tensor([8, 32], dtype=torch.int32)
    assert torch.equal(group_sums(mx, offs), group_sums(mx.dequantize(), offs))
    sizes = torch.tensor([8, 24], dtype=torch.int32)
    padded, plain = pad_groups(mx, sizes, alignment=32), pad_groups(mx.dequantize(), sizes, alignment=32)
    assert isinstance(padded.rows, MXTensor)
    assert torch.equal(padded.rows.dequantize()[:64], plain.rows[:64])
