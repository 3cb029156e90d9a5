"""Combine in one kernel: it stores sums to peers, and adds up sums that have arrived from peers.

Slot (r, t) belongs to token t of rank r. Tokens are cut into chunks, and chunks into tiles. Programs draw tickets for
tiles. For a tile, a program does this:

    in chunk c              for each rank r: sum the rows of slot (r, t), store the sum into slot (this rank, t) of r
    in chunk c - lag        sum slots (r, t) of this rank's buffer over all ranks r
    on leaving a chunk      add the tiles that it stored to the chunk's counter; the last program signals the chunk to
                            all ranks
    on entering chunk c     wait for the signals of all ranks for chunk c - lag

So memory and links are busy at the same time, and after the last store only `lag` chunks are left to sum. Programs draw
tickets, because full links serve some programs more slowly. If each program had a fixed share of the tiles, all would
wait for the slowest one.

Only running programs draw tiles. So no wait depends on a program that has not started, and one running program per rank
is enough to finish. Two of these kernels at the same time could deadlock across ranks, so a transport runs them one
after another.

Sums are in fp32: first over a token's rows on one rank, in the order of its expert list, then over ranks in rank order.
Each sum is rounded once.
"""

import triton
import triton.language as tl

from mxep.comms.kernels.rows import add_rows
from mxep.comms.kernels.signals import (
    arrive,
    compare_dispatches,
    load_dispatch,
    next_signal,
    next_ticket,
    send_dispatch,
    signal_peers,
    wait_for_peers,
)
from mxep.comms.layout import CHANNELS

AT_ONCE = tl.constexpr(4)
"""Rows of a slot that are loaded before the first one is added."""
ARRIVED_AT_END = tl.constexpr(2 + CHANNELS)
TILE_COUNTER = tl.constexpr(3 + CHANNELS)

SCALARS = ("num_tokens", "max_tokens", "rank", "experts_per_rank", "chunk_tiles", "chunks", "lag", "op_id",
           "values_start", "counters_start", "rows_start")  # fmt: skip


@triton.jit
def owner_of(expert, experts_per_rank, W: tl.constexpr):
    return tl.where((expert >= 0) & (expert < W * experts_per_rank), expert // experts_per_rank, -1).to(tl.int32)


@triton.jit
def load_slot_rows(slot_rows_ptr, num_tokens_ptr, token, peer, max_tokens, K: tl.constexpr, KP: tl.constexpr):
    """Load the row indices of slots (peer, token): (BLOCK_T, KP) int32, -1 for entries without a row."""
    mask = token < tl.load(num_tokens_ptr + peer)
    k = tl.arange(0, KP)[None, :]
    pair = (peer * max_tokens + token)[:, None] * K + k
    return tl.load(slot_rows_ptr + pair, mask=mask[:, None] & (k < K), other=-1)


@triton.jit
def is_sent(row):
    """True for slots that send a sum. row: (BLOCK_T, KP), their row indices.

    If all rows of a slot were dropped (-2), it sends zeros: the token's rank does not know of it and reads the slot.
    """
    return (tl.min(row, 1) < -1) | (tl.max(row, 1) >= 0)


@triton.jit
def store_sum(
    rows_ptr, row_values_ptr, slot_rows_ptr, row, token, peer, base, max_tokens, rank, rows_start, values_start,
    K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROW_ELEMENTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sum the rows of slots (peer, token). Store the sums into slots (rank, token) of the peer's buffer.

    row: (BLOCK_T, KP), row indices of the slots. base: address of the peer's buffer.
    """
    sent = is_sent(row)
    if tl.max(sent.to(tl.int32), 0) > 0:
        dtype: tl.constexpr = rows_ptr.dtype.element_ty
        total = tl.zeros((BLOCK_T, BLOCK), tl.float32)
        for first in range(0, K, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                offs = (peer * max_tokens + token) * K + first + i
                row_k = tl.load(slot_rows_ptr + offs, mask=sent & (first + i < K), other=-1)
                total = add_rows(total, rows_ptr, row_k, D, BLOCK)
        column = tl.arange(0, BLOCK)[None, :]
        home = rank * max_tokens + token
        start = tl.multiple_of((base + rows_start).to(tl.pointer_type(dtype)), 16)
        offs = home.to(tl.int64)[:, None] * ROW_ELEMENTS + column
        tl.store(start + offs, total.to(dtype), mask=sent[:, None] & (column < D))
        if row_values_ptr is not None:
            k = tl.arange(0, KP)[None, :]
            table = (base + values_start).to(tl.pointer_type(tl.float32))
            value = tl.load(row_values_ptr + row, mask=row >= 0, other=0.0)
            tl.store(table + (home[:, None] * K + k), value, mask=sent[:, None] & (k < K))


@triton.jit
def sum_arrived(
    out_ptr, values_ptr, ids_ptr, token, mask, local_base, max_tokens, experts_per_rank, rows_start, values_start,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sum slots (peer, token) of this rank's buffer over all peers that own an expert of the token.

    If values_ptr is given, also copy the row value of each (token, expert) pair from its owner's entry.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, KP)[None, :]
    pair = token[:, None] * K + k
    mask_k = mask[:, None] & (k < K)
    owner = owner_of(tl.load(ids_ptr + pair, mask=mask_k, other=-1), experts_per_rank, W)
    total = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    start = tl.multiple_of((local_base + rows_start).to(tl.pointer_type(dtype)), 16)
    for peer in range(W):
        arrived = tl.max((owner == peer).to(tl.int32), 1) > 0
        offs = (peer * max_tokens + token).to(tl.int64)[:, None] * ROW_ELEMENTS + column
        total += tl.load(start + offs, mask=arrived[:, None] & (column < D), other=0.0).to(tl.float32)
    offs = token.to(tl.int64)[:, None] * D + column
    tl.store(out_ptr + offs, total.to(dtype), mask=mask[:, None] & (column < D))
    if values_ptr is not None:
        table = (local_base + values_start).to(tl.pointer_type(tl.float32))
        value = tl.load(table + (owner * max_tokens * K + pair), mask=owner >= 0, other=0.0)
        tl.store(values_ptr + pair, value, mask=mask_k)


@triton.jit
def leave_chunk(
    pointers_ptr, counters_ptr, counters_start, chunk, stored, chunk_tiles, signal, dispatch, rank,
    W: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Add the tiles that this program stored (`stored`) to the chunk's counter. The last program signals the chunk."""
    if stored > 0:
        if arrive(counters_ptr + 3 + chunk, stored, chunk_tiles):
            if chunk == 0:
                send_dispatch(pointers_ptr, counters_start, dispatch, rank, W, WP)
            signal_peers(pointers_ptr, 1 + chunk, signal, rank, W, WP)


@triton.jit(do_not_specialize=SCALARS)
def combine_kernel(
    rows_ptr, row_values_ptr, slot_rows_ptr, num_tokens_ptr, ids_ptr, out_ptr, values_ptr, pointers_ptr, state_ptr,
    dispatch_ptr, num_tokens, max_tokens, rank, experts_per_rank, chunk_tiles, chunks, lag, op_id, values_start,
    counters_start, rows_start,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, BLOCK_T: tl.constexpr, TICKET_TILES: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """num_tokens_ptr: (W,), tokens of each rank. num_tokens: tokens of this rank.

    row_values_ptr, values_ptr and dispatch_ptr may be None.
    """
    local_base = tl.load(pointers_ptr + rank)
    counters_ptr = (local_base + counters_start).to(tl.pointer_type(tl.int64))
    signal = next_signal(counters_ptr, 1, op_id)
    dispatch = load_dispatch(dispatch_ptr)
    tokens = tl.arange(0, BLOCK_T)
    chunk = 0
    stored = 0
    tile = next_ticket(counters_ptr, TILE_COUNTER) * TICKET_TILES
    row = load_slot_rows(slot_rows_ptr, num_tokens_ptr, tile * BLOCK_T + tokens, (rank + tile) % W, max_tokens, K, KP)
    while tile < (chunks + lag) * chunk_tiles:
        now = tile // chunk_tiles
        if now > chunk:
            leave_chunk(
                pointers_ptr, counters_ptr, counters_start, chunk, stored, chunk_tiles, signal, dispatch, rank, W, WP
            )
            if now >= lag:
                wait_for_peers(local_base, 1 + now - lag, signal, state_ptr, W, WP, CLOCK)
            chunk = now
            stored = 0
        token = tile * BLOCK_T + tokens
        next_tile = tile + 1
        if next_tile % TICKET_TILES == 0:
            next_tile = next_ticket(counters_ptr, TILE_COUNTER) * TICKET_TILES
        if chunk < chunks:
            for turn in range(W):
                peer = (rank + tile + turn) % W
                # Load the row indices of the next slots while the rows of these slots are summed.
                if turn < W - 1:
                    next_token = token
                    next_peer = (peer + 1) % W
                else:
                    next_token = next_tile * BLOCK_T + tokens
                    next_peer = (rank + next_tile) % W
                next_row = load_slot_rows(slot_rows_ptr, num_tokens_ptr, next_token, next_peer, max_tokens, K, KP)
                store_sum(
                    rows_ptr, row_values_ptr, slot_rows_ptr, row, token, peer, tl.load(pointers_ptr + peer),
                    max_tokens, rank, rows_start, values_start, K, KP, D, BLOCK, ROW_ELEMENTS, BLOCK_T,
                )  # fmt: skip
                row = next_row
            stored += 1
        if chunk >= lag:
            token -= lag * chunk_tiles * BLOCK_T
            sum_arrived(
                out_ptr, values_ptr, ids_ptr, token, token < num_tokens, local_base, max_tokens,
                experts_per_rank, rows_start, values_start, W, K, KP, D, BLOCK, ROW_ELEMENTS, BLOCK_T,
            )  # fmt: skip
        tile = next_tile
    leave_chunk(pointers_ptr, counters_ptr, counters_start, chunk, stored, chunk_tiles, signal, dispatch, rank, W, WP)
    if arrive(counters_ptr + ARRIVED_AT_END, 1, tl.num_programs(0)):
        compare_dispatches(counters_ptr, dispatch, signal, state_ptr, W, WP)
        tl.store(counters_ptr + 1, signal >> 32)
        tl.store(counters_ptr + TILE_COUNTER, tl.zeros((), tl.int64))
