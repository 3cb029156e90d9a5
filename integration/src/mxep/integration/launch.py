"""Starts the ranks of one job on this machine and brings back what they return.

    caller ── fork server (torch imported once) ──┬─ rank 0: init_process_group, fn(Rank, *args) ─┐
       ^                                          └─ rank 1: ...                                  │
       └───────────── ("ready" | "value" | "error", ...) over one pipe a rank ────────────────────┘

- A rank that raises or dies ends the job: `RanksFailed` carries every traceback that arrived, the first one first, and
  no process is left behind. A job over its time limit ends the same way, with the stack of every rank still running.
- Ctrl-C (SIGINT) and SIGTERM reach the ranks as SIGUSR1, which only sets `Rank.stop`: "stop after this step". A second
  signal kills them at once.
- Each rank leads a process group of its own, so the terminal's Ctrl-C does not hit it and killing it takes its children
  along. It ends itself when the caller is gone, even by SIGKILL.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# How long after the first failure the other ranks may still report theirs.
GRACE = 0.3
PR_SET_PDEATHSIG = 1
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class RanksFailed(RuntimeError):
    """Some ranks raised, died or ran out of time; the message holds every traceback, in order of arrival.

    ranks: the numbers of the ranks that failed, in the same order.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StopFlag:
    """Set in a rank by SIGUSR1 (Ctrl-C at the caller): the job should stop after this step."""

    def __init__(self) -> None:
        self.requested = False

    def agreed(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether any rank of `group` was asked to stop: one answer for all. A collective on the host (gloo)."""
        flag = torch.tensor([self.requested], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)


@dataclass(frozen=True)
class Rank:
    """What a rank's function gets: its number, how many there are, its device and the flag that asks it to stop."""

    rank: int
    world_size: int
    device: torch.device
    stop: StopFlag = field(default_factory=StopFlag)


def run_ranks(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    world_size: int,
    timeout: float | None = None,
    device: str = "auto",
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> list[T]:
    """Call `fn(Rank, *args)` in `world_size` new processes and return their results, in rank order.

    fn: a module-level function; ranks find it by its file and name, so its module need not be importable.
    args, results: pickled by value (tensors too).
    timeout: seconds for the whole job, start included; None is no limit.
    device: "cpu" (gloo), "cuda" (rank r on device r, nccl + gloo), or "auto": "cuda" if there are enough of them.
    env: variables on top of the caller's environment.
    preload: more modules for the fork server to import; counts in the first call of a process.

    The default process group is up when `fn` starts and gone after it. Each rank has cores // world_size threads.
    Raises RanksFailed, or ValueError for a bad world size or device.
    """
    device = resolve_device(device, world_size)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mxep.integration.preload", *preload])
    environment = {**os.environ, **NO_MULTICAST, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="mxep-ranks-") as scratch:
        payload = pickle.dumps((FunctionName.of(fn), pickle.dumps(tuple(args))))
        ranks: list[_Process] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                where = (rank, world_size, device, scratch, environment)
                process = context.Process(target=_rank_main, args=(theirs, payload, *where), name=f"rank {rank}")
                process.start()
                theirs.close()
                ranks.append(_Process(rank, process, ours))
            with _forward_signals(ranks):
                _collect(ranks, timeout, Path(scratch))
        finally:
            for one in ranks:
                one.kill()
        return [one.value for one in ranks]


def run_in_place(fn: Callable[..., T], args: Sequence[Any] = (), *, device: str = "auto") -> T:
    """Call `fn(Rank, *args)` in this process, which torchrun started (RANK, WORLD_SIZE, LOCAL_RANK are set)."""
    device = resolve_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    stop = StopFlag()
    before = {number: signal.signal(number, lambda *_: _request(stop)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with process_group(device, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), stop=stop) as rank:
            return fn(rank, *args)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


@contextlib.contextmanager
def process_group(
    device: str, rank: int, world_size: int, *, init_method: str = "env://", stop: StopFlag | None = None
) -> Iterator[Rank]:
    """The default process group for the length of the block."""
    here = init_process_group(device, rank, world_size, init_method=init_method)
    try:
        yield Rank(rank, world_size, here, stop or StopFlag())
    finally:
        dist.destroy_process_group()


def init_process_group(device: str, rank: int, world_size: int, *, init_method: str = "env://") -> torch.device:
    """Bring up the default group: gloo, or nccl beside gloo for "cuda". Returns this rank's device, made current."""
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(here)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    limit = timedelta(minutes=10)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    return here


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
        found: Any = sys.modules.get(self.module)
        if found is None:
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


# ── in the caller ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Process:
    """The caller's view of one rank."""

    def __init__(self, rank: int, process: ForkServerProcess, connection: Connection) -> None:
        self.rank, self.process, self.connection = rank, process, connection
        self.ready = False  # its signal handlers are in place
        self.finished = False
        self.value: Any = None

    def signal(self, number: int) -> None:
        if self.ready and not self.finished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def receive(self) -> str | None:
        """Take one message; an error text if the rank failed."""
        try:
            kind, *content = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.finished = True
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            return f"rank {self.rank} {how} before it returned"
        if kind == "ready":
            self.ready = True
            return None
        self.finished = True
        if kind == "value":
            (self.value,) = content
            return None
        return f"rank {self.rank} raised:\n{content[0]}"

    def kill(self) -> None:
        """End the rank and its children; a rank that has returned gets the time to leave by itself."""
        if self.finished:
            self.process.join(timeout=5)
        # Its group exists from "ready" on; before that the rank has no children.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


def _collect(ranks: list[_Process], timeout: float | None, scratch: Path) -> None:
    """Read the ranks' messages until all have returned; raise RanksFailed on the first failure or at the limit."""
    limit = float("inf") if timeout is None else time.monotonic() + timeout
    errors: list[tuple[int, str]] = []
    while running := {one.connection: one for one in ranks if not one.finished}:
        left = limit - time.monotonic()
        heard = wait(list(running), timeout=None if left == float("inf") else max(left, 0.0))
        for connection in heard:
            one = running[connection]  # type: ignore[index]
            if error := one.receive():
                if not errors:
                    limit = min(limit, time.monotonic() + GRACE)
                errors.append((one.rank, error))
        if not heard:
            break
    if not running and not errors:
        return
    late = [one for one in ranks if not one.finished]
    names = ", ".join(str(one.rank) for one in late)
    if errors:
        note = f"\n(rank {names} had not finished and was killed)" if late else ""
        raise RanksFailed("\n".join(text for _, text in errors) + note, [rank for rank, _ in errors])
    raise RanksFailed(
        f"rank {names} did not finish within {timeout} s\n{_stacks(late, scratch)}", [one.rank for one in late]
    )


def _stacks(late: list[_Process], scratch: Path) -> str:
    """Where each of these ranks is now."""
    for one in late:
        one.signal(signal.SIGUSR2)
    time.sleep(GRACE)
    files = [(one.rank, _stack_file(scratch, one.rank)) for one in late]
    return "\n".join(f"rank {rank} was at:\n{file.read_text()}" for rank, file in files if file.exists())


def _stack_file(scratch: str | Path, rank: int) -> Path:
    return Path(scratch) / f"stack-{rank}"


@contextlib.contextmanager
def _forward_signals(ranks: list[_Process]) -> Iterator[None]:
    """SIGINT and SIGTERM ask the ranks to stop after their step; the second one raises KeyboardInterrupt here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def forward(number: int, frame: object) -> None:
        nonlocal asked
        if asked or not all(one.ready for one in ranks):
            raise KeyboardInterrupt
        asked = True
        for one in ranks:
            one.signal(signal.SIGUSR1)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ── in a rank ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rank_main(
    connection: Connection,
    payload: bytes,
    rank: int,
    world_size: int,
    device: str,
    scratch: str,
    environment: dict[str, str],
) -> None:
    os.setsid()
    _die_with_caller()
    os.environ.clear()  # the fork server's are those of the first call
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    stop = StopFlag()
    signal.signal(signal.SIGUSR1, lambda *_: _request(stop))
    with _stack_file(scratch, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR2, file=stack)
        connection.send_bytes(pickle.dumps(("ready",)))
        try:
            name, args = pickle.loads(payload)
            fn = name.load()
            here = init_process_group(device, rank, world_size, init_method=f"file://{scratch}/store")
            value = fn(Rank(rank, world_size, here, stop), *pickle.loads(args))
            message = pickle.dumps(("value", value))
        except BaseException:
            message = pickle.dumps(("error", traceback.format_exc()))
        # An error goes out before the group goes down, or the peers' complaints about that would come first.
        connection.send_bytes(message)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR2)


def _request(stop: StopFlag) -> None:
    stop.requested = True


def _die_with_caller() -> None:
    """End this rank and its children when the fork server or the caller is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    caller = multiprocessing.parent_process()
    assert caller is not None

    def watch() -> None:
        # The sentinel is a pipe whose other end the caller holds: it ends with the caller, however that ends.
        wait([caller.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="caller watch", daemon=True).start()
