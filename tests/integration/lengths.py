"""What lengths that change cost in a transformers model: ms a step of Qwen3-MoE's sizes, eight layers, on one GPU.

    PYTHONPATH=$(ls -d packages/*/src integration/src | tr '\n' ':') python tests/integration/lengths.py [FILE.json]

Four sequences a step, padded to their longest, forward + backward without an optimizer, vocabulary 32,000, 1700 tokens
a sequence or a number drawn from 850 to 1700. A row is what experts cost a token: (a step - the same step of a model of
one expert of no size) / tokens, in us, with lengths that change and with one. "first": 30 lengths of which nothing is
known, kernels compiled; "again": the median of three times these.
"""

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
import transformers
import triton
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import mxep.integration.transformers  # noqa: F401
from mxep.runtime.replay import no_replays

SEQUENCES, LEAST, MOST, STEPS, LAYERS = 4, 850, 1700, 30, 8


def make_model(experts: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}
    config = Qwen3MoeConfig(**sizes, head_dim=128, router_aux_loss_coef=0.0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=experts if experts != "none" else "eager"
        )
    if experts == "none":
        for layer in model.model.layers:
            layer.mlp = Nothing()
    return model


class Nothing(nn.Module):
    """In place of a layer's experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Case:
    def __init__(self, experts: str) -> None:
        self.model = make_model(experts)

    def step(self, length: int) -> None:
        ids = torch.randint(0, 32000, (SEQUENCES, length), device="cuda")
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.model.zero_grad(set_to_none=True)

    def each(self, lengths: Sequence[int]) -> float:
        """ms of a step, where these follow each other."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for length in lengths:
            self.step(length)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / len(lengths)


def main() -> None:
    drawn = random.Random(0).sample(range(LEAST, MOST + 1), STEPS)
    found: dict[str, dict[str, float]] = {}
    for experts in ("none", "mxep_mxfp8", "mxep_bf16"):
        case = Case(experts)
        with no_replays():
            case.each(drawn)
        found[experts] = {"first": case.each(drawn)}
        for _ in range(2):  # the second records, the third plays
            case.each(drawn)
        found[experts]["again"] = statistics.median(case.each(drawn) for _ in range(3))
        with no_replays():
            found[experts]["without records"] = statistics.median(case.each(drawn) for _ in range(3))
        case.each([MOST] * 4)
        found[experts]["fixed"] = statistics.median(case.each([MOST] * STEPS) for _ in range(3))
        print(experts, {name: round(ms, 2) for name, ms in found[experts].items()}, flush=True)
        del case
        torch.cuda.empty_cache()
    tokens = {"fixed": SEQUENCES * MOST} | dict.fromkeys(
        ("first", "again", "without records"), SEQUENCES * sum(drawn) / STEPS
    )
    rows = []
    for experts in ("mxep_mxfp8", "mxep_bf16"):
        of, none = found[experts], found["none"]
        us = {
            name: round(1e3 * (of[name] - none["again" if name != "fixed" else name]) / tokens[name], 3) for name in of
        }
        rows.append({"experts": experts, "step ms": of, "of experts, us a token": us})
        print(rows[-1], flush=True)
    if len(sys.argv) > 1:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        about |= {"transformers": transformers.__version__, "commit": commit, "rows": rows, "no experts": found["none"]}
        about["command"] = "python tests/integration/lengths.py"
        with contextlib.closing(open(sys.argv[1], "w")) as file:
            json.dump(about, file, indent=1)


if __name__ == "__main__":
    main()
