"""dispatch, make_plan, combine over real ranks: bitwise what plain collectives and python loops make."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from comms.cases import (
    CASES,
    Sent,
    assert_bitwise,
    bring,
    content,
    expected_plan,
    expected_return,
    expert_outputs,
    gather,
)
from mxep.comms import (
    NEW,
    Capacity,
    Handle,
    PeersDisagree,
    RoutingPlan,
    Transport,
    Workspace,
    combine,
    describe_dispatch,
    dispatch,
    gather_rows,
    make_plan,
    new_dispatch,
)
from ranks import Context, distributed

MAX_TOKENS, TOP_K, DIM = 6, 3, 20
EXPERTS_PER_RANK = {1: 5, 2: 3, 3: 2, 4: 2}


def make_workspace(
    ctx: Context, kind: type | None = None, *, timeout: float = 60.0, transport: Transport | None = None, **changes
) -> Workspace:
    sizes = {"max_tokens": MAX_TOKENS, "top_k": TOP_K, "dim": DIM, "row_bytes": 4 * DIM}
    sizes["num_experts"] = EXPERTS_PER_RANK[ctx.world_size] * ctx.world_size
    workspace = Workspace(transport or ctx.transport(kind, timeout=timeout), **{**sizes, **changes})
    poison(workspace)
    return workspace


def poison(workspace: Workspace) -> None:
    """NaN in every row and value, and tables that name real experts: whoever reads what nobody sent shows it."""
    for buffer in workspace.arena.buffers:
        buffer.local[workspace.layout.rows_start :].fill_(255)
        workspace.layout.ids(buffer.local).fill_(0)
        workspace.layout.num_tokens(buffer.local).fill_(workspace.max_tokens)
    workspace.transport.barrier("poison")


def bring_to(workspace: Workspace, case: str, rank: int, seed: int) -> Sent:
    sizes = {"max_tokens": workspace.max_tokens, "top_k": workspace.top_k, "num_experts": workspace.num_experts}
    return bring(case, rank, world_size=workspace.transport.world_size, seed=seed, **sizes)


def plan_slots(workspace: Workspace, handle: Handle, *, alignment: int = 4, capacity: Capacity | None = None):
    handle.wait()
    e = workspace.num_local_experts
    plan = make_plan(
        *handle.tables,
        first_expert=workspace.transport.rank * e,
        num_local_experts=e,
        alignment=alignment,
        capacity=capacity,
        num_experts=workspace.num_experts,
    )
    return dataclasses.replace(plan, dispatch=handle.number)


def cross(ctx: Context, workspace: Workspace, *, redispatch: bool = False) -> None:
    """Two dispatches, of which rank 1 takes the first for the second one, and the others the second."""
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    plans = [plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights)) for _ in range(2)]
    plan = plans[ctx.rank != 1]
    if redispatch:
        dispatch(workspace, mine.payload, mine.ids, plan=plan).wait()
    else:
        rows = torch.zeros(plan.max_rows, workspace.dim, dtype=torch.bfloat16, device=ctx.device)
        combine(workspace, rows, plan, mine.ids).wait()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    workspace.transport.check()


def check_crossed(ctx: Context, kind: type | None) -> None:
    for redispatch in (False, True):
        workspace = make_workspace(ctx, kind)
        step = "dispatch" if redispatch else "combine"
        others = "".join(f", rank {rank} of dispatch 2" for rank in range(2, ctx.world_size))
        said = f"rank {ctx.rank} met peers in a {step} of other dispatches: rank 0 of dispatch 2, rank 1 of dispatch 1"
        with pytest.raises(PeersDisagree, match=said + others):
            cross(ctx, workspace, redispatch=redispatch)


@distributed(2, 3)
def test_ranks_that_take_one_dispatch_for_another_are_told(ctx: Context):
    check_crossed(ctx, None)


def meet_with_layers(ctx: Context, workspace: Workspace, new_dispatches: Sequence[int]) -> None:
    """New dispatches, of the layers that each rank names."""
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    workspace.transport.announce(new_dispatches[ctx.rank])
    dispatch(workspace, mine.payload, mine.ids, mine.weights).wait()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    workspace.transport.check()


def check_layers(ctx: Context, kind: type | None) -> None:
    workspace = make_workspace(ctx, kind)
    for of_ranks in ([new_dispatch(7, 2)] * 2, [NEW, new_dispatch(7, 0)], [new_dispatch(7, 0), NEW]):
        meet_with_layers(ctx, workspace, of_ranks)
    said = "rank 0 of a new one of layer 7, rank 1 of a new one of layer 7, after 1 of its passes failed"
    with pytest.raises(PeersDisagree, match=f"rank {ctx.rank} met peers in a dispatch of other dispatches: {said}"):
        meet_with_layers(ctx, workspace, [new_dispatch(7, failures) for failures in range(2)])


@distributed(2)
def test_new_dispatches_of_other_layers_are_told_apart(ctx: Context):
    check_layers(ctx, None)


def test_numbers_of_layers_and_failures_fit_a_header_and_start_again():
    for layer, failures in ((1, 0), (65535, 0), (65536, 4095), (3, 4096 + 5)):
        number = new_dispatch(layer, failures)
        assert -(2**29) <= number < NEW
        assert f"layer {(layer - 1) % 65535 + 1}" in (said := describe_dispatch(number))
        assert (f"after {failures % 4096} " in said) == (failures > 0)
    assert new_dispatch(0, 5) == NEW


def my_experts(workspace: Workspace, rank: int) -> range:
    return range(rank * workspace.num_local_experts, (rank + 1) * workspace.num_local_experts)


def check_arrived(
    slots: tuple[torch.Tensor, ...], plan: RoutingPlan, everyone: list[Sent], experts: range, what: str
) -> None:
    """Every valid and padding row of the payload, gathered from the slots, is what loops make of what was sent."""
    wanted = expected_plan(everyone, experts, plan.alignment, plan.max_rows)
    assert plan.offs.tolist() == wanted.offs, what
    assert plan.group_sizes.tolist() == wanted.group_sizes, what
    assert int(plan.overflow[experts.start // len(experts)]) == wanted.overflow, what
    for part, rows in enumerate(gather_rows(slots, plan.row_slot)):
        assert_bitwise(rows[: len(wanted.pairs)], wanted.rows(everyone, part), f"{what}, part {part}")
    pairs = [None if pair is None else everyone[pair[0]].weights[pair[1], pair[2]] for pair in wanted.pairs]
    weights = torch.tensor([0.0 if weight is None else float(weight) for weight in pairs])
    assert_bitwise(plan.row_weight[: len(pairs)], weights, f"{what}, weights")


def expert_rows(workspace: Workspace, plan: RoutingPlan, everyone: list[Sent], dtype: torch.dtype, seed: int):
    """(R_max, D) rows and (R_max,) values that this rank's experts give, NaN where nothing may be read."""
    rows = torch.full((plan.max_rows, workspace.dim), float("nan"), dtype=dtype)
    values = torch.full((plan.max_rows, 2), float("nan"))[:, 0]  # not contiguous
    outputs = [expert_outputs(sent, rank, workspace.dim, dtype, seed) for rank, sent in enumerate(everyone)]
    for pair, row in enumerate(plan.slot_rows.flatten().tolist()):
        if row >= 0:
            slot, k = divmod(pair, workspace.top_k)
            rank, token = divmod(slot, workspace.max_tokens)
            rows[row], values[row] = outputs[rank][0][token, k], outputs[rank][1][token, k]
    return rows.to(workspace.device), values.to(workspace.device)


def lost_pairs(workspace: Workspace, everyone: list[Sent], rank: int, alignment: int, max_rows: int) -> set:
    """(token, k) of this rank that did not fit the capacity of the rank they went to."""
    lost = set()
    for owner in range(workspace.transport.world_size):
        everything, kept = (
            expected_plan(everyone, my_experts(workspace, owner), alignment, rows).pairs for rows in (10**9, max_rows)
        )
        lost |= {pair[1:] for pair in set(everything) - set(kept) if pair is not None and pair[0] == rank}
    return lost


def check_return(ctx: Context, workspace: Workspace, plan, everyone, dtype, seed: int, what: str, fits=False) -> None:
    mine = everyone[ctx.rank]
    rows, values = expert_rows(workspace, plan, everyone, dtype, seed)
    out, back = combine(workspace, rows, plan, mine.ids.to(ctx.device), row_values=values).wait()
    lost = set() if fits else lost_pairs(workspace, everyone, ctx.rank, plan.alignment, plan.max_rows)
    sizes = {"experts_per_rank": workspace.num_local_experts, "world_size": ctx.world_size}
    outputs = expert_outputs(mine, ctx.rank, workspace.dim, dtype, seed)
    wanted, wanted_values = expected_return(mine, *outputs, lost, **sizes)
    assert_bitwise(out, wanted, f"{what}, sums")
    assert_bitwise(back, wanted_values, f"{what}, values")


@distributed(1, 2, 3, 4)
def test_rows_go_out_and_come_home_as_loops_and_plain_collectives_say(ctx: Context):
    check_cases(ctx, make_workspace(ctx), CASES)


def check_cases(ctx: Context, workspace: Workspace, cases: tuple[str, ...]) -> None:
    experts = my_experts(workspace, ctx.rank)
    for seed, case in enumerate(cases):
        mine = bring_to(workspace, case, ctx.rank, seed)
        everyone = gather(ctx.group, mine)
        here = mine.to(ctx.device)
        handle = dispatch(workspace, here.payload, here.ids, here.weights)
        plan = plan_slots(workspace, handle)
        check_arrived(handle.wait(), plan, everyone, experts, case)
        for dtype in (torch.bfloat16, torch.float32):
            check_return(ctx, workspace, plan, everyone, dtype, seed, f"{case}, {dtype}")

        # Once more along the same plan, other bytes and no tables, as a backward does.
        again = [content(rank, len(sent.ids), 30, salt=50) for rank, sent in enumerate(everyone)]
        repeat = dispatch(workspace, (again[ctx.rank].to(ctx.device),), here.ids.long())
        assert repeat.tables is None
        sent_again = [dataclasses.replace(sent, payload=(bytes_,)) for sent, bytes_ in zip(everyone, again)]
        check_arrived(repeat.wait(), plan, sent_again, experts, f"{case}, again")
        out, nothing = combine(
            workspace, torch.zeros(plan.max_rows, workspace.dim, device=ctx.device), plan, here.ids
        ).wait()
        assert nothing is None
        assert not out.any()


@distributed(2, 3)
def test_rows_over_capacity_are_counted_and_the_rest_comes_home(ctx: Context):
    check_over_capacity(ctx, make_workspace(ctx), ("one rank", "one expert", "full", "duplicates"))


def check_over_capacity(ctx: Context, workspace: Workspace, cases: tuple[str, ...]) -> None:
    dropped = 0
    for seed, case in enumerate(cases):
        mine = bring_to(workspace, case, ctx.rank, seed)
        everyone = gather(ctx.group, mine)
        here = mine.to(ctx.device)
        for capacity in (Capacity.factor(0.2), Capacity.factor(1.0), Capacity.exact()):
            handle = dispatch(workspace, here.payload, here.ids, here.weights)
            plan = plan_slots(workspace, handle, alignment=2, capacity=capacity)
            what = f"{case}, {capacity}"
            check_arrived(handle.wait(), plan, everyone, my_experts(workspace, ctx.rank), what)
            check_return(ctx, workspace, plan, everyone, torch.bfloat16, seed, what, capacity == Capacity.exact())
            if capacity == Capacity.exact():
                assert not plan.overflow.any()
                assert plan.max_rows == int(plan.offs[-1])
            alike = [plan.overflow.tolist()] * ctx.world_size
            dist.all_gather_object(alike, plan.overflow.tolist(), group=ctx.group)
            assert all(each == alike[0] for each in alike), "every rank knows of every rank"
            dropped += int(plan.overflow.sum())
    total = torch.tensor(dropped, device=ctx.device)
    dist.all_reduce(total, group=ctx.group)
    assert int(total) > 0


@distributed(1, 2, 3)
def test_workspaces_of_other_sizes_take_turns_in_the_same_buffers(ctx: Context):
    check_other_sizes(ctx, None, ("random", "duplicates", "no tokens on rank 0"))


def check_other_sizes(ctx: Context, kind: type | None, cases: tuple[str, ...]) -> None:
    """Rows of both are sent before those of the first go home, as layers in flight do."""
    one = make_workspace(ctx, kind)
    sizes = {"max_tokens": 9, "top_k": 2, "dim": 36, "row_bytes": 144, "num_experts": 2 * ctx.world_size}
    other = make_workspace(ctx, transport=one.transport, **sizes)
    for seed, case in enumerate(cases):
        sent = []
        for workspace in (one, other):
            mine = bring_to(workspace, case, ctx.rank, seed)
            everyone, here = gather(ctx.group, mine), mine.to(ctx.device)
            handle = dispatch(workspace, here.payload, here.ids, here.weights)
            plan = plan_slots(workspace, handle)
            check_arrived(handle.wait(), plan, everyone, my_experts(workspace, ctx.rank), case)
            sent.append((plan, everyone))
        for workspace, (plan, everyone) in zip((one, other), sent):
            check_return(ctx, workspace, plan, everyone, torch.bfloat16, seed, case)
    assert one.arena.buffers is other.arena.buffers
    assert one.arena.exchanges == 4 * len(cases)


@distributed(2)
def test_one_token_in_parts_of_one_wider_row(ctx: Context):
    check_one_token(ctx, make_workspace(ctx))


def check_one_token(ctx: Context, workspace: Workspace) -> None:
    wide = content(ctx.rank, 1, 27).to(ctx.device)
    ids = torch.full((1, TOP_K), -1, device=ctx.device)
    ids[0, 0] = 0
    slots = dispatch(workspace, (wide[:, :24], wide[:, 24:]), ids).wait()
    if ctx.rank == 0:
        for rank in range(2):
            for part, wanted in zip(slots, content(rank, 1, 27).split((24, 3), 1)):
                assert_bitwise(part[rank * MAX_TOKENS : rank * MAX_TOKENS + 1], wanted, f"from rank {rank}")


@distributed(2)
def test_a_nan_stays_in_its_token(ctx: Context):
    workspace = make_workspace(ctx, top_k=2)
    ids = torch.tensor([[0, 3], [3, 0], [1, -1]], device=ctx.device)
    payload = (content(ctx.rank, 3, 8).to(ctx.device),)
    plan = plan_slots(workspace, dispatch(workspace, payload, ids, torch.ones(3, 2, device=ctx.device)))
    rows = torch.ones(plan.max_rows, DIM, device=ctx.device)
    token_zero_of_rank_one = plan.row_slot == MAX_TOKENS
    out, _ = combine(workspace, rows.masked_fill(token_zero_of_rank_one[:, None], float("nan")), plan, ids).wait()
    nan = out.isnan().all(1).tolist()
    assert nan == [ctx.rank == 1, False, False]
    assert out[1:].tolist() == [[2.0] * DIM, [1.0] * DIM]


@distributed(1, 2)
def test_invalid_ids_raise_on_cpu_and_are_counted_and_sent_nowhere_on_cuda(ctx: Context):
    workspace = make_workspace(ctx, top_k=2)
    wrong = workspace.num_experts
    ids = torch.tensor([[0, wrong], [-5, 2**40]], device=ctx.device)
    payload, weights = (content(ctx.rank, 2, 8).to(ctx.device),), torch.ones(2, 2, device=ctx.device)
    if ctx.device.type == "cpu":
        with pytest.raises(ValueError, match=rf"expert ids: got \[-5, {wrong}, {2**40}\], wanted -1 \(not routed\) to"):
            dispatch(workspace, payload, ids, weights).wait()
        with pytest.raises(ValueError, match="expert ids: got"):
            dispatch(workspace, payload, ids).wait()
        assert workspace.arena.exchanges == (0 if ctx.world_size == 1 else 1), "which refused"
        return
    plan = plan_slots(workspace, dispatch(workspace, payload, ids, weights))
    assert int(plan.invalid) == 3 * ctx.world_size
    assert int(plan.group_sizes.sum()) == (ctx.world_size if ctx.rank == 0 else 0)
    out, _ = combine(workspace, torch.ones(plan.max_rows, DIM, device=ctx.device), plan, ids).wait()
    assert out[:, 0].tolist() == [1.0, 0.0]


@distributed(1)
def test_bad_arguments_are_refused_before_anything_moves(ctx: Context):
    workspace = make_workspace(ctx)
    good = bring_to(workspace, "full", 0, 0).to(ctx.device)
    plan = plan_slots(workspace, dispatch(workspace, good.payload, good.ids, good.weights))
    rows = torch.zeros(plan.max_rows, DIM, device=ctx.device)
    wide, seven = torch.zeros(6, 81, dtype=torch.uint8, device=ctx.device), torch.zeros(7, 3, device=ctx.device)
    refused = [
        (lambda: dispatch(workspace, (seven,), good.ids), r"payload: got torch.float32 \(7, 3\), wanted torch.uint8"),
        (
            lambda: dispatch(workspace, (wide[:, :0], wide[:, :8]), good.ids),
            r"payload: .* \(6, 0\), .* at least one byte",
        ),
        (lambda: dispatch(workspace, (wide,), good.ids), "payload: got 81 bytes a row, wanted 1 to 80"),
        (
            lambda: dispatch(workspace, (good.payload[0], wide[:5]), good.ids),
            r"payload: .* \(5, 81\), wanted .* \(6, bytes",
        ),
        (
            lambda: dispatch(workspace, (seven.byte(),), seven.int()),
            "batch: got 7 tokens, wanted at most max_tokens = 6",
        ),
        (
            lambda: dispatch(workspace, good.payload, good.ids, num_sms=0, async_op=True),
            "num_sms: got 0, wanted at least 1",
        ),
        (
            lambda: dispatch(workspace, good.payload, good.ids.float()),
            r"expert_ids: got torch.float32 \(6, 3\), wanted",
        ),
        (lambda: dispatch(workspace, good.payload, good.ids[:, :2]), r"expert_ids: .* \(6, 2\), wanted .* \(6, 3\)"),
        (lambda: dispatch(workspace, good.payload, good.ids, good.weights.bfloat16()), r"weights: got torch.bfloat16"),
        (
            lambda: combine(workspace, rows[1:], plan, good.ids),
            "rows: got torch.float32 .*, wanted torch.bfloat16 or",
        ),
        (lambda: combine(workspace, rows.half(), plan, good.ids), "rows: got torch.float16"),
        (lambda: combine(workspace, rows, plan, good.ids, row_values=rows), "row_values: got torch.float32"),
        (lambda: combine(workspace, rows, plan, seven.int()), "expert_ids: got 7 tokens, wanted at most"),
        (
            lambda: combine(workspace, rows, short_plan(plan), good.ids),
            r"plan.slot_rows: got \(5, 3\), wanted \(6, 3",
        ),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert workspace.arena.exchanges == 1


def short_plan(plan: RoutingPlan) -> RoutingPlan:
    return dataclasses.replace(plan, slot_rows=plan.slot_rows[:5])


@distributed(2)
def test_a_row_too_wide_for_the_workspace_is_refused_on_the_way_home(ctx: Context):
    workspace = make_workspace(ctx, row_bytes=None)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    plan = plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights))
    rows = torch.zeros(plan.max_rows, DIM, device=ctx.device)
    with pytest.raises(ValueError, match=r"rows: got 80 bytes a row, wanted at most 48 \(row_bytes\)"):
        combine(workspace, rows, plan, mine.ids).wait()
    out, _ = combine(workspace, rows.bfloat16(), plan, mine.ids).wait()
    assert not out.any()


@distributed(2, device="cuda")
def test_moves_wait_for_no_device_read(ctx: Context):
    workspace = make_workspace(ctx)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights))
        rows = torch.zeros(plan.max_rows, DIM, device=ctx.device)
        combine(workspace, rows, plan, mine.ids, row_values=rows[:, 0]).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
