"""Quantize along columns, transposed on the way, alone or with rows of the same read.

    x (N, K)                                    a program takes a tile of NR rows x NC columns
      | amax of BLOCK rows a column             -> qdata (K, N), scale (N / BLOCK, K)
      | amax of BLOCK columns a row             -> qdata (N, K), scale (K / BLOCK, N)

Values are read once, as a tuple of packed rows: see `transpose`; `tile` quantizes them. Leading axes are a batch. A
column whose block is longer than a tile takes two kernels: magnitudes first, then the qdata.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels import on_hopper, rows
from mxep.quant.kernels.numbers import abs_bits, bytes_of, reciprocal, scale_byte
from mxep.quant.kernels.tile import place_of, put_columns, put_rows
from mxep.quant.kernels.transpose import load_tile, store_transposed

TILE = (256, 64)
LONG_TILE = (64, 128)
NUM_WARPS = 8


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
    batch, row_tile, column_tile = place_of(tl.cdiv(N, NR), tl.cdiv(K, NC), ROWS_FIRST)
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
        put_rows(tile, row, rows_ptr, rows_scale_ptr, K, 1, N, rows_left, columns_left, MODE, BLOCK)
    columns_ptr += first + column0.to(tl.int64) * N + row0
    columns_scale_ptr += (batch * N + row0) // BLOCK * K + column0
    put_columns(tile, columns_ptr, columns_scale_ptr, N, K, rows_left, columns_left, MODE, BLOCK)


@triton.jit
def column_amax_kernel(x_ptr, bits_ptr, length, K, NR: tl.constexpr, NC: tl.constexpr):
    """bits (segments, K) = the largest magnitude bits of each column of x (segments, length, K); bits start at 0."""
    segment, row_tile, column_tile = place_of(tl.cdiv(length, NR), tl.cdiv(K, NC), False)
    row = row_tile * NR + tl.arange(0, NR)
    column = column_tile * NC + tl.arange(0, NC)
    there = column < K
    place = (segment * length + row)[:, None] * K + column[None, :]
    x = tl.load(x_ptr + place, mask=(row < length)[:, None] & there[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr + segment * K + column, tl.max(abs_bits(x), axis=0), mask=there, sem="relaxed")


@triton.jit
def quantize_long_columns_kernel(
    x_ptr, bits_ptr, codes_ptr, scale_ptr, length, N, K, MODE: tl.constexpr, PACK: tl.constexpr, NR: tl.constexpr,
    NC: tl.constexpr,
):  # fmt: skip
    """x (segments, length, K), bits (segments, K) -> qdata (batch, K, N), scale (segments, K)."""
    segment, row_tile, column_tile = place_of(tl.cdiv(length, NR), tl.cdiv(K, NC), True)
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
    store_transposed(scaled, codes_ptr, N, length - row0, K - column0)
    if row_tile == 0:
        tl.store(scale_ptr + segment * K + column0 + column, byte.to(tl.uint8), mask=there)


def quantize_columns(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block_size: int,
    *,
    tile: tuple[int, int] = TILE,
    rows_first: bool = False,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_columns."""
    x = x.contiguous()
    *rest, n, k = x.shape
    qdata = torch.empty((*rest, k, n), dtype=dtype, device=x.device)
    scale = torch.empty((*rest, n // block_size, k), dtype=SCALE_DTYPE, device=x.device)
    if not x.numel():
        return qdata, scale
    options = {"num_warps": NUM_WARPS} | options
    if _fits(block_size, tile):
        _quantize_tile(x, None, None, qdata, scale, mode, block_size, tile, rows_first, options)
        return qdata, scale
    bits = torch.zeros((x.numel() // (block_size * k), k), dtype=torch.int32, device=x.device)
    column_amax(x, bits, block_size, tile=tile, **options)
    put_long_columns(x, bits, qdata, scale, mode, block_size, tile=tile, **options)
    return qdata, scale


def column_amax(x: Tensor, bits: Tensor, block_size: int, *, tile: tuple[int, int] = TILE, **options: int) -> None:
    """Into bits (..., K), zeros: the largest magnitude bits of each block of a column of x (..., N, K) contiguous."""
    k = x.shape[-1]
    nr, nc = tile
    grid = (bits.numel() // k * triton.cdiv(block_size, nr) * triton.cdiv(k, nc),) if k else (0,)
    if grid[0]:
        options = {"num_warps": NUM_WARPS} | options
        column_amax_kernel[grid](x, bits, block_size, k, NR=nr, NC=nc, **options)


def put_long_columns(
    x: Tensor,
    bits: Tensor,
    qdata: Tensor,
    scale: Tensor,
    mode: str,
    block_size: int,
    *,
    tile: tuple[int, int] = LONG_TILE,
    **options: int,
) -> None:
    """qdata, scale of quantize_columns, of x (..., N, K) contiguous and its columns' magnitude bits (segments, K)."""
    n, k = x.shape[-2:]
    nr, nc = tile
    grid = (bits.shape[0] * triton.cdiv(block_size, nr) * triton.cdiv(k, nc),)
    quantize_long_columns_kernel[grid](
        x, bits, qdata, bytes_of(scale), block_size, n, k, MODE=mode,
        PACK=8 if block_size % 8 == 0 else 1, NR=nr, NC=nc,
        **{"num_warps": NUM_WARPS} | options,
    )  # fmt: skip


def quantize_both(
    x: Tensor,
    dtype: torch.dtype,
    mode: str,
    block_size: int,
    *,
    tile: tuple[int, int] = TILE,
    rows_first: bool = False,
    **options: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mxep::quantize_both."""
    if not _fits(block_size, tile):
        qdata, scale = rows.quantize_rows(x, dtype, mode, block_size)
        return qdata, scale.mT.contiguous(), *quantize_columns(x, dtype, mode, block_size)
    x = x.contiguous()
    *rest, n, k = x.shape
    qdata = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*rest, k // block_size, n), dtype=SCALE_DTYPE, device=x.device)
    transposed = torch.empty((*rest, k, n), dtype=dtype, device=x.device)
    turned_scale = torch.empty((*rest, n // block_size, k), dtype=SCALE_DTYPE, device=x.device)
    capped = on_hopper(maxnreg=80) if x.element_size() == 2 else {}  # fp32 would spill
    options = {"num_warps": NUM_WARPS} | capped | options
    if x.numel():
        _quantize_tile(x, qdata, scale, transposed, turned_scale, mode, block_size, tile, rows_first, options)
    return qdata, scale, transposed, turned_scale


def _fits(block_size: int, tile: tuple[int, int]) -> bool:
    return 16 <= block_size <= min(tile) and block_size & (block_size - 1) == 0


def _quantize_tile(
    x: Tensor,
    qdata: Tensor | None,
    scale: Tensor | None,
    transposed: Tensor,
    turned_scale: Tensor,
    mode: str,
    block_size: int,
    tile: tuple[int, int],
    rows_first: bool,
    options: dict[str, int],
) -> None:
    n, k = x.shape[-2:]
    nr, nc = tile
    grid = (x.numel() // (n * k) * triton.cdiv(n, nr) * triton.cdiv(k, nc),)
    quantize_tile_kernel[grid](
        x, qdata, None if scale is None else bytes_of(scale), transposed, bytes_of(turned_scale), n, k,
        MODE=mode, BLOCK=block_size, NR=nr, NC=nc, ROWS_FIRST=rows_first,
        **options,
    )  # fmt: skip
