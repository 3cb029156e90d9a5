"""Rows by an index, in words as wide as rows and their offsets allow. Programs past the last valid row end at once."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.dispatch import WORDS
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_BYTES = 16384
NUM_WARPS = 8


@triton.jit(do_not_specialize=["rows", "groups"])
def gather_kernel(
    part_ptr, index_ptr, offs_ptr, out_ptr, stride, rows, groups,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    valid = rows
    if offs_ptr is not None:
        valid = tl.minimum(rows, tl.load(offs_ptr + groups - 1))
    first = tl.program_id(0) * BLOCK_T
    if first >= valid:
        return
    row = first + tl.arange(0, BLOCK_T)
    source = tl.where(row < valid, row, -1)
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=row < valid, other=-1)
    column = tl.arange(0, BLOCK)[None, :]
    offs = tl.maximum(source, 0).to(tl.int64)[:, None] * stride + column
    x = tl.load(part_ptr + offs, mask=(source >= 0)[:, None] & (column < WIDTH), other=0)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column, x, mask=(row < valid)[:, None] & (column < WIDTH))


def gather_rows(part: Tensor, row_index: Tensor | None, offs: Tensor | None) -> Tensor:
    """mxep::gather_rows."""
    rows = len(part if row_index is None else row_index)
    out = torch.empty(rows, part.shape[1], dtype=part.dtype, device=part.device)
    if not out.numel():
        return out
    if part.stride(1) != 1:
        part = part.contiguous()
    size = part.itemsize
    word = math.gcd(8, part.shape[1] * size, part.stride(0) * size, part.storage_offset() * size)
    source, target = part.view(WORDS[word]), out.view(WORDS[word])
    width = source.shape[1]
    block = next_power_of_2(width)
    at_once = max(1, TILE_BYTES // (block * word))
    launch(gather_kernel, (cdiv(len(out), at_once),),
        source, row_index, offs, target, source.stride(0), len(out),
        0 if offs is None else len(offs), WIDTH=width, BLOCK=block, BLOCK_T=at_once, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
