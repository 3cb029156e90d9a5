"""Argument checks, which raise ValueError. Some return the argument in a normalized form."""

import torch
from torch import Tensor

from mxep.quant.formats import E2M1, E4M3, E5M2, SCALE_DTYPE, MXFormat, ScaleMode, format_of

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
