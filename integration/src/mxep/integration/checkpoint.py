"""Checkpoints: folders of safetensors and JSON. Reading one executes nothing.

    RUN_FOLDER/mxfp8/step-000200/model.safetensors       parameters and buffers
                                 optimizer.safetensors   AdamW's two moments, "first." and "second." + parameter name
                                 state.json              run, step, config, digest of the text
                                 metrics.jsonl           one line a step so far

Expert tensors are whole, (E, ...), whatever number of ranks wrote them; each rank that loads takes its own experts.
Rank 0 writes into a hidden folder, waits until the disk has it, renames it, waits for that, too, and then deletes
older checkpoints. So the newest folder is complete whenever the power fails. What is not finite is not saved.

E experts in all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from .collective import all_gather
from .mesh import Mesh, local
from .model import Transformer

FORMAT = 1
MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


@dataclass(frozen=True)
class State:
    """What a checkpoint has besides its tensors.

    run: the recipe's name. step: steps done. config: the whole config, plain JSON values. digest: of the text.
    metrics: one dict a step done.
    """

    run: str
    step: int
    config: dict[str, Any]
    digest: str
    metrics: list[dict[str, Any]]


def save(folder: Path, state: State, *, model: Transformer, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Write ``folder/step-N`` and drop older ones. Collective; only rank 0 writes.

    Raises FloatingPointError on every rank, and writes nothing, if a weight or a moment of any rank is not finite.
    """
    weights, moments = model.state_dict(), _moments(model, optimizer)
    _refuse_unless_finite({**weights, **moments}, state)
    if mesh.rank < dist.get_world_size(mesh.ep):  # the ranks that share experts with rank 0
        weights, moments = _whole(weights), _whole(moments)
    if mesh.rank != 0:
        return
    about = {"format": FORMAT, **dataclasses.asdict(state)}
    metrics = "".join(json.dumps(row) + "\n" for row in about.pop("metrics"))
    target = step_folder(folder, state.step)
    partial, replaced = folder / f".{target.name}.partial", folder / f".{target.name}.replaced"
    for left in (partial, replaced):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(weights, partial / "model.safetensors")
    save_file(moments, partial / "optimizer.safetensors")
    (partial / "metrics.jsonl").write_text(metrics)
    (partial / "state.json").write_text(json.dumps(about, indent=1))
    for written in (*sorted(partial.iterdir()), partial):
        _sync(written)
    if target.exists():
        os.rename(target, replaced)
    os.rename(partial, target)
    for parent in (folder, folder.parent):
        _sync(parent)
    for old in (replaced, *_steps(folder)):
        if old != target:
            shutil.rmtree(old, ignore_errors=old == replaced)


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of ``step`` in a run's ``folder``."""
    return folder / f"step-{step:06d}"


def load(folder: Path, *, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer in place from ``folder/step-N``. Each rank takes its experts, at any ep degree.

    Raises ValueError naming the tensor, got and wanted, where a file does not fit the model.
    """
    moments = _moments(model, optimizer)
    _fill(folder / "model.safetensors", model.state_dict())
    _fill(folder / "optimizer.safetensors", moments)
    # AdamW counts the steps that were taken.
    step = torch.tensor(float(sum(not row.get("skipped") for row in read_state(folder).metrics)))
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": step.clone(),
            **{key: moments[f"{moment}.{name}"] for moment, key in MOMENTS.items()},
        }


def find(path: Path) -> dict[str, Path]:
    """The newest checkpoint of each run, by name: of a run folder, or the one checkpoint that ``path`` itself is.

    Raises ValueError where there is none.
    """
    if (path / "state.json").is_file():
        return {read_state(path).run: path}
    found = {folder.name: steps[-1] for folder in sorted(path.glob("*/")) if (steps := _steps(folder))}
    if not found:
        raise ValueError(f"no checkpoint in {path}: wanted a run folder or a step-N folder of one")
    return found


def read_state(folder: Path) -> State:
    """What ``folder/step-N`` is. Raises ValueError where that cannot be read."""
    try:
        about = json.loads((folder / "state.json").read_text())
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if (found := about.pop("format")) != FORMAT:
            raise ValueError(f"format: got {found}, wanted {FORMAT}")
        for key, kind in {"run": str, "step": int, "config": dict, "digest": str}.items():
            if not isinstance(about[key], kind):
                raise ValueError(f"{key}: got {about[key]!r}, wanted {kind.__name__}")
        return State(**about, metrics=metrics)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a checkpoint: {type(error).__name__}: {error}") from None


def _steps(folder: Path) -> list[Path]:
    found = (step for step in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", step.name))
    return sorted(found, key=lambda step: int(step.name.removeprefix("step-")))


def _sync(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_unless_finite(tensors: dict[str, Tensor], state: State) -> None:
    largest = torch.stack([local(tensor).abs().max() for tensor in tensors.values()]).float()
    wrong = [name for name, value in zip(tensors, largest.tolist()) if not math.isfinite(value)]
    if name := next((name for names in all_gather(wrong) for name in names), None):
        raise FloatingPointError(f"{state.run}, step {state.step}: {name} is not finite: not saved")


def _moments(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments by name, zeros where it has none yet."""
    return {
        f"{moment}.{name}": optimizer.state[p].get(key, torch.zeros_like(p.detach()))
        for name, p in model.named_parameters()
        for moment, key in MOMENTS.items()
    }


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everything on the CPU, all experts of the ep group in one tensor. Collective over that group."""
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in whole.items()}


def _fill(file: Path, tensors: dict[str, Tensor]) -> None:
    """Copy this rank's share of the stored tensors."""
    try:
        with safe_open(file, framework="pt") as stored:
            if missing := set(tensors) ^ set(stored.keys()):
                raise ValueError(f"{file}: {sorted(missing)[0]} is only in the file or only in the model")
            for name, tensor in tensors.items():
                source, own = stored.get_slice(name), local(tensor)
                if (got := tuple(source.get_shape())) != (wanted := tuple(tensor.shape)):
                    raise ValueError(f"{file}: {name} is {got}, wanted {wanted}")
                first = tensor.device_mesh.get_local_rank() * len(own) if isinstance(tensor, DTensor) else 0
                own.copy_(source[first : first + len(own)])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: {error}") from None
