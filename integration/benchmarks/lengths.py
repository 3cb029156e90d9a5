"""Cost of sequence lengths that never repeat: ms per step (forward + backward) of a layer, or of a whole model.

    python integration/benchmarks/lengths.py [FILE.json]                              a layer on one GPU
    torchrun --nproc-per-node 2 integration/benchmarks/lengths.py [FILE.json]         a model on several

The layer: MXFP8, D 2048, F 768, 64 experts, top-8, T drawn from 512 to 4096.

- "called", "recorded", "first play", "second play": the first four steps of a length, with the device idle before
  each. Medians over lengths.

The others are ms per step over 100 lengths in a row:

- "without records": replays are off. Median of three times.
- "never before": the first 100 lengths of a new layer.
- "others, never before": 100 other lengths, right after.
- "these again": the same other lengths once more. Median of three times.

The model: Qwen3-30B's sizes with 8 layers and a vocabulary of 32,000, as transformers makes it: eager, SDPA, bf16, no
optimizer. Batches are padded to the longest sequence, and padding is counted as tokens. Experts are spread over all
ranks, and the rest is replicated.

Experts: "none" return their input, "baseline" is baseline.BaselineLayer, and the others are mxep's recipes.
Lengths: "fixed" is the mean. "never before" are 30 steps of different lengths that the experts have not seen, and
"again" repeats them. "alike": all ranks have the same length. "by rank": each draws its own, so all wait for the
longest. Experts "none" run each of the 120 lengths first, because torch itself takes 0.1 s for a new one.

ms             mean of 30 steps, slowest rank
tokens/s       of all ranks
of fixed       ms per token that the experts add / the same at the fixed length
"""

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.model import QWEN3, draw_weights, register_experts
from benchmarks.script import rank, ranks, run, seconds
from mxep.comms import Capacity
from mxep.ep import MoE
from mxep.integration.mesh import all_gather
from mxep.integration.report import Row
from mxep.integration.transformers import check, expert_parallel
from mxep.runtime.lengths import room_for
from mxep.runtime.replay import no_replays

T = TypeVar("T")


def milliseconds(step: Callable[[T], object], given: Sequence[T]) -> float:
    """Mean ms of a step. given: what each step gets. Collective."""

    def steps() -> None:
        for each in given:
            step(each)

    return 1e3 * seconds(steps) / len(given)


class Layer:
    """A new layer, without records, and its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = MoE(2048, 768, 64, 8, recipe="mxfp8", device="cuda", dispatcher="local")

    def step(self, length: int) -> None:
        x = torch.randn(length, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.layer(x).backward(x.detach())
        self.layer.zero_grad(set_to_none=True)

    def milliseconds(self, lengths: Sequence[int]) -> float:
        return milliseconds(self.step, lengths)


def measure_layer(count: int = 100, least: int = 512, most: int = 4096) -> Row:
    drawn = random.Random(0).sample(range(least, most + 1), 2 * count)
    drawn, others = drawn[:count], drawn[count:]
    layer = Layer()
    with no_replays():
        layer.milliseconds(drawn)  # kernels compile
        row: Row = {"without records": statistics.median(layer.milliseconds(others) for _ in range(3))}
    rooms = sorted({room_for(tokens) for tokens in range(least, most + 1)})
    random.Random(1).shuffle(rooms)
    times = [[layer.milliseconds([tokens]) for _ in range(4)] for tokens in rooms]
    row |= zip(("called", "recorded", "first play", "second play"), map(statistics.median, zip(*times)))
    layer = Layer()
    row |= {"never before": layer.milliseconds(drawn), "others, never before": layer.milliseconds(others)}
    row["these again"] = statistics.median(layer.milliseconds(others) for _ in range(3))
    return row | {"rooms": len(rooms)}


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


def make_batch(longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (4, longest), and a mask that is 0 for padding, at most half of each sequence."""
    lengths = [longest, *(random.Random(longest).randint(longest // 2, longest) for _ in range(SEQUENCES - 1))]
    places = torch.arange(longest, device=device, dtype=torch.int64)
    mask = places < torch.tensor(lengths, device=device, dtype=torch.int64)[:, None]
    return torch.randint(VOCABULARY, mask.shape, device=device, dtype=torch.int64), mask.long()


def measure_model(device: torch.device) -> list[Row]:
    """A row for each kind of experts and lengths. Collective."""
    model = make_model(device)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        ids, mask = batch
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    def timed(lengths: Sequence[int]) -> float:
        return milliseconds(step, [make_batch(length, device) for length in lengths])

    pool = random.Random(0).sample(range(LEAST, MOST + 1), 4 * STEPS)
    by_rank = random.Random(rank() + 1).sample(pool[STEPS:], STEPS)
    drawn = {"alike": pool[:STEPS], "by rank": by_rank, "fixed": [FIXED] * STEPS}
    rows: list[Row] = []
    plain, added = dict[str, float](), dict[tuple[str, str, str], float]()
    for experts in EXPERTS:
        model.config._experts_implementation = f"bench {experts}"
        timed([*pool, FIXED] if experts == NONE else [MOST] * 4)
        for lengths, drawn_here in drawn.items():
            if lengths == "fixed":
                timed(drawn_here[:4])
            tokens = sum(all_gather(SEQUENCES * sum(drawn_here)))
            for when in ("again",) if experts == NONE or lengths == "fixed" else ("never before", "again"):
                ms = timed(drawn_here)
                added[experts, lengths, when] = (ms - plain.setdefault(lengths, ms)) / tokens
                rows.append({"experts": experts, "lengths": lengths, "when": when, "ms": ms})
                rows[-1]["tokens/s"] = tokens / STEPS / ms * 1e3
        if experts not in (NONE, BASELINE):
            check(model)
    for row in (row for row in rows if row["experts"] != NONE):
        fixed = added[row["experts"], "fixed", "again"]
        row["of fixed"] = added[row["experts"], row["lengths"], row["when"]] / fixed
    return rows


def measure(device: torch.device) -> Iterator[Row]:
    yield from measure_model(device) if ranks() > 1 else [measure_layer()]


if __name__ == "__main__":
    run(measure)
