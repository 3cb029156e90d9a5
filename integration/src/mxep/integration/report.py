"""Results: tables of rows and JSON files for any task; summary.json, report.html and the table at the end for training.

row       plain values by column; "note" says why it has no figures, "error" what went wrong
Section   a table: some columns name a row, others are its figures
Report    sections, and the ceilings that they are compared with

report.html is one file without scripts that fetches nothing: losses, their curves as SVG, tables of routing and speed,
where it ran, and the config. Curves of all other metrics are TensorBoard's and W&B's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import rich.markup
import torch
from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from . import __version__
from .config import to_json
from .schema import Config
from .train import COUNTS, Outcome, Run

Row = dict[str, Any]
REMARK = 20  # least width of the column of notes and errors


@dataclass(frozen=True)
class Section:
    """A table. labels: columns that name a row. figures: name of each other column -> its format."""

    title: str
    labels: tuple[str, ...]
    figures: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)

    def empty(self) -> Section:
        return dataclasses.replace(self, rows=[])

    @property
    def filled(self) -> list[str]:
        """Names of figures that at least one row has."""
        return [name for name in self.figures if any(row.get(name) is not None for row in self.rows)]

    def texts(self, row: Row, names: Iterable[str]) -> list[str]:
        """The row's figures of these columns, formatted. A missing one is ""."""
        return ["" if row.get(name) is None else format(row[name], self.figures[name]) for name in names]

    def show(self, console: Console) -> None:
        """Print the table. A rule separates rows that differ in more than the last label. Columns without figures are
        left out. Notes and errors wrap. The console is widened if labels or figures would be cut."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name in self.labels:
            table.add_column(name, no_wrap=True)
        for name in self.filled:
            table.add_column(name, justify="right", no_wrap=True)
        remarks = any(row.get("note") or row.get("error") for row in self.rows)
        if remarks:
            table.add_column("", overflow="fold")
        previous: list[str] | None = None
        for row in self.rows:
            *first, last = [_label(row.get(name)) for name in self.labels]
            if previous not in (None, first):
                table.add_section()
            color, said = ("", row["note"]) if row.get("note") else ("[red]", row.get("error", ""))
            labels = [""] * len(first) if previous == first else first
            cells = [*labels, last, *self.texts(row, self.filled), color + rich.markup.escape(said)]
            table.add_row(*cells[: len(table.columns)])
            previous = first
        for column in table.columns:  # rich's own least width is that of the longest word
            wanted = [Text.from_markup(str(cell)).cell_len for cell in (column.header, *column.cells)]
            column.min_width = max(wanted) if column.no_wrap else min(REMARK, max(wanted))
        unlimited = console.options.update(max_width=sys.maxsize)  # a measurement is cut to the options' width
        console.width = max(console.width, Measurement.get(console, unlimited, table).minimum)
        console.print(table)


def _label(value: Any) -> str:
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return "" if value is None else rich.markup.escape(str(value))


@dataclass
class Report:
    """Results of a task. ceilings: name -> rate to compare with. seconds: total duration. about: settings. remarks:
    sentences below the tables."""

    title: str
    ceilings: dict[str, float]
    sections: dict[str, Section]
    seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    @property
    def lines(self) -> list[Row]:
        return [row for section in self.sections.values() for row in section.rows]

    @property
    def failed(self) -> int:
        return sum("error" in row for row in self.lines)

    def add(self, section: str, row: Row) -> Row:
        """Append a row with floats rounded to five digits, and return it."""
        self.sections[section].rows.append(shortened(row))
        return self.sections[section].rows[-1]

    def to_json(self, command: str, commit: str | None) -> dict[str, Any]:
        """Plain values, with `provenance`."""
        sections = {name: section.rows for name, section in self.sections.items()}
        measured = {"ceilings": self.ceilings, "seconds": self.seconds} if self.seconds else {}
        return {"what": self.title, **provenance(command, commit), **self.about, **measured, "sections": sections}

    def show(self, console: Console) -> None:
        """A line of ceilings, then a table for each section, and remarks."""
        ceilings = "".join(f"{name} {value:.4g}; " for name, value in self.ceilings.items())
        measured = f": {ceilings}{self.seconds:.0f} s" if self.seconds else ""
        console.print(f"{self.title}{measured}", highlight=False, soft_wrap=True)
        for section in self.sections.values():
            if section.rows:
                section.show(console)
        for remark in self.remarks:
            console.print(remark, highlight=False, soft_wrap=True)


# JSON

PACKAGES = (
    *("triton", "torchao", "transformers", "tokenizers", "peft"),
    *("sgl-deep-gemm", "apache-tvm-ffi", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "scattermoe"),
)
"""Results give these packages' versions, if they are installed, after torch's."""
DESCRIBE = ("describe", "--always", "--dirty", "--exclude=*")  # the commit; "-dirty" if files differ from it


def shortened(value: Any) -> Any:
    """``value`` with floats rounded to five digits."""
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_json(report: Mapping[str, Any], files: Sequence[Path]) -> None:
    for file in files:
        file.write_text(json.dumps(report, indent=1) + "\n")


def provenance(command: str, commit: str | None) -> dict[str, Any]:
    """Device, driver, versions, date, commit and command. commit: replaces git's answer, None outside a repository."""
    cuda = torch.cuda.is_available()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "commit": commit or _output("git", "-C", str(Path(__file__).parent), *DESCRIBE),
        "command": command,
    }


@functools.cache
def _output(*command: str) -> str | None:
    """The first line that a command prints. None if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0].strip()
    return None


# Training

LAST = 20  # the final training loss is the mean over these last steps
TABLES = {
    "Loss in nats per byte": {
        "valid_loss": ("held-out text", ".4f"),
        "train_loss": (f"training, last {LAST} steps", ".4f"),
        "unigram_entropy": ("unigram entropy", ".4f"),
    },
    "Token copies, over all steps, layers and ranks": {
        "rows_routed": ("routed", ","),
        "rows_sent": ("sent", ","),
        "rows_computed": ("GEMM rows", ","),
        "padding_share": ("padding", ".2%"),
        "rows_dropped": ("dropped", ","),
        "rows_invalid": ("bad ids", ","),
        "expert_load": ("expert load", ".3f"),
    },
    "Speed": {
        "steps": ("steps", ","),
        "skipped": ("skipped", ","),
        "ms_a_step": ("ms per step", ",.1f"),
        "tokens_per_s": ("tokens/s", ",.0f"),
        "tflops": ("TFLOP/s", ",.3g"),
        "mfu": ("MFU", ".1%"),
        "peak_gib": ("peak GiB", ".1f"),
        "seconds": ("seconds", ",.1f"),
    },
}
"""Title -> key of the summary -> column, format."""
# Over ten pairs of runs of the main job, recipes differ by 0.000 on average, with a standard deviation of 0.025.
NOTE = "Rounding alone moves the loss of so short a run by a few hundredths, either way."
EMULATED = "CPUs emulate MXFP8: these speeds say nothing of GPUs."


def summarize(outcome: Outcome) -> dict[str, Any]:
    """The outcome in numbers: losses in nats per byte, row counts over all steps, layers and ranks."""
    runs = [_summarize(run) for run in outcome.runs]
    summary: dict[str, Any] = {"text": outcome.text, "unigram_entropy": outcome.entropy, "runs": runs}
    if len(runs) == 2 and not outcome.stopped:
        summary["valid_loss_difference"] = runs[1]["valid_loss"] - runs[0]["valid_loss"]
        summary["train_loss_difference"] = runs[1]["train_loss"] - runs[0]["train_loss"]
    return summary


def write(outcome: Outcome, folder: Path, config: Config, command: str) -> dict[str, Any]:
    """Write summary.json and report.html into ``folder``, and return the summary."""
    summary = summarize(outcome) | {"provenance": provenance(command, None)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    (folder / "report.html").write_text(page(outcome, summary, config))
    return summary


def tables(summary: dict[str, Any]) -> list[Section]:
    """Tables of losses, token copies and speed, with a row for each run."""
    rows = [{**run, "unigram_entropy": summary.get("unigram_entropy")} for run in summary["runs"]]
    if "valid_loss_difference" in summary:
        keys = "valid_loss", "train_loss"
        rows.append({"name": "difference", **{key: summary[f"{key}_difference"] for key in keys}})
    found = []
    for title, columns in TABLES.items():
        shown = [row for row in rows if row.keys() & columns.keys()]
        cells = [{column: row[key] for key, (column, _) in columns.items() if key in row} for row in shown]
        named = [{"run": row["name"], **each} for row, each in zip(shown, cells)]
        found.append(Section(title, ("run",), dict(columns.values()), named))
    return found


def show(summary: dict[str, Any], console: Console) -> None:
    """Print the tables at the end."""
    for table in tables(summary):
        table.show(console)
    for remark in _remarks(summary["runs"]):
        console.print(remark, highlight=False)


def _remarks(runs: Sequence[Row]) -> list[str]:
    counts = [f"TFLOP/s: {count}." for count in dict.fromkeys(run["tflops_count"] for run in runs)]
    return counts + [NOTE] * (len(runs) > 1) + [EMULATED] * all(run.get("peak_gib") is None for run in runs)


def show_sweep(jobs: Sequence[tuple[Path, Sequence[str]]], console: Console | None = None) -> None:
    """Print one table of all jobs of a sweep: overrides that differ, and losses. jobs: (folder, overrides) of each."""
    common = set.intersection(*(set(overrides) for _, overrides in jobs))
    figures = {"held-out": ".4f", "training": ".4f", "tokens/s": ",.0f"}
    table = Section("Sweep: loss in nats per byte", ("job", "run"), figures)
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

    def mean(key: str) -> float | None:
        """Time-weighted mean over all steps. None if a step lacks the number, as those of a checkpoint may."""
        if not run.metrics or any(row.get(key) is None for row in run.metrics):
            return None
        return float(sum(row[key] * row["seconds"] for row in run.metrics) / max(run.seconds, 1e-9))

    return {
        "name": run.name,
        "steps": run.steps,
        "skipped": len(run.metrics) - len(run.taken),
        "stopped": run.stopped,
        "valid_loss": run.valid_loss,
        "train_loss": sum(row["loss"] for row in last) / max(1, len(last)),
        **totals,
        "padding_share": totals["rows_padding"] / max(1, totals["rows_computed"]),
        "expert_load": sum(row["expert_load"] for row in last) / max(1, len(last)),
        "seconds": run.seconds,
        "ms_a_step": run.ms_a_step,
        "tokens_per_s": mean("tokens_per_s") or 0.0,
        "tflops_count": run.tflops_count,
        **{key: mean(key) for key in ("tflops", "mfu")},
        "peak_gib": max((row.get("peak_gib") or 0.0 for row in run.metrics), default=0.0) or None,
    }


# The page

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --dim: #667; --line: #ddd; --soft: #f5f5f5; --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eee; --dim: #99a; --line: #333; --soft: #1c1c1c; --page: #111 } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: var(--ink); background: var(--page) }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2.5rem }
.dim, dt, small { color: var(--dim) } .dim { margin-top: .2rem }
dl, .charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--least)), 1fr)) }
dl { --least: 10rem } .charts { --least: 22rem }
dl div { background: var(--soft); border-radius: .5rem; padding: .6rem 1rem } dt { font-size: .85rem }
dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums } small { font-size: .85rem }
svg { width: 100%; max-width: 40rem; height: auto } svg text { font-size: 12px; fill: var(--dim) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child { padding-left: 0 } th[scope=row], th.label { text-align: left } tbody th { font-weight: normal }
thead th { white-space: normal; vertical-align: bottom }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere }
pre { background: var(--soft); padding: 1rem; overflow-x: auto }
summary { margin-top: 2.5rem } summary h2 { display: inline }
@media (max-width: 40rem) { th, td { padding: .2rem .4rem; font-size: .9rem } }
"""
STYLES = (("#0072B2", "", 2.5), ("#D55E00", "9 4", 1.5), ("#888888", "2 4", 1.2))
"""Color, dashes and width of each run and of the reference curve. Colors are Okabe and Ito's, for color-blind readers.
Curves often overlap, so those on top are narrower."""
WIDTH, LEFT, HEIGHT = 470, 48, 250
POINTS = 800  # per curve, at most


class Curve(NamedTuple):
    """Points (step, value) in a style of `STYLES`. label: None: not in the legend. faint: not smoothed."""

    label: str | None
    style: tuple[str, str, float]
    points: list[tuple[float, float]]
    faint: bool = False


def page(outcome: Outcome, summary: dict[str, Any], config: Config) -> str:
    """Return the text of report.html. summary: of `summarize`, with "provenance"."""
    runs, last = outcome.runs, outcome.runs[-1]
    title = " and ".join(run.name for run in runs) + ", trained alike" * (len(runs) > 1)
    stopped = [f"Stopped: {last.name}, step {last.steps} of {config.train.steps}."] * outcome.stopped
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in [*stopped, *_remarks(summary["runs"])])
    facts = {"text": outcome.text, **summary["provenance"]}
    facts["versions"] = ", ".join(f"{name} {one}" for name, one in {"mxep": __version__, **facts["versions"]}.items())
    rows = ((escape(name), escape(str(one))) for name, one in facts.items() if one is not None)
    shown = "".join(f'<tr><th scope="row">{name}</th><td>{one}</td></tr>' for name, one in rows)
    ran = f"{last.steps:,} steps", f"{config.parallel.ranks} ranks", facts["device"], facts["date"]
    about = escape(" · ".join(ran))
    lines = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">',
        f'<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<p class="dim">{about}</p>',
        f"<dl>{''.join(_tiles(summary['runs']))}</dl>",
        f"<ul>{remarks}</ul>" if remarks else "",
        f'<h2>Curves</h2>\n<div class="charts">{"".join(charts(runs, outcome.entropy))}</div>',
        *map(_table, tables(summary)),
        f'<h2>Where it ran</h2>\n<div class="wide"><table class="facts">{shown}</table></div>',
        "<details><summary><h2>Config</h2></summary>",
        f"<pre>{escape(OmegaConf.to_yaml(OmegaConf.create(to_json(config))))}</pre>\n</details>",
        "</body>\n</html>\n",
    )
    return "\n".join(lines)


def _tiles(runs: Sequence[Row]) -> Iterator[str]:
    tiles = ("valid_loss", "held-out loss", "nats per byte", ".3f"), ("tokens_per_s", "speed", "tokens/s", ",.0f")
    for (key, what, unit, form), run in itertools.product(tiles, runs):
        if run.get(key) is not None:
            yield f"<div><dt>{escape(run['name'])}, {what}</dt><dd>{run[key]:{form}} <small>{unit}</small></dd></div>"


def charts(runs: Sequence[Run], entropy: float) -> Iterator[str]:
    """SVGs of losses in nats per byte: raw and smoothed, then other runs minus the first. Skipped steps have none."""
    curves = [[(row["step"], row["loss"]) for row in run.taken] for run in runs]
    last = max((step for curve in curves for step, _ in curve), default=1)
    drawn = []
    for run, curve, style in zip(runs, curves, STYLES):
        drawn += [Curve(None, style, curve, faint=True), Curve(run.name, style, smooth(curve))]
    level = Curve(f"unigram entropy, {entropy:.2f}", STYLES[-1], [(1, entropy), (last, entropy)])
    yield chart("loss in nats per byte, by step", [*drawn, level])
    base, zero = dict(curves[0]), Curve(None, STYLES[-1], [(1, 0.0), (last, 0.0)])
    for run, curve, style in zip(runs[1:], curves[1:], STYLES[1:]):
        both = [(step, loss - base[step]) for step, loss in curve if step in base]
        if both:
            name = f"{run.name} - {runs[0].name}"
            title = f"{name} in nats per byte, smoothed"
            yield chart(title, [zero, Curve(None, style, smooth(both))])


def chart(title: str, curves: Sequence[Curve]) -> str:
    """Curves over steps as SVG, with a legend above and ticks at round numbers."""
    points = [point for each in curves for point in each.points if math.isfinite(point[1])]
    (x0, x1), (y0, y1) = ((min(values), max(values)) for values in zip(*points))
    room = 0.05 * (y1 - y0) or 0.5
    y0, y1, x1 = y0 - room, y1 + room, max(x1, x0 + 1)
    top, bottom = 44, HEIGHT - 24

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - 8), bottom - (y - y0) / (y1 - y0) * (bottom - top)

    lines = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>']
    lines.append(f'<text x="0" y="12">{escape(title)}</text>')
    for y in _ticks(y0, y1):
        lines.append(f'<path d="M{LEFT} {at(x0, y)[1]:.1f}H{WIDTH - 8}" stroke="var(--line)"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{at(x0, y)[1] + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    below = ((x, at(x, y0)[0]) for x in _ticks(x0, x1))
    for x, left in below:
        lines.append(f'<text x="{min(left, WIDTH - 18):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{x:g}</text>')
    place = LEFT
    for label, (color, dashes, width), all_points, faint in curves:
        every = max(1, math.ceil(len(all_points) / POINTS))
        kept = [*all_points[::every], *all_points[-1:]]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in kept if math.isfinite(y))
        stroke = f'fill="none" stroke="{color}" stroke-width="{0.7 if faint else width}" stroke-dasharray="{dashes}"'
        lines.append(f'<polyline points="{path}" {stroke} opacity="{0.35 if faint else 1}"/>')
        if label:
            lines.append(f'<path d="M{place} 28h26" {stroke}/><text x="{place + 32}" y="32">{escape(label)}</text>')
            place += 60 + 7 * len(label)
    return "\n".join([*lines, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``, three to seven of them."""
    unit = 10 ** math.floor(math.log10((high - low) / 3))
    unit *= max(factor for factor in (1, 2, 5) if factor * unit <= (high - low) / 3)
    return [i * unit for i in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def smooth(curve: Sequence[tuple[float, float]], weight: float = 0.8) -> list[tuple[float, float]]:
    """Smooth a curve as TensorBoard does: each mean weighs an earlier value by ``weight ** distance``."""
    total = count = 0.0
    smoothed = []
    for step, value in curve:
        total, count = weight * total + value, weight * count + 1
        smoothed.append((step, total / count))
    return smoothed


def _table(section: Section) -> str:
    head = "".join(f'<th class="label">{escape(name)}</th>' for name in section.labels)
    head += "".join(f"<th>{escape(name)}</th>" for name in section.filled)
    body = []
    for row in section.rows:
        cells = [f'<th scope="row">{escape(str(row.get(name, "")))}</th>' for name in section.labels]
        cells += [f"<td>{escape(text)}</td>" for text in section.texts(row, section.filled)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    table = "\n".join(("<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody>", "</table>"))
    return f'<h2>{escape(section.title)}</h2>\n<div class="wide">{table}</div>'
