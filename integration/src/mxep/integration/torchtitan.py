"""Routed experts for torchtitan 0.3, as overrides of its configs: mxep does dispatch, experts and combine.

    --override.imports 'mxep.integration.torchtitan.routed_experts={"recipe": "mxfp8"}'

`routed_experts` replaces both children of each `RoutedExperts`. Parameters, their names, sharding and initialisation
stay torchtitan's:

    token_dispatcher.dispatch   moves nothing: tokens with their ids and scores go to inner_experts as they are
    inner_experts               dispatches, computes and combines, in one call of mxep
    token_dispatcher.combine    moves nothing

`linears` is a second override, for the linears of attention, dense MLPs and shared experts. `metrics` is a third, which
logs the experts' loads.

B batch, L length, T tokens, K experts a token, E experts, D model dim, F hidden dim.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Configurable, derive
from torchtitan.config import override as registered
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

from mxep.comms import Capacity
from mxep.ep import Dispatch, TokenDispatcher, make_dispatcher, run_experts
from mxep.ep.dtensors import local_tensor
from mxep.ep.moe import pick_recipe
from mxep.gemm import Recipe, quantize_weights_once_a_step
from mxep.gemm.backends import BACKENDS
from mxep.gemm.functional import module_forward
from mxep.gemm.recipe import recipe_of

__all__ = ["Options", "linears", "metrics", "routed_experts"]

if not hasattr(dist, "set_timeout"):  # torchtitan 0.3.0 calls it; torch 2.13 has it under this name
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How routed experts run.

    Attributes:
        recipe: "mxfp8", "fp8", "bf16" or another name of :class:`mxep.gemm.Recipe`. "auto" is MXFP8 if it pays for
            max_tokens, else bf16.
        dispatcher, max_tokens, timeout, ranks_per_node, nodes_per_token: as in :class:`mxep.ep.Dispatch`, for the
            ranks of the ep mesh. Without EP nothing travels. Set max_tokens to local_batch_size * seq_len / context
            parallel degree. torch.compile with EP needs max_tokens.
        capacity: rows that fit on a rank, as a multiple of the balanced load. None: the worst case.
        overflow: for rows over the capacity, "raise" before the optimizer steps, "drop", or "recompute", which drops
            none and saves less for backward than the worst case.
        dtype: of activations: "bfloat16", or "float32" if training.mixed_precision_param is float32.
        backend: of the grouped GEMM.
        quantize_once: whether the micro-batches of a step share quantized weights.
    """

    recipe: str = "mxfp8"
    dispatcher: str = "symmetric"
    capacity: float | None = None
    overflow: Literal["raise", "drop", "recompute"] = "raise"
    max_tokens: int | None = None
    timeout: float | None = None
    ranks_per_node: int | None = None
    nodes_per_token: int | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    backend: str = "auto"
    quantize_once: bool = False

    def check(self, dim: int, hidden_dim: int) -> None:
        """Raise ValueError for invalid values, and for sizes that the recipe cannot quantize."""
        recipe = recipe_of(self.recipe)
        if not isinstance(recipe, Recipe):
            if self.max_tokens is None:
                raise ValueError("recipe: got 'auto' without max_tokens, want both, as it is picked by that")
        elif dim % recipe.group_alignment or hidden_dim % recipe.group_alignment:
            raise ValueError(
                f"recipe {recipe.name} wants dim and hidden_dim in {recipe.group_alignment}s, got {dim}, {hidden_dim}"
            )
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: got {self.dtype!r}, wanted 'bfloat16' or 'float32'")
        check_backend(self.backend)
        if not isinstance(self.quantize_once, bool):
            raise ValueError(f"quantize_once: got {self.quantize_once!r}, want true or false")
        if self.capacity is None and self.overflow != "raise":
            raise ValueError(f"overflow={self.overflow!r} needs a capacity, such as 1.5")
        self.dispatch()

    def dispatch(self) -> Dispatch:
        """The options as a `Dispatch`. Raises ValueError as it does."""
        capacity: Capacity | float | None = self.capacity
        if self.overflow != "raise" and isinstance(capacity, int | float):
            capacity = Capacity.factor(capacity, self.overflow)
        names = "dispatcher", "max_tokens", "timeout", "ranks_per_node", "nodes_per_token"
        return Dispatch(capacity=capacity, **{name: getattr(self, name) for name in names})

    def make_dispatcher(self, num_experts: int, dim: int, group: dist.ProcessGroup | None) -> TokenDispatcher:
        """Make a group's dispatcher, which equal layers share. It is checked before each optimizer step."""
        dispatch = self.dispatch()
        if group is None:
            dispatch = Dispatch("local", dispatch.capacity, dispatch.max_tokens)
        made = make_dispatcher(dispatch, num_experts, dim=dim, dtype=getattr(torch, self.dtype), group=group)
        check_before_steps(made)
        if self.quantize_once:
            quantize_weights_once_a_step()
        return made


def check_backend(backend: str) -> None:
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend: got {backend!r}, want one of auto, {', '.join(BACKENDS)}")


_checked: weakref.WeakSet[TokenDispatcher] = weakref.WeakSet()


def check_before_steps(dispatcher: TokenDispatcher) -> None:
    """While the dispatcher lives, call its `check` before each step of torchtitan's optimizers."""
    if dispatcher in _checked:
        return
    _checked.add(dispatcher)
    here = weakref.ref(dispatcher)

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The container's step calls its optimizers' steps, which need no check.
        if isinstance(optimizer, OptimizersContainer) and (alive := here()) is not None:
            alive.check()

    weakref.finalize(dispatcher, register_optimizer_step_pre_hook(check).remove)


class Routed(NamedTuple):
    """Routing of this rank's tokens. counts_E: tokens of each expert. layer: from `TokenDispatcher.number_layer`; 0 if
    compiled, as one graph serves all layers."""

    expert_ids_TK: Tensor
    scores_TK: Tensor
    counts_E: Tensor
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
        return x_TD, Routed(expert_ids_TK, scores_TK, counts_E, self.dispatcher, number), None

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
        # Not a buffer: a buffer needs a place in torchtitan's sharding config.
        self.load_E = torch.zeros(config.num_experts, dtype=torch.int64)

    def forward(self, x_TD: Tensor, routed: Routed) -> Tensor:
        """Gradients of weights are sums over all ranks' tokens, because torchtitan divides the loss by all tokens."""
        options, recipe, (expert_ids_TK, scores_TK, counts_E, dispatcher, layer) = self.options, self.recipe, routed
        if torch.compiler.is_compiling() and options.max_tokens is None and dispatcher.world_size > 1:
            raise ValueError("torch.compile with expert parallelism needs mxep's max_tokens")
        if self.training:
            self.load_E.add_(counts_E.detach())
        if not isinstance(recipe, Recipe):
            sizes = self.w2_EDF.shape[1], self.w2_EDF.shape[2], expert_ids_TK.shape[1]
            picked = pick_recipe(None, *sizes, dispatcher, max_tokens=options.max_tokens)
            assert picked is not None
            recipe = picked
        weights = (self.w1_EFD, self.w3_EFD), self.w2_EDF
        how: dict[str, Any] = {"dispatcher": dispatcher, "recipe": recipe, "backend": options.backend, "layer": layer}
        return run_experts(x_TD, expert_ids_TK, scores_TK.float(), *weights, **how)[0]

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        part = local_tensor(self.w2_EDF).shape[2]
        if isinstance(self.recipe, Recipe) and part % (multiple := self.recipe.group_alignment):
            raise ValueError(
                f"tensor_parallel_degree: got {parallel_dims.tp}, which leaves a rank {part} of an expert's "
                f"hidden_dim, want a multiple of {multiple} for recipe {self.recipe.name}: set "
                "expert_parallel_degree, which keeps experts whole, or recipe bf16"
            )

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.load_E = torch.zeros_like(self.load_E, device=buffer_device or self.w1_EFD.device)


@registered(target=RoutedExperts.Config, description="dispatch, experts and combine by mxep")  # type: ignore[untyped-decorator]
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


@registered(  # type: ignore[untyped-decorator]
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


class LoadMetrics(MetricsProcessor):  # type: ignore[misc]
    """Also logs `loads` over the ep mesh."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        pass

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        mesh = self.parallel_dims.get_optional_mesh("ep")
        found = loads(self.model_parts or [], None if mesh is None else mesh.get_group())
        super().log(*args, extra_metrics={**(extra_metrics or {}), **found}, **kwargs)


@registered(target=MetricsProcessor.Config, exact=True, description="loads of mxep's experts")  # type: ignore[untyped-decorator]
def metrics(config: Any) -> Any:
    """torchtitan's metrics, and loads of the experts that mxep runs."""
    return derive(config, LoadMetrics.Config)


def loads(model_parts: list[nn.Module], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Busiest expert's tokens / mean, by layer, since the last call: clears the experts' load_E. Collective."""
    modules = [named for part in model_parts for named in part.named_modules()]
    layers = {name: module.load_E for name, module in modules if isinstance(getattr(module, "load_E", None), Tensor)}
    if not layers:
        return {}
    counts = torch.stack(list(layers.values()))
    if group is not None:
        dist.all_reduce(counts, group=group)
    for load_E in layers.values():
        load_E.zero_()
    largest = counts.amax(1) / counts.double().mean(1).clamp_min(1e-9)
    names = (name.replace("._checkpoint_wrapped_module", "").partition(".moe.")[0] for name in layers)
    return {f"moe_load/{name}": load for name, load in zip(names, largest.tolist())}
