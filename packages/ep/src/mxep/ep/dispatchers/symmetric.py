"""SymmetricDispatcher: symmetric-memory stores, one barrier a move, no host sync, no collective.

A token travels once per destination rank; the receiver plans alone. The workspace is made at the first send, when the
sizes are known: the one moment when the ranks talk through collectives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import (
    Capacity,
    SharedMemoryTransport,
    SymmetricMemoryTransport,
    Transport,
    Workspace,
    return_rows,
    send_rows,
    start_return_rows,
    start_send_rows,
)

from .base import Parts, Routing, TokenDispatcher

BESIDE = 32
"""Multiprocessors that rows may take which are sent while something else computes: they get 0.92 of the links."""


class SymmetricDispatcher(TokenDispatcher):
    """See :class:`TokenDispatcher`.

    Args:
        dim: D. dtype: the widest dtype that rows travel in, there (unquantized) or back.
        max_tokens: T_max, the most tokens a rank will ever send at once; slots are sized for it. None: the most any
            rank brings to the first send. More tokens later raise ValueError.
        timeout: seconds that a wait for a peer takes at most, 60 unless given.
        transport: how ranks reach each other's memory. None: shared memory for CPU tensors, NVLink symmetric memory for
            CUDA tensors.
    """

    borrows = True

    def __init__(
        self,
        num_experts: int,
        *,
        dim: int,
        dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        capacity: Capacity | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        transport: Transport | None = None,
    ) -> None:
        sizes = {"dim": dim, "dtype": dtype, "max_tokens": max_tokens}
        super().__init__(num_experts, group=group, capacity=capacity, sizes=sizes)
        self.dim = dim
        self.row_dtype: torch.dtype = dtype
        self.max_tokens = max_tokens
        self.timeout = timeout
        self.transport = transport
        self.workspace: Workspace | None = None

    def static_tokens(self, num_tokens: int) -> tuple[int, int] | None:
        return None if self.max_tokens is None else (self.world_size, self.max_tokens)

    def send(self, parts: Parts, expert_ids: Tensor, weights: Tensor, *, multiple: int) -> tuple[Parts, Routing]:
        return self._send(parts, expert_ids, weights, multiple, None)()

    def start_send(
        self, parts: Parts, expert_ids: Tensor, weights: Tensor, *, multiple: int
    ) -> Callable[[], tuple[Parts, Routing]]:
        return self._send(parts, expert_ids, weights, multiple, BESIDE)

    def _send(
        self, parts: Parts, expert_ids: Tensor, weights: Tensor, multiple: int, num_programs: int | None
    ) -> Callable[[], tuple[Parts, Routing]]:
        workspace = self.workspace or self._make_workspace(expert_ids)
        sending = start_send_rows(workspace, parts, expert_ids, weights, num_programs=num_programs)
        assert sending.tables is not None
        plan = self._plan(*sending.tables, multiple=multiple, capacity=self.capacity)  # while rows are under way
        routing = Routing(plan, expert_ids, self.num_local_experts)
        return lambda: (sending.wait().parts, routing)

    def resend(self, parts: Parts, routing: Routing) -> Parts:
        assert self.workspace is not None
        return send_rows(self.workspace, parts, routing.expert_ids).parts

    def start_resend(self, parts: Parts, routing: Routing) -> Callable[[], Parts]:
        assert self.workspace is not None
        sending = start_send_rows(self.workspace, parts, routing.expert_ids, num_programs=BESIDE)
        return lambda: sending.wait().parts

    def give_back(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert self.workspace is not None
        return return_rows(self.workspace, rows, routing.plan, routing.expert_ids, row_values=row_values)

    def start_give_back(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        assert self.workspace is not None
        plan, ids = routing.plan, routing.expert_ids
        return start_return_rows(self.workspace, rows, plan, ids, row_values=row_values).wait

    def check(self) -> None:
        super().check()
        if self.transport is not None:
            self.transport.check()

    def _make_workspace(self, expert_ids: Tensor) -> Workspace:
        device = expert_ids.device
        if self.transport is None:
            make = SymmetricMemoryTransport if device.type == "cuda" else SharedMemoryTransport
            self.transport = make(self.group, timeout=60.0 if self.timeout is None else self.timeout)
        if self.transport.world_size != self.world_size:
            raise ValueError(
                f"the dispatcher was made for {self.world_size} ranks, its transport has {self.transport.world_size}: "
                "initialise the process group before making the layer"
            )
        if self.max_tokens is None:  # once, before the first move: who was given max_tokens asks nobody
            most = torch.tensor(len(expert_ids), device=device)
            if self.world_size > 1:
                dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            self.max_tokens = int(most)
        with torch.inference_mode(False):  # it outlives the call that makes it
            self.workspace = Workspace(
                self.transport,
                max_tokens=self.max_tokens,
                top_k=expert_ids.shape[1],
                dim=self.dim,
                row_bytes=self.dim * self.row_dtype.itemsize,
                num_experts=self.num_experts,
            )
        return self.workspace
