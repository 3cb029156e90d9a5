"""Sums of groups of rows: a program takes a group and BLOCK_N columns, 32 rows at a time.

Read: x once, 1 to 4 bytes per element, and scales. Written: 4 bytes per group and column.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from mxep.quant.device import as_bytes, group_bounds, power_of_two
from mxep.quant.shapes import GROUP_SUMS_LANES, empty_group_sums
from mxep.runtime.launch import cdiv, launch

BLOCK_N = 128


@triton.jit
def _halves(lanes):
    """The sum over the first axis. A sum of two numbers has only one order."""
    if lanes.shape[0] > 1:
        return _halves(tl.sum(tl.reshape(lanes, (2, lanes.shape[0] // 2, lanes.shape[1])), axis=0))
    else:
        return tl.reshape(lanes, (lanes.shape[1],))


@triton.jit(do_not_specialize=["rows", "num_groups"])
def group_sums_kernel(
    x_ptr, scale_ptr, offs_ptr, out_ptr, rows, num_groups, N, stride, scale_stride, block_size,
    LANES: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """scale_ptr may be None. UNIT divides block_size and BLOCK_N."""
    group = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    unit = tl.program_id(1) * BLOCK_N + UNIT * tl.arange(0, BLOCK_N // UNIT)[None, :]
    start, end = group_bounds(group, offs_ptr, num_groups, rows)
    lanes = tl.zeros((LANES, BLOCK_N), out_ptr.dtype.element_ty)
    for first in range(start, end, LANES):
        row = (first + tl.arange(0, LANES)[:, None]).to(tl.int64)
        x = tl.load(x_ptr + row * stride + column, mask=(row < end) & (column < N), other=0.0).to(lanes.dtype)
        if scale_ptr is not None:
            scale = tl.load(
                scale_ptr + row * scale_stride + unit // block_size, mask=(row < end) & (unit < N), other=127
            )
            x = tl.reshape(x, (LANES, BLOCK_N // UNIT, UNIT)) * power_of_two(scale.to(tl.int32))[:, :, None]
            x = tl.reshape(x, (LANES, BLOCK_N))
        lanes += x
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + group.to(tl.int64) * N + column, _halves(lanes), mask=column < N)


def group_sums(x: Tensor, scale: Tensor | None, block_size: int, offs: Tensor) -> Tensor:
    """mxep::group_sums."""
    rows, width = x.shape
    groups = offs.shape[0]
    out = empty_group_sums(x, offs)
    x, scale = (part if part is None or part.stride(1) == 1 else part.contiguous() for part in (x, scale))
    launch(group_sums_kernel, (groups, cdiv(width, BLOCK_N)),
        x, None if scale is None else as_bytes(scale), offs, out, rows, groups, width, x.stride(0),
        0 if scale is None else scale.stride(0), block_size,
        LANES=GROUP_SUMS_LANES, BLOCK_N=BLOCK_N, UNIT=math.gcd(block_size, BLOCK_N), num_warps=4,
    )  # fmt: skip
    return out
