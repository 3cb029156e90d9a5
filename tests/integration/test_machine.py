"""What a machine has not is told at once: devices, backends, memory."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mxep.gemm import BACKENDS
from mxep.integration import machine
from mxep.integration.launch import Gpu
from mxep.integration.schema import Config

H100 = Gpu((9, 0), 80 * 10**9)
B200 = Gpu((10, 0), 180 << 30)


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """machine_with(GPUs, GiB of memory): this machine, as far as configs are concerned."""

    def make(gpus: list[Gpu], gib: float = 1000) -> None:
        monkeypatch.setattr(machine, "gpus", lambda: gpus)
        monkeypatch.setattr(machine, "memory", lambda: int(gib * machine.GIB))

    return make


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        ([], ["parallel.device=cuda"], "parallel.device=cuda: got 0 CUDA devices here, wanted one for each of 2 ranks"),
        ([H100], ["parallel.device=cuda"], "got 1 CUDA devices here, wanted one for each of 2 ranks: parallel.ranks=1"),
        ([H100], ["task=bench", "bench=layer"], "bench.device=cuda: got 1 CUDA devices here, wanted one for each of 2"),
        ([], ["dispatcher=nvshmem"], "dispatcher=nvshmem: got ranks on CPUs, wanted CUDA devices"),
        ([H100] * 2, ["dispatcher=nvshmem", "parallel.device=cpu"], "dispatcher=nvshmem: got ranks on CPUs"),
        (
            [],
            ["backend=hopper", "task=verify"],
            "backend=hopper: got ranks on CPUs, wanted CUDA devices of compute capab",
        ),
        (
            [B200] * 2,
            ["backend=hopper", "task=compare"],
            "backend=hopper: got 10.0, wanted CUDA devices of compute capab",
        ),
        (
            [H100] * 2,
            ["backend=blackwell"],
            "backend=blackwell: got 9.0, wanted CUDA devices of compute capability 10.0",
        ),
        ([B200], ["task=bench", "bench=gemm"], "bench.backend=hopper: got 10.0, wanted CUDA devices"),
        ([], [], None),
        ([], ["task=bench", "bench=layer", "bench.device=cpu"], None),
        ([H100] * 2, ["backend=hopper", "dispatcher=nvshmem", "parallel.device=cuda"], None),
        ([H100], ["task=bench", "bench=gemm"], None),
        ([B200] * 2, ["backend=blackwell", "recipe=mxfp8"], None),
        ([], ["task=estimate", "backend=hopper"], None),
    ],
)
def test_a_device_that_is_not_there_is_told(
    make_config: Callable[..., Config],
    machine_with: Callable[..., None],
    gpus: list[Gpu],
    overrides: list[str],
    message: str | None,
):
    machine_with(gpus)
    found = "; ".join(machine.complaints(make_config("parallel.ranks=2", *overrides)))
    assert (message in found and ";" not in found) if message else not found


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_a_backend_runs_where_its_own_reason_says_so(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name, (first, last) in machine.CAPABILITIES.items():
        runs = BACKENDS[name].unsupported_reason(torch.device("cuda")) is None
        assert runs == (first <= capability <= last), name
    for name in BACKENDS.keys() - machine.CAPABILITIES.keys():
        assert BACKENDS[name].unsupported_reason(torch.device("cpu")) is None, name


@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3_30b_a3b", 30.5), ("mixtral_8x7b", 46.7), ("deepseek_v3_proxy", 16), ("medium", 0.014)],
)
def test_parameters_are_those_that_the_configs_say(make_config: Callable[..., Config], model: str, billions: float):
    config = make_config(f"model={model}", "task=bench", "recipe=bf16", "data.max_bytes=100000")
    assert sum(machine.parameters(config)) / 1e9 == pytest.approx(billions, rel=0.04)


BIG = "model=qwen3_30b_a3b", "recipe=bf16", "parallel.ranks=8", "data.batch=8"


@pytest.mark.parametrize(
    ("gpus", "gib", "overrides", "message"),
    [
        ([], 400, [], "30.5 billion parameters take 614.7 GiB of memory on 8 ranks here, and 400.0 GiB are free"),
        ([], 400, ["parallel.fsdp=true"], "take 455.3 GiB of memory on 8 ranks here"),
        ([], 400, ["parallel.fsdp=true", "train.precision=bf16-true"], None),
        ([], 400, ["model.layers=12"], None),
        ([H100] * 8, 1000, [], "weights, gradients and moments of 30.5 billion parameters take 76.8 GiB of each rank"),
        ([H100] * 8, 1000, ["parallel.fsdp=true"], None),
        ([H100] * 8, 10, ["parallel.fsdp=true"], None),
        ([B200] * 8, 1000, ["parallel.ep=1"], "take 454.8 GiB of each rank, and a GPU here has 180.0 GiB"),
        ([], 0.3, ["model=tiny", "parallel.ep=1"], "take 0.5 GiB of memory on 8 ranks here, and 0.3 GiB are free"),
    ],
)
def test_a_model_that_is_larger_than_the_machine_is_told_before_anything_starts(
    make_config: Callable[..., Config],
    machine_with: Callable[..., None],
    gpus: list[Gpu],
    gib: float,
    overrides: list[str],
    message: str | None,
):
    machine_with(gpus, gib)
    found = "; ".join(machine.complaints(make_config(*BIG, *overrides)))
    assert message in found if message else not found


def test_the_ranks_of_a_node_share_its_memory(
    make_config: Callable[..., Config], machine_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    machine_with([], 100)
    config = make_config(*BIG)
    assert list(machine.complaints(config))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert list(machine.complaints(config)) == []


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_control_group_is_its_limit_without_what_is_taken(tmp_path: Path, version: int):
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, ("1000", "700")):
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50\ntotal_inactive_file 50\n")
    assert machine._free_of(tmp_path) == 350
    assert machine._free_of(tmp_path / "none") > 1 << 60
    if version == 2:
        (tmp_path / "memory.max").write_text("max\n")
        assert machine._free_of(tmp_path) > 1 << 60


def test_this_machine_has_some_memory():
    total = int(re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[1])
    assert 1 << 20 < machine.memory() <= 1024 * total


def test_a_large_model_is_refused_by_the_command_and_leaves_no_folder(
    mxep, tmp_path: Path, machine_with: Callable[..., None]
):
    machine_with([], 20)
    finished = mxep("model=qwen3_30b_a3b")
    assert finished.code == 1
    assert "billion parameters take 477.7 GiB of memory on 2 ranks here, and 20.0 GiB are free" in finished.err
    assert not (tmp_path / "run").exists()
