"""Run folders: each belongs to one run, whoever starts others at the same time. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import TextIO


def new_folder(wanted: str) -> str:
    """Make the folder ``wanted``; if it is there, one with -2, -3 and so on at its end. Returns its name."""
    folder, number = wanted, 1
    while True:
        try:
            Path(folder).mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = f"{wanted}-{number}"
        else:
            return folder


def take(folder: Path, config: str, *, resumed: Path | None) -> TextIO:
    """Write ``config`` to config.yaml of ``folder``, which is this run's as long as what is returned is open.

    resumed: the checkpoint, or run folder, that the run goes on from. One in ``folder`` goes on in its own folder.

    Raises ValueError, and leaves everything as it is, if another run has the folder or had it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "config.yaml").open("a+")
    try:
        with contextlib.suppress(OSError):  # where there are no locks: then a run that ended is noticed alone
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(_taken(folder)) from None
        within = resumed is not None and folder.resolve() in (resumed.resolve(), *resumed.resolve().parents)
        if file.tell() and not within:
            raise ValueError(_taken(folder))
        file.truncate(0)
        file.write(config)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _taken(folder: Path) -> str:
    return f"hydra.run.dir: got {folder}, which has a run, wanted a folder of its own: leave it out, or name another"
