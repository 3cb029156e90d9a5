"""Model FLOPs against the figures that NVIDIA publishes, and those counted by its rules."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV4Config,
    Dots1Config,
    GptOssConfig,
    Qwen3MoeConfig,
)

from mxep.integration.flops import count_name, flops_per_token


def qwen3(layers: int = 48, vocabulary: int = 151936) -> Any:
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    sizes |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    return Qwen3MoeConfig(**sizes, num_hidden_layers=layers, vocab_size=vocabulary)


def gpt_oss(layers: int = 24, vocabulary: int = 201088, *, windows: bool = True) -> Any:
    kinds = {} if windows else {"layer_types": ["full_attention"] * layers}
    sizes = {"num_hidden_layers": layers, "num_local_experts": 32, "vocab_size": vocabulary, **kinds}
    return GptOssConfig(**sizes)


def moonlight(layers: int = 27, vocabulary: int = 163840) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}
    sizes |= {"moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}
    sizes |= {"first_k_dense_replace": 1, "intermediate_size": 11264, "q_lora_rank": None, "kv_lora_rank": 512}
    sizes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return DeepseekV3Config(**sizes, num_hidden_layers=layers, vocab_size=vocabulary)


def gflop(config: Any, length: int) -> float:
    return sum(flops_per_token(config, length).values()) / 1e9


@pytest.mark.parametrize(
    ("config", "tflops", "tokens_per_second", "tolerance"),
    [
        (qwen3(), 299.352, 13_011.378, 1e-4),
        (qwen3(), 199.120, 8_654.602, 1e-4),
        (moonlight(), 386.590, 22_528.026, 5e-4),
        (gpt_oss(vocabulary=32000), 117.010, 5_851.199, 5e-4),
    ],
)
def test_a_published_rate_is_its_tokens_a_second_times_our_count(
    config: Any, tflops: float, tokens_per_second: float, tolerance: float
) -> None:
    assert gflop(config, 4096) * tokens_per_second / 1e3 == pytest.approx(tflops, rel=tolerance)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (qwen3(8), (4.988, 5.390, 6.196)),
        (qwen3(16), (8.108, 8.913, 10.524)),
        (qwen3(40), (17.470, 19.483, 23.510)),
        (qwen3(48), (20.590, 23.006, 27.838)),
        (qwen3(8, 32000), (3.514, 3.916, 4.722)),
        (qwen3(48, 32000), (19.117, 21.533, 26.364)),
        (gpt_oss(windows=False), (22.838, 24.046, 26.461)),
        (gpt_oss(), (22.307, 22.912, 24.120)),
        (gpt_oss(8, 32000), (6.830, 7.032, 7.435)),
        (moonlight(), (16.304, 17.153, 18.852)),
        (moonlight(13, 32000), (7.274, 7.683, 8.501)),
    ],
)
def test_layers_vocabulary_and_length_count(config: Any, expected: tuple[float, ...]) -> None:
    assert tuple(round(gflop(config, length), 3) for length in (2048, 4096, 8192)) == expected


def test_qwen3_30b_has_half_of_its_flops_in_experts() -> None:
    parts = flops_per_token(qwen3(), 4096)
    assert sum(parts.values()) == pytest.approx(23.0063e9, rel=2e-6)
    shares = {name: round(value / sum(parts.values()), 3) for name, value in parts.items() if value}
    assert shares == {"projections": 0.236, "attention": 0.21, "experts": 0.473, "head": 0.081}


def test_a_low_rank_of_queries_replaces_their_projection() -> None:
    whole, low = moonlight(), moonlight()
    low.q_lora_rank = 100
    saved = 2048 * 16 * 192 - 100 * (2048 + 16 * 192 + 1)
    parts = [flops_per_token(config, 4096)["projections"] for config in (whole, low)]
    assert parts[0] - parts[1] == 6 * 27 * saved


def test_dense_layers_have_no_experts() -> None:
    config = qwen3(4)
    config.mlp_only_layers, config.decoder_sparse_step, config.intermediate_size = [1], 2, 6144
    parts = flops_per_token(config, 4096)  # layer 3 alone has experts
    assert parts["experts"] == 6 * 3 * 2048 * 768 * 8
    assert parts["dense"] == 6 * 3 * 3 * 2048 * 6144


def test_a_vocabulary_is_padded_to_128() -> None:
    assert gflop(qwen3(8, 32001), 4096) == gflop(qwen3(8, 32128), 4096) > gflop(qwen3(8, 32000), 4096)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    config = SimpleNamespace(**vars(gpt_oss()) | {"sliding_window": 4096})
    assert gflop(config, 4096) == gflop(gpt_oss(windows=False), 4096)


SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
SMALL |= {"vocab_size": 128, "intermediate_size": 96, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SMALL |= {"max_position_embeddings": 64, "head_dim": 32, "pad_token_id": 0}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 32}
MLA |= {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MLA |= {"num_key_value_heads": 4, "head_dim": 16}
ONE = {"moe_intermediate_size": None}  # experts are of intermediate_size
CHECKED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [0]}),
    ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 40, "head_dim": 16}),
    ("mixtral", ONE | {"num_local_experts": 4}),
    ("olmoe", ONE | {"num_experts": 4, "head_dim": 16}),
    ("gpt_oss", ONE | {"num_local_experts": 4}),
    ("minimax_m2", ONE | {"num_local_experts": 4}),
    ("glm4_moe", {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    ("dots1", {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    ("deepseek_v2", MLA),
    ("deepseek_v3", MLA),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes"), CHECKED)
def test_a_count_is_that_of_the_models_gemms(kind: str, changes: dict[str, Any]) -> None:
    """With routers and shared experts' gates, and all scores."""
    config, length = AutoConfig.for_model(kind, **SMALL | changes), 16
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None] + 1, use_cache=False)
    found = counter.get_flop_counts()["Global"]
    parts = flops_per_token(config, length)
    parts["attention"] *= 2
    left_out = [m.weight for name, m in model.named_modules() if name.endswith(("gate", "router")) and m._parameters]
    norms = 6 * 2 * sum(getattr(config, name, None) or 0 for name in ("q_lora_rank", "kv_lora_rank"))  # Megatron's + 1
    counted = sum(parts.values()) - norms + 6 * sum(w.numel() for w in left_out)
    assert sum(found.values()) == counted / 3 * length


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DeepseekV4Config(), "expected a model type of deepseek_v2, .* got deepseek_v4"),
        (
            SimpleNamespace(**vars(qwen3(2)) | {"layer_types": ["full_attention", "conv"]}),
            "expected layers with full or sliding attention, got conv",
        ),
        (Dots1Config(), "dots1: expected num_experts_per_tok, got none"),
    ],
)
def test_what_is_not_known_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flops_per_token(config, 4096)


def test_a_count_names_what_it_depends_on() -> None:
    assert count_name(qwen3(16), 4096) == "Megatron's count, 16 layers, vocabulary 151936, sequence 4096"
