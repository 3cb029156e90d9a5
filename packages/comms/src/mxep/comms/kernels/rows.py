"""Kernels that move and sum rows: gather, join and sum within a rank, and combine across ranks.

Bytes are copied in the widest words that divide widths, strides and offsets. Programs past the last valid row exit at
once.

**Combine** is one kernel, which stores sums to peers, and adds up sums that have arrived from peers.
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

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from mxep.comms.layout import ALIGNMENT, CHANNELS, round_up
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE_BYTES = 16384
NUM_WARPS = 8
SPREAD = 256
"""Minimum programs of `sum_slots`, if there are so many slots."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
AT_ONCE = tl.constexpr(4)
"""Rows of a slot that are loaded before the first one is added."""
ARRIVED_AT_END = tl.constexpr(2 + CHANNELS)
TILE_COUNTER = tl.constexpr(3 + CHANNELS)

SCALARS = ("num_tokens", "max_tokens", "rank", "experts_per_rank", "chunk_tiles", "chunks", "lag", "op_id",
           "values_start", "counters_start", "rows_start")  # fmt: skip


def tokens_per_tile(most: int, tokens: int, programs: int) -> int:
    """Tokens per tile: the largest power of two up to `most` with which each program gets a full tile. At least 1."""
    count = 1
    while 2 * count <= most and tokens >= 2 * count * programs:
        count *= 2
    return count


@triton.jit(do_not_specialize=["rows", "groups"])
def gather_kernel(
    part_ptr, index_ptr, offs_ptr, out_ptr, stride, rows, groups,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    valid = rows
    if offs_ptr is not None:
        valid = tl.minimum(rows, tl.load(offs_ptr + groups - 1))
    first = tl.program_id(0) * BLOCK_T
    if first >= valid:
        return
    row = first + tl.arange(0, BLOCK_T)
    source = tl.where(row < valid, row, -1)
    if index_ptr is not None:
        source = tl.load(index_ptr + row, mask=row < valid, other=-1)
    column = tl.arange(0, BLOCK)[None, :]
    offs = tl.maximum(source, 0).to(tl.int64)[:, None] * stride + column
    x = tl.load(part_ptr + offs, mask=(source >= 0)[:, None] & (column < WIDTH), other=0)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column, x, mask=(row < valid)[:, None] & (column < WIDTH))


def gather_rows(part: Tensor, row_index: Tensor | None, offs: Tensor | None) -> Tensor:
    rows = len(part if row_index is None else row_index)
    out = torch.empty(rows, part.shape[1], dtype=part.dtype, device=part.device)
    if not out.numel():
        return out
    if part.stride(1) != 1:
        part = part.contiguous()
    size = part.itemsize
    word = math.gcd(8, part.shape[1] * size, part.stride(0) * size, part.storage_offset() * size)
    source, target = part.view(WORDS[word]), out.view(WORDS[word])
    width = source.shape[1]
    block = next_power_of_2(width)
    at_once = max(1, TILE_BYTES // (block * word))
    launch(gather_kernel, (cdiv(len(out), at_once),),
        source, row_index, offs, target, source.stride(0), len(out),
        0 if offs is None else len(offs), WIDTH=width, BLOCK=block, BLOCK_T=at_once, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _join_part(
    part_ptr, out_ptr, source, index, row, rows, part_stride, out_stride, number_ptr, step,
    START: tl.constexpr, WORD: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows `source` of a part into rows `row` of the result, then write zeros up to word END.

    START: byte within a row of the result at which the part begins. WIDTH: words of the part, WORD bytes each.
    index: row index of each row of the result. If it is negative and number_ptr is given, the row gets the header word.
    """
    column = tl.arange(0, BLOCK)[None, :]
    offs = tl.maximum(source, 0).to(tl.int64)[:, None] * part_stride + column
    x = tl.load(part_ptr + offs, mask=(source >= 0)[:, None] & (column < WIDTH), other=0)
    if number_ptr is not None:
        if START < 4:
            byte = START + column * WORD
            header = ((tl.load(number_ptr) * 4 + step).to(tl.int64) & 0xFFFFFFFF) >> (8 * tl.minimum(byte, 4))
            x = tl.where((index < 0)[:, None] & (byte < 4), header.to(x.dtype), x)
    offs = row.to(tl.int64)[:, None] * out_stride + column
    tl.store(out_ptr + offs, x, mask=(row < rows)[:, None] & (column < END))


@triton.jit(do_not_specialize=["rows", "step"])
def join_kernel(
    part0_ptr, part1_ptr, table_ptr, out0_ptr, out1_ptr, out2_ptr, index_ptr, number_ptr,
    stride0, stride1, stride2, out_stride0, out_stride1, out_stride2, rows, step,
    START0: tl.constexpr, WORD0: tl.constexpr, WIDTH0: tl.constexpr, END0: tl.constexpr, BLOCK0: tl.constexpr,
    START1: tl.constexpr, WORD1: tl.constexpr, WIDTH1: tl.constexpr, END1: tl.constexpr, BLOCK1: tl.constexpr,
    START2: tl.constexpr, WORD2: tl.constexpr, WIDTH2: tl.constexpr, END2: tl.constexpr, BLOCK2: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    index = tl.load(index_ptr + row, mask=row < rows, other=-1)
    _join_part(part0_ptr, out0_ptr, index, index, row, rows, stride0, out_stride0, number_ptr, step,
               START0, WORD0, WIDTH0, END0, BLOCK0)  # fmt: skip
    if part1_ptr is not None:
        _join_part(part1_ptr, out1_ptr, index, index, row, rows, stride1, out_stride1, number_ptr, step,
                   START1, WORD1, WIDTH1, END1, BLOCK1)  # fmt: skip
    if table_ptr is not None:
        source = tl.where(row < rows, row, -1)
        _join_part(table_ptr, out2_ptr, source, index, row, rows, stride2, out_stride2, number_ptr, step,
                   START2, WORD2, WIDTH2, END2, BLOCK2)  # fmt: skip


def join_rows(
    first: Tensor, other: Tensor | None, row_index: Tensor, table: Tensor | None, number: Tensor | None, step: int
) -> Tensor:
    parts = [part if part is None or part.stride(1) == 1 else part.contiguous() for part in (first, other, table)]
    last, used = max(i for i, part in enumerate(parts) if part is not None), 0
    width = round_up(sum(part.shape[1] for part in parts if part is not None), ALIGNMENT)
    out = torch.empty((len(row_index), width), dtype=torch.uint8, device=row_index.device)
    if not out.numel():
        return out
    sources: list[Tensor | None] = []
    targets: list[Tensor | None] = []
    constants, nbytes = {}, 0
    for i, part in enumerate(parts):
        start, word, columns, end = used, 1, 0, 0
        if part is not None:
            used += part.shape[1]
            end = width if i == last else used
            word = math.gcd(8, part.shape[1], part.stride(0), part.storage_offset(), start, end)
            columns, end = part.shape[1] // word, (end - start) // word
        sources.append(None if part is None else part.view(WORDS[word]))
        targets.append(None if part is None else out[:, start : start + end * word].view(WORDS[word]))
        block = next_power_of_2(end)
        nbytes += block * word
        named = {"START": start, "WORD": word, "WIDTH": columns, "END": end, "BLOCK": block}
        constants |= {f"{name}{i}": value for name, value in named.items()}
    at_once = max(1, TILE_BYTES // next_power_of_2(nbytes))
    strides = [0 if each is None else each.stride(0) for each in (*sources, *targets)]
    launch(join_kernel, (cdiv(len(out), at_once),),
        *sources, *targets, row_index, number, *strides, len(out), step,
        **constants, BLOCK_T=at_once, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def add_rows(acc, rows_ptr, row, D: tl.constexpr, BLOCK: tl.constexpr):
    """Returns acc (BLOCK_T, BLOCK) plus the rows `row` (BLOCK_T,) of the matrix. A negative index adds nothing."""
    column = tl.arange(0, BLOCK)[None, :]
    offs = tl.maximum(row, 0).to(tl.int64)[:, None] * D + column
    return acc + tl.load(rows_ptr + offs, mask=(row >= 0)[:, None] & (column < D), other=0.0).to(tl.float32)


@triton.jit
def sum_slots_kernel(
    rows_ptr, slot_rows_ptr, out_ptr, slots,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    for k in range(K):
        total = add_rows(total, rows_ptr, tl.load(slot_rows_ptr + slot * K + k, mask=slot < slots, other=-1), D, BLOCK)
    offs = slot.to(tl.int64)[:, None] * D + column
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=(slot < slots)[:, None] & (column < D))


def sum_slots(rows: Tensor, slot_rows: Tensor) -> Tensor:
    (slots, top_k), dim = slot_rows.shape, rows.shape[1]
    out = torch.empty(slots, dim, dtype=rows.dtype, device=rows.device)
    block = next_power_of_2(dim)
    block_t = tokens_per_tile(TILE_BYTES // (block * rows.itemsize), slots, SPREAD)
    if out.numel():
        launch(sum_slots_kernel, (cdiv(slots, block_t),),
            rows.contiguous(), slot_rows.contiguous(), out, slots, K=top_k, D=dim, BLOCK=block, BLOCK_T=block_t,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


# ── combine ──


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
