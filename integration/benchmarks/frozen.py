"""Frozen quantized experts on one GPU: forward + gradient of x, and the cost of expanding their weights.

    python integration/benchmarks/frozen.py [FILE.json]

A layer with all its experts on one GPU and fixed, balanced routing, as a LoRA fine-tune runs it: no weight gradients.

- "grouped_mm" is `baseline.py`, "bf16" is `run_experts` with the same weights.
- "mxfp8", "mxfp4", "fp8_block" and "fp8_row" are `run_experts` with weights frozen in that format, recipe mxfp8.
- "+ lora" adds LoRA of rank 16 on both weights, and its gradients.
- "GEMMs" is microseconds of gate_up_proj's forward and dgrad alone, with quantized rows and expanded weights.
- "expand" is microseconds of one expansion of gate_up_proj, and its speed / that of a copy of as many bytes.

Calls are launched by the host. Times are medians of five stretches.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.baseline import BaselineLayer
from benchmarks.script import free_memory, gradients, save
from benchmarks.timer import Alternative, Call, Timer
from mxep.ep import run_experts
from mxep.ep.dispatchers import LocalDispatcher
from mxep.ep.lora import LoRAWeights
from mxep.gemm import Recipe, freeze
from mxep.gemm.backends import BACKENDS
from mxep.integration.metrics import snr
from mxep.integration.results import shortened
from mxep.quant import quantize

RANK = 16
SHAPES = {  # D, F, experts, top-k, tokens
    "qwen3-30b, 2048 rows": (2048, 768, 128, 8, 32768),
    "qwen3-30b, 512 rows": (2048, 768, 128, 8, 8192),
    "qwen3-235b/8, 2048 rows": (4096, 1536, 16, 8, 4096),
    "qwen3-235b/8, 512 rows": (4096, 1536, 16, 8, 1024),
    "gpt-oss-20b, 512 rows": (2880, 2880, 32, 4, 4096),
}
FROZEN = ("mxfp8", "mxfp4", "fp8_block", "fp8_row")
HOPPER = BACKENDS["hopper"]


def microseconds(calls: Mapping[str, Call]) -> dict[str, float]:
    timer = Timer(torch.device("cuda"), seconds=0.05, rounds=5)
    rows = timer.compare({name: Alternative(lambda call=call: [call], graph=False) for name, call in calls.items()})  # type: ignore[misc]
    return {name: row["us"] for name, row in rows.items()}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def layer(kind: str, gate_up: Any, down: Any, lora: LoRAWeights | None = None) -> Callable[..., Tensor]:
    """A function of x, ids and weights."""
    if kind == "grouped_mm":
        return BaselineLayer(gate_up, down)
    recipe = Recipe.bf16() if kind == "bf16" else Recipe.mxfp8()
    how: dict[str, Any] = {"dispatcher": LocalDispatcher(gate_up.shape[0]), "recipe": recipe, "lora": lora}
    return lambda x, ids, weights: run_experts(x, ids, weights, gate_up, down, **how)[0]


def join_lora(gate_up: Tensor, down: Tensor) -> LoRAWeights:
    """Random LoRA weights of rank 16 for both projections."""
    (experts, wide, dim), hidden = gate_up.shape, down.shape[2]
    shapes = (experts, RANK, dim), (experts, wide, RANK), (experts, RANK, hidden), (experts, dim, RANK)
    made = [(normal(*shape) * 0.02).requires_grad_() for shape in shapes]
    return LoRAWeights(made[0], made[1], made[2], made[3], 1.0)


def measure() -> Iterator[dict[str, Any]]:
    """Yield a row for each shape."""
    for name in SHAPES:
        yield {"shape": name} | layers_at(name)
        free_memory()


def layers_at(name: str) -> dict[str, Any]:
    dim, hidden, experts, top_k, tokens = SHAPES[name]
    torch.manual_seed(0)
    gate_up = normal(experts, 2 * hidden, dim) * dim**-0.5
    down = normal(experts, dim, hidden) * hidden**-0.5
    ids = torch.arange(tokens * top_k, device="cuda", dtype=torch.int32).remainder_(experts).view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device="cuda", dtype=torch.float32)
    x = normal(tokens, dim).requires_grad_()
    d_out, lora = torch.randn_like(x), join_lora(gate_up, down)
    pairs: dict[str, Any] = {"grouped_mm": (gate_up, down), "bf16": (gate_up, down)}
    pairs |= {fmt: (freeze(gate_up, fmt), freeze(down, fmt)) for fmt in FROZEN}  # type: ignore[arg-type]
    steps: dict[str, Call] = {}

    def gradient(call: Callable[..., Tensor], *adapters: Tensor) -> Tensor:
        dx: Tensor = gradients(call(x, ids, weights), [x, *adapters], d_out)[0]
        return dx

    for kind, pair in pairs.items():
        steps[kind] = functools.partial(gradient, layer(kind, pair[0], pair[1]))
        if kind in FROZEN:
            steps[f"{kind} + lora"] = functools.partial(gradient, layer(kind, pair[0], pair[1], lora), *lora.tensors)
    reference = steps["grouped_mm"]()
    found: dict[str, Any] = {f"{kind} dx dB": snr(reference, steps[kind]()) for kind in ("bf16", *FROZEN)}
    times = microseconds(steps)
    found |= {f"{kind} ms": us / 1e3 for kind, us in times.items()}
    found |= {f"{kind} x grouped_mm": times["grouped_mm"] / times[kind] for kind in ("bf16", *FROZEN)}
    with torch.no_grad():
        return found | {"GEMMs us": gemms(pairs, len(ids.flatten()))} | expansions(pairs)


def gemms(pairs: dict[str, Any], rows: int) -> dict[str, float]:
    experts, wide, dim = pairs["bf16"][0].shape
    a, dy = (quantize(normal(rows, width), block_size=None) for width in (dim, wide))
    offs = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32).mul_(rows // experts)
    calls: dict[str, Call] = {}
    for fmt in ("mxfp8", "fp8_block", "fp8_row"):
        w, w_t = HOPPER.expand_rowwise(pairs[fmt][0]), HOPPER.expand_colwise(pairs[fmt][0])
        out: dict[str, Any] = {"out_dtype": torch.bfloat16}
        calls[f"{fmt} forward"] = functools.partial(HOPPER.forward, a, w, offs, bias=None, **out)
        calls[f"{fmt} dgrad"] = functools.partial(HOPPER.dgrad, dy, w_t, offs, **out)
    return microseconds(calls)


def expansions(pairs: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    elements = pairs["bf16"][0].numel()
    for fmt in FROZEN:
        w = pairs[fmt][0]
        moved = elements + w.qdata.numel() + (w.scale.numel() if fmt == "mxfp4" else 0)
        source, target = torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda")
        ways = {"rowwise": HOPPER.expand_rowwise} if fmt == "mxfp4" else {}  # others are stored row-wise
        for way, expand in (ways | {"colwise": HOPPER.expand_colwise}).items():
            calls = {"expand": functools.partial(expand, w), "copy": functools.partial(target.copy_, source)}
            us = microseconds(calls)
            found[f"{fmt} expand {way} us"] = us["expand"]
            found[f"{fmt} expand {way} of copy"] = us["copy"] / us["expand"]
    return found


if __name__ == "__main__":
    rows = []
    for row in measure():
        rows.append(shortened(row))
        print(json.dumps(rows[-1]), flush=True)
        save(next(iter(sys.argv[1:]), None), rows)
