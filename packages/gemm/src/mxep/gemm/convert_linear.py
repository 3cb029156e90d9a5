"""nn.Linear under `convert`: which modules are converted, and why others are left alone unless a filter selects them.

Routers, heads and adapters cost little and decide much, so they are left alone. So are linears that nothing calls, and
those that the recipe cannot handle. Embeddings are no nn.Linear.
"""

import re
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mxep.gemm.recipe import Recipe

ROUTERS: Final = re.compile(r"(^|\.)router(\.|$)|(^|[._])gate$")
HEADS: Final = re.compile(r"(^|\.)(lm_)?head$")
ADAPTERS: Final = re.compile(r"(^|\.)lora_")


def is_linear(module: nn.Module) -> bool:
    """True for an nn.Linear with nn.Linear's own forward, even if converted or sharded by FSDP2."""
    forward = getattr(type(module), "_mxep_base", type(module)).forward
    return isinstance(module, nn.Linear) and forward is nn.Linear.forward


def reason_to_leave(name: str, module: nn.Linear, vocabulary: int, recipe: Recipe) -> str | None:
    """Reason why the linear called `name` is not converted by default; None if it is.

    vocabulary: rows of the model's largest embedding, 0 if it has none.
    """
    if ROUTERS.search(name):
        return "a router, by its name"
    if HEADS.search(name) or module.out_features == vocabulary:
        return "the head: by its name, or has as many outputs as the embedding rows"
    if ADAPTERS.search(name):
        return "an adapter, by its name"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "part of nn.MultiheadAttention, which does not call it"
    if module.weight.dtype not in (torch.bfloat16, torch.float32):
        return f"its weight is {module.weight.dtype}"
    if module.out_features % recipe.group_alignment or module.in_features % recipe.group_alignment:
        return f"its sizes are no multiples of {recipe.group_alignment}, which recipe {recipe.name} wants"
    return None


def vocabulary_of(model: nn.Module) -> int:
    """Rows of the largest embedding, 0 without one."""
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)


def by_pattern(fqns: Iterable[str]) -> str:
    """Names with layer numbers replaced by stars, each pattern once: "layers.*.q_proj.weight (48), ..."."""
    found: dict[str, list[str]] = {}
    for fqn in fqns:
        found.setdefault(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", fqn), []).append(fqn)
    return ", ".join(f"{pattern} ({len(names)})" if len(names) > 1 else names[0] for pattern, names in found.items())
