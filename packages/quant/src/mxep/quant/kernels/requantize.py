"""Requantize: qdata and scales blocked in any way, gathered or not, to blocks of 32 rows.

    qdata (S, K), their scales                  a program takes a tile of BLOCK_M rows x BLOCK_N columns
      | fp32 in registers: qdata * 2^(scale - 127)
      | amax of 32 rows per column              -> qdata (K, R), scale (R / 32, K)

Like `columns`, except for its input. Leading axes are a batch.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import as_bytes, on_hopper, power_of_two, valid_rows
from mxep.quant.kernels.tile import program_tile, quantize_tile_columns
from mxep.quant.shapes import empty_columns, picked_shape
from mxep.runtime.launch import cdiv, launch

TILE = (128, 128)
NUM_WARPS = 4


@triton.jit
def requantize_kernel(
    qdata_ptr, scale_ptr, row_index_ptr, offs_ptr, out_ptr, out_scale_ptr, R, K, num_groups, batch_stride, stride,
    scale_batch_stride, scale_stride_row, scale_stride_column, block_rows, block_columns,
    MODE: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """qdata (batch, S, K), one scale per block_rows x block_columns of them -> blocks of 32 rows, transposed. R is a
    multiple of 32. UNIT divides 32 and block_columns."""
    BLOCK_SIZE: tl.constexpr = 32
    PACK: tl.constexpr = 8
    batch, row_tile, column_tile = program_tile(tl.cdiv(R, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row0 = row_tile * BLOCK_M
    column0 = column_tile * BLOCK_N
    valid = R
    if offs_ptr is not None:
        # Each pack and each block is wholly inside or wholly outside.
        valid = valid_rows(offs_ptr, num_groups, R) // BLOCK_SIZE * BLOCK_SIZE
        if row0 >= valid:
            return
    rows_left = valid - row0
    columns_left = K - column0
    row = PACK * tl.arange(0, BLOCK_M // PACK)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    unit = UNIT * tl.arange(0, BLOCK_N // UNIT)[None, :]
    qdata_ptr += batch * batch_stride + column0 + column
    scale_ptr += batch * scale_batch_stride + ((column0 + unit) // block_columns).to(tl.int64) * scale_stride_column
    mask = row < rows_left
    source = row0 + row
    tile = ()
    for i in tl.static_range(PACK):
        if row_index_ptr is not None:
            source = tl.load(row_index_ptr + row0 + row + i, mask=row < rows_left, other=-1)
            mask = source >= 0
        qdata = tl.load(qdata_ptr + source.to(tl.int64) * stride, mask=mask & (column < columns_left), other=0.0)
        scale_ptrs = scale_ptr + (source // block_rows).to(tl.int64) * scale_stride_row
        scale = tl.load(scale_ptrs, mask=mask & (unit < columns_left), other=0)
        source += 1
        x = tl.reshape(qdata.to(tl.float32), (BLOCK_M // PACK, BLOCK_N // UNIT, UNIT))
        x = x * power_of_two(scale.to(tl.int32))[:, :, None]
        tile = tile + (tl.reshape(x, (BLOCK_M // PACK, BLOCK_N)),)
    first = batch * R * K
    out_ptr += first + column0.to(tl.int64) * R + row0
    out_scale_ptr += (batch * R + row0) // BLOCK_SIZE * K + column0
    quantize_tile_columns(tile, out_ptr, out_scale_ptr, R, K, rows_left, columns_left, MODE, BLOCK_SIZE)


def requantize(
    qdata: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    row_index: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    mode: str,
) -> tuple[Tensor, Tensor]:
    """mxep::requantize."""
    out, out_scale = empty_columns(qdata, dtype, 32, picked_shape(qdata, row_index))
    if not out.numel():
        return out, out_scale
    if qdata.stride(-1) != 1:
        qdata = qdata.contiguous()
    qdata, scale = (x.flatten(0, -3) if x.ndim > 2 else x[None] for x in (qdata, as_bytes(scale)))
    k, r = out.shape[-2:]
    block_m, block_n = TILE
    grid = (qdata.shape[0] * cdiv(r, block_m) * cdiv(k, block_n),)
    launch(requantize_kernel, grid,
        qdata, scale, row_index, offs, out, as_bytes(out_scale),
        r, k, 0 if offs is None else offs.shape[0],
        qdata.stride(0), qdata.stride(1), *scale.stride(), block_rows, block_columns,
        MODE=mode, UNIT=math.gcd(32, block_columns), BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=NUM_WARPS, **on_hopper(maxnreg=96 if row_index is None else 80),
    )  # fmt: skip
    return out, out_scale
