"""parallel.fsdp: what is not expert is sharded over all ranks, copies of experts over theirs; nothing else changes."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from integration.test_micro_batches import SMALL, gradients, whole
from integration.test_train import losses, losses_and_norms, make_trainer, needs_gpu, train_stop_and_resume
from integration.tiny_models import tiny
from mxep.integration import checkpoint
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank, run_ranks
from mxep.integration.schema import Config
from nodes import make_nodes, run_nodes

LAYOUTS = (2, 2), (4, 2), (2, 1)
FSDP = "parallel.fsdp=true"


def test_sharded_ranks_have_the_gradients_of_one_process(make_config: Callable[..., Config], tmp_path: Path):
    """In fp32, with micro-batches and with blocks that are computed again."""
    given = *SMALL, "recipe=bf16", "train.precision=32-true"
    alone = make_config(*given, "parallel.ranks=1")
    ((wanted, _),) = run_ranks(gradients, (alone, tmp_path), world_size=1, timeout=60, device="cpu")
    for ranks, ep in LAYOUTS:
        more = FSDP, f"parallel.ranks={ranks}", f"parallel.ep={ep}", "train.micro_batches=2"
        config = make_config(*given, *more, "train.activation_checkpointing=true")
        for got, _ in run_ranks(gradients, (config, tmp_path), world_size=ranks, timeout=60, device="cpu"):
            assert got.keys() == wanted.keys()
            for name in wanted:
                if name == "loss" or name.startswith("model."):
                    # As one sums a few hundred terms in another order.
                    error = (got[name] - wanted[name]).norm() / wanted[name].norm()
                    assert error < 1e-5, (ranks, ep, name, error)


def curves(rank: Rank, configs: list[Config], folder: Path) -> list[list[tuple[float, float]]]:
    return [losses_and_norms(rank, config, folder) for config in configs]


def test_sharded_ranks_train_as_one_process(make_config: Callable[..., Config], tmp_path: Path):
    """Parameters in fp32 or in bf16, computed in bf16: but for roundings."""
    found = []
    for ranks, *layout in ((1,), (2, FSDP), (4, FSDP, "parallel.ep=2")):
        given = *SMALL, "recipe=bf16", "train.steps=4", f"parallel.ranks={ranks}", *layout
        configs = [make_config(*given, f"train.precision={precision}") for precision in ("bf16-mixed", "bf16-true")]
        results = run_ranks(curves, (configs, tmp_path), world_size=ranks, timeout=60, device="cpu")
        assert all(result == results[0] for result in results)
        found.append(torch.tensor(results[0]))
    for curve in found[1:]:
        # A wrong scale of any gradient shows in the norm at once: a factor of 2 or 4.
        assert curve.sub(found[0]).abs().div(found[0]).max() < 2e-2


def test_a_sharded_run_resumes_bit_for_bit(make_config: Callable[..., Config], tmp_path: Path):
    more = "train.steps=4", "train.checkpoint_every=3", "train.micro_batches=2", "train.activation_checkpointing=true"
    config = make_config(*SMALL, FSDP, "parallel.ranks=4", "parallel.ep=2", "train.compare=false", *more)
    whole_run, half, rest = run_ranks(
        train_stop_and_resume, (config, tmp_path), world_size=4, timeout=120, device="cpu"
    )[0]
    assert [run.steps for run in half.runs] == [2]
    assert losses(rest) == losses(whole_run)
    assert [run.valid_loss for run in rest.runs] == [run.valid_loss for run in whole_run.runs]
    saved = checkpoint.find(tmp_path / "half")["mxfp8"]
    assert sorted(path.name for path in saved.iterdir()) == ["metrics.jsonl", "model", "optimizer", "state.json"]
    assert len(list((saved / "model").iterdir())) == 4


def share_of(rank: Rank, config: Config, folder: Path) -> float:
    """Numbers that a rank holds of weights and moments, of those that there are."""
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    tensors = list(trainer.model.parameters())
    tensors += [value for of in trainer.optimizer.state.values() for value in of.values() if value.dim()]
    assert all(isinstance(tensor, DTensor) for tensor in tensors)
    return sum(tensor.to_local().numel() for tensor in tensors) / sum(tensor.numel() for tensor in tensors)


def test_a_rank_holds_its_part_alone(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config(*SMALL, FSDP, "recipe=bf16", "parallel.ranks=4", "parallel.ep=2")
    shares = run_ranks(share_of, (config, tmp_path), world_size=4, timeout=60, device="cpu")
    assert shares == pytest.approx([0.25] * 4)


def weight_parts(trainer: object) -> dict[str, torch.Tensor]:
    named = dict(trainer.model.named_parameters())
    moments = {f"first.{name}": trainer.optimizer.state[p]["exp_avg"] for name, p in named.items()}
    return {name: whole(tensor) for name, tensor in (named | moments).items()}


def train_and_save(rank: Rank, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    trainer = make_trainer(rank, config, folder)
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    return weight_parts(trainer)


def load(rank: Rank, config: Config, folders: list[Path]) -> list[dict[str, torch.Tensor]]:
    found = []
    for folder in folders:
        trainer = make_trainer(rank, config, folder)
        trainer.load(checkpoint.find(folder)["bf16"])
        assert trainer.step == 2
        found.append(weight_parts(trainer))
    return found


def test_checkpoints_load_with_and_without_sharding_and_at_other_degrees(
    make_config: Callable[..., Config], tmp_path: Path
):
    layouts = {
        "fsdp": (FSDP, "parallel.ranks=4", "parallel.ep=2"),
        "fsdp2": (FSDP, "parallel.ranks=2", "parallel.ep=2"),
        "whole": ("parallel.ranks=2", "parallel.ep=1"),
    }
    configs = {name: make_config(*SMALL, "recipe=bf16", *layout) for name, layout in layouts.items()}
    wanted = {}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        how = {"world_size": config.ranks, "timeout": 60, "device": "cpu"}
        wanted[name] = run_ranks(train_and_save, (config, tmp_path / name), **how)[0]
    for loaded, config in configs.items():
        others = [name for name in layouts if name != loaded]
        how = {"world_size": config.ranks, "timeout": 60, "device": "cpu"}
        for found in run_ranks(load, (config, [tmp_path / name for name in others]), **how):
            for saved, got in zip(others, found):
                assert got.keys() == wanted[saved].keys()
                assert [n for n in got if not torch.equal(got[n], wanted[saved][n])] == [], (saved, loaded)


def first_weights(rank: Rank, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    model = make_trainer(rank, config, folder).model.model
    return {name: whole(weight) for name, weight in model.state_dict().items()}


def test_sharded_ranks_start_from_a_folder(make_config: Callable[..., Config], tmp_path: Path):
    source = tiny(vocab_size=256)
    source.save_pretrained(tmp_path / "source")
    sizes = {"dim": 64, "hidden_dim": 32, "experts": 4, "heads": 2}
    given = *(f"model.{key}={size}" for key, size in sizes.items()), "recipe=bf16", FSDP, "parallel.ranks=2"
    config = make_config("model=qwen3_moe_tiny", *given, f"model.pretrained={tmp_path / 'source'}")
    for weights in run_ranks(first_weights, (config, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert weights.keys() == source.state_dict().keys()
        assert [name for name, wanted in source.state_dict().items() if not torch.equal(weights[name], wanted)] == []


def refused(rank: Rank, config: Config, folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        make_trainer(rank, config, folder)
    return str(error.value)


def test_weights_to_start_from_that_are_not_finite_are_named_on_every_rank(
    make_config: Callable[..., Config], tmp_path: Path
):
    """An expert of rank 1 alone."""
    source = tiny(vocab_size=256)
    with torch.no_grad():
        source.model.layers[0].mlp.experts.down_proj[3, 5, 7] = torch.inf
    source.save_pretrained(tmp_path / "source")
    sizes = {"dim": 64, "hidden_dim": 32, "experts": 4, "heads": 2}
    given = *(f"model.{key}={size}" for key, size in sizes.items()), "recipe=bf16", "parallel.ranks=2"
    config = make_config("model=qwen3_moe_tiny", *given, f"model.pretrained={tmp_path / 'source'}")
    wanted = f"model.pretrained: {tmp_path / 'source'}: model.model.layers.0.mlp.experts.down_proj is not finite"
    for message in run_ranks(refused, (config, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert message.startswith(wanted)


def load_error(rank: Rank, config: Config, folder: Path) -> str:
    with pytest.raises(ValueError, match="wanted") as error:
        make_trainer(rank, config, folder).load(checkpoint.find(folder)["bf16"])
    return str(error.value)


def test_a_checkpoint_that_lacks_a_ranks_file_or_is_of_another_model_is_refused(
    make_config: Callable[..., Config], tmp_path: Path
):
    given = *SMALL, FSDP, "recipe=bf16", "parallel.ranks=2"
    run_ranks(train_and_save, (make_config(*given), tmp_path), world_size=2, timeout=60, device="cpu")
    wider = make_config(*given, "model.hidden_dim=64")
    for message in run_ranks(load_error, (wider, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert "model: model.model.layers.0.mlp.experts.gate_up_proj is (4, 64, 32), wanted (4, 128, 32)" in message
    optimizer = checkpoint.find(tmp_path)["bf16"] / "optimizer"
    for file in sorted(optimizer.iterdir()):
        hidden = file.rename(tmp_path / file.name)
        for message in run_ranks(load_error, (make_config(*given), tmp_path), world_size=2, timeout=60, device="cpu"):
            wanted = f"{optimizer}: no {file.name}: wanted the files of all 2 ranks that saved ("
            assert message.startswith(wanted)
        hidden.rename(file)


def test_what_cannot_be_sharded_is_refused(make_config: Callable[..., Config]):
    with pytest.raises(ConfigError, match=r"parallel\.fsdp: got true, wanted false: only models of transformers"):
        make_config(FSDP)


@needs_gpu
def test_on_gpus_a_sharded_run_learns_and_resumes(make_config: Callable[..., Config], tmp_path: Path):
    ranks = min(2, torch.cuda.device_count())
    more = "train.steps=20", "train.checkpoint_every=5", "train.micro_batches=2", "train.activation_checkpointing=true"
    config = make_config(
        *("model=qwen3_moe_tiny", "parallel.device=cuda", f"parallel.ranks={ranks}", "data.batch=8", FSDP), *more
    )
    done, half, rest = run_ranks(
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
