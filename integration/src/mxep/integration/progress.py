"""Progress of a run on the terminal: a bar where there is one, a line for each tenth where there is none."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mxep.gemm.backends import select


class Progress:
    """Shows run ``name`` over ``steps`` steps on stderr; nothing unless ``shown``. A context manager."""

    def __init__(self, name: str, steps: int, entropy: float, *, shown: bool) -> None:
        self.name = name
        self.steps = steps
        self.console = Console(stderr=True, quiet=not shown)
        self.bar = Bar(
            TextColumn(f"[bold]{name:>6}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn(f"{{task.fields[values]}} [dim](unigram {entropy:.2f})"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(name, total=steps, values="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.stop()

    def advance(self, step: int, row: dict[str, Any] | None) -> None:
        """``step`` steps are done; ``row``: the metrics of the last one."""
        values = "" if row is None else describe(row)
        if self.console.is_terminal:
            self.bar.update(self.task, completed=step, values=values)
        elif step and step % max(1, self.steps // 10) == 0:
            self.console.print(f"{self.name:>6}  step {step}/{self.steps}  {values}", soft_wrap=True, highlight=False)


def show_backend(name: str, device: torch.device, *, shown: bool) -> None:
    """Say on stderr, if `shown`, what backend "auto" is on `device`. RuntimeError if `name` cannot run there."""
    logger = logging.getLogger("mxep.gemm")
    if shown and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mxep: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    select(name, device)


def describe(row: dict[str, Any]) -> str:
    """A step's metrics in a few words; expert load is the busiest expert over the mean."""
    if row.get("skipped"):
        return f"skipped {row['skipped']}"
    return f"loss {row['loss']:.3f}  {row['tokens_per_s'] / 1e3:.1f}k tokens/s  expert load {row['expert_load']:.2f}x"
