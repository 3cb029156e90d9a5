"""What a CUDA graph that moves needs of CUDA's driver: its nodes, with their parameters as words."""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class NotCaptured(Exception):
    """Why a function cannot be a graph."""


class NotCapturedNow(NotCaptured):
    """Why it cannot be one now."""


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


_COPIES = {1: ("Memcpy", 200, (6, 17)), 2: ("Memset", 40, (0,))}
"""By a node's type: its name, the bytes of its parameters, and which of their words are addresses on the device."""
_SIDES = (("from", 4), ("to", 15))
"""Of a memcpy: where the type of its memory is, a word before the host's address and two before the device's."""
_KERNEL, _EMPTY = 0, 5
_TENSOR_MAP = 128
"""Bytes."""
_ON_DEVICE, _UNIFIED, _MEMORY_TYPE = 2, 4, 2
"""CU_MEMORYTYPE_DEVICE and _UNIFIED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE."""
RELAXED = 2
"""A capture that forbids no thread to free memory or to ask events, which torch's allocator does when it is asked."""


class Node(NamedTuple):
    """A node of a graph, its parameters as words to be changed before `updater`.

    addresses: by its place, a word that may be an address. True: all of its bytes have been set, as those of a
        parameter of 8 bytes. False: a part of a structure, which may be a small integer and bytes that nobody has set.
        None: a part of 128 bytes, which may be a tensor map; there it holds sizes, two to a word.
    """

    handle: int
    kind: int
    words: Any
    params: Any
    addresses: dict[int, bool | None]

    @classmethod
    def of(cls, handle: int) -> "Node":
        node, kind = ctypes.c_void_p(handle), ctypes.c_int()
        call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == _EMPTY:
            return cls(handle, kind.value, (), None, {})
        if kind.value in _COPIES:
            name, nbytes, addresses = _COPIES[kind.value]
            words = (ctypes.c_uint64 * (nbytes // 8))()
            call(f"cuGraph{name}NodeGetParams", node, words)
            if name == "Memcpy":
                _check_device_copy(words)
            return cls(handle, kind.value, words, words, dict[int, bool | None].fromkeys(addresses, True))
        if kind.value != _KERNEL:
            raise NotCaptured(f"a node of type {kind.value}")
        params = _KernelParams()
        call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        if params.extra:
            raise NotCaptured("a kernel's parameters are packed")
        sizes = _sizes_of_parameters(params)
        words = (ctypes.c_uint64 * max(1, sum(-(-size // 8) for size in sizes)))()
        pointers, place = (ctypes.c_void_p * max(1, len(sizes)))(), ctypes.addressof(words)
        for i, size in enumerate(sizes):
            ctypes.memmove(place, params.kernelParams[i], size)
            pointers[i], place = place, place + -(-size // 8) * 8
        params.kernelParams = pointers
        may_be = dict[int, bool | None]()
        for size in sizes:
            first, count = len(may_be), -(-size // 8)
            is_map = size == _TENSOR_MAP
            may_be.update((first + i, (i == 0 or None) if is_map else size == 8) for i in range(count))
        return cls(handle, kind.value, words, (params, pointers), may_be)

    def updater(self, exec_: ctypes.c_void_p) -> Callable[[], int]:
        """A function that gives the words to the graph that is launched."""
        node = ctypes.c_void_p(self.handle)
        if self.kind == _KERNEL:
            update = driver().cuGraphExecKernelNodeSetParams_v2
            return functools.partial(update, exec_, node, ctypes.byref(self.params[0]))
        context = ctypes.c_void_p()
        call("cuCtxGetCurrent", ctypes.byref(context))
        update = getattr(driver(), f"cuGraphExec{_COPIES[self.kind][0]}NodeSetParams")
        return functools.partial(update, exec_, node, self.words, context)


def _check_device_copy(words: Any) -> None:
    """Raises NotCaptured for a copy from or to the host, or a CUDA array: its memory may be gone, or another's."""
    for side, place in _SIDES:
        kind = ctypes.c_uint(words[place] & 0xFFFFFFFF)
        if kind.value == _UNIFIED:
            address = ctypes.c_ulonglong(words[place + 2])
            call("cuPointerGetAttribute", ctypes.byref(kind), _MEMORY_TYPE, address)
        if kind.value != _ON_DEVICE:
            raise NotCaptured(f"it copies {side} memory that is not the device's")


def _sizes_of_parameters(params: _KernelParams) -> list[int]:
    ask, of = ("cuFuncGetParamInfo", params.func) if params.func else ("cuKernelGetParamInfo", params.kern)
    (offset, size), sizes, info = (ctypes.c_size_t(), ctypes.c_size_t()), list[int](), getattr(driver(), ask)
    while not info(ctypes.c_void_p(of), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


def nodes_of(graph: ctypes.c_void_p) -> list[int]:
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count:
        call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    return [node or 0 for node in nodes]


def captured_nodes(stream: int) -> set[int]:
    """Of the graph that is captured on a stream."""
    status, number, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
    call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
    return set(nodes_of(graph)) if graph else set()


@contextmanager
def relaxed() -> Iterator[None]:
    """Within it this thread may free memory, graphs and so on, which may end the capture of another one otherwise."""
    mode = ctypes.c_int(RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def call(name: str, *args: Any) -> None:
    if failed := getattr(driver(), name)(*args):
        raise NotCaptured(f"{name}: error {failed}")


@functools.cache
def driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")  # its calls are shorter than giving up the interpreter's lock
