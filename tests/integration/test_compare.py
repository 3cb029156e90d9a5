"""task=compare: what it makes of losses, and the whole of it on two ranks."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.compare import BASE, NUDGE, NUDGED, Outcome, Trials, compare, nudge, sentence, summarize
from integration.test_train import StopAfter
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank
from mxep.integration.schema import Config
from mxep.integration.train import Run
from ranks import run_again

TINY = ("model=tiny", "data=text", "data.batch=4", "data.length=32", "train.valid_batches=1", "optimizer.warmup=5")


def run(name: str, loss: float, *, curve: tuple[float, ...] = (3.0, 2.0)) -> Run:
    """With held-out loss `loss` after a few steps of 10 ms."""
    metrics = [{"step": i + 1, "loss": x, "grad_norm": 1.0, "seconds": 0.01} for i, x in enumerate(curve)]
    return Run(name, len(curve), False, metrics, loss)


def made_up(differences: tuple[float, ...]) -> Trials:
    """bf16 at 1.0, 1.25 and 1.5, mxfp8 beside it, bf16 nudged by 0.125 up, down and up."""
    trials = {}
    for seed, (loss, difference, nudged) in enumerate(zip((1.0, 1.25, 1.5), differences, (0.125, -0.125, 0.125))):
        runs = {
            name: run(name, at) for name, at in ((BASE, loss), ("mxfp8", loss + difference), (NUDGED, loss + nudged))
        }
        trials[seed] = runs
    return trials


def test_the_mean_difference_stands_beside_three_measures_of_noise() -> None:
    _, (ours, nudged, bf16, mxfp8, *training) = summarize(made_up((0.125, 0.25, 0.0625)))
    assert (ours["loss"], ours["what"]) == ("held-out", "mxfp8 - bf16")
    assert ours["each"] == [0.125, 0.25, 0.0625]
    assert ours["mean"] == pytest.approx(0.4375 / 3)
    assert ours["standard error"] == pytest.approx(ours["deviation"] / 3**0.5)
    assert ours["noise"] == {
        "seeds": 0.25,
        "nudges": pytest.approx(0.125 / 3**0.5),
        "standard errors": pytest.approx(2 * ours["standard error"]),
    }
    assert nudged["each"] == [0.125, -0.125, 0.125]
    assert bf16["mean"] == 1.25
    assert mxfp8["each"] == [1.125, 1.5, 1.5625]
    assert training[0]["mean"] == 0


def test_the_sentence_has_the_numbers() -> None:
    _, rows = summarize(made_up((0.5, -0.5, 0.0)))
    assert sentence(rows[0]) == (
        "held-out loss: mxfp8 - bf16 is +0.0000 on average; noise: 0.2500 by seeds, 0.0722 by nudges, 0.5774 by "
        "standard errors"
    )


def test_every_run_tells_its_steps_and_the_mean_loss_of_tenths() -> None:
    trials = made_up((0.0, 0.0, 0.0))
    curve = tuple(float(i) for i in range(200))
    trials[0]["mxfp8"] = run("mxfp8", 1.0, curve=curve)
    rows, _ = summarize(trials)
    assert [(row["seed"], row["run"]) for row in rows[:4]] == [(0, BASE), (0, "mxfp8"), (0, NUDGED), (1, BASE)]
    assert rows[1]["checked steps"] == 200
    assert rows[1]["train_loss"] == pytest.approx(149.5)  # of the last 100
    assert rows[1]["ms a step"] == pytest.approx(10)


def test_a_nudge_moves_every_weight_by_no_more_than_a_rounding_and_alike_on_every_rank() -> None:
    layer = nn.Linear(64, 64)
    one, two, other = (copy.deepcopy(layer) for _ in range(3))
    for model, seed in ((one, 3), (two, 3), (other, 4)):
        nudge(model, seed)
    moved = (one.weight / layer.weight - 1).abs()
    assert NUDGE / 2 < moved.max() <= NUDGE * (1 + 2**-10)
    assert torch.equal(one.weight, two.weight)
    assert not torch.equal(one.weight, other.weight)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe=bf16"], "recipe must be another one"),
        (["compare.seeds=[1]"], "compare.seeds: got [1], wanted two or more that differ"),
        (["compare.seeds=[1,2,1]"], "compare.seeds: got [1, 2, 1], wanted two or more that differ"),
        (["resume=/some/run"], "task=compare starts anew: resume must be null"),
        (["compare.out=/no/such/folder/x.json"], "compare.out: no such folder: /no/such/folder"),
    ],
)
def test_what_cannot_be_compared_is_named(make_config: Callable[..., Config], overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config("task=compare", *overrides)


def test_the_command_trains_all_seeds_and_leaves_one_file(mxep, text: Path, tmp_path: Path):
    out = tmp_path / "train.json"
    overrides = ["task=compare", "compare.seeds=[3,5]", "train.steps=3", f"compare.out={out}", "compare.commit=abc"]
    finished = mxep(*TINY, f"data.path={text}", *overrides)
    assert finished.code == 0, finished.err
    report = json.loads(out.read_text())
    assert report == json.loads((tmp_path / "run" / "compare.json").read_text())
    assert (report["commit"], report["steps"], report["ranks"]) == ("abc", 3, 2)
    assert report["command"].startswith("mxep model=tiny")
    names = ["bf16", "mxfp8", "bf16 nudged"]
    runs = [(row["seed"], row["run"]) for row in report["sections"]["runs"]]
    assert runs == [(seed, name) for seed in (3, 5) for name in names]
    assert {row["checked steps"] for row in report["sections"]["runs"]} == {3}
    assert 0 < report["sections"]["differences"][0]["noise"]["nudges"] < 0.1
    assert "by seeds" in finished.out
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    assert len(list((tmp_path / "run").rglob("metrics.jsonl"))) == 6


def compare_and_stop(rank: Rank, config: Config, folder: Path) -> Outcome:
    return compare(dataclasses.replace(rank, stop=StopAfter(5)), config, str(folder))


def test_a_stop_leaves_no_half_of_a_trial(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("train.steps=1", "parallel.ranks=1", "parallel.ep=1")
    (outcome,) = run_again(compare_and_stop, (config, tmp_path), world_size=1, timeout=60, device="cpu")
    assert outcome.stopped
    assert [(seed, len(runs)) for seed, runs in outcome.trials.items()] == [(0, 3)]
