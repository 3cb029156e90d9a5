"""A run of its own: forward and backward of a compiled layer, on one rank, what inductor has on disk used again.

    python warm_cache.py '{"max_tokens": 64}'    ->    how often the cache had a graph

Raises if what it computes is not what the layer computes uncompiled.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from mxep.comms import Capacity
from mxep.ep import MoE


def main(options: dict) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if load := options.pop("load", None):
        options["capacity"] = Capacity.factor(load)
    torch.manual_seed(0)
    moe = MoE(64, 32, 4, 1, recipe="mxfp8", **options)
    x = torch.randn(24, 64, dtype=torch.bfloat16)
    runs = []
    for layer in (moe, torch.compile(moe, fullgraph=True)):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.backward(x)
        runs.append((out, leaf.grad, *(p.grad.clone() for p in moe.parameters())))
    for eager, compiled in zip(*runs):
        assert (eager - compiled).norm() <= 0.02 * eager.norm()
    return counters["inductor"]["fxgraph_cache_hit"]


if __name__ == "__main__":
    print("hits", main(json.loads(sys.argv[1])))
