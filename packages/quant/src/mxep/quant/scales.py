"""Scale bytes: from a block's largest magnitude to e8m0, and from e8m0 to the fp32 power of two. Integers only.

    amax (fp32) --scale_of_amax--> scale (uint8) --power_of_two--> 2**(scale - 127)   to dequantize
                                                 --reciprocal----> 2**(127 - scale)   to quantize

Casts to float8_e8m0fnu have rounding rules of their own, so scales are made from the bits of fp32: sign, 8 exponent
bits with bias 127 (the same bias as e8m0), 23 mantissa bits. Example: amax 480 = 1.875 * 2**8 has exponent field 135,
so FLOOR for E4M3 is 135 - 8 = 127. RCEIL takes 480 / 448 = 1.07, exponent field 127, mantissa not zero: 128.
"""

import torch
from torch import Tensor

from mxep.quant.formats import MXFormat, ScaleMode

NAN_SCALE = 255
_MANTISSA = 0x7FFFFF
_SIGN = -0x80000000
_INF = 0x7F800000
_NAN = 0x7FC00000
_TWO_TO_MINUS_127 = 0x400000  # a subnormal in fp32: its exponent field is 0


def scale_of_amax(amax: Tensor, fmt: MXFormat, mode: ScaleMode) -> Tensor:
    """Scales (uint8) of blocks with largest magnitude |amax| (fp32, any shape).

    0 and everything too small give 0 (2**-127), NaN and Inf give 255.
    """
    bits = amax.view(torch.int32) & ~_SIGN  # the maximum of NaNs may be any NaN, even a negative one
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
    """2**(scale - 127) in fp32, exact for scales 0 to 254 (uint8, any shape); NaN for 255."""
    exponent = scale.to(torch.int32)
    bits = torch.where(exponent == 0, _TWO_TO_MINUS_127, exponent << 23)
    return torch.where(exponent == NAN_SCALE, _NAN, bits).view(torch.float32)


def reciprocal(scale: Tensor) -> Tensor:
    """2**(127 - scale) in fp32, exact for scales 0 to 254 (uint8, any shape); NaN for 255."""
    return power_of_two(254 - scale)  # uint8 wraps: 254 - 255 is 255 again
