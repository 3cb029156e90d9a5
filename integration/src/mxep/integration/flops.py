"""Model FLOPs of a token in a training step, counted as NVIDIA's Megatron-LM and Megatron-Bridge count them.

    Qwen3-30B-A3B, 48 layers, vocabulary 151936, S 4096: 23.0063 GFLOP a token; 13,011 tokens/s are 299.3 TFLOP/s

Each matrix product counts 6 times its multiply-adds: 2 FLOPs each, in forward, dgrad and wgrad. Multiply-adds a token:

    projections         D (Dq + 2 Dkv) + Dq D, Dq = heads * head_dim; D Dq more for an output gate
                        latent attention (MLA) has its low-rank factors
    attention           Dq S / 2 for the scores and as many for the values: causality halves both
                        in a layer with a window W < S: W (W + 1) / 2 + (S - W) W scores in place of S^2 / 2
                        in a layer with chunks of C: C^2 / 2 a chunk
    linear attention    gated delta net: its convolution, and 4 Hv Dv^2 for Hv heads of Dv values
    experts             3 D F K, and 3 D F for each shared expert of that size; 3 D Fd in a dense layer
    head                D * V, V padded to a multiple of 128

Not counted: routers, embedding, norms, RoPE, softmax, loss, optimizer, and recomputation by checkpointing.

Source: `transformer_flops` in Megatron-LM's megatron/training/training.py (d98e8a6); windows as in Megatron-Bridge's
training/utils/flop_utils.py (067f987). Megatron-LM ignores windows and chunks.

D model dim, F hidden dim of an expert, Fd of a dense layer, K experts a token, S sequence length, V vocabulary.
"""

from __future__ import annotations

from typing import Any

VOCABULARY_MULTIPLE = 128
"""Megatron-Bridge pads vocabularies to this times the tensor-parallel size, here 1."""
COUNTED = (
    *("afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "llama4_text"),
    *("minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
)
"""Model types for which a test compares the count with their GEMMs (tests/integration/test_flops.py)."""
GATED = "afmoe", "qwen3_5_moe_text", "qwen3_next"
"""Model types with a gate on the output of attention: one more projection, of Dq features."""


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
    dense_hidden = getattr(config, "intermediate_size_mlp", None) or getattr(config, "intermediate_size", 0)
    kinds = _layer_kinds(config)
    linear = kinds.count("linear_attention")
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
        projections = dim * ((2 + (kind in GATED)) * heads * value + key_value)
    linear_projections = delta_net = 0
    if linear:
        value_heads, width = config.linear_num_value_heads, config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * config.linear_key_head_dim, value_heads * width
        linear_projections = dim * (2 * keys + 3 * values + 2 * value_heads)
        delta_net = config.linear_conv_kernel_dim * (2 * keys + values) + 4 * value_heads * width**2
    names = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    shared = hidden * (kind == "llama4_text" or sum(getattr(config, name, None) or 0 for name in names))
    shared += getattr(config, "shared_expert_intermediate_size", None) or 0
    counted = {
        "projections": (layers - linear) * projections + linear * linear_projections,
        "attention": heads * (query_key + value) * sum(_context(config, each, length) for each in kinds),
        "linear attention": linear * delta_net,
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
    if (chosen := getattr(config, "moe_layers", None)) is not None:
        return i in chosen
    if (start := getattr(config, "moe_layer_start_index", None)) is not None:
        end = config.moe_layer_end_index
        last = config.num_hidden_layers - 1 if end == -1 else end
        return bool(start <= i <= last and (i + 1) % config.moe_layer_interval == 0)
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if (first := getattr(config, name, None)) is not None:
            return i >= int(first)
    named, every = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return i not in named and not (i + 1) % every


def _layer_kinds(config: Any) -> list[str]:
    """Each layer's attention, in the words of transformers' layer_types. Raises ValueError for others."""
    default = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    layers: int = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or [default] * layers)[:layers]
    known = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"flops_per_token: expected layer types of {', '.join(known)}, got {kind}")
    return kinds


def _context(config: Any, kind: str, length: float) -> float:
    """Mean number of tokens that a token attends to in a layer of this kind."""
    if kind == "linear_attention":
        return 0.0
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    if window and window < length:
        return float(window * (window + 1) / 2 + (length - window) * window) / length
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    if chunk and chunk < length:
        whole, rest = divmod(length, chunk)
        return float(whole * chunk**2 + rest**2) / 2 / length
    return length / 2
