"""A run's configuration as typed sections, data only. Values and meanings are in configs/config.yaml and its groups.

    lr: Annotated[float, Field(gt=0, le=1)]      name: Annotated[str, one_of(*TASKS)]

Each type has the range of its values, or the names it may have, as pydantic checks them (`out_of_bounds`). config.py
checks settings against each other. Nothing here imports torch, so mistakes are reported at once: names of backends,
dispatchers and recipes are copies, and a test compares them with the real tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

BACKENDS = ("reference", "dequant", "hopper", "triton", "blackwell")
DISPATCHERS = ("local", "all_to_all", "symmetric", "hierarchical", "nvshmem")
RECIPES = ("bf16", "fp8", "mxfp8")
ALIGNMENT = {"bf16": 1, "fp8": 16, "mxfp8": 32}  # of sizes that a recipe multiplies
KEPT_IN_FP8 = "gate_up_fp8"
"""A change of a recipe, for bench=layer and task=estimate."""
CASES = tuple(f"{recipe}/{dispatcher}" for dispatcher in DISPATCHERS[:4] for recipe in RECIPES)
BENCHES = ("quant", "gemm", "linear", "comms", "layer", "model")
VOCABULARY = 256
"""Without a tokenizer, tokens are bytes."""
TASKS = ("train", "compare", "verify", "bench", "estimate")


def one_of(*names: str) -> Any:
    return Field(pattern=f"^({'|'.join(names)})$")


INT64 = 2**63 - 1  # the largest integer of torch's sizes
Count = Annotated[int, Field(ge=1, le=INT64)]
NotNegative = Annotated[int, Field(ge=0, le=INT64)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=2_000_000)]  # poll() takes 2^31 ms
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # torch's generator on CPUs drops higher bits


def out_of_bounds(config: Any) -> Iterator[str]:
    """Yield a line for each value in ``config`` (a dataclass of dataclasses) that is out of bounds, and for each key
    that a section does not have, which Hydra adds for a `+`."""
    for prefix, section in {"": config, **{f"{name}.": each for name, each in vars(config).items()}}.items():
        if dataclasses.is_dataclass(section):
            for key in sorted(vars(section).keys() - {field.name for field in dataclasses.fields(section)}):
                yield f"no such key: {prefix}{key}"
    try:
        TypeAdapter(type(config)).validate_python(dataclasses.asdict(config))
    except ValidationError as error:
        for each in error.errors():
            yield f"{'.'.join(map(str, each['loc']))}: got {each['input']!r}: {each['msg']}"


@dataclass
class TaskConfig:
    name: Annotated[str, one_of(*TASKS)]


@dataclass
class ModelConfig:
    """A decoder of `layers` blocks: attention with `heads` heads, then an MoE. Each token takes `top_k` of `experts`
    routed experts and all `shared_experts`. `dim` is D, `hidden_dim` is F of one expert. balance_rate: how far a
    router's bias moves towards balance in a step.

    transformers: config of a transformers model with these sizes and its `model_type`. null: mxep's own decoder.
    pretrained: a `save_pretrained` folder of such a model to start from, maybe with more layers."""

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
    """The training text: files, cut into batches of bytes or tokens."""

    path: str | None
    max_bytes: Count
    batch: Count
    length: Count
    vocabulary: Annotated[int, Field(ge=VOCABULARY, le=INT64)] | None = None
    tokenizer: str | None = None


@dataclass
class RecipeConfig:
    """Recipes of experts (name), and of attention's and dense MLPs' linears (linear)."""

    name: str
    linear: str | None = None


@dataclass
class DispatcherConfig:
    """How tokens reach experts, and how many rows fit on a rank."""

    name: Annotated[str, one_of(*DISPATCHERS)]
    capacity: Annotated[str, one_of("worst_case", "factor")]
    factor: Positive
    overflow: Annotated[str, one_of("raise", "drop", "recompute")]
    timeout: Seconds
    ranks_per_node: Count | None
    nodes_per_token: Count | None


@dataclass
class ParallelConfig:
    """`ep` ranks share one set of experts. The ranks / ep sets are data-parallel."""

    ranks: Count | None
    ep: Count | None
    fsdp: bool
    device: Annotated[str, one_of("auto", "cpu", "cuda")]
    timeout: Seconds | None


@dataclass
class OptimizerConfig:
    """AdamW with `lr` warmed up over `warmup` steps, then cosine down to `lr * final`; gradient norm at most `clip`."""

    lr: Annotated[float, Field(gt=0, le=1)]
    warmup: NotNegative
    final: Share
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    clip: Positive


@dataclass
class TrainConfig:
    """How task=train and task=compare train."""

    steps: Count
    micro_batches: Count
    precision: Annotated[str, one_of("bf16-mixed", "bf16-true", "32-true")]
    activation_checkpointing: bool
    compile: bool
    compare: bool
    checkpoint_every: NotNegative | None
    valid_batches: Count
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
    """The layer that task=verify checks, with `tokens` tokens a rank."""

    tokens: Count
    dim: Count
    hidden_dim: Count
    experts: Count
    top_k: Count
    cases: list[str] | None


@dataclass
class BenchConfig:
    """Settings of task=bench. shapes, cpu_shapes: kind -> shapes on GPUs, on CPUs."""

    name: Annotated[str, one_of(*BENCHES)]
    device: Annotated[str, one_of("cuda", "cpu")]
    backend: str | None
    sections: list[str] | None
    cases: list[str] | None
    shapes: dict[str, list[list[Count]]]
    cpu_shapes: dict[str, list[list[Count]]]
    out: str | None
    commit: str | None
    models: list[str] | None = None
    changes: list[str] | None = None


@dataclass
class EstimateConfig:
    """Machines, and the layers to place on them. task=estimate reads `model` and `dispatcher`, too."""

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
    fsdp: bool | None
    recipes: list[str]
    rates: list[str] | None


@dataclass
class Config:
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
    backend: Annotated[str, one_of("auto", *BACKENDS)]
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
        """Tokens of a rank's micro-batch."""
        return self.data.batch // self.ranks // self.train.micro_batches * self.data.length


def configs_dir() -> Path:
    """configs/ beside this file: a link in the repository, a copy in sdists and wheels."""
    return Path(__file__).resolve().parent / "configs"


SIZE_NAMES = {
    "dim": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "hidden_dim": ("moe_intermediate_size", "intermediate_size"),
    "shared_experts": ("n_shared_experts",),
}
"""Key of the section `model` -> its names in transformers configs. The first one present counts."""


def sizes_of(found: Mapping[str, Any]) -> dict[str, int]:
    """The sizes in a transformers config, by key of the section `model`."""
    pairs = [(key, name) for key, names in SIZE_NAMES.items() for name in reversed(names)]
    return {key: found[name] for key, name in pairs if isinstance(found.get(name), int)}


def override_key(override: str) -> str:
    """The key or group that an argument of the command line sets."""
    return override.lstrip("+~").split("=")[0].split("@")[0]
