"""Groups of rows: how many rows are valid, padding each group to the alignment that a GEMM needs, sums of groups.

M rows lie group after group. Padding appends zero rows to each group, up to a multiple of `alignment`. An empty group
gets none. With sizes (3, 0, 2) and alignment 4:

    x          a b c | | d e            M = 5 rows
    rows       a b c 0 | | d e 0 0      offs 4, 4, 8
    row_index  0 1 2 -1   3 4 -1 -1     then -1 up to the capacity of 16 rows

Only the device knows the sizes, so the result has a static capacity of C = round_up(M + G * (alignment - 1), alignment)
rows. Padding and unpadding are each other's backward.

`group_sums` has a fixed order. It adds row r of a group to lane r mod 32, rows in order. Then it adds lanes 16 to 31 to
lanes 0 to 15, 8 to 15 to 0 to 7, ...

M rows of x, G groups, D row length.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.quant.formats import E2M1
from mxep.quant.ops import bytewise, decode, pick_rows
from mxep.quant.shapes import GROUP_SUMS_LANES as LANES
from mxep.quant.shapes import empty_group_sums, empty_picked, padded_rows
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


@dataclass(frozen=True)
class PaddedGroups:
    """Rows in groups padded to an alignment, with the map back.

    rows:       (C, D), dtype of the input; rows from offs[-1] on are unspecified. An MXTensor stays one: its bytes are
                not copied, only `row_index` is set.
    offs:       (G,) int32, inclusive cumulative padded sizes (`offs` of torch's grouped GEMMs).
    row_index:  (C,) int32, row of x for each row, -1 for padding.
    """

    rows: Tensor
    offs: Tensor
    row_index: Tensor


def valid_rows(offs: Tensor | None, capacity: int) -> int:
    """Rows that a reference must compute: int(offs[-1]). All of `capacity` without offs, and on a GPU, to save a sync.
    Raises ValueError if the groups do not fit the capacity."""
    if offs is None or offs.device.type != "cpu":
        return capacity
    valid = int(offs[-1])
    if not 0 <= valid <= capacity:
        raise ValueError(f"offs[-1]: got {valid}, want 0 to {capacity}, the rows of the buffer")
    return valid


def check_offs(offs: Tensor | None, *tensors: Tensor) -> None:
    """Raise ValueError unless offs is None or (G,) int32, G >= 1, on the device of the 2-D `tensors`."""
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
    """(G,) int32 ends of the groups within rows [:first], and within rows [first:]."""
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
    """valid (..., n, D) padded with zero rows to (..., capacity, D). Zeros make references equal in every byte."""
    missing = capacity - valid.shape[-2]
    return bytewise(lambda x: torch.nn.functional.pad(x, (0, 0, 0, missing)), valid) if missing else valid


def group_of_rows(offs: Tensor, num_rows: int) -> Tensor:
    """(num_rows,) int64: group of each row; G for rows from offs[-1] on."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=offs.device)
    return torch.searchsorted(offs, rows, right=True)


def pad_groups(x: Tensor, group_sizes: Tensor, *, alignment: int) -> PaddedGroups:
    """Pad each group of rows with zero rows to a multiple of `alignment`.

    x:           (M, D), any dtype, or an MXTensor blocked along its rows. Rows past the last group are dropped.
    group_sizes: (G,) int32 or int64, unpadded, on x's device.
    Differentiable in x. Raises ValueError for a wrong shape, dtype, device or alignment, and on CPU for sizes that are
    negative or sum to more than M. On a GPU nothing past row M is read.
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
    """Put the rows of y back where pad_groups took them from: result[row_index[i]] = y[i].

    y: (C, D). row_index: (C,) int32 from pad_groups. num_rows: M. Returns (M, D) in y's dtype, zeros in rows that were
    in no group. Rows of y with row_index -1 are not read. Differentiable in y, except for fp8 dtypes.
    Raises ValueError for wrong shapes, dtype or device.
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
    # No row is twice in the index. Padding is scattered to entry num_rows.
    inverse = row_index.new_full((num_rows + 1,), -1)
    inverse[torch.where(row_index >= 0, row_index, num_rows).long()] = i
    return pick_rows(y, inverse[:num_rows])


class _MoveRows(torch.autograd.Function):
    """`_pad_rows`, or with num_rows its inverse, `_unpad_rows`."""

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
    """Rows `row_index` of x, over x's bytes. An index of x is composed with it."""
    if x.axis != -1:
        raise ValueError(f"x: got an MXTensor blocked along axis {x.axis}, want -1 (a row index moves whole blocks)")
    if x.row_index is not None:
        row_index = torch.where(row_index >= 0, x.row_index[row_index.clamp(min=0)], row_index)
    return x.with_parts(x.qdata, x.scale, row_index)


def group_sums(x: Tensor, offs: Tensor) -> Tensor:
    """Sum of the rows of each group: (G, N) fp32 (fp64 for fp64), zeros for an empty group.

    x: (R, N) bf16 | fp32 | fp16 | fp64, or an MXTensor. offs: (G,) int32 inclusive ends. Rows from offs[-1] on are not
    read. No autograd. Raises ValueError for other offs or shapes.
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
    """x (R, N), scale (R, N / block_size) e8m0 or None."""
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
