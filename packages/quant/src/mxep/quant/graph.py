"""A CUDA graph of a function of tensors, whose arguments and results lie elsewhere at each launch.

A captured graph holds addresses in its nodes' parameters. Those that lie in an argument or in a result are found once,
and written anew before each launch, which costs the host 0.5 us a node, where a launch takes 4 us and the Python around
it 20. What lives within the function alone stays where it was captured: in a pool that all graphs of a stream share, as
they run one after the other.

Memory of a result may have been another tensor's before, within the same capture. So an address is the result's only in
nodes that were captured after it was made: a dispatch mode looks at each allocation which nodes there are.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOST_BYTES = 4 << 30
"""That a function may allocate: memory of the pool serves nobody else, and who takes more is not bound by the host."""
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
Flat = Sequence[Tensor | None]
_capturing = threading.Lock()
"""Of the side streams."""


class NotCaptured(Exception):
    """Why a function cannot be a graph."""


class NotCapturedNow(NotCaptured):
    """Why it cannot be one now."""


class MovingGraph:
    """A graph of `function`, a function of no arguments that uses `given` and returns plain tensors or None.

    It is captured, not run: :meth:`launch` does. Raises NotCaptured, and what the function raises.

    Args:
        given: the arguments, on the current device, in memory of torch's. Those that are one tensor here have to be one
            at each launch.
        capturing: entered while the function runs.
    """

    def __init__(
        self, function: Callable[[], Flat], given: Flat, capturing: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._graph, self._exec = ctypes.c_void_p(), ctypes.c_void_p()  # __del__ asks, whatever fails
        index = torch.cuda.current_device()
        self._device, self._driver = torch.device("cuda", index), _driver()
        self._start = ctypes.CDLL("libcuda.so.1").cuGraphLaunch  # may wait for the device: other threads go on
        here = index, torch._C._cuda_getCurrentRawStream(index)
        side, pool = _side_stream(*here), _pool(*here)
        if not _takes_from(pool, self._device):
            raise NotCapturedNow("allocations go to another pool")
        versions, stream = [_version(x) for x in given], ctypes.c_void_p(side.cuda_stream)
        allocations = _Allocations(side.cuda_stream, given)
        # Not torch's CUDAGraph, which leaves the random generator unusable if a capture fails.
        with _capturing, torch.cuda.stream(side), torch.cuda.use_mem_pool(pool), allocations:
            _call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
            try:
                with capturing():
                    results = function()
            finally:
                ended = self._driver.cuStreamEndCapture(stream, ctypes.byref(self._graph))
        if ended:
            raise NotCaptured(f"cuStreamEndCapture: error {ended}")
        self._written = [i for i, x in enumerate(given) if _version(x) != versions[i]]
        self._results, sources = _places(given, results, allocations.nodes_before)
        self._made = [source.form for source in sources[len(given) :]]
        _call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), self._graph, ctypes.c_ulonglong(0))
        nodes = [_Node.of(node) for node in _nodes(self._graph)]
        patches = [(node, i, *found) for node in nodes for i in node.addresses
                   if (found := _source_of(node.words[i], node.handle, sources)) is not None]  # fmt: skip
        moving = {id(patch[0]): patch[0] for patch in patches}.values()
        self._updates = [node.updater(self._exec) for node in moving]
        self._patches = [(node.words, i, source, offset) for node, i, source, offset in patches]
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self._exec:
            self._driver.cuGraphExecDestroy(self._exec)
        if self._graph:
            self._driver.cuGraphDestroy(self._graph)

    def launch(self, given: Flat, addresses: Sequence[int]) -> list[Tensor | None]:
        """The function's results for other arguments. addresses: of `given`, 0 of None."""
        empty, device = torch.empty, self._device
        made = [empty(shape, dtype=dtype, device=device) for dtype, shape in self._made]
        places = [*addresses, *[x.data_ptr() for x in made]]
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index))
        with self._lock:  # parameters are the graph's, and taken at the launch
            for words, i, source, offset in self._patches:
                words[i] = places[source] + offset
            failed = 0
            for update in self._updates:
                failed = failed or update()
            failed = failed or self._start(self._exec, stream)
        if failed:
            raise RuntimeError(f"a graph's launch: got error {failed} of CUDA's driver")
        if self._written:
            torch.autograd.graph.increment_version([x for i in self._written if (x := given[i]) is not None])
        tensors = [*given, *made]
        return [None if each is None else each.of(tensors) for each in self._results]


class _Allocations(TorchDispatchMode):
    """Of each storage that is made and not given, by its address in torch: the nodes that were captured before."""

    wants_allocations_alone = True
    """For `mxep.quant.modes`."""

    def __init__(self, stream: int, given: Flat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes_before: dict[int, set[int]] = {}
        self._stream = stream
        self._known = {x.untyped_storage()._cdata for x in given if x is not None}
        self._nbytes = 0
        self._storages: list[StorageWeakRef] = []  # so that no address of one is used again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and kind is not Parameter for kind in types):
            return NotImplemented  # a subclass, which says what it does with plain ones
        if _NEVER & set(func.tags):
            raise NotCaptured(f"{func} reads from the device, or changes what a tensor is")
        before = _captured_nodes(self._stream)
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.nodes_before[storage._cdata] = before
                self._storages.append(StorageWeakRef(storage))
                self._nbytes += storage.nbytes()
        if self._nbytes > MOST_BYTES:
            raise NotCaptured(f"it allocates more than {MOST_BYTES} bytes")
        return out


class _Source(NamedTuple):
    """Memory that moves. form: of what is made; whether an argument has no gaps. without: nodes from before it was."""

    start: int
    end: int
    form: Any
    without: set[int]


class _Place(NamedTuple):
    """Where a result is: a tensor of those given and made, as it is or seen in another form."""

    tensor: int
    form: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int] | None

    def of(self, tensors: Sequence[Any]) -> Tensor:
        x: Tensor = tensors[self.tensor]
        return x if self.form is None else _view(x, *self.form)


def _places(given: Flat, results: Flat, nodes_before: dict[int, set[int]]) -> tuple[list[_Place | None], list[_Source]]:
    """Where each result is, and all sources: of the arguments, then of what is made for the results."""
    none = _Source(0, 0, None, set())
    sources = [none if x is None else _Source(*_extent(x), x.is_contiguous(), set()) for x in given]
    of_storage: dict[int, int] = {}
    places: list[_Place | None] = []
    for x in results:
        if x is None:
            places.append(None)
            continue
        if same := [i for i, other in enumerate(given) if x is other]:
            places.append(_Place(same[0], None))
            continue
        storage, (start, end), form = x.untyped_storage(), _extent(x), (x.dtype, tuple(x.shape), x.stride())
        if storage._cdata in nodes_before:
            if (i := of_storage.get(storage._cdata, -1)) < 0:
                i = of_storage[storage._cdata] = len(sources)
                first, nbytes = storage.data_ptr(), storage.nbytes()
                whole = x.is_contiguous() and first == start and end - start == nbytes
                made = (x.dtype, tuple(x.shape)) if whole else (torch.uint8, (nbytes,))
                sources.append(_Source(first, first + nbytes, made, nodes_before[storage._cdata]))
            made_dtype, made_shape = sources[i].form
            as_made = (made_dtype, made_shape) == form[:2] and x.is_contiguous()
            places.append(_Place(i, None if as_made else (*form, start - sources[i].start)))
            continue
        inside = [i for i, each in enumerate(sources[: len(given)]) if each.start <= start and end <= each.end]
        if len(inside) != 1:
            raise NotCaptured(f"a result {tuple(x.shape)} is neither made nor in one argument")
        places.append(_Place(inside[0], (*form, start - sources[inside[0]].start)))
    return places, sources


def _source_of(word: int, node: int, sources: Sequence[_Source]) -> tuple[int, int] | None:
    """(source, bytes from its start) of an address in a node; None for what does not move."""
    found = [i for i, each in enumerate(sources) if each.start <= word < each.end and node not in each.without]
    if any(sources[i].start == word for i in found):
        found = [i for i in found if sources[i].start == word or sources[i].form]
    if len({sources[i].start for i in found}) > 1:
        raise NotCaptured("arguments overlap")
    return (found[0], word - sources[found[0]].start) if found else None


def _version(x: Tensor | None) -> int | None:
    return None if x is None or x.is_inference() else x._version


def _extent(x: Tensor) -> tuple[int, int]:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + elements * x.itemsize


def _view(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Tensor:
    """A view of x's memory, `start` bytes behind its first."""
    first = x.storage_offset() * x.itemsize + start
    if dtype.itemsize == x.dtype.itemsize:
        x = x if x.dtype == dtype else x.view(dtype)
        return x.as_strided(shape, strides, first // dtype.itemsize)
    empty = torch.empty(0, dtype=dtype, device=x.device)
    return empty.set_(x.untyped_storage(), first // dtype.itemsize, shape, strides)


# ── CUDA's driver ────────────────────────────────────────────────────────────────────────────────────────────────────


class _KernelParams(ctypes.Structure):
    _fields_ = [
        ("func", ctypes.c_void_p),
        *[(f"{of}Dim{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "XYZ"],
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


_COPIES = {1: ("Memcpy", 200, (5, 6, 16, 17)), 2: ("Memset", 40, (0,))}
"""By a node's type: its name, the bytes of its parameters, and which of their words are addresses."""
_KERNEL, _EMPTY, _THREAD_LOCAL = 0, 5, 1


class _Node(NamedTuple):
    """A node of a graph, its parameters as words to be changed before `updater`, and which may be addresses."""

    handle: int
    kind: int
    words: Any
    params: Any
    addresses: Sequence[int] = ()

    @classmethod
    def of(cls, handle: int) -> "_Node":
        node, kind = ctypes.c_void_p(handle), ctypes.c_int()
        _call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == _EMPTY:
            return cls(handle, kind.value, (), None)
        if kind.value in _COPIES:
            name, nbytes, addresses = _COPIES[kind.value]
            words = (ctypes.c_uint64 * (nbytes // 8))()
            _call(f"cuGraph{name}NodeGetParams", node, words)
            return cls(handle, kind.value, words, words, addresses)
        if kind.value != _KERNEL:
            raise NotCaptured(f"a node of type {kind.value}")
        params = _KernelParams()
        _call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        if params.extra:
            raise NotCaptured("a kernel's parameters are packed")
        sizes = _sizes_of_parameters(params)
        words = (ctypes.c_uint64 * max(1, sum(-(-size // 8) for size in sizes)))()
        pointers, place = (ctypes.c_void_p * max(1, len(sizes)))(), ctypes.addressof(words)
        for i, size in enumerate(sizes):
            ctypes.memmove(place, params.kernelParams[i], size)
            pointers[i], place = place, place + -(-size // 8) * 8
        params.kernelParams = pointers
        return cls(handle, kind.value, words, (params, pointers), range(len(words)))

    def updater(self, exec_: ctypes.c_void_p) -> Callable[[], int]:
        """A function that gives the words to the graph that is launched."""
        node = ctypes.c_void_p(self.handle)
        if self.kind == _KERNEL:
            update = _driver().cuGraphExecKernelNodeSetParams_v2
            return functools.partial(update, exec_, node, ctypes.byref(self.params[0]))
        context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(context))
        update = getattr(_driver(), f"cuGraphExec{_COPIES[self.kind][0]}NodeSetParams")
        return functools.partial(update, exec_, node, self.words, context)


def _sizes_of_parameters(params: _KernelParams) -> list[int]:
    ask, of = ("cuFuncGetParamInfo", params.func) if params.func else ("cuKernelGetParamInfo", params.kern)
    (offset, size), sizes, info = (ctypes.c_size_t(), ctypes.c_size_t()), list[int](), getattr(_driver(), ask)
    while not info(ctypes.c_void_p(of), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


def _nodes(graph: ctypes.c_void_p) -> list[int]:
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count:
        _call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return [node or 0 for node in nodes]


def _captured_nodes(stream: int) -> set[int]:
    """Of the graph that is captured on a stream."""
    status, number, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
    _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
    return set(_nodes(graph)) if graph else set()


def _call(name: str, *args: Any) -> None:
    if failed := getattr(_driver(), name)(*args):
        raise NotCaptured(f"{name}: error {failed}")


@functools.cache
def _driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")  # its calls are shorter than giving up the interpreter's lock


@functools.cache
def _side_stream(index: int, stream: int) -> torch.cuda.Stream:
    """Where graphs of a stream are captured: cuBLAS has a workspace for each, which graphs of two would write to."""
    return torch.cuda.Stream(index)


@functools.cache
def _pool(index: int, stream: int) -> torch.cuda.MemPool:
    return torch.cuda.MemPool()


def _takes_from(pool: torch.cuda.MemPool, device: torch.device) -> bool:
    """Whether what is allocated within the pool lies there: a user's pool, or a compiler's, may go before it."""
    with torch.cuda.use_mem_pool(pool):
        place = torch.empty(1, dtype=torch.uint8, device=device).data_ptr()
    segments = (each for each in torch.cuda.memory_snapshot() if 0 <= place - each["address"] < each["total_size"])
    return any(tuple(each["segment_pool_id"]) == tuple(pool.id) for each in segments)
