"""One transport, and so one pair of buffers, for all symmetric dispatchers of a (group, device, kind).

Opening one is collective. So it stays open until all its users have closed it, or the group is destroyed: garbage is
collected at different times on each rank. A process alone needs no agreement: its transport goes with its users.
"""

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mxep.comms import NvshmemTransport, OneThread, SharedMemoryTransport, SymmetricMemoryTransport, Transport

Key = tuple[str | None, torch.device, type[Transport]]
_open: dict[Key, Transport] = {}
_alone: weakref.WeakValueDictionary[Key, Transport] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Exchanges:
    """State that all dispatchers of a group share.

    Attributes:
        thread: guard that admits one thread to exchanges. dispatches: dispatches by collectives. collectives: all
            collectives. layers: layers with a number. failures: passes on this rank that raised after they had sent
            something. All ranks reset it when a layer is made or room is reserved.
    """

    thread: OneThread = field(default_factory=OneThread)
    dispatches: int = 0
    collectives: int = 0
    layers: int = 0
    failures: int = 0


_of_groups: dict[str, tuple[dist.ProcessGroup, Exchanges]] = {}
"""Shared state by the group's name."""


def exchanges_of(group: dist.ProcessGroup) -> Exchanges:
    """State that the dispatchers of a group share, including those without a transport."""
    for stale in [name for name, (each, _) in _of_groups.items() if not lives(each)]:
        del _of_groups[stale]
    name = str(group.group_name)
    if name not in _of_groups or _of_groups[name][0] is not group:  # names are reused
        _of_groups[name] = group, Exchanges()
    return _of_groups[name][1]


def open_transport(
    group: dist.ProcessGroup | None, device: torch.device, timeout: float | None, kind: type[Transport] | None = None
) -> Transport:
    """The group's transport on this device, with one more user; a new one if a peer has failed the old one.

    kind: NvshmemTransport, or None for NVLink (CUDA) or shared memory (CPU).

    Raises ValueError if the transport has another timeout than ``timeout``, and for NVSHMEM on a CPU.
    """
    for stale in [key for key, each in _open.items() if not lives(each.group)]:
        _open.pop(stale).close()
    transports = _alone if group is None or group.size() == 1 else _open
    if kind is NvshmemTransport and device.type != "cuda":
        raise ValueError(f"dispatcher nvshmem: got tensors on {device}, wanted CUDA; on CPU use symmetric")
    kind = kind or (SymmetricMemoryTransport if device.type == "cuda" else SharedMemoryTransport)
    key = None if group is None else str(group.group_name), device, kind
    found = transports.get(key)
    # Names of groups are reused.
    if found is None or found.group is not group or has_failed(found):
        make: Any = kind
        found = transports[key] = make(group, timeout=timeout)
    elif timeout is not None and timeout != found.timeout:
        others = f"{found.timeout:g} s as other layers of the group have, whose buffers it shares"
        raise ValueError(f"timeout: got {timeout:g} s, wanted {others}")
    found.arena.users += 1
    return found


def close_transport(transport: Transport) -> None:
    """Remove one user. The last one closes it."""
    transport.arena.users -= 1
    if transport.arena.users:
        return
    transport.close()
    transports: MutableMapping[Key, Transport]
    for transports in (_open, _alone):
        for key in [key for key, each in transports.items() if each is transport]:
            del transports[key]


def lives(group: dist.ProcessGroup | None) -> bool:
    """True if the group was not destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def has_failed(transport: Transport) -> bool:
    """True if this rank knows that the transport is unusable."""
    try:
        transport.check()
    except RuntimeError:
        return True
    return transport.arena.refused is not None
