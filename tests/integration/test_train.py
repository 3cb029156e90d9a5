"""Training: what a run leaves behind, that it resumes exactly, and that ranks add nothing but speed."""

import contextlib
import copy
import dataclasses
import errno
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from mxep.comms import CapacityExceeded
from mxep.ep import MoE
from mxep.integration import checkpoint, report
from mxep.integration.data import read_text
from mxep.integration.launch import Rank, StopFlag, run_ranks
from mxep.integration.mesh import Mesh
from mxep.integration.metrics import log_backend
from mxep.integration.model import recipes
from mxep.integration.schema import Config
from mxep.integration.train import Outcome, Trainer, learning_rate, make_optimizer, train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class StopAfter(StopFlag):
    """Asked to stop after `steps` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def agreed(self) -> bool:
        self.left -= 1
        return self.left < 0


def train_stop_and_resume(rank: Rank, config: Config, folder: Path) -> tuple[Outcome, Outcome, Outcome]:
    """The same job in one go; stopped in the middle of its last run; and resumed from there."""
    for name in ("whole", "half", "rest"):
        (folder / name).mkdir(exist_ok=True)
    whole = train(rank, config, str(folder / "whole"), {})
    # agreed() is asked before each step, and once more at the end of no run.
    stop = StopAfter((len(recipes(config)) - 1) * config.train.steps + config.train.steps // 2)
    half = train(dataclasses.replace(rank, stop=stop), config, str(folder / "half"), {})
    torch.distributed.barrier()
    checkpoints = {run: str(path) for run, path in checkpoint.find(folder / "half").items()}
    return whole, half, train(rank, config, str(folder / "rest"), checkpoints)


def losses(outcome: Outcome) -> list[list[float]]:
    return [[row["loss"] for row in run.metrics] for run in outcome.runs]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_bit_for_bit(
    make_config: Callable[..., Config], tmp_path: Path, device: str
):
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    overrides = (f"parallel.device={device}", f"parallel.ranks={ranks}")
    config = make_config("train.steps=4", "train.checkpoint_every=3", *overrides)
    whole, half, rest = run_ranks(
        train_stop_and_resume, (config, tmp_path), world_size=ranks, timeout=60, device=device
    )[0]
    assert [run.steps for run in half.runs] == [4, 2]
    assert half.stopped
    assert not rest.stopped
    assert [run.name for run in rest.runs] == ["bf16", "mxfp8"]
    assert losses(rest) == losses(whole)
    assert [run.valid_loss for run in rest.runs] == [run.valid_loss for run in whole.runs]
    written = [json.loads(line) for line in (tmp_path / "rest" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in written] == [loss for run in losses(whole) for loss in run]


def losses_and_norms(rank: Rank, config: Config, folder: Path) -> list[tuple[float, float]]:
    (run,) = train(rank, config, str(folder), {}).runs
    return [(row["loss"], row["grad_norm"]) for row in run.metrics]


def test_one_rank_expert_parallel_and_data_parallel_ranks_train_alike(
    make_config: Callable[..., Config], tmp_path: Path
):
    """The losses of one process on the whole batch, but for the order of sums and roundings to bf16 on the way home."""
    curves = {}
    for ranks, ep in ((1, 1), (2, 2), (4, 2)):
        config = make_config(
            "recipe=bf16", "train.steps=5", f"parallel.ranks={ranks}", f"parallel.ep={ep}", "model.balance_rate=0"
        )
        results = run_ranks(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=60, device="cpu")
        assert all(result == results[0] for result in results)
        curves[ranks, ep] = results[0]
    alone = torch.tensor(curves.pop((1, 1)))
    for layout, curve in curves.items():
        # A wrong scale of any gradient shows in the norm at once (a factor of 2 or 4); rounding stays under a percent.
        assert torch.tensor(curve).sub(alone).abs().div(alone).max() < 1e-2, layout


def test_nodes_of_one_rank_train_as_one_node_does_bit_for_bit_and_nodes_of_two_alike(
    make_config: Callable[..., Config], tmp_path: Path
):
    """dispatcher=hierarchical, in MXFP8: sums are rounded where symmetric rounds them, if nodes have one rank."""
    curves = {}
    for ranks, dispatcher, of_node in ((2, "symmetric", "null"), (2, "hierarchical", 1), (4, "hierarchical", 2)):
        how = f"dispatcher={dispatcher}", f"dispatcher.ranks_per_node={of_node}", "dispatcher.capacity=factor"
        given = "train.compare=false", "train.steps=4", f"parallel.ranks={ranks}", *how
        config = make_config(*given, "model.balance_rate=0", "dispatcher.factor=2")
        results = run_ranks(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=60, device="cpu")
        assert all(result == results[0] for result in results)
        curves[ranks, dispatcher] = torch.tensor(results[0])
    assert torch.equal(curves[2, "hierarchical"], curves[2, "symmetric"])
    assert curves[4, "hierarchical"].sub(curves[2, "symmetric"]).abs().div(curves[2, "symmetric"]).max() < 2e-2


@needs_gpu
def test_a_cuda_graph_of_loss_and_gradients_trains_as_calls_from_the_host_do(
    make_config: Callable[..., Config], tmp_path: Path
):
    ranks = min(2, torch.cuda.device_count())
    curves = []
    for graph in ("false", "true"):
        config = make_config(
            *("train.compare=false", "train.steps=8", f"parallel.ranks={ranks}", "parallel.device=cuda"),
            f"train.graph={graph}",
        )
        results = run_ranks(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=120, device="cuda")
        assert all(result == results[0] for result in results)
        curves.append(torch.tensor(results[0]))
    host, graph = curves
    assert len(set(graph[:, 0].tolist())) == 8  # replays see new batches and new weights
    assert torch.equal(host, graph)


@needs_gpu
@pytest.mark.parametrize("override", ["train.graph=true", "train.graph=false", "dispatcher=all_to_all"])
def test_a_run_on_gpus_repeats_bit_for_bit(make_config: Callable[..., Config], tmp_path: Path, override: str):
    ranks = min(2, torch.cuda.device_count())
    config = make_config("train.compare=false", "train.steps=20", f"parallel.ranks={ranks}", override)
    curves = [
        run_ranks(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=120, device="cuda") for _ in range(2)
    ]
    assert curves[0] == curves[1]


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


def test_a_checkpoint_loads_at_another_degree_of_expert_parallelism(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16")
    for before, after in run_ranks(
        save_then_load_elsewhere, (config, tmp_path), world_size=2, timeout=60, device="cpu"
    ):
        assert before == pytest.approx(after, rel=1e-3)  # bf16 roundings of partial sums on the way home
    stored = HuggingFaceStorageReader(str(checkpoint.find(tmp_path)["bf16"] / "model")).read_metadata()
    experts = stored.state_dict_metadata["blocks.0.moe.experts.gate_up_proj"].size
    assert list(experts) == [config.model.experts, 2 * config.model.hidden_dim, config.model.dim]


def test_a_checkpoint_of_another_model_is_refused_by_name(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16", "parallel.ranks=1")
    run_ranks(save_one, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    wider = make_config("recipe=bf16", "parallel.ranks=1", "model.hidden_dim=64")
    (message,) = run_ranks(load_error, (wider, tmp_path), world_size=1, timeout=60, device="cpu")
    assert "model: blocks.0.moe.experts.gate_up_proj is (4, 64, 32), wanted (4, 128, 32)" in message


def save_one(rank: Rank, config: Config, folder: Path) -> None:
    make_trainer(rank, config, folder).save()


def load_error(rank: Rank, config: Config, folder: Path) -> str:
    with pytest.raises(ValueError, match="wanted") as error:
        make_trainer(rank, config, folder).load(checkpoint.find(folder)["bf16"])
    return str(error.value)


def held_out_error(rank: Rank, config: Config, folder: Path) -> str:
    with pytest.raises(CapacityExceeded) as error:
        make_trainer(rank, config, folder).validate()
    return str(error.value)


def test_held_out_text_is_checked_too(make_config: Callable[..., Config], tmp_path: Path):
    overflows = make_config("recipe=bf16", "parallel.ranks=1", "dispatcher.capacity=factor", "dispatcher.factor=0.3")
    (message,) = run_ranks(held_out_error, (overflows, tmp_path), world_size=1, timeout=60, device="cpu")
    assert "rows did not fit" in message


def make_trainer(rank: Rank, config: Config, folder: Path) -> Trainer:
    text = read_text(config.data)
    return Trainer(rank, config, recipes(config)[0], Mesh.make(config.ep, rank.device), text, folder)


def break_steps(trainer: Trainer, steps: set[int], how: str) -> None:
    """Make steps of a run bad on this rank: its gradients' norm overflows, its loss is NaN, or rows are lost."""
    gradients, reduce, loss, check = trainer.gradients, trainer.gradients.reduce, trainer.model.loss, MoE.check
    now = lambda: trainer.step + 1 in steps  # noqa: E731

    def reduce_to_huge() -> None:
        reduce()
        if now():
            gradients.experts[0].fill_(1e30)

    def check_to_overflow(moe: MoE) -> None:
        check(moe)
        if now():
            raise CapacityExceeded("7 rows did not fit")

    if how == "norm":
        gradients.reduce = reduce_to_huge
    elif how == "loss":
        trainer.model.loss = lambda *batch: loss(*batch) * (float("nan") if now() else 1.0)
    else:
        mock.patch.object(MoE, "check", check_to_overflow).start()


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def run_with_bad_steps(rank: Rank, config: Config, folder: Path, steps: set[int], how: str) -> str:
    """The error that a run ends with whose ``steps`` are bad on the last rank."""
    trainer = make_trainer(rank, config, folder)
    if rank.rank == rank.world_size - 1:
        break_steps(trainer, steps, how)
    with pytest.raises((FloatingPointError, CapacityExceeded)) as error:
        trainer.run()
    return f"{type(error.value).__name__}: {error.value}"


BAD = {
    "norm": r"FloatingPointError: bf16, step 3: the loss is \d.*, the gradient norm inf",
    "loss": "FloatingPointError: bf16, step 3: the loss is nan, the gradient norm nan",
    "rows": "CapacityExceeded: bf16, step 3: 7 rows did not fit",
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_step_on_one_rank_ends_the_run_on_all_and_leaves_the_last_good_checkpoint(
    make_config: Callable[..., Config], tmp_path: Path, how: str
):
    config = make_config("recipe=bf16", "parallel.ranks=2", "train.steps=5", "train.checkpoint_every=1")
    messages = run_ranks(run_with_bad_steps, (config, tmp_path, {3}, how), world_size=2, timeout=60, device="cpu")
    kept = tmp_path / "bf16" / "step-000002"
    for message in messages:
        assert re.fullmatch(BAD[how] + f"; it was not taken, and the last good checkpoint is {kept}", message)
    assert checkpoint.find(tmp_path) == {"bf16": kept}
    files = [load_file(file) for file in (kept / "model").iterdir()]
    assert len(files) == 2
    assert all(tensor.isfinite().all() for file in files for tensor in file.values())


def skip_one_step(rank: Rank, config: Config, folder: Path, how: str) -> tuple[bool, Outcome]:
    """Whether weights stay as they are in a skipped step, and the run."""
    trainer = make_trainer(rank, config, folder)
    if rank.rank == rank.world_size - 1:
        break_steps(trainer, {3}, how)
    for _ in range(2):
        trainer.train_step()
    before = weights_of(trainer)
    trainer.train_step()
    same = all(torch.equal(a, b) for a, b in zip(before, weights_of(trainer), strict=True))
    return same, Outcome([trainer.run()], "", 0.0)


@pytest.mark.parametrize("how", BAD)
def test_a_bad_step_may_be_skipped_by_all_ranks(make_config: Callable[..., Config], tmp_path: Path, how: str):
    config = make_config("recipe=bf16", "parallel.ranks=2", "train.steps=6", "train.skip_bad_steps=1")
    (same, outcome), other = run_ranks(skip_one_step, (config, tmp_path, how), world_size=2, timeout=60, device="cpu")
    assert same
    assert other[0]
    (run,) = outcome.runs
    assert [bool(row["skipped"]) for row in run.metrics] == [False, False, True, False, False, False]
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    json.dumps(run.metrics, allow_nan=False)
    assert report.summarize(outcome)["runs"][0]["skipped"] == 1
    (svg,) = report.charts({"": {"bf16": run}}, 3.0)
    assert [len(line.split()) for line in re.findall('points="([^"]*)"', svg)] == [6, 6, 3], "the last point is twice"


def skip_a_step_and_resume(rank: Rank, config: Config, folder: Path) -> tuple[list[float], list[float]]:
    """The losses after a skipped step of a run, and of one that resumes right after that step."""
    trainer, resumed = make_trainer(rank, config, folder), make_trainer(rank, config, folder)
    break_steps(trainer, {1, 3}, "norm")
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    resumed.load(checkpoint.step_folder(folder / trainer.name, 3))
    return tuple([row["loss"] for row in each.run().metrics] for each in (trainer, resumed))


def test_a_run_resumes_exactly_after_skipped_steps(make_config: Callable[..., Config], tmp_path: Path):
    """AdamW's count of steps, which its bias corrections follow, is of those taken."""
    config = make_config("recipe=bf16", "parallel.ranks=1", "train.steps=8", "train.skip_bad_steps=1")
    whole, resumed = run_ranks(skip_a_step_and_resume, (config, tmp_path), world_size=1, timeout=60, device="cpu")[0]
    assert resumed == whole


def test_more_bad_steps_in_a_row_than_may_be_skipped_end_the_run(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16", "parallel.ranks=1", "train.steps=9", "train.skip_bad_steps=1")
    steps = {2, 4, 5}
    (message,) = run_ranks(
        run_with_bad_steps, (config, tmp_path, steps, "norm"), world_size=1, timeout=60, device="cpu"
    )
    assert "step 5" in message
    assert "there is no checkpoint" in message


def save_with_a_nan(rank: Rank, config: Config, folder: Path) -> str:
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    if rank.rank == 1:
        trainer.optimizer.state[trainer.model.blocks[0].moe.experts.down_proj]["exp_avg"].fill_(float("inf"))
    with pytest.raises(FloatingPointError) as error:
        trainer.save()
    return str(error.value)


def test_what_is_not_finite_on_any_rank_is_not_saved(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16", "parallel.ranks=2")
    for message in run_ranks(save_with_a_nan, (config, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert message == "bf16, step 2: first.blocks.0.moe.experts.down_proj is not finite: not saved"
    assert checkpoint.find(tmp_path)["bf16"].name == "step-000001"


def test_rows_over_the_capacity_may_be_dropped_and_are_counted(make_config: Callable[..., Config], tmp_path: Path):
    drops = ("dispatcher.capacity=factor", "dispatcher.factor=0.5", "dispatcher.overflow=drop")
    config = make_config("recipe=bf16", "parallel.ranks=2", "train.steps=3", *drops)
    (outcome, _) = run_ranks(train, (config, str(tmp_path), {}), world_size=2, timeout=60, device="cpu")
    for row in outcome.runs[0].metrics:
        assert row["rows_dropped"] == row["rows_routed"] - (row["rows_valid"] - row["rows_padding"]) > 0
        assert not row["skipped"]
    console = Console(record=True, width=200)
    report.show(report.summarize(outcome), console)
    assert re.search(r"\brouted\b.*\bdropped\b", console.export_text())


def log_backends(rank: Rank, config: Config, folder: Path) -> tuple[str, set[str], str]:
    """What is logged of "auto", chosen twice; the backends of a model's layers; the error of one that cannot run."""
    with contextlib.redirect_stderr(io.StringIO()) as logged:
        for _ in range(2):
            log_backend("auto", rank)
    layers = {moe.backend for moe in make_trainer(rank, config, folder).model.moes}
    with pytest.raises(RuntimeError) as error:
        train(rank, dataclasses.replace(config, backend="hopper"), str(folder), {})
    return logged.getvalue(), layers, str(error.value)


def test_a_config_picks_the_backend_and_what_auto_is_is_logged_once(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16", "parallel.ranks=2", "backend=dequant")
    results = run_ranks(log_backends, (config, tmp_path), world_size=2, timeout=60, device="cpu")
    assert [logged.count("\n") for logged, *_ in results] == [1, 0]
    assert "reference" in results[0][0]
    for _, layers, error in results:
        assert layers == {"dequant"}
        assert "backend 'hopper' cannot run on cpu" in error


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


def test_the_power_may_fail_at_any_moment_of_a_save(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16", "parallel.ranks=1")
    (calls,) = run_ranks(save_until_the_power_fails, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    # The last of them replaced the same step, which the one before had renamed but not deleted the older one.
    files = ["metrics.jsonl", "model", "optimizer", "state.json"]
    synced = [("sync", name) for name in [*files, ".step-000002.partial"]]
    order = [calls.index(call) for call in synced]
    renamed, durable = calls.index(("rename", ".step-000002.partial")), calls.index(("sync", "bf16"))
    assert max(order) < renamed < durable < min(i for i, call in enumerate(calls) if call[1] == "step-000001")
    assert checkpoint.find(tmp_path)["bf16"].name == "step-000002"
    assert [path.name for path in (tmp_path / "bf16").iterdir()] == ["step-000002"]


def save_to_a_full_disk(rank: Rank, config: Config, folder: Path) -> str:
    """The error of a save on whose disk the second file of tensors does not fit."""
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    synced, fsync = [], os.fsync

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with mock.patch.object(os, "fsync", full), pytest.raises(OSError, match="No space left") as error:
        trainer.save()
    return str(error.value)


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(
    make_config: Callable[..., Config], tmp_path: Path
):
    config = make_config("recipe=bf16", "parallel.ranks=1")
    (message,) = run_ranks(save_to_a_full_disk, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert "optimizer: rank 0: [Errno 28] No space left" in message
    assert [path.name for path in (tmp_path / "bf16").iterdir()] == ["step-000001"]


def flip(file: Path, at: int) -> None:
    """Flip a bit of the byte ``at``, from the end if it is negative."""
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


def refusals_of_each_flip(rank: Rank, config: Config, folder: Path) -> dict[str, str]:
    """By file of a checkpoint, the error of loading it with a bit flipped in that file."""
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    trainer.save()
    step, found = trainer.saved, {}
    assert step is not None
    dist.barrier()
    files = sorted(file for file in step.rglob("*") if file.is_file())
    for file in files:
        for at in (-1, file.stat().st_size // 2):
            if rank.rank == 0:
                flip(file, at)
            dist.barrier()
            with pytest.raises(ValueError, match=r"SHA-256|not a checkpoint") as error:
                trainer.load(step)
            found[str(file.relative_to(step))] = str(error.value)
            dist.barrier()
            if rank.rank == 0:
                flip(file, at)
            dist.barrier()
    trainer.load(step)
    return found


@pytest.mark.parametrize("sharded", ["false", "true"])
def test_a_bit_that_flips_in_any_file_of_a_checkpoint_is_noticed_on_all_ranks(
    make_config: Callable[..., Config], tmp_path: Path, sharded: str
):
    model = ("model=qwen3_moe_tiny", "model.layers=1", "parallel.fsdp=true") if sharded == "true" else ()
    config = make_config("recipe=bf16", "parallel.ranks=2", "train.compare=false", *model)
    one, two = run_ranks(refusals_of_each_flip, (config, tmp_path), world_size=2, timeout=100, device="cpu")
    assert one == two
    tensors = {name: message for name, message in one.items() if name.endswith(".safetensors")}
    assert len(tensors) == 4
    for name, message in tensors.items():
        assert re.search(rf"{name}: got SHA-256 \w{{12}}, wanted \w{{12}}: the file is not what was saved", message)
    assert one.keys() - tensors.keys() == {"metrics.jsonl", "state.json"}


def load_a_nan(rank: Rank, config: Config, folder: Path) -> str:
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[-1] = float("nan")
    with mock.patch.object(checkpoint, "not_finite", return_value=None):
        trainer.save()
    assert trainer.saved is not None
    with pytest.raises(ValueError, match="is not finite") as error:
        make_trainer(rank, config, folder).load(trainer.saved)
    return str(error.value)


def test_a_checkpoint_with_a_nan_is_not_loaded(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16", "parallel.ranks=1")
    (message,) = run_ranks(load_a_nan, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert "model: embedding.weight is not finite, wanted finite numbers" in message


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1}'])
def test_a_broken_state_is_refused(tmp_path: Path, content: str):
    (tmp_path / "state.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        checkpoint.read_state(tmp_path)


def test_the_learning_rate_warms_up_and_comes_down(make_config: Callable[..., Config]):
    config = make_config("optimizer.warmup=10", "optimizer.lr=1", "optimizer.final=0.1").optimizer
    rates = [learning_rate(step, 110, config) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
