"""PEFT's LoRA on frozen experts on a GPU, against plain PEFT on the model with their values.

PYTHONPATH=$PYTHONPATH:tests python -m pytest --noconftest -o addopts=--import-mode=importlib -q -s THIS_FILE
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, PeftType, get_peft_model
from peft.tuners.lora import LoraModel

from integration.tiny_models import force_routing, tiny, token_ids, worst
from mxep.integration.metrics import snr
from mxep.integration.transformers import FrozenExperts, freeze_experts, merge_and_freeze, optimize
from mxep.integration.transformers.experts import weight_names

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["o_proj"], target_parameters=EXPERTS))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            width = parameter.shape[1] if "lora_A" in name else 128
            parameter.data = (torch.randn(parameter.shape, generator=generator) * width**-0.5).to(DEVICE)
    return model


def step(model: Any) -> dict[str, Tensor]:
    ids = token_ids().to(DEVICE)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return grads if out.get("logits") is None else {"logits": out.logits.detach().float(), **grads}


def pair(kind: str, fmt: Any) -> tuple[Any, Any]:
    """(frozen with LoRA, the model of its values in plain PEFT, eager), with one routing."""
    frozen = tiny(kind, "mxep_mxfp8", torch.bfloat16, **SIZES)
    plain = copy.deepcopy(frozen)
    plain.set_experts_implementation("eager")
    freeze_experts(frozen.to(DEVICE), fmt)
    plain.to(DEVICE)
    for name, experts in frozen.named_modules():
        if isinstance(experts, FrozenExperts):
            target = plain.get_submodule(name)
            for each in weight_names(experts):
                values = getattr(experts, each).dequantize()
                getattr(target, each).data.copy_(values.mT if target.is_transposed else values)
    recorded = force_routing(plain)
    with torch.no_grad():
        plain(input_ids=token_ids().to(DEVICE))
    for model in (frozen, plain):
        force_routing(model, recorded)
    ours = PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA]
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = LoraModel
    theirs = adapted(plain)
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = ours
    return adapted(frozen), theirs


@pytest.mark.parametrize(
    ("kind", "fmt"), [("qwen3_moe", "mxfp8"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "mxfp8"), ("qwen3_moe", "fp8_row")]
)
def test_lora_on_a_gpu_equals_plain_peft_on_the_values(kind: str, fmt: str) -> None:
    """Rows are in E4M3 in both passes: 23 to 26 dB a GEMM."""
    ours, theirs = pair(kind, fmt)
    wanted = step(theirs)
    for _ in range(4):  # called, recorded, played
        got = step(ours)
    lowest, name = worst(wanted, got)
    print(f"{kind} {fmt}: logits {snr(wanted['logits'], got['logits']):.1f} dB, worst {name} {lowest:.1f} dB")
    assert snr(wanted["logits"], got["logits"]) > 16
    assert lowest > 10
    ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(4):
        again = step(ours)
    assert worst(got, again)[0] > 60


def test_compiled_layers_equal_eager_ones() -> None:
    models = [tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16, **SIZES).to(DEVICE) for _ in range(2)]
    for model in models:
        freeze_experts(model, "mxfp4")
    optimize(models[0], compile=False), optimize(models[1], compile=True)
    wanted, got = ([step(each) for _ in range(4)][-1] for each in (adapted(model).train() for model in models))
    lowest, name = worst(wanted, got)
    print(f"compiled: worst {name} {lowest:.1f} dB")
    assert lowest > 10  # a token may go to other experts


def test_merging_on_a_gpu_quantizes_again() -> None:
    ours, theirs = pair("gpt_oss", "mxfp4")
    ids = token_ids().to(DEVICE)
    merged, errors = merge_and_freeze(ours, "mxfp8")
    with torch.no_grad():
        ratio = snr(theirs(input_ids=ids).logits.float(), merged(input_ids=ids).logits.float())
    print(f"merged: logits {ratio:.1f} dB, weights {min(each.snr for each in errors.values()):.1f} dB")
    assert ratio > 14
    assert min(each.snr for each in errors.values()) > 30
