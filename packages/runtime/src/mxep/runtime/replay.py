"""`@replayed`: a function of tensors that is a CUDA graph from its second call of a kind on, wherever they lie.

The Python between two launches costs the host more than the launches, and these more than a graph of them. Calls with
tensors of the same shapes launch the same kernels, so the second such call captures them, and it and all later ones are
a launch of the graph, with the addresses of this call (`graph.py`). Unlike a graph that a user captures, it fixes no
memory of arguments and results: weights may move, calls may overlap, and all of it works under FSDP2, checkpoints and
pipelines.
"""

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mxep.runtime.graph import MovingGraph

MOST_GRAPHS = 256
"""Of a function."""
MOST_BYTES = 1 << 30
"""That a call may allocate to be a graph, if its function says no other. A graph holds its arguments and its
temporaries to its end, where a function that is called drops them as it goes. To move a GiB takes an H200 0.75 ms and
more, the host less to launch what does."""
LEAST_DEVICE = 0
"""Index of the first device that replays; -1 is the CPU."""
Tensors = list[Any]
"""Tensors, MXTensors or their parts, and None."""


class _Parts(NamedTuple):
    """How an object of tensors is taken apart, and put together."""

    whole: type
    tensors: int
    apart: Callable[[Any], Any]


_PARTS: dict[type, _Parts] = {}
"""By the type of its parts, a NamedTuple of which the first are its tensors."""


def register_parts(parts: type, whole: type, tensors: int) -> None:
    """Let replayed functions take and give objects of type `whole` as `parts`, a NamedTuple.

    The first `tensors` fields are tensors or None, the others hashable. `parts.of(whole)` and `parts.join()` convert.
    """
    _PARTS[parts] = _WHOLE[whole] = _Parts(whole, tensors, parts.of)  # type: ignore[attr-defined]


_WHOLE: dict[type, _Parts] = {}


class _Refused:
    """A kind of calls that is not replayed. Another try follows at its 2nd, 4th, 8th ... call: what stood in the way
    may have been another thread's memory, a user's pool or a passing error.

    Attributes:
        why: the reason of the last try. measures: whether a try measures a call before it captures one.
    """

    __slots__ = ("calls", "measures", "tries", "why")

    def __init__(self, why: str, measures: bool, last: object) -> None:
        self.why, self.measures = why, measures
        self.tries: int = 1 + last.tries if isinstance(last, _Refused) else 0
        self.calls = 1 << self.tries

    def is_due(self) -> bool:
        """Count a call. Whether it tries again."""
        self.calls -= 1
        return self.calls <= 0  # below, where another thread counted in between


class _Replay(NamedTuple):
    """A graph, and of which of its results MXTensors are made: what else they are, by place, or None."""

    graph: MovingGraph
    joined: list[Any]


class Replayed:
    """What :func:`replayed` makes.

    Attributes:
        function: the function itself. replays: how many calls were launches of a graph. most_bytes: that a call may
            allocate to be one.
    """

    most_bytes = MOST_BYTES

    def __init__(self, function: Callable[..., Tensors]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.replays = 0
        self._kinds: dict[Hashable, _Replay | _Refused | bool | None] = {}
        """By what decides the course. None: seen once. False: seen only within the first call of another function."""
        self._lock = threading.Lock()

    @property
    def refused(self) -> list[str]:
        """Why not, of the kinds of calls that cannot be replayed."""
        return [kind.why for kind in self._kinds.values() if isinstance(kind, _Refused)]

    def state(self, *static: Any) -> Hashable | None:
        """What decides the course besides the arguments; None if this call cannot be replayed. For subclasses."""
        return ()

    def capturing(self, *static: Any) -> AbstractContextManager[object]:
        """Entered while the function is captured. For subclasses."""
        return nullcontext()

    def launched(self, *static: Any) -> None:
        """Called after each launch of a graph. For subclasses."""

    def __call__(self, tensors: Tensors, *static: Any) -> Tensors:
        results = self.replay(tensors, *static)
        return self.direct(tensors, *static) if results is None else results

    def replay(self, tensors: Tensors, *static: Any) -> Tensors | None:
        """What a launch of the graph gives, which empties `tensors`; None where the function is to be called."""
        if torch.compiler.is_compiling():
            return None
        key, flat, addresses = _taken_apart(tensors, static)
        state = None if key is None else self.state(*static)
        if state is None:
            return None
        key = key, state
        found = self._kinds.get(key, self)
        if found is self and _here.counts:  # its bytes are the outer function's; where shapes change, it comes again
            self._keep(key, False)
            return None
        if _here.calls:
            return None
        if type(found) is _Refused and not found.is_due():
            return None
        if found is self or found is False or (type(found) is _Refused and found.measures):
            flat.clear()
            results, why = self._counted(tensors, static, type(found) is _Refused)
            self._keep(key, None if why is None else _Refused(why, True, found))
            return results
        if type(found) is not _Replay:
            made = self._capture(tensors, flat, static)
            found = _Refused(made, False, found) if isinstance(made, str) else made
            self._keep(key, found)
        if type(found) is not _Replay:
            return None
        try:
            results = found.graph.launch(flat, addresses)
        except torch.OutOfMemoryError:  # nothing was launched, and the function drops as it goes what a graph holds
            return None
        except RuntimeError as error:  # nothing was launched; the function raises what is still wrong
            self._keep(key, _Refused(self._told(f"{type(error).__name__}: {error}"), False, None))
            return None
        tensors.clear()
        self.replays += 1
        self.launched(*static)
        return _joined(results, found.joined)

    def _counted(self, tensors: Tensors, static: tuple[Any, ...], again: bool) -> tuple[Tensors, str | None]:
        """The function's results, and why it allocates too much for a graph.

        again: its parts may be graphs by now, which allocate less than what they are graphs of: they are called.
        """
        device, outer = torch._C._cuda_getDevice(), (_here.counts, _here.calls)
        _here.counts, _here.calls = True, again or _here.calls
        try:
            before = _allocated(device)
            results = self.direct(tensors, *static)
            nbytes = _allocated(device) - before
        finally:
            _here.counts, _here.calls = outer
        if nbytes <= self.most_bytes:
            return results, None
        return results, self._told(f"it allocates {nbytes} bytes, more than {self.most_bytes}")

    def _capture(self, tensors: Tensors, flat: Tensors, static: tuple[Any, ...]) -> _Replay | str:
        """The graph, or why there is none."""
        joined: list[Any] = []

        def run() -> Tensors:
            joined.clear()
            results: Tensors = []
            for x in self.direct(list(tensors), *static):
                known = _PARTS.get(type(x))
                results += [x] if known is None else x[: known.tensors]
                joined.append(None if known is None else (type(x), known.tensors, x[known.tensors :]))
            return results

        why = ""
        for is_last in (False, True):
            try:
                return _Replay(MovingGraph(run, flat, functools.partial(self.capturing, *static)), joined)
            except torch.OutOfMemoryError as error:
                why = f"OutOfMemoryError: {error}"
            except Exception as error:  # the function itself runs then, and raises what is its own
                return self._told(f"{type(error).__name__}: {error}")
            if not is_last:  # here the failed try holds nothing any more
                torch.cuda.empty_cache()  # of which a capture can take nothing
        return self._told(why)

    def _told(self, why: str) -> str:
        logging.getLogger("mxep.runtime").debug("%s is not replayed: %s", self.function.__name__, why)
        return why

    def _keep(self, key: Hashable, kind: _Replay | _Refused | bool | None) -> None:
        with self._lock:
            if key not in self._kinds and len(self._kinds) >= MOST_GRAPHS:
                # Shapes that came once go before those that come again.
                once = (other for other, kept in self._kinds.items() if kept is None or kept is False)
                del self._kinds[next(once, next(iter(self._kinds)))]
            self._kinds[key] = kind

    def direct(self, tensors: Tensors, *static: Any) -> Tensors:
        """The function itself, called as it would be replayed."""
        whole = [x.join() if type(x) in _PARTS else x for x in tensors]
        tensors.clear()
        return [_WHOLE[type(x)].apart(x) if type(x) in _WHOLE else x for x in self.function(whole, *static)]


def replayed(function: Callable[..., Tensors]) -> Replayed:
    """Replay a function (tensors, *static) -> tensors on CUDA; elsewhere it is called as ever.

    tensors, and what it returns: lists of tensors, objects of tensors (`register_parts`) and None; it returns what it
    made, views of that, or what it got. It owns the list, and may empty it so that memory goes early. static: hashable;
    with shapes, strides and dtypes it decides all that the function does. Its callers give and get objects as parts.

    It must not read from the device, nor decide by anything but its arguments, and other tensors that it uses have to
    stay where they are. Not replayed: CPU tensors, other subclasses, with gradients enabled, under torch.compile or a
    dispatch mode, while a graph is captured, when a profiler hooks Triton's launches, and functions that cannot be
    captured or whose first call allocates more than MOST_BYTES.
    """
    return Replayed(function)


@contextmanager
def no_replays() -> Iterator[None]:
    """While it is open, in all threads, replayed functions are called: for who looks into them, as a debugger does."""
    global _paused
    with _pausing:
        _paused += 1
    try:
        yield
    finally:
        with _pausing:
            _paused -= 1


_paused = 0
_pausing = threading.Lock()


class _Here(threading.local):
    """What a thread does. counts: it counts the bytes of a call. calls: no function within that is replayed."""

    counts = False
    calls = False


_here = _Here()


def _joined(flat: list[Tensor | None], joined: list[Any]) -> Tensors:
    rest = iter(flat)
    return [next(rest) if of is None else of[0](*(next(rest) for _ in range(of[1])), *of[2]) for of in joined]


def _taken_apart(tensors: Tensors, static: tuple[Any, ...]) -> tuple[Hashable | None, Tensors, tuple[int, ...]]:
    """What decides the function's course, None where it is not replayed; the plain tensors, and their addresses."""
    if _paused or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return None, [], ()
    # 0.0 equals -0.0, and 1 equals True and 1.0.
    static = tuple([(type(x), x.hex() if type(x) is float else x) for x in static])
    if torch._C._is_any_autocast_enabled():
        static = *static, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    flat: Tensors = []
    for x in tensors:
        if (known := _PARTS.get(type(x))) is not None:
            flat += x[: known.tensors]
            static = *static, len(flat), x[known.tensors :]
        else:
            flat.append(x)
    read = _reader(*map(type, flat))
    found = None if read is None else read(*flat)
    if found is None or found[0][0] != torch._C._cuda_getDevice() or _launch().is_profiled() or _is_capturing():
        return None, [], ()
    facts, addresses = found
    return (static, torch.is_inference_mode_enabled(), _settings(), _stream(facts[0]), facts), flat, addresses


def _settings() -> tuple[object, ...]:
    """Settings of the process by which torch chooses kernels, or fills memory that it gives out."""
    c = torch._C
    return (
        c._get_deterministic_algorithms(),
        c._get_deterministic_fill_uninitialized_memory(),
        c._get_fp32_precision_getter("cuda", "matmul"),
        c._get_cublas_allow_bf16_reduced_precision_reduction(),
        c._get_cublas_allow_fp16_reduced_precision_reduction(),
        c._get_cublas_allow_fp16_accumulation(),
        c._get_sm_carveout_experimental(),
        c._get_blas_preferred_backend(),
    )


@functools.cache
def _reader(*kinds: type) -> Callable[..., tuple[tuple[Any, ...], tuple[int, ...]] | None] | None:
    """A function of tensors of these types: (device and what else decides), addresses; None unless on one GPU."""
    names = [f"x{i}" for i, kind in enumerate(kinds) if kind is not type(None)]
    if not names or {*kinds} - {Tensor, Parameter, type(None)}:
        return None
    lines = [f"here = {names[0]}.get_device()"]
    others = " or ".join([f"here < {LEAST_DEVICE}", *(f"{name}.get_device() != here" for name in names[1:])])
    lines += [f"if {others}:", "    return None"]
    lines += [f"p_{name} = {name}.data_ptr()" for name in names]
    # Which of them are one decides, as a graph then has their address once.
    places = ", ".join(f"p_{name}" for name in names)
    lines += [f"apart = len({{{places}}}) == {len(names)} or tuple(map(({places},).index, ({places},)))"]
    # To 32 bytes: torch's elementwise kernels load so many at once where they can.
    lines += [f"aligned = not ({' | '.join(f'p_{name}' for name in names)}) & 31"]
    lines += [f"aligned = aligned or ({', '.join(f'p_{name} & 31' for name in names)},)"]
    # Inference tensors have no version, which those that a graph writes get one more of.
    lines += [f"inference = {' or '.join(f'{name}.is_inference()' for name in names)}"]
    lines += [f"inference = inference and ({', '.join(f'{name}.is_inference()' for name in names)},)"]
    facts = (f"{name}.shape, {name}.is_contiguous() or {name}.stride(), {name}.dtype" for name in names)
    addresses = ("0" if kind is type(None) else f"p_x{i}" for i, kind in enumerate(kinds))
    nothing = tuple(kind is type(None) for kind in kinds)
    lines += [f"return (here, {nothing}, aligned, apart, inference, {', '.join(facts)}), ({', '.join(addresses)},)"]
    found: dict[str, Any] = {}
    exec(f"def read({', '.join(f'x{i}' for i in range(len(kinds)))}):\n    " + "\n    ".join(lines), found)
    read: Callable[..., tuple[tuple[Any, ...], tuple[int, ...]] | None] = found["read"]
    return read


def _allocated(device: int) -> int:
    """Bytes that torch has given out on a device, those that came back included; 0 of an allocator that counts none."""
    try:
        return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["allocated"])
    except (KeyError, RuntimeError):
        return 0


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def _launch() -> Any:
    from mxep.runtime import launch  # imports Triton: only where there is CUDA

    return launch
