"""Start the ranks of one job on this machine and collect their results.

    caller ── fork server (torch imported once) ──┬─ rank 0: init_process_group, fn(Rank, *args) ─┐
       ^                                          └─ rank 1: ...                                  │
       └───────────── ("ready" | "value" | "error", ...) over one pipe a rank ────────────────────┘

- A rank that raises or dies ends the job: `RanksFailed` carries every traceback that arrived, the first one first, and
  no process is left behind. A job over its time limit ends the same way, with the stack of every rank still running.
- Ctrl-C (SIGINT) and SIGTERM reach the ranks as SIGUSR1, which only sets `Rank.stop`: "stop after this step". A second
  signal kills them at once, as does the first one before they have started, or of a job that has no steps.
- Each rank leads a process group of its own, so the terminal's Ctrl-C does not hit it and killing it takes its children
  along. It ends itself when the caller is gone, even by SIGKILL.

It does not use `start_processes` of torch.distributed.elastic, which reports the first failed rank only, leaves the
children of ranks behind, shows no stacks at a time limit, and ends ranks on Ctrl-C instead of after their step.
"""

from __future__ import annotations

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
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .process import start_fork_server

T = TypeVar("T")

OUT_OF_MEMORY = "most likely out of memory: the system ends a process that takes the last of it by SIGKILL"
GRACE = 0.3
"""Seconds after the first failure in which the other ranks may still report theirs."""


class RanksFailed(RuntimeError):
    """Some ranks raised, died or ran out of time; the message holds every traceback, in order of arrival.

    ranks: the numbers of the ranks that failed, in the same order. first: the first failure in one line.
    """

    def __init__(self, message: str, ranks: Sequence[int], first: str) -> None:
        super().__init__(message)
        self.ranks, self.first = tuple(ranks), first


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

    fn: a module-level function; ranks find it by its file and name, so its module need not be importable.
    args, results: pickled by value (tensors too).
    timeout: seconds for the whole job, start included; None is no limit.
    device: "cpu" (gloo), "cuda" (rank r on device r, nccl + gloo), or "auto": "cuda" if there are enough of them.
    steps: `fn` looks at `Rank.stop`. If it does not, Ctrl-C and SIGTERM raise KeyboardInterrupt here.

    The default process group is up when `fn` starts and gone after it. Each rank has cores // world_size threads.
    Raises RanksFailed, or ValueError for a bad world size or device.
    """
    device = resolve_device(device, world_size)
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    payload = pickle.dumps((FunctionName.of(fn), pickle.dumps(tuple(args))))
    ranks: list[_Process] = []
    with tempfile.TemporaryDirectory(prefix="mxep-ranks-") as scratch:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (sender, payload, rank, world_size, device, scratch, dict(os.environ))
                process = context.Process(target=rank_main, args=arguments, name=f"rank {rank}")
                process.start()
                sender.close()
                ranks.append(_Process(rank, process, receiver))
            with _forward_signals(ranks if steps else []):
                _collect(ranks, timeout, Path(scratch))
        finally:
            # First those that still run: one that failed may wait for them while it takes its group down.
            for one in sorted(ranks, key=lambda one: one.finished):
                one.kill()
    return [one.value for one in ranks]


def run_in_place(fn: Callable[..., T], args: Sequence[Any] = (), *, device: str = "auto", steps: bool = True) -> T:
    """Call `fn(Rank, *args)` in this process, which torchrun started (RANK, WORLD_SIZE, LOCAL_RANK are set).

    steps: as of `run_ranks`.
    """
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


class _Process:
    """The caller's view of one rank. ready: its signal handlers are in place. finished: it returned, raised or died.

    error: its failure in one line; story: with the traceback.
    """

    def __init__(self, rank: int, process: ForkServerProcess, connection: Connection) -> None:
        self.rank, self.process, self.connection = rank, process, connection
        self.pid = process.pid or 0  # it runs already
        self.ready = self.finished = self.died = False
        self.value: Any = None
        self.error = self.story = ""

    def signal(self, number: int) -> None:
        if self.ready and not self.finished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def receive(self) -> None:
        """Take one message, or see that there will be none."""
        if not self.process.is_alive():  # earlier messages are still in the pipe, perhaps a part of one
            os.set_blocking(self.connection.fileno(), False)
        try:
            kind, content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, BlockingIOError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            kind, content = "died", f"rank {self.rank} {how} before it returned"
        self.ready = True
        self.finished = kind != "ready"
        if kind == "value":
            self.value = content
        elif kind == "error":
            self.error, self.story = (f"rank {self.rank} raised:{each}" for each in content)
        elif kind == "died":
            self.error = self.story = content
            if "SIGKILL" in content:
                self.story += f"\n({OUT_OF_MEMORY})"
            self.died = True

    def kill(self) -> None:
        """End the rank and its children; a rank that has returned gets the time to leave by itself."""
        if self.finished:
            self.process.join(timeout=5)
        # Its group exists from "ready" on; before that the rank has no children.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


def _collect(ranks: list[_Process], timeout: float | None, scratch: Path) -> None:
    """Read the ranks' messages until all have returned; raise RanksFailed on the first failure or at the limit."""
    limit = float("inf") if timeout is None else time.monotonic() + timeout
    failed: list[_Process] = []
    while running := [one for one in ranks if not one.finished]:
        left = limit - time.monotonic()
        # A dead rank's pipe stays open while its children live: the fork server reports ended ranks.
        sources: dict[Any, _Process] = {end: one for one in running for end in (one.connection, one.process.sentinel)}
        arrived = wait(list(sources), timeout=None if left == float("inf") else max(left, 0.0))
        for one in dict.fromkeys(sources[end] for end in arrived):
            one.receive()
            if one.error:
                if not failed:
                    limit = min(limit, time.monotonic() + GRACE)
                failed.append(one)
        if not arrived:
            break
    names = ", ".join(str(one.rank) for one in running)
    if failed:
        failed.sort(key=lambda one: not one.died)  # a dead rank's peers may complain before its end is reported
        note = f"\n(rank {names} had not finished and was killed)" if running else ""
        stories = "\n".join(one.story for one in failed)
        stories += _stacks([one for one in failed if one.died], scratch)
        raise RanksFailed(stories + note, [one.rank for one in failed], failed[0].error)
    if running:
        late = f"rank {names} did not finish within {timeout} s"
        for one in running:
            one.signal(signal.SIGUSR2)
        time.sleep(GRACE)
        raise RanksFailed(late + _stacks(running, scratch), [one.rank for one in running], late)


def _stacks(ranks: list[_Process], scratch: Path) -> str:
    """Stacks of these ranks, as far as they wrote one."""
    found = ((one.rank, stack_file(scratch, one.rank)) for one in ranks)
    stacks = ((rank, file.read_text()) for rank, file in found if file.exists())
    return "".join(f"\nrank {rank} was at:\n{stack}" for rank, stack in stacks if stack)


@contextlib.contextmanager
def _forward_signals(ranks: list[_Process]) -> Iterator[None]:
    """SIGINT and SIGTERM ask the ranks to stop after their step; the second one raises KeyboardInterrupt here. Without
    ranks the first one does."""
    stopping = False

    def forward(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping or not ranks or not all(one.ready for one in ranks):
            raise KeyboardInterrupt
        stopping = True
        for one in ranks:
            one.signal(signal.SIGUSR1)

    with _handler(forward) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """`handler` for SIGINT and SIGTERM."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


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
    """First argument of a rank's function: its number, the number of ranks, its device and the stop flag."""

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
    # A function that ends at once would close its connections while other ranks still open theirs.
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
        # The caller holds the other end of the sentinel's pipe, and so does every child that it forks later.
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
