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
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .rank import FunctionName, Rank, StopFlag, init_process_group, rank_main, stack_file

__all__ = [
    "FunctionName",
    "Rank",
    "RanksFailed",
    "StopFlag",
    "init_process_group",
    "resolve_device",
    "run_in_place",
    "run_ranks",
]

T = TypeVar("T")

# How long after the first failure the other ranks may still report theirs.
GRACE = 0.3


class RanksFailed(RuntimeError):
    """Some ranks raised, died or ran out of time; the message holds every traceback, in order of arrival.

    ranks: the numbers of the ranks that failed, in the same order.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


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
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="mxep-ranks-") as scratch:
        payload = pickle.dumps((FunctionName.of(fn), pickle.dumps(tuple(args))))
        ranks: list[_Process] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                where = (rank, world_size, device, scratch, environment)
                process = context.Process(target=rank_main, args=(theirs, payload, *where), name=f"rank {rank}")
                process.start()
                theirs.close()
                ranks.append(_Process(rank, process, ours))
            with _forward_signals(ranks):
                _collect(ranks, timeout, Path(scratch))
        finally:
            # First those that still run: one that failed may wait for them while it takes its group down.
            for one in sorted(ranks, key=lambda one: one.finished):
                one.kill()
        return [one.value for one in ranks]


def run_in_place(fn: Callable[..., T], args: Sequence[Any] = (), *, device: str = "auto") -> T:
    """Call `fn(Rank, *args)` in this process, which torchrun started (RANK, WORLD_SIZE, LOCAL_RANK are set)."""
    device = resolve_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = init_process_group(device, rank, world_size)
    stop = StopFlag()
    before = {number: signal.signal(number, stop.request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return fn(Rank(rank, world_size, here, stop), *args)
    finally:
        dist.destroy_process_group()
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
        """Take one message, or see that there will be none; an error text if the rank failed."""
        dead = not self.process.is_alive()
        if dead:  # what it said before is still in the pipe, perhaps a part of a message
            os.set_blocking(self.connection.fileno(), False)
        try:
            kind, *content = pickle.loads(self.connection.recv_bytes())
        except (EOFError, BlockingIOError):
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
    while running := [one for one in ranks if not one.finished]:
        left = limit - time.monotonic()
        # A dead rank's pipe has no end while a child that it forked lives: the fork server tells who has ended.
        sources = {source: one for one in running for source in (one.connection, one.process.sentinel)}
        heard = wait(list(sources), timeout=None if left == float("inf") else max(left, 0.0))
        for one in dict.fromkeys(sources[source] for source in heard):  # type: ignore[index]
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
    files = [(one.rank, stack_file(scratch, one.rank)) for one in late]
    return "\n".join(f"rank {rank} was at:\n{file.read_text()}" for rank, file in files if file.exists())


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
