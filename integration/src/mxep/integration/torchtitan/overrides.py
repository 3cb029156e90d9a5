"""Overrides for torchtitan 0.3: mxep does dispatch, experts and combine.

`routed_experts` replaces both children of each `RoutedExperts`. Parameters, their names, sharding and initialisation
stay torchtitan's:

    token_dispatcher.dispatch   moves nothing: tokens with their ids and scores go to inner_experts as they are
    inner_experts               dispatches, computes and combines, in one call of mxep
    token_dispatcher.combine    moves nothing

B batch, L length, T tokens, K experts a token, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import Configurable, derive
from torchtitan.config import override as registered
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from mxep.ep import TokenDispatcher
from mxep.ep.dtensors import local_tensor
from mxep.gemm import Recipe
from mxep.gemm.functional import module_forward
from mxep.gemm.recipe import recipe_of

from .options import Options, check_backend


def override(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torchtitan's decorator. Users then name the function `mxep.integration.torchtitan.FUNCTION`."""

    def decorate(factory: Callable[..., Any]) -> Callable[..., Any]:
        factory.__module__ = __package__
        made: Callable[..., Any] = registered(**options)(factory)
        return made

    return decorate


class Routed(NamedTuple):
    """Routing of this rank's tokens."""

    expert_ids_TK: Tensor
    scores_TK: Tensor
    dispatcher: TokenDispatcher
    layer: int


class Dispatcher(Configurable):  # type: ignore[misc]
    """Replaces torchtitan's token dispatcher. It gets the ep mesh, and leaves the exchange to the experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        num_experts: int
        dim: int
        options: Options

    def __init__(self, config: Config) -> None:
        self.config = config
        self.wire_meshes(ep_mesh=None)  # without TP and EP, torchtitan does not call it

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        group = None if ep_mesh is None else ep_mesh.get_group()
        self.dispatcher = self.config.options.make_dispatcher(self.config.num_experts, self.config.dim, group)
        self.number = self.dispatcher.number_layer()

    def dispatch(
        self, x_TD: Tensor, scores_TK: Tensor, expert_ids_TK: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, Routed, None]:
        number = 0 if torch.compiler.is_compiling() else self.number
        return x_TD, Routed(expert_ids_TK, scores_TK, self.dispatcher, number), None

    def combine(self, out_TD: Tensor, metadata: None, x_TD: Tensor) -> Tensor:
        return out_TD


class Experts(GroupedExperts):  # type: ignore[misc]
    """torchtitan's parameters w1_EFD, w2_EDF, w3_EFD, computed by mxep."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        options: Options

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options, self.recipe = config.options, recipe_of(config.options.recipe)

    def forward(self, x_TD: Tensor, routed: Routed) -> Tensor:
        weights = self.w1_EFD, self.w2_EDF, self.w3_EFD
        tokens = x_TD, routed.expert_ids_TK, routed.scores_TK
        return self.options.run(self.recipe, *tokens, weights, routed.dispatcher, routed.layer)

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        part = local_tensor(self.w2_EDF).shape[2]
        if isinstance(self.recipe, Recipe) and part % (multiple := self.recipe.group_alignment):
            raise ValueError(
                f"tensor_parallel_degree: got {parallel_dims.tp}, which leaves a rank {part} of an expert's "
                f"hidden_dim, want a multiple of {multiple} for recipe {self.recipe.name}: set "
                "expert_parallel_degree, which keeps experts whole, or recipe bf16"
            )


@override(target=RoutedExperts.Config, description="dispatch, experts and combine by mxep")
def routed_experts(config: Any, **options: Any) -> Any:
    """Options are those of `Options`.

    Raises ValueError for experts that are not plain gated MLPs: with biases, or made by other overrides and converters.
    """
    chosen, experts = Options(**options), config.inner_experts
    if type(config) is not RoutedExperts.Config or type(experts) is not GroupedExperts.Config:
        names = type(config).__qualname__, type(experts).__qualname__
        raise ValueError(f"mxep runs RoutedExperts.Config of GroupedExperts.Config, got {names[0]} of {names[1]}")
    chosen.check(experts.dim, experts.hidden_dim)
    dispatcher = Dispatcher.Config(num_experts=experts.num_experts, dim=experts.dim, options=chosen)
    inner = derive(experts, Experts.Config, options=chosen)
    return derive(config, RoutedExperts.Config, inner_experts=inner, token_dispatcher=dispatcher)


class QuantizedLinear(Linear):  # type: ignore[misc]
    """A linear with torchtitan's parameters and GEMMs in a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        recipe: Recipe
        backend: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe, self.backend = config.recipe, config.backend

    def forward(self, input: Tensor) -> Tensor:
        return module_forward(self, input, self.recipe, self.backend)


@override(
    target=Linear.Config,
    fqns=[f"*layers.*.{part}.*" for part in ("attention", "feed_forward", "shared_experts")],
    description="linears by mxep",
)
def linears(config: Any, recipe: str = "mxfp8", backend: str = "auto") -> Any:
    """Linears by mxep. Linears with sizes that the recipe cannot take, and a model's own classes, stay unchanged.

    Raises ValueError for an unknown recipe or backend, and for linears that torchtitan's own converters (Float8, MX,
    NVFP4) took first. With exact=True these would go unnoticed.
    """
    chosen = Recipe.named(recipe)
    check_backend(backend)
    kind = type(config)
    if "quantization" in kind.__module__:
        raise ValueError(
            f"linears: got {kind.__qualname__}, which torchtitan's own quantization made, want Linear.Config: leave "
            "out its converter, or mxep's override of linears"
        )
    if kind is not Linear.Config:
        return config
    if config.in_features % chosen.group_alignment or config.out_features % chosen.group_alignment:
        return config
    return derive(config, QuantizedLinear.Config, recipe=chosen, backend=backend)
