"""Start the ranks of one job on this machine and collect their results. Imports nothing heavy.

    caller ── fork server (torch imported once) ──┬─ rank 0: init_process_group, fn(Rank, *args) ─┐
       ^                                          └─ rank 1: ...                                  │
       └── a scratch folder: ready-0, then value-0 or error-0; stack-0 after a crash or at the time limit  ┘

- A rank that raises or dies ends the job: `RanksFailed` has every traceback that arrived, in order of arrival, and no
  process is left. A job over its time limit ends in the same way, with the stack of each rank that still runs.
- SIGINT (Ctrl-C) and SIGTERM reach the ranks as SIGUSR1, which sets `Rank.stop`: "stop after this step". A second
  signal kills the ranks at once. So does the first one before they have started, or in a job without steps.
- Each rank leads a process group of its own: the terminal's Ctrl-C does not reach it, and its children end with it.
  It ends itself when the caller is gone, even by SIGKILL.

torch.distributed.elastic's `start_processes` reports only the first failed rank, leaves children of ranks behind, shows
no stacks at a time limit, and kills ranks on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
SIGNALS = signal.SIGINT, signal.SIGTERM
STOPPED = 130
"""Exit code of a job that a signal stopped."""
OUT_OF_MEMORY = "most likely out of memory: the system ends a process that takes the last of it by SIGKILL"
GRACE = 0.3
"""Seconds after the first failure in which other ranks may still report theirs."""
PRELOAD = "MXEP_PRELOAD"
"""Environment variable of the fork server: further modules to import."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PR_SET_PDEATHSIG = 1


class RanksFailed(RuntimeError):
    """Some ranks raised, died or ran out of time. The message holds every traceback, in order of arrival.

    ranks: the failed ranks, in the same order. first: the first failure in one line.
    """

    def __init__(self, message: str, ranks: Sequence[int], first: str) -> None:
        super().__init__(message)
        self.ranks, self.first = tuple(ranks), first


class StopFlag:
    """Set in a rank by SIGUSR1 (Ctrl-C at the caller): the job should stop after this step."""

    requested = False

    def request(self, number: int, frame: object) -> None:
        self.requested = True

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all. Collective on the host (gloo)."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor([self.requested], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


@dataclass(frozen=True)
class Rank:
    """First argument of a rank's function: its number, the number of ranks, its device and the stop flag."""

    rank: int
    world_size: int
    device: torch.device
    stop: StopFlag = field(default_factory=StopFlag)


# This process: torchrun, GPUs, signals, and the fork server


def under_torchrun() -> bool:
    """Whether this process is a rank that an outer torchrun started."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def reports() -> bool:
    """Whether this process writes the run folder: always, except for torchrun's ranks above 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def gpu_count() -> int:
    """How many GPUs the driver shows this process, under CUDA_VISIBLE_DEVICES. Does not need torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def end_on_signals(clean_up: Callable[[], None] = lambda: None) -> None:
    """Make SIGINT and SIGTERM end this process and its fork server at once, with a line. For use before a job starts:
    there is nothing to save, and an exception in the middle of an import would show a traceback or be lost."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        if reports():
            os.write(2, b"mxep: stopped before there was anything to save\n")
        clean_up()
        _kill_fork_server()
        os._exit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, end)


def raise_on_signals() -> None:
    """Restore Python's own handling of SIGINT and SIGTERM."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def start_fork_server(*modules: str) -> None:
    """Start the ranks' fork server if it does not run yet. It imports torch, mxep and `modules` in the background, and
    ends when this process does."""
    server: Any = forkserver
    server.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # first, as it unblocks both signals
    # A scheduler's SIGTERM and a terminal's Ctrl-C reach the whole process group. The caller asks the ranks to stop
    # after their step; until then they need the server. So the server blocks both signals, and ends with the caller.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ[PRELOAD] = " ".join(modules)
    try:
        server.ensure_running()
    finally:
        del os.environ[PRELOAD]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_fork_server() -> None:
    """End the fork server at once, even during its imports. No rank may be left."""
    _kill_fork_server()
    server: Any = forkserver
    server._forkserver._stop()


def _kill_fork_server() -> None:
    server: Any = forkserver
    if (pid := server._forkserver._forkserver_pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _preload() -> None:
    """Import modules in the fork server, so that each rank starts with them in memory.

    A module that fails to import is skipped: here the error would only show as a broken pipe. The rank that needs it
    imports it again and reports the error.
    """
    # torch._dynamo: a custom op imports it at its first call, which takes seconds.
    own = "torch._dynamo", "mxep.integration.train", "mxep.integration.verify"
    # Garbage collections would scan the imported objects again and again, for a fifth of the import time.
    gc.disable()
    for name in (*own, *os.environ.pop(PRELOAD).split()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


# The caller


def run_ranks(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    world_size: int,
    timeout: float | None = None,
    device: str = "auto",
    steps: bool = True,
) -> list[T]:
    """Call `fn(Rank, *args)` in `world_size` new processes and return their results, in rank order.

    fn: a module-level function. Ranks find it by its file and name, so its module need not be importable.
    args, results: pickled by value (tensors too).
    timeout: seconds for the whole job, start included. None is no limit.
    device: "cpu" (gloo) or "cuda" (rank r on device r, nccl + gloo). "auto" is "cuda" if there are enough devices.
    steps: `fn` looks at `Rank.stop`. False: it does not, so Ctrl-C and SIGTERM raise KeyboardInterrupt here.

    The default process group is up when `fn` starts and gone after it. Each rank has cores // world_size threads.
    Raises RanksFailed, or ValueError for a bad world size or device.
    """
    device = resolve_device(device, world_size)
    payload = pickle.dumps((FunctionName.of(fn), pickle.dumps(tuple(args))))
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    ranks: list[ForkServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="mxep-ranks-") as scratch:
        folder = Path(scratch)
        try:
            limit = None if timeout is None else time.monotonic() + timeout
            for rank in range(world_size):
                arguments = payload, rank, world_size, device, folder, dict(os.environ), limit
                process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}")
                process.start()
                ranks.append(process)
            with _forward_signals(ranks if steps else [], folder):
                _wait(ranks, folder, timeout, float("inf") if limit is None else limit)
            return [pickle.loads((folder / f"value-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for process in ranks:
                assert process.pid is not None
                with contextlib.suppress(ProcessLookupError):  # its group exists from "ready" on
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def run_in_place(fn: Callable[..., T], args: Sequence[Any] = (), *, device: str = "auto", steps: bool = True) -> T:
    """Call `fn(Rank, *args)` in this process, which torchrun started (RANK, WORLD_SIZE, LOCAL_RANK are set).

    steps: as for `run_ranks`.
    """
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = resolve_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    here = init_process_group(device, rank, world_size)
    stop = StopFlag()
    with _handler(stop.request) if steps else contextlib.nullcontext():
        try:
            return fn(Rank(rank, world_size, here, stop), *args)
        finally:
            dist.destroy_process_group()


def resolve_device(device: str, world_size: int) -> str:
    """ "auto" -> "cuda" if every rank of this machine can have a device of its own, else "cpu"."""
    import torch

    if world_size < 1:
        raise ValueError(f"world_size: got {world_size}, wanted at least 1")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: got {device!r}, wanted 'auto', 'cpu' or 'cuda'")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and available < world_size:
        raise ValueError(f"device 'cuda': got {available} devices, wanted one for each of {world_size} ranks")
    if device == "auto":
        return "cuda" if available >= world_size else "cpu"
    return device


def _wait(ranks: Sequence[ForkServerProcess], folder: Path, timeout: float | None, limit: float) -> None:
    """Wait for all ranks. Raise RanksFailed after the first failure, or at `limit` (`timeout` s after the start)."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}  # the fork server reports ends
    failures: list[tuple[int, int, str, str]] = []  # when, rank, failure in one line, with traceback
    while running:
        for end in (ended := wait(list(running), None if limit == float("inf") else max(limit - time.monotonic(), 0))):
            rank = running.pop(end)  # type: ignore[arg-type]
            if not (folder / f"value-{rank}").exists():
                if not failures:
                    limit = min(limit, time.monotonic() + GRACE)
                failures.append(_failure(rank, ranks[rank], folder))
        if not ended:
            break
    names = ", ".join(map(str, running.values()))
    if failures:
        failures.sort()  # a dead rank (0) comes first: its peers may complain before its end is known
        stories = "\n".join(story for *_, story in failures)
        stories += "".join(_stack(rank, folder) for when, rank, *_ in failures if not when)
        note = f"\n(rank {names} had not finished and was killed)" if running else ""
        raise RanksFailed(stories + note, [rank for _, rank, *_ in failures], failures[0][2])
    if running:
        late = f"rank {names} did not finish within {timeout} s"
        time.sleep(GRACE)  # late ranks write their stacks
        raise RanksFailed(late + "".join(_stack(rank, folder) for rank in running.values()), [*running.values()], late)


def _failure(rank: int, process: ForkServerProcess, folder: Path) -> tuple[int, int, str, str]:
    """Return (time it raised, or 0 if it died; rank; failure in one line; failure with traceback)."""
    if (error := folder / f"error-{rank}").exists():
        when, line, story = pickle.loads(error.read_bytes())
        return when, rank, f"rank {rank} raised: {line}", f"rank {rank} raised:\n{story}"
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    line = f"rank {rank} {how} before it returned"
    return 0, rank, line, line + (f"\n({OUT_OF_MEMORY})" if code == -signal.SIGKILL else "")


def _stack(rank: int, folder: Path) -> str:
    file = folder / f"stack-{rank}"
    return f"\nrank {rank} was at:\n{stack}" if file.exists() and (stack := file.read_text()) else ""


@contextlib.contextmanager
def _forward_signals(ranks: Sequence[ForkServerProcess], folder: Path) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the ranks to stop after their step. The second raises KeyboardInterrupt here.
    Without ranks, or before all are ready, the first one does, too."""
    stopping = False

    def forward(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping or not ranks or not all((folder / f"ready-{rank}").exists() for rank in range(len(ranks))):
            raise KeyboardInterrupt
        stopping = True
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGUSR1)

    with _handler(forward) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Use `handler` for SIGINT and SIGTERM while open."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


# A rank


@dataclass(frozen=True)
class FunctionName:
    """Names a module-level function for another process: a module name, its file, and the name inside it."""

    module: str
    file: str
    qualname: str

    @staticmethod
    def of(fn: Callable[..., Any]) -> FunctionName:
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
    import torch
    import torch.distributed as dist

    here = torch.device("cpu")
    if device == "cuda":
        os.environ.update(NO_MULTICAST)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(here)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    limit = timedelta(minutes=10)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    return here


def _rank_main(
    payload: bytes,
    rank: int,
    world_size: int,
    device: str,
    folder: Path,
    environment: dict[str, str],
    limit: float | None,
) -> None:
    """Run a rank. It writes ready-r, then value-r or error-r (time, error in one line, traceback), and stack-r at
    `limit`, a time of the monotonic clock."""
    import torch
    import torch.distributed as dist

    os.setsid()
    _die_with_caller()
    os.environ.clear()  # the fork server has the first call's environment
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    # Wait for all: a function that ends at once would close connections while other ranks still open theirs.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    stop = StopFlag()
    signal.signal(signal.SIGUSR1, stop.request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the fork server blocks them
    with (folder / f"stack-{rank}").open("w") as stack:
        faulthandler.enable(stack)  # on a signal such as SIGSEGV
        if limit is not None:
            faulthandler.dump_traceback_later(max(limit - time.monotonic(), 1e-3), file=stack)
        (folder / f"ready-{rank}").touch()
        try:
            name, args = pickle.loads(payload)
            fn = name.load()
            here = init_process_group(device, rank, world_size, init_method=f"file://{folder}/store")
            _write(folder / f"value-{rank}", fn(Rank(rank, world_size, here, stop), *pickle.loads(args)))
        except BaseException as error:
            line = f"{type(error).__name__}: {error}"
            _write(folder / f"error-{rank}", (time.monotonic_ns(), line, traceback.format_exc()))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # at once, as destroying the group might wait for others. Peers notice, and complain later
        signal.alarm(5)  # ends this rank if it cannot leave the group
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
        faulthandler.cancel_dump_traceback_later()


def _write(file: Path, value: object) -> None:
    """Pickle a value to a file. Once the file has its name, it is complete."""
    partial = file.with_name(f"{file.name}.part")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(file)


def _die_with_caller() -> None:
    """End this rank and its children when the fork server or the caller is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    caller: Any = multiprocessing.parent_process()
    ends: list[Any] = [caller.sentinel]
    with contextlib.suppress(OSError):  # later children of the caller hold its end of the sentinel, too
        ends.append(os.pidfd_open(caller.pid))

    def watch() -> None:
        wait(ends)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="caller watch", daemon=True).start()


if PRELOAD in os.environ:  # in the fork server
    _preload()
