"""A whole training step of Qwen3-30B-A3B cut to N layers: micro-batches, clipping, AdamW; NVIDIA's count of FLOPs.

    python integration/benchmarks/step.py --layers 4 8 --kinds baseline "mxep_mxfp8 + optimize" --out FILE.json
    torchrun --nproc-per-node 2 integration/benchmarks/step.py --layers 8 16 --out FILE.json

A kind names the experts, `baseline` (baseline.BaselineLayer), `mxep_RECIPE` or, on one GPU, `transformers` (its
grouped_mm), and changes to the rest of the model:

    + optimize    mxep.integration.transformers.optimize: loss in chunks, causal SDPA, decoder layers compiled
    + linears     attention's projections in MXFP8 too (with + optimize)

Without "+ optimize" the model is as transformers makes it. Parameters are bf16. On several GPUs experts are spread over
all ranks (EP), and the rest is sharded by FSDP2 and gathered once a step. BaselineLayer reads sizes on the host there,
so with it "+ optimize" compiles only attention and norms.

Weights are random. `--routing forced` gives every expert equally many tokens, as Megatron's
--moe-router-force-load-balancing does. Labels are the ids.

ms            a step: median
TFLOP/s       of a GPU, model FLOPs as Megatron-LM counts them (mxep.integration.flops)
peak GiB      most memory of a rank, states included
most of mean  rows of the busiest GPU / mean, by layer
shares        of a step: kernels of one profiled step, by name and by the autograd node that launched them, over `ms`;
              `idle`: what is left of `ms`. Overlapping kernels each count in full
t(48)         t(N2) + (48 - N2) (t(N2) - t(N1)) / (N2 - N1), for two numbers of layers; the optimizer is scaled with it

8 layers fit one GPU of 80 GB, and 16 fit two. With fp32 moments it is 6 and 12.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.baseline import BaselineLayer
from benchmarks.script import GIB, busy, free_memory, rank, ranks, save, seconds, started_ranks, synchronize
from mxep.comms import Capacity
from mxep.ep import accumulate_in_place, clip_grad_norm_, parameter_groups
from mxep.ep.dtensors import local_tensor, local_weight
from mxep.gemm import Recipe, quantize_after_step, quantize_weights_once
from mxep.integration.flops import count_name, flops_per_token
from mxep.integration.mesh import all_gather
from mxep.integration.transformers import Implementation, check, expert_parallel, optimize, register
from mxep.integration.transformers.experts import ALL_EXPERTS_FUNCTIONS, layers

CAPACITY = 2.0  # times the balanced load of a rank
KINDS = (
    "baseline",
    "baseline + optimize",
    "transformers + optimize",
    "mxep_bf16",
    "mxep_mxfp8",
    "mxep_bf16 + optimize",
)
KINDS += ("mxep_mxfp8 + optimize", "mxep_mxfp8 + optimize + linears")
SIZES: dict[str, dict[str, int]] = {
    "qwen3": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
              "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
             "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512},
}  # fmt: skip
SHARES = {
    "optimizer, clip, accumulation": r"Optimizer\.step|AccumulateGrad|\bclip\b|adamw|multi_tensor",
    "communication": r"nccl|^(dispatch(_tables)?|combine|barrier|put|meet|sum_arrived|stage_sums|read_tables)_kernel",
    "attention": r"flash|fmha|sdpa|cudnn.*attention|ScaledDotProduct|attention_",
    "head and loss": r"head and loss|LinearCrossEntropy|NllLoss|LogSoftmax|nll_loss|log_softmax",
    "experts GEMM": r"^grouped_(mm|wgrad)_kernel|[Gg]rouped_?[Mm]m|GroupedGemm|GroupProblem",
    "experts other": r"^(?!triton_)\w+_kernel$|mxep::|BaselineLayer|_Spread|_Take|_Weigh|experts other",
    "linears": r"gemm|nvjet|cutlass|xmma|MmBackward|aten::mm|aten::linear",
}
"""Share of a step -> patterns in the names of its kernels, or of the autograd nodes that launched them. The first match
counts. MXFP8 linears run the experts' GEMM kernels and count there. An eager head's GEMMs count as linears."""
REST = "norms, element-wise"


def baseline_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts' forward by the baseline, a layer that the module keeps."""
    w13, w2 = local_weight(experts.gate_up_proj), local_weight(experts.down_proj)
    layer = experts.__dict__.get("_baseline")
    if layer is None:
        group = dist.group.WORLD if len(w13) < experts.num_experts else None
        layer = experts.__dict__["_baseline"] = BaselineLayer(w13, w2, group=group)
    layer.w13, layer.w2 = w13, w2
    out: Tensor = layer(hidden_states, top_k_index.int(), top_k_weights.float())
    layer.w13 = layer.w2 = None  # which would keep a graph
    return out


def register_experts(recipes: Iterable[str], **limits: Any) -> None:
    """Register experts for transformers: `bench RECIPE`, `bench baseline`, and `bench none`, which do nothing."""
    for recipe in recipes:
        register(Implementation(f"bench {recipe}", Recipe.named(recipe), **limits))
    ALL_EXPERTS_FUNCTIONS.register("bench baseline", baseline_experts)
    ALL_EXPERTS_FUNCTIONS.register("bench none", lambda experts, hidden_states, *_: hidden_states)


def draw_weights(model: Any, device: torch.device, seed: int = 0, residual: float = 1.0) -> None:
    """Move a model from meta to the device, with random weights. Only experts' differ from rank to rank.

    residual: factor of the weights whose results are added to the residuals.
    """
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    shared, own = (torch.Generator(device).manual_seed(each) for each in (seed, 1000 * (seed + 1) + rank()))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            std = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
            std *= residual if "o_proj" in name or "down_proj" in name else 1.0
            local_tensor(weight).normal_(std=std, generator=own if ".experts." in name else shared)


class ForcedRouter(Qwen3MoeTopKRouter):
    """Gives all experts equally many tokens, spreads a token's experts evenly, and weights them as the router would."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        token, k = (torch.arange(n, device=logits.device, dtype=torch.int64) for n in (len(logits), self.top_k))
        ids = (token[:, None] + k * (self.num_experts // self.top_k)) % self.num_experts
        chosen = logits.float().softmax(-1).gather(1, ids)
        return logits, (chosen / chosen.sum(-1, keepdim=True)).to(logits.dtype), ids


class AdamWFP32(torch.optim.Optimizer):
    """AdamW of bf16 parameters with fp32 moments, one kernel per parameter. torch's has such moments for fp32 only."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            corrections = torch.tensor([1 - beta ** group["steps"] for beta in (0.9, 0.95)], dtype=torch.float32)
            for p in group["params"]:
                weight, grad = local_tensor(p).view(-1), local_tensor(p.grad).view(-1)
                if not (state := self.state[p]):
                    state["moments"] = torch.zeros(2, len(weight), dtype=torch.float32, device=weight.device)
                run, corrections = _compiled_adamw if weight.is_cuda else _adamw, corrections.to(weight.device)
                run(weight, grad, *state["moments"], corrections, group["lr"], group["weight_decay"])


def _adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, corrections: Tensor, lr: float, decay: float) -> None:
    grad = g.float()
    m.lerp_(grad, 0.1)
    v.lerp_(grad * grad, 0.05)
    update = m / corrections[0] / ((v / corrections[1]).sqrt() + 1e-8)
    w.copy_(w.float() * (1 - lr * decay) - lr * update)


_compiled_adamw = torch.compile(_adamw, dynamic=True)


class Subject:
    """A model of one kind, its optimizer and its batches."""

    def __init__(self, kind: str, depth: int, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        experts, *rest = kind.split(" + ")
        self.mxep = experts.startswith("mxep")
        recipe = experts.removeprefix("mxep_")
        self.config = Qwen3MoeConfig(
            **SIZES[args.sizes], num_hidden_layers=depth, norm_topk_prob=True, tie_word_embeddings=False,
            max_position_embeddings=args.length,
        )  # fmt: skip
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16, attn_implementation="sdpa")
        limits = {"capacity": Capacity.factor(CAPACITY)} if ranks() > 1 else {}
        register_experts({"bf16", recipe if self.mxep else "bf16"}, max_tokens=args.tokens, **limits)
        mesh = init_device_mesh(device.type, (ranks(),)) if ranks() > 1 else None
        if mesh:
            expert_parallel(model, mesh, f"bench {recipe if self.mxep else 'bf16'}")
        draw_weights(model, device)
        own = {weight for name, weight in model.named_parameters() if ".experts." in name}
        if args.routing == "forced":
            for layer in model.model.layers:
                layer.mlp.gate.__class__ = ForcedRouter
        model.config._experts_implementation = "grouped_mm" if experts == "transformers" else f"bench {recipe}"
        model.train()
        self.changed: dict[str, str] = {}
        if "optimize" in rest:
            whole = self.mxep or not mesh
            linears = "mxfp8" if "linears" in rest else None
            self.changed = optimize(model, experts=None, linears=linears, attention="causal", compile=whole)
            for layer in () if whole else model.model.layers:
                for part in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
                    part.forward = torch.compile(part.forward)
        if mesh:
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=own)
        self.model = model
        kwargs: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.1}
        if args.moments == "fp32":
            self.optimizer: torch.optim.Optimizer = AdamWFP32(parameter_groups(model), **kwargs)
        else:
            self.optimizer = torch.optim.AdamW(parameter_groups(model), fused=True, betas=(0.9, 0.95), **kwargs)
        self.once = quantize_after_step(self.optimizer) if self.mxep and args.after_step else None
        torch.manual_seed(rank())  # of batches
        shape = args.micro_batches, args.tokens // args.length, args.length
        self.ids = torch.randint(self.config.vocab_size, shape, device=device, dtype=torch.int64)

    def step(self) -> Tensor:
        """A whole step; the mean loss."""
        model, args = self.model, self.args
        items = args.micro_batches * args.tokens
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        with contextlib.ExitStack() as stack:
            if self.mxep:
                if self.once is None:
                    stack.enter_context(quantize_weights_once())
                if args.accumulate == "gemm":
                    stack.enter_context(accumulate_in_place())
            for i, ids in enumerate(self.ids):
                if ranks() > 1:
                    last = i == args.micro_batches - 1
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last)
                    model.set_is_last_backward(last)
                loss = model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=items).loss
                loss.backward()
                total += loss.detach()
        if self.mxep:
            check(model)
        with torch.profiler.record_function("clip"):
            clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    @torch.no_grad()
    def most_of_mean(self) -> list[float]:
        """The rows of the busiest GPU divided by the mean, by layer. Collective."""
        counts = torch.zeros(len(self.model.model.layers), ranks(), device=self.device, dtype=torch.float32)

        def count(i: int, _: Any, __: Any, routed: tuple[Tensor, Tensor, Tensor]) -> None:
            counts[i] = (routed[2].flatten() // (self.config.num_experts // ranks())).bincount(minlength=ranks())

        gates = [layer.mlp.gate for layer in self.model.model.layers]
        hooks = [gate.register_forward_hook(functools.partial(count, i)) for i, gate in enumerate(gates)]
        with torch.compiler.set_stance("force_eager"):
            self.model(input_ids=self.ids[0], use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        if ranks() > 1:
            dist.all_reduce(counts)
        return [round(float(c.max() / c.mean()), 3) for c in counts]

    def close(self) -> None:
        for _, layer in layers(self.model):
            layer.dispatcher.close()
        if self.once is not None:
            self.once.close()


def measure(kind: str, depth: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Figures of a kind. Collective."""
    began = time.perf_counter()
    subject = Subject(kind, depth, args, device)
    try:
        losses = [float(subject.step()) for _ in range(args.warm_up)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        ready = time.perf_counter() - began
        while len(times) < 3 or (sum(times) < args.seconds and len(times) < 100):
            times.append(seconds(subject.step))
        ms, tokens = 1e3 * statistics.median(times), args.micro_batches * args.tokens
        flops = sum(flops_per_token(subject.config, args.length).values())
        row: dict[str, Any] = {"kind": kind, "layers": depth, "ranks": ranks(), "ms": round(ms, 2)}
        row |= {"min ms": round(1e3 * min(times), 2), "max ms": round(1e3 * max(times), 2), "steps": len(times)}
        row |= {"tokens/s a GPU": round(tokens / ms * 1e3, 1), "TFLOP/s a GPU": round(tokens * flops / ms / 1e9, 1)}
        row |= {"count": count_name(subject.config, args.length), "losses": losses, "optimize": subject.changed}
        if device.type == "cuda":
            row["peak GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            row["allocator retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        row["seconds until timed"] = round(ready, 1)
        if args.profile:
            row["shares"] = shares(subject.step, ms)
        row["most of mean"] = subject.most_of_mean()
        return row
    finally:
        subject.close()


def shares(step: Callable[[], object], ms: float) -> dict[str, Any]:
    """Shares by part of a step that takes `ms` without a profiler. Collective."""
    seconds(step)
    with torch.profiler.profile() as profile:
        step()
        synchronize()
    kernels = [
        event
        for event in profile.events()
        if event.device_type != torch.autograd.DeviceType.CPU and not getattr(event, "is_user_annotation", False)
    ]
    found = dict.fromkeys((*SHARES, REST), 0.0)  # us
    left = collections.Counter[str]()
    for kernel in kernels:
        left[kernel.name] += kernel.time_range.elapsed_us()
    for event in profile.events():
        for kernel in event.kernels:
            found[part_of(kernel.name, *_ancestors(event))] += kernel.duration
            left[kernel.name] -= kernel.duration
    for name, us in left.items():  # graphs' kernels have no launcher
        found[part_of(name)] += max(0.0, us)
    other_ms = (sum(found.values()) - found["communication"]) / 1e3
    found["idle"] = 1e3 * ms - busy((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    by_rank = {"other than communication, ms by rank": [round(each, 2) for each in all_gather(other_ms)]}
    return {part: round(us / 1e3 / ms, 4) for part, us in found.items()} | by_rank


def part_of(*names: str) -> str:
    """The part of a step that a kernel belongs to, by its name and those of what launched it."""
    for part, pattern in SHARES.items():
        if any(re.search(pattern, name) for name in names):
            return part
    return REST


def _ancestors(event: Any) -> Iterator[str]:
    while event is not None:
        yield str(event.name)
        event = event.cpu_parent


def extrapolated(rows: list[dict[str, Any]], tokens: int, length: int, sizes: str, depth: int = 48) -> list[str]:
    """A line for each kind measured at two numbers of layers: what `depth` layers would take."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        at = sorted((row["layers"], row["ms"]) for row in rows if row["kind"] == kind and "ms" in row)
        if len(at) >= 2:
            (few, first), (many, last) = at[-2:]
            ms = last + (depth - many) * (last - first) / (many - few)
            config = Qwen3MoeConfig(**SIZES[sizes], num_hidden_layers=depth)
            flops = sum(flops_per_token(config, length).values())
            rate = f"{tokens * flops / ms / 1e9:.1f} TFLOP/s, {tokens / ms * 1e3:.0f} tokens/s a GPU"
            lines.append(f"{kind}: t({depth}) = {ms:.1f} ms, {rate}, from {few} and {many} layers")
    return lines


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch and rank")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed steps a kind, three at least")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--routing", choices=("natural", "forced"), default="natural")
    parser.add_argument("--moments", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--accumulate", choices=("gemm", "autograd"), default="gemm", help="what adds mxep's gradients")
    parser.add_argument("--after-step", action="store_true", help="quantize_after_step, not within the micro-batches")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sizes", choices=tuple(SIZES), default="qwen3")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    if args.tokens % args.length:
        parser.error(f"--tokens: expected a multiple of --length {args.length}, got {args.tokens}")
    for kind in args.kinds:
        if kind.startswith("transformers") and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            parser.error(f"--kinds: expected {kind!r} on one GPU alone; bench=model has it on several")
        if not re.fullmatch(r"(baseline|transformers|mxep_\w+)( \+ optimize( \+ linears)?)?", kind):
            parser.error(f"--kinds: expected as one of {', '.join(KINDS)}, got {kind!r}")
    return args


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    args, rows = arguments(given), []
    with started_ranks() as device:
        for depth, kind in ((depth, kind) for depth in args.layers for kind in args.kinds):
            torch._dynamo.reset()
            try:
                row = measure(kind, depth, args, device)
            except torch.OutOfMemoryError as error:
                row = {"kind": kind, "layers": depth, "error": str(error).partition("\n")[0]}
            rows.append(row)
            free_memory()
            if rank() == 0:
                print(json.dumps(row), flush=True)
            save(args.out, rows, arguments=vars(args) | {"out": str(args.out)})
        if rank() == 0:
            print(*extrapolated(rows, args.micro_batches * args.tokens, args.length, args.sizes), sep="\n", flush=True)
    return rows


if __name__ == "__main__":
    main()
