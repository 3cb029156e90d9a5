"""torchtitan 0.3's own trainer on GPUs, with its experts and with mxep's: tokens/s and losses of each case.

    torchrun --nproc-per-node 2 integration/benchmarks/titan.py --layers 8 --out titan.json

The model is torchtitan's with fewer layers. The text is Python's standard library, split into words, so that losses
fall. Tokens/s, losses and memory are from the trainer's logs. docs/lab/models.md lists packages.

Cases: torchtitan (its experts and all-to-all), a recipe of mxep's experts, and RECIPE-linear with linears in it, too.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import re
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.config.override import OverrideConfig, parse_cli_imports
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))

import mxep.integration.torchtitan  # noqa: F401  # torchtitan's own experts need it, too, with torch 2.13
from benchmarks.script import free_memory, print_and_save
from mxep.integration.launch import NO_MULTICAST
from mxep.integration.report import Row

MODELS = {"qwen3-30b": ("qwen3", "30B-A3B", 8), "deepseek-16b": ("deepseek_v3", "16B", 8)}
MODELS |= {"qwen3-debug": ("qwen3", "debugmodel_moe", 2), "deepseek-debug": ("deepseek_v3", "debugmodel", 2)}
"""Name -> torchtitan's model, its flavor, default number of layers."""
OWN, LINEAR = "torchtitan", "-linear"
LOG_EVERY, WARM_UP = 5, 20


class Words(BaseDataLoader):  # type: ignore[misc]
    """A rank's dataloader: windows of a text, the same in every run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        vocabulary: int

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self.text, self.batch, self.length = read_words(config.vocabulary), local_batch_size, seq_len
        self.generator, self.name = torch.Generator().manual_seed(dp_rank), f"rank{dp_rank}"

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            starts = torch.randint(len(self.text) - self.length, (self.batch, 1), generator=self.generator)
            window = self.text[starts + torch.arange(self.length + 1)]
            yield {"input": window[:, :-1]}, window[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict[self.name])


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


class Logged:
    """Replaces the trainer's TensorBoard and keeps the logged metrics by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps[step] = metrics

    def close(self) -> None:
        pass

    def each(self, name: str, after: int = 0) -> list[float]:
        return [float(metrics[name]) for step, metrics in self.steps.items() if step > after]


def read_words(vocabulary: int) -> Tensor:
    """(N,) int64: the standard library's source, its words numbered by frequency."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = re.findall(r"\w+|\s+|[^\w\s]", "".join(file.read_text(errors="ignore") for file in files))
    common = collections.Counter(words).most_common(vocabulary - 1)
    number = {word: i for i, (word, _) in enumerate(common, 1)}
    return torch.tensor([number.get(word, 0) for word in words])


def make_config(args: argparse.Namespace, case: str) -> Any:
    """torchtitan's config for a case. torchrun has set the environment."""
    name, flavor, layers = MODELS[args.model]
    spec = importlib.import_module(f"torchtitan.models.{name}").model_registry(flavor, moe_comm_backend="standard")
    spec.model.layers = spec.model.layers[: args.layers or layers]
    for layer in spec.model.layers:  # the others want documents' positions
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    vocabulary = decoder_vocab_size(spec)
    imports = []
    if case != OWN:
        recipe = case.removesuffix(LINEAR)
        how = {"recipe": recipe, "max_tokens": args.batch * args.length, "capacity": args.capacity}
        imports.append(f"mxep.integration.torchtitan.routed_experts={json.dumps(how)}")
        imports.append("mxep.integration.torchtitan.metrics")
        if case.endswith(LINEAR):
            imports.append(f"mxep.integration.torchtitan.linears={json.dumps({'recipe': recipe})}")
    return Trainer.Config(
        model_spec=spec,
        dump_folder=tempfile.mkdtemp(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary)),
        metrics=MetricsProcessor.Config(log_freq=args.log_every, disable_color_printing=True),
        tokenizer=NoTokenizer.Config(),
        dataloader=Words.Config(vocabulary=vocabulary),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=min(20, args.steps), total_steps=args.steps),
        training=TrainingConfig(
            local_batch_size=args.batch, seq_len=args.length, steps=args.steps, disable_cuda_graphs=True
        ),
        # Its default, "spmd_types", needs a newer torch than 2.13.
        parallelism=ParallelismConfig(
            expert_parallel_degree=int(os.environ["WORLD_SIZE"]), spmd_backend="partial_dtensor"
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        compile=CompileConfig(enable=args.compile),
        debug=DebugConfig(seed=0),
        override=OverrideConfig(imports=parse_cli_imports(imports)),
    )


def measure(trainer: Any, args: argparse.Namespace, case: str) -> Row:
    """Train. Returns a row of figures; tokens/s are of all ranks, the median of logs after the warm-up."""
    logged = trainer.metrics_processor.logger = Logged()
    trainer.train()
    world = int(os.environ["WORLD_SIZE"])
    row = {name: getattr(args, name) for name in ("model", "compile", "batch", "length", "capacity")}
    row |= {"case": case, "layers": len(trainer.model_parts[0].layers), "ranks": world}
    if speeds := [world * speed for speed in logged.each("throughput(tps)", after=min(WARM_UP, args.steps - 1))]:
        row |= {"tokens/s": statistics.median(speeds), "spread": [min(speeds), max(speeds)]}
    row |= {"reserved GiB": max(logged.each("memory/max_reserved(GiB)"))}
    losses = logged.each("loss_metrics/global_avg_loss")
    return row | {"losses": dict(zip(logged.steps, losses))}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="torchtitan 0.3's trainer with its experts or mxep's, under torchrun")
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--cases", nargs="+", default=[OWN, "mxfp8"], help=f"{OWN}, RECIPE, or RECIPE{LINEAR}")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--log-every", type=int, default=LOG_EVERY)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--capacity", type=float, help="rows that fit, in balanced loads; default: the worst case")
    parser.add_argument("--commit", help="of these sources, where there is no git")
    parser.add_argument("--out", type=Path, default=Path("titan.json"))
    return parser.parse_args(arguments)


def measure_all(args: argparse.Namespace) -> Iterator[Row]:
    for case in args.cases:
        trainer = make_config(args, case).build()
        row = measure(trainer, args, case)
        trainer.close()
        del trainer
        torch._dynamo.reset()
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        yield row


def main() -> None:
    from torchtitan.tools.logging import init_logger

    args = parse()
    os.environ.update(NO_MULTICAST)
    init_logger()
    print_and_save(measure_all(args), args.out, args.commit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
