"""A bench, from its config to its report."""

from __future__ import annotations

import importlib
import time

import torch
from rich.console import Console

from ..config import ConfigError
from ..schema import BenchConfig
from . import BENCHES
from .report import Results


def run(config: BenchConfig, seed: int, console: Console) -> Results:
    """Measure what `config` names on the device it names; `console` gets a line as soon as it is there.

    Raises ConfigError for a config that does not fit, or without a CUDA device where it wants one.
    """
    module = importlib.import_module(BENCHES[config.name])
    module.check(config)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench needs a CUDA device, and there is none here")
    start = time.monotonic()

    def say(line: str) -> None:
        passed = time.monotonic() - start
        console.print(f"{passed:6.1f} s  {line}", soft_wrap=True, highlight=False, markup=False)

    report: Results = module.measure(config, seed, say)
    report.seconds = time.monotonic() - start
    return report
