"""Training: what a run leaves behind, that it resumes exactly, and that ranks add nothing but speed."""

import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from mxep.comms import CapacityExceeded
from mxep.ep import MoE
from mxep.integration import checkpoint, launch, report
from mxep.integration.data import read_text
from mxep.integration.launch import Rank, RanksFailed, StopFlag
from mxep.integration.mesh import Mesh
from mxep.integration.metrics import log_backend
from mxep.integration.model import recipes
from mxep.integration.schema import Config
from mxep.integration.train import Outcome, Trainer, learning_rate, train
from ranks import close_ranks, run_again

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
    whole, half, rest = run_again(
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
            "recipe=bf16", "train.steps=3", f"parallel.ranks={ranks}", f"parallel.ep={ep}", "model.balance_rate=0"
        )
        results = run_again(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=60, device="cpu")
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
        given = "train.compare=false", "train.steps=3", f"parallel.ranks={ranks}", *how
        config = make_config(*given, "model.balance_rate=0", "dispatcher.factor=2")
        results = run_again(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=60, device="cpu")
        assert all(result == results[0] for result in results)
        curves[ranks, dispatcher] = torch.tensor(results[0])
    assert torch.equal(curves[2, "hierarchical"], curves[2, "symmetric"])
    assert curves[4, "hierarchical"].sub(curves[2, "symmetric"]).abs().div(curves[2, "symmetric"]).max() < 2e-2


@needs_gpu
@pytest.mark.parametrize("override", ["dispatcher=symmetric", "dispatcher=all_to_all"])
def test_a_run_on_gpus_repeats_bit_for_bit(make_config: Callable[..., Config], tmp_path: Path, override: str):
    ranks = min(2, torch.cuda.device_count())
    config = make_config("train.compare=false", "train.steps=20", f"parallel.ranks={ranks}", override)
    curves = [
        run_again(losses_and_norms, (config, tmp_path), world_size=ranks, timeout=120, device="cuda") for _ in range(2)
    ]
    assert curves[0] == curves[1]


def held_out_error(rank: Rank, config: Config, folder: Path) -> str:
    with pytest.raises(CapacityExceeded) as error:
        make_trainer(rank, config, folder).validate()
    return str(error.value)


def make_trainer(rank: Rank, config: Config, folder: Path) -> Trainer:
    text = read_text(config.data)
    return Trainer(rank, config, recipes(config)[0], Mesh.make(config.ep, rank.device), text, folder)


def break_steps(trainer: Trainer, steps: set[int], how: str) -> None:
    """Make steps of a run bad on this rank: its gradients' norm overflows, its loss is NaN, or rows are lost."""
    reduce, loss, check = trainer._reduce, trainer.model.loss, MoE.check
    experts = next(moe.experts for moe in trainer.model.moes)
    now = lambda: trainer.step + 1 in steps  # noqa: E731

    def reduce_to_huge() -> None:
        reduce()
        if now():
            experts.down_proj.grad.fill_(1e30)

    def check_to_overflow(moe: MoE) -> None:
        check(moe)
        if now():
            raise CapacityExceeded("7 rows did not fit")

    if how == "norm":
        trainer._reduce = reduce_to_huge
    elif how == "loss":
        trainer.model.loss = lambda *batch: loss(*batch) * (float("nan") if now() else 1.0)
    else:
        mock.patch.object(MoE, "check", check_to_overflow).start()


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    """Biases of routers, too, which no optimizer moves."""
    return [tensor.detach().clone() for tensor in trainer.model.state_dict().values()]


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


def end_and_skip(rank: Rank, ends: Config, skips: Config, folder: Path, how: str) -> tuple[str, tuple[bool, Outcome]]:
    (folder / "skips").mkdir(exist_ok=True)
    found = run_with_bad_steps(rank, ends, folder, {3}, how)
    mock.patch.stopall()
    return found, skip_one_step(rank, skips, folder / "skips", how)


@pytest.mark.parametrize("how", BAD)
def test_a_bad_step_on_one_rank_ends_the_run_or_is_skipped_on_all(
    make_config: Callable[..., Config], tmp_path: Path, how: str
):
    """One that ends it leaves the last good checkpoint."""
    given = "recipe=bf16", "parallel.ranks=2"
    ends = make_config(*given, "train.steps=5", "train.checkpoint_every=1")
    skips = make_config(*given, "train.steps=6", "train.skip_bad_steps=1")
    results = run_again(end_and_skip, (ends, skips, tmp_path, how), world_size=2, timeout=60, device="cpu")
    kept = tmp_path / "bf16" / "step-000002"
    for message, (same, _) in results:
        assert re.fullmatch(BAD[how] + f"; it was not taken, and the last good checkpoint is {kept}", message)
        assert same
    assert checkpoint.find(tmp_path) == {"bf16": kept}
    files = [load_file(file) for file in (kept / "model").iterdir()]
    assert len(files) == 2
    assert all(tensor.isfinite().all() for file in files for tensor in file.values())

    outcome = results[0][1][1]
    (run,) = outcome.runs
    assert [bool(row["skipped"]) for row in run.metrics] == [False, False, True, False, False, False]
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    json.dumps(run.metrics, allow_nan=False)
    assert report.summarize(outcome)["runs"][0]["skipped"] == 1
    (svg,) = report.charts([run], 3.0)
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


def bad_steps_of_one(rank: Rank, config: Config, overflows: Config, folder: Path) -> tuple[Any, str, str]:
    whole, resumed = skip_a_step_and_resume(rank, config, folder)
    (folder / "more").mkdir()
    message = run_with_bad_steps(rank, config, folder / "more", {2, 4, 5}, "norm")
    return (whole, resumed), message, held_out_error(rank, overflows, folder)


def test_bad_steps_in_a_row_and_held_out_text(make_config: Callable[..., Config], tmp_path: Path):
    """A run resumes exactly after skipped steps: AdamW's count of steps, which its bias corrections follow, is of those
    taken. More in a row than may be skipped end it. Rows of held-out text may overflow, too."""
    given = "recipe=bf16", "parallel.ranks=1"
    config = make_config(*given, "train.steps=6", "train.skip_bad_steps=1")
    overflows = make_config(*given, "dispatcher.capacity=factor", "dispatcher.factor=0.3")
    args = config, overflows, tmp_path
    (found,) = run_again(bad_steps_of_one, args, world_size=1, timeout=60, device="cpu")
    (whole, resumed), message, held_out = found
    assert resumed == whole
    assert "step 5" in message
    assert "there is no checkpoint" in message
    assert "rows did not fit" in held_out


def test_rows_over_the_capacity_may_be_dropped_and_are_counted(make_config: Callable[..., Config], tmp_path: Path):
    drops = ("dispatcher.capacity=factor", "dispatcher.factor=0.5", "dispatcher.overflow=drop")
    config = make_config("recipe=bf16", "parallel.ranks=2", "train.steps=3", *drops)
    (outcome, _) = run_again(train, (config, str(tmp_path), {}), world_size=2, timeout=60, device="cpu")
    for row in outcome.runs[0].metrics:
        assert row["rows_dropped"] == row["rows_routed"] - (row["rows_computed"] - row["rows_padding"]) > 0
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
    # A process logs once.
    results = run_again(log_backends, (config, tmp_path), world_size=2, timeout=60, device="cpu", fresh=True)
    assert [logged.count("\n") for logged, *_ in results] == [1, 0]
    assert "reference" in results[0][0]
    for _, layers, error in results:
        assert layers == {"dequant"}
        assert "backend 'hopper' cannot run on cpu" in error


def test_the_learning_rate_warms_up_and_comes_down(make_config: Callable[..., Config]):
    config = make_config("optimizer.warmup=10", "optimizer.lr=1", "optimizer.final=0.1").optimizer
    rates = [learning_rate(step, 110, config) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)


DIES_AT = 10  # a replay, where steps are captured
TIMEOUT = 2.0
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs")


class Mortal(Trainer):
    """Rank 1 dies before step DIES_AT, when the others are on their way into it."""

    def _batch(self, *which: object) -> tuple[torch.Tensor, torch.Tensor]:
        if self.step == DIES_AT:
            if self.rank.rank == 1:
                (self.folder / "died").write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
        return super()._batch(*which)


def train_until_rank_1_dies(rank: Rank, config: Config, folder: Path) -> None:
    trainer = Mortal(
        rank, config, recipes(config)[-1], Mesh.make(config.ep, rank.device), read_text(config.data), folder
    )
    try:
        trainer.run()
    finally:
        (folder / f"ended-{rank.rank}").write_text("")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def test_survivors_of_a_training_run_name_the_rank_that_was_killed_within_the_timeout(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
):
    monkeypatch.setattr(launch, "GRACE", 100.0)  # or the caller would end the survivors before they noticed
    ranks = 2 if device == "cpu" else min(4, torch.cuda.device_count())
    config = make_config(
        *(f"parallel.device={device}", f"parallel.ranks={ranks}", f"dispatcher.timeout={TIMEOUT}"),
        *("train.steps=100000", "train.checkpoint_every=5"),
    )
    close_ranks()  # so that none is left but this job's
    with pytest.raises(RanksFailed) as failure:
        run_again(train_until_rank_1_dies, (config, tmp_path), world_size=ranks, timeout=200, device=device)
    assert sorted(failure.value.ranks) == list(range(ranks))
    assert failure.value.first == "rank 1 was killed by SIGKILL before it returned"
    message = str(failure.value)
    assert "rank 1 was killed by SIGKILL before it returned" in message
    died = (tmp_path / "died").stat().st_mtime
    for survivor in set(range(ranks)) - {1}:
        assert re.search(rf"PeerTimeout: rank {survivor} waited {TIMEOUT:g} s .* for rank 1 \(last seen", message)
        assert (tmp_path / f"ended-{survivor}").stat().st_mtime - died < TIMEOUT + 5
    assert not multiprocessing.active_children()
    assert [path.name for path in (tmp_path / "mxfp8").iterdir()] == [f"step-{DIES_AT:06d}"]
