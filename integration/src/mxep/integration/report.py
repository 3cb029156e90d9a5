"""What a training job leaves behind: summary.json, loss.png and the table at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .results import Section
from .train import Outcome, Run

LAST = 20  # steps that the training loss at the end is averaged over


def summarize(outcome: Outcome) -> dict[str, Any]:
    """The outcome in numbers: losses in nats a byte, rows over all steps, layers and ranks."""
    runs = [_summarize(run) for run in outcome.runs]
    summary: dict[str, Any] = {"text": outcome.text, "unigram_entropy": outcome.entropy, "runs": runs}
    if len(runs) == 2 and not outcome.stopped:
        summary["valid_loss_difference"] = runs[1]["valid_loss"] - runs[0]["valid_loss"]
        summary["train_loss_difference"] = runs[1]["train_loss"] - runs[0]["train_loss"]
    return summary


def write(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """summary.json and loss.png into ``folder``; returns the summary."""
    summary = summarize(outcome)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    plot(outcome, folder / "loss.png")
    return summary


def plot(outcome: Outcome, file: Path) -> None:
    """Both runs' loss over steps, smoothed over the raw curve, and the unigram entropy as a line."""
    # The object interface, without pyplot: no global figure, no display, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot(
        xlabel="step", ylabel="loss (nats a byte)", title=f"Training on {Path(outcome.text).name}"
    )
    for run, color in zip(outcome.runs, ("tab:blue", "tab:orange")):
        steps, losses = [row["step"] for row in run.taken], [row["loss"] for row in run.taken]
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(losses), color=color, label=run.name)
    axes.axhline(outcome.entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(file))


def show(summary: dict[str, Any], console: Console) -> None:
    """The table at the end."""
    runs = summary["runs"]
    differences = {
        "held-out text": summary.get("valid_loss_difference"),
        f"training, last {LAST} steps": summary.get("train_loss_difference"),
    }
    lines = {
        "held-out text": [_number(run["valid_loss"]) for run in runs],
        f"training, last {LAST} steps": [f"{run['train_loss']:.4f}" for run in runs],
        "unigram entropy of the text": [f"{summary['unigram_entropy']:.4f}" for _ in runs],
        "steps": [str(run["steps"]) for run in runs],
        **({"of them skipped": [str(run["skipped"]) for run in runs]} if any(run["skipped"] for run in runs) else {}),
        "rows routed (token, expert)": [f"{run['rows_routed']:,}" for run in runs],
        "rows sent (token, rank)": [f"{run['rows_sent']:,}" for run in runs],
        **(
            {"rows dropped": [f"{run['rows_dropped']:,}" for run in runs]}
            if any(run["rows_dropped"] for run in runs)
            else {}
        ),
        "padding share of rows": [f"{run['padding_share']:.1%}" for run in runs],
        "expert load, busiest / mean": [f"{run['expert_load']:.2f}" for run in runs],
        "tokens/s": [f"{run['tokens_per_s']:,.0f}" for run in runs],
        "seconds": [f"{run['seconds']:.1f}" for run in runs],
    }
    rows: list[dict[str, Any]] = []
    for line, cells in lines.items():
        rows.append({"": line, **{run["name"]: cell for run, cell in zip(runs, cells)}})
        if (difference := differences.get(line)) is not None:
            rows[-1]["difference"] = f"{difference:+.4f}"
    columns = [*(run["name"] for run in runs), *(["difference"] if "valid_loss_difference" in summary else [])]
    Section("Loss in nats a byte", ("",), dict.fromkeys(columns, ""), rows).show(console)
    if len(runs) > 1:
        # Over ten pairs of runs of the main job, recipes differ by 0.000 on average, with a deviation of 0.025.
        note = "Rounding alone moves the loss of so short a run by a few hundredths, either way."
        console.print(note, highlight=False)


def show_sweep(jobs: Sequence[tuple[Path, Sequence[str]]], console: Console | None = None) -> None:
    """One table of all jobs of a sweep: what each set, and the losses of those that trained.

    jobs: the folder of each, and its overrides.
    """
    common = set.intersection(*(set(overrides) for _, overrides in jobs))
    table = Table(title="Sweep: loss in nats a byte", title_justify="left", box=None, pad_edge=False)
    for name in ("job", "run"):
        table.add_column(name, overflow="fold")
    for name in ("held-out", "training", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for folder, overrides in jobs:
        label = f"{folder.name}: {' '.join(each for each in overrides if each not in common)}"
        file = folder / "summary.json"
        for run in json.loads(file.read_text())["runs"] if file.exists() else [None]:
            losses = [] if run is None else [_number(run["valid_loss"]), f"{run['train_loss']:.4f}"]
            cells = ["done"] if run is None else [run["name"], *losses, f"{run['tokens_per_s']:,.0f}"]
            table.add_row(label, *cells)
            label = ""
    console = console or Console()
    console.print(table, markup=False)
    console.print(f"sweep folder: {jobs[0][0].parent}", soft_wrap=True, highlight=False)


def _summarize(run: Run) -> dict[str, Any]:
    keys = ("rows_routed", "rows_sent", "rows_valid", "rows_padding", "rows_dropped")
    totals = {key: sum(row.get(key, 0) for row in run.metrics) for key in keys}
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
        "tokens_per_s": tokens / max(run.seconds, 1e-9),
    }


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, without the pull of its start."""
    smooth, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smooth.append(total / norm)
    return smooth


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
