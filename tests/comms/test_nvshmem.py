"""Moves by puts: played over CPU processes; through NVSHMEM between GPUs. And what is said where NVSHMEM is not."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch._C._distributed_c10d import _SymmetricMemory

from comms.cases import CASES, assert_bitwise, bring_to, make_workspace
from comms.test_exchange import (
    check_cases,
    check_late,
    check_no_device_read,
    check_one_token,
    check_over_capacity,
    check_rounds,
    check_widths,
)
from comms.test_symmetric_memory import check_captured
from comms.transports import PlayedTransport
from mxep.comms import NvshmemTransport, SymmetricMemoryTransport, dispatch
from mxep.comms.layout import PE_SHIFT
from mxep.comms.nvshmem import exchange as nvshmem
from mxep.comms.nvshmem.transport import (
    check_group,
    check_versions,
    choose_backend,
    device_library,
    device_version,
    host_version,
)
from ranks import Context, distributed

TESTS = Path(__file__).parents[1]
ON_CUDA = torch.cuda.is_available()
"""Where it is not, puts are played with small cases: an interpreted kernel takes its time."""


def kind_of(ctx: Context) -> type:
    """NVSHMEM on CUDA: only in a process of its own, as other tests of one torchrun use torch's other backend."""
    if ctx.device.type == "cpu":
        if ON_CUDA:
            pytest.skip("fewer GPUs than ranks, and here kernels are not interpreted")
        return PlayedTransport
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pytest.skip("a process has one backend of symmetric memory: run this file without torchrun")
    return NvshmemTransport


@distributed(1, 2, 3, 4, device="cuda")
def test_rows_go_out_and_come_home_as_loops_and_plain_collectives_say(ctx: Context):
    check_cases(ctx, make_workspace(ctx, kind_of(ctx)), CASES)
    if ctx.world_size > 1:
        check_rounds(ctx, kind_of(ctx), 60)


@distributed(2, device="cuda")
def test_rows_over_capacity_are_counted_and_the_rest_comes_home(ctx: Context):
    workspace = make_workspace(ctx, kind_of(ctx))
    check_over_capacity(ctx, workspace, ("one rank",))
    check_one_token(ctx, workspace)


@distributed(2)
def test_long_rows_are_put_in_pieces(ctx: Context):
    """Rows of 40000 bytes on the way out, tables of 3 pieces, two programs that share all puts."""
    sizes = {"max_tokens": 1100, "top_k": 9, "dim": 12, "row_bytes": 40016, "num_sms": 2}
    workspace = make_workspace(ctx, kind_of(ctx), num_experts=18, **sizes)
    payload = torch.arange(3 * 40001, dtype=torch.int32).to(torch.uint8).view(3, -1) + ctx.rank
    ids, weights = torch.full((3, 9), -1), torch.rand(3, 9)
    ids[:, 0] = 9 * (1 - ctx.rank)  # to the other rank
    here = [tensor.to(ctx.device) for tensor in (payload, ids, weights)]
    handle = dispatch(workspace, here[:1], *here[1:])
    other = (1 - ctx.rank) * 1100
    assert_bitwise(handle.wait()[0][other : other + 3], payload - ctx.rank + (1 - ctx.rank), "rows")
    assert_bitwise(handle.tables[0][ctx.rank, :3], ids.int(), "own ids")
    mine = bring_to(workspace, "full", ctx.rank, 0).to(ctx.device)
    handle = dispatch(workspace, [part[:, :8] for part in mine.payload], mine.ids, mine.weights)
    for rank in range(2):
        theirs = bring_to(workspace, "full", rank, 0)
        assert_bitwise(handle.tables[0][rank, : len(theirs.ids)], theirs.ids.int(), f"ids of rank {rank}")
        assert_bitwise(handle.tables[1][rank, : len(theirs.ids)], theirs.weights, f"weights of rank {rank}")


@distributed(2, device="cuda")
def test_a_captured_graph_replays_with_new_routing_and_waits_for_no_device_read(ctx: Context):
    check_captured(ctx, make_workspace(ctx, kind_of(ctx)))
    check_no_device_read(ctx, make_workspace(ctx, kind_of(ctx)))


@distributed(2, device="cuda")
def test_a_rank_that_never_comes_is_named(ctx: Context):
    check_late(ctx, kind_of(ctx), 0.5)


@distributed(2, device="cuda")
def test_ranks_that_send_rows_of_other_widths_are_told(ctx: Context):
    check_widths(ctx, kind_of(ctx))


@distributed(2, device="cuda")
def test_both_backends_in_one_process_are_refused(ctx: Context):
    kind_of(ctx)
    if ctx.rank == 0:  # one rank is enough to refuse them all
        _SymmetricMemory.empty_strided_p2p((16,), (1,), torch.uint8, ctx.device)
    with pytest.raises(RuntimeError, match="rank 0: got symmetric memory of backend CUDA in this process already"):
        NvshmemTransport(ctx.group)


@distributed(2, device="cuda")
def test_the_other_transport_after_nvshmem_is_refused(ctx: Context):
    ctx.transport(kind_of(ctx))
    with pytest.raises(RuntimeError, match="got backend NVSHMEM of torch's symmetric memory, wanted CUDA"):
        SymmetricMemoryTransport(ctx.group)


# ── the kernel's jobs, interpreted ───────────────────────────────────────────────────────────────────────────────────

SPAN = tl.constexpr(1 << 17)


@triton.jit
def add_to_pe(target, source, size, pe):
    """Stands for a put: PE p's buffer lies SPAN bytes behind that of p - 1. Adds, so that a second time shows."""
    byte = tl.arange(0, 16384)
    source = source.to(tl.pointer_type(tl.uint8)) + byte
    target = (target + pe * SPAN).to(tl.pointer_type(tl.uint8)) + byte
    tl.store(target, tl.load(target, mask=byte < size) + tl.load(source, mask=byte < size), mask=byte < size)


@pytest.mark.skipif(ON_CUDA, reason="here the kernel itself runs")
@pytest.mark.parametrize(("nbytes", "groups", "programs"), [(40, 1, 3), (40, 2, 5), (16384, 2, 1), (40001, 2, 4)])
def test_the_put_kernel_does_every_job_once(monkeypatch, nbytes, groups, programs):
    monkeypatch.setattr(nvshmem, "put_nbi_block", add_to_pe)
    source = torch.randint(1, 100, (4, nbytes + 7), dtype=torch.uint8)[:, :nbytes]
    buffers, wanted = torch.zeros(2, 3, SPAN.value, dtype=torch.uint8)
    destinations = torch.full((4, 2), -1)
    for row, j, pe, byte in [(0, 0, 2, 0), (1, 1, 0, 50000), (3, 0, 1, 16), (3, 1, 2, 50008)]:
        destinations[row, j] = pe << PE_SHIFT | byte
        wanted[pe, byte : byte + nbytes] = source[row]
    launch = {(programs, 1, 1): nvshmem.put_kernel[(programs,)]}
    nvshmem.put(launch, programs, source, buffers, destinations, groups)
    assert_bitwise(buffers, wanted, "buffers")


# ── errors that need no GPU ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(ON_CUDA, reason="CUDA is here")
def test_without_cuda_it_says_so():
    with pytest.raises(RuntimeError, match="NvshmemTransport: got no CUDA device; on CPU use SharedMemoryTransport"):
        NvshmemTransport()


def test_a_group_of_some_ranks_is_refused():
    check_group(4, 4)
    with pytest.raises(ValueError, match="got a group of 2 of the job's 4 ranks, wanted all of them"):
        check_group(2, 4)


def test_a_missing_device_library_says_what_to_install(monkeypatch, tmp_path):
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    if not symm_mem.is_nvshmem_available():
        pytest.skip("this torch has no NVSHMEM")
    monkeypatch.setattr(NvshmemLibFinder, "found_device_lib_path", None)
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"not found .*; pip install mxep-comms\[nvshmem-cu\d+\].* or set NVSHMEM_LI"
    ):
        device_library()


def test_the_device_library_of_an_architecture_is_found(monkeypatch, tmp_path):
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    def fail() -> str:
        raise RuntimeError("not found")

    monkeypatch.setattr(symm_mem, "is_nvshmem_available", lambda: True)
    monkeypatch.setattr(NvshmemLibFinder, "find_device_library", fail)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    monkeypatch.delenv("NVSHMEM_LIB_DIR", raising=False)
    with pytest.raises(RuntimeError, match="not found"):
        device_library()
    folder = tmp_path / "nvidia" / "nvshmem" / "lib"
    folder.mkdir(parents=True)
    for sm in (80, 90, 120):
        (folder / f"libnvshmem_device_sm_{sm}.bc").touch()
    assert device_library() == str(folder / "libnvshmem_device_sm_90.bc")


def test_a_torch_without_nvshmem_says_so(monkeypatch):
    monkeypatch.setattr(symm_mem, "is_nvshmem_available", lambda: False)
    with pytest.raises(RuntimeError, match="without NVSHMEM, wanted a build with it; use SymmetricMemoryTransport"):
        device_library()


def test_a_device_library_of_another_version_is_refused():
    check_versions("3.4.5", "3.4.5", "lib")
    check_versions("3.4.5", None, "lib")
    with pytest.raises(RuntimeError, match=r"device library 3.3.9 \(lib\), wanted 3.4.5 as the host library"):
        check_versions("3.3.9", "3.4.5", "lib")


def test_symmetric_memory_of_another_backend_is_refused(monkeypatch):
    def refuse(name: str) -> None:
        raise RuntimeError("Backend can not be changed after use.")

    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    monkeypatch.setattr(symm_mem, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(symm_mem, "set_backend", refuse)
    with pytest.raises(RuntimeError, match="got symmetric memory of backend CUDA in this process already, wanted NVSH"):
        choose_backend(torch.device("cuda", 0))
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1"


@pytest.mark.slow
def test_a_kernel_that_calls_nvshmem_compiles_and_carries_the_version_of_the_host_library():
    if not symm_mem.is_nvshmem_available():
        pytest.skip("this torch has no NVSHMEM")
    command = [sys.executable, TESTS / "ahead_of_time.py", TESTS / "comms" / "nvshmem_launches.py", "meet"]
    done = subprocess.run([*command, "--read", "--target", "90", "--ptx", "meet"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert device_version(done.stdout) == host_version() is not None
