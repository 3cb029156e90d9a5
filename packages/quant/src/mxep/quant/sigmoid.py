"""A sigmoid with the same bits on every device: by hand, of operations that IEEE 754 rounds in one way only.

Libraries' exponentials differ by device, by vector lane and by version, so values quantized after one could differ in
a byte. This one uses fp32 multiplication, addition, division and rounding to an integer, each a separate and correctly
rounded operation, and integer arithmetic on exponent bits. A kernel equals it bit for bit if it does the same
operations in the same order, contracts no multiply and add into an FMA, and divides by IEEE rules (`tl.div_rn`, not
`/`). The result depends on nothing but the element: not on its position, the length of the tensor or its strides.
Subnormals arise only where they vanish in a sum, so a device that flushes them gets the same bits.

    y = -min(|x|, 87)
    n = round(y * log2(e))                                 to nearest, ties to even
    r = r_high - r_low, r_high = y - n * LN2_HIGH, r_low = n * LN2_LOW           r_high is exact, |r| <= ln(2) / 2
    z = (1 + (r_high + (p(r) * r^2 - r_low))) * 2^n        = exp(y), p by Horner's scheme
    big   = 1 / (1 + z)
    small = z - z * (z * big)                              = z / (1 + z), but closer, and one division serves both
    sigmoid(x), sigmoid(-x) = big, small for x >= 0; small, big for x < 0

Error at most 2 ulp where |x| <= 87 (1.94, exhaustively). Beyond, infinities included, the value is that of 87: 1, or
1.6e-38 where it should be less. NaN stays NaN. The reduction is Cody and Waite's, the coefficients are those of the
Cephes library's expf.
"""

import torch
from torch import Tensor

LIMIT = 87.0
"""exp(-LIMIT) is still a normal fp32 number, exp(-LIMIT - 1) is not."""

_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375  # 355/512: with |n| <= 126 the product has 16 bits
_LN2_LOW = -2.12194440e-4
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def sigmoid_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid(x), sigmoid(-x)) of x fp32, any shape; the second is 1 minus the first, but as accurate."""
    z = _exp_of_minus_magnitude(x)
    big = torch.ones_like(z).div_(1.0 + z)
    small = z - (z * big).mul_(z)
    # Swapped where x is negative; by bits, as torch.where takes a branch per element on a CPU, 15 times as long.
    bits, other = big.view(torch.int32), small.view(torch.int32)
    swap = (bits ^ other).bitwise_and_(x.view(torch.int32) >> 31)
    return bits.bitwise_xor_(swap).view(torch.float32), other.bitwise_xor_(swap).view(torch.float32)


def _exp_of_minus_magnitude(x: Tensor) -> Tensor:
    # In place where that is free: the same operations, half the time of fresh tensors on a CPU.
    y = x.abs().clamp_(max=LIMIT).neg_()
    n = (y * _LOG2_E).round_()
    r_high, r_low = y.sub_(n * _LN2_HIGH), n * _LN2_LOW
    r = r_high - r_low
    p = torch.full_like(r, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p.mul_(r).add_(coefficient)
    mantissa = p.mul_(r.mul_(r)).sub_(r_low).add_(r_high).add_(1.0)
    two_to_n = n.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return mantissa.mul_(two_to_n)  # exact, as it is normal; of NaN the mantissa is NaN, whatever its n became
