"""Many moves back to back, fresh routing each, ranks out of step: no stale and no early row is ever read."""

import random
import time

import torch

from comms.cases import CASES
from comms.test_exchange import bring_to, check_arrived, check_return, make_workspace, my_experts, plan_slots
from mxep.comms import combine, dispatch
from ranks import Context, distributed

ROUNDS = 60


def dawdle(ctx: Context, luck: random.Random) -> None:
    """Put this rank out of step with the others, by a little and now and then by much."""
    pause = luck.choice((0, 0, 0, 0.0002, 0.003))
    if ctx.device.type == "cuda":
        torch.cuda._sleep(int(pause * 1.5e9))
    else:
        time.sleep(pause)


@distributed(*((2, 3, 4) if torch.cuda.is_available() else (4,)))
def test_no_round_sees_another_rounds_rows(ctx: Context):
    check_rounds(ctx, None, ROUNDS)


def check_rounds(ctx: Context, kind: type | None, rounds: int) -> None:
    one = make_workspace(ctx, kind)
    workspaces = one, make_workspace(ctx, transport=one.transport, top_k=2, max_tokens=3)
    together = random.Random(0)  # the same choices on every rank
    luck = random.Random(ctx.rank + 1)
    in_flight = []
    for seed in range(rounds):
        workspace = together.choice(workspaces)
        case = together.choice(CASES)
        # No communication but the moves themselves: everyone knows what everyone brings.
        everyone = [bring_to(workspace, case, rank, seed) for rank in range(ctx.world_size)]
        mine = everyone[ctx.rank].to(ctx.device)
        dawdle(ctx, luck)
        handle = dispatch(workspace, mine.payload, mine.ids, mine.weights)
        dawdle(ctx, luck)
        plan = plan_slots(workspace, handle)
        check_arrived(handle.wait(), plan, everyone, my_experts(workspace, ctx.rank), f"round {seed}")
        in_flight.append((workspace, plan, everyone, seed))
        while in_flight and together.random() < 0.55:
            workspace, plan, everyone, brought = in_flight.pop(together.randrange(len(in_flight)))
            mine = everyone[ctx.rank].to(ctx.device)
            if together.random() < 0.3:
                dawdle(ctx, luck)
                slots = dispatch(workspace, mine.payload, mine.ids).wait()
                check_arrived(slots, plan, everyone, my_experts(workspace, ctx.rank), f"round {brought} again")
            dawdle(ctx, luck)
            check_return(ctx, workspace, plan, everyone, torch.bfloat16, brought, f"round {brought} at {seed}")


@distributed(4)
def test_two_runs_are_bitwise_equal(ctx: Context):
    workspace = make_workspace(ctx)
    results = []
    for _ in range(2):
        mine = bring_to(workspace, "full", ctx.rank, 3).to(ctx.device)
        plan = plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights))
        rows = torch.randn(plan.max_rows, workspace.dim, generator=torch.Generator().manual_seed(ctx.rank))
        results.append(combine(workspace, rows.to(ctx.device), plan, mine.ids).wait()[0])
    assert torch.equal(*results)
