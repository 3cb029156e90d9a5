"""What a run is made of, as typed sections: data only. Values, and what keys mean, are in configs/config.yaml and its
groups; the checks are in config.py.

Imported before anything heavy, so that a command line with a mistake is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class TaskConfig:
    """name: what to do, one of the tasks in job.py."""

    name: str


@dataclass
class ModelConfig:
    """A decoder of `layers` blocks: attention with `heads` heads, then an MoE of `experts` routed experts of which a
    token takes `top_k`, and `shared_experts` that all tokens take. `dim` is D, `hidden_dim` is F of one expert.
    balance_rate: how far a router's bias moves a step towards balance.

    transformers: the config of a model of transformers with these sizes, its `model_type` and whatever else it has;
    null: mxep's own decoder. pretrained: a folder with such a model, as `save_pretrained` writes it, to start from: its
    config.json says the sizes, of which `layers` may be fewer."""

    dim: int
    layers: int
    heads: int
    experts: int
    top_k: int
    hidden_dim: int
    shared_experts: int
    balance_rate: float
    transformers: dict[str, Any] | None = None
    pretrained: str | None = None


@dataclass
class DataConfig:
    """What is learned: files, cut into batches of bytes or tokens."""

    path: str | None
    max_bytes: int
    batch: int
    length: int
    vocabulary: int | None = None
    tokenizer: str | None = None


@dataclass
class RecipeConfig:
    """Which numbers products have: of experts, and of linears beside them."""

    name: str
    linear: str | None = None


@dataclass
class DispatcherConfig:
    """How tokens reach experts, and how many rows fit on a rank."""

    name: str
    capacity: str
    factor: float
    overflow: str
    timeout: float
    ranks_per_node: int | None
    nodes_per_token: int | None


@dataclass
class ParallelConfig:
    """Processes, and which of them share one set of experts; ranks / ep sets work data-parallel."""

    ranks: int | None
    ep: int | None
    fsdp: bool
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
    """How a run trains; task=compare trains like this, too."""

    steps: int
    micro_batches: int
    precision: str
    activation_checkpointing: bool
    compile: bool
    compare: bool
    checkpoint_every: int | None
    valid_batches: int
    graph: bool | None
    skip_bad_steps: int
    tensorboard: bool
    wandb: bool = False


@dataclass
class CompareConfig:
    """task=compare trains the recipe and bf16 from each of `seeds`."""

    seeds: list[int]
    out: str | None
    commit: str | None


@dataclass
class VerifyConfig:
    """The layer and the linear that task=verify checks, `tokens` a rank."""

    tokens: int
    dim: int
    hidden_dim: int
    experts: int
    top_k: int
    cases: list[str] | None
    out: str | None
    commit: str | None


@dataclass
class BenchConfig:
    """What task=bench measures. shapes: kind of shape -> shapes; cpu_shapes: those of device "cpu"."""

    name: str
    device: str
    backend: str | None
    sections: list[str] | None
    cases: list[str] | None
    shapes: dict[str, list[list[int]]]
    cpu_shapes: dict[str, list[list[int]]]
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
    layers: int | None
    tokens: int
    gpus_per_node: int
    nodes: int
    nvlink: float
    network: float
    memory: float
    optimizer_bytes: int
    micro_batches: int
    imbalance: float
    recipes: list[str]
    rates: list[str]
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
    backend: str
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
        """Of a micro-batch."""
        return self.data.batch // self.ranks // self.train.micro_batches * self.data.length


def configs_dir() -> Path:
    """configs/ beside this file: in the repository a link to the folder at its top, in sdists and wheels a copy."""
    return Path(__file__).resolve().parent / "configs"


def register() -> None:
    """Register the types with Hydra, under the name that configs/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=Config)
