"""Checks of arguments, which raise ValueError, and uninitialized results of ops, their fakes and their launchers.

Letters: N or R rows, K columns, G groups of rows, F hidden width of SwiGLU. The host does not know the group sizes, so
buffers are large enough for any sizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.quant.formats import E2M1, E4M3, E5M2, SCALE_DTYPE, MXFormat, ScaleMode, format_of

SWIZZLE_ROWS, SWIZZLE_COLS = 128, 4
"""Rows and columns of a swizzled tile of scales, see `mxep.quant.groups`."""

GROUP_SUMS_LANES = 32
"""Number of partial sums per group and column in `group_sums`."""


def round_up(n: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is at least n. n >= 0, an int or a torch.SymInt."""
    return (n + alignment - 1) // alignment * alignment


def padded_rows(rows: int, num_groups: int, alignment: int) -> int:
    """Buffer rows that suffice for `rows` rows in `num_groups` groups of any sizes, each padded to `alignment`."""
    return round_up(rows + num_groups * (alignment - 1), alignment)


def swizzled_shape(rows: int, cols: int, offs: Tensor | None) -> tuple[int, int]:
    """Shape of the result of `mxep.quant.groups.swizzle_scales` for scales (rows, cols) and the same offs."""
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

    shape: that of the tensor; None: x.shape. block_size 0: one scale per row. x gives the device. qdata of E2M1 are
    (..., K/2).
    """
    *rest, k = shape or x.shape
    scales, bytes_ = k // block_size if block_size else 1, k // format_of(dtype).elements_per_byte
    return x.new_empty((*rest, bytes_), dtype=dtype), x.new_empty((*rest, scales), dtype=SCALE_DTYPE)


def empty_values(qdata: Tensor, row_index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Uninitialized values (..., N, K) of qdata blocked along its last axis, with the row index applied."""
    *rest, k = picked_shape(qdata, row_index)
    return qdata.new_empty((*rest, k * format_of(qdata.dtype).elements_per_byte), dtype=dtype)


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
    """Uninitialized h (R, F) `dtype`, and uint8 scales (R, F/block_size), (R, 1) if folded, or (0,) if mode is None."""
    h = gate_up.new_empty(
        (gate_up.shape[0] + (0 if rest is None else rest.shape[0]), gate_up.shape[1] // 2), dtype=dtype
    )
    return h, _scale_of_rows(h, h.shape[1], mode, block_size, folded)


def empty_swiglu_backward(
    d_h: Tensor, mode: str | None, block_size: int, folded: bool, h_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialized scales of d_gate_up, d_row_weight (R,) fp32, and h (R, F) with its scales.

    Scales: as of `empty_swiglu`; if d_gate_up has one per row, so has h. Without h_dtype h and its scales are (0,).
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


Axis = int | tuple[int, int]
BLOCKS_2D = (-2, -1)
"""Value of `axis` for square 2-D blocks, which have one scale per block_size rows x block_size columns."""

VALUE_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
"""Dtypes of tensors that can be quantized. An MXTensor's outer dtype is one of them, too."""

_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}
_MODES = tuple(mode.value for mode in ScaleMode)


def check_values(name: str, x: Tensor) -> None:
    """Check that `x` is a plain bf16, fp32 or fp16 tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: got a {type(x).__name__}, want a tensor")
    if type(x) is not Tensor and hasattr(x, "qdata"):
        raise ValueError(f"{name}: got an MXTensor, want a plain tensor: dequantize or requantize it")
    if x.dtype not in VALUE_DTYPES:
        raise ValueError(f"{name}: got dtype {x.dtype}, want one of {VALUE_DTYPES}")


def check_format(fmt: MXFormat | str) -> torch.dtype:
    """torch dtype of qdata in `fmt`, which is E4M3, E5M2 or a name of one. E2M1 raises: only `quantize` supports it."""
    if isinstance(fmt, str):
        fmt = _FORMATS.get(fmt, fmt)
    if fmt not in (E4M3, E5M2):
        raise ValueError(f"fmt: got {fmt!r}, want E4M3 or E5M2")
    assert isinstance(fmt, MXFormat)
    return fmt.dtype


def check_mode(mode: ScaleMode | str) -> str:
    """Name of the scale mode `mode`, which is a ScaleMode or a name."""
    if mode not in _MODES:
        raise ValueError(f"mode: got {mode!r}, want one of {_MODES}")
    return str(mode)


def check_axis(axis: Axis, x: Tensor) -> Axis:
    """Normalize a blocked axis of `x` to -1, -2 or (-2, -1). Raises ValueError if `x` has fewer than two axes."""
    if x.ndim < 2:
        raise ValueError(f"got shape {tuple(x.shape)}, want two axes or more, (..., N, K)")
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    transposed = tuple(sorted(a - x.ndim if a >= 0 else a for a in given))
    if transposed == BLOCKS_2D:
        return BLOCKS_2D
    if transposed in ((-1,), (-2,)):
        return transposed[0]
    raise ValueError(f"axis: got {axis} for shape {tuple(x.shape)}, want one of the last two, or both for 2-D blocks")


def check_block(block_size: int | None, axis: Axis, x: Tensor | torch.Size) -> int:
    """Elements per scale: block_size, or for None the length of the blocked axis.

    Raises ValueError if the number does not divide every blocked axis of `x`, a tensor or a shape.
    """
    shape = x if isinstance(x, torch.Size) else x.shape
    axes = (axis,) if isinstance(axis, int) else axis
    if block_size is None:
        if len(axes) > 1:
            raise ValueError("block_size: got None for 2-D blocks, want a number of elements")
        block_size = shape[axes[0]]
    if block_size < 1:
        raise ValueError(f"block_size: got {block_size} for shape {tuple(shape)}, want a positive number of elements")
    for a in axes:
        if shape[a] % block_size:
            raise ValueError(f"got shape {tuple(shape)}, want axis {a} a multiple of the block, {block_size}")
    return block_size


def check_block_e2m1(block_size: int, axis: Axis) -> None:
    """Check that the two E2M1 elements of a byte always lie in one block: axis -1 or -2 and an even block_size."""
    if axis == BLOCKS_2D:
        raise ValueError(
            "axis: got 2-D blocks of E2M1, want -1 or -2: two elements share a byte along the blocked axis"
        )
    if block_size % 2:
        raise ValueError(f"block_size: got {block_size} for E2M1, want an even number: two elements share a byte")


def check_byte_elements(name: str, mx: Tensor) -> None:
    """Check that MXTensor `mx` is E4M3 or E5M2, one byte per element."""
    if mx.qdata.dtype == E2M1.dtype:  # type: ignore[attr-defined]
        raise ValueError(f"{name}: got E2M1, want E4M3 or E5M2: to_mxfp8 gives the same values in E4M3")


def shape_of(qdata: Tensor, axis: Axis) -> torch.Size:
    """Shape in elements, (..., N, K), of qdata blocked along `axis`. It differs from qdata.shape only for E2M1."""
    per_byte = format_of(qdata.dtype).elements_per_byte
    if per_byte == 1 or not isinstance(axis, int):
        return qdata.shape
    shape = [*qdata.shape]
    shape[axis] *= per_byte
    return torch.Size(shape)


def check_parts(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, axis: Axis, block_size: int, orig_dtype: torch.dtype
) -> None:
    for name, part in (("qdata", qdata), ("scales", scale), ("row_index", row_index)):
        if not isinstance(part, Tensor) and (part is not None or name != "row_index"):
            raise ValueError(f"{name}: got a {type(part).__name__}, want a tensor")
    if qdata.dtype not in (E4M3.dtype, E5M2.dtype, E2M1.dtype):
        raise ValueError(
            f"qdata: got {qdata.dtype}: want {E4M3.dtype}, {E5M2.dtype} or {E2M1.dtype}; "
            "mxep.quant.quantize makes qdata"
        )
    if axis not in (-1, -2, BLOCKS_2D):
        raise ValueError(f"axis: got {axis!r}, want -1, -2 or {BLOCKS_2D}")
    if qdata.ndim < 2:
        raise ValueError(f"qdata: got shape {tuple(qdata.shape)}, want two axes or more, (..., N, K)")
    if not isinstance(block_size, (int, torch.SymInt)):
        raise ValueError(f"block_size: got {block_size!r}, want a number of elements")
    shape = shape_of(qdata, axis)
    check_block(block_size, axis, shape)
    if qdata.dtype == E2M1.dtype:
        check_block_e2m1(block_size, axis)
    if orig_dtype not in VALUE_DTYPES:
        raise ValueError(f"orig_dtype: got {orig_dtype}, want one of {VALUE_DTYPES}")
    *rest, n, k = shape
    wanted = *rest, n if axis == -1 else n // block_size, k if axis == -2 else k // block_size
    if (scale.dtype, scale.shape, scale.device) != (SCALE_DTYPE, wanted, qdata.device):
        got = f"{scale.dtype} of shape {tuple(scale.shape)} on {scale.device}"
        raise ValueError(
            f"scales: got {got}, want {SCALE_DTYPE} of shape {wanted} on {qdata.device} "
            f"for qdata {tuple(shape)} in blocks of {block_size} along axis {axis}"
        )
    if row_index is None:
        return
    if row_index.dtype != torch.int32 or row_index.ndim != 1 or row_index.device != qdata.device:
        got = f"{row_index.dtype} of shape {tuple(row_index.shape)} on {row_index.device}"
        raise ValueError(f"row_index: got {got}, want torch.int32 of one axis on {qdata.device}")
    if qdata.ndim != 2 or axis != -1:
        raise ValueError(f"row_index: got qdata {tuple(qdata.shape)} blocked along {axis}, want (S, K) along -1")
