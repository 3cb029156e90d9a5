"""One Qwen3 attention's forward + backward with bf16 and MXFP8 projections, eager and compiled: time, host's, kernels.

python integration/benchmarks/attention.py                  Qwen3-30B-A3B's sizes, 8192 tokens, on a GPU
python integration/benchmarks/attention.py --tokens 64      a trial where there is no GPU, whose times say nothing
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRotaryEmbedding

from mxep.gemm import convert, join_linears

KINDS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda attention: attention,
    "mxfp8": lambda attention: convert(attention, "mxfp8"),
    "mxfp8, q k v joined": lambda attention: join_linears(convert(attention, "mxfp8")),
}
CALLS, ROUNDS = 100, 5


def make(tokens: int, device: str) -> dict[str, Callable[[], None]]:
    """Name -> a forward and backward of two sequences."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    config = Qwen3MoeConfig(**sizes, attn_implementation="sdpa")
    torch.manual_seed(0)
    plain = Qwen3MoeAttention(config, 0).to(device, torch.bfloat16)
    x, d_out = (torch.randn(2, tokens // 2, 2048, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    positions = Qwen3MoeRotaryEmbedding(config).to(device)(x, torch.arange(tokens // 2, device=device)[None])

    def step_of(attention: Any) -> Callable[[], None]:
        return lambda: attention(x, position_embeddings=positions, attention_mask=None)[0].backward(d_out)

    steps = {}
    for name, prepare in KINDS.items():
        for how in ("eager", "compiled"):
            attention = prepare(copy.deepcopy(plain))
            if how == "compiled":
                attention.forward = torch.compile(attention.forward)
            steps[f"{name}, {how}"] = step_of(attention)
    return steps


def measure(step: Callable[[], None], calls: int, wait: Callable[[], None]) -> tuple[float, float]:
    """ms a call, and how many of them the host was busy with, once the chip is as warm as these calls make it."""
    for _ in range(calls):
        step()
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    busy = time.perf_counter() - begin
    wait()
    return (time.perf_counter() - begin) / calls * 1e3, busy / calls * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    tokens, on_gpu = parser.parse_args().tokens, torch.cuda.is_available()
    steps, wait = make(tokens, "cuda" if on_gpu else "cpu"), torch.cuda.synchronize if on_gpu else lambda: None
    calls, found = CALLS if on_gpu else 1, {name: list[tuple[float, float]]() for name in steps}
    for _ in range(ROUNDS):  # the first compiles and captures
        for name, step in steps.items():
            found[name].append(measure(step, calls, wait))
    for name, step in steps.items():
        ms, host = (statistics.median(times) for times in zip(*found[name][1:]))
        line = f"{name:30} {ms:8.3f} ms, host {host:.3f}"
        if on_gpu:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                measure(step, 10, wait)
            line += f", kernels {sum(each.self_device_time_total for each in seen.key_averages()) / 1e4:.3f}"
        print(line)


if __name__ == "__main__":
    main()
