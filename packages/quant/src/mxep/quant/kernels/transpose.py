"""A tile of qdata, stored transposed: rows become the contiguous axis.

A thread holds PACK = 8 rows that follow one another, as a tuple of 8 tensors (NR / 8, NC), so that the qdata of a
column become two 32-bit words in its registers before the tile is transposed through shared memory. That takes a
quarter of the accesses and of the instructions that single bytes take.

    tile[i][j] is row 8 * j + i        word 2 * j      c0 | c1 << 8 | c2 << 16 | c3 << 24   (c0 lies first in memory)
                                       word 2 * j + 1  c4 | c5 << 8 | c6 << 16 | c7 << 24
    stored (columns, NR / 4) words  =  (columns, NR) qdata

Where rows are no multiple of 8 the tuple has one tensor (NR, NC), stored byte by byte.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, row, column, stride, rows_left, columns_left, PACK: tl.constexpr):
    """A tuple of PACK tensors (NR / PACK, NC): rows `row` + i of a matrix, `stride` elements a row; zeros outside.

    row: (NR / PACK, 1) int32, the first row of each pack; packs lie wholly inside rows_left or wholly outside.
    column: (1, NC) int32.
    """
    mask = (row < rows_left) & (column < columns_left)
    ptr += row.to(tl.int64) * stride + column
    tile = ()
    for _ in tl.static_range(PACK):
        tile = tile + (tl.load(ptr, mask=mask, other=0.0),)
        ptr += stride
    return tile


@triton.jit
def store_transposed(tile, out_ptr, stride, rows_left, columns_left):
    """Store the qdata of `tile`, transposed: column c at out_ptr + c * stride.

    tile: a tuple of 8 tensors (NR / 8, NC), or of one (NR, NC), of values; cast to the qdata out_ptr points to.
    out_ptr: the place of the tile's first row and column. stride: qdata a column.
    rows_left, columns_left: what is stored; for 8 tensors stride and rows_left are multiples of 8, rows_left better one
    of 16 that Triton can see.
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
def interleave(tile):
    """A tuple of 8 tensors (NR / 8, N), or of one (NR, N), as the (NR, N) rows they are."""
    if len(tile) == 1:
        return tile[0]
    else:
        first = tl.join(tl.join(tile[0], tile[1]), tl.join(tile[2], tile[3]))
        second = tl.join(tl.join(tile[4], tile[5]), tl.join(tile[6], tile[7]))
        rows = tl.permute(tl.join(first, second), (0, 4, 3, 2, 1))
        return tl.reshape(rows, (8 * rows.shape[0], rows.shape[4]))


@triton.jit
def _word(a, b, c, d, dtype: tl.constexpr):
    """Four values as qdata in a 32-bit word. Cast in pairs, as the hardware does, so that two are packed for free."""
    return _half(a, b, dtype) | (_half(c, d, dtype) << 16)


@triton.jit
def _half(a, b, dtype: tl.constexpr):
    low, high = tl.split(tl.join(a, b).to(dtype).to(tl.uint8, bitcast=True).to(tl.int32))
    return low | (high << 8)
