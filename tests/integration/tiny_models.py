"""Random models of transformers, as small as they go: two layers, four experts each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from mxep.integration.metrics import snr

TOKENS = 24
_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_DEEPSEEK |= {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**_BASE, head_dim=32, moe_intermediate_size=32, num_experts=4),
    "mixtral": lambda: MixtralConfig(**_BASE, head_dim=32, num_local_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(**_BASE, **_DEEPSEEK, moe_intermediate_size=32, n_routed_experts=4),
    "gpt_oss": lambda: GptOssConfig(**_BASE, head_dim=32, num_local_experts=4, rope_parameters=dict(_ROPE)),
    "llama4": lambda: Llama4TextConfig(
        **_BASE | {"num_experts_per_tok": 1}, head_dim=32, intermediate_size_mlp=64, num_local_experts=4,
        interleave_moe_layer_step=1, attention_chunk_size=64,
    ),
}  # fmt: skip
_V4 = {"q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 1, "hc_mult": 2, "sliding_window": 64, "n_routed_experts": 4}
_V4 |= {"layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["moe"] * 2, "partial_rotary_factor": 0.5}
_V2 = {"moe_intermediate_size": 32, "n_routed_experts": 4, "topk_method": "group_limited_greedy", "n_group": 2}
OTHERS: dict[str, Callable[[], Any]] = {
    "deepseek_v2": lambda: DeepseekV2Config(**_BASE | _DEEPSEEK | _V2),
    "deepseek_v4": lambda: DeepseekV4Config(
        **_BASE | {"num_key_value_heads": 1}, **_V4, head_dim=32, moe_intermediate_size=32, num_nextn_predict_layers=0
    ),
}
"""Of which few tests are."""


def tiny(
    kind: str = "qwen3_moe", implementation: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """The model of a seed. Experts' weights have a standard deviation of 1 / sqrt(fan-in), embeddings 1, as trained."""
    config = (CONFIGS | OTHERS)[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if "experts" in name or "embed_tokens" in name:
            nn.init.normal_(parameter, std=0.125 if "experts" in name else 1.0)
    model.to(dtype)
    if implementation != "eager":
        model.set_experts_implementation(implementation)
    return model


def whole(x: Tensor) -> Tensor:
    """All of a tensor of which a rank may hold a part."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def token_ids(rows: int = 2, seed: int = 1, device: Any = None) -> Tensor:
    return torch.randint(3, 64, (rows, TOKENS), generator=torch.Generator().manual_seed(seed)).to(device)


def step(model: nn.Module, ids: Tensor | None = None) -> dict[str, Tensor]:
    """Logits of a forward, and the gradients of its loss by the parameters' names."""
    ids = token_ids() if ids is None else ids
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **grads}


def worst(wanted: dict[str, Tensor], got: dict[str, Tensor], *, experts: bool = False) -> tuple[float, str]:
    """The lowest SNR of any tensor, and its name; experts: of their weights alone."""
    assert wanted.keys() == got.keys()
    names = [name for name in wanted if not experts or ".experts." in name]
    return min((snr(wanted[name], got[name]), name) for name in names)


def force_routing(model: nn.Module, recorded: list[Tensor] | None = None) -> list[Tensor]:
    """Record which experts the routers of a model choose, or make them choose what was recorded; the list of both.

    Weights stay the router's own, at the experts that were recorded.
    """
    found: list[Tensor] = [] if recorded is None else recorded
    ends = ".mlp.gate", ".mlp.router", ".feed_forward.router"
    routers = [module for name, module in model.named_modules() if name.endswith(ends)]
    for i, router in enumerate(routers):

        def hook(module: nn.Module, args: Any, out: Any, i: int = i) -> Any:
            if recorded is None:
                found.append(out[2] if len(out) == 3 else out[1].topk(module.top_k).indices)
                return None
            if len(out) == 2:  # Llama 4: scores of all experts, and logits by which its block chooses
                logits = torch.full_like(out[1], -torch.inf).scatter(1, recorded[i], out[1].gather(1, recorded[i]))
                return logits.float().sigmoid().to(out[0].dtype), logits
            logits, weights, _ = out
            sigmoid = hasattr(module, "e_score_correction_bias")  # DeepSeek-V3
            scores = (logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)).gather(1, recorded[i])
            scores = scores / scores.sum(-1, keepdim=True) * getattr(module, "routed_scaling_factor", 1.0)
            return logits, scores.to(weights.dtype), recorded[i]

        router.register_forward_hook(hook)
    assert routers
    return found
