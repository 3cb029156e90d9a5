"""LoRA's GEMMs for groups of rows (`mxep.gemm.lora` has definitions and letters). Each kernel reads its rows once.

    shrink   a program multiplies BLOCK_M rows (all of K) by A of every group among them  -> inner (BLOCK_M, r)
    expand   a program adds inner B^T to BLOCK_M rows x BLOCK_N columns of out, in place
    wgrad    a program contracts all rows of a group for BLOCK_K columns                  -> (r, BLOCK_K)

The kernels are memory-bound: a rank of 16 makes 16 multiply-adds per byte of qdata. So rows are dequantized in
registers. If a scale covers a whole row, it multiplies the sum over K (shrink) or inner (wgrad), not each element.
wgrad is the slowest, probably limited by conversions to bf16 and by shared memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import group_bounds, power_of_two, valid_rows
from mxep.runtime.launch import cdiv, launch, next_power_of_2

SHRINK_TILE, EXPAND_TILE, WGRAD_TILE = (32, 128), (64, 128), (64, 128)
"""Tile sizes, (rows, columns)."""
SHRINK_HOW = {"num_warps": 2, "num_stages": 3}
EXPAND_HOW = {"num_warps": 4}
WGRAD_HOW = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _load_values(
    x_ptr, scale_ptr, source, row_mask, first, K, row_stride, scale_stride, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Load BLOCK_N columns, from column `first` on, of the rows `source`. Returns (rows, BLOCK_N) in DTYPE.

    Masked rows and columns from K on are zeros. If BLOCK is 32, the elements are multiplied by their scales.
    """
    column = first + tl.arange(0, BLOCK_N)[None, :]
    x = tl.load(x_ptr + source[:, None] * row_stride + column, mask=row_mask[:, None] & (column < K), other=0.0)
    if BLOCK == 32:
        block = first // BLOCK + tl.arange(0, BLOCK_N // BLOCK)[None, :]
        mask = row_mask[:, None] & (block < K // BLOCK)
        factor = power_of_two(
            tl.load(scale_ptr + source[:, None] * scale_stride + block, mask=mask, other=0).to(tl.int32)
        )
        blocks = tl.reshape(x.to(tl.float32), (x.shape[0], BLOCK_N // BLOCK, BLOCK)) * factor[:, :, None]
        return tl.reshape(blocks, x.shape).to(DTYPE)
    else:
        return x.to(tl.float32).to(DTYPE)


@triton.jit
def _sources(row, index_ptr, row_mask):
    """Where to read each row: (source rows int64, mask of rows to read). A row with index -1 is all zeros, not read."""
    if index_ptr is None:
        return row.to(tl.int64), row_mask
    else:
        source = tl.load(index_ptr + row, mask=row_mask, other=-1)
        return tl.maximum(source, 0).to(tl.int64), row_mask & (source >= 0)


@triton.jit
def _groups_of(first_row, BLOCK_M: tl.constexpr, offs_ptr, num_groups, GROUPS: tl.constexpr):
    """Range (first, end) of the groups that have rows in first_row .. first_row + BLOCK_M - 1."""
    group = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + group, mask=group < num_groups, other=2**31 - 1)
    first = tl.sum((ends <= first_row).to(tl.int32), axis=0)
    return first, tl.minimum(tl.sum((ends < first_row + BLOCK_M).to(tl.int32), axis=0) + 1, num_groups)


@triton.jit
def lora_shrink_kernel(
    x_ptr, scale_ptr, index_ptr, A_ptr, offs_ptr, out_ptr, num_groups, rows, K, factor, row_stride, scale_stride,
    A_group_stride, A_rank_stride, A_k_stride,
    BLOCK: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK: 32 if a scale covers 32 elements, 1 if it covers a whole row, 0 if x is unquantized."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first_row = tl.program_id(0) * BLOCK_M
    rows = valid_rows(offs_ptr, num_groups, rows)
    if first_row < rows:
        row = first_row + tl.arange(0, BLOCK_M)
        rank = tl.arange(0, BLOCK_R)
        source, mask = _sources(row, index_ptr, row < rows)
        sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        first_group, end_group = _groups_of(first_row, BLOCK_M, offs_ptr, num_groups, GROUPS)
        for g in range(first_group, end_group):
            start, end = group_bounds(g, offs_ptr, num_groups, rows)
            if end > tl.maximum(start, first_row):
                A = A_ptr + tl.cast(g, tl.int64) * A_group_stride
                part = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for k in range(0, K, BLOCK_K):
                    x = _load_values(
                        x_ptr, scale_ptr, source, mask, k, K, row_stride, scale_stride, BLOCK, BLOCK_K, dtype
                    )
                    column = k + tl.arange(0, BLOCK_K)
                    place = rank[None, :] * A_rank_stride + column[:, None].to(tl.int64) * A_k_stride
                    a = tl.load(A + place, mask=(rank < RANK)[None, :] & (column < K)[:, None], other=0.0)
                    part = tl.dot(x, a.to(dtype), part, input_precision="ieee")
                sums = tl.where(((row >= start) & (row < end))[:, None], part, sums)
        if BLOCK == 1:
            scale = tl.load(scale_ptr + source * scale_stride, mask=mask, other=0).to(tl.int32)
            sums *= power_of_two(scale)[:, None]
        out = row.to(tl.int64)[:, None] * RANK + rank[None, :]
        tl.store(out_ptr + out, (sums * factor).to(dtype), mask=(row < rows)[:, None] & (rank < RANK)[None, :])


@triton.jit
def lora_expand_kernel(
    out_ptr, inner_ptr, B_ptr, offs_ptr, num_groups, rows, N, out_stride, B_group_stride, B_n_stride, B_rank_stride,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    first_row = tl.program_id(1) * BLOCK_M
    rows = valid_rows(offs_ptr, num_groups, rows)
    if first_row < rows:
        row = first_row + tl.arange(0, BLOCK_M)
        rank = tl.arange(0, BLOCK_R)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = row.to(tl.int64)[:, None] * RANK + rank[None, :]
        inner = tl.load(inner_ptr + place, mask=(row < rows)[:, None] & (rank < RANK)[None, :], other=0.0)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        first_group, end_group = _groups_of(first_row, BLOCK_M, offs_ptr, num_groups, GROUPS)
        for g in range(first_group, end_group):
            start, end = group_bounds(g, offs_ptr, num_groups, rows)
            if end > tl.maximum(start, first_row):
                B = B_ptr + tl.cast(g, tl.int64) * B_group_stride
                of_b = rank[:, None] * B_rank_stride + column[None, :].to(tl.int64) * B_n_stride
                b = tl.load(B + of_b, mask=(rank < RANK)[:, None] & (column < N)[None, :], other=0.0)
                mine = tl.where(((row >= start) & (row < end))[:, None], inner, 0.0)
                sums = tl.dot(mine, b.to(dtype), sums, input_precision="ieee")
        mask = (row < rows)[:, None] & (column < N)[None, :]
        out = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        sums += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def lora_wgrad_kernel(
    out_ptr, inner_ptr, x_ptr, scale_ptr, index_ptr, offs_ptr, num_groups, rows, K, factor, row_stride, scale_stride,
    out_group_stride, out_rank_stride, out_k_stride,
    BLOCK: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK: as in `lora_shrink_kernel`."""
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    group = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_K
    rank = tl.arange(0, BLOCK_R)
    start, end = group_bounds(group, offs_ptr, num_groups, rows)
    sums = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for row0 in range(start, end, BLOCK_M):
        row = row0 + tl.arange(0, BLOCK_M)
        source, mask = _sources(row, index_ptr, row < end)
        place = row.to(tl.int64)[:, None] * RANK + rank[None, :]
        inner = tl.load(inner_ptr + place, mask=(row < end)[:, None] & (rank < RANK)[None, :], other=0.0)
        if BLOCK == 1:
            scale = tl.load(scale_ptr + source * scale_stride, mask=mask, other=0).to(tl.int32)
            inner = (inner.to(tl.float32) * power_of_two(scale)[:, None]).to(dtype)
        x = _load_values(x_ptr, scale_ptr, source, mask, first, K, row_stride, scale_stride, BLOCK, BLOCK_K, dtype)
        sums = tl.dot(tl.trans(inner), x, sums, input_precision="ieee")
    column = first + tl.arange(0, BLOCK_K)
    place = rank[:, None].to(tl.int64) * out_rank_stride + column[None, :].to(tl.int64) * out_k_stride
    mask = (rank < RANK)[:, None] & (column < K)[None, :]
    out = out_ptr + group.to(tl.int64) * out_group_stride + place
    tl.store(out, (sums * factor).to(out_ptr.dtype.element_ty), mask=mask)


def lora_shrink(x, x_scale, x_index, A, offs, scale, dtype):
    """Launcher of mxep::lora_shrink. `mxep.gemm.lora.lora_shrink` has the types."""
    rows, (groups, rank, k) = len(x if x_index is None else x_index), A.shape
    out = torch.empty((rows, rank), dtype=dtype, device=x.device)
    block_m, block_k = SHRINK_TILE
    if rows:
        launch(lora_shrink_kernel, (cdiv(rows, block_m),),
            *_dense(x, x_scale), x_index, A, offs, out, groups, rows, k, scale, *_strides(x, x_scale), *A.stride(),
            BLOCK=_block(x, x_scale), **_rank(rank), GROUPS=next_power_of_2(groups), BLOCK_M=block_m, BLOCK_K=block_k,
            **SHRINK_HOW,
        )  # fmt: skip
    return out


def lora_expand(out: Tensor, inner: Tensor, B: Tensor, offs: Tensor) -> None:
    (rows, n), (groups, _, rank), (block_m, block_n) = out.shape, B.shape, EXPAND_TILE
    if rows:
        launch(lora_expand_kernel, (cdiv(n, block_n), cdiv(rows, block_m)),
            out, inner, B, offs, groups, rows, n, out.stride(0), *B.stride(),
            **_rank(rank), GROUPS=next_power_of_2(groups), BLOCK_M=block_m, BLOCK_N=block_n, **EXPAND_HOW,
        )  # fmt: skip


def lora_wgrad(out, inner, x, x_scale, x_index, offs, scale):
    (groups, rank, k), (block_m, block_k) = out.shape, WGRAD_TILE
    launch(lora_wgrad_kernel, (cdiv(k, block_k), groups),
        out, inner, *_dense(x, x_scale), x_index, offs, groups, len(inner), k, scale, *_strides(x, x_scale),
        *out.stride(), BLOCK=_block(x, x_scale), **_rank(rank), BLOCK_M=block_m, BLOCK_K=block_k, **WGRAD_HOW,
    )  # fmt: skip


def _dense(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    assert x.stride(1) == 1, "columns are next to each other"
    assert scale is None or scale.shape[1] == 1 or scale.stride(1) == 1, "scales of a row are next to each other"
    return x, scale


def _strides(x: Tensor, scale: Tensor | None) -> tuple[int, int]:
    return x.stride(0), 0 if scale is None else scale.stride(0)


def _block(x: Tensor, scale: Tensor | None) -> int:
    """The kernels' BLOCK (see `lora_shrink_kernel`)."""
    if scale is None:
        return 0
    block = x.shape[1] // scale.shape[1]
    if block == x.shape[1]:
        return 1
    assert block == 32, "scales of 32 elements or of a row"
    return block


def _rank(rank: int) -> dict[str, int]:
    """RANK, and BLOCK_R, its padded size: tl.dot needs powers of two, at least 16."""
    return {"RANK": rank, "BLOCK_R": max(16, next_power_of_2(rank))}
