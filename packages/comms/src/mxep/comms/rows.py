"""Gather rows by an index, for example in the order of a plan, and sum the rows of each slot."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.runtime.op import ANY_GPU, op

from .layout import ALIGNMENT, round_up


def gather_rows(payload: Sequence[Tensor], row_index: Tensor | None, offs: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gather rows of each part: row i of a result is row ``row_index[i]`` of the part, or zeros if that is negative.

    Args:
        payload: parts (S, n_i), of any dtype that torch can index. View fp8 as uint8.
        row_index: (R,) int32. None: copy all rows to a contiguous tensor.
        offs: (e,) int32 inclusive ends of row groups. On CUDA, rows of the results from offs[-1] on are not written,
            and their indices are not read.
    Returns:
        One tensor (R, n_i) per part.
    """
    return tuple(gather_part(part, row_index, offs) for part in payload)


def join_rows(
    payload: Sequence[Tensor],
    row_index: Tensor,
    table: Tensor | None = None,
    number: Tensor | None = None,
    step: int = 0,
) -> Tensor:
    """Concatenate bytes row by row. Row i is row ``row_index[i]`` of each part, then row i of the table, then zeros.

    Args:
        payload: one or more parts (S, n_i) uint8.
        row_index: (R,) int32. If negative, the bytes of the parts are zero.
        table: (R, m) uint8.
        number: (1,) int32. If given, rows with a negative index are headers: they begin with the int32
            number * 4 + step, or with as many of its bytes as a row has.
    Returns:
        (R, n) uint8. n is the sum of all n_i and m, rounded up to 16, so that parts can be read in wide words.
    """
    first, *others = payload
    other = torch.cat(others, 1) if len(others) > 1 else (*others, None)[0]
    joined: Tensor = join_parts(first, other, row_index, table, number, step)
    return joined


@op(
    "mxep::gather_rows",
    fake=lambda part, row_index, offs: part.new_empty(
        (part if row_index is None else row_index).shape[0], part.shape[1]
    ),
    launcher="mxep.comms.kernels.rows:gather_rows",
    capability=ANY_GPU,
)
def gather_part(part: Tensor, row_index: Tensor | None, offs: Tensor | None) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format) if row_index is None else _gather(part, row_index)


def _joined_width(*parts: Tensor | None) -> int:
    return round_up(sum(part.shape[1] for part in parts if part is not None), ALIGNMENT)


@op(
    "mxep::join_rows",
    fake=lambda first, other, row_index, table, number, step: first.new_empty(
        row_index.shape[0], _joined_width(first, other, table)
    ),
    launcher="mxep.comms.kernels.rows:join_rows",
    capability=ANY_GPU,
)
def join_parts(
    first: Tensor, other: Tensor | None, row_index: Tensor, table: Tensor | None, number: Tensor | None, step: int
) -> Tensor:
    parts = [_gather(part, row_index) for part in (first, other) if part is not None]
    parts += [] if table is None else [table]
    behind = _joined_width(*parts) - sum(part.shape[1] for part in parts)
    joined = torch.cat((*parts, first.new_zeros(len(row_index), behind)), 1)
    if number is not None:
        word = (number * 4 + step).view(torch.uint8)[: joined.shape[1]]
        joined[:, : len(word)] = torch.where(row_index[:, None] < 0, word, joined[:, : len(word)])
    return joined


@op(
    "mxep::sum_slots",
    fake=lambda rows, slot_rows: rows.new_empty(slot_rows.shape[0], rows.shape[1]),
    launcher="mxep.comms.kernels.rows:sum_slots",
    capability=ANY_GPU,
)
def sum_slots(rows: Tensor, slot_rows: Tensor) -> Tensor:
    """Sum the rows of each slot in fp32, in the order of slot_rows, and round once.

    rows: (R_max, D) bf16 or fp32. slot_rows: (S, K) int32 rows of each slot; negative entries are skipped.
    Returns (S, D) in the dtype of rows. A slot without rows is zero.
    """
    total = torch.zeros(slot_rows.shape[0], rows.shape[1], device=rows.device, dtype=torch.float32)
    for row_index in slot_rows.unbind(1):
        total += _gather(rows, row_index).float()
    return total.to(rows.dtype)


def _gather(part: Tensor, row_index: Tensor) -> Tensor:
    if part.shape[0] == 0:
        return part.new_zeros(row_index.shape[0], part.shape[1])
    words = _as_words(part)
    # Zeros are filled in, not multiplied in, because row 0 may hold NaN.
    rows = words.index_select(0, row_index.clamp_min(0)).masked_fill_(row_index[:, None] < 0, 0)
    return rows.view(part.dtype)


def _as_words(part: Tensor) -> Tensor:
    """View rows as 8-byte words if sizes and strides allow. A CPU copies words 4 times as fast as bytes."""
    size = part.element_size()
    if any(count * size % 8 for count in (part.shape[1], part.stride(0), part.storage_offset())) or part.stride(1) != 1:
        return part
    return part.view(torch.int64)
