"""dispatch, make_plan, combine over real ranks: bitwise what plain collectives and python loops make.

A kind of exchange: "own" of the device at hand; without a GPU also "kernels", interpreted, and "puts", played.
"""

import dataclasses
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist

from comms.cases import (
    CASES,
    DIM,
    MAX_TOKENS,
    TOP_K,
    assert_bitwise,
    bring_to,
    check_arrived,
    check_return,
    content,
    cross,
    gather,
    make_workspace,
    my_experts,
    plan_slots,
)
from comms.transports import InterpretedTransport, PlayedTransport
from host_sync import no_host_sync
from mxep.comms import (
    NEW,
    Capacity,
    PeersDisagree,
    PeerTimeout,
    SharedMemoryTransport,
    Workspace,
    combine,
    dispatch,
    gather_rows,
    new_dispatch,
)
from mxep.comms.kernels.rows import tokens_per_tile
from mxep.comms.layout import CHANNELS
from mxep.comms.symmetric_memory import FaultRecord
from ranks import Context, distributed

ON_CUDA = torch.cuda.is_available()
KINDS = ("own",) if ON_CUDA else ("own", "kernels", "puts")
CLASSES = {"own": None, "kernels": InterpretedTransport, "puts": PlayedTransport}
interpreted = pytest.mark.skipif(ON_CUDA, reason="here the kernels themselves run")


@distributed(*((1, 2, 3, 4) if ON_CUDA else (1, 3)), kind=KINDS)
def test_rows_go_out_and_come_home_as_loops_and_plain_collectives_say(ctx: Context, kind: str):
    cases = {"own": CASES, "kernels": ("random",), "puts": ("no tokens on rank 0",)}  # the interpreter takes its time
    check_cases(ctx, make_workspace(ctx, CLASSES[kind]), cases[kind])


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


@distributed(2, kind=KINDS)
def test_rows_over_capacity_are_counted_and_the_rest_comes_home(ctx: Context, kind: str):
    cases = ("one rank", "one expert", "full", "duplicates") if kind == "own" else ("one rank",)
    check_over_capacity(ctx, make_workspace(ctx, CLASSES[kind], num_sms=2), cases)


def check_over_capacity(ctx: Context, workspace: Workspace, cases: tuple[str, ...]) -> None:
    dropped = 0
    for seed, case in enumerate(cases):
        mine = bring_to(workspace, case, ctx.rank, seed)
        everyone = gather(ctx.group, mine)
        here = mine.to(ctx.device)
        for capacity in (Capacity.factor(0.2), Capacity.factor(1.0)):
            handle = dispatch(workspace, here.payload, here.ids, here.weights)
            plan = plan_slots(workspace, handle, alignment=2, capacity=capacity)
            what = f"{case}, {capacity}"
            check_arrived(handle.wait(), plan, everyone, my_experts(workspace, ctx.rank), what)
            check_return(ctx, workspace, plan, everyone, torch.bfloat16, seed, what)
            alike = [plan.overflow.tolist()] * ctx.world_size
            dist.all_gather_object(alike, plan.overflow.tolist(), group=ctx.group)
            assert all(each == alike[0] for each in alike), "every rank knows of every rank"
            dropped += int(plan.overflow.sum())
    total = torch.tensor(dropped, device=ctx.device)
    dist.all_reduce(total, group=ctx.group)
    assert int(total) > 0


@distributed(*((2, 3, 4) if ON_CUDA else (3,)), kind=KINDS)
def test_no_round_sees_another_rounds_rows(ctx: Context, kind: str):
    check_rounds(ctx, CLASSES[kind], {"own": 60 if ON_CUDA else 30, "kernels": 4, "puts": 3}[kind])


def dawdle(ctx: Context, luck: random.Random) -> None:
    """Put this rank out of step with the others, by a little and now and then by much."""
    pause = luck.choice((0, 0, 0, 0.0002, 0.003))
    if ctx.device.type == "cuda":
        torch.cuda._sleep(int(pause * 1.5e9))
    else:
        time.sleep(pause)


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


@distributed(2, kind=KINDS)
def test_workspaces_of_other_sizes_take_turns_in_the_same_buffers(ctx: Context, kind: str):
    """Rows of both are sent before those of the first go home, as layers in flight do."""
    one = make_workspace(ctx, CLASSES[kind])
    sizes = {"max_tokens": 9, "top_k": 2, "dim": 36, "row_bytes": 144, "num_experts": 2 * ctx.world_size}
    other = make_workspace(ctx, transport=one.transport, **sizes)
    cases = ("random", "duplicates", "no tokens on rank 0") if kind == "own" else ("random",)
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
    assert one.transport.buffers is other.transport.buffers
    assert one.transport.exchanges == 4 * len(cases)


@distributed(2, kind=KINDS)
def test_one_token_in_parts_of_one_wider_row(ctx: Context, kind: str):
    """Such parts are contiguous to torch, with a stride that no word divides."""
    check_one_token(ctx, make_workspace(ctx, CLASSES[kind]))


def check_one_token(ctx: Context, workspace: Workspace) -> None:
    wide = content(ctx.rank, 1, 27).to(ctx.device)
    ids = torch.full((1, TOP_K), -1, device=ctx.device)
    ids[0, 0] = 0
    slots = dispatch(workspace, (wide[:, :24], wide[:, 24:]), ids).wait()
    if ctx.rank == 0:
        for rank in range(2):
            for part, wanted in zip(slots, content(rank, 1, 27).split((24, 3), 1)):
                assert_bitwise(part[rank * MAX_TOKENS : rank * MAX_TOKENS + 1], wanted, f"from rank {rank}")


@distributed(3, kind=[kind for kind in KINDS if kind != "kernels"])  # of kernels: test_schedules.py
def test_ranks_that_take_one_dispatch_for_another_are_told(ctx: Context, kind: str):
    for redispatch in (False, True):
        workspace = make_workspace(ctx, CLASSES[kind])
        said = f"rank {ctx.rank} met peers in a {'dispatch' if redispatch else 'combine'} of other dispatches: "
        with pytest.raises(PeersDisagree, match=said + "rank 0 of dispatch 2, rank 1 of dispatch 1, rank 2 of disp"):
            cross(ctx, workspace, redispatch=redispatch)


@distributed(2, kind=KINDS)
def test_new_dispatches_of_other_layers_are_told_apart(ctx: Context, kind: str):
    workspace = make_workspace(ctx, CLASSES[kind])
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)

    def meet(of_ranks: list[int]) -> None:
        workspace.transport.announce(of_ranks[ctx.rank])
        dispatch(workspace, mine.payload, mine.ids, mine.weights).wait()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        workspace.transport.check()

    for of_ranks in ([new_dispatch(7, 2)] * 2, [NEW, new_dispatch(7, 0)], [new_dispatch(7, 0), NEW]):
        meet(of_ranks)
    said = "rank 0 of a new one of layer 7, rank 1 of a new one of layer 7, after 1 of its passes failed"
    with pytest.raises(PeersDisagree, match=f"rank {ctx.rank} met peers in a dispatch of other dispatches: {said}"):
        meet([new_dispatch(7, failures) for failures in range(2)])


@distributed(2, kind=KINDS)
def test_two_runs_are_bitwise_equal_whatever_the_number_of_programs(ctx: Context, kind: str):
    two = make_workspace(ctx, CLASSES[kind], num_sms=2)
    one = make_workspace(ctx, transport=two.transport, num_sms=1)
    sent = bring_to(two, "full", ctx.rank, 0).to(ctx.device)
    results = []
    for workspace, bound in ((two, None), (two, 1), (two, 5), (one, None)):
        handle = dispatch(workspace, sent.payload, sent.ids, sent.weights, num_sms=bound, async_op=True)
        plan = plan_slots(workspace, handle)
        (rows,) = gather_rows(handle.wait()[:1], plan.row_slot)
        rows = torch.nn.functional.pad(rows.float(), (0, workspace.dim))[:, : workspace.dim]
        results.append(combine(workspace, rows, plan, sent.ids, async_op=True).wait()[0].clone())
    assert results[0].any()
    assert all(torch.equal(result, results[0]) for result in results)


@distributed(2, 3, kind=[kind for kind in KINDS if kind != "puts"])
def test_a_rank_with_too_many_tokens_tells_its_peers_at_once_what_to_set(ctx: Context, kind: str):
    workspace = Workspace(ctx.transport(CLASSES[kind]), max_tokens=6, top_k=1, dim=16, num_experts=ctx.world_size)

    def send(tokens: int) -> None:
        part = torch.zeros(tokens, 8, dtype=torch.uint8, device=ctx.device)
        ids = torch.zeros(tokens, 1, dtype=torch.int32, device=ctx.device)
        dispatch(workspace, (part,), ids, torch.ones(tokens, 1, device=ctx.device)).wait()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        workspace.transport.check()

    send(6)
    dist.barrier(ctx.group)
    started = time.monotonic()
    if ctx.rank == 1:
        with pytest.raises(ValueError, match="got 9 tokens, wanted at most max_tokens = 6: set max_tokens=9 or more"):
            send(9)
        with pytest.raises(RuntimeError, match=r"rank 1 refused an exchange .*: make the layers again"):
            send(6)
    else:
        with pytest.raises(PeersDisagree, match="rank 1 brought 9 tokens, more than max_tokens: set max_tokens=9 or m"):
            send(6)
    dist.barrier(ctx.group)
    assert time.monotonic() - started < 30, "before the timeout of 60 s"


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
        assert workspace.transport.exchanges == (0 if ctx.world_size == 1 else 1), "which refused"
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
    short_plan = dataclasses.replace(plan, slot_rows=plan.slot_rows[:5])

    def out(payload=good.payload, ids=good.ids, weights=None, **how):
        return lambda: dispatch(workspace, payload, ids, weights, **how)

    def home(rows=rows, plan=plan, ids=good.ids, values=None):
        return lambda: combine(workspace, rows, plan, ids, row_values=values)

    for call, message in (
        (out((seven,)), r"payload: got torch.float32 \(7, 3\), wanted torch.uint8"),
        (out((wide[:, :0], wide[:, :8])), r"payload: got \[0, 8\] bytes a row, wanted at least 1 of each part"),
        (out(()), "payload: got no tensor, wanted at least one"),
        (out((wide,)), r"payload: got \[81\] bytes a row, wanted .* at most 80 of all"),
        (out((good.payload[0], wide[:5])), r"payload: .* \(5, 81\), wanted .* \(6, 81\)"),
        (out((seven.byte(),), seven.int()), "batch: got 7 tokens, wanted at most max_tokens = 6"),
        (out(num_sms=0, async_op=True), "num_sms: got 0, wanted at least 1"),
        (out(ids=good.ids.float()), r"expert_ids: got torch.float32 \(6, 3\), wanted"),
        (out(ids=good.ids[:, :2]), r"expert_ids: .* \(6, 2\), wanted .* \(6, 3\)"),
        (out(weights=good.weights.bfloat16()), r"weights: got torch.bfloat16"),
        (home(rows[1:]), "rows: got torch.float32 .*, wanted torch.bfloat16 or"),
        (home(rows.half()), "rows: got torch.float16"),
        (home(values=rows), "row_values: got torch.float32"),
        (home(ids=seven.int()), "expert_ids: got 7 tokens, wanted at most"),
        (home(plan=short_plan), r"plan.slot_rows: got \(5, 3\), wanted \(6, 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert workspace.transport.exchanges == 1


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
    check_no_device_read(ctx, make_workspace(ctx))


def check_no_device_read(ctx: Context, workspace: Workspace) -> None:
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    torch.cuda.synchronize()
    with no_host_sync():
        plan = plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights))
        rows = torch.zeros(plan.max_rows, DIM, device=ctx.device)
        combine(workspace, rows, plan, mine.ids, row_values=rows[:, 0]).wait()


@interpreted
@distributed(2, device="cpu")
def test_epochs_wrap_around(ctx: Context):
    workspace = make_workspace(ctx, InterpretedTransport)
    layout, last = workspace.layout, 2**31 - 2
    for buffer in workspace.transport.buffers:
        words = buffer.local.view(torch.int64)
        words[: CHANNELS * ctx.world_size] = last << 32
        buffer.local[layout.counters_start :].view(torch.int64)[:2] = last
    workspace.transport.barrier("ready")
    check_cases(ctx, workspace, ("random",))
    assert buffer.local[layout.counters_start :].view(torch.int64)[1] < 0


@interpreted
@distributed(2, device="cpu")
def test_a_workspace_without_room_for_tokens_still_meets(ctx: Context):
    check_cases(ctx, make_workspace(ctx, InterpretedTransport, max_tokens=0), ("no tokens at all",))
    check_cases(ctx, make_workspace(ctx, PlayedTransport, max_tokens=0), ("no tokens at all",))


@interpreted
@distributed(2, device="cpu")
def test_long_rows_and_many_tokens_cross_tiles_and_chunks(ctx: Context):
    """9 chunks of tokens, several tiles a program, tables of two programs, parts in words of 8 bytes and of one."""
    kind, sizes = InterpretedTransport, {"max_tokens": 530, "top_k": 2, "dim": 12, "row_bytes": 48}
    check_cases(ctx, make_workspace(ctx, kind, **sizes), ("full",))


@interpreted
@distributed(3, device="cpu")
def test_a_rank_that_never_comes_is_named_on_all_others(ctx: Context):
    check_late(ctx, InterpretedTransport, 0.02)


def check_late(ctx: Context, kind: type, limit: float) -> None:
    workspace = make_workspace(ctx, kind, timeout=limit)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    if ctx.rank != 1:
        dispatch(workspace, mine.payload, mine.ids).wait()  # ends, whatever it brought
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        said = rf"waited {limit} s at dispatch, barrier 1, for rank 1 \(last seen at barr"
        with pytest.raises(PeerTimeout, match=said):
            dispatch(workspace, mine.payload, mine.ids).wait()
    dist.barrier(ctx.group)


@interpreted
@distributed(2, device="cpu")
def test_ranks_that_send_rows_of_other_widths_are_told(ctx: Context):
    check_widths(ctx, InterpretedTransport)


def check_widths(ctx: Context, kind: type) -> None:
    workspace = make_workspace(ctx, kind)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    dispatch(workspace, mine.payload[: 1 + ctx.rank], mine.ids).wait()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    got = "rank 0 at dispatch with rows of 24 bytes, rank 1 at dispatch with rows of 27 bytes"
    with pytest.raises(PeersDisagree, match=got):
        workspace.transport.check()


@interpreted
@distributed(1, device="cpu")
def test_an_id_past_int32_is_no_experts_after_it_was_narrowed(ctx: Context):
    ids = torch.tensor([[2**32, -(2**32)], [2**31 - 1, 1]])  # the first two have zeroes in the lower half
    for kind in (InterpretedTransport, PlayedTransport, SharedMemoryTransport):
        workspace = make_workspace(ctx, kind, top_k=2)
        buffer = workspace.begin("tables")
        workspace.exchange.dispatch_tables(buffer, ids, torch.ones(2, 2), torch.empty(1, dtype=torch.int32))
        told = workspace.layout.ids(buffer.local)[0, :2].tolist()
        assert [[-1 <= i < 5 for i in ids] for ids in told] == [[False, False], [False, True]]  # there are 5 experts
        assert told[1][1] == 1


def test_a_record_tells_who_is_late_across_the_wrap():
    record = FaultRecord(3, pinned=False)
    before, after = 2**31 - 1 << 32, -(2**31) << 32
    record.values[:] = torch.tensor([1, 1, after, after, before, after])
    with pytest.raises(PeerTimeout, match="for rank 1 ") as info:
        record.check(0, 1.0)
    assert info.value.missing == (1,)


def test_a_rank_that_waits_at_a_barrier_is_told_that_its_peers_may_have_captured_no_graph():
    record = FaultRecord(2, pinned=False)
    record.values[:] = torch.tensor([1, 0, 2 << 32, 2 << 32, 1 << 32])
    with pytest.raises(PeerTimeout, match=r"at barrier, barrier 2, for rank 1 .* capture on all ranks or on none"):
        record.check(0, 1.0)


def test_tiles_are_as_large_as_leaves_every_program_one() -> None:
    for tokens, programs in itertools.product((0, 1, 7, 80, 1000), (1, 3, 20)):
        fitting = [count for count in (1, 2, 4, 8, 16, 32) if count == 1 or count * programs <= tokens]
        assert tokens_per_tile(32, tokens, programs) == fitting[-1]
        assert tokens_per_tile(4, tokens, programs) == min(4, fitting[-1])
