"""E2M1, the element of MXFP4: sixteen numbers, each a 4-bit code, packed two per byte.

    code    0   1   2   3   4   5   6   7      code 8 + c is the negative of code c (8 is -0)
    value   0  .5   1  1.5  2   3   4   6

    element   0    1    2    3   ...           along the blocked axis
    byte     [ 0, 1 ]  [ 2, 3 ]  ...           the even element is in the low four bits, the odd one in the high four

Source: OCP Microscaling Formats v1.0, section 5.3.3. gpt-oss, DeepSeek-V4 and compressed-tensors pack in the same way.
Quantized elements are rounded to nearest, with ties to the even code, and saturate at 6. The format has no NaN. A block
with NaN or Inf gets scale 255, and all its codes are 7.

Shapes: x (..., K), codes (..., K) uint8, qdata (..., K/2) float4_e2m1fn_x2, scale (..., K/block) e8m0, with block the
number of elements per scale.
"""

import itertools

import torch
from torch import Tensor

from mxep.quant.formats import E2M1, E4M3, NAN_SCALE, SCALE_DTYPE, ScaleMode, power_of_two, reciprocal, scale_of_amax
from mxep.quant.ops import NAN_ELEMENT, pick_mx
from mxep.quant.shapes import num_rows
from mxep.runtime.op import op

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of each code from 0 to 7."""
NAN_CODE = 7
HEADROOM = 6
"""Largest s for which every E2M1 number * 2**s is an E4M3 number: 6 * 2**6 = 384, and E4M3's max is 448."""


def encode(x: Tensor) -> Tensor:
    """Round x (fp32) to codes (uint8): to nearest, ties to the even code, saturated at 6.

    -0 keeps its sign. NaN becomes 7. Examples of ties: 0.75 lies between codes 1 and 2 and becomes code 2; 5 lies
    between codes 6 and 7 and becomes code 6.
    """
    size = x.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for lower, (a, b) in enumerate(itertools.pairwise(MAGNITUDES)):
        middle = (a + b) / 2
        codes += ~(size <= middle) if lower % 2 == 0 else ~(size < middle)  # a tie goes up only to an even code
    return codes | x.signbit().to(torch.uint8) << 3


def decode(codes: Tensor) -> Tensor:
    """Values (fp32) of codes (uint8, 0 to 15, any shape)."""
    magnitude = codes.int() & 7
    bits = (126 + (magnitude >> 1)) << 23 | (magnitude & 1) << 22
    values = torch.where(magnitude > 1, bits, magnitude * 0x3F000000).view(torch.float32)  # 0 and 0.5 are subnormal
    return torch.where(codes > 7, -values, values)


def pack(codes: Tensor) -> Tensor:
    """Codes (..., K) uint8, K even -> qdata (..., K/2) float4_e2m1fn_x2."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(E2M1.dtype)


def unpack(qdata: Tensor) -> Tensor:
    """qdata (..., K/2) float4_e2m1fn_x2 -> codes (..., K) uint8, contiguous."""
    both = qdata.view(torch.uint8)
    return torch.stack((both & 0xF, both >> 4), -1).flatten(-2)


def widen(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert E2M1 to E4M3 with exactly the same values.

    Elements are multiplied by 2**s and the scale is reduced by s, with s = min(6, scale). A block with scale 255 (NaN)
    keeps that scale and gets elements 0x7f.

    Args:
        qdata: (..., K/2) float4_e2m1fn_x2.
        scale: (..., K/block) e8m0.
    Returns:
        qdata: (..., K) float8_e4m3fn.
        scale: (..., K/block) e8m0.
    """
    bytes_ = scale.view(torch.uint8).int().unsqueeze(-1)
    nan = bytes_ == NAN_SCALE
    up = bytes_.clamp(max=HEADROOM)
    blocks = _blocks(decode(unpack(qdata)), scale)
    wide = (blocks * power_of_two(127 + up)).to(E4M3.dtype)
    wide.view(torch.uint8).masked_fill_(nan, NAN_ELEMENT)
    new_scale = torch.where(nan, NAN_SCALE, bytes_ - up).to(torch.uint8).squeeze(-1)
    return wide.flatten(-2), new_scale.view(SCALE_DTYPE)


@op(
    "mxep::quantize_e2m1",
    fake=lambda x, mode, block_size: (
        x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=E2M1.dtype),
        x.new_empty((*x.shape[:-1], x.shape[-1] // block_size), dtype=SCALE_DTYPE),
    ),
    launcher="mxep.quant.kernels.e2m1:quantize_e2m1",
)
def quantize(x: Tensor, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x (..., K) bf16 | fp32 | fp16 -> qdata (..., K/2) float4_e2m1fn_x2, scale (..., K/block_size) e8m0."""
    blocks = torch.unflatten(x.float().contiguous(), -1, (x.shape[-1] // block_size, block_size))
    scale = scale_of_amax(blocks.abs().amax(-1, keepdim=True), E2M1, ScaleMode(mode))
    codes = encode(blocks * reciprocal(scale)).masked_fill_(scale == NAN_SCALE, NAN_CODE)
    return pack(codes.flatten(-2)), scale.squeeze(-1).view(SCALE_DTYPE)


@op(
    "mxep::dequantize_e2m1",
    fake=lambda qdata, scale, row_index, dtype: qdata.new_empty(
        (*qdata.shape[:-2], num_rows(qdata, row_index), 2 * qdata.shape[-1]), dtype=dtype
    ),
    launcher="mxep.quant.kernels.requantize:dequantize_e2m1",
)
def dequantize(qdata: Tensor, scale: Tensor, row_index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Values in `dtype`, rounded once from the exact fp32 values.

    Args:
        qdata: (..., N, K/2); with a row index (N, K/2).
        scale: (..., N, K/block_size) e8m0.
        row_index: (R,) int32 or None; -1 gives a row of zeros.
    Returns:
        (..., N, K) `dtype`, or (R, K) with a row index.
    """
    qdata, scale = pick_mx(qdata, scale, row_index)
    blocks = _blocks(decode(unpack(qdata)), scale)
    return (blocks * power_of_two(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def _blocks(values: Tensor, scale: Tensor) -> Tensor:
    """values (..., K), scale (..., K/block) -> (..., K/block, block). K may be 0."""
    return torch.unflatten(values, -1, (scale.shape[-1], values.shape[-1] // max(1, scale.shape[-1])))
