"""torch's symmetric-memory all-to-all on NVSHMEM (`all_to_all_vdev_2d`), compared with NCCL's, on all ranks.

    NVSHMEM_DISABLE_NVLS=1 torchrun --nproc-per-node 2 integration/benchmarks/peer_exchange.py [FILE.json]

A process has one kind of symmetric memory, so bench=comms compares mxep with the same NCCL calls in another process
(with these shapes as `bench.shapes.headline`). torch 2.11 allows at most 15 experts a rank. As there, permuting rows
does not count. But sizes are on the device, and dispatch starts each expert's rows at a multiple of 32. Both directions
are checked first.

us      median over rounds of the slowest rank; vdev_2d is launched by the host, and NCCL is in a CUDA graph
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.comms import BLOCK, Collective, Problem, Shape, make_timer
from benchmarks.script import rank, ranks, run
from benchmarks.timer import Alternative
from mxep.integration.launch import Rank
from mxep.integration.report import Row

SHAPES = [Shape(8192, 7168, 16, 4), Shape(8192, 5120, 16, 1), Shape(4096, 4096, 16, 1)]


def group_name() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


class VDev:
    """Sends a row per (token, expert) pair to the expert's rank, and back. Collective. sent: (T K, D), by expert."""

    def __init__(self, p: Problem, sent: Tensor) -> None:
        self.name, pairs, experts = group_name(), len(sent), p.shape.experts
        most = p.traffic.most_pairs + BLOCK * p.local_experts
        make: Any = lambda *shape, dtype: symm_mem.empty(*shape, dtype=dtype, device=p.device)  # noqa: E731
        self.sent, self.back = (make(pairs, p.shape.dim, dtype=sent.dtype) for _ in range(2))
        self.received = make(most, p.shape.dim, dtype=sent.dtype)
        self.splits = make(experts, dtype=torch.int64)
        self.where, self.where_back = (make(2, experts, dtype=torch.int64) for _ in range(2))
        self.sent.copy_(sent)
        self.splits.copy_(p.ids.flatten().bincount(minlength=experts))

    def dispatch(self) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self.sent, self.received, self.splits, self.where, self.name, major_align=BLOCK
        )

    def combine(self) -> None:
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(self.received, self.back, self.where, self.where_back, self.name)

    def check(self) -> None:
        """Raise RuntimeError if rows do not come back as they were sent. Collective."""
        self.back.zero_()
        self.dispatch()
        self.combine()
        if not self.back.equal(self.sent):
            raise RuntimeError("other rows come back than were sent")


def measure(device: torch.device) -> Iterator[Row]:
    """Yield a row for each shape and call. Collective."""
    symm_mem.set_backend("NVSHMEM")
    symm_mem.enable_symm_mem_for_group(group_name())
    flag = torch.zeros(1, device=device, dtype=torch.float32)
    timer = make_timer(device, lambda: dist.all_reduce(flag))
    for shape in SHAPES:
        p = Problem(Rank(rank(), ranks(), device), shape, 0.0, 0)
        nccl = Collective(p)
        order = p.ids.flatten().long().argsort(stable=True) // shape.top_k
        nccl.sent.copy_(p.bf16[0].view(torch.bfloat16)[order])
        peer = VDev(p, nccl.sent)
        peer.check()
        calls = {
            f"{name} bf16{suffix}": Alternative(functools.partial(list, [call]), graph)
            for name, exchange, graph in (("NCCL", nccl, True), ("vdev_2d", peer, False))
            for suffix, call in (("", exchange.dispatch), (", combine", exchange.combine))
        }
        for name, row in timer.compare(calls).items():
            yield {"shape": list(shape), "what": name, **row}


if __name__ == "__main__":
    run(measure)
