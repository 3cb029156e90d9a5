"""torchtitan 0.3 with mxep's override: its layers, and its own trainer on CPU processes."""

import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("titan_on_cpu", reason="wants torchtitan", exc_type=ImportError)
pytest.importorskip("torchtitan.config.override", reason="wants torchtitan 0.3", exc_type=ImportError)

from mxep.gemm.recipe import LEAST
from mxep.integration.metrics import snr
from ranks import Context, distributed

E, K, D, F, T = 8, 3, 64, 96, 40
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")


def configs(**options: Any) -> tuple[Any, Any]:
    """RoutedExperts.Config as torchtitan has it, and as the override makes it."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from mxep.integration.torchtitan import routed_experts

    experts = GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
    dispatcher = LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    own = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)
    return own, routed_experts(own, dtype="float32", **options)


def in_fp32(experts: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """What its GroupedExperts compute, which cast to bf16."""
    w1, w2, w3 = (getattr(experts, name) for name in NAMES)
    found = []
    for e, rows in enumerate(x.split(counts.tolist())):
        found.append((torch.nn.functional.silu(rows @ w1[e].T) * (rows @ w3[e].T)) @ w2[e].T)
    return torch.cat(found)


@pytest.mark.parametrize(("recipe", "least"), [("bf16", 120.0), ("mxfp8", 22.5)])
@pytest.mark.parametrize("shape", [(T,), (2, T // 2)], ids=str)
def test_layer_equals_torchtitans(
    recipe: str, least: float, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan.models.common.moe import GroupedExperts

    monkeypatch.setattr(GroupedExperts, "forward", in_fp32)
    torch.manual_seed(0)
    own, ours = (config.build() for config in configs(recipe=recipe))
    for name in NAMES:
        torch.nn.init.normal_(getattr(own.inner_experts, name), std=D**-0.5)
    ours.load_state_dict(own.state_dict())  # the same names

    x = torch.randn(*shape, D)
    ids = torch.rand(T, E).topk(K).indices
    scores, counts, d_out = torch.rand(T, K), torch.bincount(ids.flatten(), minlength=E), torch.randn(*shape, D)
    found = []
    for layer in (own, ours):
        inputs = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        if len(shape) == 2:
            given = inputs[0], inputs[1].view(*shape, K), ids.view(*shape, K)
            out = layer(*given, counts)
        else:  # as torchtitan's main branch calls these three
            tokens, routed, metadata = layer.token_dispatcher.dispatch(*inputs, ids, counts)
            out = layer.token_dispatcher.combine(layer.inner_experts(tokens, routed), metadata, inputs[0])
        out.backward(d_out)
        weights = [getattr(layer.inner_experts, name).grad for name in NAMES]
        found.append([out, *(tensor.grad for tensor in inputs), *weights])
    for name, reference, got in zip(("out", "x", "scores", *NAMES), *found):
        assert snr(reference, got) >= least, name
    assert torch.equal(ours.inner_experts.load_E, counts)


@pytest.mark.parametrize(("max_tokens", "picked"), [(T, "bf16"), (T + 3, "mxfp8")])
def test_recipe_auto_goes_by_max_tokens(max_tokens: int, picked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (T + 2) * K / E  # of an expert: one more token of each rank, and it pays
    monkeypatch.setitem(LEAST, "experts", 1 / (1 / rows + 1 / D + 1 / F))
    ids = torch.rand(1, T, E).topk(K).indices
    inputs = torch.randn(1, T, D), torch.rand(1, T, K), ids, torch.bincount(ids.flatten(), minlength=E)
    found = []
    for recipe in ("auto", picked):
        torch.manual_seed(0)
        layer = configs(recipe=recipe, max_tokens=max_tokens)[1].build()
        for name in NAMES:
            torch.nn.init.normal_(getattr(layer.inner_experts, name), std=D**-0.5)
        found.append(layer(*inputs))
    assert torch.equal(*found)


def test_errors_name_what_is_wrong() -> None:
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    from mxep.integration.torchtitan import routed_experts

    with pytest.raises(ValueError, match=r"dtype: got 'half'"):
        configs()[1].inner_experts.options.__class__(dtype="half").check(D, F)
    with pytest.raises(ValueError, match="needs a capacity"):
        configs(overflow="drop")
    with pytest.raises(ValueError, match="recipe: got 'auto' without max_tokens"):
        configs(recipe="auto")
    with pytest.raises(TypeError, match="recipes"):
        configs(recipes="mxfp8")
    own, _ = configs()
    own.inner_experts.dim = 40
    with pytest.raises(ValueError, match="in 32s, got 40"):
        routed_experts(own)
    own.inner_experts = GptOssGroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
    with pytest.raises(ValueError, match="of GptOssGroupedExperts"):
        routed_experts(own)


def overridden(recipe: str, *, linear: str | None = None, **options: Any) -> Any:
    """As `--override.imports` reads them."""
    from torchtitan.config.override import OverrideConfig, parse_cli_imports

    given = {"recipe": recipe, "dtype": "float32", "max_tokens": 64, **options}
    tokens = [f"mxep.integration.torchtitan.routed_experts={json.dumps(given)}", "mxep.integration.torchtitan.metrics"]
    if linear is not None:
        tokens.append(f"mxep.integration.torchtitan.linears={json.dumps({'recipe': linear})}")
    return OverrideConfig(imports=parse_cli_imports(tokens))


def test_linears_multiply_by_the_recipe() -> None:
    from torchtitan.models.common.linear import Linear

    from mxep.gemm import linear
    from mxep.integration.torchtitan import linears

    config = Linear.Config(in_features=D, out_features=F)
    own, ours = config.build(), linears(config, "mxfp8").build()
    ours.load_state_dict(own.state_dict())
    x = torch.randn(T, D)
    assert torch.equal(ours(x), linear(x, own.weight, recipe="mxfp8"))
    assert not torch.equal(ours(x), own(x))
    narrow = Linear.Config(in_features=D, out_features=F + 8)
    assert linears(narrow, "mxfp8") is narrow
    with pytest.raises(ValueError, match="mxfp9"):
        linears(config, "mxfp9")
    with pytest.raises(ValueError, match="backend: got 'best', want one of auto"):
        linears(config, "mxfp8", "best")


def test_linears_beside_torchtitans_own_quantization_are_refused() -> None:
    """As Float8's converter leaves a model: its config's class is a child of Linear's."""
    import types

    from torchtitan.config import Configurable
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.common.linear import Linear

    # torchao, which defines the real ones, may be missing.
    float8 = types.new_class("Float8Linear.Config", (Linear.Config,), exec_body=lambda names: names.update(
        __module__="torchtitan.components.quantization.float8"
    ))  # fmt: skip

    class Layer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            attention: Any

    class Attention(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            wo: Any

    class Model(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            layers: list[Any]

    made = Model.Config(layers=[Layer.Config(attention=Attention.Config(wo=float8(in_features=D, out_features=F)))])
    with pytest.raises(ValueError, match=r"linears: got Float8Linear\.Config, .*leave out its converter"):
        apply_overrides(overridden("mxfp8", linear="mxfp8"), made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": float("nan")}, "capacity: expected a Capacity, or a factor"),
        ({"capacity": -1}, "Capacity.factor: got .*, (wanted|expected) a positive number"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number, at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number"),
        ({"timeout": -1}, "timeout: expected seconds, more than 0, got -1"),
        ({"dispatcher": "fast"}, "dispatcher: expected one of local, .*got 'fast'"),
        ({"ranks_per_node": 2}, "dispatcher 'symmetric' has no ranks_per_node"),
        ({"backend": "best"}, "backend: got 'best', want one of auto"),
        ({"overflow": "lose", "capacity": 1.5}, "overflow"),
        ({"overflow": "lose"}, "overflow='lose' needs a capacity"),
        ({"recipe": "mxfp9"}, "mxfp9"),
        ({"recipe": None}, "recipe: got None, want bf16, fp8, mxfp8"),
        ({"quantize_once": "no"}, "quantize_once: got 'no', want true or false"),
    ],
)
def test_options_are_checked_before_anything_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configs(**options)


def test_options_of_nodes_reach_the_dispatcher() -> None:
    from mxep.integration.torchtitan import Options

    options = Options(dispatcher="hierarchical", ranks_per_node=2, nodes_per_token=1, capacity=1.25, overflow="drop")
    dispatch = options.dispatch()
    assert (dispatch.ranks_per_node, dispatch.nodes_per_token) == (2, 1)
    assert (dispatch.capacity.kind, dispatch.capacity.overflow) == ("factor", "drop")
    assert options.make_dispatcher(8, 64, None).world_size == 1, "without EP nothing travels"


def test_a_compiled_layer_of_several_ranks_needs_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxep.integration.torchtitan import Experts, Options, Routed

    x = torch.ones(2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="needs mxep's max_tokens"):
        Experts.forward(
            SimpleNamespace(options=Options(), recipe="mxfp8"), x, Routed(x, x, x, SimpleNamespace(world_size=2), 0)
        )


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_hugging_faces_names_and_tensors_stay(model: str, tmp_path: Path) -> None:
    """Of a model on one process, to Hugging Face's state dict and back."""
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.common.linear import Linear

    from mxep.integration.torchtitan import Experts, QuantizedLinear
    from titan_trainer import make_config

    found, weights = [], None
    for override in (None, overridden("mxfp8", linear="mxfp8")):
        config = make_config(model, str(tmp_path))
        if override is not None:
            apply_overrides(override, config)
        built = config.model_spec.model.build()
        if weights is None:
            weights = {name: torch.randn_like(x) for name, x in built.state_dict().items()}
        built.load_state_dict(weights)
        adapter = config.model_spec.state_dict_adapter(config.model_spec.model, None)
        hf = adapter.to_hf(built.state_dict())
        back = adapter.from_hf(dict(hf))
        found.append((hf, back))
        kinds = {type(module) for module in built.modules()}
        assert {Experts, QuantizedLinear} <= kinds or override is None
    left = {name for name, module in built.named_modules() if type(module) is Linear}
    assert left == {"lm_head", *(name for name, _ in built.named_modules() if name.endswith(".router.gate"))}
    for own, ours in zip(*found):
        assert list(own) == list(ours)
        assert all(torch.equal(own[name], ours[name]) for name in own)
    hf, back = found[1]
    assert any("experts.7." in name for name in hf)  # one tensor an expert
    assert {name for name in weights if "expert_bias" not in name} <= set(back)  # Hugging Face's Qwen3 has none
    assert all(torch.equal(back[name], weights[name]) for name in back)


@functools.cache  # the ranks stay for the tests of this file
def deepseek_v3(rank: int, recipe: str | None = None) -> tuple[list[float], list[str]]:
    """Losses and names of four steps with EP, FSDP2 and AC. recipe: of mxep's experts; None: torchtitan's own."""
    from titan_trainer import make_config, train

    how = {} if recipe is None else {"override": overridden(recipe)}
    with tempfile.TemporaryDirectory() as folder:
        losses, trainer = train(make_config("deepseek_v3", folder, ep=2, **how), rank)
    trainer.close()
    return losses, list(trainer.model_parts[0].state_dict())


def train_v3(ctx: Context, folder: Path, steps: int, override: Any, *, batches: int = 1, **options: Any) -> list[float]:
    """Losses of a run with these options."""
    from titan_trainer import BATCH, make_config, train

    options["training"] = {"steps": steps, "global_batch_size": batches * ctx.world_size * BATCH}
    losses, trainer = train(make_config("deepseek_v3", str(folder), ep=2, override=override, **options), ctx.rank)
    trainer.close()
    return losses


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_its_trainer_trains(ctx: Context, tmp_path: Path) -> None:
    """Losses against its own experts, which compute in bf16 whatever the model's dtype. Linears: the next test."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    (own, names), (in_bf16, same_names), (in_mxfp8, _) = (
        deepseek_v3(ctx.rank, recipe) for recipe in (None, "bf16", "mxfp8")
    )
    assert own[-1] < own[0] - 0.5
    assert same_names == names
    torch.testing.assert_close(in_bf16, own, rtol=0, atol=1e-3)
    torch.testing.assert_close(in_mxfp8, own, rtol=0, atol=1e-2)
    plain = overridden("bf16", dispatcher="all_to_all")
    assert train_v3(ctx, tmp_path, 3, plain, activation_checkpoint=FullAC.Config()) == in_bf16[:3]


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_its_trainer_trains_two_layers_of_qwen3(ctx: Context, tmp_path: Path) -> None:
    from titan_trainer import make_config, train

    found = []
    for how in ({}, {"override": overridden("mxfp8", linear="mxfp8")}):
        losses, trainer = train(make_config("qwen3", str(tmp_path), ep=2, **how), ctx.rank)
        trainer.close()
        found.append((losses, list(trainer.model_parts[0].state_dict())))
    (own, names), (losses, same_names) = found
    assert own[-1] < own[0] - 0.5
    torch.testing.assert_close(losses, own, rtol=0, atol=2e-2)  # 1e-2 of experts, as much again of linears
    assert same_names == names


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_its_trainer_compiles_blocks(ctx: Context, tmp_path: Path) -> None:
    from torchtitan.config import CompileConfig

    how = {"compile": CompileConfig(enable=True, backend="eager"), "activation_checkpoint": None}
    losses = train_v3(ctx, tmp_path, 2, overridden("mxfp8"), **how)
    torch.testing.assert_close(losses, deepseek_v3(ctx.rank, "mxfp8")[0][:2], rtol=0, atol=1e-4)


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_tensor_parallelism_that_cuts_experts_too_small_is_refused_before_a_step(ctx: Context, tmp_path: Path) -> None:
    from titan_trainer import make_config, train

    config = make_config("qwen3", str(tmp_path), override=overridden("mxfp8"))
    config.parallelism.tensor_parallel_degree = 2
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    with pytest.raises(ValueError, match=r"got 2, which leaves a rank 16 .*: set expert_parallel_degree"):
        config.build()
    config = make_config("qwen3", str(tmp_path), override=overridden("bf16"), training={"steps": 1})
    config.parallelism.tensor_parallel_degree = 2
    train(config, ctx.rank)[1].close()


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_micro_batches_share_quantized_weights(ctx: Context, tmp_path: Path) -> None:
    from mxep.gemm import quantize_weights_once_a_step

    found = [train_v3(ctx, tmp_path, 2, overridden("mxfp8", quantize_once=once), batches=2) for once in (False, True)]
    assert found[0] == found[1]
    # One MoE layer of two weights, two ways, two steps.
    assert quantize_weights_once_a_step().quantizations == 2 * 2 * 2


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_rows_over_capacity_stop_the_step(ctx: Context, tmp_path: Path) -> None:
    from mxep.comms import CapacityExceeded
    from titan_on_cpu import reduce_over_gloo
    from titan_trainer import make_config

    config = make_config("deepseek_v3", str(tmp_path), ep=2, override=overridden("bf16", capacity=0.1))
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    trainer = config.build()
    reduce_over_gloo(trainer.model_parts[0])
    before = [p.detach().clone() for p in trainer.model_parts[0].parameters()]
    with pytest.raises(CapacityExceeded, match="would have been enough"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model_parts[0].parameters()))
    trainer.close()
    drop, recompute = (
        train_v3(ctx, tmp_path, 2, overridden("bf16", capacity=0.1, overflow=overflow))
        for overflow in ("drop", "recompute")
    )
    with_room_for_all, _ = deepseek_v3(ctx.rank, "bf16")
    assert recompute == with_room_for_all[:2] != drop


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_checkpoints_and_loads_are_torchtitans(ctx: Context, tmp_path: Path) -> None:
    """From its checkpoint mxep's experts go on as its own would have, and from mxep's its own do."""
    from titan_trainer import make_config, train

    def run(folder: str, override: Any, steps: int, load_step: int = -1) -> tuple[list[float], Any]:
        kept = {"enable": True, "interval": 2, "last_save_model_only": False, "load_step": load_step}
        given: dict[str, Any] = {"training": {"steps": steps}, "checkpoint": kept}
        if override is not None:
            given["override"] = override
        losses, trainer = train(make_config("deepseek_v3", str(tmp_path / folder), ep=2, **given), ctx.rank)
        trainer.close()
        return losses, trainer

    mxep = overridden("bf16", linear="bf16")
    _, (_, trainer) = run("own", None, 2), run("mxep", mxep, 2)
    loads = trainer.metrics_processor.logger.each("moe_load/layers.1")
    assert all(1 <= load <= 8 for load in loads)  # of 8 experts
    # The fourth loss is behind a step of the optimizer, whose state is in the checkpoint, too.
    whole, _ = deepseek_v3(ctx.rank)
    for rest in (run("own", mxep, 4, 2)[0], run("mxep", None, 4, 2)[0]):
        torch.testing.assert_close(rest, whole[2:], rtol=0, atol=1e-3)


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_the_benchmark_measures_its_cases(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import titan
    from titan_on_cpu import reduce_over_gloo
    from titan_trainer import no_sleep, smaller

    monkeypatch.setenv("LOCAL_RANK", str(ctx.rank))
    monkeypatch.setenv("WORLD_SIZE", str(ctx.world_size))
    few = SimpleNamespace(get_path=lambda name: Path(json.__file__).parent)  # words of a folder of the library
    monkeypatch.setattr(titan, "sysconfig", few)
    sizes = ["--model", "qwen3-debug", "--layers", "1", "--length", "32", "--batch", "2"]
    args = titan.parse([*sizes, "--steps", "3", "--log-every", "1"])
    rows = []
    for case in (titan.OWN, "mxfp8-linear"):
        with smaller("qwen3"), no_sleep():
            trainer = titan.make_config(args, case).build()
            reduce_over_gloo(trainer.model_parts[0])
            rows.append(titan.measure(trainer, args, case))
        trainer.close()
    for row in rows:
        assert row["tokens/s"] > 0
        assert list(row["losses"]) == [1, 2, 3]
    own, ours = (list(row["losses"].values()) for row in rows)
    assert own != ours
    torch.testing.assert_close(ours, own, rtol=0, atol=2e-2)
