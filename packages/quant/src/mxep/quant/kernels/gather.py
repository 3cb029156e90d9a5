"""Rows by an index: copied, padded, quantized on the way; scales copied or swizzled on the way.

    row index[i] of x (or row i; -1: zeros)     a program takes NR rows x NC columns
      | values: blocks quantized                -> row i of the result: values or qdata
      | qdata: their scale bytes beside them    -> row i of the scales, or its place in the 128 x 4 layout of
                                                   `mxep.quant.swizzle`, each group a tile of 128 rows of its own

Where scales are swizzled a program's rows are a tile of that layout, so it writes 512 scale bytes in one piece; else a
tile is wide, so that its scales fill sectors of 32 bytes. Rows past the last group cost a program that ends at once.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.groups import round_up
from mxep.quant.kernels.bounds import bounds_of, valid_rows
from mxep.quant.kernels.numbers import abs_bits, bytes_of, reciprocal, scale_byte
from mxep.quant.swizzle import ROWS, swizzled_shape

WIDE = (8, 1024)
NUM_WARPS = 4
SWIZZLE_WARPS = 8
PAD_GROUPS = 32

_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _group_tile(tile, ends_ptr, groups, rows, NR: tl.constexpr, GROUPS: tl.constexpr):
    """(first row, rows left) of tile `tile`, where every group starts a tile of its own; (_, 0) past the last."""
    if ends_ptr is None:
        return tile * NR, rows - tile * NR
    else:
        group = tl.arange(0, GROUPS)
        start, end = bounds_of(group, ends_ptr, groups, rows)
        tiles = tl.cdiv(tl.maximum(end - start, 0), NR)
        last = tl.cumsum(tiles, 0)
        mine = (tile >= last - tiles) & (tile < last)
        row = tl.sum(tl.where(mine, start + (tile - (last - tiles)) * NR, 0))
        return row, tl.sum(tl.where(mine, end, 0)) - row


@triton.jit(do_not_specialize=["rows", "groups"])
def pick_kernel(
    x_ptr,
    scale_ptr,
    index_ptr,
    ends_ptr,
    out_ptr,
    out_scale_ptr,
    batch_stride,
    stride,
    scale_batch_stride,
    scale_stride,
    scale_column_stride,
    rows,
    K,
    groups,
    out_scale_batch_stride,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    SWIZZLE: tl.constexpr,
    GROUPS: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
):
    """out None: scales alone. MODE None: x is copied. out_scale None: no scales."""
    column_tiles = tl.cdiv(K, NC)
    tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    batch = tl.program_id(1).to(tl.int64)
    if SWIZZLE:
        row0, rows_left = _group_tile(tile, ends_ptr, groups, rows, NR, GROUPS)
    else:
        row0 = tile * NR
        rows_left = valid_rows(ends_ptr, groups, rows) - row0
    if rows_left <= 0:
        return
    row = tl.arange(0, NR)[:, None]
    there = row < rows_left
    wanted = there
    source = row0 + row
    if index_ptr is not None:
        source = tl.load(index_ptr + source, mask=there, other=-1)
        there = source >= 0
    source = source.to(tl.int64)
    column0 = column_tile * NC
    column = tl.arange(0, NC)[None, :]
    inside = column < K - column0
    if out_ptr is not None:
        x = tl.load(x_ptr + batch * batch_stride + source * stride + column0 + column, mask=there & inside, other=0)
        qdata = x
        if MODE is not None:
            dtype: tl.constexpr = out_ptr.dtype.element_ty
            x = tl.reshape(x.to(tl.float32), (NR, NC // BLOCK, BLOCK))
            byte = scale_byte(tl.max(abs_bits(x), axis=2), MODE, dtype)
            qdata = tl.reshape((x * reciprocal(byte)[:, :, None]).to(dtype), (NR, NC))
            byte = byte.to(tl.uint8)
        out_ptr += (batch * rows + row0) * K + column0
        tl.store(out_ptr + row.to(tl.int64) * K + column, qdata, mask=wanted & inside)
    if out_scale_ptr is not None:
        blocks = K // BLOCK
        block = tl.arange(0, NC // BLOCK)[None, :]
        inside = block < blocks - column0 // BLOCK
        if MODE is None:
            scale_ptr += batch * scale_batch_stride
            at = source * scale_stride + (column0 // BLOCK + block).to(tl.int64) * scale_column_stride
            byte = tl.load(scale_ptr + at, mask=there & inside, other=0)
        if SWIZZLE:
            tl.static_assert(NR == 128 and NC == 4 * BLOCK)
            quarters = tl.permute(tl.reshape(byte, (4, 32, 4)), (1, 0, 2))
            out_scale_ptr += batch * out_scale_batch_stride + (tile * column_tiles + column_tile).to(tl.int64) * 512
            tl.store(out_scale_ptr + tl.arange(0, 512), tl.reshape(quarters, (512,)))
        else:
            out_scale_ptr += (batch * rows + row0) * blocks + column0 // BLOCK
            tl.store(out_scale_ptr + row.to(tl.int64) * blocks + block, byte, mask=wanted & inside)


@triton.jit(do_not_specialize=["capacity", "rows", "groups"])
def pad_index_kernel(
    sizes_ptr, ends_ptr, index_ptr, capacity, rows, groups, alignment, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    """Every program sums up all sizes, GROUPS at a time, and looks closer at those whose places are in its tile."""
    place0 = tl.program_id(0) * TILE
    place = place0 + tl.arange(0, TILE)
    source = tl.full((TILE,), -1, tl.int32)
    last_row, last_place = 0, 0
    for group0 in range(0, groups, GROUPS):
        group = group0 + tl.arange(0, GROUPS)
        size = tl.load(sizes_ptr + group, mask=group < groups, other=0).to(tl.int32)
        padded = (size + alignment - 1) // alignment * alignment
        end = tl.minimum(last_place + tl.cumsum(padded, 0), capacity)
        if tl.program_id(0) == 0:
            tl.store(ends_ptr + group, end, mask=group < groups)
        places = tl.sum(padded, 0)
        if (last_place < place0 + TILE) & (last_place + places > place0):
            first = last_row + tl.cumsum(size, 0) - size
            within = place[:, None] - (end - padded)[None, :]
            mine = (within >= 0) & (within < size[None, :])
            source += tl.sum(tl.where(mine, first[None, :] + within + 1, 0), axis=1)
        last_row += tl.sum(size, 0)
        last_place += places
    tl.store(index_ptr + place, tl.where(source < rows, source, -1), mask=place < capacity)


@triton.jit(do_not_specialize=["places", "rows"])
def invert_kernel(index_ptr, inverse_ptr, places, rows, TILE: tl.constexpr):
    """inverse[index[i]] = i where index[i] is a row; every row has at most one place."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(index_ptr + place, mask=place < places, other=-1)
    tl.store(inverse_ptr + row, place, mask=(row >= 0) & (row < rows))


def materialize(qdata: Tensor, scale: Tensor, row_index: Tensor | None) -> tuple[Tensor, Tensor]:
    """mxep::materialize."""
    if row_index is None:
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in (qdata, scale))  # type: ignore[return-value]
    out = torch.empty((row_index.shape[0], qdata.shape[1]), dtype=qdata.dtype, device=qdata.device)
    out_scale = torch.empty((row_index.shape[0], scale.shape[1]), dtype=scale.dtype, device=scale.device)
    if qdata.shape[1] and qdata.shape[1] // scale.shape[1] == 32:
        _pick(qdata.view(torch.uint8), scale, row_index, None, out.view(torch.uint8), out_scale, None)
    else:
        _pick(qdata.view(torch.uint8), None, row_index, None, out.view(torch.uint8), None, None)
        _pick(bytes_of(scale), None, row_index, None, bytes_of(out_scale), None, None)
    return out, out_scale


def gather_swizzled(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """mxep::gather_swizzled."""
    rows = qdata.shape[0] if row_index is None else row_index.shape[0]
    out = torch.empty((rows, qdata.shape[1]), dtype=qdata.dtype, device=qdata.device)
    out_scale = _swizzled(scale, rows, scale.shape[1], offs)
    _pick(qdata.view(torch.uint8), scale, row_index, offs, out.view(torch.uint8), out_scale, None, swizzle=True)
    return out, out_scale


def quantize_swizzled(
    x: Tensor, row_index: Tensor | None, offs: Tensor | None, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_swizzled."""
    rows = x.shape[0] if row_index is None else row_index.shape[0]
    out = torch.empty((rows, x.shape[1]), dtype=dtype, device=x.device)
    out_scale = _swizzled(x, rows, x.shape[1] // 32, offs)
    _pick(x, None, row_index, offs, out, out_scale, mode, swizzle=True)
    return out, out_scale


def pad_quantize(x: Tensor, row_index: Tensor, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    """mxep::pad_quantize."""
    out = torch.empty((row_index.shape[0], x.shape[1]), dtype=dtype, device=x.device)
    out_scale = torch.empty((row_index.shape[0], x.shape[1] // 32), dtype=SCALE_DTYPE, device=x.device)
    _pick(x, None, row_index, None, out, out_scale, mode)
    return out, out_scale


def swizzle_scales(scale: Tensor, offs: Tensor | None) -> Tensor:
    """mxep::swizzle_scales."""
    rows, cols = scale.shape[-2:]
    out = _swizzled(scale, rows, cols, offs).view(scale.dtype)
    _pick(None, scale, None, offs, None, out, None, swizzle=True)
    return out


def pad_rows(x: Tensor, row_index: Tensor) -> Tensor:
    """mxep::pad_rows."""
    out = torch.empty((row_index.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    plain = _PLAIN.get(x.element_size(), torch.int64)
    _pick(x.contiguous().view(plain), None, row_index, None, out.view(plain), None, None)
    return out


def unpad_rows(y: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    """mxep::unpad_rows."""
    inverse = torch.full((num_rows,), -1, dtype=torch.int32, device=y.device)
    places = row_index.shape[0]
    if places:
        invert_kernel[(triton.cdiv(places, 1024),)](row_index, inverse, places, num_rows, TILE=1024)
    return pad_rows(y, inverse)


def pad_index(group_sizes: Tensor, num_rows: int, alignment: int) -> tuple[Tensor, Tensor]:
    """mxep::pad_index."""
    groups = group_sizes.shape[0]
    capacity = round_up(num_rows + groups * (alignment - 1), alignment)
    ends = torch.empty(groups, dtype=torch.int32, device=group_sizes.device)
    index = torch.empty(capacity, dtype=torch.int32, device=group_sizes.device)
    pad_index_kernel[(max(1, triton.cdiv(capacity, 256)),)](
        group_sizes, ends, index, capacity, num_rows, groups, alignment,
        GROUPS=min(triton.next_power_of_2(groups), PAD_GROUPS), TILE=256,
    )  # fmt: skip
    return ends, index


def _swizzled(like: Tensor, rows: int, cols: int, offs: Tensor | None) -> Tensor:
    """Scales of the shape that `mxep.quant.swizzle` says, not written yet."""
    shape = (*like.shape[:-2], *swizzled_shape(rows, cols, offs))
    return torch.empty(shape, dtype=SCALE_DTYPE, device=like.device)


def _pick(
    x: Tensor | None,
    scale: Tensor | None,
    row_index: Tensor | None,
    offs: Tensor | None,
    out: Tensor | None,
    out_scale: Tensor | None,
    mode: str | None,
    *,
    swizzle: bool = False,
) -> None:
    """Rows of x and scale, picked by row_index, to out and out_scale; in groups if there are offs."""
    if x is not None and x.stride(-1) != 1:
        x = x.contiguous()
    if x is not None:
        rows, k = (x.shape[0] if row_index is None else row_index.shape[0]), x.shape[1]
        batch, strides = 1, (0, x.stride(0))
    else:
        assert scale is not None
        rows, k = scale.shape[-2], scale.shape[-1] * 32
        batch, strides = math.prod(scale.shape[:-2]), (0, 0)
    if not rows * k * batch:
        return
    if scale is not None:
        scale = bytes_of(scale)
        scale = scale.flatten(0, -3) if scale.ndim > 2 else scale[None]
    nr, nc = (ROWS, 128) if swizzle else WIDE
    row_tiles = triton.cdiv(rows, nr)
    if swizzle:
        assert out_scale is not None
        row_tiles = out_scale.shape[-2] // ROWS
    groups = 0 if offs is None else offs.shape[0]
    pick_kernel[(row_tiles * triton.cdiv(k, nc), batch)](
        x, scale, row_index, offs, out, None if out_scale is None else bytes_of(out_scale),
        *strides, *((0, 0, 0) if scale is None else scale.stride()), rows, k, groups,
        0 if out_scale is None or batch == 1 else out_scale.shape[-2] * out_scale.shape[-1],
        MODE=mode, BLOCK=32, SWIZZLE=swizzle, GROUPS=triton.next_power_of_2(max(groups, 1)), NR=nr, NC=nc,
        num_warps=SWIZZLE_WARPS if swizzle else NUM_WARPS,
    )  # fmt: skip
