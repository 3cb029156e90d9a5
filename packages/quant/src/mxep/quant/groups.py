"""Groups of rows, such as the tokens of each expert: pad each group for a GEMM, sum each group, or swizzle its scales.

M rows are stored group after group. `pad_groups` appends zero rows to each group, up to a multiple of `alignment`. An
empty group gets no padding. Example: sizes (3, 0, 2), alignment 4:

    x          a b c | | d e            M = 5 rows
    rows       a b c 0 | | d e 0 0      offs 4, 4, 8
    row_index  0 1 2 -1   3 4 -1 -1     then -1 up to the capacity of 16 rows

Only the device knows the sizes, so the result has a static capacity of C = round_up(M + G * (alignment - 1), alignment)
rows. The backward of `pad_groups` is `unpad_groups`, and the reverse.

`group_sums` adds in a fixed order, so that all devices give the same bits. Each group and column has 32 partial sums
("lanes"). Row r of a group is added to lane r mod 32, rows in ascending order. Then lanes 16 to 31 are added to lanes
0 to 15, lanes 8 to 15 to lanes 0 to 7, and so on.

**Swizzled scales** lie in the 128 x 4 blocked layout that NVIDIA's block-scaled GEMMs read (cuBLAS, tcgen05). A matrix
(rows, cols) of scale bytes, cols = K / 32, is padded with zero bytes to a multiple of 128 x 4 and cut into tiles of 512
bytes. The tiles are stored one after another, in row-major order. Inside a tile, each run of 16 bytes holds the four
columns of rows i, i + 32, i + 64 and i + 96:

    offset(r, c) = tile(r // 128, c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4

Groups of rows are padded to multiples of 128 rows, swizzled separately, and stored one after another. A swizzled tensor
keeps a 2-D shape, because torch's scaled GEMMs check it. But element [r, c] of it is not the scale of row r and column
c.

M rows of x, G groups, D row length, C capacity.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.quant.formats import BLOCK, E2M1, SCALE_DTYPE
from mxep.quant.ops import bytewise, decode, pick_mx, pick_rows
from mxep.quant.shapes import GROUP_SUMS_LANES as LANES
from mxep.quant.shapes import (
    SWIZZLE_COLS,
    SWIZZLE_ROWS,
    check_byte_elements,
    empty_group_sums,
    empty_picked,
    num_rows,
    padded_rows,
    swizzled_shape,
)
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


@dataclass(frozen=True)
class PaddedGroups:
    """Result of `pad_groups`: rows (C, D), of which those from offs[-1] on are unspecified, and int32 indices.

    offs: (G,), inclusive cumulative padded sizes. row_index: (C,), rows[i] is x[row_index[i]], or zeros if it is -1.
    """

    rows: Tensor
    offs: Tensor
    row_index: Tensor


def valid_rows(offs: Tensor | None, capacity: int) -> int:
    """Number of leading rows that a plain-torch reference must compute: on the CPU int(offs[-1]), else `capacity`.

    On a GPU reading offs would be a sync. Raises ValueError if offs[-1] is negative or above `capacity`.
    """
    if offs is None or offs.device.type != "cpu":
        return capacity
    valid = int(offs[-1])
    if not 0 <= valid <= capacity:
        raise ValueError(f"offs[-1]: got {valid}, want 0 to {capacity}, the rows of the buffer")
    return valid


def check_offs(offs: Tensor | None, *tensors: Tensor) -> None:
    """Check that offs is (G,) int32 with G >= 1, and that `tensors` are 2-D and on its device.

    Raises ValueError if not. offs None passes, whatever the tensors are.
    """
    if offs is None:
        return
    if offs.dtype != torch.int32 or offs.ndim != 1 or offs.shape[0] == 0:
        raise ValueError(f"offs: got {offs.dtype} of shape {tuple(offs.shape)}, want int32 of shape (G,), G >= 1")
    for tensor in tensors:
        if tensor.ndim != 2:
            raise ValueError(f"rows in groups: got shape {tuple(tensor.shape)}, want (rows, columns)")
        if tensor.device != offs.device:
            raise ValueError(f"offs: got device {offs.device}, want {tensor.device}, that of the rows")


def split_ends(offs: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Split the groups at row `first`. offs: (G,) int32 inclusive ends.

    Returns:
        Ends of each group's part in rows [:first], (G,) int32.
        Ends of each group's part in rows [first:], (G,) int32, counted from `first`.
    """
    check_offs(offs)
    ends: tuple[Tensor, Tensor] = _split_ends(offs, first)
    return ends


@op(
    "mxep::split_ends",
    fake=lambda offs, first: (torch.empty_like(offs), torch.empty_like(offs)),
    launcher="mxep.quant.kernels.groups:split_ends",
)
def _split_ends(offs: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return offs.clamp(max=first), (offs - first).clamp(min=0)


def fill_rows(valid: Tensor, capacity: int) -> Tensor:
    """Append zero rows to `valid` (..., n, D) up to `capacity`. Kernels leave these rows unspecified."""
    missing = capacity - valid.shape[-2]
    return bytewise(lambda x: torch.nn.functional.pad(x, (0, 0, 0, missing)), valid) if missing else valid


def group_of_rows(offs: Tensor, num_rows: int) -> Tensor:
    """Index of the group of each row, (num_rows,) int64. Rows from offs[-1] on get G."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=offs.device)
    return torch.searchsorted(offs, rows, right=True)


def pad_groups(x: Tensor, group_sizes: Tensor, *, alignment: int) -> PaddedGroups:
    """Pad each group of rows with zero rows to a multiple of `alignment`.

    x:           (M, D), any dtype, or an MXTensor blocked along its rows, which keeps its bytes and gets a row index.
                 Rows past the last group are dropped.
    group_sizes: (G,) int32 or int64 sizes before padding, on x's device.

    Differentiable in x. Raises ValueError for a wrong shape, dtype, device or alignment. On the CPU it also raises
    ValueError if a size is negative or the sizes sum to more than M. A GPU does not check the sizes, but no row of x
    from M on is read.
    """
    if x.ndim != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, want (M, D)")
    if alignment < 1:
        raise ValueError(f"alignment: got {alignment}, want at least 1")
    if group_sizes.ndim != 1 or group_sizes.dtype not in (torch.int32, torch.int64) or group_sizes.shape[0] == 0:
        raise ValueError(
            f"group_sizes: got {group_sizes.dtype} of shape {tuple(group_sizes.shape)}, "
            "want int32 or int64 of shape (G,), G >= 1"
        )
    if group_sizes.device != x.device:
        raise ValueError(f"group_sizes: got device {group_sizes.device}, want {x.device}, that of x")
    offs, row_index = _pad_index(group_sizes, x.shape[0], alignment)
    if isinstance(x, MXTensor):
        return PaddedGroups(_reindex(x, row_index), offs, row_index)
    rows: Tensor = _MoveRows.apply(x, row_index, None)  # type: ignore[no-untyped-call]
    return PaddedGroups(rows, offs, row_index)


def unpad_groups(y: Tensor, row_index: Tensor, *, num_rows: int) -> Tensor:
    """Undo `pad_groups`: result[row_index[i]] = y[i].

    Args:
        y: (C, D) padded rows. Rows with row_index -1 are not read.
        row_index: (C,) int32 from `pad_groups`.
        num_rows: M, the number of rows before padding.
    Returns:
        (M, D) in y's dtype. Rows that were in no group are zeros.
    Differentiable in y, except for fp8 dtypes. Raises ValueError for wrong shapes, dtypes or devices.
    """
    if y.ndim != 2:
        raise ValueError(f"y: got shape {tuple(y.shape)}, want (C, D)")
    if row_index.shape != y.shape[:1] or row_index.dtype != torch.int32 or row_index.device != y.device:
        raise ValueError(
            f"row_index: got {row_index.dtype} of shape {tuple(row_index.shape)} on {row_index.device}, "
            f"want int32 of shape ({y.shape[0]},) on {y.device}"
        )
    if num_rows < 0:
        raise ValueError(f"num_rows: got {num_rows}, want at least 0")
    result: Tensor = _MoveRows.apply(y, row_index, num_rows)  # type: ignore[no-untyped-call]
    return result


@op(
    "mxep::pad_index",
    fake=lambda group_sizes, num_rows, alignment: (
        torch.empty_like(group_sizes, dtype=torch.int32),
        group_sizes.new_empty(padded_rows(num_rows, group_sizes.shape[0], alignment), dtype=torch.int32),
    ),
    launcher="mxep.quant.kernels.groups:pad_index",
    index_dtypes=(torch.int32, torch.int64),
)
def _pad_index(group_sizes: Tensor, num_rows: int, alignment: int) -> tuple[Tensor, Tensor]:
    sizes = group_sizes.long()
    if sizes.device.type == "cpu" and (int(sizes.min()) < 0 or int(sizes.sum()) > num_rows):
        raise ValueError(f"group_sizes: got {sizes.tolist()}, want sizes >= 0 that sum to at most {num_rows} rows")
    capacity = padded_rows(num_rows, sizes.shape[0], alignment)
    padded = (sizes + alignment - 1) // alignment * alignment
    offs = padded.cumsum(0).clamp(max=capacity).int()
    group = group_of_rows(offs, capacity).clamp(max=sizes.shape[0] - 1)
    within = torch.arange(capacity, device=sizes.device, dtype=torch.int64) - (offs - padded)[group]
    source = (sizes.cumsum(0) - sizes)[group] + within
    mask = (within < sizes[group]) & (source < num_rows)
    return offs, torch.where(mask, source, -1).int()


@op("mxep::pad_rows", fake=empty_picked, launcher="mxep.quant.kernels.groups:pad_rows")
def _pad_rows(x: Tensor, row_index: Tensor) -> Tensor:
    return pick_rows(x, row_index)


@op(
    "mxep::unpad_rows",
    fake=lambda y, row_index, num_rows: y.new_empty(num_rows, y.shape[1]),
    launcher="mxep.quant.kernels.groups:unpad_rows",
)
def _unpad_rows(y: Tensor, row_index: Tensor, num_rows: int) -> Tensor:
    i = torch.arange(row_index.shape[0], dtype=torch.int32, device=y.device)
    # A row occurs at most once in the index. Padding rows are scattered to entry num_rows, which is not used.
    inverse = row_index.new_full((num_rows + 1,), -1)
    inverse[torch.where(row_index >= 0, row_index, num_rows).long()] = i
    return pick_rows(y, inverse[:num_rows])


class _MoveRows(torch.autograd.Function):
    """Autograd of `_pad_rows` (num_rows is None) and of its inverse, `_unpad_rows` (num_rows is given)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_index: Tensor, num_rows: int | None) -> Tensor:
        ctx.save_for_backward(row_index)
        ctx.num_rows = x.shape[0] if num_rows is None else None
        rows: Tensor = _pad_rows(x, row_index) if num_rows is None else _unpad_rows(x, row_index, num_rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (row_index,) = ctx.saved_tensors
        unpad = ctx.num_rows is not None
        return _unpad_rows(grads[0], row_index, ctx.num_rows) if unpad else _pad_rows(grads[0], row_index), None, None


def _reindex(x: MXTensor, row_index: Tensor) -> MXTensor:
    """MXTensor with rows x[row_index], sharing x's bytes. If x has a row index itself, the two are composed."""
    if x.axis != -1:
        raise ValueError(f"x: got an MXTensor blocked along axis {x.axis}, want -1 (a row index moves whole blocks)")
    if x.row_index is not None:
        row_index = torch.where(row_index >= 0, x.row_index[row_index.clamp(min=0)], row_index)
    return x.with_parts(x.qdata, x.scale, row_index)


def group_sums(x: Tensor, offs: Tensor) -> Tensor:
    """Sum of the rows of each group, in the fixed order of the module's docstring. No autograd.

    Args:
        x: (R, N) bf16 | fp32 | fp16 | fp64, or an MXTensor.
        offs: (G,) int32 inclusive ends of the groups. Rows from offs[-1] on are not read.
    Returns:
        (G, N) fp32, or fp64 if x is fp64. An empty group has zeros.
    Raises ValueError for a wrong offs or another shape.
    """
    check_offs(offs, x)
    if not isinstance(x, MXTensor):
        sums: Tensor = _group_sums(x, None, 1, offs)
    elif x.axis != -1 or x.row_index is not None or x.qdata.dtype == E2M1.dtype:
        sums = _group_sums(x.dequantize(), None, 1, offs)
    else:
        sums = _group_sums(x.qdata, x.scale, x.block_size, offs)
    return sums


@op(
    "mxep::group_sums",
    fake=lambda x, scale, block_size, offs: empty_group_sums(x, offs),
    launcher="mxep.quant.kernels.groups:group_sums",
)
def _group_sums(x: Tensor, scale: Tensor | None, block_size: int, offs: Tensor) -> Tensor:
    """x: (R, N), plain or qdata. scale: (R, N / block_size) e8m0 if x is qdata, else None. Returns (G, N)."""
    values = x.to(empty_group_sums(x, offs).dtype) if scale is None else decode(x, scale, (1, block_size), None)
    groups, (rows, width) = offs.shape[0], x.shape
    group = group_of_rows(offs, rows)
    first = torch.cat((offs.new_zeros(1), offs))[group]
    lane = (torch.arange(rows, device=x.device, dtype=torch.int64) - first) % LANES
    lanes = values.new_zeros((groups + 1) * LANES, width).index_add_(0, group * LANES + lane, values)
    lanes = lanes.view(groups + 1, LANES, width)[:groups]
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.squeeze(1)


def swizzle_scales(scale: Tensor, *, offs: Tensor | None = None) -> Tensor:
    """Copy scales to the 128 x 4 blocked layout. With offs, each group of rows is swizzled separately.

    Args:
        scale: (..., rows, cols) e8m0 or uint8, any strides. With offs it must be 2-D.
        offs: (G,) int32 inclusive ends of the row groups. Rows from offs[-1] on are not read.
    Returns:
        Contiguous tensor of scale's dtype. Padding bytes are 0.
        Without offs: (..., round_up(rows, 128), round_up(cols, 4)).
        With offs: (round_up(rows + G * 127, 128), round_up(cols, 4)). Bytes past the last group are unspecified.
    Raises ValueError for another dtype, for fewer than two axes and for a wrong offs.
    """
    if scale.dtype not in (SCALE_DTYPE, torch.uint8):
        raise ValueError(f"scale: got dtype {scale.dtype}, want {SCALE_DTYPE} or its bytes as torch.uint8")
    if scale.ndim < 2:
        raise ValueError(f"scale: got shape {tuple(scale.shape)}, want (..., rows, cols)")
    check_offs(offs, scale)
    swizzled: Tensor = _swizzle(scale, offs)
    return swizzled


def gather_swizzled(mx: MXTensor, *, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply the row index of `mx` and swizzle its scales, for a block-scaled GEMM. No autograd.

    Args:
        mx: (R, K) in blocks of 32 along K, E4M3 or E5M2.
        offs: (G,) int32 inclusive ends of the row groups. Rows from offs[-1] on are not read.
    Returns:
        qdata: (R, K), in the dtype of mx.qdata. Rows from offs[-1] on are unspecified.
        scale: e8m0, the result of `swizzle_scales` for the R rows.
    Raises ValueError for any other `mx` and for a wrong offs.
    """
    if not isinstance(mx, MXTensor) or mx.axis != -1 or mx.block_size != BLOCK or mx.ndim != 2:
        raise ValueError(f"gather_swizzled: got {mx!r}, want an MXTensor (R, K) in blocks of {BLOCK} along its rows")
    check_byte_elements("gather_swizzled", mx)
    check_offs(offs, mx)
    qdata, scale = _gather_swizzled(mx.qdata, mx.scale, mx.row_index, offs)
    return qdata, scale


@op(
    "mxep::gather_swizzled",
    fake=lambda qdata, scale, row_index, offs: (
        qdata.new_empty((num_rows(qdata, row_index), qdata.shape[1])),
        scale.new_empty(swizzled_shape(num_rows(qdata, row_index), scale.shape[1], offs)),
    ),
    launcher="mxep.quant.kernels.groups:gather_swizzled",
)
def _gather_swizzled(
    qdata: Tensor, scale: Tensor, row_index: Tensor | None, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """qdata (S, K), scale (S, K/32) -> qdata (R, K), scale in the 128 x 4 layout."""
    rows = num_rows(qdata, row_index)
    picked, scale_bytes = pick_mx(qdata, scale, row_index, valid_rows(offs, rows))
    return fill_rows(picked, rows).clone(), _swizzle.reference(fill_rows(scale_bytes.view(SCALE_DTYPE), rows), offs)


@op(
    "mxep::swizzle_scales",
    fake=lambda scale, offs: scale.new_empty(
        (*scale.shape[:-2], *swizzled_shape(scale.shape[-2], scale.shape[-1], offs))
    ),
    launcher="mxep.quant.kernels.groups:swizzle_scales",
)
def _swizzle(scale: Tensor, offs: Tensor | None) -> Tensor:
    plain = scale.view(torch.uint8)
    *rest, rows, cols = plain.shape
    height, width = swizzled_shape(rows, cols, offs)
    if offs is not None:
        valid = valid_rows(offs, rows)
        # In the result each group starts at a multiple of 128. Rows past the last group go to row `height`, cut below.
        starts = torch.nn.functional.pad(offs.long(), (1, 0))
        room = (starts.diff() + SWIZZLE_ROWS - 1) // SWIZZLE_ROWS * SWIZZLE_ROWS
        new_starts = torch.nn.functional.pad(room.cumsum(0), (1, 0))
        group = group_of_rows(offs, valid)
        row = torch.arange(valid, device=offs.device, dtype=torch.int64) - starts[group] + new_starts[group]
        row = torch.where(group < offs.shape[0], row, height)
        plain = plain.new_zeros(height + 1, cols).index_copy_(0, row, plain[:valid])[:height]
    padded = torch.nn.functional.pad(plain, (0, width - cols, 0, height - plain.shape[-2]))
    # (tile row, quarter, row in the quarter, tile column, column) -> (tile row, tile column, row, quarter, column)
    tiles = padded.reshape(*rest, height // SWIZZLE_ROWS, 4, 32, width // SWIZZLE_COLS, SWIZZLE_COLS).transpose(-4, -2)
    return tiles.reshape(*rest, height, width).clone().view(scale.dtype)
