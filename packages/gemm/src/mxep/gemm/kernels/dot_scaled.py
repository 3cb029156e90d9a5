"""MXFP8 GEMMs over ragged groups by `tl.dot_scaled`: one persistent kernel per GEMM, offs read on the device.

    grouped_mm     out (M, N)     = a (M, C) times w[g] (N, C)^T, for each group g of rows    forward, dgrad
    grouped_wgrad  dw[g] (N, K)   = y (N, M) times x (K, M)^T, over the tokens of group g     wgrad

Tiles (BLOCK_M x BLOCK_N) are numbered through all groups in order. Program t computes tiles t, t + programs, and so
on. A tile belongs to one group, and an empty group has no tiles. Within a group, numbers run through all columns of
GROUP_M row tiles before the next GROUP_M row tiles begin. So concurrent programs share rows of both operands in L2.
Example: groups of 256, 0 and 32 rows, BLOCK_M 128, two column tiles: tiles 0 to 3 belong to group 0, tiles 4 and 5 to
group 2.

A step of a tile's loop takes BLOCK_K = 128 qdata and 4 scales of each row. Rows past the group's end, and columns past
the contraction's end, are masked instead of read: qdata 0, scale 2**-127. Blackwell's tensor cores multiply qdata by
their scales (tcgen05.mma.block_scale). Other GPUs convert the scaled qdata to bf16 first. Both accumulate in fp32.

M rows of all groups (capacity), N out features, K in features, G groups, C contracted size. Strides are in elements.
"""

import os

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from mxep.quant.device import group_bounds, num_sms
from mxep.runtime.launch import cdiv, launch, next_power_of_2

BLOCK = tl.constexpr(32)


@triton.jit
def _tile_of(tile, tiles_before, tiles, columns, GROUP_M: tl.constexpr, group):
    """(group, row tile, column tile) of tile number `tile`.

    tiles: (GROUPS,) number of row tiles of each group. tiles_before: (GROUPS,) row tiles of all groups before it.
    """
    mask = (tile >= tiles_before * columns) & (tile < (tiles_before + tiles) * columns)
    g = tl.sum(tl.where(mask, group, 0))
    within = tile - tl.sum(tl.where(mask, tiles_before, 0)) * columns
    height = tl.sum(tl.where(mask, tiles, 0))
    first = within // (GROUP_M * columns) * GROUP_M
    rows = tl.minimum(height - first, GROUP_M)
    within -= first * columns
    return g, first + within % rows, within // rows


@triton.jit
def _product(
    a_ptr, a_scale_ptr, a_mask, a_stride, a_scale_stride, b_ptr, b_scale_ptr, b_mask, b_stride, b_scale_stride,
    length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of a by BLOCK_N rows of b, contracted over `length`. Returns (BLOCK_M, BLOCK_N) fp32.

    a_ptr (BLOCK_M, 1), b_ptr (BLOCK_N, 1): the rows' first elements. Strides lead from element to element of a row.
    """
    A_FORMAT: tl.constexpr = "e4m3" if a_ptr.dtype.scalar.element_ty == tl.float8e4nv else "e5m2"
    B_FORMAT: tl.constexpr = "e4m3" if b_ptr.dtype.scalar.element_ty == tl.float8e4nv else "e5m2"
    k = tl.arange(0, BLOCK_K)[None, :]
    block = tl.arange(0, BLOCK_K // BLOCK)[None, :]
    a_ptr += k * a_stride
    b_ptr += k * b_stride
    a_scale_ptr += block * a_scale_stride
    b_scale_ptr += block * b_scale_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, length, BLOCK_K):
        left = length - k0
        a = tl.load(a_ptr, mask=a_mask & (k < left), other=0.0)
        b = tl.load(b_ptr, mask=b_mask & (k < left), other=0.0)
        a_scale = tl.load(a_scale_ptr, mask=a_mask & (block * BLOCK < left), other=0)
        b_scale = tl.load(b_scale_ptr, mask=b_mask & (block * BLOCK < left), other=0)
        sums = tl.dot_scaled(a, a_scale, A_FORMAT, tl.trans(b), b_scale, B_FORMAT, sums)
        a_ptr += BLOCK_K * a_stride
        b_ptr += BLOCK_K * b_stride
        a_scale_ptr += BLOCK_K // BLOCK * a_scale_stride
        b_scale_ptr += BLOCK_K // BLOCK * b_scale_stride
    return sums


@triton.jit
def _halves(x):
    BLOCK_M: tl.constexpr = x.shape[0]
    BLOCK_N: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _quarters(x):
    """Split the columns of x into four parts. Storing part after part needs fewer registers."""
    left, right = _halves(x)
    return _halves(left) + _halves(right)


@triton.jit(do_not_specialize=["M", "groups"])
def grouped_mm_kernel(
    a_ptr, a_scale_ptr, index_ptr, w_ptr, w_scale_ptr, offs_ptr, bias_ptr, out_ptr, M, N, C, groups, a_stride,
    a_stride_c, a_scale_stride, a_scale_stride_c, w_stride_g, w_stride, w_stride_c, w_scale_stride_g,
    w_scale_stride, w_scale_stride_c, out_stride, W_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """W_BLOCK: rows of w that share a scale, 1 or 32. index_ptr: row index of a; None if its rows are in order."""
    group = tl.arange(0, GROUPS)
    start, end = group_bounds(group, offs_ptr, groups, M)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_M)
    tiles_before = tl.cumsum(tiles, 0) - tiles
    columns = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.sum(tiles) * columns, tl.num_programs(0)):
        g, row_tile, column_tile = _tile_of(tile, tiles_before, tiles, columns, GROUP_M, group)
        row0 = tl.sum(tl.where(group == g, start, 0)) + row_tile * BLOCK_M
        rows_left = tl.sum(tl.where(group == g, end, 0)) - row0
        row = tl.arange(0, BLOCK_M)[:, None]
        mask = row < rows_left
        source = row0 + row
        if index_ptr is not None:
            source = tl.load(index_ptr + source, mask=mask, other=-1)
            mask = source >= 0
        source = source.to(tl.int64)
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        batch = g.to(tl.int64)
        sums = _product(
            a_ptr + source * a_stride, a_scale_ptr + source * a_scale_stride, mask, a_stride_c, a_scale_stride_c,
            w_ptr + batch * w_stride_g + n.to(tl.int64) * w_stride,
            w_scale_ptr + batch * w_scale_stride_g + (n // W_BLOCK).to(tl.int64) * w_scale_stride,
            n < N, w_stride_c, w_scale_stride_c, C, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        out = out_ptr + (row0 + row).to(tl.int64) * out_stride
        quarters = _quarters(sums)
        for i in tl.static_range(4):
            column = column_tile * BLOCK_N + i * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)[None, :]
            part = quarters[i]
            if bias_ptr is not None:
                part += tl.load(bias_ptr + batch * N + column, mask=column < N, other=0.0).to(tl.float32)
            tl.store(out + column, part.to(out_ptr.dtype.element_ty), mask=(row < rows_left) & (column < N))


@triton.jit(do_not_specialize=["M", "groups"])
def grouped_wgrad_kernel(
    y_ptr, y_scale_ptr, x_ptr, x_scale_ptr, offs_ptr, out_ptr, M, N, K, groups, y_stride, y_stride_m,
    y_scale_stride, y_scale_stride_m, x_stride, x_stride_m, x_scale_stride, x_scale_stride_m, factor,
    ADD: tl.constexpr, HALVES: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """y (N, M) and x (K, M) have blocks along M. factor: the result is multiplied by it in fp32.

    ADD: add to out (groups, N, K) instead of writing it. Empty groups then have no tiles.
    HALVES: out is (2, groups, N / 2, K).
    """
    group = tl.arange(0, GROUPS)
    start, end = group_bounds(group, offs_ptr, groups, M)
    mask = group < groups
    if ADD:
        mask = end > start
    tiles = tl.where(mask, tl.cdiv(N, BLOCK_M), 0)
    tiles_before = tl.cumsum(tiles, 0) - tiles
    columns = tl.cdiv(K, BLOCK_N)
    for tile in range(tl.program_id(0), tl.sum(tiles) * columns, tl.num_programs(0)):
        g, row_tile, column_tile = _tile_of(tile, tiles_before, tiles, columns, GROUP_M, group)
        # Count blocks instead of tokens: then the compiler knows that addresses are aligned, and makes wide loads.
        first = tl.sum(tl.where(group == g, start, 0)) // BLOCK
        length = (tl.sum(tl.where(group == g, end, 0)) // BLOCK - first) * BLOCK
        block = first.to(tl.int64)
        m = block * BLOCK
        row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        sums = _product(
            y_ptr + row.to(tl.int64) * y_stride + m * y_stride_m,
            y_scale_ptr + row.to(tl.int64) * y_scale_stride + block * y_scale_stride_m,
            row < N, y_stride_m, y_scale_stride_m,
            x_ptr + n.to(tl.int64) * x_stride + m * x_stride_m,
            x_scale_ptr + n.to(tl.int64) * x_scale_stride + block * x_scale_stride_m,
            n < K, x_stride_m, x_scale_stride_m, length, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        out_row = g.to(tl.int64) * N + row
        if HALVES:
            out_row = (g + tl.where(row < N // 2, 0, groups - 1)).to(tl.int64) * (N // 2) + row
        out = out_ptr + out_row * K
        quarters = _quarters(sums)
        for i in tl.static_range(4):
            column = column_tile * BLOCK_N + i * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)[None, :]
            inside = (row < N) & (column < K)
            part = quarters[i] * factor
            if ADD:
                part += tl.load(out + column, mask=inside, other=0.0)
            tl.store(out + column, part.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_mm(a, a_scale, a_index, w, w_scale, offs, bias, out_dtype):
    """Launcher of mxep::grouped_mm_dot_scaled. All tensors may have any strides. w_scale: (G, N or N/32, C/32)."""
    groups, n, c = w.shape
    m = a.shape[0] if a_index is None else a_index.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    a_index, offs, bias = (x if x is None else x.contiguous() for x in (a_index, offs, bias))
    how = launch_options()
    tiles = (cdiv(m, how["BLOCK_M"]) + groups) * cdiv(n, how["BLOCK_N"])
    launch(
        grouped_mm_kernel, (_programs(tiles, a.device),),
        a, a_scale, a_index, w, w_scale, offs,
        bias, out, m, n, c, groups,
        *a.stride(), *a_scale.stride(), *w.stride(), *w_scale.stride(), out.stride(0),
        W_BLOCK=n // w_scale.shape[1], GROUPS=next_power_of_2(groups), **how,
    )  # fmt: skip
    return out


def grouped_wgrad(out, y, y_scale, x, x_scale, offs, factor=1.0, add=False):
    """Launcher of mxep::grouped_wgrad_dot_scaled. Any strides. If qdata are contiguous along M, loads are wide."""
    if not out.numel():
        return
    groups, n, k = out.shape[-3], y.shape[1], x.shape[1]
    how = launch_options()
    tiles = groups * cdiv(n, how["BLOCK_M"]) * cdiv(k, how["BLOCK_N"])
    y, y_scale, x, x_scale = y.mT, y_scale.mT, x.mT, x_scale.mT
    launch(
        grouped_wgrad_kernel, (_programs(tiles, x.device),),
        y, y_scale, x, x_scale, offs.contiguous(), out, y.shape[1], n, k, groups,
        *y.stride(), *y_scale.stride(), *x.stride(), *x_scale.stride(), factor,
        ADD=add, HALVES=out.dim() == 4, GROUPS=next_power_of_2(groups), **how,
    )  # fmt: skip


def launch_options() -> dict[str, int]:
    """Tile sizes and pipeline depth. On sm_100 the tile is twice as wide, because accumulators lie in tensor memory."""
    wide = False
    if os.environ.get("TRITON_INTERPRET") != "1":
        target = driver.active.get_current_target()
        wide = target.backend == "cuda" and target.arch // 10 == 10
    shape = {"BLOCK_M": 128, "BLOCK_N": 256 if wide else 128, "BLOCK_K": 128, "GROUP_M": 8}
    return shape | {"num_warps": 8, "num_stages": 4 if wide else 3}


def _programs(tiles: int, device: torch.device) -> int:
    """Number of programs to start: one per SM. On a CPU at most 3, because each costs time, but tests need several."""
    if device.type != "cuda":
        return min(tiles, 3)
    return min(tiles, num_sms(device))
