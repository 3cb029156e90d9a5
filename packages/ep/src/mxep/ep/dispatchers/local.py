"""LocalDispatcher: no expert parallelism. Slots are the tokens themselves; only the plan is made."""

from typing import Any

import torch
from torch import Tensor

from mxep.comms import narrow_ids, sum_slots
from mxep.quant.replay import replayed

from .base import Payload, Routing, TokenDispatcher
from .handles import Done, Handle


class LocalDispatcher(TokenDispatcher):
    """All experts live on this process; see :class:`TokenDispatcher`."""

    spans_ranks = False
    in_graphs = True

    def static_tokens(self, num_tokens: int) -> tuple[int, int]:
        return 1, num_tokens

    def graph_state(self) -> tuple[()]:
        return ()

    def dispatch(
        self, payload: Payload, expert_ids: Tensor, weights: Tensor, *, alignment: int, overlap: bool = False
    ) -> Handle[tuple[Payload, Routing]]:
        expert_ids = narrow_ids(expert_ids, self.num_experts)
        num_tokens = torch.full((1,), len(expert_ids), dtype=torch.int32, device=expert_ids.device)
        plan = self._plan(expert_ids[None], weights[None], num_tokens, alignment=alignment, capacity=self.capacity)
        return Done((payload, Routing(plan, expert_ids, self.num_local_experts)))

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        return Done(payload)

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        out, values = _sum_rows([rows, routing.plan.slot_rows, row_values])
        return Done((out, values))


@replayed
def _sum_rows(tensors: list[Any]) -> list[Tensor | None]:
    """[rows, slot_rows, row_values or None] -> [their sums (T, D), the values (T, K)]."""
    rows, slot_rows, row_values = tensors
    out = sum_slots(rows, slot_rows)
    if row_values is None:
        return [out, None]
    values = row_values.index_select(0, slot_rows.clamp_min(0).flatten()).view(slot_rows.shape)
    return [out, torch.where(slot_rows >= 0, values, 0.0)]
