"""Kernels of the all-to-all ops in `comms/rows.py`. The letters are explained there.

plan_all_to_all orders (token, expert) pairs by destination rank in two launches, without a sort:

    count   one program per chunk of tokens    ids -> counts (chunks, W), invalid ids (chunks,)
    place   one program per chunk of tokens    counts -> first row of this chunk's pairs in the block of each rank
                                               ids, tile by tile -> position, rows, sums, token, tables

Each `place` program sums the counts of earlier chunks itself. It orders the pairs of a tile by counting in bytes, as
explained in `plan.py`. A tile holds whole tokens, with K padded to a power of two. Unsent pairs get the last rows, in
their order. Rows are int32, so W + T * K and T * P * K must stay below 2^31.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.plan import COUNTS_AT_ONCE, LEAST_EXPERTS, NUM_WARPS, SEGMENT, TILE_COUNTS, _order, _sizes
from mxep.comms.layout import NEW
from mxep.runtime.launch import cdiv, launch, next_power_of_2

ANY_NEW = tl.constexpr(NEW * 4 + 1)
MOST_CHUNKS = 128
COUNT_TILE = 1024
NODE_TILE = 2048
"""Maximum tokens x nodes of a tile."""
MOST_TOKENS = 256
"""Maximum tokens of a tile."""
FLAT_TILE = 1024


@triton.jit
def _owner(ids, experts_per_rank, num_ranks):
    """Returns the rank that owns each expert id (-1 for ids that are -1 or invalid), and a mask of invalid ids."""
    valid = (ids >= 0) & (ids < experts_per_rank * num_ranks)
    rank = tl.where(valid, tl.maximum(ids, 0) // experts_per_rank, -1)
    return rank, (ids != -1) & (valid == 0)


@triton.jit(do_not_specialize=["pairs", "chunk", "experts_per_rank", "num_ranks"])
def pair_count_kernel(
    ids_ptr, counts_ptr, wrong_ptr, pairs, chunk, experts_per_rank, num_ranks, RANKS: tl.constexpr, TILE: tl.constexpr
):
    """pairs: T * K. chunk: pairs per program."""
    program = tl.program_id(0)
    end = tl.minimum((program + 1) * chunk, pairs)
    counts, wrong = tl.zeros((RANKS,), tl.int32), tl.zeros((TILE,), tl.int32)
    for first in range(program * chunk, end, TILE):
        pair = first + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + pair, mask=pair < end, other=-1)
        rank, is_wrong = _owner(ids, experts_per_rank, num_ranks)
        wrong += is_wrong.to(tl.int32)
        counts += tl.histogram(rank, RANKS, mask=rank >= 0)
    ranks = tl.arange(0, RANKS)
    tl.store(counts_ptr + program * num_ranks + ranks, counts, mask=ranks < num_ranks)
    tl.store(wrong_ptr + program, tl.sum(wrong, 0))


@triton.jit(do_not_specialize=["tokens", "chunk", "experts_per_rank", "num_ranks", "most", "width"])
def pair_place_kernel(
    ids_ptr, weights_ptr, counts_ptr, wrong_ptr,
    sizes_ptr, valid_ids_ptr, token_ptr, tables_ptr, position_ptr, rows_ptr, sums_ptr,
    tokens, chunk, experts_per_rank, num_ranks, most, width,
    TOP_K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """chunk: tokens per program. most: P, the maximum ranks per token. Weights and tables are read as int32 words."""
    TILE: tl.constexpr = SEGMENTS * SEGMENT
    program, chunks, ranks = tl.program_id(0), tl.num_programs(0), tl.arange(0, RANKS)
    sizes, earlier = _sizes(counts_ptr, num_ranks, num_ranks, chunks, program, RANKS, CHUNKS)
    with_header = sizes + (ranks < num_ranks).to(tl.int32)
    header = tl.cumsum(with_header, 0) - with_header
    next_row = header + 1 + earlier
    sent_before = tl.sum(earlier, 0)
    all_sent = num_ranks + tl.sum(sizes, 0)
    if program == 0:
        wrong = tl.zeros((RANKS,), tl.int32)
        for first in range(0, chunks, RANKS):
            wrong += tl.load(wrong_ptr + first + ranks, mask=first + ranks < chunks, other=0)
        mask = ranks < num_ranks
        tl.store(sizes_ptr + ranks * 3, with_header.to(tl.int64), mask=mask)
        tl.store(sizes_ptr + ranks * 3 + 1, ranks.to(tl.int64) * 0 + tl.sum(wrong, 0), mask=mask)
        tl.store(sizes_ptr + ranks * 3 + 2, ranks.to(tl.int64) * 0 + width, mask=mask)
        tl.store(token_ptr + header, -1, mask=mask)
        tl.store(tables_ptr + header * 2, -1, mask=mask)
        tl.store(tables_ptr + header * 2 + 1, 0, mask=mask)

    lane = tl.arange(0, TILE)
    k, column = lane % KP, tl.arange(0, KP)[None, :]
    end = tl.minimum((program + 1) * chunk, tokens)
    for first in range(program * chunk, end, TILE // KP):
        token = first + lane // KP
        pair = token * TOP_K + k
        mask = (token < end) & (k < TOP_K)
        ids = tl.load(ids_ptr + pair, mask=mask, other=-1)
        rank, _ = _owner(ids, experts_per_rank, num_ranks)
        is_sent = rank >= 0

        place, of_segment = _order(rank, SEGMENTS, SEGMENT, RANKS)
        first_row = next_row[None, :] + tl.cumsum(of_segment, 0) - of_segment
        next_row += tl.sum(of_segment, 0)
        first_row = tl.reshape(first_row, (SEGMENTS * RANKS,))
        row = tl.gather(first_row, lane // SEGMENT * RANKS + tl.maximum(rank, 0), 0) + place - 1
        before = sent_before + tl.cumsum(is_sent.to(tl.int32), 0)
        sent_before += tl.sum(is_sent.to(tl.int32), 0)
        row = tl.where(is_sent, row, all_sent + pair - before)
        ids = tl.where(is_sent, ids, -1)
        tl.store(valid_ids_ptr + pair, ids, mask=mask)
        tl.store(token_ptr + row, tl.where(is_sent, token, -1), mask=mask)
        tl.store(tables_ptr + row.to(tl.int64) * 2, ids, mask=mask)
        tl.store(tables_ptr + row.to(tl.int64) * 2 + 1, tl.load(weights_ptr + pair, mask=mask, other=0), mask=mask)
        position = tl.where(is_sent, row, -1)
        tl.store(position_ptr + pair, position, mask=mask)

        # For each pair, count the ranks of its token that are below its own. The token's first pair on a rank counts.
        rank, position = tl.reshape(rank, (TILE // KP, KP)), tl.reshape(position, (TILE // KP, KP))
        place_of_rank, num = tl.zeros((TILE // KP, KP), tl.int32), tl.zeros((TILE // KP,), tl.int32)
        for j in range(TOP_K):
            other = tl.sum(tl.where(column == j, rank, 0), 1)
            twins = tl.sum(((rank == other[:, None]) & (column < j)).to(tl.int32), 1)
            counted = (other >= 0) & (twins == 0)
            place_of_rank += (counted[:, None] & (other[:, None] < rank)).to(tl.int32)
            num += counted.to(tl.int32)
        token = first + tl.arange(0, TILE // KP)
        for p in range(most):
            of_rank = token.to(tl.int64) * most + p
            mask_tk = (token < end)[:, None] & (column < TOP_K)
            tl.store(rows_ptr + of_rank[:, None] * TOP_K + column, tl.where(place_of_rank == p, position, -1), mask_tk)
            tl.store(sums_ptr + of_rank, tl.where(p < num, of_rank.to(tl.int32), -1), mask=token < end)


def plan_all_to_all(
    expert_ids: Tensor, weights: Tensor, experts_per_rank: int, num_ranks: int, width: int
) -> tuple[Tensor, ...]:
    (tokens, top_k), device = expert_ids.shape, expert_ids.device
    expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
    most, all_rows = min(top_k, num_ranks), num_ranks + tokens * top_k
    sizes = torch.empty((num_ranks, 3), dtype=torch.int64, device=device)
    ids, position = (torch.empty((tokens, top_k), dtype=torch.int32, device=device) for _ in range(2))
    token = torch.empty(all_rows, dtype=torch.int32, device=device)
    tables = torch.empty((all_rows, 2), dtype=torch.int32, device=device)
    rows = torch.empty((tokens * most, top_k), dtype=torch.int32, device=device)
    sums = torch.empty((tokens, most), dtype=torch.int32, device=device)

    ranks, of_token = max(LEAST_EXPERTS, next_power_of_2(num_ranks)), next_power_of_2(top_k)
    segments = max(1, TILE_COUNTS // ranks, of_token // SEGMENT)
    at_once = segments * SEGMENT // of_token
    chunk = at_once * max(1, cdiv(tokens, at_once * MOST_CHUNKS))
    chunks = max(1, cdiv(tokens, chunk))
    counts, wrong = (torch.empty(chunks * n, dtype=torch.int32, device=device) for n in (num_ranks, 1))
    launch(pair_count_kernel, (chunks,),
        expert_ids, counts, wrong, tokens * top_k, chunk * top_k, experts_per_rank, num_ranks,
        RANKS=ranks, TILE=COUNT_TILE, num_warps=NUM_WARPS,
    )  # fmt: skip
    launch(pair_place_kernel, (chunks,),
        expert_ids, weights.view(torch.int32), counts, wrong, sizes, ids, token, tables, position, rows, sums,
        tokens, chunk, experts_per_rank, num_ranks, most, width,
        TOP_K=top_k, KP=of_token, RANKS=ranks, SEGMENTS=segments, SEGMENT=SEGMENT,
        CHUNKS=max(1, COUNTS_AT_ONCE // ranks), num_warps=NUM_WARPS,
    )  # fmt: skip
    return sizes, ids, token, tables.view(torch.uint8), position, rows, sums


@triton.jit(do_not_specialize=["row_stride", "size_stride", "blocks", "step"])
def compare_kernel(
    rows_ptr, sizes_ptr, number_ptr, found_ptr, row_stride, size_stride, blocks, step,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, byte = tl.arange(0, BLOCKS), tl.arange(0, 4)[None, :]
    sizes = tl.load(sizes_ptr + block * size_stride, mask=block < blocks, other=0)
    head = tl.cumsum(sizes, 0) - sizes
    ptrs, mask = rows_ptr + head[:, None] * row_stride + byte, (block < blocks)[:, None] & (byte < WIDTH)
    seen = tl.sum(tl.load(ptrs, mask=mask, other=0).to(tl.int32) << (8 * byte), 1)
    word = tl.load(number_ptr) * 4 + step
    own = tl.sum(tl.where(byte < WIDTH, word & (255 << (8 * byte)), 0), 1)
    differ = (block < blocks) & (seen != own) & (tl.maximum(seen, own) != ANY_NEW)
    if (tl.sum(differ.to(tl.int32), 0) > 0) & (tl.load(found_ptr) == 0):
        tl.store(found_ptr + 1 + block, seen, mask=block < blocks)
        tl.store(found_ptr, 1)


def compare_headers(rows: Tensor, sizes: Tensor, number: Tensor, found: Tensor, step: int) -> None:
    assert rows.stride(1) == 1 or rows.shape[1] == 1
    launch(compare_kernel, (1,),
        rows, sizes, number, found, rows.stride(0), sizes.stride(0), len(sizes), step,
        WIDTH=min(4, rows.shape[1]), BLOCKS=next_power_of_2(len(sizes)), num_warps=1,
    )  # fmt: skip


# ── slots of nodes ──


@triton.jit
def _pairs_of_nodes(
    ids_ptr, token, mask, experts_per_node, num_experts,
    TOP_K: tl.constexpr, NODES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Returns the number of pairs of each token on each node, (BLOCK_T, NODES), and its invalid ids, (BLOCK_T,)."""
    pairs, wrong = tl.zeros((BLOCK_T, NODES), tl.int32), tl.zeros((BLOCK_T,), tl.int32)
    for k in range(TOP_K):
        ids = tl.load(ids_ptr + token * TOP_K + k, mask=mask, other=-1)
        valid = (ids >= 0) & (ids < num_experts)
        wrong += ((ids != -1) & (valid == 0)).to(tl.int32)
        node = tl.where(valid, tl.maximum(ids, 0) // experts_per_node, -1)
        pairs += (node[:, None] == tl.arange(0, NODES)[None, :]).to(tl.int32)
    return pairs, wrong


@triton.jit(do_not_specialize=["tokens", "chunk", "num_nodes", "experts_per_node", "num_experts", "all_slots"])
def node_count_kernel(
    ids_ptr, counts_ptr, wrong_ptr, tokens_ptr,
    tokens, chunk, num_nodes, experts_per_node, num_experts, all_slots,
    TOP_K: tl.constexpr, NODES: tl.constexpr, BLOCK_T: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    end = tl.minimum((program + 1) * chunk, tokens)
    counts, all_wrong = tl.zeros((NODES,), tl.int32), tl.zeros((BLOCK_T,), tl.int32)
    for first in range(program * chunk, end, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        pairs, wrong = _pairs_of_nodes(
            ids_ptr, token, token < end, experts_per_node, num_experts, TOP_K, NODES, BLOCK_T
        )
        counts += tl.sum((pairs > 0).to(tl.int32), 0)
        all_wrong += wrong
    node = tl.arange(0, NODES)
    tl.store(counts_ptr + program * num_nodes + node, counts, mask=node < num_nodes)
    tl.store(wrong_ptr + program, tl.sum(all_wrong, 0))
    for first in range(program * FILL, all_slots, tl.num_programs(0) * FILL):
        slot = first + tl.arange(0, FILL)
        tl.store(tokens_ptr + slot, -1, mask=slot < all_slots)


@triton.jit(do_not_specialize=["tokens", "chunk", "num_nodes", "num_slots", "experts_per_node", "num_experts"])
def node_place_kernel(
    ids_ptr, weights_ptr, counts_ptr, wrong_ptr, totals_ptr, valid_ids_ptr, slots_ptr, tokens_ptr, tables_ptr,
    tokens, chunk, num_nodes, num_slots, experts_per_node, num_experts,
    TOP_K: tl.constexpr, NODES: tl.constexpr, BLOCK_T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """totals_ptr: (3,) int64, the argument `counts` of the op, updated. Weights and tables are read as int32 words."""
    program, chunks, node = tl.program_id(0), tl.num_programs(0), tl.arange(0, NODES)[None, :]
    needed, before = _sizes(counts_ptr, num_nodes, num_nodes, chunks, program, NODES, CHUNKS)
    if program == 0:
        wrong = tl.zeros((NODES,), tl.int32)
        for first in range(0, chunks, NODES):
            each = first + tl.arange(0, NODES)
            wrong += tl.load(wrong_ptr + each, mask=each < chunks, other=0)
        tl.store(totals_ptr, tl.maximum(tl.load(totals_ptr), tl.max(needed, 0).to(tl.int64)))
        tl.store(totals_ptr + 2, tl.load(totals_ptr + 2) + tl.sum(wrong, 0))
    total = tl.maximum(needed, num_slots).to(tl.int64)[None, :]
    lost = tl.zeros((NODES,), tl.int32)
    end = tl.minimum((program + 1) * chunk, tokens)
    for first in range(program * chunk, end, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        mask = token < end
        pairs, _ = _pairs_of_nodes(ids_ptr, token, mask, experts_per_node, num_experts, TOP_K, NODES, BLOCK_T)
        is_needed = (pairs > 0).to(tl.int32)
        place = (before[None, :] + tl.cumsum(is_needed, 0) - is_needed).to(tl.int64)
        before += tl.sum(is_needed, 0)
        first_free = ((place + 1) * num_slots + total // 2) // total
        place = (place * num_slots + total // 2) // total
        fits = (is_needed > 0) & (place < first_free)
        lost += tl.sum(tl.where(fits, 0, pairs), 0)
        slot = node * (num_slots + 1) + 1 + place.to(tl.int32)
        shown = mask[:, None] & (node < num_nodes)
        tl.store(slots_ptr + token.to(tl.int64)[:, None] * num_nodes + node, tl.where(fits, slot, -1), mask=shown)
        tl.store(tokens_ptr + slot, token[:, None] + node * 0, mask=fits)
        for k in range(TOP_K):
            pair = token.to(tl.int64) * TOP_K + k
            ids = tl.load(ids_ptr + pair, mask=mask, other=-1)
            ids = tl.where((ids >= 0) & (ids < num_experts), ids, -1)
            tl.store(valid_ids_ptr + pair, ids, mask=mask)
            table = pair + token.to(tl.int64) * TOP_K
            tl.store(tables_ptr + table, ids + 1, mask=mask)
            tl.store(tables_ptr + table + TOP_K, tl.load(weights_ptr + pair, mask=mask, other=0), mask=mask)
    all_lost = tl.sum(lost, 0)
    if all_lost > 0:
        tl.atomic_add(totals_ptr + 1, all_lost.to(tl.int64))


@triton.jit(do_not_specialize=["pairs", "first_expert", "num_experts", "stride"])
def read_tables_kernel(
    tables_ptr, ids_ptr, weights_ptr, pairs, first_expert, num_experts, stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tables_ptr += (pair // TOP_K).to(tl.int64) * stride + pair % TOP_K
    ids = tl.load(tables_ptr, mask=pair < pairs, other=0) - (1 + first_expert)
    tl.store(ids_ptr + pair, tl.where((ids >= 0) & (ids < num_experts), ids, -1), mask=pair < pairs)
    tl.store(weights_ptr + pair, tl.load(tables_ptr + TOP_K, mask=pair < pairs, other=0), mask=pair < pairs)


@triton.jit(do_not_specialize=["pairs", "num_nodes", "experts_per_node"])
def pick_values_kernel(
    values_ptr, slots_ptr, ids_ptr, out_ptr, pairs, num_nodes, experts_per_node,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    node, token = tl.maximum(ids, 0) // experts_per_node, (pair // TOP_K).to(tl.int64)
    slot = tl.load(slots_ptr + token * num_nodes + node, mask=ids >= 0, other=-1)
    value = tl.load(values_ptr + slot.to(tl.int64) * TOP_K + pair % TOP_K, mask=slot >= 0, other=0.0)
    tl.store(out_ptr + pair, value, mask=pair < pairs)


def plan_slots(
    expert_ids: Tensor, weights: Tensor, counts: Tensor, num_nodes: int, num_slots: int, experts_per_node: int,
    num_experts: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    (tokens, top_k), device = expert_ids.shape, expert_ids.device
    expert_ids, weights = expert_ids.contiguous(), weights.detach().contiguous()
    all_slots = num_nodes * (num_slots + 1)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    slots = torch.empty((tokens, num_nodes), dtype=torch.int32, device=device)
    token_of = torch.empty(all_slots, dtype=torch.int32, device=device)
    tables = torch.empty((tokens, 2 * top_k), dtype=torch.int32, device=device)
    nodes = next_power_of_2(num_nodes)
    at_once = max(1, min(MOST_TOKENS, NODE_TILE // nodes))
    chunk = at_once * max(1, cdiv(tokens, at_once * MOST_CHUNKS))
    chunks = max(1, cdiv(tokens, chunk))
    needed, wrong = (torch.empty(chunks * n, dtype=torch.int32, device=device) for n in (num_nodes, 1))
    options = {"TOP_K": top_k, "NODES": nodes, "BLOCK_T": at_once, "num_warps": NUM_WARPS}
    launch(node_count_kernel, (chunks,),
        expert_ids, needed, wrong, token_of, tokens, chunk, num_nodes, experts_per_node, num_experts, all_slots,
        FILL=FLAT_TILE, **options,
    )  # fmt: skip
    launch(node_place_kernel, (chunks,),
        expert_ids, weights.view(torch.int32), needed, wrong, counts, ids, slots, token_of, tables,
        tokens, chunk, num_nodes, num_slots, experts_per_node, num_experts,
        CHUNKS=max(1, min(MOST_CHUNKS, COUNTS_AT_ONCE // nodes)), **options,
    )  # fmt: skip
    return ids, slots, token_of, tables.view(torch.uint8)


def read_tables(tables: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    words = tables.view(torch.int32)
    rows, top_k = len(words), words.shape[1] // 2
    ids, weights = (torch.empty((rows, top_k), dtype=torch.int32, device=tables.device) for _ in range(2))
    if ids.numel():
        launch(read_tables_kernel, (cdiv(ids.numel(), FLAT_TILE),),
            words, ids, weights, ids.numel(), first_expert, num_experts, words.stride(0), TOP_K=top_k, BLOCK=FLAT_TILE,
        )  # fmt: skip
    return ids, weights.view(torch.float32)


def pick_values(values: Tensor, slots: Tensor, ids: Tensor, experts_per_node: int) -> Tensor:
    out = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if out.numel():
        launch(pick_values_kernel, (cdiv(out.numel(), FLAT_TILE),),
            values.contiguous(), slots.contiguous(), ids.contiguous(), out, out.numel(), slots.shape[1],
            experts_per_node, TOP_K=ids.shape[1], BLOCK=FLAT_TILE,
        )  # fmt: skip
    return out
