"""A tile of values, quantized along its columns or its rows: what `columns` and `requantize` share.

Measured on an H200 (65536 x 7168, Triton 3.6, share of the copy's 4.26 TB/s): columns 0.96, both 0.91, requantize 0.86.
What limits them is not DRAM but requests to L2, half of which cross the fabric between its two partitions (87% busy):
hence tiles with lines of 128 bytes, and scales stored along the tile. A register cap where it does not spill buys
another program an SM. Persistent programs that prefetch (cp.async) were slower: registers. Eviction hints did nothing.
"""

import triton
import triton.language as tl

from mxep.quant.kernels.numbers import abs_bits, reciprocal, scale_byte
from mxep.quant.kernels.transpose import interleave, store_transposed


@triton.jit
def put_columns(
    tile, codes_ptr, scale_ptr, stride, scale_stride, rows_left, columns_left, MODE: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize tile (tuple of (packs, NC)) in blocks of BLOCK rows; column c to codes_ptr + c * stride, the scales of
    block b to scale_ptr + b * scale_stride. rows_left is a multiple of BLOCK."""
    PACKS: tl.constexpr = tile[0].shape[0]
    NC: tl.constexpr = tile[0].shape[1]
    BLOCKS: tl.constexpr = PACKS * len(tile) // BLOCK
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    amax = tl.abs(tile[0].to(tl.float32))
    for i in tl.static_range(1, len(tile)):
        amax = tl.maximum(amax, tl.abs(tile[i].to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    byte = scale_byte(tl.max(tl.reshape(abs_bits(amax), (BLOCKS, PACKS // BLOCKS, NC)), axis=1), MODE, dtype)
    factor = tl.reshape(tl.broadcast_to(reciprocal(byte)[:, None, :], (BLOCKS, PACKS // BLOCKS, NC)), (PACKS, NC))
    scaled = ()
    for i in tl.static_range(len(tile)):
        scaled = scaled + (tile[i].to(tl.float32) * factor,)
    blocks_left = rows_left // BLOCK
    store_transposed(scaled, codes_ptr, stride, blocks_left * BLOCK, columns_left)
    block = tl.arange(0, BLOCKS)[:, None]
    column = tl.arange(0, NC)[None, :]
    place = block.to(tl.int64) * scale_stride + column
    tl.store(scale_ptr + place, byte.to(tl.uint8), mask=(column < columns_left) & (block < blocks_left))


@triton.jit
def put_rows(
    tile, row, codes_ptr, scale_ptr, stride, scale_stride, block_stride, rows_left, columns_left, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize tile (tuple of (packs, NC)) in blocks of BLOCK columns; row r to codes_ptr + r * stride, the scale of
    its block b to scale_ptr + r * scale_stride + b * block_stride. row (packs, 1): the first row of each pack."""
    PACKS: tl.constexpr = tile[0].shape[0]
    NC: tl.constexpr = tile[0].shape[1]
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    column = tl.arange(0, NC)[None, :]
    mask = (row < rows_left) & (column < columns_left)
    scales = ()
    for i in tl.static_range(len(tile)):
        x = tl.reshape(tile[i].to(tl.float32), (PACKS, NC // BLOCK, BLOCK))
        byte = scale_byte(tl.max(abs_bits(x), axis=2), MODE, dtype)
        qdata = tl.reshape((x * reciprocal(byte)[:, :, None]).to(dtype), (PACKS, NC))
        tl.store(codes_ptr + (row + i).to(tl.int64) * stride + column, qdata, mask=mask)
        scales = scales + (byte.to(tl.uint8),)
    byte = interleave(scales)
    row = tl.arange(0, byte.shape[0])[:, None]
    block = tl.arange(0, NC // BLOCK)[None, :]
    mask = (row < rows_left) & (block < columns_left // BLOCK)
    tl.store(scale_ptr + row.to(tl.int64) * scale_stride + block.to(tl.int64) * block_stride, byte, mask=mask)


@triton.jit
def place_of(row_tiles, column_tiles, ROWS_FIRST: tl.constexpr):
    """(batch, row tile, column tile) of this program; ROWS_FIRST: programs that follow one another share columns."""
    program = tl.program_id(0)
    batch = program // (row_tiles * column_tiles)
    program = program % (row_tiles * column_tiles)
    if ROWS_FIRST:
        return batch.to(tl.int64), program % row_tiles, program // row_tiles
    else:
        return batch.to(tl.int64), program // column_tiles, program % column_tiles
