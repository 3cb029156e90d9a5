"""SymmetricDispatcher stores rows into peers' memory, with one barrier per exchange, no host sync and no collective.

A token travels once to each rank that has one of its experts, and each receiver makes its own plan. The first dispatch
with new sizes makes a workspace, which takes collectives. All layers of a group share one transport and its pair of
buffers.

T_max maximum tokens of any rank, K experts per token, D model dim.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    Capacity,
    NvshmemTransport,
    SharedMemoryTransport,
    SymmetricBuffer,
    SymmetricMemoryTransport,
    Transport,
    Workspace,
    combine,
    dispatch,
    narrow_ids,
)

from .base import Handle, Later, Payload, Routing, TokenDispatcher, check_reserved
from .groups import made_to_stay, state_of

OVERLAP_SMS = 32
"""Number of SMs for a dispatch that overlaps with other work. With these it reaches 0.92 of the links' bandwidth."""


class SymmetricDispatcher(TokenDispatcher):
    """See :class:`TokenDispatcher`.

    Args:
        dim: D.
        dtype: widest dtype of rows that dispatch (if unquantized) or combine sends.
        max_tokens: T_max, see :class:`Dispatch`. It decides the number of slots. If a rank brings more tokens, it
            raises ValueError and its peers raise PeersDisagree. To go on, make the layers again, or, if max_tokens is
            None, call ``reserve`` on each layer.
        timeout: see :class:`Dispatch`. It also limits how much later than its peers a rank may begin an exchange. None:
            the timeout of the group's open transport, or if there is none, of the group's collectives.
    """

    borrows = True
    in_graphs = True
    has_rooms = True
    of_this_process = ("passes", "_opened", "_most_tokens", "_workspaces")
    kind: type[Transport] | None = None
    """Class of the group's transport. None: shared memory for CPU tensors, NVLink for CUDA tensors."""

    def __init__(
        self,
        num_experts: int,
        *,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        capacity: Capacity | float | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> None:
        sizes = {"dim": dim, "dtype": dtype, "max_tokens": max_tokens, "timeout": timeout}
        super().__init__(num_experts, group=group, capacity=capacity, sizes=sizes)
        self.dim: int = dim
        self.row_dtype: torch.dtype = dtype
        self.max_tokens = max_tokens
        self.timeout = timeout
        self._opened: dict[torch.device, Transport] = {}
        self._most_tokens: dict[torch.device, int] = {}
        """T_max by device. Used if max_tokens was not given."""
        self._workspaces: dict[tuple[torch.device, int, int], Workspace] = {}
        """Workspaces by (device, T_max, K)."""

    def __repr__(self) -> str:
        first = max(self._most_tokens.values(), default=None)
        most = self.max_tokens or ("first batch" if not first else f"{first} (so far)")
        return f"{super().__repr__()[:-1]}, max_tokens={most})"

    def static_tokens(self, num_tokens: int) -> tuple[int, int] | None:
        return None if self.max_tokens is None else (self.world_size, self.max_tokens)

    def _most_rows(self, device: torch.device) -> int | None:
        return self.max_tokens or self._most_tokens.get(device)

    def dispatch(
        self,
        payload: Payload,
        expert_ids: Tensor,
        weights: Tensor,
        *,
        alignment: int,
        overlap: bool = False,
        room: int | None = None,
    ) -> Handle[tuple[Payload, Routing]]:
        self.claim()
        given = expert_ids if expert_ids.is_cpu else narrow_ids(expert_ids)  # on a CPU, errors quote the ids as given
        expert_ids = narrow_ids(given)
        workspace = self.workspace(expert_ids)
        workspace.transport.next_dispatch = self.new_dispatch
        sms = OVERLAP_SMS if overlap else None
        handle = dispatch(workspace, payload, given, weights, async_op=True, num_sms=sms, room=room)
        assert handle.tables is not None
        # The plan is made while rows are in flight.
        plan = self._plan(*handle.tables, alignment=alignment, capacity=self.capacity)
        plan = dataclasses.replace(plan, dispatch=handle.number)
        routing = Routing(plan, expert_ids, self.num_local_experts, room=room)
        return Later(lambda: (handle.wait(), routing))

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        workspace, ids = self._workspace_of(routing), routing.expert_ids
        sms = OVERLAP_SMS if overlap else None
        how = {"async_op": overlap, "num_sms": sms, "room": routing.room}
        return dispatch(workspace, payload, ids, plan=routing.plan, **how)  # type: ignore[arg-type]

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        workspace, plan, ids = self._workspace_of(routing), routing.plan, routing.expert_ids
        # Over NVLink overlap is ignored: it gains nothing, and holds rows to the GEMM's end (docs/lab/layer.md).
        aside = overlap and workspace.transport.access == "puts"
        return combine(workspace, rows, plan, ids, row_values, async_op=aside, room=routing.room)

    def reserve(self, max_tokens: int, device: torch.device | str) -> None:
        """See :class:`TokenDispatcher`. Call it for every layer that shares the buffers.

        After a batch that was too large, it drops the failed buffers on all ranks, so that the step can be repeated."""
        super().reserve(max_tokens, device)
        device = torch.empty(0, device=device, dtype=torch.float32).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # no exchange may be in flight when buffers are dropped
        transport = self._opened.get(device)
        failed = transport is not None and has_failed(transport)
        most = most_tokens(max_tokens, device, self.group)
        if most_tokens(int(failed), device, self.group) and transport is not None:
            self._workspaces = {key: each for key, each in self._workspaces.items() if key[0] != device}
            self.passes.clear()
            if device in self._counts:
                self._counts[device].zero_()  # counts of the failed step
            # A rank whose transport is intact must not reuse it, because its peers' transports have failed.
            transport.refused = transport.refused or "given up by reserve(), which others need, too"
            close_transport(self._opened.pop(device))
        check_reserved(most, self.max_tokens)
        if self.max_tokens is None and most > self._most_tokens.get(device, 0):
            self._most_tokens[device] = most
            self.passes.clear()  # their CUDA graphs have too few slots

    def claim(self) -> None:
        """See :class:`TokenDispatcher`. Layers of a single rank share buffers, too, which threads would overwrite."""
        (self._shared_state or state_of(self.group)).claim()

    def begin(self, layer: int) -> None:
        super().begin(layer)
        for transport in self._opened.values():
            transport.announce(self.new_dispatch)

    def _sent(self) -> int:
        return sum(transport.exchanges for transport in self._opened.values())

    def graph_state(self) -> tuple[SymmetricBuffer, bool] | None:
        self.claim()
        transport = self._transport_here()
        return None if transport is None else transport.graph_state()

    def launched(self, exchanges: int) -> None:
        if (transport := self._transport_here()) is not None:
            transport.launched(exchanges)

    def close(self) -> None:
        super().close()
        if self.uses > 0:
            return
        self._workspaces.clear()
        while self._opened:
            close_transport(self._opened.popitem()[1])

    def _transport_here(self) -> Transport | None:
        """The transport on the current CUDA device, or None."""
        return self._opened.get(_device(torch._C._cuda_getDevice()))

    def _transports(self) -> tuple[Transport, ...]:
        return tuple(self._opened.values())

    def workspace(self, expert_ids: Tensor) -> Workspace:
        device, (tokens, top_k) = expert_ids.device, expert_ids.shape
        max_tokens = self._most_rows(device)
        if not max_tokens:
            max_tokens = self._most_tokens[device] = most_tokens(tokens, device, self.group)
        found = self._workspaces.get((device, max_tokens, top_k))
        return self._make_workspace(device, max_tokens, top_k) if found is None else found

    def _workspace_of(self, routing: Routing) -> Workspace:
        """The workspace of the dispatch that made this routing, for an exchange that follows."""
        self.claim()
        slots, top_k = routing.plan.slot_rows.shape
        key = routing.plan.slot_rows.device, slots // self.world_size, top_k
        if key not in self._workspaces:
            raise RuntimeError("dispatcher: got a routing from before it was closed, wanted close() after backward")
        return self._workspaces[key]

    def _make_workspace(self, device: torch.device, max_tokens: int, top_k: int) -> Workspace:
        self.check_usable(self.group is None and dist.is_initialized())
        self.used = True  # set before the dispatch may fail: layers made again then get another

        def make() -> Workspace:
            transport = self._opened.get(device)
            if transport is None:
                transport = self._opened[device] = open_transport(self.group, device, self.timeout, self.kind)
            return Workspace(
                transport,
                max_tokens=max_tokens,
                top_k=top_k,
                dim=self.dim,
                row_bytes=self.dim * self.row_dtype.itemsize,
                num_experts=self.num_experts,
            )

        made = self._workspaces[device, max_tokens, top_k] = made_to_stay(device, make)
        return made


def open_transport(
    group: dist.ProcessGroup | None, device: torch.device, timeout: float | None, kind: type[Transport] | None = None
) -> Transport:
    """Return the group's transport on this device, and count one more user. Collective.

    If the transport has failed on any rank, or was closed, all ranks replace it.
    kind: NvshmemTransport. None: NVLink on CUDA devices, shared memory on CPUs.

    Raises ValueError if the open transport has another timeout than ``timeout``, and for NVSHMEM on a CPU.
    """
    if kind is NvshmemTransport and device.type != "cuda":
        raise ValueError(f"dispatcher nvshmem: got tensors on {device}, wanted CUDA; on CPU use symmetric")
    kind = kind or (SymmetricMemoryTransport if device.type == "cuda" else SharedMemoryTransport)
    transports = state_of(group).transports
    found = transports.get((device, kind))
    failed = found is None or has_failed(found)
    if group is not None and group.size() > 1:
        anywhere = [failed] * group.size()
        dist.all_gather_object(anywhere, failed, group=group)
        if found is not None and not failed and any(anywhere):
            found.refused, failed = "given up, because it failed on a peer", True
    if found is None or failed:
        make: Callable[..., Transport] = kind
        found = transports[device, kind] = make(group, timeout=timeout)
    elif timeout is not None and timeout != found.timeout:
        others = f"{found.timeout:g} s as other layers of the group have, whose buffers it shares"
        raise ValueError(f"timeout: got {timeout:g} s, wanted {others}")
    found.users += 1
    return found


def close_transport(transport: Transport) -> None:
    """Count one user less. If none is left, close the transport."""
    transport.users -= 1
    if not transport.users:
        transport.close()


def has_failed(transport: Transport) -> bool:
    """True if this rank knows that the transport is unusable."""
    try:
        transport.check()
    except RuntimeError:
        return True
    return transport.refused is not None


def most_tokens(tokens: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The most tokens that any rank of the group passes. Collective."""
    most = torch.tensor(tokens, device=device, dtype=torch.int64)
    if group is not None and group.size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


@functools.cache
def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


class NvshmemDispatcher(SymmetricDispatcher):
    """A :class:`SymmetricDispatcher` over NVSHMEM, for CUDA tensors. Meant for several hosts, on which it never ran.

    The group must contain all ranks of the job. It needs an extra of mxep-comms. The first dispatch raises RuntimeError
    if a rank has no CUDA, no NVSHMEM, or symmetric memory of another backend in its process.
    """

    kind = NvshmemTransport
