"""LoRA of a whole model on one GPU, over experts that stay quantized: tokens/s and memory.

    python integration/benchmarks/lora_model.py --model qwen3-30b --kinds mxfp8 mxfp4 --layers 48 --out FILE.json
    python integration/benchmarks/lora_model.py --model qwen3-30b --kinds mxfp8 mxep_bf16 grouped_mm --layers 12

Random weights of a published config. LoRA (PEFT, rank 16) on attention and on all experts, gradient checkpointing,
AdamW on the adapters, one batch of --tokens in sequences of --length. For all kinds, head and loss are computed in
chunks of rows (`optimize`), and norms and RoPE are transformers' own, eager.

- `mxfp8`, `mxfp4`, `fp8_block`, `fp8_row`: Frozen experts, quantized one by one as they are made.
- `mxep_bf16`: Experts in bf16, computed by mxep, LoRA by its low-rank GEMMs.
- `grouped_mm`: transformers' grouped_mm experts in bf16, LoRA by PEFT, which adds B A to the weights.

model GiB    after loading, adapters included
peak GiB     most memory of a step
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

import mxep.integration.transformers  # registers names, and LoRA on experts
from benchmarks.model import QWEN3
from benchmarks.script import GIB, free_memory, print_and_save, seconds
from mxep.ep.frozen import register_frozen
from mxep.gemm import FrozenWeight, freeze
from mxep.gemm.frozen import FORMATS, FrozenFormat
from mxep.integration.report import Row
from mxep.integration.transformers.experts import is_experts, weight_names
from mxep.integration.transformers.quantized import keep_names, strip

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-30b": (Qwen3MoeConfig, QWEN3),
    "gpt-oss-120b": (
        GptOssConfig,
        {"hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8}
        | {"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880}
        | {"vocab_size": 201088},
    ),
}


def normal(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)


def frozen(experts: int, n: int, k: int, fmt: FrozenFormat, device: torch.device) -> FrozenWeight:
    """Random (experts, n, k), frozen expert after expert."""
    each = [freeze(normal(1, n, k, device=device), fmt).parts for _ in range(experts)]
    return FrozenWeight(*map(torch.cat, zip(*each)))


def build(config: Any, kind: str, device: torch.device) -> Any:
    """The model on the device. Experts are frozen if the kind is a format."""
    attention = "sdpa" if "qwen" in config.model_type else "eager"
    how = {"attn_implementation": attention, "experts_implementation": "mxep_mxfp8" if kind in FORMATS else kind}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **how)
    for experts in [module for module in model.modules() if is_experts(module)] if kind in FORMATS else []:
        weights = {}
        for name in weight_names(experts):
            e, *sizes = getattr(experts, name).shape
            n, k = reversed(sizes) if experts.is_transposed else sizes
            weights[name] = frozen(e, n, k, kind, device)  # type: ignore[arg-type]
        strip(experts)
        for name, weight in weights.items():
            register_frozen(experts, name, weight, None)
    if kind in FORMATS:
        keep_names(model)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                value = normal(*p.shape, device=device) if p.dim() > 1 else torch.ones_like(p, device=device)
                module._parameters[name] = nn.Parameter(value.zero_() if "bias" in name else value)
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not in the state
    return model


def adapted(model: Any, rank: int) -> Any:
    """The model with LoRA on attention and experts, checkpointed."""
    mxep.integration.transformers.optimize(model, experts=None, attention=None, compile=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    experts = [f"mlp.experts.{each}" for each in ("gate_up_proj", "down_proj")]
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
    how = {"r": rank, "lora_alpha": 2 * rank, "target_modules": linears, "target_parameters": experts}
    return peft.get_peft_model(model, peft.LoraConfig(**how, task_type="CAUSAL_LM"))


def measure(config: Any, kind: str, args: argparse.Namespace, device: torch.device) -> Row:
    torch.manual_seed(0)
    began, cuda = time.perf_counter(), device.type == "cuda"
    model = adapted(build(config, kind, device), args.rank).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(config.vocab_size, (args.tokens // args.length, args.length), device=device)
    row: Row = {"kind": kind, "layers": config.num_hidden_layers, "tokens": args.tokens}
    row["trained, million"] = sum(p.numel() for p in trained) / 1e6
    if cuda:
        free_memory()
        row["model GiB"] = torch.cuda.memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    times = [seconds(step) for _ in range(args.warmup + args.steps)]
    taken = statistics.median(times[args.warmup :])
    row |= {"ms": 1e3 * taken, "tokens/s": args.tokens / taken, "losses": [losses[0], losses[-1]]}
    return row | {
        "seconds in all": time.perf_counter() - began,
        **({"peak GiB": torch.cuda.max_memory_allocated() / GIB} if cuda else {}),
    }


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--kinds", nargs="+", default=["mxfp8"], choices=[*FORMATS, "mxep_bf16", "grouped_mm"])
    parser.add_argument("--layers", type=int, help="default all")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--length", type=int, default=4096, help="of a sequence")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--sizes", type=json.loads, default={}, help="JSON that replaces sizes of the config")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def measure_all(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = args.sizes | ({} if args.layers is None else {"num_hidden_layers": args.layers})
    config_class, own = MODELS[args.model]
    config = config_class(**own | {"use_cache": False} | sizes)
    for kind in args.kinds:
        try:
            yield measure(config, kind, args, device)
        except torch.OutOfMemoryError as error:
            yield {"kind": kind, "layers": config.num_hidden_layers, "error": str(error).partition("\n")[0]}
        free_memory()


def main(given: list[str] | None = None) -> list[Row]:
    args = arguments(given)
    return print_and_save(measure_all(args), args.out, model=args.model)


if __name__ == "__main__":
    main()
