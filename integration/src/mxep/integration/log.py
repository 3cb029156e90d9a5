"""The metrics of a run's steps, as they come: metrics.jsonl, and TensorBoard's files and W&B if they are wanted."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .config import to_json
from .schema import Config

NOT_METRICS = ("run", "step", "skipped")


@contextlib.contextmanager
def log(
    folder: Path, name: str, before: Iterable[dict[str, Any]], config: Config, *, shown: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields write(row) of run ``name``: a line of ``folder/metrics.jsonl``, and its numbers in ``folder/tensorboard``.

    before: rows of a resumed run, which are written first. They replace what ``folder`` has of this run, which may
    go on in its own folder. shown: on rank 0; others write nothing. With W&B the run is in the project WANDB_PROJECT or
    "mxep", in a group named after ``folder``.
    """
    if not shown:
        yield lambda row: None
        return
    with contextlib.ExitStack() as stack:
        metrics = folder / "metrics.jsonl"
        written = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        mine = json.dumps({"run": name})[:-1] + ","
        metrics.write_text("".join(line for line in written if not line.startswith(mine)))
        file = stack.enter_context(metrics.open("a", buffering=1))
        writer: Any = None
        if config.train.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            shutil.rmtree(folder / "tensorboard" / name, ignore_errors=True)
            writer = stack.enter_context(SummaryWriter(str(folder / "tensorboard" / name)))

        run: Any = None
        if config.train.wandb:
            where = {"project": os.environ.get("WANDB_PROJECT", "mxep"), "group": folder.resolve().name}
            made = importlib.import_module("wandb").init(**where, name=name, dir=str(folder), config=to_json(config))
            run = stack.enter_context(made)

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            for key, value in scalars(row) if writer is not None else ():
                writer.add_scalar(key, value, row["step"])
            if run is not None:
                run.log(dict(scalars(row)), step=row["step"])

        for row in before:
            write(row)
        yield write


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row by name; of a list each, by its index. What is None has none."""
    for key, value in row.items():
        if key in NOT_METRICS or value is None:
            continue
        if isinstance(value, list):
            yield from ((f"{key}/{i}", each) for i, each in enumerate(value))
        else:
            yield key, value
