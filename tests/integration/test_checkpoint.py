"""Run folders and checkpoints: what a save leaves, whatever fails, who may load it, and that no run is written over."""

import copy
import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from integration.test_train import losses, make_trainer, train_stop_and_resume
from integration.test_train_options import FSDP, SMALL, whole
from mxep.integration import checkpoint
from mxep.integration.app import register
from mxep.integration.checkpoint import new_folder, take
from mxep.integration.data import read_text
from mxep.integration.launch import Rank
from mxep.integration.mesh import Mesh
from mxep.integration.model import recipes
from mxep.integration.schema import Config, configs_dir
from mxep.integration.train import Trainer, make_optimizer
from ranks import run_again

TINY = ("model=tiny", "data=text", "data.batch=4", "data.length=32", "train.valid_batches=1", "train.compare=false")


# Run folders


def test_runs_that_start_at_one_time_get_a_folder_each(tmp_path: Path):
    wanted, found = str(tmp_path / "outputs" / "today" / "12-00-00"), []
    threads = [threading.Thread(target=lambda: found.append(new_folder(wanted))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [wanted, *(f"{wanted}-{number}" for number in range(2, 9))]


@pytest.mark.parametrize("key", ["run", "sweep"])
def test_a_config_names_its_own_folder_and_always_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.chdir(tmp_path)
    register()
    found = []
    for _ in range(2):
        with initialize_config_dir(str(configs_dir()), version_base="1.3"):
            hydra = compose("config", return_hydra_config=True).hydra
        names = [hydra[key].dir for _ in range(2)]
        assert names[0] == names[1]
        found.append(names[0])
    assert found[0] != found[1]
    assert sorted(str(path) for path in Path().glob("*/*/*")) == sorted(found)


def test_a_folder_is_one_runs(tmp_path: Path):
    take(tmp_path, "seed: 1\n", resumed=None)
    for resumed in (None, tmp_path.parent):
        with pytest.raises(ValueError, match=r"hydra\.run\.dir: got .*, which has a run"):
            take(tmp_path, "seed: 2\n", resumed=resumed)
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    take(tmp_path, "seed: 3\n", resumed=tmp_path / "mxfp8")  # it goes on in its own
    assert (tmp_path / "config.yaml").read_text() == "seed: 3\n"


def test_a_run_in_a_folder_with_a_run_is_refused_and_one_that_resumes_there_has_one_line_a_step(
    mxep, text: Path, tmp_path: Path
):
    given = *TINY, f"data.path={text}", "parallel.ranks=1", "train.steps=2", "train.compare=true"
    assert mxep(*given).code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = mxep(*given, "seed=1")
    assert (again.code, "which has a run, wanted a folder of its own" in again.err) == (1, True)
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    resumed = mxep(f"resume={tmp_path / 'run'}", "train.steps=3", "parallel.ranks=1")
    assert resumed.code == 0, resumed.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["run"], row["step"]) for row in rows] == [(run, i) for run in ("bf16", "mxfp8") for i in (1, 2, 3)]


# One rank


def load_error(rank: Rank, config: Config, folder: Path) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_trainer(rank, config, folder).load(checkpoint.find(folder)["bf16"])
    return str(error.value)


class PowerFailure(Exception):
    """At the chosen call of `sync`, `rename` or `rmtree`."""


def save_until_the_power_fails(rank: Rank, config: Config, folder: Path) -> list[tuple[str, str]]:
    """The calls that a save makes, in order, after saves that failed at each of them left a whole checkpoint."""
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    calls: list[tuple[str, str]] = []
    allowed = 0

    def watched(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def checked(path: Path, *rest: object, **options: object) -> object:
            calls.append((name, Path(path).name))
            if len(calls) > allowed:
                raise PowerFailure
            return call(path, *rest, **options)

        return checked

    with (
        mock.patch.object(checkpoint, "_sync", watched("sync", checkpoint._sync)),
        mock.patch.object(os, "rename", watched("rename", os.rename)),
        mock.patch.object(shutil, "rmtree", watched("rmtree", shutil.rmtree)),
    ):
        for number in range(100):
            allowed = number
            calls.clear()
            try:
                trainer.save()
            except PowerFailure:
                found = checkpoint.find(folder)["bf16"]
                assert checkpoint.read_state(found).step == int(found.name[-1])
                checkpoint.load(found, model=trainer.model, optimizer=trainer.optimizer)
                continue
            return calls
    raise AssertionError("a save that never ends")


def save_to_a_full_disk(rank: Rank, config: Config, folder: Path) -> str:
    """The error of a save on whose disk the second file of tensors does not fit."""
    trainer = two_steps(rank, config, folder)
    synced, fsync = [], os.fsync

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with mock.patch.object(os, "fsync", full), pytest.raises(OSError, match="No space left") as error:
        trainer.save()
    return str(error.value)


def two_steps(rank: Rank, config: Config, folder: Path) -> Trainer:
    """A trainer that saved its first step and has done a second one."""
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    return trainer


def faults(rank: Rank, config: Config, wider: Config, folder: Path) -> dict[str, Any]:
    """Each on checkpoints of its own, in one process."""
    folders = {name: folder / name for name in ("power", "disk")}
    for each in folders.values():
        each.mkdir()
    return {
        "power": save_until_the_power_fails(rank, config, folders["power"]),
        "disk": save_to_a_full_disk(rank, config, folders["disk"]),
        "wider": load_error(rank, wider, folders["disk"]),
    }


@pytest.fixture(scope="module")
def failed(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What `faults` found, and its folder."""
    folder = tmp_path_factory.mktemp("faults")
    config, wider = (make_config("recipe=bf16", "parallel.ranks=1", *more) for more in ((), ("model.hidden_dim=64",)))
    return run_again(faults, (config, wider, folder), world_size=1, timeout=100, device="cpu")[0], folder


def test_the_power_may_fail_at_any_moment_of_a_save(failed: tuple[dict[str, Any], Path]):
    calls, folder = failed[0]["power"], failed[1] / "power"
    # The last of them replaced the same step, which the one before had renamed but not deleted the older one.
    files = ["metrics.jsonl", "model", "optimizer", "state.json"]
    synced = [("sync", name) for name in [*files, ".step-000002.partial"]]
    order = [calls.index(call) for call in synced]
    renamed, durable = calls.index(("rename", ".step-000002.partial")), calls.index(("sync", "bf16"))
    assert max(order) < renamed < durable < min(i for i, call in enumerate(calls) if call[1] == "step-000001")
    assert checkpoint.find(folder)["bf16"].name == "step-000002"
    assert [path.name for path in (folder / "bf16").iterdir()] == ["step-000002"]


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(failed: tuple[dict[str, Any], Path]):
    assert "optimizer: rank 0: [Errno 28] No space left" in failed[0]["disk"]
    assert [path.name for path in (failed[1] / "disk" / "bf16").iterdir()] == ["step-000001"]


def test_a_checkpoint_of_another_model_is_refused_by_name(failed: tuple[dict[str, Any], Path]):
    assert re.search(r"4, 32, 32.*4, 32, 64.*blocks\.0\.moe\.experts\.down_proj", failed[0]["wider"])


WHOLE = {"format": checkpoint.FORMAT, "files": {}, "run": "bf16", "step": 1, "config": {}, "digest": ""}
BROKEN = [json.dumps(WHOLE | change) for change in ({"step": "1"}, {"config": []}, {"run": None}, {"files": []})]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1}', *BROKEN])
def test_a_broken_state_is_refused(tmp_path: Path, content: str):
    (tmp_path / "state.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        checkpoint.read_state(tmp_path)


# Two ranks


def save_then_load_elsewhere(rank: Rank, config: Config, folder: Path) -> tuple[float, float]:
    """Two steps with experts on two ranks; then the checkpoint in a model whose ranks hold all experts."""
    text = read_text(config.data)
    spread, whole = Mesh.make(2, rank.device), Mesh.make(1, rank.device)
    (recipe,) = recipes(config)
    first = Trainer(rank, config, recipe, spread, text, folder)
    for _ in range(2):
        first.train_step()
    first.save()
    torch.distributed.barrier()
    second = Trainer(rank, config, recipe, whole, text, folder)
    second.load(checkpoint.find(folder)["bf16"])
    moments = [second.optimizer.state[p]["exp_avg"].abs().sum().item() for p in second.model.parameters()]
    assert second.step == 2
    assert min(moments) > 0
    elsewhere = copy.deepcopy(second.model).to("meta")  # as a GPU is, somewhere else than the host
    optimizer = make_optimizer(elsewhere, config.optimizer)
    with mock.patch.object(checkpoint, "not_finite", return_value=None):  # which reads from the device
        checkpoint.load(checkpoint.find(folder)["bf16"], model=elsewhere, optimizer=optimizer)
    assert {tensor.device.type for of in optimizer.state.values() for tensor in of.values()} == {"meta"}
    return first.validate(), second.validate()


def save_with_a_nan(rank: Rank, config: Config, folder: Path) -> str:
    trainer = two_steps(rank, config, folder)
    if rank.rank == 1:
        trainer.optimizer.state[trainer.model.blocks[0].moe.experts.down_proj]["exp_avg"].fill_(float("inf"))
    with pytest.raises(FloatingPointError) as error:
        trainer.save()
    return str(error.value)


def refusals_of_each_cut(rank: Rank, config: Config, folder: Path) -> dict[str, str]:
    """By file of a checkpoint, the error of loading it without its last byte. Broken headers are refused, too."""
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    trainer.save()
    step, found = trainer.saved, {}
    assert step is not None
    dist.barrier()
    files = sorted(file for file in step.rglob("*") if file.is_file())
    for file in files:
        content = file.read_bytes()
        dist.barrier()
        if rank.rank == 0:
            file.write_bytes(content[:-1])
        dist.barrier()
        with pytest.raises(ValueError, match="is not a checkpoint") as error:
            trainer.load(step)
        found[str(file.relative_to(step))] = str(error.value)
        dist.barrier()
        if rank.rank == 0:
            file.write_bytes(bytes(8) + content[8:] if file.suffix == ".safetensors" else content)
        dist.barrier()
        if file.suffix == ".safetensors":
            with pytest.raises(ValueError, match=f"{file.parent}: expected safetensors files, got "):
                trainer.load(step)
            dist.barrier()
            if rank.rank == 0:
                file.write_bytes(content)
            dist.barrier()
    trainer.load(step)
    return found


def on_two_ranks(rank: Rank, config: Config, folder: Path) -> tuple[tuple[float, float], str, dict[str, str]]:
    found = []
    for name, fn in {"ep": save_then_load_elsewhere, "nan": save_with_a_nan, "cuts": refusals_of_each_cut}.items():
        (folder / name).mkdir(exist_ok=True)
        found.append(fn(rank, config, folder / name))
    return tuple(found)


def test_what_two_ranks_save(make_config: Callable[..., Config], tmp_path: Path):
    """A checkpoint loads at another degree of expert parallelism; what is not finite on any rank is not saved; a file
    that is not whole is noticed on all ranks."""
    config = make_config("recipe=bf16", "parallel.ranks=2", "train.compare=false")
    one, two = run_again(on_two_ranks, (config, tmp_path), world_size=2, timeout=100, device="cpu")
    for (before, after), message, _ in (one, two):
        assert before == pytest.approx(after, rel=1e-3)  # bf16 roundings of partial sums on the way home
        assert message == "bf16, step 2: first.blocks.0.moe.experts.down_proj is not finite: not saved"
    stored = HuggingFaceStorageReader(str(checkpoint.find(tmp_path / "ep")["bf16"] / "model")).read_metadata()
    experts = stored.state_dict_metadata["blocks.0.moe.experts.gate_up_proj"].size
    assert list(experts) == [config.model.experts, 2 * config.model.hidden_dim, config.model.dim]
    assert checkpoint.find(tmp_path / "nan")["bf16"].name == "step-000001"
    assert one[2] == two[2]
    tensors = {name: message for name, message in one[2].items() if name.endswith(".safetensors")}
    assert len(tensors) == 4
    for name, message in tensors.items():
        assert re.search(rf"{name}: got \d+ bytes, wanted \d+", message)
    assert one[2].keys() - tensors.keys() == {"metrics.jsonl", "state.json"}


# parallel.fsdp


def share_of(trainer: Trainer) -> float:
    """Numbers that a rank holds of weights and moments, of those that there are."""
    tensors = list(trainer.model.parameters())
    tensors += [value for of in trainer.optimizer.state.values() for value in of.values() if value.dim()]
    assert all(isinstance(tensor, DTensor) for tensor in tensors)
    return sum(tensor.to_local().numel() for tensor in tensors) / sum(tensor.numel() for tensor in tensors)


def weight_parts(trainer: object) -> dict[str, torch.Tensor]:
    named = dict(trainer.model.named_parameters())
    moments = {f"first.{name}": trainer.optimizer.state[p]["exp_avg"] for name, p in named.items()}
    return {name: whole(tensor) for name, tensor in (named | moments).items()}


def train_and_save(rank: Rank, config: Config, folder: Path) -> tuple[dict[str, torch.Tensor], Trainer]:
    trainer = make_trainer(rank, config, folder)
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    return weight_parts(trainer), trainer


def load(rank: Rank, config: Config, *folders: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for folder in folders:
        trainer = make_trainer(rank, config, folder)
        trainer.load(checkpoint.find(folder)["bf16"])
        assert trainer.step == 2
        found.append(weight_parts(trainer))
    return found


def resume_and_save(rank: Rank, resumed: Config, config: Config, folder: Path) -> tuple[Any, float, Any]:
    outcomes = train_stop_and_resume(rank, resumed, folder)
    parts, trainer = train_and_save(rank, config, folder / "fsdp")
    return outcomes, share_of(trainer), parts


def load_and_refuse(rank: Rank, configs: dict[str, Config], folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Weights of checkpoints saved or loaded on two ranks, and errors of broken ones."""
    found = {
        "whole": train_and_save(rank, configs["whole"], folder / "whole")[0],
        "fsdp as whole": load(rank, configs["whole"], folder / "fsdp")[0],
        "fsdp2": train_and_save(rank, configs["fsdp2"], folder / "fsdp2")[0],
        "fsdp, whole as fsdp2": load(rank, configs["fsdp2"], folder / "fsdp", folder / "whole"),
    }
    messages = {"wider": load_error(rank, configs["wider"], folder / "fsdp2")}
    for file in sorted((checkpoint.find(folder / "fsdp2")["bf16"] / "optimizer").iterdir()):
        dist.barrier()
        if rank.rank == 0:
            hidden = file.rename(folder / file.name)
        dist.barrier()
        messages[str(file)] = load_error(rank, configs["fsdp2"], folder / "fsdp2")
        dist.barrier()
        if rank.rank == 0:
            hidden.rename(file)
        dist.barrier()
    return found, messages


def test_sharded_checkpoints(make_config: Callable[..., Config], tmp_path: Path):
    """A sharded run resumes bit for bit, and a rank holds its part alone. Checkpoints load with and without sharding
    and at other degrees. One that lacks a rank's file or is of another model is refused."""
    for name in ("fsdp", "fsdp2", "whole"):
        (tmp_path / name).mkdir()
    given = *SMALL, "recipe=bf16"
    layouts = {
        "fsdp": (FSDP, "parallel.ranks=4", "parallel.ep=2"),
        "fsdp2": (FSDP, "parallel.ranks=2", "parallel.ep=2"),
        "whole": ("parallel.ranks=2", "parallel.ep=1"),
        "wider": (FSDP, "parallel.ranks=2", "model.hidden_dim=64"),
    }
    configs = {name: make_config(*given, *layout) for name, layout in layouts.items()}
    # It stops after one step, so the third loss is behind a step of the optimizer that was resumed.
    resumed = make_config(*SMALL, *layouts["fsdp"], "train.compare=false", "train.steps=3", "data.batch=8")
    how = {"timeout": 120, "device": "cpu"}

    four = run_again(resume_and_save, (resumed, configs["fsdp"], tmp_path), world_size=4, **how)
    (outcome, half, rest), _, sharded = four[0]
    assert [run.steps for run in half.runs] == [1]
    assert losses(rest) == losses(outcome)
    assert [run.valid_loss for run in rest.runs] == [run.valid_loss for run in outcome.runs]
    saved = checkpoint.find(tmp_path / "half")["mxfp8"]
    assert sorted(path.name for path in saved.iterdir()) == ["metrics.jsonl", "model", "optimizer", "state.json"]
    assert len(list((saved / "model").iterdir())) == 4
    assert [share for _, share, _ in four] == pytest.approx([0.25] * 4)

    two = run_again(load_and_refuse, (configs, tmp_path), world_size=2, **how)
    for found, messages in two:
        same(found["fsdp as whole"], sharded)
        for got, wanted in zip(found["fsdp, whole as fsdp2"], (sharded, found["whole"])):
            same(got, wanted)
        assert re.search(r"4, 32, 32.*4, 32, 64.*layers\.0\.mlp\.experts\.down_proj", messages.pop("wider"))
        for file, message in messages.items():
            assert "is not a checkpoint: FileNotFoundError" in message
            assert Path(file).name in message
        assert len(messages) == 2
    for (got,) in run_again(load, (configs["fsdp"], tmp_path / "whole"), world_size=4, **how):
        same(got, two[0][0]["whole"])


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in got if not torch.equal(got[name], wanted[name])] == []
