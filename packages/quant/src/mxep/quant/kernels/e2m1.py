"""MXFP4: quantize values to E2M1, and fold E2M1 to E4M3 with one scale per row.

    quantize_e2m1  a block of values -> two codes per byte, one scale. x is a list of blocks, as in `quantize`
    fold_e2m1      row i: D/2 bytes, D/32 scales -> D bytes of E4M3, one scale max(S - 6, 0), with S the largest scale
                   of a block that is not all zero. A block is multiplied by 2^(scale - row scale), at most 2^6

**quantize_e2m1**: the code of a magnitude v is the minimum of four numbers, each rounded to nearest even:

    2 * v      exact for codes 0 to 4 (steps of 0.5)   computed by v + 2^22, whose last bit is 0.5
    v + 2      exact for codes 4 to 6 (steps of 1)     computed by v + 2^23, whose last bit is 1
    v / 2 + 4  exact for codes 6 and 7 (a step of 2)   computed by v + 2^24, whose last bit is 2
    7          the largest code

On an H100 this kernel has quantized weights for frozen experts. It was never timed there, and never compared with its
reference.

**fold_e2m1**: `_codes` computes four elements at a time, as the bytes of a 32-bit word, because a fold moves only
1.5 bytes per element. In that time an H200 can issue about ten instructions per element. Let e = 6 + (scale - row
scale), which is 12 for the block with the largest scale. An E2M1 code c without its sign becomes this E4M3 byte:

    c >= 2 (1 .. 6)   4 * c + 8 * e        c has one mantissa bit and its exponent above; the exponent grows by e
    c == 1 (0.5)      8 * e                0.5 is a subnormal of E2M1 but a normal number of E4M3
    c == 0            0

This is correct for e >= 1, that is for scales down to 2^11 below the row's largest. Blocks with smaller scales need
`_small_codes`, which shifts multiples of 2^-9 right and rounds to nearest even. Rows with such blocks are read a second
time, in a loop. In one pass, the temporaries of `_small_codes` would raise the registers for all rows from 64 to 140.

Programs stride over tiles of ROWS whole rows, held in registers. A thread takes pairs of 32-bit words, 16 elements. It
loads 8 bytes and stores 16. On an H100 the kernel runs at 0.87 to 0.92 of the speed of a copy that moves as many bytes
(integration/benchmarks/frozen.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import NAN_SCALE, abs_bits, num_sms, reciprocal, rows_of, scale_of_amax
from mxep.quant.formats import E2M1, E4M3
from mxep.quant.shapes import empty_rows
from mxep.runtime.launch import cdiv, launch, next_power_of_2

QUANTIZE_ELEMENTS = 4096
LONGEST = 8192
"""Maximum elements of a block that a program holds in registers."""


@triton.jit
def _nearest_codes(x):
    """E2M1 codes (int32, 0 to 15) of x (fp32); unspecified for NaN."""
    size = tl.abs(x)
    by_halves = (size + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    by_ones = (size + 8388608.0).to(tl.int32, bitcast=True) - (0x4B000000 - 2)
    by_twos = (size + 16777216.0).to(tl.int32, bitcast=True) - (0x4B800000 - 4)
    codes = tl.minimum(tl.minimum(by_halves, by_ones), tl.minimum(by_twos, 7))
    return codes | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _packed(x, scale):
    """Quantize x (blocks, elements) fp32 by scale (blocks,). Returns bytes of E2M1, (blocks, elements / 2) uint8."""
    codes = tl.where((scale == NAN_SCALE)[:, None], 7, _nearest_codes(x * reciprocal(scale)[:, None]))
    even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit(do_not_specialize=["num_blocks"])
def quantize_e2m1_kernel(
    x_ptr, qdata_ptr, scale_ptr, num_blocks, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * NUM_BLOCKS
    block = tl.arange(0, NUM_BLOCKS)
    mask = (block < num_blocks - first)[:, None]
    element = tl.arange(0, CHUNK)[None, :]
    pair = tl.arange(0, CHUNK // 2)[None, :]
    x_ptr += first * BLOCK_SIZE + block[:, None] * BLOCK_SIZE + element
    qdata_ptr += first * (BLOCK_SIZE // 2) + block[:, None] * (BLOCK_SIZE // 2) + pair
    x = tl.load(x_ptr, mask=mask & (element < BLOCK_SIZE), other=0.0).to(tl.float32)
    bits = tl.max(abs_bits(x), axis=1)
    for chunk in range(CHUNK, BLOCK_SIZE, CHUNK):
        more = tl.load(x_ptr + chunk, mask=mask & (chunk + element < BLOCK_SIZE), other=0.0).to(tl.float32)
        bits = tl.maximum(bits, tl.max(abs_bits(more), axis=1))
    scale = scale_of_amax(bits, MODE, tl.uint8)
    tl.store(qdata_ptr, _packed(x, scale), mask=mask & (pair < BLOCK_SIZE // 2))
    for chunk in range(CHUNK, BLOCK_SIZE, CHUNK):
        more = tl.load(x_ptr + chunk, mask=mask & (chunk + element < BLOCK_SIZE), other=0.0).to(tl.float32)
        inside = mask & (chunk // 2 + pair < BLOCK_SIZE // 2)
        tl.store(qdata_ptr + chunk // 2, _packed(more, scale), mask=inside)
    tl.store(scale_ptr + first + block, scale.to(tl.uint8), mask=block < num_blocks - first)


def quantize_e2m1(x: Tensor, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """The launcher of mxep::quantize_rows for E2M1."""
    x = x.contiguous()
    qdata, scale = empty_rows(x, E2M1.dtype, block_size)
    if x.numel():
        chunk = min(next_power_of_2(block_size), LONGEST)
        blocks = max(1, QUANTIZE_ELEMENTS // chunk)
        launch(quantize_e2m1_kernel, (cdiv(scale.numel(), blocks),),
            x, qdata, scale, scale.numel(), MODE=mode, BLOCK_SIZE=block_size, NUM_BLOCKS=blocks,
            CHUNK=chunk, num_warps=max(4, chunk // 1024),
        )  # fmt: skip
    return qdata, scale


TILE_PAIRS = 128
"""Pairs of words (16 elements each) per tile. A tile is several short rows, or one row of any length."""
WARP_PAIRS = 256
"""Pairs of words per warp, for choosing the number of warps of a tile."""
CHUNK = 32
"""Pairs of words per warp that `_expand_small` handles in one step."""
PROGRAMS_PER_SM = 256
ALIGNMENT = 16
"""Alignment in bytes that the kernel needs for the rows of qdata. Other qdata are copied first."""


@triton.jit
def _four_nibbles(words):
    """Put each four of the low 16 bits of a word into a byte of their own; the high four bits of a byte are 0."""
    words = words & 0xFFFF
    words = (words | (words << 8)) & 0x00FF00FF
    return (words | (words << 4)) & 0x0F0F0F0F


@triton.jit
def _codes(magnitude, e):
    """E2M1 magnitude * 2**(e - 6) as an E4M3 byte, for the four bytes of each word. Bytes are 0 to 7, e is 1 to 12."""
    sum7 = magnitude + 0x07070707
    nonzero = sum7 & 0x08080808
    one = (sum7 ^ (magnitude + 0x06060606)) & 0x08080808
    return (magnitude << 2) + nonzero * e - (one >> 1)


@triton.jit
def _small_codes(magnitude, e):
    """`_codes` for e from -7 to 0. Results are multiples of 2**-9, E4M3's smallest number, rounded to nearest even."""
    at_5 = ((magnitude + 0x03030303) >> 3) & 0x01010101
    at_6 = ((magnitude + 0x02020202) >> 3) & 0x01010101
    at_7 = ((magnitude + 0x01010101) >> 3) & 0x01010101
    multiples = (magnitude + at_5 + at_6 + 3 * at_7) << 2  # in units of 2**-9; for e = 0: 0 4 8 12 16 24 32 48
    shift = tl.maximum(-e, 1)
    half = (1 << (shift - 1)) - 1
    odd = (multiples >> shift) & 0x01010101
    rounded = ((multiples + half * 0x01010101 + odd) >> shift) & ((0xFF >> shift) * 0x01010101)
    above_16 = (rounded >> 4) & (rounded >> 3) & 0x01010101  # 24 * 2**-9 = 6 * 2**-7 is byte 20; others are their byte
    return tl.where(e == 0, magnitude << 2, rounded - 4 * above_16)


@triton.jit
def _expand(words, e, is_nan, SMALL: tl.constexpr):
    """Words (rows, pairs, 2) of E2M1 -> words (rows, pairs, 4) of E4M3.

    e: (rows, pairs), 1 to 12, or -7 to 12 if SMALL. is_nan: (rows,), True for rows that become NaN.
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
    """e of `_codes`. Clamped to -7, which makes all elements zero, and to 12, which only blocks of zeros can exceed."""
    return tl.minimum(tl.maximum(scale - row_scale[:, None] + 6, -7), 12)


@triton.jit
def _expand_small(words_row, scale_row, folded_row, row_scale, row_mask, PAIRS: tl.constexpr, CHUNK: tl.constexpr):
    """Fold rows that have blocks with e < 1, CHUNK pairs at a time to save registers.

    words_row, scale_row, folded_row: pointers to the first element of each row.
    """
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
    """words_ptr: qdata as int32, eight codes per word. A pair is two words, half a block.
    stride: words per row, divided by 4, so that Triton knows that rows are 16-byte aligned.
    folded_ptr: E4M3 as int32, four elements per word.
    PAIRS: pairs per row. CHUNK: pairs per step of `_expand_small`.
    """
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
    width = 2 * qdata.shape[-1]
    folded, folded_scale = empty_rows(qdata, E4M3.dtype, 0, (*qdata.shape[:-1], width))
    if folded.numel():
        qdata, scale = rows_of(qdata.view(torch.uint8)), rows_of(scale)
        if qdata.data_ptr() % ALIGNMENT or qdata.stride(0) % ALIGNMENT:
            qdata = qdata.clone(memory_format=torch.contiguous_format)
        pairs = width // 16
        padded = next_power_of_2(pairs)
        rows = max(1, TILE_PAIRS // padded)
        tiles, warps = cdiv(folded_scale.numel(), rows), min(32, max(1, rows * padded // WARP_PAIRS))
        launch(fold_e2m1_kernel, (min(tiles, PROGRAMS_PER_SM * num_sms(qdata.device)),),
            qdata.view(torch.int32), scale, folded.view(torch.int32), folded_scale,
            qdata.stride(0) // ALIGNMENT, scale.stride(0), folded_scale.numel(),
            PAIRS=pairs, ROWS=rows, CHUNK=min(CHUNK * warps, padded), num_warps=warps,
        )  # fmt: skip
    return folded, folded_scale
