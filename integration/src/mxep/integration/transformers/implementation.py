"""How experts are computed, under one name: what transformers' registry calls in place of a model's own loop.

experts_implementation="mxep_mxfp8"   ->   Implementation("mxep_mxfp8", Recipe.named("mxfp8"))

Models that the registry does not reach, because their experts' class has no decorator:

    Step 3.7, LongCat-Flash   `route_experts`: experts as others have them; LongCat's zero experts give tokens back
    Llama 4                   `route_llama4`: experts multiply every token, most of them by zero

In Llama 4 scores multiply the input of the experts, not their output: each (token, expert) pair is a token of its own.

    score (T, K)  sigmoid of the chosen logits    x * score -> experts, K rows a token, each for one expert -> sum
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from mxep.ep import Dispatch, DispatchFields, LocalDispatcher, TokenDispatcher
from mxep.ep.lora import LoRAWeights
from mxep.gemm import Recipe
from mxep.gemm.backends import BACKENDS

from ..flops import top_k_of
from .layer import KEY, MAX_TOKENS, Layer, activation_of, check_experts, has_own_parameters
from .versions import ALL_EXPERTS_FUNCTIONS, default_apply_gate

_local: weakref.WeakValueDictionary[int, TokenDispatcher] = weakref.WeakValueDictionary()
"""By number of experts: layers share one, so that a check asks the device once."""


class Implementation:
    """A value of `experts_implementation=` and `ep_implementation=`, once it is registered.

    Attributes:
        name: of it in transformers.
        recipe, backend: as for `mxep.ep.MoE`; "auto" is picked anew for each module of experts, once.
        dispatch: how tokens travel where experts are spread over ranks: a `mxep.ep.Dispatch`, or its fields by keyword.
            Its max_tokens None: what MXEP_MAX_TOKENS says in the environment, else the most of
            the first batch. **Padding counts**: transformers gives a layer every token of a padded batch, also of its
            capacity and loads. Pack sequences instead (`DataCollatorWithFlattening`).

    ValueError as of `Dispatch`, and for a backend that is none.
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
        """max_tokens as registered, else as in the environment."""
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
        """The forward of `experts`: hidden_states (T, D), top_k_index, top_k_weights (T, K) -> (T, D).

        lora: as for `mxep.ep.run_experts`. ValueError for experts with a gate of the model's own.
        """
        return self.ready_layer(experts).forward(experts, hidden_states, top_k_index, top_k_weights, lora)

    def ready_layer(self, experts: nn.Module) -> Layer:
        """The experts' layer, made where there is none for this implementation."""
        layer: Layer | None = getattr(experts, KEY, None)
        return self.layer_of(experts) if layer is None or layer.made_for is not self else layer

    def layer_of(self, experts: Any, dispatcher: TokenDispatcher | None = None, *, wgrad_scale: float = 1.0) -> Layer:
        """The experts' layer, made for this implementation. ValueError, with a cure, where it cannot serve them.

        dispatcher: where experts are spread over ranks; None: where they were.
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
            else:  # none, or all that shared it have closed it
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


def prepare(experts: Any, hidden_states: Tensor) -> None:
    """Do what would break a graph of the experts' next forward: make their layer, and pick the recipe of "auto".

    hidden_states: (..., D), tokens of their decoder layer.
    """
    how = implementation_of(experts.config)
    layer: Layer | None = experts.__dict__.get(KEY) if how is None else how.ready_layer(experts)
    if layer is not None and not isinstance(layer.recipe, Recipe):
        layer.prepare(experts, hidden_states.flatten(0, -2), top_k_of(experts.config))


def implementation_of(config: Any) -> Implementation | None:
    """mxep's implementation that a config names."""
    found = ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None), None)
    return found if isinstance(found, Implementation) else None


def route_llama4(model: nn.Module, implementation: str = "mxep_mxfp8") -> list[str]:
    """Make the experts of a Llama 4 compute only the tokens that chose them, by mxep; returns their modules' names.

    In place. Parameters stay what and where they are. `expert_parallel` may follow.
    ValueError for a model without such experts, or a name that is none.
    """
    _raise_unless_registered(implementation)
    block, routed_block, routed_experts = _classes()
    found = {name: module for name, module in model.named_modules() if isinstance(module, block)}
    if not found:
        raise ValueError(f"{type(model).__name__}: got no {block.__name__}, want a Llama 4 with experts")
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    config._experts_implementation = implementation
    for module in found.values():
        module.__class__ = routed_block
        _decorate(module.experts, routed_experts, config, is_transposed=True)
    return [f"{name}.experts" for name in found]


def route_experts(model: nn.Module, implementation: str = "mxep_mxfp8") -> list[str]:
    """Let mxep compute the experts of a Step 3.7 or LongCat-Flash; returns their modules' names.

    In place. Parameters stay what and where they are. `expert_parallel` may follow, but for LongCat's zero experts.
    ValueError for a model without such experts, or a name that is none.
    """
    _raise_unless_registered(implementation)
    found = [(name, kind, module) for name, module in model.named_modules() if (kind := _routed(type(module)))]  # type: ignore[arg-type]
    if not found:
        raise ValueError(f"{type(model).__name__}: got no experts of Step 3.7 or LongCat-Flash, want some")
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    config._experts_implementation = implementation
    for _, kind, module in found:
        _decorate(module, kind, config, is_transposed=False)
    return [name for name, *_ in found]


def _raise_unless_registered(implementation: str) -> None:
    if not isinstance(ALL_EXPERTS_FUNCTIONS.get(implementation, None), Implementation):
        raise ValueError(f"implementation: got {implementation!r}, want one that mxep has registered, as 'mxep_mxfp8'")


def _decorate(experts: Any, kind: type, config: Any, *, is_transposed: bool) -> None:
    """Give a module the class, and what transformers' decorator sets."""
    experts.__class__ = kind
    experts.config, experts.is_transposed = config, is_transposed
    experts.has_gate = experts.is_concatenated = True
    experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False


def _run(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    run = ALL_EXPERTS_FUNCTIONS[experts.config._experts_implementation]
    return run(experts, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


@functools.cache
def _routed(kind: type) -> type | None:
    """The class that a class of experts becomes; None for others."""
    if kind.__name__ not in ("Step3p7Experts", "LongcatFlashExperts"):
        return None

    class Experts(kind):  # type: ignore[misc]
        _apply_gate = getattr(kind, "_apply_gate", default_apply_gate)

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return _run(self, hidden_states, top_k_index, top_k_weights)

    class WithZeroExperts(Experts):
        """Ids from the number of weights on are experts that return their input."""

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            zero = top_k_index >= self.num_routed_experts
            out = _run(self, hidden_states, top_k_index.masked_fill(zero, -1), top_k_weights)
            back = top_k_weights.masked_fill(~zero, 0).sum(1, keepdim=True)
            return out + (hidden_states * back).to(out.dtype)

    return WithZeroExperts if kind.__name__ == "LongcatFlashExperts" else Experts


@functools.cache
def _classes() -> tuple[Any, Any, Any]:
    """transformers' block, and block and experts as they are to be; the import takes long."""
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

    class Experts(Llama4TextExperts):  # type: ignore[misc]
        _apply_gate = default_apply_gate

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return _run(self, hidden_states, top_k_index, top_k_weights)

    class Block(Llama4TextMoe):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            x = hidden_states.reshape(-1, self.hidden_dim)
            scores, logits = self.router(x)
            ids = logits.topk(self.top_k, dim=1).indices
            pairs = (x[:, None] * scores.gather(1, ids)[..., None]).view(-1, self.hidden_dim)
            once = torch.ones(len(pairs), 1, dtype=torch.float32, device=x.device)
            routed = self.experts(pairs, ids.view(-1, 1), once).view(-1, self.top_k, self.hidden_dim)
            return self.shared_expert(x) + routed.sum(1), logits

    return Llama4TextMoe, Block, Experts
