"""What an MX number is, derived a second time: from the definitions, in float64, with no line of mxep's arithmetic.

Every fp32 input, every code times every scale, and every product here is exact in float64 (11 exponent bits), so the
only roundings are those that the definitions ask for. Arrays are numpy; a block is the last axis.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mxep.quant import E4M3, E5M2, MXFormat, MXTensor, ScaleMode

FORMATS = (E4M3, E5M2)
MODES = tuple(ScaleMode)
FP32_MAX = float(np.finfo(np.float32).max)
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

BITS = {"E4M3": (3, 7), "E5M2": (2, 15), "E2M1": (1, 1)}  # mantissa bits, bias of the exponent
TOP = {"E4M3": 448.0, "E5M2": 57344.0, "E2M1": 6.0}


def value_of_code(name: str, code: int) -> float:
    """The value of one code, from its sign, exponent and mantissa fields."""
    mantissa_bits, bias = BITS[name]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = code & (1 << mantissa_bits) - 1
    if name == "E4M3" and code & 0x7F == 0x7F:
        return float("nan")
    if name == "E5M2" and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def code_values(fmt: MXFormat) -> Floats:
    """Values of the 256 qdata."""
    return np.array([value_of_code(fmt.name, code) for code in range(256)])


def values(fmt: MXFormat, qdata: Bytes, byte: Bytes) -> Floats:
    """Values (..., n) of qdata (..., n) whose scale bytes are `byte` (..., 1); exact."""
    scale = np.where(byte == 255, np.nan, 2.0 ** (byte.astype(np.float64) - 127))
    return code_values(fmt)[qdata] * scale


def nearest_codes(fmt: MXFormat, x: Floats) -> Bytes:
    """Codes of x: saturating, round to nearest, ties to the even code, the sign of zero kept. x is finite."""
    table = code_values(fmt)[:128]
    table = table[np.isfinite(table)]
    size = np.minimum(np.abs(x), TOP[fmt.name])
    above = np.searchsorted(table, size)  # first code that is not smaller
    below = np.maximum(above - 1, 0)
    up, down = table[above] - size, size - table[below]
    take_below = (down < up) | ((down == up) & (below % 2 == 0) & (above != below))
    take_below &= table[above] != size
    return (np.where(take_below, below, above) + 128 * np.signbit(x)).astype(np.uint8)


def floor_log2(x: Floats) -> NDArray[np.int64]:
    return np.where(x == 0, -9999, np.frexp(x)[1].astype(np.int64) - 1)


def ceil_log2(x: Floats) -> NDArray[np.int64]:
    mantissa, exponent = np.frexp(x)
    return np.where(x == 0, -9999, exponent.astype(np.int64) - (mantissa == 0.5))


def scale_of_amax(fmt: MXFormat, mode: ScaleMode, amax: Floats) -> Bytes:
    """Scale bytes of blocks whose largest magnitude is `amax`, an fp32 number."""
    top_exponent = int(floor_log2(np.float64(TOP[fmt.name])))
    finite = np.where(np.isfinite(amax), amax, 0.0)
    if mode is ScaleMode.FLOOR:
        exponent = floor_log2(finite) - top_exponent
    else:
        reciprocal = np.float64(np.float32(1.0 / TOP[fmt.name]))
        ratio = (finite * reciprocal).astype(np.float32).astype(np.float64)  # one rounding, as in fp32
        exponent = ceil_log2(ratio)
    return np.where(np.isfinite(amax), np.clip(exponent, -127, 127) + 127, 255).astype(np.uint8)


def quantize_blocks(fmt: MXFormat, mode: ScaleMode, x: Floats) -> tuple[Bytes, Bytes]:
    """Codes (..., n) and scale bytes (..., 1) of blocks x (..., n)."""
    with np.errstate(invalid="ignore"):
        byte = scale_of_amax(fmt, mode, np.abs(x).max(-1, keepdims=True))
    bad = byte == 255
    scaled = np.where(bad, 0.0, x) * 2.0 ** (127 - byte.astype(np.float64))
    return np.where(bad, 0x7F, nearest_codes(fmt, scaled)).astype(np.uint8), byte


def quantize_rows(fmt: MXFormat, mode: ScaleMode, x: Tensor, block_size: int = 32) -> tuple[Bytes, Bytes]:
    """Codes (..., K) and scale bytes (..., K/block) of a bf16, fp16 or fp32 tensor x (..., K)."""
    blocks = x.detach().double().numpy().reshape(*x.shape[:-1], -1, block_size)
    qdata, byte = quantize_blocks(fmt, mode, blocks)
    return qdata.reshape(x.shape), byte[..., 0]


def raw(x: Tensor) -> Bytes:
    """The bytes of a 1-byte tensor."""
    array: Bytes = x.detach().view(torch.uint8).numpy()
    return array


def assert_bytes(got: Tensor, want: Bytes) -> None:
    """Bitwise, printing the first bad coordinate."""
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, want {want.shape}"
    bad = np.argwhere(raw(got) != want)
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise AssertionError(f"{len(bad)} bytes differ, first at {at}: got {raw(got)[at]:#04x}, want {want[at]:#04x}")


def hostile_rows() -> Tensor:
    """fp32 (R, 32): one kind of unpleasant block a row."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(32, generator=generator)
    nan, inf, tiny = float("nan"), float("inf"), 2.0**-149

    def one(value: float, rest: Tensor | float = 0.0) -> Tensor:
        block_size = torch.zeros(32) + rest
        block_size[5] = value
        return block_size

    rows = [
        torch.zeros(32),
        -torch.zeros(32),
        one(nan),
        one(nan, normal),
        one(-nan, normal),
        one(inf),
        one(-inf, normal),
    ]
    rows += [one(value) for value in (tiny, -tiny, 2.0**-127, 2.0**-126, 2.0**-119, 2.0**-118, FP32_MAX, -FP32_MAX)]
    rows += [one(value) for value in (448.0, 449.0, 480.0, 57344.0, 57345.0, 61440.0, 1.0, 1.75, 1.9375, 1.96875, 2.0)]
    rows += [normal * 2.0**shift for shift in (-150, -149, -140, -130, -127, -126, -120, -118, -111, 0, 100, 120, 125)]
    rows += [one(FP32_MAX, normal), one(FP32_MAX, normal * 2.0**100), one(tiny, -0.0), one(1.0, normal * 2.0**-20)]
    # Around every threshold of RCEIL, max * 2**k, in normal and subnormal quotients, and around powers of two.
    for top in (448.0, 57344.0):
        for power in (-143, -136, -135, -134, -133, -127, -126, -119, 0, 1, 100):
            middle = np.float32(top * 2.0**power)
            for near in (np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))):
                rows.append(one(float(near)))
    for mantissa in (1.0, 1.0 + 2**-23, 1.75, 1.8125, 1.875, 1.9375, 1.9375 - 2**-23, 2.0 - 2**-23):
        rows += [one(mantissa * 2.0**power) for power in (-126, -120, -111, -119, 0, 9, 127)]
    return torch.stack(rows)


def parts(result: Any) -> list[Tensor]:
    """The plain tensors of a result: of tuples, of frozen dataclasses, of MXTensors; None has none."""
    if result is None:
        return []
    if isinstance(result, MXTensor):
        return [result.qdata, result.scale]
    if isinstance(result, Tensor):
        return [result]
    return [part for value in (result if isinstance(result, tuple) else vars(result).values()) for part in parts(value)]
