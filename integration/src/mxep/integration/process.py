"""What kind of process this is, and the one that ranks are forked from. Imports nothing heavy: `app` starts with it."""

import ctypes
import os
from multiprocessing import forkserver
from typing import Any

STOPPED = 130
"""Exit code of a job that a signal stopped."""


def under_torchrun() -> bool:
    """Whether this process is a rank that an outer torchrun started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def reports() -> bool:
    """Whether this process writes the run folder: always, except for torchrun's ranks above 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def count_gpus() -> int:
    """How many GPUs the driver shows this process, as CUDA_VISIBLE_DEVICES has it. Asks without torch."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def start_fork_server(*preload: str) -> Any:
    """Start the process that ranks are forked from, unless it runs; it imports torch, mxep and `preload` meanwhile.

    Returns what `multiprocessing` has of it. It ends by itself when this process is gone.
    """
    server: Any = forkserver
    server.set_forkserver_preload(["mxep.integration.preload", *preload, "mxep.integration.preloaded"])
    server.ensure_running()
    return server._forkserver
