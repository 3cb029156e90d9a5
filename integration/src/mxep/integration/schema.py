"""What a run is made of, as typed sections: data only. Values, and what keys mean, are in configs/config.yaml and its
groups; beside each type is what a value may be (`bounds`), and what must fit together is checked in config.py.

Imported before anything heavy, so that a command line with a mistake is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from .bounds import INT64, Count, NotNegative, OneOf, Positive, Range, Seconds, Seed, Share
from .folder import new_folder
from .names import BACKENDS, BENCHES, DISPATCHERS, TASKS, VOCABULARY


@dataclass
class TaskConfig:
    """name: what to do, one of the tasks in job.py."""

    name: Annotated[str, OneOf(TASKS)]


@dataclass
class ModelConfig:
    """A decoder of `layers` blocks: attention with `heads` heads, then an MoE of `experts` routed experts of which a
    token takes `top_k`, and `shared_experts` that all tokens take. `dim` is D, `hidden_dim` is F of one expert.
    balance_rate: how far a router's bias moves a step towards balance.

    transformers: the config of a model of transformers with these sizes, its `model_type` and whatever else it has;
    null: mxep's own decoder. pretrained: a folder with such a model, as `save_pretrained` writes it, to start from: its
    config.json says the sizes, of which `layers` may be fewer."""

    dim: Count
    layers: Count
    heads: Count
    experts: Count
    top_k: Count
    hidden_dim: Count
    shared_experts: NotNegative
    balance_rate: Share
    transformers: dict[str, Any] | None = None
    pretrained: str | None = None


@dataclass
class DataConfig:
    """What is learned: files, cut into batches of bytes or tokens."""

    path: str | None
    max_bytes: Count
    batch: Count
    length: Count
    vocabulary: Annotated[int, Range(VOCABULARY, INT64)] | None = None
    tokenizer: str | None = None


@dataclass
class RecipeConfig:
    """Which numbers products have: of experts, and of linears beside them."""

    name: str
    linear: str | None = None


@dataclass
class DispatcherConfig:
    """How tokens reach experts, and how many rows fit on a rank."""

    name: Annotated[str, OneOf(DISPATCHERS)]
    capacity: Annotated[str, OneOf(("worst_case", "exact", "factor"))]
    factor: Positive
    overflow: Annotated[str, OneOf(("raise", "drop"))]
    timeout: Seconds
    ranks_per_node: Count | None
    nodes_per_token: Count | None


@dataclass
class ParallelConfig:
    """Processes, and which of them share one set of experts; ranks / ep sets work data-parallel."""

    ranks: Count | None
    ep: Count | None
    fsdp: bool
    device: Annotated[str, OneOf(("auto", "cpu", "cuda"))]
    timeout: Seconds | None


@dataclass
class OptimizerConfig:
    """AdamW with `lr` warmed up over `warmup` steps, then cosine down to `lr * final`; gradient norm at most `clip`."""

    lr: Annotated[float, Range(0, 1, above=True)]
    warmup: NotNegative
    final: Share
    beta1: Annotated[float, Range(0, 1, below=True)]
    beta2: Annotated[float, Range(0, 1, below=True)]
    weight_decay: Annotated[float, Range(0)]
    clip: Positive


@dataclass
class TrainConfig:
    """How a run trains; task=compare trains like this, too."""

    steps: Count
    micro_batches: Count
    precision: Annotated[str, OneOf(("bf16-mixed", "bf16-true", "32-true"))]
    activation_checkpointing: bool
    compile: bool
    compare: bool
    checkpoint_every: NotNegative | None
    valid_batches: Count
    graph: bool | None
    skip_bad_steps: NotNegative
    tensorboard: bool
    wandb: bool = False


@dataclass
class CompareConfig:
    """task=compare trains the recipe and bf16 from each of `seeds`."""

    seeds: list[Seed]
    out: str | None
    commit: str | None


@dataclass
class VerifyConfig:
    """The layer and the linear that task=verify checks, `tokens` a rank."""

    tokens: Count
    dim: Count
    hidden_dim: Count
    experts: Count
    top_k: Count
    cases: list[str] | None
    out: str | None
    commit: str | None


@dataclass
class BenchConfig:
    """What task=bench measures. shapes: kind of shape -> shapes; cpu_shapes: those of device "cpu"."""

    name: Annotated[str, OneOf(BENCHES)]
    device: Annotated[str, OneOf(("cuda", "cpu"))]
    backend: str | None
    sections: list[str] | None
    cases: list[str] | None
    shapes: dict[str, list[list[Count]]]
    cpu_shapes: dict[str, list[list[Count]]]
    out: str | None
    picture: str | None
    commit: str | None
    models: list[str] | None = None
    optimizer: str | None = None
    activation_checkpointing: bool = False


@dataclass
class EstimateConfig:
    """Machines, and what of a stack of layers on them; the sections `model` and `dispatcher` count, too."""

    model: str | None
    layers: Count | None
    tokens: Count
    gpus_per_node: Count
    nodes: Count
    nvlink: Positive
    network: Positive
    memory: Positive
    optimizer_bytes: NotNegative
    micro_batches: Count
    pipeline_stages: Count
    fsdp: bool | None
    imbalance: Annotated[float, Range(1)]
    recipes: list[str]
    rates: list[str] | None
    sections: list[str] | None
    out: str | None
    picture: str | None
    commit: str | None


@dataclass
class Config:
    """Everything."""

    task: TaskConfig
    model: ModelConfig
    data: DataConfig
    recipe: RecipeConfig
    dispatcher: DispatcherConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    compare: CompareConfig
    verify: VerifyConfig
    bench: BenchConfig
    estimate: EstimateConfig
    backend: Annotated[str, OneOf(("auto", *BACKENDS))]
    seed: Seed
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
        """Of a micro-batch."""
        return self.data.batch // self.ranks // self.train.micro_batches * self.data.length


def configs_dir() -> Path:
    """configs/ beside this file: in the repository a link to the folder at its top, in sdists and wheels a copy."""
    return Path(__file__).resolve().parent / "configs"


def register() -> None:
    """Register the types with Hydra, under the name that configs/config.yaml starts from, and the resolver that names
    run folders: once in each config, as that of ``now``."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("new_folder", new_folder, replace=True, use_cache=True)
