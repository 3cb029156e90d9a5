"""Stores of tokens: into slots, or straight into expert-major rows, of the ranks that need them; and of the tables.

A program takes NT tokens at a time: their parts once from memory, then for one rank after another a store of those rows
that it needs; each program starts with another rank, so that all links are busy. A row's parts lie side by side, each
moved in words of WORD_i bytes, which its width and its place are multiples of.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.launch import Launch, rows_at_once
from mxep.comms.kernels.signals import arrive, meet, word_of

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
MOST_PARTS = 2
NUM_WARPS = 16
TILE_BYTES = 16384
FEW_PROGRAMS = 64
"""Up to so many take four times as much at once."""
TABLE_PAIRS = 1024

SCALARS = ("num_tokens", "max_tokens", "rank", "experts_per_rank", "signature", "signals_start", "own_start",
           "rows_start", "ids_start", "values_start", "num_tokens_start", "groups")  # fmt: skip


@triton.jit
def owner_of(expert, experts_per_rank, W: tl.constexpr):
    """The rank that owns an expert; -1 for what is not an expert's id."""
    return tl.where((expert >= 0) & (expert < W * experts_per_rank), expert // experts_per_rank, -1).to(tl.int32)


@triton.jit
def load_part(part_ptr, token, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    place = token.to(tl.int64)[:, None] * WIDTH + column
    return tl.load(part_ptr + place, mask=there[:, None] & (column < WIDTH), other=0)


@triton.jit
def load_tokens(
    ids_ptr, part0_ptr, part1_ptr, tile, num_tokens, experts_per_rank,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WIDTH0: tl.constexpr, BLOCK0: tl.constexpr,
    WIDTH1: tl.constexpr, BLOCK1: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """(token, owner of each of its experts, parts) of a tile; nobody owns what is past the last token."""
    k = tl.arange(0, KP)[None, :]
    token = tile * NT + tl.arange(0, NT)
    there = token < num_tokens
    ids = tl.load(ids_ptr + token[:, None] * K + k, mask=there[:, None] & (k < K), other=-1)
    x0 = load_part(part0_ptr, token, there, WIDTH0, BLOCK0)
    x1 = tl.zeros((1, 1), tl.int32)
    if part1_ptr is not None:
        x1 = load_part(part1_ptr, token, there, WIDTH1, BLOCK1)
    return token, owner_of(ids, experts_per_rank, W), x0, x1


@triton.jit
def store_part(
    base, part_ptr, x, row, there, OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Into rows `row` of a peer's, the first at address `base`, OFFSET bytes behind each row's start."""
    WORD: tl.constexpr = part_ptr.dtype.element_ty.primitive_bitwidth // 8
    # An address out of a table has lost its alignment.
    start = tl.multiple_of(base.to(tl.pointer_type(part_ptr.dtype.element_ty)), 16)
    column = tl.arange(0, BLOCK)[None, :]
    place = row.to(tl.int64)[:, None] * (ROW_BYTES // WORD) + (OFFSET // WORD + column)
    tl.store(start + place, x, mask=there[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=SCALARS)
def put_rows_kernel(
    ids_ptr, rows_ptr, ends_ptr, sizes_ptr, part0_ptr, part1_ptr, pointers_ptr, state_ptr,
    num_tokens, max_tokens, rank, experts_per_rank, groups, signature, signals_start, own_start, rows_start,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROW_BYTES: tl.constexpr,
    WIDTH0: tl.constexpr, BLOCK0: tl.constexpr, OFFSET1: tl.constexpr, WIDTH1: tl.constexpr, BLOCK1: tl.constexpr,
    NT: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """rows None: token t goes into slot (rank, t); else pair (t, k) into row rows[t, k], and padding rows become zero.

    part1 None: a row has one part.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    own_base = tl.load(pointers_ptr + rank)
    token, owner, x0, x1 = load_tokens(
        ids_ptr, part0_ptr, part1_ptr, program, num_tokens, experts_per_rank,
        W, K, KP, WIDTH0, BLOCK0, WIDTH1, BLOCK1, NT,
    )  # fmt: skip
    for tile in range(program, tl.cdiv(num_tokens, NT), programs):
        # The next tile is under way while this one is stored.
        next_token, next_owner, next0, next1 = load_tokens(
            ids_ptr, part0_ptr, part1_ptr, tile + programs, num_tokens, experts_per_rank,
            W, K, KP, WIDTH0, BLOCK0, WIDTH1, BLOCK1, NT,
        )  # fmt: skip
        for turn in range(W):
            peer = (turn + rank + tile) % W
            base = tl.load(pointers_ptr + peer) + rows_start
            if rows_ptr is None:
                row = rank * max_tokens + token
                there = tl.max((owner == peer).to(tl.int32), 1) > 0
                store_part(base, part0_ptr, x0, row, there, 0, ROW_BYTES, WIDTH0, BLOCK0)
                if part1_ptr is not None:
                    store_part(base, part1_ptr, x1, row, there, OFFSET1, ROW_BYTES, WIDTH1, BLOCK1)
            else:
                for i in range(K):
                    row = tl.load(rows_ptr + token * K + i, mask=token < num_tokens, other=-1)
                    expert = tl.load(ids_ptr + token * K + i, mask=token < num_tokens, other=-1)
                    there = (owner_of(expert, experts_per_rank, W) == peer) & (row >= 0)
                    store_part(base, part0_ptr, x0, row, there, 0, ROW_BYTES, WIDTH0, BLOCK0)
                    if part1_ptr is not None:
                        store_part(base, part1_ptr, x1, row, there, OFFSET1, ROW_BYTES, WIDTH1, BLOCK1)
        token, owner, x0, x1 = next_token, next_owner, next0, next1
    if rows_ptr is not None:
        for group in range(program, groups, programs):
            start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0) + tl.load(sizes_ptr + group)
            end = tl.load(ends_ptr + group)
            base = own_base + rows_start
            for first in range(start, end, NT):
                row = first + tl.arange(0, NT)
                zero0 = tl.zeros((NT, BLOCK0), part0_ptr.dtype.element_ty)
                store_part(base, part0_ptr, zero0, row, row < end, 0, ROW_BYTES, WIDTH0, BLOCK0)
                if part1_ptr is not None:
                    zero1 = tl.zeros((NT, BLOCK1), part1_ptr.dtype.element_ty)
                    store_part(base, part1_ptr, zero1, row, row < end, OFFSET1, ROW_BYTES, WIDTH1, BLOCK1)

    own_ptr = (own_base + own_start).to(tl.pointer_type(tl.int64))
    word = word_of(own_ptr, 1, signature)
    if arrive(own_ptr + 3, 1, programs):
        meet(pointers_ptr, own_base, signals_start, 1, word, state_ptr, rank, W, WP, CLOCK)
        tl.store(own_ptr + 1, word >> 32)


@triton.jit(do_not_specialize=SCALARS)
def put_tables_kernel(
    ids_ptr, weights_ptr, pointers_ptr, state_ptr, num_tokens, max_tokens, rank, experts_per_rank, signature,
    ids_start, values_start, num_tokens_start, signals_start, own_start,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Ids (T, K), weights (T, K) and T into place `rank` of every rank's tables."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    own_base = tl.load(pointers_ptr + rank)
    for first in range(program * BLOCK, num_tokens * K, programs * BLOCK):
        pair = first + tl.arange(0, BLOCK)
        there = pair < num_tokens * K
        ids = tl.load(ids_ptr + pair, mask=there, other=-1)
        # Clamped so that no invalid int64 wraps around into a valid int32.
        ids = tl.minimum(tl.maximum(ids, -2), W * experts_per_rank).to(tl.int32)
        weights = tl.load(weights_ptr + pair, mask=there, other=0)
        for turn in range(W):
            base = tl.load(pointers_ptr + (turn + rank) % W)
            table = tl.multiple_of((base + ids_start).to(tl.pointer_type(tl.int32)), 16)
            tl.store(table + (rank * max_tokens * K + pair), ids, mask=there)
            table = tl.multiple_of((base + values_start).to(tl.pointer_type(tl.float32)), 16)
            tl.store(table + (rank * max_tokens * K + pair), weights, mask=there)
    if program == 0:
        peer = tl.arange(0, WP)
        base = tl.load(pointers_ptr + peer, mask=peer < W, other=0)
        counts = (base + num_tokens_start).to(tl.pointer_type(tl.int32))
        tl.store(counts + rank, num_tokens, mask=peer < W)

    own_ptr = (own_base + own_start).to(tl.pointer_type(tl.int64))
    word = word_of(own_ptr, 0, signature)
    if arrive(own_ptr + 2, 1, programs):
        meet(pointers_ptr, own_base, signals_start, 0, word, state_ptr, rank, W, WP, CLOCK)
        tl.store(own_ptr, word >> 32)


def put_rows(
    launch: Launch,
    payload: Sequence[Tensor],
    expert_ids: Tensor,
    experts_per_rank: int,
    *,
    rows: Tensor | None = None,
    offs: Tensor | None = None,
    group_sizes: Tensor | None = None,
) -> None:
    """Tokens to slots; with ``rows`` (T, K) int32 to expert-major rows, and zeroes on the padding of the own groups."""
    layout = launch.layout
    words, widths, offsets = _in_words(payload)
    blocks = [triton.next_power_of_2(width) for width in widths]
    tile_bytes = TILE_BYTES * (4 if launch.max_sms <= FEW_PROGRAMS else 1)
    at_once = rows_at_once(tile_bytes, blocks[0] * words[0].itemsize, len(expert_ids), launch.max_sms)
    programs = max(1, min(triton.cdiv(len(expert_ids), at_once), launch.max_sms))
    put_rows_kernel[(programs,)](
        expert_ids, rows, offs, group_sizes, words[0],
        words[1] if len(words) > 1 else None, launch.pointers, launch.state, len(expert_ids), layout.max_tokens,
        launch.rank, experts_per_rank,
        0 if offs is None else len(offs), launch.signature(offsets[-1]), layout.signals_start,
        layout.own_start, layout.rows_start,
        W=layout.world_size, WP=triton.next_power_of_2(layout.world_size), K=layout.top_k,
        KP=triton.next_power_of_2(layout.top_k), ROW_BYTES=layout.row_bytes, WIDTH0=widths[0], BLOCK0=blocks[0],
        OFFSET1=offsets[1], WIDTH1=widths[-1], BLOCK1=blocks[-1], NT=at_once, CLOCK=launch.clock,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def put_tables(launch: Launch, expert_ids: Tensor, weights: Tensor, experts_per_rank: int) -> None:
    layout = launch.layout
    programs = max(1, min(triton.cdiv(expert_ids.numel(), TABLE_PAIRS), launch.max_sms))
    put_tables_kernel[(programs,)](
        expert_ids, weights, launch.pointers, launch.state, len(expert_ids), layout.max_tokens, launch.rank,
        experts_per_rank, launch.signature(layout.top_k), layout.ids_start, layout.values_start,
        layout.num_tokens_start, layout.signals_start, layout.own_start,
        W=layout.world_size, WP=triton.next_power_of_2(layout.world_size), K=layout.top_k, BLOCK=TABLE_PAIRS,
        CLOCK=launch.clock, num_warps=8,
    )  # fmt: skip


def _in_words(payload: Sequence[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
    """Parts as words, their widths in words, and where each starts in a row, in bytes; last, where the row ends."""
    if len(payload) > MOST_PARTS:
        payload = [torch.cat(tuple(payload), 1)]
    words, widths, offsets = [], [], [0]
    for part in payload:
        width = part.shape[1]
        # Flat: one row is contiguous to torch whatever its stride, which a view as wider words would not take.
        part = part.contiguous().view(-1)
        word = math.gcd(8, offsets[-1], width, part.storage_offset())
        words.append(part.view(WORDS[word]))
        widths.append(width // word)
        offsets.append(offsets[-1] + width)
    return words, widths, offsets
