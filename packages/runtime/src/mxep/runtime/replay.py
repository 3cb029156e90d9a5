"""`@replayed`: a function of tensors that is recorded in its second call of a kind, and played from then on.

The Python between two launches costs the host more than the launches, and these more than a graph of them. Calls with
tensors of the same shapes do the same. So the second such call is recorded as it runs (`record.py`), and all later ones
play the record over their own memory (`graph.py`). The first is not, as shapes that never come again would pay for a
record without having it played. Nothing runs twice, and nothing is captured. Unlike a graph that a
user captures it fixes no memory of arguments and results: weights may move, calls may overlap, and all of it works
under FSDP2, checkpoints and pipelines.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .graph import Player
from .record import Record, Recorder

MOST_RECORDS = 256
"""Of a function."""
LEAST_DEVICE = 0
"""Index of the first device that replays; -1 is the CPU."""
Tensors = list[Any]
"""Tensors, objects of them or their parts, and None."""


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
    """A kind of calls that could not be recorded. The next try is at its 2nd, 4th, 8th ... call from then, as the cause
    may have been temporary.

    Attributes:
        why: the reason of the last try.
    """

    __slots__ = ("calls", "tries", "used", "why")

    def __init__(self, why: str, last: object) -> None:
        self.why = why
        self.tries: int = 1 + last.tries if isinstance(last, _Refused) else 0
        self.calls, self.used = 1 << self.tries, next(_clock)

    def is_due(self) -> bool:
        """Count a call. Whether it tries again."""
        self.calls -= 1
        return self.calls <= 0  # below, where another thread counted in between


class _Seen:
    """A kind of calls that came once."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = next(_clock)


class _Recorded:
    """A kind of calls that is replayed.

    Attributes:
        player: plays the record, made at the first play. joined: for each result None (a tensor), or how to put an
            object together from flat tensors.
    """

    __slots__ = ("joined", "player", "record", "used")

    def __init__(self, record: Record, joined: list[Any]) -> None:
        self.record, self.joined = record, joined
        self.player: Player | None = None
        self.used = next(_clock)


_clock = itertools.count()


class Replayed:
    """What :func:`replayed` makes.

    Attributes:
        function: the function itself. replays: how many calls were played.
    """

    def __init__(self, function: Callable[..., Tensors], *, donated: Collection[int] = ()) -> None:
        functools.update_wrapper(self, function)
        self.function, self.donated = function, donated
        self.replays = 0
        self._kinds: dict[Hashable, _Recorded | _Refused | _Seen] = {}
        """By the key of a kind of calls."""
        self._lock = threading.Lock()
        self._warned = False

    @property
    def refused(self) -> list[str]:
        """Why not, of the kinds of calls that cannot be replayed."""
        return [kind.why for kind in self._kinds.values() if isinstance(kind, _Refused)]

    def state(self, *static: Any) -> Hashable | None:
        """Further facts that decide what the function does; None: do not replay this call. For subclasses."""
        return ()

    def launched(self, *static: Any) -> None:
        """Called after each play. For subclasses."""

    def moving(self, *static: Any) -> tuple[int, ...]:
        """Places of the tensors whose first size, the same for all, calls of a kind do not share (`lengths.py`). No
        object of tensors comes before them. For subclasses."""
        return ()

    def __call__(self, tensors: Tensors, *static: Any) -> Tensors:
        results = self.replay(tensors, *static)
        return self.direct(tensors, *static) if results is None else results

    def replay(self, tensors: Tensors, *static: Any) -> Tensors | None:
        """The results of this call, recorded or played, and `tensors` emptied. None: the caller runs the function."""
        if torch.compiler.is_compiling() or _here.calls:
            return None
        moving = self.moving(*static)
        key, flat, addresses, parts = _taken_apart(tensors, static, moving)
        state = None if key is None else self.state(*static)
        if state is None:
            return None
        key = key, state
        found = self._kinds.get(key)
        if found is None:
            flat.clear()
            return self._call(key, tensors, static)
        if type(found) is _Refused and not found.is_due():
            return None
        if type(found) is not _Recorded:
            return self._record(key, tensors, flat, static, moving, found)
        found.used = next(_clock)
        tokens = len(flat[moving[0]]) if moving else 0
        tensors.clear()  # so that memory goes early
        try:
            if found.player is None:
                device = next(x.device for x in flat if x is not None)
                found.player = Player(found.record, device, self.donated)
            results = found.player.play(flat, addresses, tokens)
        except RuntimeError as error:
            if found.player is not None and found.player.has_begun:
                raise
            if not isinstance(error, torch.OutOfMemoryError):  # the function may need less: it drops as it goes
                self._keep(key, _Refused(self._log(f"{type(error).__name__}: {error}"), None))
            tensors += _joined(flat, parts)
            return None  # the function raises what is still wrong
        self.replays += 1
        self.launched(*static)
        return _joined(results, found.joined)

    def _call(self, key: Hashable, tensors: Tensors, static: tuple[Any, ...]) -> Tensors:
        """The results of a kind's first call. Functions inside it are not counted as kinds of their own."""
        self._keep(key, _Seen())
        _here.calls = True
        try:
            return self.direct(tensors, *static)
        finally:
            _here.calls = False

    def _record(
        self,
        key: Hashable,
        tensors: Tensors,
        flat: Tensors,
        static: tuple[Any, ...],
        moving: tuple[int, ...],
        last: Any,
    ) -> Tensors:
        """Record a call. Returns its results even if the record is refused."""
        recorder = Recorder(flat, moving)
        flat.clear()
        with recorder:
            results = self.direct(tensors, *static)
        plain: Tensors = []
        joined: list[Any] = []
        for x in results:
            known = _PARTS.get(type(x))
            plain += [x] if known is None else x[: known.tensors]
            joined.append(None if known is None else (type(x), known.tensors, x[known.tensors :]))
        record = recorder.finish(plain)
        self._keep(key, _Refused(self._log(recorder.why), last) if record is None else _Recorded(record, joined))
        return results

    def _log(self, why: str) -> str:
        logger, name = logging.getLogger("mxep.runtime"), self.function.__qualname__
        logger.log(logging.DEBUG if self._warned else logging.WARNING, "%s is called, not replayed: %s", name, why)
        self._warned = True
        return why

    def _keep(self, key: Hashable, kind: _Recorded | _Refused | _Seen) -> None:
        with self._lock:
            if key not in self._kinds and len(self._kinds) >= MOST_RECORDS:
                # Kinds without a record go first, then the least recently used.
                of = self._kinds
                del of[min(of, key=lambda each: (type(of[each]) is _Recorded, of[each].used))]
            self._kinds[key] = kind

    def direct(self, tensors: Tensors, *static: Any) -> Tensors:
        """The function itself, called as it would be replayed."""
        whole = [x.join() if type(x) in _PARTS else x for x in tensors]
        tensors.clear()
        return [_WHOLE[type(x)].apart(x) if type(x) in _WHOLE else x for x in self.function(whole, *static)]


def replayed(function: Callable[..., Tensors], *, donated: Collection[int] = ()) -> Replayed:
    """Record and play a function (tensors, *static) -> tensors on CUDA; elsewhere it is called as ever.

    tensors, and what it returns: lists of tensors, objects of tensors (`register_parts`) and None; it returns what it
    made, views of that, or what it got. It owns the list, and may empty it so that memory goes early. static: hashable;
    with shapes, strides and dtypes it decides all that the function does. Its callers give and get objects as parts.
    donated: places of tensors that are nobody else's, so that to drop them early may lower the peak of memory.

    A class of static objects with an attribute `recordable` says by it whether functions with its objects are recorded.
    It must not read from the device, nor decide by anything but its arguments; other tensors that it uses are `fixed`,
    and kernels that it starts in another way than by `launch` make it say `refuse`. Not replayed: CPU tensors, other
    subclasses, with gradients enabled, under torch.compile or a dispatch mode, while a graph is captured, and when a
    profiler hooks Triton's launches.
    """
    return Replayed(function, donated=donated)


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
    """State of this thread. calls: it is inside a kind's first call, so functions inside are just called."""

    calls = False


_here = _Here()


def _joined(flat: list[Tensor | None], joined: list[Any]) -> Tensors:
    rest = iter(flat)
    return [next(rest) if of is None else of[0](*(next(rest) for _ in range(of[1])), *of[2]) for of in joined]


def _taken_apart(
    tensors: Tensors, static: tuple[Any, ...], moving: tuple[int, ...]
) -> tuple[Hashable | None, Tensors, tuple[int, ...], list[Any]]:
    """(key of the kind or None: not replayed, plain tensors, their addresses, how `_joined` rebuilds objects)."""
    if _paused or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return None, [], (), []
    if not all(map(_is_recordable, map(type, static))):
        return None, [], (), []
    # 0.0 equals -0.0, and 1 equals True and 1.0.
    static = tuple([(type(x), x.hex() if type(x) is float else x) for x in static])
    if torch._C._is_any_autocast_enabled():
        static = *static, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    flat: Tensors = []
    parts: list[Any] = []
    for x in tensors:
        if (known := _PARTS.get(type(x))) is not None:
            flat += x[: known.tensors]
            parts.append((type(x), known.tensors, x[known.tensors :]))
        else:
            flat.append(x)
            parts.append(None)
    read = _reader(moving, *map(type, flat))
    found = None if read is None else read(*flat)
    if found is None or found[0][0] != torch._C._cuda_getDevice() or _launch().is_profiled() or _is_capturing():
        return None, [], (), []
    facts, addresses = found
    return (
        (static, (*parts,), torch.is_inference_mode_enabled(), _settings(), _stream(facts[0]), facts),
        flat,
        addresses,
        parts,
    )


@functools.cache
def _is_recordable(kind: type) -> bool:
    """Whether calls with static objects of this class may be recorded. A class with an attribute `recordable` must set
    it itself; an inherited True does not count."""
    return not hasattr(kind, "recordable") or bool(kind.__dict__.get("recordable", False))


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
def _reader(
    moving: tuple[int, ...], *kinds: type
) -> Callable[..., tuple[tuple[Any, ...], tuple[int, ...]] | None] | None:
    """A function of tensors of these types: (device and what else decides), addresses; None unless on one GPU, and
    those that move are dense and of one length."""
    names = [f"x{i}" for i, kind in enumerate(kinds) if kind is not type(None)]
    if not names or {*kinds} - {Tensor, Parameter, type(None)}:
        return None
    lines = [f"here = {names[0]}.get_device()"]
    others = " or ".join([f"here < {LEAST_DEVICE}", *(f"{name}.get_device() != here" for name in names[1:])])
    lines += [f"if {others}:", "    return None"]
    if moving:
        of = [f"x{i}" for i in moving]
        unlike = [f"{name}.shape[0] != {of[0]}.shape[0]" for name in of[1:]]
        lines += [f"if {' or '.join([*unlike, *(f'not {name}.is_contiguous()' for name in of)])}:", "    return None"]
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
    facts = (
        f"{name}.shape[1:], {name}.dtype"
        if int(name[1:]) in moving
        else f"{name}.shape, {name}.is_contiguous() or {name}.stride(), {name}.dtype"
        for name in names
    )
    addresses = ("0" if kind is type(None) else f"p_x{i}" for i, kind in enumerate(kinds))
    nothing = tuple(kind is type(None) for kind in kinds)
    lines += [f"return (here, {nothing}, aligned, apart, inference, {', '.join(facts)}), ({', '.join(addresses)},)"]
    found: dict[str, Any] = {}
    exec(f"def read({', '.join(f'x{i}' for i in range(len(kinds)))}):\n    " + "\n    ".join(lines), found)
    read: Callable[..., tuple[tuple[Any, ...], tuple[int, ...]] | None] = found["read"]
    return read


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def _launch() -> Any:
    from mxep.runtime import launch  # imports Triton: only where there is CUDA

    return launch
