"""Quantize where nothing turns: along rows, and square tiles. Read once, qdata and scale bytes written.

rows    x is a list of blocks of BLOCK elements, one after another; a program takes TILE of them
        (a block that is no power of two, a whole row say, is masked up to one; a longer one is read twice)
tiles   a program takes BLOCK rows x NC columns
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels.numbers import abs_bits, bytes_of, reciprocal, scale_byte

TILE_ELEMENTS = 4096
NUM_WARPS = 4
LONG_ELEMENTS = 8192
LONGEST = 16384
"""Elements of a block that a program holds in registers."""


@triton.jit(do_not_specialize=["num_blocks"])
def quantize_blocks_kernel(
    x_ptr, codes_ptr, scale_ptr, num_blocks, MODE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    block = tl.arange(0, TILE)
    there = block < num_blocks - first
    offset = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + first * BLOCK + offset, mask=there[:, None], other=0.0).to(tl.float32)
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    byte = scale_byte(tl.max(abs_bits(x), axis=1), MODE, dtype)
    qdata = (x * reciprocal(byte)[:, None]).to(dtype)
    tl.store(codes_ptr + first * BLOCK + offset, qdata, mask=there[:, None])
    tl.store(scale_ptr + first + block, byte.to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["num_blocks"])
def quantize_long_blocks_kernel(
    x_ptr, codes_ptr, scale_ptr, num_blocks, length, MODE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    """Blocks of `length` elements, in chunks of CHUNK; ONE_CHUNK: length <= CHUNK."""
    first = tl.program_id(0).to(tl.int64) * TILE
    block = tl.arange(0, TILE)
    there = (block < num_blocks - first)[:, None]
    element = tl.arange(0, CHUNK)[None, :]
    start = (first + block)[:, None] * length
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    x = tl.load(x_ptr + start + element, mask=there & (element < length), other=0.0).to(tl.float32)
    bits = tl.max(abs_bits(x), axis=1)
    if not ONE_CHUNK:
        for chunk in range(CHUNK, length, CHUNK):
            at = chunk + element
            more = tl.load(x_ptr + start + at, mask=there & (at < length), other=0.0).to(tl.float32)
            bits = tl.maximum(bits, tl.max(abs_bits(more), axis=1))
    byte = scale_byte(bits, MODE, dtype)
    factor = reciprocal(byte)[:, None]
    tl.store(codes_ptr + start + element, (x * factor).to(dtype), mask=there & (element < length))
    if not ONE_CHUNK:
        for chunk in range(CHUNK, length, CHUNK):
            at = chunk + element
            more = tl.load(x_ptr + start + at, mask=there & (at < length), other=0.0).to(tl.float32)
            tl.store(codes_ptr + start + at, (more * factor).to(dtype), mask=there & (at < length))
    tl.store(scale_ptr + first + block, byte.to(tl.uint8), mask=block < num_blocks - first)


@triton.jit
def quantize_tiles_kernel(x_ptr, codes_ptr, scale_ptr, K, MODE: tl.constexpr, BLOCK: tl.constexpr, NC: tl.constexpr):
    """x (rows, K), rows a multiple of BLOCK; leading axes are just more rows."""
    row_tile = tl.program_id(0).to(tl.int64)
    column0 = tl.program_id(1) * NC
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, NC)
    start = row_tile * BLOCK * K + column0
    place = row[:, None].to(tl.int64) * K + column[None, :]
    mask = (column < K - column0)[None, :]
    x = tl.load(x_ptr + start + place, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    x = tl.reshape(x, (BLOCK, NC // BLOCK, BLOCK))
    byte = scale_byte(tl.max(tl.max(abs_bits(x), axis=2), axis=0), MODE, dtype)
    qdata = tl.reshape((x * reciprocal(byte)[None, :, None]).to(dtype), (BLOCK, NC))
    tl.store(codes_ptr + start + place, qdata, mask=mask)
    block = column0 // BLOCK + tl.arange(0, NC // BLOCK)
    tl.store(scale_ptr + row_tile * (K // BLOCK) + block, byte.to(tl.uint8), mask=block < K // BLOCK)


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block_size: int,
    *,
    tile_elements: int = TILE_ELEMENTS,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_rows."""
    x = x.contiguous()
    qdata = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // block_size), dtype=SCALE_DTYPE, device=x.device)
    blocks = scale.numel()
    if not x.numel():
        return qdata, scale
    if block_size & (block_size - 1) == 0 and block_size <= tile_elements:
        tile = tile_elements // block_size
        quantize_blocks_kernel[(triton.cdiv(blocks, tile),)](
            x, qdata, bytes_of(scale), blocks, MODE=mode, BLOCK=block_size, TILE=tile, num_warps=num_warps
        )
        return qdata, scale
    chunk = min(triton.next_power_of_2(block_size), LONGEST)
    tile = max(1, LONG_ELEMENTS // chunk)
    quantize_long_blocks_kernel[(triton.cdiv(blocks, tile),)](
        x, qdata, bytes_of(scale), blocks, block_size, MODE=mode, TILE=tile, CHUNK=chunk, ONE_CHUNK=block_size <= chunk,
        num_warps=max(4, chunk // 2048),
    )  # fmt: skip
    return qdata, scale


def quantize_tiles(
    x: Tensor, dtype: torch.dtype, mode: str, block_size: int, *, columns: int = 256, num_warps: int = 8
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_tiles. ValueError for a block that is no power of two up to 128."""
    if block_size & (block_size - 1) or block_size > 128:
        raise ValueError(f"block_size: got tiles of {block_size} x {block_size}, want a power of two up to 128 on CUDA")
    x = x.contiguous()
    *rest, n, k = x.shape
    qdata = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*rest, n // block_size, k // block_size), dtype=SCALE_DTYPE, device=x.device)
    if x.numel():
        grid = (x.numel() // k // block_size, triton.cdiv(k, columns))
        quantize_tiles_kernel[grid](
            x, qdata, bytes_of(scale), k, MODE=mode, BLOCK=block_size, NC=columns, num_warps=num_warps
        )
    return qdata, scale
