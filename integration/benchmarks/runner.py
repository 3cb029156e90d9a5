"""Run a bench, from its config to its report, in this process or on all ranks."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from mxep.integration.config import ConfigError, unknown
from mxep.integration.launch import Rank
from mxep.integration.report import Report, Row, Section
from mxep.integration.results import write_json as write
from mxep.integration.schema import BenchConfig

from .script import free_memory

T = TypeVar("T")
ANY = "*"
"""Key of SHAPES that stands for any name."""


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


def load(name: str) -> Any:
    """Import the module of a bench. Raises ConfigError if a package is missing."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ImportError as error:
        raise ConfigError(f"bench={name}: {error}") from error


def on_ranks(name: str) -> bool:
    return name in ("comms", "layer", "model")


def complaints(config: BenchConfig) -> Iterator[str]:
    """Yield a message for each setting that the bench of `config` does not have.

    The bench's module has SHAPES: name in bench.shapes (or ANY) -> the number that each size must be a multiple of.
    SIZES are the names of these sizes. CASES, BACKENDS and CHANGES, if any, are names that settings may have.
    """
    module = load(config.name)
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


def run(
    rank: Rank | None,
    config: BenchConfig,
    seed: int,
    files: Sequence[Path] = (),
    command: str = "",
    ranks_per_node: int | None = None,
    *,
    quiet: bool = False,
) -> Report:
    """Run the bench of `config`. rank: None runs it in this process alone. Collective, with one report for all ranks.

    After each row, rank 0 writes all rows so far into `files`, so that a stopped run loses none. Unless `quiet`, it
    also logs the row as JSON.
    """
    module, begin = load(config.name), time.monotonic()
    rank = rank or Rank(0, 1, torch.device(config.device))
    console = Console(stderr=True, quiet=quiet or rank.rank > 0)
    sections = {name: module.SECTIONS[name].empty() for name in config.sections or module.SECTIONS}
    title = f"mxep {config.name}" + (f", {rank.world_size} ranks" if rank.world_size > 1 else "")
    report = Report(title, {}, sections)
    for name, row in module.measure(Bench(rank, config, seed, report, ranks_per_node)):
        added = json.dumps({"section": name, **report.add(name, row)})
        report.seconds = time.monotonic() - begin
        console.print(f"{report.seconds:6.1f} s  {added}", soft_wrap=True, highlight=False, markup=False)
        if rank.rank == 0:
            write(report.to_json(command, config.commit), files)
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
FORMATS |= dict.fromkeys(("TF", "TFLOP/s", "wire GB/s"), ".0f")
FORMATS |= dict.fromkeys(("launches", "allocations", "ops"), ".0f")
