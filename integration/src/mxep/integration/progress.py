"""Progress of a run: a line that changes on a terminal, else a line for each tenth."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mxep.gemm.backends import select

from .rank import Rank


@contextlib.contextmanager
def progress(name: str, steps: int, entropy: float, *, shown: bool) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Shows run ``name`` over ``steps`` steps on stderr; nothing unless ``shown``.

    Yields advance(step, row): ``step`` steps are done, and ``row`` has the metrics of the last one.
    """
    console = Console(stderr=True, quiet=not shown)
    bar = Progress(
        TextColumn(f"[bold]{name:>6}"),
        TextColumn("{task.completed}/{task.total}", table_column=Column(min_width=2 * len(str(steps)) + 1)),
        TimeRemainingColumn(compact=True, table_column=Column(min_width=5)),
        TextColumn("{task.fields[values]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task(name, total=steps, values="")

    def advance(step: int, row: dict[str, Any]) -> None:
        if console.is_terminal:
            bar.update(task, completed=step, values=describe(row))
        elif step % max(1, steps // 10) == 0:
            console.print(f"{name:>6}  step {step}/{steps}  {describe(row)}", soft_wrap=True, highlight=False)

    if console.is_terminal:
        console.print(f"{name:>6}  unigram entropy {entropy:.2f}", highlight=False)
    with bar:
        yield advance


def describe(row: dict[str, Any]) -> str:
    """A step's metrics in a few words, in 80 columns with the steps; load is the busiest expert over the mean.

    MFU where the GPU's peak is known, else TFLOP/s of a rank; the peak of memory where it is counted, on GPUs.
    """
    if row.get("skipped"):
        return f"skipped {row['skipped']}"
    rate = f"{row['tflops']:.3g} TFLOP/s" if row.get("mfu") is None else f"MFU {row['mfu']:.1%}"
    memory = "" if row.get("peak_gib") is None else f" {row['peak_gib']:.1f} GiB"
    speed = f"{row['tokens_per_s'] / 1e3:.1f}k tokens/s {rate}{memory}"
    return f"loss {row['loss']:.3f} {speed} load {row['expert_load']:.2f}x"


def log_backend(name: str, rank: Rank) -> None:
    """Log on rank 0's stderr which backend "auto" is on its device. RuntimeError if ``name`` cannot run there."""
    logger = logging.getLogger("mxep.gemm")
    if rank.rank == 0 and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mxep: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    select(name, rank.device)
