"""Kernels of the exchange in many orders: right to the bit, no access that nothing orders, nobody waits for ever.

And each line that makes it so is missed, within a few orders, if it is taken away. `--orders 100` plays so many more.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comms.cases import bring_to, check_arrived, check_return, cross, make_workspace, my_experts, plan_slots
from comms.transports import Ranks, ScheduledContext
from mxep.comms import PeersDisagree
from mxep.comms import dispatch as dispatch_tokens
from mxep.comms.kernels import exchange as dispatch
from mxep.comms.kernels import rows, signals
from schedule import Deadlock, Race, Schedule, mutate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels are not interpreted")
TOKENS = 5
FEW = 12
"""Orders within which a line that is taken away is missed; most are in the first."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("orders")))


def play(
    body: Callable[..., Any], seed: int, *, world_size: int = 2, programs: int = 2, resident: int | None = None
) -> None:
    """Five tokens make three chunks of two tiles of one token, or five of one; tables are of two programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "CHUNK_BYTES", (128, 80)[seed % 2])
        patch.setattr(dispatch, "COMBINE_TILE", 1)
        patch.setattr(dispatch, "TABLE_PAIRS", 8)
        Ranks(Schedule(seed, resident=resident), world_size, programs).run(body)


def rounds(ctx: ScheduledContext, cases: tuple[str, ...] = ("random", "full")) -> None:
    """A round is of three exchanges, so that buffers alternate, the last one of four, so that one brings sums twice."""
    workspace = make_workspace(ctx, max_tokens=TOKENS)
    for seed, case in enumerate(cases):
        everyone = [bring_to(workspace, case, rank, seed) for rank in range(ctx.world_size)]
        mine, experts = everyone[ctx.rank], my_experts(workspace, ctx.rank)
        handle = dispatch_tokens(workspace, mine.payload, mine.ids, mine.weights)
        ctx.read(*handle.wait(), *handle.tables)
        plan = plan_slots(workspace, handle)
        check_arrived(handle.wait(), plan, everyone, experts, case)
        check_return(ctx, workspace, plan, everyone, torch.bfloat16, seed, case)
        again = dispatch_tokens(workspace, mine.payload, mine.ids, plan=plan).wait()
        ctx.read(*again)
        check_arrived(again, plan, everyone, experts, f"{case}, again")
    check_return(ctx, workspace, plan, everyone, torch.bfloat16, seed, f"{case}, again")


def one_buffer(ctx: ScheduledContext, barriers: bool = True) -> None:
    """Sends that all use one buffer, as replays of a graph of one exchange do."""
    workspace = make_workspace(ctx, max_tokens=TOKENS)
    workspace.transport.buffers = workspace.transport.buffers[:1] * 2
    mine = bring_to(workspace, "full", ctx.rank, 0)
    for _ in range(3):
        if barriers:
            workspace.transport.barrier("between")
        ctx.read(*dispatch_tokens(workspace, mine.payload, mine.ids).wait())


def crossed(ctx: ScheduledContext) -> None:
    for redispatch in (False, True):
        with pytest.raises(PeersDisagree, match="rank 0 of dispatch 2, rank 1 of dispatch 1"):
            cross(ctx, make_workspace(ctx, max_tokens=TOKENS), redispatch=redispatch)


def wild_ids(ctx: ScheduledContext) -> None:
    """Tables are int32: cut off, 2**32 would be expert 0 and 2**40 + 1 expert 1."""
    workspace = make_workspace(ctx, top_k=2)
    wrong, layout = workspace.num_experts, workspace.layout
    ids = torch.tensor([[1, 2**32], [-(2**32), 2**40 + 1], [-1, wrong], [2**31, -(2**31) - 1]])
    buffer = workspace.begin("wild ids")
    workspace.exchange.dispatch_tables(buffer, ids, torch.ones(ids.shape), torch.empty(1, dtype=torch.int32))
    tables = layout.ids(buffer.local)[:, : len(ids)].tolist()
    assert tables == [[[1, wrong], [-2, wrong], [-1, wrong], [wrong, -2]]] * ctx.world_size


@pytest.mark.parametrize(("world_size", "programs", "resident"), [(2, 2, None), (2, 3, 1), (3, 1, 2)])
def test_tokens_go_out_and_sums_come_home(seed, world_size, programs, resident):
    """resident: on a GPU that is full, where programs start when others have ended."""
    cases = ("random", "full") if world_size == 2 else ("duplicates",)
    play(lambda ctx: rounds(ctx, cases), seed, world_size=world_size, programs=programs, resident=resident)


def test_ranks_that_take_one_dispatch_for_another_are_told(seed):
    play(crossed, seed)


def test_a_buffer_may_be_used_again_at_once_after_a_barrier(seed):
    play(one_buffer, seed)


def test_ids_that_fit_no_int32_reach_the_tables_as_invalid_ones():
    play(wild_ids, 0)


def missed(body: Callable[..., Any], **options: Any) -> None:
    """Raises what the first orders bring to light."""
    for seed in range(FEW):
        play(body, seed, **options)


def test_a_buffer_that_is_used_again_without_a_barrier_is_noticed():
    with pytest.raises(Race, match=r"rank \d's buffer 1 .*(store_part|send_dispatch).*: nothing orders them"):
        missed(lambda ctx: one_buffer(ctx, barriers=False))


MEET = "signal_and_wait(pointers_ptr, local_base, 0, signal, state_ptr, rank, W, WP, CLOCK)"
LEAVE = (
    "leave_chunk(pointers_ptr, counters_ptr, counters_start, chunk, stored, chunk_tiles, signal, dispatch, rank, W, WP)"
)
MEET_ROWS = MEET.replace("local_base, 0", "local_base, 1")
SEND = "send_dispatch(pointers_ptr, counters_start, dispatch, rank, W, WP)"
COMPARE = "compare_dispatches(counters_ptr, dispatch, signal, state_ptr, W, WP)"
NOT_RAISED = pytest.fail.Exception
CLAMP = "tl.minimum(tl.maximum(ids, -2), W * experts_per_rank)"
MUTATIONS = {
    # A signal says more than is true.
    "a chunk announced by each who leaves it": (rounds, rows.leave_chunk, "stored, chunk_tiles)", "0, 0)", Race),
    "a chunk announced by the first to leave it": (
        rounds, rows.leave_chunk, "stored, chunk_tiles)", "stored, stored)", Race
    ),
    "a chunk announced before its tiles arrived": (
        rounds, rows.leave_chunk,
        "if arrive(counters_ptr + 3 + chunk, stored, chunk_tiles):", "if True:", Race
    ),
    "arrived before all have": (rounds, signals.arrive, "+ share == count", "+ share <= count", Race),
    "rows announced by each": (rounds, dispatch.dispatch_kernel, "+ 3, 1, programs)", "+ 3, 0, 0)", Race),
    "tables announced by each": (rounds, dispatch.dispatch_tables_kernel, "+ 2, 1, programs)", "+ 2, 0, 0)", Race),
    # It is given, or taken, without what was done before it.
    "announce relaxed": (rounds, signals.signal_peers, 'sem="release"', 'sem="relaxed"', Race),
    "announce on this GPU only": (rounds, signals.signal_peers, 'scope="sys"', 'scope="gpu"', Race),
    "arrive without release": (rounds, signals.arrive, 'sem="acq_rel"', 'sem="acquire"', Race),
    "arrive without acquire": (rounds, signals.arrive, 'sem="acq_rel"', 'sem="release"', Race),
    "await relaxed": (rounds, signals.wait_for_peers, 'sem="acquire"', 'sem="relaxed"', Race),
    "await this GPU only": (rounds, signals.wait_for_peers, 'acquire", scope="sys"', 'acquire", scope="gpu"', Race),
    "polls not volatile": (rounds, signals.wait_for_peers, "True)\n            if", "False)\n            if", Race),
    # Nobody, or the wrong one, is waited for.
    "the first chunk not awaited": (rounds, rows.combine_kernel, "now >= lag:", "now > lag:", Race),
    "the chunk before awaited": (rounds, rows.combine_kernel, "1 + now - lag, s", "now - lag, s", Deadlock),
    "the epoch of rows not kept": (rounds, dispatch.dispatch_kernel, "1, signal >> 32", "1, 0", (Race, PeersDisagree)),
    "the epoch of sums not kept": (rounds, rows.combine_kernel, "1, signal >> 32", "1, 0", (Race, PeersDisagree)),
    "a barrier that does not wait": (one_buffer, signals.barrier_kernel, MEET, "pass", Race),
    # Work is done twice, or never.
    "a ticket for two": (rounds, signals.next_ticket, "tl.full((), 1,", "tl.full((), 0,", Race),
    "tickets not taken back": (
        rounds, rows.combine_kernel, "TILE_COUNTER, tl.zeros((), tl.int64)", "TILE_COUNTER, 99", AssertionError
    ),
    "tiles of a chunk counted for the next": (
        rounds, rows.combine_kernel, "chunk = now\n            stored = 0", "chunk = now", (Race, Deadlock)
    ),
    "the last chunk not left": (rounds, rows.combine_kernel, f"{LEAVE}\n    if", "if", Deadlock),
    # It is not said, or not heard, which dispatch it is.
    "a dispatch not sent with rows": (rounds, dispatch.dispatch_kernel, SEND, "pass", (Race, PeersDisagree)),
    "a dispatch not sent with sums": (rounds, rows.leave_chunk, SEND, "pass", (Race, PeersDisagree)),
    "a dispatch sent behind the signal": (
        rounds, dispatch.dispatch_kernel, f"{SEND}\n        {MEET_ROWS}", f"{MEET_ROWS}\n        {SEND}",
        (Race, PeersDisagree),
    ),
    "a dispatch sent with each chunk": (rounds, rows.leave_chunk, "if chunk == 0:", "if chunk >= 0:", Race),
    "dispatches of rows not compared": (crossed, dispatch.dispatch_kernel, COMPARE, "pass", NOT_RAISED),
    "dispatches of sums not compared": (crossed, rows.combine_kernel, COMPARE, "pass", NOT_RAISED),
    "dispatches not counted": (
        crossed, signals.number_dispatch, "tl.store(state_ptr + 3, number)", "pass", NOT_RAISED
    ),
    "ids not clamped": (wild_ids, dispatch.dispatch_tables_kernel, CLAMP, "ids", AssertionError),
}  # fmt: skip
"""What is taken away: from which kernel, what it reads instead, and who tells."""


@pytest.mark.parametrize("what", MUTATIONS)
def test_it_is_noticed(monkeypatch, what):
    body, kernel, old, new, told = MUTATIONS[what]
    mutate(monkeypatch, kernel, old, new)
    with pytest.raises(told):
        missed(body)


def test_a_program_that_waits_for_one_that_finds_no_room_is_noticed(monkeypatch):
    """Only the last to arrive waits for peers. If all did, all would be well where there is room for all."""
    monkeypatch.setattr(dispatch, "signal_peers", signals.signal_peers, raising=False)
    monkeypatch.setattr(dispatch, "wait_for_peers", signals.wait_for_peers, raising=False)
    old = (
        "if arrive(counters_ptr + 3, 1, programs):\n        dispatch = load_dispatch(dispatch_ptr)\n"
        f"        {SEND}\n        {MEET_ROWS}\n        {COMPARE}"
    )
    new = (
        "full = arrive(counters_ptr + 3, 1, programs)\n"
        "    if full:\n"
        "        signal_peers(pointers_ptr, 1, signal, rank, W, WP)\n"
        "    wait_for_peers(local_base, 1, signal, state_ptr, W, WP, CLOCK)\n"
        "    if full:"
    )
    mutate(monkeypatch, dispatch.dispatch_kernel, old, new)
    play(one_buffer, 0)
    with pytest.raises(Deadlock, match=r"for room, as 1 run at once"):
        play(one_buffer, 0, resident=1)
