"""A CUDA graph of a function of tensors, whose arguments and results lie elsewhere at each launch.

A captured graph holds addresses in its nodes' parameters. Those that lie in an argument, in a result or in a temporary
are found once, and written anew before each launch, which costs the host 0.5 us a node, where a launch takes 4 us and
the Python around it 20. Temporaries are captured in a pool of their own (`pools.py`). Each of its segments that a node
refers to is a tensor of each launch, or small ones together: made before it and dropped after it, as those of a
function that is called are. So between launches a graph has no memory.

Memory of a result may have been another tensor's before, within the same capture. So an address is the result's only in
nodes that were captured after it was made: a dispatch mode looks at each allocation which nodes there are.

Kernels of torch and CUTLASS take structures, whose gaps keep what lay on the host's stack. An integer beside such bytes
looks like an address: 0 and 0x7fcd are 0x7fcd00000000, which may lie in an argument of some GiB. So a word of a
structure that could be a small integer (below SMALL in its lower half) is an address only if a tensor of the function
begins there. Where tensors within an operator begin is not known: with such a word in a temporary, at which no known
tensor begins, the function is not captured. A tensor map holds an address and sizes, two to a word: where such a word
could be an address, the function is not captured, either.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mxep.runtime.driver import RELAXED, Node, NotCaptured, call, captured_nodes, driver, nodes_of, relaxed
from mxep.runtime.pools import Pool, capture_pool, forget, scratch, side_stream

SHARED = 32 << 20
"""Bytes of a segment up to which it shares a tensor with others: to allocate and to free one costs the host 5 us."""
SMALL = 1 << 20
"""Above the integers that were seen beside such bytes: sizes of tiles and of shared memory."""
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
Flat = Sequence[Tensor | None]
_capturing = threading.Lock()
"""Of the side streams, and of `pools.py`."""


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
        self._graph, self._exec = ctypes.c_void_p(), ctypes.c_void_p()
        index = torch.cuda.current_device()
        self._device, self._driver = torch.device("cuda", index), driver()
        weakref.finalize(self, _destroy, self._graph, self._exec)
        self._start = ctypes.CDLL("libcuda.so.1").cuGraphLaunch  # may wait for the device: other threads go on
        with _capturing, relaxed(), capture_pool(index) as pool:
            sources, known, temporaries = self._capture(function, given, capturing, pool)
            # While there is the memory that it names.
            call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), self._graph, ctypes.c_ulonglong(0))
        nodes = [Node.of(node) for node in nodes_of(self._graph)]
        patches, used = _patches(nodes, sources, temporaries, known)
        places, together = _laid_out(used)
        self._made = [source.form for source in [*sources[len(given) :], *together]]
        moving = {id(patch[0]): patch[0] for patch in patches}.values()
        self._updates = [node.updater(self._exec) for node in moving]
        here = [(source, 0) for source in range(len(sources))]
        here += [(len(sources) + tensor, start) for tensor, start in places]
        self._patches = [(node.words, i, here[k][0], here[k][1] + offset) for node, i, k, offset in patches]
        self._lock = threading.Lock()

    def _capture(
        self,
        function: Callable[[], Flat],
        given: Flat,
        capturing: Callable[[], AbstractContextManager[object]],
        pool: Pool,
    ) -> tuple[list["_Source"], set[int], list["_Source"]]:
        """What moves of arguments and results, where tensors begin, and where temporaries lie."""
        side = side_stream(self._device.index, torch._C._cuda_getCurrentRawStream(self._device.index))
        versions, stream = [_version(x) for x in given], ctypes.c_void_p(side.cuda_stream)
        allocations = _Allocations(side.cuda_stream, given)
        # Not torch's CUDAGraph, which leaves the random generator unusable if a capture fails.
        with torch.cuda.stream(side), allocations:
            call("cuStreamBeginCapture_v2", stream, RELAXED)
            try:
                with capturing():
                    results = function()
            finally:
                ended = self._driver.cuStreamEndCapture(stream, ctypes.byref(self._graph))
        if ended:
            raise NotCaptured(f"cuStreamEndCapture: error {ended}")
        self._written = [i for i, x in enumerate(given) if _version(x) != versions[i]]
        self._results, sources = _places(given, results, allocations.nodes_before)
        temporaries = [_Source.of_bytes(*segment) for segment in scratch()]
        kept = allocations.alive({x.untyped_storage()._cdata for x in results if x is not None})
        if any(each.start <= address < each.end for address in kept for each in temporaries):
            forget(pool)
            raise NotCaptured("it keeps a tensor that it makes, and does not give it")
        return sources, allocations.begins | {x.data_ptr() for x in given if x is not None}, temporaries

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
    """What is known of the tensors of a function.

    Attributes:
        nodes_before: of each storage that is made and not given, by its address in torch: the nodes that were captured
            before. begins: addresses at which tensors begin.
    """

    wants_allocations_alone = True
    """For `mxep.runtime.modes`."""

    def __init__(self, stream: int, given: Flat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes_before: dict[int, set[int]] = {}
        self.begins: set[int] = set()
        self._stream = stream
        self._known = {x.untyped_storage()._cdata for x in given if x is not None}
        self._storages: list[tuple[StorageWeakRef, int]] = []  # referred to, so that no address of one is used again

    def alive(self, besides: Collection[int]) -> list[int]:
        """Where the memory begins of storages that were made, or first seen, and are still there. besides: those."""
        return [start for each, start in self._storages if each.cdata not in besides and not each.expired()]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and kind is not Parameter for kind in types):
            return NotImplemented  # a subclass, which says what it does with plain ones
        if _NEVER & set(func.tags):
            raise NotCaptured(f"{func} reads from the device, or changes what a tensor is")
        before = captured_nodes(self._stream)
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.begins.update(x.data_ptr() for x in tensors)
        for x in tensors:
            if (storage := x.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.nodes_before[storage._cdata] = before
                self._storages.append((StorageWeakRef(storage), storage.data_ptr()))
        return out


class _Source(NamedTuple):
    """Memory that moves. form: of what is made; whether an argument has no gaps. without: nodes from before it was."""

    start: int
    end: int
    form: Any
    without: set[int]

    @classmethod
    def of_bytes(cls, start: int, nbytes: int) -> "_Source":
        return cls(start, start + nbytes, (torch.uint8, (nbytes,)), set())


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


def _source_of(
    word: int, node: int, sources: Sequence[_Source], begins: Collection[int] | None = None
) -> tuple[int, int] | None:
    """(source, bytes from its start) of an address in a node; None for what does not move.

    begins: where tensors begin, of a word that is a part of a structure.
    """
    small = begins is not None and word % (1 << 32) < SMALL
    if small and begins is not None and word not in begins:
        return None
    found = [i for i, each in enumerate(sources) if each.start <= word < each.end and node not in each.without]
    if found and small:
        raise NotCaptured("an address could as well be a small integer")
    if any(sources[i].start == word for i in found):
        found = [i for i in found if sources[i].start == word or sources[i].form]
    if len({sources[i].start for i in found}) > 1:
        raise NotCaptured("arguments overlap")
    return (found[0], word - sources[found[0]].start) if found else None


def _patches(
    nodes: Sequence[Node], sources: Sequence[_Source], temporaries: Sequence[_Source], known: Collection[int]
) -> tuple[list[tuple[Node, int, int, int]], list[_Source]]:
    """Of all words that move: the node, which of its words, the source, bytes from its start; and what temporaries are
    sources, behind the others. known: where tensors begin."""
    patches, used = [], list[_Source]()
    for node in nodes:
        for i, whole in node.addresses.items():
            word, begins = node.words[i], None if whole else known
            found = _source_of(word, node.handle, sources, begins)
            temporary = _temporary_of(word, temporaries, begins) if found is None else None
            if whole is None and (found or temporary) and word not in known:
                raise NotCaptured("an address could as well be two sizes of a tensor map")
            if temporary is not None:
                if temporary not in used:
                    used.append(temporary)
                found = len(sources) + used.index(temporary), word - temporary.start
            if found is not None:
                patches.append((node, i, *found))
    return patches, used


def _laid_out(temporaries: Sequence[_Source]) -> tuple[list[tuple[int, int]], list[_Source]]:
    """Of each: which tensor it lies in, how far behind its start; and the tensors, of bytes. Small ones share one."""
    places, tensors, shared = list[tuple[int, int]](), list[_Source](), 0
    apart = [each.end - each.start > SHARED for each in temporaries]
    for each, alone in zip(temporaries, apart):
        places.append((sum(apart[: len(places)]), 0) if alone else (sum(apart), shared))
        shared += 0 if alone else each.end - each.start
    tensors = [each for each, alone in zip(temporaries, apart) if alone]
    return places, tensors + [_Source.of_bytes(0, shared)] * (shared > 0)


def _temporary_of(word: int, temporaries: Sequence[_Source], begins: Collection[int] | None) -> _Source | None:
    """In which of them an address lies. begins: as of `_source_of`."""
    found = next((each for each in temporaries if each.start <= word < each.end), None)
    # Where a tensor within an operator begins is not known, and an address that is overlooked writes anywhere.
    if found and begins is not None and word % (1 << 32) < SMALL and word not in begins:
        raise NotCaptured("an address of a temporary could as well be a small integer")
    return found


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


def _destroy(graph: ctypes.c_void_p, exec_: ctypes.c_void_p) -> None:
    if graph:
        with relaxed():
            if exec_:
                driver().cuGraphExecDestroy(exec_)
            driver().cuGraphDestroy(graph)
