"""Programs of Triton kernels in an order drawn from a seed, on a CPU: several ranks in one process, all of it watched.

The interpreter runs a launch's programs to their ends, one after another, so there no program ever meets another. Here

    schedule = Schedule(seed)
    schedule.watch(memory, "rank 0's buffer")
    results = schedule.run(body_of_rank_0, body_of_rank_1)

each body, and each program that it launches, is a thread of its own. One runs at a time. Before each access to watched
memory it may have to hand over to another; which one is drawn, so a seed that failed fails again.

Waits. Who polls in vain (a volatile load that brings what it brought before) sleeps until what it polls has changed. If
all sleep, `Deadlock` says who polls what. `resident`: so many programs of a launch run at once, the others have to wait
until one ends, as they do on a GPU that is full.

Order. Memory here is as strong as can be, a GPU's is not. So the rules are checked instead of the luck: each program
carries a vector clock (what it knows to have happened, by program), an atomic with release leaves it at its place, one
with acquire takes it along, if the scopes reach; a launch comes after all that its rank did before. Two accesses of the
same byte by two programs, one of them a store, not both atomic or volatile, neither known to the other: that is a
`Race`, whatever was read. A program without races behaves on a weak memory as on this one. Threads of one program are
not told apart: barriers between them are not checked.
"""

import contextlib
import ctypes
import functools
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl  # noqa: F401 the interpreter wants it beside `_play`
from torch import Tensor
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock

MOST_TASKS = 64
"""Bodies and programs of all ranks: places in a vector clock."""
MOST_STEPS = 200_000
READ, WRITE, STRONG_READ, STRONG_WRITE = range(4)
"""Kinds of accesses; strong: atomic or volatile."""
VERBS = ("reads", "stores", "polls", "changes")
CONFLICTS = {
    READ: (WRITE, STRONG_WRITE),
    WRITE: (READ, WRITE, STRONG_READ, STRONG_WRITE),
    STRONG_READ: (WRITE,),
    STRONG_WRITE: (READ, WRITE),
}
ACQUIRE = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
RELEASE = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
NOT_KERNELS = (str(Path(triton.__file__).parent), __file__, str(Path(__file__).with_name("triton_interpreter.py")))


class Deadlock(AssertionError):
    """All wait."""


class Race(AssertionError):
    """Two accesses that nothing orders."""


class _Stopped(BaseException):
    """Another task failed. No Exception, which the interpreter would wrap."""


@dataclass(eq=False)
class _Task:
    """A body, or a program of a launch of it.

    Attributes:
        number: its place in clocks; programs of a rank that bear the same name share it, one after another.
        speed: how often it is drawn. children: programs of its launch that have not ended.
        polled: (addresses, bytes of an element, what was there, site) of its last volatile load.
    """

    name: str
    rank: int
    number: int
    run: Callable[[], Any]
    parent: "_Task | None"
    clock: np.ndarray
    speed: float
    place: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    children: int = 0
    result: Any = None
    thread: threading.Thread | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    polled: tuple[np.ndarray, int, bytes, str] | None = None
    sleeps: bool = False


class Schedule:
    """One order, drawn from `seed`; `run` it once. resident: programs of a launch that run at once, None: all."""

    def __init__(self, seed: int, *, resident: int | None = None) -> None:
        self._draw, self._resident, self._steps = random.Random(seed), resident, 0
        self._tasks: list[_Task] = []  # that have not ended
        self._threads: list[threading.Thread] = []
        self._names: list[str] = []  # of tasks, by number
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._nudged = False
        self._left: dict[int, dict[tuple[int, bool], np.ndarray]] = {}  # clocks, by address, rank and scope
        self._regions: list[tuple[int, int, int, str, Tensor]] = []  # start, end, number of the first byte, name
        # By kind, task, byte: the task's own time at its last such access, and where that was.
        self._times = self._sites = np.zeros((4, MOST_TASKS, 0), np.int32)
        self._lines: list[str] = []

    def watch(self, memory: Tensor, name: str) -> None:
        """Order what kernels, and `read`, do to contiguous `memory`."""
        assert memory.is_contiguous()
        start, first = memory.data_ptr(), self._times.shape[2]
        self._regions = sorted([*self._regions, (start, start + memory.nbytes, first, name, memory)])
        self._starts, self._ends, self._firsts = np.array([region[:3] for region in self._regions]).T
        more = np.zeros((4, MOST_TASKS, memory.nbytes), np.int32)
        self._times, self._sites = (np.concatenate((old, more), 2) for old in (self._times, self._sites))

    def read(self, *tensors: Tensor) -> None:
        """The running body reads them, which nobody else can tell."""
        for tensor in tensors:
            places = np.array(tensor.data_ptr())
            for size, stride in zip(tensor.shape, tensor.stride()):
                places = places[..., None] + np.arange(size) * stride * tensor.itemsize
            self._access(READ, places.ravel(), tensor.itemsize)

    def run(self, *bodies: Callable[[], Any]) -> list[Any]:
        """The results of the bodies, one a rank. Raises what the first task to fail raised, or Deadlock, or Race."""
        ranks = [self._task(f"rank {rank}", rank, body, None) for rank, body in enumerate(bodies)]
        self._tasks = ranks.copy()
        # A launch lends the language the interpreter's functions: this one, of `_play`, lasts as long as all others.
        stock.GridExecutor(_play, ["schedule"], (1,))(self)
        if self._error is not None:
            raise self._error
        return [task.result for task in ranks]

    def play(self) -> None:
        with _intercepted(self):
            self._hand_over(None)
            self._done.wait()
            for thread in self._threads:
                thread.join()

    # ── who runs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _task(self, name: str, rank: int, run: Callable[[], Any], parent: _Task | None) -> _Task:
        if name not in self._names:
            self._names.append(name)
        number = self._names.index(name)
        clock = np.zeros(MOST_TASKS, np.int32) if parent is None else parent.clock.copy()
        clock[number] += 1
        return _Task(name, rank, number, run, parent, clock, 10 ** self._draw.uniform(-2, 0))

    def launch(self, executor: stock.GridExecutor, *args: Any, **named: Any) -> None:
        """The running body's, to its end: in place of `GridExecutor.__call__`."""
        known = inspect.getfullargspec(executor.fn).args
        bound = inspect.getcallargs(executor.fn, *args, **{name: v for name, v in named.items() if name in known})
        values = {name: v if name in executor.constexprs else stock._implicit_cvt(v) for name, v in bound.items()}
        grid = executor.grid(values) if callable(executor.grid) else executor.grid
        grid = (*grid, 1, 1)[:3]
        body = self._running
        programs = []
        for number, place in enumerate(np.ndindex(grid)):
            run = functools.partial(executor.fn, **values)
            programs.append(self._task(f"rank {body.rank}, program {number}", body.rank, run, body))
            programs[-1].place, programs[-1].grid = place, grid
        body.clock[body.number] += 1
        body.children = len(programs)
        self._tasks += programs
        self._hand_over(body)
        body.clock = functools.reduce(np.maximum, [program.clock for program in programs], body.clock)

    def _main(self, task: _Task) -> None:
        try:
            self._resume(task)
            with np.errstate(all="ignore"):
                task.result = task.run()
        except _Stopped:
            return
        except BaseException as error:
            self._fail(error)
            return
        self._tasks.remove(task)
        if task.parent is not None:
            task.parent.children -= 1
        self._hand_over(None)

    def _hand_over(self, me: _Task | None) -> None:
        """To one that can run, maybe to `me` again; None: whoever ran before has ended."""
        self._steps += 1
        ready = [task for task in self._tasks if self._can_run(task)]
        if not ready and not self._nudged:  # maybe one polls what is there already: let all look again
            self._nudged = True
            ready = [task for task in self._tasks if task.sleeps]
        if not ready or self._steps > MOST_STEPS:
            if self._tasks:
                why = f"no end after {self._steps} steps" if ready else "all wait"
                self._fail(Deadlock("\n".join([f"{why}:", *map(self._waits_for, self._tasks)])))
            self._done.set()
            if me is not None:
                raise _Stopped
            return
        (task,) = self._draw.choices(ready, [task.speed for task in ready])
        if task is me:
            return
        self._running = task
        if task.thread is None:
            task.thread = threading.Thread(target=self._main, args=(task,), daemon=True)
            self._threads.append(task.thread)
            task.thread.start()
        else:
            task.go.release()
        if me is not None:
            me.go.acquire()
            self._resume(me)

    def _resume(self, task: _Task) -> None:
        if self._error is not None:
            raise _Stopped
        stock.interpreter_builder.grid_idx, stock.interpreter_builder.grid_dim = task.place, task.grid

    def _can_run(self, task: _Task) -> bool:
        if task.sleeps and task.polled is not None:
            addresses, size, seen, _ = task.polled
            return _bytes_at(addresses, size) != seen
        if task.thread is None and task.parent is not None and self._resident is not None:
            running = [other for other in self._tasks if other.thread is not None and other.parent is task.parent]
            return len(running) < self._resident
        return not task.children

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        for task in self._tasks:
            task.go.release()
        self._done.set()

    def _waits_for(self, task: _Task) -> str:
        if task.children:
            return f"  {task.name}: for its programs"
        if task.thread is None:
            return f"  {task.name}: for room, as {self._resident} run at once"
        if task.polled is None:
            return f"  {task.name}: for nothing"
        addresses, size, seen, site = task.polled
        words = " ".join(hex(word) for word in np.frombuffer(seen, f"u{size}"))
        return f"  {task.name}: for {self._name(int(addresses[0]))}, at {site}, which holds {words}"

    # ── what they do to memory ───────────────────────────────────────────────────────────────────────────────────────

    def load(self, original: Any, builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        me, addresses, size = self._running, _addresses(pointers, mask), _size(pointers)
        if named.get("is_volatile", rest and rest[-1]):
            before = me.polled
            me.polled = addresses, size, _bytes_at(addresses, size), _site()
            me.sleeps = before is not None and np.array_equal(before[0], addresses) and before[2] == me.polled[2]
            self._access(STRONG_READ, addresses, size)
            me.sleeps = False
            me.polled = addresses, size, _bytes_at(addresses, size), _site()
        else:
            self._access(READ, addresses, size)
        return original(builder, pointers, mask, *rest, **named)

    def store(self, original: Any, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses = _addresses(pointers, mask)
        self._access(WRITE, addresses, _size(pointers))
        for address in self._left.keys() & set(addresses.tolist()):
            del self._left[address]  # whoever acquires from now on reads this store
        return original(builder, pointers, value, mask, *rest)

    def change(self, original: Any, builder: Any, kind: Any, pointers: Any, value: Any, mask: Any, *order: Any) -> Any:
        self._atomic(_addresses(pointers, mask), _size(pointers), *order)
        return original(builder, kind, pointers, value, mask, *order)

    def compare(self, original: Any, builder: Any, pointers: Any, wanted: Any, value: Any, *order: Any) -> Any:
        self._atomic(pointers.data.ravel(), _size(pointers), *order)
        return original(builder, pointers, wanted, value, *order)

    def _atomic(self, addresses: np.ndarray, size: int, sem: Any, scope: Any) -> None:
        me, everywhere = self._running, scope == ir.MEM_SYNC_SCOPE.SYSTEM

        def acquire() -> None:
            for address in addresses.tolist() if sem in ACQUIRE else ():
                for (rank, to_all), clock in self._left.get(address, {}).items():
                    if rank == me.rank or (to_all and everywhere):
                        me.clock = np.maximum(me.clock, clock)

        self._access(STRONG_WRITE, addresses, size, acquire)
        if sem in RELEASE:
            for address in addresses.tolist():
                left = self._left.setdefault(address, {})
                left[me.rank, everywhere] = np.maximum(left.get((me.rank, everywhere), 0), me.clock)
            me.clock[me.number] += 1

    def _access(self, kind: int, addresses: np.ndarray, size: int, acquire: Callable[[], None] = lambda: None) -> None:
        """Hand over; then, if elements of `size` bytes are watched, compare the access with others and note it."""
        if not len(self._bytes(addresses, size)):
            return
        me = self._running
        self._hand_over(me)
        self._nudged &= kind == STRONG_READ
        acquire()
        byte = self._bytes(addresses, size)  # others may have brought memory to watch
        for other in CONFLICTS[kind]:
            unknown = self._times[other][:, byte] > me.clock[:, None]
            if unknown.any():
                task, i = np.argwhere(unknown)[0]
                line = self._lines[self._sites[other, task, byte[i]]]
                what = f"{VERBS[kind]} {self._name(self._address(int(byte[i])))} at {_site()}"
                self._fail(
                    Race(f"{me.name} {what}, {self._names[task]} {VERBS[other]} it at {line}: nothing orders them")
                )
                raise _Stopped
        if (line := _site()) not in self._lines:
            self._lines.append(line)
        self._times[kind, me.number, byte] = me.clock[me.number]
        self._sites[kind, me.number, byte] = self._lines.index(line)

    def _bytes(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The numbers of those that are watched."""
        addresses = addresses.astype(np.int64, copy=False)
        region = np.searchsorted(self._starts, addresses, "right") - 1
        watched = (region >= 0) & (addresses < self._ends[region])
        first = (addresses - self._starts[region] + self._firsts[region])[watched]
        return (first[:, None] + np.arange(size)).ravel()

    def _address(self, byte: int) -> int:
        return next(start + byte - first for start, end, first, *_ in self._regions if 0 <= byte - first < end - start)

    def _name(self, address: int) -> str:
        return next(f"{name} + {address - start}" for start, end, _, name, _ in self._regions if start <= address < end)


def _play(schedule: Schedule) -> None:
    schedule.play()


@contextlib.contextmanager
def _intercepted(schedule: Schedule) -> Iterator[None]:
    """Launches, and what kernels do to memory, go through the schedule."""
    with pytest.MonkeyPatch.context() as patch:

        def through(name: str, method: Callable[..., Any]) -> None:
            original = getattr(stock.InterpreterBuilder, name)
            patch.setattr(stock.InterpreterBuilder, name, lambda *args, **named: method(original, *args, **named))

        through("create_masked_load", schedule.load)
        through("create_masked_store", schedule.store)
        through("create_atomic_rmw", schedule.change)
        through("create_atomic_cas", schedule.compare)
        patch.setattr(stock.GridExecutor, "__call__", lambda *args, **named: schedule.launch(*args, **named))
        yield


def _addresses(pointers: Any, mask: Any) -> np.ndarray:
    return pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].ravel()


def _size(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _bytes_at(addresses: np.ndarray, size: int) -> bytes:
    return b"".join(ctypes.string_at(address, size) for address in addresses.tolist())


def _site() -> str:
    """The line of a kernel, or of a test, that is running."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(NOT_KERNELS) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def mutate(patch: pytest.MonkeyPatch, kernel: Any, old: str, new: str) -> None:
    """Until `patch` is undone, one place in the source of a kernel, or of a device function, reads otherwise."""
    prepare = kernel.rewriter._prepare_source

    def prepared(lines: list[str]) -> str:
        source: str = prepare(lines)
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
        return source.replace(old, new)

    with pytest.MonkeyPatch.context() as here:
        here.setattr(kernel.rewriter, "_prepare_source", prepared)
        patch.setitem(kernel.rewritten_fn, kernel.fn, kernel.rewriter.rewrite_ast())
