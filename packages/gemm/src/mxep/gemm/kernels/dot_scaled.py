"""MXFP8 products over ragged groups by `tl.dot_scaled`: one persistent kernel a product, groups read on the device.

    grouped_mm     a (R, C) x w[g] (N, C)        -> out (M, N)      rows of a group against its weight   forward, dgrad
    grouped_wgrad  x (N, R) x y (K, R) over g's R -> dw (G, N, K)   a group's tokens contracted          wgrad

Every program takes tiles BM x BN, the one after the other: tile t, t + programs, ... of all groups' tiles in a row.
Each group starts a tile of its own, an empty one has none; within a group, bands of BAND row tiles go over all columns,
so that programs at work at once share rows of both operands in L2. Example: groups of 256, 0 and 32 rows, BM 128, two
column tiles: tiles 0 to 3 are group 0's, 4 and 5 group 2's.

A tile's loop takes BK = 128 qdata a row and 4 scales. Codes and scales are masked (0 times 2**-127 is 0) past the
group's rows and the contraction's end, so nothing there is read. Blackwell multiplies qdata by their scales in its
tensor cores (tcgen05.mma.block_scale), other GPUs upcast to bf16 first; both accumulate in fp32.

M rows (capacity), N, K sizes of w, G groups, C the contraction. Strides are in elements.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from mxep.quant.kernels.bounds import bounds_of
from mxep.quant.kernels.numbers import bytes_of

BLOCK = tl.constexpr(32)


@triton.jit
def _tile_of(tile, tiles_before, tiles, columns, BAND: tl.constexpr, group):
    """(group, row tile, column tile) of `tile`; tiles (GROUPS,): row tiles of a group, tiles_before: of all before."""
    mine = (tile >= tiles_before * columns) & (tile < (tiles_before + tiles) * columns)
    g = tl.sum(tl.where(mine, group, 0))
    within = tile - tl.sum(tl.where(mine, tiles_before, 0)) * columns
    height = tl.sum(tl.where(mine, tiles, 0))
    band = within // (BAND * columns)
    rows = tl.minimum(height - band * BAND, BAND)
    within -= band * BAND * columns
    return g, band * BAND + within % rows, within // rows


@triton.jit
def _product(
    a_ptr,
    a_scale_ptr,
    a_there,
    a_stride,
    a_scale_stride,
    b_ptr,
    b_scale_ptr,
    b_there,
    b_stride,
    b_scale_stride,
    length,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """(BM, BN) fp32: sum over `length` of a * b; a_ptr (BM, 1), b_ptr (BN, 1) where rows begin, strides along them."""
    A_FORMAT: tl.constexpr = "e4m3" if a_ptr.dtype.scalar.element_ty == tl.float8e4nv else "e5m2"
    B_FORMAT: tl.constexpr = "e4m3" if b_ptr.dtype.scalar.element_ty == tl.float8e4nv else "e5m2"
    k = tl.arange(0, BK)[None, :]
    block = tl.arange(0, BK // BLOCK)[None, :]
    a_ptr += k * a_stride
    b_ptr += k * b_stride
    a_scale_ptr += block * a_scale_stride
    b_scale_ptr += block * b_scale_stride
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, length, BK):
        left = length - k0
        a = tl.load(a_ptr, mask=a_there & (k < left), other=0.0)
        b = tl.load(b_ptr, mask=b_there & (k < left), other=0.0)
        a_scale = tl.load(a_scale_ptr, mask=a_there & (block * BLOCK < left), other=0)
        b_scale = tl.load(b_scale_ptr, mask=b_there & (block * BLOCK < left), other=0)
        sums = tl.dot_scaled(a, a_scale, A_FORMAT, tl.trans(b), b_scale, B_FORMAT, sums)
        a_ptr += BK * a_stride
        b_ptr += BK * b_stride
        a_scale_ptr += BK // BLOCK * a_scale_stride
        b_scale_ptr += BK // BLOCK * b_scale_stride
    return sums


@triton.jit
def _halves(x):
    BM: tl.constexpr = x.shape[0]
    BN: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _quarters(x):
    """The columns of x in four parts: stored one after the other they need fewer registers."""
    left, right = _halves(x)
    return _halves(left) + _halves(right)


@triton.jit(do_not_specialize=["M", "groups"])
def grouped_mm_kernel(
    a_ptr,
    a_scale_ptr,
    index_ptr,
    w_ptr,
    w_scale_ptr,
    ends_ptr,
    bias_ptr,
    run_if_ptr,
    out_ptr,
    M,
    N,
    C,
    groups,
    a_stride,
    a_stride_c,
    a_scale_stride,
    a_scale_stride_c,
    w_stride_g,
    w_stride,
    w_stride_c,
    w_scale_stride_g,
    w_scale_stride,
    w_scale_stride_c,
    out_stride,
    W_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """W_BLOCK: rows of w that share a scale, 1 or 32. index None: a's rows as they lie. run_if 0: nothing happens."""
    if run_if_ptr is not None:
        if tl.load(run_if_ptr) == 0:
            return
    group = tl.arange(0, GROUPS)
    start, end = bounds_of(group, ends_ptr, groups, M)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BM)
    tiles_before = tl.cumsum(tiles, 0) - tiles
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.sum(tiles) * columns, tl.num_programs(0)):
        g, row_tile, column_tile = _tile_of(tile, tiles_before, tiles, columns, BAND, group)
        row0 = tl.sum(tl.where(group == g, start, 0)) + row_tile * BM
        rows_left = tl.sum(tl.where(group == g, end, 0)) - row0
        row = tl.arange(0, BM)[:, None]
        there = row < rows_left
        source = row0 + row
        if index_ptr is not None:
            source = tl.load(index_ptr + source, mask=there, other=-1)
            there = source >= 0
        source = source.to(tl.int64)
        n = column_tile * BN + tl.arange(0, BN)[:, None]
        batch = g.to(tl.int64)
        sums = _product(
            a_ptr + source * a_stride,
            a_scale_ptr + source * a_scale_stride,
            there,
            a_stride_c,
            a_scale_stride_c,
            w_ptr + batch * w_stride_g + n.to(tl.int64) * w_stride,
            w_scale_ptr + batch * w_scale_stride_g + (n // W_BLOCK).to(tl.int64) * w_scale_stride,
            n < N,
            w_stride_c,
            w_scale_stride_c,
            C,
            BM,
            BN,
            BK,
        )
        out = out_ptr + (row0 + row).to(tl.int64) * out_stride
        quarters = _quarters(sums)
        for i in tl.static_range(4):
            column = column_tile * BN + i * (BN // 4) + tl.arange(0, BN // 4)[None, :]
            part = quarters[i]
            if bias_ptr is not None:
                part += tl.load(bias_ptr + batch * N + column, mask=column < N, other=0.0).to(tl.float32)
            tl.store(out + column, part.to(out_ptr.dtype.element_ty), mask=(row < rows_left) & (column < N))


@triton.jit(do_not_specialize=["M", "groups"])
def grouped_wgrad_kernel(
    x_ptr,
    x_scale_ptr,
    y_ptr,
    y_scale_ptr,
    ends_ptr,
    run_if_ptr,
    out_ptr,
    M,
    N,
    K,
    groups,
    x_stride,
    x_stride_m,
    x_scale_stride,
    x_scale_stride_m,
    y_stride,
    y_stride_m,
    y_scale_stride,
    y_scale_stride_m,
    factor,
    ADD: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    """x (N, M), y (K, M) in blocks along M. factor: fp32, of the product.

    ADD: to what out (groups, N, K) holds, and empty groups have no tiles.
    """
    if run_if_ptr is not None:
        if tl.load(run_if_ptr) == 0:
            return
    group = tl.arange(0, GROUPS)
    start, end = bounds_of(group, ends_ptr, groups, M)
    wanted = group < groups
    if ADD:
        wanted = end > start
    tiles = tl.where(wanted, tl.cdiv(N, BM), 0)
    tiles_before = tl.cumsum(tiles, 0) - tiles
    columns = tl.cdiv(K, BN)
    for tile in range(tl.program_id(0), tl.sum(tiles) * columns, tl.num_programs(0)):
        g, row_tile, column_tile = _tile_of(tile, tiles_before, tiles, columns, BAND, group)
        # Blocks, not tokens, so that the compiler knows what divides an address: else it loads byte by byte.
        first = tl.sum(tl.where(group == g, start, 0)) // BLOCK
        length = (tl.sum(tl.where(group == g, end, 0)) // BLOCK - first) * BLOCK
        block = first.to(tl.int64)
        m = block * BLOCK
        row = row_tile * BM + tl.arange(0, BM)[:, None]
        n = column_tile * BN + tl.arange(0, BN)[:, None]
        sums = _product(
            x_ptr + row.to(tl.int64) * x_stride + m * x_stride_m,
            x_scale_ptr + row.to(tl.int64) * x_scale_stride + block * x_scale_stride_m,
            row < N,
            x_stride_m,
            x_scale_stride_m,
            y_ptr + n.to(tl.int64) * y_stride + m * y_stride_m,
            y_scale_ptr + n.to(tl.int64) * y_scale_stride + block * y_scale_stride_m,
            n < K,
            y_stride_m,
            y_scale_stride_m,
            length,
            BM,
            BN,
            BK,
        )
        out = out_ptr + (g.to(tl.int64) * N + row) * K
        quarters = _quarters(sums)
        for i in tl.static_range(4):
            column = column_tile * BN + i * (BN // 4) + tl.arange(0, BN // 4)[None, :]
            inside = (row < N) & (column < K)
            part = quarters[i] * factor
            if ADD:
                part += tl.load(out + column, mask=inside, other=0.0)
            tl.store(out + column, part.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    a_index: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    run_if: Tensor | None = None,
    **options: int,
) -> Tensor:
    """a (R, C), scale (R, C/32), index (M,) or None; w (G, N, C), scale (G, N or N/32, C/32) -> out (M, N).

    Any strides, of vectors too. bias: (G, N) or None. out: (M, N) contiguous, allocated in out_dtype if None; rows past
    the last group are not written. run_if: int32 (); where it is 0, `out` stays as it is and the launch costs its own
    time alone.
    """
    groups, n, c = w.shape
    m = a.shape[0] if a_index is None else a_index.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    a_index, offs, bias = (x if x is None else x.contiguous() for x in (a_index, offs, bias))
    how = launch_options() | options
    tiles = (triton.cdiv(m, how["BM"]) + groups) * triton.cdiv(n, how["BN"])
    grouped_mm_kernel[(_programs(tiles, a.device),)](
        a, bytes_of(a_scale), a_index, w, bytes_of(w_scale), offs,
        bias, run_if, out, m, n, c, groups,
        *a.stride(), *a_scale.stride(), *w.stride(), *w_scale.stride(), out.stride(0),
        W_BLOCK=n // w_scale.shape[1], GROUPS=triton.next_power_of_2(groups), **how,
    )  # fmt: skip
    return out


def grouped_wgrad(
    x: Tensor,
    x_scale: Tensor,
    y: Tensor,
    y_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    *,
    factor: float = 1.0,
    out: Tensor | None = None,
    add: bool = False,
    run_if: Tensor | None = None,
    **options: int,
) -> Tensor:
    """x (M, N), scale (M/32, N); y (M, K), scale (M/32, K) -> out (G, N, K): factor * x[rows of g].T @ y[rows of g].

    Any strides; loads are wide where qdata lie along M. out: contiguous, allocated in out_dtype if None; an empty
    group's is zero. add: added to `out` instead, in fp32 before the rounding. run_if: as for `grouped_mm`.
    """
    groups, n, k = offs.shape[0], x.shape[1], y.shape[1]
    if out is None:
        out = torch.empty((groups, n, k), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    how = launch_options() | options
    tiles = groups * triton.cdiv(n, how["BM"]) * triton.cdiv(k, how["BN"])
    x, x_scale, y, y_scale = x.mT, bytes_of(x_scale).mT, y.mT, bytes_of(y_scale).mT
    grouped_wgrad_kernel[(_programs(tiles, x.device),)](
        x, x_scale, y, y_scale, offs.contiguous(), run_if, out, x.shape[1], n, k, groups,
        *x.stride(), *x_scale.stride(), *y.stride(), *y_scale.stride(), factor,
        ADD=add, GROUPS=triton.next_power_of_2(groups), **how,
    )  # fmt: skip
    return out


def launch_options() -> dict[str, int]:
    """Tile and pipeline: on sm_100 accumulators live in tensor memory, so a tile can be twice as wide."""
    wide = os.environ.get("TRITON_INTERPRET") != "1" and _is_sm_100()
    shape = {"BM": 128, "BN": 256 if wide else 128, "BK": 128, "BAND": 8}
    return shape | {"num_warps": 8, "num_stages": 4 if wide else 3}


def _is_sm_100() -> bool:
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch // 10 == 10)


def _programs(tiles: int, device: torch.device) -> int:
    """One program an SM; few without SMs, where each costs time and loops over tiles are to be tried all the same."""
    if device.type != "cuda":
        return min(tiles, 3)
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count)
