"""Weights that a Trainer leaves as they are when it loads a checkpoint of its own.

    save_pretrained    mlp.experts.gate_up_proj (E, 2F, D)  ->  mlp.experts.0.gate_proj.weight and so on, one a tensor
    Trainer            load_state_dict(file, strict=False)  ->  finds no gate_up_proj, and trains the one that is there

So it is with `train(resume_from_checkpoint=)` and with `load_best_model_at_end` of transformers 5. What the files have
under other names than the model is read here as `from_pretrained` reads it, and copied into the model's own parameters.

A Trainer also gives whole tensors to a model of DTensors, which torch refuses. `take_parts` makes parts of them.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel, TrainerState
from transformers.core_model_loading import revert_weight_conversion

_WEIGHTS, _INDEX, _STATE = "model.safetensors", "model.safetensors.index.json", "trainer_state.json"


def resumed_folder(args: Any, state: Any) -> Path:
    """The checkpoint that a Trainer has resumed from, which it tells no callback: by its step, and its log.

    ValueError if it is neither in output_dir nor what args say.
    """
    inside = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    for folder in (args.resume_from_checkpoint, inside):
        if isinstance(folder, str | Path) and (file := Path(folder) / _STATE).is_file():
            saved = TrainerState.load_from_json(str(file))
            if saved.global_step == state.global_step and json.dumps(saved.log_history) == json.dumps(
                state.log_history
            ):
                return Path(folder)
    raise ValueError(
        f"resume_from_checkpoint: got a checkpoint of step {state.global_step} that is not {inside}, want its folder "
        "in TrainingArguments(resume_from_checkpoint=FOLDER), too: a Trainer does not load experts, MxepCallback does"
    )


def is_saved_under_other_names(model: nn.Module) -> bool:
    """Whether a Trainer, which loads what has the model's names, leaves weights of `save_pretrained` out."""
    if not isinstance(model, PreTrainedModel):  # of PEFT's it saves and loads adapters
        return False
    names = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in _tensors(model).items()
    }
    return set(revert_weight_conversion(model, names)) != set(names)


@torch.no_grad()
def restore(model: Any, folder: Path) -> list[str]:
    """Copy what the files of `save_pretrained` in `folder` have under other names into the model; returns its names.

    In place; of a DTensor each rank copies its part. If any name is another, a rank reads the whole model into its
    host's memory. Adapters alone, and checkpoints of FSDP and DeepSpeed, have the model's names: nothing is read.

    ValueError for a folder whose other weights are not the model's.
    """
    names = _saved_names(folder)
    own = _tensors(model)
    others = {name for name in own if name not in names} - set(getattr(model, "_tied_weights_keys", None) or ())
    if not names or not others:
        return []
    config = copy.deepcopy(model.config)
    config.distributed_config = None
    config._experts_implementation = "eager"
    dtype = torch.promote_types(*(own[name].dtype for name in (min(others), max(others))))
    read, told = type(model).from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    saved = read.state_dict()
    if missing := others.intersection(told["missing_keys"]):
        raise ValueError(f"{folder}: got no {min(missing)}, want all weights of {type(model).__name__}")
    for name, value in own.items():
        part = _part(saved[name], value).to(_local(value))
        if name in others:
            _local(value).copy_(part)
        elif dtype == value.dtype and not torch.equal(part, _local(value)):
            raise ValueError(
                f"{folder}: got another {name} than the Trainer loaded, want the checkpoint that it resumed: give its "
                "folder in TrainingArguments(resume_from_checkpoint=FOLDER), too"
            )
    return sorted(others)


def take_parts(model: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
    """A pre-hook of `load_state_dict`: of whole tensors each rank takes its part where the model has DTensors."""
    for name, own in _tensors(model).items():
        given = state_dict.get(name)
        if isinstance(own, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
            part = _part(given, own).to(own.to_local())
            how: dict[str, Any] = {"shape": own.shape, "stride": own.stride(), "run_check": False}
            state_dict[name] = DTensor.from_local(part, own.device_mesh, own.placements, **how)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _saved_names(folder: Path) -> set[str]:
    if (folder / _INDEX).is_file():
        return set(json.loads((folder / _INDEX).read_text())["weight_map"])
    if not (folder / _WEIGHTS).is_file():
        return set()
    with safe_open(folder / _WEIGHTS, framework="pt") as file:
        return set(file.keys())


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor what this rank has of a DTensor."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
