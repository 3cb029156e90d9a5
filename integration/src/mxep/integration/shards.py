"""Tensors in a folder of safetensors to which every rank writes its own part: torch's distributed checkpoint.

    model/shard-00001-model-00001-of-00001.safetensors    rank 0's parts; where they lie in the whole is in the header
          shard-00002-...                                 rank 1's

What several ranks hold alike one of them writes. Any number of ranks loads it, sharded in any way or not at all. Unlike
torch's own files these have no pickle: reading one executes nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from .collective import from_all_ranks


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's parts, and wait until the disk has them. Collective over the default group.

    Raises OSError, also where parts are not here then: the folder must be one that all nodes see.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise OSError(f"{folder}: {_first(error)}") from error

    reason = from_all_ranks(lambda: "" if dist.get_rank() else complaint(folder, tensors, dist.get_world_size()))[0]
    if reason:
        raise OSError(f"not saved: {reason}: wanted a run folder that all nodes see")


def load(folder: Path, tensors: dict[str, Tensor], *, ranks: int) -> None:
    """Fill this rank's parts of ``tensors`` in place. Collective over the default group. ranks: how many wrote.

    Raises ValueError, on all ranks, naming the files that are missing or the first tensor that does not fit.
    """
    if reason := complaint(folder, tensors, ranks):
        raise ValueError(reason)
    try:
        state_dict_loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise ValueError(f"{folder}: {_first(error)}") from error


def complaint(folder: Path, tensors: dict[str, Tensor], ranks: int) -> str:
    """What of ``tensors``, of which this rank may have parts, is not there as a whole; "" if all is."""
    why = _difference(folder, tensors)
    # All may be there without a file of each rank: one that has no part of anything writes none.
    names = (f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, ranks + 1))
    if why and (missing := ", ".join(name for name in names if not (folder / name).is_file())):
        why = why.removeprefix(f"{folder}: ")
        return f"{folder}: no {missing}: wanted the files of all {ranks} ranks that saved ({why})"
    return why


def _difference(folder: Path, tensors: dict[str, Tensor]) -> str:
    try:
        stored: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        return f"{folder}: {error}"
    if missing := set(tensors) ^ set(stored):
        return f"{folder}: {sorted(missing)[0]} is only in the file or only in the model"
    for name, tensor in tensors.items():
        if (got := tuple(stored[name].size)) != (wanted := tuple(tensor.shape)):
            return f"{folder}: {name} is {got}, wanted {wanted}"
        if (found := sum(math.prod(chunk.sizes) for chunk in stored[name].chunks)) != (count := tensor.numel()):
            return f"{folder}: {name} has {found} numbers, wanted {count}"
    return ""


def _first(error: CheckpointException) -> str:
    return next((f"rank {rank}: {wrapped[0]}" for rank, wrapped in sorted(error.failures.items())), str(error))
