"""Shapes and uninitialized result tensors, shared by ops, their fakes and their launchers.

Letters: N or R rows, K columns, G groups of rows, F hidden width of SwiGLU. The host does not know the group sizes, so
buffers are large enough for any sizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.quant.formats import SCALE_DTYPE

SWIZZLE_ROWS, SWIZZLE_COLS = 128, 4
"""Rows and columns of a swizzled tile of scales, see `mxep.quant.swizzle`."""

GROUP_SUMS_LANES = 32
"""Number of partial sums per group and column in `group_sums`."""


def round_up(n: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is at least n. n >= 0, an int or a torch.SymInt."""
    return (n + alignment - 1) // alignment * alignment


def padded_rows(rows: int, num_groups: int, alignment: int) -> int:
    """Buffer rows that suffice for `rows` rows in `num_groups` groups of any sizes, each padded to `alignment`."""
    return round_up(rows + num_groups * (alignment - 1), alignment)


def swizzled_shape(rows: int, cols: int, offs: Tensor | None) -> tuple[int, int]:
    """Shape of the result of `mxep.quant.swizzle.swizzle_scales` for scales (rows, cols) and the same offs."""
    num_groups = 0 if offs is None else offs.shape[0]
    return padded_rows(rows, num_groups, SWIZZLE_ROWS), round_up(cols, SWIZZLE_COLS)


def num_rows(stored: Tensor, row_index: Tensor | None) -> int:
    return stored.shape[-2] if row_index is None else row_index.shape[0]


def picked_shape(stored: Tensor, row_index: Tensor | None) -> tuple[int, ...]:
    return *stored.shape[:-2], num_rows(stored, row_index), stored.shape[-1]


def joined(dim: int, *parts: Tensor | None) -> Tensor:
    """Concatenate parts (..., N, K) along dim -2 or -1, skipping None."""
    given = [part for part in parts if part is not None]
    return given[0] if len(given) == 1 else torch.cat(given, dim)


def joined_shape(dim: int, *parts: Tensor | None) -> tuple[int, ...]:
    first, *others = (part.shape for part in parts if part is not None)
    shape = [*first]
    shape[dim] += sum(other[dim] for other in others)
    return tuple(shape)


def empty_rows(
    x: Tensor, dtype: torch.dtype, block_size: int, shape: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Uninitialized qdata (..., K) and scale (..., K/block_size) of a tensor (..., K) quantized along rows.

    shape: that of the tensor; None: x.shape. block_size 0: one scale per row. x gives the device.
    """
    *rest, k = shape or x.shape
    scales = k // block_size if block_size else 1
    return x.new_empty((*rest, k), dtype=dtype), x.new_empty((*rest, scales), dtype=SCALE_DTYPE)


def empty_columns(
    x: Tensor, dtype: torch.dtype, block_size: int, shape: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Uninitialized qdata (..., K, N) and scale (..., N/block_size, K) of a tensor (..., N, K) quantized along columns.

    shape: that of the tensor; None: x.shape. x gives the device.
    """
    *rest, n, k = shape or x.shape
    return x.new_empty((*rest, k, n), dtype=dtype), x.new_empty((*rest, n // block_size, k), dtype=SCALE_DTYPE)


def empty_2d(x: Tensor, dtype: torch.dtype, block_size: int) -> tuple[Tensor, Tensor]:
    """Uninitialized qdata (..., N, K) and scale (..., N/block_size, K/block_size) of x (..., N, K) in square blocks."""
    *rest, n, k = x.shape
    scale = x.new_empty((*rest, n // block_size, k // block_size), dtype=SCALE_DTYPE)
    return x.new_empty(x.shape, dtype=dtype), scale


def empty_swiglu(
    gate_up: Tensor, dtype: torch.dtype, mode: str | None, block_size: int, folded: bool, rest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Uninitialized results of `mxep::swiglu`.

    Returns:
        h: (R, F) `dtype`.
        scale: uint8, (R, F/block_size), (R, 1) if folded, or (0,) if mode is None.
    """
    h = gate_up.new_empty(
        (gate_up.shape[0] + (0 if rest is None else rest.shape[0]), gate_up.shape[1] // 2), dtype=dtype
    )
    return h, _scale_of_rows(h, h.shape[1], mode, block_size, folded)


def empty_swiglu_backward(
    d_h: Tensor, mode: str | None, block_size: int, folded: bool, h_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialized results of `mxep::swiglu_backward`.

    Returns:
        scale: uint8 scales of d_gate_up, (R, 2F/block_size), (R, 1) if folded, or (0,) if mode is None.
        d_row_weight: (R,) fp32.
        h: (R, F) h_dtype, or (0,) without h_dtype.
        h_scale: uint8 scales of h, or (0,) without h_dtype.
    """
    rows, width = d_h.shape
    scale = _scale_of_rows(d_h, 2 * width, mode, block_size, folded)
    h, h_scale = d_h.new_empty(0), d_h.new_empty(0, dtype=torch.uint8)
    if h_dtype is not None:
        h = d_h.new_empty((rows, width), dtype=h_dtype)
        h_scale = _scale_of_rows(h, width, mode, min(block_size, width), folded)
    return scale, d_h.new_empty(rows, dtype=torch.float32), h, h_scale


def _scale_of_rows(x: Tensor, width: int, mode: str | None, block_size: int, folded: bool) -> Tensor:
    shape = (0,) if mode is None else (x.shape[0], 1 if folded else width // block_size)
    return x.new_empty(shape, dtype=torch.uint8)


def empty_group_sums(x: Tensor, offs: Tensor) -> Tensor:
    """Uninitialized (G, N) for x (R, N) and offs (G,): fp64 if x is fp64, else fp32."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((offs.shape[0], x.shape[1]), dtype=dtype)


def empty_picked(x: Tensor, row_index: Tensor) -> Tensor:
    return x.new_empty((row_index.shape[0], *x.shape[1:]))
