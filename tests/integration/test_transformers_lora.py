"""PEFT's LoRA on frozen experts equals PEFT's own on the model with their values, and its adapters are PEFT's."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import transformers
from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrize

from integration.test_transformers_frozen import pair
from integration.test_transformers_parallel import of_mean_loss, of_one_process
from integration.tiny_models import step, tiny, token_ids, worst
from mxep.ep import clip_grad_norm_
from mxep.integration.metrics import snr
from mxep.integration.transformers import FrozenExperts, expert_parallel, freeze_experts, merge_and_freeze
from ranks import Context, distributed

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
ATTENTION = {"qwen3_moe": "q_proj", "gpt_oss": "q_proj", "deepseek_v3": "q_b_proj"}


def config(kind: str = "qwen3_moe", **how: Any) -> LoraConfig:
    given: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": [ATTENTION[kind]]}
    return LoraConfig(**given | {"target_parameters": PARAMETERS} | how)


@contextmanager
def plain_peft() -> Iterator[None]:
    """PEFT as it is without mxep."""
    ours = PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA]
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = LoraModel
    try:
        yield
    finally:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = ours


def with_lora(model: Any, kind: str = "qwen3_moe", *, seed: int = 3, **how: Any) -> Any:
    """A and B drawn as PEFT draws them in both models, and B with values that matter."""
    torch.manual_seed(seed)
    return drawn(get_peft_model(model, config(kind, **how)))


def drawn(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            width = parameter.shape[1] if "lora_A" in name else 64
            parameter.data = torch.randn(parameter.shape, generator=generator) * width**-0.5
    return model


def both(kind: str, fmt: str = "mxfp8") -> tuple[Any, Any]:
    """(frozen with LoRA, the model of its values in plain PEFT)"""
    frozen, plain = pair(kind, fmt)
    plain.set_experts_implementation("eager")
    ours = with_lora(frozen, kind)
    with plain_peft():
        theirs = with_lora(plain, kind)
    assert {type(m) for m in theirs.modules() if isinstance(m, PeftParamWrapper)} == {PeftParamWrapper}
    return ours, theirs


@pytest.mark.parametrize(("kind", "fmt"), [*zip(KINDS, ("mxfp8", "mxfp4", "mxfp8"))])
def test_lora_on_frozen_experts_equals_plain_peft_on_their_values(kind: str, fmt: str) -> None:
    """Logits and gradients of A and B, in the same names. Where bf16 rounds differs, and the adapters are fp32."""
    ours, theirs = both(kind, fmt)
    assert {n: p.shape for n, p in ours.named_parameters() if "lora_" in n} == {
        n: p.shape for n, p in theirs.named_parameters() if "lora_" in n
    }
    wanted, got = step(theirs), step(ours)
    assert sum(".experts." in name for name in got) == 8
    lowest, name = worst(wanted, got)
    assert lowest > 28, name
    ours.set_experts_implementation("mxep_mxfp8")  # 31 dB a GEMM
    got = step(ours)
    assert worst(wanted, got)[0] > 14
    assert snr(wanted["logits"], got["logits"]) > 20


def test_adapters_alone_train_and_are_fp32_from_the_first() -> None:
    model = with_lora(pair("qwen3_moe", "mxfp4")[0])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    grads = step(model)
    assert all(grads[name].dtype == torch.float32 and grads[name].count_nonzero() for name in trained)


def test_no_dense_update_of_experts_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a dense update")

    monkeypatch.setattr(parametrize, "register_parametrization", refuse)
    frozen, plain = pair("gpt_oss", "mxfp4")
    for model in (frozen, plain):  # mxep runs the second's in bf16
        step(with_lora(model, "gpt_oss"))
    with pytest.raises(AssertionError, match="a dense update"):
        step(with_lora(tiny("gpt_oss", "mxep_bf16"), "gpt_oss", r=4))


def test_lora_on_bf16_experts_of_mxep_equals_plain_peft() -> None:
    _, plain = pair("qwen3_moe", "mxfp8")
    ours = with_lora(copy.deepcopy(plain))
    plain.set_experts_implementation("eager")
    with plain_peft():
        theirs = with_lora(plain)
    wanted, got = step(theirs), step(ours)
    assert worst(wanted, got)[0] > 28


def test_adapters_are_disabled_chosen_and_deleted() -> None:
    frozen, _ = pair("qwen3_moe", "mxfp8")
    wanted = step(frozen)["logits"]
    model = with_lora(frozen)
    first = step(model)["logits"]
    with model.disable_adapter():
        assert torch.equal(step_logits(model), wanted)
    assert torch.equal(step_logits(model), first)
    model.add_adapter("second", config(r=16))
    assert torch.equal(step_logits(model), first), "it is not active yet"
    model.set_adapter("second")
    assert torch.equal(step_logits(model), wanted), "its B is zero"
    drawn(model, seed=1)
    second = step(model)
    assert all("second" in name for name in second if "lora_" in name)
    assert not torch.equal(second["logits"], first)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"expected one active adapter, got \['default', 'second'\]: set_adapter"):
        step_logits(model)
    model.set_adapter("default")
    model.delete_adapter("second")
    step(model)
    assert isinstance(model.unload().model.layers[0].mlp.experts, FrozenExperts)


@torch.no_grad()
def step_logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=token_ids()).logits
    return logits


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(reentrant: bool) -> None:
    model = with_lora(pair("gpt_oss", "mxfp4")[0], "gpt_oss").train()
    wanted = step(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    got = step(model)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_autocast_runs_fp32_adapters_on_bf16_activations() -> None:
    model = with_lora(pair("qwen3_moe", "mxfp8")[0])
    wanted = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = step(model)
    assert worst(wanted, got)[0] > 28


def test_configs_that_frozen_experts_cannot_have_raise_with_the_cure() -> None:
    frozen, _ = pair("qwen3_moe", "mxfp8")
    before = list(frozen.state_dict())
    for changes, message in (
        ({"r": 4}, r"r: expected a multiple of 8 for model.layers.0.mlp.experts.gate_up_proj, which is frozen, got 4"),
        ({"rank_pattern": {"experts.down_proj": 12}}, r"multiple of 8 for .*down_proj, which is frozen, got 12"),
        ({"target_parameters": PARAMETERS[1:]}, r"expected both gate_up_proj and down_proj of .*, got down_proj"),
    ):
        with pytest.raises(ValueError, match=message):
            get_peft_model(frozen, config(**changes))
        assert list(frozen.state_dict()) == before, "unchanged"
    for model in (frozen, tiny()):
        with pytest.raises(
            ValueError, match=r"init_lora_weights: expected True, False, 'gaussian' .*, got 'pissa' and"
        ):
            get_peft_model(model, config(init_lora_weights="pissa"))
        assert not any("lora" in name for name in model.state_dict())
    with pytest.raises(ValueError, match=r"expected no module of frozen experts.*target_parameters, \['mlp"):
        get_peft_model(frozen, LoraConfig(target_modules=["experts"]))


def test_adapters_load_in_plain_peft_and_back(tmp_path: Path) -> None:
    ours, theirs = both("gpt_oss", "mxfp4")
    frozen, plain = pair("gpt_oss", "mxfp4")
    plain.set_experts_implementation("eager")
    for model, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        model.save_pretrained(folder)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    name = "base_model.model.model.layers.0.mlp.experts.{}lora_{}.weight"
    shapes = {key: tuple(files[0][name.format(*key)].shape) for key in (("", "A"), ("base_layer.", "B"))}
    assert shapes == {("", "A"): (32, 64), ("base_layer.", "B"): (128, 32)}
    saved = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert sorted(saved["target_parameters"]) == sorted(PARAMETERS)
    with plain_peft():
        there = PeftModel.from_pretrained(plain, tmp_path / "ours")
    here = PeftModel.from_pretrained(frozen, tmp_path / "theirs")
    assert torch.equal(step_logits(there), step_logits(theirs))
    assert torch.equal(step_logits(here), step_logits(ours))
    assert snr(step_logits(there), step_logits(here)) > 30
    for cheap in (True, False):
        again = PeftModel.from_pretrained(
            pair("gpt_oss", "mxfp4")[0], tmp_path / "ours", is_trainable=True, low_cpu_mem_usage=cheap
        )
        assert snr(step_logits(ours), step_logits(again)) > (40 if cheap else 150), "PEFT rounds them to bf16 if cheap"
        assert any(p.requires_grad for p in again.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_merged_into_bf16_it_is_the_models_own_class_again(kind: str, tmp_path: Path) -> None:
    ours, theirs = both(kind, "mxfp8")
    own = type(tiny(kind).model.layers[0].mlp.experts)
    wanted = step_logits(theirs.merge_and_unload())
    merged = ours.merge_and_unload(safe_merge=True)
    assert {type(m) for m in merged.modules() if isinstance(m, own)} == {own}
    assert snr(wanted, step_logits(merged)) > 28
    merged.set_experts_implementation("eager")
    assert snr(wanted, step_logits(merged)) > 40
    merged.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in merged.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8_block", "fp8_row"])
def test_merged_into_the_quantized_format_it_tells_what_was_lost(fmt: str) -> None:
    ours, theirs = both("gpt_oss", fmt)
    wanted = step_logits(theirs.merge_and_unload())
    merged, errors = merge_and_freeze(ours)
    assert len(errors) == 4
    dB = {"mxfp8": 30, "mxfp4": 17, "fp8_block": 31, "fp8_row": 31}[fmt]
    lowest = min(each.snr for each in errors.values())
    assert dB < lowest < dB + 3
    assert all(0.5 < each.changed <= 1 for each in errors.values())
    experts = merged.model.layers[0].mlp.experts
    assert isinstance(experts, FrozenExperts)
    assert experts.down_proj.format == fmt
    assert snr(wanted, step_logits(merged)) > (8 if fmt == "mxfp4" else 20)
    assert not any("lora" in name for name in merged.state_dict())
    with pytest.raises(ValueError, match="expected active adapters on frozen experts, got none"):
        merge_and_freeze(get_peft_model(merged, LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8_block", "fp8_row"])
def test_formats_that_are_never_folded_merge_into_folded_mxfp8(fmt: str) -> None:
    merged, _ = merge_and_freeze(with_lora(pair("qwen3_moe", fmt)[0]), "mxfp8")
    assert merged.model.layers[0].mlp.experts.down_proj.row_scale is not None


def test_experts_that_do_not_fold_are_merged_as_they_are_stored() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[..., :32] *= 2**-14
    freeze_experts(model, folded=False)
    adapted = with_lora(model)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1e-6
    whole = copy.deepcopy(adapted)
    wanted = step_logits(adapted)
    with pytest.raises(ValueError, match="expected fmt mxfp8 or mxfp4 or fp8_block or fp8_row, got 'fp8'"):
        merge_and_freeze(adapted, "fp8")
    with pytest.raises(ValueError, match=r"do not fold exactly, got \d+: pass folded=False") as caught:
        merge_and_freeze(adapted, folded=True)
    assert "model.layers.1.mlp.experts, which is as it was" in caught.value.__notes__[0]
    for _ in range(2):
        message = r"unmerge: expected .*merged before it raised: call it again"
        with adapted.disable_adapter(), pytest.raises(ValueError, match=message):
            step_logits(adapted)
    assert snr(wanted, step_logits(adapted)) > 25, "neither merged twice nor lost"
    _, errors = merge_and_freeze(adapted, folded=False)
    assert all("layers.1." in name for name in errors), "those that the first call left"
    merged, errors = merge_and_freeze(whole)
    assert len(errors) == 4
    assert all(layer.mlp.experts.gate_up_proj.row_scale is None for layer in merged.model.layers)


def test_an_update_below_half_a_step_of_mxfp4_is_told_as_lost() -> None:
    model = with_lora(pair("gpt_oss", "mxfp4")[0], "gpt_oss")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1e-3
    _, errors = merge_and_freeze(model)
    assert all(each.changed < 0.05 for each in errors.values())


def test_merging_in_place_is_refused_with_the_cure() -> None:
    model = with_lora(pair("qwen3_moe", "mxfp8")[0])
    with pytest.raises(ValueError, match=r"merge_and_unload\(\) makes them bf16, and .*merge_and_freeze\(model\)"):
        model.merge_adapter()


@distributed(2, device="cpu", first=("lora", "spread"))
def test_lora_on_frozen_experts_over_ranks_equals_one_process(ctx: Context, first: str, tmp_path: Path) -> None:
    if torch.__version__ < "2.13":
        return
    whole, model = (tiny("gpt_oss", "mxep_bf16", torch.bfloat16) for _ in range(2))
    freeze_experts(whole, "mxfp4"), freeze_experts(model, "mxfp4")
    one = with_lora(whole, "gpt_oss")
    mesh = init_device_mesh("cpu", (2,))
    if first == "spread":
        expert_parallel(model, mesh, "mxep_bf16")
        if ctx.rank == 0:
            one.save_pretrained(tmp_path)
        torch.distributed.barrier()
        model = PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    else:
        model = with_lora(model, "gpt_oss")
        expert_parallel(model, mesh, "mxep_bf16")
    wanted = of_one_process(ctx, one)
    got = of_mean_loss(ctx, model)
    lowest, name = worst(wanted, got)
    assert lowest > 28, name
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ctx.rank == 0:
        model.save_pretrained(tmp_path / "again", state_dict=state)
        one.save_pretrained(tmp_path / "one")
        files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "again")]
        assert files[0].keys() == files[1].keys()
        assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    (merged, _), (whole, _) = merge_and_freeze(model), merge_and_freeze(one)
    for name, part in merged.model.layers[0].mlp.experts.named_parameters():
        stored = whole.get_parameter(f"model.layers.0.mlp.experts.{name}")
        assert torch.equal(part.full_tensor(), stored), name


@distributed(2, device="cpu")
def test_adapters_on_experts_that_are_spread_already_have_whole_gradients(ctx: Context) -> None:
    if torch.__version__ < "2.13":
        return
    model = tiny("gpt_oss", "mxep_bf16", torch.bfloat16)
    freeze_experts(model, "mxfp4")
    expert_parallel(model, init_device_mesh("cpu", (2,)), "mxep_bf16")
    model = get_peft_model(model, config("gpt_oss"))
    of_mean_loss(ctx, model)
    grads = [p.grad for p in model.parameters() if isinstance(p.grad, DTensor)]
    assert {grad.placements for grad in grads} == {(Replicate(),)}
    clip_grad_norm_(model.parameters(), 1.0)  # which refuses partial sums


@distributed(2, device="cpu")
def test_fsdp2_shards_adapters_and_frozen_experts(ctx: Context) -> None:
    """Each rank has the whole experts while it computes, and a part of all bytes and adapters else."""
    whole = tiny("gpt_oss", "mxep_bf16", torch.bfloat16)
    freeze_experts(whole, "mxfp4")
    one = with_lora(whole, "gpt_oss")
    model = copy.deepcopy(one)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stored = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) for p in stored.values())
    wanted, got = of_one_process(ctx, one), of_mean_loss(ctx, model)
    lowest, name = worst(wanted, got)
    assert lowest > 28, name
