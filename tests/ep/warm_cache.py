"""A run of its own: forward and backward of compiled layers, on one rank, what inductor has on disk used again.

    python warm_cache.py '[{"max_tokens": 64}, {"max_tokens": 32}]'    ->    of each, how often the cache had a graph

Raises if what they compute is not what the layers compute uncompiled.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from mxep.comms import Capacity
from mxep.ep import MoE


def hits(options: dict) -> int:
    if load := options.pop("load", None):
        options["capacity"] = Capacity.factor(load)
    torch.manual_seed(0)
    moe = MoE(64, 32, 4, 1, recipe="mxfp8", **options)
    x = torch.randn(24, 64, dtype=torch.bfloat16)
    ids, weights = (found.detach() for found in moe.router(x))  # here, so that no kernel is compiled as C++
    before = counters["inductor"]["fxgraph_cache_hit"]
    runs = []
    for layer in (moe, torch.compile(moe, fullgraph=True)):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        out = layer(leaf, expert_ids=ids, weights=weights)
        out.backward(x)
        runs.append((out, leaf.grad, *(p.grad.clone() for p in moe.experts.parameters())))
    for eager, compiled in zip(*runs):
        assert (eager - compiled).norm() <= 0.02 * eager.norm()
    return counters["inductor"]["fxgraph_cache_hit"] - before


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps([hits(options) for options in json.loads(sys.argv[1])]))
