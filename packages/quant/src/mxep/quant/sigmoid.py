"""A sigmoid with the same bits on every device, and cheap on a GPU, made of operations that IEEE 754 rounds uniquely.

Libraries' exponentials differ by device, by vector lane and by version, so values quantized after one could differ in
a byte. This one uses fp32 multiplication and addition, each separate and correctly rounded, and integer arithmetic on
the bits of fp32. A kernel equals it bit for bit if it does the same operations in the same order and contracts no
multiply and add into an FMA. The result depends only on the element, not on its position, the length of the tensor or
its strides. Subnormals arise only where they vanish in a sum, so a device that flushes them gets the same bits.

    t = -log2(e) / 4 * clamp(x, -86, 86)            exp(-x) = 2^(4t)
    u = t + ROUND                                   t to the nearest n / 4, ties to even; n is in the last bits of u
    f = t - (u - ROUND)                             exact, |f| <= 1/8: exp(-x) = 2^n * 2^(4f)
    p, q = (f^2 + C0) + C1 * f, (f^2 + C0) - C1 * f         2^(4f) = p / q * (1 +- 4.4e-7), minimax
    p = p * 2^n                                     exp(-x) = p / q; the last bits of u are added to p's exponent
    r = 1 / (p + q)                                 by hand, below
    sigmoid(x), sigmoid(-x) = q * r, p * r

The reciprocal of d begins with MAGIC minus d, both as integers, off by 5% at most. Two of Newton's steps follow, of
third and second order: r * (3 - t * (3 - t)) with t = d * r, then r * (2 - d * r). They leave 1.4 * 2^-23. Everything
is 21 instructions for one result, without a branch. An IEEE division alone is two thirds of that on a GPU, with
branches.

Relative error of either result, in 2^-23: at most 6 for |x| <= 1, 10 for |x| <= 8. Then the rounding of t shows: 14 at
20, 38 at 86. Beyond 86, infinities included, the value is that of 86: 1, or 4.5e-38 instead of less. NaN stays NaN.
"""

import math

import torch
from torch import Tensor

LIMIT = 86.0
"""Bound of |x|, so that exp(x), its inverse and all between are normal fp32 numbers."""

SCALE = -0.25 / math.log(2)
ROUND = 1.5 * 2.0**21
C0, C1 = 1.5649444, 2.1694605
MAGIC = 0x7EF32000


def sigmoid_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid(x), sigmoid(-x)) of x fp32, any shape. The second is 1 minus the first, but as accurate."""
    # In place if that is free: the same operations take half the time of fresh tensors on a CPU.
    t = x.clamp(-LIMIT, LIMIT).mul_(SCALE)
    u = t + ROUND
    f = t.sub_(u - ROUND)
    even, odd = (f * f).add_(C0), f.mul_(C1)
    p, q = even + odd, even.sub_(odd)
    p = p.view(torch.int32).add_(u.view(torch.int32) << 23).view(torch.float32)
    r = reciprocal(p + q)
    return q.mul_(r), p.mul_(r)


def reciprocal(d: Tensor) -> Tensor:
    """1 / d for d fp32, from 2^-126 to 2^125."""
    r = (MAGIC - d.view(torch.int32)).view(torch.float32)
    t = d * r
    r.mul_((3.0 - t).mul_(t).neg_().add_(3.0))
    return r.mul_(2.0 - d * r)
