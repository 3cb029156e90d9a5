"""Gather rows by an index, join parts of rows, and sum the rows of each slot.

Bytes are copied in the widest words that divide widths, strides and offsets. Programs past the last valid row exit at
once.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.layout import ALIGNMENT, round_up
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_BYTES = 16384
NUM_WARPS = 8
SPREAD = 256
"""Minimum programs of `sum_slots`, if there are so many slots."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def tokens_per_tile(most: int, tokens: int, programs: int) -> int:
    """Tokens per tile: the largest power of two up to `most` with which each program gets a full tile. At least 1."""
    count = 1
    while 2 * count <= most and tokens >= 2 * count * programs:
        count *= 2
    return count


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


@triton.jit
def _join_part(
    part_ptr, out_ptr, source, index, row, rows, part_stride, out_stride, number_ptr, step,
    START: tl.constexpr, WORD: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows `source` of a part into rows `row` of the result, then write zeros up to word END.

    START: byte within a row of the result at which the part begins. WIDTH: words of the part, WORD bytes each.
    index: row index of each row of the result. If it is negative and number_ptr is given, the row gets the header word.
    """
    column = tl.arange(0, BLOCK)[None, :]
    offs = tl.maximum(source, 0).to(tl.int64)[:, None] * part_stride + column
    x = tl.load(part_ptr + offs, mask=(source >= 0)[:, None] & (column < WIDTH), other=0)
    if number_ptr is not None:
        if START < 4:
            byte = START + column * WORD
            header = ((tl.load(number_ptr) * 4 + step).to(tl.int64) & 0xFFFFFFFF) >> (8 * tl.minimum(byte, 4))
            x = tl.where((index < 0)[:, None] & (byte < 4), header.to(x.dtype), x)
    offs = row.to(tl.int64)[:, None] * out_stride + column
    tl.store(out_ptr + offs, x, mask=(row < rows)[:, None] & (column < END))


@triton.jit(do_not_specialize=["rows", "step"])
def join_kernel(
    part0_ptr, part1_ptr, table_ptr, out0_ptr, out1_ptr, out2_ptr, index_ptr, number_ptr,
    stride0, stride1, stride2, out_stride0, out_stride1, out_stride2, rows, step,
    START0: tl.constexpr, WORD0: tl.constexpr, WIDTH0: tl.constexpr, END0: tl.constexpr, BLOCK0: tl.constexpr,
    START1: tl.constexpr, WORD1: tl.constexpr, WIDTH1: tl.constexpr, END1: tl.constexpr, BLOCK1: tl.constexpr,
    START2: tl.constexpr, WORD2: tl.constexpr, WIDTH2: tl.constexpr, END2: tl.constexpr, BLOCK2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    index = tl.load(index_ptr + row, mask=row < rows, other=-1)
    _join_part(part0_ptr, out0_ptr, index, index, row, rows, stride0, out_stride0, number_ptr, step,
               START0, WORD0, WIDTH0, END0, BLOCK0)  # fmt: skip
    if part1_ptr is not None:
        _join_part(part1_ptr, out1_ptr, index, index, row, rows, stride1, out_stride1, number_ptr, step,
                   START1, WORD1, WIDTH1, END1, BLOCK1)  # fmt: skip
    if table_ptr is not None:
        source = tl.where(row < rows, row, -1)
        _join_part(table_ptr, out2_ptr, source, index, row, rows, stride2, out_stride2, number_ptr, step,
                   START2, WORD2, WIDTH2, END2, BLOCK2)  # fmt: skip


def join_rows(
    first: Tensor, other: Tensor | None, row_index: Tensor, table: Tensor | None, number: Tensor | None, step: int
) -> Tensor:
    parts = [part if part is None or part.stride(1) == 1 else part.contiguous() for part in (first, other, table)]
    last, used = max(i for i, part in enumerate(parts) if part is not None), 0
    width = round_up(sum(part.shape[1] for part in parts if part is not None), ALIGNMENT)
    out = torch.empty((len(row_index), width), dtype=torch.uint8, device=row_index.device)
    if not out.numel():
        return out
    sources: list[Tensor | None] = []
    targets: list[Tensor | None] = []
    constants, nbytes = {}, 0
    for i, part in enumerate(parts):
        start, word, columns, end = used, 1, 0, 0
        if part is not None:
            used += part.shape[1]
            end = width if i == last else used
            word = math.gcd(8, part.shape[1], part.stride(0), part.storage_offset(), start, end)
            columns, end = part.shape[1] // word, (end - start) // word
        sources.append(None if part is None else part.view(WORDS[word]))
        targets.append(None if part is None else out[:, start : start + end * word].view(WORDS[word]))
        block = next_power_of_2(end)
        nbytes += block * word
        named = {"START": start, "WORD": word, "WIDTH": columns, "END": end, "BLOCK": block}
        constants |= {f"{name}{i}": value for name, value in named.items()}
    at_once = max(1, TILE_BYTES // next_power_of_2(nbytes))
    strides = [0 if each is None else each.stride(0) for each in (*sources, *targets)]
    launch(join_kernel, (cdiv(len(out), at_once),),
        *sources, *targets, row_index, number, *strides, len(out), step,
        **constants, BLOCK_T=at_once, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def add_rows(acc, rows_ptr, row, D: tl.constexpr, BLOCK: tl.constexpr):
    """Returns acc (BLOCK_T, BLOCK) plus the rows `row` (BLOCK_T,) of the matrix. A negative index adds nothing."""
    column = tl.arange(0, BLOCK)[None, :]
    offs = tl.maximum(row, 0).to(tl.int64)[:, None] * D + column
    return acc + tl.load(rows_ptr + offs, mask=(row >= 0)[:, None] & (column < D), other=0.0).to(tl.float32)


@triton.jit
def sum_slots_kernel(
    rows_ptr, slot_rows_ptr, out_ptr, slots,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    for k in range(K):
        total = add_rows(total, rows_ptr, tl.load(slot_rows_ptr + slot * K + k, mask=slot < slots, other=-1), D, BLOCK)
    offs = slot.to(tl.int64)[:, None] * D + column
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=(slot < slots)[:, None] & (column < D))


def sum_slots(rows: Tensor, slot_rows: Tensor) -> Tensor:
    (slots, top_k), dim = slot_rows.shape, rows.shape[1]
    out = torch.empty(slots, dim, dtype=rows.dtype, device=rows.device)
    block = next_power_of_2(dim)
    block_t = tokens_per_tile(TILE_BYTES // (block * rows.itemsize), slots, SPREAD)
    if out.numel():
        launch(sum_slots_kernel, (cdiv(slots, block_t),),
            rows.contiguous(), slot_rows.contiguous(), out, slots, K=top_k, D=dim, BLOCK=block, BLOCK_T=block_t,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
