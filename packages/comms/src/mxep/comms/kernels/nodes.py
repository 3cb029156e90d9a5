"""Assigns slots of nodes to tokens in two launches, like rows in `plan.py`. Tables and values take a launch each.

    count   a program a chunk of tokens    ids -> tokens that need each node (chunks, N); slots' tokens filled with -1
    place   the same programs              counts -> tokens of earlier chunks
                                           ids, tile by tile -> slots, tokens, tables

Integer atomics count the pairs that do not fit: the sum does not depend on their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.plan import COUNTS_AT_ONCE, _sizes
from mxep.runtime.launch import cdiv, launch, next_power_of_2

TILE = 2048
"""Tokens x nodes of a tile."""
MOST_TOKENS = 256
"""Most tokens of a tile."""
MOST_CHUNKS = 128
FLAT_TILE = 1024
NUM_WARPS = 8


@triton.jit
def _pairs_of_nodes(
    ids_ptr, token, mask, experts_per_node, num_experts,
    TOP_K: tl.constexpr, NODES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """(BLOCK_T, NODES) number of each token's pairs on each node, and (BLOCK_T,) number of its invalid ids."""
    pairs, wrong = tl.zeros((BLOCK_T, NODES), tl.int32), tl.zeros((BLOCK_T,), tl.int32)
    for k in range(TOP_K):
        ids = tl.load(ids_ptr + token * TOP_K + k, mask=mask, other=-1)
        valid = (ids >= 0) & (ids < num_experts)
        wrong += ((ids != -1) & (valid == 0)).to(tl.int32)
        node = tl.where(valid, tl.maximum(ids, 0) // experts_per_node, -1)
        pairs += (node[:, None] == tl.arange(0, NODES)[None, :]).to(tl.int32)
    return pairs, wrong


@triton.jit(do_not_specialize=["tokens", "chunk", "num_nodes", "experts_per_node", "num_experts", "all_slots"])
def count_kernel(
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
def place_kernel(
    ids_ptr, weights_ptr, counts_ptr, wrong_ptr, totals_ptr, valid_ids_ptr, slots_ptr, tokens_ptr, tables_ptr,
    tokens, chunk, num_nodes, num_slots, experts_per_node, num_experts,
    TOP_K: tl.constexpr, NODES: tl.constexpr, BLOCK_T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """totals: (3,) int64, the op's counts, updated. weights, tables: int32 words."""
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
    expert_ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    num_nodes: int,
    num_slots: int,
    experts_per_node: int,
    num_experts: int,
) -> tuple[Tensor, ...]:
    """mxep::plan_slots."""
    (tokens, top_k), device = expert_ids.shape, expert_ids.device
    expert_ids, weights = expert_ids.contiguous(), weights.detach().contiguous()
    all_slots = num_nodes * (num_slots + 1)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    slots = torch.empty((tokens, num_nodes), dtype=torch.int32, device=device)
    token_of = torch.empty(all_slots, dtype=torch.int32, device=device)
    tables = torch.empty((tokens, 2 * top_k), dtype=torch.int32, device=device)
    nodes = next_power_of_2(num_nodes)
    at_once = max(1, min(MOST_TOKENS, TILE // nodes))
    chunk = at_once * max(1, cdiv(tokens, at_once * MOST_CHUNKS))
    chunks = max(1, cdiv(tokens, chunk))
    needed, wrong = (torch.empty(chunks * n, dtype=torch.int32, device=device) for n in (num_nodes, 1))
    options = {"TOP_K": top_k, "NODES": nodes, "BLOCK_T": at_once, "num_warps": NUM_WARPS}
    launch(count_kernel, (chunks,),
        expert_ids, needed, wrong, token_of, tokens, chunk, num_nodes, experts_per_node, num_experts, all_slots,
        FILL=FLAT_TILE, **options,
    )  # fmt: skip
    launch(place_kernel, (chunks,),
        expert_ids, weights.view(torch.int32), needed, wrong, counts, ids, slots, token_of, tables,
        tokens, chunk, num_nodes, num_slots, experts_per_node, num_experts,
        CHUNKS=max(1, min(MOST_CHUNKS, COUNTS_AT_ONCE // nodes)), **options,
    )  # fmt: skip
    return ids, slots, token_of, tables.view(torch.uint8)


def read_tables(tables: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """mxep::read_tables."""
    words = tables.view(torch.int32)
    rows, top_k = len(words), words.shape[1] // 2
    ids, weights = (torch.empty((rows, top_k), dtype=torch.int32, device=tables.device) for _ in range(2))
    if ids.numel():
        launch(read_tables_kernel, (cdiv(ids.numel(), FLAT_TILE),),
            words, ids, weights, ids.numel(), first_expert, num_experts, words.stride(0), TOP_K=top_k, BLOCK=FLAT_TILE,
        )  # fmt: skip
    return ids, weights.view(torch.float32)


def pick_values(values: Tensor, slots: Tensor, ids: Tensor, experts_per_node: int) -> Tensor:
    """mxep::pick_values."""
    out = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if out.numel():
        launch(pick_values_kernel, (cdiv(out.numel(), FLAT_TILE),),
            values.contiguous(), slots.contiguous(), ids.contiguous(), out, out.numel(), slots.shape[1],
            experts_per_node, TOP_K=ids.shape[1], BLOCK=FLAT_TILE,
        )  # fmt: skip
    return out
