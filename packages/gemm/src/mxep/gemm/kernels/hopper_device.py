"""Grouped GEMM on Hopper's tensor cores (sm_90): FP8 with a scale per row, or bf16. In Gluon, Triton's lower level.

    a (M, K) ---TMA---> shared, 4 stages of 128 bytes along K ---wgmma---> 128 x 256 tile ---x scales, + bias---> out
    b (G * N, K) --^

A program has two warpgroups, each of which multiplies 64 rows of the tile, and one warp that loads. The loading warp
draws tiles one by one from a counter, and passes their numbers to the warpgroups. Fixed shares would be uneven, because
contracted groups differ in length, and other kernels may hold some SMs for a while. The next tile is loaded while the
current one is stored. The first half of a tile is stored while the second half is still multiplied. offs are read on
the device. An empty group costs nothing, but with RAGGED = "contraction" its zeros are written.

FP8 tiles are computed in two halves of 128 columns each. The reason: Hopper's tensor cores add products with 13
fraction bits, so a sum must leave them now and then. A second accumulator for a whole tile does not fit the registers
(2 x 128 of 240 per thread). So a warpgroup multiplies one half over INTERVAL stages into 64 registers, and adds these
to the half's fp32 sum. Then it multiplies the other half over the same stages. One warpgroup adds while the other
multiplies. If the number of stages is no multiple of INTERVAL, the remaining ones come first, one at a time. bf16 sums
are fp32 in the tensor core, and stay there.

    RAGGED = "rows"         out[m, n]    = sum_k a[m, k] b[g, n, k] 2^(sa[m] + sb[g, n]) + bias[g, n]    m of group g
    BLOCKS                  the same with fp32 s[g, n / 128, k / 128], one per block of b, instead of 2^sb
    b_scale in fp32         the same with s[g, n] instead of 2^sb, if not BLOCKS
    RAGGED = "contraction"  out[g, m, n] = factor 2^e[g] sum_k a[m, k] b[n, k]                           k of group g
    HALVES                  out is (2, G, M / 2, N): rows m < M / 2 of all groups, then rows m >= M / 2 of all groups

bf16 has no scales. Its operands may be transposed: b is (G, K, N) with TRANSPOSED. With RAGGED = "contraction", a is
(K, M) and b is (K, N).

With BLOCKS, INTERVAL is 1: a stage is one block along K, and half of a tile is one block along N. So each sum that
leaves the tensor core is multiplied by one number.

With RAGGED = "contraction", FP8 groups begin at multiples of BLOCK_K and have zeros after their last column, as
fold_for_wgrad writes them. bf16 groups may begin anywhere, because loads stop at a group's end (`hopper.ragged`). A
stage past the end of K or of a group reads past the tensor's end, which gives zeros without memory traffic.

M rows of out, N columns of out, K contracted, G groups. A stage is 128 bytes per row of both operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as wgmma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wgmma_wait

if hasattr(tma, "async_load"):
    load_tile, store_tile = tma.async_load, tma.async_store
else:  # until Triton 3.7
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

MIN_BEFORE, MAX_BEFORE = gl.constexpr(-64), gl.constexpr(80)
"""Exponents of the smallest and largest factor that `_before_and_after` applies before the column's scale."""
BLOCK_M, BLOCK_N, BLOCK_BITS = gl.constexpr(128), gl.constexpr(256), gl.constexpr(1024)
"""BLOCK_M x BLOCK_N: a tile of out. BLOCK_BITS: bits per row of an operand that one stage loads."""
ROWS_END = gl.constexpr(2**30)
"""Number of rows that a descriptor made by `hopper.ragged` has."""
NEXT_TILES = gl.constexpr(4)
"""How many tile numbers the loading warp may draw ahead of the multiplying warpgroups."""


@gluon.jit
def _position(tile, m_tiles, n_tiles, GROUP_M: gl.constexpr):
    """(row tile, column tile) of the tile with number `tile` within its group."""
    first = tile // (GROUP_M * n_tiles) * GROUP_M
    height = min(m_tiles - first, GROUP_M)
    within = tile % (GROUP_M * n_tiles)
    return first + within % height, within // height


@gluon.jit
def _sizes(
    offs_ptr, g, start, M, K,
    RAGGED: gl.constexpr, ADD: gl.constexpr, BLOCK_K: gl.constexpr, INTERVAL: gl.constexpr,
):  # fmt: skip
    """(end, row tiles, stages) of group g. end: offs[g], or M without offs. stages: of its contraction, >= INTERVAL."""
    if RAGGED == "rows":
        end = M if offs_ptr is None else gl.minimum(gl.load(offs_ptr + g), M)
        end = gl.maximum(end, start)
        return end, gl.cdiv(end - start, BLOCK_M), gl.maximum(gl.cdiv(K, BLOCK_K), INTERVAL)
    else:
        end = gl.maximum(gl.minimum(gl.load(offs_ptr + g), K), start)
        m_tiles = gl.where(end > start, gl.cdiv(M, BLOCK_M), 0) if ADD else gl.cdiv(M, BLOCK_M)
        return end, m_tiles, gl.maximum(gl.cdiv(end - start, BLOCK_K), INTERVAL)


@gluon.jit
def _load_stage(
    a_tile, b_tile, full, a_desc, b_desc, g, start, end, row, column, k, N, K,
    RAGGED: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Load the stage of group g that begins at k. row, column: first row and column of the tile within the group."""
    mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    if a_desc.dtype == gl.bfloat16 and RAGGED == "contraction":
        k += ROWS_END - (end - start)  # counted from the end, as `hopper.ragged` says
        load_tile(a_desc, [ROWS_END, end, k, row], full, a_tile)
        load_tile(b_desc, [ROWS_END, end, k, column], full, b_tile)
    elif a_desc.dtype == gl.bfloat16:
        load_tile(a_desc, [start + row, k], full, a_tile)
        if TRANSPOSED:
            load_tile(b_desc, [g, k, column], full, b_tile)
        else:
            load_tile(b_desc, [g, column, k], full, b_tile)
    else:
        if RAGGED == "rows":
            row += start
            column += g * N
        else:
            k = gl.where(start + k < end, start + k, K)
        load_tile(a_desc, [row, k], full, a_tile)
        load_tile(b_desc, [column, k], full, b_tile)


@gluon.jit
def _load(
    a_tiles, b_tiles, full, empty, next_tiles, tile_full, tile_empty, a_desc, b_desc, tile_counter_ptr, offs_ptr,
    G, M, N, K, RAGGED: gl.constexpr, TRANSPOSED: gl.constexpr, INTERVAL: gl.constexpr, GROUP_M: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """The loading warp: draws tiles, and loads both operands into each stage that both warpgroups have released."""
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    BLOCK_K: gl.constexpr = BLOCK_BITS // a_tiles.dtype.primitive_bitwidth
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n_tiles = gl.cdiv(N, BLOCK_N)
    step = 0
    tiles_done = 0
    tile = gl.program_id(0)
    start = 0
    first = 0
    for g in range(G):
        end, m_tiles, stages = _sizes(offs_ptr, g, start, M, K, RAGGED, ADD, BLOCK_K, INTERVAL)
        last = first + m_tiles * n_tiles
        while tile < last:
            slot = tiles_done % NEXT_TILES
            next_tile = gl.num_programs(0) + gl.atomic_add(tile_counter_ptr, 1, sem="relaxed", scope="gpu")
            mbarrier.wait(tile_empty.index(slot), ((tiles_done // NEXT_TILES) & 1) ^ 1)
            next_tiles.index(slot).store(gl.full([1], next_tile, gl.int32, ONE))
            mbarrier.arrive(tile_full.index(slot), count=1)
            i, j = _position(tile - first, m_tiles, n_tiles, GROUP_M)
            for k in range(stages):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                _load_stage(
                    a_tiles.index(stage), b_tiles.index(stage), full.index(stage), a_desc, b_desc,
                    g, start, end, i * BLOCK_M, j * BLOCK_N, k * BLOCK_K, N, K, RAGGED, TRANSPOSED,
                )  # fmt: skip
                step += 1
            tile = next_tile
            tiles_done += 1
        first = last
        start = end
    # There is one draw per tile, so the program that made the last draw knows it, and resets the counter.
    if tile == gl.num_programs(0) + first - 1:
        gl.store(tile_counter_ptr, 0)


@gluon.jit
def _multiply_bf16(
    a_tiles, b_tiles, full, empty, sum0, sum1, step, stages,
    RAGGED: gl.constexpr, TRANSPOSED: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """Multiply all stages, and add them to the sums of both halves. The caller awaits and releases the last stage."""
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    BLOCK_K: gl.constexpr = BLOCK_BITS // a_tiles.dtype.primitive_bitwidth
    HALF: gl.constexpr = BLOCK_N // 2
    for s in range(stages):
        stage = (step + s) % STAGES
        mbarrier.wait(full.index(stage), ((step + s) // STAGES) & 1)
        if RAGGED == "contraction":
            a = a_tiles.index(stage).reshape((BLOCK_K, BLOCK_M)).slice(WHO * 64, 64, dim=1).permute((1, 0))
        else:
            a = a_tiles.index(stage).slice(WHO * 64, 64, dim=0)
        if RAGGED == "contraction" or TRANSPOSED:
            b = b_tiles.index(stage).reshape((BLOCK_K, BLOCK_N))
            b0, b1 = b.slice(0, HALF, dim=1), b.slice(HALF, HALF, dim=1)
        else:
            b = b_tiles.index(stage).reshape((BLOCK_N, BLOCK_K))
            b0, b1 = b.slice(0, HALF, dim=0).permute((1, 0)), b.slice(HALF, HALF, dim=0).permute((1, 0))
        sum0 = wgmma(a, b0, sum0, is_async=True)
        sum1 = wgmma(a, b1, sum1, is_async=True)
        sum0, sum1 = wgmma_wait(2, deps=[sum0, sum1])
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=s > 0)
    return sum0, sum1


@gluon.jit
def _begin(
    a_tiles, b_tiles, full, step, INTERVAL: gl.constexpr, WHO: gl.constexpr, HALF: gl.constexpr, SUM: gl.constexpr
):
    """Start to multiply 64 rows of the tile (number WHO, 0 or 1) by half of its columns (HALF), over INTERVAL stages.

    Returns the sums, (64, 128) fp32, which are not complete before `wgmma_wait`.
    """
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    WIDTH: gl.constexpr = b_tiles.type.shape[1] // 2
    part = gl.zeros([64, WIDTH], gl.float32, SUM)
    for u in gl.static_range(INTERVAL):
        stage = (step + u) % STAGES
        if HALF == 0:
            mbarrier.wait(full.index(stage), ((step + u) // STAGES) & 1)
        a = a_tiles.index(stage).slice(WHO * 64, 64, dim=0)
        b = b_tiles.index(stage).slice(HALF * WIDTH, WIDTH, dim=0).permute((1, 0))
        part = wgmma(a, b, part, use_acc=u > 0, is_async=True)
    return part


@gluon.jit
def _finish(part, empty, step, INTERVAL: gl.constexpr):
    """Wait for the sums of the second half, and release each stage as soon as it has been multiplied."""
    STAGES: gl.constexpr = empty.type.shape[0]
    for u in gl.static_range(INTERVAL):
        part = wgmma_wait(INTERVAL - 1 - u, deps=[part])
        mbarrier.arrive(empty.index((step + u) % STAGES), count=1)
    return part


@gluon.jit
def _add(
    sum0, sum1, block0, block1, a_tiles, b_tiles, full, empty, step,
    INTERVAL: gl.constexpr, BLOCKS: gl.constexpr, WHO: gl.constexpr, SUM: gl.constexpr,
):  # fmt: skip
    """Add INTERVAL stages to the sums of both halves. With BLOCKS, block0 and block1 point to the halves' scales."""
    if BLOCKS:  # loaded before the multiplications begin
        scale0 = gl.load(block0)
        scale1 = gl.load(block1)
    part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 0, SUM)
    part = wgmma_wait(0, deps=[part])
    if BLOCKS:
        part *= scale0
    sum0 += part
    part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 1, SUM)
    part = _finish(part, empty, step, INTERVAL)
    if BLOCKS:
        part *= scale1
    sum1 += part
    return sum0, sum1


@gluon.jit
def _power(scale):
    """2^(scale - 127) in fp32, NaN for 255."""
    scale = scale.to(gl.int32)
    bits = gl.where(scale == 0, 0x00400000, scale << 23)
    return gl.where(scale == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _before_and_after(scale):
    """Split `_power(scale)` of a row into two factors, applied before and after the column's scale.

    The first factor lies in 2^-64 to 2^80. The second is the rest, mostly 1. A sum of products of qdata is 0 or lies in
    2^-32 to 2^47. With this order of multiplication, it overflows or underflows fp32 only if the final result does.
    """
    scale = scale.to(gl.int32)
    before = gl.maximum(gl.minimum(scale, 127 + MAX_BEFORE), 127 + MIN_BEFORE)
    return _power(before), _power(gl.where(scale == 255, 255, 127 + scale - before))


@gluon.jit
def _store(half, out_ptr, out_desc, staging, row_scale, column_scale, bias, row, end, column, N, ADD: gl.constexpr):
    """Scale 64 rows of half a tile, add the bias, round, and store or add (ADD) to out.

    row_scale: None, or two factors, to apply before and after the columns' scales.
    column_scale: e8m0 bytes, or fp32, or None.
    TMA stores bf16 results, except where a group ends within the 64 rows, and with ADD.
    """
    L: gl.constexpr = half.type.layout
    if column_scale is None:  # row_scale: None, or two factors, each a number or (64, 1)
        if row_scale is not None:
            half = half * row_scale[0] * row_scale[1]
    else:
        half = half * row_scale[0][:, None]
        if column_scale.dtype != gl.float32:
            column_scale = _power(column_scale)
        half = half * gl.convert_layout(column_scale, gl.SliceLayout(0, L))[None, :]
        half = half * row_scale[1][:, None]
    if bias is not None:
        half = half + gl.convert_layout(bias.to(gl.float32), gl.SliceLayout(0, L))[None, :]
    if out_desc is None:
        _store_rows(half, out_ptr, row, end, column, N, ADD)
    else:
        tma.store_wait(0)
        staging.store(half.to(out_desc.dtype))
        fence_async_shared()
        if ADD:
            _store_wide(staging, out_ptr, row, end, column, N, ADD)
        elif row + 64 <= end:
            store_tile(out_desc, [row, column], staging)
        else:
            _store_wide(staging, out_ptr, row, end, column, N, ADD)


@gluon.jit
def _store_wide(staging, out_ptr, row, end, column, N, ADD: gl.constexpr):
    """Store or add the staged half tile, which lies in shared memory, with 16 bytes per thread."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    _store_rows(staging.load(WIDE), out_ptr, row, end, column, N, ADD)


@gluon.jit
def _store_rows(piece, out_ptr, row, end, column, N, ADD: gl.constexpr):
    L: gl.constexpr = piece.type.layout
    m = row + gl.arange(0, 64, gl.SliceLayout(1, L))
    n = column + gl.arange(0, piece.type.shape[1], gl.SliceLayout(0, L))
    ptrs = out_ptr + (m.to(gl.int64)[:, None] * N + n[None, :])
    mask = (m < end)[:, None] & (n < N)[None, :]
    if ADD:  # an atomic does not wait for the old value; each element of out gets one addition
        gl.atomic_add(ptrs, piece, mask=mask, sem="relaxed", scope="gpu")
    else:
        gl.store(ptrs, piece, mask=mask)


@gluon.jit
def _columns(ptr, g, column, N, WIDTH: gl.constexpr):
    """Load WIDTH elements, from `column` on, of row g of a (G, N) tensor. Elements from N on are 0."""
    n = column + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(ptr + g.to(gl.int64) * N + n, mask=n < N, other=0)


@gluon.jit
def _tile(
    a_tiles, b_tiles, full, empty, staging,
    out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr,
    g, start, end, tile, m_tiles, n_tiles, step, stages, G, M, N, factor,
    RAGGED: gl.constexpr, TRANSPOSED: gl.constexpr, INTERVAL: gl.constexpr, GROUP_M: gl.constexpr,
    ADD: gl.constexpr, HALVES: gl.constexpr, BLOCKS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """Compute and store 64 rows of a tile of group g. step: number of its first stage. Returns the next tile's."""
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    BF16: gl.constexpr = a_tiles.dtype == gl.bfloat16
    WIDTH: gl.constexpr = BLOCK_N // 2
    SUM: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 256 // a_tiles.dtype.primitive_bitwidth]
    )
    sum0 = gl.zeros([64, WIDTH], gl.float32, SUM)
    sum1 = gl.zeros([64, WIDTH], gl.float32, SUM)
    block0 = b_scale_ptr
    block1 = b_scale_ptr
    if BLOCKS:
        height = gl.cdiv(N, WIDTH)  # blocks along N
        block = _position(tile, m_tiles, n_tiles, GROUP_M)[1] * 2
        block0 += (g * height + block) * stages
        block1 += (g * height + gl.minimum(block + 1, height - 1)) * stages
    if BF16:
        sum0, sum1 = _multiply_bf16(a_tiles, b_tiles, full, empty, sum0, sum1, step, stages, RAGGED, TRANSPOSED, WHO)
    else:
        for _ in range(stages % INTERVAL):
            sum0, sum1 = _add(sum0, sum1, block0, block1, a_tiles, b_tiles, full, empty, step, 1, BLOCKS, WHO, SUM)
            step += 1
        for _ in range(stages // INTERVAL - 1):
            sum0, sum1 = _add(
                sum0, sum1, block0, block1, a_tiles, b_tiles, full, empty, step, INTERVAL, BLOCKS, WHO, SUM
            )
            step += INTERVAL
            if BLOCKS:
                block0 += 1
                block1 += 1
        if BLOCKS:
            last0 = gl.load(block0)
            last1 = gl.load(block1)
        part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 0, SUM)
    # Computed after the loop, because the loop has no registers left.
    i, j = _position(tile, m_tiles, n_tiles, GROUP_M)
    row = i * BLOCK_M + WHO * 64
    column = j * BLOCK_N
    bias0, bias1, scale0, scale1, row_scale = None, None, None, None, None
    if RAGGED == "rows":
        row += start
        row_end = end
        if not BF16:
            m = row + gl.arange(0, 64, gl.SliceLayout(1, SUM))
            row_scale = _before_and_after(gl.load(a_scale_ptr + m, mask=m < end, other=0))
            if BLOCKS:
                row_scale = row_scale[0][:, None], row_scale[1][:, None]
            else:
                scale0 = _columns(b_scale_ptr, g, column, N, WIDTH)
                scale1 = _columns(b_scale_ptr, g, column + WIDTH, N, WIDTH)
        if bias_ptr is not None:
            bias0 = _columns(bias_ptr, g, column, N, WIDTH)
            bias1 = _columns(bias_ptr, g, column + WIDTH, N, WIDTH)
    else:
        height = M // 2 if HALVES else M
        second = (row >= height).to(gl.int32) if HALVES else 0
        row += (g + second * (G - 1)) * height
        row_end = (g + second * G + 1) * height
        if BF16:
            row_scale = factor, 1.0
        else:
            e = gl.load(a_scale_ptr + g)
            row_scale = _power(127 + (e >> 1)) * factor, _power(127 + (e - (e >> 1)))
    if BF16:
        sum0, sum1 = wgmma_wait(0, deps=[sum0, sum1])
        step += stages
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
    else:
        part = wgmma_wait(0, deps=[part])
        if BLOCKS:
            part *= last0
        sum0 += part
        part = _begin(a_tiles, b_tiles, full, step, INTERVAL, WHO, 1, SUM)
    _store(sum0, out_ptr, out_desc, staging, row_scale, scale0, bias0, row, row_end, column, N, ADD)
    if not BF16:
        part = _finish(part, empty, step, INTERVAL)
        if BLOCKS:
            part *= last1
        sum1 += part
        step += INTERVAL
    _store(sum1, out_ptr, out_desc, staging, row_scale, scale1, bias1, row, row_end, column + WIDTH, N, ADD)
    return step


@gluon.jit
def _multiply(
    a_tiles, b_tiles, full, empty, next_tiles, tile_full, tile_empty, staging,
    out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, offs_ptr, G, M, N, K, factor,
    RAGGED: gl.constexpr, TRANSPOSED: gl.constexpr, INTERVAL: gl.constexpr, GROUP_M: gl.constexpr, ADD: gl.constexpr,
    HALVES: gl.constexpr, BLOCKS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup (number WHO, 0 or 1): computes its 64 rows of every tile.

    If all 64 rows are past the group's end, it only releases the stages.
    """
    STAGES: gl.constexpr = a_tiles.type.shape[0]
    BLOCK_K: gl.constexpr = BLOCK_BITS // a_tiles.dtype.primitive_bitwidth
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n_tiles = gl.cdiv(N, BLOCK_N)
    step = 0
    tiles_done = 0
    tile = gl.program_id(0)
    start = 0
    first = 0
    for g in range(G):
        end, m_tiles, stages = _sizes(offs_ptr, g, start, M, K, RAGGED, ADD, BLOCK_K, INTERVAL)
        last = first + m_tiles * n_tiles
        while tile < last:
            slot = tiles_done % NEXT_TILES
            mbarrier.wait(tile_full.index(slot), (tiles_done // NEXT_TILES) & 1)
            next_tile = gl.max(next_tiles.index(slot).load(ONE), 0)
            has_rows = True
            if RAGGED == "rows":
                has_rows = start + _position(tile - first, m_tiles, n_tiles, GROUP_M)[0] * BLOCK_M + WHO * 64 < end
            if has_rows:
                step = _tile(
                    a_tiles, b_tiles, full, empty, staging.index(WHO),
                    out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr,
                    g, start, end, tile - first, m_tiles, n_tiles, step, stages, G, M, N, factor,
                    RAGGED, TRANSPOSED, INTERVAL, GROUP_M, ADD, HALVES, BLOCKS, WHO,
                )  # fmt: skip
            else:
                for _ in range(stages):
                    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
                    mbarrier.arrive(empty.index(step % STAGES), count=1)
                    step += 1
            # All threads have read next_tile: they met at a barrier before this warpgroup released a stage.
            mbarrier.arrive(tile_empty.index(slot), count=1)
            tile = next_tile
            tiles_done += 1
        first = last
        start = end
    if out_desc is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["G"])
def grouped_mm_kernel(
    a_desc, b_desc, out_ptr, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, offs_ptr, tile_counter_ptr, G, M, N, K,
    factor, RAGGED: gl.constexpr, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr, INTERVAL: gl.constexpr,
    GROUP_M: gl.constexpr, ADD: gl.constexpr, HALVES: gl.constexpr, BLOCKS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    next_tiles = gl.allocate_shared_memory(gl.int32, [NEXT_TILES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [NEXT_TILES, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [NEXT_TILES, 1], mbarrier.MBarrierLayout())
    staging = full  # not used
    if out_desc is not None:
        staging = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    for q in gl.static_range(NEXT_TILES):
        mbarrier.init(tile_full.index(q), count=1)
        mbarrier.init(tile_empty.index(q), count=2)
    gl.warp_specialize(
        [
            (_multiply, (a_tiles, b_tiles, full, empty, next_tiles, tile_full, tile_empty, staging, out_ptr, out_desc,
                         a_scale_ptr, b_scale_ptr, bias_ptr, offs_ptr, G, M, N, K, factor,
                         RAGGED, TRANSPOSED, INTERVAL, GROUP_M, ADD, HALVES, BLOCKS, 0)),
            (_multiply, (a_tiles, b_tiles, full, empty, next_tiles, tile_full, tile_empty, staging, out_ptr, out_desc,
                         a_scale_ptr, b_scale_ptr, bias_ptr, offs_ptr, G, M, N, K, factor,
                         RAGGED, TRANSPOSED, INTERVAL, GROUP_M, ADD, HALVES, BLOCKS, 1)),
            (_load, (a_tiles, b_tiles, full, empty, next_tiles, tile_full, tile_empty, a_desc, b_desc,
                     tile_counter_ptr, offs_ptr, G, M, N, K, RAGGED, TRANSPOSED, INTERVAL, GROUP_M, ADD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
