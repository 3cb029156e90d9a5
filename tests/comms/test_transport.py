"""Transports: buffers that peers write, a barrier that names who is late, memory that is gone afterwards."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mxep.comms import (
    PeersDisagree,
    PeerTimeout,
    SharedMemoryTransport,
    SymmetricMemoryTransport,
    Workspace,
    combine,
    dispatch,
    make_plan,
)
from mxep.comms.symmetric_memory import cuda_device
from mxep.integration.launch import Rank, RanksFailed, run_ranks
from ranks import Context, distributed


@distributed(1, 2, 3, 4)
def test_what_peers_store_before_a_barrier_is_here_after_it(ctx: Context):
    transport = ctx.transport()
    one, other = transport.allocate(ctx.world_size * 1000), transport.allocate(8)
    assert [peer.data_ptr() for peer in one.peers] == one.pointers.tolist()
    assert not one.local.any()
    assert not other.local.any()
    transport.barrier("zeroes were seen")
    for step in range(20):
        if ctx.device.type == "cpu":
            time.sleep(0.002 * ((ctx.rank + step) % 3 == 0))
        for peer in one.peers:
            peer[ctx.rank * 1000 : (ctx.rank + 1) * 1000] = 10 * step + ctx.rank
        transport.barrier("stores")
        seen = one.local.view(ctx.world_size, 1000).clone()
        wanted = torch.arange(ctx.world_size, device=ctx.device)[:, None] + 10 * step
        assert torch.equal(seen.long(), wanted.expand(-1, 1000)), f"step {step}"
        transport.barrier("reads")
    assert not other.local.any()


@distributed(3, device="cpu")
def test_a_rank_that_never_comes_is_named_on_all_others(ctx: Context):
    transport = ctx.transport(timeout=0.6)
    transport.barrier("first")
    started = time.monotonic()
    if ctx.rank != 1:
        with pytest.raises(PeerTimeout, match=r"waited 0.6 s at second, barrier 2, for rank 1 \(last seen") as info:
            transport.barrier("second")
        assert time.monotonic() - started < 3
        assert info.value.missing == (1,)
        assert (info.value.step, info.value.counter, info.value.limit) == ("second", 2, 0.6)
        with pytest.raises(RuntimeError, match=f"transport of rank {ctx.rank}: unusable after: .* for rank 1"):
            transport.barrier("third")
    dist.barrier(ctx.group)


@distributed(3, device="cpu")
def test_peers_of_a_rank_with_ids_that_are_none_are_told_so(ctx: Context):
    workspace = Workspace(ctx.transport(), max_tokens=2, top_k=1, dim=16, num_experts=3)
    payload, ids = (torch.zeros(2, 8, dtype=torch.uint8),), torch.tensor([[0], [1 + 7 * (ctx.rank == 1)]])
    if ctx.rank == 1:
        with pytest.raises(ValueError, match=r"expert ids: got \[8\], wanted -1 \(not routed\) to 2"):
            dispatch(workspace, payload, ids, torch.ones(2, 1)).wait()
    else:
        with pytest.raises(PeersDisagree, match="refused to dispatch: rank 1 brought invalid expert ids"):
            dispatch(workspace, payload, ids, torch.ones(2, 1)).wait()
    dist.barrier(ctx.group)
    for buffer in workspace.arena.buffers:
        assert not workspace.layout.num_tokens(buffer.local)[1], "nothing moved from rank 1"


@distributed(3, device="cpu")
def test_ranks_in_other_moves_are_told_on_cpu_too(ctx: Context):
    check_other_moves(ctx, "rows of 8 bytes, rank 1 at combine with rows of 64 bytes", home=ctx.rank == 1)
    check_other_moves(ctx, "rows of 8 bytes, rank 1 at dispatch with rows of 9 bytes", width=8 + (ctx.rank == 1))
    said = "with rows of 8 bytes in layout .*, rank 1 at dispatch with rows of 8 bytes in layout"
    check_other_moves(ctx, said, larger=ctx.rank == 1)


def check_other_moves(ctx: Context, said: str, *, home: bool = False, width: int = 8, larger: bool = False) -> None:
    transport = ctx.transport(timeout=20)
    one, other = (Workspace(transport, max_tokens=t, top_k=1, dim=16, num_experts=3, row_bytes=64) for t in (2, 3))
    part, ids = torch.zeros(2, width, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int32)
    handle = dispatch(one, (part[:, :8],), ids, torch.ones(2, 1))
    plan = make_plan(*handle.tables, first_expert=ctx.rank, num_local_experts=1, alignment=1)
    rows = torch.zeros(plan.max_rows, 16)
    with pytest.raises(
        PeersDisagree, match=f"rank {ctx.rank} met peers in other exchanges: rank 0 at dispatch .*{said}"
    ):
        _ = combine(one, rows, plan, ids).wait() if home else dispatch(other if larger else one, (part,), ids).wait()
    with pytest.raises(RuntimeError, match=r"unusable after: rank . met peers in other exchanges"):
        transport.check()


@distributed(1, 2)
def test_smaller_buffers_make_room_for_larger_ones_and_their_views_stay(ctx: Context):
    transport = ctx.transport()
    sizes = {"top_k": 1, "dim": 16, "num_experts": ctx.world_size}
    small = Workspace(transport, max_tokens=2, **sizes)
    old = small.arena.buffers
    part = torch.full((2, 16), 7 + ctx.rank, dtype=torch.uint8, device=ctx.device)
    ids = torch.full((2, 1), ctx.world_size - 1, dtype=torch.int32, device=ctx.device)
    (arrived,) = dispatch(small, (part,), ids).wait()
    before = arrived.clone()
    larger = Workspace(transport, max_tokens=4, **sizes)
    assert larger.arena.buffers is small.arena.buffers is not old
    assert Workspace(transport, max_tokens=3, **sizes).arena.buffers is larger.arena.buffers
    for _ in range(3):
        dispatch(larger, (part + 1,), ids).wait()
        (again,) = dispatch(small, (part,), ids).wait()
        assert torch.equal(again, before) or ctx.rank < ctx.world_size - 1
    assert torch.equal(arrived, before)
    assert small.arena.exchanges == larger.arena.exchanges == 7


class FakeStream:
    """Remembers what waits for what."""

    def __init__(self) -> None:
        self.waits_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waits_for.append(other)

    wait_event = wait_stream


def test_a_move_on_another_stream_waits_for_the_last_ones_and_is_waited_for(monkeypatch):
    if dist.is_initialized():
        pytest.skip("there is a group")
    monkeypatch.setattr("mxep.comms.workspace.capture_of", lambda stream: 0)
    transport = SharedMemoryTransport()
    small, large = (Workspace(transport, max_tokens=t, top_k=2, dim=16, num_experts=4) for t in (2, 4))
    transport.stream = FakeStream()
    one, other = FakeStream(), FakeStream()
    moves = (one, small), (one, large), (other, large), (one, small)
    for number, (stream, workspace) in enumerate(moves):
        monkeypatch.setattr("mxep.comms.workspace.current_stream", lambda index, stream=stream: stream)
        workspace.begin("exchange")
        transport.arena.done, transport.arena.in_flight = f"exchange {number} is over", object()
    # What a move holds is let go of on the stream that it began on, and on the one that goes on with it.
    assert one.waits_for == ["exchange 0 is over", "exchange 1 is over", "exchange 2 is over", other]
    assert other.waits_for == ["exchange 1 is over", one, "exchange 2 is over"]
    small.join()
    assert one.waits_for[-1] == "exchange 3 is over"
    transport.close()


def test_a_capture_and_what_comes_after_one_begin_with_a_barrier(monkeypatch):
    if dist.is_initialized():
        pytest.skip("there is a group")
    transport = SharedMemoryTransport()
    workspace = Workspace(transport, max_tokens=2, top_k=2, dim=16, num_experts=4)
    transport.stream, met = FakeStream(), []
    monkeypatch.setattr("mxep.comms.workspace.current_stream", lambda index: transport.stream)
    monkeypatch.setattr(transport, "barrier", lambda step, signal_pad: met.append(step))
    for capture in (0, 5, 5, 0, 0):
        monkeypatch.setattr("mxep.comms.workspace.capture_of", lambda stream, capture=capture: capture)
        workspace.begin("exchange")
        workspace.arena.exchanges += 1
    assert met == ["exchange, exchange 1", "exchange, exchange 3", "exchange, exchange 4"]
    transport.close()


@distributed(2)
def test_ranks_that_disagree_on_sizes_are_both_named(ctx: Context):
    transport = ctx.transport()
    sizes = {"max_tokens": 4, "top_k": 2, "dim": 16, "num_experts": 4}
    with pytest.raises(ValueError, match="ranks disagree on top_k: got 3 on rank 1, wanted 2 as on rank 0"):
        Workspace(transport, **{**sizes, "top_k": 2 + ctx.rank})
    with pytest.raises(ValueError, match="ranks disagree on num_sms: got 9 on rank 1, wanted 8 as on rank 0"):
        Workspace(transport, **sizes, num_sms=8 + ctx.rank)
    with pytest.raises(ValueError, match="allocate: ranks disagree on nbytes: got 1 on rank 1, wanted 0 as on rank 0"):
        transport.allocate(ctx.rank)
    with pytest.raises(ValueError, match="num_experts: got 5, wanted a multiple of 2 ranks"):
        Workspace(transport, **{**sizes, "num_experts": 5})
    with pytest.raises(ValueError, match="dim: got 0, wanted at least 1"):
        Workspace(transport, **{**sizes, "dim": 0})


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mxep")


def open_files() -> list[str]:
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except FileNotFoundError:  # the descriptor that lists them
            continue
    return [link for link in links if "memfd:mxep" in link]


@distributed(2, device="cpu")
def test_buffers_have_no_name_and_no_descriptor_and_go_with_the_transport(ctx: Context):
    before = mappings()
    transport = SharedMemoryTransport(ctx.group)
    workspace = Workspace(transport, max_tokens=4, top_k=2, dim=16, num_experts=4)
    assert mappings() == before + 2 * 3  # two peers of the signal pad and of two buffers
    assert open_files() == []
    assert not [name for name in os.listdir("/dev/shm") if "mxep" in name]
    dist.barrier(ctx.group)
    kept = workspace.arena.buffers[0].local[:4]
    transport.close()
    assert mappings() == before + 1
    kept.fill_(1)  # a view that is still held stays valid
    del kept
    assert mappings() == before
    with pytest.raises(RuntimeError, match="closed"):
        transport.barrier("late")


def crash(rank: Rank, folder: Path) -> None:
    (folder / f"pid-{rank.rank}").write_text(str(os.getpid()))
    transport = SharedMemoryTransport()
    transport.allocate(2**20).local.fill_(1)
    transport.barrier("before the crash")
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.barrier("after the crash")


def test_a_crash_leaves_nothing_behind(tmp_path):
    with pytest.raises(RanksFailed, match="rank 1 was killed by SIGKILL"):
        run_ranks(crash, (tmp_path,), world_size=2, timeout=60, device="cpu")
    for file in tmp_path.glob("pid-*"):
        assert not Path(f"/proc/{file.read_text()}/maps").exists()
    assert not [name for name in os.listdir("/dev/shm") if "mxep" in name]


def test_a_process_alone_needs_no_process_group():
    if dist.is_initialized():
        pytest.skip("there is a group")
    transport = SharedMemoryTransport()
    assert (transport.rank, transport.world_size) == (0, 1)
    buffer = transport.allocate(16)
    transport.barrier("alone")
    assert len(buffer.peers) == 1
    transport.close()


def test_a_machine_with_another_memory_order_is_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="got Linux on aarch64, wanted Linux on x86_64"):
        SharedMemoryTransport()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_symmetric_memory_without_cuda_says_so():
    with pytest.raises(RuntimeError, match="got no CUDA device; on CPU use SharedMemoryTransport"):
        SymmetricMemoryTransport()


def test_a_device_without_an_index_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert cuda_device(None) == cuda_device("cuda") == torch.device("cuda", 3)
    assert cuda_device("cuda:1") == torch.device("cuda", 1)


def test_an_exchange_whose_order_is_unknown_begins_with_a_barrier():
    """The first of every capture, and after one all that are in none."""
    if dist.is_initialized():
        pytest.skip("there is a group")
    transport = SharedMemoryTransport()
    workspace = Workspace(transport, max_tokens=4, top_k=2, dim=16, num_experts=4)
    captures = 0, 0, 5, 5, 7, 7, 0, 0, 9
    unknown = False, False, True, False, True, False, True, True, True
    assert tuple(workspace._is_order_unknown(capture) for capture in captures) == unknown
    with workspace.stream(transport):
        pass
    with pytest.raises(RuntimeError, match="in flight while a capture starts or ends, wanted wait"):
        workspace._is_order_unknown(0)
    assert workspace._is_order_unknown(0)  # what was in flight is gone with its capture
    with workspace.stream(transport):
        pass
    for _ in range(2):  # outside of any it is there until someone waits
        with pytest.raises(RuntimeError, match="wanted wait"):
            workspace._is_order_unknown(11)
    workspace.join()
    assert workspace._is_order_unknown(11)
    transport.close()
