"""A whole model on batches padded to their longest sequence, whose length changes from step to step.

    python integration/benchmarks/padded.py [FILE.json]
    torchrun --nproc-per-node 2 integration/benchmarks/padded.py [FILE.json]

Qwen3-30B's sizes with 8 layers and a vocabulary of 32,000, as transformers makes it: eager, SDPA, bf16, no optimizer.
A batch has four sequences. The longest has 1,200 to 1,700 tokens, the others at least half as many. The rest is
padding, which is counted as tokens. On several GPUs experts are spread over all ranks, and the rest is replicated.

Experts: "none" return their input, "baseline" is baseline.BaselineLayer, and the others are mxep's recipes.
Lengths: "fixed" is 1,450, the mean. "never before" are 30 steps of different lengths that the experts have not seen,
and "again" are the same. "alike": all ranks have the same length. "by rank": each draws its own, so all wait for the
longest. There are 120 lengths, and experts "none" run each of these first, because torch itself takes 0.1 s for a
new one.

ms             a step: forward and backward, mean of 30, the slowest rank's
tokens/s       of all ranks together
of fixed       ms a token that the experts add, over the same at the fixed length
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.step import RANK, RANKS, SIZES, baseline_experts, draw_weights
from mxep.comms import Capacity
from mxep.gemm import Recipe
from mxep.integration.report import provenance, write_json
from mxep.integration.transformers import Implementation, check, expert_parallel, register
from mxep.integration.transformers.experts import ALL_EXPERTS_FUNCTIONS

SEQUENCES, LEAST, MOST, STEPS = 4, 1200, 1700, 30
FIXED = (LEAST + MOST) // 2
VOCABULARY = 32000
NONE, BASELINE = "none", "baseline"
EXPERTS = (NONE, BASELINE, "bf16", "mxfp8")


def make_model() -> Any:
    limits: dict[str, Any] = {"max_tokens": SEQUENCES * MOST}
    if RANKS > 1:
        limits["capacity"] = Capacity.factor(2.0)
    for recipe in EXPERTS[2:]:
        register(Implementation(f"padded {recipe}", Recipe.named(recipe), **limits))
    ALL_EXPERTS_FUNCTIONS.register(f"padded {NONE}", lambda experts, hidden_states, *_: hidden_states)
    ALL_EXPERTS_FUNCTIONS.register(f"padded {BASELINE}", baseline_experts)
    sizes = SIZES["qwen3"] | {"vocab_size": VOCABULARY, "num_hidden_layers": 8}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, tie_word_embeddings=False)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if RANKS > 1:
        expert_parallel(model, init_device_mesh("cuda", (RANKS,)), "padded bf16")
    draw_weights(model, torch.device("cuda"))
    return model.train()


def batch(longest: int) -> tuple[Tensor, Tensor]:
    """Ids (4, longest), and the mask of those that are no padding."""
    lengths = [longest, *(random.Random(longest).randint(longest // 2, longest) for _ in range(SEQUENCES - 1))]
    places = torch.arange(longest, device="cuda", dtype=torch.int64)
    mask = places < torch.tensor(lengths, device="cuda", dtype=torch.int64)[:, None]
    return torch.randint(VOCABULARY, mask.shape, device="cuda", dtype=torch.int64), mask.long()


def milliseconds(model: Any, lengths: list[int]) -> float:
    """Of a step, over these lengths one after the other. Collective."""
    batches = [batch(length) for length in lengths]
    torch.cuda.synchronize()
    if RANKS > 1:
        dist.barrier()
        torch.cuda.synchronize()
    began = time.perf_counter()
    for ids, mask in batches:
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    took = torch.tensor([time.perf_counter() - began], device="cuda", dtype=torch.float64)
    if RANKS > 1:
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return 1e3 * float(took) / len(lengths)


def measure(model: Any) -> list[dict[str, Any]]:
    """A row for each kind of experts and lengths. Collective."""
    pool = random.Random(0).sample(range(LEAST, MOST + 1), 4 * STEPS)
    drawn = {"alike": pool[:STEPS]}
    if RANKS > 1:
        drawn["by rank"] = random.Random(RANK + 1).sample(pool[STEPS:], STEPS)
    drawn["fixed"] = [FIXED] * STEPS
    rows: list[dict[str, Any]] = []
    added = dict[tuple[str, str, str], float]()
    for experts in EXPERTS:
        model.config._experts_implementation = f"padded {experts}"
        milliseconds(model, [*pool, FIXED] if experts == NONE else [MOST] * 4)
        for lengths, drawn_here in drawn.items():
            if lengths == "fixed":
                milliseconds(model, drawn_here[:4])
            tokens = torch.tensor([SEQUENCES * sum(drawn_here)], device="cuda", dtype=torch.int64)
            if RANKS > 1:
                dist.all_reduce(tokens)
            for when in ("again",) if experts == NONE or lengths == "fixed" else ("never before", "again"):
                ms = milliseconds(model, drawn_here)
                added[experts, lengths, when] = (ms - added.get((NONE, lengths, "ms"), 0)) / int(tokens)
                if experts == NONE:
                    added[NONE, lengths, "ms"] = ms
                rows.append({"experts": experts, "lengths": lengths, "when": when, "ms": round(ms, 2)})
                rows[-1]["tokens/s"] = round(int(tokens) / STEPS / ms * 1e3)
                if RANK == 0:
                    print(rows[-1], flush=True)
        if experts not in (NONE, BASELINE):
            check(model)
    for row in rows:
        if row["experts"] != NONE:
            fixed = added[row["experts"], "fixed", "again"]
            row["of fixed"] = round(added[row["experts"], row["lengths"], row["when"]] / fixed, 3)
    return rows


def main() -> None:
    torch.cuda.set_device(RANK)
    if RANKS > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    rows = measure(make_model())
    if RANK == 0:
        print(*rows, sep="\n")
        if sys.argv[1:]:
            write_json(provenance("padded.py", None) | {"ranks": RANKS, "rows": rows}, [Path(sys.argv[1])])
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
