"""Code that kernels of all packages share: Triton device functions, and helpers of launchers.

    scales   abs_bits -> scale_of_amax -> reciprocal           to quantize: `mxep.quant.formats`, bit for bit
             power_of_two                                      to dequantize
             shifted                                           to fold: `mxep.quant.fold.shift_qdata`
             half_of_e2m1                                      to decode MXFP4
    groups   valid_rows, group_bounds                          ranges of the groups' rows
    host     rows_of, num_sms, on_hopper                       for launchers

Scales are int32 here, 0 to 255. Element formats are Triton's dtypes tl.float8e4nv and tl.float8e5. Casts to them
saturate, round to nearest even, and turn any NaN into 0x7f.

The host cannot check `offs` without a sync, so kernels clamp them to the rows of the buffer. If offs are too large,
negative or out of order, results are unspecified, but nothing outside the buffer is read or written.
"""

import functools
import os

import torch
import triton
import triton.language as tl

NAN_SCALE = tl.constexpr(255)
_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MANTISSA = tl.constexpr(0x7FFFFF)
_TWO_TO_MINUS_127 = tl.constexpr(0x400000)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x (..., R, n) as (rows, n) with contiguous rows; a copy only if the strides need one."""
    x = x.flatten(0, -2)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of SMs of the device; 1 under the interpreter. For a meta device, that of the current GPU."""
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_hopper(**options: int) -> dict[str, int]:
    """Launch options that were measured on sm_90, for that target only."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return {}
    from triton.runtime import driver

    return options if driver.active.get_current_target().arch == 90 else {}


@triton.jit
def abs_bits(x):
    """Bits of |x| (x fp32) as int32. They sort like the magnitudes, with Inf above all numbers and NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_amax(bits, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """Scale (int32) of a block with largest `abs_bits` `bits`, for qdata of DTYPE; tl.uint8 is E2M1."""
    E4M3: tl.constexpr = DTYPE == tl.float8e4nv
    E2M1: tl.constexpr = DTYPE == tl.uint8
    MAX_EXPONENT: tl.constexpr = 8 if E4M3 else 2 if E2M1 else 15
    if MODE == "rceil":
        reciprocal_of_max: tl.constexpr = 1.0 / 448.0 if E4M3 else 1.0 / 6.0 if E2M1 else 1.0 / 57344.0
        ratio = (bits.to(tl.float32, bitcast=True) * reciprocal_of_max).to(tl.int32, bitcast=True)
        scale = tl.where(ratio <= _TWO_TO_MINUS_127, 0, (ratio + _MANTISSA) >> 23)
    elif MODE == "floor":
        scale = (bits >> 23) - MAX_EXPONENT
    elif MODE == "ceil":
        scale = ((bits + _MANTISSA) >> 23) - MAX_EXPONENT
    else:
        tl.static_assert(MODE == "even")
        half_an_ulp: tl.constexpr = 0x80000 if E4M3 else 0x200000 if E2M1 else 0x100000
        scale = ((bits + half_an_ulp) >> 23) - MAX_EXPONENT
    if MODE != "rceil":
        scale = tl.maximum(scale, 0)
    return tl.where(bits >= _INF, NAN_SCALE, scale)


@triton.jit
def power_of_two(scale):
    """2**(scale - 127) in fp32, for scales 0 to 254; NaN for 255."""
    bits = tl.maximum(scale << 23, _TWO_TO_MINUS_127)
    return tl.where(scale == NAN_SCALE, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scale):
    """2**(127 - scale) in fp32, for scales 0 to 253 (`scale_of_amax` makes none above 247); NaN for 255."""
    return tl.where(scale == NAN_SCALE, _NAN, (254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_power_of_two(exponent, is_nan):
    """2**exponent in fp16, for exponents (int32) -24 to 15 (the cast makes subnormals), or NaN."""
    bits = tl.where(is_nan, _NAN, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def shifted(qdata, shift, is_nan):
    """The values qdata * 2**-shift in fp16. Cast to the format of qdata they equal `mxep.quant.fold.shift_qdata`.

    qdata: fp8. shift: int32, not negative. is_nan: True to make NaN. Both broadcast to qdata.
    NaN and Inf become NaN. Exact unless the cast gives 0: other values are above 2**-10 (E4M3) or 2**-17 (E5M2) and
    have 4 or 3 significant bits, so they are multiples of fp16's smallest number, 2**-24.
    """
    values = qdata.to(tl.float16)
    if qdata.dtype == tl.float8e4nv:
        values *= _half_power_of_two(-tl.minimum(shift, 19), is_nan)
    else:
        shift = tl.minimum(shift, 33)
        first = tl.minimum(shift, 9)  # 2**-33 is no fp16 number
        zero_or_nan = values * 0.0
        values *= _half_power_of_two(-first, is_nan)
        values = values * _half_power_of_two(first - shift, is_nan) + zero_or_nan
    return values


@triton.jit
def half_of_e2m1(code):
    """Values (fp16) of E2M1 codes (int32, 0 to 15). Read as fp16, the shifted code is 2**14 times too small."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def valid_rows(offs_ptr, num_groups, rows):
    """End of the last group, at most `rows`; `rows` if offs_ptr is None. A negative end means no rows."""
    if offs_ptr is None:
        return rows
    else:
        return tl.minimum(tl.load(offs_ptr + num_groups - 1), rows)


@triton.jit
def group_bounds(group, offs_ptr, num_groups, rows):
    """(start, end) of the groups `group` (indices), clamped to [0, rows]. start > end if offs are out of order."""
    end = tl.load(offs_ptr + group, mask=group < num_groups, other=0)
    start = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group < num_groups), other=0)
    return tl.maximum(tl.minimum(start, rows), 0), tl.maximum(tl.minimum(end, rows), 0)
