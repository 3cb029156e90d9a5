"""Requantize qdata to blocks of 32 rows, or dequantize them to values. Both apply a row index and read qdata once.

    qdata (S, K), scales of blocks of any size, row index     a program takes a tile of BLOCK_M rows x BLOCK_N columns
      | fp32 in registers: qdata * 2^(scale - 127)
      |                                dequantize ->  row i of the result, bf16, fp32 or fp16
      | amax of 32 rows per column     requantize ->  qdata (K, R), scale (R/32, K), transposed as in `quantize`

S stored rows, R rows of the result, K columns. Leading axes are a batch. Index -1 gives a row of zeros. dequantize
takes qdata of any strides. It also takes E2M1, which has two columns per byte. On an H200 requantize runs at 0.86 of
copy speed.
"""

import math

import torch
import triton
import triton.language as tl

from mxep.quant.device import half_of_e2m1, on_hopper, power_of_two, valid_rows
from mxep.quant.kernels.quantize import program_tile, quantize_tile_columns
from mxep.quant.shapes import empty_columns, empty_values, picked_shape
from mxep.runtime.launch import cdiv, launch

TILE = (128, 128)
NUM_WARPS = 4


@triton.jit
def requantize_kernel(
    qdata_ptr, scale_ptr, row_index_ptr, offs_ptr, out_ptr, out_scale_ptr, R, K, num_groups, batch_stride, stride,
    scale_batch_stride, scale_stride_row, scale_stride_column, block_rows, block_columns,
    MODE: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """qdata (batch, S, K) with one scale per block_rows x block_columns -> qdata (batch, K, R) in blocks of 32 rows.

    R is a multiple of 32. UNIT divides 32 and block_columns.
    """
    BLOCK_SIZE: tl.constexpr = 32
    PACK: tl.constexpr = 8
    batch, row_tile, column_tile = program_tile(tl.cdiv(R, BLOCK_M), tl.cdiv(K, BLOCK_N), False)
    row0 = row_tile * BLOCK_M
    column0 = column_tile * BLOCK_N
    valid = R
    if offs_ptr is not None:
        # Rounded down to whole blocks. Then rows_left of load_tile and quantize_tile_columns cuts no pack and no block.
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


def requantize(qdata, scale, block_rows, block_columns, row_index, offs, dtype, mode):
    out, out_scale = empty_columns(qdata, dtype, 32, picked_shape(qdata, row_index))
    if not out.numel():
        return out, out_scale
    if qdata.stride(-1) != 1:
        qdata = qdata.contiguous()
    qdata, scale = (x.flatten(0, -3) if x.ndim > 2 else x[None] for x in (qdata, scale))
    k, r = out.shape[-2:]
    block_m, block_n = TILE
    grid = (qdata.shape[0] * cdiv(r, block_m) * cdiv(k, block_n),)
    launch(requantize_kernel, grid,
        qdata, scale, row_index, offs, out, out_scale,
        r, k, 0 if offs is None else offs.shape[0],
        qdata.stride(0), qdata.stride(1), *scale.stride(), block_rows, block_columns,
        MODE=mode, UNIT=math.gcd(32, block_columns), BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=NUM_WARPS, **on_hopper(maxnreg=96 if row_index is None else 80),
    )  # fmt: skip
    return out, out_scale


DEQUANTIZE_TILE = (8, 512)


@triton.jit(do_not_specialize=["rows"])
def dequantize_kernel(
    qdata_ptr, scale_ptr, index_ptr, out_ptr, rows, K, batch_stride, row_stride, column_stride,
    scale_batch_stride, scale_row_stride, scale_column_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """K: bytes per row of qdata. PACKED: a byte holds two columns (E2M1).

    BLOCK_ROWS: rows per scale. BLOCK_COLUMNS: bytes of qdata per scale, along a row.
    """
    tiles = tl.cdiv(K, BLOCK_N)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    batch = tl.program_id(1).to(tl.int64)
    row_mask = row < rows
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=row_mask, other=-1)
    mask = (row_mask & (source >= 0))[:, None] & (column < K)
    source = tl.maximum(source, 0).to(tl.int64)[:, None]
    qdata = tl.load(
        qdata_ptr + batch * batch_stride + source * row_stride + column * column_stride, mask=mask, other=0.0
    )
    place = batch * scale_batch_stride + source // BLOCK_ROWS * scale_row_stride
    scale = tl.load(scale_ptr + place + column // BLOCK_COLUMNS * scale_column_stride, mask=mask, other=0)
    factor = power_of_two(scale.to(tl.int32))
    first = (batch * rows + row.to(tl.int64))[:, None] * K
    out_mask = row_mask[:, None] & (column < K)
    if PACKED:
        code = qdata.to(tl.int32)
        values = tl.join(
            half_of_e2m1(code & 15).to(tl.float32) * factor, half_of_e2m1(code >> 4).to(tl.float32) * factor
        )
        place = (first + column)[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=out_mask[:, :, None])
    else:
        values = qdata.to(tl.float32) * factor
        tl.store(out_ptr + first + column, values.to(out_ptr.dtype.element_ty), mask=out_mask)


def dequantize(qdata, scale, block_rows, block_columns, row_index, dtype):
    out = empty_values(qdata, row_index, dtype)
    rows, k = out.shape[-2], qdata.shape[-1]
    if out.numel():
        if packed := qdata.dtype == torch.float4_e2m1fn_x2:
            qdata, block_columns = qdata.view(torch.uint8), block_columns // 2
        qdata, scale = qdata.reshape(-1, *qdata.shape[-2:]), scale.reshape(-1, *scale.shape[-2:])
        block_m, block_n = DEQUANTIZE_TILE
        grid = (cdiv(rows, block_m) * cdiv(k, block_n), qdata.shape[0])
        launch(dequantize_kernel, grid,
            qdata, scale, row_index, out, rows, k, *qdata.stride(), *scale.stride(),
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, PACKED=packed, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
