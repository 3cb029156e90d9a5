"""Device functions: how the programs of all ranks meet. What is stored before is visible after.

    word        epoch << 32 | signature     epoch: how often this buffer's tables, or rows, have moved, alike everywhere
                                            signature: what the rank thinks it is moving; peers must think the same
    take        programs take tiles of a kernel's work one by one
    arrive      a program adds what it has done, after its stores, and is told if that was the last of it
    announce    it stores the word into place (channel, my rank) of every rank's signals
    await_peers waits until every place (channel, peer) of its own signals holds the epoch

Memory order. A program's threads store, then meet at a CTA barrier; one of them adds to the counter, acquire-release at
system scope. So whoever finds the counter full has, by causality, all programs' stores before it. It announces with
a release at system scope; the waiting rank reads the word with an acquire at system scope, and its other threads follow
over a CTA barrier. Kernels that come later in the stream see all of it, as they see what any kernel stored. A word only
grows, by 2^32 at a time until it wraps around, and has one writer: whether it is there yet is told by the sign of a
difference.

Time limit. A wait looks at the GPU's clock, in ns (under the interpreter: counts turns). When time is up, or a peer's
signature differs, the first program to notice writes a record where the host can read it without waiting for the device
(`Record` of `symmetric_memory.py`), and goes on; later waits end at once. So streams never hang, and the host raises.
State: (3,) int64 on the device: whether a wait has failed, the limit in ns, the record's address.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from mxep.comms.layout import Layout

TURN = tl.constexpr(20_000)
"""ns that a turn of a wait counts for under the interpreter."""


@triton.jit
def word_of(own_ptr, counter: tl.constexpr, signature):
    """The word of a move that begins, from the counter of the moves before."""
    return ((tl.load(own_ptr + counter) + 1) << 32) | signature


@triton.jit
def arrive(counter_ptr, share, count):
    """Whether `count` is full now that this program has done `share` of it. The counter is 0 again then."""
    tl.debug_barrier()
    full = tl.atomic_add(counter_ptr, tl.zeros((), tl.int64) + share, sem="acq_rel", scope="sys") + share == count
    if full:
        tl.store(counter_ptr, tl.zeros((), tl.int64))
    return full


@triton.jit
def take(own_ptr, counter: tl.constexpr):
    """The next tile of a kernel's work, this program's alone. Whoever is served slowly, by the links, takes fewer."""
    return tl.atomic_add(own_ptr + counter, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def announce(pointers_ptr, signals_start, channel, word, rank, W: tl.constexpr, WP: tl.constexpr):
    peer = tl.arange(0, WP)
    base = tl.load(pointers_ptr + peer, mask=peer < W, other=0)
    place = (base + signals_start + (channel * W + rank) * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(place, word, mask=peer < W, sem="release", scope="sys")


@triton.jit
def await_peers(
    own_base, signals_start, channel, word, state_ptr, W: tl.constexpr, WP: tl.constexpr, CLOCK: tl.constexpr
):
    peer = tl.arange(0, WP)
    there = peer < W
    place = (own_base + signals_start + channel * W * 8).to(tl.pointer_type(tl.int64)) + peer
    # Differences, as epochs wrap around: an int32's worth of moves may be a week of decoding.
    least = (word >> 32) << 32
    seen = tl.load(place, mask=there, other=word, volatile=True)
    if tl.min(seen - least, 0) < 0:
        limit = tl.where(tl.load(state_ptr) != 0, 0, tl.load(state_ptr + 1))
        start = tl.zeros((), tl.int64)
        if CLOCK:
            start = globaltimer()
        waited = tl.zeros((), tl.int64)
        while (tl.min(seen - least, 0) < 0) & (waited <= limit):
            seen = tl.load(place, mask=there, other=word, volatile=True)
            if CLOCK:
                waited = globaltimer() - start
            else:
                waited += TURN
    seen = tl.atomic_add(place, tl.zeros((WP,), tl.int64), mask=there, sem="acquire", scope="sys")
    seen = tl.where(there, seen, word)
    tl.debug_barrier()
    wrong = (seen - least < 0) | (((seen ^ word) >> 32 == 0) & (seen != word))
    if tl.max(wrong.to(tl.int32), 0) != 0:
        if tl.atomic_cas(state_ptr, tl.zeros((), tl.int64), tl.full((), 1, tl.int64), sem="acq_rel", scope="sys") == 0:
            record = tl.load(state_ptr + 2).to(tl.pointer_type(tl.int64))
            tl.store(record + 1, tl.zeros((), tl.int64) + channel)
            tl.store(record + 2, word)
            tl.store(record + 3 + peer, seen, mask=there)
            tl.debug_barrier()
            # A fence between what the record says and the word that says it is there.
            tl.atomic_add(state_ptr, tl.zeros((), tl.int64), sem="acq_rel", scope="sys")
            tl.store(record, tl.full((), 1, tl.int64))


@triton.jit
def meet(
    pointers_ptr, own_base, signals_start, channel, word, state_ptr, rank,
    W: tl.constexpr, WP: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    announce(pointers_ptr, signals_start, channel, word, rank, W, WP)
    await_peers(own_base, signals_start, channel, word, state_ptr, W, WP, CLOCK)


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(pointers_ptr, state_ptr, rank, W: tl.constexpr, WP: tl.constexpr, CLOCK: tl.constexpr):
    """Pads of W words, then the own counter."""
    own_base = tl.load(pointers_ptr + rank)
    own_ptr = (own_base + W * 8).to(tl.pointer_type(tl.int64))
    word = word_of(own_ptr, 0, 0)
    meet(pointers_ptr, own_base, 0, 0, word, state_ptr, rank, W, WP, CLOCK)
    tl.store(own_ptr, word >> 32)


def barrier(pointers: Tensor, state: Tensor, rank: int, clock: bool) -> None:
    """Over buffers of (W + 1) int64 that are used for nothing else."""
    world_size = len(pointers)
    barrier_kernel[(1,)](
        pointers, state, rank, W=world_size, WP=triton.next_power_of_2(world_size), CLOCK=clock, num_warps=1
    )


@triton.jit(do_not_specialize=["rank", "signature"])
def refuse_kernel(pointers_ptr, rank, signature, signals_start, own_start, W: tl.constexpr, WP: tl.constexpr):
    """Where peers wait for tables (0) and for the first rows (1)."""
    own_ptr = (tl.load(pointers_ptr + rank) + own_start).to(tl.pointer_type(tl.int64))
    for channel in tl.static_range(2):
        announce(pointers_ptr, signals_start, channel, word_of(own_ptr, channel, signature), rank, W, WP)


def refuse(pointers: Tensor, rank: int, signature: int, layout: Layout) -> None:
    """Tell the peers in a move that we will not come. Nothing is counted: the buffer is of no use afterwards."""
    world_size = layout.world_size
    refuse_kernel[(1,)](
        pointers, rank, signature, layout.signals_start, layout.own_start,
        W=world_size, WP=triton.next_power_of_2(world_size), num_warps=1,
    )  # fmt: skip
