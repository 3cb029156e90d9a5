"""What runs inside a rank that `launch.run_ranks` started: the process group, the signals, the function, its result."""

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class StopFlag:
    """Set in a rank by SIGUSR1 (Ctrl-C at the caller): the job should stop after this step."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, number: int, frame: object) -> None:
        """A signal handler."""
        self.requested = True

    def agreed(self) -> bool:
        """Whether any rank shall stop: one answer for all. A collective on the host (gloo)."""
        flag = torch.tensor([self.requested], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


@dataclass(frozen=True)
class Rank:
    """What a rank's function gets: its number, how many there are, its device and the flag that asks it to stop."""

    rank: int
    world_size: int
    device: torch.device
    stop: StopFlag = field(default_factory=StopFlag)


@dataclass(frozen=True)
class FunctionName:
    """Names a module-level function for another process: a module name, its file, and the name inside it."""

    module: str
    file: str
    qualname: str

    @staticmethod
    def of(fn: Callable[..., Any]) -> "FunctionName":
        if "<" in fn.__qualname__:
            raise ValueError(f"got {fn.__qualname__}, wanted a function at module level: ranks find it by its name")
        return FunctionName(fn.__module__, os.path.abspath(inspect.getfile(fn)), fn.__qualname__)

    def load(self) -> Callable[..., Any]:
        found: Any = None
        with contextlib.suppress(ImportError):
            found = importlib.import_module(self.module)
        if self.module != "__main__" and getattr(found, "__file__", None) != self.file:
            # pytest's importlib mode gives test modules names that nobody else can import.
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None, self.file
            assert spec.loader is not None, self.file
            found = sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]


def init_process_group(device: str, rank: int, world_size: int, *, init_method: str = "env://") -> torch.device:
    """Bring up the default group: gloo, or nccl and gloo for "cuda". Returns this rank's device, made current."""
    here = torch.device("cpu")
    if device == "cuda":
        os.environ.update(NO_MULTICAST)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it to be deterministic
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(here)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    limit = timedelta(minutes=10)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    return here


def rank_main(
    connection: Connection,
    payload: bytes,
    rank: int,
    world_size: int,
    device: str,
    scratch: str,
    environment: dict[str, str],
) -> None:
    """The rank's process: sends ("ready", None), then ("value", result) or ("error", (in one line, traceback))."""
    os.setsid()
    _die_with_caller()
    os.environ.clear()  # the fork server's are those of the first call
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    # A rank whose function ends at once would take its connections down while others still make theirs.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    stop = StopFlag()
    signal.signal(signal.SIGUSR1, stop.request)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server ignores both
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stack_file(scratch, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR2, file=stack)
        faulthandler.enable(stack)  # where a signal such as SIGSEGV kills it
        connection.send_bytes(pickle.dumps(("ready", None)))
        try:
            name, args = pickle.loads(payload)
            fn = name.load()
            here = init_process_group(device, rank, world_size, init_method=f"file://{scratch}/store")
            value = fn(Rank(rank, world_size, here, stop), *pickle.loads(args))
            message = pickle.dumps(("value", value))
        except BaseException as error:
            message = pickle.dumps(("error", (f" {type(error).__name__}: {error}", f"\n{traceback.format_exc()}")))
        # An error goes out before the group goes down, or the peers' complaints about that would come first.
        connection.send_bytes(message)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR2)


def _die_with_caller() -> None:
    """End this rank and its children when the fork server or the caller is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    caller: Any = multiprocessing.parent_process()

    def watch() -> None:
        # The sentinel is a pipe whose other end the caller holds, and every child that it forks later.
        try:
            wait([caller.sentinel, os.pidfd_open(caller.pid)])
        except ProcessLookupError:
            pass  # gone
        except OSError:  # Linux before 5.3 has none
            wait([caller.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="caller watch", daemon=True).start()


def stack_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"stack-{rank}"
