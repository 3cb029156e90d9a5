"""The two kernels that call NVSHMEM: puts by PE, and a barrier without peers' addresses.

Each kernel links NVSHMEM's device library, which takes some 10 s, and NVSHMEM initialises each loaded module. So there
are only two, with run-time sizes and unspecialized arguments. They are compiled once, when a transport opens. An
exchange compiles nothing, so it may be captured at once.

Functions are declared with C's widths: int64 for addresses, sizes and signals, int32 for PEs and operations. All
threads of a block make a block put together. Each thread calls the other functions by itself, so `meet_kernel` is one
warp and only sets signals.

Memory order. Kernels before `meet_kernel` in its stream issue the puts of an exchange. `quiet` completes them all and
orders them before the signals. Between GPUs of one host it is a fence at system scope, which the peer's acquire needs.
Over a network it waits for the network. `uint64_test` is NVSHMEM's acquire of data that a signal announced over a
network.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import core

from mxep.comms.kernels.signals import next_signal, wait_for_peers
from mxep.comms.layout import PE_SHIFT
from mxep.runtime.launch import cdiv, next_power_of_2

SIGNAL_SET = tl.constexpr(9)
CMP_GE = tl.constexpr(5)
PE_BITS = tl.constexpr(PE_SHIFT)
PIECE = tl.constexpr(16384)
"""Most bytes of one put. Longer rows are cut, so that many programs share them."""
PUT_WARPS = 16


def _declare(symbol: str, *types: str) -> Any:
    """Declare a device function of NVSHMEM's library. Its result, if any, is ignored."""
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
    """Put row i of source, nbytes each, to destinations (i, j). A destination is a PE and a byte of its buffer."""
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
    """Compile ``put_kernel`` for the current device."""
    raw, longs = torch.empty(16, dtype=torch.uint8, device="cpu"), torch.empty(2, dtype=torch.int64, device="cpu")
    wide = 1 << PE_SHIFT
    libraries = {"libnvshmem_device": library}
    return put_kernel.run(
        raw, raw, longs, wide, 2, 2, 2, 2, grid=(1,), warmup=True, num_warps=PUT_WARPS, extern_libs=libraries
    )


def compile_meet(library: str, world_size: int) -> Any:
    """Compile ``meet_kernel`` for this number of ranks and the current device."""
    raw, ints, longs = (
        torch.empty(16, dtype=torch.uint8, device="cpu"),
        torch.empty(4, dtype=torch.int32, device="cpu"),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )
    wide = 1 << PE_SHIFT
    return meet_kernel.run(
        raw, ints, longs, wide, 2, 2, wide, *_meet_constants(world_size),
        grid=(1,), warmup=True, num_warps=1, extern_libs={"libnvshmem_device": library},
    )  # fmt: skip


def put(kernel: Any, programs: int, source: Tensor, buffer: Tensor, destinations: Tensor, groups: int) -> None:
    """Put rows (N, n) uint8 to destinations (N, J) int64 with at most this many programs."""
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
