"""From a command line to a job: a checked Config, and the checkpoints to start from.

Imports nothing heavy: a mistake is answered before torch is there.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from omegaconf import DictConfig

from .arguments import override_key
from .config import ConfigError, resolve, restore
from .process import count_gpus, under_torchrun
from .schema import Config, RecipeConfig
from .sizes import sizes_of
from .state import TOKENIZER, find, read_state
from .tokenizer import vocabulary_of

OF_TASKS = ("bench", "compare", "estimate", "verify")
"""Sections that the task of the same name reads, and no other."""


def prepare(raw: DictConfig, overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """The config to run, and the checkpoint folder of each run to start from.

    A resumed job takes from its checkpoint what `restore` says, except for ``overrides``. Raises ConfigError, or
    ValueError for a bad checkpoint.
    """
    given = {override_key(override) for override in overrides}
    for key in sorted(given):
        if (section := key.partition(".")[0]) in OF_TASKS and section != (task := raw.task.name):
            raise ConfigError(f"{key}: task={task} does not read it, task={section} does: add that, or leave it out")
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    _fit_bench(raw, given)
    if raw.model.pretrained is not None:
        _fit_model_to_checkpoint(raw, given)
    if raw.resume is None:
        _fit_vocabulary(raw, given)
        config = resolve(raw, ranks=ranks)
        checkpoints: dict[str, str] = {}
    else:
        config, checkpoints = _resume(raw, overrides, given, ranks)
    bench = config.bench
    if config.task.name == "bench" and bench.device == "cuda" and not count_gpus():
        cure = "; bench.device=cpu tries small shapes without one" if bench.cpu_shapes else ""
        raise ConfigError(f"bench={bench.name} needs a CUDA device, and there is none here{cure}")
    return config, checkpoints


def _fit_bench(raw: DictConfig, given: set[str]) -> None:
    """Models whose shapes the command line names are those that are measured. On a CPU a bench has shapes and a backend
    of its own, but for those that the command line names."""
    named = {kind: shapes for kind, shapes in raw.bench.shapes.items() if f"bench.shapes.{kind}" in given}
    if raw.bench.models is not None and "bench.models" not in given:
        if "bench.shapes" in given:
            raise ConfigError(
                f"bench.shapes: which are measured? bench.models=[...] names some of {'; '.join(raw.bench.shapes)}"
            )
        raw.bench.models = list(named) or raw.bench.models
    elif raw.bench.models is not None and (left := [kind for kind in named if kind not in raw.bench.models]):
        cure = f"add {left[0]} there, or leave this out"
        raise ConfigError(f"bench.shapes.{left[0]}: got bench.models without it: {cure}")
    if raw.bench.device != "cpu":
        return
    if raw.bench.backend is not None and "bench.backend" not in given:
        raw.bench.backend = "reference"
    if raw.bench.cpu_shapes and "bench.shapes" not in given:
        raw.bench.shapes = {**raw.bench.cpu_shapes, **named}


def _fit_model_to_checkpoint(raw: DictConfig, given: set[str]) -> None:
    """The section `model` has the sizes of the model that it starts from, but for the number of layers."""
    file = Path(raw.model.pretrained) / "config.json"
    if raw.resume is not None:
        raise ConfigError("model.pretrained: the checkpoint that resume names has the weights: leave it out")
    try:
        found = json.loads(file.read_text())
        whole = int(found["num_hidden_layers"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.pretrained: {file}: {reason}: wanted a folder of save_pretrained") from None
    if "model.layers" in given:
        layers = found["num_hidden_layers"] = raw.model.layers
        if layers > whole:
            raise ConfigError(f"model.layers: got {layers}, but {file} has {whole}")
        found |= {key: value[:layers] for key, value in found.items() if key.endswith("layer_types") and value}
    sizes = {"shared_experts": 0, "balance_rate": 0.0, **sizes_of(found)}
    for key in sizes:
        if f"model.{key}" not in given:
            raw.model[key] = sizes[key]
    raw.model.transformers = found


def _fit_vocabulary(raw: DictConfig, given: set[str]) -> None:
    """A new model of transformers has as many tokens as the data, unless the command line says how many."""
    data, model = raw.data, raw.model
    named = data.get("tokenizer") is not None or data.get("vocabulary") is not None
    if not named or model.transformers is None or model.pretrained is not None:
        return
    if not {"model.transformers", "model.transformers.vocab_size"} & given:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # which resolve() names
            model.transformers.vocab_size = vocabulary_of(data)


def _resume(raw: DictConfig, overrides: list[str], given: set[str], ranks: int | None) -> tuple[Config, dict[str, str]]:
    path = Path(raw.resume)
    if not path.exists():
        raise ConfigError(f"resume: no such file or folder: {path}")
    checkpoints = find(path)
    state = read_state(next(iter(checkpoints.values())))
    if named := sorted({"data.tokenizer", "data.vocabulary"} & given):
        raise ConfigError(f"{named[0]}: the checkpoint that resume names says what tokens are: leave it out")
    raw = restore(raw, state.config, overrides)
    kept = next(iter(checkpoints.values())) / TOKENIZER
    raw.data.tokenizer, raw.data.vocabulary = str(kept.resolve()) if kept.exists() else None, None
    if path in checkpoints.values():  # one run alone, no comparison
        raw.train.compare = False
        if state.run == "bf16" and not any(key.partition(".")[0] == "recipe" for key in given):
            raw.recipe = RecipeConfig("bf16")
    elif (wanted := dict(raw.recipe)) != (trained := state.config["recipe"]):
        changed = ", ".join(f"recipe.{key}={wanted[key]}" for key in wanted if wanted[key] != trained[key])
        step = checkpoints.get(trained["name"], next(reversed(checkpoints.values())))
        raise ConfigError(
            f"resume: {path} trained {trained['name']}, and {changed} is another recipe: leave it out, or go on from "
            f"the weights of one run with resume={step}"
        )
    return resolve(raw, ranks=ranks), {run: str(step.resolve()) for run, step in checkpoints.items()}
