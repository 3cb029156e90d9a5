"""Models that transformers' registry does not reach, because their experts' class has no decorator.

    Step 3.7, LongCat-Flash   experts like those of other models; LongCat's zero experts return their input
    Llama 4                   each expert computes all tokens, with scores of zero for most of them

Llama 4 multiplies the input of experts by scores, not their output. So each (token, expert) pair becomes a token:

    score (T, K)  sigmoid of the chosen logits    x * score -> experts, K rows a token, each for one expert -> sum

T tokens, K experts a token.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .experts import ALL_EXPERTS_FUNCTIONS, default_apply_gate, registered, remade_by


def route_experts(model: nn.Module, implementation: str = "mxep_mxfp8") -> list[str]:
    """Let mxep compute the experts of a Llama 4, Step 3.7 or LongCat-Flash. Returns their modules' names.

    The model changes in place, its parameters do not. `expert_parallel` may follow, unless there are zero experts.
    Raises ValueError for a model without such experts, or an unknown name.
    """
    registered(implementation)
    routed = {name: kind for name, module in model.named_modules() if (kind := _routed(type(module)))}  # type: ignore[arg-type]
    if not routed:
        raise ValueError(f"{type(model).__name__}: got no experts of Llama 4, Step 3.7 or LongCat-Flash, want some")
    if replaced := next((name for name in routed if "forward" in model.get_submodule(name).__dict__), None):
        raise ValueError(
            f"{replaced}: got a forward that was replaced, as device_map does over several devices, want its class's: "
            "route_experts before accelerate's dispatch_model"
        )
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    config._experts_implementation = implementation
    names = []
    for name, kind in routed.items():
        module: Any = model.get_submodule(name)
        module.__class__ = kind
        if hasattr(kind, "_apply_gate"):  # experts, not a block: set what transformers' decorator sets
            names.append(name)
            module.config, module.is_transposed = config, kind.__name__.startswith("Llama4")
            module.has_gate = module.is_concatenated = True
            module.has_bias = module.has_post_expert_norm = module._is_expert_parallel = False
    return names


def _run(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **lora: Any) -> Tensor:
    run = ALL_EXPERTS_FUNCTIONS[experts.config._experts_implementation]
    return run(experts, hidden_states, top_k_index, top_k_weights, **lora)  # type: ignore[no-any-return]


def _run_with_zero_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **lora: Any
) -> Tensor:
    """Run experts if ids >= num_routed_experts are zero experts, which return their input."""
    zero = top_k_index >= experts.num_routed_experts
    out = _run(experts, hidden_states, top_k_index.masked_fill(zero, -1), top_k_weights, **lora)
    back = top_k_weights.masked_fill(~zero, 0).sum(1, keepdim=True)
    return out + (hidden_states * back).to(out.dtype)


def _run_llama4_block(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, block.hidden_dim)
    scores, logits = block.router(x)
    ids = logits.topk(block.top_k, dim=1).indices
    pairs = (x[:, None] * scores.gather(1, ids)[..., None]).view(-1, block.hidden_dim)
    once = torch.ones(len(pairs), 1, dtype=torch.float32, device=x.device)
    routed = block.experts(pairs, ids.view(-1, 1), once).view(-1, block.top_k, block.hidden_dim)
    return block.shared_expert(x) + routed.sum(1), logits


FORWARDS = {
    "Step3p7Experts": _run,
    "LongcatFlashExperts": _run_with_zero_experts,
    "Llama4TextExperts": _run,
    "Llama4TextMoe": _run_llama4_block,
}
"""Name of a class in transformers -> its forward by mxep."""


@functools.cache
def _routed(kind: type) -> type | None:
    """The class that replaces a class of experts or of their block; None if there is none."""
    name = next((base.__name__ for base in kind.__mro__ if base.__name__ in FORWARDS), None)
    if name is None:
        return None
    if getattr(kind, "forward", None) is FORWARDS[name]:
        return kind
    gate = {"_apply_gate": getattr(kind, "_apply_gate", default_apply_gate)} if name.endswith("Experts") else {}
    own = {"forward": FORWARDS[name], **remade_by(_routed, kind), **gate}
    return type(kind.__name__, (kind,), own)
