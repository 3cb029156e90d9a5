"""A tile of codes, stored transposed: rows become the contiguous axis.

A program's tile of NR rows x NC columns is held as (PACK, NR / PACK, NC), PACK rows that follow one another along the
first axis, which Triton keeps in the registers of one thread. So PACK codes of a column become one word before the tile
is turned through shared memory, and that takes a PACK-th of the accesses:

    rows      0 1 2 3 | 4 5 6 7 | ...        tile[i, j] is row PACK * j + i
    words     w0      | w1      | ...        w0 = c0 | c1 << 8 | c2 << 16 | c3 << 24   (little-endian: c0 comes first)
    stored    (columns, rows / PACK) words  =  (columns, rows) codes
"""

import triton
import triton.language as tl


@triton.jit
def tile_rows(PACK: tl.constexpr, NR: tl.constexpr):
    """(PACK, NR / PACK) int32: the row, within the tile, of each place."""
    return tl.arange(0, PACK)[:, None] + PACK * tl.arange(0, NR // PACK)[None, :]


@triton.jit
def store_turned(codes, out_ptr, stride, words_left, columns_left):
    """Store codes (PACK, NR / PACK, NC), fp8, PACK 1 or 4, transposed: column c at out_ptr + c * stride bytes.

    out_ptr: pointer to the place of the tile's first row and column. stride: bytes a column, a multiple of PACK.
    words_left, columns_left: how many of the NR / PACK words a column, and of the columns, are stored.
    """
    PACK: tl.constexpr = codes.shape[0]
    codes = codes.to(tl.uint8, bitcast=True)
    if PACK == 4:
        words = tl.sum(codes.to(tl.int32) << (8 * tl.arange(0, 4))[:, None, None], axis=0)
        out_ptr = out_ptr.to(tl.pointer_type(tl.int32))
    else:
        words = tl.reshape(codes, (codes.shape[1], codes.shape[2]))
        out_ptr = out_ptr.to(tl.pointer_type(tl.uint8))
    word = tl.arange(0, words.shape[0])
    column = tl.arange(0, words.shape[1])
    mask = (column < columns_left)[:, None] & (word < words_left)[None, :]
    tl.store(out_ptr + column[:, None].to(tl.int64) * (stride // PACK) + word[None, :], tl.trans(words), mask=mask)
