"""Signals of this process, GPUs of this machine, and the fork server of ranks. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple

COMPUTE_CAPABILITY = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
SIGNALS = signal.SIGINT, signal.SIGTERM
PRELOAD = "MXEP_PRELOAD"
"""In the environment of the fork server: modules that it imports, too."""
STOPPED = 130
"""Exit code of a job that a signal stopped."""


def under_torchrun() -> bool:
    """Whether this process is a rank that an outer torchrun started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def reports() -> bool:
    """Whether this process writes the run folder: always, except for torchrun's ranks above 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def end_on_signals(clean_up: Callable[[], None] = lambda: None) -> None:
    """Have SIGINT and SIGTERM end this process and its fork server at once, with one line: a start has nothing to save.
    An exception in the middle of an import would be a traceback, or be lost."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        if reports():
            os.write(2, b"mxep: stopped before there was anything to save\n")
        clean_up()
        server: Any = forkserver
        if (pid := server._forkserver._forkserver_pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, end)


def raise_on_signals() -> None:
    """Restore Python's own handling of SIGINT and SIGTERM."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Gpu(NamedTuple):
    """A device's compute capability, and the bytes that it has."""

    capability: tuple[int, int]
    bytes: int


def gpus() -> list[Gpu]:
    """The GPUs that the driver shows this process, as CUDA_VISIBLE_DEVICES has them. Asks without torch."""
    count, device, number, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), index)
        capability = []
        for attribute in COMPUTE_CAPABILITY:
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(number.value)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        found.append(Gpu((capability[0], capability[1]), size.value))
    return found


def count_gpus() -> int:
    """How many of them there are."""
    return len(gpus())


def start_fork_server(*preload: str) -> Any:
    """Start the fork server of ranks if it does not run. It imports torch, mxep and `preload` in the background.

    Returns what `multiprocessing` has of it. It ends by itself when this process is gone.
    """
    server: Any = forkserver
    server.set_forkserver_preload(["mxep.integration.preload"])
    resource_tracker.ensure_running()  # which unblocks both signals
    # A terminal's Ctrl-C reaches the server, too. It starts with signals blocked, until `preload` ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ[PRELOAD] = " ".join(preload)
    try:
        server.ensure_running()
    finally:
        del os.environ[PRELOAD]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return server._forkserver


def end_fork_server(server: Any) -> None:
    """End what `start_fork_server` returned, at once, whatever it still imports. No rank may be left."""
    with contextlib.suppress(ProcessLookupError):
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()
