"""Models that the registry does not reach, because their experts' class has no decorator:

    Step 3.7, LongCat-Flash   `route_experts`: experts as others have them; LongCat's zero experts give tokens back
    Llama 4                   `route_llama4`: experts multiply every token, most of them by zero

In Llama 4 scores multiply the input of the experts, not their output: each (token, expert) pair is a token of its own.

    score (T, K)  sigmoid of the chosen logits    x * score -> experts, K rows a token, each for one expert -> sum

T tokens, K experts a token.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .experts import ALL_EXPERTS_FUNCTIONS, default_apply_gate, registered


def route_llama4(model: nn.Module, implementation: str = "mxep_mxfp8") -> list[str]:
    """Make the experts of a Llama 4 compute only the tokens that chose them, by mxep; returns their modules' names.

    In place. Parameters stay what and where they are. `expert_parallel` may follow.
    ValueError for a model without such experts, or a name that is none.
    """
    registered(implementation)
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
    registered(implementation)
    found = [(name, kind, module) for name, module in model.named_modules() if (kind := _routed(type(module)))]  # type: ignore[arg-type]
    if not found:
        raise ValueError(f"{type(model).__name__}: got no experts of Step 3.7 or LongCat-Flash, want some")
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    config._experts_implementation = implementation
    for _, kind, module in found:
        _decorate(module, kind, config, is_transposed=False)
    return [name for name, *_ in found]


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
