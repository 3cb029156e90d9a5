"""Folding kernels: along rows (`fold`), along a frozen weight's columns (`fold_columns`), and along tokens
(`fold_for_wgrad`). `mxep.quant.fold` explains what they compute.

**fold** picks rows by the row index and shifts their block scales into their qdata, in one read and one write.

    stored row row_index[i] (or i)   D qdata, D / block_size scales
      | max_scale = the largest scale of a block that is not all zero, shift = max_scale - scale, qdata * 2^-shift
      v
    row i                            D qdata, one scale

A row is BLOCKS blocks of SUB elements, and PER_SCALE consecutive blocks share one scale. SUB is the largest power of
two up to 32 that divides the elements per scale. Programs stride over tiles of ROWS whole rows, held in registers. A
row of 7168 qdata takes one warp, which finds the largest scale without a barrier. Starting a program takes 0.6 ns even
if it has no valid rows. So the number of programs is limited, however large the capacity is. Speed on an H200 (65536
rows picked by an index): 0.93 of copy speed at 7168, 5120 and 4096 columns, 0.90 at 2048.

With factors (`mxep.quant.scale_columns`), a row's values are multiplied by its group's factors in fp32 and quantized to
one scale instead.

**fold_columns** replaces a weight's scales by given column scales, and transposes the weight.

    qdata (N, K), one scale per block of a row        a program takes a tile of BLOCK_M rows x BLOCK_N columns
      | qdata * 2^(scale - column_scale)              -> folded (K, N)

Leading axes are a batch. E4M3 values are multiplied in fp16, two per instruction. Each product is exact, or so small
that it becomes 0 in E4M3 (`mxep.quant.device.shifted`). E2M1 is decoded when it is loaded; its even and its odd columns
are stored as separate tiles. Speed on an H100, relative to a copy of as many bytes (integration/benchmarks/frozen.py):
0.90 to 0.95 for E4M3, 0.79 to 0.83 for E2M1.

**fold_for_wgrad** finds one exponent per group, then picks, shifts and transposes the rows of x and of y. Each takes a
kernel; x_max and y_max are the largest scales of a row of x and of y:

    max_scales       scales -> one record per row of x and of y, with the row's largest scale and its source row
                     also most[g], the maximum of x_max + y_max + 1 over the rows of group g without NaN; -1 if none
    split            d = most[g] - 1 - x_max - y_max; in the records, x_max becomes x_base = x_max + d // 2 and y_max
                     becomes y_base = y_max + (d - d // 2)
                     also the exponent of each group, from most
    shift_transpose  launched for x, then for y: qdata * 2^-(base - scale), transposed

A record is an int64 at the column that the row will have. Its low 32 bits are the source row (-1: a row of zeros), the
next 16 bits are the largest scale or the base. Until `split`, the high 16 bits of x's records are the group. Padding
columns between groups have the record -1.

A program of shift_transpose takes a tile in packs of rows, as in `quantize`. Programs are numbered so that consecutive
ones take GROUP_M row tiles of the same columns, then those of the next columns. So programs that run at the same time
read neighbouring columns, and together write GROUP_M * BLOCK_M tokens of each column. Speed on an H200: 0.77 of copy
speed for the three launches, 0.82 for shift_transpose alone. max_scales takes 20 us for 65536 rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import (
    NAN_SCALE,
    abs_bits,
    group_bounds,
    half_of_e2m1,
    num_sms,
    power_of_two,
    reciprocal,
    rows_of,
    scale_of_amax,
    shifted,
    valid_rows,
)
from mxep.quant.kernels.quantize import program_tile, store_transposed
from mxep.quant.shapes import empty_rows, num_rows, padded_rows, picked_shape
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_ELEMENTS = 2048
"""Elements per tile, with rows padded to a power of two. A tile is several short rows, or one row of any length."""
WARP_ELEMENTS = 8192
"""Elements of a tile per warp. For E5M2 half as many, because it takes more registers."""
PROGRAMS_PER_SM = 256
"""Maximum programs per SM. If there are more tiles, programs take several."""


@triton.jit
def _is_nonzero(qdata):
    """True where a block has a nonzero element. Reduces the last of three axes.

    qdata: fp8, or int32 words of four fp8 elements each.
    """
    if qdata.dtype != tl.int32:
        qdata = qdata.to(tl.uint8, bitcast=True).to(tl.int32)
    return tl.max(qdata & 0x7F7F7F7F, axis=2) > 0


@triton.jit(do_not_specialize=["rows", "num_groups"])
def fold_kernel(
    qdata_ptr, scale_ptr, index_ptr, offs_ptr, factor_ptr, folded_ptr, folded_scale_ptr, stride, scale_stride, rows,
    num_groups, BLOCKS: tl.constexpr, SUB: tl.constexpr, PER_SCALE: tl.constexpr, WORDS: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """factor_ptr: (groups, BLOCKS * SUB) fp32, or None to fold. GROUPS: num_groups, padded to a power of two."""
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))[None, :]
    block_mask = block < BLOCKS
    element = block[:, :, None] * SUB + tl.arange(0, SUB)
    valid = valid_rows(offs_ptr, num_groups, rows)

    for tile in range(tl.program_id(0), tl.cdiv(valid, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        row_mask = row < valid
        source = row
        if index_ptr is not None:
            source = tl.load(index_ptr + row, mask=row_mask, other=-1)
        mask = (row_mask & (source >= 0))[:, None] & block_mask
        source = tl.maximum(source, 0).to(tl.int64)[:, None]
        scale = tl.load(scale_ptr + source * scale_stride + block // PER_SCALE, mask=mask, other=0).to(tl.int32)
        first = qdata_ptr + (source * stride)[:, :, None]
        qdata = tl.load(first + element, mask=mask[:, :, None], other=0.0)
        if factor_ptr is None:
            if WORDS:  # this second load of the same bytes hits L1, or waits for the first load's line
                word = block[:, :, None] * (SUB // 4) + tl.arange(0, SUB // 4)
                words = tl.load(first.to(tl.pointer_type(tl.int32)) + word, mask=mask[:, :, None], other=0)
                nonzero = _is_nonzero(words)
            else:
                nonzero = _is_nonzero(qdata)
            max_scale = tl.max(tl.where(nonzero | (scale == NAN_SCALE), scale, 0), axis=1)
            shift = tl.maximum(max_scale[:, None] - scale, 0)[:, :, None]
            folded = shifted(qdata, shift, (max_scale == NAN_SCALE)[:, None, None]).to(dtype)
        else:
            group = tl.zeros((ROWS,), tl.int32)
            if offs_ptr is not None:
                ends = tl.arange(0, GROUPS)
                ends = tl.load(offs_ptr + ends, mask=ends < num_groups, other=0x7FFFFFFF)
                group = tl.minimum(tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1), num_groups - 1)
            factors = factor_ptr + (group.to(tl.int64) * (BLOCKS * SUB))[:, None, None] + element
            factor = tl.load(factors, mask=(row_mask[:, None] & block_mask)[:, :, None], other=0.0)
            values = qdata.to(tl.float32) * power_of_two(scale)[:, :, None] * factor
            bits = tl.max(tl.max(abs_bits(values), axis=2), axis=1)
            max_scale = scale_of_amax(bits, "rceil", dtype)
            folded = (values * reciprocal(max_scale)[:, None, None]).to(dtype)

        mask = (row_mask[:, None] & block_mask)[:, :, None]
        first = row.to(tl.int64)
        tl.store(folded_ptr + (first * (BLOCKS * SUB))[:, None, None] + element, folded, mask=mask)
        tl.store(folded_scale_ptr + first, max_scale.to(tl.uint8), mask=row_mask)


def fold(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launcher of mxep::fold, and of mxep::scale_columns, which passes factor."""
    folded, folded_scale = empty_rows(qdata, qdata.dtype, 0, picked_shape(qdata, row_index))
    if folded.numel():
        sub = math.gcd(qdata.shape[-1] // scale.shape[-1], 32)
        per_scale = qdata.shape[-1] // scale.shape[-1] // sub
        qdata, scale = rows_of(qdata), rows_of(scale)
        blocks = qdata.shape[1] // sub
        padded = next_power_of_2(blocks) * sub
        rows = max(1, TILE_ELEMENTS // padded)
        share = 1 if qdata.dtype == torch.float8_e4m3fn else 2  # E5M2 takes more registers
        if factor is not None:
            share, factor = 4, factor.contiguous()  # values are fp32
        num_groups = 0 if offs is None else offs.shape[0]
        tiles = cdiv(folded_scale.numel(), rows)
        launch(fold_kernel, (min(tiles, PROGRAMS_PER_SM * num_sms(qdata.device)),),
            qdata, scale, row_index, offs, factor, folded, folded_scale, qdata.stride(0), scale.stride(0),
            folded_scale.numel(), num_groups,
            BLOCKS=blocks, SUB=sub, PER_SCALE=per_scale,
            WORDS=all(n % 4 == 0 for n in (qdata.data_ptr(), qdata.stride(0), sub)), ROWS=rows,
            GROUPS=1 if factor is None else next_power_of_2(max(1, num_groups)),
            num_warps=min(32, max(1, rows * padded * (32 // sub) * share // WARP_ELEMENTS)),
        )  # fmt: skip
    return folded, folded_scale


COLUMNS_TILE = (64, 256)
PACKED_TILE = (64, 128)
COLUMNS_WARPS = 4


@triton.jit
def _power(exponent, is_nan, dtype: tl.constexpr):
    """2**exponent as `dtype`, or NaN where is_nan. exponent: -24 to 15 for fp16, -64 to 64 for fp32."""
    bits = tl.where(is_nan, 0x7FC00000, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _scaled(values, exponent, is_nan, ROWS: tl.constexpr):
    """values (rows, blocks, n) * 2**exponent (rows, blocks), or NaN where is_nan. Returns (rows, blocks * n).

    values: fp16 for E4M3 and E2M1, fp32 for E5M2. Exponents below -24 make any E4M3 number 0.
    ROWS: True if the weight was folded along rows before. If a row's scale is far above the column's, the exponent can
        then exceed 15, the largest of fp16. Its values are below 2**-6, so the product still fits.
    """
    if values.dtype == tl.float32:
        factor = _power(tl.minimum(tl.maximum(exponent, -64), 64), is_nan, tl.float32)
        values = values * factor[:, :, None]
    else:
        factor = _power(tl.minimum(tl.maximum(exponent, -24), 15), is_nan, tl.float16)
        values = values * factor[:, :, None]
        if ROWS:
            factor = _power(tl.minimum(tl.maximum(exponent - 15, 0), 15), is_nan, tl.float16)
            values = values * factor[:, :, None]
    return tl.reshape(values, (values.shape[0], values.shape[1] * values.shape[2]))


@triton.jit
def fold_columns_kernel(
    qdata_ptr, scale_ptr, column_scale_ptr, folded_ptr, N, K,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK: elements per scale along a row, either 32 or K. PACKED: a byte of qdata holds two E2M1 codes."""
    PER_BYTE: tl.constexpr = 2 if PACKED else 1
    ROWS: tl.constexpr = BLOCK != 32
    batch, row_tile, column_tile = program_tile(tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row0 = (row_tile * BLOCK_M).to(tl.int64)
    column0 = column_tile * BLOCK_N
    rows_left = N - row_tile * BLOCK_M
    row = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    block = column0 // 32 + tl.arange(0, BLOCK_N // 32)[None, :]
    top = tl.load(column_scale_ptr + batch * (K // 32) + block, mask=block < K // 32, other=0).to(tl.int32)
    mask = (row < rows_left) & (block < K // 32)
    scale_ptr += (batch * N + row0 + row) * (K // BLOCK) + block * 32 // BLOCK
    byte = block[:, :, None] * (32 // PER_BYTE) + tl.arange(0, 32 // PER_BYTE)[None, None, :]
    qdata_ptr += (batch * N + row0) * (K // PER_BYTE) + row[:, :, None].to(tl.int64) * (K // PER_BYTE) + byte
    folded_ptr += batch * N * K + column0.to(tl.int64) * N + row0
    even = ()
    odd = ()
    for i in tl.static_range(PACK):
        exponent = tl.load(scale_ptr + i * (K // BLOCK), mask=mask, other=0).to(tl.int32) - top
        qdata = tl.load(qdata_ptr + i * (K // PER_BYTE), mask=mask[:, :, None], other=0.0)
        if PACKED:
            even = even + (_scaled(half_of_e2m1(qdata.to(tl.int32) & 15), exponent, top == NAN_SCALE, False),)
            odd = odd + (_scaled(half_of_e2m1(qdata.to(tl.int32) >> 4), exponent, top == NAN_SCALE, False),)
        elif qdata.dtype == tl.float8e5:
            even = even + (_scaled(qdata.to(tl.float32), exponent, top == NAN_SCALE, ROWS),)
        else:
            even = even + (_scaled(qdata.to(tl.float16), exponent, top == NAN_SCALE, ROWS),)
    store_transposed(even, folded_ptr, PER_BYTE * N, rows_left, (K - column0) // PER_BYTE)
    if PACKED:
        store_transposed(odd, folded_ptr + N, 2 * N, rows_left, (K - column0) // 2)


def fold_columns(qdata: Tensor, scale: Tensor, column_scale: Tensor) -> Tensor:
    packed = qdata.dtype == torch.float4_e2m1fn_x2
    dtype = torch.float8_e4m3fn if packed else qdata.dtype
    n, k = qdata.shape[-2], qdata.shape[-1] * (2 if packed else 1)
    folded = torch.empty((*qdata.shape[:-2], k, n), dtype=dtype, device=qdata.device)
    if folded.numel():
        qdata, scale = qdata.contiguous(), scale.contiguous()
        block_m, block_n = PACKED_TILE if packed else COLUMNS_TILE
        grid = (folded.numel() // (n * k) * cdiv(n, block_m) * cdiv(k, block_n),)
        launch(fold_columns_kernel, grid,
            qdata, scale, column_scale.contiguous(), folded, n, k,
            BLOCK=k // scale.shape[-1], PACKED=packed, PACK=1 if n % 8 else 8, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=COLUMNS_WARPS,
        )  # fmt: skip
    return folded


SCALE_ELEMENTS = 8192
"""Maximum scales per tile of max_scales, which has at most WGRAD_PROGRAMS_PER_SM programs per SM."""
WGRAD_PROGRAMS_PER_SM = 16
SPLIT_ROWS = 512
WGRAD_TILE = (256, 128)
"""Rows and columns of the tile that a program of shift_transpose takes."""
GROUP_M = 8
WGRAD_WARPS = 8
MOST_GROUPS = 1 << 15

_NAN_BASE = tl.constexpr(0x7FFF)


@triton.jit
def _max_scale(scale_ptr, index_ptr, row, mask, stride, BLOCKS: tl.constexpr):
    """Returns the largest scale of each row `row` (0 if its source row is -1), and the source row, both int32."""
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


def fold_for_wgrad(x, x_scale, x_index, y, y_scale, y_index, offs, alignment):
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
    x, y, x_scale, y_scale = rows_of(x), rows_of(y), rows_of(x_scale), rows_of(y_scale)
    programs = WGRAD_PROGRAMS_PER_SM * num_sms(device)

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
    block_m, block_n = WGRAD_TILE
    for qdata, scale, record, out in ((x, x_scale, x_record, x_t), (y, y_scale, y_record, y_t)):
        columns = qdata.shape[1]
        if columns:
            block_size = columns // scale.shape[1]
            sub = math.gcd(block_size, 32)
            tiles = cdiv(width, block_m) * cdiv(columns, block_n)
            launch(shift_transpose_kernel, (tiles,),
                qdata, scale, record, out_offs, out, width, columns, qdata.stride(0), scale.stride(0), num_groups,
                SUB=sub, PER_SCALE=block_size // sub, PACK=8 if width % 8 == 0 else 1, BLOCK_M=block_m,
                BLOCK_N=block_n, GROUP_M=GROUP_M, num_warps=WGRAD_WARPS,
            )  # fmt: skip
    return x_t, y_t, exponent, out_offs
