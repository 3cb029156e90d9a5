"""Requantize: qdata and scales blocked in any way, gathered or not, to blocks of 32 rows.

    qdata (S, K), their scales                  a program takes a tile of NR rows x NC columns
      | fp32 in registers: qdata * 2^(byte - 127)
      | amax of 32 rows a column                -> qdata (K, R), scale (R / 32, K)

As `columns`, but for what it reads. Leading axes are a batch.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE
from mxep.quant.kernels import on_hopper
from mxep.quant.kernels.bounds import valid_rows
from mxep.quant.kernels.numbers import bytes_of, power_of_two
from mxep.quant.kernels.tile import place_of, put_columns

TILE = (128, 128)
NUM_WARPS = 4


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
    UNIT: tl.constexpr,
    NR: tl.constexpr,
    NC: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """qdata (batch, S, K), a scale for block_rows x block_columns of them -> blocks of 32 rows, transposed. R is a
    multiple of 32, UNIT divides 32 and block_columns."""
    BLOCK: tl.constexpr = 32
    PACK: tl.constexpr = 8
    batch, row_tile, column_tile = place_of(tl.cdiv(R, NR), tl.cdiv(K, NC), ROWS_FIRST)
    row0 = row_tile * NR
    column0 = column_tile * NC
    valid = R
    if group_ends_ptr is not None:
        valid = valid_rows(group_ends_ptr, num_groups, R) // BLOCK * BLOCK  # packs and blocks lie inside or outside
        if row0 >= valid:
            return
    rows_left = valid - row0
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
        qdata = tl.load(codes_ptr + source.to(tl.int64) * stride, mask=there & (column < columns_left), other=0.0)
        byte = tl.load(
            scale_ptr + (source // block_rows).to(tl.int64) * scale_stride_row,
            mask=there & (unit < columns_left),
            other=0,
        )
        source += 1
        x = tl.reshape(qdata.to(tl.float32), (NR // PACK, NC // UNIT, UNIT))
        x = x * power_of_two(byte.to(tl.int32))[:, :, None]
        tile = tile + (tl.reshape(x, (NR // PACK, NC)),)
    first = batch * R * K
    out_ptr += first + column0.to(tl.int64) * R + row0
    out_scale_ptr += (batch * R + row0) // BLOCK * K + column0
    put_columns(tile, out_ptr, out_scale_ptr, R, K, rows_left, columns_left, MODE, BLOCK)


def requantize(
    qdata: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    row_index: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    mode: str,
    *,
    tile: tuple[int, int] = TILE,
    rows_first: bool = False,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """mxep::requantize."""
    *rest, stored, k = qdata.shape
    r = stored if row_index is None else row_index.shape[0]
    out = torch.empty((*rest, k, r), dtype=dtype, device=qdata.device)
    out_scale = torch.empty((*rest, r // 32, k), dtype=SCALE_DTYPE, device=qdata.device)
    if not out.numel():
        return out, out_scale
    if qdata.stride(-1) != 1:
        qdata = qdata.contiguous()
    qdata, scale = qdata.flatten(0, -3) if rest else qdata[None], scale.flatten(0, -3) if rest else scale[None]
    options = {"num_warps": NUM_WARPS} | on_hopper(maxnreg=96 if row_index is None else 80) | options
    nr, nc = tile
    grid = (qdata.shape[0] * triton.cdiv(r, nr) * triton.cdiv(k, nc),)
    requantize_kernel[grid](
        qdata, bytes_of(scale), row_index, offs, out, bytes_of(out_scale),
        r, k, 0 if offs is None else offs.shape[0],
        qdata.stride(0), qdata.stride(1), *scale.stride(), block_rows, block_columns,
        MODE=mode, UNIT=math.gcd(32, block_columns), NR=nr, NC=nc, ROWS_FIRST=rows_first, **options,
    )  # fmt: skip
    return out, out_scale
