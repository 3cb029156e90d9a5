"""bench=model: steps of training of a whole model of transformers, on all ranks, with several kinds of experts.

- `baseline bf16`: baseline.BaselineLayer in place of the experts.
- `transformers bf16`: transformers' grouped_mm; on several ranks between its own all-to-alls (5.23 and newer).
- `mxep RECIPE`: mxep.integration.transformers, with its expert_parallel over all ranks.
- `mxep mxfp8, linear`: Attention's projections in MXFP8 as well, q, k and v as one GEMM (convert, join_linears).
- `..., graph`: A step is a replay of one CUDA graph.
- `no experts`: Experts return their input. This measures the rest of the model.

Models with a name that starts with DEEPSEEK are like DeepSeek-V3: sigmoid routers, two shared experts, a dense first
layer, latent attention with whole queries. All others are like Qwen3-MoE. One model with random bf16 weights serves all
cases. Parameters other than experts are replicated. Attention and norms are compiled on GPUs.

A step is forward and backward. bench.optimizer=adamw adds torch's fused step, with learning rate 0, so that all cases
have the same weights. bench.activation_checkpointing: each decoder layer keeps only its input.

tokens/s       of all ranks together; TFLOP/s: of a rank, as Megatron-LM counts them (mxep.integration.flops)
ms             a step: median over sustained stretches, slowest rank; x bf16: how many times as fast as the baseline
of step        share of the step beyond the time of `no experts`, whose experts get no gradients
dB             SNR of the head's gradient against the baseline's, least over ranks; below LEAST_SNR fails
held GiB       a rank's parameters and optimizer moments, which stay between steps; not counted in the peak
peak GiB       most memory of a step beyond held GiB, gradients included

T tokens of a rank, in two sequences, D model dim, F hidden dim, E experts, K experts a token.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from mxep.comms import Capacity
from mxep.ep import parameter_groups
from mxep.ep.dtensors import local_tensor, local_weight
from mxep.integration.flops import flops_per_token
from mxep.integration.launch import Rank
from mxep.integration.mesh import FailedOnRanks, from_all_ranks, on_all_ranks
from mxep.integration.metrics import snr
from mxep.integration.report import Row
from mxep.integration.schema import RECIPES
from mxep.integration.transformers import check, expert_parallel
from mxep.integration.transformers.experts import ALL_EXPERTS_FUNCTIONS, layers, own_expert_parallel
from mxep.integration.transformers.optimize import CAUSAL, multiply_by

from .layer import memory_of
from .runner import ANY, Bench, models, table
from .script import GIB
from .step import draw_weights, register_experts
from .timer import Alternative, Timer, failure

BASELINE, PLAIN, TRANSFORMERS = "baseline bf16", "no experts", "transformers bf16"
DEEPSEEK = "deepseek"
VOCABULARY = 32768
CAPACITY = 2.0  # times the balanced load; random routers stay below, else check() would raise
LEAST_SNR = 12.0  # other GEMMs flip the choice of experts, more so with more layers; without experts: up to 10

LINEAR = ", linear"
CASES = (
    *(BASELINE, PLAIN, TRANSFORMERS),
    *(f"mxep {what}{graph}" for what in (*RECIPES, "mxfp8, linear") for graph in ("", ", graph")),
)
SHAPES = {ANY: (2, 1, 32, 32, 1, 1)}
SIZES = "tokens, layers, dim, hidden dim, experts, top-k"
OPTIMIZERS = ("adamw",)
FIGURES = "tokens/s, TFLOP/s, ms, x bf16, of step, held GiB, peak GiB, loss, dB"
TITLE = f"whole models of vocabulary {VOCABULARY}; x: how many times as fast as {BASELINE}"
SECTIONS = {"model": table(TITLE, "model, tokens, what", FIGURES)}


class Shape(NamedTuple):
    """T, layers, D, F, E, K."""

    tokens: int
    layers: int
    dim: int
    hidden: int
    experts: int
    top_k: int


def measure(bench: Bench) -> Iterator[tuple[str, Row]]:
    """Yield (section, row), model by model. Collective, with the same rows on all ranks."""
    for about, shape in models(bench, Shape):
        for row in _measured(bench, about["model"], shape):
            yield "model", about | {"tokens": shape.tokens} | row


def _measured(bench: Bench, name: str, shape: Shape) -> list[Row]:
    """Rows of one model. It is freed before the next is made."""
    try:
        with contextlib.closing(on_all_ranks(lambda: Subject.make(bench, name, shape))) as subject:
            return list(_rows(bench, subject))
    except FailedOnRanks as error:
        return [{"what": "all", **failure(error)}]


def _rows(bench: Bench, subject: Subject) -> Iterator[Row]:
    timer = Timer(bench.device, seconds=1.5, rounds=3, graph_calls=1)
    names = tuple(dict.fromkeys((BASELINE, PLAIN, *(bench.config.cases or CASES))))
    rows: dict[str, Row] = {name: {"what": name, "held GiB": subject.held / GIB} for name in names}
    runs, reference = {}, list[Tensor]()
    flops = sum(flops_per_token(subject.model.config, subject.ids.shape[1]).values())
    for name, row in rows.items():

        def inspect(got: tuple[Tensor, Tensor], name: str = name, row: Row = row) -> None:
            row["loss"] = statistics.fmean(from_all_ranks(lambda: float(got[0])))
            if not reference:
                reference.append(got[1].clone())
            row["dB"] = min(from_all_ranks(lambda: snr(reference[0], got[1])))
            if name != PLAIN and not row["dB"] >= LEAST_SNR:
                raise FailedOnRanks(f"wanted {LEAST_SNR:g} dB at least against {BASELINE}, got {row['dB']:.1f}")

        try:
            step = on_all_ranks(lambda name=name: subject.step(name))  # type: ignore[misc]
            subject.model.zero_grad(set_to_none=True)  # left by a case that failed
            row |= on_all_ranks(lambda step=step: memory_of(step, bench.device))  # type: ignore[misc]
            graph = "must" if name.endswith(", graph") else "never"
            runs[name] = timer.prepare(
                Alternative(lambda step=step: [step], graph, check=lambda: check(subject.model), inspect=inspect)  # type: ignore[misc]
            )
        except FailedOnRanks as error:
            if name == BASELINE:
                raise
            row |= failure(error)
    timed = timer.measure(runs)
    ms = {name: found.pop("us") / 1e3 for name, found in timed.items() if "us" in found}
    for name, row in rows.items():
        row |= timed.get(name, {})
        if name in ms:
            row |= {"ms": ms[name], "tokens/s": subject.shape.tokens * bench.rank.world_size / ms[name] * 1e3}
            row |= {"TFLOP/s": flops * subject.shape.tokens / ms[name] / 1e9}
            row |= {"x bf16": ms[BASELINE] / ms[name]} if BASELINE in ms else {}
            row |= {"of step": 1 - ms[PLAIN] / ms[name]} if PLAIN in ms else {}
        yield row


@dataclass(frozen=True)
class Subject:
    """The model, its optimizer, and the batch of this rank.

    attentions: the layers' own, and a second list with the same weights. The second is converted to MXFP8 when a case
    needs it: converted earlier, it would warn that it never runs.
    """

    model: Any
    optimizer: torch.optim.Optimizer | None
    attentions: dict[bool, list[Any]]
    ids: Tensor
    shape: Shape
    rank: Rank
    converted: list[Any] = field(default_factory=list)

    @classmethod
    def make(cls, bench: Bench, name: str, shape: Shape) -> Subject:
        """Make model, optimizer and batch. Collective."""
        rank = bench.rank
        config = _config(name, shape)
        register_experts(RECIPES, max_tokens=shape.tokens, capacity=Capacity.factor(CAPACITY))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=CAUSAL)
        if rank.world_size > 1:
            mesh = init_device_mesh(rank.device.type, (rank.world_size,))
            expert_parallel(model, mesh, "bench bf16")
            if own_expert_parallel is not None:
                alone = init_device_mesh(rank.device.type, (rank.world_size, 1), mesh_dim_names=("ep", "tp"))["tp"]
                ALL_EXPERTS_FUNCTIONS.register("bench own", functools.partial(all_to_all_experts, mesh, alone))
        # Residuals keep the size of embeddings in any depth, so that few experts flip.
        draw_weights(model, rank.device, bench.seed, residual=(2 * shape.layers) ** -0.5)
        model.train()
        plain = [layer.self_attn for layer in model.model.layers]
        shared = {id(weight): weight for weight in model.parameters()}
        attentions = {False: plain, True: [copy.deepcopy(one, shared) for one in plain]}
        for layer in model.model.layers:
            for module in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
                _compile(module, rank.device)
        if bench.config.activation_checkpointing:
            for layer in model.model.layers:  # nothing is drawn, and a graph cannot read the generators' state
                layer.forward = functools.partial(
                    checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
                )
        optimizer = _adamw(model, rank.device) if bench.config.optimizer else None
        generator = torch.Generator(rank.device).manual_seed(1000 * (bench.seed + 1) + rank.rank)
        sequences = torch.randint(VOCABULARY, (2, shape.tokens // 2), device=rank.device, generator=generator)
        return cls(model, optimizer, attentions, sequences, shape, rank)

    @property
    def held(self) -> int:
        """Bytes of this rank's parameters and of the optimizer's moments."""
        states = [] if self.optimizer is None else self.optimizer.state.values()
        moments = [tensor for state in states for tensor in state.values()]
        return sum(local_tensor(tensor).nbytes for tensor in (*self.model.parameters(), *moments))

    def step(self, name: str) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return a call that runs a step with these experts. It returns loss and head's gradient, and frees gradients.

        Raises NotImplementedError if these ranks cannot run the case.
        """
        parallel = self.rank.world_size > 1
        if name == TRANSFORMERS and parallel and own_expert_parallel is None:
            raise NotImplementedError("wants transformers 5.23")
        attentions = self.attentions[LINEAR in name]
        if LINEAR in name and not self.converted:
            for attention in attentions:
                multiply_by("mxfp8", attention, "auto")
                self.converted.append(_compile(attention, self.rank.device))
        own = "bench own" if parallel else "grouped_mm"
        recipe = name.removeprefix("mxep ").removesuffix(", graph").removesuffix(LINEAR)
        named = {BASELINE: "bench baseline", PLAIN: "bench none", TRANSFORMERS: own}
        implementation = named.get(name, f"bench {recipe}")

        def step() -> tuple[Tensor, Tensor]:
            self.model.config._experts_implementation = implementation
            for layer, attention in zip(self.model.model.layers, attentions):
                layer.self_attn = attention
            loss: Tensor = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
            gradient: Tensor = self.model.lm_head.weight.grad
            if self.optimizer is not None:
                self.optimizer.step()
            self.model.zero_grad(set_to_none=True)
            return loss.detach(), gradient

        return step

    def close(self) -> None:
        """Close dispatchers. Collective."""
        for _, layer in layers(self.model):
            layer.dispatcher.close()


def all_to_all_experts(
    ep: DeviceMesh, tp: DeviceMesh, experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' own expert parallelism, on the experts that are here. tp: of this rank alone."""
    here = copy.copy(experts)
    here.__dict__["_parameters"] = {name: local_weight(weight) for name, weight in experts.named_parameters()}
    here.num_experts = len(here.down_proj)
    exchange = own_expert_parallel.AllToAllEP(here, ep, tp)
    exchange.experts_forward = functools.partial(ALL_EXPERTS_FUNCTIONS["grouped_mm"], here)
    out: Tensor = exchange(hidden_states, top_k_index, top_k_weights)
    return out.to(hidden_states.dtype)


def _config(name: str, shape: Shape) -> Any:
    sizes: dict[str, Any] = {"hidden_size": shape.dim, "num_hidden_layers": shape.layers, "vocab_size": VOCABULARY}
    sizes |= {"moe_intermediate_size": shape.hidden, "num_experts_per_tok": shape.top_k, "norm_topk_prob": True}
    sizes["tie_word_embeddings"] = False
    if name.startswith(DEEPSEEK):
        heads, shared = max(2, shape.dim // 128), 2
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": None}
        sizes |= {"n_routed_experts": shape.experts, "n_shared_experts": shared, "n_group": 1, "topk_group": 1}
        sizes |= {"first_k_dense_replace": 1, "intermediate_size": (shape.top_k + shared) * shape.hidden}
        return DeepseekV3Config(**sizes)
    heads = max(2, shape.dim // 64)
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 8), "head_dim": 128}
    return Qwen3MoeConfig(**sizes, num_experts=shape.experts)


def _adamw(model: Any, device: torch.device) -> torch.optim.Optimizer:
    """AdamW with its moments allocated already. Otherwise the first case would be charged for them."""
    graphs = device.type == "cuda"
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.0, weight_decay=0.0, fused=True, capturable=graphs)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def _compile(module: Any, device: torch.device) -> Any:
    if device.type == "cuda":
        module.forward = torch.compile(module.forward)  # without transformers' hooks, which break a graph
    return module
