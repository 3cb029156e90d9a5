"""The guard on the device: three kernels, of which two return at once where the first found nothing.

trigger   spreads of both operands' rows -> fired: is any of them too large to be harmless?
moments   a weight's qdata (G, N, K)     -> (4, G, K): mean and variance of each column, and of its fold's errors
check     an activation's qdata (M, K)   -> (2, M): noise and signal of each row's products; flag, counters

The numbers are those of `mxep.gemm.guard_ops`, in fp32; `mxep.gemm.guard` has the formulas. Folded qdata are not read:
they follow from the exact ones and the row's scale, a byte an element instead of two. Sums have a fixed order, counters
are integers: results are the same in every run. Programs of `check` take ROWS rows, all of one group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.kernels.bounds import valid_rows
from mxep.quant.kernels.fold import shifted
from mxep.quant.kernels.numbers import NAN_BYTE, bytes_of

SPREADS = 2048
ROWS = 16
COLUMNS = 128
WEIGHT_TILE = (16, 128)
INF = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["groups", "limit", "num_a", "num_w"])
def trigger_kernel(
    spread_a_ptr, spread_w_ptr, ends_ptr, fired_ptr, counters_ptr, groups, num_a, num_w, limit, CHUNK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    valid = valid_rows(ends_ptr, groups, num_a)
    spread = tl.load(spread_a_ptr + place, mask=place < valid, other=0)
    spread = tl.maximum(spread, tl.load(spread_w_ptr + place, mask=place < num_w, other=0))
    if tl.program_id(0) == 0:
        tl.atomic_add(counters_ptr, 1, sem="relaxed")
    if tl.max(spread, axis=0) > limit:
        if tl.atomic_max(fired_ptr, 1, sem="relaxed") == 0:
            tl.atomic_add(counters_ptr + 1, 1, sem="relaxed")


@triton.jit
def _errors_of(qdata, shift, ESTIMATE: tl.constexpr):
    """(values, folded values, errors, variances of errors), fp32, in units of the row's scale; shift broadcasts.

    ESTIMATE: qdata came with one scale a row, so errors are not known, but the variance that a subnormal's step makes.
    """
    E4M3: tl.constexpr = qdata.dtype == tl.float8e4nv
    values = qdata.to(tl.float32)
    values = tl.where(tl.abs(values) < INF, values, 0.0)
    if ESTIMATE:
        smallest_normal: tl.constexpr = 2.0**-6 if E4M3 else 2.0**-14
        variance: tl.constexpr = 2.0**-18 / 12 if E4M3 else 2.0**-32 / 12
        return values, values, tl.zeros_like(values), tl.where(tl.abs(values) < smallest_normal, variance, 0.0)
    else:
        folded = shifted(qdata, shift, shift < 0).to(qdata.dtype).to(tl.float32)
        folded = tl.where(tl.abs(folded) < INF, folded, 0.0)
        values *= tl.where(shift < 127, (127 - shift) << 23, 0).to(tl.float32, bitcast=True)
        return values, folded, folded - values, tl.zeros_like(values)


@triton.jit
def _put_moments(sums, squares, N, ptr, size, mask):
    mean = tl.sum(sums, axis=0, keep_dims=True) / N
    tl.store(ptr, mean, mask=mask)
    variance = tl.sum(squares, axis=0, keep_dims=True) / N - mean * mean
    tl.store(ptr + size, tl.maximum(variance, 0.0), mask=mask)


@triton.jit
def moments_kernel(
    fired_ptr, codes_ptr, scale_ptr, top_ptr, out_ptr, N, K, stride_group, stride_row, scale_stride_group,
    scale_stride_row, scale_stride_block, top_stride_group, top_stride_row, ROW_SCALED: tl.constexpr, NR: tl.constexpr,
    NC: tl.constexpr,
):  # fmt: skip
    """A program takes NC columns of a group. ROW_SCALED: there is one scale a row, not one for 32 qdata."""
    if fired_ptr is not None:
        if tl.load(fired_ptr) == 0:
            return
    SUB: tl.constexpr = 32
    BLOCKS: tl.constexpr = NC // SUB
    group = (tl.program_id(0) // tl.cdiv(K, NC)).to(tl.int64)
    column0 = tl.program_id(0) % tl.cdiv(K, NC) * NC
    codes_ptr += group * stride_group
    scale_ptr += group * scale_stride_group
    top_ptr += group * top_stride_group
    many = tl.arange(0, 1024)
    largest = tl.zeros((1024,), tl.int32)
    for n in range(0, N, 1024):
        top = tl.load(top_ptr + (n + many) * top_stride_row, mask=n + many < N, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.where(top == NAN_BYTE, 0, top))
    unit = tl.max(largest, axis=0)
    block = column0 // SUB + tl.arange(0, BLOCKS)[None, :]
    column = block[:, :, None] * SUB + tl.arange(0, SUB)
    sums = tl.zeros((NR, BLOCKS, SUB), tl.float32)
    squares = tl.zeros((NR, BLOCKS, SUB), tl.float32)
    error_sums = tl.zeros((NR, BLOCKS, SUB), tl.float32)
    error_squares = tl.zeros((NR, BLOCKS, SUB), tl.float32)
    for n in range(0, N, NR):
        row = n + tl.arange(0, NR)
        there = row < N
        row = row.to(tl.int64)
        top = tl.load(top_ptr + row * top_stride_row, mask=there, other=NAN_BYTE).to(tl.int32)
        there = top != NAN_BYTE
        mask = there[:, None, None] & (column < K)
        qdata = tl.load(codes_ptr + row[:, None, None] * stride_row + column, mask=mask, other=0.0)
        shift = tl.zeros((NR, BLOCKS), tl.int32)
        if not ROW_SCALED:
            byte = tl.load(
                scale_ptr + row[:, None] * scale_stride_row + block * scale_stride_block,
                mask=there[:, None] & (block * SUB < K),
                other=0,
            )
            shift = tl.maximum(top[:, None] - byte.to(tl.int32), 0)
        values, _, errors, variances = _errors_of(qdata, shift[:, :, None], ROW_SCALED)
        below = unit - top
        factor = tl.where(there & (below < 127), (127 - below) << 23, 0).to(tl.float32, bitcast=True)[:, None, None]
        values *= factor
        errors *= factor
        sums += values
        squares += values * values
        error_sums += errors
        error_squares += errors * errors + variances * factor * factor
    out_ptr += group * K
    size = (tl.num_programs(0) // tl.cdiv(K, NC)).to(tl.int64) * K
    _put_moments(sums, squares, N, out_ptr + column, size, column < K)
    _put_moments(error_sums, error_squares, N, out_ptr + 2 * size + column, size, column < K)


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _row_sums(x):
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2])), axis=1)


@triton.jit(do_not_specialize=["M", "groups", "max_ratio"])
def check_kernel(
    fired_ptr, codes_ptr, scale_ptr, index_ptr, top_ptr, moments_ptr, ends_ptr, sums_ptr, flag_ptr, counters_ptr, M, K,
    groups, max_ratio, stride, scale_stride, scale_stride_block, top_stride, GROUPS: tl.constexpr,
    ROW_SCALED: tl.constexpr, ROWS: tl.constexpr, NC: tl.constexpr,
):  # fmt: skip
    """ROW_SCALED: there is one scale a row, not one for 32 qdata."""
    if tl.load(fired_ptr) == 0:
        return
    row0 = tl.program_id(0) * ROWS
    if row0 >= tl.load(ends_ptr + groups - 1):
        return
    SUB: tl.constexpr = 32
    BLOCKS: tl.constexpr = NC // SUB
    g = tl.arange(0, GROUPS)
    group = tl.sum((tl.load(ends_ptr + g, mask=g < groups, other=2147483647) <= row0).to(tl.int32), axis=0)
    row = row0 + tl.arange(0, ROWS)
    there = row < M
    top = tl.load(top_ptr + row.to(tl.int64) * top_stride, mask=there, other=NAN_BYTE).to(tl.int32)
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=there, other=-1)
    read = (top != NAN_BYTE) & (source >= 0)
    source = tl.maximum(source, 0).to(tl.int64)
    moments_ptr += group.to(tl.int64) * K
    size = groups.to(tl.int64) * K
    noise_means = tl.zeros((ROWS, BLOCKS, SUB), tl.float32)
    signal_means = tl.zeros((ROWS, BLOCKS, SUB), tl.float32)
    noises = tl.zeros((ROWS, BLOCKS, SUB), tl.float32)
    signals = tl.zeros((ROWS, BLOCKS, SUB), tl.float32)
    for column0 in range(0, K, NC):
        block = column0 // SUB + tl.arange(0, BLOCKS)[None, :]
        column = block[:, :, None] * SUB + tl.arange(0, SUB)
        mask = read[:, None, None] & (column < K)
        qdata = tl.load(codes_ptr + source[:, None, None] * stride + column, mask=mask, other=0.0)
        shift = tl.zeros((ROWS, BLOCKS), tl.int32)
        if not ROW_SCALED:
            byte = tl.load(
                scale_ptr + source[:, None] * scale_stride + block * scale_stride_block,
                mask=read[:, None] & (block * SUB < K),
                other=0,
            )
            shift = tl.maximum(top[:, None] - byte.to(tl.int32), 0)
        values, folded, errors, variances = _errors_of(qdata, shift[:, :, None], ROW_SCALED)
        variances = tl.where(mask, variances, 0.0)
        mean = tl.load(moments_ptr + column, mask=column < K, other=0.0)
        variance = tl.load(moments_ptr + size + column, mask=column < K, other=0.0)
        error_mean = tl.load(moments_ptr + 2 * size + column, mask=column < K, other=0.0)
        error_variance = tl.load(moments_ptr + 3 * size + column, mask=column < K, other=0.0)
        noise_means += errors * mean + folded * error_mean
        signal_means += values * mean
        noises += (errors * errors + variances) * variance + variances * mean * mean
        noises += folded * folded * error_variance
        signals += values * values * variance
    noise = _row_sums(noises) + _square(_row_sums(noise_means))
    signal = _row_sums(signals) + _square(_row_sums(signal_means))
    tl.store(sums_ptr + row, noise, mask=there)
    tl.store(sums_ptr + M.to(tl.int64) + row, signal, mask=there)
    ratio = tl.where(signal > 0, noise / signal, 0.0)
    failed = tl.sum((ratio > max_ratio).to(tl.int32), axis=0)
    worst = tl.max(ratio.to(tl.int32, bitcast=True), axis=0)
    tl.atomic_max(counters_ptr + 4, worst.to(tl.int64), sem="relaxed")
    if failed > 0:
        tl.atomic_add(counters_ptr + 3, failed.to(tl.int64), sem="relaxed")
        if tl.atomic_max(flag_ptr, 1, sem="relaxed") == 0:
            tl.atomic_add(counters_ptr + 2, 1, sem="relaxed")


def trigger(spread_a: Tensor | None, spread_w: Tensor | None, offs: Tensor, counters: Tensor, limit: int) -> Tensor:
    """mxep::guard_trigger."""
    if spread_a is None or spread_w is None:
        counters[:2].add_(1)
        return torch.ones((), dtype=torch.int32, device=counters.device)
    fired = torch.zeros((), dtype=torch.int32, device=counters.device)
    grid = (triton.cdiv(max(spread_a.numel(), spread_w.numel(), 1), SPREADS),)
    trigger_kernel[grid](
        spread_a.contiguous(), spread_w.contiguous(), offs, fired, counters, offs.shape[0],
        spread_a.numel(), spread_w.numel(), limit, CHUNK=SPREADS,
    )  # fmt: skip
    return fired


def moments(qdata: Tensor, scale: Tensor, top: Tensor, fired: Tensor | None) -> Tensor:
    """mxep::guard_moments."""
    qdata = qdata if qdata.stride(-1) == 1 else qdata.contiguous()
    groups, n, k = qdata.shape
    out = torch.empty((4, groups, k), dtype=torch.float32, device=qdata.device)
    nr, nc = WEIGHT_TILE
    scale, top = bytes_of(scale), bytes_of(top)
    moments_kernel[(groups * triton.cdiv(k, nc),)](
        fired, qdata, scale, top, out, n, k, qdata.stride(0), qdata.stride(1), *scale.stride(), top.stride(0),
        top.stride(1), ROW_SCALED=scale.shape[-1] == 1, NR=nr, NC=nc,
    )  # fmt: skip
    return out


def check(
    qdata: Tensor,
    scale: Tensor,
    row_index: Tensor | None,
    top: Tensor,
    moments: Tensor,
    offs: Tensor,
    fired: Tensor,
    counters: Tensor,
    max_ratio: float,
) -> tuple[Tensor, Tensor]:
    """mxep::guard_check."""
    qdata = qdata if qdata.stride(-1) == 1 else qdata.contiguous()
    m, k = top.shape[0], qdata.shape[1]
    sums = torch.empty((2, m), dtype=torch.float32, device=qdata.device)
    flag = torch.zeros((), dtype=torch.int32, device=qdata.device)
    scale, top = bytes_of(scale), bytes_of(top)
    if m:
        check_kernel[(triton.cdiv(m, ROWS),)](
            fired, qdata, scale, row_index, top, moments, offs, sums, flag, counters, m, k, offs.shape[0],
            max_ratio, qdata.stride(0), scale.stride(0), scale.stride(1), top.stride(0),
            GROUPS=triton.next_power_of_2(offs.shape[0]), ROW_SCALED=scale.shape[-1] == 1, ROWS=ROWS, NC=COLUMNS,
        )  # fmt: skip
    return flag, sums
