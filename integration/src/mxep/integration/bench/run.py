"""A bench, from its config to its report: in this process, or in a rank."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from types import ModuleType

import torch
from rich.console import Console

from ..config import ConfigError
from ..rank import Rank
from ..schema import BenchConfig
from . import BENCHES, PICTURES
from .report import Results


def check(config: BenchConfig) -> ModuleType:
    """The module of the bench that `config` names.

    Raises ConfigError for a config that does not fit, or without a CUDA device where it wants one.
    """
    module = importlib.import_module(BENCHES[config.name])
    module.check(config)
    if config.picture is not None and config.name not in PICTURES:
        raise ConfigError(f"bench.picture: got {config.picture}, wanted null: bench={config.name} draws none")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench needs a CUDA device, and there is none here")
    return module


def run(config: BenchConfig, seed: int, console: Console) -> Results:
    """Measure what `config` names on the device it names; `console` gets a line as soon as it is there.

    Raises ConfigError as `check` does.
    """
    module = check(config)
    return _timed(lambda say: module.measure(config, seed, say), console)


def run_on_rank(rank: Rank, config: BenchConfig, seed: int) -> Results:
    """The same on one of several ranks, for a bench that is made for them; rank 0 tells. Collective."""
    module = check(config)
    return _timed(
        lambda say: module.measure_on_rank(rank, config, seed, say), Console(stderr=True, quiet=rank.rank > 0)
    )


def _timed(measure: Callable[[Callable[[str], None]], Results], console: Console) -> Results:
    start = time.monotonic()

    def say(line: str) -> None:
        passed = time.monotonic() - start
        console.print(f"{passed:6.1f} s  {line}", soft_wrap=True, highlight=False, markup=False)

    report = measure(say)
    report.seconds = time.monotonic() - start
    return report
