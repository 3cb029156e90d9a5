"""`@replayed`: record a function's second call with the same signature, and replay the record in later calls.

The signature of a call is the shapes, strides, dtypes, ... of its arguments. Calls with the same signature launch the
same steps. Most host time goes into the Python code between launches, and launching one CUDA graph is faster than
launching its kernels. So the second call of a signature is recorded while it runs (`record.py`), and later calls replay
the record (`graph.py`). The first call is not recorded, because its shapes may never occur again.

A captured CUDA graph fixes the addresses of arguments and results. A record does not. So weights may move, calls may
overlap, and FSDP2, activation checkpointing and pipeline parallelism work.
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
"""Maximum call signatures that are kept per function."""
LEAST_DEVICE = 0
"""Calls on devices with a smaller index are not replayed. The CPU has index -1."""


_clock = itertools.count()


class _Kind:
    """State of a call signature that was seen once, and base class of other states.

    used: time of the last call, counted in calls.
    """

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = next(_clock)


class _Refused(_Kind):
    """State of a signature that could not be recorded. why: the reason.

    The reason may be temporary, so later calls try again, less and less often: after 1, 2, 4, ... calls.
    """

    __slots__ = ("calls", "tries", "why")

    def __init__(self, why: str, last: object = None) -> None:
        super().__init__()
        self.why = why
        self.tries: int = 1 + last.tries if isinstance(last, _Refused) else 0
        self.calls = 1 << self.tries

    def is_due(self) -> bool:
        """Count a call. Returns True if this call should try to record again."""
        self.calls -= 1
        return self.calls <= 0  # may be negative, if several threads count at the same time


class _Recorded(_Kind):
    """State of a signature that is replayed.

    Attributes:
        form: form of the results (`bundle.py`).
        donated: indices of argument tensors that the function released, so that a replay may free them early.
        player: plays the record. None before the first replay.
        record: None after the first replay, when the player has what it needs.
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
        function: the decorated function.
        replays: number of calls that were replayed.
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
        """Reasons why call signatures could not be recorded, one per refused signature."""
        return [kind.why for kind in self._kinds.values() if isinstance(kind, _Refused)]

    def state(self) -> Hashable | None:
        """An additional part of the signature, for subclasses to override. None: do not replay this call."""
        return ()

    def launched(self) -> None:
        """Hook for subclasses, called after each replay."""

    def moving(self, **static: Any) -> tuple[int, ...]:
        """Indices of argument tensors whose number of rows is not part of the signature (`lengths.py`).

        In one call all of them have the same number of rows. For subclasses to override.
        """
        return ()

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Call the function, record this call, or replay it. Returns the function's results.

        A replay sets all fields of `Operands` arguments to None.
        """
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
                with self._lock:  # another thread may be creating the player
                    if found.record is not None:
                        found.player, found.record = Player(found.record, tensors[0].device, found.donated), None
            assert found.player is not None
            results = found.player.play(tensors, given.addresses, tokens)
        except RuntimeError as error:
            if found.player is not None and found.player.has_begun:
                raise
            if not isinstance(error, torch.OutOfMemoryError):  # after it, later calls still replay
                self._keep(key, _Refused(self._log(f"{type(error).__name__}: {error}")))
            args = build(given.form, iter(given.tensors))
            del given, tensors
            return self.direct(*args, **static)  # may need less memory; raises again if the error persists
        self.replays += 1
        self.launched()
        return build(found.form, iter(results))

    def _call(self, key: Hashable, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Make the first call of a signature. Replayed functions called inside it are neither recorded nor counted."""
        self._keep(key, _Kind())
        here.calls = True
        try:
            return self.direct(*args, **static)
        finally:
            here.calls = False

    def _record(
        self, key: Hashable, given: "_Given", args: Any, static: Any, moving: tuple[int, ...], last: Any
    ) -> Any:
        """Call the function and record it. Returns the function's results, even if the record is refused."""
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
                # Remove a signature without a record if there is one. Among several, remove the least recently used.
                of = self._kinds
                del of[min(of, key=lambda each: (type(of[each]) is _Recorded, of[each].used))]
            self._kinds[key] = kind

    def direct(self, *args: Any, **static: Any) -> Any:
        """Call the function itself. Arguments and results are parts (`bundle.register_parts`), as in a replay."""
        return as_parts(self.function(*as_whole(args), **static))


def replayed(function: Callable[..., Any]) -> Replayed:
    """Record and replay a function (*args, **static) -> results on CUDA. On other devices it is only called.

    args, results: objects of tensors (`bundle.py`), on one device. Results are new tensors, views of new tensors, or
        arguments. For classes given to `register_parts`, callers pass and receive the parts, while the function gets
        and returns whole objects.
    static: hashable values. A class with an attribute `recordable` must set it to True. Everything that the function
        does must follow from static and from the shapes, strides and dtypes of args.

    The function must not read from the device. It may use tensors that are not arguments only if they are registered by
    `record.fixed`. If it starts kernels without `launch`, it must call `record.refuse`. It owns its arguments of class
    `Operands`, and may `release` their fields to reuse the memory.

    Calls are not replayed if a tensor is on the CPU or of a subclass, if gradients are enabled, under torch.compile or
    a dispatch mode, during a capture, and while a profiler hooks Triton's launches.
    """
    return Replayed(function)


@contextmanager
def no_replays() -> Iterator[None]:
    """Context in which no thread replays: all call the functions themselves. For debugging, for example."""
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
    """Arguments of a call, taken apart.

    key: signature of the call. form, tensors: as from `bundle.take_apart`. addresses: addresses of the tensors.
    """

    key: Hashable
    form: Form
    tensors: list[Tensor]
    addresses: tuple[int, ...]


def _taken_apart(args: tuple[Any, ...], static: dict[str, Any], moving: tuple[int, ...]) -> _Given | None:
    """Take the arguments apart. Returns None if this call must not be replayed."""
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
    """Indices of the tensors that the function released. form: form of args before the call."""
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
    """True if calls with static values of this class may be recorded.

    That is the case if the class has no attribute `recordable`, or sets it to True itself. An inherited True does not
    count.
    """
    return not hasattr(kind, "recordable") or bool(kind.__dict__.get("recordable", False))


def _settings() -> tuple[object, ...]:
    """Current values of torch's settings that affect its choice of kernels, or whether it fills new memory."""
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
    """Generate the code of a function that reads a signature's facts from num_tensors tensors.

    The generated function takes the tensors as separate arguments. It returns:
        facts: tuple with the device index, and with the tensors' part of the signature.
        addresses: tuple of the tensors' addresses.
    It returns None if the tensors are not on one GPU, or if tensors in `moving` are not contiguous or differ in rows.
    """
    names = [f"x{i}" for i in range(num_tensors)]
    lines = [f"here = {names[0]}.get_device()"]
    others = " or ".join([f"here < {LEAST_DEVICE}", *(f"{name}.get_device() != here" for name in names[1:])])
    lines += [f"if {others}:", "    return None"]
    if moving:
        of = [f"x{i}" for i in moving]
        unlike = [f"{name}.shape[0] != {of[0]}.shape[0]" for name in of[1:]]
        lines += [f"if {' or '.join([*unlike, *(f'not {name}.is_contiguous()' for name in of)])}:", "    return None"]
    lines += [f"p_{name} = {name}.data_ptr()" for name in names]
    # In a record, tensors with the same address are one source. So the signature contains which tensors share one.
    places = ", ".join(f"p_{name}" for name in names)
    lines += [f"apart = len({{{places}}}) == {len(names)} or tuple(map(({places},).index, ({places},)))"]
    # Addresses modulo 32, because torch's elementwise kernels load 32 bytes at once if the alignment allows it.
    lines += [f"aligned = not ({' | '.join(f'p_{name}' for name in names)}) & 31"]
    lines += [f"aligned = aligned or ({', '.join(f'p_{name} & 31' for name in names)},)"]
    # A replay increments the version of tensors that it writes, but inference tensors have no version.
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
