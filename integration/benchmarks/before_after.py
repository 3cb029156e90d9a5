"""Eager layers over all ranks, ms a step (forward + backward), to compare two commits on one warm machine.

    torchrun --nproc-per-node 2 integration/benchmarks/before_after.py NAME

Run it in turn with the sources of either commit. Sizes are Qwen3-30B's: D 2048, F 768, 128 experts, top-8. "host" is
the time until a step is launched, of an idle GPU. docs/results/exchanges-h100.json has what it printed.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from mxep.ep import MoE


def measure(name: str, recipe: str, dispatcher: str, tokens: int) -> None:
    """Print the median of five stretches of 12 steps, and of ten steps' time on the host."""
    torch.manual_seed(0)
    limits = {} if dispatcher == "all_to_all" else {"max_tokens": tokens}
    moe = MoE(2048, 768, 128, 8, recipe=recipe, dispatcher=dispatcher, device="cuda", **limits)
    x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_out = torch.randn_like(x)

    def step() -> None:
        moe(x).backward(d_out)
        moe.zero_grad(set_to_none=True)
        x.grad = None

    def seconds(steps: int, *, waits: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if waits:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps

    for _ in range(12):
        step()
    dist.barrier()
    stretches = sorted(seconds(12, waits=True) for _ in range(5))
    host = sorted(seconds(1, waits=False) for _ in range(10))
    if dist.get_rank() == 0:
        print(
            f"{name} {recipe:6} {dispatcher:10} T {tokens:5}: {1e3 * stretches[2]:.3f} ms a step "
            f"(min {1e3 * stretches[0]:.3f}), host {1e3 * host[5]:.3f} ms",
            flush=True,
        )
    moe.close()


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for tokens in (256, 4096):
        for recipe in ("mxfp8", "bf16"):
            measure(sys.argv[1], recipe, "symmetric", tokens)
    measure(sys.argv[1], "mxfp8", "all_to_all", 256)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
