"""Routed experts for torchtitan 0.2, as a model converter. `__init__.py` shows the command.

Each MoE and its experts get another class. Parameters, their names, sharding and initialisation stay torchtitan's.
torchtitan's dispatch does not run: it is in hooks on the experts' forward, which is not called here.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torchtitan.models.moe.moe import GroupedExperts, MoE
from torchtitan.protocols.model_converter import register_model_converter

from mxep.ep import TokenDispatcher
from mxep.gemm import Recipe, convert, join_linears
from mxep.gemm.convert import is_linear, reason_to_leave
from mxep.gemm.recipe import recipe_of

from .options import Options

TOGETHER = ("wq", "wk", "wv"), ("wq", "wkv_a"), ("wq_a", "wkv_a"), ("w1", "w3")
"""Linears of torchtitan's models that share an input, in attention, latent attention and gated MLPs."""


@dataclass(frozen=True, kw_only=True)
class ConverterOptions(Options):
    """Options of routed experts, and linear: recipe for linears of attention, dense MLPs and shared experts, by name or
    "auto". None: they stay torchtitan's."""

    linear: str | None = None


@dataclass
class JobConfig:
    """Section that `--job.custom_config_module` adds to torchtitan's config."""

    mxep: ConverterOptions = field(default_factory=ConverterOptions)


class Scores:
    """Holds scores (T, K) fp32. FSDP2 would cast them if they were a module's argument."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class Experts(GroupedExperts):  # type: ignore[misc]
    """torchtitan's parameters w1, w2, w3, computed by mxep."""

    options: Options
    recipe: Recipe | str
    dispatcher: TokenDispatcher
    number: int

    def routed(self, x: Tensor, expert_ids: Tensor, scores: Scores) -> Tensor:
        """x (T, D) -> (T, D): dispatch, experts and combine."""
        weights = self.w1, self.w2, self.w3
        number = 0 if torch.compiler.is_compiling() else self.number
        return self.options.run(self.recipe, x, expert_ids, scores.scores, weights, self.dispatcher, number)

    def init_weights(self, init_std: float) -> None:
        super().init_weights(init_std)
        if "routed" not in vars(self):  # this is the first call after FSDP2 sharded it
            register_fsdp_forward_method(self, "routed")


class RoutedMoE(MoE):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D)."""
        tokens = x.flatten(0, 1)
        scores, expert_ids, counts = self.router(tokens, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        out: Tensor = self.experts.routed(tokens, expert_ids, Scores(scores))
        if self.shared_experts is not None:
            out = out + self.shared_experts(tokens)
        return out.view(x.shape)


class Converter:
    """Converts all MoEs of a model.

    Raises ValueError for experts that mxep cannot compute, for TP, and if torchtitan also quantizes the same modules.
    """

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        if parallel_dims.tp_enabled:
            raise ValueError(
                "mxep's converter for torchtitan 0.2 does not support tensor parallelism: set its degree to 1"
            )
        self.options: ConverterOptions = job_config.mxep
        kinds = ("quantize.grouped_mm", "quantize.linear")[: 1 if self.options.linear is None else 2]
        if others := [name for name in job_config.model.converters if name.startswith(kinds)]:
            raise ValueError(
                f"model.converters: got {', '.join(others)} beside mxep, want one to quantize: leave them out, or "
                "mxep.linear where they are of linears"
            )
        mesh = parallel_dims.get_optional_mesh("ep")
        self.group = None if mesh is None else mesh.get_group()

    def convert(self, model: nn.Module) -> None:
        for name, moe in model.named_modules():
            if not isinstance(moe, MoE):
                continue
            experts = moe.experts
            if type(moe) is not MoE or type(experts) is not GroupedExperts:
                raise ValueError(
                    f"{name}: got {type(moe).__name__} of {type(experts).__name__}, wanted MoE of GroupedExperts"
                )
            if moe.score_before_experts:
                raise ValueError(
                    f"{name}: mxep applies scores to what experts return, this model to what they are given"
                )
            num_experts, hidden_dim, dim = experts.w1.shape
            self.options.check(dim, hidden_dim)
            moe.__class__, experts.__class__ = RoutedMoE, Experts
            experts.options, experts.recipe = self.options, recipe_of(self.options.recipe)
            experts.dispatcher = self.options.make_dispatcher(num_experts, dim, self.group)
            experts.number = experts.dispatcher.number_layer()
        if self.options.linear is not None:
            convert_linears(model, self.options.linear, self.options.backend)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        pass


def convert_linears(model: nn.Module, recipe: str, backend: str) -> None:
    """Convert the layers' linears, except for routers and sizes that MXFP8 cannot take. TOGETHER lists joined GEMMs.

    torchtitan calls converters before activation checkpointing, compilation and sharding.
    """
    linears = ((name, x) for name, x in model.named_modules() if name.startswith("layers.") and is_linear(x))
    chosen = {f"{name}.weight" for name, x in linears if not reason_to_leave(name, x, 0, Recipe.mxfp8())}
    join_linears(convert(model, recipe, lambda name, _: name in chosen, backend=backend), TOGETHER)


register_model_converter(Converter, "mxep")
