"""What a run is made of, as typed sections: data only. The values are in configs/*.yaml, the checks in config.py.

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
    """source: "stdlib" or "text". path: a file or folder, for "text". max_bytes: cap on the text, in bytes.
    batch: sequences a step over all ranks, of `length` tokens each. vocabulary: of a byte-level BPE that is trained on
    the text; tokenizer: a file with one, a tokenizer.json; neither: a token is a byte."""

    source: str
    path: str | None
    max_bytes: int
    batch: int
    length: int
    vocabulary: int | None = None
    tokenizer: str | None = None


@dataclass
class RecipeConfig:
    """name: of a mxep.gemm.Recipe, for the experts, or "auto": mxfp8 where it pays for their sizes and rows, else bf16,
    the same for the whole run. mode, weight_block, wgrad: replace the recipe's own where not null.
    linear: name of the recipe of linears, as "mxfp8", or "auto", by their shapes; null: they stay torch's. They are
    attention's projections, of transformers models dense MLPs', too; embedding, routers and head stay torch's."""

    name: str
    mode: str | None
    weight_block: str | None
    wgrad: str | None
    linear: str | None = None


@dataclass
class DispatcherConfig:
    """name: of a mxep.ep dispatcher. capacity: "worst_case", "exact", or "factor" (times `factor`, a multiple of the
    balanced load). overflow: of rows over a factor: "raise" makes a bad step of them, "drop" leaves them out and counts
    them. timeout: seconds that "symmetric" waits for a rank before it names it, and "hierarchical" for anything; others
    have their process group's. ranks_per_node: of "hierarchical"; null: as many as there are on each host, but in
    task=verify half of all, so that there are two nodes. nodes_per_token: of "hierarchical" with a factor, the most
    nodes that a token's experts lie on; null: all."""

    name: str
    capacity: str
    factor: float
    overflow: str
    timeout: float
    ranks_per_node: int | None
    nodes_per_token: int | None


@dataclass
class ParallelConfig:
    """ranks: processes (null: one a GPU, 2 on a CPU). ep: ranks that share one set of experts (null: all of them; 1
    with the local dispatcher); ranks / ep sets work data-parallel. fsdp: shard what is not expert over all ranks, and
    copies of experts over the sets. device: "auto", "cpu", "cuda". timeout: seconds for
    the whole job, null for no limit."""

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
    """steps of each run. micro_batches: that a rank cuts its share of data.batch in; their gradients are summed before
    the optimizer's step. precision: "bf16-mixed": weights, gradients and moments in fp32, products in bf16;
    "bf16-true": all in bf16; "32-true": all in fp32; experts are multiplied as the recipe says in each.
    activation_checkpointing: each block keeps its input alone, and is computed again in backward. compile: by
    torch.compile, in each block, attention, norms and dense MLPs, each by itself. compare: train in bf16 first, for
    comparison. checkpoint_every: steps between checkpoints, 0 for one at the end, null for none.
    valid_batches: batches of held-out text for the final loss. graph: whether on GPUs loss and gradients are computed
    by CUDA graphs; null: where nothing on the way waits for the host (of transformers models: `graph.CAPTURED`).
    skip_bad_steps: how many steps in a row may be left out because loss or gradient norm is not finite or rows
    overflowed the capacity; one more ends the run.
    tensorboard: metrics go into its files, too, in the run folder. wandb: and to W&B, with the config."""

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
    """task=compare trains the recipe and bf16 from each of `seeds`. out: a file for the results besides compare.json in
    the run folder. commit: the code's version in the results; null: git's."""

    seeds: list[int]
    out: str | None
    commit: str | None


@dataclass
class VerifyConfig:
    """The layer and the linear that task=verify checks, `tokens` a rank. cases: names of mxep.ep.CASES and of
    verify.LINEAR_CASES, null for all. out, commit: as of compare, besides verify.json."""

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
    """name: what task=bench measures, one of mxep.integration.bench.BENCHES. device: "cuda", or "cpu" for a bench that
    can. backend: of mxep.gemm, measured by bench=gemm. sections: of its results, null for all. cases: names of its
    cases, null for all. shapes: kind of shape -> shapes. cpu_shapes: those of device "cpu", unless the command line
    names others. out: a file for the results besides bench.json in the run folder. picture: a file for its picture,
    null for none. commit: what the results call the code's version; null: ask git. models: names of its models, null
    for all, of bench=layer and bench=model. optimizer: whose step is part of bench=model's, "adamw" or null.
    activation_checkpointing: whether its layers are computed again in backward.
    """

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
    """model: a config.json of transformers or its folder; null: the section `model`. layers: MoE layers that a rank has
    (of a stage of a pipeline); null: the model's. tokens: of a rank. nvlink, network: GB/s of a GPU in a direction,
    within a node and between nodes. memory: GiB that a rank may take. optimizer_bytes: of a parameter. micro_batches:
    of a step, whose gradients are reduced once. imbalance: load of the busiest rank over the mean. recipes: some of
    bf16, fp8, mxfp8. rates: results of bench=layer. sections: of the results, null for all. out, picture, commit: as
    of a bench, besides estimate.json. The sections `model` and `dispatcher` (capacity, factor) count, too."""

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
    """Everything. backend: of mxep.gemm, for training and verification; "auto" is the best for the device. seed decides
    weights and batches. resume: a run folder or a checkpoint folder to go on from."""

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
