"""Numbers of a run: progress line, metrics.jsonl, TensorBoard and W&B, speed of a step, SNR of tensors.

tokens_per_s   of all ranks
tflops         10^12 model FLOPs a second of a rank, as Megatron-LM counts them: no padding, no recomputation.
               Compare it only at equal vocabulary and sequence length
mfu            tflops / this GPU's bf16 peak, whatever the recipe; none if the peak is unknown
peak_gib       largest memory of torch's tensors on any rank since the run began; none on CPUs
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mxep.gemm.backends import select

from .flops import count_name, flops_per_token

if TYPE_CHECKING:
    from .launch import Rank
    from .model import Transformer
    from .schema import Config
    from .transformers.model import CausalLM


@contextlib.contextmanager
def progress(name: str, steps: int, entropy: float, *, shown: bool) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Show the progress of run ``name`` over ``steps`` steps on stderr, if ``shown``.

    Yields advance(step, row). step: the number of steps done. row: the metrics of the last one.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, quiet=not shown)
    if console.is_terminal:
        console.print(f"{name:>6}  unigram entropy {entropy:.2f}", highlight=False)
    with console.status("") as status:

        def advance(step: int, row: dict[str, Any]) -> None:
            if console.is_terminal:
                line = f"{name:>6} {step}/{steps} {describe(row)}"
                status.update(Text(line, no_wrap=True, overflow="ellipsis"))
            elif step % max(1, steps // 10) == 0:
                console.print(f"{name:>6}  step {step}/{steps}  {describe(row)}", soft_wrap=True, highlight=False)

        yield advance


def describe(row: dict[str, Any]) -> str:
    """A step's metrics in one line, short enough for 80 columns with the step count.

    load: tokens of the busiest expert / mean. Speed is MFU if the GPU's peak is known, else TFLOP/s of a rank.
    """
    if row.get("skipped"):
        return f"skipped {row['skipped']}"
    rate = "" if row["tflops"] is None else f" {row['tflops']:.3g} TFLOP/s"
    rate = rate if row.get("mfu") is None else f" MFU {row['mfu']:.1%}"
    memory = "" if row.get("peak_gib") is None else f" {row['peak_gib']:.1f} GiB"
    speed = f"{row['tokens_per_s'] / 1e3:.1f}k tokens/s{rate}{memory}"
    return f"loss {row['loss']:.3f} {speed} load {row['expert_load']:.2f}x"


def log_backend(name: str, rank: Rank) -> None:
    """Log on rank 0's stderr which backend "auto" picks. Raises RuntimeError if ``name`` cannot run on the device."""
    logger = logging.getLogger("mxep.gemm")
    if rank.rank == 0 and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mxep: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    select(name, rank.device)


NOT_METRICS = ("run", "step", "skipped")


@contextlib.contextmanager
def log(
    folder: Path, name: str, before: Iterable[dict[str, Any]], config: Config, *, shown: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields write(row), which logs a row of run ``name`` to ``folder/metrics.jsonl``, TensorBoard and W&B.

    before: rows of a resumed run. They are written first, and replace this run's rows in ``folder``.
    shown: True on rank 0; other ranks write nothing. W&B's project is WANDB_PROJECT or "mxep", its group the folder.
    """
    if not shown:
        yield lambda row: None
        return
    with contextlib.ExitStack() as stack:
        metrics = folder / "metrics.jsonl"
        written = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        mine = json.dumps({"run": name})[:-1] + ","
        metrics.write_text("".join(line for line in written if not line.startswith(mine)))
        file = stack.enter_context(metrics.open("a", buffering=1))
        writer: Any = None
        if config.train.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            shutil.rmtree(folder / "tensorboard" / name, ignore_errors=True)
            writer = stack.enter_context(SummaryWriter(str(folder / "tensorboard" / name)))

        run: Any = None
        if config.train.wandb:
            from .config import to_json

            where = {"project": os.environ.get("WANDB_PROJECT", "mxep"), "group": folder.resolve().name}
            made = importlib.import_module("wandb").init(**where, name=name, dir=str(folder), config=to_json(config))
            run = stack.enter_context(made)

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            for key, value in scalars(row) if writer is not None else ():
                writer.add_scalar(key, value, row["step"])
            if run is not None:
                run.log(dict(scalars(row)), step=row["step"])

        for row in before:
            write(row)
        yield write


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield a row's numbers by name, a list's by name and index. Leaves out None."""
    for key, value in row.items():
        if key in NOT_METRICS or value is None:
            continue
        if isinstance(value, list):
            yield from ((f"{key}/{i}", each) for i, each in enumerate(value))
        else:
            yield key, value


PEAKS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "A100": 312.0,
}
"""Part of a device's name -> dense bf16 TFLOP/s in its data sheet. The first part that matches counts."""


def decoder_config(model: Transformer | CausalLM, config: Config) -> Any:
    """A model's sizes under their names in transformers, for `flops_per_token`."""
    from .schema import SIZE_NAMES  # needs pydantic, which transformers' part of mxep does not

    m = config.model
    if m.transformers is not None:
        decoder: Any = model.model
        return decoder.config.get_text_config()
    named = {names[0]: getattr(m, key) for key, names in SIZE_NAMES.items()}
    return SimpleNamespace(**named, vocab_size=model.vocabulary)


def peak_of(name: str) -> float | None:
    """A device's peak TFLOP/s, by its name; None if unknown."""
    return next((peak for part, peak in PEAKS.items() if re.search(rf"{part}\b", name)), None)  # no A1000 for A100


class Speed:
    """Speed of a run's steps on this rank. Creating it resets peak memory. count: see `flops.count_name`."""

    def __init__(self, model: Transformer | CausalLM, config: Config, device: torch.device) -> None:
        self.tokens = config.data.batch * config.data.length
        sizes = decoder_config(model, config)
        self.count = count_name(sizes, config.data.length)
        try:
            flops: float | None = sum(flops_per_token(sizes, config.data.length).values())
        except ValueError:  # FLOPs of this model are unknown
            flops = None
        self.tflop = None if flops is None else self.tokens / config.ranks * flops / 1e12
        self.device = device
        self.peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def memory(self) -> int:
        """Peak bytes so far; 0 on CPUs."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def of(self, seconds: float, peak_bytes: int) -> dict[str, float | None]:
        """The speed metrics of a step. peak_bytes: the maximum over ranks."""
        tflops = None if self.tflop is None else self.tflop / seconds
        return {
            "seconds": seconds,
            "tokens_per_s": self.tokens / seconds,
            "tflops": tflops,
            "mfu": None if self.peak is None or tflops is None else tflops / self.peak,
            "peak_gib": peak_bytes / 2**30 if peak_bytes else None,
        }


LIMIT = 300.0  # dB, for equal tensors
CHUNK = 1 << 26  # elements compared at a time: weight gradients are large


def snr(reference: Tensor, got: Tensor) -> float:
    """10 log10(sum reference^2 / sum (reference - got)^2) in dB, clipped to +-LIMIT. -LIMIT if it is not finite.

    Computed on the device of `got`. Raises ValueError for tensors of different shapes.
    """
    if reference.shape != got.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, wanted {tuple(reference.shape)}")
    signal = noise = 0.0
    for one, other in zip(reference.detach().flatten().split(CHUNK), got.detach().flatten().split(CHUNK)):
        exact = one.to(other.device).double()
        signal += float(exact.square().sum())
        noise += float((exact - other.double()).square().sum())
    if noise == 0.0:
        return LIMIT
    if not math.isfinite(signal + noise) or signal == 0.0:
        return -LIMIT
    return max(-LIMIT, min(LIMIT, 10 * math.log10(signal / noise)))
