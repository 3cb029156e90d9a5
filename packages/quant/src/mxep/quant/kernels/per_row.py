"""Row-scaled qdata both ways: one scale per row, and one per column, of x (N, K) read twice.

    quantize_per_row      x -> qdata (N, K), scale (N, 1)   and the amax of each column, by atomic max
    quantize_per_column   x -> qdata (K, N), scale (1, K)   the second pass of `columns`

A column's scale needs all its rows before its first element, so two reads are the least: 6 bytes per element of bf16,
instead of 8 for rows and columns by themselves. The second pass may wait: a weight's columns wait until backward. A
program of the first pass takes whole rows, ROWS at a time, held in registers with the running amax of their columns. A
thread has the same columns of all rows, so these need no exchange. The next rows are loaded before the barrier for the
scales of these. Maxima are integers, so their order does not matter: results are the same in every run. Leading axes
are a batch.

A thread stores the 8 elements that it has loaded together. Triton would prefer to store 16 and move them through shared
memory. With 8 columns per thread or fewer it would move the maxima, too, at an eighth of the speed.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import abs_bits, as_bytes, num_sms, reciprocal, scale_of_amax
from mxep.quant.kernels.columns import column_amax, quantize_long_columns
from mxep.quant.kernels.rows import LONGEST, quantize_rows
from mxep.quant.shapes import empty_columns, empty_rows, stacked, stacked_shape
from mxep.runtime.launch import cdiv, launch, next_power_of_2

ROWS_PER_PROGRAM = 192
"""Approximate rows per program. Few mean many atomics, one per column of a program. Many mean few programs."""
LEAST_ROWS = 16
"""Least rows per program, however short the matrices are."""


@triton.jit(do_not_specialize=["steps"])
def quantize_rows_with_amax_kernel(
    x_ptr, qdata_ptr, scale_ptr, bits_ptr, N, all_rows, steps, K: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """x (batch, N, K) -> qdata, scale (batch, N). bits (batch, K), the columns' amax bits, start at 0 or at others'.

    A program takes ROWS rows in each of its steps. all_rows: rows of a matrix of the results, if it has other parts'
    rows, too; else None.
    """
    programs = tl.cdiv(N, ROWS * steps)
    batch = (tl.program_id(0) // programs).to(tl.int64)
    row0 = tl.program_id(0) % programs * (ROWS * steps)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, triton.next_power_of_2(K))
    column_mask = column < K
    if all_rows is not None:
        qdata_ptr += batch * (all_rows - N) * K
        scale_ptr += batch * (all_rows - N)
    amax = tl.zeros(column.shape, tl.int32)
    dtype: tl.constexpr = qdata_ptr.dtype.element_ty
    first = batch * N + row0
    offsets = row[:, None] * K + column[None, :]
    left = N - row0
    mask = (row < left)[:, None] & column_mask[None, :]
    ahead = tl.load(x_ptr + first * K + offsets, mask=mask, other=0.0)
    for step in range(tl.minimum(steps, tl.cdiv(left, ROWS))):
        x = ahead.to(tl.float32)
        row_mask = row < left
        mask = row_mask[:, None] & column_mask[None, :]
        left -= ROWS
        next_mask = (row < tl.where(step + 1 < steps, left, 0))[:, None] & column_mask[None, :]
        ahead = tl.load(x_ptr + (first + ROWS) * K + offsets, mask=next_mask, other=0.0)
        bits = abs_bits(x)
        amax = tl.maximum(amax, tl.max(bits, axis=0))
        scale = scale_of_amax(tl.max(bits, axis=1), MODE, dtype)
        to = tl.max_contiguous(qdata_ptr + first * K + offsets, (1, 8))
        tl.store(to, (x * reciprocal(scale)[:, None]).to(dtype), mask=mask)
        tl.store(scale_ptr + first + row, scale.to(tl.uint8), mask=row_mask)
        first += ROWS
    tl.atomic_max(bits_ptr + batch * K + column, amax, mask=column_mask, sem="relaxed")


def quantize_per_row(
    x: Tensor, y: Tensor | None, z: Tensor | None, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """mxep::quantize_per_row. Rows longer than registers hold are joined and read once more."""
    *rest, n, k = shape = stacked_shape(x, y, z)
    amax = torch.zeros((*rest, k), dtype=torch.float32, device=x.device)
    bits = amax.view(torch.int32)
    if k > LONGEST or not x.numel():
        x = stacked(x, y, z).contiguous()
        column_amax(x, bits, n)
        return *quantize_rows(x, dtype, mode, k), amax
    qdata, scale = empty_rows(x, dtype, k, shape)
    wide = next_power_of_2(k) > 2048
    rows = 8 // x.element_size() if k <= LONGEST // 2 else 1
    batch, all_rows = amax.numel() // k, None if y is None else n
    for part, (to, scale_to) in _places((qdata, as_bytes(scale)), -2, x, y, z):
        n = part.shape[-2]
        steps = _steps(batch, n, rows, num_sms(x.device) * (1 if wide else 3))
        launch(quantize_rows_with_amax_kernel, (batch * cdiv(n, rows * steps),),
            part, to, scale_to, bits, n, all_rows, steps, K=k, MODE=mode, ROWS=rows, num_warps=16 if wide else 4,
        )  # fmt: skip
    return qdata, scale, amax


def _places(
    results: tuple[Tensor, ...], dim: int, *parts: Tensor | None
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Each part, contiguous, and its place in `results`, which hold all parts along `dim`."""
    start = 0
    for part in parts:
        if part is not None and (n := part.shape[-2]):
            whole = results[0].shape[dim] == n
            yield part.contiguous(), results if whole else tuple(to.narrow(dim, start, n) for to in results)
            start += n


def _steps(batch: int, n: int, rows: int, at_once: int) -> int:
    """Steps of `rows` rows for each program, so that `at_once` programs are busy to the end."""
    waves = max(1, round(batch * n / (at_once * ROWS_PER_PROGRAM)))
    return cdiv(max(LEAST_ROWS, cdiv(n, max(1, at_once * waves // batch))), rows)


def quantize_per_column(
    x: Tensor, y: Tensor | None, z: Tensor | None, amax: Tensor, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor]:
    """mxep::quantize_per_column."""
    *_, n, k = shape = stacked_shape(x, y, z)
    qdata, scale = empty_columns(x, dtype, n, shape)
    if qdata.numel():
        bits = amax.contiguous().view(-1, k).view(torch.int32)
        for part, (to,) in _places((qdata,), -1, x, y, z):
            quantize_long_columns(part, bits, to, scale, mode, part.shape[-2])
    return qdata, scale
