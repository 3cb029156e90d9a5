"""What lengths that never come twice cost: ms a step (forward + backward), of one layer or of a transformers model.

    python integration/benchmarks/lengths.py layer [FILE.json]
    torchrun --nproc-per-node 2 integration/benchmarks/lengths.py layer [FILE.json]
    python integration/benchmarks/lengths.py model [FILE.json]                       one GPU

layer: D 2048, F 768, 64 experts, top-8, T drawn from 512 to 4096; over several GPUs each rank draws lengths of its own
and `max_tokens` is 4096. Times are rank 0's. "called", "recorded", "first play", "second play": steps of a length whose
room is new, one after the other, each with the device idle before it: medians over rooms. Then what a step takes where
100 lengths follow each other: "without records"; "never before", in a layer of which nothing is known; "others, never
before"; "these again", the median of three times.

model: Qwen3-MoE's sizes, eight layers. Four sequences a step, padded to their longest, without an optimizer, vocabulary
32,000, 1700 tokens a sequence or a number drawn from 850 to 1700. A row is what experts cost a token: (a step - the
same step of a model without experts) / tokens, in us. "first": 30 lengths of which nothing is known, kernels compiled;
"again": the median of three times these.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import nn

from mxep.ep import MoE
from mxep.runtime.lengths import room_for
from mxep.runtime.replay import no_replays

LENGTHS, LEAST, MOST = 100, 512, 4096
SEQUENCES, MODEL_LEAST, MODEL_MOST, STEPS, LAYERS = 4, 850, 1700, 30, 8
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def milliseconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    if RANKS > 1:
        dist.barrier()
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


class Case:
    """Something of which nothing is known yet, and its steps."""

    def step(self, length: int) -> None:
        raise NotImplementedError

    def each(self, lengths: Sequence[int]) -> float:
        """Of a step, where these follow each other."""
        return milliseconds(lambda: [self.step(length) for length in lengths]) / len(lengths)


class LayerCase(Case):
    def __init__(self, recipe: str) -> None:
        torch.manual_seed(0)
        where: dict[str, Any] = {"dispatcher": "local"}
        if RANKS > 1:
            where = {"group": dist.group.WORLD, "max_tokens": MOST}
        self.layer = MoE(2048, 768, 64, 8, recipe=recipe, device="cuda", **where)

    def step(self, length: int) -> None:
        x = torch.randn(length, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.layer(x).backward(x.detach())
        self.layer.zero_grad(set_to_none=True)


class ModelCase(Case):
    def __init__(self, experts: str) -> None:
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        import mxep.integration.transformers  # noqa: F401

        torch.manual_seed(0)
        sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8}
        sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}
        config = Qwen3MoeConfig(**sizes, head_dim=128, router_aux_loss_coef=0.0)
        how = {"dtype": torch.bfloat16, "experts_implementation": experts if experts != "none" else "eager"}
        with torch.device("cuda"):
            self.model = AutoModelForCausalLM.from_config(config, **how)
        if experts == "none":
            for layer in self.model.model.layers:
                layer.mlp = nn.Identity()

    def step(self, length: int) -> None:
        ids = torch.randint(0, 32000, (SEQUENCES, length), device="cuda")
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.model.zero_grad(set_to_none=True)


def measure_layer(recipe: str) -> dict[str, float]:
    drawn = random.Random(RANK).sample(range(LEAST, MOST + 1), 2 * LENGTHS)
    drawn, others = drawn[:LENGTHS], drawn[LENGTHS:]
    case, found = LayerCase(recipe), {}
    with no_replays():
        case.each(drawn)  # kernels compile
        found["without records"] = statistics.median(case.each(others) for _ in range(3))
    rooms = sorted({room_for(tokens) for tokens in range(LEAST, MOST + 1)})
    random.Random(1).shuffle(rooms)
    times = [[milliseconds(lambda tokens=tokens: case.step(tokens)) for _ in range(4)] for tokens in rooms]  # type: ignore[misc]
    found |= dict(zip(("called", "recorded", "first play", "second play"), map(statistics.median, zip(*times))))
    case = LayerCase(recipe)
    found["never before"] = case.each(drawn)
    found["others, never before"] = case.each(others)
    found["these again"] = statistics.median(case.each(others) for _ in range(3))
    found["rooms"] = len(rooms)
    found["replays"] = sum(each.replays for each in case.layer.dispatcher.passes.values())
    return found


def measure_model(experts: str) -> dict[str, float]:
    drawn = random.Random(0).sample(range(MODEL_LEAST, MODEL_MOST + 1), STEPS)
    case = ModelCase(experts)
    with no_replays():
        case.each(drawn)
    found = {"first": case.each(drawn)}
    for _ in range(2):  # the second records, the third plays
        case.each(drawn)
    found["again"] = statistics.median(case.each(drawn) for _ in range(3))
    with no_replays():
        found["without records"] = statistics.median(case.each(drawn) for _ in range(3))
    case.each([MODEL_MOST] * 4)
    found["fixed"] = statistics.median(case.each([MODEL_MOST] * STEPS) for _ in range(3))
    print(experts, {name: round(ms, 2) for name, ms in found.items()}, flush=True)
    mean = SEQUENCES * sum(drawn) / STEPS
    return found | {"tokens": mean}


def of_layer() -> dict[str, Any]:
    if RANKS > 1:
        torch.cuda.set_device(RANK)
        dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    rows = [{"recipe": recipe} | measure_layer(recipe) for recipe in ("mxfp8", "bf16")]
    rows = [{name: round(ms, 3) if isinstance(ms, float) else ms for name, ms in row.items()} for row in rows]
    if RANKS > 1:
        dist.destroy_process_group()
    return {"ranks": RANKS, "rows": rows}


def of_model() -> dict[str, Any]:
    import transformers

    none, *others = (measure_model(experts) for experts in ("none", "mxep_mxfp8", "mxep_bf16"))
    rows = []
    for experts, found in zip(("mxep_mxfp8", "mxep_bf16"), others):
        us, mean = {}, found.pop("tokens")
        for name, ms in found.items():
            of_none, tokens = (none["fixed"], SEQUENCES * MODEL_MOST) if name == "fixed" else (none["again"], mean)
            us[name] = round(1e3 * (ms - of_none) / tokens, 3)
        rows.append({"experts": experts, "step ms": found, "of experts, us a token": us})
    none.pop("tokens")
    return {"transformers": transformers.__version__, "rows": rows, "no experts": none}


def main() -> None:
    kind, *files = sys.argv[1:]
    found = {"layer": of_layer, "model": of_model}[kind]()
    if RANK == 0:
        print(*found["rows"], sep="\n", flush=True)
    if files and RANK == 0:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        start = f"torchrun --nproc-per-node {RANKS}" if RANKS > 1 else "python"
        about |= {"commit": commit, "command": f"{start} integration/benchmarks/lengths.py {kind}"}
        Path(files[0]).write_text(json.dumps(about | found, indent=1))


if __name__ == "__main__":
    main()
