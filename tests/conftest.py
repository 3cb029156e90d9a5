"""No ceremony in test files: without a CUDA device, Triton kernels are interpreted with the GPU's numbers.

There a folder's files run side by side, each on cores of its own: threads that share one with another's would wait for
it again and again. A file by itself, GPUs, which tests take all of, and torchrun have one process: `-n 0`.
"""

import os
from pathlib import Path

import pytest

import triton_interpreter

triton_interpreter.on_import()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--orders", type=int, default=2, help="how many orders tests/comms/test_schedules.py plays")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run the files of tests; 0 is this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ or not any(Path(argument).is_dir() for argument in config.args):
        return 0
    import torch

    return 0 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


def pytest_configure(config: pytest.Config) -> None:
    if found := getattr(config, "workerinput", None):  # before torch is imported, which counts the cores
        first, step = int(found["workerid"].removeprefix("gw")), found["workercount"]
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first::step])
