"""State shared by the dispatchers of a process group: counters, transports with their memory, and nodes.

Layers share open transports. A transport is closed by its last user. The ranks of a group form nodes of L ranks: rank r
is number r % L on node r // L. The process groups within and across nodes are made once:

    W = 6 ranks, L = 2 per node    within   (0 1) (2 3) (4 5)     the ranks of a node
                                   across   (0 2 4) (1 3 5)       the ranks with one number, of all nodes
"""

import datetime
import platform
import weakref
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mxep.comms import (
    NvshmemTransport,
    OneThread,
    SharedMemoryTransport,
    SymmetricMemoryTransport,
    Transport,
    timeout_of,
)
from mxep.gemm.quantize_once import in_graph_tree
from mxep.runtime.record import set_up

Key = tuple[str | None, torch.device, type[Transport]]
_open: dict[Key, Transport] = {}
_alone: weakref.WeakValueDictionary[Key, Transport] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group, and where this rank is among them.

    Attributes:
        ranks: L, the number of ranks per node.
        count: N, the number of nodes.
        node: this rank's node.
        within: process group of this node's ranks; None if this process is alone.
        across: process group of the ranks with this rank's number on each node; None if there is one node.
    """

    ranks: int = 1
    count: int = 1
    node: int = 0
    within: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None


@dataclass(eq=False)
class Exchanges:
    """State that all dispatchers of a group share.

    Attributes:
        thread: guard that admits only one thread to exchanges.
        dispatches: number of dispatches by collectives.
        collectives: number of collectives.
        layers: number of layers.
        failures: number of passes that raised on this rank after they had sent something. All ranks reset it when they
            make a layer or reserve room.
        nodes: `Nodes`, by the number of ranks per node that was asked for.
    """

    thread: OneThread = field(default_factory=OneThread)
    dispatches: int = 0
    collectives: int = 0
    layers: int = 0
    failures: int = 0
    nodes: dict[int | None, Nodes] = field(default_factory=dict)


_of_groups: dict[str, tuple[dist.ProcessGroup, Exchanges]] = {}


def exchanges_of(group: dist.ProcessGroup) -> Exchanges:
    for stale in [name for name, (each, _) in _of_groups.items() if not lives(each)]:
        del _of_groups[stale]
    name = str(group.group_name)
    if name not in _of_groups or _of_groups[name][0] is not group:  # group names are reused
        _of_groups[name] = group, Exchanges()
    return _of_groups[name][1]


def open_transport(
    group: dist.ProcessGroup | None, device: torch.device, timeout: float | None, kind: type[Transport] | None = None
) -> Transport:
    """Return the group's transport on this device, and count one more user. Collective.

    If the transport has failed on any rank, all ranks replace it.
    kind: NvshmemTransport. None: NVLink on CUDA devices, shared memory on CPUs.

    Raises ValueError if the open transport has another timeout than ``timeout``, and for NVSHMEM on a CPU.
    """
    for stale in [key for key, each in _open.items() if not lives(each.group)]:
        _open.pop(stale).close()
    transports = _alone if group is None or group.size() == 1 else _open
    if kind is NvshmemTransport and device.type != "cuda":
        raise ValueError(f"dispatcher nvshmem: got tensors on {device}, wanted CUDA; on CPU use symmetric")
    kind = kind or (SymmetricMemoryTransport if device.type == "cuda" else SharedMemoryTransport)
    key = None if group is None else str(group.group_name), device, kind
    found = transports.get(key)
    # A later group may have the name of a destroyed one.
    failed = found is None or found.group is not group or has_failed(found)
    if group is not None and transports is _open:
        anywhere = [failed] * group.size()
        dist.all_gather_object(anywhere, failed, group=group)
        if found is not None and not failed and any(anywhere):
            found.refused, failed = "given up, because it failed on a peer", True
    if found is None or failed:
        make: Callable[..., Transport] = kind
        found = transports[key] = make(group, timeout=timeout)
    elif timeout is not None and timeout != found.timeout:
        others = f"{found.timeout:g} s as other layers of the group have, whose buffers it shares"
        raise ValueError(f"timeout: got {timeout:g} s, wanted {others}")
    found.users += 1
    return found


def close_transport(transport: Transport) -> None:
    """Count one user less. If none is left, close the transport."""
    transport.users -= 1
    if transport.users:
        return
    transport.close()
    transports: MutableMapping[Key, Transport]
    for transports in (_open, _alone):
        for key in [key for key, each in transports.items() if each is transport]:
            del transports[key]


def lives(group: dist.ProcessGroup | None) -> bool:
    """True if the group exists and was not destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def has_failed(transport: Transport) -> bool:
    """True if this rank knows that the transport is unusable."""
    try:
        transport.check()
    except RuntimeError:
        return True
    return transport.refused is not None


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


def nodes_of(group: dist.ProcessGroup | None, ranks: int | None, timeout: float | None) -> Nodes:
    """Return the group's nodes. The first call with these arguments is collective.

    ranks: number of ranks per node. None: each host is a node.
    timeout: maximum seconds of a collective between nodes. None: the group's timeout. Only the first call uses it.

    Raises ValueError on all ranks if `ranks` does not divide the group's size, or differs between ranks.
    """
    if group is None:
        return Nodes()
    known = exchanges_of(group).nodes
    if ranks not in known:
        known[ranks] = _make(group, ranks, timeout)
    return known[ranks]


def _make(group: dist.ProcessGroup, ranks: int | None, timeout: float | None) -> Nodes:
    world_size, rank = group.size(), group.rank()
    timeout = timeout_of(group, group._device_types[0]) if timeout is None else timeout
    found: list[tuple[str, int | None]] = [("", None)] * world_size
    dist.all_gather_object(found, (platform.node(), ranks), group=group)
    hosts, given = [host for host, _ in found], {each for _, each in found}
    if len(given) > 1:
        raise ValueError(f"ranks_per_node: got {sorted(map(str, given))}, wanted the same on all ranks")
    if ranks is None:
        ranks = hosts.count(hosts[0])
        alike = all(hosts[i : i + ranks] == [hosts[i]] * ranks for i in range(0, world_size, ranks))
        if not alike or len(set(hosts)) * ranks != world_size:
            counts = ", ".join(f"{host} x {hosts.count(host)}" for host in dict.fromkeys(hosts))
            raise ValueError(f"ranks_per_node: got {counts}, wanted as many ranks on each host, side by side")
    if ranks < 1 or world_size % ranks:
        raise ValueError(f"ranks_per_node: got {ranks}, wanted a divisor of the {world_size} ranks of the group")
    node, index, count = rank // ranks, rank % ranks, world_size // ranks
    members = dist.get_process_group_ranks(group)
    within = group if count == 1 else _group(members[node * ranks : (node + 1) * ranks], timeout)
    across = None if count == 1 else group if ranks == 1 else _group(members[index::ranks], timeout)
    return Nodes(ranks, count, node, within, across)


def _group(ranks: list[int], timeout: float | None) -> dist.ProcessGroup:
    """Make a group of these ranks. Only they call this. They must be in ascending order, because torch sorts them."""
    if ranks != sorted(ranks):
        raise ValueError(f"dispatcher hierarchical: got a group of ranks {ranks}, wanted them in ascending order")
    limit = None if timeout is None else datetime.timedelta(seconds=timeout)
    world: Any = dist.group.WORLD
    # If a device were bound, torch would split the default communicator, and NCCL would wait for all ranks of the job.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
    return made
