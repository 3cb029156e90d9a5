"""Quantize along columns, turned on the way, and what shares a tile with that: both ways of one read, requantize.

    x (N, K) values, or codes and scales        a program takes a tile of NR rows x NC columns
      | amax of BLOCK rows a column             -> codes (K, N), scale (N / BLOCK, K)        `_put_columns`
      | amax of BLOCK columns a row             -> codes (N, K), scale (N, K / BLOCK)        `_put_rows`

Values are read once, as a tuple of packed rows: see `turn`. Leading axes are a batch. A column whose block is longer
than a tile takes two kernels: magnitudes first, then the codes.

Measured on an H200 (65536 x 7168, Triton 3.6, share of the copy's 4.26 TB/s): columns 0.96, both 0.91, requantize 0.86.
What limits them is not DRAM but requests to L2, half of which cross the fabric between its two partitions (87% busy):
hence tiles with lines of 128 bytes, and scales stored along the tile. A register cap where it does not spill buys
another program an SM. Persistent programs that prefetch (cp.async) were slower: registers. Eviction hints did nothing.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels import on_hopper, rows
from mxep.quant.kernels.numbers import bytes_of, magnitude_bits, power_of_two, reciprocal, scale_byte
from mxep.quant.kernels.turn import interleave, load_tile, store_turned

TILE = (256, 64)
NUM_WARPS = 8
REQUANTIZE_TILE = (128, 128)
REQUANTIZE_WARPS = 4


@triton.jit
def _put_columns(
    tile, codes_ptr, scale_ptr, stride, scale_stride, rows_left, columns_left, MODE: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize tile (tuple of (packs, NC)) in blocks of BLOCK rows; column c to codes_ptr + c * stride, the scales of
    block b to scale_ptr + b * scale_stride. rows_left is a multiple of BLOCK."""
    PACKS: tl.constexpr = tile[0].shape[0]
    NC: tl.constexpr = tile[0].shape[1]
    BLOCKS: tl.constexpr = PACKS * len(tile) // BLOCK
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    amax = tl.abs(tile[0].to(tl.float32))
    for i in tl.static_range(1, len(tile)):
        amax = tl.maximum(amax, tl.abs(tile[i].to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    byte = scale_byte(tl.max(tl.reshape(magnitude_bits(amax), (BLOCKS, PACKS // BLOCKS, NC)), axis=1), MODE, dtype)
    factor = tl.reshape(tl.broadcast_to(reciprocal(byte)[:, None, :], (BLOCKS, PACKS // BLOCKS, NC)), (PACKS, NC))
    scaled = ()
    for i in tl.static_range(len(tile)):
        scaled = scaled + (tile[i].to(tl.float32) * factor,)
    blocks_left = rows_left // BLOCK
    store_turned(scaled, codes_ptr, stride, blocks_left * BLOCK, columns_left)
    block = tl.arange(0, BLOCKS)[:, None]
    column = tl.arange(0, NC)[None, :]
    place = block.to(tl.int64) * scale_stride + column
    tl.store(scale_ptr + place, byte.to(tl.uint8), mask=(column < columns_left) & (block < blocks_left))


@triton.jit
def _put_rows(
    tile, row, codes_ptr, scale_ptr, stride, scale_stride, block_stride, rows_left, columns_left, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize tile (tuple of (packs, NC)) in blocks of BLOCK columns; row r to codes_ptr + r * stride, the scale of
    its block b to scale_ptr + r * scale_stride + b * block_stride. row (packs, 1): the first row of each pack."""
    PACKS: tl.constexpr = tile[0].shape[0]
    NC: tl.constexpr = tile[0].shape[1]
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    column = tl.arange(0, NC)[None, :]
    mask = (row < rows_left) & (column < columns_left)
    scales = ()
    for i in tl.static_range(len(tile)):
        x = tl.reshape(tile[i].to(tl.float32), (PACKS, NC // BLOCK, BLOCK))
        byte = scale_byte(tl.max(magnitude_bits(x), axis=2), MODE, dtype)
        codes = tl.reshape((x * reciprocal(byte)[:, :, None]).to(dtype), (PACKS, NC))
        tl.store(codes_ptr + (row + i).to(tl.int64) * stride + column, codes, mask=mask)
        scales = scales + (byte.to(tl.uint8),)
    byte = interleave(scales)
    row = tl.arange(0, byte.shape[0])[:, None]
    block = tl.arange(0, NC // BLOCK)[None, :]
    mask = (row < rows_left) & (block < columns_left // BLOCK)
    tl.store(scale_ptr + row.to(tl.int64) * scale_stride + block.to(tl.int64) * block_stride, byte, mask=mask)


@triton.jit
def _place(row_tiles, column_tiles, ROWS_FIRST: tl.constexpr):
    """(batch, row tile, column tile) of this program; ROWS_FIRST: programs that follow one another share columns."""
    program = tl.program_id(0)
    batch = program // (row_tiles * column_tiles)
    program = program % (row_tiles * column_tiles)
    if ROWS_FIRST:
        return batch.to(tl.int64), program % row_tiles, program // row_tiles
    else:
        return batch.to(tl.int64), program // column_tiles, program % column_tiles


@triton.jit
def quantize_tile_kernel(
    x_ptr,
    rows_ptr,
    rows_scale_ptr,
    columns_ptr,
    columns_scale_ptr,
    N,
    K,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """x (batch, N, K) -> along columns, and along rows too unless rows_ptr is None."""
    PACK: tl.constexpr = 8
    batch, row_tile, column_tile = _place(tl.cdiv(N, NR), tl.cdiv(K, NC), ROWS_FIRST)
    row0 = (row_tile * NR).to(tl.int64)
    column0 = column_tile * NC
    rows_left = N - row_tile * NR
    columns_left = K - column0
    row = PACK * tl.arange(0, NR // PACK)[:, None]
    column = tl.arange(0, NC)[None, :]
    first = batch * N * K
    tile = load_tile(x_ptr + first + row0 * K + column0, row, column, K, rows_left, columns_left, PACK)
    if rows_ptr is not None:
        rows_ptr += first + row0 * K + column0
        rows_scale_ptr += (batch * (K // BLOCK) + column0 // BLOCK) * N + row0
        _put_rows(tile, row, rows_ptr, rows_scale_ptr, K, 1, N, rows_left, columns_left, MODE, BLOCK)
    columns_ptr += first + column0.to(tl.int64) * N + row0
    columns_scale_ptr += (batch * N + row0) // BLOCK * K + column0
    _put_columns(tile, columns_ptr, columns_scale_ptr, N, K, rows_left, columns_left, MODE, BLOCK)


@triton.jit
def requantize_kernel(
    codes_ptr,
    scale_ptr,
    row_index_ptr,
    group_ends_ptr,
    out_ptr,
    out_scale_ptr,
    R,
    K,
    num_groups,
    batch_stride,
    stride,
    scale_batch_stride,
    scale_stride_row,
    scale_stride_column,
    block_rows,
    block_columns,
    MODE: tl.constexpr,
    TURN: tl.constexpr,
    UNIT: tl.constexpr,
    PACK: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """codes (batch, S, K), a scale for block_rows x block_columns of them -> blocks of 32: TURN along rows, turned;
    else along columns. UNIT divides 32 and block_columns. PACK 8 (needed by TURN) if R is a multiple of 8, else 1."""
    BLOCK: tl.constexpr = 32
    batch, row_tile, column_tile = _place(tl.cdiv(R, NR), tl.cdiv(K, NC), ROWS_FIRST)
    row0 = row_tile * NR
    column0 = column_tile * NC
    live = R
    if group_ends_ptr is not None:
        live = tl.load(group_ends_ptr + num_groups - 1)
        if row0 >= live:
            return
    rows_left = live - row0
    columns_left = K - column0
    row = PACK * tl.arange(0, NR // PACK)[:, None]
    column = tl.arange(0, NC)[None, :]
    unit = UNIT * tl.arange(0, NC // UNIT)[None, :]
    codes_ptr += batch * batch_stride + column0 + column
    scale_ptr += batch * scale_batch_stride + ((column0 + unit) // block_columns).to(tl.int64) * scale_stride_column
    there = row < rows_left
    source = row0 + row
    tile = ()
    for i in tl.static_range(PACK):
        if row_index_ptr is not None:
            source = tl.load(row_index_ptr + row0 + row + i, mask=row < rows_left, other=-1)
            there = source >= 0
        codes = tl.load(codes_ptr + source.to(tl.int64) * stride, mask=there & (column < columns_left), other=0.0)
        byte = tl.load(
            scale_ptr + (source // block_rows).to(tl.int64) * scale_stride_row,
            mask=there & (unit < columns_left),
            other=0,
        )
        source += 1
        x = tl.reshape(codes.to(tl.float32), (NR // PACK, NC // UNIT, UNIT))
        x = x * power_of_two(byte.to(tl.int32))[:, :, None]
        tile = tile + (tl.reshape(x, (NR // PACK, NC)),)
    first = batch * R * K
    if TURN:
        out_ptr += first + column0.to(tl.int64) * R + row0
        out_scale_ptr += (batch * R + row0) // BLOCK * K + column0
        _put_columns(tile, out_ptr, out_scale_ptr, R, K, rows_left, columns_left, MODE, BLOCK)
    else:
        out_ptr += first + row0.to(tl.int64) * K + column0
        out_scale_ptr += (batch * R + row0) * (K // BLOCK) + column0 // BLOCK
        _put_rows(tile, row, out_ptr, out_scale_ptr, K, K // BLOCK, 1, rows_left, columns_left, MODE, BLOCK)


@triton.jit
def column_magnitudes_kernel(x_ptr, bits_ptr, length, K, NR: tl.constexpr, NC: tl.constexpr):
    """bits (segments, K) = the largest magnitude bits of each column of x (segments, length, K); bits start at 0."""
    segment, row_tile, column_tile = _place(tl.cdiv(length, NR), tl.cdiv(K, NC), False)
    row = row_tile * NR + tl.arange(0, NR)
    column = column_tile * NC + tl.arange(0, NC)
    there = column < K
    place = (segment * length + row)[:, None] * K + column[None, :]
    x = tl.load(x_ptr + place, mask=(row < length)[:, None] & there[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr + segment * K + column, tl.max(magnitude_bits(x), axis=0), mask=there, sem="relaxed")


@triton.jit
def quantize_long_columns_kernel(
    x_ptr, bits_ptr, codes_ptr, scale_ptr, length, N, K, MODE: tl.constexpr, PACK: tl.constexpr, NR: tl.constexpr,
    NC: tl.constexpr,
):  # fmt: skip
    """x (segments, length, K), bits (segments, K) -> codes (batch, K, N), scale (segments, K)."""
    segment, row_tile, column_tile = _place(tl.cdiv(length, NR), tl.cdiv(K, NC), True)
    batch = segment // (N // length)
    within = segment % (N // length)
    row0 = row_tile * NR
    column0 = column_tile * NC
    column = tl.arange(0, NC)[None, :]
    there = column < K - column0
    byte = scale_byte(
        tl.load(bits_ptr + segment * K + column0 + column, mask=there, other=0), MODE, codes_ptr.dtype.element_ty
    )
    row = PACK * tl.arange(0, NR // PACK)[:, None]
    x_ptr += (segment * length + row0) * K + column0
    tile = load_tile(x_ptr, row, column, K, length - row0, K - column0, PACK)
    scaled = ()
    for i in tl.static_range(PACK):
        scaled = scaled + (tile[i].to(tl.float32) * reciprocal(byte),)
    codes_ptr += (batch * K + column0) * N + within * length + row0
    store_turned(scaled, codes_ptr, N, length - row0, K - column0)
    if row_tile == 0:
        tl.store(scale_ptr + segment * K + column0 + column, byte.to(tl.uint8), mask=there)


def quantize_columns(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block: int,
    *,
    tile: tuple[int, int] = TILE,
    rows_first: bool = False,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_columns."""
    x = x.contiguous()
    *rest, n, k = x.shape
    codes = torch.empty((*rest, k, n), dtype=dtype, device=x.device)
    scale = torch.empty((*rest, n // block, k), dtype=SCALE_DTYPE, device=x.device)
    if not x.numel():
        return codes, scale
    options = {"num_warps": NUM_WARPS} | options
    if _fits(block, tile):
        _quantize_tile(x, None, None, codes, scale, mode, block, tile, rows_first, options)
        return codes, scale
    segments = x.numel() // (block * k)
    bits = torch.zeros((segments, k), dtype=torch.int32, device=x.device)
    nr, nc = tile
    grid = (segments * triton.cdiv(block, nr) * triton.cdiv(k, nc),)
    pack = 8 if block % 8 == 0 else 1
    column_magnitudes_kernel[grid](x, bits, block, k, NR=nr, NC=nc, **options)
    quantize_long_columns_kernel[grid](
        x, bits, codes, bytes_of(scale), block, n, k, MODE=mode, PACK=pack, NR=nr, NC=nc, **options
    )
    return codes, scale


def quantize_both(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block: int,
    *,
    tile: tuple[int, int] = TILE,
    rows_first: bool = False,
    **options: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mxep::quantize_both."""
    if not _fits(block, tile):
        codes, scale = rows.quantize_rows(x, dtype, mode, block)
        return codes, scale.mT.contiguous(), *quantize_columns(x, dtype, mode, block)
    x = x.contiguous()
    *rest, n, k = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*rest, k // block, n), dtype=SCALE_DTYPE, device=x.device)
    turned = torch.empty((*rest, k, n), dtype=dtype, device=x.device)
    turned_scale = torch.empty((*rest, n // block, k), dtype=SCALE_DTYPE, device=x.device)
    capped = on_hopper(maxnreg=80) if x.element_size() == 2 else {}  # fp32 would spill
    options = {"num_warps": NUM_WARPS} | capped | options
    if x.numel():
        _quantize_tile(x, codes, scale, turned, turned_scale, mode, block, tile, rows_first, options)
    return codes, scale, turned, turned_scale


def requantize(
    codes: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    row_index: Tensor | None,
    group_ends: Tensor | None,
    columns: bool,
    dtype: torch.dtype,
    mode: str,
    *,
    tile: tuple[int, int] = REQUANTIZE_TILE,
    rows_first: bool = False,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """mxep::requantize."""
    *rest, stored, k = codes.shape
    if codes.stride(-1) != 1 and codes.stride(-2) == 1 and row_index is None and group_ends is None:
        # Stored turned: what is along rows here is along columns there, and codes come out as they lie there.
        out, out_scale = requantize(codes.mT, scale.mT, block_columns, block_rows, None, None, not columns, dtype, mode)
        return out, out_scale.mT.contiguous()
    r = stored if row_index is None else row_index.shape[0]
    out = torch.empty((*rest, k, r) if columns else (*rest, r, k), dtype=dtype, device=codes.device)
    shape = (*rest, r // 32, k) if columns else (*rest, r, k // 32)
    out_scale = torch.empty(shape, dtype=SCALE_DTYPE, device=codes.device)
    if not out.numel():
        return out, out_scale
    if codes.stride(-1) != 1:
        codes = codes.contiguous()
    codes, scale = codes.flatten(0, -3) if rest else codes[None], scale.flatten(0, -3) if rest else scale[None]
    options = {"num_warps": REQUANTIZE_WARPS} | on_hopper(maxnreg=96 if row_index is None else 80) | options
    nr, nc = tile
    grid = (codes.shape[0] * triton.cdiv(r, nr) * triton.cdiv(k, nc),)
    requantize_kernel[grid](
        codes, bytes_of(scale), row_index, group_ends, out, bytes_of(out_scale),
        r, k, 0 if group_ends is None else group_ends.shape[0],
        codes.stride(0), codes.stride(1), *scale.stride(), block_rows, block_columns,
        MODE=mode, TURN=columns, UNIT=math.gcd(32, block_columns), PACK=1 if r % 8 else 8, NR=nr, NC=nc,
        ROWS_FIRST=rows_first, **options,
    )  # fmt: skip
    return out, out_scale


def _fits(block: int, tile: tuple[int, int]) -> bool:
    return 16 <= block <= min(tile) and block & (block - 1) == 0


def _quantize_tile(
    x: Tensor,
    codes: Tensor | None,
    scale: Tensor | None,
    turned: Tensor,
    turned_scale: Tensor,
    mode: str,
    block: int,
    tile: tuple[int, int],
    rows_first: bool,
    options: dict[str, int],
) -> None:
    n, k = x.shape[-2:]
    nr, nc = tile
    grid = (x.numel() // (n * k) * triton.cdiv(n, nr) * triton.cdiv(k, nc),)
    quantize_tile_kernel[grid](
        x, codes, None if scale is None else bytes_of(scale), turned, bytes_of(turned_scale), n, k,
        MODE=mode, BLOCK=block, NR=nr, NC=nc, ROWS_FIRST=rows_first,
        **options,
    )  # fmt: skip
