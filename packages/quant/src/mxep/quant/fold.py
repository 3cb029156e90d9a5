"""Folding: replace block scales by one scale per row, so that a row-scaled FP8 GEMM computes the MX product.

The row gets its largest block scale. The difference to a block's own scale, the shift d, goes into the exponents of the
block's qdata. Example of one row with three blocks of 32:

    32-blocks    2^-3 * (1 .. 448)  |  2^0 * (1 .. 448)  |  0 ..                    scales 124, 127, 0
    max_scale    2^0, the largest scale of the blocks that are not all zero
    shift d      3                  |  0                 |  any
    row          qdata * 2^-3       |  qdata             |  0 ..                    one scale, 127

In E4M3 and E5M2, element q becomes round_to_nearest_even(q * 2^-d), which may be a subnormal. -0 keeps its sign. NaN
and Inf become 0x7f. Nothing overflows, because d >= 0. In the next paragraph, numbers in parentheses are for E5M2.

An element stays exact if |q| >= 2^(d-6) (2^(d-14)), because q * 2^-d then has no bits below the smallest subnormal,
2^-9 (2^-16). If blocks were quantized by RCEIL, all elements within 13.8 (28.8) binades of their row's amax are exact.
The error of any other element is at most half a smallest subnormal times max_scale, 2^-10 (2^-17) * max_scale. That is
2^-17.8 (2^-31.8) of the row's amax. From d = 19 (33) on every element becomes 0. `fold_with_stats` counts the elements
that change.

E2M1 (MXFP4) is folded to E4M3, where q * 2^s is exact for s from -8 to 6. So a row with max_scale 2^S gets the scale
2^(S-6), and all blocks with a scale of at least 2^(S-14) stay exact.

A block of zeros does not count for max_scale, whatever its scale. If a row has a NaN block (scale 255), the whole row
becomes NaN, as its exact product would: every element 0x7f, scale 255. A row of zeros gets scale 0.

**For dgrad** (`fold_for_dgrad`) a frozen weight needs one scale per column. Forward contracts W (N, K) with x over K,
dgrad contracts W with dy over N. A block is 32 elements of one row. So along N, dgrad meets a column of blocks, each
one row high. T is the largest scale exponent of the column:

    columns 32 j .. 32 j + 31     row 0   2^s0 * 32 qdata       T = max s over rows that are not all zero here
                                  row 1   2^s1 * 32 qdata       row n becomes qdata * 2^-(T - sn), rounded to E4M3
                                  ...                           one scale 2^T for the 32 columns

So dgrad is exact if the scales of a block column are close together over all N rows of an expert. Forward is exact if
the scales of a row are close together. The weight is not quantized a second time. So an exact fold gives the gradient
of the very values that forward multiplied. `column_scales` computes T for every block column. A frozen weight keeps
them, and then a fold is one read and one write.

**For wgrad** (`fold_for_wgrad`) X and dY, which are blocked along rows, become GEMM operands without a second
quantization. dW is the sum over tokens m of dY[m]^T X[m]. The product of token m has the scale 2^(s_x(m) + s_y(m)),
where s_x(m) and s_y(m) are the largest scale exponents of its row of X and of dY. A GEMM that contracts over tokens
cannot apply a scale per token. So the product of a group is multiplied by the group's largest scale, 2^E. The
difference d between E and a token's own exponent is shifted into its qdata: d // 2 into those of X, the rest into those
of dY. An element is also shifted by the difference between its row's largest exponent and its block's, and then rounded
once. The same pass picks rows by the row index, and transposes qdata, because FP8 tensor cores need operands that are
contiguous along tokens.

    product[g] = 2^E[g] * y_t[:, g] @ x_t[:, g].T         (N, K), over the columns of group g

Example: a group of four tokens with K = N = 1. The third token is a padding row.

    token           0      1      2      3
    s_x             0     -2      -     -1
    s_y             3      0      -      0
    s_x + s_y       3     -2      -     -1       E = 3
    d               0      5      -      4
    x   q         1.5    3.0      0    1.0
        shift       0      2      -      2
        becomes   1.5   0.75      0   0.25
    y   q         2.0    1.0      0    4.0
        shift       0      3      -      2
        becomes   2.0  0.125      0    1.0       2^3 * (3 + 0.09375 + 0 + 0.25) = 26.75, as 24 + 0.75 + 0 + 2

Only scales decide the shifts, not elements. A row of zeros from `quantize`, `fold` or a padding index has scale 0
(2^-127), so it does not raise E. A row of zeros with a larger scale, as in 2-D blocks, can raise E. Then the other rows
are shifted further than needed.

A row with a NaN block (scale 255) does not raise E either. Its qdata become 0x7f, so the whole product of its group
becomes NaN, while the exact product would have NaN only in a row or a column. A group has E = 0 if it is empty or has
only such rows.

Letters: R rows (tokens), D row length, S stored rows (slots) of a tensor with a row index, G groups, C columns of the
wgrad operands (tokens and padding), N outputs and K inputs of a weight.
"""

import math
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from mxep.quant.block_fp8 import BlockFP8
from mxep.quant.formats import BLOCK, E2M1, E4M3, NAN_SCALE, SCALE_DTYPE, power_of_two
from mxep.quant.groups import check_offs, fill_rows, group_of_rows, valid_rows
from mxep.quant.ops import HEADROOM, NAN_ELEMENT, pick_mx, values_of, widen
from mxep.quant.shapes import (
    BLOCKS_2D,
    check_block,
    check_byte_elements,
    empty_rows,
    num_rows,
    padded_rows,
    picked_shape,
)
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


@dataclass(frozen=True)
class FoldStats:
    """What a fold changes; tensors on the device. Elements that become NaN are not counted.

    changed: () int64, number of elements with a new value, including flushed elements.
    flushed: () int64, number of nonzero elements that become zero.
    exact:   (..., R) bool, True for rows with no changed element and no NaN block.
    spread:  (..., R) int32, largest minus smallest scale exponent of the row's nonzero blocks: 0 to 254 binades, and 0
             if the row has a NaN block. If spread is above 8, measure the error of the GEMM.
    """

    changed: Tensor
    flushed: Tensor
    exact: Tensor
    spread: Tensor


def fold(mx: MXTensor, *, offs: Tensor | None = None) -> MXTensor:
    """Replace the block scales of `mx` by one scale over the whole blocked axis, as the module explains. No autograd.

    Args:
        mx: (..., R, D) blocked along -1 or -2, E4M3, E5M2 or E2M1. A row index is applied; -1 gives a row of zeros with
            scale 0.
        offs: (G,) int32 inclusive ends of the row groups of a 2-D `mx` blocked along -1. Rows from offs[-1] on are not
            read, and unspecified in the result.
    Returns:
        MXTensor (..., R, D) in the format of `mx`, or E4M3 if `mx` is E2M1. qdata are contiguous along the blocked
        axis. scale is (..., R, 1) for axis -1, (..., 1, D) for axis -2.
    Raises ValueError for 2-D blocks (call `mx.along(axis)` before) and for a wrong offs.
    """
    qdata, scale, row_index = _parts_by_row(mx, offs)
    if qdata.dtype == E2M1.dtype and row_index is None and offs is None and mx.block_size == BLOCK:
        return _result(mx, *fold_e2m1(qdata, scale))
    if qdata.dtype == E2M1.dtype:
        qdata, scale = widen(qdata, scale)
    return _result(mx, *fold_op(qdata, scale, row_index, offs))


def fold_with_stats(mx: MXTensor, *, offs: Tensor | None = None) -> tuple[MXTensor, FoldStats]:
    """`fold`, and what it changes, in plain torch.

    Rows from offs[-1] on are not counted, and their spread is unspecified.
    """
    qdata, scale, row_index = _parts_by_row(mx, offs)
    if qdata.dtype == E2M1.dtype:
        qdata, scale = widen(qdata, scale)
    blocks, capacity = _blocks(qdata, scale, row_index, offs), num_rows(qdata, row_index)
    shift = blocks.shift.clamp(max=flush_shift(qdata.dtype))
    before, after = blocks.qdata.float(), shift_qdata(blocks.qdata, shift).float()
    counted = ~blocks.nan & ~after.isnan()
    if offs is not None:
        row = torch.arange(before.shape[0], device=qdata.device, dtype=torch.int64)
        counted &= (row < offs[-1]).view(-1, 1, 1)
    changes = counted & (after * power_of_two(127 + shift) != before)
    exact = ~(changes.any(-1, keepdim=True).any(-2, keepdim=True) | blocks.nan).squeeze(-1)
    flushed = (counted & (after == 0) & (before != 0)).sum()
    lowest = torch.where(blocks.counts, blocks.scale, NAN_SCALE).amin(-2, keepdim=True)
    spread = torch.where(blocks.nan, 0, blocks.max_scale - lowest).clamp(min=0).squeeze(-1)
    by_row = (fill_rows(x, capacity).squeeze(-1) for x in (exact, spread))
    stats = FoldStats(changes.sum(), flushed, *by_row)
    return _result(mx, *_folded(blocks, capacity)), stats


def _parts_by_row(mx: MXTensor, offs: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the arguments. Returns qdata, scale and row index of `mx`, or of `mx.mT` if `mx` is blocked along -2."""
    if not isinstance(mx, MXTensor):
        raise ValueError(f"fold: got a {type(mx).__name__}, want an MXTensor: quantize it")
    if mx.axis == BLOCKS_2D:
        raise ValueError("fold: got 2-D blocks, want a tensor blocked along one axis: call .along(axis)")
    check_block(None, mx.axis, mx)
    check_offs(offs, mx)
    if offs is not None and mx.axis != -1:
        raise ValueError(f"fold: got offs for axis {mx.axis}, want axis -1: groups are of rows")
    return (mx.qdata, mx.scale, mx.row_index) if mx.axis == -1 else (mx.qdata.mT, mx.scale.mT, None)


def _result(mx: MXTensor, qdata: Tensor, scale: Tensor) -> MXTensor:
    if mx.axis != -1:
        return MXTensor(qdata.mT, scale.mT, None, -2, qdata.shape[-1], mx.dtype, trusted=True)
    return MXTensor(qdata, scale, None, -1, qdata.shape[-1], mx.dtype, trusted=True)


def flush_shift(dtype: torch.dtype) -> int:
    """Smallest shift d that makes every element 0: 19 for E4M3, 33 for E5M2.

    max * 2^-d is then less than half the smallest subnormal.
    """
    info = torch.finfo(dtype)
    return math.frexp(info.max / (info.smallest_normal * info.eps))[1] + 1


def shift_qdata(qdata: Tensor, shift: Tensor) -> Tensor:
    """qdata * 2^-shift, rounded once to nearest even in the format of qdata. NaN and Inf become 0x7f.

    qdata: fp8, any shape. shift: int32 >= 0, broadcasts to qdata.
    Examples in E4M3: 0x41 (2.25) shifted by 1 is 0x39 (1.125). Shifted by 9 it is 2.25 smallest subnormals, rounded to
    2 of them, 0x02. Shifted by 19 it is 0x00.
    """
    scale = 127 - shift.clamp(max=flush_shift(qdata.dtype))
    moved = values_of(qdata) * power_of_two(scale)
    shifted = moved.to(qdata.dtype)
    shifted.view(torch.uint8).masked_fill_(~moved.isfinite(), NAN_ELEMENT)
    return shifted


@dataclass(frozen=True)
class _Blocks:
    """The valid rows, cut into blocks. All tensors have the axes (..., row, block, element), some of length 1.

    counts: True for blocks that count for max_scale. nan: True for rows with a NaN block.
    """

    qdata: Tensor
    scale: Tensor
    counts: Tensor
    max_scale: Tensor
    nan: Tensor

    @property
    def shift(self) -> Tensor:
        """Shift d of each block. If a block of zeros has a scale above max_scale, its d is 0."""
        return (self.max_scale - self.scale).clamp(min=0)


def _blocks(qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None) -> _Blocks:
    valid = valid_rows(offs, num_rows(qdata, row_index))
    qdata, scale = pick_mx(qdata, scale, row_index, valid)
    num_blocks = scale.shape[-1]
    qdata = torch.unflatten(qdata, -1, (num_blocks, qdata.shape[-1] // num_blocks))
    scale = scale.int().unsqueeze(-1)
    nan_block = scale == NAN_SCALE
    counts = (qdata.view(torch.uint8) & 0x7F).amax(-1, keepdim=True).ne(0) & ~nan_block
    max_scale = torch.where(counts, scale, 0).amax(-2, keepdim=True)
    return _Blocks(qdata, scale, counts, max_scale, nan_block.any(-2, keepdim=True))


def _folded(blocks: _Blocks, capacity: int) -> tuple[Tensor, Tensor]:
    folded = shift_qdata(blocks.qdata, blocks.shift)
    folded.view(torch.uint8).masked_fill_(blocks.nan, NAN_ELEMENT)
    scale = torch.where(blocks.nan, NAN_SCALE, blocks.max_scale).to(torch.uint8).view(SCALE_DTYPE)
    return fill_rows(folded.flatten(-2), capacity), fill_rows(scale.flatten(-2), capacity)


@op(
    "mxep::fold",
    fake=lambda qdata, scale, row_index, offs: empty_rows(qdata, qdata.dtype, 0, picked_shape(qdata, row_index)),
    launcher="mxep.quant.kernels.fold:fold",
)
def fold_op(qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """qdata (..., S, D) fp8, scale (..., S, D/block_size) e8m0 -> qdata (..., R, D), scale (..., R, 1)."""
    return _folded(_blocks(qdata, scale, row_index, offs), num_rows(qdata, row_index))


@op(
    "mxep::fold_e2m1",
    fake=lambda qdata, scale: empty_rows(qdata, E4M3.dtype, 0, (*qdata.shape[:-1], 2 * qdata.shape[-1])),
    launcher="mxep.quant.kernels.e2m1:fold_e2m1",
)
def fold_e2m1(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """qdata (..., R, D/2) E2M1, scale (..., R, D/32) e8m0 -> qdata (..., R, D) E4M3, scale (..., R, 1)."""
    return fold_op.reference(*widen(qdata, scale), None, None)  # type: ignore[no-any-return]


@overload
def fold_for_dgrad(mx: MXTensor, column_scale: Tensor | None = None) -> MXTensor: ...
@overload
def fold_for_dgrad(mx: MXTensor | BlockFP8, column_scale: Tensor | None = None) -> MXTensor | BlockFP8: ...
def fold_for_dgrad(mx: MXTensor | BlockFP8, column_scale: Tensor | None = None) -> MXTensor | BlockFP8:
    """Replace the block scales of `mx` (..., N, K) by one scale per column, for dgrad, which contracts N. No autograd.

    Args:
        mx: MXTensor with blocks of 32 along K (axis -1) and no row index. If `column_scale` is given, it may also have
            one scale per row. Or BlockFP8, which keeps its scales.
        column_scale: (..., K/32) e8m0, the result of `column_scales` of the weight with blocks of 32, before any fold.
            None: computed here.
    Returns:
        MXTensor (..., N, K) with axis -2 and block_size N; E4M3 if `mx` is E2M1. qdata are contiguous along N. scale is
        (..., 1, K), equal within each 32 columns. For BlockFP8: the same values, with qdata contiguous along N.
    Raises ValueError for other blocks.
    """
    if isinstance(mx, BlockFP8):
        one = mx.qdata.new_full((*mx.shape[:-2], max(mx.shape[-2:]), 1), 127, dtype=torch.uint8).view(SCALE_DTYPE)
        columns = one[..., : mx.shape[-1] // BLOCK, 0]
        return BlockFP8(fold_columns(mx.qdata, one[..., : mx.shape[-2], :], columns).mT, mx.scale, mx.block_size)
    if column_scale is None:
        column_scale = column_scales(mx)
    n = mx.shape[-2]
    qdata = fold_columns(mx.qdata, mx.scale, column_scale).mT
    scale = column_scale.view(torch.uint8).repeat_interleave(BLOCK, -1).unsqueeze(-2)
    return MXTensor(qdata, scale.view(SCALE_DTYPE), None, -2, n, mx.dtype, trusted=True)


def column_scales(mx: MXTensor) -> Tensor:
    """Scale that `fold_for_dgrad` gives each 32 columns, (..., K/32) e8m0. 255 if a block of the 32 columns is NaN.

    mx: (..., N, K) with blocks of 32 along K and no row index. All qdata are read, in plain torch. For E2M1, the scales
        are those of the same values in E4M3 (`mxep.quant.ops.widen`).
    """
    if not isinstance(mx, MXTensor):
        raise ValueError(f"fold_for_dgrad: expected an MXTensor, got a {type(mx).__name__}: quantize it")
    if mx.axis != -1 or mx.block_size != BLOCK or mx.row_index is not None:
        raise ValueError(f"fold_for_dgrad: expected blocks of {BLOCK} along K and no row index, got {mx}")
    scale, without_sign = mx.scale.view(torch.uint8), 0x7F7F7F7F7F7F7F7F
    nan = scale == NAN_SCALE
    if mx.qdata.dtype == E2M1.dtype:  # computed on packed qdata, because widening takes 36 bytes per element
        scale = torch.where(nan, scale, scale.clamp(min=HEADROOM) - HEADROOM)
        without_sign = 0x7777777777777777
    qdata = mx.qdata.view(torch.uint8).contiguous()
    words = (qdata if qdata.storage_offset() % 8 == 0 else qdata.clone()).view(torch.int64)
    live = (words & without_sign).ne(0).unflatten(-1, (scale.shape[-1], -1)).any(-1)
    return torch.where(live | nan, scale, 0).amax(-2).view(SCALE_DTYPE)


@op(
    "mxep::fold_columns",
    fake=lambda qdata, scale, column_scale: qdata.new_empty(
        (*qdata.shape[:-2], BLOCK * column_scale.shape[-1], qdata.shape[-2]),
        dtype=E4M3.dtype if qdata.dtype == E2M1.dtype else qdata.dtype,
    ),
    launcher="mxep.quant.kernels.fold:fold_columns",
)
def fold_columns(qdata: Tensor, scale: Tensor, column_scale: Tensor) -> Tensor:
    """Divide the values by their column's scale, round once, and transpose. Returns (..., K, N) fp8.

    qdata: (..., N, K) fp8, or (..., N, K/2) E2M1. scale: (..., N, K/block). column_scale: (..., K/32).
    """
    if qdata.dtype == E2M1.dtype:
        qdata, scale = widen(qdata, scale)
    by_column = column_scale.view(torch.uint8).int().repeat_interleave(BLOCK, -1).unsqueeze(-2)
    by_row = scale.view(torch.uint8).int().repeat_interleave(qdata.shape[-1] // scale.shape[-1], -1)
    exponent = (by_row - by_column).clamp(-flush_shift(qdata.dtype), 64)
    folded = (values_of(qdata) * power_of_two(127 + exponent)).to(qdata.dtype)
    nan = (by_column == NAN_SCALE) | values_of(qdata).isfinite().logical_not()
    folded.view(torch.uint8).masked_fill_(nan, NAN_ELEMENT)
    return folded.mT.contiguous()


@dataclass(frozen=True)
class WgradOperands:
    """Operands of a grouped wgrad: product[g] = 2**exponent[g] * y_t[:, g] @ x_t[:, g].T. [:, g]: columns of group g.

    x_t:      (K, C) qdata in x's format, contiguous. Columns from offs[-1] on are unspecified.
    y_t:      (N, C) qdata in y's format, contiguous. Columns from offs[-1] on are unspecified.
    exponent: (G,) int32, -254 to 254. 2**exponent may exceed the range of fp32, so multiply by 2**(exponent // 2) and
              then by 2**(exponent - exponent // 2).
    offs:     (G,) int32, inclusive ends of the groups' columns, including padding.
    """

    x_t: Tensor
    y_t: Tensor
    exponent: Tensor
    offs: Tensor


def fold_for_wgrad(x: MXTensor, y: MXTensor, offs: Tensor, *, alignment: int = 1) -> WgradOperands:
    """Fold the scales of x (R, K) and y (R, N) into their qdata, group by group, and transpose both. No autograd.

    The module's docstring explains the computation.
    x, y: E4M3 or E5M2, blocked along axis -1 in blocks of any length. Each may have a row index; -1 is a row of zeros.
    offs: (G,) int32, inclusive ends of the row groups. Rows from offs[-1] on are not read.
    alignment: each group's columns begin at a multiple of it. 1 or more.
    Raises ValueError for another axis or format, if x and y differ in rows, and for a wrong offs or alignment.
    """
    if alignment < 1:
        raise ValueError(f"alignment: got {alignment}, want 1 or more columns")
    for name, operand in (("x", x), ("y", y)):
        if not isinstance(operand, MXTensor):
            raise ValueError(f"{name}: got a {type(operand).__name__}, want an MXTensor: quantize it")
        check_byte_elements(name, operand)
        if operand.axis != -1:
            raise ValueError(f"{name}: got {operand!r}, want a tensor blocked along its rows, axis -1")
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"y: got {y.shape[0]} rows, want {x.shape[0]}, as x has")
    check_offs(offs, x, y)
    x_parts, y_parts = ((mx.qdata, mx.scale, mx.row_index) for mx in (x, y))
    return WgradOperands(*_fold_for_wgrad(*x_parts, *y_parts, offs, alignment))


@op(
    "mxep::fold_for_wgrad",
    fake=lambda x, x_scale, x_index, y, y_scale, y_index, offs, alignment: (
        *(
            operand.new_empty((operand.shape[1], padded_rows(num_rows(x, x_index), offs.shape[0], alignment)))
            for operand in (x, y)
        ),
        torch.empty_like(offs),
        torch.empty_like(offs),
    ),
    launcher="mxep.quant.kernels.fold:fold_for_wgrad",
)
def _fold_for_wgrad(
    x: Tensor, x_scale: Tensor, x_index: Tensor | None, y: Tensor, y_scale: Tensor, y_index: Tensor | None,
    offs: Tensor, alignment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the fields of `WgradOperands`, with C = `padded_rows(R, G, alignment)` columns.

    x, y: (S_x, K) and (S_y, N) fp8, with an index (R,), or None if they have R rows. Block sizes may differ.
    """
    capacity = num_rows(x, x_index)
    valid = valid_rows(offs, capacity)
    x, x_scale, x_max = _picked(x, x_scale, x_index, valid)
    y, y_scale, y_max = _picked(y, y_scale, y_index, valid)
    counts = (x_max != NAN_SCALE) & (y_max != NAN_SCALE)
    carried = x_max + y_max
    group = group_of_rows(offs, valid)
    nothing = -1
    most = carried.new_full((offs.shape[0] + 1,), nothing)  # the last entry is for rows past the groups
    most = most.scatter_reduce(0, group, torch.where(counts, carried, nothing), "amax")
    d = torch.where(counts, most[group] - carried, 0)
    exponent = torch.where(most == nothing, 0, most - 2 * 127)[:-1]
    to_x = d // 2
    sizes = offs.diff(prepend=offs.new_zeros(1))
    out_offs = ((sizes + alignment - 1) // alignment * alignment).cumsum(0, dtype=torch.int32)
    moved = torch.nn.functional.pad(out_offs - offs, (1, 0))[group]
    column = torch.arange(valid, device=x.device, dtype=torch.int64) + moved
    columns = padded_rows(capacity, len(offs), alignment)
    x_t = _shift_and_transpose(x, x_scale, x_max, to_x, column, columns)
    y_t = _shift_and_transpose(y, y_scale, y_max, d - to_x, column, columns)
    return x_t, y_t, exponent, out_offs


def _picked(qdata: Tensor, scale: Tensor, row_index: Tensor | None, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """qdata (valid, K), scale (valid, blocks) int32 and the largest scale (valid,) of each valid row."""
    qdata, scale = pick_mx(qdata, scale, row_index, valid)
    scale = scale.int()
    return qdata, scale, torch.nn.functional.pad(scale, (0, 1)).amax(1)  # a row without blocks has scale 0


def _shift_and_transpose(
    qdata: Tensor, scale: Tensor, max_scale: Tensor, half: Tensor, column: Tensor, columns: int
) -> Tensor:
    """Shift qdata (valid, K) by (max_scale - scale) + half, and put row i in column column[i] of the result (K, C).

    half: (valid,), the part of d for this operand. Rows with max_scale 255 (NaN) become 0x7f. C = `columns`.
    """
    blocks = scale.shape[1]
    shift = (max_scale + half).unsqueeze(1) - scale
    by_block = torch.unflatten(qdata, 1, (blocks, qdata.shape[1] // max(blocks, 1)))
    shifted = shift_qdata(by_block, shift.unsqueeze(2)).view(torch.uint8).flatten(1)
    shifted.masked_fill_((max_scale == NAN_SCALE).unsqueeze(1), NAN_ELEMENT)
    transposed = shifted.new_zeros((shifted.shape[1], columns))
    transposed[:, column] = shifted.T
    return transposed.view(qdata.dtype)
