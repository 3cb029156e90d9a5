"""How modules of experts run: transformers' registry calls an `Implementation`, which runs a `Layer`.

    experts_implementation="mxep_mxfp8"   ->   Implementation("mxep_mxfp8", Recipe.named("mxfp8"))

    fused      SwiGLU, plain or clamped, with or without biases: mxep.ep's layer, which quantizes and multiplies by the
               routing weights within SwiGLU
    composed   everything else that `@use_experts_implementation` describes: mxep's dispatch, GEMMs and combine, and
               between them the model's own `_apply_gate` or activation, on unquantized rows

E experts in all, e of them on this rank, D model dim, F hidden dim, T tokens of this rank, K experts a token, R_max
rows.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mxep.ep import Dispatch, DispatchFields, LocalDispatcher, Routing, TokenDispatcher, combine, dispatch, run_experts
from mxep.ep.dtensors import local_weight
from mxep.ep.frozen import PARTS
from mxep.ep.functional import scaled_gradient
from mxep.ep.lora import LoRAWeights
from mxep.ep.moe import pick_recipe, recipe_of_call
from mxep.gemm import FrozenWeight, Recipe, grouped_mm
from mxep.gemm.backends import BACKENDS
from mxep.quant import SwiGLU

from ..flops import top_k_of

try:
    import transformers
except ImportError as error:
    raise ImportError("transformers is missing: pip install 'mxep-integration[transformers]'") from error

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import _default_apply_gate as default_apply_gate
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} has no registry of experts that mxep knows, want 5.17 or newer: "
        "pip install -U 'mxep-integration[transformers]'"
    ) from error

try:
    from transformers.distributed import expert_parallel as own_expert_parallel
except ImportError:
    own_expert_parallel: Any = None  # type: ignore[no-redef]

__all__ = ["ALL_EXPERTS_FUNCTIONS", "default_apply_gate", "own_expert_parallel"]
KEY = "_mxep_layer"
PROJECTIONS = "gate_up_proj", "up_proj", "down_proj"
KINDS = ("", "_bias", *(f"_{part}" for part in PARTS))
WEIGHTS = frozenset(f"{name}{kind}" for name in PROJECTIONS for kind in KINDS)
"""Names of parameters that hold all experts, (E, ...)."""
UNQUANTIZED = Recipe.bf16()
MAX_TOKENS = "MXEP_MAX_TOKENS"
"""Environment variable: max_tokens of implementations registered without it."""


@dataclass
class Layer:
    """How a module of experts runs.

    Attributes:
        made_for: the implementation.
        recipe: the implementation's. "auto" until max_tokens or the first training call picks one (`mxep.ep.moe`).
        activation: the SwiGLU that mxep.ep's layer fuses; None: the module's own code runs.
        cleans: whether rows without a token are zeroed, because the module has parameters of its own between its two
            GEMMs, and their gradients sum over all rows.
        masks: whether expert ids >= E mean "not on this rank", as in transformers' own expert parallelism.
        number: from `TokenDispatcher.number_layer`.
        called: whether it has run a forward.
        last_routing: routing of the last forward. None before the first one, and after a compiled one.
    """

    made_for: object
    recipe: Recipe | Literal["auto"]
    backend: str
    dispatcher: TokenDispatcher
    activation: SwiGLU | None
    cleans: bool
    masks: bool
    wgrad_scale: float = 1.0
    max_tokens: int | None = None
    number: int = 0
    called: bool = False
    last_routing: Routing | None = field(default=None, repr=False)

    @property
    def parallel(self) -> bool:
        return self.dispatcher.spans_ranks

    def check(self) -> None:
        """Raise device errors since the last check, as `mxep.ep.MoE.check` does."""
        self.dispatcher.check()

    def forward(
        self, experts: Any, x: Tensor, expert_ids: Tensor, weights: Tensor, lora: LoRAWeights | None = None
    ) -> Tensor:
        """x (T, D), expert_ids, weights (T, K) -> (T, D) in x's dtype."""
        if lora is not None and self.activation is None:
            raise ValueError(f"lora: expected experts with a SwiGLU that mxep has, got {type(experts).__name__}")
        self.called = True  # not read first: a compiled read adds a guard
        given = expert_ids, weights, lora
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):
                return self._forward(experts, x, *given).to(dtype)
        out = self._forward(experts, x, *given)
        return out if out.dtype == dtype else out.to(dtype)

    def _forward(
        self, experts: Any, x: Tensor, expert_ids: Tensor, weights: Tensor, lora: LoRAWeights | None
    ) -> Tensor:
        down = experts.down_proj
        if x.dtype.itemsize > down.dtype.itemsize:  # norms in fp32 before experts in bf16
            x = x.to(down.dtype)
        if self.masks:
            expert_ids = expert_ids.masked_fill(expert_ids >= self.dispatcher.num_experts, -1)
        if weights.dtype != torch.float32:
            weights = weights.float()
        recipe = self.recipe
        if not isinstance(recipe, Recipe):
            self.recipe, recipe = recipe_of_call(self._pick, experts, x, expert_ids.shape[1])
        routing: Routing | None
        how: dict[str, Any] = {} if torch.compiler.is_compiling() else {"layer": self.number}
        if self.activation is None:
            with nullcontext() if torch.compiler.is_compiling() else self.dispatcher.watched():
                out, routing = self._composed(experts, x, expert_ids, weights, recipe)
        else:
            gate_up = experts.gate_up_proj
            if gate_up.shape[0] > down.shape[0]:  # LongCat has rows for zero experts, which use no weights
                gate_up = gate_up[: down.shape[0]]
            if experts.is_transposed:
                gate_up, down = (local_weight(w, transposed=True) for w in (gate_up, down))
            out, routing = run_experts(
                *(x, expert_ids, weights, gate_up, down),
                dispatcher=self.dispatcher,
                recipe=recipe,
                backend=self.backend,
                wgrad_scale=self.wgrad_scale,
                activation=self.activation,
                gate_up_bias=experts.gate_up_proj_bias if experts.has_bias else None,
                down_bias=experts.down_proj_bias if experts.has_bias else None,
                lora=lora,
                **how,
            )
        if torch.compiler.is_compiling():
            routing = None
        self.last_routing = routing
        return out

    def _pick(self, experts: Any, x: Tensor, top_k: int) -> Recipe | None:
        sizes = experts.down_proj.shape[1:]
        dim, hidden_dim = reversed(sizes) if experts.is_transposed else sizes
        how: dict[str, Any] = {"max_tokens": self.max_tokens, "training": experts.training}
        return pick_recipe(x, dim, hidden_dim, top_k, self.dispatcher, **how)

    def _composed(
        self, experts: Any, x: Tensor, expert_ids: Tensor, weights: Tensor, recipe: Recipe
    ) -> tuple[Tensor, Routing]:
        dispatcher = self.dispatcher
        if not torch.compiler.is_compiling():
            dispatcher.begin(self.number)
        rows, row_weight, routing = dispatch(x, expert_ids, weights, dispatcher=dispatcher, recipe=recipe)
        row_weight = row_weight.to(x.dtype)[:, None]
        unused = (routing.plan.row_slot < 0)[:, None] if self.cleans else None

        def between(apply: Any, rows: Tensor) -> Tensor:
            if unused is None:
                return apply(rows)  # type: ignore[no-any-return]
            return apply(rows.masked_fill(unused, 0)).masked_fill(unused, 0)  # type: ignore[no-any-return]

        gate_up = self._linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, routing, recipe)
        h = between(experts._apply_gate if experts.has_gate else experts.act_fn, gate_up)
        normed = getattr(experts, "has_post_expert_norm", False)
        if not normed and not experts.has_bias:  # down_proj is linear: weigh its input
            y = self._linear(experts, "down_proj", h * row_weight, routing, recipe)
            return combine(y, routing, dispatcher=dispatcher, recipe=recipe), routing
        y = self._linear(experts, "down_proj", h, routing, recipe)
        y = (between(experts.post_expert_norm, y) if normed else y) * row_weight
        # Combine's gradient is not quantized: only a GEMM could use it in that form.
        return combine(y, routing, dispatcher=dispatcher, recipe=UNQUANTIZED), routing

    def _linear(self, experts: Any, name: str, rows: Tensor, routing: Routing, recipe: Recipe) -> Tensor:
        """rows (R_max, in) -> (R_max, out), each multiplied by its expert's weight, plus its bias."""
        w = getattr(experts, name)
        if not isinstance(w, FrozenWeight):
            w = local_weight(w, transposed=experts.is_transposed)
        bias = None
        if experts.has_bias:
            bias = scaled_gradient(local_weight(getattr(experts, f"{name}_bias")), self.wgrad_scale)
        return grouped_mm(
            rows,
            w,
            routing.plan.offs,
            recipe=recipe,
            backend=self.backend,
            bias=bias,
            wgrad_scale=self.wgrad_scale,
            watched=self.dispatcher.watched if self.parallel and not torch.compiler.is_compiling() else None,
        )

    def __deepcopy__(self, memo: Any) -> Self:
        return replace(self, dispatcher=copy.deepcopy(self.dispatcher, memo), last_routing=None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a dispatcher belongs to this process: the next forward makes one


def has_own_parameters(experts: nn.Module) -> bool:
    """Whether the module has parameters other than weights, biases, and PEFT's adapters of these."""
    names = (name for name, _ in experts.named_parameters())
    return any(name not in WEIGHTS and not name.startswith("parametrizations.") for name in names)


@torch.no_grad()
def activation_of(experts: Any) -> SwiGLU | None:
    """Return the module's activation if mxep.ep's layer can fuse it, else None.

    A gate is the model's own code. Its output for a few numbers, some beyond its limit, tells which one it is.
    """
    extras = has_own_parameters(experts) or any(True for _ in experts.buffers())
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False) or extras:
        return None
    own = vars(experts)
    alpha = float(own.get("alpha", own.get("swiglu_alpha", 1.0)))
    limit = float(own.get("limit", own.get("swiglu_limit")) or math.inf)
    gate = torch.linspace(-1, 1, 101, device="cpu", dtype=torch.float32) * (3 * limit if limit < math.inf else 20)
    gate_up = SwiGLU(interleaved=not experts.is_concatenated).join(gate[None], gate.roll(37)[None])
    wanted = experts._apply_gate(gate_up)
    limits = (None, limit) if limit < math.inf else (None,)
    for choice in itertools.product({1.0, alpha}, limits, (0.0, 1.0), (not experts.is_concatenated,)):
        found = (activation := SwiGLU(*choice)).glu(*activation.split(gate_up))
        if torch.allclose(found.glu * found.up, wanted, rtol=1e-5, atol=1e-6):
            return activation
    return None


def check_experts(experts: Any, name: str, recipe: Recipe | Literal["auto"], *, spread: bool) -> None:
    """Raise ValueError, with a cure, for experts that `recipe` cannot compute. "auto" can compute what bf16 can."""
    recipe = recipe if isinstance(recipe, Recipe) else UNQUANTIZED
    who = f"{type(experts).__name__}, {name}"
    if not hasattr(experts, "has_gate"):
        raise ValueError(f"{who}: got a module without @use_experts_implementation of transformers, want one with it")
    for weight_name in weight_names(experts):
        weight = getattr(experts, weight_name, None)
        floats = isinstance(weight, Tensor) and weight.dim() == 3 and weight.dtype in (torch.bfloat16, torch.float32)
        if not floats and not isinstance(weight, FrozenWeight):
            got = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(
                f"{who}: {weight_name} is {got}, want (experts, ., .) in bfloat16 or float32: load the model with "
                "dtype=torch.bfloat16 and unquantized, or by mxep.integration.transformers.load_quantized"
            )
        stored = experts._parameters[f"{weight_name}_qdata"] if isinstance(weight, FrozenWeight) else weight
        if isinstance(stored, DTensor) and not spread:
            raise ValueError(
                f"{who}: {weight_name} is a DTensor over {stored.device_mesh}: spread experts by "
                f"DistributedConfig(ep_size=, ep_implementation={name!r}), or by mxep's expert_parallel(model, mesh)"
            )
        if any(size % recipe.group_alignment for size in weight.shape[1:]):  # type: ignore[union-attr]
            raise ValueError(
                f"{who}: {weight_name} is {tuple(weight.shape)}, want the last two in "  # type: ignore[union-attr]
                f"{recipe.group_alignment}s for recipe {recipe.name}: use mxep_bf16"
            )


def weight_names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def is_experts(module: nn.Module) -> bool:
    """Whether `@use_experts_implementation` of transformers decorates the module's class."""
    return hasattr(module, "has_gate") and hasattr(type(module), "_apply_gate") and hasattr(module, "down_proj")


def experts_in(model: nn.Module, who: str) -> dict[str, Any]:
    """The modules of experts, by name. Raises ValueError, beginning with `who`, if there are none."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise ValueError(
            f"{who}: expected a model with experts that mxep runs, got {type(model).__name__}: "
            "route_experts prepares Llama 4, Step 3.7 and LongCat-Flash"
        )
    return found


def layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Yield (name, layer) of modules of experts that mxep runs or ran, or that are spread over ranks."""
    for name, module in model.named_modules():
        layer = module.__dict__.get(KEY)
        if layer is not None:
            named = ALL_EXPERTS_FUNCTIONS.get(getattr(module.config, "_experts_implementation", None), None)
            if not layer.parallel and not isinstance(named, type(layer.made_for)):  # others compute it now
                layer.last_routing = None
            yield name, layer


_local: weakref.WeakValueDictionary[int, TokenDispatcher] = weakref.WeakValueDictionary()
"""Number of experts -> dispatcher. Layers share it, so that a check needs one device-to-host sync."""


class Implementation:
    """A value of `experts_implementation=` and `ep_implementation=`, once it is registered.

    Attributes:
        name: its name in transformers.
        recipe, backend: as for `mxep.ep.MoE`. With "auto", each module of experts picks its own recipe once.
        dispatch: a `mxep.ep.Dispatch`, or its fields by keyword, for experts that are spread over ranks. max_tokens
            None comes from MXEP_MAX_TOKENS in the environment, or else from the first batch.
            **Padding counts** for max_tokens, capacity and loads: transformers gives a layer every token of a padded
            batch. Pack sequences instead (`DataCollatorWithFlattening`).

    Raises ValueError as `Dispatch` does, and for an unknown backend.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe | Literal["auto"],
        backend: str = "auto",
        dispatch: Dispatch | None = None,
        **fields: Unpack[DispatchFields],
    ) -> None:
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"backend: got {backend!r}, want one of auto, {', '.join(BACKENDS)}")
        self.name, self.recipe, self.backend = name, recipe, backend
        self.dispatch = Dispatch.of(dispatch, fields)

    def most_tokens(self) -> int | None:
        """The registered max_tokens, else the environment's."""
        said = os.environ.get(MAX_TOKENS)
        if self.dispatch.max_tokens is not None or not said:
            return self.dispatch.max_tokens
        if not said.isdecimal() or int(said) < 1:
            raise ValueError(
                f"{MAX_TOKENS}: got {said!r}, want the most tokens (batch times length) that a rank brings"
            )
        return int(said)

    def __call__(
        self,
        experts: nn.Module,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        lora: LoRAWeights | None = None,
    ) -> Tensor:
        """Forward: hidden_states (T, D), top_k_index, top_k_weights (T, K) -> (T, D).

        lora: as for `mxep.ep.run_experts`. Raises ValueError for lora with a gate that mxep cannot fuse.
        """
        return self.ready_layer(experts).forward(experts, hidden_states, top_k_index, top_k_weights, lora)

    def ready_layer(self, experts: nn.Module) -> Layer:
        """Return the experts' layer, made now if there is none for this implementation."""
        layer: Layer | None = getattr(experts, KEY, None)
        return self.layer_of(experts) if layer is None or layer.made_for is not self else layer

    def layer_of(self, experts: Any, dispatcher: TokenDispatcher | None = None, *, wgrad_scale: float = 1.0) -> Layer:
        """Make the experts' layer for this implementation. Raises ValueError if it cannot compute them.

        dispatcher: for experts spread over ranks. None: the old layer's, or a local one.
        """
        found: Layer | None = getattr(experts, KEY, None)
        number = 0 if dispatcher is None else dispatcher.number_layer()
        if dispatcher is None and found is not None and found.parallel:
            dispatcher, wgrad_scale, number = found.dispatcher, found.wgrad_scale, found.number
        check_experts(experts, self.name, self.recipe, spread=dispatcher is not None)
        masks = dispatcher is None and getattr(experts, "_is_expert_parallel", True)
        if dispatcher is None:
            num_experts = experts.down_proj.shape[0]
            dispatcher = _local.get(num_experts)
            if dispatcher is not None and dispatcher.uses > 0:
                dispatcher.uses += 1
            else:  # none yet, or its layers have closed it
                dispatcher = _local[num_experts] = LocalDispatcher(num_experts)
        cleans = has_own_parameters(experts)
        activation = activation_of(experts)
        if activation is None and isinstance(self.recipe, Recipe) and self.recipe.saved_gate_up == "fp8":
            raise ValueError(
                f"{type(experts).__name__}: got recipe {self.recipe.name} for a gate of the model's own, which keeps "
                "its input itself, want one without gate_up_fp8"
            )
        how = activation, cleans, masks, wgrad_scale, self.most_tokens(), number
        layer = Layer(self, self.recipe, self.backend, dispatcher, *how)
        experts.__dict__[KEY] = layer  # nn.Module's own way costs more
        return layer


ORIGIN = "_mxep_origin"
"""Attribute of a class made at run time: the functions that made it, the last first, and the class that they began
with."""


def remade_by(make: Callable[[type], Any], kind: type) -> dict[str, Any]:
    """Attributes of the class that `make(kind)` returns: pickle, which cannot find it by its name, makes it again."""
    return {ORIGIN: (make, *vars(kind).get(ORIGIN, (kind,))), "__reduce_ex__": _reduce}


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    reduced: Any = object.__reduce_ex__(module, max(protocol, 2))
    origin = vars(type(module)).get(ORIGIN)  # none of a class that FSDP2 derived from it
    return reduced if origin is None else (_empty, origin, *reduced[2:])


def _empty(*origin: Any) -> Any:
    *makers, kind = origin
    for make in reversed(makers):
        kind = make(kind)
    return kind.__new__(kind)


def prepare(experts: Any, hidden_states: Tensor) -> None:
    """Make the experts' layer, and pick a recipe for "auto", before a compiled forward, which can do neither.

    hidden_states: (..., D), the input of their decoder layer.
    """
    if KEY not in experts.__dict__ and isinstance(experts, FSDPModule):
        experts.unshard()  # a group of their own, which FSDP2 gathers later
    how = implementation_of(experts.config)
    layer: Layer | None = experts.__dict__.get(KEY) if how is None else how.ready_layer(experts)
    if layer is not None and not isinstance(layer.recipe, Recipe):
        x, top_k = hidden_states.flatten(0, -2), top_k_of(experts.config)
        layer.recipe, _ = recipe_of_call(layer._pick, experts, x, top_k)


def implementation_of(config: Any) -> Implementation | None:
    """mxep's implementation that a config names, or None."""
    found = ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None), None)
    return found if isinstance(found, Implementation) else None


def registered(implementation: str, key: str = "implementation") -> Implementation:
    """mxep's implementation of this name. Raises ValueError about the argument `key` if there is none."""
    how = ALL_EXPERTS_FUNCTIONS.get(implementation, None)
    if not isinstance(how, Implementation):
        raise ValueError(f"{key}: got {implementation!r}, want one that mxep has registered, as 'mxep_mxfp8'")
    return how
