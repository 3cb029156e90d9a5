"""Split fold: per group one exponent, then each operand's rows picked, shifted and turned, in one read and one write.

    scale bytes of x and y    -> per row a word: top of x | top of y << 8 | group << 16;  per group the most that a row
                                 carries, top of x + top of y + 1, or 0 where no row counts         `tops_kernel`
    codes and bytes of x      -> x_t (K, R): code * 2^-(top - byte + half of what its group's most has more)
    codes and bytes of y      -> y_t (N, R)                                                         `turn_kernel`

A turning program takes tiles of NR rows x NC columns, 8 rows a pack as in `turn`. SUB: elements that surely share a
scale, 32 or the largest power of two that divides the block; PER_SCALE of them do. Order of the tiles: bands of BAND
row tiles, within a band column after column, so that programs that run together read whole rows (NC columns next to
each other) and write whole lines (BAND * NR tokens of a column).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.kernels.fold import multiprocessors, rows_of, shifted
from mxep.quant.kernels.numbers import NAN_BYTE, bytes_of
from mxep.quant.kernels.turn import store_turned

TOPS_ELEMENTS = 8192
TILE = (128, 128)
NUM_WARPS = 4
BAND = 2
PROGRAMS_PER_SM = 16


@triton.jit
def _top(scale_ptr, index_ptr, row, there, stride, BLOCKS: tl.constexpr):
    """The largest scale byte of each row, int32; 0 for rows of zeros."""
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=there, other=-1)
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))[None, :]
    byte = tl.load(
        scale_ptr + source.to(tl.int64)[:, None] * stride + block,
        mask=(there & (source >= 0))[:, None] & (block < BLOCKS),
        other=0,
    )
    return tl.max(byte.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["groups"])
def tops_kernel(
    x_scale_ptr,
    x_index_ptr,
    y_scale_ptr,
    y_index_ptr,
    ends_ptr,
    word_ptr,
    most_ptr,
    x_stride,
    y_stride,
    groups,
    X_BLOCKS: tl.constexpr,
    Y_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    live = tl.load(ends_ptr + groups - 1)
    group = tl.arange(0, GROUPS)
    end = tl.load(ends_ptr + group, mask=group < groups, other=0x7FFFFFFF)
    for tile in range(tl.program_id(0), tl.cdiv(live, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < live
        x_top = _top(x_scale_ptr, x_index_ptr, row, there, x_stride, X_BLOCKS)
        y_top = _top(y_scale_ptr, y_index_ptr, row, there, y_stride, Y_BLOCKS)
        row_group = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1)
        tl.store(word_ptr + row, x_top | (y_top << 8) | (row_group << 16), mask=there)
        counts = there & (x_top != NAN_BYTE) & (y_top != NAN_BYTE)
        carried = tl.where(counts, x_top + y_top + 1, 0)
        most = tl.max(tl.where(row_group[:, None] == group[None, :], carried[:, None], 0), axis=0)
        tl.atomic_max(most_ptr + group, most, mask=most > 0, sem="relaxed")


@triton.jit(do_not_specialize=["groups"])
def turn_kernel(
    codes_ptr,
    scale_ptr,
    index_ptr,
    ends_ptr,
    word_ptr,
    most_ptr,
    out_ptr,
    exponent_ptr,
    R,
    K,
    stride,
    scale_stride,
    groups,
    IS_Y: tl.constexpr,
    SUB: tl.constexpr,
    PER_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    PACK: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    BAND: tl.constexpr,
):
    live = tl.load(ends_ptr + groups - 1)
    if not IS_Y:
        if tl.program_id(0) == 0:
            group = tl.arange(0, GROUPS)
            most = tl.load(most_ptr + group, mask=group < groups, other=0)
            tl.store(exponent_ptr + group, tl.where(most == 0, 0, most - (1 + 2 * 127)), mask=group < groups)

    column_tiles = tl.cdiv(K, NC)
    bands = tl.cdiv(tl.cdiv(live, NR), BAND)
    pack = PACK * tl.arange(0, NR // PACK)[:, None]
    column = tl.arange(0, NC)[None, :]
    sub = tl.arange(0, NC // SUB)[None, :]
    for place in range(tl.program_id(0), bands * column_tiles * BAND, tl.num_programs(0)):
        band = place // (column_tiles * BAND)
        row0 = (band * BAND + place % BAND) * NR
        column0 = (place // BAND - band * column_tiles) * NC
        columns_left = K - column0
        values = ()
        for i in tl.static_range(PACK):
            row = row0 + pack + i
            there = row < live
            word = tl.load(word_ptr + row, mask=there, other=0)
            x_top = word & 255
            y_top = (word >> 8) & 255
            d = tl.load(most_ptr + ((word >> 16) & 0xFFFF), mask=there, other=1) - 1 - x_top - y_top
            d = tl.where((x_top == NAN_BYTE) | (y_top == NAN_BYTE), 0, d)
            top = y_top if IS_Y else x_top
            half = (d + 1) >> 1 if IS_Y else d >> 1
            source = row
            if index_ptr is not None:
                source = tl.load(index_ptr + row, mask=there, other=-1)
                there = source >= 0
            source = source.to(tl.int64)
            byte = tl.load(
                scale_ptr + source * scale_stride + (column0 // SUB + sub) // PER_SCALE,
                mask=there & (sub * SUB < columns_left),
                other=0,
            )
            codes = tl.load(
                codes_ptr + source * stride + column0 + column, mask=there & (column < columns_left), other=0.0
            )
            shift = top + half - byte.to(tl.int32)
            codes = tl.reshape(codes, (NR // PACK, NC // SUB, SUB))
            moved = shifted(codes, shift[:, :, None], (top == NAN_BYTE)[:, :, None])
            values = values + (tl.reshape(moved, (NR // PACK, NC)),)
        store_turned(values, out_ptr + column0.to(tl.int64) * R + row0, R, R - row0, columns_left)


def split_fold(
    x: Tensor,
    x_scale: Tensor,
    x_index: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_index: Tensor | None,
    group_ends: Tensor,
    *,
    tops_elements: int = TOPS_ELEMENTS,
    tile: tuple[int, int] = TILE,
    num_warps: int = NUM_WARPS,
    band: int = BAND,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> tuple[Tensor, Tensor, Tensor]:
    """mxep::split_fold.

    tops_elements: scale bytes a program looks at, at a time. tile: rows x columns a program turns at a time, by
    num_warps warps, in bands of `band` row tiles. programs_per_sm: as many as start; they take several tiles each.
    """
    capacity = x.shape[0] if x_index is None else x_index.shape[0]
    groups = group_ends.shape[0]
    device = x.device
    x_t = torch.empty((x.shape[1], capacity), dtype=x.dtype, device=device)
    y_t = torch.empty((y.shape[1], capacity), dtype=y.dtype, device=device)
    if groups >= 1 << 16:
        raise ValueError(f"group_ends: got {groups} groups, want fewer than 65536")
    if not capacity:
        return x_t, y_t, torch.zeros_like(group_ends)
    exponent = torch.empty_like(group_ends)
    word = torch.empty(capacity, dtype=torch.int32, device=device)
    most = torch.zeros(groups, dtype=torch.int32, device=device)
    operands = [
        (rows_of(codes), rows_of(bytes_of(scale)), index, out)
        for codes, scale, index, out in ((x, x_scale, x_index, x_t), (y, y_scale, y_index, y_t))
    ]
    (x, x_scale, _, _), (y, y_scale, _, _) = operands
    programs = programs_per_sm * multiprocessors(device)
    padded_groups = triton.next_power_of_2(groups)
    widest = max(padded_groups, *(triton.next_power_of_2(scale.shape[1]) for scale in (x_scale, y_scale)))
    rows = min(64, max(1, tops_elements // widest))
    tops_kernel[(min(programs, triton.cdiv(capacity, rows)),)](
        x_scale, x_index, y_scale, y_index, group_ends, word, most, x_scale.stride(0), y_scale.stride(0), groups,
        X_BLOCKS=x_scale.shape[1], Y_BLOCKS=y_scale.shape[1], GROUPS=padded_groups, ROWS=rows,
    )  # fmt: skip
    nr, nc = tile
    for is_y, (codes, scale, index, out) in enumerate(operands):
        columns = codes.shape[1]
        block = columns // max(scale.shape[1], 1)
        sub = math.gcd(block, 32)
        tiles = triton.cdiv(triton.cdiv(capacity, nr), band) * band * triton.cdiv(columns, nc)
        turn_kernel[(max(1, min(programs, tiles)),)](
            codes, scale, index, group_ends, word, most, out, exponent, capacity, columns, codes.stride(0),
            scale.stride(0), groups, IS_Y=bool(is_y), SUB=sub, PER_SCALE=block // sub, GROUPS=padded_groups,
            PACK=8 if capacity % 8 == 0 else 1, NR=nr, NC=nc, BAND=band, num_warps=num_warps,
        )  # fmt: skip
    return x_t, y_t, exponent
