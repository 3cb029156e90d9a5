"""Device functions for a tile of values: loaded, quantized along its columns, stored transposed.

A thread holds PACK = 8 consecutive rows, as a tuple of 8 tensors (BLOCK_M / 8, BLOCK_N). So the qdata of a column
become two 32-bit words in its registers before the tile is transposed through shared memory. This takes a quarter of
the accesses and instructions that single bytes take.

    tile[i][j] is row 8 * j + i         word 2 * j      q0 | q1 << 8 | q2 << 16 | q3 << 24   (q0 lies first in memory)
                                        word 2 * j + 1  q4 | q5 << 8 | q6 << 16 | q7 << 24
    stored (columns, BLOCK_M / 4) words  =  (columns, BLOCK_M) qdata

If rows are no multiple of 8, the tuple has one tensor (BLOCK_M, BLOCK_N), stored byte by byte.

Measured on an H200 (65536 x 7168, Triton 3.6, share of the copy's 4.26 TB/s): columns 0.96, requantize 0.86.
The limit is not DRAM but requests to L2, half of which cross the fabric between its two partitions (87% busy). Hence
tiles have lines of 128 bytes, and scales are stored along the tile. A register cap without spills fits another program
per SM. Persistent programs with prefetch (cp.async) were slower, because of registers. Eviction hints did nothing.
"""

import triton
import triton.language as tl

from mxep.quant.device import abs_bits, reciprocal, scale_of_amax


@triton.jit
def load_tile(ptr, row, column, stride, rows_left, columns_left, PACK: tl.constexpr):
    """A tuple of PACK tensors (BLOCK_M / PACK, BLOCK_N): rows `row` + i of a matrix, `stride` elements per row; zeros
    outside.

    row: (BLOCK_M / PACK, 1) int32, first row of each pack. Packs lie wholly inside or wholly outside of rows_left.
    column: (1, BLOCK_N) int32.
    """
    mask = (row < rows_left) & (column < columns_left)
    ptr += row.to(tl.int64) * stride + column
    tile = ()
    for _ in tl.static_range(PACK):
        tile = tile + (tl.load(ptr, mask=mask, other=0.0),)
        ptr += stride
    return tile


@triton.jit
def quantize_tile_columns(
    tile, qdata_ptr, scale_ptr, stride, scale_stride, rows_left, columns_left, MODE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize tile (tuple of (packs, BLOCK_N)) in blocks of BLOCK_SIZE rows.

    Column c goes to qdata_ptr + c * stride, the scales of block b go to scale_ptr + b * scale_stride. rows_left is a
    multiple of BLOCK_SIZE.
    """
    PACKS: tl.constexpr = tile[0].shape[0]
    BLOCK_N: tl.constexpr = tile[0].shape[1]
    NUM_BLOCKS: tl.constexpr = PACKS * len(tile) // BLOCK_SIZE
    BY_BLOCK: tl.constexpr = (NUM_BLOCKS, PACKS // NUM_BLOCKS, BLOCK_N)
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    amax = tl.abs(tile[0].to(tl.float32))
    for i in tl.static_range(1, len(tile)):
        amax = tl.maximum(amax, tl.abs(tile[i].to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    scale = scale_of_amax(tl.max(tl.reshape(abs_bits(amax), BY_BLOCK), axis=1), MODE, dtype)
    factor = tl.reshape(tl.broadcast_to(reciprocal(scale)[:, None, :], BY_BLOCK), (PACKS, BLOCK_N))
    scaled = ()
    for i in tl.static_range(len(tile)):
        scaled = scaled + (tile[i].to(tl.float32) * factor,)
    blocks_left = rows_left // BLOCK_SIZE
    store_transposed(scaled, qdata_ptr, stride, blocks_left * BLOCK_SIZE, columns_left)
    block = tl.arange(0, NUM_BLOCKS)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    offsets = block.to(tl.int64) * scale_stride + column
    tl.store(scale_ptr + offsets, scale.to(tl.uint8), mask=(column < columns_left) & (block < blocks_left))


@triton.jit
def store_transposed(tile, out_ptr, stride, rows_left, columns_left):
    """Store the qdata of `tile`, transposed: column c at out_ptr + c * stride.

    tile: a tuple of 8 tensors (BLOCK_M / 8, BLOCK_N), or of one (BLOCK_M, BLOCK_N), of values. They are cast to the
    qdata of out_ptr, which is the tile's first row and column. stride: qdata per column.
    rows_left, columns_left: rows and columns to store. With 8 tensors, stride and rows_left are multiples of 8;
    rows_left is best a multiple of 16 that Triton can see.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, tile[0].shape[1])[:, None]
    if len(tile) == 1:
        qdata = tl.trans(tile[0].to(dtype))
        row = tl.arange(0, qdata.shape[1])[None, :]
        mask = (column < columns_left) & (row < rows_left)
        tl.store(out_ptr + column.to(tl.int64) * stride + row, qdata, mask=mask)
    else:
        first = _word(tile[0], tile[1], tile[2], tile[3], dtype)
        second = _word(tile[4], tile[5], tile[6], tile[7], dtype)
        words = tl.permute(tl.join(first, second), (1, 0, 2))
        words = tl.reshape(words, (words.shape[0], words.shape[1] * 2))
        word = tl.arange(0, words.shape[1])[None, :]
        mask = (column < columns_left) & (word < rows_left // 4)
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + column.to(tl.int64) * (stride // 4) + word, words, mask=mask)


@triton.jit
def _word(a, b, c, d, dtype: tl.constexpr):
    """Four values as qdata in a 32-bit word. Cast in pairs, as in hardware, so that two are packed for free."""
    return _half(a, b, dtype) | (_half(c, d, dtype) << 16)


@triton.jit
def _half(a, b, dtype: tl.constexpr):
    low, high = tl.split(tl.join(a, b).to(dtype).to(tl.uint8, bitcast=True).to(tl.int32))
    return low | (high << 8)


@triton.jit
def program_tile(row_tiles, column_tiles, ROWS_FIRST: tl.constexpr):
    """(batch, row tile, column tile) of this program. ROWS_FIRST: consecutive programs share columns."""
    program = tl.program_id(0)
    batch = program // (row_tiles * column_tiles)
    program = program % (row_tiles * column_tiles)
    if ROWS_FIRST:
        return batch.to(tl.int64), program % row_tiles, program // row_tiles
    else:
        return batch.to(tl.int64), program // column_tiles, program % column_tiles
