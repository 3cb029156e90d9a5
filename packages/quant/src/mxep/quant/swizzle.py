"""Scale swizzle: scale bytes in the 128 x 4 blocked layout that NVIDIA's block-scaled GEMMs read (cuBLAS, tcgen05).

The scales are a matrix (rows, cols) of bytes, cols = K / 32. It is padded with zero bytes to a multiple of 128 x 4 and
cut into tiles of 128 x 4 = 512 bytes. The tiles are stored one after another, in row-major order. Inside a tile, each
run of 16 bytes holds the four columns of rows i, i + 32, i + 64 and i + 96:

    offset(r, c) = tile(r // 128, c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4

Example: 128 x 4 scales; bytes 0 to 3 are row 0, bytes 4 to 7 row 32, bytes 12 to 15 row 96, bytes 16 to 19 row 1.

With G groups of rows, each group is padded to a multiple of 128 rows and swizzled separately. The groups are stored one
after another. Only the device knows the group sizes, so the result has round_up(rows + G * 127, 128) rows, enough for
any sizes.

A swizzled tensor keeps a 2-D shape, because torch's scaled GEMMs check it. But element [r, c] of it is not the scale of
row r and column c.
"""

import torch
from torch import Tensor

from mxep.quant.checks import check_byte_elements
from mxep.quant.formats import BLOCK, SCALE_DTYPE
from mxep.quant.groups import check_offs, fill_rows, group_of_rows, valid_rows
from mxep.quant.ops import pick_mx
from mxep.quant.shapes import SWIZZLE_COLS as COLS
from mxep.quant.shapes import SWIZZLE_ROWS as ROWS
from mxep.quant.shapes import num_rows, swizzled_shape
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


def swizzle_scales(scale: Tensor, *, offs: Tensor | None = None) -> Tensor:
    """Copy scales to the 128 x 4 blocked layout. With offs, each group of rows is swizzled separately.

    Args:
        scale: (..., rows, cols) e8m0 or uint8, any strides. With offs it must be 2-D.
        offs: (G,) int32 inclusive ends of the row groups. Rows from offs[-1] on are not read.
    Returns:
        Contiguous tensor of scale's dtype. Padding bytes are 0.
        Without offs: (..., round_up(rows, 128), round_up(cols, 4)).
        With offs: (round_up(rows + G * 127, 128), round_up(cols, 4)). Bytes past the last group are unspecified.
    Raises ValueError for another dtype, for fewer than two axes and for a wrong offs.
    """
    if scale.dtype not in (SCALE_DTYPE, torch.uint8):
        raise ValueError(f"scale: got dtype {scale.dtype}, want {SCALE_DTYPE} or its bytes as torch.uint8")
    if scale.ndim < 2:
        raise ValueError(f"scale: got shape {tuple(scale.shape)}, want (..., rows, cols)")
    check_offs(offs, scale)
    swizzled: Tensor = _swizzle(scale, offs)
    return swizzled


def gather_swizzled(mx: MXTensor, *, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply the row index of `mx` and swizzle its scales, for a block-scaled GEMM. No autograd.

    Args:
        mx: (R, K) in blocks of 32 along K, E4M3 or E5M2.
        offs: (G,) int32 inclusive ends of the row groups. Rows from offs[-1] on are not read.
    Returns:
        qdata: (R, K), in the dtype of mx.qdata. Rows from offs[-1] on are unspecified.
        scale: e8m0, the result of `swizzle_scales` for the R rows.
    Raises ValueError for any other `mx` and for a wrong offs.
    """
    if not isinstance(mx, MXTensor) or mx.axis != -1 or mx.block_size != BLOCK or mx.ndim != 2:
        raise ValueError(f"gather_swizzled: got {mx!r}, want an MXTensor (R, K) in blocks of {BLOCK} along its rows")
    check_byte_elements("gather_swizzled", mx)
    check_offs(offs, mx)
    qdata, scale = _gather_swizzled(mx.qdata, mx.scale, mx.row_index, offs)
    return qdata, scale


@op(
    "mxep::gather_swizzled",
    fake=lambda qdata, scale, row_index, offs: (
        qdata.new_empty((num_rows(qdata, row_index), qdata.shape[1])),
        scale.new_empty(swizzled_shape(num_rows(qdata, row_index), scale.shape[1], offs)),
    ),
    launcher="mxep.quant.kernels.groups:gather_swizzled",
)
def _gather_swizzled(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """qdata (S, K), scale (S, K/32) -> qdata (R, K), scale in the 128 x 4 layout."""
    rows = num_rows(qdata, row_index)
    picked, scale_bytes = pick_mx(qdata, scale, row_index, valid_rows(offs, rows))
    return fill_rows(picked, rows).clone(), _swizzle.reference(fill_rows(scale_bytes.view(SCALE_DTYPE), rows), offs)


@op(
    "mxep::swizzle_scales",
    fake=lambda scale, offs: scale.new_empty(
        (*scale.shape[:-2], *swizzled_shape(scale.shape[-2], scale.shape[-1], offs))
    ),
    launcher="mxep.quant.kernels.groups:swizzle_scales",
)
def _swizzle(scale: Tensor, offs: Tensor | None) -> Tensor:
    plain = scale.view(torch.uint8)
    *rest, rows, cols = plain.shape
    height, width = swizzled_shape(rows, cols, offs)
    if offs is not None:
        valid = valid_rows(offs, rows)
        # In the result each group starts at a multiple of 128. Rows past the last group go to row `height`, cut below.
        starts = torch.nn.functional.pad(offs.long(), (1, 0))
        room = (starts.diff() + ROWS - 1) // ROWS * ROWS
        new_starts = torch.nn.functional.pad(room.cumsum(0), (1, 0))
        group = group_of_rows(offs, valid)
        row = torch.arange(valid, device=offs.device, dtype=torch.int64) - starts[group] + new_starts[group]
        row = torch.where(group < offs.shape[0], row, height)
        plain = plain.new_zeros(height + 1, cols).index_copy_(0, row, plain[:valid])[:height]
    padded = torch.nn.functional.pad(plain, (0, width - cols, 0, height - plain.shape[-2]))
    # (tile row, quarter, row in the quarter, tile column, column) -> (tile row, tile column, row, quarter, column)
    tiles = padded.reshape(*rest, height // ROWS, 4, 32, width // COLS, COLS).transpose(-4, -2)
    return tiles.reshape(*rest, height, width).clone().view(scale.dtype)
