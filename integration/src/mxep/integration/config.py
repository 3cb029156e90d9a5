"""What a run is made of, as typed sections. The values are in configs/*.yaml; the types and the checks are here.

    configs/config.yaml + groups (model=..., recipe=..., ...) + command line
        -> hydra checks keys and types against these dataclasses
        -> `resolve` fills what depends on the machine and checks values -> Config, plain data, goes to the ranks

A config is data only. Names (recipe, dispatcher, data source, task) pick from tables in code, so no config can make
anything that mxep does not name.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from mxep.comms import Capacity
from mxep.ep import CASES, DISPATCHERS
from mxep.gemm import Recipe
from mxep.quant import ScaleMode

from .data import SOURCES


class ConfigError(ValueError):
    """The config asks for something that does not exist or does not fit; the message says what, for the user."""


@dataclass
class TaskConfig:
    """name: what to do, one of the tasks in app.py."""

    name: str


@dataclass
class ModelConfig:
    """A decoder of `layers` blocks: attention with `heads` heads, then an MoE of `experts` routed experts of which a
    token takes `top_k`, and `shared_experts` that all tokens take. `dim` is D, `hidden_dim` is F of one expert.
    balance_rate: how far a router's bias moves a step towards balance."""

    dim: int
    layers: int
    heads: int
    experts: int
    top_k: int
    hidden_dim: int
    shared_experts: int
    balance_rate: float


@dataclass
class DataConfig:
    """source: "stdlib" or "text". path: a file or folder, for "text". max_bytes: cap on the text, in bytes.
    batch: sequences a step over all ranks, of `length` bytes each."""

    source: str
    path: str | None
    max_bytes: int
    batch: int
    length: int


@dataclass
class RecipeConfig:
    """name: of a mxep.gemm.Recipe. mode, weight_block, wgrad: replace the recipe's own where not null."""

    name: str
    mode: str | None
    weight_block: str | None
    wgrad: str | None


@dataclass
class DispatcherConfig:
    """name: of a mxep.ep dispatcher. capacity: "worst_case", "exact", or "factor" (times `factor`, a multiple of the
    balanced load)."""

    name: str
    capacity: str
    factor: float


@dataclass
class ParallelConfig:
    """ranks: processes (null: one a GPU, 2 on a CPU). ep: ranks that share one set of experts (null: all of them; 1
    with the local dispatcher); ranks / ep sets work data-parallel. device: "auto", "cpu", "cuda". timeout: seconds for
    the whole job, null for no limit."""

    ranks: int | None
    ep: int | None
    device: str
    timeout: float | None


@dataclass
class OptimizerConfig:
    """AdamW with `lr` warmed up over `warmup` steps, then cosine down to `lr * final`; gradient norm at most `clip`."""

    lr: float
    warmup: int
    final: float
    beta1: float
    beta2: float
    weight_decay: float
    clip: float


@dataclass
class TrainConfig:
    """steps of each run. compare: train in bf16 first, for comparison. checkpoint_every: steps between checkpoints, 0
    for one at the end. valid_batches: batches of held-out text for the final loss."""

    steps: int
    compare: bool
    checkpoint_every: int
    valid_batches: int


@dataclass
class VerifyConfig:
    """The layer that task=verify checks, `tokens` a rank. cases: names of mxep.ep.CASES, null for all."""

    tokens: int
    dim: int
    hidden_dim: int
    experts: int
    top_k: int
    cases: list[str] | None


@dataclass
class Config:
    """Everything. seed decides weights and batches. resume: a run folder or a checkpoint folder to go on from."""

    task: TaskConfig
    model: ModelConfig
    data: DataConfig
    recipe: RecipeConfig
    dispatcher: DispatcherConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    verify: VerifyConfig
    seed: int
    resume: str | None

    @property
    def ranks(self) -> int:
        assert self.parallel.ranks is not None, "resolve() fills it"
        return self.parallel.ranks

    @property
    def ep(self) -> int:
        assert self.parallel.ep is not None, "resolve() fills it"
        return self.parallel.ep

    @property
    def tokens_per_rank(self) -> int:
        return self.data.batch // self.ranks * self.data.length

    def make_recipe(self) -> Recipe:
        changes: dict[str, Any] = {}
        if self.recipe.mode is not None:
            changes["mode"] = ScaleMode[_one_of("recipe.mode", self.recipe.mode.upper(), ScaleMode.__members__)]
        if self.recipe.weight_block is not None:
            changes["weight_block"] = _one_of("recipe.weight_block", self.recipe.weight_block, ("1x32", "32x32"))
        if self.recipe.wgrad is not None:
            changes["wgrad"] = _one_of("recipe.wgrad", self.recipe.wgrad, ("mx", "bf16"))
        return dataclasses.replace(Recipe.named(self.recipe.name), **changes)

    def make_capacity(self) -> Capacity:
        kind = _one_of("dispatcher.capacity", self.dispatcher.capacity, ("worst_case", "exact", "factor"))
        return Capacity.factor(self.dispatcher.factor) if kind == "factor" else getattr(Capacity, kind)()


def configs_dir() -> Path:
    """configs/ of the repository this file lies in, else the copy that the wheel carries."""
    here = Path(__file__).resolve()
    in_repo = here.parents[4] / "configs" if len(here.parents) > 4 else here
    return in_repo if (in_repo / "config.yaml").is_file() else here.parent / "configs"


def register() -> None:
    """Tell Hydra the types, under the name that configs/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=Config)


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


def restore(raw: DictConfig, saved: dict[str, Any], overrides: list[str]) -> DictConfig:
    """A saved config with the keys that `overrides` names taken from `raw`: what `resume=...` runs on.

    Raises ConfigError if the saved config does not fit this version's types.
    """
    try:
        config = OmegaConf.merge(OmegaConf.structured(Config), saved)
    except Exception as error:
        raise ConfigError(f"the checkpoint's config does not fit: {str(error).splitlines()[0]}") from None
    assert isinstance(config, DictConfig)
    for override in overrides:
        key = override.lstrip("+~").split("=")[0]
        if not key.startswith("hydra"):
            OmegaConf.update(config, key, OmegaConf.select(raw, key))
    return config


def to_json(config: Config) -> dict[str, Any]:
    """A Config as plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


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
        recipe = config.make_recipe()
        config.make_capacity()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _one_of("dispatcher.name", config.dispatcher.name, DISPATCHERS)
    _one_of("data.source", config.data.source, SOURCES)
    _positive(config)
    for name in config.verify.cases or ():
        _one_of("verify.cases", name, CASES)
    ranks, ep, model, data = config.ranks, config.ep, config.model, config.data
    _divides("parallel.ep", ep, "parallel.ranks", ranks)
    _divides("parallel.ranks", ranks, "data.batch", data.batch)
    if config.dispatcher.name == "local" and ep != 1:
        raise ConfigError(f"the local dispatcher keeps all experts on each rank: parallel.ep must be 1, got {ep}")
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
    }
    for section, keys in wanted.items():
        for key in keys:
            value = getattr(getattr(config, section), key)
            if not value > 0:
                raise ConfigError(f"{section}.{key} must be positive, got {value}")


def _divides(name: str, value: int, of_name: str, of: int) -> None:
    if of % value:
        raise ConfigError(f"{of_name} must be a multiple of {value} ({name}), got {of}")


def _one_of(key: str, value: str, names: Any) -> str:
    if value not in names:
        raise ConfigError(f"{key}: got {value!r}, wanted one of {', '.join(names)}")
    return value
