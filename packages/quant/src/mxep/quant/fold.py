"""Folding: block scales become one scale per row, so that an ordinary row-scaled FP8 GEMM computes the MX product.

Scales are powers of two, and an 8-bit float has exponents to spare. Per row:

    32-blocks    2^-3 * (1 .. 448)  |  2^0 * (1 .. 448)  |  0 ..                    scales 124, 127, 0
    max_scale    2^0, the largest scale of a block that is not all zero
    shift d      3                  |  0                 |  any
    row          qdata * 2^-3       |  qdata as they are |  0 ..                    one scale, 127

The element rule, for both formats: q becomes round_to_nearest_even(q * 2^-d) in that format, subnormals included. -0
keeps its sign, NaN and Inf become 0x7f. Nothing overflows, because d >= 0.

The result is exact while q * 2^-d needs no bits below the smallest subnormal (E4M3 2^-9, E5M2 2^-16). This holds for
|q| >= 2^(d-6) in E4M3 and |q| >= 2^(d-14) in E5M2. With blocks quantized by RCEIL these are all elements within 13.8
(28.8) binades of the amax of their row. Other elements err by at most half that subnormal, 2^-10 (2^-17) of max_scale:
2^-17.8 (2^-31.8) of the amax. From d = 19 (33) on nothing is left. So folding is lossless only under that condition;
`fold_with_stats` counts the elements that violate it.

E2M1 (MXFP4) folds to E4M3. Its exponents reach 6 binades above E2M1's and 8 below: q * 2^s is exact for s from -8
to 6. So a row of max_scale 2^S gets the scale 2^(S-6), and all blocks within 2^14 of the largest are exact.

A block with only zeros does not count for max_scale, whatever its scale. A NaN block (scale 255) makes NaN of its row,
as in the exact product: every element 0x7f, scale 255. If everything is zero the scale is 0.

`mxep.quant.fold_for_wgrad` does the same shift along the other axis, for a wgrad.
R rows, D row length, S stored rows (slots) of an indexed tensor, G groups.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.quant.checks import BLOCKS_2D, check_block
from mxep.quant.e2m1 import widen
from mxep.quant.formats import BLOCK, E2M1, E4M3, SCALE_DTYPE
from mxep.quant.groups import check_offs, fill_rows, valid_rows
from mxep.quant.ops import NAN_ELEMENT, pick_mx, values_of
from mxep.quant.scales import NAN_SCALE, power_of_two
from mxep.quant.shapes import empty_rows, num_rows, picked_shape
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


@dataclass(frozen=True)
class FoldStats:
    """Cost of a fold, on the device. Elements that are NaN afterwards are in none of the counts.

    changed: () int64, number of elements whose value changes, flushed ones included.
    flushed: () int64, number of nonzero elements that become zero.
    exact:   (..., R) bool, rows with no changed element and no NaN block.
    spread:  (..., R) int32, 0 to 254 binades: largest minus smallest exponent of the row's nonzero blocks; 0 with a NaN
             block. Above 8, look at the error of the product: it is the cheap sign.
    """

    changed: Tensor
    flushed: Tensor
    exact: Tensor
    spread: Tensor


def fold(mx: MXTensor, *, offs: Tensor | None = None) -> MXTensor:
    """`mx` with one scale over its whole blocked axis. The module's docstring has the rule.

    mx: (..., R, D) blocked along -1 or -2, E4M3 or E5M2, or E2M1, which becomes E4M3. A row index is applied (-1: a
        row of zeros, scale 0), so the result (R, D) is dense. Its bytes are contiguous along the blocked axis; scale
        (..., R, 1).
    offs: int32 (G,) inclusive ends of the row groups of a 2-D `mx` over a capacity buffer, axis -1. Rows from
        offs[-1] on are not read, and unspecified in the result.
    No autograd. Raises ValueError for 2-D blocks (use `mx.along(axis)`) and a wrong offs.
    """
    qdata, scale, row_index = _parts_by_row(mx, offs)
    if qdata.dtype == E2M1.dtype and row_index is None and offs is None and mx.block_size == BLOCK:
        return _result(mx, *fold_e2m1(qdata, scale))
    if qdata.dtype == E2M1.dtype:
        qdata, scale = widen(qdata, scale)
    return _result(mx, *fold_op(qdata, scale, row_index, offs))


def fold_with_stats(mx: MXTensor, *, offs: Tensor | None = None) -> tuple[MXTensor, FoldStats]:
    """`fold`, and its cost: changed and flushed elements, spread of each row. In plain torch on any device.

    Rows from offs[-1] on are not counted, and their spread is unspecified. Raises ValueError as `fold`.
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
    """qdata, scale and row index of `mx`, transposed if needed to be blocked along -1."""
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
    """Smallest d that leaves nothing: max * 2^-d is under half the smallest subnormal. E4M3 19, E5M2 33."""
    info = torch.finfo(dtype)
    return math.frexp(info.max / (info.smallest_normal * info.eps))[1] + 1


def shift_qdata(qdata: Tensor, shift: Tensor) -> Tensor:
    """qdata (fp8, any shape) times 2^-shift (int, broadcasts, 0 <= shift), rounded to nearest even in their format.

    The product is exact in fp32, so there is one rounding. NaN and Inf become 0x7f.
    Example, E4M3: 0x41 (2.25) by 1 is 0x39 (1.125), by 9 is 0x02 (2.25 subnormals become 2), by 19 is 0x00.
    """
    scale = 127 - shift.clamp(max=flush_shift(qdata.dtype))
    moved = values_of(qdata) * power_of_two(scale)
    shifted = moved.to(qdata.dtype)
    shifted.view(torch.uint8).masked_fill_(~moved.isfinite(), NAN_ELEMENT)
    return shifted


@dataclass(frozen=True)
class _Blocks:
    """Valid rows cut into blocks, and the values that a row decides.

    qdata (..., block, element) fp8. scale int32 and counts bool, both (..., block, 1); counts: the block counts for the
    largest scale. max_scale int32 and nan bool, both (..., 1, 1).
    """

    qdata: Tensor
    scale: Tensor
    counts: Tensor
    max_scale: Tensor
    nan: Tensor

    @property
    def shift(self) -> Tensor:
        """d of each block. A zero block above the largest is not shifted, as zeros stay zeros."""
        return (self.max_scale - self.scale).clamp(min=0)


def _blocks(qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None) -> _Blocks:
    """The blocks of the valid rows."""
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
    launcher="mxep.quant.kernels.fold_e2m1:fold_e2m1",
)
def fold_e2m1(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """qdata (..., R, D/2) E2M1, scale (..., R, D/32) e8m0 -> qdata (..., R, D) E4M3, scale (..., R, 1)."""
    return fold_op.reference(*widen(qdata, scale), None, None)  # type: ignore[no-any-return]
