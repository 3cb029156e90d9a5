"""Device functions: signals between the programs of all ranks. What is stored before is visible after.

    signal          epoch << 32 | op id    epoch: how many exchanges this buffer's tables, or rows, have had; the same
                                           on all ranks. op id: of `layout.op_id`; peers must have the same
    next_ticket     a program gets its next tiles from the tile counter
    arrive          a program adds what it has done, after its stores, and learns whether that was the last of it
    signal_peers    stores the signal into (channel, this rank) of every rank's signal pad
    wait_for_peers  waits until each (channel, peer) of the own signal pad holds the epoch

Memory order. A program's threads store, then meet at a CTA barrier. One of them adds to the counter, acquire-release at
system scope. So whoever finds the counter full has, by causality, all programs' stores before it. It signals with a
release at system scope. The waiting rank reads the signal with an acquire at system scope, and its other threads follow
over a CTA barrier. Later kernels of the stream see all of it, as they see what any kernel stored. A signal only grows,
by 2^32 at a time until it wraps around, and has one writer. Whether it has arrived is the sign of a difference.

Time limit. A wait reads the GPU's clock, in ns (the interpreter counts polls). When time is up, or a peer's op id
differs, the first program to notice writes a fault record where the host can read it without waiting for the device
(`FaultRecord` of `cuda.py`), and goes on. Later waits end at once. So streams never hang, and the host raises.
State: (4,) int64 on the device: whether a wait has failed, the limit in ns, the fault record's address, and how many
dispatches there were. The last one of tables numbers the dispatch, on the device, as a graph of it may be replayed.

Dispatches. Op ids tell a combine from a dispatch, but not of which dispatch it is. So a rank stores that number, of its
plan, into every rank's `dispatches` before its first signal of rows. Who has waited for all signals compares them. A
new dispatch has no number before its tables have met: it sends which layer's it is (`new_dispatch` of `layout.py`).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from mxep.comms.layout import NEW, NUM_COUNTERS
from mxep.runtime.launch import launch, next_power_of_2

DISPATCHES = tl.constexpr(NUM_COUNTERS)
"""Where they begin behind the counters."""
ANY_NEW = tl.constexpr(NEW)
POLL_NS = tl.constexpr(20_000)
"""ns that a poll counts for under the interpreter."""


@triton.jit
def next_signal(counters_ptr, counter: tl.constexpr, op_id):
    """The signal of an exchange that begins, from the counter of those before."""
    return ((tl.load(counters_ptr + counter) + 1) << 32) | op_id


@triton.jit
def arrive(counter_ptr, share, count):
    """Whether `count` is full now that this program has done `share` of it. The counter is 0 again then."""
    tl.debug_barrier()
    full = tl.atomic_add(counter_ptr, tl.zeros((), tl.int64) + share, sem="acq_rel", scope="sys") + share == count
    if full:
        tl.store(counter_ptr, tl.zeros((), tl.int64))
    return full


@triton.jit
def next_ticket(counters_ptr, counter: tl.constexpr):
    """The next tiles of a kernel's work. Programs that the links serve slowly draw fewer."""
    return tl.atomic_add(counters_ptr + counter, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def signal_peers(pointers_ptr, channel, signal, rank, W: tl.constexpr, WP: tl.constexpr):
    peer = tl.arange(0, WP)
    base = tl.load(pointers_ptr + peer, mask=peer < W, other=0)
    ptrs = (base + (channel * W + rank) * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(ptrs, signal, mask=peer < W, sem="release", scope="sys")


@triton.jit
def record_fault(state_ptr, channel, signal, seen, peer, mask):
    """Where the host reads it, unless there is one."""
    if tl.atomic_cas(state_ptr, tl.zeros((), tl.int64), tl.full((), 1, tl.int64), sem="acq_rel", scope="sys") == 0:
        fault_ptr = tl.load(state_ptr + 2).to(tl.pointer_type(tl.int64))
        tl.store(fault_ptr + 1, tl.zeros((), tl.int64) + channel)
        tl.store(fault_ptr + 2, signal)
        tl.store(fault_ptr + 3 + peer, seen, mask=mask)
        tl.debug_barrier()
        # A fence between the record and the flag that says it is written.
        tl.atomic_add(state_ptr, tl.zeros((), tl.int64), sem="acq_rel", scope="sys")
        tl.store(fault_ptr, tl.full((), 1, tl.int64))


@triton.jit
def load_dispatch(dispatch_ptr):
    """The number of a plan's dispatch, 0 where there is none."""
    number = tl.zeros((), tl.int64)
    if dispatch_ptr is not None:
        number += tl.load(dispatch_ptr)
    return number


@triton.jit
def send_dispatch(pointers_ptr, counters_start, dispatch, rank, W: tl.constexpr, WP: tl.constexpr):
    """To every rank, before the first signal of rows."""
    peer = tl.arange(0, WP)
    base = tl.load(pointers_ptr + peer, mask=peer < W, other=0)
    ptrs = (base + counters_start).to(tl.pointer_type(tl.int64)) + (DISPATCHES + rank)
    tl.store(ptrs, tl.zeros((WP,), tl.int64) + dispatch, mask=peer < W)
    tl.debug_barrier()  # all threads' stores before the signal of one


@triton.jit
def compare_dispatches(counters_ptr, dispatch, signal, state_ptr, W: tl.constexpr, WP: tl.constexpr):
    """With the peers', once all their signals are here."""
    peer = tl.arange(0, WP)
    seen = tl.load(counters_ptr + DISPATCHES + peer, mask=peer < W, other=0)
    wrong = (seen != dispatch) & (tl.maximum(seen, dispatch) != ANY_NEW) & (peer < W)
    if tl.max(wrong.to(tl.int32), 0) != 0:
        record_fault(state_ptr, -1, signal, seen, peer, peer < W)


@triton.jit
def number_dispatch(dispatch_ptr, state_ptr):
    """Count a dispatch, and tell its plan."""
    number = (tl.load(state_ptr + 3) + 1) & 0x7FFFFFFF
    tl.store(state_ptr + 3, number)
    tl.store(dispatch_ptr, number.to(tl.int32))


@triton.jit
def wait_for_peers(local_base, channel, signal, state_ptr, W: tl.constexpr, WP: tl.constexpr, CLOCK: tl.constexpr):
    peer = tl.arange(0, WP)
    mask = peer < W
    ptrs = (local_base + channel * W * 8).to(tl.pointer_type(tl.int64)) + peer
    # Differences, as epochs wrap around: an int32's worth of exchanges may be a week of decoding.
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
    """Signal pads of W signals, then the local counter."""
    local_base = tl.load(pointers_ptr + rank)
    counters_ptr = (local_base + W * 8).to(tl.pointer_type(tl.int64))
    signal = next_signal(counters_ptr, 0, 0)
    signal_and_wait(pointers_ptr, local_base, 0, signal, state_ptr, rank, W, WP, CLOCK)
    tl.store(counters_ptr, signal >> 32)


@triton.jit(do_not_specialize=["rank", "op_id"])
def refuse_kernel(pointers_ptr, rank, op_id, counters_start, W: tl.constexpr, WP: tl.constexpr):
    """Where peers wait for tables (0) and for the first rows (1)."""
    counters_ptr = (tl.load(pointers_ptr + rank) + counters_start).to(tl.pointer_type(tl.int64))
    for channel in tl.static_range(2):
        signal_peers(pointers_ptr, channel, next_signal(counters_ptr, channel, op_id), rank, W, WP)


@triton.jit(do_not_specialize=["counters_start", "op_id"])
def compare_kernel(buffer_ptr, dispatch_ptr, state_ptr, counters_start, op_id, W: tl.constexpr, WP: tl.constexpr):
    """The dispatches that came by puts."""
    counters_ptr = (buffer_ptr.to(tl.int64) + counters_start).to(tl.pointer_type(tl.int64))
    signal = tl.zeros((), tl.int64) + op_id
    compare_dispatches(counters_ptr, load_dispatch(dispatch_ptr), signal, state_ptr, W, WP)


def compare(
    buffer: Tensor, number: Tensor | None, state: Tensor, counters_start: int, op_id: int, world_size: int
) -> None:
    """Dispatches that came into a buffer with this rank's, after the signals of its rows."""
    ranks = {"W": world_size, "WP": next_power_of_2(world_size)}
    launch(compare_kernel, (1,), buffer, number, state, counters_start, op_id, **ranks, num_warps=1)


def barrier(pointers: Tensor, state: Tensor, rank: int, clock: bool) -> None:
    """Over buffers of (W + 1) int64 that are used for nothing else."""
    world_size = pointers.shape[0]
    padded = next_power_of_2(world_size)
    launch(barrier_kernel, (1,), pointers, state, rank, W=world_size, WP=padded, CLOCK=clock, num_warps=1)
