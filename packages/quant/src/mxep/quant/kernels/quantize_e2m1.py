"""Quantize to E2M1 along rows: values read once, two codes per byte and block scales written once.

x is a list of blocks of BLOCK_SIZE elements, one after another, as in `rows`. A program takes NUM_BLOCKS of them. A
block that is no power of two is masked up to one. Blocks longer than LONGEST are read twice.

The code of a magnitude v is the least of four numbers, each rounded to nearest even:

    2 v        codes 0 to 4, which are 0.5 apart     v + 2^22 has steps of 0.5: its bits count them
    v + 2      codes 4 to 6, 1 apart                 v + 2^23 has steps of 1
    v / 2 + 4  codes 6 and 7, 2 apart                v + 2^24 has steps of 2
    7          the largest

It froze weights on an H100, but was never timed there, nor compared with its reference. For sm_90 it compiles to 32
registers (bf16) without spills. An element takes 21 instructions.
"""

import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import NAN_SCALE, abs_bits, as_bytes, reciprocal, scale_of_amax
from mxep.quant.formats import E2M1, SCALE_DTYPE
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_ELEMENTS = 4096
LONGEST = 8192
"""Elements of a block that a program holds in registers."""


@triton.jit
def _codes(x):
    """E2M1 codes (int32, 0 to 15) of x (fp32). Those of NaN mean nothing."""
    size = tl.abs(x)
    by_halves = (size + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    by_ones = (size + 8388608.0).to(tl.int32, bitcast=True) - (0x4B000000 - 2)
    by_twos = (size + 16777216.0).to(tl.int32, bitcast=True) - (0x4B800000 - 4)
    codes = tl.minimum(tl.minimum(by_halves, by_ones), tl.minimum(by_twos, 7))
    return codes | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _packed(x, scale):
    """Bytes (blocks, elements / 2) of x (blocks, elements) fp32 under their scales (blocks,)."""
    codes = tl.where((scale == NAN_SCALE)[:, None], 7, _codes(x * reciprocal(scale)[:, None]))
    even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit(do_not_specialize=["num_blocks"])
def quantize_e2m1_kernel(
    x_ptr, qdata_ptr, scale_ptr, num_blocks, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Blocks of BLOCK_SIZE elements, in chunks of CHUNK: one where they fit it."""
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
    """mxep::quantize_e2m1."""
    *rest, k = x.shape
    x = x.contiguous()
    qdata = x.new_empty((*rest, k // 2), dtype=E2M1.dtype)
    scale = x.new_empty((*rest, k // block_size), dtype=SCALE_DTYPE)
    if x.numel():
        chunk = min(next_power_of_2(block_size), LONGEST)
        blocks = max(1, TILE_ELEMENTS // chunk)
        launch(quantize_e2m1_kernel, (cdiv(scale.numel(), blocks),),
            x, as_bytes(qdata), as_bytes(scale), scale.numel(), MODE=mode, BLOCK_SIZE=block_size, NUM_BLOCKS=blocks,
            CHUNK=chunk, num_warps=max(4, chunk // 1024),
        )  # fmt: skip
    return qdata, scale
