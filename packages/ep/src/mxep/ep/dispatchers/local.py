"""LocalDispatcher, without expert parallelism: it sends nothing, and only makes the plan. Slots are the tokens.

Several threads may call one dispatcher at once, because exchanges share no state, and counts are added under a lock.

T tokens, K experts per token, D model dim.
"""

import dataclasses
import sys
import threading
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.comms import Capacity, batch_too_large, check_ids, gather_rows, narrow_ids, sum_slots
from mxep.runtime.lengths import Length
from mxep.runtime.record import fill
from mxep.runtime.replay import replayed

from .base import Done, Handle, Payload, Routing, TokenDispatcher, check_reserved

_counting = threading.Lock()
"""Held while a plan on a CPU adds to the counts of its dispatcher."""


class LocalDispatcher(TokenDispatcher):
    """Dispatcher of a process that has all experts; see :class:`TokenDispatcher`.

    Args:
        max_tokens: maximum tokens of a call. More raise ValueError. None: any number.
        stands_in_for: name of the dispatcher that was asked for with a group of one rank. If a process group of several
            ranks is initialised later, this dispatcher raises ValueError.
    """

    spans_ranks = False
    slots_are_tokens = True
    in_graphs = True
    has_rooms = True

    def __init__(
        self,
        num_experts: int,
        *,
        group: dist.ProcessGroup | None = None,
        capacity: Capacity | float | None = None,
        max_tokens: int | None = None,
        stands_in_for: str | None = None,
    ) -> None:
        sizes: dict[str, object] = {"max_tokens": max_tokens, "stands_in_for": stands_in_for}
        super().__init__(num_experts, group=group, capacity=capacity, sizes=sizes)
        self.max_tokens = max_tokens
        self._made_alone = stands_in_for is not None and not dist.is_initialized()

    def __repr__(self) -> str:
        most = "" if self.max_tokens is None else f", max_tokens={self.max_tokens}"
        return f"{super().__repr__()[:-1]}{most})"

    def static_tokens(self, num_tokens: int) -> tuple[int, int]:
        return 1, num_tokens

    def graph_state(self) -> tuple[()]:
        return ()

    def _most_rows(self, device: torch.device) -> int:
        return sys.maxsize if self.max_tokens is None else self.max_tokens

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
        self.check_usable(self._made_alone and dist.is_initialized() and dist.get_world_size() > 1)
        if self.max_tokens is not None and len(expert_ids) > self.max_tokens:
            raise ValueError(batch_too_large(len(expert_ids), self.max_tokens))
        if type(expert_ids) is Tensor and expert_ids.is_cpu:
            check_ids(expert_ids, self.num_experts)
        expert_ids = narrow_ids(expert_ids)
        num_tokens = torch.empty(1, dtype=torch.int32, device=expert_ids.device)
        fill(num_tokens, Length(len(expert_ids)))
        tables = expert_ids[None], weights[None], num_tokens
        with _counting if expert_ids.is_cpu else nullcontext():
            plan = self._plan(*tables, alignment=alignment, capacity=self.capacity, max_tokens=room)
        plan = dataclasses.replace(plan, dispatch=num_tokens)  # any tensor will do: compiled graphs expect one
        return Done((payload, Routing(plan, expert_ids, self.num_local_experts, room=room)))

    def reserve(self, max_tokens: int, device: torch.device | str) -> None:
        super().reserve(max_tokens, device)
        check_reserved(max_tokens, self.max_tokens)

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        return Done(payload)

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        return Done(_sum_rows(rows, routing.plan.slot_rows, row_values))


@replayed
def _sum_rows(rows: Tensor, slot_rows: Tensor, row_values: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sum each token's rows. Returns the sums (T, D), and row_values gathered to (T, K) or None."""
    out = sum_slots(rows, slot_rows)
    if row_values is None:
        return out, None
    (values,) = gather_rows((row_values[:, None],), slot_rows.flatten())
    return out, values.view(slot_rows.shape)
