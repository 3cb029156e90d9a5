"""make_plan on the device, in two launches.

A source is a block of a routing table. A pair is one (token, expert) choice, and a chunk is a run of pairs of one
source.

    count   one program per chunk          ids -> counts (chunks, E); also fills all rows with -1 and 0
    place   one program per chunk          counts -> first row of each expert in this chunk
                                           ids, tile by tile -> row of each pair -> row_slot, slot_rows, ...

Each `place` program sums the counts of all earlier chunks itself, which saves a launch for a scan. There are at most
256 chunks (128 with many experts), or one per source if there are more sources. `count` fills all rows, so `place`
writes only valid rows. Program o of `place` also counts the rows that rank o needs, and those that do not fit there.

If the groups do not fit, every program searches the caps of `comms/plan.py` (there L, here "level") bit by bit.

The position of a pair among the pairs of its expert in a tile is found by counting in bytes. A tile is cut into
segments of 32 pairs, and one word has the counts of four experts. Example with a segment of 4 pairs:

    ids            1    0    1    1
    1 << 8 * id  0100 0001 0100 0100   hexadecimal, two of the four bytes shown
    cumsum       0100 0101 0201 0301   byte `id` says: the 1st, 1st, 2nd, 3rd pair of its expert in this segment

The last element of the cumsum is the counts of the segment. They are then summed over the segments of the tile. Rows
are int32: W * T_max * K pairs and the padding of all groups must stay below 2^31.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.layout import num_owners
from mxep.runtime.launch import cdiv, launch, next_power_of_2

SEGMENT = 32
"""Pairs per segment. At most 255, because they are counted in bytes."""
LEAST_EXPERTS = 32
"""The number of experts is padded to at least this, because a warp's histogram has one bin per lane."""
TILE_COUNTS = 1024
"""Segments x experts of a tile. This is 32 words per thread of 8 warps."""
COUNTS_AT_ONCE = 8192
SHARES_AT_ONCE = 2048
"""Counts that are loaded together if groups do not fit. With 16 ranks they take 124 registers per thread. 8192 counts
would take 176, and an SM would hold only one program."""
COUNT_TILE = 1024
MOST_BINS = 512
"""Maximum experts that are counted in one pass over the ids."""
NUM_WARPS = 8


@triton.jit
def _live_pairs(num_tokens_ptr, source, blocks, max_tokens, TOP_K: tl.constexpr):
    """Number of valid pairs of a source, clamped to the size of its block if num_tokens is wrong."""
    tokens = tl.load(num_tokens_ptr + source // blocks)
    return tl.minimum(tl.maximum(tokens, 0) - source % blocks * max_tokens, max_tokens) * TOP_K


@triton.jit(do_not_specialize=["max_tokens", "blocks", "chunk", "first_counted", "counted", "num_experts", "max_rows"])
def count_kernel(
    ids_ptr, num_tokens_ptr, counts_ptr, wrong_ptr, row_slot_ptr, row_weight_ptr,
    max_tokens, blocks, chunk, first_counted, counted, num_experts, max_rows,
    TOP_K: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count the pairs of experts first_counted to first_counted + counted - 1, BINS experts per pass over the ids."""
    source = tl.program_id(1)
    program = source * tl.num_programs(0) + tl.program_id(0)
    lane = tl.arange(0, TILE)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, _live_pairs(num_tokens_ptr, source, blocks, max_tokens, TOP_K))
    ids_ptr += source * max_tokens * TOP_K
    wrong = tl.zeros((TILE,), tl.int32)
    for section in range(0, counted, BINS):
        counts = tl.zeros((BINS,), tl.int32)
        for first in range(begin, end, TILE):
            mask = first + lane < end
            expert = tl.load(ids_ptr + first + lane, mask=mask, other=-1)
            wrong += ((section == 0) & ((expert < -1) | (expert >= num_experts))).to(tl.int32)
            bin = expert - first_counted - section
            counts += tl.histogram(bin, BINS, mask=mask & (bin >= 0) & (bin < BINS))
        bins = section + tl.arange(0, BINS)
        tl.store(counts_ptr + program * counted + bins, counts, mask=bins < counted)
    tl.store(wrong_ptr + program, tl.sum(wrong, 0))
    for first in range(program * TILE, max_rows, tl.num_programs(0) * tl.num_programs(1) * TILE):
        row = first + lane
        tl.store(row_slot_ptr + row, -1, mask=row < max_rows)
        tl.store(row_weight_ptr + row, 0.0, mask=row < max_rows)


@triton.jit
def _order(local, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, EXPERTS: tl.constexpr):
    """Count pairs per segment and expert. local: (SEGMENTS * SEGMENT,) expert of each pair, or -1.

    Returns:
        (SEGMENTS * SEGMENT,) position of each pair among the pairs of its expert in its segment, from 1.
        (SEGMENTS, EXPERTS) number of pairs of each expert in each segment.
    """
    local = tl.trans(tl.reshape(local, (SEGMENTS, SEGMENT)))
    shift = (local & 3) * 8
    mask = (local >> 2)[:, :, None] == tl.arange(0, EXPERTS // 4)[None, None, :]
    ones = tl.where(mask, (1 << shift)[:, :, None], 0)
    place = (tl.sum(tl.where(mask, tl.cumsum(ones, 0), 0), 2) >> shift) & 255
    total = (tl.sum(ones, 0)[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 255
    return tl.reshape(tl.trans(place), (SEGMENTS * SEGMENT,)), tl.reshape(total, (SEGMENTS, EXPERTS))


@triton.jit
def _sizes(counts_ptr, counted, experts, chunks, this_chunk, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Sum the counts of all chunks. counted: counts per chunk in memory.

    Returns:
        (EXPERTS,) number of pairs of each expert in all chunks.
        (EXPERTS,) number of pairs of each expert in chunks before this_chunk.
    """
    expert = tl.arange(0, EXPERTS)[None, :]
    sizes = tl.zeros((EXPERTS,), tl.int32)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        each = first + tl.arange(0, CHUNKS)[:, None]
        mask = (each < chunks) & (expert < experts)
        counts = tl.load(counts_ptr + each * counted + expert, mask=mask, other=0)
        sizes += tl.sum(counts, 0)
        earlier += tl.sum(tl.where(each < this_chunk, counts, 0), 0)
    return sizes, earlier


@triton.jit
def _level(sizes, room, bits):
    """Largest level below 2**bits with sum(min(sizes, level), 0) <= room. Shape of room.

    sizes: (N,) with room (), or (N, M) with room (M,).
    """
    level = room * 0
    for bit in range(bits):
        higher = level + (1 << (bits - 1 - bit))
        level = tl.where(tl.sum(tl.minimum(sizes, higher), 0) <= room, higher, level)
    return level


@triton.jit
def _capped(sizes, alignment, max_rows, bits):
    """Cap all group sizes at one level, so that the padded groups fit in max_rows.

    bits: bit length of R_max // alignment.
    """
    tiles = (sizes + alignment - 1) // alignment
    kept = sizes
    if tl.sum(tiles, 0) * alignment > max_rows:
        kept = tl.minimum(sizes, _level(tiles, max_rows // alignment, bits) * alignment)
    return kept


@triton.jit
def _sizes_of_sources(
    counts_ptr, counted, experts, sources, blocks, chunks_of_source,
    SOURCES: tl.constexpr, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Returns (SOURCES,) source indices in rank order, and (SOURCES, EXPERTS) number of their pairs of each expert."""
    rank = tl.arange(0, SOURCES)
    tables = sources // blocks
    source = rank % tables * blocks + rank // tables
    expert = tl.arange(0, EXPERTS)[None, None, :]
    sizes = tl.zeros((SOURCES, EXPERTS), tl.int32)
    for first in range(0, chunks_of_source, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[None, :, None]
        mask = (rank < sources)[:, None, None] & (chunk < chunks_of_source) & (expert < experts)
        each = (source * chunks_of_source)[:, None, None] + chunk
        sizes += tl.sum(tl.load(counts_ptr + each * counted + expert, mask=mask, other=0), 1)
    return source, sizes


@triton.jit(
    do_not_specialize=[
        "max_tokens", "blocks", "pairs", "chunk", "chunks", "chunks_of_source", "first_counted", "counted",
        "first_expert", "experts", "owners", "alignment", "max_rows", "tile_bits", "pair_bits",
    ]
)  # fmt: skip
def place_kernel(
    ids_ptr, weights_ptr, num_tokens_ptr, counts_ptr, wrong_ptr, row_slot_ptr, row_weight_ptr, slot_rows_ptr, offs_ptr,
    group_sizes_ptr, totals_ptr, running_ptr, own_tokens_ptr,
    max_tokens, blocks, pairs, chunk, chunks, chunks_of_source, first_counted, counted, first_expert, experts, owners,
    alignment, max_rows, tile_bits, pair_bits,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, CHUNKS: tl.constexpr,
    SOURCES: tl.constexpr, CHUNKS_OF_SOURCE: tl.constexpr,
):  # fmt: skip
    """pairs: pairs per source. max_rows: rows that may be used.
    tile_bits: bit length of R_max // alignment. pair_bits: bit length of `pairs`.
    totals_ptr: (2 * owners + 1,), receives the rows that each owner needs, the rows that do not fit on each owner, and
        the number of invalid ids.
    running_ptr: totals over all plans, updated, or None. own_tokens_ptr: receives a copy of num_tokens.
    """
    source = tl.program_id(1)
    this_chunk = source * chunks_of_source + tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    here_ptr = counts_ptr + (first_expert - first_counted)
    sizes, earlier = _sizes(here_ptr, counted, experts, chunks, this_chunk, EXPERTS, CHUNKS)
    kept = _capped(sizes, alignment, max_rows, tile_bits)
    padded = (kept + alignment - 1) // alignment * alignment
    ends = tl.cumsum(padded, 0)
    next_row = ends - padded
    end_row = next_row + kept
    if tl.sum(sizes - kept, 0) == 0:
        next_row += earlier
    else:
        # shares: rows of each expert that each source keeps. before: True for sources before this one.
        sources = tl.num_programs(1)
        each, of_sources = _sizes_of_sources(
            here_ptr, counted, experts, sources, blocks, chunks_of_source, SOURCES, EXPERTS, CHUNKS_OF_SOURCE
        )
        level = _level(of_sources, kept, pair_bits)[None, :]
        shares = tl.minimum(of_sources, level)
        more = (of_sources > level).to(tl.int32)
        shares += more * (tl.cumsum(more, 0) <= (kept - tl.sum(shares, 0))[None, :]).to(tl.int32)
        before = (each < source)[:, None]
        end_row = next_row + tl.sum(tl.where((each <= source)[:, None], shares, 0), 0)
        next_row += tl.sum(tl.where(before, shares - of_sources, 0), 0) + earlier
    if this_chunk == 0:
        tl.store(offs_ptr + expert, ends, mask=expert < experts)
        tl.store(group_sizes_ptr + expert, sizes, mask=expert < experts)
        wrong = tl.zeros((1024,), tl.int32)
        for first in range(0, chunks, 1024):
            each = first + tl.arange(0, 1024)
            wrong += tl.load(wrong_ptr + each, mask=each < chunks, other=0)
        all_wrong = tl.sum(wrong, 0).to(tl.int64)
        tl.store(totals_ptr + 2 * owners, all_wrong)
        if running_ptr is not None:
            tl.store(running_ptr + 2 * owners, tl.load(running_ptr + 2 * owners) + all_wrong)
    if (tl.program_id(0) == 0) & (source % blocks == 0):
        tl.store(own_tokens_ptr + source // blocks, tl.load(num_tokens_ptr + source // blocks))
    for owner in range(this_chunk, owners, chunks):
        of_owner, _ = _sizes(counts_ptr + owner * experts, counted, experts, chunks, 0, EXPERTS, CHUNKS)
        all_needed = tl.sum((of_owner + alignment - 1) // alignment * alignment, 0).to(tl.int64)
        all_dropped = tl.sum(of_owner - _capped(of_owner, alignment, max_rows, tile_bits), 0).to(tl.int64)
        tl.store(totals_ptr + owner, all_needed)
        tl.store(totals_ptr + owners + owner, all_dropped)
        if running_ptr is not None:
            most_ptr = running_ptr + owner
            tl.store(most_ptr, tl.maximum(tl.load(most_ptr), all_needed))
            tl.store(most_ptr + owners, tl.load(most_ptr + owners) + all_dropped)

    TILE: tl.constexpr = SEGMENTS * SEGMENT
    lane = tl.arange(0, TILE)
    flat0 = source * max_tokens * TOP_K
    valid = tl.minimum(_live_pairs(num_tokens_ptr, source, blocks, max_tokens, TOP_K), pairs)
    begin = tl.program_id(0) * chunk
    for first in range(begin, tl.minimum(begin + chunk, pairs), TILE):
        pair = first + lane
        local = tl.load(ids_ptr + flat0 + pair, mask=pair < valid, other=-1) - first_expert
        mask = (local >= 0) & (local < experts)
        local = tl.where(mask, local, -1)
        place, of_segment = _order(local, SEGMENTS, SEGMENT, EXPERTS)
        first_row = next_row[None, :] + tl.cumsum(of_segment, 0) - of_segment
        next_row += tl.sum(of_segment, 0)
        first_row = tl.reshape(first_row, (SEGMENTS * EXPERTS,))
        row = tl.gather(first_row, lane // SEGMENT * EXPERTS + tl.maximum(local, 0), 0) + place - 1
        fits = mask & (row < tl.gather(end_row, tl.maximum(local, 0), 0))
        pair_row = tl.where(fits, row, tl.where(mask, -2, -1))
        tl.store(slot_rows_ptr + source * pairs + pair, pair_row, mask=pair < pairs)
        flat = flat0 + pair
        tl.store(row_slot_ptr + row, flat // TOP_K, mask=fits)
        tl.store(row_weight_ptr + row, tl.load(weights_ptr + flat, mask=fits, other=0.0), mask=fits)


def make_plan(
    expert_ids: Tensor, weights: Tensor, num_tokens: Tensor, first_expert: int, num_local_experts: int,
    alignment: int, max_rows: int, num_experts: int, blocks: int, max_tokens: int, limit: int,
    running: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    tables, _, top_k = expert_ids.shape
    expert_ids, weights, num_tokens = expert_ids.contiguous(), weights.contiguous(), num_tokens.contiguous()
    device = expert_ids.device
    row_slot = torch.empty(max_rows, dtype=torch.int32, device=device)
    row_weight = torch.empty(max_rows, dtype=torch.float32, device=device)
    slot_rows = torch.empty((tables * max_tokens, top_k), dtype=torch.int32, device=device)
    offs, group_sizes = (torch.empty(num_local_experts, dtype=torch.int32, device=device) for _ in range(2))
    owners = num_owners(num_experts, num_local_experts)
    first_counted, counted = (0, num_experts) if owners > 1 else (first_expert, num_local_experts)
    totals, own_tokens = torch.empty(2 * owners + 1, dtype=torch.int64, device=device), torch.empty_like(num_tokens)

    sources, max_tokens = tables * blocks, max_tokens // blocks
    pairs = max_tokens * top_k
    experts, segments, chunk, chunks = _shape(num_local_experts, sources, pairs)
    in_block = next_power_of_2(sources)
    bins = min(MOST_BINS, max(LEAST_EXPERTS, next_power_of_2(counted)))
    counts, wrong = (torch.empty(sources * chunks * n, dtype=torch.int32, device=device) for n in (counted, 1))
    options = {"TOP_K": max(top_k, 1), "num_warps": NUM_WARPS}
    launch(count_kernel, (chunks, sources),
        expert_ids, num_tokens, counts, wrong, row_slot, row_weight,
        max_tokens, blocks, chunk, first_counted, counted, num_experts, max_rows,
        BINS=bins, TILE=COUNT_TILE, **options,
    )  # fmt: skip
    launch(place_kernel, (chunks, sources),
        expert_ids, weights, num_tokens, counts, wrong, row_slot, row_weight, slot_rows, offs, group_sizes, totals,
        running, own_tokens, max_tokens, blocks, pairs, chunk, sources * chunks, chunks, first_counted, counted,
        first_expert, num_local_experts, owners, alignment, limit,
        (max_rows // alignment).bit_length(), pairs.bit_length(),
        EXPERTS=experts, SEGMENTS=segments, SEGMENT=SEGMENT, CHUNKS=max(1, COUNTS_AT_ONCE // experts),
        SOURCES=in_block, CHUNKS_OF_SOURCE=max(1, SHARES_AT_ONCE // (experts * in_block)), **options,
    )  # fmt: skip
    return row_slot, row_weight, slot_rows, offs, group_sizes, totals, own_tokens


@functools.lru_cache(256)
def _shape(num_experts: int, sources: int, pairs: int) -> tuple[int, int, int, int]:
    """Returns padded experts, segments per tile, pairs per chunk, chunks per source. pairs: pairs per source.

    Example: 32 experts and 4 sources of 65536 pairs give (32, 32, 1024, 64). These are 256 programs, on the 132 SMs of
    an H200.
    """
    experts = max(LEAST_EXPERTS, next_power_of_2(num_experts))
    segments = max(1, TILE_COUNTS // experts)
    most = max(1, min(256, max(128, 32768 // experts)) // sources)
    chunk = segments * SEGMENT * max(1, cdiv(pairs, segments * SEGMENT * most))
    return experts, segments, chunk, max(1, cdiv(pairs, chunk))
