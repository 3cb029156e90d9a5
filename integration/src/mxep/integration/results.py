"""Write results as JSON, with their provenance: device, versions, commit, command. Does not import hydra."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("triton", "torchao", "transformers", "tokenizers", "peft"),
    *("sgl-deep-gemm", "apache-tvm-ffi", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "scattermoe"),
)
"""Results give these packages' versions, if they are installed, after torch's."""


def shortened(value: Any) -> Any:
    """``value`` with floats rounded to five digits."""
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_json(report: Mapping[str, Any], files: Sequence[Path]) -> None:
    for file in files:
        file.write_text(json.dumps(report, indent=1) + "\n")


def provenance(command: str, commit: str | None) -> dict[str, Any]:
    """Device, driver, versions, date, commit and command. commit: replaces git's answer."""
    cuda = torch.cuda.is_available()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "commit": commit or git_commit(),
        "command": command,
    }


def git_commit() -> str | None:
    """The repository's commit, with "-dirty" if files differ from it. None outside a repository."""
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")


@functools.cache
def _output(*command: str) -> str | None:
    """The first line that a command prints. None if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0].strip()
    return None
