"""How experts are computed, under one name: what transformers' registry calls in place of a model's own loop.

experts_implementation="mxep_mxfp8"   ->   Implementation("mxep_mxfp8", Recipe.named("mxfp8"))
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from mxep.comms import Capacity
from mxep.gemm import Recipe

from .layer import KEY, MAX_TOKENS, Layer, check_experts


@dataclass(frozen=True, eq=False)
class Implementation:
    """What `experts_implementation=` and `ep_implementation=` may name, once it is registered.

    Attributes:
        name: of it in transformers.
        recipe, backend: as for `mxep.ep.MoE`; "auto" is picked anew for each module of experts, once.
        dispatcher: ``"symmetric"``, ``"hierarchical"``, ``"nvshmem"`` or ``"all_to_all"``, where experts are spread
            over ranks.
        capacity, max_tokens, timeout, ranks_per_node, nodes_per_token: of that dispatcher, as for `mxep.ep.MoE`.
            max_tokens None: what MXEP_MAX_TOKENS says in the environment, else the most so far, between GPUs of the
            first batch.
    """

    name: str
    recipe: Recipe | Literal["auto"]
    backend: str = "auto"
    dispatcher: str = "symmetric"
    capacity: Capacity | None = None
    max_tokens: int | None = None
    timeout: float | None = None
    ranks_per_node: int | None = None
    nodes_per_token: int | None = None

    def most_tokens(self) -> int | None:
        """What was registered, else what the environment says."""
        said = os.environ.get(MAX_TOKENS)
        if self.max_tokens is not None or not said:
            return self.max_tokens
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

    def layer_of(self, experts: nn.Module, **changes: Any) -> Layer:
        """The experts' layer, made for this implementation. ValueError, with a cure, where it cannot serve them."""
        found: Layer | None = getattr(experts, KEY, None)
        if found is not None and found.parallel:  # where experts lie stays
            changes = {"dispatcher": found.dispatcher, "wgrad_scale": found.wgrad_scale} | changes
        check_experts(experts, self.name, self.recipe, spread="dispatcher" in changes)
        layer = Layer.of(experts, self, self.recipe, self.backend, max_tokens=self.most_tokens(), **changes)
        experts.__dict__[KEY] = layer  # nn.Module's own way costs more
        return layer
