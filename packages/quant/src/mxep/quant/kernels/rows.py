"""Quantizes without transposing: along rows, and in square 2-D blocks. Reads once, writes qdata and scales.

rows   x is a list of blocks of BLOCK_SIZE elements, one after another; a program takes NUM_BLOCKS of them
       (a block that is no power of two, such as a row, is masked up to one; a longer one is read twice)
2-D    a program takes BLOCK_SIZE rows x BLOCK_N columns
"""

import functools
import operator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import abs_bits, as_bytes, reciprocal, scale_of_amax
from mxep.quant.shapes import empty_2d, empty_rows
from mxep.runtime.launch import cdiv, launch, next_power_of_2
from mxep.runtime.lengths import Length

TILE_ELEMENTS = 4096
LONG_ELEMENTS = 8192
LONGEST = 16384
"""Most elements of a block that a program holds in registers."""
BLOCK_N_2D = 256


@triton.jit(do_not_specialize=["num_blocks"])
def quantize_blocks_kernel(
    x_ptr, qdata_ptr, scale_ptr, num_blocks, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Blocks of BLOCK_SIZE elements, in chunks of CHUNK; one chunk if the block fits it."""
    first = tl.program_id(0).to(tl.int64) * NUM_BLOCKS
    block = tl.arange(0, NUM_BLOCKS)
    mask = block < num_blocks - first
    element = tl.arange(0, CHUNK)[None, :]
    offsets = block[:, None] * BLOCK_SIZE + element
    x_ptr += first * BLOCK_SIZE
    qdata_ptr += first * BLOCK_SIZE
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    inside = mask[:, None] if CHUNK == BLOCK_SIZE else mask[:, None] & (element < BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(abs_bits(x), axis=1)
    for chunk in range(CHUNK, BLOCK_SIZE, CHUNK):
        more_inside = mask[:, None] & (chunk + element < BLOCK_SIZE)
        more = tl.load(x_ptr + chunk + offsets, mask=more_inside, other=0.0).to(tl.float32)
        bits = tl.maximum(bits, tl.max(abs_bits(more), axis=1))
    scale = scale_of_amax(bits, MODE, dtype)
    factor = reciprocal(scale)[:, None]
    tl.store(qdata_ptr + offsets, (x * factor).to(dtype), mask=inside)
    for chunk in range(CHUNK, BLOCK_SIZE, CHUNK):
        more_inside = mask[:, None] & (chunk + element < BLOCK_SIZE)
        more = tl.load(x_ptr + chunk + offsets, mask=more_inside, other=0.0).to(tl.float32)
        tl.store(qdata_ptr + chunk + offsets, (more * factor).to(dtype), mask=more_inside)
    tl.store(scale_ptr + first + block, scale.to(tl.uint8), mask=mask)


@triton.jit
def quantize_2d_kernel(
    x_ptr, qdata_ptr, scale_ptr, K, MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """x (rows, K), rows a multiple of BLOCK_SIZE. Leading axes are just more rows."""
    row_block = tl.program_id(0).to(tl.int64)
    column0 = tl.program_id(1) * BLOCK_N
    row = tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, BLOCK_N)
    start = row_block * BLOCK_SIZE * K + column0
    offsets = row[:, None].to(tl.int64) * K + column[None, :]
    mask = (column < K - column0)[None, :]
    x = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    x = tl.reshape(x, (BLOCK_SIZE, BLOCK_N // BLOCK_SIZE, BLOCK_SIZE))
    scale = scale_of_amax(tl.max(tl.max(abs_bits(x), axis=2), axis=0), MODE, dtype)
    qdata = tl.reshape((x * reciprocal(scale)[None, :, None]).to(dtype), (BLOCK_SIZE, BLOCK_N))
    tl.store(qdata_ptr + start + offsets, qdata, mask=mask)
    block = column0 // BLOCK_SIZE + tl.arange(0, BLOCK_N // BLOCK_SIZE)
    tl.store(scale_ptr + row_block * (K // BLOCK_SIZE) + block, scale.to(tl.uint8), mask=block < K // BLOCK_SIZE)


def quantize_rows(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """mxep::quantize_rows."""
    x = x.contiguous()
    qdata, scale = empty_rows(x, dtype, block_size)
    if x.numel():
        _quantize_blocks(x, qdata, scale, scale.numel(), mode, block_size)
    return qdata, scale


def quantize_into_room(x: Tensor, room: int, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """mxep::quantize_into_room."""
    qdata, scale = empty_rows(x, dtype, block_size, (room, x.shape[1]))
    if x.numel():
        blocks = Length(len(x), functools.partial(operator.mul, scale.shape[1]))
        _quantize_blocks(x.contiguous(), qdata, scale, blocks, mode, block_size)
    return qdata, scale


def _quantize_blocks(x: Tensor, qdata: Tensor, scale: Tensor, num_blocks: int, mode: str, block_size: int) -> None:
    """Quantize the first blocks of x. qdata and scale may have room for more."""
    chunk = min(next_power_of_2(block_size), LONGEST)
    tile = max(1, (TILE_ELEMENTS if chunk == block_size <= TILE_ELEMENTS else LONG_ELEMENTS) // chunk)
    launch(quantize_blocks_kernel, (cdiv(scale.numel(), tile),),
        x, qdata, as_bytes(scale), num_blocks, MODE=mode, BLOCK_SIZE=block_size, NUM_BLOCKS=tile, CHUNK=chunk,
        num_warps=max(4, chunk // 2048),
    )  # fmt: skip


def quantize_2d(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """mxep::quantize_2d. Raises ValueError for a block that is no power of two up to 128."""
    if block_size & (block_size - 1) or block_size > 128:
        raise ValueError(f"block_size: got {block_size} x {block_size}, want a power of two up to 128 on CUDA")
    x = x.contiguous()
    k = x.shape[-1]
    qdata, scale = empty_2d(x, dtype, block_size)
    if x.numel():
        grid = (x.numel() // k // block_size, cdiv(k, BLOCK_N_2D))
        launch(quantize_2d_kernel, grid,
            x, qdata, as_bytes(scale), k, MODE=mode, BLOCK_SIZE=block_size, BLOCK_N=BLOCK_N_2D, num_warps=8,
        )  # fmt: skip
    return qdata, scale
