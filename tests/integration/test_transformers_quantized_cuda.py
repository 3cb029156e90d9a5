"""Quantized models on a GPU: the bytes, the memory, logits, exports and replays. No fixtures: it runs without hydra.

PYTHONPATH=$PYTHONPATH:tests python -m pytest --noconftest -o addopts=--import-mode=importlib -q -s THIS_FILE
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from integration.quantized_checkpoints import write
from integration.tiny_models import force_routing, tiny, token_ids
from mxep.ep.lora import LoRAWeights
from mxep.gemm import Recipe
from mxep.gemm.backends import select
from mxep.integration.metrics import snr
from mxep.integration.transformers import (
    FrozenExperts,
    freeze_experts,
    joined_routing,
    load_quantized,
    record_routing,
    replay_routing,
    save_quantized,
)

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = [("gpt_oss", "gpt-oss"), ("qwen3_moe", "minimax-m3"), ("qwen3_moe", "ct-mxfp4"), ("deepseek_v3", "deepseek-v3")]
CASES += [("qwen3_moe", "ct-fp8-row")]
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}


def step(model: Any) -> dict[str, Tensor]:
    """Logits, and gradients by name."""
    ids = token_ids().to(next(model.parameters()).device)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_a_gpu_reads_the_bytes_and_computes_with_them(tmp_path: Path, model: str, kind: str) -> None:
    reference = write(tmp_path, model, kind, **SIZES)
    loaded, on_cpu = load_quantized(tmp_path, device=DEVICE), load_quantized(tmp_path)
    for name, x in on_cpu.state_dict().items():
        assert torch.equal(x, loaded.state_dict()[name].cpu()), name
    recorded = force_routing(reference)
    with torch.no_grad():
        reference(input_ids=token_ids())
    force_routing(reference, recorded)
    force_routing(loaded, [ids.to(DEVICE) for ids in recorded])
    wanted = step(reference)
    for _ in range(4):  # called, recorded, played
        got = step(loaded)
    ratios = {name: snr(wanted[name], x.cpu().float()) for name, x in got.items()}
    print(model, kind, {name: round(ratios[name], 1) for name in ("logits", min(ratios, key=ratios.__getitem__))})
    assert ratios["logits"] > 18
    assert min(ratios.values()) > 10


@pytest.mark.parametrize(("model", "kind"), [("gpt_oss", "gpt-oss"), ("qwen3_moe", "minimax-m3")])
def test_loading_takes_the_memory_of_the_model_and_a_layer(tmp_path: Path, model: str, kind: str) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "intermediate_size": 512, "num_hidden_layers": 4}
    write(tmp_path, model, kind, **sizes, num_experts=8, num_local_experts=8, layer_types=["full_attention"] * 4)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_quantized(tmp_path, device=DEVICE)
    peak = torch.cuda.max_memory_allocated() - before
    named = dict(loaded.named_parameters())
    whole = sum(p.nbytes for p in named.values())
    layer = sum(p.nbytes for n, p in named.items() if n.startswith("model.layers.0.mlp.experts."))
    print(f"{model}: model {whole / 2**20:.1f} MiB, a layer's experts {layer / 2**20:.1f}, peak {peak / 2**20:.1f}")
    assert peak < whole + layer


def test_lora_trains_on_frozen_experts() -> None:
    model = tiny("gpt_oss", "mxep_mxfp8", torch.bfloat16, **SIZES).to(DEVICE)
    freeze_experts(model, "mxfp4")
    experts: Any = model.model.layers[0].mlp.experts
    pairs = [side for w in (experts.gate_up_proj, experts.down_proj) for side in ((8, w.shape[2]), (w.shape[1], 8))]
    parts = [torch.randn(4, *side, device=DEVICE, dtype=torch.bfloat16).div_(8).requires_grad_() for side in pairs]
    x = torch.randn(64, 128, device=DEVICE, dtype=torch.bfloat16)
    ids, weights = torch.randint(0, 4, (64, 2), device=DEVICE), torch.rand(64, 2, device=DEVICE)
    out = experts(x, ids, weights, lora=LoRAWeights(*parts, scale=2.0))
    out.float().square().sum().backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in parts)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_mxfp4_weights"])
def test_trained_experts_are_exported_as_forward_multiplied_them(tmp_path: Path, recipe: str) -> None:
    model = tiny("qwen3_moe", f"mxep_{recipe}", torch.bfloat16, **SIZES).to(DEVICE)
    for _ in range(4):
        step(model)
    fmt: Any = "mxfp4" if "mxfp4" in recipe else "mxfp8"
    ratios = save_quantized(model, tmp_path, fmt)
    again = load_quantized(tmp_path, device=DEVICE)
    for name, module in again.named_modules():
        if isinstance(module, FrozenExperts):
            for each in ("gate_up_proj", "down_proj"):
                w = getattr(model.get_submodule(name), each)
                forward, _ = select("auto", DEVICE).quantize_weight_rowwise(w, Recipe.named(recipe))
                got = getattr(module, each).shipped().dequantize(torch.float32)
                assert torch.equal(got, forward.dequantize(torch.float32))
    with torch.no_grad():
        ids = token_ids().to(DEVICE)
        again.model.rotary_emb.load_state_dict(model.model.rotary_emb.state_dict())
        again.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq)  # `tiny` casts it
        wanted, got = model.eval()(input_ids=ids).logits, again(input_ids=ids).logits
    print(
        recipe, "exported:", round(min(ratios.values()), 1), "dB; logits:", round(snr(wanted.float(), got.float()), 1)
    )
    assert snr(wanted.float(), got.float()) > 40


def test_replayed_routing_changes_no_bit_and_is_that_of_the_batch() -> None:
    model = tiny("gpt_oss", "mxep_mxfp8", torch.bfloat16, **SIZES).to(DEVICE)
    freeze_experts(model, "mxfp8")
    with record_routing(model) as found:
        wanted = step(model)
    with replay_routing(model, joined_routing(found, 2)):
        for _ in range(4):
            got = step(model)
    assert torch.equal(wanted["logits"], got["logits"])
    router = model.model.layers[0].mlp.router.weight
    assert router.grad is not None
    assert router.grad.abs().sum() > 0


@pytest.mark.parametrize("implementation", ["mxep_mxfp8", "mxep_fp8", "mxep_bf16"])
def test_a_tokens_experts_do_not_depend_on_the_batch(implementation: str) -> None:
    """Bit for bit, of the experts alone. bf16 is cuBLAS's: it is printed, not asserted."""
    model = tiny("qwen3_moe", implementation, torch.bfloat16, **SIZES).to(DEVICE)
    if implementation == "mxep_mxfp8":
        freeze_experts(model, "mxfp8")
    experts: Any = model.model.layers[0].mlp.experts
    x = torch.randn(512, 128, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.rand(512, 4, device=DEVICE).argsort(1)[:, :2]
    weights = torch.rand(512, 2, device=DEVICE)
    with torch.no_grad():
        whole = experts(x, ids, weights)
        same = [torch.equal(experts(x[:n], ids[:n], weights[:n]), whole[:n]) for n in (1, 7, 64, 200)]
    print(implementation, "batch-invariant:", same)
    assert all(same) or implementation == "mxep_bf16"
