"""Compare a config with this machine: devices, backends, memory. Imports nothing heavy.

A job that cannot run is refused before torch is imported or a rank starts. Memory is that of weights, gradients and
AdamW's moments, and on the host of what models are made from. It is the least: activations and buffers come on top.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .config import load_benchmark
from .data import vocabulary_of
from .launch import Gpu, gpus, under_torchrun
from .schema import Config, moe_layers

GIB = 1 << 30
PROCESS = 64 << 20  # bytes of a rank besides its model, at least
CAPABILITIES = {"hopper": ((9, 0), (9, 0)), "blackwell": ((10, 0), (10, 99)), "triton": ((8, 9), (99, 0))}
"""Backend -> the first and the last compute capability that it runs on. Others run anywhere."""


def complaints(config: Config) -> Iterator[str]:
    """Yield a line for each thing that this machine lacks."""
    task, bench = config.task.name, config.bench
    if task == "estimate":
        return
    found = gpus()
    ranks = (
        int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks)) if under_torchrun() else config.ranks
    )  # of this machine
    key, asked = ("bench", bench.device) if task == "bench" else ("parallel", config.parallel.device)
    if task == "bench" and not load_benchmark("names").BENCH[bench.name].on_ranks:
        ranks = 1
    if asked == "cuda" and len(found) < ranks:
        cure = f"parallel.ranks={len(found)}" if found else f"{key}.device=cpu"
        yield f"{key}.device=cuda: got {len(found)} CUDA devices here, wanted one for each of {ranks} ranks: {cure}"
        return
    used = found[:ranks] if asked != "cpu" and len(found) >= ranks else []
    if task == "bench":
        yield from _check_backend("bench.backend", bench.backend, used)
        return
    yield from _check_backend("backend", config.backend, used)
    if task == "verify":
        return
    if config.dispatcher.name == "nvshmem" and not used:
        yield "dispatcher=nvshmem: got ranks on CPUs, wanted CUDA devices: dispatcher=symmetric runs on CPUs"
    yield from _check_memory(config, ranks, used)


def _check_backend(key: str, backend: str | None, used: list[Gpu]) -> Iterator[str]:
    if backend not in CAPABILITIES or (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        return
    first, last = CAPABILITIES[backend]
    wanted = f"wanted CUDA devices of compute capability {first[0]}.{first[1]}{' or newer' * (backend == 'triton')}"
    if not used:
        yield f"{key}={backend}: got ranks on CPUs, {wanted}: auto takes the best for the device"
    elif wrong := [one.capability for one in used if not first <= one.capability <= last]:
        got = ".".join(map(str, wrong[0]))
        yield f"{key}={backend}: got {got}, {wanted}: auto takes the best for the device"


def _check_memory(config: Config, ranks: int, used: list[Gpu]) -> Iterator[str]:
    experts, rest = parameters(config)
    spread = config.ranks if config.parallel.fsdp else config.ep
    rank_parameters = experts / spread + rest / (config.ranks if config.parallel.fsdp else 1)
    weight, trained = (2, 8) if config.train.precision == "bf16-true" else (4, 16)
    count = f"{(experts + rest) / 1e9:.3g} billion parameters"
    cure = "wanted a smaller model (model.layers=N), or more ranks over which experts are spread (parallel.ep)"
    if used:
        need, have = rank_parameters * trained, min(one.bytes for one in used)
        if need > have:
            what = f"weights, gradients and moments of {count} take {need / GIB:.1f} GiB of each rank"
            yield f"model: {what}, and a GPU here has {have / GIB:.1f} GiB: {cure}"
    whole = (
        experts + rest if config.model.pretrained else rank_parameters
    )  # which each rank reads before it takes its part
    made = 0 if used and not config.model.pretrained and config.model.transformers else whole * weight
    need, have = ranks * (PROCESS + max(made, 0 if used else rank_parameters * trained)), memory()
    if need > have:
        what = f"{count} take {need / GIB:.1f} GiB of memory on {ranks} ranks here"
        yield f"model: {what}, and {have / GIB:.1f} GiB are free: {cure}"


def parameters(config: Config) -> tuple[float, float]:
    """How many there are in routed experts, and in all else but what few models have."""
    model, hf_config = config.model, config.model.transformers or {}
    expert = 3.0 * model.dim * model.hidden_dim
    layers = moe_layers(hf_config, model.layers) if hf_config else model.layers
    rest = layers * model.shared_experts * expert
    rest += 2 * model.dim * (hf_config.get("vocab_size") or vocabulary_of(config.data))
    if not hf_config.get("kv_lora_rank"):
        width = hf_config.get("head_dim") or model.dim // model.heads
        heads = model.heads + (hf_config.get("num_key_value_heads") or model.heads)
        rest += model.layers * 2 * model.dim * heads * width
    return layers * model.experts * expert, rest


def memory() -> int:
    """Bytes that processes may still take: of the machine, and of each control group that this process is in."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = Path("/sys/fs/cgroup", controllers)
            group = top / path.lstrip("/")
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
                free = min(free, _free_of(folder))
    return free


def _free_of(group: Path) -> int:
    """Bytes that the processes of a control group may still take; what its files take can be given back."""
    for limit, usage, file in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most != "max":
            return int(most) - used + int(stat.get(file, 0))
    return 1 << 62
