"""A record lists the steps of one call of a function, so that they can be repeated with other memory.

    Launch   start a kernel with this grid and arguments     Fill   fill a tensor with one number
    Copy     copy one tensor to another                      Call   call any other torch op

Each tensor of a step is a `View`: a *source*, a byte offset into it, dtype, shape and strides. A source is an argument
of the function, memory that the function allocated, or memory registered by `fixed`, which never moves. If a step uses
other memory, or an op cannot be repeated, the record is refused. The call itself is not affected.

While a `Recorder` is open, `launch` adds our kernels to it, and a dispatch mode adds torch's ops. Code that starts a
kernel in another way must call :func:`refuse`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .lengths import Length

Flat = Sequence[Tensor | None]


class View(NamedTuple):
    """A tensor that begins `offset` bytes into a source. Sources are numbered as in `Record`, fixed ones -1, -2, ..."""

    source: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Launch(NamedTuple):
    """A kernel launch. args: views, numbers, tensor descriptors with a view as `base`. compiled: Triton's binary."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Fill(NamedTuple):
    """Fill a dense tensor with `value`, which may be a `Length`. pattern: the memset word of `size` bytes for it."""

    to: View
    value: float
    pattern: int
    size: int


class Copy(NamedTuple):
    """Copy a dense tensor, `start`, to another of the same layout, `to`."""

    to: View
    start: View


class Call(NamedTuple):
    """A torch op. made: for each source that the op allocates, (index of the result in it, view of that result)."""

    op: Any
    args: Any
    kwargs: Any
    made: tuple[tuple[int, View], ...]


class Step(NamedTuple):
    """A step, and the indices of the steps that it must follow."""

    what: Launch | Fill | Copy | Call
    after: frozenset[int]


class Made(NamedTuple):
    """Memory that the function allocated. by: index of the step whose torch op allocates it, -1 if the player does."""

    nbytes: int
    by: int


class Record(NamedTuple):
    """The steps of a call.

    Attributes:
        steps: in order.
        given: number of arguments. They are sources 0 to given - 1.
        made: allocations. They are sources given, given + 1, ...
        results: views of the results. An int is the index of an argument that was returned itself.
        written: indices of arguments that the steps modify.
        fixed: registered tensors that the steps use. The record keeps them alive.
        moving: indices of arguments whose number of rows may differ in each replay.
    """

    steps: list[Step]
    given: int
    made: list[Made]
    results: list[View | int | None]
    written: list[int]
    fixed: list[Tensor]
    moving: tuple[int, ...] = ()


class Rehearsal:
    """Stands in for a Recorder inside `launch.rehearsal`. wanted: key -> (kernel, grid, arguments, constexprs)."""

    rehearses = True

    def __init__(self) -> None:
        self.wanted: dict[tuple[Any, ...], tuple[Any, tuple[int, ...], list[Any], dict[str, Any]]] = {}
        self.tails: dict[int, frozenset[int]] = {}
        self.events: dict[Any, frozenset[int]] = {}

    def refuse(self, why: str) -> None:
        pass

    def fill(self, x: Tensor, length: Length) -> None:
        pass

    def launch(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Any) -> None:
        pass


class _Here(threading.local):
    recorder: "Recorder | Rehearsal | None" = None
    calls = False


here = _Here()
"""State of this thread. recorder: the open recorder. calls: True inside the first call of a signature (`replay.py`)."""


def refuse(why: str) -> None:
    """Refuse the record that this thread is recording, if any. Then the call's signature is not replayed."""
    if here.recorder is not None:
        here.recorder.refuse(why)


@contextmanager
def set_up() -> Iterator[None]:
    """Context: code inside, such as creating a workspace, is not recorded, so no replay repeats it."""
    recorder, here.recorder = here.recorder, None
    try:
        yield
    finally:
        here.recorder = recorder


_fixed: dict[int, StorageWeakRef] = {}


def fixed(*tensors: Tensor) -> None:
    """Let recorded functions use these tensors although they are no arguments. Their memory must not move. Records keep
    them alive."""
    for x in tensors:
        ref = StorageWeakRef(x.untyped_storage())
        if ref.cdata not in _fixed or _fixed[ref.cdata].expired():
            _fixed[ref.cdata] = ref  # the reference keeps torch from reusing its cdata
    if len(_fixed) > 4096:
        for cdata in [cdata for cdata, ref in _fixed.items() if ref.expired()]:
            del _fixed[cdata]


def fill(x: Tensor, length: Length) -> None:
    recorder = here.recorder
    with set_up():
        x.fill_(int(length))
    if recorder is not None:
        recorder.fill(x, length)


def record_event(event: Any, stream: Any) -> None:
    """`event.record(stream)`, which an open recorder takes into account."""
    event.record(stream)
    if here.recorder is not None:
        here.recorder.events[event] = here.recorder.tails.get(stream.cuda_stream, frozenset())


def wait_event(stream: Any, event: Any) -> None:
    """`stream.wait_event(event)`. An open recorder takes it into account if it saw the event's `record_event`."""
    stream.wait_event(event)
    if (recorder := here.recorder) is not None:
        tails = recorder.tails.get(stream.cuda_stream, frozenset())
        recorder.tails[stream.cuda_stream] = tails | recorder.events.get(event, frozenset())


_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_aten = torch.ops.aten
_KINDS: dict[Any, str] = {
    _aten.record_stream.default: "nothing",  # the player allocates the memory itself
    _aten.empty.memory_format: "empty",
    **{op.default: "empty" for op in (_aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.empty_like)},
    **{op.default: "copy" for op in (_aten.clone, _aten.copy_, _aten._to_copy)},
}
_FILL_VALUES: dict[Any, Callable[..., Any]] = {
    **{op.default: lambda *_: 0 for op in (_aten.zeros, _aten.new_zeros, _aten.zeros_like, _aten.zero_)},
    **{op.default: lambda *_: 1 for op in (_aten.ones, _aten.new_ones, _aten.ones_like)},
    **{op: lambda *args: args[1] for op in (_aten.full.default, _aten.full_like.default, _aten.fill_.Scalar)},
    _aten.new_full.default: lambda *args: args[2],
}
"""Op -> function of the op's arguments that returns the number with which the op fills its result."""


_kinds: dict[int, tuple[str, Any]] = {}
"""id of a torch op -> (its kind, the op). By id, because hashing the op takes longer."""


def _kind_of(op: Any) -> str:
    """How a record treats a torch op: "empty", "fill", "copy", "view", "writes", "pure" or "nothing"."""
    if (known := _kinds.get(id(op))) is None:
        known = _kinds[id(op)] = _kind(op), op
    return known[0]


def _kind(op: Any) -> str:
    if op in _FILL_VALUES or op in _KINDS:
        return _KINDS.get(op, "fill")
    alias = [each.alias_info for each in (*op._schema.arguments, *op._schema.returns)]
    if any(each is not None and each.is_write for each in alias):
        return "writes"
    is_view = op._schema.returns and all(each.alias_info is not None for each in op._schema.returns)
    return "view" if is_view and not set(op.tags) & _NEVER else "pure"


def tensors_of(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [x for x in tree_leaves(out) if isinstance(x, Tensor)]


def _tensors_in(args: Any) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors_in(x)


class Recorder(TorchDispatchMode):
    """Records the steps of a call while it is open (`with recorder:`).

    given: the function's arguments, all on one device. moving: as in `Record`.

    Attributes:
        why: reason why the record is refused, or "".
        tails: stream -> steps that the next step on this stream must follow.
        events: recorded event -> steps that work waiting for the event must follow.
    """

    rehearses = False
    wants_torch_ops_alone = True
    """Read by `mxep.runtime.op`: our ops may skip torch's dispatcher while this mode is open."""

    def __init__(self, given: Flat, moving: tuple[int, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._moving = moving
        self.why = ""
        self.tails: dict[int, frozenset[int]] = {}
        self.events: dict[Any, frozenset[int]] = {}
        self._given = list(given)
        self._device = next(x.device for x in given if x is not None)
        self._versions = [_version(x) for x in given]
        self._steps: list[Step] = []
        self._made: list[Made] = []
        self._sources: dict[int, list[tuple[int, int, int]]] = {}
        """Storage -> (source, first address, end address) of each argument or allocation in it."""
        self._storages: list[StorageWeakRef] = []
        """Weak references to the storages of `_made`, so that torch does not reuse the keys of `_sources`."""
        self._fixed: list[Tensor] = []
        self._places_of_fixed: dict[Any, int] = {}
        self._views: dict[View, View] = {}
        """Equal views are one object, to save time of Python's garbage collector."""
        for i, x in enumerate(given):
            if x is not None:
                places = self._sources.setdefault(_storage_of(x), [])
                start, end = _extent(x)
                if not any(start == other for _, other, _ in places):
                    places.append((i, start, end))
                elif other := [k for k, (_, start_, end_) in enumerate(places) if start_ == start and end > end_]:
                    places[other[0]] = (i, start, end)

    def __enter__(self) -> "Recorder":
        here.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        here.recorder = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import Dynamo, which takes seconds

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def launch(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Any) -> None:
        if not self.why:
            noted = tuple([self._argument(x) for x in args])
            self._add(Launch(kernel, compiled, grid, noted, constants))

    def fill(self, x: Tensor, length: Length) -> None:
        if not self.why:
            value = length if self._moving else int(length)
            self._add(Fill(self._view(x), value, int(length), x.itemsize))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind is not Tensor and kind is not Parameter:
                return NotImplemented  # then the subclass's own dispatch calls ops on plain tensors, which come here
        kind, open_ = _kind_of(op), here.recorder
        if kind == "view" or open_ is not self or self.why:
            return op(*args, **(kwargs or {}))
        if kind == "empty":
            out = op(*args, **(kwargs or {}))
            if self._is_here(out):
                self._make(out, -1)
            return out
        here.recorder = None  # kernels that the op launches are not steps of their own
        try:
            out = op(*args, **(kwargs or {}))
        finally:
            here.recorder = open_
        self._op(op, kind, args, kwargs or {}, out)
        return out

    def _is_here(self, x: Tensor) -> bool:
        if is_other := x.device != self._device:
            self.refuse(f"a tensor {tuple(x.shape)} is of another device")
        return not is_other

    def _op(self, op: Any, kind: str, args: Any, kwargs: Any, out: Any) -> None:
        if kind == "nothing":
            return None
        if _NEVER & set(op.tags):
            return self.refuse(f"{op} reads from the device, or changes what a tensor is")
        outs = tensors_of(out)
        made: dict[int, int] = {}
        for i, x in enumerate(outs):
            cdata = _storage_of(x)
            if cdata not in self._sources and (cdata not in _fixed or _fixed[cdata].expired()):
                made.setdefault(cdata, i)
        if not all(self._is_here(x) for x in (*outs, *_tensors_in(args), *_tensors_in(kwargs.values()))):
            return None
        if kind == "fill" and (pattern := _pattern(outs[0], value := _FILL_VALUES[op](*args))) is not None:
            if made:
                self._make(outs[0], -1)
            self._add(Fill(self._view(outs[0]), value, *pattern))
        elif kind == "copy" and _are_alike(outs[0], start := args[1] if op is _aten.copy_.default else args[0]):
            if made:
                self._make(outs[0], -1)
            self._add(Copy(self._view(outs[0]), self._view(start)))
        elif outs and not made and kind == "pure":
            return None  # the op returned a view, although its schema does not say so
        else:
            seen = tree_map(lambda x: self._view(x) if isinstance(x, Tensor) else x, (args, kwargs))
            for i in made.values():
                self._make(outs[i], len(self._steps))
            places = tuple((i, self._view(outs[i])) for i in made.values())
            if any(view.offset for _, view in places):
                return self.refuse(f"{op} gives a part of what it makes")
            self._add(Call(op, seen[0], seen[1], places))
            self.tails = dict.fromkeys(self.tails, frozenset([len(self._steps) - 1]))
        return None

    def _make(self, x: Tensor, by: int) -> None:
        storage = x.untyped_storage()
        start = storage.data_ptr()
        self._sources[storage._cdata] = [(len(self._given) + len(self._made), start, start + storage.nbytes())]
        self._made.append(Made(storage.nbytes(), by))
        self._storages.append(StorageWeakRef(storage))

    def _add(self, what: Launch | Fill | Copy | Call) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device.index) if self._device.type == "cuda" else 0
        step = Step(what, self.tails.get(stream, frozenset()))
        self._steps.append(step)
        self.tails[stream] = frozenset([len(self._steps) - 1])

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._view(x, of_launch=True)
        if hasattr(x, "for_triton"):
            return x._replace(base=self._view(x.base))
        if type(x) is Length and not self._moving:  # all replays have this length
            return int(x)
        return x

    def _view(self, x: Tensor, *, of_launch: bool = False) -> View:
        """The view of a tensor. Refuses the record if the tensor lies in no known source, or if a torch op uses an
        argument in `moving`, because the op would use this call's number of rows in all replays."""
        storage, form = _storage_of(x), (x.dtype, tuple(x.shape), x.stride())
        places = self._sources.get(storage)
        if places is not None and places[0][0] >= len(self._given) and (at := x.data_ptr() - places[0][1]) >= 0:
            view = View(places[0][0], at, *form)  # in an allocation of the function, which fills its whole storage
            return self._views.setdefault(view, view)
        start, end = _extent(x)
        if places is not None:
            found = [(source, first) for source, first, last in places if first <= start and end <= last]
            if not x.numel():  # an empty tensor has no address
                return View(places[0][0], 0, *form)
            if len(found) == 1:
                if found[0][0] in self._moving and not of_launch:
                    self.refuse(f"an op uses argument {found[0][0]}, whose rows change from call to call")
                view = View(found[0][0], start - found[0][1], *form)
                return self._views.setdefault(view, view)
            self.refuse(f"a tensor {tuple(x.shape)} lies in {len(found) or 'no'} arguments, want one")
        elif (ref := _fixed.get(storage)) is not None and not ref.expired():
            key = start, *form
            if key not in self._places_of_fixed:
                self._fixed.append(x)
                self._places_of_fixed[key] = -len(self._fixed)
            return View(self._places_of_fixed[key], 0, *form)
        else:
            self.refuse(f"a tensor {tuple(x.shape)} of {x.dtype} is neither given, nor made, nor fixed")
        return View(0, 0, *form)

    def finish(self, results: Flat) -> Record | None:
        """Returns the record, or None if it is refused. results: the function's results, plain tensors and None."""
        found: list[View | int | None] = []
        kept = set()
        for x in results:
            same = [i for i, other in enumerate(self._given) if x is other]
            if x is None or same:
                found.append(same[0] if x is not None else None)
                continue
            view = self._view(x)
            if view.source < 0:
                self.refuse(f"a result {tuple(x.shape)} is memory that stays")
            kept.add(x.untyped_storage()._cdata)
            found.append(view)
        if any(not each.expired() for each in self._storages if each.cdata not in kept):
            self.refuse("it keeps a tensor that it makes, and does not give it")
        written = [i for i, x in enumerate(self._given) if _version(x) != self._versions[i]]
        if self.why:
            return None
        return Record(self._steps, len(self._given), self._made, found, written, self._fixed, self._moving)


def _version(x: Tensor | None) -> int | None:
    return None if x is None or x.is_inference() else x._version


def _storage_of(x: Tensor) -> int:
    """`x.untyped_storage()._cdata`, without creating a storage object."""
    return torch._C._storage_address(x)  # type: ignore[attr-defined, no-any-return]


def _extent(x: Tensor) -> tuple[int, int]:
    if x.is_contiguous():
        start = x.data_ptr()
        return start, start + x.nbytes
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + elements * x.itemsize


def _is_dense(x: Tensor) -> bool:
    """True if the elements of x cover its byte range without gaps or overlaps."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _are_alike(to: Tensor, start: Tensor) -> bool:
    """True if `to.copy_(start)` is a flat copy of bytes."""
    same = to.dtype == start.dtype and to.shape == start.shape and to.stride() == start.stride()
    return same and to.device == start.device and _is_dense(to) and to.is_neg() == start.is_neg()


def _pattern(x: Tensor, value: Any) -> tuple[int, int] | None:
    """(word, bytes of the word) of a memset that fills x with `value`, or None if no memset can."""
    if not isinstance(value, int | float | bool) or not _is_dense(x) or x.dtype.is_complex:
        return None
    if value == 0 and str(value)[0] != "-":
        return 0, 1
    word = torch.full((1,), value, dtype=x.dtype, device="cpu").view(torch.uint8).tolist()
    if len(word) == 8 and word[:4] == word[4:]:
        word = word[:4]
    return None if len(word) > 4 else (int.from_bytes(bytes(word), "little"), len(word))
