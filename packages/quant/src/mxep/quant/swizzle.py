"""Scale swizzle: scale bytes in the 128 x 4 blocked layout that NVIDIA's block-scaled GEMMs read (cuBLAS, tcgen05).

The (rows, cols) matrix of scales, cols = K / 32, is cut into tiles of 128 x 4, padded with zero bytes; tiles lie one
after another in row-major order, each 512 bytes. In a tile the four 32-row quarters are interleaved, so that 16 bytes
hold the four columns of rows i, i + 32, i + 64 and i + 96:

    offset(r, c) = tile(r // 128, c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4

Example: 128 x 4 scales; bytes 0 to 3 are row 0, bytes 4 to 7 row 32, bytes 12 to 15 row 96, bytes 16 to 19 row 1.

Per group, every group is swizzled alone (its rows rounded up to 128) and the groups lie one after another. As their
sizes are on the device, the capacity is static: round_up(rows + G * 127, 128) rows, whatever the sizes.

                     whole                                         per group
    swizzle_scales   (..., rows, cols) -> (..., rows up to 128, cols up to 4)   (rows, cols) -> (capacity, cols up to 4)
    unswizzle_scales the way back

`quantize_swizzled` and `gather_swizzled` write that layout at once, beside the qdata of rows they quantize or pick.

G groups. The shape of a swizzled tensor counts its bytes (torch's scaled GEMMs check it); its order is not row-major.
"""

import torch
from torch import Tensor

from mxep.quant import ops
from mxep.quant.checks import check_axis, check_block, check_format, check_mode, check_row_index, check_values
from mxep.quant.formats import BLOCK, E4M3, SCALE_DTYPE, MXFormat, ScaleMode
from mxep.quant.groups import check_group_ends, fill_rows, gather, group_of_rows, round_up, valid_rows
from mxep.quant.kernels import on_cuda
from mxep.quant.tensor import MXTensor

ROWS, COLS = 128, 4
"""Scales in a tile."""


def swizzle_scales(scale: Tensor, *, offs: Tensor | None = None) -> Tensor:
    """Scales in the 128 x 4 blocked layout, of the whole matrix or of each group alone.

    scale: (..., rows, cols) e8m0 or uint8, any strides; with offs (rows, cols).
    offs: (G,) int32, inclusive ends of the row groups; rows from offs[-1] on are not read.
    Returns a contiguous tensor of scale's dtype: (..., round_up(rows, 128), round_up(cols, 4)), or with offs
    (round_up(rows + G * 127, 128), round_up(cols, 4)), where what lies past the last group is unspecified. Padding
    bytes are 0. ValueError for other dtypes, fewer than two axes, a wrong offs.
    """
    _check_scale("scale", scale)
    if scale.ndim < 2:
        raise ValueError(f"scale: got shape {tuple(scale.shape)}, want (..., rows, cols)")
    check_group_ends(offs, scale)
    swizzled: Tensor = _swizzle(scale, offs)
    return swizzled


def unswizzle_scales(swizzled: Tensor, *, rows: int, cols: int, offs: Tensor | None = None) -> Tensor:
    """The way back: scales (..., rows, cols), contiguous, of what `swizzle_scales` made of them.

    swizzled: (..., round_up(rows, 128), round_up(cols, 4)) e8m0 or uint8, contiguous; with offs
        (round_up(rows + G * 127, 128), round_up(cols, 4)). Rows of the result from offs[-1] on are unspecified.
    ValueError for other dtypes or shapes, or a wrong offs.
    """
    _check_scale("swizzled", swizzled)
    check_group_ends(offs, swizzled)
    wanted = swizzled_shape(rows, cols, offs)
    if tuple(swizzled.shape[-2:]) != wanted or not swizzled.is_contiguous():
        raise ValueError(
            f"swizzled: got shape {tuple(swizzled.shape)} with strides {swizzled.stride()}, "
            f"want (..., {wanted[0]}, {wanted[1]}) contiguous for {rows} rows and {cols} cols"
        )
    scale: Tensor = _unswizzle(swizzled, rows, cols, offs)
    return scale


def quantize_swizzled(
    x: Tensor,
    *,
    row_index: Tensor | None = None,
    offs: Tensor | None = None,
    fmt: MXFormat | str = E4M3,
    mode: ScaleMode | str = ScaleMode.RCEIL,
) -> tuple[Tensor, Tensor]:
    """What a block-scaled GEMM takes, of one read: qdata (R, K) and their scales in the 128 x 4 layout.

    x: (R, K) bf16 | fp32 | fp16, K a multiple of 32; or (S, K) with row_index int32 (R,), -1 for a row of zeros.
    offs: (G,) int32, inclusive ends of the row groups, each swizzled alone, as `swizzle_scales` does.
        Rows from offs[-1] on are not read; what qdata and scales hold there is unspecified.
    Bitwise the qdata and `swizzle_scales` of `quantize`. No autograd. ValueError for other shapes, dtypes, devices.
    """
    check_values("quantize_swizzled", x)
    _check_rows(x, row_index, offs)
    check_block(BLOCK, check_axis(-1, x), x)
    qdata, scale = _quantize_swizzled(x.detach(), row_index, offs, check_format(fmt), check_mode(mode))
    return qdata, scale


def gather_swizzled(mx: MXTensor, *, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same of rows that are MX already, picked by their row index if they have one: qdata (R, K), swizzled scales.

    mx: (R, K) in blocks of 32 along its rows. Other arguments and errors as for `quantize_swizzled`.
    """
    if not isinstance(mx, MXTensor) or mx.axis != -1 or mx.block_size != BLOCK or mx.ndim != 2:
        raise ValueError(f"gather_swizzled: got {mx!r}, want an MXTensor (R, K) in blocks of {BLOCK} along its rows")
    check_group_ends(offs, mx)
    qdata, scale = _gather_swizzled(mx.qdata, mx.scale, mx.row_index, offs)
    return qdata, scale


def _check_rows(x: Tensor, row_index: Tensor | None, offs: Tensor | None) -> None:
    if x.ndim != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, want (rows, K)")
    if row_index is not None:
        check_row_index(row_index, x, -1)
    check_group_ends(offs, x)


@torch.library.custom_op("mxep::quantize_swizzled", mutates_args=())
def _quantize_swizzled(
    x: Tensor, row_index: Tensor | None, offs: Tensor | None, dtype: torch.dtype, mode: str
) -> tuple[Tensor, Tensor]:
    """x (S, K) values -> qdata (R, K), scale in the 128 x 4 layout."""
    rows = x.shape[0] if row_index is None else row_index.shape[0]
    valid = valid_rows(offs, rows)
    picked = x[:valid] if row_index is None else gather(x, row_index[:valid])
    qdata, scale = ops.encode_rows(picked, dtype, mode, BLOCK)
    qdata = fill_rows(qdata.view(torch.uint8), rows).view(dtype)
    return qdata, _blocked(fill_rows(scale.view(torch.uint8), rows).view(SCALE_DTYPE), offs)


@_quantize_swizzled.register_fake
def _(x: Tensor, row_index: Tensor | None, offs: Tensor | None, dtype: torch.dtype, mode: str) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if row_index is None else row_index.shape[0]
    shape = swizzled_shape(rows, x.shape[1] // BLOCK, offs)
    return x.new_empty((rows, x.shape[1]), dtype=dtype), x.new_empty(shape, dtype=SCALE_DTYPE)


@torch.library.custom_op("mxep::gather_swizzled", mutates_args=())
def _gather_swizzled(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """qdata (S, K), scale (S, K/32) -> qdata (R, K), scale in the 128 x 4 layout."""
    rows = qdata.shape[0] if row_index is None else row_index.shape[0]
    valid = valid_rows(offs, rows)
    parts = [part.view(torch.uint8) for part in (qdata, scale)]
    parts = [part[:valid] if row_index is None else ops.pick_rows(part, row_index[:valid]) for part in parts]
    picked, byte = (fill_rows(part, rows) for part in parts)
    return picked.clone().view(qdata.dtype), _blocked(byte.view(SCALE_DTYPE), offs)


@_gather_swizzled.register_fake
def _(qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = qdata.shape[0] if row_index is None else row_index.shape[0]
    return qdata.new_empty((rows, qdata.shape[1])), scale.new_empty(swizzled_shape(rows, scale.shape[1], offs))


@torch.library.custom_op("mxep::swizzle_scales", mutates_args=())
def _swizzle(scale: Tensor, offs: Tensor | None) -> Tensor:
    return _blocked(scale, offs)


@_swizzle.register_fake
def _(scale: Tensor, offs: Tensor | None) -> Tensor:
    *rest, rows, cols = scale.shape
    return scale.new_empty((*rest, *swizzled_shape(rows, cols, offs)))


@torch.library.custom_op("mxep::unswizzle_scales", mutates_args=())
def _unswizzle(swizzled: Tensor, rows: int, cols: int, offs: Tensor | None) -> Tensor:
    *rest, height, width = swizzled.shape
    tiles = swizzled.view(torch.uint8).reshape(*rest, height // ROWS, width // COLS, 32, 4, COLS)
    plain = tiles.transpose(-4, -2).reshape(*rest, height, width)
    if offs is not None:
        valid = valid_rows(offs, rows)
        plain = fill_rows(gather(plain, _places(offs, valid, nowhere=-1)), rows)
    return plain[..., :rows, :cols].clone(memory_format=torch.contiguous_format).view(swizzled.dtype)


@_unswizzle.register_fake
def _(swizzled: Tensor, rows: int, cols: int, offs: Tensor | None) -> Tensor:
    return swizzled.new_empty((*swizzled.shape[:-2], rows, cols))


def _blocked(scale: Tensor, offs: Tensor | None) -> Tensor:
    plain = scale.view(torch.uint8)
    *rest, rows, cols = plain.shape
    height, width = swizzled_shape(rows, cols, offs)
    if offs is not None:
        valid = valid_rows(offs, rows)
        place = _places(offs, valid, nowhere=height)
        plain = plain.new_zeros(height + 1, cols).index_copy_(0, place, plain[:valid])[:height]
    padded = torch.nn.functional.pad(plain, (0, width - cols, 0, height - plain.shape[-2]))
    # (tile row, quarter, row in the quarter, tile column, column) -> (tile row, tile column, row, quarter, column)
    tiles = padded.reshape(*rest, height // ROWS, 4, 32, width // COLS, COLS).transpose(-4, -2)
    return tiles.reshape(*rest, height, width).clone().view(scale.dtype)


def swizzled_shape(rows: int, cols: int, offs: Tensor | None) -> tuple[int, int]:
    """Shape of the swizzled scales of a matrix of (rows, cols) of them, or of its groups."""
    padding = 0 if offs is None else offs.shape[0] * (ROWS - 1)
    return round_up(rows + padding, ROWS), round_up(cols, COLS)


def _places(offs: Tensor, num_rows: int, *, nowhere: int) -> Tensor:
    """(num_rows,) int64: where rows go when every group starts at a multiple of 128; `nowhere` past the groups."""
    ends = offs.long()
    starts = torch.nn.functional.pad(ends, (1, 0))  # (G + 1,): dead rows have a start, too
    room = (starts.diff() + ROWS - 1) // ROWS * ROWS
    new_starts = torch.nn.functional.pad(room.cumsum(0), (1, 0))
    group = group_of_rows(offs, num_rows)
    row = torch.arange(num_rows, device=offs.device)
    return torch.where(group < ends.shape[0], row - starts[group] + new_starts[group], nowhere)


def _check_scale(name: str, scale: Tensor) -> None:
    if scale.dtype not in (SCALE_DTYPE, torch.uint8):
        raise ValueError(f"{name}: got dtype {scale.dtype}, want {SCALE_DTYPE} or its bytes as torch.uint8")


on_cuda(_swizzle, "gather", "swizzle_scales")
on_cuda(_quantize_swizzled, "gather", "quantize_swizzled")
on_cuda(_gather_swizzled, "gather", "gather_swizzled")
