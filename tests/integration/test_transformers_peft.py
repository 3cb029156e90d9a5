"""LoRA on experts and on attention, over mxep's experts and over a converted model, in either order."""

import copy
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, get_peft_model

import mxep.integration.transformers  # noqa: F401
from integration.tiny_models import step, tiny, token_ids, worst
from mxep.gemm import convert, convert_mode

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": [], "target_parameters": PARAMETERS},
    "attention": {"target_modules": ["q_proj"]},
    "both": {"target_modules": ["q_proj"], "target_parameters": PARAMETERS},
}


def with_lora(model: Any, targets: str) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **TARGETS[targets]))


@pytest.mark.parametrize("targets", TARGETS)
def test_lora_over_mxeps_experts_equals_lora_over_the_models_own(targets: str) -> None:
    wanted, model = step(with_lora(tiny(), targets)), with_lora(tiny(implementation="mxep_bf16"), targets)
    got = step(model)
    lowest, name = worst(wanted, got)  # as without adapters
    assert lowest > 116, name
    assert all("lora" in name for name in got if name != "logits")
    model.gradient_checkpointing_enable()
    assert all(torch.equal(got[name], value) for name, value in step(model.train()).items())
    merged = copy.deepcopy(model).merge_and_unload()
    assert worst({"logits": wanted["logits"]}, {"logits": merged(input_ids=token_ids()).logits.detach()})[0] > 110


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("first", ["convert", "peft"])
def test_convert_before_and_after_peft_multiplies_every_product(
    targets: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []
    multiply = convert_mode._grouped_mm_any_size
    monkeypatch.setattr(convert_mode, "_grouped_mm_any_size", lambda *a: (products.append(a), multiply(*a))[1])
    wanted = step(with_lora(tiny(), targets))
    base = tiny(implementation="grouped_mm")
    if first == "convert":
        convert(base, "mxfp8", strict=True)
    model = with_lora(base, targets)
    if first == "peft":
        convert(model, "mxfp8", strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*mxfp8")
        got = step(model)
    assert len(products) == 4  # two of each layer
    # Adapters that are drawn as they are double the experts' output; a layer in MXFP8 has 23.6 dB.
    assert worst(wanted, got)[0] > 16
    model.merge_and_unload()(input_ids=token_ids())
    assert len(products) == 8, "merged, it is a converted model still"
