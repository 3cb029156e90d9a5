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

N outputs, K inputs, leading axes are experts. Plain torch on any device; no kernel yet.
"""

import torch
from torch import Tensor

from mxep.quant.fold import FoldStats, fold, fold_with_stats
from mxep.quant.formats import BLOCK
from mxep.quant.tensor import MXTensor
from mxep.quant.to_mxfp8 import to_mxfp8


def fold_for_dgrad(mx: MXTensor) -> MXTensor:
    """`mx` (..., N, K) with one scale over all N rows of each column, as dgrad contracts it.

    mx: blocks of 32 along K (axis -1), E4M3, E5M2 or E2M1 (the result has E4M3), no row index.
    Returns (..., N, K) with axis -2 and block_size N; bytes contiguous along N, scale (..., 1, K), equal within each
    32 columns. No autograd. Raises ValueError for other blocks.
    """
    return _by_columns(fold(_column_blocks(mx)), mx)


def fold_for_dgrad_with_stats(mx: MXTensor) -> tuple[MXTensor, FoldStats]:
    """`fold_for_dgrad`, and its cost. `spread` and `exact` of the stats are (..., K/32): one value per 32 columns."""
    folded, stats = fold_with_stats(_column_blocks(mx))
    return _by_columns(folded, mx), stats


def _column_blocks(mx: MXTensor) -> MXTensor:
    """(..., K/32, 32 N): one row per block column, with the blocks of all N rows one after another."""
    if not isinstance(mx, MXTensor):
        raise ValueError(f"fold_for_dgrad: expected an MXTensor, got a {type(mx).__name__}: quantize it")
    if mx.axis != -1 or mx.block_size != BLOCK or mx.row_index is not None:
        raise ValueError(f"fold_for_dgrad: expected blocks of {BLOCK} along K and no row index, got {mx}")
    mx = to_mxfp8(mx)
    qdata = _bytes(mx.qdata).unflatten(-1, (-1, BLOCK)).transpose(-3, -2).flatten(-2)
    return MXTensor(qdata.view(mx.qdata.dtype), mx.scale.mT, None, -1, BLOCK, mx.dtype, trusted=True)


def _by_columns(folded: MXTensor, mx: MXTensor) -> MXTensor:
    """(..., K/32, 32 N) with one scale per row -> (..., N, K) with one scale per column."""
    n = mx.shape[-2]
    transposed = _bytes(folded.qdata).unflatten(-1, (n, BLOCK)).mT.flatten(-3, -2)  # (..., K, N)
    scale = _bytes(folded.scale).repeat_interleave(BLOCK, -2).mT
    qdata = transposed.contiguous().view(folded.qdata.dtype).mT
    return MXTensor(qdata, scale.view(folded.scale.dtype), None, -2, n, mx.dtype, trusted=True)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
