"""The direct variant: tokens go straight to their expert-major rows on the owner, no slots in between.

    move i      every rank's tables to every rank                 barrier
                each rank plans for each owner, alike everywhere
    move i + 1  token t -> row plan[owner].slot_rows[t, k]        barrier
                the owner zeroes its padding rows

One more barrier and a row for every (token, expert) pair instead of one for every (token, rank), but no gather after:
better where a token seldom has two experts on one rank. Bitwise the rows that send_rows and gather_rows make.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .capacity import Capacity
from .exchange import check_parts, checked_ids, checked_weights, copy_tables, pack, split_parts, store, store_tables
from .layout import Layout
from .plan import RoutingPlan, make_plan
from .workspace import Workspace


@dataclass(frozen=True)
class GroupedRows:
    """What arrived, expert-major.

    Attributes:
        parts: uint8 (R_max, n_i) strided views into the workspace, borrowed until its next move. Padding rows are zero,
            rows past the last group hold anything.
        plan: where they came from; :func:`return_rows` takes it.
    """

    parts: tuple[Tensor, ...]
    plan: RoutingPlan


def send_rows_to_groups(
    workspace: Workspace,
    parts: Sequence[Tensor],
    expert_ids: Tensor,
    weights: Tensor,
    *,
    multiple: int,
    capacity: Capacity | None = None,
) -> GroupedRows:
    """Send tokens to their rows in the expert-major, padded order of the experts' ranks. Collective; two moves.

    Args and errors as :func:`send_rows` and :func:`make_plan` have them. The workspace's ``direct_rows`` must hold the
    capacity's R_max (ValueError).
    """
    check_parts(workspace, parts)
    expert_ids = checked_ids(workspace, expert_ids, len(parts[0]))
    weights = checked_weights(workspace, weights, expert_ids)
    layout, rank, e = workspace.layout, workspace.transport.rank, workspace.num_local_experts

    move = workspace.begin("send_rows_to_groups, tables")
    put_tables(move.buffer.peers, move.buffer.pointers, expert_ids, weights, layout.ints(), rank)
    # After it: the tables of all ranks lie on all ranks.
    move.finish()
    tables = copy_tables(layout, move.buffer.local)
    plans = [
        make_plan(
            *tables,
            first_expert=owner * e,
            num_local_experts=e,
            multiple=multiple,
            capacity=capacity,
            num_experts=workspace.num_experts,
        )
        for owner in range(layout.world_size)
    ]
    most = max(plan.max_rows for plan in plans)
    if most > workspace.direct_rows:
        raise ValueError(f"direct_rows: got {workspace.direct_rows} in the workspace, wanted at least {most}")

    mine = slice(rank * layout.max_tokens, rank * layout.max_tokens + len(expert_ids))
    pair_rows = torch.stack([plan.slot_rows[mine] for plan in plans])
    move = workspace.begin("send_rows_to_groups, rows")
    put_rows_to_groups(move.buffer.peers, move.buffer.pointers, list(parts), pair_rows, layout.ints(), rank)
    # After it: every row of this rank's experts lies at its place; padding is nobody's but ours.
    move.finish()
    plan = plans[rank]
    rows = layout.rows(move.buffer.local)[: plan.max_rows]
    rows.masked_fill_(plan.row_source[:, None] < 0, 0)
    return GroupedRows(split_parts(rows, parts), plan)


@torch.library.custom_op("mxep::put_tables", mutates_args=("peers",))
def put_tables(
    peers: list[Tensor], pointers: Tensor, expert_ids: Tensor, weights: Tensor, layout: list[int], rank: int
) -> None:
    """Store this rank's ids (T, K) int32, weights (T, K) fp32 and T into every peer's tables."""
    for peer in peers:
        store_tables(Layout(*layout), peer, expert_ids, weights, rank)


@torch.library.custom_op("mxep::put_rows_to_groups", mutates_args=("peers",))
def put_rows_to_groups(
    peers: list[Tensor], pointers: Tensor, parts: list[Tensor], pair_rows: Tensor, layout: list[int], rank: int
) -> None:
    """Store token t into row ``pair_rows[r, t, k]`` of each peer r, for each k where that is not negative.

    pair_rows: (W, T, K) int32.
    """
    place = Layout(*layout)
    packed = pack(parts)
    for peer, rows_of_tokens in zip(peers, pair_rows):
        for row_index in rows_of_tokens.unbind(1):
            store(place, peer, torch.where(row_index >= 0, row_index, place.spare_row(rank)).long(), packed)
