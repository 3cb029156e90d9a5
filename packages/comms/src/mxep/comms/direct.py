"""The direct variant: tokens go straight to their expert-major rows on the owner, no slots in between.

    exchange i      every rank's tables to every rank             barrier
                    each rank finds its tokens' rows on their owners, and plans its own rows
    exchange i + 1  token t -> row rows[t, k] of the owner        barrier
                    the owner zeroes its padding rows

One more barrier and a row for every (token, expert) pair instead of one for every (token, rank), but no gather after:
better where a token seldom has two experts on one rank. Bitwise the rows that dispatch and gather_rows make.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .capacity import Capacity
from .exchange import check_tokens
from .plan import RoutingPlan, make_plan, plan_destinations
from .workspace import Workspace


@dataclass(frozen=True)
class GroupedRows:
    """What arrived, expert-major.

    Attributes:
        payload: uint8 (R_max, n_i) strided views into the workspace, borrowed until its next exchange. Padding rows are
            zero, rows past the last group hold anything.
        plan: where they came from; :func:`combine` takes it.
    """

    payload: tuple[Tensor, ...]
    plan: RoutingPlan


def dispatch_to_rows(
    workspace: Workspace,
    payload: Sequence[Tensor],
    expert_ids: Tensor,
    weights: Tensor,
    *,
    alignment: int,
    capacity: Capacity | None = None,
) -> GroupedRows:
    """Send tokens to their rows in the expert-major, padded order of the experts' ranks. Collective; two exchanges.

    Args and errors as :func:`dispatch` and :func:`make_plan` have them. The workspace's ``direct_rows`` must hold the
    capacity's R_max, and ``Capacity.exact`` will not do: senders cannot know another rank's size (ValueError).
    """
    if workspace.is_on_other_device():
        with torch.cuda.device(workspace.device):
            return dispatch_to_rows(workspace, payload, expert_ids, weights, alignment=alignment, capacity=capacity)
    expert_ids, checked = check_tokens(workspace, payload, expert_ids, weights)
    assert checked is not None
    rank, layout, e = workspace.transport.rank, workspace.layout, workspace.num_local_experts
    capacity = Capacity.worst_case() if capacity is None else capacity
    if capacity.kind == "exact":
        raise ValueError(
            "capacity: got Capacity.exact(), wanted a bound that all ranks know: worst_case() or factor(c)"
        )
    tokens = layout.world_size, layout.max_tokens, layout.top_k
    max_rows = capacity.rows(*tokens, num_local_experts=e, alignment=alignment)
    if max_rows > workspace.direct_rows:
        raise ValueError(f"direct_rows: got {workspace.direct_rows} in the workspace, wanted at least {max_rows}")

    buffer = workspace.begin("dispatch_to_rows, tables")
    # After it: the tables of all ranks are on all ranks.
    workspace.steps.dispatch_tables(buffer, expert_ids, checked)
    ids, weights, num_tokens = workspace.tables(buffer)
    plan = make_plan(
        ids,
        weights,
        num_tokens,
        first_expert=rank * e,
        num_local_experts=e,
        alignment=alignment,
        capacity=capacity,
        num_experts=workspace.num_experts,
    )
    sizes = rank, expert_ids.shape[0], e, alignment, max_rows, workspace.num_experts
    rows = plan_destinations(ids, num_tokens, *sizes)
    buffer = workspace.begin("dispatch_to_rows, rows")
    # After it: every row of this rank's experts has arrived, and padding is zero.
    workspace.steps.dispatch_to_rows(buffer, payload, expert_ids, rows, plan)
    return GroupedRows(workspace.rows(buffer, max_rows, payload), plan)
