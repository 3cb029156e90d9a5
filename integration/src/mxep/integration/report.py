"""What a training job leaves behind: summary.json, loss.png, report.html and the table at the end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import curves, page
from .results import Section, provenance
from .schema import Config
from .step import COUNTS
from .train import Outcome, Run

LAST = 20  # steps that the training loss at the end is averaged over
TABLES = {
    "Loss in nats a byte": {
        "valid_loss": ("held-out text", ".4f"),
        "train_loss": (f"training, last {LAST} steps", ".4f"),
        "unigram_entropy": ("unigram entropy", ".4f"),
    },
    "Rows routed, over all steps, layers and ranks": {
        **{f"rows_{key}": (key, ",") for key in COUNTS},
        "padding_share": ("padding / valid", ".2%"),
        "expert_load": ("expert load", ".3f"),
    },
    "Speed": {
        "steps": ("steps", ","),
        "skipped": ("skipped", ","),
        "ms_a_step": ("ms a step", ",.1f"),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "tflops": ("TFLOP/s", ",.3g"),
        "mfu": ("MFU", ".1%"),
        "peak_gib": ("peak GiB", ".1f"),
        "seconds": ("seconds", ",.1f"),
    },
}
"""Title -> key of the summary -> column, format. On CPUs some columns have no figure."""
# Over ten pairs of runs of the main job, recipes differ by 0.000 on average, with a deviation of 0.025.
NOTE = "Rounding alone moves the loss of so short a run by a few hundredths, either way."


def summarize(outcome: Outcome) -> dict[str, Any]:
    """The outcome in numbers: losses in nats a byte, rows over all steps, layers and ranks."""
    runs = [_summarize(run) for run in outcome.runs]
    summary: dict[str, Any] = {"text": outcome.text, "unigram_entropy": outcome.entropy, "runs": runs}
    if len(runs) == 2 and not outcome.stopped:
        summary["valid_loss_difference"] = runs[1]["valid_loss"] - runs[0]["valid_loss"]
        summary["train_loss_difference"] = runs[1]["train_loss"] - runs[0]["train_loss"]
    return summary


def write(outcome: Outcome, folder: Path, config: Config, command: str) -> dict[str, Any]:
    """summary.json, loss.png and report.html into ``folder``; returns the summary."""
    summary, text, last = summarize(outcome), Path(outcome.text).name, outcome.runs[-1]
    made_by = provenance(command, None)
    (folder / "summary.json").write_text(json.dumps(summary | {"provenance": made_by}, indent=1))
    groups = {"": {run.name: run for run in outcome.runs}}
    remarks = [NOTE] if len(outcome.runs) > 1 else []
    if outcome.stopped:
        remarks.insert(0, f"Stopped: {last.name}, step {last.steps} of {config.train.steps}.")
    page.write(
        folder,
        f"mxep task=train: {' beside '.join(groups[''])}, on {text}",
        curves.draw(groups, f"Training on {text}", outcome.entropy),
        remarks=remarks,
        losses=tables(summary)[:1],
        tables=details(groups),
        config=config,
        provenance=made_by,
    )
    return summary


def tables(summary: dict[str, Any]) -> list[Section]:
    """Losses, rows and speed, a row for each run."""
    rows = [{**run, "unigram_entropy": summary.get("unigram_entropy")} for run in summary["runs"]]
    if "valid_loss_difference" in summary:
        keys = "valid_loss", "train_loss"
        rows.append({"name": "difference", **{key: summary[f"{key}_difference"] for key in keys}})
    return [
        Section(
            title,
            ("run",),
            dict(columns.values()),
            [
                {"run": row["name"], **{column: row[key] for key, (column, _) in columns.items() if key in row}}
                for row in rows
                if row.keys() & columns.keys()
            ],
        )
        for title, columns in TABLES.items()
    ]


def details(groups: curves.Groups) -> list[Section]:
    """How rows were routed, and how fast, a row for each run; the expert load of each layer, a column for each run."""
    runs = {f"{group} {name}".strip(): run for group, each in groups.items() for name, run in each.items()}
    _, routing, speed = tables({"runs": [_summarize(run) | {"name": name} for name, run in runs.items()]})
    loads = {}
    for name, run in runs.items():
        rows = [row["expert_loads"] for row in run.taken[-LAST:] if "expert_loads" in row]  # a checkpoint's may lack it
        loads[name] = [statistics.fmean(layer) for layer in zip(*rows)]
    layers = max(map(len, loads.values()))
    by_layer = [{"layer": i, **{name: load[i] for name, load in loads.items() if load}} for i in range(layers)]
    title = f"Expert load, busiest / mean, last {LAST} steps"
    return [routing, Section(title, ("layer",), dict.fromkeys(runs, ".3f"), by_layer), speed]


def show(summary: dict[str, Any], console: Console) -> None:
    """The tables at the end."""
    for table in tables(summary):
        table.show(console)
    if len(summary["runs"]) > 1:
        console.print(NOTE, highlight=False)
    if all(run.get("peak_gib") is None for run in summary["runs"]):
        console.print("CPUs emulate MXFP8: these speeds say nothing of GPUs.", highlight=False)


def show_sweep(jobs: Sequence[tuple[Path, Sequence[str]]], console: Console | None = None) -> None:
    """One table of all jobs of a sweep: what each set, and the losses of those that trained.

    jobs: the folder of each, and its overrides.
    """
    common = set.intersection(*(set(overrides) for _, overrides in jobs))
    figures = {"held-out": ".4f", "training": ".4f", "tokens/s": ",.0f"}
    table = Section("Sweep: loss in nats a byte", ("job", "run"), figures)
    for folder, overrides in jobs:
        job = f"{folder.name}: {' '.join(each for each in overrides if each not in common)}"
        file = folder / "summary.json"
        runs = json.loads(file.read_text())["runs"] if file.exists() else [{"name": "done"}]
        for run in runs:
            losses = {"held-out": run.get("valid_loss"), "training": run.get("train_loss")}
            table.rows.append({"job": job, "run": run["name"], **losses, "tokens/s": run.get("tokens_per_s")})
    console = console or Console()
    table.show(console)
    console.print(f"sweep folder: {jobs[0][0].parent}", soft_wrap=True, highlight=False)


def _summarize(run: Run) -> dict[str, Any]:
    totals = {f"rows_{key}": sum(row.get(f"rows_{key}", 0) for row in run.metrics) for key in COUNTS}
    last = run.taken[-LAST:]
    tokens = sum(row["tokens_per_s"] * row["seconds"] for row in run.metrics)
    return {
        "name": run.name,
        "steps": run.steps,
        "skipped": len(run.metrics) - len(run.taken),
        "stopped": run.stopped,
        "valid_loss": run.valid_loss,
        "train_loss": sum(row["loss"] for row in last) / max(1, len(last)),
        **totals,
        "padding_share": totals["rows_padding"] / max(1, totals["rows_valid"]),
        "expert_load": sum(row["expert_load"] for row in last) / max(1, len(last)),
        "seconds": run.seconds,
        "ms_a_step": run.ms_a_step,
        "tokens_per_s": tokens / max(run.seconds, 1e-9),
        **{key: _mean(run, key) for key in ("tflops", "mfu")},
        "peak_gib": max((row.get("peak_gib") or 0.0 for row in run.metrics), default=0.0) or None,
    }


def _mean(run: Run, key: str) -> float | None:
    """Over the time of all steps; None if some have no such number, as a checkpoint's may not."""
    if not run.metrics or any(row.get(key) is None for row in run.metrics):
        return None
    return float(sum(row[key] * row["seconds"] for row in run.metrics) / max(run.seconds, 1e-9))
