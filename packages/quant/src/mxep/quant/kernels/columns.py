"""Quantize along columns, turned on the way, and what shares a tile with that: both ways of one read, requantize.

    x (N, K) values, or codes and scales        a program takes a tile of NR rows x NC columns
      | amax of BLOCK rows a column             -> codes (K, N), scale (K, N / BLOCK)        `_put_columns`
      | amax of BLOCK columns a row             -> codes (N, K), scale (N, K / BLOCK)        `_put_rows`

Values are read once, as (PACK, NR / PACK, NC): see `turn`. Leading axes are a batch. A column longer than a tile takes
two kernels: largest magnitudes first, then the codes.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels import rows
from mxep.quant.kernels.numbers import bytes_of, magnitude_bits, power_of_two, reciprocal, scale_byte
from mxep.quant.kernels.turn import store_turned, tile_rows

TILE = (128, 128)
NUM_WARPS = 8
REQUANTIZE_TILE = (128, 128)
REQUANTIZE_WARPS = 8

_FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _put_columns(
    x,
    codes_ptr,
    scale_ptr,
    stride,
    scale_stride,
    rows_left,
    columns_left,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize x (PACK, NR / PACK, NC) fp32 in blocks of BLOCK rows; column c to codes_ptr + c * stride, and its scales
    to scale_ptr + c * scale_stride. rows_left is a multiple of BLOCK."""
    PACK: tl.constexpr = x.shape[0]
    NC: tl.constexpr = x.shape[2]
    BLOCKS: tl.constexpr = x.shape[1] * PACK // BLOCK
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    x = tl.reshape(x, (PACK, BLOCKS, BLOCK // PACK, NC))
    bits = tl.max(tl.max(magnitude_bits(x), axis=2), axis=0)
    byte = scale_byte(bits, MODE, dtype)
    codes = tl.reshape((x * reciprocal(byte)[None, :, None, :]).to(dtype), (PACK, BLOCKS * BLOCK // PACK, NC))
    blocks_left = rows_left // BLOCK
    store_turned(codes, codes_ptr, stride, blocks_left * (BLOCK // PACK), columns_left)
    block = tl.arange(0, BLOCKS)
    column = tl.arange(0, NC)
    mask = (column < columns_left)[:, None] & (block < blocks_left)[None, :]
    place = column[:, None].to(tl.int64) * scale_stride + block[None, :]
    tl.store(scale_ptr + place, tl.trans(byte).to(tl.uint8), mask=mask)


@triton.jit
def _put_rows(
    x,
    row,
    codes_ptr,
    scale_ptr,
    stride,
    scale_stride,
    rows_left,
    columns_left,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize x (PACK, NR / PACK, NC) fp32 in blocks of BLOCK columns; row r to codes_ptr + r * stride, and its scales
    to scale_ptr + r * scale_stride. row (PACK, NR / PACK): the row of each place."""
    PACK: tl.constexpr = x.shape[0]
    PACKS: tl.constexpr = x.shape[1]
    NC: tl.constexpr = x.shape[2]
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    x = tl.reshape(x, (PACK, PACKS, NC // BLOCK, BLOCK))
    bits = tl.max(magnitude_bits(x), axis=3)
    byte = scale_byte(bits, MODE, dtype)
    codes = tl.reshape((x * reciprocal(byte)[:, :, :, None]).to(dtype), (PACK, PACKS, NC))
    column = tl.arange(0, NC)
    row = row[:, :, None]
    there = row < rows_left
    tl.store(codes_ptr + row.to(tl.int64) * stride + column[None, None, :], codes,
             mask=there & (column < columns_left)[None, None, :])  # fmt: skip
    block = tl.arange(0, NC // BLOCK)
    tl.store(scale_ptr + row.to(tl.int64) * scale_stride + block[None, None, :], byte.to(tl.uint8),
             mask=there & (block < columns_left // BLOCK)[None, None, :])  # fmt: skip


@triton.jit
def _tile(row_tiles, column_tiles, ROWS_FIRST: tl.constexpr):
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
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    batch, row_tile, column_tile = _tile(tl.cdiv(N, NR), tl.cdiv(K, NC), ROWS_FIRST)
    row0 = row_tile.to(tl.int64) * NR
    column0 = column_tile.to(tl.int64) * NC
    rows_left = (N - row0).to(tl.int32)
    columns_left = (K - column0).to(tl.int32)
    row = tile_rows(PACK, NR)
    column = tl.arange(0, NC)
    x_ptr += batch * N * K + row0 * K + column0
    mask = (row < rows_left)[:, :, None] & (column < columns_left)[None, None, :]
    x = tl.load(x_ptr + row[:, :, None].to(tl.int64) * K + column[None, None, :], mask=mask, other=0.0).to(tl.float32)
    if ROWS:
        rows_ptr += batch * N * K + row0 * K + column0
        rows_scale_ptr += (batch * N + row0) * (K // BLOCK) + column0 // BLOCK
        _put_rows(x, row, rows_ptr, rows_scale_ptr, K, K // BLOCK, rows_left, columns_left, MODE, BLOCK)
    columns_ptr += batch * N * K + column0 * N + row0
    columns_scale_ptr += (batch * K + column0) * (N // BLOCK) + row0 // BLOCK
    _put_columns(x, columns_ptr, columns_scale_ptr, N, N // BLOCK, rows_left, columns_left, MODE, BLOCK)


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
    """codes (batch, S, K), a scale for block_rows x block_columns of them -> blocks of 32: TURN along rows, turned; else
    along columns. UNIT divides 32 and block_columns."""
    BLOCK: tl.constexpr = 32
    batch, row_tile, column_tile = _tile(tl.cdiv(R, NR), tl.cdiv(K, NC), ROWS_FIRST)
    row0 = row_tile * NR
    column0 = column_tile * NC
    live = R
    if group_ends_ptr is not None:
        live = tl.load(group_ends_ptr + num_groups - 1)
        if row0 >= live:
            return
    rows_left = live - row0
    columns_left = K - column0
    row = tile_rows(PACK, NR)
    there = row < rows_left
    source = row0 + row
    if row_index_ptr is not None:
        source = tl.load(row_index_ptr + source, mask=there, other=-1)
        there = source >= 0
    source = source[:, :, None].to(tl.int64)
    there = there[:, :, None]
    column = column0 + tl.arange(0, NC)
    unit = column0 + UNIT * tl.arange(0, NC // UNIT)
    byte = tl.load(
        scale_ptr
        + batch * scale_batch_stride
        + source // block_rows * scale_stride_row
        + (unit // block_columns)[None, None, :].to(tl.int64) * scale_stride_column,
        mask=there & (unit < K)[None, None, :],
        other=0,
    ).to(tl.int32)
    codes = tl.load(
        codes_ptr + batch * batch_stride + source * stride + column[None, None, :],
        mask=there & (column < K)[None, None, :],
        other=0.0,
    )
    x = codes.to(tl.float32)
    if codes_ptr.dtype.element_ty == tl.float8e5:  # an Inf among the codes is no overflow
        x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
    x = tl.reshape(x, (PACK, NR // PACK, NC // UNIT, UNIT)) * power_of_two(byte)[:, :, :, None]
    x = tl.clamp(tl.reshape(x, (PACK, NR // PACK, NC)), -_FP32_MAX, _FP32_MAX, propagate_nan=tl.PropagateNan.ALL)
    first = batch * R * K
    if TURN:
        out_ptr += first + column0.to(tl.int64) * R + row0
        out_scale_ptr += (batch * K + column0) * (R // BLOCK) + row0 // BLOCK
        _put_columns(x, out_ptr, out_scale_ptr, R, R // BLOCK, rows_left, columns_left, MODE, BLOCK)
    else:
        out_ptr += first + row0.to(tl.int64) * K + column0
        out_scale_ptr += (batch * R + row0) * (K // BLOCK) + column0 // BLOCK
        _put_rows(x, row, out_ptr, out_scale_ptr, K, K // BLOCK, rows_left, columns_left, MODE, BLOCK)


@triton.jit
def column_magnitudes_kernel(
    x_ptr, bits_ptr, length, K, NR: tl.constexpr, NC: tl.constexpr
):
    """bits (segments, K) = the largest magnitude bits of each column of x (segments, length, K); bits start at 0."""
    segment, row_tile, column_tile = _tile(tl.cdiv(length, NR), tl.cdiv(K, NC), False)
    row = row_tile * NR + tl.arange(0, NR)
    column = column_tile * NC + tl.arange(0, NC)
    there = column < K
    place = (segment * length + row)[:, None] * K + column[None, :]
    x = tl.load(x_ptr + place, mask=(row < length)[:, None] & there[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr + segment * K + column, tl.max(magnitude_bits(x), axis=0), mask=there, sem="relaxed")


@triton.jit
def quantize_long_columns_kernel(
    x_ptr,
    bits_ptr,
    codes_ptr,
    scale_ptr,
    length,
    N,
    K,
    MODE: tl.constexpr,
    PACK: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
):
    """x (segments, length, K), bits (segments, K) -> codes (batch, K, N), scale (batch, K, N / length)."""
    segment, row_tile, column_tile = _tile(tl.cdiv(length, NR), tl.cdiv(K, NC), True)
    batch = segment // (N // length)
    within = segment % (N // length)
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    row0 = row_tile * NR
    row = row0 + tile_rows(PACK, NR)
    column = column_tile * NC + tl.arange(0, NC)
    there = column < K
    byte = scale_byte(tl.load(bits_ptr + segment * K + column, mask=there, other=0), MODE, dtype)
    place = (segment * length + row)[:, :, None] * K + column[None, None, :]
    x = tl.load(x_ptr + place, mask=(row < length)[:, :, None] & there[None, None, :], other=0.0).to(tl.float32)
    codes = (x * reciprocal(byte)[None, None, :]).to(dtype)
    column0 = column_tile.to(tl.int64) * NC
    store_turned(
        codes,
        codes_ptr + batch * N * K + column0 * N + within * length + row0,
        N,
        (length - row0) // PACK,
        K - column_tile * NC,
    )
    if row_tile == 0:
        tl.store(scale_ptr + (batch * K + column) * (N // length) + within, byte.to(tl.uint8), mask=there)


def quantize_columns(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block: int,
    *,
    tile: tuple[int, int] = TILE,
    num_warps: int = NUM_WARPS,
    rows_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_columns."""
    x = x.contiguous()
    *rest, n, k = x.shape
    codes = torch.empty((*rest, k, n), dtype=dtype, device=x.device)
    scale = torch.empty((*rest, k, n // block), dtype=SCALE_DTYPE, device=x.device)
    if not x.numel():
        return codes, scale
    if _fits(block, tile):
        _quantize_tile(x, None, None, codes, scale, mode, block, tile, num_warps, rows_first)
        return codes, scale
    segments = x.numel() // (block * k)
    bits = torch.zeros((segments, k), dtype=torch.int32, device=x.device)
    nr, nc = tile
    grid = (segments * triton.cdiv(block, nr) * triton.cdiv(k, nc),)
    pack = 4 if block % 4 == 0 else 1
    column_magnitudes_kernel[grid](x, bits, block, k, NR=nr, NC=nc, num_warps=num_warps)
    quantize_long_columns_kernel[grid](
        x, bits, codes, bytes_of(scale), block, n, k, MODE=mode, PACK=pack, NR=nr, NC=nc, num_warps=num_warps
    )
    return codes, scale


def quantize_both(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block: int,
    *,
    tile: tuple[int, int] = TILE,
    num_warps: int = NUM_WARPS,
    rows_first: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mxep::quantize_both."""
    if not _fits(block, tile):
        return *rows.quantize_rows(x, dtype, mode, block), *quantize_columns(x, dtype, mode, block)
    x = x.contiguous()
    *rest, n, k = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*rest, n, k // block), dtype=SCALE_DTYPE, device=x.device)
    turned = torch.empty((*rest, k, n), dtype=dtype, device=x.device)
    turned_scale = torch.empty((*rest, k, n // block), dtype=SCALE_DTYPE, device=x.device)
    if x.numel():
        _quantize_tile(x, codes, scale, turned, turned_scale, mode, block, tile, num_warps, rows_first)
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
    num_warps: int = REQUANTIZE_WARPS,
    rows_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """mxep::requantize."""
    *rest, stored, k = codes.shape
    r = stored if row_index is None else row_index.shape[0]
    shape = (*rest, k, r) if columns else (*rest, r, k)
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    out_scale = torch.empty((*shape[:-1], shape[-1] // 32), dtype=SCALE_DTYPE, device=codes.device)
    if not out.numel():
        return out, out_scale
    turn = columns
    if codes.stride(-1) != 1 and codes.stride(-2) == 1 and row_index is None and group_ends is None:
        # Stored turned: what is along rows here is along columns there, and the result comes out as it lies there.
        codes, scale, block_rows, block_columns = codes.mT, scale.mT, block_columns, block_rows
        r, k, turn = k, r, not turn
    if codes.stride(-1) != 1:
        codes = codes.contiguous()
    codes, scale = codes.flatten(0, -3) if rest else codes[None], scale.flatten(0, -3) if rest else scale[None]
    nr, nc = tile
    grid = (codes.shape[0] * triton.cdiv(r, nr) * triton.cdiv(k, nc),)
    requantize_kernel[grid](
        codes, bytes_of(scale), row_index, group_ends, out, bytes_of(out_scale),
        r, k, 0 if group_ends is None else group_ends.shape[0],
        codes.stride(0), codes.stride(1), *scale.stride(), block_rows, block_columns,
        MODE=mode, TURN=turn, UNIT=math.gcd(32, block_columns), PACK=4 if turn else 1, NR=nr, NC=nc,
        ROWS_FIRST=rows_first, num_warps=num_warps,
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
    num_warps: int,
    rows_first: bool,
) -> None:
    n, k = x.shape[-2:]
    nr, nc = tile
    grid = (x.numel() // (n * k) * triton.cdiv(n, nr) * triton.cdiv(k, nc),)
    quantize_tile_kernel[grid](
        x, codes, None if scale is None else bytes_of(scale), turned, bytes_of(turned_scale), n, k,
        MODE=mode, BLOCK=block, ROWS=codes is not None, PACK=4, NR=nr, NC=nc, ROWS_FIRST=rows_first,
        num_warps=num_warps,
    )  # fmt: skip
