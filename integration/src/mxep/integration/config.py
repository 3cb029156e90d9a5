"""From what Hydra composed to a checked Config: what depends on the machine is filled in, what does not fit is named.

    configs/config.yaml + groups (model=..., recipe=..., ...) + command line
        -> hydra checks keys and types against schema.py
        -> `resolve` -> Config, plain data, goes to the ranks

Names (recipe, dispatcher, data source, task) pick from tables in code, so no config can make anything that mxep does
not name.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from mxep.comms import Capacity
from mxep.ep import CASES, DISPATCHERS
from mxep.gemm import BACKENDS, Recipe
from mxep.quant import ScaleMode

from .bench import BENCHES
from .data import SOURCES
from .schema import Config
from .verify_linear import LINEAR_CASES

RESTORED = ("model", "data", "recipe", "optimizer", "train", "seed")
"""What `resume` takes from a checkpoint: names, numbers, and one path that is read, `data.path`. The command line says
everything else, above all what is written and where."""

CHOICES = {
    "backend": ("auto", *BACKENDS),
    "bench.name": BENCHES,
    "data.source": SOURCES,
    "dispatcher.name": DISPATCHERS,
    "dispatcher.capacity": ("worst_case", "exact", "factor"),
    "dispatcher.overflow": ("raise", "drop"),
    "parallel.device": ("auto", "cpu", "cuda"),
    "recipe.mode": tuple(ScaleMode),
    "recipe.weight_block": ("1x32", "32x32"),
    "recipe.wgrad": ("mx", "bf16"),
}
"""Key -> the values it may have, besides null where the schema allows that."""

POSITIVE = (
    *("parallel.ranks", "parallel.ep", "dispatcher.timeout", "optimizer.lr", "optimizer.clip"),
    *("model.dim", "model.layers", "model.heads", "model.experts", "model.hidden_dim"),
    *("data.max_bytes", "data.batch", "data.length", "train.steps", "train.valid_batches"),
    *("verify.tokens", "verify.dim", "verify.hidden_dim", "verify.experts", "verify.top_k"),
)
NOT_NEGATIVE = ("train.skip_bad_steps", "train.checkpoint_every", "optimizer.warmup")

DIVIDES = (
    ("parallel.ep", "parallel.ranks"),
    ("parallel.ranks", "data.batch"),
    ("parallel.ep", "model.experts"),
)
"""(divisor, multiple)."""

MX_ONLY = ("triton", "blackwell")
"""Backends that multiply MX operands alone."""


class ConfigError(ValueError):
    """The config asks for something that does not exist or does not fit; the message says what, for the user."""


def resolve(raw: DictConfig, *, ranks: int | None = None) -> Config:
    """What Hydra composed -> a checked Config. `ranks`: how many there are already, under torchrun.

    Raises ConfigError with one line for the user.
    """
    if missing := OmegaConf.missing_keys(raw):
        raise ConfigError(f"no value for {', '.join(sorted(missing))}: give it as {min(missing)}=...")
    try:  # `+key=value` adds keys that Hydra refuses without the +
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(raw))
    except ConfigKeyError as error:
        raise ConfigError(f"no such key: {error.full_key}") from None
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    if config.recipe.mode is not None:
        config.recipe.mode = config.recipe.mode.lower()
    for key, choices in CHOICES.items():
        if (value := attrgetter(key)(config)) is not None and value not in choices:
            raise ConfigError(f"{key}: got {value!r}, wanted one of {', '.join(choices)}")
    _fill_parallel(config, ranks)
    try:
        complaint = next(_complaints(config), None)
    except ValueError as error:  # of a Recipe or a Capacity
        complaint = str(error)
    if complaint is not None:
        raise ConfigError(complaint)
    return config


def restore(raw: DictConfig, saved: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
    """`raw` with the RESTORED sections of a saved config, except for the keys that `overrides` names.

    The saved config is data of unknown origin: plain values of known keys are taken, and none is interpolated. Raises
    ConfigError for others.
    """
    config = copy.deepcopy(raw)
    given = {override_key(override) for override in overrides}
    try:
        for section in RESTORED:
            nested = {"": saved[section]} if section == "seed" else {f".{key}": v for key, v in saved[section].items()}
            for suffix, value in nested.items():
                key = section + suffix
                if isinstance(value, str) and ("${" in value or value == "???"):
                    raise ValueError(f"{key}: got {value!r}, wanted plain text")
                if not isinstance(value, str | int | float | None):
                    raise ValueError(f"{key}: got {value!r}, wanted text or a number")
                if not given & {section, key}:
                    OmegaConf.update(config, key, value)
    except (ValueError, KeyError, AttributeError, OmegaConfBaseException) as error:
        raise ConfigError(f"the checkpoint's config does not fit: {str(error).splitlines()[0]}") from None
    return config


def override_key(override: str) -> str:
    """The key or group that an argument of the command line sets."""
    return override.lstrip("+~").split("=")[0].split("@")[0]


def to_json(config: Config) -> dict[str, Any]:
    """A Config as plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def make_recipe(config: Config) -> Recipe:
    """The recipe that the config names, with its changes. Raises ValueError if there is none."""
    changes = {key: value for key, value in dataclasses.asdict(config.recipe).items() if value is not None}
    recipe = Recipe.named(changes.pop("name"))
    changes.pop("linear", None)
    if "mode" in changes:
        changes["mode"] = ScaleMode(changes["mode"])
    return dataclasses.replace(recipe, **changes)


def linear_recipe(config: Config, recipe: Recipe) -> Recipe | None:
    """The recipe of linears beside experts of `recipe`: None where they stay torch's, as they do in a bf16 baseline."""
    name = config.recipe.linear
    return Recipe.named(name) if name is not None and recipe == make_recipe(config) else None


def recipes(config: Config) -> list[Recipe]:
    """What task=train trains: bf16 first with train.compare, then the config's recipe."""
    recipe = make_recipe(config)
    return [Recipe.bf16(), recipe] if config.train.compare and recipe.scaling != "none" else [recipe]


def make_capacity(config: Config) -> Capacity:
    """The bound on a rank's rows."""
    if config.dispatcher.capacity == "factor":
        return Capacity.factor(config.dispatcher.factor, config.dispatcher.overflow)
    return Capacity.exact() if config.dispatcher.capacity == "exact" else Capacity.worst_case()


def sizes_on_host(config: Config) -> bool:
    """Whether a layer waits for the host to read how many rows there are."""
    loops = config.backend == "reference"
    return config.dispatcher.name == "all_to_all" or config.dispatcher.capacity == "exact" or loops


def _fill_parallel(config: Config, ranks: int | None) -> None:
    parallel = config.parallel
    if ranks is not None:
        parallel.ranks = ranks
    elif parallel.ranks is None:
        gpus = torch.cuda.device_count() if parallel.device != "cpu" and torch.cuda.is_available() else 0
        parallel.ranks = gpus or 2
    if parallel.ep is None:
        parallel.ep = 1 if config.dispatcher.name == "local" else parallel.ranks


def _complaints(config: Config) -> Iterator[str]:
    """What does not fit; everything that a rank would trip over is caught here."""

    def value(key: str) -> Any:
        return attrgetter(key)(config)

    model, path, recipe, capacity = config.model, config.data.path, make_recipe(config), make_capacity(config)
    for key in POSITIVE:
        if not value(key) > 0:
            yield f"{key} must be positive, got {value(key)}"
    for key in NOT_NEGATIVE:
        if value(key) is not None and value(key) < 0:
            yield f"{key} must be at least 0, got {value(key)}"
    for divisor, multiple in DIVIDES:
        if value(multiple) % value(divisor):
            yield f"{multiple} must be a multiple of {value(divisor)} ({divisor}), got {value(multiple)}"
    if model.dim % (2 * model.heads):
        yield f"model.dim must be a multiple of {2 * model.heads} (twice model.heads), got {model.dim}"
    if not 1 <= model.top_k <= model.experts:
        yield f"model.top_k must lie in 1..{model.experts} (model.experts), got {model.top_k}"
    if recipe.scaling == "mx" and (model.dim % 32 or model.hidden_dim % 32):
        sizes = f"{model.dim} and {model.hidden_dim}"
        yield f"recipe {recipe.name} wants model.dim and model.hidden_dim in 32s, got {sizes}"
    linear = linear_recipe(config, recipe)
    if linear is not None and model.dim % linear.group_alignment:
        yield f"recipe.linear={linear.name} wants model.dim in {linear.group_alignment}s, got {model.dim}"
    if config.dispatcher.overflow == "drop" and config.dispatcher.capacity != "factor":
        yield f"dispatcher.overflow=drop: nothing overflows {capacity.kind}; wanted dispatcher.capacity=factor"
    if config.dispatcher.name == "local" and config.ep != 1:
        yield f"the local dispatcher keeps all experts on each rank: parallel.ep must be 1, got {config.ep}"
    if config.dispatcher.name == "nvshmem" and config.ep != config.ranks:
        yield f"the nvshmem dispatcher takes all ranks: parallel.ep must be {config.ranks}, got {config.ep}"
    if config.train.graph and sizes_on_host(config):
        yield "train.graph=true: the host must read no sizes, but with all_to_all, exact capacity or reference it does"
    if config.data.source == "text" and path is None:
        yield "data.source=text wants data.path, a file or a folder"
    if path is not None and not Path(path).exists():
        yield f"data.path: no such file or folder: {path}"
    for case in config.verify.cases or ():
        if case not in (*CASES, *LINEAR_CASES):
            yield f"verify.cases: got {case!r}, wanted one of {', '.join((*CASES, *LINEAR_CASES))}"
    for key in ("bench.out", "compare.out", "verify.out"):
        if value(key) is not None and not Path(value(key)).absolute().parent.is_dir():
            yield f"{key}: no such folder: {Path(value(key)).parent}"
    if config.task.name == "compare":
        seeds = config.compare.seeds
        if recipe.scaling == "none":
            yield "task=compare compares a recipe with bf16: recipe must be another one"
        if len(set(seeds)) < max(2, len(seeds)):
            yield f"compare.seeds: got {seeds}, wanted two or more that differ: noise is what lies between them"
        if config.resume is not None:
            yield "task=compare starts anew: resume must be null"
    names = [one.name for one in _multiplied(config) if one.scaling != "mx"]
    if config.backend in MX_ONLY and names:
        wanted = "train.compare=false" if config.task.name == "train" and recipe.scaling == "mx" else "another backend"
        yield f"backend={config.backend} multiplies MX operands alone, and {names[0]} has none; wanted {wanted}"


def _multiplied(config: Config) -> list[Recipe]:
    """The recipes whose products `backend` computes in this task."""
    if config.task.name == "verify":
        named = {name: case.recipe for name, case in CASES.items()} | LINEAR_CASES
        return [Recipe.named(named[name]) for name in config.verify.cases or named]
    linear = linear_recipe(config, make_recipe(config))
    linears = [] if linear is None else [linear]
    if config.task.name == "compare":
        return [Recipe.bf16(), make_recipe(config), *linears]
    return [*recipes(config), *linears] if config.task.name == "train" else []
