"""Device functions for signals between the programs of all ranks.

Stores of a rank before a signal are visible to a rank that has waited for the signal. A signal is an int64,
epoch << 32 | op id. The epoch is the number of exchanges of tables, or of rows, made in this buffer. The op id is
`Layout.op_id`. Both must be equal on all ranks. W is the number of ranks.

    next_ticket     draws the next tiles of a program from the tile counter
    arrive          adds a program's finished work to a counter, after the program's stores; True for the last program
    signal_peers    stores the signal into entry (channel, this rank) of every rank's signal pad
    wait_for_peers  waits until every entry (channel, peer) of this rank's signal pad holds the epoch

Memory order. The threads of a program store, then meet at a CTA barrier. Then one thread adds to the counter, with
acquire-release at system scope. One program finds the counter full, and the stores of all programs happen before its
next steps. It signals with a release at system scope. A waiting rank reads the signal with an acquire at
system scope, and a CTA barrier orders its other threads after that. Later kernels of its stream see all of these
stores, too. Each entry of a signal pad has one writer. It grows by 2^32 per exchange until it wraps around, so waits
compare by the sign of the difference.

Time limit. A wait measures time by the GPU's clock, in ns; under Triton's interpreter it counts polls. If time is up,
or the op id of a peer differs, the first program that notices writes a fault record, which the host reads without a
sync (`symmetric_memory.FaultRecord`). The program then goes on, and all later waits end at once. So no stream hangs,
and the host raises. The state of waits is (4,) int64 on the device: failed flag, limit in ns, address of the fault
record, number of dispatches. The device counts dispatches, because a captured dispatch may be replayed.

Dispatches. An op id distinguishes a combine from a dispatch, but not two dispatches. So a rank stores the dispatch
number of its plan into `dispatches` of every rank's buffer, before its first signal of rows. The program that has
waited for all signals compares the numbers. A new dispatch gets its number only with its tables. Its rows carry the
number of `layout.new_dispatch` instead.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from mxep.comms.layout import NEW, NUM_COUNTERS
from mxep.runtime.launch import launch, next_power_of_2

DISPATCHES = tl.constexpr(NUM_COUNTERS)
"""Offset of the first dispatch number from the first counter, in int64 elements."""
ANY_NEW = tl.constexpr(NEW)
POLL_NS = tl.constexpr(20_000)
"""Nanoseconds that a poll counts for under Triton's interpreter, which has no clock."""


@triton.jit
def next_signal(counters_ptr, counter: tl.constexpr, op_id):
    """Signal of the exchange that begins. counter: index of the counter of past exchanges; the epoch is one more."""
    return ((tl.load(counters_ptr + counter) + 1) << 32) | op_id


@triton.jit
def arrive(counter_ptr, share, count):
    """Add `share` to the counter, after the stores of all threads. If it reaches `count`, reset it and return True."""
    tl.debug_barrier()
    full = tl.atomic_add(counter_ptr, tl.zeros((), tl.int64) + share, sem="acq_rel", scope="sys") + share == count
    if full:
        tl.store(counter_ptr, tl.zeros((), tl.int64))
    return full


@triton.jit
def next_ticket(counters_ptr, counter: tl.constexpr):
    """Draw the number of the next tiles to work on. So programs that stores to a slow link delay take fewer tiles."""
    return tl.atomic_add(counters_ptr + counter, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def signal_peers(pointers_ptr, channel, signal, rank, W: tl.constexpr, WP: tl.constexpr):
    peer = tl.arange(0, WP)
    base = tl.load(pointers_ptr + peer, mask=peer < W, other=0)
    ptrs = (base + (channel * W + rank) * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(ptrs, signal, mask=peer < W, sem="release", scope="sys")


@triton.jit
def record_fault(state_ptr, channel, signal, seen, peer, mask):
    """Write the fault record, unless one has been written already."""
    if tl.atomic_cas(state_ptr, tl.zeros((), tl.int64), tl.full((), 1, tl.int64), sem="acq_rel", scope="sys") == 0:
        fault_ptr = tl.load(state_ptr + 2).to(tl.pointer_type(tl.int64))
        tl.store(fault_ptr + 1, tl.zeros((), tl.int64) + channel)
        tl.store(fault_ptr + 2, signal)
        tl.store(fault_ptr + 3 + peer, seen, mask=mask)
        tl.debug_barrier()
        # This acquire-release is a fence between the record's stores and its written flag.
        tl.atomic_add(state_ptr, tl.zeros((), tl.int64), sem="acq_rel", scope="sys")
        tl.store(fault_ptr, tl.full((), 1, tl.int64))


@triton.jit
def load_dispatch(dispatch_ptr):
    number = tl.zeros((), tl.int64)
    if dispatch_ptr is not None:
        number += tl.load(dispatch_ptr)
    return number


@triton.jit
def send_dispatch(pointers_ptr, counters_start, dispatch, rank, W: tl.constexpr, WP: tl.constexpr):
    """Store the dispatch number on every rank. Call it before the first signal of rows."""
    peer = tl.arange(0, WP)
    base = tl.load(pointers_ptr + peer, mask=peer < W, other=0)
    ptrs = (base + counters_start).to(tl.pointer_type(tl.int64)) + (DISPATCHES + rank)
    tl.store(ptrs, tl.zeros((WP,), tl.int64) + dispatch, mask=peer < W)
    tl.debug_barrier()  # no thread signals before all threads have stored


@triton.jit
def compare_dispatches(counters_ptr, dispatch, signal, state_ptr, W: tl.constexpr, WP: tl.constexpr):
    """Compare the dispatch number with those of the peers. Call it after all their signals have arrived."""
    peer = tl.arange(0, WP)
    seen = tl.load(counters_ptr + DISPATCHES + peer, mask=peer < W, other=0)
    wrong = (seen != dispatch) & (tl.maximum(seen, dispatch) != ANY_NEW) & (peer < W)
    if tl.max(wrong.to(tl.int32), 0) != 0:
        record_fault(state_ptr, -1, signal, seen, peer, peer < W)


@triton.jit
def number_dispatch(dispatch_ptr, state_ptr):
    number = (tl.load(state_ptr + 3) + 1) & 0x7FFFFFFF
    tl.store(state_ptr + 3, number)
    tl.store(dispatch_ptr, number.to(tl.int32))


@triton.jit
def wait_for_peers(local_base, channel, signal, state_ptr, W: tl.constexpr, WP: tl.constexpr, CLOCK: tl.constexpr):
    peer = tl.arange(0, WP)
    mask = peer < W
    ptrs = (local_base + channel * W * 8).to(tl.pointer_type(tl.int64)) + peer
    # Compare differences, because epochs wrap around: a week of decoding may take 2^31 exchanges.
    least = (signal >> 32) << 32
    seen = tl.load(ptrs, mask=mask, other=signal, volatile=True)
    if tl.min(seen - least, 0) < 0:
        limit = tl.where(tl.load(state_ptr) != 0, 0, tl.load(state_ptr + 1))
        start = tl.zeros((), tl.int64)
        if CLOCK:
            start = globaltimer()
        waited = tl.zeros((), tl.int64)
        while (tl.min(seen - least, 0) < 0) & (waited <= limit):
            seen = tl.load(ptrs, mask=mask, other=signal, volatile=True)
            if CLOCK:
                waited = globaltimer() - start
            else:
                waited += POLL_NS
    seen = tl.atomic_add(ptrs, tl.zeros((WP,), tl.int64), mask=mask, sem="acquire", scope="sys")
    seen = tl.where(mask, seen, signal)
    tl.debug_barrier()
    wrong = (seen - least < 0) | (((seen ^ signal) >> 32 == 0) & (seen != signal))
    if tl.max(wrong.to(tl.int32), 0) != 0:
        record_fault(state_ptr, channel, signal, seen, peer, mask)


@triton.jit
def signal_and_wait(
    pointers_ptr, local_base, channel, signal, state_ptr, rank,
    W: tl.constexpr, WP: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    signal_peers(pointers_ptr, channel, signal, rank, W, WP)
    wait_for_peers(local_base, channel, signal, state_ptr, W, WP, CLOCK)


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(pointers_ptr, state_ptr, rank, W: tl.constexpr, WP: tl.constexpr, CLOCK: tl.constexpr):
    """Barrier over signal pads. A signal pad here is W signals, followed by one counter of this rank."""
    local_base = tl.load(pointers_ptr + rank)
    counters_ptr = (local_base + W * 8).to(tl.pointer_type(tl.int64))
    signal = next_signal(counters_ptr, 0, 0)
    signal_and_wait(pointers_ptr, local_base, 0, signal, state_ptr, rank, W, WP, CLOCK)
    tl.store(counters_ptr, signal >> 32)


@triton.jit(do_not_specialize=["rank", "op_id"])
def refuse_kernel(pointers_ptr, rank, op_id, counters_start, W: tl.constexpr, WP: tl.constexpr):
    """Signal the op id "refused" to peers, on the channels of tables (0) and of the first chunk of rows (1)."""
    counters_ptr = (tl.load(pointers_ptr + rank) + counters_start).to(tl.pointer_type(tl.int64))
    for channel in tl.static_range(2):
        signal_peers(pointers_ptr, channel, next_signal(counters_ptr, channel, op_id), rank, W, WP)


@triton.jit(do_not_specialize=["counters_start", "op_id"])
def compare_kernel(buffer_ptr, dispatch_ptr, state_ptr, counters_start, op_id, W: tl.constexpr, WP: tl.constexpr):
    counters_ptr = (buffer_ptr.to(tl.int64) + counters_start).to(tl.pointer_type(tl.int64))
    signal = tl.zeros((), tl.int64) + op_id
    compare_dispatches(counters_ptr, load_dispatch(dispatch_ptr), signal, state_ptr, W, WP)


def compare(
    buffer: Tensor, number: Tensor | None, state: Tensor, counters_start: int, op_id: int, world_size: int
) -> None:
    """Compare the dispatch numbers that peers put into ``buffer`` with this rank's `number`. Call it after `meet`."""
    ranks = {"W": world_size, "WP": next_power_of_2(world_size)}
    launch(compare_kernel, (1,), buffer, number, state, counters_start, op_id, **ranks, num_warps=1)


def barrier(pointers: Tensor, state: Tensor, rank: int, clock: bool) -> None:
    world_size = pointers.shape[0]
    padded = next_power_of_2(world_size)
    launch(barrier_kernel, (1,), pointers, state, rank, W=world_size, WP=padded, CLOCK=clock, num_warps=1)
