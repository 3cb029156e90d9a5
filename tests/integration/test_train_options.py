"""Options of training models of transformers: micro-batches, activation checkpointing, FSDP2, compile, the auxiliary
loss, linears beside experts, and weights to start from."""

import contextlib
import gc
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from integration.test_train import losses_and_norms, make_trainer, needs_gpu, train_stop_and_resume  # noqa: F401
from integration.tiny_models import tiny
from mxep.comms import CapacityExceeded
from mxep.gemm import converted, quantize_weights_once
from mxep.integration import checkpoint, train
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank
from mxep.integration.metrics import snr
from mxep.integration.schema import Config
from mxep.integration.train import make_model
from mxep.integration.transformers import model as model_module
from mxep.integration.transformers.model import CausalLM
from nodes import make_nodes, run_nodes
from ranks import run_again

SMALL = (
    *("model=qwen3_moe_tiny", "model.dim=32", "model.hidden_dim=32", "model.experts=4", "data.batch=16"),
    "model.transformers.router_aux_loss_coef=0.0",  # is of a micro-batch: no mean of means
)
FSDP = "parallel.fsdp=true"
ATTENTION = [f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qkvo"]
GIVEN = ("parallel.ranks=2", "parallel.device=cpu", "train.compare=false", "model.transformers.head_dim=32")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(rank: Rank, config: Config, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The mean loss of a first batch, its rows, loads and gradients; and how often weights were quantized."""
    trainer = make_trainer(rank, config, folder)
    opened = []

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with quantize_weights_once() as once:
            yield
            opened.append(once.quantizations)

    with mock.patch.object(train, "quantize_weights_once", watched):
        loss, rows = trainer._backward(*trainer._batch(trainer.text.train, config.seed, 0))
    trainer._reduce()
    dist.all_reduce(loss)
    found = {"loss": loss / rank.world_size, "routed": rows[train.COUNTS.index("routed")]}
    found |= {f"load {i}": router.load for i, router in enumerate(trainer.model.routers)}
    found |= {name: whole(p.grad) for name, p in trainer.model.named_parameters()}
    return found, sum(opened)


def of_each(rank: Rank, name: str, configs: list[Config], folder: Path) -> list[Any]:
    """What the function of that name here returns for each config."""
    return [globals()[name](rank, config, folder) for config in configs]


Found = dict[str, torch.Tensor]
FP32 = "recipe=bf16", "train.precision=32-true"
CHECKPOINTING = "train.activation_checkpointing=true", "model.transformers.router_aux_loss_coef=0.1"
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"alone": FP32},
    2: {
        **{f"micro {number}": ("train.compare=false", f"train.micro_batches={number}") for number in (1, 4)},
        **{
            f"{recipe} {kind}": (f"recipe={recipe}", "train.compare=false", "train.micro_batches=2", *how)
            for recipe in ("bf16", "mxfp8")
            # With the auxiliary loss, whose gradient comes into a block by another way than its output.
            for kind, how in {"blocks": CHECKPOINTING[1:], "checkpointed": CHECKPOINTING}.items()
        },
        "sharded": (*FP32, FSDP, "parallel.ep=1", "train.micro_batches=2", CHECKPOINTING[0]),
    },
    4: {
        **{f"fp32 micro {number}": (*FP32, "parallel.ep=2", f"train.micro_batches={number}") for number in (1, 4)},
        "sharded": (*FP32, FSDP, "parallel.ep=2", "train.micro_batches=2", CHECKPOINTING[0]),
    },
}
"""Number of ranks -> name -> overrides of SMALL."""


@pytest.fixture(scope="module")
def found(
    make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, tuple[Found, int]]]]:
    """What `gradients` finds of each of LAYOUTS, by number of ranks, on each of them."""
    made: dict[int, list[dict[str, tuple[Found, int]]]] = {}
    for ranks, layouts in LAYOUTS.items():
        given = *SMALL, f"parallel.ranks={ranks}", "parallel.device=cpu"
        configs = [make_config(*given, *more) for more in layouts.values()]
        args = "gradients", configs, tmp_path_factory.mktemp("gradients")
        each = run_again(of_each, args, world_size=ranks, timeout=100, device="cpu")
        made[ranks] = [dict(zip(layouts, rank)) for rank in each]
    return made


def assert_close(got: Found, wanted: Found, names: list[str]) -> None:
    """All is fp32, so only sums of a few hundred terms are in another order."""
    assert got.keys() == wanted.keys()
    for name in names:
        error = (got[name] - wanted[name]).float().norm() / wanted[name].float().norm()
        assert error < 1e-5, (name, error)


def test_micro_batches_have_the_loss_and_the_gradients_of_one_batch(found: Any):
    for rank in found[4]:
        wanted, _ = rank["fp32 micro 1"]
        assert_close(rank["fp32 micro 4"][0], wanted, list(wanted))


def test_micro_batches_share_one_quantization_of_each_weight(make_config: Callable[..., Config], found: Any):
    model = make_config(*SMALL).model
    results = [found[2][0][f"micro {number}"] for number in (1, 4)]
    assert [each["routed"] for each, _ in results] == 2 * [8 * 32 * model.top_k * model.layers]
    assert [opened for _, opened in results] == [0, 4 * model.layers]  # two weights, both ways


def test_ranks_have_the_gradients_of_one_process(found: Any):
    """In fp32; those that are sharded with micro-batches and with blocks that are computed again."""
    wanted, _ = found[1][0]["alone"]
    names = [name for name in wanted if name == "loss" or name.startswith("model.")]
    for rank in (*found[2], *found[4]):
        assert_close(rank["sharded"][0], wanted, names)
    for rank in found[4]:
        assert_close(rank["fp32 micro 1"][0], wanted, names)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_checkpointed_blocks_have_the_loss_gradients_and_loads_of_others_bit_for_bit(found: Any, recipe: str):
    for rank in found[2]:
        (wanted, quantized), (got, again) = rank[f"{recipe} blocks"], rank[f"{recipe} checkpointed"]
        assert got.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
        assert quantized == again


def overflow(rank: Rank, config: Config, folder: Path) -> tuple[str, bool]:
    """The error of a step whose rows overflow, and whether it left the weights alone."""
    trainer = make_trainer(rank, config, folder)
    before = [whole(p) for p in trainer.model.parameters()]
    with pytest.raises(CapacityExceeded) as error:
        trainer.train_step()
    return str(error.value), all(torch.equal(a, whole(b)) for a, b in zip(before, trainer.model.parameters()))


def test_rows_that_overflow_in_a_micro_batch_stop_the_step(make_config: Callable[..., Config], tmp_path: Path):
    how = "dispatcher.capacity=factor", "dispatcher.factor=0.3", "train.micro_batches=2"
    config = make_config(*SMALL, "recipe=bf16", "parallel.ranks=2", *how)
    for message, same in run_again(overflow, (config, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert "rows did not fit" in message
        assert same


# Activation checkpointing


def bytes_kept(rank: Rank, config: Config, folder: Path) -> int:
    """What a forward keeps for its backward, outside of what a checkpoint computes again; without weights."""
    trainer = make_trainer(rank, config, folder)
    weights = {p.data_ptr() for p in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.model.loss(*trainer._batch(trainer.text.train, 0, 0))
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_checkpointed_blocks_keep_less(make_config: Callable[..., Config], tmp_path: Path, device: str):
    given = *SMALL, f"parallel.device={device}", "recipe=bf16", "parallel.ranks=1"
    configs = [make_config(*given, f"train.activation_checkpointing={each}") for each in ("false", "true")]
    (kept,) = run_again(of_each, ("bytes_kept", configs, tmp_path), world_size=1, timeout=60, device=device)
    assert kept[1] < 0.5 * kept[0], kept


def refusal(rank: Rank, config: Config, folder: Path) -> str:
    """Of a model without blocks."""
    with mock.patch.object(model_module, "GradientCheckpointingLayer", int), pytest.raises(ConfigError) as error:
        make_trainer(rank, config, folder)
    return str(error.value)


def test_a_model_whose_blocks_are_not_known_is_refused(make_config: Callable[..., Config], tmp_path: Path):
    keys = FSDP.partition("=")[0], "train.activation_checkpointing", "train.compile"
    configs = [make_config(*SMALL, "recipe=bf16", "parallel.ranks=1", f"{key}=true") for key in keys]
    (messages,) = run_again(of_each, ("refusal", configs, tmp_path), world_size=1, timeout=60, device="cpu")
    assert messages == [f"{key}: leave it out: qwen3_moe has no blocks that transformers names" for key in keys]


def weights_alive(rank: Rank, config: Config, folder: Path) -> list[int]:
    """How many weights of models before are there when a job of two runs makes a model."""
    made: list[weakref.ref[object]] = []
    alive = []

    def remember(*args: Any) -> object:
        alive.append(sum(weight() is not None for weight in made))
        model = make_model(*args)
        made.extend(map(weakref.ref, model.parameters()))
        return model

    gc.disable()  # but for what train() collects
    with mock.patch.object(train, "make_model", remember):
        train.train(rank, config, str(folder), {})
    gc.enable()
    return alive


def test_a_run_gives_its_memory_back_to_the_next(make_config: Callable[..., Config], tmp_path: Path):
    given = "train.steps=1", "train.checkpoint_every=null", "train.activation_checkpointing=true", "parallel.fsdp=true"
    config = make_config(*SMALL, *given, "parallel.ranks=2")
    assert run_again(weights_alive, (config, tmp_path), world_size=2, timeout=60, device="cpu") == [[0, 0]] * 2


# FSDP2


def test_sharded_ranks_train_as_one_process(make_config: Callable[..., Config], tmp_path: Path):
    """Parameters in fp32 or in bf16, computed in bf16: but for roundings."""
    found = []
    for ranks, *layout in ((1,), (4, FSDP, "parallel.ep=2")):
        given = *SMALL, "recipe=bf16", "train.steps=2", f"parallel.ranks={ranks}", *layout
        configs = [make_config(*given, f"train.precision={precision}") for precision in ("bf16-mixed", "bf16-true")]
        results = run_again(
            of_each, ("losses_and_norms", configs, tmp_path), world_size=ranks, timeout=60, device="cpu"
        )
        assert all(result == results[0] for result in results)
        found.append(torch.tensor(results[0]))
    alone, curve = found
    # A wrong scale of any gradient shows in the norm at once: a factor of 2 or 4.
    assert curve.sub(alone).abs().div(alone).max() < 2e-2


def first_weights(rank: Rank, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    model = make_trainer(rank, config, folder).model.model
    return {name: whole(weight) for name, weight in model.state_dict().items()}


def start_from(rank: Rank, config: Config, broken: Config, folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    with pytest.raises(ConfigError) as error:
        make_trainer(rank, broken, folder)
    return first_weights(rank, config, folder), str(error.value)


def test_sharded_ranks_start_from_a_folder_whose_weights_are_finite(make_config: Callable[..., Config], tmp_path: Path):
    """An expert of rank 1 alone is not, and every rank names it."""
    source = tiny(vocab_size=256)
    source.save_pretrained(tmp_path / "source")
    wanted = {name: weight.clone() for name, weight in source.state_dict().items()}
    with torch.no_grad():
        source.model.layers[0].mlp.experts.down_proj[3, 5, 7] = torch.inf
    source.save_pretrained(tmp_path / "broken")
    sizes = {"dim": 64, "hidden_dim": 32, "experts": 4, "heads": 2}
    given = *(f"model.{key}={size}" for key, size in sizes.items()), "recipe=bf16", "parallel.ranks=2"
    config = make_config("model=qwen3_moe_tiny", *given, FSDP, f"model.pretrained={tmp_path / 'source'}")
    broken = make_config("model=qwen3_moe_tiny", *given, f"model.pretrained={tmp_path / 'broken'}")
    name = "model.model.layers.0.mlp.experts.down_proj"
    for weights, message in run_again(start_from, (config, broken, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert weights.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(weights[name], wanted[name])] == []
        assert message.startswith(f"model.pretrained: {tmp_path / 'broken'}: {name} is not finite")


@needs_gpu
def test_on_gpus_a_sharded_run_learns_and_resumes(make_config: Callable[..., Config], tmp_path: Path):
    ranks = min(2, torch.cuda.device_count())
    more = "train.steps=20", "train.checkpoint_every=5", "train.micro_batches=2", "train.activation_checkpointing=true"
    config = make_config(
        *("model=qwen3_moe_tiny", "parallel.device=cuda", f"parallel.ranks={ranks}", "data.batch=8", FSDP), *more
    )
    done, half, rest = run_again(
        train_stop_and_resume, (config, tmp_path), world_size=ranks, timeout=200, device="cuda"
    )[0]
    assert [run.steps for run in half.runs] == [20, 10]
    for run, again in zip(done.runs, rest.runs):
        assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] - 0.5
        assert run.valid_loss == pytest.approx(again.valid_loss, rel=2e-2)


def command(arguments: list[str], folder: Path) -> None:
    sys.argv = ["mxep", *arguments]
    os.chdir(folder)
    runpy.run_module("mxep.integration.app", run_name="__main__")  # as torchrun's `-m` does


@pytest.mark.slow
def test_under_torchrun_every_process_is_a_rank_and_rank_0_reports_into_the_folder_of_all(text: Path, tmp_path: Path):
    of_run = "recipe=bf16", "train.compare=false", f"hydra.run.dir={tmp_path}/here/run"
    given = [*SMALL, FSDP, "data=text", f"data.path={text}", *of_run, "train.steps=2"]
    (tmp_path / "here").mkdir()
    with make_nodes(1) as nodes:
        how = {"nodes": nodes, "ranks": 2, "timeout": 240, "connected": False}
        (ended,) = run_nodes(command, (given, tmp_path / "here"), tmp_path, **how)
    said = (tmp_path / "log-0").read_text()
    assert ended.error is None, said
    assert ended.results == [None, None], said
    assert said.count("held-out text") == 1
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run"]
    assert len((tmp_path / "here/run/metrics.jsonl").read_text().splitlines()) == 2
    saved = checkpoint.find(tmp_path / "here/run")["bf16"]
    for part in ("model", "optimizer"):
        assert sorted(path.name[:11] for path in (saved / part).iterdir()) == ["shard-00001", "shard-00002"]


# Linears beside experts, and compile


def gradients_of_traced(rank: Rank, configs: list[Config], folder: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """Of each, and what was compiled: traced alone, as compilers have no part in this."""
    seen: list[str] = []
    compile_ = torch.compile

    def listed(forward: Any) -> Any:
        seen.append(type(forward.__self__).__name__)
        return compile_(forward, backend="eager", fullgraph=True)

    found = []
    with mock.patch.object(torch, "compile", listed):
        for config in configs:
            seen.clear()
            found.append((gradients(rank, config, folder)[0], seen.copy()))
    return found


def compiled_and_converted(
    rank: Rank, configs: list[Config], named: Config, folder: Path
) -> tuple[list[tuple[dict[str, Any], list[str]]], list[str]]:
    names = [*converted(make_trainer(rank, named, folder).model.model)]
    return gradients_of_traced(rank, configs, folder), names


def test_what_is_not_expert_is_compiled_or_multiplied_by_its_own_recipe(
    make_config: Callable[..., Config], tmp_path: Path
):
    """Compiled parts have the gradients of others, and linears nearly those of linears in fp32."""
    all_of_it = "recipe.linear=mxfp8", FSDP, "train.micro_batches=2"
    given = [
        ("recipe=mxfp8", *more) for more in ((), ("train.compile=true",), all_of_it, (*all_of_it, "train.compile=true"))
    ]
    linear = make_config(*SMALL, *GIVEN, "recipe=mxfp8_linear")
    configs = [*(make_config(*SMALL, *GIVEN, *more) for more in given), linear]
    args = configs, linear, tmp_path
    found, names = run_again(compiled_and_converted, args, world_size=2, timeout=200, device="cpu")[0]
    for (wanted, none), (got, compiled) in (found[:2], found[2:4]):
        assert none == []
        assert compiled == 2 * ["Qwen3MoeAttention", "Qwen3MoeRMSNorm", "Qwen3MoeRMSNorm"]
        assert got.keys() == wanted.keys()
        for name, each in got.items():
            assert torch.equal(each, wanted[name]) or snr(wanted[name], each) > 30, name
    assert names == ATTENTION
    (plain, _), (got, _) = found[0], found[4]
    apart = {name: snr(plain[f"model.{name}"], got[f"model.{name}"]) for name in ATTENTION}
    assert all(10 < each < 40 for each in apart.values()), apart


# The auxiliary loss: layer by layer, as a plain formula has it, and counted once


COEF = 0.1
SIZES = "model.dim=32", "model.hidden_dim=32", "model.experts=4", "data.batch=8", "recipe=bf16"
ALONE = *SIZES, "parallel.ranks=1", "parallel.device=cpu", "train.precision=32-true"
QWEN = "model=qwen3_moe_tiny", f"model.transformers.router_aux_loss_coef={COEF}"
MIXTRAL = (
    *("model=mixtral_8x7b", "model.layers=2", "model.heads=2", "model.transformers.num_key_value_heads=2"),
    *("model.transformers.vocab_size=256", f"model.transformers.router_aux_loss_coef={COEF}"),
)


def plain(logits: Tensor, top_k: int) -> Tensor:
    """K times Switch Transformer's loss of one layer, expert by expert."""
    probabilities = logits.flatten(0, -2).softmax(-1)
    rows = probabilities.topk(top_k).indices.flatten().tolist()
    experts = range(logits.shape[-1])
    return top_k * len(experts) * sum(rows.count(e) / len(rows) * probabilities[:, e].mean() for e in experts)


def gradients_of(trainer, loss: Callable[[CausalLM, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Of a step, whose `CausalLM.loss` is another."""
    with mock.patch.object(CausalLM, "loss", loss):
        trainer._backward(*trainer._batch(trainer.text.train, 0, 0))
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def by_hand(model: CausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss with the auxiliary one of logits that transformers itself returns."""
    out = model.model(input_ids=inputs, use_cache=False, output_router_logits=True)
    sizes = model.model.config
    aux = sum(plain(logits, sizes.num_experts_per_tok) for logits in out.router_logits) / sizes.num_hidden_layers
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    return loss + COEF * (aux - aux.detach())


def compare(rank: Rank, config: Config, folder: Path) -> dict[str, float]:
    """How far each gradient is from that by hand, and how far that is from one without an auxiliary loss."""
    trainer = make_trainer(rank, config, folder)
    own = CausalLM.loss
    found = gradients_of(trainer, own)
    wanted = gradients_of(trainer, by_hand)
    trainer.model.aux_weight = 0.0
    without = gradients_of(trainer, own)
    distance = lambda a, b: max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b if "gate.weight" in n)  # noqa: E731
    return {"by hand": distance(found, wanted), "without": distance(without, wanted)}


def computed(rank: Rank, config: Config, folder: Path) -> dict[str, object]:
    """Of a step: whether transformers computes a loss of its own, or holds logits; and what is left of them."""
    trainer = make_trainer(rank, config, folder)
    model = trainer.model
    out = model(trainer._batch(trainer.text.train, 0, 0)[0])
    trainer.train_step()
    left = [router.logits for router in model.routers]
    trainer.validate()
    return {
        "aux_loss": out.aux_loss,
        "router_logits": out.router_logits,
        "left": left + [router.logits for router in model.routers],
        "said": model.model.config.output_router_logits,
    }


def aux_refusal(rank: Rank, config: Config, folder: Path) -> str:
    with mock.patch.object(PreTrainedModel, "can_record_outputs", {}), pytest.raises(ConfigError) as error:
        make_trainer(rank, config, folder)
    return str(error.value)


def all_of_one(
    rank: Rank, compared: list[Config], counted: list[Config], folder: Path
) -> tuple[list[dict[str, float]], list[dict[str, object]], str]:
    refused = aux_refusal(rank, counted[0], folder)
    return (
        [compare(rank, each, folder) for each in compared],
        [computed(rank, each, folder) for each in counted],
        refused,
    )


def test_the_auxiliary_loss_of_routers(make_config: Callable[..., Config], tmp_path: Path):
    """Its gradient is that of the mean of each layer's loss. transformers computes no loss of its own, and no logits
    are left. Models that do not say what their logits are refuse it."""
    cases = [(QWEN, 1), (QWEN, 2), (MIXTRAL, 1)]
    compared = [make_config(*model, *ALONE, f"train.micro_batches={number}") for model, number in cases]
    counted = [make_config(*QWEN, *ALONE, f"train.activation_checkpointing={each}") for each in ("false", "true")]
    (found,) = run_again(all_of_one, (compared, counted, tmp_path), world_size=1, timeout=100, device="cpu")
    gradients, counts, message = found
    for each, case in zip(gradients, cases):
        assert each["by hand"] < 1e-5, case  # all is fp32
        assert each["without"] > 0.1, case
    for each in counts:
        assert each["aux_loss"] is each["router_logits"] is None
        assert each["left"] == [None] * 2 * counted[0].model.layers
        assert each["said"] is True
    assert message.startswith("model.transformers.output_router_logits: got true, want false: models of qwen3_moe")
