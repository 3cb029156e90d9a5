"""PutExchange: exchanges by NVSHMEM puts to PEs (NVSHMEM's process ranks) instead of stores to addresses.

An exchange has these steps:

    stage     write outgoing rows into the staging area of the buffer
    put       send the first n bytes of each staged row to each of its destinations
    meet      wait until this rank's puts have landed, signal all ranks, wait for their signals (`kernels/signals.py`)
    compare   compare the dispatch numbers that came with the rows

Staged rows and their destinations, for W ranks:

    exchange           staged                                       destinations of a row
    dispatch_tables    this rank's entry of its own tables          W: the same entry on every other rank
    dispatch           token t                                      W: slot (this rank, t) of ranks that need it
    combine            sum of slot (r, t); values of rank r         1: slot and entry (this rank, t) of rank r

An exchange stages rows only after `meet` of the previous exchange on that buffer, so after the old puts have landed.

put_kernel and meet_kernel call NVSHMEM. A kernel that calls NVSHMEM must be linked with its device library, which takes
some 10 s, and NVSHMEM must initialise each loaded module. So there are only two such kernels, whose sizes are run-time
arguments without specialization. They are compiled when a transport is created. An exchange compiles nothing, so even
the first one may be captured.

NVSHMEM's functions take addresses, sizes and signals as int64, PEs and operations as int32. All threads of a block call
a block put together. Other functions are called by each thread separately. So `meet_kernel` has only one warp, and uses
signal operations that may be repeated (set).

Memory order. `quiet` completes the puts of earlier kernels of the stream and orders them before the signals. Between
GPUs of one host it is a fence at system scope. Over a network it waits for the network. `uint64_test` is NVSHMEM's
acquire for data that a signal announced over a network.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import core

from mxep.comms.kernels.rows import is_sent, load_slot_rows, store_sum, sum_arrived, tokens_per_tile
from mxep.comms.kernels.signals import compare, next_signal, wait_for_peers
from mxep.comms.layout import ALIGNMENT, PE_SHIFT, ROWS, TABLES, Layout, round_up
from mxep.comms.plan import RoutingPlan, narrow_ids
from mxep.comms.shared_memory import owners, width_of
from mxep.runtime.launch import cdiv, launch, next_power_of_2

if TYPE_CHECKING:
    from .transport import NvshmemTransport, StagedBuffer

SIGNAL_SET = tl.constexpr(9)
CMP_GE = tl.constexpr(5)
PE_BITS = tl.constexpr(PE_SHIFT)
PIECE = tl.constexpr(16384)
"""Maximum bytes of one put. Longer rows are put in pieces, which different programs may take."""
PUT_WARPS = 16
TILE_ELEMENTS = 8192
PROGRAMS = 264
"""Tiles of sums have more than one row only if at least this many programs have a full tile then."""
NUM_WARPS = 8


def _declare(symbol: str, *types: str) -> Any:
    """Declare a function of NVSHMEM's device library. types: its argument types. Its result is ignored."""
    op_id = {tuple(core.dtype(name) for name in types): (symbol, core.dtype("int32"))}

    @core.extern
    def call(*args: Any, _semantic: Any = None) -> Any:
        return core.extern_elementwise("", "", list(args), op_id, is_pure=False, _semantic=_semantic)

    return call


put_nbi_block = _declare("nvshmemx_putmem_nbi_block", "int64", "int64", "int64", "int32")
signal_op = _declare("nvshmemx_signal_op", "int64", "int64", "int32", "int32")
uint64_test = _declare("nvshmem_uint64_test", "int64", "int32", "int64")
quiet = _declare("nvshmem_quiet")

PUT_ARGUMENTS = ("source_ptr", "buffer_ptr", "destinations_ptr", "stride", "rows", "nbytes", "per_row", "groups")
MEET_ARGUMENTS = ("buffer_ptr", "pes_ptr", "state_ptr", "op_id", "channel", "rank", "counters_start")


@triton.jit(do_not_specialize=PUT_ARGUMENTS)
def put_kernel(source_ptr, buffer_ptr, destinations_ptr, stride, rows, nbytes, per_row, groups):
    """Put the first nbytes of row i of source to all destinations (i, j), which are encoded as `PE_SHIFT` explains.

    stride: bytes per row of source. per_row: destinations per row. groups: as in `NvshmemTransport.put`.
    """
    pieces = tl.cdiv(nbytes, PIECE)
    for job in range(tl.program_id(0), rows * per_row * pieces, tl.num_programs(0)):
        pair = job // pieces
        start = (job % pieces) * PIECE
        index = pair // per_row
        row = index % groups * (rows // groups) + index // groups
        destination = tl.load(destinations_ptr + row.to(tl.int64) * per_row + pair % per_row)
        if destination >= 0:
            pe = (destination >> PE_BITS).to(tl.int32)
            byte = destination - (pe.to(tl.int64) << PE_BITS)
            source = source_ptr.to(tl.int64) + row.to(tl.int64) * stride + start
            size = tl.minimum(nbytes - start, PIECE).to(tl.int64)
            put_nbi_block(buffer_ptr.to(tl.int64) + byte + start, source, size, pe)


@triton.jit(do_not_specialize=MEET_ARGUMENTS)
def meet_kernel(
    buffer_ptr, pes_ptr, state_ptr, op_id, channel, rank, counters_start,
    W: tl.constexpr, WP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Complete this rank's puts, signal every rank and wait for every rank's signal. One warp."""
    local_base = buffer_ptr.to(tl.int64)
    counters_ptr = (local_base + counters_start).to(tl.pointer_type(tl.int64)) + channel
    signal = next_signal(counters_ptr, 0, op_id)
    quiet()
    # Lane r signals rank r. Lanes past W repeat other lanes' signals.
    peer = tl.arange(0, LANES) % W
    target = local_base + (channel * W + rank) * 8
    signal_op(target + peer.to(tl.int64) * 0, signal, SIGNAL_SET, tl.load(pes_ptr + peer))
    wait_for_peers(local_base, channel, signal, state_ptr, W, WP, True)
    uint64_test(local_base, CMP_GE, tl.zeros((), tl.int64))
    tl.store(counters_ptr, signal >> 32)


def compile_put(library: str) -> Any:
    return _compile(put_kernel, library, PUT_WARPS, _RAW, _RAW, _LONGS, 1 << PE_SHIFT, 2, 2, 2, 2)


def compile_meet(library: str, world_size: int) -> Any:
    numbers = 1 << PE_SHIFT, 2, 2, 1 << PE_SHIFT
    return _compile(meet_kernel, library, 1, _RAW, _INTS, _LONGS, *numbers, *_meet_constants(world_size))


_RAW, _INTS, _LONGS = (torch.empty(16, dtype=of, device="cpu") for of in (torch.uint8, torch.int32, torch.int64))
"""Stand-ins for arguments, which give the compiler their dtypes."""


def _compile(kernel: Any, library: str, num_warps: int, *args: Any) -> Any:
    libraries = {"libnvshmem_device": library}
    return kernel.run(*args, grid=(1,), warmup=True, num_warps=num_warps, extern_libs=libraries)


def put(kernel: Any, programs: int, source: Tensor, buffer: Tensor, destinations: Tensor, groups: int) -> None:
    """Launch put_kernel for source (N, n) uint8 and destinations (N, J) int64, with at most `programs` programs."""
    rows, nbytes = source.shape
    per_row = destinations.shape[1]
    jobs = rows * per_row * cdiv(nbytes, PIECE.value)
    if jobs:
        kernel[(min(programs, jobs), 1, 1)](
            source, buffer, destinations.contiguous(), source.stride(0), rows, nbytes, per_row, groups
        )


def meet(
    kernel: Any, buffer: Tensor, pes: Tensor, state: Tensor, op_id: int, channel: int, rank: int, counters_start: int
) -> None:
    constants = _meet_constants(pes.shape[0])
    kernel[(1, 1, 1)](buffer, pes, state, op_id, channel, rank, counters_start, *constants)


def _meet_constants(world_size: int) -> tuple[int, int, int]:
    padded = next_power_of_2(world_size)
    return world_size, padded, max(32, padded)


@triton.jit(do_not_specialize=["max_tokens", "rows_start", "values_start"])
def stage_sums_kernel(
    rows_ptr, row_values_ptr, slot_rows_ptr, num_tokens_ptr, homes_ptr, staging_ptr, destinations_ptr, max_tokens,
    rows_start, values_start,
    ROW_BYTES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write the sum and the row values of slot (r, t) to slot (r, t) of the staging area.

    destinations_ptr: receives the destination of each slot's sum, -1 if the slot sends none.
    """
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
    """Sum slots (r, t) of the buffer over the ranks r that own an expert of token t. Also copy its row values."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    sum_arrived(
        out_ptr, values_ptr, ids_ptr, token, token < num_tokens, buffer_ptr.to(tl.int64), max_tokens,
        experts_per_rank, rows_start, values_start, W, K, KP, D, BLOCK, ROW_ELEMENTS, BLOCK_T,
    )  # fmt: skip


def stage_sums(
    rows: Tensor, row_values: Tensor | None, plan: RoutingPlan, layout: Layout, homes: Tensor, staging: Tensor
) -> Tensor:
    """Write the sums and row values of all slots to ``staging``, a uint8 tensor with the layout of a buffer.

    homes: (W,) int64, destination of slot (this rank, 0) on each rank.
    Returns (S,) int64, the destination of each slot's sum. A slot without rows on this rank has -1 and is not written.
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
    """Sum the slots that arrived in ``buffer`` (uint8) into ``out`` (T, D). Copy their row values to ``values``."""
    tokens, dim = out.shape
    block = next_power_of_2(dim)
    block_t = tokens_per_tile(TILE_ELEMENTS // block, tokens, PROGRAMS)
    launch(sum_arrived_kernel, (max(1, cdiv(tokens, block_t)),),
        buffer, expert_ids, out, values, tokens, layout.max_tokens, experts_per_rank, layout.rows_start,
        layout.values_start, W=layout.world_size, K=layout.top_k, KP=next_power_of_2(layout.top_k), D=dim,
        BLOCK=block, ROW_ELEMENTS=layout.row_bytes // out.itemsize, BLOCK_T=block_t, num_warps=NUM_WARPS,
    )  # fmt: skip


class PutExchange:
    """Exchanges of one workspace. `shared_memory.PlainExchange` explains the methods. num_sms: as in `Workspace`."""

    def __init__(
        self, transport: "NvshmemTransport", layout: Layout, experts_per_rank: int, num_sms: int | None
    ) -> None:
        self.transport, self.layout, self.experts_per_rank = transport, layout, experts_per_rank
        self.rank, self.num_sms = transport.rank, num_sms

    def refuse(self, buffer: "StagedBuffer", tokens: int) -> None:
        with contextlib.suppress(RuntimeError):  # this rank raises the reason of its refusal instead
            for channel in (ROWS, TABLES):
                self._meet(buffer, channel, "refused", tokens)
        self.transport.exchanges += 1

    def dispatch_tables(self, buffer: "StagedBuffer", expert_ids: Tensor, weights: Tensor, number: Tensor) -> None:
        layout, local = self.layout, buffer.local
        tokens, top_k = expert_ids.shape
        ids = layout.ids(local)[self.rank].view(-1)[: tokens * top_k]
        values = layout.values(local)[self.rank].view(-1)[: tokens * top_k]
        count = layout.num_tokens(local)[self.rank : self.rank + 1]
        ids.copy_(narrow_ids(expert_ids.reshape(-1)))
        values.copy_(weights.reshape(-1))
        count.fill_(tokens)
        for table in (ids, values, count):
            others = self.transport.bases + (table.data_ptr() - local.data_ptr())
            others[self.rank].fill_(-1)  # because "= -1" would copy from the host
            self.transport.put(buffer, table.view(torch.uint8).view(1, -1), others[None], self.num_sms)
        self._meet(buffer, TABLES, "dispatch_tables", layout.top_k)
        dispatches = self.transport.state[3:]
        dispatches.add_(1).bitwise_and_(2**31 - 1)
        number.copy_(dispatches)

    def dispatch(
        self, buffer: "StagedBuffer", payload: Sequence[Tensor], expert_ids: Tensor,
        num_sms: int | None = None, number: Tensor | None = None,
    ) -> None:  # fmt: skip
        layout, owner = self.layout, owners(expert_ids, self.experts_per_rank)
        ranks = torch.arange(layout.world_size, device=owner.device, dtype=torch.int64)
        needed = (owner[:, :, None] == ranks).any(1)
        slot = self.rank * layout.max_tokens + torch.arange(len(owner), device=owner.device, dtype=torch.int64)
        offs = layout.rows_start + slot[:, None] * layout.row_bytes
        destinations = torch.where(needed, self.transport.bases + offs, -1)
        num_sms = min(filter(None, (num_sms, self.num_sms)), default=None)
        self.transport.put(buffer, self._stage(buffer, payload), destinations, num_sms)
        self._meet_with_rows(buffer, "dispatch", width_of(payload), number)

    def combine(
        self, buffer: "StagedBuffer", rows: Tensor, row_values: Tensor | None, plan: RoutingPlan, expert_ids: Tensor,
        out: Tensor, values: Tensor | None,
    ) -> None:  # fmt: skip
        layout, staging = self.layout, buffer.staging
        width, bases = rows.shape[1] * rows.itemsize, self.transport.bases
        first_slot = bases + layout.rows_start + self.rank * layout.max_tokens * layout.row_bytes
        destinations = stage_sums(rows, row_values, plan, layout, first_slot, staging)
        sums = layout.rows(staging)[: layout.num_slots, : round_up(width, ALIGNMENT)]
        # One group per destination rank, because otherwise all ranks would begin with puts to the first rank.
        self.transport.put(buffer, sums, destinations[:, None], self.num_sms, groups=layout.world_size)
        if row_values is not None:
            # The values of all slots are sent, but receivers read only those of slots that were sent.
            source = layout.values(staging).view(layout.world_size, -1).view(torch.uint8)
            entry = layout.values_start + self.rank * source.shape[1]
            self.transport.put(buffer, source, (bases + entry)[:, None], self.num_sms)
        self._meet_with_rows(buffer, "combine", width, plan.dispatch)
        sum_arrived_slots(layout, buffer.local, expert_ids, self.experts_per_rank, out, values)

    def _meet_with_rows(self, buffer: "StagedBuffer", step: str, width: int, number: Tensor | None) -> None:
        """Put the dispatch number on all ranks, meet, and compare the numbers of all ranks."""
        layout, word = self.layout, self.layout.dispatches(buffer.staging)[:1]
        if number is None:
            word.zero_()
        else:
            word.copy_(number)
        there = self.transport.bases + (layout.dispatches_start + 8 * self.rank)
        self.transport.put(buffer, word.view(torch.uint8)[None], there[None], self.num_sms)
        self._meet(buffer, ROWS, step, width)
        self.transport.exchanges += 1
        op_id = layout.op_id(step, width)
        compare(buffer.local, number, self.transport.state, layout.counters_start, op_id, layout.world_size)

    def _meet(self, buffer: "StagedBuffer", channel: int, step: str, number: int) -> None:
        self.transport.meet(buffer.local, channel, self.layout.op_id(step, number), self.layout.counters_start)

    def _stage(self, buffer: "StagedBuffer", payload: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts (T, n_i) in the staging area. Returns (T, n) uint8, n rounded up to 16."""
        staged = self.layout.rows(buffer.staging)[: len(payload[0]), : round_up(width_of(payload), ALIGNMENT)]
        offset = 0
        for part in payload:
            width = part.shape[1]
            flat = part.contiguous().view(-1)  # flat, because a single row counts as contiguous with any stride
            word = torch.int64 if math.gcd(8, offset, width, flat.storage_offset()) == 8 else torch.uint8
            target = staged[:, offset : offset + width].view(word)
            target.copy_(flat.view(word).view(target.shape))
            offset += width
        return staged
