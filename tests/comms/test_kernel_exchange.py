"""The CUDA moves, interpreted over CPU processes: bitwise what the plain ones make, and what they say of late peers."""

import pytest
import torch
import torch.distributed as dist

from comms.interpreted import InterpretedTransport
from comms.played import PlayedTransport
from comms.test_exchange import (
    bring_to,
    check_cases,
    check_crossed,
    check_layers,
    check_one_token,
    check_other_sizes,
    check_over_capacity,
    make_workspace,
    plan_slots,
)
from comms.test_stress import check_rounds
from comms.test_transport import check_too_many_tokens
from mxep.comms import (
    PeersDisagree,
    PeerTimeout,
    SharedMemoryTransport,
    combine,
    dispatch,
    gather_rows,
)
from mxep.comms.kernels.rows import tokens_per_tile
from mxep.comms.layout import CHANNELS
from mxep.comms.symmetric_memory import FaultRecord
from ranks import Context, distributed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels themselves run, in the other files")


@distributed(1, 3, device="cpu")
def test_rows_go_out_and_come_home_as_loops_and_plain_collectives_say(ctx: Context):
    check_cases(ctx, make_workspace(ctx, InterpretedTransport), ("random", "duplicates"))


@distributed(2, device="cpu")
def test_rows_over_capacity_are_counted_and_the_rest_comes_home(ctx: Context):
    check_over_capacity(ctx, make_workspace(ctx, InterpretedTransport, num_sms=2), ("one rank",))


@distributed(2, device="cpu")
def test_a_bound_on_one_moves_programs_changes_no_bit(ctx: Context):
    two = make_workspace(ctx, InterpretedTransport, num_sms=2)
    one = make_workspace(ctx, transport=two.transport, num_sms=1)
    sent = bring_to(two, "full", ctx.rank, 0)
    results = []
    for workspace, bound in ((two, None), (two, 1), (two, 5), (one, None)):
        handle = dispatch(workspace, sent.payload, sent.ids, sent.weights, num_sms=bound, async_op=True)
        plan = plan_slots(workspace, handle)
        (rows,) = gather_rows(handle.wait()[:1], plan.row_slot)
        rows = torch.nn.functional.pad(rows.float(), (0, workspace.dim))[:, : workspace.dim]
        results.append(combine(workspace, rows, plan, sent.ids, async_op=True).wait()[0].clone())
    assert results[0].any()
    assert all(torch.equal(result, results[0]) for result in results)


@distributed(2, device="cpu")
def test_one_token_in_parts_of_one_wider_row(ctx: Context):
    """Such parts are contiguous to torch, with a stride that no word divides."""
    check_one_token(ctx, make_workspace(ctx, InterpretedTransport))


@distributed(2, device="cpu")
def test_epochs_wrap_around(ctx: Context):
    workspace = make_workspace(ctx, InterpretedTransport)
    layout, last = workspace.layout, 2**31 - 2
    for buffer in workspace.arena.buffers:
        words = buffer.local.view(torch.int64)
        words[: CHANNELS * ctx.world_size] = last << 32
        buffer.local[layout.counters_start :].view(torch.int64)[:2] = last
    workspace.transport.barrier("ready")
    check_cases(ctx, workspace, ("random",))
    assert buffer.local[layout.counters_start :].view(torch.int64)[1] < 0


@distributed(2, device="cpu")
def test_a_workspace_without_room_for_tokens_still_meets(ctx: Context):
    check_cases(ctx, make_workspace(ctx, InterpretedTransport, max_tokens=0), ("no tokens at all",))
    check_cases(ctx, make_workspace(ctx, PlayedTransport, max_tokens=0), ("no tokens at all",))


@distributed(3, device="cpu")
def test_no_round_sees_another_rounds_rows(ctx: Context):
    check_rounds(ctx, InterpretedTransport, 8)


@distributed(2, device="cpu")
def test_long_rows_and_many_tokens_cross_tiles_and_chunks(ctx: Context):
    """9 chunks of tokens, several tiles a program, tables of two programs, parts in words of 8 bytes and of one."""
    kind, sizes = InterpretedTransport, {"max_tokens": 530, "top_k": 2, "dim": 12, "row_bytes": 48}
    check_cases(ctx, make_workspace(ctx, kind, **sizes), ("full",))


@distributed(3, device="cpu")
def test_a_rank_that_never_comes_is_named_on_all_others(ctx: Context):
    workspace = make_workspace(ctx, InterpretedTransport, timeout=0.02)
    mine = bring_to(workspace, "full", ctx.rank, 0)
    if ctx.rank != 1:
        dispatch(workspace, mine.payload, mine.ids, mine.weights).wait()  # ends, whatever it brought
        with pytest.raises(PeerTimeout, match=r"waited 0.02 s at dispatch, barrier 1, for rank 1 \(last seen at barr"):
            dispatch(workspace, mine.payload, mine.ids).wait()
    dist.barrier(ctx.group)


@distributed(2, device="cpu")
def test_ranks_that_send_rows_of_other_widths_are_told(ctx: Context):
    workspace = make_workspace(ctx, InterpretedTransport)
    mine = bring_to(workspace, "full", ctx.rank, 0)
    dispatch(workspace, mine.payload[: 1 + ctx.rank], mine.ids).wait()
    got = "rank 0 at dispatch with rows of 24 bytes, rank 1 at dispatch with rows of 27 bytes"
    with pytest.raises(PeersDisagree, match=got):
        workspace.transport.check()


@distributed(2, 3, device="cpu")
def test_ranks_that_take_one_dispatch_for_another_are_told(ctx: Context):
    check_crossed(ctx, InterpretedTransport)
    check_crossed(ctx, PlayedTransport)


@distributed(2, device="cpu")
def test_new_dispatches_of_other_layers_are_told_apart(ctx: Context):
    check_layers(ctx, InterpretedTransport)
    check_layers(ctx, PlayedTransport)


@distributed(3, device="cpu")
def test_a_rank_with_too_many_tokens_tells_its_peers_at_once_what_to_set(ctx: Context):
    check_too_many_tokens(ctx, InterpretedTransport)


@distributed(2, device="cpu")
def test_workspaces_of_other_sizes_take_turns_in_the_same_buffers(ctx: Context):
    check_other_sizes(ctx, InterpretedTransport, ("random",))
    check_other_sizes(ctx, PlayedTransport, ("random",))


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


@pytest.mark.parametrize("programs", [1, 3, 20])
@pytest.mark.parametrize("tokens", [0, 1, 7, 80, 1000])
def test_tiles_are_as_large_as_leaves_every_program_one(tokens: int, programs: int) -> None:
    fitting = [count for count in (1, 2, 4, 8, 16, 32) if count == 1 or count * programs <= tokens]
    assert tokens_per_tile(32, tokens, programs) == fitting[-1]
    assert tokens_per_tile(4, tokens, programs) == min(4, fitting[-1])
