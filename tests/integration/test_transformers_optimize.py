"""optimize(model): each part alone and all together give the gradients of the model as it was."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from transformers import Trainer, TrainingArguments

from integration.tiny_models import TOKENS, tiny, token_ids
from mxep.gemm import Recipe, converted
from mxep.gemm.convert import state_of
from mxep.integration.metrics import snr
from mxep.integration.transformers import (
    Implementation,
    MxepCallback,
    check,
    expert_parallel,
    freeze_experts,
    load_report,
    optimize,
    register,
)
from mxep.integration.transformers.experts import layers
from mxep.integration.transformers.optimize import DeferredHead
from ranks import Context, distributed

pytestmark = pytest.mark.usefixtures("one_thread", "quick_compiler")
by_autograd = pytest.mark.parametrize("quick_compiler", ["aot_eager"], indirect=True)
NOTHING: dict[str, Any] = {"experts": None, "loss": False, "attention": None, "compile": False}


def model_of(kind: str = "qwen3_moe", name: str = "mxep_mxfp8", **changes: Any) -> Any:
    return tiny(kind, name, torch.bfloat16, **changes).train()


def gradients(model: Any, steps: int = 2, **kwargs: Any) -> dict[str, Tensor]:
    """Of the last of some steps."""
    for seed in range(steps):
        ids = token_ids(seed=seed)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False, **kwargs).loss
        loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], least_db: float) -> None:
    assert got.keys() == expected.keys()
    for name, found in got.items():
        assert torch.equal(found, expected[name]) or snr(expected[name], found) > least_db, name


@pytest.mark.parametrize(
    ("kind", "quick_compiler"),
    [("mixtral", "eager"), ("deepseek_v3", "eager"), ("gpt_oss", "aot_eager")],
    indirect=["quick_compiler"],
)
def test_all_layers_are_one_graph_without_breaks_whose_gradients_are_eager_ones(kind: str) -> None:
    model = model_of(kind)
    done = optimize(model)
    assert done["compile"] == "2 decoder layers"
    assert_close(gradients(model), gradients(model_of(kind)), 40)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@by_autograd
def test_layers_of_qwen3_are_one_graph_and_are_copied_and_pickled() -> None:
    model = model_of()
    expected = gradients(model)
    assert all(layer.last_routing is not None for _, layer in layers(model))
    optimize(model)
    assert_close(gradients(model), expected, 40)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert all(layer.last_routing is None for _, layer in layers(model))
    assert load_report(model) == {}

    half = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    model.zero_grad(set_to_none=True)
    eager = model_of()
    with torch.no_grad():
        for parameter in (*half.parameters(), *eager.parameters()):
            parameter.mul_(0.5)
    assert_close(gradients(half), gradients(eager), 40)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_auxiliary_loss_of_a_compiled_layer_is_that_of_an_eager_one() -> None:
    how = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_hidden_layers": 1}
    model = model_of(**how)
    optimize(model)
    assert_close(gradients(model), gradients(model_of(**how)), 40)


@by_autograd
def test_router_logits_and_hooks_reach_layers_that_were_compiled_without() -> None:
    model, expected, seen = model_of(router_aux_loss_coef=0.5), model_of(router_aux_loss_coef=0.5), []
    optimize(model)
    gradients(model)
    assert_close(gradients(model, output_router_logits=True), gradients(expected, output_router_logits=True), 40)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(True))
    gradients(model, steps=2)
    assert len(seen) == 2


@by_autograd
def test_training_without_a_word_about_caches_makes_none_and_one_graph() -> None:
    model = model_of()
    optimize(model)
    ids = token_ids()
    assert model(input_ids=ids, labels=ids).get("past_key_values") is None
    assert counters["stats"]["unique_graphs"] == 1
    assert model(input_ids=ids, labels=ids, use_cache=True).past_key_values.get_seq_length() == TOKENS
    assert counters["stats"]["unique_graphs"] == 1  # eager
    model.eval()
    assert model(input_ids=ids).past_key_values is not None


def test_evaluation_is_not_compiled() -> None:
    model = model_of()
    optimize(model)
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=token_ids())
    assert not counters["stats"]


@by_autograd
def test_frozen_experts_with_lora_are_in_the_graph_of_their_layer() -> None:
    """In MXFP4; a compiled layer of each format: ep/test_frozen.py."""
    peft = pytest.importorskip("peft")
    found = []
    for compiled in (False, True):
        model = model_of(moe_intermediate_size=64)
        freeze_experts(model, "mxfp4")
        optimize(model, compile=compiled)
        torch.manual_seed(0)
        experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        how = {"target_modules": ["q_proj"], "target_parameters": experts, "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, **how))
        found.append(gradients(model))
    assert_close(found[1], found[0], 40)
    assert counters["stats"]["unique_graphs"] == 2  # the first layer's input has no gradient
    assert not counters["graph_break"]


def test_each_part_alone_keeps_the_gradients() -> None:
    expected = gradients(model_of())
    for part, value in (("loss", True), ("attention", "causal"), ("compile", True)):
        model = model_of()
        done = optimize(model, **NOTHING | {part: value})
        assert list(done) == [part]
        assert_close(gradients(model), expected, 40)


@pytest.mark.parametrize("training", [False, True])
def test_causal_attention_continues_a_cache_as_sdpa_does(training: bool) -> None:
    ids, models = token_ids(), [tiny("qwen3_moe", "mxep_bf16").train(training) for _ in range(2)]
    optimize(models[1], **NOTHING | {"attention": "causal"})
    optimize(models[1], **NOTHING | {"attention": "causal"})
    assert len(models[1].model._forward_pre_hooks) == 1
    for seen in ([10], [6, 1]):  # tokens of the forwards before; is_causal alone counts queries from the first key on
        found = []
        for model in models:
            cache = None
            for part in ids.tensor_split(torch.tensor(seen).cumsum(0), 1):
                out = model(input_ids=part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
            found.append(out.logits)
        assert snr(*found) > 100


def test_causal_attention_generates_from_padded_prompts_and_in_a_static_cache() -> None:
    ids, models = token_ids(), [tiny("qwen3_moe", "mxep_bf16").eval() for _ in range(2)]
    optimize(models[1], **NOTHING | {"attention": "causal"})
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        one, other = (
            model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **how, **more) for model in models
        )
        assert torch.equal(one.sequences, other.sequences)
        assert snr(torch.stack(one.logits), torch.stack(other.logits)) > 100


def test_experts_become_mxeps_unless_they_are() -> None:
    model = model_of(name="eager")
    assert optimize(model, **NOTHING | {"experts": "mxep_bf16"})["experts"] == "2 modules by mxep_bf16"
    assert_close(gradients(model), gradients(model_of(name="mxep_bf16")), 100)
    assert optimize(model, **NOTHING | {"experts": "mxep_mxfp8"}) == {}
    assert model.config._experts_implementation == "mxep_bf16"


def test_linears_are_quantized_with_q_k_and_v_as_one() -> None:
    model, expected = model_of(), gradients(model_of())
    assert optimize(model, **NOTHING, linears="mxfp8")["linears"] == "8 in mxfp8"
    attention = model.model.layers[0].self_attn
    joined = {id(state_of(getattr(attention, f"{name}_proj")).joined) for name in "qkv"}
    assert len(joined) == 1
    assert not any("mlp" in name or "lm_head" in name for name in converted(model))
    found = gradients(model)
    assert not torch.equal(found["loss"], expected["loss"])
    assert_close(found, expected, 12)  # two layers of MXFP8, 25 dB a GEMM, and tokens whose experts change


def test_compiled_linears_have_the_gradients_of_eager_ones() -> None:
    one, other = model_of(), model_of()
    optimize(one, linears="mxfp8", compile=False)
    optimize(other, linears="mxfp8")
    assert_close(gradients(other), gradients(one), 40)
    assert not counters["graph_break"]


def test_a_second_call_changes_nothing() -> None:
    model = model_of(name="eager")
    first = optimize(model, linears="mxfp8", attention="causal")
    assert first.keys() == {"experts", "linears", "loss", "attention", "compile"}
    kinds = [type(module) for module in model.modules()]
    assert optimize(model, linears="mxfp8", attention="causal").keys() <= {"loss"}
    assert kinds == [type(module) for module in model.modules()]
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize(
    ("kind", "how", "message"),
    [
        ("qwen3_moe", {"experts": "mxfp8"}, "experts: got 'mxfp8', want one that mxep has registered"),
        ("qwen3_moe", {"experts": "grouped_mm"}, "experts: got 'grouped_mm', want one that"),
        ("llama4", {}, r"optimize\(experts=\): expected a model with experts that mxep runs, .*route_experts"),
        ("gpt_oss", {"attention": "causal"}, 'got attention windows: attention="sdpa"'),
        ("qwen3_moe", {"linears": "mxfp9"}, "mxfp9"),
    ],
)
def test_a_mistake_is_told_before_anything_changes(kind: str, how: dict[str, Any], message: str) -> None:
    model = model_of(kind, "eager")
    before = [(type(module), dict(module.__dict__)) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        optimize(model, **how)
    for (cls, attributes), module in zip(before, model.modules()):
        assert type(module) is cls
        assert module.__dict__.keys() == attributes.keys()
    assert model.config._experts_implementation == "eager"


def test_what_cannot_be_served_is_left_and_told() -> None:
    model = model_of("gpt_oss")  # has attention sinks
    model.set_attn_implementation("eager")
    model.lm_head = torch.nn.Linear(64, 64, bias=True, dtype=torch.bfloat16)
    done = optimize(model, compile=False)
    assert done == {"loss": "left: its lm_head has a bias", "attention": "left: GptOssForCausalLM has no SDPA"}


def test_a_model_that_peft_wrapped_is_told_to_come_before() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model_of(), peft.LoraConfig(r=8, target_modules=["q_proj"]))
    done = optimize(adapted, **NOTHING | {"loss": True})
    assert done == {"loss": f"left: it is a {type(adapted).__name__}, not a PreTrainedModel: call optimize before PEFT"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_are_compiled_too(use_reentrant: bool) -> None:
    model = model_of()
    optimize(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_close(gradients(model, 3), gradients(model_of(), 3), 40)
    assert bool(counters["stats"]) != use_reentrant, "its first forward has no gradients, as in evaluation"


@pytest.mark.parametrize(
    ("name", "quick_compiler"), [("mxep_mxfp8", "aot_eager"), ("mxep_auto", "eager")], indirect=["quick_compiler"]
)
def test_forwards_before_the_first_backward_are_recomputed_as_they_ran(name: str) -> None:
    """As in DPO: chosen and rejected sequences, of two lengths."""
    found = []
    for optimized in (False, True):
        model = model_of(name=name, num_hidden_layers=1)
        if optimized:
            optimize(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        batches = token_ids(), token_ids(seed=2)[:, :16]
        chosen, rejected = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches)
        (chosen - 0.5 * rejected).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_close(*found, 40)
    assert counters["stats"]["unique_graphs"] == 2, "one for each length"
    assert not counters["graph_break"]
    check(model)


@distributed(2)
def test_experts_over_ranks_open_their_buffers_within_the_first_compiled_forward(ctx: Context) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type, mesh_dim_names=("ep",))
    register(Implementation("mxep_48", Recipe.bf16(), max_tokens=48))
    found = []
    for compiled in (False, True):
        model = tiny().train()
        expert_parallel(model, mesh, "mxep_48")
        if compiled:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
                optimize(model, loss=False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = [model(input_ids=ids, labels=ids).loss for ids in (token_ids(), token_ids(1, seed=ctx.rank))]
        sum(losses).backward()
        check(model)
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for name, expected in found[0].items():
        got, expected = (getattr(x, "_local_tensor", x) for x in (found[1][name], expected))
        assert snr(expected, got) > 100, name


@distributed(2)
def test_experts_in_a_group_of_fsdp2_of_their_own_are_compiled_too(ctx: Context) -> None:
    mesh, found = DeviceMesh.from_group(ctx.group, ctx.device.type), []
    for compiled in (False, True):
        model = model_of()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
            optimize(model, loss=False, compile=compiled)
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found.append({name: grad.to_local() for name, grad in gradients(model).items() if name != "loss"})
        check(model)
    assert_close(found[1], found[0], 40)


def test_a_trainer_trains_the_same_with_accumulation(tmp_path: Any) -> None:
    """num_items_in_batch reaches the loss: rows have different numbers of labels."""
    found, rows = [], token_ids(8)
    texts = [{"input_ids": row, "labels": row.where(torch.arange(TOKENS) > 2 * i, -100)} for i, row in enumerate(rows)]
    for optimized in (False, True):
        model = model_of()
        if optimized:
            optimize(model)
        how: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": []}
        how |= {"per_device_train_batch_size": 1, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(str(tmp_path), **how)
        trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[MxepCallback()])
        trainer.train()
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        weights = model.lm_head.weight
    assert isinstance(model.lm_head, DeferredHead)
    assert weights.isfinite().all()
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert len(found[1]) == 2
    assert counters["stats"]["unique_graphs"] >= 1
