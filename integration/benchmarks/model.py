"""bench=model: whole training steps of transformers models, on all ranks.

    mxep task=bench bench=model parallel.ranks=2 'bench.changes=[optimize,forced]' bench.out=FILE.json

A step has micro-batches, clipping and AdamW. Parameters and moments are bf16. On several GPUs experts are spread over
all ranks (EP), and FSDP2 shards the rest and gathers it once a step. Weights are random, and labels are the ids.

A case names the experts:

    baseline                baseline.BaselineLayer, in Qwen3 and DeepSeek-V3
    transformers            its grouped_mm, on one rank
    mxep RECIPE             mxep.integration.transformers
    mxep RECIPE, linears    attention's projections and dense MLPs in this recipe, too (with `optimize`)
    none                    experts return their input, to measure the rest of the model

bench.changes apply to all cases:

    optimize       mxep.integration.transformers.optimize: loss in chunks, causal SDPA, decoder layers compiled.
                   On several ranks BaselineLayer syncs, so only attention and norms are compiled around it
    forced         every expert gets equally many tokens, as with Megatron's --moe-router-force-load-balancing (Qwen3)

ms            median step of the slowest rank. fastest ms, slowest ms: of all steps
TFLOP/s       per GPU, model FLOPs as Megatron-LM counts them (mxep.integration.flops)
peak GiB      most memory of a rank, optimizer states included
most of mean  rows of the busiest GPU / mean, the largest of all layers
loss          of the first step
shares        time of kernels in one profiled step / ms, by kernel and by the autograd node that launched it. idle: the
              rest of ms. Overlapping kernels each count in full

8 layers of Qwen3-30B fit one GPU of 80 GB, and 16 fit two.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from mxep.comms import Capacity
from mxep.ep import accumulate_in_place, clip_grad_norm_, parameter_groups
from mxep.ep.dtensors import local_tensor, local_weight
from mxep.gemm import Recipe, quantize_weights_once
from mxep.integration.flops import flops_per_token
from mxep.integration.mesh import all_gather
from mxep.integration.report import Row
from mxep.integration.schema import RECIPES
from mxep.integration.transformers import Implementation, check, expert_parallel, optimize, register
from mxep.integration.transformers.experts import ALL_EXPERTS_FUNCTIONS, experts_in, layers

from .baseline import BaselineLayer
from .layer import DeviceType, ProfilerActivity, profiled
from .script import GIB, Bench, FailedOnRanks, busy, free_memory, models, on_all_ranks, rank, ranks, seconds, table
from .timer import Call, failure

CAPACITY = 2.0  # times the balanced load of a rank
SECONDS, LEAST_STEPS, MOST_STEPS, WARM_UP = 6.0, 3, 100, 2
BASELINE, TRANSFORMERS, NONE, LINEARS = "baseline", "transformers", "none", ", linears"
CASES = (BASELINE, TRANSFORMERS, *(f"mxep {name}{more}" for name in RECIPES for more in ("", LINEARS)), NONE)
USUAL = BASELINE, TRANSFORMERS, "mxep bf16", "mxep mxfp8"
CHANGES = "optimize", "forced"
SIZES = "layers, micro-batches, sequences, length"
QWEN3: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "num_hidden_layers": 48, "tie_word_embeddings": False,
}  # fmt: skip
MOONLIGHT: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
    "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 163840,
    "num_hidden_layers": 27, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {"num_hidden_layers": 24, "num_local_experts": 32}
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3_30b": (Qwen3MoeConfig, QWEN3),
    "deepseek_v3_16b": (DeepseekV3Config, MOONLIGHT),
    "gpt_oss_20b": (GptOssConfig, GPT_OSS),
}
TINY = {
    "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "moe_intermediate_size": 32, "intermediate_size": 32,
    "num_experts_per_tok": 2, "vocab_size": 512,
}  # fmt: skip
"""Sizes of models on a CPU, with 8 experts."""
SHAPES = dict.fromkeys(MODELS, (1, 1, 1, 1))

SHARES = {
    "optimizer": r"Optimizer\.step|AccumulateGrad|\bclip\b|adamw|multi_tensor",
    "communication": r"nccl|^(dispatch(_tables)?|combine|barrier|put|meet|sum_arrived|stage_sums|read_tables)_kernel",
    "attention": r"flash|fmha|sdpa|cudnn.*attention|ScaledDotProduct|attention_",
    "head and loss": r"head and loss|LinearCrossEntropy|NllLoss|LogSoftmax|nll_loss|log_softmax",
    "experts GEMM": r"^(bf16_)?grouped_(mm|wgrad)_kernel|[Gg]rouped_?[Mm]m|GroupedGemm|GroupProblem",
    "experts other": r"^(?!triton_)\w+_kernel$|mxep::|BaselineLayer|_Take|_Weigh|experts other",
    "linears": r"gemm|nvjet|cutlass|xmma|MmBackward|aten::mm|aten::linear",
}
"""Share of a step -> patterns in the names of its kernels, or of the autograd nodes that launched them. The first match
counts. MXFP8 linears run the experts' GEMM kernels and count there. An eager head's GEMMs count as linears. `optimizer`
includes clipping and sums of gradients. The rest are norms and other element-wise kernels."""
REST, IDLE = "rest", "idle"
FIGURES = "ms, fastest ms, slowest ms, tokens/s a GPU, TFLOP/s, x baseline, peak GiB, most of mean, loss"


class Shape(NamedTuple):
    """Layers, micro-batches of a step, and the sequences and length (tokens) of a micro-batch on each rank."""

    layers: int
    micro_batches: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a step."""
        return self.micro_batches * self.sequences * self.length


SECTIONS = {
    "model": table(
        "training steps; x: how many times as fast as the baseline's",
        f"model, {', '.join(Shape._fields)}, what",
        FIGURES,
    ),
    "shares": table("shares of a step", "model, layers, what", ", ".join((*SHARES, REST, IDLE))),
}


def measure(bench: Bench) -> Iterator[tuple[str, Row]]:
    """Yield (section, row). Collective, with the same rows on all ranks."""
    expected = bench.config.sections or SECTIONS
    changes = tuple(bench.config.changes or ())
    for about, shape in models(bench, Shape):
        first = None
        for case in bench.config.cases or USUAL:
            row = about | shape._asdict() | {"what": case, "changes": [*changes]}
            try:
                step, parts = _step(bench, about["model"], shape, case, changes, profile="shares" in expected)
            except FailedOnRanks as error:
                step, parts = failure(error), {}
            if "ms" in step:
                ms = step["ms"]
                first = ms if case == BASELINE else first
                flops = sum(flops_per_token(config_of(about["model"], shape, bench.device), shape.length).values())
                step |= {"tokens/s a GPU": shape.tokens / ms * 1e3, "TFLOP/s": shape.tokens * flops / ms / 1e9}
                step |= {"x baseline": first / ms} if first else {}
            if "model" in expected:
                yield "model", row | step
            if parts:
                yield "shares", row | parts


def _step(
    bench: Bench, model: str, shape: Shape, case: str, changes: tuple[str, ...], *, profile: bool
) -> tuple[Row, Row]:
    """Measure a case. Returns its figures, and with `profile` its shares. Collective. Raises FailedOnRanks."""
    torch._dynamo.reset()
    free_memory()
    cuda = bench.device.type == "cuda"
    subject = on_all_ranks(lambda: Subject(model, shape, case, changes, bench.device, bench.seed))
    try:
        losses = on_all_ranks(lambda: [float(subject.step()) for _ in range(WARM_UP)])
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = list[float]()
        while len(times) < LEAST_STEPS or (cuda and sum(times) < SECONDS and len(times) < MOST_STEPS):
            times.append(on_all_ranks(lambda: seconds(subject.step)))
        ms = 1e3 * statistics.median(times)
        row: Row = {"ms": ms, "fastest ms": 1e3 * min(times), "slowest ms": 1e3 * max(times), "steps": len(times)}
        row |= {"loss": losses[0], "losses": losses, "optimize": subject.changed}
        if cuda:
            row["peak GiB"] = max(all_gather(torch.cuda.max_memory_allocated())) / GIB
        parts = shares(subject.step, ms, bench.device) if profile else {}
        row["most of mean by layer"] = subject.most_of_mean()
        return row | {"most of mean": max(row["most of mean by layer"])}, parts
    finally:
        subject.close()


def config_of(model: str, shape: Shape, device: torch.device) -> Any:
    """The config of a model cut to the layers of a shape; on a CPU also with TINY's sizes."""
    kind, sizes = MODELS[model]
    sizes = sizes | {"num_hidden_layers": shape.layers, "max_position_embeddings": max(shape.length, 64)}
    if device.type == "cpu":
        latent = {"head_dim": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        heads = 2 if kind is DeepseekV3Config else 1
        experts = {name: 8 for name in ("num_experts", "n_routed_experts", "num_local_experts") if name in sizes}
        sizes |= TINY | experts | (latent if kind is DeepseekV3Config else {}) | {"num_key_value_heads": heads}
    return kind(**sizes)


def baseline_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of experts by a BaselineLayer."""
    w13, w2 = local_weight(experts.gate_up_proj), local_weight(experts.down_proj)
    group = dist.group.WORLD if len(w13) < experts.num_experts else None
    out: Tensor = BaselineLayer(w13, w2, group=group)(hidden_states, top_k_index.int(), top_k_weights.float())
    return out


def register_experts(recipes: Iterable[str], **limits: Any) -> None:
    """Register implementations `bench RECIPE`, `bench baseline`, and `bench none`, which returns the input."""
    for recipe in recipes:
        register(Implementation(f"bench {recipe}", Recipe.named(recipe), **limits))
    ALL_EXPERTS_FUNCTIONS.register("bench baseline", baseline_experts)
    ALL_EXPERTS_FUNCTIONS.register("bench none", lambda experts, hidden_states, *_: hidden_states)


def draw_weights(model: Any, device: torch.device, seed: int = 0) -> None:
    """Move a model from meta to the device, with random weights. Only experts differ between ranks."""
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    shared, own = (torch.Generator(device).manual_seed(each) for each in (seed, 1000 * (seed + 1) + rank()))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0 if "norm" in name else 0.0)
                continue
            std = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
            local_tensor(weight).normal_(std=std, generator=own if ".experts." in name else shared)


class ForcedRouter(Qwen3MoeTopKRouter):
    """Gives all experts equally many tokens, spread evenly for each token, with the router's own weights."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        token, k = (torch.arange(n, device=logits.device, dtype=torch.int64) for n in (len(logits), self.top_k))
        ids = (token[:, None] + k * (self.num_experts // self.top_k)) % self.num_experts
        chosen = logits.float().softmax(-1).gather(1, ids)
        return logits, (chosen / chosen.sum(-1, keepdim=True)).to(logits.dtype), ids


class Subject:
    """A model of one case, its optimizer and its batches.

    Raises NotImplementedError for a case or change that the model or these ranks do not have.
    """

    def __init__(
        self, model: str, shape: Shape, case: str, changes: tuple[str, ...], device: torch.device, seed: int = 0
    ) -> None:
        self.shape, self.changes, self.device = shape, changes, device
        self.mxep = case.startswith("mxep ")
        self.config = config_of(model, shape, device)
        mesh = init_device_mesh(device.type, (ranks(),)) if ranks() > 1 else None
        self._refuse(case, mesh)
        recipe = case.removeprefix("mxep ").removesuffix(LINEARS) if self.mxep else "bf16"
        limits = {"capacity": Capacity.factor(CAPACITY)} if mesh else {}
        register_experts([recipe], max_tokens=shape.sequences * shape.length, **limits)
        attention = "eager" if device.type == "cpu" else "flex_attention"  # of gpt-oss: no other has its sinks
        how = {"dtype": torch.bfloat16, "attn_implementation": attention if model == "gpt_oss_20b" else "sdpa"}
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(self.config, **how)
        if mesh:
            expert_parallel(self.model, mesh, f"bench {recipe}")
        draw_weights(self.model, device, seed)
        own = {weight for name, weight in self.model.named_parameters() if ".experts." in name}
        if "forced" in changes:
            for layer in self.model.model.layers:
                layer.mlp.gate.__class__ = ForcedRouter
        experts = {NONE: "bench none", BASELINE: "bench baseline", TRANSFORMERS: "grouped_mm"}
        self.model.config._experts_implementation = experts.get(case, f"bench {recipe}")
        self.model.train()
        self.changed = self._optimize(recipe if case.endswith(LINEARS) else None, whole=self.mxep or not mesh)
        if mesh:
            for module in (*self.model.model.layers, self.model):
                fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=own)
        kwargs: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), fused=True, betas=(0.9, 0.95), **kwargs)
        torch.manual_seed(rank())  # of batches
        self.ids = torch.randint(self.config.vocab_size, shape[1:], device=device, dtype=torch.int64)

    def _refuse(self, case: str, mesh: Any) -> None:
        kind = self.config.model_type
        if case == BASELINE and kind == "gpt_oss":
            raise NotImplementedError("the baseline has no biases and no clamped SwiGLU")
        if case.endswith(LINEARS) and "optimize" not in self.changes:
            raise NotImplementedError("linears: wants bench.changes=[optimize]")
        if case == TRANSFORMERS and mesh:
            raise NotImplementedError("transformers: wants one rank")
        if "forced" in self.changes and kind != "qwen3_moe":
            raise NotImplementedError(f"forced: wants Qwen3's router, got {kind}'s")

    def _optimize(self, linears: str | None, *, whole: bool) -> dict[str, str]:
        if "optimize" not in self.changes:
            return {}
        attention: Any = None if self.config.model_type == "gpt_oss" else "causal"
        changed = optimize(self.model, experts=None, linears=linears, attention=attention, compile=whole)
        for layer in () if whole else self.model.model.layers:
            for part in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
                part.forward = torch.compile(part.forward)
        return changed

    def step(self) -> Tensor:
        """Run a whole step. Returns the mean loss."""
        model, micro_batches = self.model, self.shape.micro_batches
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        with contextlib.ExitStack() as stack:
            if self.mxep:
                stack.enter_context(quantize_weights_once())
                stack.enter_context(accumulate_in_place())
            for i, ids in enumerate(self.ids):
                if ranks() > 1:
                    last = i == micro_batches - 1
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last)
                    model.set_is_last_backward(last)
                loss = model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=self.shape.tokens).loss
                loss.backward()
                total += loss.detach()
        if self.mxep:
            check(model)
        with torch.profiler.record_function("clip"):
            clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    @torch.no_grad()
    def most_of_mean(self) -> list[float]:
        """Rows of the busiest GPU / mean, by MoE layer. Collective."""
        experts = [*experts_in(self.model, "bench=model").values()]
        counts = torch.zeros(len(experts), ranks(), device=self.device, dtype=torch.float32)

        def count(i: int, module: Any, given: tuple[Tensor, ...]) -> None:
            counts[i] = (given[1].flatten() // (module.num_experts // ranks())).bincount(minlength=ranks())

        hooks = [each.register_forward_pre_hook(functools.partial(count, i)) for i, each in enumerate(experts)]
        with torch.compiler.set_stance("force_eager"):
            self.model(input_ids=self.ids[0], use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        if ranks() > 1:
            dist.all_reduce(counts)
        return [round(float(c.max() / c.mean()), 3) for c in counts]

    def close(self) -> None:
        """Close dispatchers. Collective."""
        for _, layer in layers(self.model):
            layer.dispatcher.close()


def shares(step: Call, ms: float, device: torch.device) -> dict[str, Any]:
    """Shares of a step by part. ms: of the step without a profiler. Collective."""
    cuda = device.type == "cuda"
    events = profiled(step, 1, device, ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else []))
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    found = dict.fromkeys((*SHARES, REST), 0.0)  # us
    left = collections.Counter[str]()  # us of kernels by name: graphs' kernels have no launcher
    for kernel in kernels:
        left[kernel.name] += kernel.time_range.elapsed_us()
    for event in events:
        for kernel in event.kernels:
            found[part_of(kernel.name, *_ancestors(event))] += kernel.duration
            left[kernel.name] -= kernel.duration
    for name, us in left.items():
        found[part_of(name)] += max(0.0, us)
    found[IDLE] = 1e3 * ms - busy((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    return {part: us / 1e3 / ms for part, us in found.items()}


def part_of(*names: str) -> str:
    """The part of a step for a kernel, by names: the kernel's, its launcher's, and so on."""
    for part, pattern in SHARES.items():
        if any(re.search(pattern, name) for name in names):
            return part
    return REST


def _ancestors(event: Any) -> Iterator[str]:
    while event is not None:
        yield str(event.name)
        event = event.cpu_parent
