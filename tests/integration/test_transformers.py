"""mxep as transformers' implementation of experts: the model's own eager code is the measure."""

import copy
import importlib.util
import math
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import mxep.integration.transformers as mxep_transformers
from integration.tiny_models import CONFIGS, force_routing, step, tiny, token_ids, worst
from mxep.ep import LocalDispatcher
from mxep.gemm import Recipe
from mxep.gemm.recipe import LEAST
from mxep.integration.metrics import snr
from mxep.integration.transformers import Implementation, check, load_report, register, route_experts
from mxep.integration.transformers import experts as experts_module
from mxep.integration.transformers.experts import Layer, layers
from mxep.quant import SwiGLU

pytestmark = pytest.mark.usefixtures("one_thread")


def with_experts(model: Any, name: str) -> Any:
    """A copy of the model that runs this implementation."""
    model = copy.deepcopy(model)
    if "Llama4" in type(model).__name__:
        route_experts(model, name)
    else:
        model.set_experts_implementation(name)
    return model


CLAMPED = SwiGLU(1.702, 0.5, 1.0, interleaved=True)
CHANGES = {"gpt_oss": {"swiglu_limit": 0.5}}  # that clamps a third of gate and up


def rounding(exact: torch.Tensor, eager: torch.Tensor) -> float:
    """The SNR above which two ways to round are alike, where eager code is as far from `exact` as it is.

    Each has noise of its own, 3 dB for the two. Of n numbers the power of noise is known to sqrt(2 / n): three standard
    deviations of the ratio of two are 26 / sqrt(n) dB.
    """
    return snr(exact, eager.to(exact.dtype)) - 3 - 26 / math.sqrt(exact.numel())


@pytest.mark.parametrize("kind", CONFIGS)
def test_fp32_equals_the_models_own_code(kind: str) -> None:
    model = tiny(kind, **CHANGES.get(kind, {}))
    eager, got = step(model), step(routed := with_experts(model, "mxep_bf16"))
    exact = step(copy.deepcopy(model).double())
    assert eager.keys() == got.keys()
    for name in eager:
        # gpt-oss's router biases and sinks, 4 and 2 sums in which much cancels, differ more from their own float64.
        assert snr(eager[name], got[name]) >= min(120, rounding(exact[name], eager[name])), name
    assert snr(eager["logits"], got["logits"]) >= 120
    assert {layer.activation for _, layer in layers(routed)} == {CLAMPED if kind == "gpt_oss" else SwiGLU()}
    check(routed)


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_kind_with_the_references_routing(kind: str) -> None:
    model = tiny(kind, **{"qwen3_moe": {"norm_topk_prob": True}, "gpt_oss": {"swiglu_limit": 3.0}}.get(kind, {}))

    def forced(model: Any, name: str) -> dict[str, torch.Tensor]:
        force_routing(model := with_experts(model, name) if name else copy.deepcopy(model), chosen)
        return {name: value.float() for name, value in step(model).items()}

    chosen = force_routing(reference := copy.deepcopy(model))
    wanted = step(reference)
    assert worst(wanted, forced(model, ""))[0] > 110, "forcing a model to its own routing changes nothing but rounding"
    others = ("mxfp8_32x32", "mxfp8_wgrad_bf16", "fp8") if kind == "qwen3_moe" else ()
    for recipe in ("mxfp8", "mxfp8_gate_up_fp8", *others):
        got = forced(model, f"mxep_{recipe}")
        assert snr(wanted["logits"], got["logits"]) >= 22.5, recipe
        lowest, name = worst(wanted, got, experts=True)
        assert lowest >= 18.5, (recipe, name)
    eager, got = forced(model.bfloat16(), ""), forced(model, "mxep_bf16")
    for name in wanted:
        assert snr(wanted[name], got[name]) >= rounding(wanted[name], eager[name]), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_save_and_load_both_ways(kind: str, tmp_path: Path) -> None:
    def load(folder: str, name: str) -> Any:
        if kind == "llama4":  # as it is loaded before it is routed
            return with_experts(AutoModelForCausalLM.from_pretrained(tmp_path / folder), name)
        return AutoModelForCausalLM.from_pretrained(tmp_path / folder, experts_implementation=name)

    ids = token_ids()
    tiny(kind).save_pretrained(tmp_path / "eager")
    model = load("eager", "mxep_mxfp8")
    assert model.config._experts_implementation == "mxep_mxfp8"
    logits = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "ours")
    for other in (load("ours", "mxep_mxfp8"), copy.deepcopy(model)):
        assert torch.equal(other(input_ids=ids).logits, logits)
    plain, before = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("ours", "eager"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), before.parameters(), strict=True))
    assert torch.equal(plain(input_ids=ids).logits, before(input_ids=ids).logits)
    assert "mxep" not in (tmp_path / "ours" / "config.json").read_text()


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_generate_gives_the_models_own_tokens(kind: str) -> None:
    model = tiny(kind)
    options = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(token_ids()[:, :8], **options)
    assert torch.equal(with_experts(model, "mxep_bf16").generate(token_ids()[:, :8], **options), wanted)
    assert with_experts(model, "mxep_mxfp8").generate(token_ids()[:, :8], **options).shape == wanted.shape


@pytest.mark.parametrize(("kind", "reentrant"), [*((kind, False) for kind in CONFIGS), ("gpt_oss", True)])
def test_gradient_checkpointing_changes_no_bit(kind: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_experts(tiny(kind), "mxep_mxfp8").train()
    forwards, forward = [], Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda *args: (forwards.append(args), forward(*args))[1])
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(torch.equal(wanted[name], value) for name, value in step(model).items())
    assert len(forwards) == 2 + 4, "of two layers, and again in backward"


class Made(TorchDispatchMode):
    """What operations, other than views, make of bf16 and `size` numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(each.alias_info for each in func._schema.returns):
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16]
            self.found += [str(func)] * sizes.count(self.size)
        return out


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_weights_stored_transposed_are_quantized_without_a_copy(kind: str) -> None:
    model = with_experts(tiny(kind, dtype=torch.bfloat16), "mxep_mxfp8")
    experts = next(m for m in model.modules() if hasattr(m, "has_gate")).requires_grad_(False)
    assert experts.is_transposed
    x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    ids, weights = torch.randint(0, 4, (40, 1)), torch.ones(40, 1)
    for weight in (experts.gate_up_proj, experts.down_proj):
        with Made(weight.numel()) as made:
            experts(x, ids, weights).sum().backward()
        assert made.found == []
    with Made(weight.numel()) as made:
        weight.mT.contiguous()
    assert len(made.found) == 1, "a copy is seen"


def test_autocast_computes_in_its_dtype() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8")
    experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
    x, ids, weights = torch.randn(32, 64), torch.randint(0, 4, (32, 1)), torch.ones(32, 1)
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x, ids, weights)
    assert out.dtype == torch.float32
    assert torch.equal(out, experts(x.bfloat16(), ids, weights).float())


def test_switching_takes_effect_and_pickles() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8")
    quantized = model(input_ids=token_ids()).logits
    model.set_experts_implementation("mxep_bf16")
    assert snr(model(input_ids=token_ids()).logits.detach(), quantized.detach()) < 40
    model.set_experts_implementation("mxep_mxfp8")
    assert torch.equal(model(input_ids=token_ids()).logits, quantized)
    experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
    again = pickle.loads(pickle.dumps(experts))
    again.config._experts_implementation = "mxep_mxfp8"
    x, ids, weights = torch.randn(32, 64), torch.randint(0, 4, (32, 1)), torch.ones(32, 1)
    assert torch.equal(again(x, ids, weights), experts(x, ids, weights))


def test_the_load_of_experts_is_counted() -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8")
    chosen = force_routing(model)
    model(input_ids=token_ids())
    report = load_report(model)
    assert list(report) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for ids, found in zip(chosen, report.values()):
        tokens = torch.bincount(ids.flatten(), minlength=4)
        padded = int((-(-tokens // 32) * 32).sum())
        wanted = {"rows": padded, "padding": padded - ids.numel(), "dead": int((tokens == 0).sum())}
        assert found == wanted | {"busiest": pytest.approx(float(tokens.max() / tokens.float().mean()))}
    assert load_report(tiny("qwen3_moe")) == {}


def test_experts_that_cannot_be_served_say_why() -> None:
    narrow = tiny("qwen3_moe", "mxep_mxfp8", moe_intermediate_size=40)
    with pytest.raises(ValueError, match=r"Qwen3MoeExperts, mxep_mxfp8: .* want the last two in 32s .* use mxep_bf16"):
        narrow(input_ids=token_ids())
    narrow.set_experts_implementation("mxep_bf16")
    narrow(input_ids=token_ids())
    with pytest.raises(ValueError, match=r"is torch.float16 .*dtype=torch.bfloat16"):
        tiny("qwen3_moe", "mxep_mxfp8", torch.float16)(input_ids=token_ids())


def test_another_recipe_gets_a_name_of_its_own() -> None:
    register(Implementation("mxep_test", Recipe.mxfp8(), backend="dequant"))
    model = tiny("qwen3_moe", "mxep_test")
    assert snr(tiny("qwen3_moe")(input_ids=token_ids()).logits, model(input_ids=token_ids()).logits) > 10
    assert {layer.backend for _, layer in layers(model)} == {"dequant"}
    register(Implementation("mxep_test", Recipe.mxfp8(), backend="reference"))
    model(input_ids=token_ids())
    assert {layer.backend for _, layer in layers(model)} == {"reference"}


@pytest.mark.parametrize(("least", "picked"), [(32, "mxfp8"), (33, "bf16")])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_mxep_auto_is_picked_once_by_the_first_batch_that_trains(
    kind: str, least: int, picked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MXEP_MAX_TOKENS", raising=False)
    model = tiny(kind)
    routed, wanted = with_experts(model, "mxep_auto"), step(with_experts(model, f"mxep_{picked}"))
    experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
    dim, hidden = model.config.hidden_size, experts.down_proj.shape[1 if experts.is_transposed else 2]
    rows = token_ids().numel() * model.config.num_experts_per_tok / experts.down_proj.shape[0]
    monkeypatch.setitem(LEAST, "experts", 0.999 / (32 / (rows * least) + 1 / dim + 1 / hidden))
    with torch.no_grad():
        routed.eval()(input_ids=token_ids())
    assert [layer.recipe for _, layer in layers(routed)] == ["auto", "auto"], "an evaluation picks nothing"
    got = step(routed)
    assert all(torch.equal(got[name], each) for name, each in wanted.items())
    step(routed, token_ids(1))
    assert {layer.recipe for _, layer in layers(routed)} == {Recipe.named(picked)}
    monkeypatch.setenv("MXEP_MAX_TOKENS", "1")  # is what counts where it is set
    step(few := with_experts(model, "mxep_auto"))
    assert {layer.recipe for _, layer in layers(few)} == {Recipe.bf16()}


def test_every_name_is_registered() -> None:
    assert set(mxep_transformers.NAMES) <= set(experts_module.ALL_EXPERTS_FUNCTIONS.keys())
    assert {"mxep_bf16", "mxep_fp8", "mxep_mxfp8"} <= set(mxep_transformers.NAMES)


@pytest.mark.parametrize(
    ("version", "message"), [(None, "transformers is missing: pip"), ("4.57.0", "transformers 4.57.0 .* want 5.17")]
)
def test_a_missing_or_old_transformers_is_named(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = types.ModuleType("transformers")
    old.__version__ = version  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None if version is None else old)  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location("mxep.integration.transformers.again", experts_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=message):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = token_ids(1, seed=i)[0]
        return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, folder: Path, callback: Any, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=[callback])
    trainer.train()
    return trainer


def test_a_trainer_logs_load_and_shares_quantized_weights(tmp_path: Path) -> None:
    model = tiny("qwen3_moe", "mxep_mxfp8")
    callback = mxep_transformers.MxepCallback(per_layer=True)
    shared = train(copy.deepcopy(model), tmp_path, callback, gradient_accumulation_steps=2)
    logged = shared.state.log_history[0]
    assert logged["mxep/rows"] == sum(logged[f"mxep/model.layers.{i}.mlp.experts/rows"] for i in (0, 1)) > 0
    assert 1 <= logged["mxep/busiest"] <= 4
    other = mxep_transformers.MxepCallback(share_quantized_weights=False)
    alone = train(copy.deepcopy(model), tmp_path, other, gradient_accumulation_steps=2)
    for a, b in zip(shared.model.parameters(), alone.model.parameters()):
        assert torch.equal(a, b)
    keys = {key for key in alone.state.log_history[0] if key.startswith("mxep/")}
    assert keys == {"mxep/rows", "mxep/padding", "mxep/busiest", "mxep/dead"}, "of layers only if asked"


def test_a_step_that_check_refuses_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalDispatcher) -> None:
        raise ValueError("rank 0: 3 expert ids outside -1..3")

    monkeypatch.setattr(LocalDispatcher, "check", refuse)
    model = tiny("qwen3_moe", "mxep_mxfp8")
    before = copy.deepcopy(model.state_dict())
    callback = mxep_transformers.MxepCallback()
    with pytest.raises(ValueError, match="3 expert ids"):
        train(model, tmp_path, callback, gradient_accumulation_steps=2)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_nothing(kind: str, default: torch.dtype) -> None:
    model = tiny(kind, "mxep_bf16")
    wanted, again = step(model), copy.deepcopy(model)
    again.set_experts_implementation("mxep_mxfp8")
    again.set_experts_implementation("mxep_bf16")  # makes layers anew
    torch.set_default_dtype(default)
    try:
        got, report = step(again), load_report(again)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert report == load_report(model)
    assert {layer.activation for _, layer in layers(again)} == {layer.activation for _, layer in layers(model)}


def test_a_model_whose_dispatcher_was_closed_leaves_others_theirs() -> None:
    first, second = tiny("qwen3_moe", "mxep_bf16"), tiny("qwen3_moe", "mxep_bf16")
    wanted = step(first)
    for _, layer in layers(first):
        layer.dispatcher.close()
    with pytest.raises(RuntimeError, match="dispatcher: closed"):
        step(first)
    got = step(second)  # while the first is there
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
