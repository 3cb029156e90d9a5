"""Folding a frozen weight for dgrad: one scale per column of W, from the blocks that forward multiplies.

Forward contracts W (N, K) with x along K, dgrad with dy along N. A block of forward is 32 elements of one row. dgrad
meets the same blocks as a column of tiles, one row high and 32 columns wide:

    columns 32 j .. 32 j + 31     row 0   2^s0 * 32 qdata       T = max s over rows that are not all zero here
                                  row 1   2^s1 * 32 qdata       row n becomes qdata * 2^-(T - sn), rounded to E4M3
                                  ...                           one scale 2^T for the 32 columns

So dgrad and forward have different conditions. dgrad needs the scales of one block column to lie close together over
all N rows of an expert. Forward needs this of the blocks of each row: rows with norms 2^20 apart change nothing there.
The element rule is that of `mxep.quant.fold`: exact within a shift of |q| >= 2^(d-6), for E2M1 whenever d <= 14. The
weight is not quantized a second time. So an exact fold gives the gradient of the very values that forward multiplied.

`column_scales` reads a weight once; a frozen weight keeps them, and `fold_columns` then takes one read and one write.

N outputs, K inputs, leading axes are experts.
"""

import torch
from torch import Tensor

from mxep.quant import e2m1
from mxep.quant.fold import FoldStats, flush_shift, fold_with_stats
from mxep.quant.formats import BLOCK, E2M1, E4M3, SCALE_DTYPE
from mxep.quant.ops import NAN_ELEMENT, values_of
from mxep.quant.scales import NAN_SCALE, power_of_two
from mxep.quant.tensor import MXTensor
from mxep.quant.to_mxfp8 import to_mxfp8
from mxep.runtime.op import op


def fold_for_dgrad(mx: MXTensor, column_scale: Tensor | None = None) -> MXTensor:
    """`mx` (..., N, K) with one scale over all N rows of each column, as dgrad contracts it.

    mx: blocks of 32 along K (axis -1), or one scale per row with `column_scale`; E4M3, E5M2 or E2M1 (the result has
        E4M3); no row index.
    column_scale: (..., K/32) of `column_scales`, if it is known; of a folded weight, those from before it was folded.
    Returns (..., N, K) with axis -2 and block_size N; bytes contiguous along N, scale (..., 1, K), equal within each
    32 columns. No autograd. Raises ValueError for other blocks.
    """
    if column_scale is None:
        column_scale = column_scales(mx)
    n = mx.shape[-2]
    qdata = fold_columns(mx.qdata, mx.scale, column_scale).mT
    scale = column_scale.view(torch.uint8).repeat_interleave(BLOCK, -1).unsqueeze(-2)
    return MXTensor(qdata, scale.view(SCALE_DTYPE), None, -2, n, mx.dtype, trusted=True)


def column_scales(mx: MXTensor) -> Tensor:
    """(..., K/32) e8m0: the scale of each 32 columns after `fold_for_dgrad`; 255 if one of their blocks is NaN.

    mx: (..., N, K) with blocks of 32 along K, no row index. Reads all qdata, in plain torch. Of E2M1, the scales are
        those of its widened elements (`mxep.quant.e2m1.widen`).
    """
    _check(mx)
    scale, without_sign = mx.scale.view(torch.uint8), 0x7F7F7F7F7F7F7F7F
    nan = scale == NAN_SCALE
    if mx.qdata.dtype == E2M1.dtype:  # packed: widening takes 36 bytes an element
        scale = torch.where(nan, scale, scale.clamp(min=e2m1.HEADROOM) - e2m1.HEADROOM)
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
    launcher="mxep.quant.kernels.fold_columns:fold_columns",
)
def fold_columns(qdata: Tensor, scale: Tensor, column_scale: Tensor) -> Tensor:
    """qdata (..., N, K), scale (..., N, K/block) e8m0, column_scale (..., K/32) e8m0 -> (..., K, N) fp8: the values
    over the scale of their column, rounded once."""
    if qdata.dtype == E2M1.dtype:
        qdata, scale = e2m1.widen(qdata, scale)
    by_column = column_scale.view(torch.uint8).int().repeat_interleave(BLOCK, -1).unsqueeze(-2)
    by_row = scale.view(torch.uint8).int().repeat_interleave(qdata.shape[-1] // scale.shape[-1], -1)
    exponent = (by_row - by_column).clamp(-flush_shift(qdata.dtype), 64)
    folded = (values_of(qdata) * power_of_two(127 + exponent)).to(qdata.dtype)
    nan = (by_column == NAN_SCALE) | values_of(qdata).isfinite().logical_not()
    folded.view(torch.uint8).masked_fill_(nan, NAN_ELEMENT)
    return folded.mT.contiguous()


def fold_for_dgrad_with_stats(mx: MXTensor) -> tuple[MXTensor, FoldStats]:
    """`fold_for_dgrad`, and its cost. `spread` and `exact` of the stats are (..., K/32): one value per 32 columns."""
    _, stats = fold_with_stats(_column_blocks(mx))
    return fold_for_dgrad(mx), stats


def _check(mx: MXTensor) -> None:
    if not isinstance(mx, MXTensor):
        raise ValueError(f"fold_for_dgrad: expected an MXTensor, got a {type(mx).__name__}: quantize it")
    if mx.axis != -1 or mx.block_size != BLOCK or mx.row_index is not None:
        raise ValueError(f"fold_for_dgrad: expected blocks of {BLOCK} along K and no row index, got {mx}")


def _column_blocks(mx: MXTensor) -> MXTensor:
    """(..., K/32, 32 N): one row per block column, with the blocks of all N rows one after another."""
    _check(mx)
    mx = to_mxfp8(mx)
    qdata = mx.qdata.view(torch.uint8).unflatten(-1, (-1, BLOCK)).transpose(-3, -2).flatten(-2)
    return MXTensor(qdata.view(mx.qdata.dtype), mx.scale.mT, None, -1, BLOCK, mx.dtype, trusted=True)
