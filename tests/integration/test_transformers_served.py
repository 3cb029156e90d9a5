"""A model that names mxep and computes its experts without it is told, whatever the reason; what is served is equal."""

import copy
import pickle
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from integration.tiny_models import CONFIGS, step, tiny, token_ids, worst
from mxep.gemm import Recipe
from mxep.integration.metrics import snr
from mxep.integration.transformers import (
    Implementation,
    MxepCallback,
    check,
    freeze_experts,
    load_report,
    register,
    route_experts,
)

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = Path(transformers.__file__).parent / "models"
ROUTE = r"route_experts\(model, 'mxep_bf16'\)"
NO_WAY = "load the model without a name of mxep"
_BASE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
_BASE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"vocab_size": 64, "d_model": 64, "d_ff": 64, "num_experts": 4, "pad_token_id": 0, "decoder_start_token_id": 1}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "jetmoe": (_BASE | {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, NO_WAY),
    "doge": (_BASE | {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}, NO_WAY),
    "dbrx": (
        {
            "d_model": 64, "n_heads": 4, "n_layers": 1, "vocab_size": 64, "max_seq_len": 64, "rope_theta": 1e4,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        },
        NO_WAY,
    ),
    "longcat_flash": (
        {
            "vocab_size": 64, "hidden_size": 64, "num_layers": 1, "num_attention_heads": 2, "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
        },
        ROUTE,
    ),
    "nllb-moe": (
        _T5
        | {
            "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_sparse_step": 1, "decoder_sparse_step": 1,
        },
        NO_WAY,
    ),
    "switch_transformers": (
        _T5
        | {"num_layers": 2, "num_heads": 2, "d_kv": 32, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        NO_WAY,
    ),
}  # fmt: skip


def built(kind: str, name: str = "mxep_bf16") -> Any:
    config = AutoConfig.for_model(kind, **FAMILIES[kind][0])
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    return auto.from_config(config, experts_implementation=name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_that_transformers_does_not_reach_is_told_with_what_to_do(kind: str) -> None:
    model = built(kind)
    model(input_ids=token_ids(), labels=token_ids())
    for ask in (check, load_report):
        with pytest.raises(RuntimeError, match=f"got 'mxep_bf16', but mxep does not compute .*{FAMILIES[kind][1]}"):
            ask(model)
    check(built(kind, "eager"))


def test_llama4_is_told_until_it_is_routed() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["llama4"](), experts_implementation="mxep_bf16")
    with pytest.raises(RuntimeError, match=rf"\(Llama4TextMoe\).*{ROUTE}"):
        check(model)
    route_experts(model, "mxep_bf16")
    step(model)
    check(model)
    assert load_report(model)


@pytest.mark.parametrize(
    ("kind", "fmt"), [("llama4", None), ("llama4", "mxfp8"), ("qwen3_moe", "mxfp4"), ("gpt_oss", "mxfp4")]
)
def test_a_routed_or_frozen_model_is_copied_and_pickled(kind: str, fmt: Any) -> None:
    model = tiny(kind, "eager" if kind == "llama4" else "mxep_mxfp8", torch.bfloat16)
    if kind == "llama4":
        route_experts(model, "mxep_bf16")
    if fmt is not None:
        freeze_experts(model, fmt)
    wanted = model(input_ids=token_ids()).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(copied(input_ids=token_ids()).logits, wanted)


def test_every_family_without_the_decorator_is_known() -> None:
    """A new one of transformers belongs into FAMILIES, and into `route_experts` if its experts are SwiGLU."""
    known = {"llama4", "step3p7", "vitpose_backbone", *(kind.replace("-", "_") for kind in FAMILIES)}
    for file in MODELS.glob("*/modeling_*.py"):
        code = file.read_text()
        if re.search(r"^class \w*(Experts?|M[oO][eEA])\(nn\.\w+\)", code, re.M) and "use_experts_impl" not in code:
            assert file.parent.name in known


def longcat() -> Any:
    model = built("longcat_flash", "eager")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(parameter, std=0.125)
    return model


def step3(limits: list[float] | None) -> Any:
    """One block's experts: the model's other parts need sizes of their own."""
    module = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    sizes = types.SimpleNamespace(
        num_local_experts=4, hidden_size=64, moe_intermediate_size=32, hidden_act="silu", swiglu_limits=limits
    )
    model = torch.nn.Module()
    model.config = types.SimpleNamespace(get_text_config=lambda: sizes)
    model.experts = module.Step3p7Experts(sizes, swiglu_limit=limits and limits[0])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_longcats_experts_equal_their_own_code_with_those_that_give_tokens_back() -> None:
    model = longcat()
    routed = copy.deepcopy(model)
    names = route_experts(routed, "mxep_bf16")
    assert names == ["model.layers.0.mlp.experts"]
    lowest, name = worst(step(model), step(routed))
    assert lowest > 112, name
    check(routed)
    assert load_report(routed)[names[0]]["rows"] < token_ids().numel() * 3, "zero experts are no rows"
    assert routed.state_dict().keys() == model.state_dict().keys()


def test_longcats_frozen_experts_give_tokens_back_too() -> None:
    routed = longcat().eval()
    expected = copy.deepcopy(routed)
    route_experts(routed, "mxep_bf16")
    freeze_experts(routed)
    frozen, own = (model.model.layers[0].mlp.experts for model in (routed, expected))
    with torch.no_grad():
        own.gate_up_proj[:4] = frozen.gate_up_proj.dequantize(torch.float32)  # the zero experts' rows are unused
        own.down_proj.copy_(frozen.down_proj.dequantize(torch.float32))
        assert snr(expected(token_ids()).logits, routed(token_ids()).logits) > 50
    check(routed)


@pytest.mark.parametrize("limits", [None, [0.7]])
def test_step3s_experts_equal_their_own_code(limits: list[float] | None) -> None:
    model = step3(limits)
    routed = copy.deepcopy(model)
    route_experts(routed, "mxep_bf16")
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(40, 64, generator=generator), torch.rand(40, 2, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(40)])
    found = []
    for each in (model, routed):
        out = each.experts(x, ids, weights)
        out.square().sum().backward()
        found.append({"out": out.detach(), **{name: p.grad for name, p in each.named_parameters()}})
    lowest, name = worst(*found)
    assert lowest > 112, name


def test_route_experts_refuses_forwards_that_accelerate_replaced() -> None:
    """A hook calls the old class's forward, so another class would change nothing."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny("llama4")
    hooks.add_hook_to_module(model.model.layers[1].feed_forward, hooks.AlignDevicesHook("cpu"))
    before = step(model)["logits"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.feed_forward: got a forward that was replaced"):
        route_experts(model, "mxep_mxfp8")
    assert model.config._experts_implementation == "eager"
    assert torch.equal(step(model)["logits"], before)


def test_route_experts_refuses_other_models() -> None:
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM: got no experts of Llama 4, Step 3\.7 or"):
        route_experts(tiny(), "mxep_bf16")
    with pytest.raises(ValueError, match="got 'eager', want one that mxep has registered"):
        route_experts(longcat(), "eager")


def swiglu(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """As Liger's experts are: from the parameters that are there."""
    out = torch.zeros_like(hidden_states)
    for e in range(len(self.down_proj)):
        gate, up = (hidden_states @ self.gate_up_proj[e].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ self.down_proj[e].T
        out = out + y * (top_k_weights * (top_k_index == e)).sum(1, keepdim=True)
    return out


def replaced_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Before the model is built, as `apply_liger_kernel_to_qwen3_moe` does."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    class Swapped(torch.nn.Module):
        forward = swiglu

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 64, 64) / 8)
            self.down_proj = torch.nn.Parameter(torch.randn(4, 64, 32) / 8)

    monkeypatch.setattr(module, "Qwen3MoeExperts", Swapped)
    return tiny("qwen3_moe", "mxep_bf16")


def replaced_forwards(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a model that is there, as Trainer(use_liger_kernel=True) does."""
    for layer in model.model.layers:
        layer.mlp.experts.forward = types.MethodType(swiglu, layer.mlp.experts)
    return model


def one_of_two_layers(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    experts = model.model.layers[1].mlp.experts
    experts.forward = types.MethodType(swiglu, experts)
    return model


def replaced_blocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As kernels of blocks do: the modules of experts are as they were, and not called."""
    for layer in model.model.layers:

        def forward(self: Any, x: Any, own: Any = layer.mlp) -> Any:
            rows = x.view(-1, x.shape[-1])
            _, weights, ids = own.gate(rows)
            return swiglu(own.experts, rows, ids, weights).view(x.shape)

        layer.mlp.forward = types.MethodType(forward, layer.mlp)
    return model


WAYS = replaced_class, replaced_forwards, one_of_two_layers, replaced_blocks


@pytest.mark.parametrize(
    ("way", "frozen"), [*((way, False) for way in WAYS), (replaced_forwards, True), (replaced_blocks, True)]
)
def test_experts_that_something_replaced_are_noticed(
    way: Callable[..., Any], frozen: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = way(tiny("qwen3_moe", "mxep_bf16"), monkeypatch)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.requires_grad_(not frozen)
    rows = [{"input_ids": row, "labels": row} for row in token_ids(4)]
    options = {"max_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(
        model, TrainingArguments(str(tmp_path), **options), train_dataset=rows, callbacks=[MxepCallback()]
    )
    with pytest.raises(RuntimeError, match=r"mxep does not compute model\.layers\.[01]\.mlp\.experts"):
        trainer.train()
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    with pytest.raises(RuntimeError, match="experts_implementation: got 'mxep_bf16', but mxep does not compute"):
        load_report(model)
    if not (frozen and way is replaced_blocks):  # then `check` cannot know that a forward ran
        with pytest.raises(RuntimeError, match="experts_implementation: got 'mxep_bf16', but mxep does not compute"):
            check(model)


def test_experts_that_are_replaced_after_a_forward_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step(model := tiny("qwen3_moe", "mxep_bf16"))
    with pytest.raises(RuntimeError, match=r"leave that out .*swiglu=False"):
        check(replaced_forwards(copy.deepcopy(model), monkeypatch))
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", report_to=[])
    MxepCallback().on_train_begin(arguments, TrainerState(), None, model)
    with pytest.raises(RuntimeError, match=r"leave that out .*use_liger_kernel=False"):
        check(replaced_forwards(model, monkeypatch))


def test_what_wraps_a_forward_and_calls_it_is_no_replacement() -> None:
    model = tiny("qwen3_moe", "mxep_bf16")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    own = first.forward
    first.forward = lambda *args: own(*args)
    second.forward = torch.compile(second.forward, backend="eager")
    check(model)
    step(model)
    check(model)
    assert list(load_report(model)) == ["model.layers.0.mlp.experts"], "compiled, nothing is kept of a forward"


def test_another_implementation_leaves_no_routing_of_the_one_before() -> None:
    model = tiny("qwen3_moe", "mxep_bf16")
    model(input_ids=token_ids(4))
    experts = model.model.layers[0].mlp.experts
    assert load_report(model)
    model.set_experts_implementation("grouped_mm")
    model(input_ids=token_ids(1))
    assert load_report(model) == {}
    layer = experts.__dict__["_mxep_layer"]
    assert layer.last_routing is None
    callback = MxepCallback()
    callback.on_train_begin(TrainingArguments(save_strategy="no", report_to=[]), TrainerState(), None, model=model)
    step(model)
    check(model)  # it was asked for, and is no replacement
    model.set_experts_implementation("mxep_bf16")
    model(input_ids=token_ids(1))
    assert load_report(model)


def test_a_compiled_forward_leaves_no_routing_of_the_one_before() -> None:
    register(Implementation("mxep_compiled", Recipe.bf16(), max_tokens=64))
    model = tiny("qwen3_moe", "mxep_compiled")
    experts = model.model.layers[0].mlp.experts
    inputs = torch.randn(8, 64), torch.randint(0, 4, (8, 1)), torch.rand(8, 1)
    experts(*inputs)
    layer = experts.__dict__["_mxep_layer"]
    assert layer.last_routing is not None
    torch.compile(experts, backend="eager", fullgraph=True)(*inputs)
    assert layer.last_routing is None
