"""Runs of several days in one file: each recipe and seed once, of one model alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.parity import EVERY, add, runs_of


def folder_of(
    where: Path, losses: dict[str, float], *, linear: str | None = None, text: float = 2.0, **changes: Any
) -> Path:
    """A run folder, whose training losses fall to those given."""
    where.mkdir()
    seed, steps, stopped = ({"seed": 0, "steps": 120, "stopped": False} | changes).values()
    config = {
        "seed": seed,
        "recipe": {"linear": linear},
        "model": {"dim": 8},
        "data": {},
        "optimizer": {},
        "train": {"steps": steps, "compare": True},
    }
    (where / "config.yaml").write_text(yaml.safe_dump(config))
    runs = [
        {"name": name, "stopped": stopped, "steps": steps, "valid_loss": x, "peak_gib": 1.0}
        for name, x in losses.items()
    ]
    (where / "summary.json").write_text(
        json.dumps({"runs": runs, "unigram_entropy": text, "provenance": {"device": "D", "commit": None}})
    )
    rows = [
        {"run": name, "loss": x + steps - step, "tokens_per_s": 100.0 + step}
        for name, x in losses.items()
        for step in range(1, steps + 1)
    ]
    rows += [rows[-1] | {"loss": None}]  # a step that was left out
    (where / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def test_it_grows_by_recipes_and_seeds_and_replaces_what_it_has(tmp_path: Path) -> None:
    known: dict = {}
    for name, losses, seed in (("a", {"bf16": 1.0, "mxfp8": 2.0}, 0), ("b", {"bf16": 3.0}, 1), ("c", {"bf16": 4.0}, 0)):
        known = add(known, *runs_of(folder_of(tmp_path / name, losses, seed=seed), "abc"))
    assert [(run["recipe"], run["seed"], run["valid_loss"]) for run in known["runs"]] == [
        ("bf16", 0, 4.0),
        ("bf16", 1, 3.0),
        ("mxfp8", 0, 2.0),
    ]
    known = add(known, *runs_of(folder_of(tmp_path / "d", {"bf16": 4.0, "mxfp8": 5.0}, linear="mxfp8"), "abc"))
    names = [(run["recipe"], run["seed"]) for run in known["runs"]]
    assert names == [("bf16", 0), ("bf16", 1), ("mxfp8", 0), ("mxfp8, linear mxfp8", 0)]
    first = known["runs"][0]
    assert first["train_loss"] == pytest.approx(4 + sum(range(100)) / 100)
    assert first["tokens_per_s"] == 160.5
    assert len(first["curve"]) == -(-120 // EVERY)
    assert first["provenance"] == {"device": "D", "commit": "abc"}
    assert known["train"] == {"steps": 120}


def test_it_refuses_another_length_and_runs_that_stopped(tmp_path: Path) -> None:
    known = add({}, *runs_of(folder_of(tmp_path / "a", {"bf16": 1.0}), None))
    with pytest.raises(SystemExit, match=r"train: got .*60.* wanted what the others have, .*120"):
        add(known, *runs_of(folder_of(tmp_path / "b", {"bf16": 1.0}, seed=1, steps=60), None))
    with pytest.raises(SystemExit, match=r"unigram_entropy: got 3\.0, wanted what the others have, 2\.0"):
        add(known, *runs_of(folder_of(tmp_path / "d", {"bf16": 1.0}, text=3.0), None))
    with pytest.raises(SystemExit, match="bf16 stopped at step 120: resume it first"):
        runs_of(folder_of(tmp_path / "c", {"bf16": 1.0}, stopped=True), None)
