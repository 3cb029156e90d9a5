"""State that the dispatchers of a process group share."""

import threading
import weakref
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mxep.comms import Transport
from mxep.gemm.quantize_once import in_graph_tree
from mxep.runtime.record import set_up


class GroupState:
    """State that all dispatchers of a group share. group: None: a single process without groups.

    Attributes:
        dispatches: number of dispatches by collectives.
        collectives: number of collectives.
        layers: number of layers.
        failures: number of passes that raised on this rank after they had sent something. All ranks reset it when they
            make a layer or reserve room.
        nodes: results of `hierarchical.nodes_of`, by the number of ranks per node that was asked for.
        transports: open transports by device and class. With one rank they are freed with their last user, because
            nobody has to close them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ident = 0
        self.dispatches = self.collectives = self.layers = self.failures = 0
        self.nodes: dict[int | None, Any] = {}
        self.transports: MutableMapping[tuple[torch.device, type[Transport]], Transport] = {}
        if group is None or group.size() == 1:
            self.transports = weakref.WeakValueDictionary()

    def claim(self) -> None:
        """Call it before an exchange. Raises RuntimeError on a second thread while the first thread is alive.

        All ranks must make exchanges in the same order, but the order of two threads would be random. So the first
        thread that makes an exchange is the only one until it ends. During a backward, autograd's may, too.
        """
        ident = threading.get_ident()
        if ident == self._ident or torch._C._current_graph_task_id() != -1:
            return
        with self._lock:
            mine, first = threading.current_thread(), self._thread
            if first is not None and first is not mine and first.is_alive():
                raise RuntimeError(
                    f"exchange: got thread {mine.name!r}, expected {first.name!r}, which made the exchanges before: "
                    "call layers that share a group in one thread, or make a process group for each thread"
                )
            self._thread, self._ident = mine, ident


_states: dict[dist.ProcessGroup | None, GroupState] = {}


def state_of(group: dist.ProcessGroup | None) -> GroupState:
    """Return the group's state. Closes the transports of destroyed groups."""
    for stale in [each for each in list(_states) if not (each is None or is_alive(each))]:
        for transport in list(_states.pop(stale).transports.values()):
            transport.close()
    if group not in _states:
        _states[group] = GroupState(group)
    return _states[group]


def is_alive(group: dist.ProcessGroup) -> bool:
    """True if the group was not destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


_T = TypeVar("_T")


def made_to_stay(device: torch.device, make: Callable[[], _T]) -> _T:
    """Return make()'s tensors, which outlive the current call. Records do not include the steps of make().

    While torch.compile's mode="reduce-overhead" warms up or records, it owns this thread's allocations, and raises if
    anything but outputs stays allocated. make() is then called on another thread.
    """

    def aside() -> _T:
        with torch.cuda.device(device):
            made = make()
            torch.cuda.current_stream().synchronize()  # other streams do not wait for this thread's
        return made

    with torch.inference_mode(False), set_up():
        if not in_graph_tree(device):
            return make()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(aside).result()
