"""One transport, and so one pair of buffers, for all symmetric dispatchers of a (group, device, kind).

Opening one is collective. So it stays open until all who opened it have closed it, or the group is destroyed: when
objects are collected differs from rank to rank. A process alone has nobody to agree with: there it goes with its users.
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
    """What all dispatchers of a group share.

    Attributes:
        thread: which makes the exchanges. dispatches: how many there were, by collectives. collectives: of all kinds.
        layers: how many have a number. failures: passes that raised on this rank after they had sent something, since a
            layer was made or room was reserved, on all ranks.
    """

    thread: OneThread = field(default_factory=OneThread)
    dispatches: int = 0
    collectives: int = 0
    layers: int = 0
    failures: int = 0


_of_groups: dict[str, tuple[dist.ProcessGroup, Exchanges]] = {}
"""By the group's name."""


def exchanges_of(group: dist.ProcessGroup) -> Exchanges:
    """What the dispatchers of a group share, of those that are no transport's as well."""
    for stale in [name for name, (each, _) in _of_groups.items() if not lives(each)]:
        del _of_groups[stale]
    name = str(group.group_name)
    if name not in _of_groups or _of_groups[name][0] is not group:  # names are used again
        _of_groups[name] = group, Exchanges()
    return _of_groups[name][1]


def open_transport(
    group: dist.ProcessGroup | None, device: torch.device, timeout: float | None, kind: type[Transport] | None = None
) -> Transport:
    """The group's transport on this device, with one user more; a new one where a peer has failed the old one.

    kind: NvshmemTransport, or None for NVLink (CUDA) or shared memory (CPU).

    Raises ValueError if it has another timeout than the one asked for, or for NVSHMEM and a CPU.
    """
    for stale in [key for key, each in _open.items() if not lives(each.group)]:
        _open.pop(stale).close()
    transports = _alone if group is None or group.size() == 1 else _open
    if kind is NvshmemTransport and device.type != "cuda":
        raise ValueError(f"dispatcher nvshmem: got tensors on {device}, wanted CUDA; on CPU use symmetric")
    kind = kind or (SymmetricMemoryTransport if device.type == "cuda" else SharedMemoryTransport)
    key = None if group is None else str(group.group_name), device, kind
    found = transports.get(key)
    # Names of groups are used again.
    if found is None or found.group is not group or has_failed(found):
        make: Any = kind
        found = transports[key] = make(group, timeout=timeout)
    elif timeout is not None and timeout != found.timeout:
        others = f"{found.timeout:g} s as other layers of the group have, whose buffers it shares"
        raise ValueError(f"timeout: got {timeout:g} s, wanted {others}")
    found.arena.users += 1
    return found


def close_transport(transport: Transport) -> None:
    """One user less; after the last one it is closed."""
    transport.arena.users -= 1
    if transport.arena.users:
        return
    transport.close()
    transports: MutableMapping[Key, Transport]
    for transports in (_open, _alone):
        for key in [key for key, each in transports.items() if each is transport]:
            del transports[key]


def lives(group: dist.ProcessGroup | None) -> bool:
    """Whether it was not destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def has_failed(transport: Transport) -> bool:
    """Whether it cannot be used any more, as far as this rank knows."""
    try:
        transport.check()
    except RuntimeError:
        return True
    return transport.arena.refused is not None
