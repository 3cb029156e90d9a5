"""Frozen quantized experts in transformers models equal the model with their values."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("transformers")

import transformers

from integration.test_transformers_experts import made, run
from integration.tiny_models import force_routing, tiny, token_ids, worst
from mxep.ep.lora import LoRAWeights
from mxep.integration.metrics import snr
from mxep.integration.transformers import (
    FrozenExperts,
    MxepCallback,
    expert_parallel,
    freeze_experts,
    quantized,
    save_quantized,
)
from mxep.integration.transformers.experts import is_experts, weight_names
from ranks import Context, distributed

TOKENS = 40
pytestmark = pytest.mark.usefixtures("one_thread")


def dequantized(frozen: Any, model: Any) -> Any:
    """`model`, which has the experts of before, with the values of the frozen ones."""
    plain = copy.deepcopy(model)
    for name, experts in frozen.named_modules():
        if isinstance(experts, FrozenExperts):
            target = plain.get_submodule(name)
            for each in weight_names(experts):
                values = getattr(experts, each).dequantize(torch.float32)
                getattr(target, each).data.copy_(values.mT if target.is_transposed else values)
    return plain


def step(model: Any, implementation: str | None = None, ids: Tensor | None = None) -> dict[str, Tensor]:
    """Logits, and gradients of what is no expert's."""
    if implementation:
        model.set_experts_implementation(implementation)
    ids = token_ids() if ids is None else ids
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and ".experts." not in n}
    return {"logits": out.logits.detach(), **grads}


def pair(kind: str, fmt: str) -> tuple[Any, Any]:
    """(frozen, with the same values in bf16), with the routing of the second in both."""
    model = tiny(kind, "mxep_bf16", torch.bfloat16)
    frozen = copy.deepcopy(model)
    assert freeze_experts(frozen, fmt) == [name for name, each in model.named_modules() if is_experts(each)]
    plain = dequantized(frozen, model)
    recorded = force_routing(plain)
    with torch.no_grad():
        plain(input_ids=token_ids())
    for model in (frozen, plain):
        force_routing(model, recorded)
    return frozen, plain


@pytest.mark.parametrize(("kind", "fmt"), [("qwen3_moe", "mxfp8"), ("gpt_oss", "mxfp4"), ("deepseek_v3", "mxfp8")])
def test_a_frozen_model_equals_the_model_with_its_values(kind: str, fmt: str) -> None:
    """Also where bf16 rounds in other places (30 dB and more), and with rows in MXFP8 (31 dB a GEMM)."""
    frozen, plain = pair(kind, fmt)
    experts = frozen.model.layers[0].mlp.experts
    assert experts.gate_up_proj.format == experts.down_proj.format == fmt
    assert tuple(experts.gate_up_proj.shape) == (4, 2 * experts.down_proj.shape[2], 64), "rows are outputs"
    wanted = step(plain)
    assert worst(wanted, step(frozen))[0] > 30
    in_mxfp8 = step(frozen, "mxep_mxfp8")
    assert worst(wanted, in_mxfp8)[0] > 14
    assert snr(wanted["logits"], in_mxfp8["logits"]) > 22


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_gates_of_the_models_own_run_composed(fmt: str) -> None:
    """Nemotron-H has no gate and squares ReLU."""
    model = torch.nn.ModuleList([made("nemotron_h", "NemotronHExperts")])
    frozen = copy.deepcopy(model)
    assert freeze_experts(frozen, fmt) == ["0"]
    plain = dequantized(frozen, model)[0].requires_grad_(False)
    wanted, got = run(plain, "mxep_bf16"), run(frozen[0], "mxep_bf16")
    for each in ("out", "x", "weights"):
        assert snr(wanted[each], got[each]) > 38, "x is in bf16"
    assert all(parameter.grad is None for parameter in frozen.parameters())
    lora = LoRAWeights(*torch.zeros(4, 4, 8, 64), scale=1.0)
    with pytest.raises(ValueError, match="lora: expected experts with a SwiGLU that mxep has, got FrozenNemotronH"):
        frozen[0](torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), lora=lora)


def test_lora_is_an_argument_of_the_module() -> None:
    """Equal to experts whose weights have the update: forward, and gradients of x, A and B."""
    frozen, plain = pair("gpt_oss", "mxfp4")
    experts, target = frozen.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    sides = [(r, k) for w in (experts.gate_up_proj, experts.down_proj) for r, k in ((8, w.shape[2]), (w.shape[1], 8))]
    parts = [torch.randn(4, *each, generator=generator).div(8).bfloat16().requires_grad_() for each in sides]
    x = torch.randn(TOKENS, 64, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2, generator=generator)
    grads = []
    for at in (0, 1):
        given = x.clone().requires_grad_()
        for part in parts:
            part.grad = None
        if at:
            out = experts(given, ids, weights, lora=LoRAWeights(*parts, scale=2.0))
        else:
            updates = [(2.0 * parts[i + 1].float() @ parts[i].float()).mT for i in (0, 2)]
            with torch.no_grad():
                before = [getattr(target, name).clone() for name in ("gate_up_proj", "down_proj")]
            for name, old, update in zip(("gate_up_proj", "down_proj"), before, updates):
                del target._parameters[name]
                setattr(target, name, (old.float() + update))
            target.gate_up_proj_bias.data, target.down_proj_bias.data = (
                b.data.float() for b in (target.gate_up_proj_bias, target.down_proj_bias)
            )
            target.config._experts_implementation = "eager"
            out = target(given.float(), ids, weights)
        out.float().square().sum().backward()
        grads.append([out.detach(), given.grad, *(part.grad for part in parts)])
    for wanted, got in zip(*grads):
        assert snr(wanted.float(), got.float()) > 30


def test_weights_are_bytes_that_casts_and_states_keep(tmp_path: Path) -> None:
    frozen = tiny("gpt_oss", "mxep_mxfp8", torch.bfloat16)
    freeze_experts(frozen, "mxfp8")
    experts = frozen.model.layers[0].mlp.experts
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    held = {n for n, p in experts.named_parameters() if p.dtype in (torch.uint8, torch.int32)}
    assert {f"{name}_qdata" for name in ("gate_up_proj", "down_proj")} < held
    assert not any(p.requires_grad for p in experts.parameters())
    wanted = step(frozen)["logits"]
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.float().half().bfloat16()):
        cast(frozen)
        assert all(torch.equal(before[f"model.layers.0.mlp.experts.{n}"], experts.get_parameter(n)) for n in held)
    assert torch.equal(step(frozen)["logits"], wanted)
    other = tiny("gpt_oss", "mxep_mxfp8", torch.bfloat16)
    for parameter in other.parameters():
        parameter.data.zero_()
    freeze_experts(other, "mxfp8")
    torch.save(frozen.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state"))
    assert torch.equal(step(other)["logits"], wanted)
    with pytest.raises(RuntimeError, match="floating point"):
        experts.requires_grad_(True)


def test_weights_that_accelerate_offloaded_are_refused(tmp_path: Path) -> None:
    """They are on meta until a forward. Frozen on meta, they would be missing from accelerate's map of weights."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny(implementation="mxep_mxfp8")
    accelerate.cpu_offload(model.model.layers[1], torch.device("cpu"))
    kinds = [type(module) for module in model.modules()]
    for refused in (freeze_experts, lambda given: save_quantized(given, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"all weights in memory, got those of model\.layers\.1.* offloaded"):
            refused(model)
    assert kinds == [type(module) for module in model.modules()]
    assert not (tmp_path / "out").exists()


def test_a_trainer_saves_and_resumes_with_the_bytes(tmp_path: Path) -> None:
    """It trains attention and norms here. Its checkpoints have the model's own names."""
    pytest.importorskip("accelerate")
    texts = [{"input_ids": row, "labels": row} for row in token_ids(8)]

    def trained(steps: int, scale: float, **how: Any) -> dict[str, Tensor]:
        model = tiny("qwen3_moe", "mxep_mxfp8", torch.float32)
        for parameter in model.parameters():
            parameter.data *= scale
        freeze_experts(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=1, bf16=True, report_to=[], use_cpu=True, learning_rate=1e-3,
            lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, callbacks=[MxepCallback()])
        trainer.train(**how)
        return dict(model.state_dict())

    wanted = trained(2, 1.0)
    got = trained(2, 0.5, resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_a_layer_is_freed_before_the_next_is_frozen() -> None:
    """Counts bf16 weights that are alive whenever a weight is frozen."""
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16, num_hidden_layers=3)
    alive = [weakref.ref(p) for n, p in model.named_parameters() if ".experts." in n]
    seen: list[int] = []
    own = quantized.freeze

    def counting(*given: Any, **how: Any) -> Any:
        seen.append(sum(each() is not None for each in alive))
        return own(*given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized, "freeze", counting)
        freeze_experts(model, "mxfp4")
    assert seen == [6, 6, 4, 4, 2, 2]


def test_errors_name_the_cure_and_change_nothing() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    with pytest.raises(ValueError, match="expected fmt mxfp8 or mxfp4 or fp8_block or fp8_row, got 'fp8'"):
        freeze_experts(model, "fp8")
    with pytest.raises(ValueError, match="expected a model with experts that mxep runs, got Linear"):
        freeze_experts(torch.nn.Linear(2, 2))
    narrow = tiny("qwen3_moe", "mxep_bf16", torch.bfloat16, moe_intermediate_size=16)
    with pytest.raises(ValueError, match=r"down_proj: expected input features in multiples of 32, got \(4, 64, 16\)"):
        freeze_experts(narrow)
    assert not any(isinstance(each, FrozenExperts) for each in narrow.modules())
    freeze_experts(model)
    with pytest.raises(ValueError, match="expected experts that are not frozen, got mxfp8"):
        freeze_experts(model)
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError, match=r"got 'grouped_mm': model.set_experts_implementation\('mxep_mxfp8'\)"):
        model(input_ids=token_ids())


def test_after_a_module_that_does_not_fold_the_others_are_frozen_by_a_second_call() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[..., :32] *= 2**-14
    with pytest.raises(ValueError, match=r"do not fold exactly, got \d+: pass folded=False") as caught:
        freeze_experts(model)
    assert caught.value.__notes__[0].startswith("of model.layers.1.mlp.experts, which is as it was")
    assert [isinstance(layer.mlp.experts, FrozenExperts) for layer in model.model.layers] == [True, False]
    with pytest.raises(ValueError, match="expected experts that are not frozen, got mxfp8"):
        freeze_experts(model, "mxfp4", folded=False)
    assert len(freeze_experts(model, folded=False)) == 2
    assert [layer.mlp.experts.gate_up_proj.row_scale is None for layer in model.model.layers] == [False, True]


@distributed(2, device="cpu", first=("freeze", "spread"))
def test_ranks_hold_their_frozen_experts_alone(ctx: Context, first: str) -> None:
    whole = tiny("gpt_oss", "mxep_mxfp8", torch.bfloat16)
    model = copy.deepcopy(whole)
    freeze_experts(whole, "mxfp4")
    mesh = init_device_mesh("cpu", (2,))
    if first == "freeze":
        freeze_experts(model, "mxfp4")
    expert_parallel(model, mesh, "mxep_mxfp8", gradient_reduction="sum")
    if first == "spread":
        freeze_experts(model, "mxfp4")
    experts = model.model.layers[0].mlp.experts
    assert tuple(experts.down_proj.shape) == (2, 64, 64)
    ids = token_ids(seed=ctx.rank)
    wanted, got = step(whole, ids=ids), step(model, ids=ids)
    assert snr(wanted["logits"], got["logits"]) > 40


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 of torch 2.11 takes floating-point parameters only")
@distributed(2, device="cpu")
def test_fsdp2_gathers_bytes(ctx: Context) -> None:
    """Mixed precision casts what is no byte. The same logits and gradients as of a model that is not sharded."""
    whole = tiny("gpt_oss", "mxep_mxfp8", torch.float32)
    model = copy.deepcopy(whole)
    for each in (whole, model):
        freeze_experts(each, "mxfp4")
    mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert model.model.layers[0].mlp.experts.down_proj_qdata.to_local().dtype == torch.uint8
    ids = token_ids()
    whole.bfloat16()
    wanted, got = step(whole, ids=ids), step(model, ids=ids)
    assert snr(wanted["logits"], got["logits"]) > 35
    name = "model.layers.0.self_attn.q_proj.weight"
    assert snr(wanted[name], got[name].full_tensor()) > 30
