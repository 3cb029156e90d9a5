"""Expand MXFP4 to E4M3 with one scale per row. E2M1 and block scales are read once, codes and row scales written once.

    row i   D/2 bytes, D/32 scales           S = the largest scale of a block that is not all zero
      |                                      row scale R = max(S - 6, 0)
      v                                      each block is times 2^(scale - R), at most 2^6
    row i   D bytes of E4M3, one scale

Codes are computed four at a time, as bytes of a 32-bit word (`_codes`). One element at a time takes too many
instructions: with 1.5 bytes of traffic per element an H200 has time for about ten. An E2M1 code c without its sign
becomes, under the shift e:

    c >= 2 (1 .. 6)   E4M3 byte 4 c + 8 e        2^(c >> 1) with one mantissa bit moves up in the exponent by e
    c == 1 (0.5)      8 e                        a subnormal of E2M1 but a normal number of E4M3
    c == 0            0

with e = 6 + (scale - R), 12 for the largest block. This holds from e = 1 on (a block 2^11 below the largest). Rows with
smaller blocks also use `_small_codes`, which shifts multiples of 2^-9 right and rounds to nearest even. They are read
again in a loop, because its temporaries would otherwise take all rows from 64 registers to 140.

Programs stride over tiles of ROWS whole rows, held in registers, as in `fold`. A thread takes pairs of words, 16
elements: it loads 8 bytes and stores 16.

On an H100 it takes 0.87 to 0.92 of the speed of a copy that moves as many bytes (integration/benchmarks/frozen.py). For
sm_90 it compiles to 64 registers without spills. An element of ordinary rows takes 6 instructions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import NAN_SCALE, as_bytes, num_sms, rows_of
from mxep.quant.formats import E4M3
from mxep.quant.shapes import empty_rows
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_PAIRS = 128
"""Pairs of words (16 elements) that a program takes at a time: several short rows, or a longer one."""
WARP_PAIRS = 256
"""Pairs of words of a tile per warp."""
CHUNK = 32
"""Pairs a warp at a time of a row with blocks 2^12 or more below its largest, which takes more registers an element."""
PROGRAMS_PER_SM = 256
ALIGNMENT = 16
"""Alignment in bytes of the address of qdata and of its rows."""


@triton.jit
def _four_nibbles(words):
    """The low 16 bits of each word as four bytes of four bits, in order."""
    words = words & 0xFFFF
    words = (words | (words << 8)) & 0x00FF00FF
    return (words | (words << 4)) & 0x0F0F0F0F


@triton.jit
def _codes(magnitude, e):
    """E4M3 bytes of four E2M1 magnitudes (bytes 0 to 7) times 2**(e - 6), e from 1 to 12."""
    sum7 = magnitude + 0x07070707
    nonzero = sum7 & 0x08080808
    one = (sum7 ^ (magnitude + 0x06060606)) & 0x08080808
    return (magnitude << 2) + nonzero * e - (one >> 1)


@triton.jit
def _small_codes(magnitude, e):
    """The same as `_codes`, for e from -7 to 0. The bytes of these smallest E4M3 numbers are multiples of 2**-9."""
    at_5 = ((magnitude + 0x03030303) >> 3) & 0x01010101
    at_6 = ((magnitude + 0x02020202) >> 3) & 0x01010101
    at_7 = ((magnitude + 0x01010101) >> 3) & 0x01010101
    multiples = (magnitude + at_5 + at_6 + 3 * at_7) << 2  # of 2**-9 for e = 0: 0 4 8 12 16 24 32 48
    shift = tl.maximum(-e, 1)
    half = (1 << (shift - 1)) - 1
    odd = (multiples >> shift) & 0x01010101
    rounded = ((multiples + half * 0x01010101 + odd) >> shift) & ((0xFF >> shift) * 0x01010101)
    above_16 = (rounded >> 4) & (rounded >> 3) & 0x01010101  # 24, which only 6 * 2**-7 reaches, is byte 20
    return tl.where(e == 0, magnitude << 2, rounded - 4 * above_16)


@triton.jit
def _expand(words, e, is_nan, SMALL: tl.constexpr):
    """E4M3 of words (rows, pairs, 2) of E2M1: (rows, pairs, 4) words.

    e: (rows, pairs), -7 to 12, from 1 on unless SMALL. is_nan: (rows,).
    """
    low, high = _four_nibbles(words), _four_nibbles((words >> 16) & 0xFFFF)
    nibbles = tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1], 4))
    magnitude = nibbles & 0x07070707
    e = e[:, :, None]
    codes = _codes(magnitude, e)
    if SMALL:
        codes = tl.where(e > 0, codes, _small_codes(magnitude, e))
    codes |= (nibbles & 0x08080808) << 4
    return tl.where(is_nan[:, None, None], 0x7F7F7F7F, codes)


@triton.jit
def _shift(scale, row_scale):
    """e of `_codes`; -7 of all that flushes. A zero block may have any scale: it stays zero."""
    return tl.minimum(tl.maximum(scale - row_scale[:, None] + 6, -7), 12)


@triton.jit
def _expand_small(words_row, scale_row, folded_row, row_scale, row_mask, PAIRS: tl.constexpr, CHUNK: tl.constexpr):
    """Rows with small blocks, a few pairs at a time: few registers, as they are rare. *_row: where each begins."""
    for first in range(0, PAIRS, CHUNK):
        pair = first + tl.arange(0, CHUNK)[None, :]
        mask = row_mask[:, None] & (pair < PAIRS)
        scale = tl.load(scale_row + pair // 2, mask=mask, other=0).to(tl.int32)
        word = pair[:, :, None] * 2 + tl.arange(0, 2)
        words = tl.load(words_row + word, mask=mask[:, :, None], other=0)
        codes = _expand(words, _shift(scale, row_scale), row_scale == NAN_SCALE, True)
        tl.store(folded_row + pair[:, :, None] * 4 + tl.arange(0, 4), codes, mask=mask[:, :, None])


@triton.jit(do_not_specialize=["rows"])
def fold_e2m1_kernel(
    words_ptr, scale_ptr, folded_ptr, folded_scale_ptr, stride, scale_stride, rows,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """words: qdata as int32, 4 * `stride` of them a row (so that Triton sees 16-byte rows); two words (a pair) are half
    a block. folded: int32, four codes each. CHUNK: pairs at a time of rows with small blocks."""
    pair = tl.arange(0, triton.next_power_of_2(PAIRS))[None, :]
    word = tl.max_contiguous(pair[:, :, None] * 2 + tl.arange(0, 2), (1, 1, 2))
    element = pair[:, :, None] * 4 + tl.arange(0, 4)

    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = row < rows
        mask = row_mask[:, None] & (pair < PAIRS)
        scale_row = scale_ptr + (row * scale_stride)[:, None]
        words_row = words_ptr + (row * stride * 4)[:, None, None]
        folded_row = folded_ptr + (row * (PAIRS * 4))[:, None, None]
        scale = tl.load(scale_row + pair // 2, mask=mask, other=0).to(tl.int32)
        words = tl.load(words_row + word, mask=mask[:, :, None], other=0)
        nonzero = tl.max((words & 0x77777777) != 0, axis=2) > 0
        max_scale = tl.max(tl.where(nonzero | (scale == NAN_SCALE), scale, 0), axis=1)
        is_nan = max_scale == NAN_SCALE
        row_scale = tl.where(is_nan, NAN_SCALE, tl.maximum(max_scale - 6, 0))
        tl.store(folded_scale_ptr + row, row_scale.to(tl.uint8), mask=row_mask)
        e = _shift(scale, row_scale)
        small = (tl.min(tl.where(nonzero, e, 12), axis=1) < 1) & (is_nan == 0)
        mask = mask & (small == 0)[:, None]
        tl.store(folded_row + element, _expand(words, e, is_nan, False), mask=mask[:, :, None])

        if tl.max(small.to(tl.int32), axis=0) > 0:
            _expand_small(words_row, scale_row, folded_row, row_scale, row_mask & small, PAIRS, CHUNK)


def fold_e2m1(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """mxep::fold_e2m1."""
    width = 2 * qdata.shape[-1]
    folded, folded_scale = empty_rows(qdata, E4M3.dtype, 0, (*qdata.shape[:-1], width))
    if folded.numel():
        qdata, scale = rows_of(as_bytes(qdata)), rows_of(as_bytes(scale))
        if qdata.data_ptr() % ALIGNMENT or qdata.stride(0) % ALIGNMENT:
            qdata = qdata.clone(memory_format=torch.contiguous_format)
        pairs = width // 16
        padded = next_power_of_2(pairs)
        rows = max(1, TILE_PAIRS // padded)
        tiles, warps = cdiv(folded_scale.numel(), rows), min(32, max(1, rows * padded // WARP_PAIRS))
        launch(fold_e2m1_kernel, (min(tiles, PROGRAMS_PER_SM * num_sms(qdata.device)),),
            qdata.view(torch.int32), scale, folded.view(torch.int32), as_bytes(folded_scale),
            qdata.stride(0) // ALIGNMENT, scale.stride(0), folded_scale.numel(),
            PAIRS=pairs, ROWS=rows, CHUNK=min(CHUNK * warps, padded), num_warps=warps,
        )  # fmt: skip
    return folded, folded_scale
