"""Device functions of `mxep.quant.activation`: the same fp32 operations in the same order, one element at a time."""

import triton
import triton.language as tl

from mxep.quant import sigmoid

_LIMIT = tl.constexpr(sigmoid.LIMIT)
_SCALE = tl.constexpr(sigmoid.SCALE)
_ROUND = tl.constexpr(sigmoid.ROUND)
_C0, _C1 = tl.constexpr(sigmoid.C0), tl.constexpr(sigmoid.C1)
_MAGIC = tl.constexpr(sigmoid.MAGIC)
_ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _sigmoid_pair(x):
    """`mxep.quant.sigmoid.sigmoid_pair` of x clamped to +- _LIMIT, fp32."""
    t = x * _SCALE
    u = t + _ROUND
    f = t - (u - _ROUND)
    even = f * f + _C0
    odd = f * _C1
    p = (even + odd).to(tl.int32, bitcast=True) + (u.to(tl.int32, bitcast=True) << 23)
    p = p.to(tl.float32, bitcast=True)
    q = even - odd
    d = p + q
    r = (-d.to(tl.int32, bitcast=True) + _MAGIC).to(tl.float32, bitcast=True)
    t = d * r
    r = r * (3.0 - t * (3.0 - t))
    r = r * (2.0 - d * r)
    return q * r, p * r


@triton.jit
def _clamp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.minimum(tl.maximum(x, LOW, propagate_nan=_ALL_NAN), HIGH, propagate_nan=_ALL_NAN)


@triton.jit
def glu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """`SwiGLU.glu`: glu, up', and the terms of the slope. These are alpha * gate' clamped like the sigmoid's argument,
    and both sigmoids. LIMIT None: no clamp."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=_ALL_NAN)
        up = _clamp(up, -LIMIT, LIMIT)
    if SHIFT != 0.0:
        up = up + SHIFT
    above = tl.maximum(gate, -_LIMIT / ALPHA, propagate_nan=_ALL_NAN)
    x = _clamp(gate * ALPHA if ALPHA != 1.0 else gate, -_LIMIT, _LIMIT)
    s, one_minus_s = _sigmoid_pair(x)
    return above * s, up, x, s, one_minus_s


@triton.jit
def unclamped(d_gate, d_up, gate, up, LIMIT: tl.constexpr):
    """`SwiGLU.unclamped` for both gradients."""
    if LIMIT is not None:
        d_gate = tl.where(gate > LIMIT, 0.0, d_gate)
        d_up = tl.where(tl.abs(up) > LIMIT, 0.0, d_up)
    return d_gate, d_up


@triton.jit
def split_pairs(x):
    """Even elements of a vector, and odd ones."""
    return tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))


@triton.jit
def joined_pairs(a, b):
    """The inverse of `split_pairs`."""
    return tl.reshape(tl.join(a, b), (a.shape[0] * 2,))
