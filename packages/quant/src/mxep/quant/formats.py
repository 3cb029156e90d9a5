"""MX number formats (OCP Microscaling v1.0): element formats, and how a block of 32 elements gets its scale.

An MX block is 32 elements q and one scale byte b in e8m0. The values are q * 2**(b - 127). If b is 255, all are NaN.
An element of E4M3 or E5M2 (MXFP8) takes one byte, an element of E2M1 (MXFP4) is a 4-bit code, two per byte:

    code    0   1   2   3   4   5   6   7      code 8 + c is the negative of code c (8 is -0)
    value   0  .5   1  1.5  2   3   4   6

    element   0    1    2    3   ...           along the blocked axis
    byte     [ 0, 1 ]  [ 2, 3 ]  ...           the even element is in the low four bits, the odd one in the high four

gpt-oss, DeepSeek-V4 and compressed-tensors pack E2M1 in the same way. It has no NaN: in a block with NaN or Inf, scale
255 stands for it, and all codes are 7.

A scale is computed from amax, the largest magnitude of its block:

    amax (fp32) --scale_of_amax--> scale (uint8) --power_of_two--> 2**(scale - 127)   to dequantize
                                                 --reciprocal----> 2**(127 - scale)   to quantize

Scales are computed from the bits of the fp32 amax, because torch's cast to float8_e8m0fnu rounds in another way. An
fp32 number has a sign bit, 8 exponent bits and 23 mantissa bits, and its exponent bias is 127, as in e8m0.

Example for E4M3: amax 480 = 1.875 * 2**8 has exponent bits 8 + 127 = 135. FLOOR gives 135 - 8 = 127, with 8 the
max_exponent of E4M3. RCEIL divides first: 480 / 448 = 1.07 has exponent bits 127. Its mantissa is not zero, so the
scale is rounded up to 128.
"""

import itertools
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

BLOCK = 32
"""Elements per scale byte of an MX block."""

SCALE_DTYPE = torch.float8_e8m0fnu
"""Storage dtype of scales. Its one byte is an exponent with bias 127, without sign and mantissa."""


@dataclass(frozen=True)
class MXFormat:
    """An element format of MX.

    name: "E4M3", "E5M2" or "E2M1".
    dtype: torch's dtype of the qdata, 1 byte wide.
    max: largest finite magnitude: 448, 57344 or 6.
    max_exponent: floor(log2(max)): 8, 15 or 2.
    elements_per_byte: 1, or 2 for E2M1.
    """

    name: str
    dtype: torch.dtype
    max: float
    max_exponent: int
    elements_per_byte: int = 1

    def __repr__(self) -> str:
        return self.name


E4M3 = MXFormat("E4M3", torch.float8_e4m3fn, 448.0, 8)
E5M2 = MXFormat("E5M2", torch.float8_e5m2, 57344.0, 15)
E2M1 = MXFormat("E2M1", torch.float4_e2m1fn_x2, 6.0, 2, elements_per_byte=2)


def format_of(dtype: torch.dtype) -> MXFormat:
    """The MXFormat with qdata of `dtype`. Raises ValueError if there is none."""
    for fmt in (E4M3, E5M2, E2M1):
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(f"no MX format stores its qdata as {dtype}: want {E4M3.dtype}, {E5M2.dtype} or {E2M1.dtype}")


class ScaleMode(StrEnum):
    """Rule that computes a block's scale from amax, its largest magnitude.

    FLOOR: 2**(floor(log2(amax)) - max_exponent), the rule of the OCP specification. Scaled elements above the format's
        max saturate.
    RCEIL: 2**ceil(log2(amax / max)), as Blackwell computes it. The smallest scale with which nothing saturates, and
        the default.
    """

    FLOOR = "floor"
    RCEIL = "rceil"


NAN_SCALE = 255
_MANTISSA = 0x7FFFFF
_SIGN = -0x80000000
_INF = 0x7F800000
_NAN = 0x7FC00000
_TWO_TO_MINUS_127 = 0x400000  # a subnormal in fp32: its exponent field is 0


def scale_of_amax(amax: Tensor, fmt: MXFormat, mode: ScaleMode) -> Tensor:
    """Scale of each block (uint8) from its amax (fp32, sign ignored).

    A scale below 2**-127 becomes 0, which means 2**-127. An amax of NaN or Inf gives 255.
    """
    bits = amax.view(torch.int32) & ~_SIGN  # the sign bit may be set: the maximum of NaNs may be a negative NaN
    if mode == ScaleMode.FLOOR:
        scale = (bits >> 23) - fmt.max_exponent
    else:
        ratio = (bits.view(torch.float32) * (1.0 / fmt.max)).view(torch.int32)
        scale = torch.where(ratio <= _TWO_TO_MINUS_127, 0, ratio + _MANTISSA >> 23)
    return torch.where(bits >= _INF, NAN_SCALE, scale.clamp(0, NAN_SCALE - 1)).to(torch.uint8)


def power_of_two(scale: Tensor) -> Tensor:
    """2**(scale - 127) in fp32. scale: uint8. Exact for 0 to 254, NaN for 255."""
    exponent = scale.to(torch.int32)
    bits = torch.where(exponent == 0, _TWO_TO_MINUS_127, exponent << 23)
    return torch.where(exponent == NAN_SCALE, _NAN, bits).view(torch.float32)


def reciprocal(scale: Tensor) -> Tensor:
    """2**(127 - scale) in fp32. scale: uint8. Exact for 0 to 254, NaN for 255."""
    return power_of_two(254 - scale)  # uint8 wraps: 254 - 255 is 255 again


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of E2M1's codes 0 to 7."""


def encode_e2m1(x: Tensor) -> Tensor:
    """Round x (fp32) to codes (uint8): to nearest, ties to the even code, saturated at 6.

    -0 keeps its sign. NaN becomes 7. Examples of ties: 0.75 lies between codes 1 and 2 and becomes code 2; 5 lies
    between codes 6 and 7 and becomes code 6.
    """
    size = x.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for lower, (a, b) in enumerate(itertools.pairwise(_MAGNITUDES)):
        middle = (a + b) / 2
        codes += ~(size <= middle) if lower % 2 == 0 else ~(size < middle)  # a tie goes up only to an even code
    return codes | x.signbit().to(torch.uint8) << 3


def decode_e2m1(codes: Tensor) -> Tensor:
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
