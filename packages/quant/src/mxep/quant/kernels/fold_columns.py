"""Fold along the other axis: shifts a weight's scales into its qdata for given column scales, transposed on the way.

    qdata (N, K), one scale per block of a row        a program takes a tile of BLOCK_M rows x BLOCK_N columns
      | qdata * 2^(scale - column_scale)              -> folded (K, N)

One read and one write: the column scales of a frozen weight are known beforehand. Values go through fp16, two to an
instruction, which is exact if the cast to E4M3 leaves any value (`mxep.quant.device.shifted`). E2M1 is decoded as it is
read; even and odd columns, which share bytes, are stored as two tiles. Leading axes are a batch.

Speed on an H100, relative to a copy that moves as many bytes (integration/benchmarks/frozen.py): E4M3 0.90 to 0.95,
E2M1 0.79 to 0.83.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import NAN_SCALE, as_bytes, half_of_e2m1
from mxep.quant.kernels.tile import program_tile, store_transposed
from mxep.runtime.launch import cdiv, launch

TILE = (64, 256)
PACKED_TILE = (64, 128)
NUM_WARPS = 4


@triton.jit
def _power(exponent, is_nan, dtype: tl.constexpr):
    """2**exponent as `dtype`, fp16 or fp32, or NaN. fp16: exponents -24 to 15, fp32: -64 to 64."""
    bits = tl.where(is_nan, 0x7FC00000, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _scaled(values, exponent, is_nan, ROWS: tl.constexpr):
    """values (R, B, n), fp16 or fp32, * 2**exponent (R, B), or NaN; as (R, B * n).

    ROWS: rows were folded before. Then exponents may be above 15, of numbers below 2**-6: a row's scale is far above
    the column's. Below 2**-24 nothing of E4M3 is left; E5M2 takes fp32.
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
    """BLOCK: elements per scale along a row, 32 or K. PACKED: qdata are bytes of two E2M1 codes."""
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
    """mxep::fold_columns."""
    packed = qdata.dtype == torch.float4_e2m1fn_x2
    dtype = torch.float8_e4m3fn if packed else qdata.dtype
    n, k = qdata.shape[-2], qdata.shape[-1] * (2 if packed else 1)
    folded = torch.empty((*qdata.shape[:-2], k, n), dtype=dtype, device=qdata.device)
    if folded.numel():
        qdata, scale = qdata.contiguous(), as_bytes(scale).contiguous()
        block_m, block_n = PACKED_TILE if packed else TILE
        grid = (folded.numel() // (n * k) * cdiv(n, block_m) * cdiv(k, block_n),)
        launch(fold_columns_kernel, grid,
            as_bytes(qdata) if packed else qdata, scale, as_bytes(column_scale).contiguous(), folded, n, k,
            BLOCK=k // scale.shape[-1], PACKED=packed, PACK=1 if n % 8 else 8, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return folded
