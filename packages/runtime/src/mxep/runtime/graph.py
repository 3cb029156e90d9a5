"""Play a record with other memory. Consecutive kernels, fills and copies become one CUDA graph.

    record   kernel, fill, kernel | torch op | kernel, copy          "|" separates pieces
    play     a graph              | the op   | a graph

Graphs are built node by node from the record, not captured. Before each launch, addresses and lengths that changed are
written into the nodes. In tensor maps the driver replaces the address. Torch allocates all memory on the current
stream, at the points that `memory.py` plans. On the CPU the steps run one by one, with the same memory plan.
"""

import ctypes
import functools
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lengths import Length
from .memory import Sizes, cut, forms_of, nbytes_of, pieces_of
from .record import Call, Copy, Fill, Launch, Record, Step, View, tensors_of

TENSOR_MAP = 128
"""Bytes of a CUtensorMap."""
FORMATS = {
    **{f"{sign}{bits}": code for sign in "iu" for bits, code in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))},
    "i1": "b",
    "u1": "B",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
FORMATS |= {kind: code.upper() for kind, code in FORMATS.items() if kind[0] == "u"}
"""Type of a number in a kernel's signature -> its code in Python's `struct`."""
_SIZES = {code: struct.calcsize(code) for code in FORMATS.values()}
_WITHOUT_TYPE = {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}
"""Dtypes that Triton does not know."""


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """Function (shape, strides, dtype) -> new tensor on the device, the current one if it is a GPU.

    For GPUs it is the private function that code of torch's Inductor calls, because torch.empty takes twice as long.
    """
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    return fast or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


class _Piece(NamedTuple):
    """Steps that run together: `work`. makes: (base, dtype, shape, strides) to allocate. drops: bases freed after."""

    makes: list[Any]
    drops: list[int]
    work: Any


class Player:
    """Plays a record on a device. Threads may share it; a lock lets one thread at a time launch a graph.

    donated: indices of arguments that nothing else holds. The player frees each of them after its last use.
    has_begun: True if a play failed after some of the steps had run.
    """

    has_begun = False

    def __init__(self, record: Record, device: torch.device, donated: Collection[int] = ()) -> None:
        self._given, self._written, self._fixed = record.given, record.written, record.fixed
        self._empty = _allocator(device)
        given, sources = record.given, len(record.made)
        sizes = Sizes(record, donated)
        pieces = cut(sizes, pieces_of(record.steps))
        self._bases = given + sources + len(pieces)
        """Number of bases. A base is an argument, an allocation or the slab of a piece, numbered in this order."""
        forms = forms_of(record)
        layout = sizes.of(pieces)
        in_slab = {
            given + k: (given + sources + p, start)
            for p, (starts, _) in enumerate(layout.slabs)
            for k, start in starts.items()
        }
        self._pieces: list[_Piece] = []
        for p, steps in enumerate(pieces):
            slab = given + sources + p, layout.slabs[p][1]
            makes = [(slab[0], torch.uint8, (slab[1],), (1,))] if slab[1] else []
            makes += [
                (given + k, *forms.get(k, (torch.uint8, (record.made[k].nbytes,), (1,)))) for k in layout.makes[p]
            ]
            drops = [slab[0]] * (slab[1] > 0) + [given + k for k in layout.drops[p]] + layout.donated[p]
            work = [record.steps[i] for i in steps]
            called = isinstance(work[0].what, Call) or device.type != "cuda"
            kind: Any = _Called(work, record, in_slab) if called else _Graph(work, steps, record, in_slab)
            self._pieces.append(_Piece(makes, drops, kind))
        self._results = [_result(x, record, forms) for x in record.results]

    def play(self, given: list[Any], addresses: Sequence[int], tokens: int = 0) -> list[Any]:
        """Run the steps on these arguments and return the function's results. Raises torch.OutOfMemoryError.

        given: the arguments. The list is changed, so that donated arguments can be freed.
        addresses: addresses of the arguments, 0 for None. tokens: rows of the arguments in `Record.moving`.
        """
        empty, more = self._empty, self._bases - len(given)
        given += [*[None] * more, tokens]
        held, bases, done = given, [*addresses, *[0] * more, tokens], 0
        try:
            for piece in self._pieces:
                for place, dtype, shape, strides in piece.makes:
                    made = held[place] = empty(shape, strides, dtype)
                    bases[place] = made.data_ptr()
                piece.work.run(held, bases)
                for place in piece.drops:
                    held[place] = None
                done += 1
        except BaseException:
            self.has_begun = done > 0
            del given[self._given :]
            raise
        if self._written:
            torch.autograd.graph.increment_version([x for i in self._written if (x := held[i]) is not None])
        return [None if place is None else _seen(held[place], form) for place, form in self._results]


def _result(x: View | int | None, record: Record, forms: dict[int, Any]) -> tuple[int | None, View | None]:
    """(base, view) of a result. View None: the result is the whole base. Base None: the result is None."""
    if x is None or isinstance(x, int):
        return x, None
    return x.source, None if forms.get(x.source - record.given) == x[2:] and x.offset == 0 else x


def _seen(x: Tensor, view: View | None, start: int = 0) -> Tensor:
    """Tensor of a view in x's memory, which begins at byte `start`. Autograd does not treat it as a view of x."""
    if view is None:
        return x
    at = start + view.offset
    if at == 0 and view.dtype == x.dtype and x.shape == view.shape and x.stride() == view.strides:
        return x
    first = x.storage_offset() * x.itemsize + at
    empty = torch.empty(0, dtype=view.dtype, device=x.device)
    return empty.set_(x.untyped_storage(), first // view.dtype.itemsize, view.shape, view.strides)


class _Called:
    """Steps that run one by one. in_slab: source -> (base of its slab, offset), for sources in a slab."""

    def __init__(self, steps: Sequence[Step], record: Record, in_slab: dict[int, tuple[int, int]]) -> None:
        self.fixed, self.moving, self.in_slab = record.fixed, record.moving, in_slab
        self._done = [self._doing(step.what) for step in steps]

    def run(self, held: list[Any], bases: list[int]) -> None:
        for do in self._done:
            do(held, bases)

    def _doing(self, what: Any) -> Callable[[list[Any], list[int]], Any]:
        match what:
            case Call(op, args, kwargs, made):
                got = [self._getter(x) for x in args]
                named = [(name, self._getter(x)) for name, x in kwargs.items()]

                def call_(held: list[Any], bases: list[int]) -> None:
                    out = op(*[get(held) for get in got], **{name: get(held) for name, get in named})
                    if made:
                        outs = tensors_of(out)
                        for i, view in made:
                            held[view.source] = outs[i]
                            bases[view.source] = outs[i].data_ptr()

                return call_
            case Launch(kernel, _, grid, args, constants):
                got = [self._getter(x) for x in args]
                return lambda held, _: kernel[grid](*[for_triton(get(held)) for get in got], **constants)
            case Fill(to, value):
                get = self._getter(to)
                if type(value) is Length:
                    return lambda held, _: get(held).fill_(value.of(held[-1]))
                return lambda held, _: get(held).fill_(value)
            case _:
                target, start = self._getter(what.to), self._getter(what.start)
                return lambda held, _: target(held).copy_(start(held))

    def _getter(self, x: Any) -> Callable[[list[Any]], Any]:
        """Function from the tensors of a replay, by base, to the argument x: views become tensors, numbers stay."""
        if isinstance(x, View):
            if x.source < 0:
                stays = self.fixed[-x.source - 1]
                return lambda held: stays
            place, start = self.in_slab.get(x.source, (x.source, 0))
            if place in self.moving:  # the launch uses only the tensor's address
                first = x.offset // x.dtype.itemsize
                return lambda held: held[place].view(-1).view(x.dtype)[first:]
            return lambda held: _seen(held[place], x, start)
        if type(x) is Length:
            return lambda held: x.of(held[-1])
        if hasattr(x, "for_triton"):
            get = self._getter(x.base)
            return lambda held: x._replace(base=get(held))
        if type(x) in (list, tuple):
            made, got = type(x), [self._getter(each) for each in x]
            return lambda held: made(get(held) for get in got)
        return lambda held: x


def for_triton(x: Any) -> Any:
    """Convert a kernel's argument to one that Triton accepts. Tensors of dtypes unknown to Triton become uint8."""
    if type(x) is Length:
        return int(x)
    if isinstance(x, Tensor):
        return x.view(torch.uint8) if x.dtype in _WITHOUT_TYPE else x
    return x.for_triton() if hasattr(x, "for_triton") else x


class _Uses(NamedTuple):
    """Where a graph uses a base. words: (parameter words of a node, index of the word, byte offset from the base).
    maps: (address of a tensor map, byte offset). lengths: (parameter words, index of the word, length), of the last
    base, the number of tokens. nodes: their indices."""

    words: list[tuple[Any, int, int]]
    maps: list[tuple[ctypes.c_void_p, int]]
    lengths: list[tuple[Any, int, Length]]
    nodes: set[int]


class _Graph:
    """Steps as a CUDA graph, built at the first launch. places: indices of the steps. in_slab: as in `_Called`."""

    def __init__(
        self, steps: Sequence[Step], places: Sequence[int], record: Record, in_slab: dict[int, tuple[int, int]]
    ) -> None:
        self.steps, self.fixed, self.in_slab, self._first = steps, record.fixed, in_slab, places[0]
        self._lock = threading.Lock()
        self._graph, self._exec = ctypes.c_void_p(), ctypes.c_void_p()
        weakref.finalize(self, _destroy, self._graph, self._exec)
        self._uses: dict[int, _Uses] = {}
        self._bases: dict[int, int] = {}
        """The address or number of tokens in the nodes, by base. Nodes are updated if it changes, or is not known."""
        self._nodes: list[ctypes.c_void_p] = []
        self._updates: dict[int, Callable[[], int]] = {}
        """Index of a node -> call of the driver that copies its parameters into `_exec`."""
        self._alive: list[Any] = []
        """Node parameters, kept alive because `_updates` holds pointers to them."""
        self._start = patient_driver().cuGraphLaunch

    def run(self, held: list[Any], bases: list[int]) -> None:
        with self._lock:  # because threads share the parameters, from writing them until the launch has read them
            if not self._exec:
                with relaxed():
                    self._build(bases)
            failed = self._move(bases)
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))
            failed = failed or self._start(self._exec, stream)
        if failed:
            raise RuntimeError(f"a graph's launch: got error {failed} of CUDA's driver")

    def _move(self, bases: list[int]) -> int:
        failed, stale, replace = 0, set[int](), driver().cuTensorMapReplaceAddress
        last, self._bases = self._bases, {}  # not known, until all nodes are updated
        for base, (words, maps, lengths, nodes) in self._uses.items():
            if (now := bases[base]) == last.get(base):
                continue
            last[base] = now
            for params, i, offset in words:
                params[i] = now + offset
            for place, offset in maps:
                failed = failed or replace(place, ctypes.c_void_p(now + offset))
            for params, i, length in lengths:
                params[i] = length.of(now)
            stale |= nodes
        for node in stale:
            failed = failed or self._updates[node]()
        if not failed:
            self._bases = last
        return failed

    def _build(self, bases: list[int]) -> None:
        context = ctypes.c_void_p()
        for of_failed in (self._nodes, self._uses, self._updates, self._alive):
            of_failed.clear()
        call("cuCtxGetCurrent", ctypes.byref(context))
        call("cuGraphCreate", ctypes.byref(self._graph), ctypes.c_uint(0))
        for step in self.steps:
            wanted = [self._nodes[j - self._first] for j in sorted(step.after) if j >= self._first]
            after = (ctypes.c_void_p * max(1, len(wanted)))(*wanted)
            node = ctypes.c_void_p()
            head = ctypes.byref(node), self._graph, after, ctypes.c_size_t(len(wanted))
            name, params, *alive = self._params(step.what, bases, context)
            version = "_v2" if name == "Kernel" else ""
            call(f"cuGraphAdd{name}Node{version}", *head, *params)
            if name != "Empty":
                update = getattr(driver(), f"cuGraphExec{name}NodeSetParams{version}")
                self._updates[len(self._nodes)] = functools.partial(update, self._exec, node, *params)
            self._nodes.append(node)
            self._alive.append(alive)
        call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), self._graph, ctypes.c_ulonglong(0))
        self._bases = {base: bases[base] for base in self._uses}
        self.steps = ()  # less work for Python's garbage collector

    def _params(self, what: Any, bases: list[int], context: ctypes.c_void_p) -> tuple[Any, ...]:
        """Returns the kind of node, a tuple of its parameters, then objects that must be kept alive for them."""
        if isinstance(what, Launch) and 0 not in what.grid:
            return self._of_kernel(what, bases)
        if isinstance(what, Fill) and (nbytes := nbytes_of(what.to)):
            fill = MemsetParams(0, 0, what.pattern, what.size, nbytes // what.size, 1)
            self._address((ctypes.c_uint64 * 5).from_buffer(fill), 0, what.to, bases)
            if type(what.value) is Length:
                word = MemsetParams.value.offset // 4
                self._length((ctypes.c_uint32 * 10).from_buffer(fill), word, what.value, bases)
            return "Memset", (ctypes.byref(fill), context), fill
        if isinstance(what, Copy) and (nbytes := nbytes_of(what.to)):
            kind = {"srcMemoryType": ON_DEVICE, "dstMemoryType": ON_DEVICE}
            copy = CopyParams(**kind, width=nbytes, height=1, depth=1)
            words = (ctypes.c_uint64 * (ctypes.sizeof(copy) // 8)).from_buffer(copy)
            self._address(words, CopyParams.srcDevice.offset // 8, what.start, bases)
            self._address(words, CopyParams.dstDevice.offset // 8, what.to, bases)
            return "Memcpy", (ctypes.byref(copy), context), copy
        return "Empty", ()

    def _of_kernel(self, what: Launch, bases: list[int]) -> tuple[Any, ...]:
        compiled = what.compiled
        fields = list(parameters_of(compiled, what.args))
        places, end = _places(tuple([size for size, *_ in fields]))
        words = (ctypes.c_uint64 * (end + 8))()
        begin = ctypes.addressof(words)
        first = -begin % 64 // 8  # tensor maps begin at multiples of 64 bytes
        pointers = (ctypes.c_void_p * len(fields))(*[begin + 8 * (first + place) for place in places])
        for (size, code, x), place in zip(fields, places):
            i = first + place
            if size == TENSOR_MAP:
                descriptor, meta = x
                address, base, offset = self._where(descriptor.base, bases)
                start = ctypes.c_void_p(begin + 8 * i)
                ctypes.memmove(start, _tensor_map(descriptor, meta, address), TENSOR_MAP)
                if base is not None:
                    self._uses_of(base).maps.append((start, offset))
            elif not code:
                self._address(words, i, x, bases)
            elif type(x) is Length:
                self._length(words, i, x, bases)
            else:
                struct.pack_into(code, words, 8 * i, x)
        metadata = compiled.metadata
        grid, block = (*what.grid, 1, 1)[:3], (32 * metadata.num_warps, 1, 1)
        params = KernelParams(compiled.function, *grid, *block, metadata.shared, pointers)
        return "Kernel", (ctypes.byref(params),), params, words, pointers

    def _where(self, view: View, bases: list[int]) -> tuple[int, int | None, int]:
        """Returns the address of a view, its base (None for fixed memory), and its byte offset from the base."""
        if view.source < 0:
            return self.fixed[-view.source - 1].data_ptr(), None, 0
        base, start = self.in_slab.get(view.source, (view.source, 0))
        return bases[base] + start + view.offset, base, start + view.offset

    def _address(self, words: Any, i: int, view: View, bases: list[int]) -> None:
        words[i], base, offset = self._where(view, bases)
        if base is not None:
            self._uses_of(base).words.append((words, i, offset))

    def _length(self, words: Any, i: int, length: Length, bases: list[int]) -> None:
        words[i] = length.of(bases[-1])
        self._uses_of(len(bases) - 1).lengths.append((words, i, length))

    def _uses_of(self, base: int) -> _Uses:
        uses = self._uses.setdefault(base, _Uses([], [], [], set()))
        uses.nodes.add(len(self._nodes))
        return uses


@functools.cache
def _places(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Index of the first 8-byte word of each parameter, and the number of words. sizes: bytes of each parameter."""
    places, end = list[int](), 0
    for size in sizes:
        places.append(-(-end // 8) * 8 if size == TENSOR_MAP else end)
        end = places[-1] - (-size // 8)
    return places, end


def parameters_of(compiled: Any, args: Sequence[Any]) -> Any:
    """Yield (bytes, code in Python's `struct`, value) for each parameter of a compiled kernel.

    The code is "" for a view, and for a tensor map. The value of a tensor map is (descriptor, metadata). Parameters are
    those that Triton's launcher passes, without constexprs. A descriptor gives a tensor map, its sizes and its strides.
    The last two parameters are pointers to scratch memory, null for our kernels.
    """
    metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for kind, x in zip(compiled.src.signature.values(), args):
        if kind == "constexpr":
            continue
        if code := FORMATS.get(kind):
            yield _SIZES[code], code, x
        elif kind[0] == "*":
            yield 8, "", x
        else:
            yield TENSOR_MAP, "", (x, next(metas))
            yield from ((4, "i", size) for size in x.shape)
            yield from ((8, "q", stride) for stride in x.strides)
    yield 8, "Q", 0
    yield 8, "Q", 0


def _tensor_map(descriptor: Any, meta: Any, address: int) -> bytes:
    """Bytes of the tensor map of a descriptor at `address`, encoded by Triton."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    only_address = SimpleNamespace(data_ptr=lambda: address)  # Triton reads nothing else of the tensor
    made = make_tensordesc_arg(descriptor._replace(base=only_address), meta)[0]
    return ctypes.string_at(id(made) + type(made).__basicsize__ - TENSOR_MAP, TENSOR_MAP)


def _destroy(graph: ctypes.c_void_p, exec_: ctypes.c_void_p) -> None:
    if graph:
        with relaxed():
            if exec_:
                driver().cuGraphExecDestroy(exec_)
            driver().cuGraphDestroy(graph)


RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
ON_DEVICE = 2
"""CU_MEMORYTYPE_DEVICE."""


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *[(f"{of}Dim{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "XYZ"],
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS. width: in elements."""

    _fields_ = [
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class CopyParams(ctypes.Structure):
    """CUDA_MEMCPY3D. A flat copy needs only a few of these fields."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            *[(name, ctypes.c_size_t) for name in ("X", "Y", "Z", "LOD")],
            *[("MemoryType", ctypes.c_uint), ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64)],
            *[("Array", ctypes.c_void_p), ("Reserved", ctypes.c_void_p)],
            *[(name, ctypes.c_size_t) for name in ("Pitch", "Height")],
        )
    ] + [(name, ctypes.c_size_t) for name in ("width", "height", "depth")]  # type: ignore[assignment]


def call(name: str, *args: Any) -> None:
    """Call the driver's function `name`. Raises RuntimeError if it does not return success."""
    if failed := getattr(driver(), name)(*args):
        raise RuntimeError(f"{name}: got error {failed} of CUDA's driver")


@contextmanager
def relaxed() -> Iterator[None]:
    """Context in which this thread may build and destroy graphs without ending another thread's capture."""
    mode = keep_captures()
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def keep_captures() -> ctypes.c_int:
    """Set this thread's capture mode so that its calls do not end another thread's capture. Returns the old mode."""
    mode = ctypes.c_int(RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return mode


@functools.cache
def driver() -> Any:
    """CUDA's driver library. Calls keep the GIL, because releasing it would take longer than these calls."""
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def patient_driver() -> Any:
    """CUDA's driver library, for calls that may block. They release the GIL."""
    return ctypes.CDLL("libcuda.so.1")
