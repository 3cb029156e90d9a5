"""Fold for wgrad: finds one exponent per group, then picks, shifts and transposes each operand's rows, in one read and
one write.

    max_scales       scales of x and y -> a record per row and operand: its largest scale and its source row; and per
                     group the most that a row carries, max_scale of x + max_scale of y + 1, or -1 if no row counts
    split            max_scale -> base: max_scale + this operand's half of the group's excess over the row; exponents
    shift_transpose  x, then y: qdata * 2^-(base - scale), transposed

A record is an int64: source row (-1: zeros), then 16 bits of max_scale or base, then, before `split`, 16 bits of group.
It is stored at the row's future column. Records of the zeros that `alignment` puts between groups are -1.

On an H200 the whole takes 0.77 of copy speed, shift_transpose 0.82, max_scales 20 us for 65536 rows (three launches).
Transposed scales, which let a tile read 8 rows of them in a word, made shift_transpose no faster and max_scales slower.

A program of shift_transpose takes a tile of BLOCK_M rows x BLOCK_N columns, in packs of rows as in `tile`. SUB elements
surely share a scale: 32, or the largest power of two that divides the block. PER_SCALE of these have one scale. Tiles
are taken GROUP_M row tiles at a time, column after column among those. So programs that run together read neighbouring
BLOCK_N columns, and write GROUP_M * BLOCK_M tokens of a column.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import NAN_SCALE, as_bytes, group_bounds, num_sms, rows_of, shifted, valid_rows
from mxep.quant.kernels.tile import store_transposed
from mxep.quant.shapes import num_rows, padded_rows
from mxep.runtime.launch import cdiv, launch, next_power_of_2

SCALE_ELEMENTS = 8192
"""Scales that a program reads at a time. PROGRAMS_PER_SM programs start and take several such pieces each."""
PROGRAMS_PER_SM = 16
SPLIT_ROWS = 512
TILE = (256, 128)
"""Rows x columns that a program transposes, GROUP_M row tiles at a time."""
GROUP_M = 8
NUM_WARPS = 8
MOST_GROUPS = 1 << 15

_NAN_BASE = tl.constexpr(0x7FFF)


@triton.jit
def _max_scale(scale_ptr, index_ptr, row, mask, stride, BLOCKS: tl.constexpr):
    """Largest scale (0 for a row of zeros) and source row of each row, int32."""
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=mask, other=-1)
    block = tl.arange(0, triton.next_power_of_2(max(BLOCKS, 1)))[None, :]
    scale = tl.load(
        scale_ptr + source.to(tl.int64)[:, None] * stride + block,
        mask=(mask & (source >= 0))[:, None] & (block < BLOCKS),
        other=0,
    )
    return tl.max(scale.to(tl.int32), axis=1), source


@triton.jit
def _record(source, high):
    return (high.to(tl.int64) << 32) | (source.to(tl.int64) & 0xFFFFFFFF)


@triton.jit(do_not_specialize=["rows", "num_groups", "alignment"])
def max_scales_kernel(
    x_scale_ptr, x_index_ptr, y_scale_ptr, y_index_ptr, offs_ptr, x_record_ptr, y_record_ptr, most_ptr, out_offs_ptr,
    x_stride, y_stride, rows, num_groups, alignment,
    X_BLOCKS: tl.constexpr, Y_BLOCKS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    valid = valid_rows(offs_ptr, num_groups, rows)
    group = tl.arange(0, GROUPS)[None, :]
    start, end = group_bounds(group, offs_ptr, num_groups, rows)
    zeros = (alignment - tl.maximum(end - start, 0) % alignment) % alignment
    if tl.program_id(0) == 0:
        tl.store(out_offs_ptr + group, end + tl.cumsum(zeros, axis=1), mask=group < num_groups)
    end = tl.where(group < num_groups, end, 0x7FFFFFFF)
    for tile in range(tl.program_id(0), tl.cdiv(valid, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = row < valid
        x_max, x_source = _max_scale(x_scale_ptr, x_index_ptr, row, mask, x_stride, X_BLOCKS)
        y_max, y_source = _max_scale(y_scale_ptr, y_index_ptr, row, mask, y_stride, Y_BLOCKS)
        row_group = tl.sum((end <= row[:, None]).to(tl.int32), axis=1)
        column = row + tl.sum(tl.where(end <= row[:, None], zeros, 0), axis=1)
        tl.store(x_record_ptr + column, _record(x_source, x_max | (row_group << 16)), mask=mask)
        tl.store(y_record_ptr + column, _record(y_source, y_max), mask=mask)
        counts = mask & (x_max != NAN_SCALE) & (y_max != NAN_SCALE)
        carried = tl.where(counts, x_max + y_max + 1, 0)
        most = tl.max(tl.where(row_group[:, None] == group, carried[:, None], 0), axis=0)[None, :]
        tl.atomic_max(most_ptr + group, most, mask=most > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_groups"])
def split_kernel(
    x_record_ptr, y_record_ptr, most_ptr, offs_ptr, exponent_ptr, num_groups, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    if tl.program_id(0) == 0:
        group = tl.arange(0, GROUPS)
        most = tl.load(most_ptr + group, mask=group < num_groups, other=-1)
        tl.store(exponent_ptr + group, tl.where(most < 0, 0, most - (1 + 2 * 127)), mask=group < num_groups)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < tl.load(offs_ptr + num_groups - 1)
    x = tl.load(x_record_ptr + row, mask=mask, other=-1)
    y = tl.load(y_record_ptr + row, mask=mask, other=-1)
    mask = x >= 0
    x_max = (x >> 32).to(tl.int32) & 0xFFFF
    y_max = (y >> 32).to(tl.int32)
    most = tl.load(most_ptr + (x >> 48), mask=mask, other=0)
    d = tl.where((x_max == NAN_SCALE) | (y_max == NAN_SCALE), 0, most - 1 - x_max - y_max)
    x_base = tl.where(x_max == NAN_SCALE, _NAN_BASE, x_max + (d >> 1))
    y_base = tl.where(y_max == NAN_SCALE, _NAN_BASE, y_max + ((d + 1) >> 1))
    tl.store(x_record_ptr + row, _record(x, x_base), mask=mask)
    tl.store(y_record_ptr + row, _record(y, y_base), mask=mask)


@triton.jit(do_not_specialize=["num_groups"])
def shift_transpose_kernel(
    qdata_ptr, scale_ptr, record_ptr, offs_ptr, out_ptr, R, K, stride, scale_stride, num_groups,
    SUB: tl.constexpr, PER_SCALE: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    valid = tl.load(offs_ptr + num_groups - 1)
    row_tiles = tl.cdiv(valid, BLOCK_M)
    column_tiles = tl.cdiv(K, BLOCK_N)
    pack = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    sub = tl.arange(0, BLOCK_N // SUB)[None, :]
    program = tl.program_id(0)
    if program >= row_tiles * column_tiles:
        return
    group = program // (column_tiles * GROUP_M)
    within = program - group * (column_tiles * GROUP_M)
    group_m = tl.minimum(row_tiles - group * GROUP_M, GROUP_M)
    row0 = (group * GROUP_M + within % group_m) * BLOCK_M
    column0 = within // group_m * BLOCK_N
    columns_left = K - column0
    qdata = ()
    bases = ()
    scales = ()
    for i in tl.static_range(PACK):
        row = row0 + pack + i
        record = tl.load(record_ptr + row, mask=row < valid, other=-1)
        source = record.to(tl.int32)
        mask = source >= 0
        source = source.to(tl.int64)
        ptrs = qdata_ptr + source * stride + column0 + column
        qdata = qdata + (tl.load(ptrs, mask=mask & (column < columns_left), other=0.0),)
        ptrs = scale_ptr + source * scale_stride + (column0 // SUB + sub) // PER_SCALE
        scales = scales + (tl.load(ptrs, mask=mask & (sub * SUB < columns_left), other=0),)
        bases = bases + ((record >> 32).to(tl.int32),)
    values = ()
    for i in tl.static_range(PACK):
        blocks = tl.reshape(qdata[i], (BLOCK_M // PACK, BLOCK_N // SUB, SUB))
        shift = (bases[i] - scales[i].to(tl.int32))[:, :, None]
        moved = shifted(blocks, shift, (bases[i] == _NAN_BASE)[:, :, None])
        values = values + (tl.reshape(moved, (BLOCK_M // PACK, BLOCK_N)),)
    store_transposed(values, out_ptr + column0.to(tl.int64) * R + row0, R, R - row0, columns_left)


def fold_for_wgrad(
    x: Tensor,
    x_scale: Tensor,
    x_index: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_index: Tensor | None,
    offs: Tensor,
    alignment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mxep::fold_for_wgrad."""
    capacity, num_groups, device = num_rows(x, x_index), offs.shape[0], x.device
    width = padded_rows(capacity, num_groups, alignment)
    x_t, y_t = x.new_empty((x.shape[1], width)), y.new_empty((y.shape[1], width))
    if num_groups > MOST_GROUPS:
        raise ValueError(f"offs: got {num_groups} groups, want at most {MOST_GROUPS}")
    if not capacity:
        return x_t, y_t, torch.zeros_like(offs), torch.zeros_like(offs)
    exponent, out_offs = torch.empty_like(offs), torch.empty_like(offs)
    unset = torch.full((2 * width + cdiv(num_groups, 2),), -1, dtype=torch.int64, device=device)
    x_record, y_record, most = unset[:width], unset[width : 2 * width], unset[2 * width :].view(torch.int32)
    x, y, x_scale, y_scale = rows_of(x), rows_of(y), rows_of(as_bytes(x_scale)), rows_of(as_bytes(y_scale))
    programs = PROGRAMS_PER_SM * num_sms(device)

    padded_groups = next_power_of_2(num_groups)
    widest = max(padded_groups, *(next_power_of_2(scale.shape[1]) for scale in (x_scale, y_scale)))
    rows = min(64, max(1, SCALE_ELEMENTS // widest))
    launch(max_scales_kernel, (min(programs, cdiv(capacity, rows)),),
        x_scale, x_index, y_scale, y_index, offs, x_record, y_record, most, out_offs, x_scale.stride(0),
        y_scale.stride(0), capacity, num_groups, alignment, X_BLOCKS=x_scale.shape[1], Y_BLOCKS=y_scale.shape[1],
        GROUPS=padded_groups, ROWS=rows,
    )  # fmt: skip
    launch(split_kernel, (cdiv(width, SPLIT_ROWS),),
        x_record, y_record, most, out_offs, exponent, num_groups,
        GROUPS=padded_groups, ROWS=SPLIT_ROWS,
    )  # fmt: skip
    block_m, block_n = TILE
    for qdata, scale, record, out in ((x, x_scale, x_record, x_t), (y, y_scale, y_record, y_t)):
        columns = qdata.shape[1]
        if columns:
            block_size = columns // scale.shape[1]
            sub = math.gcd(block_size, 32)
            tiles = cdiv(width, block_m) * cdiv(columns, block_n)
            launch(shift_transpose_kernel, (tiles,),
                qdata, scale, record, out_offs, out, width, columns, qdata.stride(0), scale.stride(0), num_groups,
                SUB=sub, PER_SCALE=block_size // sub, PACK=8 if width % 8 == 0 else 1, BLOCK_M=block_m,
                BLOCK_N=block_n, GROUP_M=GROUP_M, num_warps=NUM_WARPS,
            )  # fmt: skip
    return x_t, y_t, exponent, out_offs
