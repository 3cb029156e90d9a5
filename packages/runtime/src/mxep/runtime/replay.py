"""`@replayed`: a function of tensors that is recorded at the second call with a signature, then replayed.

Most of the host's time goes into the Python between launches, and launching one CUDA graph is faster than launching its
kernels. Calls with the same signature (shapes, strides, dtypes, ...) launch the same steps. So the second such call is
recorded as it runs (`record.py`), and later calls replay the record (`graph.py`). The first call is not recorded,
because its shapes may never come again. Unlike a captured CUDA graph, a record does not fix the memory of arguments and
results: weights may move, calls may overlap, and FSDP2, checkpoints and pipelines work.
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

from .bundle import Form, Operands, as_parts, as_whole, build, count, take, take_apart
from .graph import Player
from .record import Record, Recorder, here

MOST_RECORDS = 256
"""Maximum call signatures kept per function."""
LEAST_DEVICE = 0
"""Index of the first device that replays; -1 is the CPU."""


_clock = itertools.count()


class _Kind:
    """A call signature seen once. used: time of the last call, as a count of calls."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = next(_clock)


class _Refused(_Kind):
    """A signature that could not be recorded, and why. The cause may be temporary, so calls try again, ever more
    rarely: after 1, 2, 4, ... calls."""

    __slots__ = ("calls", "tries", "why")

    def __init__(self, why: str, last: object = None) -> None:
        super().__init__()
        self.why = why
        self.tries: int = 1 + last.tries if isinstance(last, _Refused) else 0
        self.calls = 1 << self.tries

    def is_due(self) -> bool:
        """Count a call. Returns True if this call tries again."""
        self.calls -= 1
        return self.calls <= 0  # threads that count at once may go below 0


class _Recorded(_Kind):
    """A call signature that is replayed.

    Attributes:
        form: form of the results. donated: indices of tensors that the function released. record: None once the first
            replay has made the player.
    """

    __slots__ = ("donated", "form", "player", "record")

    def __init__(self, record: Record, form: Form, donated: Collection[int]) -> None:
        super().__init__()
        self.record: Record | None = record
        self.form, self.donated = form, donated
        self.player: Player | None = None


class Replayed:
    """The result of :func:`replayed`.

    Attributes:
        function: the function itself. replays: number of calls that were replayed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.replays = 0
        self._kinds: dict[Hashable, _Kind] = {}
        self._lock = threading.Lock()
        self._warned = False

    @property
    def refused(self) -> list[str]:
        """Why call signatures cannot be replayed."""
        return [kind.why for kind in self._kinds.values() if isinstance(kind, _Refused)]

    def state(self) -> Hashable | None:
        """Further part of the signature; None: do not replay this call. For subclasses."""
        return ()

    def launched(self) -> None:
        """Called after each replay. For subclasses."""

    def moving(self, **static: Any) -> tuple[int, ...]:
        """Indices of tensors that may vary in length within a signature (`lengths.py`). In one call they are equally
        long. For subclasses."""
        return ()

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Record this call, replay it or call the function, and return its results. A replay empties `Operands`."""
        if torch.compiler.is_compiling() or here.calls:
            return self.direct(*args, **static)
        moving = self.moving(**static)
        given = _taken_apart(args, static, moving)
        state = None if given is None else self.state()
        if given is None or state is None:
            del given
            return self.direct(*args, **static)
        key = given.key, state
        found = self._kinds.get(key)
        if found is None:
            del given
            return self._call(key, args, static)
        if type(found) is _Refused and not found.is_due():
            del given
            return self.direct(*args, **static)
        if type(found) is not _Recorded:
            return self._record(key, given, args, static, moving, found)
        found.used = next(_clock)
        tensors = given.tensors
        tokens = len(tensors[moving[0]]) if moving else 0
        for x in args:
            if isinstance(x, Operands):
                x.release(*x.__dict__)  # so that its memory can be freed during the replay
        try:
            if found.player is None:
                with self._lock:  # another thread may be here
                    if found.record is not None:
                        found.player, found.record = Player(found.record, tensors[0].device, found.donated), None
            assert found.player is not None
            results = found.player.play(tensors, given.addresses, tokens)
        except RuntimeError as error:
            if found.player is not None and found.player.has_begun:
                raise
            if not isinstance(error, torch.OutOfMemoryError):  # the function itself may need less memory
                self._keep(key, _Refused(self._log(f"{type(error).__name__}: {error}")))
            args = build(given.form, iter(given.tensors))
            del given, tensors
            return self.direct(*args, **static)  # raises the error again if it persists
        self.replays += 1
        self.launched()
        return build(found.form, iter(results))

    def _call(self, key: Hashable, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Make the first call of a signature. Calls of replayed functions within it are not counted."""
        self._keep(key, _Kind())
        here.calls = True
        try:
            return self.direct(*args, **static)
        finally:
            here.calls = False

    def _record(
        self, key: Hashable, given: "_Given", args: Any, static: Any, moving: tuple[int, ...], last: Any
    ) -> Any:
        """Record a call. Returns its results even if the record is refused."""
        recorder = Recorder(given.tensors, moving)
        given.tensors.clear()
        with recorder:
            results = self.direct(*args, **static)
        tensors, form = take_apart(results)
        record = recorder.finish(tensors)
        if record is None:
            self._keep(key, _Refused(self._log(recorder.why), last))
        else:
            self._keep(key, _Recorded(record, form, _released(args, given.form)))
        return results

    def _log(self, why: str) -> str:
        logger, name = logging.getLogger("mxep.runtime"), self.function.__qualname__
        logger.log(logging.DEBUG if self._warned else logging.WARNING, "%s is called, not replayed: %s", name, why)
        self._warned = True
        return why

    def _keep(self, key: Hashable, kind: _Kind) -> None:
        with self._lock:
            if key not in self._kinds and len(self._kinds) >= MOST_RECORDS:
                # Kinds without a record go first, then the least recently used.
                of = self._kinds
                del of[min(of, key=lambda each: (type(of[each]) is _Recorded, of[each].used))]
            self._kinds[key] = kind

    def direct(self, *args: Any, **static: Any) -> Any:
        """Call the function itself. Arguments and results are parts, as in a replay."""
        return as_parts(self.function(*as_whole(args), **static))


def replayed(function: Callable[..., Any]) -> Replayed:
    """Record and replay a function (*args, **static) -> results on CUDA. On other devices it is just called.

    args, results: objects of tensors (`bundle.py`), on one device. Results are new tensors, views of them, or
    arguments. Objects of classes in `register_parts` are passed and returned as parts, and whole within the function.
    static: hashable. A class with an attribute `recordable` must set it to True. static, and the shapes, strides and
    dtypes of args, decide all that the function does.

    The function owns its `Operands` and may `release` their fields, to reuse their memory. It must not read from the
    device. Other tensors that it uses must be `fixed`. It must call `refuse` if it starts kernels without `launch`.

    Not replayed: CPU tensors and tensor subclasses; calls with gradients enabled, under torch.compile or a dispatch
    mode, during a capture, or while a profiler hooks Triton's launches.
    """
    return Replayed(function)


@contextmanager
def no_replays() -> Iterator[None]:
    """Inside, all threads call functions instead of replaying them, for example to debug."""
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


class _Given(NamedTuple):
    """The arguments of a call. key: their signature."""

    key: Hashable
    form: Form
    tensors: list[Tensor]
    addresses: tuple[int, ...]


def _taken_apart(args: tuple[Any, ...], static: dict[str, Any], moving: tuple[int, ...]) -> _Given | None:
    """The arguments, taken apart; None if this call is not to be replayed."""
    if _paused or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return None
    tensors: list[Tensor] = []
    classes: list[type] = []
    form = take(args, tensors, classes)
    how = *static, *[take(x, tensors, classes) for x in static.values()]
    if not tensors or {*map(type, tensors)} - {Tensor, Parameter} or not all(map(is_recordable, classes)):
        return None
    found = _reader(moving, len(tensors))(*tensors)
    if found is None or found[0][0] != torch._C._cuda_getDevice() or _launch().is_profiled() or _is_capturing():
        return None
    facts, addresses = found
    if torch._C._is_any_autocast_enabled():
        how = *how, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    key = form, how, torch.is_inference_mode_enabled(), _settings(), _stream(facts[0]), facts
    return _Given(key, form, tensors, addresses)


def _released(args: tuple[Any, ...], form: Form) -> list[int]:
    """Indices of tensors in fields of `Operands` that the function has released."""
    found: list[int] = []
    at = 0
    for x, part in zip(args, form[1:]):
        fields = zip(x.__dict__.values(), part[1:]) if isinstance(x, Operands) else [(x, part)]
        for value, field in fields:
            tensors = count(field)
            if value is None:
                found += range(at, at + tensors)
            at += tensors
    return found


@functools.cache
def is_recordable(kind: type) -> bool:
    """True if calls with static objects of this class may be recorded: it has no attribute `recordable`, or has set it
    to True itself. An inherited True does not count."""
    return not hasattr(kind, "recordable") or bool(kind.__dict__.get("recordable", False))


def _settings() -> tuple[object, ...]:
    """Settings that affect which kernels torch chooses, or whether it fills new memory."""
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
def _reader(moving: tuple[int, ...], num_tensors: int) -> Callable[..., tuple[tuple[Any, ...], tuple[int, ...]] | None]:
    """Make a function from num_tensors tensors to (facts, addresses). facts: device, and the tensors' part of the
    signature. None if tensors are not on one GPU, or if moving ones are not contiguous or differ in length."""
    names = [f"x{i}" for i in range(num_tensors)]
    lines = [f"here = {names[0]}.get_device()"]
    others = " or ".join([f"here < {LEAST_DEVICE}", *(f"{name}.get_device() != here" for name in names[1:])])
    lines += [f"if {others}:", "    return None"]
    if moving:
        of = [f"x{i}" for i in moving]
        unlike = [f"{name}.shape[0] != {of[0]}.shape[0]" for name in of[1:]]
        lines += [f"if {' or '.join([*unlike, *(f'not {name}.is_contiguous()' for name in of)])}:", "    return None"]
    lines += [f"p_{name} = {name}.data_ptr()" for name in names]
    # A record notes a shared address as one source, so the signature tells which tensors share one.
    places = ", ".join(f"p_{name}" for name in names)
    lines += [f"apart = len({{{places}}}) == {len(names)} or tuple(map(({places},).index, ({places},)))"]
    # Alignment to 32 bytes, because torch's elementwise kernels load 32 bytes at once where they can.
    lines += [f"aligned = not ({' | '.join(f'p_{name}' for name in names)}) & 31"]
    lines += [f"aligned = aligned or ({', '.join(f'p_{name} & 31' for name in names)},)"]
    # A replay bumps the version of tensors that the graph writes, and inference tensors have none.
    lines += [f"inference = {' or '.join(f'{name}.is_inference()' for name in names)}"]
    lines += [f"inference = inference and ({', '.join(f'{name}.is_inference()' for name in names)},)"]
    facts = (
        f"{name}.shape[1:], {name}.dtype"
        if int(name[1:]) in moving
        else f"{name}.shape, {name}.is_contiguous() or {name}.stride(), {name}.dtype"
        for name in names
    )
    lines += [f"return (here, aligned, apart, inference, {', '.join(facts)}), ({places},)"]
    found: dict[str, Any] = {}
    exec(f"def read({', '.join(names)}):\n    " + "\n    ".join(lines), found)
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
