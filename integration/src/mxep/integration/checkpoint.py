"""Checkpoints: folders of safetensors and JSON. Reading one executes nothing.

    RUN_FOLDER/mxfp8/step-000200/model.safetensors       parameters and buffers
                                 optimizer.safetensors   AdamW's two moments, "first." and "second." + parameter name
                                 state.json              run, step, config, digests of the text and of all files
                                 metrics.jsonl           one line a step so far
                                 tokenizer.json          of a text that was read as tokens

Expert tensors are whole, (E, ...), whatever number of ranks wrote them; each rank that loads takes its own experts.
With parallel.fsdp `model` and `optimizer` are folders to which every rank writes its part (`shards.py`). Either kind
loads with or without parallel.fsdp.

Rank 0 writes into a hidden folder, waits until the disk has it, renames it, waits for that, too, and then deletes
older checkpoints. So the newest folder is complete whenever the power fails. A save that fails leaves nothing behind.
What is not finite is neither saved nor loaded, nor is a file loaded that is not what was saved.

E experts in all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import shards
from .collective import all_gather, from_all_ranks
from .mesh import Mesh, local, part
from .run_folder import DIGESTS, FORMAT, TOKENIZER, State, changed, digests_of, read_state, seal, step_folder, steps

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


def save(
    folder: Path,
    state: State,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    sharded: bool,
    tokenizer: str | None,
) -> None:
    """Write ``folder/step-N`` and drop older ones. Collective; only rank 0 writes, or, ``sharded``, all do.

    tokenizer: what tokenizer.json has; None: there is none.

    Raises FloatingPointError on every rank, and writes nothing, if a weight or a moment of any rank is not finite.
    """
    weights, moments = model.state_dict(), _moments(model, optimizer)
    if name := not_finite({**weights, **moments}):
        raise FloatingPointError(f"{state.run}, step {state.step}: {name} is not finite: not saved")
    target = step_folder(folder, state.step)
    partial, replaced = folder / f".{target.name}.partial", folder / f".{target.name}.replaced"
    if mesh.rank == 0:
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        digests: dict[str, str] = {}
        if sharded:
            all_gather(None)  # the folder is empty
            shards.save(partial / "model", weights)
            shards.save(partial / "optimizer", moments)
            for found in from_all_ranks(lambda: digests_of(partial, _files(partial)[mesh.rank :: mesh.ranks])):
                digests |= found
        elif mesh.rank < dist.get_world_size(mesh.ep):  # the ranks that share experts with rank 0
            weights, moments = _whole(weights), _whole(moments)
        if mesh.rank != 0:
            return
        if not sharded:
            _save_file(weights, partial / "model.safetensors")
            _save_file(moments, partial / "optimizer.safetensors")
        if tokenizer is not None:
            (partial / TOKENIZER).write_text(tokenizer)
        (partial / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in state.metrics))
        digests |= digests_of(partial, set(_files(partial)) - set(digests))
        about = {"format": FORMAT, **dataclasses.asdict(state), DIGESTS: digests}
        del about["metrics"]
        (partial / "state.json").write_text(json.dumps(seal(about), indent=1))
        for written in (*sorted(partial.iterdir()), partial):
            _sync(written)
        if target.exists():
            os.rename(target, replaced)
        os.rename(partial, target)
    except Exception:  # a full disk, for one
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    for parent in (folder, folder.parent):
        _sync(parent)
    for old in (replaced, *steps(folder)):
        if old != target:
            shutil.rmtree(old, ignore_errors=old == replaced)


def load(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model and optimizer in place from ``folder/step-N``. Each rank takes its part, at any ep degree. Collective.

    Raises ValueError naming the file that is not what was saved; or the tensor, got and wanted, where it does not fit
    the model, or has a number that is not finite.
    """
    state, moments = read_state(folder), _moments(model, optimizer)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if reason := next(filter(None, all_gather(changed(folder, _files(folder, "*.safetensors")[rank::ranks]))), None):
        raise ValueError(reason)
    for what, tensors in {"model": model.state_dict(), "optimizer": moments}.items():
        if (folder / what).is_dir():
            shards.load(folder / what, tensors, ranks=state.config["parallel"]["ranks"])
            if name := not_finite(tensors):
                raise ValueError(f"{folder / what}: {name} is not finite, wanted finite numbers")
        else:
            _fill(folder / f"{what}.safetensors", tensors)
    taken = float(sum(not row.get("skipped") for row in state.metrics))
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.full(
                (), taken, device=parameter.device, dtype=torch.float32
            ),  # where the fused AdamW wants it
            **{key: moments[f"{moment}.{name}"] for moment, key in MOMENTS.items()},
        }


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of a tensor that is not finite on some rank, the same on all. Collective."""
    own = {name: here for name, tensor in tensors.items() if (here := local(tensor)).numel()}
    largest = torch.stack([tensor.abs().max().float() for tensor in own.values()])
    wrong = [name for name, value in zip(own, largest.tolist()) if not math.isfinite(value)]
    return next((name for names in all_gather(wrong) for name in names), None)


def _files(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob(pattern) if file.is_file())


def _save_file(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error


def _sync(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
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
                if own.numel():
                    values = source[part(tensor)]
                    if not values.isfinite().all():
                        raise ValueError(f"{file}: {name} is not finite, wanted finite numbers")
                    own.copy_(values)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: {error}") from None
