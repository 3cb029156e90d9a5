"""MX number formats (OCP Microscaling v1.0): element formats, and how a block of 32 elements gets its scale.

An MX block is 32 elements q and one scale byte b in e8m0. Their values are q * 2**(b - 127); 255 means NaN.
E4M3 and E5M2 take a byte per element (MXFP8), E2M1 half a byte (MXFP4).

    amax (fp32) --scale_of_amax--> scale (uint8) --power_of_two--> 2**(scale - 127)   to dequantize
                                                 --reciprocal----> 2**(127 - scale)   to quantize

torch's casts to float8_e8m0fnu round otherwise, so scales are made from the bits of fp32: sign, 8 exponent bits with
the bias of e8m0, 127, 23 mantissa bits. Example: amax 480 = 1.875 * 2**8 has exponent field 135, so FLOOR for E4M3 is
135 - 8 = 127. RCEIL takes 480 / 448 = 1.07: exponent field 127, mantissa not zero, so 128.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

BLOCK = 32
"""Elements per scale byte of an MX block."""

SCALE_DTYPE = torch.float8_e8m0fnu
"""Storage dtype of scales, 1 byte: an exponent with bias 127, no sign, no mantissa."""


@dataclass(frozen=True)
class MXFormat:
    """An element format of MX.

    name: "E4M3", "E5M2" or "E2M1".
    dtype: torch's dtype of the qdata, 1 byte.
    max: largest finite magnitude (448, 57344 or 6).
    max_exponent: floor(log2(max)) (8, 15 or 2).
    mantissa_bits: explicit mantissa bits (3, 2 or 1).
    elements_per_byte: 1, or 2 for E2M1: byte i holds elements 2i (low four bits) and 2i + 1 of the blocked axis.
    """

    name: str
    dtype: torch.dtype
    max: float
    max_exponent: int
    mantissa_bits: int
    elements_per_byte: int = 1

    def __repr__(self) -> str:
        return self.name


E4M3 = MXFormat("E4M3", torch.float8_e4m3fn, 448.0, 8, 3)
E5M2 = MXFormat("E5M2", torch.float8_e5m2, 57344.0, 15, 2)
E2M1 = MXFormat("E2M1", torch.float4_e2m1fn_x2, 6.0, 2, 1, elements_per_byte=2)


def format_of(dtype: torch.dtype) -> MXFormat:
    """The format that stores qdata as `dtype`. Raises ValueError if there is none."""
    for fmt in (E4M3, E5M2, E2M1):
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(f"no MX format stores its qdata as {dtype}: want {E4M3.dtype}, {E5M2.dtype} or {E2M1.dtype}")


class ScaleMode(StrEnum):
    """Rule for a block's scale, given its largest magnitude, amax.

    FLOOR: 2**(floor(log2 amax) - max_exponent), the OCP text: elements above `max` saturate.
    CEIL: 2**(ceil(log2 amax) - max_exponent): never saturates, wastes up to a binade.
    EVEN: FLOOR of amax rounded to the element's mantissa: saturates less than FLOOR.
    RCEIL: 2**ceil(log2(amax / max)), as in Blackwell's hardware: the smallest that never saturates. The default.
    """

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RCEIL = "rceil"


NAN_SCALE = 255
_MANTISSA = 0x7FFFFF
_SIGN = -0x80000000
_INF = 0x7F800000
_NAN = 0x7FC00000
_TWO_TO_MINUS_127 = 0x400000  # a subnormal in fp32: its exponent field is 0


def scale_of_amax(amax: Tensor, fmt: MXFormat, mode: ScaleMode) -> Tensor:
    """Scales (uint8) of blocks with largest magnitude |amax| (fp32): 0 (2**-127) if too small, 255 for NaN and Inf."""
    bits = amax.view(torch.int32) & ~_SIGN  # the maximum of NaNs may be a negative NaN
    match mode:
        case ScaleMode.FLOOR:
            scale = (bits >> 23) - fmt.max_exponent
        case ScaleMode.CEIL:
            scale = (bits + _MANTISSA >> 23) - fmt.max_exponent
        case ScaleMode.EVEN:
            half_an_ulp = 1 << 22 - fmt.mantissa_bits
            scale = (bits + half_an_ulp >> 23) - fmt.max_exponent
        case ScaleMode.RCEIL:
            ratio = (bits.view(torch.float32) * (1.0 / fmt.max)).view(torch.int32)
            scale = torch.where(ratio <= _TWO_TO_MINUS_127, 0, ratio + _MANTISSA >> 23)
    return torch.where(bits >= _INF, NAN_SCALE, scale.clamp(0, NAN_SCALE - 1)).to(torch.uint8)


def power_of_two(scale: Tensor) -> Tensor:
    """2**(scale - 127) in fp32, exact for uint8 scales 0 to 254; NaN for 255."""
    exponent = scale.to(torch.int32)
    bits = torch.where(exponent == 0, _TWO_TO_MINUS_127, exponent << 23)
    return torch.where(exponent == NAN_SCALE, _NAN, bits).view(torch.float32)


def reciprocal(scale: Tensor) -> Tensor:
    """2**(127 - scale) in fp32, exact for uint8 scales 0 to 254; NaN for 255."""
    return power_of_two(254 - scale)  # uint8 wraps: 254 - 255 is 255 again
