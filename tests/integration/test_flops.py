"""Model FLOPs against the figures that NVIDIA publishes, and those counted by its rules."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

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


def test_a_count_names_what_it_depends_on() -> None:
    assert count_name(qwen3(16), 4096) == "Megatron's count, 16 layers, vocabulary 151936, sequence 4096"
