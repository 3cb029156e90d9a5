"""Quantize along columns, transposed on the way.

    x (N, K)                                    a program takes a tile of BLOCK_M rows x BLOCK_N columns
      | amax of BLOCK_SIZE rows per column      -> qdata (K, N), scale (N / BLOCK_SIZE, K)

Values are read once, as a tuple of packed rows: see `tile`. Leading axes are a batch. If a block is longer than a tile,
it takes two kernels: amax first, then the qdata.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import abs_bits, as_bytes, reciprocal, scale_of_amax
from mxep.quant.kernels.tile import load_tile, program_tile, quantize_tile_columns, store_transposed
from mxep.quant.shapes import empty_columns
from mxep.runtime.launch import cdiv, launch

TILE = (256, 64)
LONG_TILE = (64, 128)
NUM_WARPS = 8


@triton.jit
def quantize_tile_kernel(
    x_ptr, qdata_ptr, scale_ptr, N, K,
    MODE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x (batch, N, K) -> qdata (batch, K, N), scale (batch, N / BLOCK_SIZE, K)."""
    PACK: tl.constexpr = 8
    batch, row_tile, column_tile = program_tile(tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row0 = (row_tile * BLOCK_M).to(tl.int64)
    column0 = column_tile * BLOCK_N
    rows_left = N - row_tile * BLOCK_M
    columns_left = K - column0
    row = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    first = batch * N * K
    tile = load_tile(x_ptr + first + row0 * K + column0, row, column, K, rows_left, columns_left, PACK)
    qdata_ptr += first + column0.to(tl.int64) * N + row0
    scale_ptr += (batch * N + row0) // BLOCK_SIZE * K + column0
    quantize_tile_columns(tile, qdata_ptr, scale_ptr, N, K, rows_left, columns_left, MODE, BLOCK_SIZE)


@triton.jit
def column_amax_kernel(x_ptr, bits_ptr, length, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """bits (segments, K) = the amax bits of each column of x (segments, length, K); bits start at 0."""
    segment, row_tile, column_tile = program_tile(tl.cdiv(length, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < K
    offsets = (segment * length + row)[:, None] * K + column[None, :]
    x = tl.load(x_ptr + offsets, mask=(row < length)[:, None] & mask[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr + segment * K + column, tl.max(abs_bits(x), axis=0), mask=mask, sem="relaxed")


@triton.jit
def quantize_long_columns_kernel(
    x_ptr, bits_ptr, qdata_ptr, scale_ptr, length, N, K, all_rows, MODE: tl.constexpr, PACK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x (segments, length, K), bits (segments, K) -> qdata (batch, K, N), scale (segments, K).

    bits: amax bits. They may have a sign, from a NaN that torch made or from -0.
    all_rows: length of a column of qdata if it holds other parts, too. None if not.
    """
    segment, row_tile, column_tile = program_tile(tl.cdiv(length, BLOCK_M), tl.cdiv(K, BLOCK_N), True)
    batch = segment // (N // length)
    within = segment % (N // length)
    row0 = row_tile * BLOCK_M
    column0 = column_tile * BLOCK_N
    column = tl.arange(0, BLOCK_N)[None, :]
    mask = column < K - column0
    bits = tl.load(bits_ptr + segment * K + column0 + column, mask=mask, other=0) & 0x7FFFFFFF
    scale = scale_of_amax(bits, MODE, qdata_ptr.dtype.element_ty)
    row = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    x_ptr += (segment * length + row0) * K + column0
    tile = load_tile(x_ptr, row, column, K, length - row0, K - column0, PACK)
    scaled = ()
    for i in tl.static_range(PACK):
        scaled = scaled + (tile[i].to(tl.float32) * reciprocal(scale),)
    stride = N if all_rows is None else all_rows
    qdata_ptr += (batch * K + column0) * stride + within * length + row0
    store_transposed(scaled, qdata_ptr, stride, length - row0, K - column0)
    if row_tile == 0:
        tl.store(scale_ptr + segment * K + column0 + column, scale.to(tl.uint8), mask=mask)


def quantize_columns(x: Tensor, dtype: torch.dtype, mode: str, block_size: int) -> tuple[Tensor, Tensor]:
    """mxep::quantize_columns."""
    x = x.contiguous()
    qdata, scale = empty_columns(x, dtype, block_size)
    if not x.numel():
        return qdata, scale
    n, k = x.shape[-2:]
    if 16 <= block_size <= min(TILE) and block_size & (block_size - 1) == 0:  # blocks fill a tile
        block_m, block_n = TILE
        grid = (x.numel() // (n * k) * cdiv(n, block_m) * cdiv(k, block_n),)
        launch(quantize_tile_kernel, grid,
            x, qdata, as_bytes(scale), n, k, MODE=mode, BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        return qdata, scale
    bits = torch.zeros((x.numel() // (block_size * k), k), dtype=torch.int32, device=x.device)
    column_amax(x, bits, block_size)
    quantize_long_columns(x, bits, qdata, scale, mode, block_size)
    return qdata, scale


def column_amax(x: Tensor, bits: Tensor, block_size: int) -> None:
    """Write to bits (..., K), zeros: amax bits of each block of a column of x (..., N, K) contiguous."""
    k = x.shape[-1]
    block_m, block_n = TILE
    if bits.numel() and block_size:
        grid = (bits.numel() // k * cdiv(block_size, block_m) * cdiv(k, block_n),)
        launch(column_amax_kernel, grid, x, bits, block_size, k, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=NUM_WARPS)


def quantize_long_columns(x: Tensor, bits: Tensor, qdata: Tensor, scale: Tensor, mode: str, block_size: int) -> None:
    """quantize_columns of x (..., N, K) contiguous, given its columns' amax bits (segments, K). Writes qdata, scale.

    qdata: (..., K, N), or these columns of a wider one.
    """
    n, k = x.shape[-2:]
    block_m, block_n = LONG_TILE
    width = qdata.stride(-2)
    packed = block_size % 8 == width % 8 == qdata.storage_offset() % 8 == 0
    grid = (bits.shape[0] * cdiv(block_size, block_m) * cdiv(k, block_n),)
    launch(quantize_long_columns_kernel, grid,
        x, bits, qdata, as_bytes(scale), block_size, n, k, None if width == n else width, MODE=mode,
        PACK=8 if packed else 1, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=NUM_WARPS,
    )  # fmt: skip
