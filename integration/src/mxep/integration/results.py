"""Results of any task: where they were made, tables of rows, and JSON files. It does not depend on the measurement.

row       plain values by column; "note" says why it has no figures, "error" what went wrong
Section   a table: some columns name a row, others are its figures
Report    sections, and the ceilings that they are compared with
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

WIDTH = 120  # of a terminal that is asked for, if figures leave room for remarks
REMARKS = 16, 48  # fewest and most characters of a note or error in a table

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """title: the table's subject. labels: columns that name a row. figures: the others, with their format."""

    title: str
    labels: tuple[str, ...]
    figures: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)

    def empty(self) -> Section:
        """The same without rows."""
        return Section(self.title, self.labels, self.figures)

    def show(self, console: Console) -> None:
        """Print the table, a rule between rows that differ in more than the last label. No figure is cut: the console
        is widened for them. A column that has none is left out."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for name in self.labels:
            table.add_column(name, no_wrap=True)
        found = {name for row in self.rows for name, value in row.items() if value is not None}
        shown = {name: spec for name, spec in self.figures.items() if name in found}
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, max_width=0)
        previous: list[str] | None = None
        for row in self.rows:
            *first, last = [_label(row.get(name)) for name in self.labels]
            if previous not in (None, first):
                table.add_section()
            figures = ["" if row.get(name) is None else format(row[name], spec) for name, spec in shown.items()]
            remark = escape(row["note"]) if row.get("note") else f"[red]{escape(row.get('error', ''))}"
            table.add_row(*(["" for _ in first] if previous == first else first), last, *figures, remark)
            previous = first
        needed = Measurement.get(console, console.options.update(width=1000), table).maximum
        room = max(REMARKS[0], min(REMARKS[1], WIDTH - needed))
        table.columns[-1].max_width = room
        console.width = max(console.width, needed + room)
        console.print(table)


def _label(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else escape(str("" if value is None else value))


@dataclass
class Report:
    """title: the subject. ceilings: rates to compare with, by name. seconds: how long all of it took. about: of
    what it was made. remarks: sentences below the tables."""

    title: str
    ceilings: dict[str, float]
    sections: dict[str, Section]
    seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    @property
    def lines(self) -> list[Row]:
        """The rows of all sections."""
        return [row for section in self.sections.values() for row in section.rows]

    @property
    def failed(self) -> int:
        """How many rows have an error."""
        return sum("error" in row for row in self.lines)

    def add(self, section: str, row: Row) -> Row:
        """Append a row, floats rounded to five digits. Returns it as it was added."""
        self.sections[section].rows.append(shortened(row))
        return self.sections[section].rows[-1]

    def to_json(self, command: str, commit: str | None) -> dict[str, Any]:
        """Plain values, with `provenance`."""
        sections = {name: section.rows for name, section in self.sections.items()}
        measured = {"ceilings": self.ceilings, "seconds": self.seconds} if self.seconds else {}
        return {"what": self.title, **provenance(command, commit), **self.about, **measured, "sections": sections}

    def show(self, console: Console) -> None:
        """A line of ceilings, then a table for each section, and remarks."""
        ceilings = ", ".join(f"{name} {value:.4g}" for name, value in self.ceilings.items())
        measured = f": {ceilings}; {self.seconds:.0f} s" if self.seconds else ""
        console.print(f"{self.title}{measured}", highlight=False, soft_wrap=True)
        for section in self.sections.values():
            section.show(console)
        for remark in self.remarks:
            console.print(remark, highlight=False, soft_wrap=True)


def shortened(value: Any) -> Any:
    """The same with floats rounded to five digits."""
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write(report: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Write the report as JSON to each file."""
    for file in files:
        file.write_text(json.dumps(report, indent=1) + "\n")


PACKAGES = "torch", "triton", "torchao", "transformers", "tokenizers"
"""Packages with their versions in results, where installed."""


def provenance(command: str, commit: str | None) -> dict[str, Any]:
    """Device, driver, versions, date, commit and command. commit: what to say instead of git's answer."""
    cuda = torch.cuda.is_available()
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if cuda else {}
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "versions": {"python": platform.python_version(), **versions, **nccl},
        "date": datetime.date.today().isoformat(),
        "commit": commit or git_commit(),
        "command": command,
    }


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def git_commit() -> str | None:
    """The commit of the repository this file lies in, "-dirty" behind it where files differ; None if there is none."""
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")


@functools.cache
def _output(*command: str) -> str | None:
    """The first line that a command prints, None if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0].strip()
    return None
