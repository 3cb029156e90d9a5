"""How experts are computed, under one name: what transformers' registry calls in place of a model's own loop.

experts_implementation="mxep_mxfp8"   ->   Implementation("mxep_mxfp8", Recipe.named("mxfp8"))
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Literal, Unpack

from torch import Tensor, nn

from mxep.ep import Dispatch, DispatchFields, LocalDispatcher, TokenDispatcher
from mxep.gemm import Recipe
from mxep.gemm.backends import BACKENDS

from .layer import KEY, MAX_TOKENS, Layer, activation_of, check_experts, has_own_parameters

_local: weakref.WeakValueDictionary[int, TokenDispatcher] = weakref.WeakValueDictionary()
"""By number of experts: layers share one, so that a check asks the device once."""


class Implementation:
    """What `experts_implementation=` and `ep_implementation=` may name, once it is registered.

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
        """What was registered, else what the environment says."""
        said = os.environ.get(MAX_TOKENS)
        if self.dispatch.max_tokens is not None or not said:
            return self.dispatch.max_tokens
        if not said.isdecimal() or int(said) < 1:
            raise ValueError(
                f"{MAX_TOKENS}: got {said!r}, want the most tokens (batch times length) that a rank brings"
            )
        return int(said)

    def __call__(self, experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The forward of `experts`: hidden_states (T, D), top_k_index, top_k_weights (T, K) -> (T, D)."""
        layer: Layer | None = getattr(experts, KEY, None)
        if layer is None or layer.made_for is not self:
            layer = self.layer_of(experts)
        return layer.forward(experts, hidden_states, top_k_index, top_k_weights)

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
