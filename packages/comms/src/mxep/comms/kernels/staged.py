"""What moves by puts need besides puts: sums into staging, sums over ranks at home, zeroes on padding. All local.

Sums are in fp32, over the token's list in its order, then over ranks in theirs, rounded after each: as `sums.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.launch import rows_at_once
from mxep.comms.kernels.put import owner_of
from mxep.comms.kernels.sums import add_rows
from mxep.comms.layout import Layout
from mxep.comms.plan import RoutingPlan

TILE_ELEMENTS = 8192
PROGRAMS = 264
"""So many programs at least, before a tile takes more than one row."""
NUM_WARPS = 8
PADDING_WORDS = 1024


@triton.jit(do_not_specialize=["slots", "max_tokens"])
def stage_sums_kernel(
    rows_ptr, row_values_ptr, slot_rows_ptr, sources_ptr, homes_ptr, sums_ptr, numbers_ptr, there_ptr, slots,
    max_tokens, ROW_BYTES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """Slot (r, t): its sum to row (r, t) of sums, its rows' values to numbers (r, t), its way home to `there`."""
    slot = tl.program_id(0) * NT + tl.arange(0, NT)
    peer = slot // tl.maximum(max_tokens, 1)
    token = slot - peer * max_tokens
    there = slot < slots
    there = there & (token < tl.load(sources_ptr + peer, mask=there, other=0))
    k = tl.arange(0, KP)[None, :]
    row = tl.load(slot_rows_ptr + slot[:, None] * K + k, mask=there[:, None] & (k < K), other=-1)
    # A slot whose rows were all dropped (-2) sends its zeroes: its owner cannot know, and reads it.
    sent = (tl.min(row, 1) < -1) | (tl.max(row, 1) >= 0)
    total = tl.zeros((NT, BLOCK), tl.float32)
    for i in range(K):
        total = add_rows(total, rows_ptr, tl.load(slot_rows_ptr + slot * K + i, mask=sent, other=-1), D, BLOCK)
    column = tl.arange(0, BLOCK)[None, :]
    place = slot.to(tl.int64)[:, None] * ROW_ELEMENTS + column
    tl.store(sums_ptr + place, total.to(sums_ptr.dtype.element_ty), mask=sent[:, None] & (column < D))
    if row_values_ptr is not None:
        value = tl.load(row_values_ptr + row, mask=row >= 0, other=0.0)
        tl.store(numbers_ptr + (slot[:, None] * K + k), value, mask=sent[:, None] & (k < K))
    home = tl.load(homes_ptr + peer, mask=sent, other=0) + token.to(tl.int64) * ROW_BYTES
    tl.store(there_ptr + slot, tl.where(sent, home, -1), mask=slot < slots)


@triton.jit(do_not_specialize=["num_tokens", "max_tokens", "experts_per_rank"])
def sum_home_kernel(
    rows_ptr, numbers_ptr, ids_ptr, out_ptr, values_ptr, num_tokens, max_tokens, experts_per_rank,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """Slots (r, t) summed over ranks r that own one of t's experts, and the numbers of the token's pairs."""
    token = tl.program_id(0) * NT + tl.arange(0, NT)
    there = token < num_tokens
    column = tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, KP)[None, :]
    pair = token[:, None] * K + k
    listed = there[:, None] & (k < K)
    owner = owner_of(tl.load(ids_ptr + pair, mask=listed, other=-1), experts_per_rank, W)
    total = tl.zeros((NT, BLOCK), tl.float32)
    for peer in range(W):
        came = tl.max((owner == peer).to(tl.int32), 1) > 0
        slot = tl.where(came, peer * max_tokens + token, -1)
        place = tl.maximum(slot, 0).to(tl.int64)[:, None] * ROW_ELEMENTS + column
        total += tl.load(rows_ptr + place, mask=came[:, None] & (column < D), other=0.0).to(tl.float32)
    place = token.to(tl.int64)[:, None] * D + column
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < D))
    if values_ptr is not None:
        value = tl.load(numbers_ptr + (owner * max_tokens * K + pair), mask=owner >= 0, other=0.0)
        tl.store(values_ptr + pair, value, mask=listed)


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
    rows: Tensor,
    row_values: Tensor | None,
    plan: RoutingPlan,
    layout: Layout,
    homes: Tensor,
    sums: Tensor,
    numbers: Tensor | None,
) -> Tensor:
    """Sums of all slots into ``sums`` (S, row's elements), values of their rows into ``numbers`` (W, T_max, K) fp32.

    homes: (W,) int64, where slot (this rank, 0) of each rank is. Result: (S,) int64, each slot's slot there; -1 for a
    slot that holds no token for this rank, whose sum and numbers are not written.
    """
    slots, dim = layout.num_slots, rows.shape[1]
    row_values = None if row_values is None else row_values.contiguous()
    block = triton.next_power_of_2(dim)
    at_once = rows_at_once(TILE_ELEMENTS, block, slots, PROGRAMS)
    there = torch.empty(slots, dtype=torch.int64, device=rows.device)
    with torch.cuda.device_of(rows):
        stage_sums_kernel[(max(1, triton.cdiv(slots, at_once)),)](
            rows.contiguous(), row_values, plan.slot_rows, plan.num_tokens, homes, sums, numbers, there, slots,
            layout.max_tokens, ROW_BYTES=layout.row_bytes, K=layout.top_k, KP=triton.next_power_of_2(layout.top_k),
            D=dim, BLOCK=block, ROW_ELEMENTS=sums.stride(0), NT=at_once, num_warps=NUM_WARPS,
        )  # fmt: skip
    return there


def sum_home(
    rows: Tensor, numbers: Tensor, expert_ids: Tensor, experts_per_rank: int, out: Tensor, values: Tensor | None
) -> None:
    """Rows (S, row's elements) that came home -> ``out`` (T, D); numbers (W, T_max, K) -> ``values`` (T, K)."""
    world_size, max_tokens, top_k = numbers.shape
    tokens, dim = out.shape
    block = triton.next_power_of_2(dim)
    at_once = rows_at_once(TILE_ELEMENTS, block, tokens, PROGRAMS)
    with torch.cuda.device_of(rows):
        sum_home_kernel[(max(1, triton.cdiv(tokens, at_once)),)](
            rows, numbers, expert_ids, out, values, tokens, max_tokens, experts_per_rank,
            W=world_size, K=top_k, KP=triton.next_power_of_2(top_k), D=dim, BLOCK=block, ROW_ELEMENTS=rows.stride(0),
            NT=at_once, num_warps=NUM_WARPS,
        )  # fmt: skip


def zero_padding(rows: Tensor, group_ends: Tensor, group_sizes: Tensor) -> None:
    """Zeroes on rows (R_max, words) int64 between the last live row and the end of each group (e,)."""
    words = rows.shape[1]
    block = min(PADDING_WORDS, triton.next_power_of_2(words))
    with torch.cuda.device_of(rows):
        zero_padding_kernel[(len(group_ends),)](
            rows, group_ends, group_sizes, rows.stride(0), WORDS=words, BLOCK=block, num_warps=4
        )
