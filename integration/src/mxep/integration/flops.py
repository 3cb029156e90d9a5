"""Model FLOPs of a token in a training step, counted as NVIDIA's Megatron-LM and Megatron-Bridge count them.

    Qwen3-30B-A3B, 48 layers, vocabulary 151936, S 4096: 23.0063 GFLOP a token; 13,011 tokens/s are 299.3 TFLOP/s

Each matrix product counts 6 times its multiply-adds: 2 FLOPs each, in forward, dgrad and wgrad. Multiply-adds a token:

    projections    D (Dq + 2 Dkv) + Dq D, Dq = heads * head_dim; latent attention (MLA) has its low-rank factors
    attention      Dq S / 2 for the scores and as many for the values: causality halves both
                   in a layer with a window W < S: W (W + 1) / 2 + (S - W) W scores in place of S^2 / 2
    experts        3 D F K, and as much for a shared expert of that size; 3 D Fd in a dense layer
    head           D * V, V padded to a multiple of 128

Routers, embedding, norms, RoPE, softmax, loss, optimizer and whatever checkpointing computes again count nothing.

Source: `transformer_flops` in Megatron-LM's megatron/training/training.py (d98e8a6); windows as in Megatron-Bridge's
training/utils/flop_utils.py (067f987). Megatron-LM ignores windows.

D model dim, F hidden dim of an expert, Fd of a dense layer, K experts a token, S sequence length, V vocabulary.
"""

from __future__ import annotations

from typing import Any

VOCABULARY_MULTIPLE = 128
"""Megatron-Bridge pads vocabularies to this times the tensor-parallel size, here 1."""


def flops_per_token(config: Any, length: float) -> dict[str, float]:
    """FLOPs of a token in forward and backward, by part; their sum is the model's.

    config: of a decoder of transformers, or anything with its attributes. length: S; of packed sequences the mean over
    tokens of the length of their sequence, sum(L^2) / sum(L).
    """
    dim, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    hidden = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    dense = _dense_layers(config)
    if latent := getattr(config, "kv_lora_rank", None):
        query_key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        rank = getattr(config, "q_lora_rank", None)
        query = rank * (dim + heads * query_key + 1) if rank else dim * heads * query_key
        key_value = latent * (dim + heads * (config.qk_nope_head_dim + value) + 1) + dim * config.qk_rope_head_dim
        projections = query + key_value + heads * value * dim
    else:
        query_key = value = getattr(config, "head_dim", None) or dim // heads
        key_value = 2 * (getattr(config, "num_key_value_heads", None) or heads) * value
        projections = dim * (heads * query_key + key_value) + heads * value * dim
    context = sum(_context(length, window) for window in _windows(config))
    shared = hidden * (getattr(config, "n_shared_experts", None) or 0)
    shared += getattr(config, "shared_expert_intermediate_size", None) or 0
    counted = {
        "projections": layers * projections,
        "attention": heads * (query_key + value) * context,
        "experts": (layers - dense) * 3 * dim * hidden * top_k_of(config),
        "shared experts": (layers - dense) * 3 * dim * shared,
        "dense": dense and dense * 3 * dim * config.intermediate_size,
        "head": dim * -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
    }
    return {part: 6.0 * multiply_adds for part, multiply_adds in counted.items()}


def count_name(config: Any, length: int) -> str:
    """The sizes on which a figure in TFLOP/s depends most, to be named beside it."""
    return f"Megatron's count, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}, sequence {length}"


def top_k_of(config: Any) -> int:
    """K, by the names that configs of transformers have for it. ValueError if there is none."""
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"):
        if top_k := getattr(config, name, None):
            return int(top_k)
    raise ValueError(f"{getattr(config, 'model_type', 'config')}: expected num_experts_per_tok, got none")


def _dense_layers(config: Any) -> int:
    """Layers without experts."""
    if (first := getattr(config, "first_k_dense_replace", None)) is not None:
        return min(int(first), int(config.num_hidden_layers))
    named, every = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return sum(i in named or bool((i + 1) % every) for i in range(config.num_hidden_layers))


def _windows(config: Any) -> list[int | None]:
    """Each layer's attention window; None for a layer that attends to all tokens before."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds[: config.num_hidden_layers]]


def _context(length: float, window: int | None) -> float:
    """Mean number of tokens that a token attends to."""
    if not window or window >= length:
        return length / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length
