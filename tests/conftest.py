"""No ceremony in test files: without a CUDA device, Triton kernels are interpreted with the GPU's numbers.

There a folder's files run side by side, each on cores of its own: threads that share one with another's would wait for
it again and again. A file by itself, GPUs, which tests take all of, and torchrun have one process: `-n 0`.
"""

import ctypes
import gc
import os
import sys
from multiprocessing import util
from pathlib import Path

import pytest

import triton_interpreter

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # before a conftest imports torch, which counts the cores
    _cores = sorted(os.sched_getaffinity(0))
    _first, _step = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, _cores[_first::_step] or _cores)

gc.disable()  # until all is imported: what is imported stays, and each collection would look at all of it
triton_interpreter.on_import()
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # plain C++ on a CPU: no trials, for 8 s, of what it can do
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin for a busy core take 30 times as long


LONGEST = (
    "test_transformers_optimize.py",
    "test_packages.py",
    "test_bench_model.py",
    "test_launches.py",
    "test_torchtitan.py",
    "test_transformers_lora_train.py",
    "test_autograd_compiled.py",
    "test_train_options.py",
)
"""Files that would keep one process busy at the end, while the others have nothing left to do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--orders", type=int, default=2, help="how many orders tests/comms/test_schedules.py plays")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run the files of tests; 0 is this one."""
    if "TORCHELASTIC_RUN_ID" in os.environ or not any(Path(argument).is_dir() for argument in config.args):
        return 0
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver: nothing to import torch for
        gpus = False
    else:
        import torch

        gpus = torch.cuda.is_available()
    return 0 if gpus else min(4, len(os.sched_getaffinity(0)))


def pytest_configure(config: pytest.Config) -> None:
    if sys.dont_write_bytecode and (cache := getattr(config, "cache", None)):
        # Tests start dozens of processes that import torch: without bytecode each would compile its sources, for 5 s.
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))
        os.environ["PYTHONDONTWRITEBYTECODE"] = ""
        flags = util._args_from_interpreter_flags()  # of the fork server, too, which would write none for ranks
        util._args_from_interpreter_flags = lambda: [flag for flag in flags if flag != "-B"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: the processes share out files, and end together where the last ones are short."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.name not in LONGEST)  # the others stay in their order


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if (nextitem is None or nextitem.path != item.path) and (ranks := sys.modules.get("ranks")):
        ranks.close_ranks()


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        from torch.utils._device import _device_constructors

        _device_constructors()  # torch keeps them: without what a test patches, if another's device comes first
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # a tenth of the tests' time went into collections
    gc.enable()
