"""Where a capture's memory lies: in a pool that is the device's again when the capture has ended.

A pool is an id here, as `torch.cuda.graph_pool_handle` gives, and no torch.cuda.MemPool: its destructor frees, and ends
the process where another pool is in use or, since torch 2.13, where its thread captures. To release an id only counts
down. What nobody uses then is freed by `torch.cuda.empty_cache`, which raises where it fails, and by torch itself where
memory is short.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mxep.runtime.driver import NotCapturedNow

Pool = tuple[int, int]
_pools: set[Pool] = set()
"""Of captures. What lies in one that has ended is a library's scratch memory, as cuBLAS' workspace of a stream is."""


@functools.cache
def side_stream(index: int, stream: int) -> torch.cuda.Stream:
    """Where graphs of a stream are captured, which has work of its own."""
    return torch.cuda.Stream(index)


@contextmanager
def capture_pool(index: int) -> Iterator[Pool]:
    """Within it this thread's allocations lie in a pool; behind it what is free of that is the device's again.

    Raises NotCapturedNow where a user's pool, or a compiler's, goes before it.
    """
    pool: Pool = torch.cuda.graph_pool_handle()
    ours = False
    try:
        with _allocating_to(index, pool):
            place = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", index)).data_ptr()
            ours = any(0 <= place - each["address"] < each["total_size"] for each in _segments({pool}))
            if not ours:
                raise NotCapturedNow("allocations go to another pool")
            _pools.add(pool)
            yield pool
    finally:
        if ours:
            _give_back(index)


def scratch() -> list[tuple[int, int]]:
    """Address and bytes of the segments of the pool in use, and of those earlier ones in which a library keeps memory.

    A graph that is captured now may have its address, and others may free it.
    """
    found = _segments(_pools)
    _pools.intersection_update([tuple(each["segment_pool_id"]) for each in found])
    return sorted((each["address"], each["total_size"]) for each in found)


def forget(pool: Pool) -> None:
    """That what lies in a pool is scratch memory."""
    _pools.discard(pool)


@contextmanager
def _allocating_to(index: int, pool: Pool) -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()  # it might find a user's MemPool, whose destructor would end the process
    try:
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
    finally:
        if collects:
            gc.enable()


def _give_back(index: int) -> None:
    """To the device, what is free of released pools.

    And all else that torch has cached, but in torch 2.11 not while a pool is in use. So one is.
    """
    with _allocating_to(index, torch.cuda.graph_pool_handle()):
        torch.cuda.empty_cache()


def _segments(pools: set[Pool]) -> list[dict[str, Any]]:
    return [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) in pools]


def idle_bytes(index: int) -> int:
    """Of a device: what pools, ours or not, hold in which no tensor lies now."""
    pools = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0)]
    return sum(each["total_size"] - each["allocated_size"] for each in pools if each["device"] == index)
