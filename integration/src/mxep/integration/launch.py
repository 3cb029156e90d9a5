"""Start the ranks of one job on this machine and collect their results. Imports nothing heavy.

    caller ── fork server (torch imported once) ──┬─ rank 0: init_process_group, fn(Rank, *args) ─┐
       ^                                          └─ rank 1: ...                                  │
       └── a scratch folder: value-0 or error-0; stack-0 after a crash or at the time limit ──────┘

- A rank that raises or dies ends the job: `RanksFailed` has every traceback that arrived, in order of arrival, and no
  process is left. A job over its time limit ends in the same way, with the stack of each rank that still runs.
- SIGINT (Ctrl-C) and SIGTERM reach the ranks as SIGUSR1, which sets `Rank.stop`: "stop after this step". A second
  signal kills the ranks at once. So does the first one in a job without steps.
- Each rank leads a process group of its own: the terminal's Ctrl-C does not reach it, and its children end with it.
  It ends itself when the caller is gone, even by SIGKILL.

torch.distributed.elastic's `start_processes` reports only the first failed rank, leaves children of ranks behind, shows
no stacks at a time limit, and kills ranks on Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import math
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
PRELOADED = "torch._dynamo", "mxep.integration.train", "mxep.integration.verify"
"""Modules that the fork server imports. A custom op imports the first at its first call, which takes seconds."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


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


# The caller


def start_fork_server(*modules: str) -> None:
    """Start the ranks' fork server if it does not run yet. It imports PRELOADED and `modules` in the
    background."""
    server: Any = forkserver
    server.set_forkserver_preload([*PRELOADED, *modules])
    resource_tracker.ensure_running()  # first, as it unblocks both signals
    # A scheduler's SIGTERM and a terminal's Ctrl-C reach the whole process group, and ranks need the server until they
    # end. So it blocks both. Ranks inherit that, and SIGUSR1 blocked until they have a handler for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGUSR1))
    try:
        server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@atexit.register
def end_fork_server() -> None:
    """End the fork server at once, even during its imports: it holds this process's stderr."""
    server: Any = forkserver
    if (pid := server._forkserver._forkserver_pid) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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

    fn: a module-level function. args, results: pickled by value (tensors too).
    timeout: seconds for the whole job, start included. None is no limit.
    device: "cpu" (gloo) or "cuda" (rank r on device r, nccl + gloo). "auto" is "cuda" if there are enough devices.
    steps: `fn` looks at `Rank.stop`. False: it does not, so Ctrl-C and SIGTERM raise KeyboardInterrupt here.

    The default process group is up when `fn` starts and gone after it. Each rank has cores // world_size threads.
    Raises RanksFailed, or ValueError for a bad world size or device.
    """
    device = resolve_device(device, world_size)
    payload = pickle.dumps((fn, tuple(args)))
    start_fork_server()
    context = multiprocessing.get_context("forkserver")
    limit = math.inf if timeout is None else time.monotonic() + timeout
    ranks: list[ForkServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="mxep-ranks-") as scratch:
        folder = Path(scratch)
        try:
            for rank in range(world_size):
                given = payload, rank, world_size, device, folder, dict(os.environ), limit
                ranks.append(_start(context, f"rank {rank}", given))
            with _stop_on_signals(ranks if steps else []):
                _wait(ranks, folder, timeout, limit)
            return [pickle.loads((folder / f"value-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()
                process.join()


def _start(context: Any, name: str, given: tuple[Any, ...]) -> ForkServerProcess:
    """Start a rank. The fork server ends if a module that it preloads raises: then it starts again without that, and
    the rank that imports the module says why."""
    for left in reversed(range(20)):
        process: ForkServerProcess = context.Process(target=_rank_main, args=given, name=name)
        try:
            process.start()
            break
        except (EOFError, OSError):
            if not left:
                raise
            time.sleep(0.1)  # it may not have ended yet
            start_fork_server()
    return process


def run_in_place(fn: Callable[..., T], args: Sequence[Any] = (), *, device: str = "auto", steps: bool = True) -> T:
    """Call `fn(Rank, *args)` in this process, which torchrun started. steps: as for `run_ranks`."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = resolve_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    here = init_process_group(device, rank, world_size)
    stop = StopFlag()
    with handle_signals(stop.request) if steps else contextlib.nullcontext():
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
    failures: list[tuple[int, int, str, str]] = []  # of `_failure`
    while running:
        left = None if limit == math.inf else max(limit - time.monotonic(), 0)
        if not (ended := wait(list(running), left)):
            break
        for rank in map(running.pop, ended):  # type: ignore[arg-type]
            if not (folder / f"value-{rank}").exists():
                limit = limit if failures else min(limit, time.monotonic() + GRACE)
                failures.append(_failure(rank, ranks[rank], folder))
    late = ", ".join(map(str, running.values()))
    if failures:
        failures.sort()  # a dead rank (0) comes first: its peers may complain before its end is known
        story = "\n".join(each for *_, each in failures)
        story += f"\n(rank {late} had not finished and was killed)" if running else ""
        raise RanksFailed(story, [rank for _, rank, *_ in failures], failures[0][2])
    if running:
        line = f"rank {late} did not finish within {timeout} s"
        time.sleep(GRACE)  # late ranks write their stacks
        raise RanksFailed(line + "".join(_stack(rank, folder) for rank in running.values()), [*running.values()], line)


def _failure(rank: int, process: ForkServerProcess, folder: Path) -> tuple[int, int, str, str]:
    """Return (time it raised, or 0 if it died; rank; failure in one line; failure with traceback)."""
    if (error := folder / f"error-{rank}").exists():
        when, line, story = pickle.loads(error.read_bytes())
        return when, rank, f"rank {rank} raised: {line}", f"rank {rank} raised:\n{story}"
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    line = f"rank {rank} {how} before it returned"
    why = f"\n({OUT_OF_MEMORY})" if code == -signal.SIGKILL else ""
    return 0, rank, line, f"{line}{why}{_stack(rank, folder)}"


def _stack(rank: int, folder: Path) -> str:
    file = folder / f"stack-{rank}"
    return f"\nrank {rank} was at:\n{stack}" if file.exists() and (stack := file.read_text()) else ""


@contextlib.contextmanager
def _stop_on_signals(ranks: Sequence[ForkServerProcess]) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks the ranks to stop after their step. The second raises KeyboardInterrupt here.
    Without ranks the first one does, too."""
    asked: list[int] = []

    def forward(number: int, frame: object) -> None:
        if asked or not ranks:
            raise KeyboardInterrupt
        asked.append(number)
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGUSR1)

    with handle_signals(forward) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Use `handler` for SIGINT and SIGTERM while open."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


# A rank


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
    payload: bytes, rank: int, world_size: int, device: str, folder: Path, environment: dict[str, str], limit: float
) -> None:
    """Run a rank. It writes value-r or error-r (time, error in one line, traceback), and stack-r at `limit`, a time of
    the monotonic clock."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # collections need not look at what the fork server imported
    os.setsid()
    threading.Thread(target=_end_with_caller, name="caller watch", daemon=True).start()
    os.environ.clear()  # the fork server has the first call's environment
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    # Wait for all: a function that ends at once would close connections while other ranks still open theirs.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    stop = StopFlag()
    signal.signal(signal.SIGUSR1, stop.request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, signal.SIGUSR1))  # the fork server blocks them
    with (folder / f"stack-{rank}").open("w") as stack:
        faulthandler.enable(stack)  # on a signal such as SIGSEGV
        if limit != math.inf:
            faulthandler.dump_traceback_later(max(limit - time.monotonic(), 1e-3), file=stack)
        try:
            fn, args = pickle.loads(payload)
            here = init_process_group(device, rank, world_size, init_method=f"file://{folder}/store")
            _write(folder / f"value-{rank}", fn(Rank(rank, world_size, here, stop), *args))
        except BaseException as error:
            story = time.monotonic_ns(), f"{type(error).__name__}: {error}", traceback.format_exc()
            _write(folder / f"error-{rank}", story)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # at once, as destroying the group might wait for others. Peers notice, and complain later
        signal.alarm(5)  # ends this rank if it cannot leave the group
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
        faulthandler.cancel_dump_traceback_later()


def _write(file: Path, value: object) -> None:
    """Pickle a value to a file. A file with this name is complete, even if the disk is full or the rank is killed."""
    partial = file.with_name(f"{file.name}.part")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(file)


def _end_with_caller() -> None:
    """Wait until the caller is gone, then end this rank and its children."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.killpg(0, signal.SIGKILL)
