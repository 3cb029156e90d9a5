"""A bench, from its config to its report."""

from __future__ import annotations

import importlib
import time

import torch
from rich.console import Console

from ..config import ConfigError
from ..schema import BenchConfig
from . import BENCHES
from .report import Line, Report


def run(config: BenchConfig, seed: int, console: Console) -> Report:
    """Measure what `config` names on the current CUDA device; `console` gets a line as soon as it is there.

    Raises ConfigError for a config that does not fit, or without a CUDA device.
    """
    module = importlib.import_module(BENCHES[config.name])
    module.check(config)
    if not torch.cuda.is_available():
        raise ConfigError("bench needs a CUDA device, and there is none here")
    start = time.monotonic()

    def say(line: Line) -> None:
        passed = time.monotonic() - start
        console.print(f"{passed:6.1f} s  {line.summary}", soft_wrap=True, highlight=False, markup=False)

    report: Report = module.measure(config, seed, say)
    report.seconds = time.monotonic() - start
    return report
