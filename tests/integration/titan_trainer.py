"""torchtitan 0.3's own trainer on CPU processes: its debug models with fewer layers, and tokens that need no file.

torchtitan asks once, at import, which accelerator there is, and takes CUDA for granted. Importing this module answers
for it; nothing else of it is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

_memory = {"memory_stats": lambda *_: {}, "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None}
_names = {"get_device_name": lambda *_: "CPU", "get_device_properties": lambda *_: SimpleNamespace(total_memory=1)}
_calls = {name: getattr(torch.cpu, name) for name in ("device_count", "set_device", "synchronize")}
utils.device_type, utils.device_module = "cpu", SimpleNamespace(current_device=lambda: 0, **_memory, **_names, **_calls)  # type: ignore[assignment]
if not hasattr(dist, "set_timeout"):  # torch 2.13 has it under this name
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import deepseek_v3, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

LENGTH, BATCH = 32, 2
FLAVORS = {"qwen3": (qwen3, "debugmodel_moe"), "deepseek_v3": (deepseek_v3, "debugmodel")}


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """Random tokens, others on each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self.generator = torch.Generator().manual_seed(dp_rank)
        self.shape = local_batch_size, seq_len + 1

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(64, self.shape, generator=self.generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


def make_config(
    model: str,
    folder: str,
    *,
    layers: int = 2,
    ep: int = 1,
    training: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A config of its trainer, in fp32. model: of FLAVORS; options: other fields of the config."""
    registry, flavor = FLAVORS[model]
    spec = registry.model_registry(flavor, moe_comm_backend="standard")
    del spec.model.layers[layers:]
    for layer in spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    optimizer = default_adamw(lr=1e-3)
    optimizer.implementation = "for-loop"
    small = {"local_batch_size": BATCH, "seq_len": LENGTH, "steps": 3, "disable_cuda_graphs": True}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(**{**small, "mixed_precision_param": "float32", **(training or {})}),
        # Its default, "spmd_types", needs a newer torch than 2.13.
        parallelism=ParallelismConfig(expert_parallel_degree=ep, spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(**(checkpoint or {"enable": False})),
        debug=DebugConfig(seed=0),
        **options,
    )


def train(config: Any, rank: int) -> tuple[list[float], Any]:
    """The losses that it logs, and the trainer, which is to be closed. torch.distributed is initialized."""
    os.environ["LOCAL_RANK"] = str(rank)
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    logged, log = [], trainer.metrics_processor.log

    def spy(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        logged.append(loss)
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = spy
    trainer.train()
    return logged, trainer
