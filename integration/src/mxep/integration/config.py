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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mxep.comms import Capacity
from mxep.ep import CASES, DISPATCHERS
from mxep.gemm import BACKENDS, Recipe
from mxep.quant import ScaleMode

from .bench import BENCHES
from .data import SOURCES
from .schema import Config


class ConfigError(ValueError):
    """The config asks for something that does not exist or does not fit; the message says what, for the user."""


def resolve(raw: DictConfig, *, ranks: int | None = None) -> Config:
    """What Hydra composed -> a checked Config. `ranks`: how many there are already, under torchrun.

    Raises ConfigError with one line for the user.
    """
    if missing := OmegaConf.missing_keys(raw):
        raise ConfigError(f"no value for {', '.join(sorted(missing))}: give it as {min(missing)}=...")
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    _known_keys(raw, config)
    _fill_parallel(config, ranks)
    _check(config)
    return config


RESTORED = ("model", "data", "recipe", "optimizer", "train", "seed")
"""What a checkpoint knows of its run: sections of names and numbers. All else, what is written and where it runs above
all, is said anew. `data.path`, which is read, is the one path."""


def restore(raw: DictConfig, saved: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
    """`raw` with the RESTORED sections of a saved config, but for the keys that `overrides` names: what `resume=...`
    runs on.

    The saved config is data of unknown origin: plain values of known keys are taken, and none is interpolated. Raises
    ConfigError for others.
    """
    config = copy.deepcopy(raw)
    given = {override_key(override) for override in overrides}
    try:
        for section in RESTORED:
            value = saved[section]
            values = (
                {f"{section}.{key}": each for key, each in value.items()} if section != "seed" else {section: value}
            )
            for key, each in values.items():
                if isinstance(each, str) and ("${" in each or each == "???"):
                    raise ValueError(f"{key}: got {each!r}, wanted plain text")
                if not isinstance(each, str | int | float | None):
                    raise ValueError(f"{key}: got {each!r}, wanted text or a number")
                if not given & {section, key}:
                    OmegaConf.update(config, key, each)
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
    """The recipe that the config names, with the changes that it asks for. Raises ValueError for one that is none."""
    changes: dict[str, Any] = {}
    if config.recipe.mode is not None:
        changes["mode"] = ScaleMode[_one_of("recipe.mode", config.recipe.mode.upper(), ScaleMode.__members__)]
    if config.recipe.weight_block is not None:
        changes["weight_block"] = _one_of("recipe.weight_block", config.recipe.weight_block, ("1x32", "32x32"))
    if config.recipe.wgrad is not None:
        changes["wgrad"] = _one_of("recipe.wgrad", config.recipe.wgrad, ("mx", "bf16"))
    return dataclasses.replace(Recipe.named(config.recipe.name), **changes)


def make_capacity(config: Config) -> Capacity:
    """The bound on a rank's rows that the config asks for."""
    kind = _one_of("dispatcher.capacity", config.dispatcher.capacity, ("worst_case", "exact", "factor"))
    overflow = _one_of("dispatcher.overflow", config.dispatcher.overflow, ("raise", "drop"))
    if kind == "factor":
        return Capacity.factor(config.dispatcher.factor, overflow)
    if overflow == "drop":
        raise ConfigError(f"dispatcher.overflow=drop: nothing overflows {kind}; wanted dispatcher.capacity=factor")
    return getattr(Capacity, kind)()  # type: ignore[no-any-return]


def sizes_on_host(config: Config) -> bool:
    """Whether a layer waits for the host to read how many rows there are."""
    loops = config.backend == "reference"
    return config.dispatcher.name == "all_to_all" or make_capacity(config) == Capacity.exact() or loops


def _known_keys(raw: DictConfig, typed: Any, prefix: str = "") -> None:
    """Raise ConfigError for keys that the types do not have: `+key=value` adds what Hydra refuses without the +."""
    fields = {field.name for field in dataclasses.fields(typed)}
    for key in map(str, raw):
        if key not in fields:
            raise ConfigError(f"no such key: {prefix}{key}")
        if dataclasses.is_dataclass(inner := getattr(typed, key)):
            _known_keys(raw[key], inner, f"{prefix}{key}.")


def _fill_parallel(config: Config, ranks: int | None) -> None:
    parallel = config.parallel
    _one_of("parallel.device", parallel.device, ("auto", "cpu", "cuda"))
    if ranks is not None:
        parallel.ranks = ranks
    elif parallel.ranks is None:
        gpus = torch.cuda.device_count() if parallel.device != "cpu" and torch.cuda.is_available() else 0
        parallel.ranks = gpus or 2
    if parallel.ep is None:
        parallel.ep = 1 if config.dispatcher.name == "local" else parallel.ranks


def _check(config: Config) -> None:
    """Raise ConfigError for the first value that does not fit; everything a rank would trip over is caught here."""
    try:
        recipe = make_recipe(config)
        make_capacity(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _one_of("dispatcher.name", config.dispatcher.name, DISPATCHERS)
    _one_of("data.source", config.data.source, SOURCES)
    _one_of("backend", config.backend, ("auto", *BACKENDS))
    _positive(config)
    for name in config.verify.cases or ():
        _one_of("verify.cases", name, CASES)
    _one_of("bench.name", config.bench.name, BENCHES)
    for section in ("bench", "compare", "verify"):
        out = getattr(config, section).out
        if out is not None and not Path(out).absolute().parent.is_dir():
            raise ConfigError(f"{section}.out: no such folder: {Path(out).parent}")
    if config.train.skip_bad_steps < 0:
        raise ConfigError(f"train.skip_bad_steps must be at least 0, got {config.train.skip_bad_steps}")
    ranks, ep, model, data = config.ranks, config.ep, config.model, config.data
    _divides("parallel.ep", ep, "parallel.ranks", ranks)
    _divides("parallel.ranks", ranks, "data.batch", data.batch)
    if config.dispatcher.name == "local" and ep != 1:
        raise ConfigError(f"the local dispatcher keeps all experts on each rank: parallel.ep must be 1, got {ep}")
    if config.dispatcher.name == "nvshmem" and ep != ranks:
        raise ConfigError(f"the nvshmem dispatcher takes all ranks: parallel.ep must be {ranks}, got {ep}")
    if config.train.graph and sizes_on_host(config):
        raise ConfigError(
            "train.graph=true: the host must read no sizes, as all_to_all, exact capacity and backend=reference make it"
        )
    _divides("parallel.ep", ep, "model.experts", model.experts)
    _divides("model.heads", 2 * model.heads, "model.dim", model.dim)
    if not 1 <= model.top_k <= model.experts:
        raise ConfigError(f"model.top_k must lie in 1..{model.experts} (model.experts), got {model.top_k}")
    if recipe.scaling == "mx" and (model.dim % 32 or model.hidden_dim % 32):
        got = f"{model.dim} and {model.hidden_dim}"
        raise ConfigError(f"recipe {recipe.name} wants model.dim and model.hidden_dim in 32s, got {got}")
    if data.path is not None and not Path(data.path).exists():
        raise ConfigError(f"data.path: no such file or folder: {data.path}")


def _positive(config: Config) -> None:
    wanted = {
        "parallel": ("ranks", "ep"),
        "model": ("dim", "layers", "heads", "experts", "hidden_dim"),
        "data": ("max_bytes", "batch", "length"),
        "train": ("steps", "valid_batches"),
        "verify": ("tokens", "dim", "hidden_dim", "experts", "top_k"),
        "optimizer": ("lr", "clip"),
        "dispatcher": ("timeout",),
    }
    for section, keys in wanted.items():
        for key in keys:
            value = getattr(getattr(config, section), key)
            if not value > 0:
                raise ConfigError(f"{section}.{key} must be positive, got {value}")


def _divides(name: str, value: int, of_name: str, of: int) -> None:
    if of % value:
        raise ConfigError(f"{of_name} must be a multiple of {value} ({name}), got {of}")


def _one_of(key: str, value: str, names: Iterable[str]) -> str:
    if value not in (names := tuple(names)):
        raise ConfigError(f"{key}: got {value!r}, wanted one of {', '.join(names)}")
    return value
