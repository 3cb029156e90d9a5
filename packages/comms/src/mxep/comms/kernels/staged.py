"""What moves by puts need besides puts: sums into staging, sums over ranks at home, zeroes on padding. All local.

Sums are those of `sums.py`, whose device functions these kernels call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.launch import rows_at_once
from mxep.comms.kernels.sums import is_sent, push_sum, rows_of_slots, sum_arrived
from mxep.comms.layout import Layout
from mxep.comms.plan import RoutingPlan

TILE_ELEMENTS = 8192
PROGRAMS = 264
"""So many programs at least, before a tile takes more than one row."""
NUM_WARPS = 8
PADDING_WORDS = 1024


@triton.jit(do_not_specialize=["max_tokens", "rows_start", "values_start"])
def stage_sums_kernel(
    rows_ptr, row_values_ptr, slot_rows_ptr, sources_ptr, homes_ptr, staging_ptr, there_ptr, max_tokens, rows_start,
    values_start,
    ROW_BYTES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """Slot (r, t): its sum and its rows' values to slot (r, t) of the staging, its way home to `there`."""
    peer = tl.program_id(1)
    token = tl.program_id(0) * NT + tl.arange(0, NT)
    row = rows_of_slots(slot_rows_ptr, sources_ptr, token, peer, max_tokens, K, KP)
    push_sum(
        rows_ptr, row_values_ptr, slot_rows_ptr, row, token, peer, staging_ptr.to(tl.int64), max_tokens, peer,
        rows_start, values_start, K, KP, D, BLOCK, ROW_ELEMENTS, NT,
    )  # fmt: skip
    home = tl.load(homes_ptr + peer) + token.to(tl.int64) * ROW_BYTES
    tl.store(there_ptr + peer * max_tokens + token, tl.where(is_sent(row), home, -1), mask=token < max_tokens)


@triton.jit(do_not_specialize=["num_tokens", "max_tokens", "experts_per_rank", "rows_start", "values_start"])
def sum_home_kernel(
    buffer_ptr, ids_ptr, out_ptr, values_ptr, num_tokens, max_tokens, experts_per_rank, rows_start, values_start,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """Slots (r, t) of a buffer summed over ranks r that own an expert of t, and the numbers of the token's pairs."""
    token = tl.program_id(0) * NT + tl.arange(0, NT)
    sum_arrived(
        out_ptr, values_ptr, ids_ptr, token, token < num_tokens, buffer_ptr.to(tl.int64), max_tokens,
        experts_per_rank, rows_start, values_start, W, K, KP, D, BLOCK, ROW_ELEMENTS, NT,
    )  # fmt: skip


@triton.jit
def zero_padding_kernel(rows_ptr, ends_ptr, sizes_ptr, stride, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a group behind its last live one, up to its end; one program a group."""
    group = tl.program_id(0)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0) + tl.load(sizes_ptr + group)
    zero = tl.zeros((BLOCK,), tl.int64)
    for row in range(start, tl.load(ends_ptr + group)):
        for first in range(0, WORDS, BLOCK):
            word = first + tl.arange(0, BLOCK)
            tl.store(rows_ptr + (tl.cast(row, tl.int64) * stride + word), zero, mask=word < WORDS)


def stage_sums(
    rows: Tensor, row_values: Tensor | None, plan: RoutingPlan, layout: Layout, homes: Tensor, staging: Tensor
) -> Tensor:
    """Sums of all slots, and values of their rows, to their places in ``staging``, uint8, laid out as a buffer.

    homes: (W,) int64, where slot (this rank, 0) of each rank is. Result: (S,) int64, each slot's slot there; -1 for a
    slot that holds no token for this rank, whose sum and numbers are not written.
    """
    dim = rows.shape[1]
    row_values = None if row_values is None else row_values.contiguous()
    block = triton.next_power_of_2(dim)
    at_once = rows_at_once(TILE_ELEMENTS, block, layout.num_slots, PROGRAMS)
    there = torch.empty(layout.num_slots, dtype=torch.int64, device=rows.device)
    with torch.cuda.device_of(rows):
        stage_sums_kernel[(max(1, triton.cdiv(layout.max_tokens, at_once)), layout.world_size)](
            rows.contiguous(), row_values, plan.slot_rows, plan.num_tokens, homes, staging, there, layout.max_tokens,
            layout.rows_start, layout.values_start, ROW_BYTES=layout.row_bytes, K=layout.top_k,
            KP=triton.next_power_of_2(layout.top_k), D=dim, BLOCK=block,
            ROW_ELEMENTS=layout.row_bytes // rows.itemsize, NT=at_once, num_warps=NUM_WARPS,
        )  # fmt: skip
    return there


def sum_home(
    layout: Layout, buffer: Tensor, expert_ids: Tensor, experts_per_rank: int, out: Tensor, values: Tensor | None
) -> None:
    """Rows that came home into ``buffer``, uint8 -> ``out`` (T, D); numbers that came along -> ``values`` (T, K)."""
    tokens, dim = out.shape
    block = triton.next_power_of_2(dim)
    at_once = rows_at_once(TILE_ELEMENTS, block, tokens, PROGRAMS)
    with torch.cuda.device_of(out):
        sum_home_kernel[(max(1, triton.cdiv(tokens, at_once)),)](
            buffer, expert_ids, out, values, tokens, layout.max_tokens, experts_per_rank, layout.rows_start,
            layout.values_start, W=layout.world_size, K=layout.top_k, KP=triton.next_power_of_2(layout.top_k), D=dim,
            BLOCK=block, ROW_ELEMENTS=layout.row_bytes // out.itemsize, NT=at_once, num_warps=NUM_WARPS,
        )  # fmt: skip


def zero_padding(rows: Tensor, offs: Tensor, group_sizes: Tensor) -> None:
    """Zeroes on rows (R_max, words) int64 between the last valid row and the end of each group (e,)."""
    words = rows.shape[1]
    block = min(PADDING_WORDS, triton.next_power_of_2(words))
    with torch.cuda.device_of(rows):
        zero_padding_kernel[(len(offs),)](
            rows, offs, group_sizes, rows.stride(0), WORDS=words, BLOCK=block, num_warps=4
        )
