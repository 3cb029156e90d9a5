"""Moves on GPUs: captured in graphs, seen by the profiler, and what survivors say of ranks that die or never call."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comms.cases import bring_to, content, make_workspace, plan_slots
from mxep.comms import PeersDisagree, PeerTimeout, SymmetricMemoryTransport, Workspace, combine, dispatch, gather_rows
from ranks import Context, distributed

LIMIT = 1.5


@distributed(2, 4, device="cuda")
def test_a_captured_layer_of_moves_follows_new_routing(ctx: Context):
    check_captured(ctx, make_workspace(ctx))


def check_captured(ctx: Context, workspace: Workspace) -> None:
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)

    def moves(payload, ids, weights):
        handle = dispatch(workspace, payload, ids, weights)
        plan = plan_slots(workspace, handle)
        rows = gather_rows(handle.wait(), plan.row_slot)[0]
        y = rows[:, :20].float() * plan.row_weight[:, None]
        out, values = combine(workspace, y, plan, ids, row_values=y[:, 0]).wait()
        return out.clone(), values.clone()

    for _ in range(2):
        moves(mine.payload, mine.ids, mine.weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moves(mine.payload, mine.ids, mine.weights)
    for seed in range(1, 6):
        other = bring_to(workspace, "full", ctx.rank, seed).to(ctx.device)
        wanted = moves(other.payload, other.ids, other.weights)
        for static, new in zip((*mine.payload, mine.ids, mine.weights), (*other.payload, other.ids, other.weights)):
            static.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        workspace.transport.check()
        assert all(torch.equal(*pair) for pair in zip(captured, wanted)), f"routing {seed}"


@distributed(2, device="cuda")
def test_a_graph_of_one_move_may_be_replayed_again_at_once(ctx: Context):
    """Each replay stores into the buffer that the one before is still read from, on a rank that reads late."""
    workspace = make_workspace(ctx, max_tokens=64)
    part = torch.zeros(64, 80, dtype=torch.uint8, device=ctx.device)
    ids = torch.full((64, workspace.top_k), -1, device=ctx.device)
    ids[:, 0] = (1 - ctx.rank) * workspace.num_local_experts
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)

    def move():
        arrived = dispatch(workspace, (part,), ids).wait()[0][(1 - ctx.rank) * 64 :][:64]
        if ctx.rank == 1:
            torch.cuda._sleep(2_000_000)
        wrong.add_((arrived != part).sum())
        part.add_(1)  # on both ranks

    for _ in range(2):
        move()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move()
    for replay in range(20):
        graph.replay()
        if replay % 7 == 6:
            move()
    torch.cuda.synchronize()
    workspace.transport.check()
    assert not int(wrong)


@distributed(2, device="cuda")
def test_returns_of_two_workspaces_never_keep_each_other_out(ctx: Context):
    """Each fills the device and waits for its peer; what comes first on one rank comes last on the other."""
    transport = ctx.transport(timeout=10.0)
    sizes = {"max_tokens": 2048, "top_k": 1, "dim": 512, "num_experts": 2}
    workspaces = [Workspace(transport, **sizes) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    ids = torch.arange(2048, device=ctx.device)[:, None] % 2
    part, weights = content(ctx.rank, 2048, 16).to(ctx.device), torch.ones(2048, 1, device=ctx.device)
    plans = [plan_slots(workspace, dispatch(workspace, (part,), ids, weights)) for workspace in workspaces]
    rows = torch.ones(plans[0].max_rows, 512, dtype=torch.bfloat16, device=ctx.device)
    for workspace, plan in zip(workspaces, plans):
        combine(workspace, rows, plan, ids).wait()
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
    for _ in range(3):
        in_flight = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i == ctx.rank:
                    torch.cuda._sleep(40_000_000)
                in_flight.append(combine(workspaces[i], rows, plans[i], ids, async_op=True))
        for stream, handle in zip(streams, in_flight):
            with torch.cuda.stream(stream):
                assert bool((handle.wait()[0] == 1).all())
        torch.cuda.synchronize()
        transport.check()


@distributed(2, device="cuda")
def test_moves_on_two_streams_take_turns(ctx: Context):
    """What a move brought is read late on its stream; the host has begun the next three on the other one by then."""
    transport = ctx.transport(timeout=10.0)
    sizes = {"top_k": 1, "dim": 64, "num_experts": 2}
    workspaces = [Workspace(transport, max_tokens=tokens, **sizes) for tokens in (64, 48)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    peer = 1 - ctx.rank
    ids = torch.full((48, 1), peer, device=ctx.device)
    torch.cuda.synchronize()
    wrong = []
    for number in range(18):
        workspace = workspaces[number % 2]
        with torch.cuda.stream(streams[number // 3 % 2]):
            part = torch.full((48, 64), number, dtype=torch.uint8, device=ctx.device)
            (arrived,) = dispatch(workspace, (part,), ids).wait()
            torch.cuda._sleep(2_000_000 * (1 + ctx.rank))
            wrong.append((arrived[peer * workspace.max_tokens :][:48] != number).sum())
    torch.cuda.synchronize()
    transport.check()
    assert [int(count) for count in wrong] == [0] * 18


@distributed(2, device="cuda")
def test_what_was_waited_for_has_come(ctx: Context):
    """From a peer that is 10 ms late."""
    workspace = make_workspace(ctx, top_k=1, num_experts=2, dim=16, row_bytes=32)
    peer = 1 - ctx.rank
    ids = torch.full((4, 1), peer, dtype=torch.int32, device=ctx.device)
    part, weights = torch.zeros(4, 32, dtype=torch.uint8, device=ctx.device), torch.ones(4, 1, device=ctx.device)
    plan = plan_slots(workspace, dispatch(workspace, (part,), ids, weights))
    rows = torch.zeros(plan.max_rows, 16, dtype=torch.bfloat16, device=ctx.device)
    torch.cuda.synchronize()
    for number in range(1, 6):
        dist.barrier(ctx.group)
        if ctx.rank == 1:
            torch.cuda._sleep(20_000_000)
        handle = dispatch(workspace, (part + number,), ids, async_op=True)
        arrived = handle.wait()[0][peer * workspace.max_tokens :][:4].clone()
        if ctx.rank == 0:
            torch.cuda._sleep(20_000_000)
        handle = combine(workspace, rows + number, plan, ids, async_op=True)
        out = handle.wait()[0].clone()
        assert bool((arrived == number).all()), number
        assert bool((out == number).all()), number
    workspace.transport.check()


@distributed(2, device="cuda")
def test_a_graph_goes_on_with_the_buffers_that_it_was_captured_on(ctx: Context):
    transport = ctx.transport(timeout=10.0)
    sizes = {"top_k": 1, "dim": 64, "num_experts": 2}
    small = Workspace(transport, max_tokens=16, **sizes)
    peer = 1 - ctx.rank
    ids = torch.full((16, 1), peer, device=ctx.device)
    part = torch.zeros(16, 64, dtype=torch.uint8, device=ctx.device)

    def move(workspace: Workspace) -> torch.Tensor:
        return dispatch(workspace, (part,), ids).wait()[0][peer * workspace.max_tokens :][:16].clone()

    move(small)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arrived = move(small)
        with pytest.raises(RuntimeError, match="made while a CUDA graph is captured, wanted one run of the layer"):
            Workspace(transport, max_tokens=32, **sizes)
    large = Workspace(transport, max_tokens=32, **sizes)
    for number in range(1, 10):
        part.fill_(number)
        graph.replay()
        seen = move(large if number % 2 else small)
        assert bool((arrived == number).all()), number
        assert bool((seen == number).all()), number
        torch.cuda.synchronize()
        dist.barrier(ctx.group)  # before the part changes
    transport.check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_gpu_alone_needs_no_process_group():
    if dist.is_initialized():
        pytest.skip("there is a group")
    transport = SymmetricMemoryTransport()
    assert (transport.rank, transport.world_size, transport.group) == (0, 1, None)
    workspace = Workspace(transport, max_tokens=8, top_k=2, dim=16, row_bytes=64, num_experts=4)
    x = torch.randn(8, 16, device=transport.device)
    ids = torch.tensor([[0, 3], [1, -1]] * 4, device=transport.device)
    weights = torch.ones(8, 2, device=transport.device)

    def there_and_back() -> torch.Tensor:
        handle = dispatch(workspace, (x.view(torch.uint8),), ids, weights)
        plan = plan_slots(workspace, handle)
        (rows,) = gather_rows(handle.wait(), plan.row_slot)
        return combine(workspace, rows.view(torch.float32), plan, ids).wait()[0]

    there_and_back()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = there_and_back()
    graph.replay()
    assert torch.equal(out, x * torch.tensor([2.0, 1.0] * 4, device=x.device)[:, None])
    transport.check()
    transport.close()


@distributed(2, device="cuda")
def test_moves_are_kernels_of_ours_and_no_collective(ctx: Context):
    workspace = make_workspace(ctx)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)

    def moves():
        plan = plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights))
        combine(workspace, torch.zeros(plan.max_rows, 20, device=ctx.device), plan, mine.ids).wait()

    moves()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        moves()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("dispatch_kernel" in name for name in names), names
    assert any("combine_kernel" in name for name in names), names
    assert not [name for name in names if "nccl" in name.lower()]


@distributed(2, 4, device="cuda")
def test_a_rank_that_never_calls_is_named_within_the_limit(ctx: Context):
    workspace = make_workspace(ctx, timeout=LIMIT)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    dispatch(workspace, mine.payload, mine.ids, mine.weights).wait()
    torch.cuda.synchronize()
    workspace.transport.check()
    dist.barrier(ctx.group)
    if ctx.rank != 1:
        started = time.monotonic()
        dispatch(workspace, mine.payload, mine.ids).wait()
        dispatch(workspace, mine.payload, mine.ids).wait()  # nothing is known yet; its wait ends at once
        torch.cuda.synchronize()
        assert LIMIT - 0.2 < time.monotonic() - started < LIMIT + 2
        with pytest.raises(PeerTimeout, match=r"at dispatch, barrier 1, for rank 1 \(last seen at barrier 0\)") as info:
            workspace.transport.check()
        assert info.value.missing == (1,)
        with pytest.raises(PeerTimeout):
            dispatch(workspace, mine.payload, mine.ids).wait()
    dist.barrier(ctx.group)


@distributed(2, device="cuda")
def test_ranks_in_other_moves_are_told(ctx: Context):
    workspace = make_workspace(ctx, timeout=LIMIT)
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    plan = plan_slots(workspace, dispatch(workspace, mine.payload, mine.ids, mine.weights))
    if ctx.rank == 0:
        dispatch(workspace, mine.payload, mine.ids).wait()
    else:
        combine(workspace, torch.zeros(plan.max_rows, 20, device=ctx.device), plan, mine.ids).wait()
    torch.cuda.synchronize()
    got = "rank 0 at dispatch with rows of 27 bytes, rank 1 at combine with rows of 80 bytes"
    with pytest.raises(PeersDisagree, match=got):
        workspace.transport.check()


def die(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 kills itself between two moves; the others write what they were told, and exit by themselves."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    transport = SymmetricMemoryTransport(timeout=LIMIT)
    workspace = Workspace(transport, max_tokens=4, top_k=1, dim=16, num_experts=2 * world_size)
    part = content(rank, 4, 16).to(transport.device)
    ids = torch.arange(4, device=transport.device)[:, None] % (2 * world_size)
    dispatch(workspace, (part,), ids).wait()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    dispatch(workspace, (part,), ids).wait()
    torch.cuda.synchronize()
    try:
        transport.check()
    except PeerTimeout as error:
        (folder / f"told-{rank}").write_text(f"{error} after {time.monotonic() - started:.2f} s")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs")
@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="starts ranks of its own")
def test_survivors_of_a_killed_rank_are_told_who_it_was_and_exit(tmp_path):
    world_size = min(4, torch.cuda.device_count())
    script = (
        "import sys, pathlib, comms.test_symmetric_memory as t\n"
        "t.die(*map(int, sys.argv[1:3]), pathlib.Path(sys.argv[3]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), str(world_size), str(tmp_path)], env=environment)
        for rank in range(world_size)
    ]
    try:
        qdata = [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert qdata == [0 if rank != 1 else -signal.SIGKILL for rank in range(world_size)]
    for rank in range(world_size):
        if rank != 1:
            told = (tmp_path / f"told-{rank}").read_text()
            assert "at dispatch, barrier 1, for rank 1 (last seen at barrier 0)" in told, told
            assert float(told.split()[-2]) < LIMIT + 2, told
