"""What a config.json of transformers says of a model's sizes, in the words of the section `model`. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "dim": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "hidden_dim": ("moe_intermediate_size", "intermediate_size"),
    "shared_experts": ("n_shared_experts",),
}
"""Key of the section `model` -> its names there, of which the first that is there counts."""


def sizes_of(found: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that there are, by key of the section `model`."""
    known = {key: [found[name] for name in names if isinstance(found.get(name), int)] for key, names in NAMES.items()}
    return {key: values[0] for key, values in known.items() if values}


def moe_layers(found: Mapping[str, Any], layers: int) -> int:
    """How many of ``layers`` layers have experts."""
    every = found.get("decoder_sparse_step") or found.get("interleave_moe_layer_step") or 1
    dense = {*range(found.get("first_k_dense_replace") or 0), *(found.get("mlp_only_layers") or ())}
    sparse = [i for i in range(layers) if i not in dense and not (i + 1) % every]
    return len(found.get("moe_layers") or sparse)
