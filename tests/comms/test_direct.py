"""dispatch_to_rows: bitwise the rows that slots and a gather make, with the same plan."""

import dataclasses

import pytest
import torch

from comms.cases import CASES, assert_bitwise, gather
from comms.test_exchange import bring_to, check_return, make_workspace, plan_slots
from mxep.comms import Capacity, RoutingPlan, dispatch, dispatch_to_rows, gather_rows
from ranks import Context, distributed


def assert_same_plan(got: RoutingPlan, wanted: RoutingPlan) -> None:
    for field in dataclasses.fields(RoutingPlan):
        if field.name == "alignment":
            assert got.alignment == wanted.alignment
        else:
            assert_bitwise(getattr(got, field.name), getattr(wanted, field.name), field.name)


@distributed(*((1, 2, 3, 4) if torch.cuda.is_available() else (1, 3)))
def test_the_direct_variant_makes_the_rows_of_slots_and_gather(ctx: Context):
    check_direct(ctx, None, CASES)


def check_direct(ctx: Context, kind: type | None, cases: tuple[str, ...]) -> None:
    slots_workspace, direct_workspace = make_workspace(ctx, kind), make_workspace(ctx, kind, direct_rows=80)
    for seed, case in enumerate(cases):
        everyone = gather(ctx.group, bring_to(direct_workspace, case, ctx.rank, seed))
        for capacity in (Capacity.worst_case(), Capacity.factor(0.5)):
            mine = bring_to(direct_workspace, case, ctx.rank, seed).to(ctx.device)
            slots = dispatch(slots_workspace, mine.payload, mine.ids, mine.weights)
            plan = plan_slots(slots_workspace, slots, capacity=capacity)
            grouped = dispatch_to_rows(
                direct_workspace, mine.payload, mine.ids, mine.weights, alignment=4, capacity=capacity
            )
            assert_same_plan(grouped.plan, plan)
            valid = int(plan.offs[-1])
            wanted = gather_rows(slots.payload, plan.row_slot)
            for part, (rows, of_slots) in enumerate(zip(grouped.payload, wanted)):
                assert rows.shape == of_slots.shape
                assert_bitwise(rows[:valid], of_slots[:valid], f"{case}, {capacity}, part {part}")
            check_return(ctx, direct_workspace, grouped.plan, everyone, torch.bfloat16, seed, case)


@distributed(2)
def test_a_workspace_without_room_for_the_rows_is_refused(ctx: Context):
    workspace = make_workspace(ctx, direct_rows=8)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    with pytest.raises(ValueError, match="direct_rows: got 8 in the workspace, wanted at least 48"):
        dispatch_to_rows(workspace, mine.payload, mine.ids, mine.weights, alignment=4)
    with pytest.raises(ValueError, match=r"capacity: got Capacity.exact\(\), wanted a bound that all ranks know"):
        dispatch_to_rows(workspace, mine.payload, mine.ids, mine.weights, alignment=4, capacity=Capacity.exact())
    assert workspace.exchanges == 0
