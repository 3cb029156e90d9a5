"""Quantization for users: a plain or quantized tensor in, an MXTensor out.

`mxep.quant.ops` explains how elements are rounded, `mxep.quant.formats` how scales are chosen. "Straight through"
means: the gradient of the result is passed to x unchanged, as if nothing had been rounded.

x may be a view `y.mT` of a contiguous y, such as a weight stored as (E, K, N). Then y is quantized along its other axis
and the result is transposed, so that memory is read in order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.quant import ops
from mxep.quant.block_fp8 import BlockFP8
from mxep.quant.formats import BLOCK, E2M1, E4M3, MXFormat, ScaleMode
from mxep.quant.groups import check_offs, fill_rows, group_of_rows, valid_rows
from mxep.quant.ops import bytewise, decode, pick_mx, quantize_columns, quantize_rows, widen
from mxep.quant.shapes import (
    BLOCKS_2D,
    VALUE_DTYPES,
    Axis,
    check_axis,
    check_block,
    check_block_e2m1,
    check_byte_elements,
    check_format,
    check_mode,
    check_values,
    empty_columns,
    empty_rows,
    num_rows,
    picked_shape,
    round_up,
)
from mxep.quant.tensor import MXParts, MXTensor, wrap
from mxep.runtime.op import op


def quantize(
    x: Tensor,
    *,
    fmt: MXFormat | str = E4M3,
    mode: ScaleMode | str = ScaleMode.RCEIL,
    axis: Axis = -1,
    block_size: int | None = BLOCK,
    room: int | None = None,
) -> MXTensor:
    """Quantize x (..., N, K) bf16 | fp32 | fp16 to an MXTensor with its shape and outer dtype.

    fmt: E4M3 or E5M2 (MXFP8), E2M1 (MXFP4), or the name of one of them.
    axis: the blocked axis. -1: blocks along rows. -2: blocks along columns, with the same bytes as
        `quantize(x.mT).mT`. (-2, -1): square blocks of block_size x block_size elements, whose transpose is blocked
        alike, so that one quantization serves W and W^T; not for E2M1. Nonnegative axes are accepted.
    block_size: elements per scale. None: one scale over the whole axis ("row-scaled FP8").
    room: number of rows of the result, at least N, for x (N, K). Results of batches with different N then have one
        shape. Rows from N on are unspecified. Needs axis -1 and E4M3 or E5M2. The result has no gradient.

    If a block has a NaN or Inf, all its elements become NaN. Differentiable (straight through).
    Raises ValueError for other dtypes or axes, and if `block_size` does not divide the blocked axis.
    """
    check_values("quantize", x)
    axis = check_axis(axis, x)
    block_size = check_block(block_size, axis, x)
    if fmt in (E2M1, E2M1.name):
        if room is not None:
            raise ValueError(f"quantize: got room={room} for E2M1, want E4M3 or E5M2")
        check_block_e2m1(block_size, axis)
        by_rows = x.detach() if axis == -1 else x.detach().mT
        qdata, scale = ops.quantize_rows(by_rows, E2M1.dtype, check_mode(mode), block_size)
        if axis == -2:
            qdata, scale = qdata.mT, scale.mT
        return wrap(x, MXParts(qdata, scale, None, axis, block_size, x.dtype))
    how = check_format(fmt), check_mode(mode), block_size
    if room is not None:
        if x.dim() != 2 or axis != -1 or room < len(x):
            raise ValueError(
                f"quantize: got room={room} for x {tuple(x.shape)}, axis {axis}, want x (N <= room, K), -1"
            )
        qdata, scale = ops.quantize_into_room(x.detach(), room, *how)
        return MXTensor(qdata, scale, None, -1, block_size, x.dtype, trusted=True)
    source, transposed = _as_stored(x)
    if axis == BLOCKS_2D:
        qdata, scale = ops.quantize_2d(source, *how)
    elif (axis == -1) != transposed:
        qdata, scale = ops.quantize_rows(source, *how)
    else:
        qdata, scale = ops.quantize_columns(source, *how)
        qdata = qdata.mT
    if transposed:
        qdata, scale = qdata.mT, scale.mT
    return wrap(x, MXParts(qdata, scale, None, axis, block_size, x.dtype))


def quantize_joined(
    parts: Sequence[Tensor], *, fmt: MXFormat | str = E4M3, mode: ScaleMode | str = ScaleMode.RCEIL
) -> MXTensor:
    """Bitwise `quantize(torch.cat(parts, -1), block_size=None)`. parts: tensors (N, K_i). No gradient.

    Two or three parts of one dtype are not concatenated, but read where they are.
    Raises ValueError as `quantize` does, and for parts that are not 2-D.
    """
    if any(part.dim() != 2 for part in parts):
        got = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"quantize_joined: got parts {got}, want (N, K) each")
    for part in parts:
        check_values("quantize_joined", part)
    parts = [part.detach() for part in parts]
    if len(parts) not in (2, 3) or len({part.dtype for part in parts}) > 1:
        return quantize(torch.cat(parts, 1), fmt=fmt, mode=mode, block_size=None)
    qdata, scale = ops.quantize_joined_rows(*(*parts, None)[:3], check_format(fmt), check_mode(mode))
    return MXTensor(qdata, scale, None, -1, qdata.shape[1], parts[0].dtype, trusted=True)


def quantize_with_amax(
    x: Tensor | Sequence[Tensor], *, fmt: MXFormat | str = E4M3, mode: ScaleMode | str = ScaleMode.RCEIL
) -> tuple[MXTensor, Tensor]:
    """`quantize(x, block_size=None)`, and the amax of each column for :func:`quantize_columns_with_amax`. No gradient.

    Args:
        x: (..., N, K), or a sequence of parts (..., N_i, K) that would give x concatenated along N. Up to three parts
            of one dtype are not concatenated, but read where they are.
    Returns:
        MXTensor (..., N, K) with one scale per row.
        amax: (..., K) fp32, the largest magnitude of each column, NaN if the column has a NaN.
    Raises ValueError as `quantize` does, for parts of different K or leading axes, and for parts without elements.
    """
    parts, transposed = _parts("quantize_with_amax", x)
    how = check_format(fmt), check_mode(mode)
    if transposed:  # the columns are rows in memory and need no amax, but a caller may look at it
        source = parts[0].mT
        qdata, scale = ops.quantize_columns(source, *how, source.shape[-2])
        scale, amax = scale.mT, torch.linalg.vector_norm(source, torch.inf, -1, dtype=torch.float32)
    else:
        qdata, scale, amax = ops.quantize_per_row(*parts, *how)
    return MXTensor(qdata, scale, None, -1, qdata.shape[-1], parts[0].dtype, trusted=True), amax


def quantize_columns_with_amax(
    x: Tensor | Sequence[Tensor],
    amax: Tensor,
    *,
    fmt: MXFormat | str = E4M3,
    mode: ScaleMode | str = ScaleMode.RCEIL,
) -> MXTensor:
    """`quantize(x, axis=-2, block_size=None)`, reading x once instead of twice.

    x: as given to `quantize_with_amax`. amax: (..., K) fp32, as `quantize_with_amax` returned it.
    """
    parts, transposed = _parts("quantize_columns_with_amax", x)
    first, wanted = parts[0], (*parts[0].shape[:-2], parts[0].shape[-1])
    if (amax.shape, amax.dtype, amax.device) != (wanted, torch.float32, first.device):
        got = f"{amax.dtype} {tuple(amax.shape)} on {amax.device}"
        raise ValueError(f"amax: got {got}, want torch.float32 {wanted} on {first.device}")
    if transposed:
        return quantize(first, fmt=fmt, mode=mode, axis=-2, block_size=None)
    qdata, scale = ops.quantize_per_column(*parts, amax, check_format(fmt), check_mode(mode))
    return MXTensor(qdata.mT, scale, None, -2, qdata.shape[-1], first.dtype, trusted=True)


def _parts(name: str, x: Tensor | Sequence[Tensor]) -> tuple[list[Any], bool]:
    """Check x. Returns three detached parts, None for missing ones, and whether x is one tensor stored transposed."""
    parts = [x] if isinstance(x, Tensor) else [*x]
    for part in parts:
        check_values(name, part)
    outer = [(*part.shape[:-2], part.shape[-1]) if part.dim() > 1 else None for part in parts]
    if not parts or any(each is None or each != outer[0] for each in outer):  # no set: compiled sizes are unhashable
        raise ValueError(f"{name}: got parts {[tuple(part.shape) for part in parts]}, want (..., N of each, K)")
    for part in parts:
        check_block(None, -2, part)
    check_block(None, -1, parts[0])
    if len(parts) > 3 or len({part.dtype for part in parts}) > 1:
        parts = [torch.cat(parts, -2)]
    return [*(part.detach() for part in parts), None, None][:3], len(parts) == 1 and _as_stored(parts[0])[1]


def _as_stored(x: Tensor) -> tuple[Tensor, bool]:
    """(x.mT, True) if x.mT is contiguous and x is not, else (x, False). The tensor is detached."""
    x = x.detach() if x.requires_grad else x
    if not x.is_contiguous() and x.mT.is_contiguous():
        return x.mT, True
    return x, False


def requantize(
    mx: MXTensor,
    *,
    fmt: MXFormat | str | None = None,
    mode: ScaleMode | str = ScaleMode.RCEIL,
    offs: Tensor | None = None,
) -> MXTensor:
    """Quantize the fp32 values of `mx` (..., N, K) a second time, in blocks of 32 along N (axis -2).

    Args:
        mx: E4M3 or E5M2 in any blocks. Its row index is applied, so the result has none.
        fmt: element format of the result. None: that of `mx`.
        mode: scale mode of the result.
        offs: (G,) int32 inclusive ends of the row groups of a 2-D `mx`, multiples of 32. Rows from offs[-1] on are not
            read, and unspecified in the result.
    Returns:
        MXTensor (..., N, K) with qdata contiguous along N. If a block has a NaN or Inf, all its elements become NaN.
    Differentiable (straight through). Raises ValueError if N is no multiple of 32, and for a wrong offs.
    """
    if not isinstance(mx, MXTensor):
        raise ValueError(f"requantize: got a {type(mx).__name__}, want an MXTensor: quantize it")
    check_byte_elements("requantize", mx)
    check_block(BLOCK, -2, mx)
    check_offs(offs, mx)
    dtype = mx.qdata.dtype if fmt is None else check_format(fmt)
    qdata, scale = _requantize(mx.qdata, mx.scale, *mx.block_shape, mx.row_index, offs, dtype, check_mode(mode))
    return wrap(mx, MXParts(qdata.mT, scale, None, -2, BLOCK, mx.dtype))


@op(
    "mxep::requantize",
    fake=lambda qdata, scale, block_rows, block_columns, row_index, offs, dtype, mode: empty_columns(
        qdata, dtype, BLOCK, picked_shape(qdata, row_index)
    ),
    launcher="mxep.quant.kernels.requantize:requantize",
)
def _requantize(
    qdata: Tensor, scale: Tensor, block_rows: int, block_columns: int, row_index: Tensor | None, offs: Tensor | None,
    dtype: torch.dtype, mode: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """qdata (..., N, K), scale (..., N/block_rows, K/block_columns) -> qdata (..., K, R), scale (..., R/32, K).

    row_index: (R,) int32, or None: R = N.
    """
    capacity = num_rows(qdata, row_index)
    valid = valid_rows(offs, capacity)
    if valid % BLOCK:
        raise ValueError(f"requantize: got offs[-1] {valid}, want a multiple of {BLOCK}")
    if row_index is None:
        read = round_up(valid, block_rows)
        qdata, scale = qdata[..., :read, :], scale[..., : read // block_rows, :]
    else:
        row_index = row_index[:valid]
    values = decode(qdata, scale, (block_rows, block_columns), row_index)[..., :valid, :]
    transposed, new_scale = quantize_columns.reference(values, dtype, mode, BLOCK)
    if valid < capacity:
        transposed = bytewise(lambda x: torch.nn.functional.pad(x, (0, capacity - valid)), transposed)
    return transposed, fill_rows(new_scale, capacity // BLOCK)


def scale_columns(mx: MXTensor, factor: Tensor, *, offs: Tensor | None = None) -> MXTensor:
    """Multiply each group's rows of `mx` (R, K) by that group's factors, column by column. No autograd.

    This prepares dy for the dgrad of a weight that has one fp32 scale per row: dx = (dy * scale) @ qdata. Products are
    computed in fp32, and quantized with one scale (RCEIL) per row.

    Args:
        mx: E4M3 or E5M2 with blocks along K. Its row index is applied, so the result has none.
        factor: (G, K) fp32.
        offs: (G,) int32 inclusive ends of the row groups. Rows from offs[-1] on are not read, and unspecified in the
            result. None: there is one group.
    Returns:
        MXTensor (R, K) with one scale per row. If a row has a NaN or Inf, all its elements become NaN.
    Raises ValueError for other blocks, and for a wrong factor or offs.
    """
    expected = (1 if offs is None else offs.shape[0], mx.shape[-1])
    if mx.ndim != 2 or mx.axis != -1 or factor.shape != expected or factor.dtype != torch.float32:
        raise ValueError(
            f"scale_columns: expected blocks along the rows of a matrix and an fp32 factor {expected}, got {mx} and "
            f"{factor.dtype} {tuple(factor.shape)}"
        )
    check_byte_elements("scale_columns", mx)
    check_offs(offs, mx)
    qdata, scale = _scale_columns(mx.qdata, mx.scale, mx.row_index, offs, factor)
    return MXTensor(qdata, scale, None, -1, mx.shape[1], mx.dtype, trusted=True)


@op(
    "mxep::scale_columns",
    fake=lambda qdata, scale, row_index, offs, factor: empty_rows(
        qdata, qdata.dtype, 0, picked_shape(qdata, row_index)
    ),
    launcher="mxep.quant.kernels.fold:fold",
)
def _scale_columns(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """qdata (S, K) fp8, scale (S, K/block_size) e8m0, factor (G, K) fp32 -> qdata (R, K), scale (R, 1)."""
    capacity = num_rows(qdata, row_index)
    valid = valid_rows(offs, capacity)
    qdata, scale = pick_mx(qdata, scale, row_index, valid)
    values = decode(qdata, scale, (1, qdata.shape[1] // scale.shape[1]), None)
    group = 0 if offs is None else group_of_rows(offs, valid).clamp_(max=offs.shape[0] - 1)
    scaled = quantize_rows.reference(values * factor[group], qdata.dtype, ScaleMode.RCEIL.value, qdata.shape[1])
    qdata, scale = (fill_rows(x, capacity) for x in scaled)
    return qdata, scale


def to_mxfp8(x: MXTensor | BlockFP8, *, dtype: torch.dtype | None = None) -> MXTensor:
    """Convert x to an MXTensor of E4M3 with exactly the same values. No autograd.

    Args:
        x: an MXTensor or BlockFP8. An MXTensor of E2M1 becomes E4M3, and one of E4M3 or E5M2 keeps its elements; axis,
            block size and row index stay. BlockFP8 gets blocks of 32 along K.
        dtype: outer dtype of the result, bf16, fp32 or fp16. None: that of the MXTensor, or bf16 for BlockFP8.
    Raises ValueError if x is BlockFP8 and a scale is no power of two, or K or the columns of a block are no multiple
    of 32.
    """
    if dtype is not None and dtype not in VALUE_DTYPES:
        raise ValueError(f"to_mxfp8: expected dtype {VALUE_DTYPES}, got {dtype}")
    if isinstance(x, BlockFP8):
        return _of_blocks(x, torch.bfloat16 if dtype is None else dtype)
    if not isinstance(x, MXTensor):
        raise ValueError(f"to_mxfp8: expected an MXTensor or BlockFP8, got a {type(x).__name__}")
    dtype = x.dtype if dtype is None else dtype
    qdata, scale = x.qdata, x.scale
    if qdata.dtype == E2M1.dtype and x.axis == -1:
        qdata, scale = widen(qdata, scale)
    elif qdata.dtype == E2M1.dtype:
        qdata, scale = (part.mT for part in widen(qdata.mT, scale.mT))
    return MXTensor(qdata, scale, x.row_index, x.axis, x.block_size, dtype, trusted=True)


def _of_blocks(x: BlockFP8, dtype: torch.dtype) -> MXTensor:
    n, k = x.shape[-2:]
    columns = min(x.block_size[1], k)
    if k % BLOCK or columns % BLOCK:
        raise ValueError(f"to_mxfp8: expected K and block columns in multiples of {BLOCK}, got {k} and {columns}")
    exponents = x.scale_exponents()
    if exponents is None:
        raise ValueError(f"to_mxfp8: expected power-of-two scales, got others in {x.scale.dtype}: dequantize() them")
    rows = min(x.block_size[0], n)
    scale = exponents.view(torch.uint8).repeat_interleave(rows, -2)[..., :n, :]
    scale = scale.repeat_interleave(columns // BLOCK, -1)[..., : k // BLOCK]
    return MXTensor.from_qdata_and_scales(x.qdata, scale, dtype)
