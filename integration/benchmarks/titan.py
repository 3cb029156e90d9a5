"""torchtitan 0.2's own trainer on GPUs, with its experts and with mxep's: tokens/s and losses, one case a launch.

    torchrun --nproc-per-node 4 integration/benchmarks/titan.py --model qwen3-30b --case mxfp8 --out titan.jsonl

The model is torchtitan's with fewer layers. The text is Python's standard library, split into words, so that losses
fall. Tokens/s, losses and memory are from the trainer's logs. docs/lab/models.md lists packages.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxep.integration.launch import NO_MULTICAST

MODELS = {"qwen3-30b": ("qwen3", "30B-A3B", 16), "deepseek-16b": ("deepseek_v3", "16B", 16)}
MODELS |= {"qwen3-debug": ("qwen3", "debugmodel_moe", 2), "deepseek-debug": ("deepseek_v3", "debugmodel", 2)}
"""Name -> torchtitan's model, its flavor, default number of layers."""
LINEAR = "-linear"
CASES = ("torchtitan", "bf16", "mxfp8", "fp8", f"mxfp8{LINEAR}", f"fp8{LINEAR}")
"""torchtitan's experts, mxep's recipes for experts, and for linears, too."""
LOG_EVERY, WARM_UP = 10, 20


class Words:
    """A rank's dataloader: windows of a text, the same in every run."""

    def __init__(self, text: Tensor, batch: int, length: int, rank: int) -> None:
        self.text, self.batch, self.length = text, batch, length
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            starts = torch.randint(len(self.text) - self.length, (self.batch, 1), generator=self.generator)
            window = self.text[starts + torch.arange(self.length + 1)]
            yield {"input": window[:, :-1]}, window[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Logged:
    """Replaces the trainer's TensorBoard and keeps the logged metrics by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        names = {"tokens": "throughput(tps)", "loss": "loss_metrics/global_avg_loss"}
        names |= {"gib": "memory/max_reserved(GiB)", "active_gib": "memory/max_active(GiB)"}
        self.steps[step] = {short: float(metrics[name]) for short, name in names.items()}

    def close(self) -> None:
        pass


def read_words(vocabulary: int) -> Tensor:
    """(N,) int64: the standard library's source, its words numbered by frequency."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = re.findall(r"\w+|\s+|[^\w\s]", "".join(file.read_text(errors="ignore") for file in files))
    common = collections.Counter(words).most_common(vocabulary - 1)
    number = {word: i for i, (word, _) in enumerate(common, 1)}
    return torch.tensor([number.get(word, 0) for word in words])


def make_config(args: argparse.Namespace) -> Any:
    """torchtitan's config for a case. torchrun has set the environment."""
    from torchtitan.config import ConfigManager, JobConfig
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    from mxep.integration.torchtitan.converter import ConverterOptions
    from mxep.integration.torchtitan.converter import JobConfig as WithOptions

    name, flavor, layers = MODELS[args.model]
    spec = get_train_spec(name)
    sizes = dataclasses.replace(spec.model_args[flavor], n_layers=args.layers or layers)
    sizes.attn_type, sizes.attn_mask_type = "sdpa", "causal"  # others want a tokenizer

    def make_words(dp_rank: int, **_: Any) -> Words:
        return Words(read_words(sizes.vocab_size), args.batch, args.length, dp_rank)

    ours = {"model_args": {"bench": sizes}, "build_dataloader_fn": make_words, "build_tokenizer_fn": None}
    register_train_spec("bench", dataclasses.replace(spec, **ours))
    config: Any = ConfigManager._merge_configs(JobConfig, WithOptions)()
    config.model.name, config.model.flavor = "bench", "bench"
    config.job.dump_folder = tempfile.mkdtemp()
    config.training.local_batch_size, config.training.seq_len = args.batch, args.length
    config.training.steps, config.metrics.log_freq, config.debug.seed = args.steps, LOG_EVERY, 0
    config.optimizer.lr, config.lr_scheduler.warmup_steps = 3e-4, min(20, args.steps)
    config.parallelism.expert_parallel_degree = int(os.environ["WORLD_SIZE"])
    config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option = args.checkpoint, "op"
    config.compile.enable = args.compile
    if args.case != "torchtitan":
        config.model.converters = ["mxep"]
        recipe = args.case.removesuffix(LINEAR)
        how: dict[str, Any] = {"recipe": recipe, "linear": recipe if args.case.endswith(LINEAR) else None}
        how |= {"dtype": config.training.mixed_precision_param}
        config.mxep = ConverterOptions(max_tokens=args.batch * args.length, capacity=args.capacity, **how)
    return config


def measure(trainer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Train. Returns a row of figures; tokens/s are of all ranks, the median of logs after the warm-up."""
    logged = trainer.metrics_processor.logger = Logged()
    trainer.train()
    speeds = [found["tokens"] for step, found in logged.steps.items() if step > WARM_UP]
    world = int(os.environ["WORLD_SIZE"])
    result = {name: getattr(args, name) for name in ("model", "case", "compile", "checkpoint", "batch", "length")}
    result |= {"layers": trainer.model_args.n_layers, "ranks": world, "capacity": args.capacity}
    result["tokens_per_second"] = world * statistics.median(speeds) if speeds else None
    result["spread"] = [world * min(speeds), world * max(speeds)] if speeds else None
    result |= {name: max(found[name] for found in logged.steps.values()) for name in ("gib", "active_gib")}
    result["losses"] = {step: found["loss"] for step, found in logged.steps.items()}
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="torchtitan 0.2's trainer with its experts or mxep's, under torchrun")
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--case", choices=CASES, default="mxfp8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", choices=("none", "selective", "full"), default="none", help="of activations")
    parser.add_argument("--capacity", type=float, help="rows that fit, in balanced loads; default: the worst case")
    parser.add_argument("--out", type=Path, default=Path("titan.jsonl"))
    return parser.parse_args(arguments)


def main() -> None:
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    args = parse()
    os.environ.update(NO_MULTICAST)
    init_logger()
    trainer = Trainer(make_config(args))
    result = measure(trainer, args)
    trainer.close()
    if int(os.environ["RANK"]) == 0:
        with args.out.open("a") as stream:
            stream.write(json.dumps(result) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
