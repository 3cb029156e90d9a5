"""Split fold: per group one exponent, then each operand's rows picked, shifted and transposed, in one read and one
write.

    tops    scale bytes of x and y -> a record per row and operand: its largest byte, where it lies; and per group the
            most that a row carries, top of x + top of y + 1, or 0 where no row counts
    halves  tops -> bases: top + its operand's half of what the group's most has more; exponents
    turn    x, then y: qdata * 2^-(base - byte), transposed

A record is an int64: source row (-1: zeros), then 16 bits of top or base, then, before `halves`, 16 bits of group. It
stands where the row's column will. The zeros between groups that `align` asks for are records of -1 in all.

On an H200 the whole takes 0.77 of copy speed, the turns 0.82, 20 us the tops of 65536 rows (three launches). Laying out
the scale bytes transposed, so that a tile reads 8 rows of them in a word, made the turns no faster and the tops slower.

A turning program takes a tile of NR rows x NC columns, in packs of rows as in `transpose`. SUB: elements that surely
share a scale, 32 or the largest power of two that divides the block; PER_SCALE of these have one byte. Tiles are taken
in bands of BAND row tiles, column after column within a band, so that programs that run together read NC columns next
to each other, and write BAND * NR tokens of a column.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.fold_for_wgrad import columns_of
from mxep.quant.kernels.bounds import bounds_of, valid_rows
from mxep.quant.kernels.fold import multiprocessors, rows_of, shifted
from mxep.quant.kernels.numbers import NAN_BYTE, bytes_of
from mxep.quant.kernels.transpose import store_transposed

TOPS_ELEMENTS = 8192
HALVES_ROWS = 512
TILE = (256, 128)
NUM_WARPS = 8
BAND = 8
PROGRAMS_PER_SM = 16
MOST_GROUPS = 1 << 15

_NAN_BASE = tl.constexpr(0x7FFF)


@triton.jit
def _top(scale_ptr, index_ptr, row, there, stride, BLOCKS: tl.constexpr):
    """Of each row the largest scale byte (0 for a row of zeros), and where the row lies; int32."""
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=there, other=-1)
    block = tl.arange(0, triton.next_power_of_2(max(BLOCKS, 1)))[None, :]
    byte = tl.load(
        scale_ptr + source.to(tl.int64)[:, None] * stride + block,
        mask=(there & (source >= 0))[:, None] & (block < BLOCKS),
        other=0,
    )
    return tl.max(byte.to(tl.int32), axis=1), source


@triton.jit
def _record(source, high):
    return (high.to(tl.int64) << 32) | (source.to(tl.int64) & 0xFFFFFFFF)


@triton.jit(do_not_specialize=["rows", "groups", "align"])
def tops_kernel(
    x_scale_ptr,
    x_index_ptr,
    y_scale_ptr,
    y_index_ptr,
    ends_ptr,
    x_record_ptr,
    y_record_ptr,
    most_ptr,
    column_ends_ptr,
    x_stride,
    y_stride,
    rows,
    groups,
    align,
    X_BLOCKS: tl.constexpr,
    Y_BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    valid = valid_rows(ends_ptr, groups, rows)
    group = tl.arange(0, GROUPS)[None, :]
    start, end = bounds_of(group, ends_ptr, groups, rows)
    zeros = (align - tl.maximum(end - start, 0) % align) % align
    if tl.program_id(0) == 0:
        tl.store(column_ends_ptr + group, end + tl.cumsum(zeros, axis=1), mask=group < groups)
    end = tl.where(group < groups, end, 0x7FFFFFFF)
    for tile in range(tl.program_id(0), tl.cdiv(valid, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < valid
        x_top, x_source = _top(x_scale_ptr, x_index_ptr, row, there, x_stride, X_BLOCKS)
        y_top, y_source = _top(y_scale_ptr, y_index_ptr, row, there, y_stride, Y_BLOCKS)
        row_group = tl.sum((end <= row[:, None]).to(tl.int32), axis=1)
        column = row + tl.sum(tl.where(end <= row[:, None], zeros, 0), axis=1)
        tl.store(x_record_ptr + column, _record(x_source, x_top | (row_group << 16)), mask=there)
        tl.store(y_record_ptr + column, _record(y_source, y_top), mask=there)
        counts = there & (x_top != NAN_BYTE) & (y_top != NAN_BYTE)
        carried = tl.where(counts, x_top + y_top + 1, 0)
        most = tl.max(tl.where(row_group[:, None] == group, carried[:, None], 0), axis=0)[None, :]
        tl.atomic_max(most_ptr + group, most, mask=most > 0, sem="relaxed")


@triton.jit(do_not_specialize=["groups"])
def halves_kernel(
    x_record_ptr, y_record_ptr, most_ptr, ends_ptr, exponent_ptr, groups, GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    if tl.program_id(0) == 0:
        group = tl.arange(0, GROUPS)
        most = tl.load(most_ptr + group, mask=group < groups, other=0)
        tl.store(exponent_ptr + group, tl.where(most == 0, 0, most - (1 + 2 * 127)), mask=group < groups)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < tl.load(ends_ptr + groups - 1)
    x = tl.load(x_record_ptr + row, mask=there, other=-1)
    y = tl.load(y_record_ptr + row, mask=there, other=-1)
    there = x >= 0
    x_top = (x >> 32).to(tl.int32) & 0xFFFF
    y_top = (y >> 32).to(tl.int32)
    most = tl.load(most_ptr + (x >> 48), mask=there, other=0)
    d = tl.where((x_top == NAN_BYTE) | (y_top == NAN_BYTE), 0, most - 1 - x_top - y_top)
    x_base = tl.where(x_top == NAN_BYTE, _NAN_BASE, x_top + (d >> 1))
    y_base = tl.where(y_top == NAN_BYTE, _NAN_BASE, y_top + ((d + 1) >> 1))
    tl.store(x_record_ptr + row, _record(x, x_base), mask=there)
    tl.store(y_record_ptr + row, _record(y, y_base), mask=there)


@triton.jit(do_not_specialize=["groups"])
def turn_kernel(
    codes_ptr,
    scale_ptr,
    record_ptr,
    ends_ptr,
    out_ptr,
    R,
    K,
    stride,
    scale_stride,
    groups,
    SUB: tl.constexpr,
    PER_SCALE: tl.constexpr,
    PACK: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    BAND: tl.constexpr,
):
    valid = tl.load(ends_ptr + groups - 1)
    row_tiles = tl.cdiv(valid, NR)
    column_tiles = tl.cdiv(K, NC)
    pack = PACK * tl.arange(0, NR // PACK)[:, None]
    column = tl.arange(0, NC)[None, :]
    sub = tl.arange(0, NC // SUB)[None, :]
    place = tl.program_id(0)
    if place >= row_tiles * column_tiles:
        return
    band = place // (column_tiles * BAND)
    within = place - band * (column_tiles * BAND)
    high = tl.minimum(row_tiles - band * BAND, BAND)
    row0 = (band * BAND + within % high) * NR
    column0 = within // high * NC
    columns_left = K - column0
    qdata = ()
    bases = ()
    scales = ()
    for i in tl.static_range(PACK):
        row = row0 + pack + i
        record = tl.load(record_ptr + row, mask=row < valid, other=-1)
        source = record.to(tl.int32)
        there = source >= 0
        source = source.to(tl.int64)
        from_ptr = codes_ptr + source * stride + column0 + column
        qdata = qdata + (tl.load(from_ptr, mask=there & (column < columns_left), other=0.0),)
        from_ptr = scale_ptr + source * scale_stride + (column0 // SUB + sub) // PER_SCALE
        scales = scales + (tl.load(from_ptr, mask=there & (sub * SUB < columns_left), other=0),)
        bases = bases + ((record >> 32).to(tl.int32),)
    values = ()
    for i in tl.static_range(PACK):
        blocks = tl.reshape(qdata[i], (NR // PACK, NC // SUB, SUB))
        shift = (bases[i] - scales[i].to(tl.int32))[:, :, None]
        moved = shifted(blocks, shift, (bases[i] == _NAN_BASE)[:, :, None])
        values = values + (tl.reshape(moved, (NR // PACK, NC)),)
    store_transposed(values, out_ptr + column0.to(tl.int64) * R + row0, R, R - row0, columns_left)


def fold_for_wgrad(
    x: Tensor,
    x_scale: Tensor,
    x_index: Tensor | None,
    y: Tensor,
    y_scale: Tensor,
    y_index: Tensor | None,
    offs: Tensor,
    align: int,
    *,
    tops_elements: int = TOPS_ELEMENTS,
    tile: tuple[int, int] = TILE,
    band: int = BAND,
    programs_per_sm: int = PROGRAMS_PER_SM,
    **options: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mxep::fold_for_wgrad.

    tops_elements: scale bytes a program looks at, at a time; programs_per_sm start and take several such pieces each.
    tile: rows x columns a program turns, in bands of `band` row tiles. options: num_warps and other launch options.
    """
    capacity = x.shape[0] if x_index is None else x_index.shape[0]
    groups = offs.shape[0]
    device = x.device
    width = columns_of(capacity, groups, align)
    x_t = torch.empty((x.shape[1], width), dtype=x.dtype, device=device)
    y_t = torch.empty((y.shape[1], width), dtype=y.dtype, device=device)
    if groups > MOST_GROUPS:
        raise ValueError(f"offs: got {groups} groups, want at most {MOST_GROUPS}")
    if not capacity:
        return x_t, y_t, torch.zeros_like(offs), torch.zeros_like(offs)
    exponent, ends = torch.empty_like(offs), torch.empty_like(offs)
    records = torch.empty((2, width), dtype=torch.int64, device=device)
    if align > 1:
        records.fill_(-1)
    x_record, y_record = records
    most = torch.zeros(groups, dtype=torch.int32, device=device)
    x, y, x_scale, y_scale = rows_of(x), rows_of(y), rows_of(bytes_of(x_scale)), rows_of(bytes_of(y_scale))
    programs = programs_per_sm * multiprocessors(device)

    padded_groups = triton.next_power_of_2(groups)
    widest = max(padded_groups, *(triton.next_power_of_2(scale.shape[1]) for scale in (x_scale, y_scale)))
    rows = min(64, max(1, tops_elements // widest))
    tops_kernel[(min(programs, triton.cdiv(capacity, rows)),)](
        x_scale, x_index, y_scale, y_index, offs, x_record, y_record, most, ends, x_scale.stride(0),
        y_scale.stride(0), capacity, groups, align, X_BLOCKS=x_scale.shape[1], Y_BLOCKS=y_scale.shape[1],
        GROUPS=padded_groups, ROWS=rows,
    )  # fmt: skip
    halves_kernel[(triton.cdiv(width, HALVES_ROWS),)](
        x_record, y_record, most, ends, exponent, groups, GROUPS=padded_groups, ROWS=HALVES_ROWS
    )
    nr, nc = tile
    for qdata, scale, record, out in ((x, x_scale, x_record, x_t), (y, y_scale, y_record, y_t)):
        columns = qdata.shape[1]
        if columns:
            block_size = columns // scale.shape[1]
            sub = math.gcd(block_size, 32)
            tiles = triton.cdiv(width, nr) * triton.cdiv(columns, nc)
            turn_kernel[(tiles,)](
                qdata, scale, record, ends, out, width, columns, qdata.stride(0), scale.stride(0), groups,
                SUB=sub, PER_SCALE=block_size // sub, PACK=8 if width % 8 == 0 else 1, NR=nr, NC=nc, BAND=band,
                **({"num_warps": NUM_WARPS} | options),
            )  # fmt: skip
    return x_t, y_t, exponent, ends
