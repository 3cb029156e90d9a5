"""Results of a bench that compares alternatives: sections of rows, as tables and as JSON. Knows not what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from .report import make_table

REMARK = 48  # characters of a row's note or error in a table
WIDTH = 160  # of tables, at least, remarks included

Row = dict[str, Any]
"""Plain values by column. "note": why a row has no figures, where there cannot be any. "error": what went wrong."""


@dataclass(frozen=True)
class Section:
    """A table. title: what it shows. labels: columns that say what a row is. figures: others, with their format."""

    title: str
    labels: tuple[str, ...]
    figures: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)

    def line(self, row: Row) -> str:
        """A row as text."""
        figures = (f"{row[name]:{spec}} {name}" for name, spec in self.figures.items() if row.get(name) is not None)
        return "  ".join((*(f"{_label(row.get(name)):20}" for name in self.labels), *figures, _remark(row)))

    def show(self, console: Console) -> None:
        table = make_table(self.title, None)
        for name in self.labels:
            table.add_column(name, no_wrap=True)
        for name in self.figures:
            table.add_column(name, justify="right", no_wrap=True)
        remarks = any(map(_remark, self.rows))
        if remarks:
            table.add_column("", no_wrap=True, max_width=REMARK)
        previous: list[str] = []
        for row in self.rows:
            labels = [_label(row.get(name)) for name in self.labels]
            if previous and labels[:-1] != previous[:-1]:
                table.add_section()
            shown = labels if labels[:-1] != previous[:-1] else [*("" for _ in labels[:-1]), labels[-1]]
            figures = [
                format(row[name], spec) if row.get(name) is not None else "" for name, spec in self.figures.items()
            ]
            table.add_row(*shown, *figures, *([f"[red]{_remark(row)}"] if remarks else []))
            previous = labels
        console.print(table)


@dataclass
class Results:
    """Everything. ceilings: what was measured to compare with, by name. seconds: how long it all took."""

    title: str
    ceilings: dict[str, float]
    sections: dict[str, Section]
    seconds: float = 0.0

    @property
    def lines(self) -> list[Row]:
        """The rows of all sections."""
        return [row for section in self.sections.values() for row in section.rows]

    @property
    def failed(self) -> int:
        return sum("error" in row for row in self.lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        sections = {name: section.rows for name, section in self.sections.items()}
        return {"what": self.title, "ceilings": self.ceilings, "seconds": self.seconds, "sections": sections}

    def show(self, console: Console) -> None:
        """A table for each section."""
        console.width = max(console.width, WIDTH)
        ceilings = ", ".join(f"{name} {value:.4g}" for name, value in self.ceilings.items())
        console.print(f"{self.title}: {ceilings}; {self.seconds:.0f} s", highlight=False)
        for section in self.sections.values():
            section.show(console)


def _label(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else str("" if value is None else value)


def _remark(row: Row) -> str:
    return str(row.get("note") or row.get("error") or "")
