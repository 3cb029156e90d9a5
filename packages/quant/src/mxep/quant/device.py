"""Code shared by the kernels of all packages: Triton device functions, and host functions for launchers.

In this file scales are int32, 0 to 255. Element formats are the Triton dtypes tl.float8e4nv (E4M3) and tl.float8e5
(E5M2). Casts to them saturate, round to nearest even, and turn any NaN into 0x7f.

The host cannot check `offs`, the ends of the groups, without a device-to-host sync. So kernels clamp offs to the rows
of the buffer. If offs are too large, negative or out of order, results are unspecified, but no kernel reads or writes
outside the buffer.
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
    """Flatten x (..., R, n) to (rows, n) with contiguous rows. Copies x only if its strides require it."""
    x = x.flatten(0, -2)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


@functools.cache
def num_sms(device: torch.device) -> int:
    """Number of SMs of a CUDA device, or of the current GPU for a meta device. 1 on the CPU (Triton's interpreter)."""
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_hopper(**options: int) -> dict[str, int]:
    """Return `options` if the current target is sm_90, else {}. For launch options that were tuned on Hopper."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return {}
    from triton.runtime import driver

    return options if driver.active.get_current_target().arch == 90 else {}


@triton.jit
def abs_bits(x):
    """Bits of |x| (x fp32) as int32. As integers they order like |x|, with Inf above numbers and NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_amax(bits, MODE: tl.constexpr, DTYPE: tl.constexpr):
    """Scale (int32) of a block. bits: `abs_bits` of its amax. DTYPE: dtype of the qdata; tl.uint8 means E2M1."""
    E4M3: tl.constexpr = DTYPE == tl.float8e4nv
    E2M1: tl.constexpr = DTYPE == tl.uint8
    if MODE == "rceil":
        reciprocal_of_max: tl.constexpr = 1.0 / 448.0 if E4M3 else 1.0 / 6.0 if E2M1 else 1.0 / 57344.0
        ratio = (bits.to(tl.float32, bitcast=True) * reciprocal_of_max).to(tl.int32, bitcast=True)
        scale = tl.where(ratio <= _TWO_TO_MINUS_127, 0, (ratio + _MANTISSA) >> 23)
    else:
        tl.static_assert(MODE == "floor")
        MAX_EXPONENT: tl.constexpr = 8 if E4M3 else 2 if E2M1 else 15
        scale = tl.maximum((bits >> 23) - MAX_EXPONENT, 0)
    return tl.where(bits >= _INF, NAN_SCALE, scale)


@triton.jit
def power_of_two(scale):
    """2**(scale - 127) in fp32 for scale 0 to 254; NaN for 255."""
    bits = tl.maximum(scale << 23, _TWO_TO_MINUS_127)
    return tl.where(scale == NAN_SCALE, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(scale):
    """2**(127 - scale) in fp32 for scale 0 to 253; NaN for 255. `scale_of_amax` returns at most 253, or 255."""
    return tl.where(scale == NAN_SCALE, _NAN, (254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_power_of_two(exponent, is_nan):
    """2**exponent in fp16 (subnormal below 2**-14), or NaN where is_nan. exponent: int32, -24 to 15."""
    bits = tl.where(is_nan, _NAN, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def shifted(qdata, shift, is_nan):
    """qdata (fp8) * 2**-shift in fp16, or NaN where is_nan. As fp8 it equals `mxep.quant.fold.shift_qdata`.

    shift: int32, not negative. NaN and Inf of qdata become NaN. The product is exact unless it is so small that the
    cast to fp8 gives 0. Larger products are above 2**-10 (E4M3) or 2**-17 (E5M2) and have 4 or 3 significant bits, so
    they are multiples of fp16's smallest number, 2**-24.
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
    """Values (fp16) of E2M1 codes (int32, 0 to 15).

    The code's sign, exponent and mantissa are moved to their positions in fp16. Because fp16's exponent bias is larger
    by 14, the bits then read as the value * 2**-14.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def valid_rows(offs_ptr, num_groups, rows):
    """Number of leading rows that belong to a group: offs[-1] clamped to `rows`. `rows` if offs_ptr is None.

    If offs[-1] is negative, so is the result, and no row is valid.
    """
    if offs_ptr is None:
        return rows
    else:
        return tl.minimum(tl.load(offs_ptr + num_groups - 1), rows)


@triton.jit
def group_bounds(group, offs_ptr, num_groups, rows):
    """Row ranges of groups, clamped to 0 .. rows. group: tensor of group indices.

    Returns start (inclusive) and end (exclusive). If offs are out of order, start may exceed end.
    """
    end = tl.load(offs_ptr + group, mask=group < num_groups, other=0)
    start = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group < num_groups), other=0)
    return tl.maximum(tl.minimum(start, rows), 0), tl.maximum(tl.minimum(end, rows), 0)
