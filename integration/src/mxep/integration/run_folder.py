"""Run folders, each of one run, and the checkpoints in them. Imports nothing heavy.

RUN_FOLDER/config.yaml          locked while the run has it
RUN_FOLDER/mxfp8/step-000200    a checkpoint; its state.json has the SHA-256 of all its files
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


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
    """Write ``config`` to config.yaml of ``folder`` and lock it. The run keeps it while the returned file is open.

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


FORMAT = 2
DIGESTS = "sha256"
"""Key of state.json: name of each file of the checkpoint -> its SHA-256, whatever its format."""
TOKENIZER = "tokenizer.json"
"""File in a checkpoint and in a run folder, if the text was read as tokens."""


@dataclass(frozen=True)
class State:
    """A checkpoint's content besides its tensors.

    run: the recipe's name. step: steps done. config: the whole config, plain JSON values. digest: of the text.
    metrics: one dict a step done.
    """

    run: str
    step: int
    config: dict[str, Any]
    digest: str
    metrics: list[dict[str, Any]]


def same_text(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two sections `data` name the same bytes and batches of them, whatever file has their tokenizer."""
    return all(one.get(key) == two.get(key) for key in {*one, *two} - {"tokenizer", "vocabulary"})


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of ``step`` in a run's ``folder``."""
    return folder / f"step-{step:06d}"


def find(path: Path) -> dict[str, Path]:
    """The newest checkpoint of each run, by name: of a run folder, or the one checkpoint that ``path`` itself is.

    Raises ValueError where there is none.
    """
    if (path / "state.json").is_file():
        return {read_state(path).run: path}
    found = {folder.name: made[-1] for folder in sorted(path.glob("*/")) if (made := steps(folder))}
    if not found:
        raise ValueError(f"no checkpoint in {path}: wanted a run folder or a step-N folder of one")
    return found


def read_state(folder: Path) -> State:
    """Read the state of ``folder/step-N``. Raises ValueError if it cannot be read or has changed."""
    try:
        about = json.loads((folder / "state.json").read_text())
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if (found := about["format"]) != FORMAT:
            raise ValueError(f"format: got {found}, wanted {FORMAT}")
        for key, kind in {"run": str, "step": int, "config": dict, "digest": str}.items():
            if not isinstance(about[key], kind):
                raise ValueError(f"{key}: got {about[key]!r}, wanted {kind.__name__}")
        if seal(about) != about:
            raise ValueError("state.json is not what was saved")
        if reason := changed(folder, ["metrics.jsonl"]):
            raise ValueError(reason)
        del about["format"], about[DIGESTS]
        return State(**about, metrics=metrics)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a checkpoint: {type(error).__name__}: {error}") from None


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files in ``folder``, by name."""

    def digest(name: str) -> tuple[str, str]:
        with (folder / name).open("rb") as stream:
            return name, hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:
        return dict(threads.map(digest, names))


def changed(folder: Path, names: Iterable[str]) -> str:
    """Return a line for the first of these files that has changed since the save, or ""."""
    saved = json.loads((folder / "state.json").read_text())[DIGESTS]
    for name, found in digests_of(folder, names).items():
        if found != (wanted := saved.get(name, "none")):
            return (
                f"{folder / name}: got SHA-256 {found[:12]}, wanted {wanted[:12]}: the file is not what was saved; "
                "restore it from a copy, or go on from another checkpoint"
            )
    return ""


def seal(about: dict[str, Any]) -> dict[str, Any]:
    """``about`` with its own SHA-256 among those of the checkpoint's other files."""
    digests = {name: digest for name, digest in about[DIGESTS].items() if name != "state.json"}
    own = hashlib.sha256(json.dumps(about | {DIGESTS: digests}).encode()).hexdigest()
    return about | {DIGESTS: {**digests, "state.json": own}}


def steps(folder: Path) -> list[Path]:
    """The checkpoints of a run's ``folder``, the oldest first."""
    found = (step for step in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", step.name))
    return sorted(found, key=lambda step: int(step.name.removeprefix("step-")))
