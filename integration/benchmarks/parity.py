"""Runs of task=train of one model by several recipes and seeds, one file of them all, that grows from day to day.

    python integration/benchmarks/parity.py FOLDER... --out docs/results/parity-h200.json

adds the runs of these folders, or replaces them.

A run: recipe, seed, held-out loss and mean training loss of the last LAST steps (nats a byte), median tokens/s, peak
GiB, and a curve, the mean training loss of every EVERY steps. All are of one model, text and length, or it refuses.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import yaml

LAST, EVERY = 100, 50
SAME = "model", "data", "optimizer", "train"
"""Sections of the configuration that all runs share, but for train.compare. The text's entropy is the same, too."""


def runs_of(folder: Path, commit: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the runs of a folder share, and each run."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = []
    for run in summary["runs"]:
        if run["stopped"]:
            raise SystemExit(f"{folder}: {run['name']} stopped at step {run['steps']}: resume it first")
        of_run = [row for row in rows if row["run"] == run["name"]]
        losses = [row["loss"] for row in of_run if row["loss"] is not None]  # others were left out
        linear = config["recipe"].get("linear") if run["name"] != "bf16" else None
        found.append(
            {
                "recipe": run["name"] + (f", linear {linear}" if linear else ""),
                "seed": config["seed"],
                "valid_loss": run["valid_loss"],
                "train_loss": statistics.fmean(losses[-LAST:]),
                "tokens_per_s": statistics.median(row["tokens_per_s"] for row in of_run),
                "peak_gib": run["peak_gib"],
                "provenance": summary["provenance"] | ({"commit": commit} if commit else {}),
                "curve": [round(statistics.fmean(losses[i : i + EVERY]), 4) for i in range(0, len(losses), EVERY)],
            }
        )
    config["train"].pop("compare")
    return {key: config[key] for key in SAME} | {"unigram_entropy": summary["unigram_entropy"]}, found


def add(known: dict[str, Any], shared: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """``known`` with these runs in place of those of the same recipe and seed."""
    for key, section in shared.items():
        if known.setdefault(key, section) != section:
            raise SystemExit(f"{key}: got {section}, wanted what the others have, {known[key]}")
    new = {(run["recipe"], run["seed"]) for run in runs}
    kept = [run for run in known.get("runs", []) if (run["recipe"], run["seed"]) not in new]
    known["runs"] = sorted([*kept, *runs], key=lambda run: (run["recipe"], run["seed"]))
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="the code's version, where the run's machine had no git")
    given = parser.parse_args()
    known = (
        json.loads(given.out.read_text()) if given.out.exists() else {"what": "mxep task=train, losses in nats a byte"}
    )
    for folder in given.folders:
        known = add(known, *runs_of(folder, given.commit))
    given.out.write_text(json.dumps(known, indent=1))
    for run in known["runs"]:
        losses = f"{run['valid_loss']:.4f} held out, {run['train_loss']:.4f} in training"
        print(f"{run['recipe']:12} seed {run['seed']}: {losses}, {run['tokens_per_s']:,.0f} tokens/s")
    for recipe in dict.fromkeys(run["recipe"] for run in known["runs"]):
        for loss in ("valid_loss", "train_loss"):
            of_seeds = [run[loss] for run in known["runs"] if run["recipe"] == recipe]
            if of_seeds[1:]:
                print(
                    f"{recipe:12} {loss}: {statistics.fmean(of_seeds):.4f}, deviation {statistics.stdev(of_seeds):.4f}"
                )


if __name__ == "__main__":
    main()
