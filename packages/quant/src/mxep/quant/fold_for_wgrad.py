"""Split fold: row-blocked X and dY become the operands of a wgrad, without a second quantization.

dW = sum over tokens m of dY[m]^T X[m]. Token m carries the scale 2^(s_x(m) + s_y(m)), s the largest exponent of its
row's blocks, which a GEMM that contracts over tokens cannot apply. So per group the largest, 2^E, goes in front of the
product, and what a token has less, d, is shifted into its qdata, half into each operand: d // 2 into X's, the rest into
dY's, each element on top of what its own block has less than its row. One rounding, by the element rule of
`mxep.quant.fold` (exact until subnormal). The qdata are transposed on the way: tokens contiguous, as FP8 tensor cores
want them; rows are picked by an index on the way, too.

    product[g] = 2^E[g] * y_t[:, g] @ x_t[:, g].T         (N, K), over the columns of group g

Example: a group of four tokens, the third a padding row, K = N = 1.

    token           0      1      2      3
    s_x             0     -2      -     -1
    s_y             3      0      -      0
    s_x + s_y       3     -2      -     -1       E = 3
    d               0      5      -      4
    x   code      1.5    3.0      0    1.0
        shift       0      2      -      2
        becomes   1.5   0.75      0   0.25
    y   code      2.0    1.0      0    4.0
        shift       0      3      -      2
        becomes   2.0  0.125      0    1.0       2^3 * (3 + 0.09375 + 0 + 0.25) = 26.75, as 24 + 0.75 + 0 + 2

Only scale bytes decide on shifts. A row of zeros from `quantize`, `fold` or a padding index has byte 0, 2^-127, and so
does not lift E. (Zeros with a larger byte, as tiles may have, can lift it: others then shift further than they need.)
A row with a NaN block (byte 255) does not count: its qdata become 0x7f, which makes NaN of its whole group's product,
where the exact one has NaN in a row or a column, while every other token keeps its bits. A group where nothing counts
has E = 0.

A GEMM that walks over tokens in steps may want every group to begin at a step: with `align` a group's columns begin at
a multiple of it, and the columns up to the next group's are zeros.

R rows (tokens), K and N columns of x and y, S stored rows (slots) of an indexed operand, G groups, C columns of the
results: R, or with align R + G * (align - 1), rounded up to align.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.quant.fold import shift_codes
from mxep.quant.groups import check_group_ends, group_of_rows, valid_rows
from mxep.quant.kernels import on_cuda
from mxep.quant.ops import NAN_CODE, pick_rows
from mxep.quant.scales import NAN_BYTE
from mxep.quant.tensor import MXTensor


@dataclass(frozen=True)
class WgradOperands:
    """Operands of a grouped wgrad: product[g] = 2**exponent[g] * y_t[:, g] @ x_t[:, g].T.

    x_t:      (K, C) qdata in x's format, contiguous (tokens innermost); columns from ends[-1] on are unspecified.
    y_t:      (N, C) qdata in y's format, the same way.
    exponent: (G,) int32, -254 to 254. 2**exponent may lie outside fp32: multiply by 2**(e // 2) and 2**(e - e // 2).
    ends:     (G,) int32, inclusive ends of the groups' columns, zeros included; offs where there is no align.
    """

    x_t: Tensor
    y_t: Tensor
    exponent: Tensor
    ends: Tensor


def fold_for_wgrad(x: MXTensor, y: MXTensor, offs: Tensor, *, align: int = 1) -> WgradOperands:
    """Folds the scales of x (R, K) and y (R, N) into their qdata, per group, and turns both; see the module.

    x, y: blocked along their rows (axis -1) in blocks of any length, or row-scaled; E4M3 or E5M2, each with or without
        a row index (-1: a row of zeros).
    offs: (G,) int32, inclusive ends of the groups; rows from offs[-1] on are not read.
    align: columns a group begins at a multiple of, 1 or more.
    No autograd. ValueError for another axis, unequal rows, a wrong offs or align.
    """
    if align < 1:
        raise ValueError(f"align: got {align}, want 1 or more columns")
    for name, operand in (("x", x), ("y", y)):
        if not isinstance(operand, MXTensor):
            raise ValueError(f"{name}: got a {type(operand).__name__}, want an MXTensor: quantize it")
        if operand.axis != -1:
            raise ValueError(f"{name}: got {operand!r}, want a tensor blocked along its rows, axis -1")
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"y: got {y.shape[0]} rows, want {x.shape[0]}, as x has")
    check_group_ends(offs, x, y)
    return WgradOperands(*_split_fold(x.qdata, x.scale, x.row_index, y.qdata, y.scale, y.row_index, offs, align))


def columns_of(rows: int, groups: int, align: int) -> int:
    """C: room for every group's columns, whatever its size."""
    return -(-(rows + groups * (align - 1)) // align) * align


@torch.library.custom_op("mxep::fold_for_wgrad", mutates_args=())
def _split_fold(
    x: Tensor,
    x_scale: Tensor,
    x_index: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_index: Tensor | None,
    offs: Tensor,
    align: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (S, K) fp8, x_scale (S, K/block) e8m0, x_index int32 (R,) or None (then R is S), y (S', N) in the same way,
    offs int32 (G,) -> x_t (K, C), y_t (N, C), exponent and ends (G,) int32."""
    capacity = x.shape[0] if x_index is None else x_index.shape[0]
    valid = valid_rows(offs, capacity)
    x_codes, x_byte, x_top = _rows(x, x_scale, x_index, valid)
    y_codes, y_byte, y_top = _rows(y, y_scale, y_index, valid)
    counts = (x_top != NAN_BYTE) & (y_top != NAN_BYTE)
    carried = x_top + y_top
    group = group_of_rows(offs, valid)
    nothing = -1
    top = carried.new_full((offs.shape[0] + 1,), nothing)  # the last entry gathers the dead rows
    top = top.scatter_reduce(0, group, torch.where(counts, carried, nothing), "amax")
    d = torch.where(counts, top[group] - carried, 0)
    exponent = torch.where(top == nothing, 0, top - 2 * 127)[:-1]
    to_x = d // 2
    sizes = offs.diff(prepend=offs.new_zeros(1))
    ends = ((sizes + align - 1) // align * align).cumsum(0, dtype=torch.int32)
    place = torch.arange(valid, device=x.device) + torch.nn.functional.pad(ends - offs, (1, 0))[group]
    columns = columns_of(capacity, len(offs), align)
    x_t = _shift_and_turn(x_codes, x_byte, x_top, to_x, place, columns)
    y_t = _shift_and_turn(y_codes, y_byte, y_top, d - to_x, place, columns)
    return x_t, y_t, exponent, ends


@_split_fold.register_fake
def _(
    x: Tensor,
    x_scale: Tensor,
    x_index: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_index: Tensor | None,
    offs: Tensor,
    align: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.shape[0] if x_index is None else x_index.shape[0]
    columns = columns_of(rows, offs.shape[0], align)
    x_t, y_t = x.new_empty((x.shape[1], columns)), y.new_empty((y.shape[1], columns))
    return x_t, y_t, torch.empty_like(offs), torch.empty_like(offs)


def _rows(qdata: Tensor, scale: Tensor, row_index: Tensor | None, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """The valid rows: qdata (live, K) fp8, bytes (live, blocks) int32, and the largest of each row (live,) int32."""
    plain, byte = qdata.view(torch.uint8), scale.view(torch.uint8)
    if row_index is None:
        plain, byte = plain[:valid], byte[:valid]
    else:
        plain, byte = pick_rows(plain, row_index[:valid]), pick_rows(byte, row_index[:valid])
    exponent = byte.int()
    top = torch.nn.functional.pad(exponent, (0, 1)).amax(1)  # a row of no blocks has byte 0
    return plain.view(qdata.dtype), exponent, top


def _shift_and_turn(qdata: Tensor, byte: Tensor, top: Tensor, half: Tensor, place: Tensor, columns: int) -> Tensor:
    """qdata (live, K) shifted by (top - byte) + half, rows whose top is NaN all 0x7f, in columns `place` of (K, C)."""
    blocks = byte.shape[1]
    shift = (top + half).unsqueeze(1) - byte
    spread = torch.unflatten(qdata, 1, (blocks, qdata.shape[1] // max(blocks, 1)))
    shifted = shift_codes(spread, shift.unsqueeze(2)).view(torch.uint8).flatten(1)
    shifted.masked_fill_((top == NAN_BYTE).unsqueeze(1), NAN_CODE)
    transposed = shifted.new_zeros((shifted.shape[1], columns))
    transposed[:, place] = shifted.T
    return transposed.view(qdata.dtype)


on_cuda(_split_fold, "fold_for_wgrad", "fold_for_wgrad")
