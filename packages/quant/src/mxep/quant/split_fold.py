"""Split fold: row-scaled X and dY become the operands of a wgrad, without a second quantization.

dW = sum over tokens m of dY[m]^T X[m]. Token m carries the scale 2^(s_x(m) + s_y(m)), which a GEMM that contracts over
tokens cannot apply. So per group the largest, 2^E, goes in front of the product, and what a token has less, d, is
shifted into its codes, half into each operand: d // 2 into X's, the rest into dY's, by the element rule of
`mxep.quant.fold` (exact until subnormal). The codes are turned on the way: tokens contiguous, as FP8 tensor cores
want them.

    product[g] = 2^E[g] * y_t[:, g] @ x_t[:, g].T         (N, K), over the columns of group g

Example: a group of four tokens, the third a padding row, K = N = 1.

    token           0      1      2      3
    s_x             0     -2      -     -1
    s_y             3      0      -      0
    s_x + s_y       3     -2      -     -1       E = 3
    d               0      5      -      4
    x   code      1.5    3.0      0    1.0
        shift       0      2      0      2
        becomes   1.5   0.75      0   0.25
    y   code      2.0    1.0      0    4.0
        shift       0      3      0      2
        becomes   2.0  0.125      0    1.0       2^3 * (3 + 0.09375 + 0 + 0.25) = 26.75, as 24 + 0.75 + 0 + 2

A token does not count for E if its row of x or of y is zero (byte 0 and every code zero, as `quantize` and `fold` leave
zero rows). A NaN row (byte 255) does not count either: its codes become 0x7f, which makes NaN of its whole group's
product, as it is exactly, while every other token keeps its bits. A group where nothing counts has E = 0.

R rows (tokens), K and N columns of x and y, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.quant.fold import shift_codes
from mxep.quant.groups import check_group_ends, fill_rows, group_of_rows, live_rows
from mxep.quant.ops import NAN_CODE
from mxep.quant.scales import NAN_BYTE
from mxep.quant.tensor import MXTensor


@dataclass(frozen=True)
class SplitFold:
    """Operands of a grouped wgrad: product[g] = 2**exponent[g] * y_t[:, g] @ x_t[:, g].T.

    x_t:      (K, R) codes in x's format, contiguous (tokens innermost); columns from group_ends[-1] on are unspecified.
    y_t:      (N, R) codes in y's format, the same way.
    exponent: (G,) int32, -254 to 254. 2**exponent may lie outside fp32: multiply by 2**(e // 2) and 2**(e - e // 2).
    """

    x_t: Tensor
    y_t: Tensor
    exponent: Tensor


def split_fold(x: MXTensor, y: MXTensor, group_ends: Tensor) -> SplitFold:
    """Folds the row scales of x (R, K) and y (R, N) into their codes, per group, and turns both; see the module.

    x, y: row-scaled (one scale a row: `quantize(..., block=None)` or `fold(mx)`), without a row index, E4M3 or E5M2.
    group_ends: (G,) int32, inclusive ends of the groups; rows from group_ends[-1] on are not read.
    No autograd. ValueError for other blocks, an index, unequal rows or a wrong group_ends.
    """
    for name, operand in (("x", x), ("y", y)):
        if not isinstance(operand, MXTensor):
            raise ValueError(f"{name}: got a {type(operand).__name__}, want a row-scaled MXTensor")
        if operand.row_index is not None or operand.axis != -1 or operand.scale.shape != (operand.shape[0], 1):
            raise ValueError(f"{name}: got {operand!r}, want one scale a row and no row index: fold it first")
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"y: got {y.shape[0]} rows, want {x.shape[0]}, as x has")
    check_group_ends(group_ends, x, y)
    return SplitFold(*_split_fold(x.qdata, x.scale, y.qdata, y.scale, group_ends))


@torch.library.custom_op("mxep::split_fold", mutates_args=())
def _split_fold(
    x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, group_ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, K), y (R, N) fp8, scales (R, 1) e8m0 -> x_t (K, R), y_t (N, R), exponent (G,) int32."""
    capacity = x.shape[0]
    live = live_rows(group_ends, capacity)
    x, y = x[:live], y[:live]
    x_byte, y_byte = (scale[:live, 0].view(torch.uint8).int() for scale in (x_scale, y_scale))
    counts = ~(_is_zero(x, x_byte) | _is_zero(y, y_byte) | (x_byte == NAN_BYTE) | (y_byte == NAN_BYTE))
    carried = x_byte + y_byte
    group = group_of_rows(group_ends, live)
    nothing = -1
    top = carried.new_full((group_ends.shape[0] + 1,), nothing)  # the last entry gathers the dead rows
    top = top.scatter_reduce(0, group, torch.where(counts, carried, nothing), "amax")
    d = torch.where(counts, top[group] - carried, 0)
    exponent = torch.where(top == nothing, 0, top - 2 * 127)[:-1]
    to_x = d // 2
    return _shift_and_turn(x, to_x, x_byte, capacity), _shift_and_turn(y, d - to_x, y_byte, capacity), exponent


@_split_fold.register_fake
def _(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor, group_ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    return x.new_empty((x.shape[1], rows)), y.new_empty((y.shape[1], rows)), torch.empty_like(group_ends)


def _is_zero(codes: Tensor, byte: Tensor) -> Tensor:
    return (byte == 0) & (codes.view(torch.uint8) & 0x7F == 0).all(1)


def _shift_and_turn(codes: Tensor, shift: Tensor, byte: Tensor, capacity: int) -> Tensor:
    shifted = shift_codes(codes, shift.unsqueeze(1)).view(torch.uint8)
    shifted.masked_fill_((byte == NAN_BYTE).unsqueeze(1), NAN_CODE)
    return fill_rows(shifted, capacity).T.contiguous().view(codes.dtype)
