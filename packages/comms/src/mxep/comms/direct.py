"""The direct variant: tokens go straight to their expert-major rows on the owner, no slots in between.

    move i      every rank's tables to every rank                 barrier
                each rank finds its tokens' rows on their owners, and plans its own rows
    move i + 1  token t -> row rows[t, k] of the owner            barrier
                the owner zeroes its padding rows

One more barrier and a row for every (token, expert) pair instead of one for every (token, rank), but no gather after:
better where a token seldom has two experts on one rank. Bitwise the rows that send_rows and gather_rows make.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .capacity import Capacity
from .exchange import checked_tokens, split_parts, tables
from .plan import RoutingPlan, make_plan, plan_destinations
from .workspace import Workspace


@dataclass(frozen=True)
class GroupedRows:
    """What arrived, expert-major.

    Attributes:
        payload: uint8 (R_max, n_i) strided views into the workspace, borrowed until its next move. Padding rows are
            zero, rows past the last group hold anything.
        plan: where they came from; :func:`return_rows` takes it.
    """

    payload: tuple[Tensor, ...]
    plan: RoutingPlan


def send_rows_to_groups(
    workspace: Workspace,
    payload: Sequence[Tensor],
    expert_ids: Tensor,
    weights: Tensor,
    *,
    alignment: int,
    capacity: Capacity | None = None,
) -> GroupedRows:
    """Send tokens to their rows in the expert-major, padded order of the experts' ranks. Collective; two moves.

    Args and errors as :func:`send_rows` and :func:`make_plan` have them. The workspace's ``direct_rows`` must hold the
    capacity's R_max, and ``Capacity.exact`` will not do: senders cannot know another rank's size (ValueError).
    """
    expert_ids, checked = checked_tokens(workspace, payload, expert_ids, weights)
    assert checked is not None
    transport, layout, e = workspace.transport, workspace.layout, workspace.num_local_experts
    capacity = Capacity.worst_case() if capacity is None else capacity
    if capacity == Capacity.exact():
        raise ValueError(
            "capacity: got Capacity.exact(), wanted a bound that all ranks know: worst_case() or factor(c)"
        )
    tokens = layout.world_size, layout.max_tokens, layout.top_k
    max_rows = capacity.rows(*tokens, num_local_experts=e, alignment=alignment)
    if max_rows > workspace.direct_rows:
        raise ValueError(f"direct_rows: got {workspace.direct_rows} in the workspace, wanted at least {max_rows}")

    move = workspace.begin("send_rows_to_groups, tables")
    # After it: the tables of all ranks lie on all ranks.
    transport.put_tables(move, expert_ids, checked)
    ids, weights, num_tokens = tables(layout, move.buffer.local)
    plan = make_plan(
        ids,
        weights,
        num_tokens,
        first_expert=transport.rank * e,
        num_local_experts=e,
        alignment=alignment,
        capacity=capacity,
        num_experts=workspace.num_experts,
    )
    rows = plan_destinations(
        ids, num_tokens, transport.rank, len(expert_ids), e, alignment, max_rows, workspace.num_experts
    )
    move = workspace.begin("send_rows_to_groups, rows")
    # After it: every row of this rank's experts lies at its place, and padding is zero.
    transport.put_rows_to_groups(move, payload, expert_ids, rows, plan)
    return GroupedRows(split_parts(layout.rows(move.buffer.local)[:max_rows], payload), plan)
