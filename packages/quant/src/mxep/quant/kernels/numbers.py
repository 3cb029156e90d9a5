"""MX numbers on the device: `mxep.quant.scales`, bit for bit.

Scale bytes are int32 here, 0 to 255. Element formats are named by Triton's dtypes, tl.float8e4nv and tl.float8e5.
Casts to them saturate and round to nearest even, and make 0x7f of any NaN.
"""

import torch
import triton
import triton.language as tl

NAN_BYTE = tl.constexpr(255)
_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MANTISSA = tl.constexpr(0x7FFFFF)
_TWO_TO_MINUS_127 = tl.constexpr(0x400000)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Scales as Triton takes them: uint8, as it has no e8m0."""
    return x.view(torch.uint8)


@triton.jit
def abs_bits(x):
    """The bits of |x| (x fp32) as int32. They sort as the magnitudes do, Inf above all numbers, NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(bits, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """Scale byte (int32) of a block whose largest `abs_bits` are `bits`, for qdata of DTYPE."""
    E4M3: tl.constexpr = DTYPE == tl.float8e4nv
    MAX_EXPONENT: tl.constexpr = 8 if E4M3 else 15
    if MODE == "rceil":
        reciprocal_of_max: tl.constexpr = 1.0 / 448.0 if E4M3 else 1.0 / 57344.0
        ratio = (bits.to(tl.float32, bitcast=True) * reciprocal_of_max).to(tl.int32, bitcast=True)
        byte = tl.where(ratio <= _TWO_TO_MINUS_127, 0, (ratio + _MANTISSA) >> 23)
    elif MODE == "floor":
        byte = (bits >> 23) - MAX_EXPONENT
    elif MODE == "ceil":
        byte = ((bits + _MANTISSA) >> 23) - MAX_EXPONENT
    else:
        tl.static_assert(MODE == "even")
        byte = ((bits + (0x80000 if E4M3 else 0x100000)) >> 23) - MAX_EXPONENT
    if MODE != "rceil":
        byte = tl.maximum(byte, 0)
    return tl.where(bits >= _INF, NAN_BYTE, byte)


@triton.jit
def power_of_two(byte):
    """2**(byte - 127) in fp32, for bytes 0 to 254; NaN for 255."""
    bits = tl.maximum(byte << 23, _TWO_TO_MINUS_127)
    return tl.where(byte == NAN_BYTE, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(byte):
    """2**(127 - byte) in fp32, for bytes 0 to 253 (`scale_byte` makes none above 247); NaN for 255."""
    return tl.where(byte == NAN_BYTE, _NAN, (254 - byte) << 23).to(tl.float32, bitcast=True)
