"""torchtitan 0.3's own trainer on CPU processes: its debug models, smaller, and tokens that need no file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models import deepseek_v3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

from benchmarks.titan import Logged, NoTokenizer
from titan_on_cpu import reduce_over_gloo  # before torchtitan

LENGTH, BATCH = 32, 2
FLAVORS = {
    "qwen3": (qwen3, "debugmodel_moe", "_build_qwen3_moe_layers", {"n_layers": 2, "n_kv_heads": 2, "num_experts": 8}),
    "deepseek_v3": (
        *(deepseek_v3, "debugmodel", "_build_dsv3_layers"),
        {"n_layers": 2, "n_dense_layers": 1, "dense_hidden_dim": 256, "kv_lora_rank": 128},
    ),
}
"""The model's module, its flavor, the function there that makes the flavor's layers, and smaller arguments for it."""


def smaller(model: str) -> Any:
    """Within it, the flavor's layers are small."""
    registry, _, builder, sizes = FLAVORS[model]
    build = getattr(registry, builder)
    sizes = {"n_heads": 2, "moe_hidden_dim": 32, **sizes}
    return mock.patch.object(registry, builder, lambda **given: build(**given | sizes))


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """Random tokens, others on each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self.generator, self.name = torch.Generator().manual_seed(dp_rank), f"rank{dp_rank}"
        self.shape = local_batch_size, seq_len + 1

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(64, self.shape, generator=self.generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict[self.name])


def make_config(
    model: str,
    folder: str,
    *,
    ep: int = 1,
    training: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A config of its trainer, in fp32. model: of FLAVORS; options: other fields of the config."""
    registry, flavor, *_ = FLAVORS[model]
    with smaller(model):
        spec = registry.model_registry(flavor, moe_comm_backend="standard")
    for layer in spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    small = {"local_batch_size": BATCH, "seq_len": LENGTH, "steps": 4, "disable_cuda_graphs": True}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1, total_steps=4),
        training=TrainingConfig(**{**small, "mixed_precision_param": "float32", **(training or {})}),
        # Its default, "spmd_types", needs a newer torch than 2.13.
        parallelism=ParallelismConfig(expert_parallel_degree=ep, spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(**(checkpoint or {"enable": False})),
        debug=DebugConfig(seed=0),
        **options,
    )


def no_sleep() -> Any:
    """Its trainer sleeps 2 s at its end."""
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    return mock.patch("torchtitan.trainer.time", clock)


def train(config: Any, rank: int) -> tuple[list[float], Any]:
    """The losses that it logs, and the trainer, which is to be closed. torch.distributed is initialized."""
    os.environ["LOCAL_RANK"] = str(rank)
    trainer = config.build()
    reduce_over_gloo(trainer.model_parts[0])
    logged = trainer.metrics_processor.logger = Logged()
    with no_sleep():
        trainer.train()
    return logged.each("loss_metrics/global_avg_loss"), trainer
