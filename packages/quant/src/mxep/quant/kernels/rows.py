"""Quantize along rows: blocks of consecutive elements of a contiguous tensor, read once, codes and scale bytes written.

    x (..., K)  =  a list of blocks of BLOCK elements    a program takes TILE of them: bytes in 2 or 4, out 1 + 1/BLOCK
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels.numbers import bytes_of, magnitude_bits, reciprocal, scale_byte

TILE_ELEMENTS = 4096
NUM_WARPS = 4


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
    byte = scale_byte(tl.max(magnitude_bits(x), axis=1), MODE, dtype)
    codes = (x * reciprocal(byte)[:, None]).to(dtype)
    tl.store(codes_ptr + first * BLOCK + offset, codes, mask=there[:, None])
    tl.store(scale_ptr + first + block, byte.to(tl.uint8), mask=there)


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block: int,
    *,
    tile_elements: int = TILE_ELEMENTS,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_rows."""
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // block), dtype=SCALE_DTYPE, device=x.device)
    if x.numel():
        tile = tile_elements // block
        grid = (triton.cdiv(scale.numel(), tile),)
        quantize_blocks_kernel[grid](
            x, codes, bytes_of(scale), scale.numel(), MODE=mode, BLOCK=block, TILE=tile, num_warps=num_warps
        )
    return codes, scale
