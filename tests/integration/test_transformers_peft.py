"""LoRA on experts and on attention: over mxep's experts, here and over ranks, and over a converted model."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

from integration.test_transformers_parallel import of_mean_loss, of_one_process
from integration.test_transformers_served import longcat, replaced_forwards
from integration.tiny_models import step, tiny, token_ids, worst
from mxep.ep import parameter_groups
from mxep.ep.dtensors import local_tensor
from mxep.gemm import convert, convert_mode
from mxep.integration.metrics import snr
from mxep.integration.transformers import check, expert_parallel, freeze_experts, record_routing, route_experts
from mxep.integration.transformers.experts import layers
from ranks import Context, distributed

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


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_lora_on_experts_leaves_them_fused(kind: str) -> None:
    plain, model = tiny(kind, "mxep_mxfp8_gate_up_fp8"), with_lora(tiny(kind, "mxep_mxfp8_gate_up_fp8"), "experts")
    step(plain), step(model)
    activations = [[layer.activation for _, layer in layers(each)] for each in (plain, model)]
    assert activations[0] == activations[1]
    assert None not in activations[1]
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=token_ids()).logits, plain(input_ids=token_ids()).logits)


def test_lora_on_experts_runs_the_hooks_of_experts() -> None:
    model = tiny(implementation="mxep_mxfp8")
    adapted = get_peft_model(model, LoraConfig(r=8, init_lora_weights=False, **TARGETS["experts"]))
    with record_routing(adapted) as found:
        adapted(input_ids=token_ids())
    assert [len(calls) for calls in found] == [1, 1]


def test_lora_on_experts_whose_forward_something_replaced_is_pefts(monkeypatch: pytest.MonkeyPatch) -> None:
    lora, model = LoraConfig(r=8, init_lora_weights=False, **TARGETS["experts"]), tiny(implementation="mxep_bf16")
    expected = get_peft_model(tiny(implementation="eager"), lora)
    adapted = get_peft_model(replaced_forwards(model, monkeypatch), lora)
    adapted.load_state_dict(expected.state_dict())
    lowest, name = worst(step(expected), step(adapted))
    assert lowest > 110, name


@pytest.mark.parametrize("frozen", [False, True])
def test_lora_on_longcats_experts_equals_lora_over_its_own_code(frozen: bool) -> None:
    lora, model = LoraConfig(r=8, init_lora_weights=False, **TARGETS["experts"]), longcat().eval()
    if frozen:
        route_experts(model, "mxep_bf16")
        freeze_experts(model)
        step(get_peft_model(model, lora))
        check(model)
        return
    expected = get_peft_model(copy.deepcopy(model), lora)
    route_experts(model, "mxep_bf16")
    adapted = get_peft_model(model, lora)
    adapted.load_state_dict(expected.state_dict())
    lowest, name = worst(step(expected), step(adapted))
    assert lowest > 110, name


@distributed(2)
def test_lora_over_experts_over_ranks_equals_one_process(ctx: Context, tmp_path: Path) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    if torch.__version__ < "2.13":
        with pytest.raises(ValueError, match=r"adapters on experts: got torch 2\.1\d.*, want 2\.13"):
            expert_parallel(with_lora(tiny(), "both"), mesh, "mxep_bf16")
        return
    for recipe in ("mxfp8", "bf16"):
        model = with_lora(tiny(), "both")
        one = copy.deepcopy(model)
        wanted = of_one_process(ctx, one)
        expert_parallel(model.to(ctx.device), mesh, f"mxep_{recipe}")
        lowest, name = worst(wanted, of_mean_loss(ctx, model))  # as without adapters
        assert lowest > (112 if recipe == "bf16" else 10), name
    for each in (one, model):  # so far that little is left of what the weights were
        torch.optim.SGD(parameter_groups(each), lr=1e4).step()
    for (name, parameter), other in zip(model.named_parameters(), one.parameters(), strict=True):
        if ".experts." in name and parameter.requires_grad:
            assert parameter.placements == parameter.grad.placements == (Replicate(),), "as optimizers want both"
            assert snr(other.detach(), parameter.full_tensor().detach()) > 112, name
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ctx.rank == 0:
        model.save_pretrained(tmp_path, state_dict=state)
        again = dict(PeftModel.from_pretrained(tiny(), tmp_path).named_parameters())
        for name, parameter in model.named_parameters():
            if "lora" in name:
                assert torch.equal(again[name], local_tensor(parameter).cpu()), name
    part = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp", "ep"))["ep"]
    with pytest.raises(ValueError, match="mesh: got 1 of 2 ranks, want all for a model with adapters on experts"):
        expert_parallel(with_lora(tiny(), "experts"), part)


@distributed(1)
def test_frozen_adapters_stay_frozen_over_ranks(ctx: Context) -> None:
    if torch.__version__ < "2.13":
        return
    model = with_lora(tiny(), "both")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.requires_grad_(False)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert set(trained.values()) == {True, False}
    expert_parallel(model, DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",)), "mxep_bf16")
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained


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
