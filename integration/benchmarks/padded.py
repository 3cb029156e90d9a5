"""A whole model on padded batches: the length of the longest sequence changes with each step.

    torchrun --nproc-per-node 2 integration/benchmarks/padded.py [FILE.json]

Qwen3-30B's sizes with 8 layers and a vocabulary of 32,000, as transformers makes it: eager, SDPA, bf16, no optimizer.
Padding is counted as tokens. Experts are spread over all ranks, and the rest is replicated.

Experts: "none" return their input, "baseline" is baseline.BaselineLayer, and the others are mxep's recipes.
Lengths: "fixed" is the mean. "never before" are 30 steps of different lengths that the experts have not seen, and
"again" repeats them. "alike": all ranks have the same length. "by rank": each draws its own, so all wait for the
longest. Experts "none" run each of the 120 lengths first, because torch itself takes 0.1 s for a new one.

ms             forward and backward, mean of 30 steps, slowest rank
tokens/s       of all ranks
of fixed       ms per token that the experts add / the same at the fixed length
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.model import QWEN3, draw_weights, register_experts
from benchmarks.script import rank, ranks, run, seconds
from mxep.comms import Capacity
from mxep.integration.mesh import all_gather
from mxep.integration.transformers import check, expert_parallel

SEQUENCES, LEAST, MOST, STEPS = 4, 1200, 1700, 30
FIXED = (LEAST + MOST) // 2
VOCABULARY = 32000
NONE, BASELINE = "none", "baseline"
EXPERTS = (NONE, BASELINE, "bf16", "mxfp8")


def make_model(device: torch.device) -> Any:
    register_experts(EXPERTS[2:], max_tokens=SEQUENCES * MOST, capacity=Capacity.factor(2.0))
    config = Qwen3MoeConfig(**QWEN3 | {"vocab_size": VOCABULARY, "num_hidden_layers": 8})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    expert_parallel(model, init_device_mesh(device.type, (ranks(),)), "bench bf16")
    draw_weights(model, device)
    torch.manual_seed(rank())  # of batches
    return model.train()


def batch(longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (4, longest), and a mask that is 0 for padding, at most half of each sequence."""
    lengths = [longest, *(random.Random(longest).randint(longest // 2, longest) for _ in range(SEQUENCES - 1))]
    places = torch.arange(longest, device=device, dtype=torch.int64)
    mask = places < torch.tensor(lengths, device=device, dtype=torch.int64)[:, None]
    return torch.randint(VOCABULARY, mask.shape, device=device, dtype=torch.int64), mask.long()


def milliseconds(model: Any, lengths: list[int]) -> float:
    """Mean ms of a step over these lengths. Collective."""
    batches = [batch(length, model.device) for length in lengths]

    def steps() -> None:
        for ids, mask in batches:
            model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)

    return 1e3 * seconds(steps) / len(lengths)


def measure(device: torch.device) -> list[dict[str, Any]]:
    """A row for each kind of experts and lengths. Collective."""
    model = make_model(device)
    pool = random.Random(0).sample(range(LEAST, MOST + 1), 4 * STEPS)
    by_rank = random.Random(rank() + 1).sample(pool[STEPS:], STEPS)
    drawn = {"alike": pool[:STEPS], "by rank": by_rank, "fixed": [FIXED] * STEPS}
    rows: list[dict[str, Any]] = []
    plain, added = dict[str, float](), dict[tuple[str, str, str], float]()
    for experts in EXPERTS:
        model.config._experts_implementation = f"bench {experts}"
        milliseconds(model, [*pool, FIXED] if experts == NONE else [MOST] * 4)
        for lengths, drawn_here in drawn.items():
            if lengths == "fixed":
                milliseconds(model, drawn_here[:4])
            tokens = sum(all_gather(SEQUENCES * sum(drawn_here)))
            for when in ("again",) if experts == NONE or lengths == "fixed" else ("never before", "again"):
                ms = milliseconds(model, drawn_here)
                added[experts, lengths, when] = (ms - plain.setdefault(lengths, ms)) / tokens
                rows.append({"experts": experts, "lengths": lengths, "when": when, "ms": ms})
                rows[-1]["tokens/s"] = tokens / STEPS / ms * 1e3
        if experts not in (NONE, BASELINE):
            check(model)
    for row in (row for row in rows if row["experts"] != NONE):
        fixed = added[row["experts"], "fixed", "again"]
        row["of fixed"] = added[row["experts"], row["lengths"], row["when"]] / fixed
    return rows


if __name__ == "__main__":
    run(measure)
