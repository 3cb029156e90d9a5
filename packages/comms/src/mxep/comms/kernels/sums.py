"""Rows home, in one kernel: sums of what each slot's rows hold go over the wire while those that arrived are summed.

    tiles of tokens, in chunks; programs take one after the other
        chunk c             for each rank r: sum the rows of slot (r, t), store the sum into slot (my rank, t) of rank r
        and chunk c - lag   sum slots (r, t) over ranks r
    who leaves a chunk      adds its tiles to the chunk's counter; the last one signals the chunk to all ranks,
    who enters chunk c      waits for all ranks' signals of chunk c - lag

So reads, wire and writes are busy at once, and after the last store `lag` chunks are left to sum. Programs are not
served alike where the links are full: with a fixed share each, all would wait for the slowest.
A tile is taken by a program that runs, and no wait needs one that has not started: any number of them gets home, if one
runs on each rank. Two such kernels at once might keep each other out on different ranks: a transport runs them in turn.
A sum is in fp32, over the token's list in its order, then over ranks in theirs, rounded after each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.launch import Launch, rows_at_once
from mxep.comms.kernels.put import owner_of
from mxep.comms.kernels.signals import announce, arrive, await_peers, take, word_of
from mxep.comms.layout import CHANNELS, CHUNKS, round_up

TILE_BYTES = 16384
CHUNK_BYTES = 12 << 20
"""What a chunk moves at least: to finish one costs a trip over the link."""
TAKE_BYTES = 64 << 10
"""What a program takes at a time, of tiles."""
LAG = 3
SPREAD = 256
"""Programs that a sum of slots is spread over at least, if there are so many slots."""
PER_SM = 2
"""Programs that fit on a multiprocessor: one waits for its rows while the other sends."""
NUM_WARPS = 8
MAX_REGISTERS = 128
AT_ONCE = tl.constexpr(4)
"""Rows of a slot whose loads are under way together."""
ARRIVED_AT_END = tl.constexpr(2 + CHANNELS)
TAKEN = tl.constexpr(3 + CHANNELS)

SCALARS = ("num_tokens", "max_tokens", "rank", "experts_per_rank", "chunk_tiles", "chunks", "lag", "signature",
           "values_start", "signals_start", "own_start", "rows_start")  # fmt: skip


@triton.jit
def add_rows(acc, rows_ptr, row, D: tl.constexpr, BLOCK: tl.constexpr):
    """acc (NT, BLOCK) + rows `row` (NT,), where that is not negative."""
    column = tl.arange(0, BLOCK)[None, :]
    place = tl.maximum(row, 0).to(tl.int64)[:, None] * D + column
    return acc + tl.load(rows_ptr + place, mask=(row >= 0)[:, None] & (column < D), other=0.0).to(tl.float32)


@triton.jit
def sum_slots_kernel(
    rows_ptr, slot_rows_ptr, out_ptr, slots, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NT: tl.constexpr
):
    slot = tl.program_id(0) * NT + tl.arange(0, NT)
    column = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((NT, BLOCK), tl.float32)
    for k in range(K):
        total = add_rows(total, rows_ptr, tl.load(slot_rows_ptr + slot * K + k, mask=slot < slots, other=-1), D, BLOCK)
    place = slot.to(tl.int64)[:, None] * D + column
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(slot < slots)[:, None] & (column < D))


@triton.jit
def rows_of_slots(slot_rows_ptr, sources_ptr, token, peer, max_tokens, K: tl.constexpr, KP: tl.constexpr):
    """Rows (NT, KP) of slots (peer, token), -1 where there is none."""
    there = token < tl.load(sources_ptr + peer)
    k = tl.arange(0, KP)[None, :]
    pair = (peer * max_tokens + token)[:, None] * K + k
    return tl.load(slot_rows_ptr + pair, mask=there[:, None] & (k < K), other=-1)


@triton.jit
def is_sent(row):
    """Whether slots with rows `row` (NT, KP) have a sum. One whose rows were all dropped (-2) has, of zeroes: its owner
    cannot know, and reads it."""
    return (tl.min(row, 1) < -1) | (tl.max(row, 1) >= 0)


@triton.jit
def push_sum(
    rows_ptr, row_values_ptr, slot_rows_ptr, row, token, peer, base, max_tokens, rank, rows_start, values_start,
    K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROW_ELEMENTS: tl.constexpr,
    NT: tl.constexpr,
):  # fmt: skip
    """Sums of slots (peer, token), whose rows are `row`, into slots (rank, token) of the peer, at address `base`."""
    sent = is_sent(row)
    if tl.max(sent.to(tl.int32), 0) > 0:
        dtype: tl.constexpr = rows_ptr.dtype.element_ty
        total = tl.zeros((NT, BLOCK), tl.float32)
        for first in range(0, K, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                place = (peer * max_tokens + token) * K + first + i
                mine = tl.load(slot_rows_ptr + place, mask=sent & (first + i < K), other=-1)
                total = add_rows(total, rows_ptr, mine, D, BLOCK)
        column = tl.arange(0, BLOCK)[None, :]
        home = rank * max_tokens + token
        start = tl.multiple_of((base + rows_start).to(tl.pointer_type(dtype)), 16)
        place = home.to(tl.int64)[:, None] * ROW_ELEMENTS + column
        tl.store(start + place, total.to(dtype), mask=sent[:, None] & (column < D))
        if row_values_ptr is not None:
            k = tl.arange(0, KP)[None, :]
            table = (base + values_start).to(tl.pointer_type(tl.float32))
            value = tl.load(row_values_ptr + row, mask=row >= 0, other=0.0)
            tl.store(table + (home[:, None] * K + k), value, mask=sent[:, None] & (k < K))


@triton.jit
def sum_arrived(
    out_ptr, values_ptr, ids_ptr, token, there, own_base, max_tokens, experts_per_rank, rows_start, values_start,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """What ranks put into slots (rank, token) of ours, summed over ranks, and the numbers of the tokens' pairs."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, KP)[None, :]
    pair = token[:, None] * K + k
    listed = there[:, None] & (k < K)
    owner = owner_of(tl.load(ids_ptr + pair, mask=listed, other=-1), experts_per_rank, W)
    total = tl.zeros((NT, BLOCK), tl.float32)
    start = tl.multiple_of((own_base + rows_start).to(tl.pointer_type(dtype)), 16)
    for peer in range(W):
        came = tl.max((owner == peer).to(tl.int32), 1) > 0
        place = (peer * max_tokens + token).to(tl.int64)[:, None] * ROW_ELEMENTS + column
        total += tl.load(start + place, mask=came[:, None] & (column < D), other=0.0).to(tl.float32)
    place = token.to(tl.int64)[:, None] * D + column
    tl.store(out_ptr + place, total.to(dtype), mask=there[:, None] & (column < D))
    if values_ptr is not None:
        table = (own_base + values_start).to(tl.pointer_type(tl.float32))
        value = tl.load(table + (owner * max_tokens * K + pair), mask=owner >= 0, other=0.0)
        tl.store(values_ptr + pair, value, mask=listed)


@triton.jit
def leave(
    pointers_ptr, own_ptr, signals_start, chunk, pushed, chunk_tiles, word, rank, W: tl.constexpr, WP: tl.constexpr
):
    """Tell that this program has pushed so many tiles of a chunk; the last to tell signals it."""
    if pushed > 0:
        if arrive(own_ptr + 3 + chunk, pushed, chunk_tiles):
            announce(pointers_ptr, signals_start, 1 + chunk, word, rank, W, WP)


@triton.jit(do_not_specialize=SCALARS)
def return_sums_kernel(
    rows_ptr, row_values_ptr, slot_rows_ptr, sources_ptr, ids_ptr, out_ptr, values_ptr, pointers_ptr, state_ptr,
    num_tokens, max_tokens, rank, experts_per_rank, chunk_tiles, chunks, lag, signature, values_start, signals_start,
    own_start, rows_start,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, NT: tl.constexpr, TAKE: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """sources (W,): tokens that each rank sent. row_values and values None: rows go home without numbers."""
    own_base = tl.load(pointers_ptr + rank)
    own_ptr = (own_base + own_start).to(tl.pointer_type(tl.int64))
    word = word_of(own_ptr, 1, signature)
    tokens = tl.arange(0, NT)
    chunk = 0
    pushed = 0
    tile = take(own_ptr, TAKEN) * TAKE
    row = rows_of_slots(slot_rows_ptr, sources_ptr, tile * NT + tokens, (rank + tile) % W, max_tokens, K, KP)
    while tile < (chunks + lag) * chunk_tiles:
        now = tile // chunk_tiles
        if now > chunk:
            leave(pointers_ptr, own_ptr, signals_start, chunk, pushed, chunk_tiles, word, rank, W, WP)
            if now >= lag:
                await_peers(own_base, signals_start, 1 + now - lag, word, state_ptr, W, WP, CLOCK)
            chunk = now
            pushed = 0
        token = tile * NT + tokens
        next_tile = tile + 1
        if next_tile % TAKE == 0:
            next_tile = take(own_ptr, TAKEN) * TAKE
        if chunk < chunks:
            for turn in range(W):
                peer = (rank + tile + turn) % W
                # Where the next rows are is under way while these are summed.
                if turn < W - 1:
                    next_token = token
                    next_peer = (peer + 1) % W
                else:
                    next_token = next_tile * NT + tokens
                    next_peer = (rank + next_tile) % W
                next_row = rows_of_slots(slot_rows_ptr, sources_ptr, next_token, next_peer, max_tokens, K, KP)
                push_sum(
                    rows_ptr, row_values_ptr, slot_rows_ptr, row, token, peer, tl.load(pointers_ptr + peer),
                    max_tokens, rank, rows_start, values_start, K, KP, D, BLOCK, ROW_ELEMENTS, NT,
                )  # fmt: skip
                row = next_row
            pushed += 1
        if chunk >= lag:
            token -= lag * chunk_tiles * NT
            sum_arrived(
                out_ptr, values_ptr, ids_ptr, token, token < num_tokens, own_base, max_tokens,
                experts_per_rank, rows_start, values_start, W, K, KP, D, BLOCK, ROW_ELEMENTS, NT,
            )  # fmt: skip
        tile = next_tile
    leave(pointers_ptr, own_ptr, signals_start, chunk, pushed, chunk_tiles, word, rank, W, WP)
    if arrive(own_ptr + ARRIVED_AT_END, 1, tl.num_programs(0)):
        tl.store(own_ptr + 1, word >> 32)
        tl.store(own_ptr + TAKEN, tl.zeros((), tl.int64))


def return_sums(
    launch: Launch,
    rows: Tensor,
    row_values: Tensor | None,
    slot_rows: Tensor,
    sources: Tensor,
    expert_ids: Tensor,
    experts_per_rank: int,
    out: Tensor,
    values: Tensor | None,
) -> None:
    layout = launch.layout
    dim = rows.shape[1]
    block = triton.next_power_of_2(dim)
    programs = PER_SM * launch.max_sms
    at_once = rows_at_once(TILE_BYTES, block * rows.itemsize, layout.max_tokens, programs)
    tiles = max(1, triton.cdiv(layout.max_tokens, at_once))
    tile_bytes = at_once * min(layout.top_k, layout.world_size) * dim * rows.itemsize
    take = max(1, min(TAKE_BYTES // tile_bytes, tiles // programs))
    chunk_tiles = triton.cdiv(tiles, max(1, min(CHUNKS, tiles * tile_bytes // CHUNK_BYTES)))
    chunk_tiles = round_up(chunk_tiles, take)
    chunks = triton.cdiv(tiles, chunk_tiles)
    lag = max(1, min(LAG, chunks // 2))
    return_sums_kernel[(max(1, min(programs, tiles)),)](
        rows.contiguous(), None if row_values is None else row_values.contiguous(), slot_rows, sources, expert_ids,
        out, values, launch.pointers, launch.state, len(expert_ids), layout.max_tokens, launch.rank, experts_per_rank,
        chunk_tiles, chunks, lag,
        launch.signature(dim * rows.dtype.itemsize), layout.values_start, layout.signals_start, layout.own_start,
        layout.rows_start,
        W=layout.world_size, WP=triton.next_power_of_2(layout.world_size), K=layout.top_k,
        KP=triton.next_power_of_2(layout.top_k), D=dim, BLOCK=block,
        ROW_ELEMENTS=layout.row_bytes // rows.dtype.itemsize, NT=at_once, TAKE=take, CLOCK=launch.clock,
        num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def sum_slots(rows: Tensor, slot_rows: Tensor) -> Tensor:
    """mxep::sum_slots."""
    dim = rows.shape[1]
    out = torch.empty(len(slot_rows), dim, dtype=rows.dtype, device=rows.device)
    block = triton.next_power_of_2(dim)
    at_once = rows_at_once(TILE_BYTES, block * rows.itemsize, len(slot_rows), SPREAD)
    if out.numel():
        sum_slots_kernel[(triton.cdiv(len(slot_rows), at_once),)](
            rows.contiguous(), slot_rows.contiguous(), out, len(slot_rows), K=slot_rows.shape[1], D=dim, BLOCK=block,
            NT=at_once, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
