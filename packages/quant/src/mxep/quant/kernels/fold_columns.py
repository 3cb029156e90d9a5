"""Fold along the other axis: shifts a weight's scales into its qdata for given column scales, transposed on the way.

    qdata (N, K), one scale per block of a row        a program takes a tile of BLOCK_M rows x BLOCK_N columns
      | qdata * 2^(scale - column_scale)              -> folded (K, N)

One read and one write: the column scales of a frozen weight are known beforehand. E2M1 is decoded as it is read. Values
go through fp32, where the product is exact, so the cast rounds once. Leading axes are a batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import NAN_SCALE, as_bytes
from mxep.quant.kernels.tile import load_tile, program_tile, store_transposed
from mxep.runtime.launch import cdiv, launch

TILE = (64, 128)
NUM_WARPS = 8


@triton.jit
def _power(exponent):
    """2**exponent in fp32. Beyond 2**-64 every code flushes, and above 2**64 there are only zeros."""
    exponent = tl.minimum(tl.maximum(exponent, -64), 64)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _value_of_e2m1(code):
    """Values (fp32) of E2M1 codes (int32, 0 to 15)."""
    magnitude = code & 7
    bits = ((126 + (magnitude >> 1)) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude > 1, bits, magnitude * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def fold_columns_kernel(
    qdata_ptr, scale_ptr, column_scale_ptr, folded_ptr, N, K,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK: elements per scale along a row, 32 or K. PACKED: qdata are bytes of two E2M1 codes."""
    batch, row_tile, column_tile = program_tile(tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row0 = (row_tile * BLOCK_M).to(tl.int64)
    column0 = column_tile * BLOCK_N
    rows_left = N - row_tile * BLOCK_M
    columns_left = K - column0
    row = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    if PACKED:
        qdata_ptr += batch * N * (K // 2) + row0 * (K // 2) + column0 // 2
        tile = load_tile(
            qdata_ptr, row, tl.arange(0, BLOCK_N // 2)[None, :], K // 2, rows_left, columns_left // 2, PACK
        )
    else:
        tile = load_tile(qdata_ptr + batch * N * K + row0 * K + column0, row, column, K, rows_left, columns_left, PACK)
    top_ptr = column_scale_ptr + batch * (K // 32) + (column0 + column) // 32
    top = tl.load(top_ptr, mask=column < columns_left, other=0).to(tl.int32)
    top = tl.where(top == NAN_SCALE, 1 << 20, top)
    blocks = K // BLOCK
    scale_ptr += (batch * N + row0) * blocks + (column0 + column) // BLOCK + row.to(tl.int64) * blocks
    mask = (row < rows_left) & (column < columns_left)
    shifted = ()
    for i in tl.static_range(PACK):
        scale = tl.load(scale_ptr + i * blocks, mask=mask, other=0).to(tl.int32)
        if PACKED:
            codes = tile[i].to(tl.int32)
            codes = tl.reshape(tl.join(codes & 15, codes >> 4), (BLOCK_M // PACK, BLOCK_N))
            values = _value_of_e2m1(codes)
        else:
            values = tile[i].to(tl.float32)
        values = values * _power(scale - top)
        shifted = shifted + (tl.where(top > 255, float("nan"), values),)
    store_transposed(shifted, folded_ptr + batch * N * K + column0.to(tl.int64) * N + row0, N, rows_left, columns_left)


def fold_columns(qdata: Tensor, scale: Tensor, column_scale: Tensor) -> Tensor:
    """mxep::fold_columns."""
    packed = qdata.dtype == torch.float4_e2m1fn_x2
    dtype = torch.float8_e4m3fn if packed else qdata.dtype
    n, k = qdata.shape[-2], qdata.shape[-1] * (2 if packed else 1)
    folded = torch.empty((*qdata.shape[:-2], k, n), dtype=dtype, device=qdata.device)
    if folded.numel():
        qdata, scale = qdata.contiguous(), as_bytes(scale).contiguous()
        block_m, block_n = TILE
        grid = (folded.numel() // (n * k) * cdiv(n, block_m) * cdiv(k, block_n),)
        launch(fold_columns_kernel, grid,
            as_bytes(qdata) if packed else qdata, scale, as_bytes(column_scale).contiguous(), folded, n, k,
            BLOCK=k // scale.shape[-1], PACKED=packed, PACK=1 if n % 8 else 8, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return folded
