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
    for buffer in workspace.transport.buffers:
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
    kept = workspace.transport.buffers[0].local[:4]
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
