"""KernelExchange: exchanges by kernels that store to the addresses of peers and end with a barrier.

The kernels of dispatch are in this file, the kernel of combine is in `rows.py`. In a dispatch, a program loads the
rows of BLOCK_T tokens once, then stores them to each rank that needs them. Programs start with different ranks, so that
all links are busy. A row consists of parts, one per payload tensor. Each part is copied in the widest words that divide
its width and its offset within the row.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxep.comms.kernels.rows import WORDS, combine_kernel, owner_of, tokens_per_tile
from mxep.comms.kernels.signals import (
    arrive,
    compare_dispatches,
    load_dispatch,
    next_signal,
    number_dispatch,
    refuse_kernel,
    send_dispatch,
    signal_and_wait,
)
from mxep.comms.layout import CHUNKS, Layout, round_up
from mxep.comms.plan import RoutingPlan
from mxep.comms.transport import SymmetricBuffer
from mxep.runtime.launch import cdiv, launch, next_power_of_2
from mxep.runtime.lengths import Length

if TYPE_CHECKING:
    from mxep.comms.symmetric_memory import CudaTransport

DISPATCH_TILE, COMBINE_TILE = 16384, 16384
"""Bytes per tile of tokens."""
FEW_PROGRAMS = 64
"""If a dispatch has at most this many programs, its tiles are four times as large."""
MOST_PARTS = 2
"""Maximum payload tensors of the dispatch kernel. If there are more, they are concatenated first."""
TABLE_PAIRS = 1024
DISPATCH_WARPS, COMBINE_WARPS = 16, 8
CHUNK_BYTES = 12 << 20
"""Minimum bytes per chunk of a combine. Chunks are not smaller, because each one costs a signal over the link."""
TICKET_BYTES = 64 << 10
"""Maximum bytes of the tiles that a program draws with one ticket. A ticket has at least one tile."""
LAG = 3
PER_SM = 2
"""Programs of a combine per multiprocessor. While one waits for rows that it loads, the other stores."""
MAX_REGISTERS = 128
SCALARS = ("num_tokens", "max_tokens", "rank", "experts_per_rank", "op_id", "counters_start", "rows_start",
           "ids_start", "values_start", "num_tokens_start")  # fmt: skip


@triton.jit
def load_part(part_ptr, token, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    offs = token.to(tl.int64)[:, None] * WIDTH + column
    return tl.load(part_ptr + offs, mask=mask[:, None] & (column < WIDTH), other=0)


@triton.jit
def load_tokens(
    ids_ptr, part0_ptr, part1_ptr, tile, num_tokens, experts_per_rank,
    W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WIDTH0: tl.constexpr, BLOCK0: tl.constexpr,
    WIDTH1: tl.constexpr, BLOCK1: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Load a tile.

    Returns its token indices, the owners of their experts (-1 for tokens past num_tokens), and its two parts.
    """
    k = tl.arange(0, KP)[None, :]
    token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = token < num_tokens
    ids = tl.load(ids_ptr + token[:, None] * K + k, mask=mask[:, None] & (k < K), other=-1)
    x0 = load_part(part0_ptr, token, mask, WIDTH0, BLOCK0)
    x1 = tl.zeros((1, 1), tl.int32)
    if part1_ptr is not None:
        x1 = load_part(part1_ptr, token, mask, WIDTH1, BLOCK1)
    return token, owner_of(ids, experts_per_rank, W), x0, x1


@triton.jit
def store_part(
    base, part_ptr, x, row, mask, OFFSET: tl.constexpr, ROW_BYTES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store x into rows `row` of a peer, from byte OFFSET of each row on. base: address of the peer's first row."""
    WORD: tl.constexpr = part_ptr.dtype.element_ty.primitive_bitwidth // 8
    # Triton does not know the alignment of an address that was loaded from memory.
    start = tl.multiple_of(base.to(tl.pointer_type(part_ptr.dtype.element_ty)), 16)
    column = tl.arange(0, BLOCK)[None, :]
    offs = row.to(tl.int64)[:, None] * (ROW_BYTES // WORD) + (OFFSET // WORD + column)
    tl.store(start + offs, x, mask=mask[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=SCALARS)
def dispatch_kernel(
    ids_ptr, part0_ptr, part1_ptr, pointers_ptr, state_ptr, dispatch_ptr,
    num_tokens, max_tokens, rank, experts_per_rank, op_id, counters_start, rows_start,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROW_BYTES: tl.constexpr,
    WIDTH0: tl.constexpr, BLOCK0: tl.constexpr, OFFSET1: tl.constexpr, WIDTH1: tl.constexpr, BLOCK1: tl.constexpr,
    BLOCK_T: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Store token t into slot (rank, t) of each rank that needs it.

    part0_ptr, part1_ptr: parts of the rows; part1_ptr is None if there is only one.
    dispatch_ptr: (1,), dispatch number to send, or None.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    local_base = tl.load(pointers_ptr + rank)
    token, owner, x0, x1 = load_tokens(
        ids_ptr, part0_ptr, part1_ptr, program, num_tokens, experts_per_rank,
        W, K, KP, WIDTH0, BLOCK0, WIDTH1, BLOCK1, BLOCK_T,
    )  # fmt: skip
    for tile in range(program, tl.cdiv(num_tokens, BLOCK_T), programs):
        # Load the next tile while this one is stored.
        next_token, next_owner, next0, next1 = load_tokens(
            ids_ptr, part0_ptr, part1_ptr, tile + programs, num_tokens, experts_per_rank,
            W, K, KP, WIDTH0, BLOCK0, WIDTH1, BLOCK1, BLOCK_T,
        )  # fmt: skip
        for i in range(W):
            peer = (i + rank + tile) % W
            base = tl.load(pointers_ptr + peer) + rows_start
            row = rank * max_tokens + token
            mask = tl.max((owner == peer).to(tl.int32), 1) > 0
            store_part(base, part0_ptr, x0, row, mask, 0, ROW_BYTES, WIDTH0, BLOCK0)
            if part1_ptr is not None:
                store_part(base, part1_ptr, x1, row, mask, OFFSET1, ROW_BYTES, WIDTH1, BLOCK1)
        token, owner, x0, x1 = next_token, next_owner, next0, next1

    counters_ptr = (local_base + counters_start).to(tl.pointer_type(tl.int64))
    signal = next_signal(counters_ptr, 1, op_id)
    if arrive(counters_ptr + 3, 1, programs):
        dispatch = load_dispatch(dispatch_ptr)
        send_dispatch(pointers_ptr, counters_start, dispatch, rank, W, WP)
        signal_and_wait(pointers_ptr, local_base, 1, signal, state_ptr, rank, W, WP, CLOCK)
        compare_dispatches(counters_ptr, dispatch, signal, state_ptr, W, WP)
        tl.store(counters_ptr + 1, signal >> 32)


@triton.jit(do_not_specialize=SCALARS)
def dispatch_tables_kernel(
    ids_ptr, weights_ptr, pointers_ptr, state_ptr, dispatch_ptr, num_tokens, max_tokens, rank, experts_per_rank, op_id,
    ids_start, values_start, num_tokens_start, counters_start,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    """Store ids (T, K), weights (T, K) and T into entry `rank` of every rank's tables.

    dispatch_ptr: (1,), receives the dispatch number.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    local_base = tl.load(pointers_ptr + rank)
    for first in range(program * BLOCK, num_tokens * K, programs * BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mask = pair < num_tokens * K
        ids = tl.load(ids_ptr + pair, mask=mask, other=-1)
        # Clamp, so that no invalid int64 id wraps around into a valid int32 id.
        ids = tl.minimum(tl.maximum(ids, -2), W * experts_per_rank).to(tl.int32)
        weights = tl.load(weights_ptr + pair, mask=mask, other=0)
        for i in range(W):
            base = tl.load(pointers_ptr + (i + rank) % W)
            table = tl.multiple_of((base + ids_start).to(tl.pointer_type(tl.int32)), 16)
            tl.store(table + (rank * max_tokens * K + pair), ids, mask=mask)
            table = tl.multiple_of((base + values_start).to(tl.pointer_type(tl.float32)), 16)
            tl.store(table + (rank * max_tokens * K + pair), weights, mask=mask)
    if program == 0:
        peer = tl.arange(0, WP)
        base = tl.load(pointers_ptr + peer, mask=peer < W, other=0)
        counts = (base + num_tokens_start).to(tl.pointer_type(tl.int32))
        tl.store(counts + rank, num_tokens, mask=peer < W)

    counters_ptr = (local_base + counters_start).to(tl.pointer_type(tl.int64))
    signal = next_signal(counters_ptr, 0, op_id)
    if arrive(counters_ptr + 2, 1, programs):
        signal_and_wait(pointers_ptr, local_base, 0, signal, state_ptr, rank, W, WP, CLOCK)
        number_dispatch(dispatch_ptr, state_ptr)
        tl.store(counters_ptr, signal >> 32)


class KernelExchange:
    """Exchanges of one workspace. `shared_memory.PlainExchange` explains the methods. num_sms: as in `Workspace`."""

    def __init__(self, transport: "CudaTransport", layout: Layout, experts_per_rank: int, num_sms: int | None) -> None:
        self.transport, self.rank, self.state = transport, transport.rank, transport.state
        self.layout, self.experts_per_rank = layout, experts_per_rank
        self.max_sms = min(num_sms or transport.max_sms, transport.max_sms)
        world_size, top_k = layout.world_size, layout.top_k
        self._ranks = {"W": world_size, "WP": next_power_of_2(world_size)}
        self._sizes = {**self._ranks, "K": top_k, "KP": next_power_of_2(top_k)}
        self._clock = {"CLOCK": transport.clock}
        self._known: dict[Any, tuple[int, Any, dict[str, Any]]] = {}
        """Cache of launch arguments. The keys are the dtypes and widths that decide them."""

    def refuse(self, buffer: SymmetricBuffer, tokens: int) -> None:
        scalars = self.rank, self.layout.op_id("refused", tokens), self.layout.counters_start
        launch(refuse_kernel, (1,), buffer.pointers, *scalars, **self._ranks, num_warps=1)
        self.transport.exchanges += 1

    def dispatch_tables(self, buffer: SymmetricBuffer, expert_ids: Tensor, weights: Tensor, number: Tensor) -> None:
        (tokens, top_k), layout = expert_ids.shape, self.layout
        programs = max(1, min(cdiv(layout.room_for(tokens) * top_k, TABLE_PAIRS), self.max_sms))
        launch(dispatch_tables_kernel, (programs,),
            expert_ids, weights, buffer.pointers, self.state, number, Length(tokens), layout.max_tokens, self.rank,
            self.experts_per_rank, layout.op_id("dispatch_tables", top_k), layout.ids_start, layout.values_start,
            layout.num_tokens_start, layout.counters_start,
            **self._ranks, K=top_k, BLOCK=TABLE_PAIRS, **self._clock, num_warps=8,
        )  # fmt: skip

    def dispatch(
        self, buffer: SymmetricBuffer, payload: Sequence[Tensor], expert_ids: Tensor,
        num_sms: int | None = None, number: Tensor | None = None,
    ) -> None:  # fmt: skip
        if len(payload) > MOST_PARTS:
            payload = (torch.cat(tuple(payload), 1),)
        part0, part1 = as_words(payload[0], 0), None
        sms = min(num_sms or self.max_sms, self.max_sms)
        key: tuple[Any, ...] = sms, part0.dtype, part0.shape[1]
        if len(payload) > 1:
            part1 = as_words(payload[1], payload[0].shape[1])
            key = *key, part1.dtype, part1.shape[1]
        if key not in self._known:
            self._known[key] = self._dispatch_args(sms, part0, part1)
        op_id, tile_tokens, constants = self._known[key]
        tokens, layout = expert_ids.shape[0], self.layout
        room = layout.room_for(tokens)
        block_t = tokens_per_tile(tile_tokens, room, sms)
        launch(dispatch_kernel, (max(1, min(cdiv(room, block_t), sms)),),
            expert_ids, part0, part1, buffer.pointers, self.state, number, Length(tokens), layout.max_tokens, self.rank,
            self.experts_per_rank, op_id, layout.counters_start, layout.rows_start,
            **constants, BLOCK_T=block_t, **self._clock, num_warps=DISPATCH_WARPS,
        )  # fmt: skip
        self.transport.exchanges += 1

    def _dispatch_args(self, sms: int, part0: Tensor, part1: Tensor | None) -> tuple[int, int, dict[str, Any]]:
        """Returns the op id, the maximum tokens per tile, and the constexprs of the kernel."""
        last = part0 if part1 is None else part1
        block0, bytes0 = next_power_of_2(part0.shape[1]), part0.shape[1] * part0.itemsize
        row_bytes = bytes0 + (0 if part1 is None else part1.shape[1] * part1.itemsize)
        tile_bytes = DISPATCH_TILE * (4 if sms <= FEW_PROGRAMS else 1)
        widths = {"WIDTH0": part0.shape[1], "BLOCK0": block0}
        widths |= {"OFFSET1": bytes0, "WIDTH1": last.shape[1], "BLOCK1": next_power_of_2(last.shape[1])}
        constants = {**self._sizes, "ROW_BYTES": self.layout.row_bytes, **widths}
        return self.layout.op_id("dispatch", row_bytes), tile_bytes // (block0 * part0.itemsize), constants

    def combine(
        self, buffer: SymmetricBuffer, rows: Tensor, row_values: Tensor | None, plan: RoutingPlan, expert_ids: Tensor,
        out: Tensor, values: Tensor | None,
    ) -> None:  # fmt: skip
        key = rows.dtype, rows.shape[1]
        if key not in self._known:
            self._known[key] = self._combine_args(*key)
        programs, scalars, constants = self._known[key]
        launch(combine_kernel, (programs,),
            rows.contiguous(), None if row_values is None else row_values.contiguous(), plan.slot_rows,
            plan.num_tokens, expert_ids, out, values, buffer.pointers, self.state, plan.dispatch,
            Length(expert_ids.shape[0]), self.layout.max_tokens, self.rank, self.experts_per_rank, *scalars,
            **constants, **self._clock, num_warps=COMBINE_WARPS, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        self.transport.exchanges += 1

    def _combine_args(self, dtype: torch.dtype, dim: int) -> tuple[int, tuple[int, ...], dict[str, Any]]:
        """Returns the number of programs, scalar arguments of the kernel, and its constexprs."""
        layout, block, row_bytes = self.layout, next_power_of_2(dim), dim * dtype.itemsize
        programs = PER_SM * self.max_sms
        block_t = tokens_per_tile(COMBINE_TILE // (block * dtype.itemsize), layout.max_tokens, programs)
        tiles = max(1, cdiv(layout.max_tokens, block_t))
        tile_bytes = block_t * min(layout.top_k, layout.world_size) * row_bytes
        ticket_tiles = max(1, min(TICKET_BYTES // tile_bytes, tiles // programs))
        chunk_tiles = cdiv(tiles, max(1, min(CHUNKS, tiles * tile_bytes // CHUNK_BYTES)))
        chunk_tiles = round_up(chunk_tiles, ticket_tiles)
        chunks = cdiv(tiles, chunk_tiles)
        scalars = chunk_tiles, chunks, max(1, min(LAG, chunks // 2)), layout.op_id("combine", row_bytes)
        scalars += layout.values_start, layout.counters_start, layout.rows_start
        sizes = {"D": dim, "BLOCK": block, "ROW_ELEMENTS": layout.row_bytes // dtype.itemsize}
        constants = {**self._sizes, **sizes, "BLOCK_T": block_t, "TICKET_TILES": ticket_tiles}
        return max(1, min(programs, tiles)), scalars, constants


def as_words(part: Tensor, offset: int) -> Tensor:
    """View a part (T, n) uint8 as the widest integers that divide n and offset. offset: its first byte within a row."""
    width = part.shape[1]
    if part.stride() != (width, 1):  # is_contiguous() would be True for a single row with any stride
        part = part.contiguous().view(-1).view(part.shape)
    return part.view(WORDS[math.gcd(8, offset, width, part.storage_offset())])
