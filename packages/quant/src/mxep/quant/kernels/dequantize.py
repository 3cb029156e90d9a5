"""Dequantize: qdata times their scales, rounded once, in one read and one write. Rows by an index, if there is one.

    qdata row index[i] (or i; -1: zeros)    a program takes BLOCK_M rows x BLOCK_N columns
      | value * 2^(scale - 127) in fp32     -> row i of the result, bf16, fp32 or fp16

Strides are free, so qdata may lie in receive slots, or along N. E2M1 bytes hold two columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import as_bytes, half_of_e2m1, power_of_two
from mxep.quant.shapes import num_rows
from mxep.runtime.launch import cdiv, launch

TILE = (8, 512)
NUM_WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def dequantize_kernel(
    qdata_ptr, scale_ptr, index_ptr, out_ptr, rows, K, batch_stride, row_stride, column_stride,
    scale_batch_stride, scale_row_stride, scale_column_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """K: bytes of a row, which hold two columns each if PACKED. BLOCK_ROWS, BLOCK_COLUMNS: bytes per scale."""
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


def dequantize(
    qdata: Tensor, scale: Tensor, block_rows: int, block_columns: int, row_index: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """mxep::dequantize."""
    return _dequantize(qdata, scale, row_index, dtype, block_rows, block_columns, 1)


def dequantize_e2m1(qdata: Tensor, scale: Tensor, row_index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """mxep::dequantize_e2m1."""
    return _dequantize(as_bytes(qdata), scale, row_index, dtype, 1, qdata.shape[-1] // scale.shape[-1], 2)


def _dequantize(
    qdata: Tensor,
    scale: Tensor,
    row_index: Tensor | None,
    dtype: torch.dtype,
    block_rows: int,
    block_columns: int,
    per_byte: int,
) -> Tensor:
    rows, k = num_rows(qdata, row_index), qdata.shape[-1]
    out = torch.empty((*qdata.shape[:-2], rows, per_byte * k), dtype=dtype, device=qdata.device)
    if out.numel():
        qdata, scale = qdata.reshape(-1, *qdata.shape[-2:]), as_bytes(scale).reshape(-1, *scale.shape[-2:])
        block_m, block_n = TILE
        grid = (cdiv(rows, block_m) * cdiv(k, block_n), qdata.shape[0])
        launch(dequantize_kernel, grid,
            qdata, scale, row_index, out, rows, k, *qdata.stride(), *scale.stride(),
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, PACKED=per_byte == 2, BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
