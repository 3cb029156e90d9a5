"""Model FLOPs of a token in a training step, counted as NVIDIA's Megatron-LM and Megatron-Bridge count them.

    Qwen3-30B-A3B, 48 layers, vocabulary 151936, S 4096: 23.0063 GFLOP a token; 13,011 tokens/s are 299.3 TFLOP/s

Each matrix product counts 6 times its multiply-adds: 2 FLOPs each, in forward, dgrad and wgrad. Multiply-adds a token:

    projections         D (Dq + 2 Dkv) + Dq D, Dq = heads * head_dim
                        latent attention (MLA) has its low-rank factors
    attention           Dq S / 2 for the scores and as many for the values: causality halves both
                        in a layer with a window W < S: W (W + 1) / 2 + (S - W) W scores in place of S^2 / 2
    experts             3 D F K, and 3 D F for each shared expert of that size; 3 D Fd in a dense layer
    head                D * V, V padded to a multiple of 128

Not counted: routers, embedding, norms, RoPE, softmax, loss, optimizer, and recomputation by checkpointing.

Source: `transformer_flops` in Megatron-LM's megatron/training/training.py (d98e8a6); windows as in Megatron-Bridge's
training/utils/flop_utils.py (067f987). Megatron-LM ignores windows.

D model dim, F hidden dim of an expert, Fd of a dense layer, K experts a token, S sequence length, V vocabulary.
"""

from __future__ import annotations

from typing import Any

VOCABULARY_MULTIPLE = 128
"""Megatron-Bridge pads vocabularies to this times the tensor-parallel size, here 1."""
COUNTED = (
    *("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "olmoe"),
    *("qwen2_moe", "qwen3_moe"),
)
"""Model types for which a test compares the count with their GEMMs (tests/integration/test_flops.py)."""


def flops_per_token(config: Any, length: float) -> dict[str, float]:
    """FLOPs of a token in forward and backward, by part of the model.

    config: config of a transformers decoder, or any object with its attributes. Without a model_type it is counted as
    a decoder like Qwen3-MoE or DeepSeek-V3. length: S; sum(L^2) / sum(L) for packed sequences of lengths L.

    Raises ValueError for a model type that is not in COUNTED, and for layers of an unknown type.
    """
    kind = getattr(config, "model_type", None)
    if kind is not None and kind not in COUNTED:
        raise ValueError(f"flops_per_token: expected a model type of {', '.join(COUNTED)}, got {kind}")
    dim, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    hidden = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    dense_hidden = getattr(config, "intermediate_size", 0)
    sparse = sum(_is_sparse(config, i) for i in range(layers))
    if latent := getattr(config, "kv_lora_rank", None):
        query_key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        rank = getattr(config, "q_lora_rank", None)
        query = rank * (dim + heads * query_key + 1) if rank else dim * heads * query_key
        key_value = latent * (dim + heads * (config.qk_nope_head_dim + value) + 1) + dim * config.qk_rope_head_dim
        projections = query + key_value + heads * value * dim
    else:
        query_key = value = getattr(config, "head_dim", None) or dim // heads
        key_value = 2 * (getattr(config, "num_key_value_heads", None) or heads) * value
        projections = dim * (2 * heads * value + key_value)
    shared = hidden * (getattr(config, "n_shared_experts", None) or 0)
    shared += getattr(config, "shared_expert_intermediate_size", None) or 0
    counted = {
        "projections": layers * projections,
        "attention": heads * (query_key + value) * _contexts(config, length),
        "experts": sparse * 3 * dim * hidden * top_k_of(config),
        "shared experts": sparse * 3 * dim * shared,
        "dense": (layers - sparse) * 3 * dim * dense_hidden,
        "head": dim * -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
    }
    return {part: 6.0 * multiply_adds for part, multiply_adds in counted.items()}


def count_name(config: Any, length: int) -> str:
    """Words to print with a figure in TFLOP/s: the way of counting, and the sizes that matter most."""
    return f"Megatron's count, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}, sequence {length}"


def top_k_of(config: Any) -> int:
    """K, under any of its names in transformers configs. Raises ValueError if there is none."""
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"):
        if top_k := getattr(config, name, None):
            return int(top_k)
    raise ValueError(f"{getattr(config, 'model_type', 'config')}: expected num_experts_per_tok, got none")


def _is_sparse(config: Any, i: int) -> bool:
    if (first := getattr(config, "first_k_dense_replace", None)) is not None:
        return i >= int(first)
    named, every = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return i not in named and not (i + 1) % every


def _contexts(config: Any, length: float) -> float:
    """Mean number of tokens that a token attends to, summed over layers. Raises ValueError for unknown layer types."""
    window, layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    default = "sliding_attention" if window else "full_attention"
    kinds = list(getattr(config, "layer_types", None) or [default] * layers)[:layers]
    if unknown := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        raise ValueError(f"flops_per_token: expected layers with full or sliding attention, got {unknown[0]}")
    within = length / 2
    if window and window < length:
        within = (window * (window + 1) / 2 + (length - window) * window) / length
    return sum(length / 2 if kind == "full_attention" else within for kind in kinds)
