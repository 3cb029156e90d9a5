"""Checkpoints: torch's distributed checkpoints in safetensors, and JSON. Reading one executes no code.

    RUN_FOLDER/mxfp8/step-000200/model/shard-00001-...       parameters and buffers, a file per rank that has a part
                                 optimizer/shard-00001-...   AdamW's moments, "first." and "second." + parameter name
                                 state.json                  run, step, config, digests of the text and of all files
                                 metrics.jsonl               one line a step so far
                                 tokenizer.json              of a text that was read as tokens

Every rank writes its part; one rank writes tensors that several hold alike. Any number of ranks loads it, at any
expert-parallel degree, with or without parallel.fsdp.

The ranks write into a hidden folder. Rank 0 waits until the disk has it, renames it, waits for that, too, and then
deletes older checkpoints. So the newest folder is complete whenever the power fails. A save that fails leaves nothing
behind. Tensors that are not finite are neither saved nor loaded. Changed files are not loaded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from .collective import all_gather, from_all_ranks
from .mesh import Mesh, local
from .run_folder import DIGESTS, FORMAT, TOKENIZER, State, changed, digests_of, read_state, seal, step_folder, steps

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}
Tensors = dict[str, Tensor]


def save(
    folder: Path,
    state: State,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    tokenizer: str | None,
) -> None:
    """Write ``folder/step-N``, which all nodes must see, and delete older ones. Collective.

    tokenizer: what tokenizer.json has; None: there is none.

    Raises FloatingPointError on every rank, and writes nothing, if a weight or a moment of any rank is not finite.
    """
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
        digests: dict[str, str] = {}
        for found in from_all_ranks(lambda: digests_of(partial, _files(partial)[mesh.rank :: mesh.ranks])):
            digests |= found
        if mesh.rank != 0:
            return
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
    """Fill model and optimizer in place from ``folder/step-N``; each rank takes its part. Collective.

    Raises ValueError for a changed or missing file, naming it, and for a tensor that does not fit the model or is not
    finite, with got and wanted.
    """
    state, moments = read_state(folder), _moments(model, optimizer)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if reason := next(filter(None, all_gather(changed(folder, _files(folder, "*.safetensors")[rank::ranks]))), None):
        raise ValueError(reason)
    for what, tensors in {"model": model.state_dict(), "optimizer": moments}.items():
        if reason := _difference(folder / what, tensors, state.config["parallel"]["ranks"]):
            raise ValueError(reason)
        try:
            state_dict_loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder / what)))
        except CheckpointException as error:
            raise ValueError(f"{folder / what}: {_first(error)}") from error
        if name := not_finite(tensors):
            raise ValueError(f"{folder / what}: {name} is not finite, wanted finite numbers")
    taken = float(sum(not row.get("skipped") for row in state.metrics))
    for name, parameter in model.named_parameters():
        count = torch.full((), taken, device=parameter.device, dtype=torch.float32)  # where the fused AdamW wants it
        own = {key: moments[f"{moment}.{name}"] for moment, key in MOMENTS.items()}
        optimizer.state[parameter] = {"step": count, **own}


def not_finite(tensors: Tensors) -> str | None:
    """The name of a tensor that is not finite on some rank, the same on all. Collective."""
    own = {name: here for name, tensor in tensors.items() if (here := local(tensor)).numel()}
    largest = torch.stack([tensor.abs().max().float() for tensor in own.values()])
    wrong = [name for name, value in zip(own, largest.tolist()) if not math.isfinite(value)]
    return next((name for names in all_gather(wrong) for name in names), None)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """AdamW's moments by name, zeros where it has none yet."""
    return {
        f"{moment}.{name}": optimizer.state[p].get(key, torch.zeros_like(p.detach()))
        for name, p in model.named_parameters()
        for moment, key in MOMENTS.items()
    }


def _write(folder: Path, tensors: Tensors) -> None:
    """Write this rank's parts, and wait until the disk has them. Collective. OSError where not all are here then."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise OSError(f"{folder}: {_first(error)}") from error
    reason = from_all_ranks(lambda: "" if dist.get_rank() else _difference(folder, tensors, dist.get_world_size()))[0]
    if reason:
        raise OSError(f"not saved: {reason}: wanted a run folder that all nodes see")


def _difference(folder: Path, tensors: Tensors, ranks: int) -> str:
    """Name a tensor that the folder does not hold completely, or "". tensors: this rank may have parts of them.
    ranks: how many wrote the folder."""
    try:
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        return f"{folder}: {error}"
    why = _unlike(stored, tensors)
    # All may be there without a file of each rank: one that has no part of anything writes none.
    names = (f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, ranks + 1))
    if why and (missing := ", ".join(name for name in names if not (folder / name).is_file())):
        return f"{folder}: no {missing}: wanted the files of all {ranks} ranks that saved ({why})"
    return why and f"{folder}: {why}"


def _unlike(stored: dict[str, Any], tensors: Tensors) -> str:
    if missing := set(tensors) ^ set(stored):
        return f"{sorted(missing)[0]} is only in the file or only in the model"
    for name, tensor in tensors.items():
        if (got := tuple(stored[name].size)) != (wanted := tuple(tensor.shape)):
            return f"{name} is {got}, wanted {wanted}"
        if (found := sum(math.prod(chunk.sizes) for chunk in stored[name].chunks)) != (count := tensor.numel()):
            return f"{name} has {found} numbers, wanted {count}"
    return ""


def _first(error: CheckpointException) -> str:
    return next((f"rank {rank}: {wrapped[0]}" for rank, wrapped in sorted(error.failures.items())), str(error))


def _files(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob(pattern) if file.is_file())


def _sync(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
