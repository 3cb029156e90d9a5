"""Row-scaled FP8 grouped GEMM on Hopper's tensor cores (sm_90), sums promoted to fp32. In Gluon, Triton's lower level.

    a (M, K) ---TMA---> shared, 4 stages of 128 along K ---wgmma---> 128 x 256 tile ---x scales, + bias---> out
    b (G * N, K) --^

A program is two warpgroups that multiply, 64 rows of the tile each, and a warp that loads. Tiles are taken one by one
from a counter, as groups differ along a contraction and other kernels may hold some multiprocessors for a while; the
loading warp takes them and tells the others. The next tile loads while one is stored; half of a tile is stored while
the other half is still multiplied, and by then the two warpgroups have drifted apart. Group ends are read on the
device; a group without rows costs nothing, or, along a ragged contraction, its zeros.

Why halves: Hopper adds FP8 products with 13 fraction bits, so a sum must leave the tensor core now and then. A second
accumulator of the whole tile does not fit the registers (2 x 128 of 240 a thread). So each warpgroup multiplies into 64
registers one half of its columns over INTERVAL stages, adds them to that half's sum in fp32, then does the other half
over the same stages, which stay in shared memory meanwhile; one warpgroup adds while the other multiplies. Stages that
are no whole interval come first, one by one.

    RAGGED = "rows"         out[m, n]    = sum_k a[m, k] b[g, n, k] 2^(sa[m] + sb[g, n]) + bias[g, n]    m of group g
    RAGGED = "contraction"  out[g, m, n] = factor 2^e[g] sum_k a[m, k] b[n, k]                           k of group g

Along a ragged contraction groups begin at multiples of BK, with zeros behind their last column (fold_for_wgrad's
align). Stages past the end of K, or of a group, are read past the tensor's end, which loads zeros without traffic.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mxep.gemm.backends.hopper import STEP
from mxep.quant.kernels.fold import multiprocessors

if hasattr(tma, "async_load"):
    load_tile, store_tile = tma.async_load, tma.async_store
else:  # until Triton 3.7
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

BM, BN, BK = 128, 256, STEP
STAGES = 4
INTERVAL = 2
"""Stages of BK between promotions: 256. Fewer cost additions, more leave the loads no slack (all 4 stages held)."""
BAND = 16
"""Row tiles of a band: tiles go down a band, then to the next column of it, so that programs share what L2 holds."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
LEAST_BEFORE, MOST_BEFORE = gl.constexpr(-64), gl.constexpr(80)
"""Exponents that a row's scale has in front of a column's."""
QUEUE = gl.constexpr(4)
"""Tiles whose numbers wait between the loading warp, which takes them, and the others."""


@gluon.jit
def _place(tile, m_tiles, n_tiles, BAND: gl.constexpr):
    """(row tile, column tile) of a group's tile."""
    first = tile // (BAND * n_tiles) * BAND
    height = min(m_tiles - first, BAND)
    within = tile % (BAND * n_tiles)
    return first + within % height, within // height


@gluon.jit
def _sizes(
    ends_ptr, g, start, M, K,
    RAGGED: gl.constexpr, ADD: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr, INTERVAL: gl.constexpr,
):  # fmt: skip
    """(end of group g, its row tiles, stages of its contraction: at least INTERVAL, which may hold zeros alone)."""
    end = gl.load(ends_ptr + g)
    if RAGGED == "rows":
        end = gl.maximum(gl.minimum(end, M), start)
        return end, gl.cdiv(end - start, BM), gl.maximum(gl.cdiv(K, BK), INTERVAL)
    else:
        end = gl.maximum(gl.minimum(end, K), start)
        m_tiles = gl.cdiv(M, BM)
        if ADD:
            m_tiles = gl.where(end > start, m_tiles, 0)
        return end, m_tiles, gl.maximum(gl.cdiv(end - start, BK), INTERVAL)


@gluon.jit
def _load(
    a_desc, b_desc, a_tiles, b_tiles, full, empty, queue, told, heard, taken_ptr, ends_ptr, G, M, N, K,
    RAGGED: gl.constexpr, INTERVAL: gl.constexpr, BAND: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The loading warp: which tile is next, and both operands of every stage as the multiplying warpgroups release
    them."""
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    BM: gl.constexpr = a_tiles.type.shape[1]
    BN: gl.constexpr = b_tiles.type.shape[1]
    BK: gl.constexpr = a_tiles.type.shape[2]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n_tiles = gl.cdiv(N, BN)
    step = 0
    turn = 0
    tile = gl.program_id(0)
    start = 0
    first = 0
    for g in range(G):
        end, m_tiles, stages = _sizes(ends_ptr, g, start, M, K, RAGGED, ADD, BM, BK, INTERVAL)
        last = first + m_tiles * n_tiles
        while tile < last:
            place = turn % QUEUE
            following = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed", scope="gpu")
            mbarrier.wait(heard.index(place), ((turn // QUEUE) & 1) ^ 1)
            queue.index(place).store(gl.full([1], following, gl.int32, ONE))
            mbarrier.arrive(told.index(place), count=1)
            i, j = _place(tile - first, m_tiles, n_tiles, BAND)
            row = i * BM
            column = j * BN
            if RAGGED == "rows":
                row += start
                column += g * N
            for k in range(stages):
                at = k * BK
                if RAGGED == "contraction":
                    at += start
                    at = gl.where(at < end, at, K)
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                load_tile(a_desc, [row, at], full.index(stage), a_tiles.index(stage))
                load_tile(b_desc, [column, at], full.index(stage), b_tiles.index(stage))
                step += 1
            tile = following
            turn += 1
        first = last
        start = end


@gluon.jit
def _begin(
    a_tiles, b_tiles, full, step, INTERVAL: gl.constexpr, WHO: gl.constexpr, HALF: gl.constexpr, SUM: gl.constexpr
):
    """Begin to multiply this warpgroup's 64 rows with one half of the columns, over INTERVAL stages."""
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    WIDTH: gl.constexpr = b_tiles.type.shape[1] // 2
    part = gl.zeros([64, WIDTH], gl.float32, SUM)
    for u in gl.static_range(INTERVAL):
        stage = (step + u) % STAGES
        if HALF == 0:
            mbarrier.wait(full.index(stage), ((step + u) // STAGES) & 1)
        a = a_tiles.index(stage).slice(WHO * 64, 64, dim=0)
        b = b_tiles.index(stage).slice(HALF * WIDTH, WIDTH, dim=0).permute((1, 0))
        part = warpgroup_mma(a, b, part, use_acc=u > 0, is_async=True)
    return part


@gluon.jit
def _finish(part, empty, step, INTERVAL: gl.constexpr):
    """Wait for the second half, releasing one stage after the other."""
    STAGES: gl.constexpr = empty.type.shape[0]
    for u in gl.static_range(INTERVAL):
        part = warpgroup_mma_wait(INTERVAL - 1 - u, deps=[part])
        mbarrier.arrive(empty.index((step + u) % STAGES), count=1)
    return part


@gluon.jit
def _add(sum0, sum1, a_tiles, b_tiles, full, empty, step, INTERVAL: gl.constexpr, WHO: gl.constexpr, SUM: gl.constexpr):
    """Both halves' sums, and what INTERVAL stages add to them."""
    part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 0, SUM)
    sum0 += warpgroup_mma_wait(0, deps=[part])
    part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 1, SUM)
    sum1 += _finish(part, empty, step, INTERVAL)
    return sum0, sum1


@gluon.jit
def _power(byte):
    """2^(byte - 127) of a scale byte, NaN of 255."""
    byte = byte.to(gl.int32)
    bits = gl.where(byte == 0, 0x00400000, byte << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _before_and_after(byte):
    """Two factors of a row's `_power`: one before the column's, and what is left of it after, mostly 1.

    A sum of qdata' products is 0 or within 2^-32 to 2^47. So, whatever the scales, a sum times a row's 2^-64 to 2^80,
    times the column's scale, times the rest leaves the range of fp32 only where the result does: no 2^127 of a row
    meets a sum before a column's 2^-127 has.
    """
    byte = byte.to(gl.int32)
    before = gl.maximum(gl.minimum(byte, 127 + MOST_BEFORE), 127 + LEAST_BEFORE)
    return _power(before), _power(gl.where(byte == 255, 255, 127 + byte - before))


@gluon.jit
def _store(half, out_ptr, out_desc, staging, row_scale, column_scale, bias, row, end, column, N, ADD: gl.constexpr):
    """Scale, add, round and store 64 rows of half a tile: bf16 by TMA, but for rows past the end of their group."""
    L: gl.constexpr = half.type.layout
    if column_scale is None:
        half = half * row_scale[0] * row_scale[1]
    else:
        half = half * row_scale[0][:, None]
        half = half * gl.convert_layout(_power(column_scale), gl.SliceLayout(0, L))[None, :]
        half = half * row_scale[1][:, None]
    if bias is not None:
        half = half + gl.convert_layout(bias.to(gl.float32), gl.SliceLayout(0, L))[None, :]
    if out_desc is None:
        _store_rows(half, out_ptr, row, end, column, N, ADD)
    else:
        tma.store_wait(0)
        staging.store(half.to(out_desc.dtype))
        fence_async_shared()
        if row + 64 <= end:
            store_tile(out_desc, [row, column], staging)
        else:
            WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            _store_rows(staging.load(WIDE), out_ptr, row, end, column, N, ADD)


@gluon.jit
def _store_rows(piece, out_ptr, row, end, column, N, ADD: gl.constexpr):
    L: gl.constexpr = piece.type.layout
    m = row + gl.arange(0, 64, gl.SliceLayout(1, L))
    n = column + gl.arange(0, piece.type.shape[1], gl.SliceLayout(0, L))
    at = out_ptr + (m.to(gl.int64)[:, None] * N + n[None, :])
    there = (m < end)[:, None] & (n < N)[None, :]
    if ADD:  # where it lies: nothing waits for what was there, and each number is added to once
        gl.atomic_add(at, piece, mask=there, sem="relaxed", scope="gpu")
    else:
        gl.store(at, piece, mask=there)


@gluon.jit
def _columns(ptr, g, column, N, WIDTH: gl.constexpr):
    """WIDTH columns of row g of ptr (G, N)."""
    n = column + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(ptr + g.to(gl.int64) * N + n, mask=n < N, other=0)


@gluon.jit
def _tile(
    a_tiles, b_tiles, full, empty, staging,
    out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr,
    g, start, end, tile, m_tiles, n_tiles, step, stages, M, N, factor,
    RAGGED: gl.constexpr, INTERVAL: gl.constexpr, BAND: gl.constexpr, ADD: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile of group g, from the first stage to the store. Returns the next stage."""
    BM: gl.constexpr = a_tiles.type.shape[1]
    BN: gl.constexpr = b_tiles.type.shape[1]
    WIDTH: gl.constexpr = BN // 2
    SUM: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    sum0 = gl.zeros([64, WIDTH], gl.float32, SUM)
    sum1 = gl.zeros([64, WIDTH], gl.float32, SUM)
    for _ in range(stages % INTERVAL):
        sum0, sum1 = _add(sum0, sum1, a_tiles, b_tiles, full, empty, step, 1, WHO, SUM)
        step += 1
    for _ in range(stages // INTERVAL - 1):
        sum0, sum1 = _add(sum0, sum1, a_tiles, b_tiles, full, empty, step, INTERVAL, WHO, SUM)
        step += INTERVAL
    part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 0, SUM)
    # Not before the loop, which has no registers to keep it in.
    i, j = _place(tile, m_tiles, n_tiles, BAND)
    row = i * BM + WHO * 64
    column = j * BN
    bias0 = None
    bias1 = None
    if RAGGED == "rows":
        row += start
        row_end = end
        m = row + gl.arange(0, 64, gl.SliceLayout(1, SUM))
        row_scale = _before_and_after(gl.load(a_scale_ptr + m, mask=m < end, other=0))
        scale0 = _columns(b_scale_ptr, g, column, N, WIDTH)
        scale1 = _columns(b_scale_ptr, g, column + WIDTH, N, WIDTH)
        if bias_ptr is not None:
            bias0 = _columns(bias_ptr, g, column, N, WIDTH)
            bias1 = _columns(bias_ptr, g, column + WIDTH, N, WIDTH)
    else:
        row += g * M
        row_end = (g + 1) * M
        e = gl.load(a_scale_ptr + g)
        row_scale = _power(127 + (e >> 1)) * factor, _power(127 + (e - (e >> 1)))
        scale0 = None
        scale1 = None
    sum0 += warpgroup_mma_wait(0, deps=[part])
    part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 1, SUM)
    _store(sum0, out_ptr, out_desc, staging, row_scale, scale0, bias0, row, row_end, column, N, ADD)
    sum1 += _finish(part, empty, step, INTERVAL)
    _store(sum1, out_ptr, out_desc, staging, row_scale, scale1, bias1, row, row_end, column + WIDTH, N, ADD)
    return step + INTERVAL


@gluon.jit
def _multiply(
    a_tiles, b_tiles, full, empty, queue, told, heard, staging,
    out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, ends_ptr, G, M, N, K, factor,
    RAGGED: gl.constexpr, INTERVAL: gl.constexpr, BAND: gl.constexpr, ADD: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: 64 rows of every tile, if any of them are in the group."""
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    BM: gl.constexpr = a_tiles.type.shape[1]
    BK: gl.constexpr = a_tiles.type.shape[2]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n_tiles = gl.cdiv(N, b_tiles.type.shape[1])
    step = 0
    turn = 0
    tile = gl.program_id(0)
    start = 0
    first = 0
    for g in range(G):
        end, m_tiles, stages = _sizes(ends_ptr, g, start, M, K, RAGGED, ADD, BM, BK, INTERVAL)
        last = first + m_tiles * n_tiles
        while tile < last:
            place = turn % QUEUE
            mbarrier.wait(told.index(place), (turn // QUEUE) & 1)
            following = gl.max(queue.index(place).load(ONE), 0)
            there = True
            if RAGGED == "rows":
                there = start + _place(tile - first, m_tiles, n_tiles, BAND)[0] * BM + WHO * 64 < end
            if there:
                step = _tile(
                    a_tiles, b_tiles, full, empty, staging.index(WHO),
                    out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr,
                    g, start, end, tile - first, m_tiles, n_tiles, step, stages, M, N, factor,
                    RAGGED, INTERVAL, BAND, ADD, WHO,
                )  # fmt: skip
            else:
                for _ in range(stages):
                    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1
            # All threads have read it: they met at a barrier at the latest before this warpgroup released a stage.
            mbarrier.arrive(heard.index(place), count=1)
            tile = following
            turn += 1
        first = last
        start = end
    if out_desc is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["G"])
def grouped_mm_kernel(
    a_desc, b_desc, out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, ends_ptr, taken_ptr, G, M, N, K,
    factor, RAGGED: gl.constexpr, STAGES: gl.constexpr, INTERVAL: gl.constexpr, BAND: gl.constexpr, ADD: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queue = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    staging = full  # not used
    if out_desc is not None:
        staging = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    for q in gl.static_range(QUEUE):
        mbarrier.init(told.index(q), count=1)
        mbarrier.init(heard.index(q), count=2)
    gl.warp_specialize(
        [
            (_multiply, (a_tiles, b_tiles, full, empty, queue, told, heard, staging, out_ptr, out_desc,
                         a_scale_ptr, b_scale_ptr, bias_ptr, ends_ptr, G, M, N, K, factor,
                         RAGGED, INTERVAL, BAND, ADD, 0)),
            (_multiply, (a_tiles, b_tiles, full, empty, queue, told, heard, staging, out_ptr, out_desc,
                         a_scale_ptr, b_scale_ptr, bias_ptr, ends_ptr, G, M, N, K, factor,
                         RAGGED, INTERVAL, BAND, ADD, 1)),
            (_load, (a_desc, b_desc, a_tiles, b_tiles, full, empty, queue, told, heard, taken_ptr, ends_ptr,
                     G, M, N, K, RAGGED, INTERVAL, BAND, ADD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    **options: Any,
) -> Tensor:
    """mxep::fp8_grouped_mm. Codes: rows and addresses multiples of 16 bytes. options: programs, interval, band."""
    (M, K), (G, N, _) = a.shape, w.shape
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    a, w = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (a, w))
    if M:
        a_scale, w_scale = (scale.view(torch.uint8).reshape(-1) for scale in (a_scale, w_scale))
        bias = None if bias is None else bias.contiguous()
        _launch(out, a, w.reshape(G * N, K), a_scale, w_scale, bias, offs, M, N, K, ragged="rows", **options)
    return out


def grouped_wgrad(
    y_t: Tensor,
    x_t: Tensor,
    exponent: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    factor: float = 1.0,
    add_to: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """mxep::fp8_grouped_wgrad, or added into add_to (G, N, K) fp32. Groups begin at multiples of BK."""
    (N, C), (K, _) = y_t.shape, x_t.shape
    shape = ends.shape[0], N, K
    out = torch.empty(shape, dtype=out_dtype, device=y_t.device) if add_to is None else add_to
    if C:
        options |= {"ragged": "contraction", "add": add_to is not None, "factor": factor}
        _launch(out, y_t, x_t, exponent, None, None, ends, N, K, C, **options)
    elif add_to is None:
        out.zero_()
    return out


def add_grouped_wgrad(
    to: Tensor, y_t: Tensor, x_t: Tensor, exponent: Tensor, ends: Tensor, factor: float = 1.0
) -> None:
    """mxep::fp8_grouped_wgrad_add."""
    grouped_wgrad(y_t, x_t, exponent, ends, torch.float32, factor, to)


def _launch(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    bias: Tensor | None,
    ends: Tensor,
    M: int,
    N: int,
    K: int,
    *,
    ragged: str,
    add: bool = False,
    factor: float = 1.0,
    programs: int = 0,
    interval: int = INTERVAL,
    band: int = BAND,
) -> None:
    qdata = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_desc, b_desc = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, BK], qdata) for x, rows in ((a, BM), (b, BN))
    )
    out_desc = None
    if out.dtype == torch.bfloat16:
        wide = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        out_desc = TensorDescriptor(out, [out.numel() // N, N], [N, 1], [BM // 2, BN // 2], wide)
    taken = torch.zeros(1, dtype=torch.int32, device=out.device)
    grouped_mm_kernel[(programs or multiprocessors(a.device),)](
        a_desc, b_desc, out, out_desc, a_scale, b_scale, bias, ends, taken, ends.shape[0], M, N, K, factor,
        RAGGED=ragged, STAGES=STAGES, INTERVAL=interval, BAND=band, ADD=add,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
