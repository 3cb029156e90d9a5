"""Run folders, and the checkpoints in them: torch's distributed checkpoints in safetensors, and JSON.

    RUN_FOLDER/config.yaml
    RUN_FOLDER/mxfp8/step-000200/model/shard-00001-...       parameters and buffers, one file per rank that has any
                                 optimizer/shard-00001-...   AdamW's moments, "first." and "second." + parameter name
                                 state.json                  run, step, config, SHA-256 of the text, sizes of all files
                                 metrics.jsonl               one line a step so far
                                 tokenizer.json              if the text was read as tokens

Every rank writes its part; one rank writes a part that several hold. Any number of ranks can load a checkpoint, at any
expert-parallel degree, with or without parallel.fsdp.

The ranks write into a hidden folder. Rank 0 syncs it to disk, renames it, syncs the name, and then deletes older
checkpoints. So the newest folder is complete even after a power failure. A save that fails leaves nothing behind.
Tensors that are not finite are not saved. A checkpoint that lacks a file, or part of one, is not loaded. Reading
executes no code.

Only saving and loading import torch: the command looks for a checkpoint before torch is imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.checkpoint.api import CheckpointException

    from .mesh import Mesh

FORMAT = 3
TOKENIZER = "tokenizer.json"
"""File in a checkpoint and in a run folder, if the text was read as tokens."""
MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


def new_folder(wanted: str) -> str:
    """Make the folder ``wanted``, with -2, -3 and so on appended if it exists. Returns the name."""
    folder, number = wanted, 1
    while True:
        try:
            Path(folder).mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = f"{wanted}-{number}"


def take(folder: Path, config: str, *, resumed: Path | None) -> None:
    """Write ``config`` to config.yaml of ``folder``.

    resumed: the checkpoint or run folder to resume from. If it is in ``folder``, the run continues there.

    Raises ValueError, and changes nothing, if the folder belongs to another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    within = resumed is not None and folder.resolve() in (resumed.resolve(), *resumed.resolve().parents)
    if (file := folder / "config.yaml").exists() and not within:
        raise ValueError(
            f"hydra.run.dir: got {folder}, which has a run, wanted a folder of its own: leave it out, or name another"
        )
    file.write_text(config)


@dataclass(frozen=True)
class State:
    """A checkpoint without its tensors.

    run: the recipe's name. step: steps done. config: the whole config, plain JSON values. digest: the text's.
    metrics: one dict a step done.
    """

    run: str
    step: int
    config: dict[str, Any]
    digest: str
    metrics: list[dict[str, Any]]


def same_text(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether two `data` sections give the same batches of the same bytes. The tokenizer's file does not count."""
    return all(one.get(key) == two.get(key) for key in {*one, *two} - {"tokenizer", "vocabulary"})


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of ``step`` in a run's ``folder``."""
    return folder / f"step-{step:06d}"


def steps(folder: Path) -> list[Path]:
    """The checkpoints of a run's ``folder``, the oldest first."""
    found = (step for step in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", step.name))
    return sorted(found, key=lambda step: int(step.name.removeprefix("step-")))


def find(path: Path) -> dict[str, Path]:
    """The newest checkpoint of each run, by run name. path: a run folder or a checkpoint. ValueError if none."""
    if (path / "state.json").is_file():
        return {read_state(path).run: path}
    found = {folder.name: made[-1] for folder in sorted(path.glob("*/")) if (made := steps(folder))}
    if not found:
        raise ValueError(f"no checkpoint in {path}: wanted a run folder or a step-N folder of one")
    return found


def read_state(folder: Path) -> State:
    """Read the state of ``folder/step-N``. Raises ValueError if it cannot be read, or if a file is not whole."""
    try:
        about = json.loads((folder / "state.json").read_text())
        if (found := about.pop("format")) != FORMAT:
            raise ValueError(f"format: got {found}, wanted {FORMAT}")
        for name, size in about.pop("files").items():
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name}: got {found} bytes, wanted {size}")
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        state = State(**about, metrics=metrics)
        if (kinds := (type(state.run), type(state.step), type(state.config))) != (str, int, dict):
            got = ", ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"run, step and config: got {got}, wanted str, int, dict")
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not a checkpoint: {type(error).__name__}: {error}") from None


# Tensors


def save(
    folder: Path, state: State, *, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, tokenizer: str | None
) -> None:
    """Write ``folder/step-N`` and delete older ones. All nodes must see the folder. Collective.

    tokenizer: content of tokenizer.json; None: no such file.

    Raises FloatingPointError on every rank, and writes nothing, if a weight or a moment of any rank is not finite.
    """
    from .mesh import all_gather

    tensors = {"model": model.state_dict(), "optimizer": _moments(model, optimizer)}
    if name := not_finite({**tensors["model"], **tensors["optimizer"]}):
        raise FloatingPointError(f"{state.run}, step {state.step}: {name} is not finite: not saved")
    target = step_folder(folder, state.step)
    partial, replaced = folder / f".{target.name}.partial", folder / f".{target.name}.replaced"
    if mesh.rank == 0:
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        all_gather(None)  # the folder is empty
        for what, given in tensors.items():
            _write(partial / what, given)
        seen = all_gather(_files(partial))
        if missing := set().union(*seen) - set(seen[0]):
            raise OSError(f"not saved: rank 0 sees no {min(missing)}: wanted a run folder that all nodes see")
        if mesh.rank != 0:
            return
        if tokenizer is not None:
            (partial / TOKENIZER).write_text(tokenizer)
        (partial / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in state.metrics))
        sizes = {name: (partial / name).stat().st_size for name in _files(partial)}
        about = {"format": FORMAT, **dataclasses.asdict(state), "files": sizes}
        del about["metrics"]
        (partial / "state.json").write_text(json.dumps(about, indent=1))
        for written in (*sorted(partial.iterdir()), partial):
            _sync(written)
        if target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)
    except Exception:  # for example a full disk
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    for parent in (folder, folder.parent):
        _sync(parent)
    for old in (replaced, *steps(folder)):
        if old != target:
            shutil.rmtree(old, ignore_errors=old == replaced)


def load(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer in place from ``folder/step-N``; each rank takes its part. Collective.

    Raises ValueError for a checkpoint that is not whole, and for a tensor that does not fit the model.
    """
    import torch
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    state, moments = read_state(folder), _moments(model, optimizer)
    for what, tensors in {"model": model.state_dict(), "optimizer": moments}.items():
        reader = HuggingFaceStorageReader(str(folder / what))
        try:
            stored = reader.read_metadata().state_dict_metadata
        except SafetensorError as error:
            raise ValueError(f"{folder / what}: expected safetensors files, got {error}") from error
        if more := stored.keys() - tensors.keys():
            raise ValueError(f"{folder / what}: got {min(more)}, which the model does not have")
        try:
            load_tensors(dict(tensors), storage_reader=reader)
        except CheckpointException as error:
            raise ValueError(f"{folder / what}: {_first(error)}") from error
    taken = float(sum(not row.get("skipped") for row in state.metrics))
    for name, parameter in model.named_parameters():
        count = torch.full((), taken, device=parameter.device, dtype=torch.float32)  # fused AdamW needs it there
        own = {key: moments[f"{moment}.{name}"] for moment, key in MOMENTS.items()}
        optimizer.state[parameter] = {"step": count, **own}


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of a tensor that is not finite on some rank, or None. Same on all ranks. Collective."""
    import torch

    from .mesh import all_gather, local

    own = {name: here for name, tensor in tensors.items() if (here := local(tensor)).numel()}
    largest = torch.stack([tensor.abs().max().float() for tensor in own.values()]).tolist() if own else []
    wrong = [name for name, value in zip(own, largest) if not math.isfinite(value)]
    return next((name for names in all_gather(wrong) for name in names), None)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments by name, zeros where it has none yet."""
    import torch

    return {
        f"{moment}.{name}": optimizer.state[p].get(key, torch.zeros_like(p.detach()))
        for name, p in model.named_parameters()
        for moment, key in MOMENTS.items()
    }


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's parts and wait until they are on disk. Collective. Raises OSError."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save_tensors(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise OSError(f"{folder}: {_first(error)}") from error


def _first(error: CheckpointException) -> str:
    return next((f"rank {rank}: {wrapped[0]}" for rank, wrapped in sorted(error.failures.items())), str(error))


def _files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
