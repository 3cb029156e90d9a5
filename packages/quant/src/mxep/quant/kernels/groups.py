"""Copy rows in an index's order, swizzle their scales, and sum rows by group.

Copy (pick_kernel):

    row index[i] of x (or row i; -1: zeros)     a program takes BLOCK_M rows x BLOCK_N columns
      | values or qdata                         -> row i of the result
      | scales of the qdata                     -> row i of the scales; if swizzled, the position of row i in the
                                                   128 x 4 layout of `mxep.quant.groups`

In the swizzled layout each group starts a new 128 x 4 tile. A program then takes the 128 rows of one tile, so it
writes 512 consecutive scales. Without swizzling, a program takes fewer rows but more columns, so that its scales fill
sectors of 32 bytes. Programs past the last group exit at once.

Sum (group_sums_kernel): a program takes one group and BLOCK_N columns, 32 rows at a time.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import group_bounds, power_of_two, valid_rows
from mxep.quant.shapes import (
    GROUP_SUMS_LANES,
    SWIZZLE_ROWS,
    empty_group_sums,
    empty_picked,
    num_rows,
    padded_rows,
    swizzled_shape,
)
from mxep.runtime.launch import cdiv, launch, next_power_of_2

WIDE = (8, 1024)
NUM_WARPS = 4
SWIZZLE_WARPS = 8
PAD_GROUPS = 32

_INT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _group_tile(tile, offs_ptr, num_groups, rows, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """Rows of tile number `tile`. Every group starts a new tile.

    Returns the first row, and the number of rows from there to the end of the group: 0 if there is no such tile.
    """
    if offs_ptr is None:
        return tile * BLOCK_M, rows - tile * BLOCK_M
    else:
        group = tl.arange(0, GROUPS)
        start, end = group_bounds(group, offs_ptr, num_groups, rows)
        tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_M)
        last = tl.cumsum(tiles, 0)
        mask = (tile >= last - tiles) & (tile < last)
        row = tl.sum(tl.where(mask, start + (tile - (last - tiles)) * BLOCK_M, 0))
        return row, tl.sum(tl.where(mask, end, 0)) - row


@triton.jit(do_not_specialize=["num_groups", "first"])
def split_ends_kernel(offs_ptr, before_ptr, behind_ptr, num_groups, first, BLOCK: tl.constexpr):
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(offs_ptr + group, mask=group < num_groups)
    tl.store(before_ptr + group, tl.minimum(end, first), mask=group < num_groups)
    tl.store(behind_ptr + group, tl.maximum(end - first, 0), mask=group < num_groups)


def split_ends(offs, first):
    before, behind = torch.empty_like(offs), torch.empty_like(offs)
    launch(split_ends_kernel, (cdiv(len(offs), 128),), offs, before, behind, len(offs), first, BLOCK=128)
    return before, behind


@triton.jit(do_not_specialize=["rows", "num_groups"])
def pick_kernel(
    x_ptr, scale_ptr, index_ptr, offs_ptr, out_ptr, out_scale_ptr, stride, scale_batch_stride, scale_stride,
    scale_column_stride, rows, K, num_groups, out_scale_batch_stride,
    BLOCK_SIZE: tl.constexpr, SWIZZLE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy rows and their scales. x_ptr: None to copy only scales. out_scale_ptr: None if there are no scales."""
    column_tiles = tl.cdiv(K, BLOCK_N)
    tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    batch = tl.program_id(1).to(tl.int64)
    if SWIZZLE:
        row0, rows_left = _group_tile(tile, offs_ptr, num_groups, rows, BLOCK_M, GROUPS)
    else:
        row0 = tile * BLOCK_M
        rows_left = valid_rows(offs_ptr, num_groups, rows) - row0
    if rows_left <= 0:
        return
    row = tl.arange(0, BLOCK_M)[:, None]
    out_mask = row < rows_left
    mask = out_mask
    source = row0 + row
    if index_ptr is not None:
        source = tl.load(index_ptr + source, mask=mask, other=-1)
        mask = source >= 0
    source = source.to(tl.int64)
    column0 = column_tile * BLOCK_N
    column = tl.arange(0, BLOCK_N)[None, :]
    column_mask = column < K - column0
    if x_ptr is not None:
        x = tl.load(x_ptr + source * stride + column0 + column, mask=mask & column_mask, other=0)
        out_ptr += (batch * rows + row0) * K + column0
        tl.store(out_ptr + row.to(tl.int64) * K + column, x, mask=out_mask & column_mask)
    if out_scale_ptr is not None:
        blocks = K // BLOCK_SIZE
        block = tl.arange(0, BLOCK_N // BLOCK_SIZE)[None, :]
        column_mask = block < blocks - column0 // BLOCK_SIZE
        scale_ptr += batch * scale_batch_stride
        offsets = source * scale_stride + (column0 // BLOCK_SIZE + block).to(tl.int64) * scale_column_stride
        scale = tl.load(scale_ptr + offsets, mask=mask & column_mask, other=0)
        if SWIZZLE:
            tl.static_assert(BLOCK_M == 128 and BLOCK_N == 4 * BLOCK_SIZE)
            quarters = tl.permute(tl.reshape(scale, (4, 32, 4)), (1, 0, 2))
            out_scale_ptr += batch * out_scale_batch_stride + (tile * column_tiles + column_tile).to(tl.int64) * 512
            tl.store(out_scale_ptr + tl.arange(0, 512), tl.reshape(quarters, (512,)))
        else:
            out_scale_ptr += (batch * rows + row0) * blocks + column0 // BLOCK_SIZE
            tl.store(out_scale_ptr + row.to(tl.int64) * blocks + block, scale, mask=out_mask & column_mask)


@triton.jit(do_not_specialize=["capacity", "rows", "num_groups"])
def pad_index_kernel(
    sizes_ptr, offs_ptr, index_ptr, capacity, rows, num_groups, alignment, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    """Each program adds up the sizes of all groups, GROUPS at a time, and writes the index of its own TILE rows."""
    out_row0 = tl.program_id(0) * TILE
    out_row = out_row0 + tl.arange(0, TILE)
    source = tl.full((TILE,), -1, tl.int32)
    last_row, last_out_row = 0, 0
    for group0 in range(0, num_groups, GROUPS):
        group = group0 + tl.arange(0, GROUPS)
        size = tl.load(sizes_ptr + group, mask=group < num_groups, other=0).to(tl.int32)
        padded = (size + alignment - 1) // alignment * alignment
        end = tl.minimum(last_out_row + tl.cumsum(padded, 0), capacity)
        if tl.program_id(0) == 0:
            tl.store(offs_ptr + group, end, mask=group < num_groups)
        out_rows = tl.sum(padded, 0)
        if (last_out_row < out_row0 + TILE) & (last_out_row + out_rows > out_row0):
            first = last_row + tl.cumsum(size, 0) - size
            within = out_row[:, None] - (end - padded)[None, :]
            mask = (within >= 0) & (within < size[None, :])
            source += tl.sum(tl.where(mask, first[None, :] + within + 1, 0), axis=1)
        last_row += tl.sum(size, 0)
        last_out_row += out_rows
    tl.store(index_ptr + out_row, tl.where(source < rows, source, -1), mask=out_row < capacity)


@triton.jit(do_not_specialize=["indices", "rows"])
def invert_kernel(index_ptr, inverse_ptr, indices, rows, TILE: tl.constexpr):
    """inverse[index[i]] = i for every index[i] that is not -1. A row occurs at most once in the index."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(index_ptr + i, mask=i < indices, other=-1)
    tl.store(inverse_ptr + row, i, mask=(row >= 0) & (row < rows))


def materialize(qdata: Tensor, scale: Tensor, row_index: Tensor | None) -> tuple[Tensor, Tensor]:
    if row_index is None:
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in (qdata, scale))  # type: ignore[return-value]
    out, out_scale = empty_picked(qdata, row_index), empty_picked(scale, row_index)
    if qdata.shape[1] and qdata.shape[1] // scale.shape[1] == 32:
        _pick(qdata.view(torch.uint8), scale, row_index, None, out.view(torch.uint8), out_scale)
    else:
        _pick(qdata.view(torch.uint8), None, row_index, None, out.view(torch.uint8), None)
        _pick(scale, None, row_index, None, out_scale, None)
    return out, out_scale


def gather_swizzled(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    out = qdata.new_empty((num_rows(qdata, row_index), qdata.shape[1]))
    out_scale = scale.new_empty(swizzled_shape(out.shape[0], scale.shape[1], offs))
    _pick(qdata.view(torch.uint8), scale, row_index, offs, out.view(torch.uint8), out_scale, swizzle=True)
    return out, out_scale


def swizzle_scales(scale: Tensor, offs: Tensor | None) -> Tensor:
    *rest, rows, cols = scale.shape
    out = scale.new_empty((*rest, *swizzled_shape(rows, cols, offs)))
    _pick(None, scale, None, offs, None, out, swizzle=True)
    return out


def pad_rows(x: Tensor, row_index: Tensor) -> Tensor:
    out = empty_picked(x, row_index)
    plain = _INT_DTYPES.get(x.element_size(), torch.int64)
    _pick(x.contiguous().view(plain), None, row_index, None, out.view(plain), None)
    return out


def unpad_rows(y: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    inverse = torch.full((num_rows,), -1, dtype=torch.int32, device=y.device)
    indices = row_index.shape[0]
    if indices:
        launch(invert_kernel, (cdiv(indices, 1024),), row_index, inverse, indices, num_rows, TILE=1024)
    return pad_rows(y, inverse)


def pad_index(group_sizes: Tensor, num_rows: int, alignment: int) -> tuple[Tensor, Tensor]:
    num_groups = group_sizes.shape[0]
    capacity = padded_rows(num_rows, num_groups, alignment)
    offs = torch.empty(num_groups, dtype=torch.int32, device=group_sizes.device)
    index = torch.empty(capacity, dtype=torch.int32, device=group_sizes.device)
    launch(pad_index_kernel, (max(1, cdiv(capacity, 256)),),
        group_sizes, offs, index, capacity, num_rows, num_groups, alignment,
        GROUPS=min(next_power_of_2(num_groups), PAD_GROUPS), TILE=256,
    )  # fmt: skip
    return offs, index


def _pick(x, scale, row_index, offs, out, out_scale, *, swizzle: bool = False) -> None:
    """Copy rows `row_index` of x (S, K) to out, and those of scale to out_scale. Rows past the last group are skipped.

    x and out may be None, or scale and out_scale.
    """
    if x is not None:
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, k, batch = num_rows(x, row_index), x.shape[1], 1
    else:
        assert scale is not None
        rows, k, batch = scale.shape[-2], scale.shape[-1] * 32, math.prod(scale.shape[:-2])
    if not rows * k * batch:
        return
    if scale is not None:
        scale = scale.flatten(0, -3) if scale.ndim > 2 else scale[None]
    block_m, block_n = (SWIZZLE_ROWS, 128) if swizzle else WIDE
    row_tiles = cdiv(rows, block_m)
    if swizzle:
        assert out_scale is not None
        row_tiles = out_scale.shape[-2] // SWIZZLE_ROWS
    num_groups = 0 if offs is None else offs.shape[0]
    launch(pick_kernel, (row_tiles * cdiv(k, block_n), batch),
        x, scale, row_index, offs, out, out_scale,
        0 if x is None else x.stride(0), *((0, 0, 0) if scale is None else scale.stride()), rows, k, num_groups,
        0 if out_scale is None or batch == 1 else out_scale.shape[-2] * out_scale.shape[-1],
        BLOCK_SIZE=32, SWIZZLE=swizzle, GROUPS=next_power_of_2(max(num_groups, 1)), BLOCK_M=block_m,
        BLOCK_N=block_n, num_warps=SWIZZLE_WARPS if swizzle else NUM_WARPS,
    )  # fmt: skip


BLOCK_N = 128


@triton.jit
def _halves(lanes):
    """Sum over the first axis by halving it repeatedly. Each tl.sum adds only two numbers, so the order is fixed."""
    if lanes.shape[0] > 1:
        return _halves(tl.sum(tl.reshape(lanes, (2, lanes.shape[0] // 2, lanes.shape[1])), axis=0))
    else:
        return tl.reshape(lanes, (lanes.shape[1],))


@triton.jit(do_not_specialize=["rows", "num_groups"])
def group_sums_kernel(
    x_ptr, scale_ptr, offs_ptr, out_ptr, rows, num_groups, N, stride, scale_stride, block_size,
    LANES: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """scale_ptr: None if x is not quantized. UNIT: columns per loaded scale; divides block_size and BLOCK_N."""
    group = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    unit = tl.program_id(1) * BLOCK_N + UNIT * tl.arange(0, BLOCK_N // UNIT)[None, :]
    start, end = group_bounds(group, offs_ptr, num_groups, rows)
    lanes = tl.zeros((LANES, BLOCK_N), out_ptr.dtype.element_ty)
    for first in range(start, end, LANES):
        row = (first + tl.arange(0, LANES)[:, None]).to(tl.int64)
        x = tl.load(x_ptr + row * stride + column, mask=(row < end) & (column < N), other=0.0).to(lanes.dtype)
        if scale_ptr is not None:
            scale = tl.load(
                scale_ptr + row * scale_stride + unit // block_size, mask=(row < end) & (unit < N), other=127
            )
            x = tl.reshape(x, (LANES, BLOCK_N // UNIT, UNIT)) * power_of_two(scale.to(tl.int32))[:, :, None]
            x = tl.reshape(x, (LANES, BLOCK_N))
        lanes += x
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + group.to(tl.int64) * N + column, _halves(lanes), mask=column < N)


def group_sums(x: Tensor, scale: Tensor | None, block_size: int, offs: Tensor) -> Tensor:
    rows, width = x.shape
    groups = offs.shape[0]
    out = empty_group_sums(x, offs)
    x, scale = (part if part is None or part.stride(1) == 1 else part.contiguous() for part in (x, scale))
    launch(group_sums_kernel, (groups, cdiv(width, BLOCK_N)),
        x, scale, offs, out, rows, groups, width, x.stride(0),
        0 if scale is None else scale.stride(0), block_size,
        LANES=GROUP_SUMS_LANES, BLOCK_N=BLOCK_N, UNIT=math.gcd(block_size, BLOCK_N), num_warps=4,
    )  # fmt: skip
    return out
