"""Check the config that Hydra composed, and fill in the values that depend on the machine.

    configs/config.yaml + groups (model=..., recipe=..., ...) + command line
        -> hydra checks keys and types against schema.py
        -> `resolve` -> Config, plain data, goes to the ranks

Names (recipe, dispatcher, data source, task) pick from tables in code, so no config can make an arbitrary object.
Nothing here imports torch, so mistakes are reported at once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import data
from .checkpoint import TOKENIZER, find, read_state
from .launch import gpu_count, under_torchrun
from .schema import (
    ALIGNMENT,
    CASES,
    KEPT_IN_FP8,
    RECIPES,
    VOCABULARY,
    Config,
    RecipeConfig,
    out_of_bounds,
    override_key,
    sizes_of,
)

RESTORED = ("model", "data", "recipe", "optimizer", "train", "seed")
"""Sections that `resume` takes from a checkpoint, except for NOT_RESTORED. None has a path to write to. All other
settings come from the command line."""

NOT_RESTORED = ("model.pretrained", "train.wandb")
"""A checkpoint has its weights already, and somebody else's checkpoint must not start an upload."""

TRANSFORMERS_ONLY = {
    "parallel.fsdp": False,
    "train.precision": "bf16-mixed",
    "train.activation_checkpointing": False,
    "train.compile": False,
}
"""Keys that only transformers models may change -> their value for mxep's own decoder."""


BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
"""Exists in a clone of the repository, not in wheels."""


class ConfigError(ValueError):
    """A setting that does not exist or does not fit. The message is for the user."""


def find_benchmarks() -> None:
    """Make integration/benchmarks importable for tasks compare, bench and estimate, or raise ConfigError."""
    if not (BENCHMARKS / "__init__.py").is_file():
        raise ConfigError(
            f"task=bench, task=compare and task=estimate: got no {BENCHMARKS}, which no package of mxep has: "
            "run them in a clone of its repository, by uv run mxep"
        )
    if str(BENCHMARKS.parent) not in sys.path:  # ranks get this path, too
        sys.path.insert(0, str(BENCHMARKS.parent))


def load_benchmark(module: str) -> Any:
    find_benchmarks()
    return importlib.import_module(f"benchmarks.{module}")


def resolve(raw: DictConfig, *, ranks: int | None = None) -> Config:
    """Check a composed config and fill in `parallel`. ranks: the world size under torchrun, else None.

    Raises ConfigError with one line that names every setting that does not fit.
    """
    if missing := OmegaConf.missing_keys(raw):
        raise ConfigError(f"no value for {', '.join(sorted(missing))}: give it as {min(missing)}=...")
    config = OmegaConf.to_object(raw)
    assert isinstance(config, Config)
    _refuse(out_of_bounds(config))
    if config.task.name in ("bench", "compare", "estimate"):
        find_benchmarks()
    _fill_parallel(config, ranks)
    _refuse(_complaints(config))
    return config


def restore(raw: DictConfig, saved: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
    """``raw`` with the RESTORED sections of a saved config, except for the keys in ``overrides``.

    The saved config is untrusted. Raises ConfigError for an unknown key, and for a value that is not plain or would be
    interpolated.
    """
    config = copy.deepcopy(raw)
    given = {override_key(override) for override in overrides}
    try:
        for section in RESTORED:
            nested = {"": saved[section]} if section == "seed" else {f".{key}": v for key, v in saved[section].items()}
            for suffix, value in nested.items():
                key = section + suffix
                if "${" in (plain := json.dumps(value)) or plain == '"???"':  # OmegaConf would look it up
                    raise ValueError(f"{key}: got {value!r}, wanted plain text")
                by_group = section in given and (section != "data" or suffix == ".path")  # all it says
                if key not in NOT_RESTORED and key not in given and not by_group:
                    OmegaConf.update(config, key, value, merge=False)
    except (ValueError, KeyError, AttributeError, OmegaConfBaseException) as error:
        raise ConfigError(f"the checkpoint's config does not fit: {str(error).splitlines()[0]}") from None
    return config


def to_json(config: Config) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def _fill_parallel(config: Config, ranks: int | None) -> None:
    parallel = config.parallel
    if ranks is not None:
        parallel.ranks = ranks
    elif parallel.ranks is None:
        parallel.ranks = (gpu_count() if parallel.device != "cpu" else 0) or 2
    if parallel.ep is None:
        parallel.ep = 1 if config.dispatcher.name == "local" else parallel.ranks


def _refuse(complaints: Iterator[str]) -> None:
    if found := "; ".join(complaints):
        raise ConfigError(found)


def _check_ranks(config: Config) -> Iterator[str]:
    """Yield a line for each size that the ranks cannot share evenly."""
    experts, ranks, ep = config.model.experts, config.ranks, config.ep
    if ranks % ep:
        cure = f"parallel.ep={math.gcd(ranks, ep)} or parallel.ranks={ep * (ranks // ep + 1)}"
        yield f"parallel.ranks must be a multiple of {ep} (parallel.ep), got {ranks}: try {cure}"
    elif experts % ep:
        cure = f"parallel.ep={math.gcd(ranks, experts)} or model.experts={ep * (experts // ep + 1)}"
        yield f"model.experts must be a multiple of {ep} (parallel.ep), got {experts}: try {cure}"
    if config.data.batch % (pieces := ranks * config.train.micro_batches):
        cure = f"data.batch={pieces * (config.data.batch // pieces + 1)}"
        factors = "parallel.ranks" if pieces == ranks else "parallel.ranks times train.micro_batches"
        yield f"data.batch must be a multiple of {pieces} ({factors}), got {config.data.batch}: try {cure}"
    if config.dispatcher.name == "local" and ep != 1:
        yield f"the local dispatcher keeps all experts on each rank: parallel.ep must be 1, got {ep}"


def _complaints(config: Config) -> Iterator[str]:
    """Yield a line for each setting that does not fit; ranks would fail on it later."""
    task, model, path = config.task.name, config.model, config.data.path
    trains = task in ("train", "compare")
    if task != "estimate":  # estimate tries its own layouts
        yield from _check_ranks(config)
    if model.transformers is not None:
        yield from _check_transformers(config, model.transformers)
    else:
        yield from _check_own_model(config)
    if not 1 <= model.top_k <= model.experts:
        yield f"model.top_k must lie in 1..{model.experts} (model.experts), got {model.top_k}"
    alignment = _alignment(config.recipe.name)
    if model.dim % alignment or model.hidden_dim % alignment:
        sizes = f"{model.dim} and {model.hidden_dim}"
        yield f"recipe {config.recipe.name} wants model.dim and model.hidden_dim in {alignment}s, got {sizes}"
    linear = config.recipe.linear or "bf16"
    if model.dim % (alignment := _alignment(linear)):
        yield f"recipe.linear={linear} wants model.dim in {alignment}s, got {model.dim}"
    if config.dispatcher.overflow != "raise" and config.dispatcher.capacity != "factor":
        overflow, capacity = config.dispatcher.overflow, config.dispatcher.capacity
        yield f"dispatcher.overflow={overflow}: nothing overflows {capacity}; wanted dispatcher.capacity=factor"
    if path is not None and not (path and Path(path).exists()):  # "", of an unset variable, is Path's "."
        yield f"data.path: no such file or folder: {path or repr(path)}"
    elif trains and (complaint := data.complaint(config.data)):
        yield complaint
    if trains and (complaint := data.tokenizer_complaint(config.data)):
        yield complaint
    yield from unknown("verify.cases", config.verify.cases or (), CASES)
    if config.verify.top_k > config.verify.experts:
        yield f"verify.top_k must lie in 1..{config.verify.experts} (verify.experts), got {config.verify.top_k}"
    if task == "estimate":
        known = *RECIPES, *(f"{recipe}_{KEPT_IN_FP8}" for recipe in RECIPES[1:])
        yield from unknown("estimate.recipes", config.estimate.recipes or ["[]"], known)
    if task == "bench":
        yield from load_benchmark("script").complaints(config.bench)
    for key in ("bench.out", "compare.out"):
        if (file := attrgetter(key)(config)) is not None and not Path(file).absolute().parent.is_dir():
            yield f"{key}: no such folder: {Path(file).parent}"
    if task == "compare":
        seeds = config.compare.seeds
        if config.recipe.name in ("bf16", "auto"):  # auto may be bf16
            yield "task=compare compares a recipe with bf16: recipe must be another one"
        if len(set(seeds)) < max(2, len(seeds)):
            yield f"compare.seeds: got {seeds}, wanted two or more that differ: noise is what lies between them"
        if config.resume is not None:
            yield "task=compare starts anew: resume must be null"


def _check_own_model(config: Config) -> Iterator[str]:
    """Yield a line for each setting that mxep's own decoder does not have, and for sizes that do not fit."""
    for key, default in TRANSFORMERS_ONLY.items():
        if (value := attrgetter(key)(config)) != default:
            got, wanted = str(value).lower(), str(default).lower()
            yield f"{key}: got {got}, wanted {wanted}: only models of transformers have others, as model=qwen3_moe_tiny"
    if config.model.dim % (width := 2 * config.model.heads):
        yield f"model.dim must be a multiple of {width} (twice model.heads), got {config.model.dim}"


def _check_transformers(config: Config, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that a model of transformers does not have. Nothing is imported."""
    if not isinstance(hf_config.get("model_type"), str):
        yield "model.transformers: got no model_type, wanted that of a model of transformers"
    for key, size in sizes_of(hf_config).items():
        if size != (got := getattr(config.model, key)):
            yield f"model.{key}: got {got}, but model.transformers has {size}: wanted the same"
    wrong = data.tokenizer_complaint(config.data)
    least = VOCABULARY if wrong else data.vocabulary_of(config.data)
    if (size := hf_config.get("vocab_size", least)) < least:
        yield f"model.transformers.vocab_size must be at least {least}, one for each token of the data, got {size}"
    for key in hf_config:
        if key.endswith("implementation"):  # some values name code to download
            yield f"model.transformers.{key}: wanted no such key: the model's own attention and mxep's experts run"
    if hf_config.get("tie_word_embeddings"):
        yield "model.transformers.tie_word_embeddings: got true, wanted false: checkpoints hold each weight once"


def unknown(key: str, got: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """A line for each of ``got`` that is none of ``known``."""
    for name in got:
        if name not in known:
            some = f"{key}: got {name!r}, wanted some of {'; '.join(known)}"
            yield some if known else f"{key}: got {name!r}, wanted null"


def _alignment(recipe: str) -> int:
    """Sizes must be multiples of this: 1 for "auto", which takes bf16 where MXFP8 does not fit."""
    return ALIGNMENT.get(recipe.partition("_")[0], 1)


# From the command line


TASK_SECTIONS = ("bench", "compare", "estimate", "verify")
"""Config sections that only the task of the same name reads."""


def prepare(raw: DictConfig, overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """The config to run, and the checkpoint folder of each run to start from.

    Resuming restores sections from the checkpoint (`restore`). Raises ConfigError, or ValueError for a bad checkpoint.
    """
    given = {override_key(override) for override in overrides}
    for key in sorted(given):
        if (section := key.partition(".")[0]) in TASK_SECTIONS and section != (task := raw.task.name):
            raise ConfigError(f"{key}: task={task} does not read it, task={section} does: add that, or leave it out")
    ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    _fit_bench(raw, given)
    if raw.model.pretrained is not None:
        _fit_model_to_checkpoint(raw, given)
    if raw.resume is not None:
        return _resume(raw, overrides, given, ranks)
    _fit_vocabulary(raw, given)
    return resolve(raw, ranks=ranks), {}


def _fit_bench(raw: DictConfig, given: set[str]) -> None:
    """Shapes on the command line select their models. On CPUs, shapes and backend have other defaults."""
    if raw.task.name == "bench" and raw.bench.device == "cuda" and not gpu_count():
        cure = "; bench.device=cpu tries small shapes without one" if raw.bench.cpu_shapes else ""
        raise ConfigError(f"bench={raw.bench.name} needs a CUDA device, and there is none here{cure}")
    named = {kind: shapes for kind, shapes in raw.bench.shapes.items() if f"bench.shapes.{kind}" in given}
    if raw.bench.models is not None and "bench.models" not in given:
        raw.bench.models = list(named) or raw.bench.models
    if raw.bench.device != "cpu":
        return
    if raw.bench.backend is not None and "bench.backend" not in given:
        raw.bench.backend = "reference"
    if raw.bench.cpu_shapes and "bench.shapes" not in given:
        raw.bench.shapes = {**raw.bench.cpu_shapes, **named}


def _fit_model_to_checkpoint(raw: DictConfig, given: set[str]) -> None:
    """Take the sizes in `model` that are not given from the config.json of model.pretrained."""
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
    """Give a new transformers model the data's vocabulary size, unless the command line gives one."""
    section, model = raw.data, raw.model
    named = section.get("tokenizer") is not None or section.get("vocabulary") is not None
    if not named or model.transformers is None or model.pretrained is not None:
        return
    if not {"model.transformers", "model.transformers.vocab_size"} & given:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # resolve() reports these
            model.transformers.vocab_size = data.vocabulary_of(section)


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
        changes = ", ".join(f"recipe.{key}={wanted[key]}" for key in wanted if wanted[key] != trained[key])
        step = checkpoints.get(trained["name"], next(reversed(checkpoints.values())))
        raise ConfigError(
            f"resume: {path} trained {trained['name']}, and {changes} is another recipe: leave it out, or go on from "
            f"the weights of one run with resume={step}"
        )
    return resolve(raw, ranks=ranks), {run: str(step.resolve()) for run, step in checkpoints.items()}
