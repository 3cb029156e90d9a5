"""Llama 4, whose experts transformers' registry does not reach: they multiply every token, most of them by zero.

    score (T, K)  sigmoid of the chosen logits    x * score -> experts, K rows a token, each for one expert -> sum

Scores multiply the input of the experts there, not their output: so each (token, expert) pair is a token of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .implementation import Implementation
from .versions import ALL_EXPERTS_FUNCTIONS, default_apply_gate


def route_llama4(model: nn.Module, implementation: str = "mxep_mxfp8") -> list[str]:
    """Make the experts of a Llama 4 compute only the tokens that chose them, by mxep; returns their modules' names.

    In place. Parameters stay what and where they are. `expert_parallel` may follow.
    ValueError for a model without such experts, or a name that is none.
    """
    if not isinstance(ALL_EXPERTS_FUNCTIONS.get(implementation, None), Implementation):
        raise ValueError(f"implementation: got {implementation!r}, want one that mxep has registered, as 'mxep_mxfp8'")
    block, routed_block, routed_experts = _classes()
    found = {name: module for name, module in model.named_modules() if isinstance(module, block)}
    if not found:
        raise ValueError(f"{type(model).__name__}: got no {block.__name__}, want a Llama 4 with experts")
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    config._experts_implementation = implementation
    for module in found.values():
        experts: Any = module.experts
        module.__class__, experts.__class__ = routed_block, routed_experts
        experts.config = config
        experts.has_gate = experts.is_concatenated = experts.is_transposed = True
        experts.has_bias = experts._is_expert_parallel = False
    return [f"{name}.experts" for name in found]


@functools.cache
def _classes() -> tuple[Any, Any, Any]:
    """transformers' block, and block and experts as they are to be; the import takes long."""
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

    class Experts(Llama4TextExperts):  # type: ignore[misc]
        _apply_gate = default_apply_gate

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            run = ALL_EXPERTS_FUNCTIONS[self.config._experts_implementation]
            return run(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]

    class Block(Llama4TextMoe):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            x = hidden_states.reshape(-1, self.hidden_dim)
            scores, logits = self.router(x)
            ids = logits.topk(self.top_k, dim=1).indices
            pairs = (x[:, None] * scores.gather(1, ids)[..., None]).view(-1, self.hidden_dim)
            once = torch.ones(len(pairs), 1, device=x.device)
            routed = self.experts(pairs, ids.view(-1, 1), once).view(-1, self.top_k, self.hidden_dim)
            return self.shared_expert(x) + routed.sum(1), logits

    return Llama4TextMoe, Block, Experts
