"""MX number formats (OCP Microscaling v1.0): an element format and how a block of 32 elements gets its scale.

An MX block is 32 qdata of an element format and one scale byte in e8m0: byte b means 2**(b - 127), 255 means NaN.
E4M3 and E5M2 take a byte an element (MXFP8), E2M1 half a byte (MXFP4).
A value is `code * 2**(byte - 127)`. `MXFormat` is the single home of facts about an element format.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

BLOCK = 32
"""Elements of an MX block: those that share one scale byte."""

SCALE_DTYPE = torch.float8_e8m0fnu
"""Storage dtype of scales, 1 byte: an exponent with bias 127, no sign, no mantissa."""


@dataclass(frozen=True)
class MXFormat:
    """An element format of MX.

    name: "E4M3", "E5M2" or "E2M1".
    dtype: torch's dtype of the qdata, 1 byte each.
    max: largest finite magnitude (448, 57344 or 6).
    max_exponent: floor(log2(max)) (8, 15 or 2).
    mantissa_bits: explicit mantissa bits (3, 2 or 1).
    elements_per_byte: 1, or 2 for E2M1: elements 2i and 2i+1 of the blocked axis share byte i, 2i in its low four bits.
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
    """Rule for a block's scale, given its largest magnitude, amax. `mxep.quant.scales` has the bits.

    FLOOR: 2**(floor(log2 amax) - max_exponent), the OCP text: elements above `max` saturate.
    CEIL: 2**(ceil(log2 amax) - max_exponent): never saturates, wastes up to a binade.
    EVEN: FLOOR of amax rounded to the element's mantissa: saturates less than FLOOR.
    RCEIL: 2**ceil(log2(amax / max)), as in Blackwell's hardware: never saturates, wastes nothing. The default.
    """

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RCEIL = "rceil"
