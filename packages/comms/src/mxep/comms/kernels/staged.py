"""Local kernels of exchanges by puts: sums into staging, sums over ranks.

They call the device functions of `combine.py`, so the sums are the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.combine import is_sent, load_slot_rows, store_sum, sum_arrived
from mxep.comms.kernels.dispatch import tokens_per_tile
from mxep.comms.layout import Layout
from mxep.comms.plan import RoutingPlan
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_ELEMENTS = 8192
PROGRAMS = 264
"""Least number of programs before a tile takes more than one row."""
NUM_WARPS = 8


@triton.jit(do_not_specialize=["max_tokens", "rows_start", "values_start"])
def stage_sums_kernel(
    rows_ptr, row_values_ptr, slot_rows_ptr, num_tokens_ptr, homes_ptr, staging_ptr, destinations_ptr, max_tokens,
    rows_start, values_start,
    ROW_BYTES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write slot (r, t)'s sum and row values to slot (r, t) of the staging, its destination to `destinations`."""
    peer = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = load_slot_rows(slot_rows_ptr, num_tokens_ptr, token, peer, max_tokens, K, KP)
    store_sum(
        rows_ptr, row_values_ptr, slot_rows_ptr, row, token, peer, staging_ptr.to(tl.int64), max_tokens, peer,
        rows_start, values_start, K, KP, D, BLOCK, ROW_ELEMENTS, BLOCK_T,
    )  # fmt: skip
    home = tl.load(homes_ptr + peer) + token.to(tl.int64) * ROW_BYTES
    tl.store(destinations_ptr + peer * max_tokens + token, tl.where(is_sent(row), home, -1), mask=token < max_tokens)


@triton.jit(do_not_specialize=["num_tokens", "max_tokens", "experts_per_rank", "rows_start", "values_start"])
def sum_arrived_kernel(
    buffer_ptr, ids_ptr, out_ptr, values_ptr, num_tokens, max_tokens, experts_per_rank, rows_start, values_start,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sum slots (r, t) of a buffer over ranks r that own an expert of t. Gather the values of the token's pairs."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    sum_arrived(
        out_ptr, values_ptr, ids_ptr, token, token < num_tokens, buffer_ptr.to(tl.int64), max_tokens,
        experts_per_rank, rows_start, values_start, W, K, KP, D, BLOCK, ROW_ELEMENTS, BLOCK_T,
    )  # fmt: skip


def stage_sums(
    rows: Tensor, row_values: Tensor | None, plan: RoutingPlan, layout: Layout, homes: Tensor, staging: Tensor
) -> Tensor:
    """Write all slots' sums and row values to their slots in ``staging``, uint8, laid out as a buffer.

    homes: (W,) int64, destination of slot (this rank, 0) on each rank. Result: (S,) int64 destination of each slot. It
    is -1 for slots without a token for this rank; their sums and values are not written.
    """
    dim = rows.shape[1]
    row_values = None if row_values is None else row_values.contiguous()
    block = next_power_of_2(dim)
    block_t = tokens_per_tile(TILE_ELEMENTS // block, layout.num_slots, PROGRAMS)
    destinations = torch.empty(layout.num_slots, dtype=torch.int64, device=rows.device)
    launch(stage_sums_kernel, (max(1, cdiv(layout.max_tokens, block_t)), layout.world_size),
        rows.contiguous(), row_values, plan.slot_rows, plan.num_tokens, homes, staging, destinations,
        layout.max_tokens, layout.rows_start, layout.values_start, ROW_BYTES=layout.row_bytes, K=layout.top_k,
        KP=next_power_of_2(layout.top_k), D=dim, BLOCK=block,
        ROW_ELEMENTS=layout.row_bytes // rows.itemsize, BLOCK_T=block_t, num_warps=NUM_WARPS,
    )  # fmt: skip
    return destinations


def sum_arrived_slots(
    layout: Layout, buffer: Tensor, expert_ids: Tensor, experts_per_rank: int, out: Tensor, values: Tensor | None
) -> None:
    """Sum the slots that arrived in ``buffer`` (uint8) into ``out`` (T, D), and copy their values to ``values``."""
    tokens, dim = out.shape
    block = next_power_of_2(dim)
    block_t = tokens_per_tile(TILE_ELEMENTS // block, tokens, PROGRAMS)
    launch(sum_arrived_kernel, (max(1, cdiv(tokens, block_t)),),
        buffer, expert_ids, out, values, tokens, layout.max_tokens, experts_per_rank, layout.rows_start,
        layout.values_start, W=layout.world_size, K=layout.top_k, KP=next_power_of_2(layout.top_k), D=dim,
        BLOCK=block, ROW_ELEMENTS=layout.row_bytes // out.itemsize, BLOCK_T=block_t, num_warps=NUM_WARPS,
    )  # fmt: skip
