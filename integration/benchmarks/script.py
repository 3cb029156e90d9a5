"""How benchmarks start, print rows and save them: scripts under torchrun (`run`), and benches (`run_bench`).

Also times over all ranks, memory, and one rank's failure on all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from mxep.integration.config import ConfigError, unknown
from mxep.integration.launch import Rank
from mxep.integration.mesh import all_gather
from mxep.integration.report import Report, Row, Section, provenance, shortened, write_json
from mxep.integration.schema import BenchConfig, Config

T = TypeVar("T")
GIB = 1 << 30


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def started_ranks() -> Iterator[torch.device]:
    """Open a process group for the ranks that torchrun started, if there are several. Yields this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if several:
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    yield device
    if several:
        dist.destroy_process_group()


def gradients(out: Tensor | Sequence[Tensor], leaves: Sequence[Tensor], d_out: Tensor | Sequence[Tensor]) -> list[Any]:
    """The gradients of leaves, by `backward` as in a training loop. It leaves no `.grad`.

    `torch.autograd.grad` would take mxep 16 us more per leaf (`mxep.gemm.product.is_wanted`; a CPU of 2 cores).
    """
    torch.autograd.backward(out, d_out)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def synchronize() -> None:
    """Wait for this rank's GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    gc.collect()
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds(call: Callable[[], object]) -> float:
    """The slowest rank's time for a call that all ranks begin together, until its GPU is done. Collective."""
    synchronize()
    if ranks() > 1:
        dist.barrier()
        synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return max(all_gather(time.perf_counter() - began))


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the intervals (start, end)."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def save(file: str | Path | None, rows: Sequence[Row], commit: str | None = None, **about: Any) -> None:
    """Write rows with their provenance and `about`, on rank 0, if there is a file. commit: where there is no git."""
    if file and rank() == 0:
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        write_json(provenance(command, commit) | {"ranks": ranks()} | about | {"rows": rows}, [Path(file)])


def print_and_save(rows: Iterable[Row], file: str | Path | None, commit: str | None = None, **about: Any) -> list[Row]:
    """Print each row as it comes, and `save` all so far, as the next may fail. Returns them."""
    found: list[Row] = []
    for row in rows:
        found.append(shortened(row))
        if rank() == 0:
            print(json.dumps(found[-1]), flush=True)
        save(file, found, commit, **about)
    return found


def run(measure: Callable[[torch.device], Iterable[Row]]) -> None:
    """`print_and_save` the rows of measure(device) into the command's file, if it names one."""
    with started_ranks() as device:
        print_and_save(measure(device), next(iter(sys.argv[1:]), None))


class FailedOnRanks(RuntimeError):
    """Raised on all ranks when something failed on some. unsupported: this machine cannot do it."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


def all_gather_tensor(tensor: Tensor) -> Tensor:
    """(W, ...): all ranks' tensors of one shape. Collective."""
    if not dist.is_initialized():
        return tensor[None]
    flat = tensor.contiguous().view(torch.uint8)
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return torch.stack(found).view(tensor.dtype)


def from_all_ranks(fn: Callable[[], T]) -> list[T]:
    """`fn()` of every rank. If it raises on one rank, all raise FailedOnRanks. Collective."""
    value, failure = None, None
    try:
        value = fn()
    except Exception as error:
        unsupported = isinstance(error, (ImportError, NotImplementedError)) or getattr(error, "unsupported", False)
        failure = (str(error) if unsupported else describe(error)), unsupported
    answers = all_gather((value, failure))
    for rank, (_, theirs) in enumerate(answers):
        if theirs is not None:
            where = "" if theirs[1] or not dist.is_initialized() else f"rank {rank}: "
            raise FailedOnRanks(f"{where}{theirs[0]}", unsupported=theirs[1])
    return [theirs for theirs, _ in answers]  # type: ignore[misc]


def on_all_ranks(fn: Callable[[], T]) -> T:
    """`fn()` of this rank. If it raises on one rank, all raise FailedOnRanks. Collective."""
    kept: list[T] = []
    from_all_ranks(lambda: kept.append(fn()))
    return kept[0]


def describe(error: Exception) -> str:
    """An exception in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# task=bench

ANY = "*"
"""Key of SHAPES that stands for any name."""
ON_RANKS = ("comms", "layer", "model")
"""Benches of several ranks."""


@dataclass(frozen=True)
class Bench:
    """Arguments of a bench, which adds its ceilings to report and yields its rows. ranks_per_node: for layers."""

    rank: Rank
    config: BenchConfig
    seed: int
    report: Report
    ranks_per_node: int | None = None

    @property
    def device(self) -> torch.device:
        return self.rank.device

    @property
    def ceilings(self) -> dict[str, float]:
        return self.report.ceilings


def load_bench(name: str) -> Any:
    """Import the module of a bench. Raises ConfigError if a package is missing."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ImportError as error:
        raise ConfigError(f"bench={name}: {error}") from error


def complaints(config: BenchConfig) -> Iterator[str]:
    """Yield a message for each setting that the bench of `config` does not have.

    The bench's module has SHAPES: name in bench.shapes (or ANY) -> the number that each size must be a multiple of.
    SIZES are the names of these sizes. CASES, BACKENDS and CHANGES, if any, are names that settings may have.
    """
    module = load_bench(config.name)
    if config.device == "cpu" and not config.cpu_shapes:
        yield f"bench.device: got 'cpu', and bench={config.name} measures CUDA devices alone"
    yield from unknown("bench.sections", config.sections or (), module.SECTIONS)
    yield from unknown("bench.backend", [config.backend] if config.backend else (), getattr(module, "BACKENDS", ()))
    for key in ("cases", "changes"):
        yield from unknown(f"bench.{key}", getattr(config, key) or (), getattr(module, key.upper(), ()))
    yield from unknown("bench.models", config.models or (), config.shapes)
    if ANY not in module.SHAPES:
        yield from unknown("bench.shapes", config.shapes, module.SHAPES)
    for kind, shapes in config.shapes.items():
        units = module.SHAPES.get(kind) or module.SHAPES.get(ANY) or ()
        for shape in shapes if units else ():
            fits = len(shape) == len(units) and all(size >= 1 and not size % unit for size, unit in zip(shape, units))
            if not fits or ("top-k" in module.SIZES and shape[-1] > shape[-2]):
                wanted = f"{len(units)} {module.SIZES}, multiples of {list(units)}"
                yield f"bench.shapes.{kind}: got {list(shape)}, wanted {wanted}"


def run_bench(
    rank: Rank | None, config: Config, files: Sequence[Path] = (), command: str = "", *, quiet: bool = False
) -> Report:
    """Run the bench of `config`. rank: None runs it in this process alone. Collective, with one report for all ranks.

    After each row, rank 0 writes all rows so far into `files`, so that a stopped run loses none. Unless `quiet`, it
    also logs the row as JSON.
    """
    wanted, begin = config.bench, time.monotonic()
    module = load_bench(wanted.name)
    rank = rank or Rank(0, 1, torch.device(wanted.device))
    console = Console(stderr=True, quiet=quiet or rank.rank > 0)
    sections = {name: module.SECTIONS[name].empty() for name in wanted.sections or module.SECTIONS}
    title = f"mxep {wanted.name}" + (f", {rank.world_size} ranks" if rank.world_size > 1 else "")
    report = Report(title, {}, sections)
    for name, row in module.measure(Bench(rank, wanted, config.seed, report, config.dispatcher.ranks_per_node)):
        added = json.dumps({"section": name, **report.add(name, row)})
        report.seconds = time.monotonic() - begin
        console.print(f"{report.seconds:6.1f} s  {added}", soft_wrap=True, highlight=False, markup=False)
        if rank.rank == 0:
            write_json(report.to_json(command, wanted.commit), files)
    return report


def models(bench: Bench, shape_of: Callable[..., T]) -> Iterator[tuple[Row, T]]:
    """Yield (labels of its rows, shape) of each shape of the config's models."""
    for model in bench.config.models or bench.config.shapes:
        for sizes in bench.config.shapes[model]:
            if bench.device.type == "cuda":
                # Compiled code has widths as constants. After a second shape they would become variables.
                importlib.import_module("torch._dynamo").reset()
            yield {"model": model, "shape": list(sizes), "ranks": bench.rank.world_size}, shape_of(*sizes)
            free_memory()


def table(title: str, labels: str, figures: str) -> Section:
    """A section. labels, figures: column names, separated by commas."""
    return Section(title, tuple(labels.split(", ")), {name: FORMATS.get(name, ".2f") for name in figures.split(", ")})


FORMATS = {"of sum": ".0%", "tokens/s a GPU": ".0f", "loss": ".4f"}
FORMATS |= dict.fromkeys(("us", "left us", "dB"), ".1f")
FORMATS |= dict.fromkeys(("TF", "TFLOP/s", "wire GB/s", "launches"), ".0f")
