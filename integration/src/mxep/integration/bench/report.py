"""Results of a bench: lines beside a ceiling, as a table and as JSON. Knows nothing of what was measured."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120  # of the table where the output is no terminal


class Results(Protocol):
    """What a bench gives. lines: all that was measured; failed: how many of them have no figures though they should."""

    seconds: float

    @property
    def lines(self) -> list[Any]: ...

    @property
    def failed(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...

    def show(self, console: Console) -> None: ...


@dataclass(frozen=True)
class Ceiling:
    """What cannot be beaten, measured before the lines and after them; the larger counts.

    work: what a line counts ("bytes", "flop"). unit: 1e12 of it a second ("TB/s", "TFLOP/s").
    """

    name: str
    work: str
    unit: str
    before: float
    after: float

    @property
    def value(self) -> float:
        return max(self.before, self.after)


@dataclass(frozen=True)
class Line:
    """One thing measured at one shape.

    us: microseconds a call, or why there are none. work: the least that has to be done, see `Ceiling`. target: share
    of the ceiling. kernels: those of Triton that a call launches (none: plain torch). empty_us: microseconds that empty
    kernels of the same grids take. peers: microseconds of others at the same work, or why there are none.
    """

    name: str
    shape: tuple[int, ...]
    us: float | str
    work: int
    target: float | None = None
    kernels: tuple[str, ...] = ()
    empty_us: float | None = None
    peers: dict[str, float | str] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        """1e12 of the work a second."""
        return None if isinstance(self.us, str) else self.work / self.us / 1e6

    @property
    def dimensions(self) -> str:
        return " x ".join(map(str, self.shape))

    @property
    def summary(self) -> str:
        us = f"failed: {self.us}" if isinstance(self.us, str) else f"{self.us:9.1f} us"
        return f"{self.name:24} {self.dimensions:18} {us}"


@dataclass
class Report:
    """Everything. title: what was measured; seconds: how long that took."""

    title: str
    ceiling: Ceiling
    lines: list[Line]
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(isinstance(line.us, str) for line in self.lines)

    def share(self, line: Line) -> float | None:
        """Of the ceiling."""
        return None if line.rate is None else line.rate / self.ceiling.value

    def to_json(self) -> dict[str, Any]:
        """Plain values; a key for each thing of a line, peers among them."""
        ceiling = self.ceiling
        lines = [
            {
                "name": line.name,
                "shape": list(line.shape),
                "us": line.us,
                ceiling.work: line.work,
                ceiling.unit: line.rate,
                "share": self.share(line),
                "target": line.target,
                "kernels": list(line.kernels),
                "empty us": line.empty_us,
                **{f"{name} us": us for name, us in line.peers.items()},
            }
            for line in self.lines
        ]
        return {
            "what": self.title,
            f"{ceiling.name} {ceiling.unit}": {"before": ceiling.before, "after": ceiling.after},
            "seconds": self.seconds,
            "lines": lines,
        }

    def show(self, console: Console) -> None:
        """The table of `show`."""
        show(self, console)


def write(report: Results, command: str, commit: str | None, files: list[Path]) -> None:
    """The report as JSON, with where it was made. `commit`: to say where there is no git, null for git's answer."""
    where = {**environment(), "commit": commit or git_commit(), "command": command}
    title, *rest = report.to_json().items()
    text = json.dumps(dict([title, *where.items(), *rest]), indent=1)
    for file in files:
        file.write_text(text + "\n")


def environment() -> dict[str, Any]:
    """Device, driver, versions and date."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            **({"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if cuda else {}),
            **_installed("torchao"),
        },
        "date": datetime.date.today().isoformat(),
    }


def _installed(*peers: str) -> dict[str, str]:
    """Versions of those that are."""
    found = {}
    for name in peers:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_commit() -> str | None:
    """The commit of the repository this file lies in, "-dirty" behind it where files differ; None if there is none."""
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")


def show(report: Report, console: Console) -> None:
    """A table with a section for each name, red where a target is missed."""
    ceiling = report.ceiling
    console.width = max(console.width, WIDTH)
    peers = list(dict.fromkeys(name for line in report.lines for name in line.peers))
    table = make_table(
        f"{report.title}: {ceiling.name} is {ceiling.value:.2f} {ceiling.unit} "
        f"({ceiling.before:.2f} before, {ceiling.after:.2f} after)",
        f"{report.seconds:.0f} s. empty: kernels of the same grids with nothing in them.",
    )
    table.add_column("", no_wrap=True)
    for name in ("shape", "us", ceiling.unit, f"of {ceiling.name}", "target", "empty us", *(f"{p} us" for p in peers)):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for line in report.lines:
        if previous not in (None, line.name):
            table.add_section()
        plain = "" if line.kernels or isinstance(line.us, str) else " [dim](plain torch)"
        table.add_row("" if line.name == previous else line.name + plain, *_cells(report, line, peers))
        previous = line.name
    console.print(table)


def make_table(title: str, caption: str | None) -> Table:
    """An empty table in the style of all benches."""
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )


def _cells(report: Report, line: Line, peers: list[str]) -> list[str]:
    share = report.share(line)
    others = [_time(line.peers.get(peer, "")) for peer in peers]
    target = "" if line.target is None else f"{line.target:.2f}"
    if share is None or line.rate is None:
        return [line.dimensions, _time(line.us), "", "", target, "", *others]
    color = "default" if line.target is None else "green" if share >= line.target else "red"
    empty = "" if line.empty_us is None else f"{line.empty_us:.1f}"
    return [line.dimensions, _time(line.us), f"{line.rate:.2f}", f"[{color}]{share:.3f}", target, empty, *others]


def _time(us: float | str) -> str:
    if isinstance(us, str):
        return "[red]failed" if us else ""
    return f"{us:.1f}"


def _output(*command: str) -> str | None:
    """The first line that a command prints, None if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0].strip()
    return None
