"""MX number formats (OCP Microscaling v1.0): an 8-bit element format and how a block of 32 elements gets its scale.

An MX block is 32 qdata of an element format and one scale byte in e8m0: byte b means 2**(b - 127), 255 means NaN.
A value is `code * 2**(byte - 127)`. `MXFormat` is the single home of what is known about an element format.
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

    name: "E4M3" or "E5M2".
    dtype: torch's dtype of the qdata, 1 byte an element.
    max: largest finite magnitude (448 or 57344).
    max_exponent: floor(log2(max)) (8 or 15).
    mantissa_bits: explicit mantissa bits (3 or 2).
    """

    name: str
    dtype: torch.dtype
    max: float
    max_exponent: int
    mantissa_bits: int

    def __repr__(self) -> str:
        return self.name


E4M3 = MXFormat("E4M3", torch.float8_e4m3fn, 448.0, 8, 3)
E5M2 = MXFormat("E5M2", torch.float8_e5m2, 57344.0, 15, 2)


def format_of(dtype: torch.dtype) -> MXFormat:
    """The format whose qdata are stored as `dtype`; ValueError if no MX format is."""
    for fmt in (E4M3, E5M2):
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(f"no MX format stores its qdata as {dtype}: want {E4M3.dtype} or {E5M2.dtype}")


class ScaleMode(StrEnum):
    """How a block's scale follows from its largest magnitude, amax; `mxep.quant.scales` has the bits.

    FLOOR: 2**(floor(log2 amax) - max_exponent), the OCP text: elements above `max` saturate.
    CEIL: 2**(ceil(log2 amax) - max_exponent): never saturates, wastes up to a binade.
    EVEN: FLOOR of amax rounded to the element's mantissa: saturates less than FLOOR.
    RCEIL: 2**ceil(log2(amax / max)), what Blackwell's hardware does: never saturates, wastes nothing. The default.
    """

    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"
    RCEIL = "rceil"
