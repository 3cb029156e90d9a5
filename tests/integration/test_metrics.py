"""A line of metrics: FLOPs by hand, a share of a named peak, memory; and its copies for TensorBoard and W&B."""

import dataclasses
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from integration.conftest import TINY, Finished
from integration.test_train import make_trainer, needs_gpu
from mxep.integration import metrics
from mxep.integration.config import to_json
from mxep.integration.launch import Rank
from mxep.integration.metrics import PEAKS, Speed, peak_of, scalars
from mxep.integration.schema import Config
from ranks import run_again


def flops(rank: Rank, config: Config, folder: Path) -> tuple[float, str]:
    speed = make_trainer(rank, config, folder).speed
    return speed.tflop / speed.tokens * config.ranks * 1e12, speed.count


OWN = ("model=tiny", "model.shared_experts=1")
QWEN = ("model=qwen3_moe_tiny", "parallel.ranks=2", "parallel.fsdp=true")


@pytest.mark.parametrize("given", [OWN, QWEN])
def test_a_tokens_flops_are_those_counted_by_hand(make_config: Callable[..., Config], tmp_path: Path, given: list[str]):
    config = make_config("recipe=bf16", *given)
    m = config.model
    experts = (m.top_k + m.shared_experts) * 3 * m.dim * m.hidden_dim
    if given is OWN:
        width, attention = m.dim, 4 * m.dim * m.dim
    else:
        width, key_values = m.heads * m.transformers["head_dim"], 2 * m.transformers["head_dim"]
        attention = m.dim * (2 * width + 2 * key_values)
    weights = m.layers * (attention + experts) + 256 * m.dim
    expected = 6 * weights + m.layers * 6 * config.data.length * width  # causal: half of the scores
    for found, count in run_again(flops, (config, tmp_path), world_size=config.ranks, timeout=60, device="cpu"):
        assert found == pytest.approx(expected)
        assert count == f"Megatron's count, {m.layers} layers, vocabulary 256, sequence {config.data.length}"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA RTX A1000", None),
        ("some accelerator", None),
    ],
)
def test_a_peak_is_that_of_the_first_part_of_its_name(name: str, peak: float | None):
    assert peak_of(name) == peak
    assert all(peak_of(f"NVIDIA {part}") == value for part, value in PEAKS.items())


def speed_of(
    rank: Rank, config: Config, folder: Path
) -> tuple[dict[str, float | None], dict[str, float | None], float]:
    trainer = make_trainer(rank, config, folder)
    trainer.train_step()
    speed: Speed = trainer.speed
    row, tflop = trainer.metrics[0], speed.tflop
    speed.peak = 2 * tflop
    return row, speed.of(0.5, 2**31), tflop


def test_a_line_has_tflops_of_a_rank_and_on_gpus_mfu_and_memory(make_config: Callable[..., Config], tmp_path: Path):
    config = make_config("recipe=bf16", "parallel.ranks=2", "train.micro_batches=2")
    for row, made_up, tflop in run_again(speed_of, (config, tmp_path), world_size=2, timeout=60, device="cpu"):
        assert row["tflops"] * row["seconds"] == pytest.approx(tflop)
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(4 * 32)
        assert (row["mfu"], row["peak_gib"]) == (None, None)
        assert made_up["tflops"] == pytest.approx(2 * tflop)
        assert (made_up["mfu"], made_up["peak_gib"]) == (pytest.approx(1.0), 2.0)
    half = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=8))
    (_, _, more), *_ = run_again(speed_of, (half, tmp_path), world_size=2, timeout=60, device="cpu")
    assert more == pytest.approx(2 * tflop)


@needs_gpu
def test_on_gpus_memory_is_counted_and_mfu_is_a_share(make_config: Callable[..., Config], tmp_path: Path):
    ranks = min(2, torch.cuda.device_count())
    config = make_config("recipe=bf16", "parallel.device=cuda", f"parallel.ranks={ranks}")
    for row, *_ in run_again(speed_of, (config, tmp_path), world_size=ranks, timeout=100, device="cuda"):
        assert row["peak_gib"] > 0
        if peak_of(torch.cuda.get_device_name()):
            assert 0 < row["mfu"] < 1


def test_tensorboard_has_the_numbers_of_metrics_jsonl(mxep: Callable[..., Finished], text: Path, tmp_path: Path):
    """Of a run on tokens, and of one that resumes it in another folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = "train.steps=3", "train.tensorboard=true", "train.checkpoint_every=2", "parallel.ranks=1"
    done = mxep(*TINY, f"data.path={text}", "data.vocabulary=300", *given)
    assert done.code == 0, done.err
    again = mxep(
        f"resume={tmp_path / 'run'}", f"hydra.run.dir={tmp_path / 'more'}", "train.steps=4", "parallel.ranks=1"
    )
    assert again.code == 0, again.err
    assert "another text" not in again.err
    for folder, steps in (("run", 3), ("more", 4)):
        rows = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        for name in ("bf16", "mxfp8"):
            events = EventAccumulator(str(tmp_path / folder / "tensorboard" / name))
            events.Reload()
            wanted = {row["step"]: dict(scalars(row)) for row in rows if row["run"] == name}
            assert len(wanted) == steps
            assert set(events.Tags()["scalars"]) == set(wanted[1])
            assert {"loss", "lr", "tflops", "expert_loads/0"} <= set(wanted[1])
            for key in wanted[1]:
                found = {event.step: event.value for event in events.Scalars(key)}
                assert found == pytest.approx({step: row[key] for step, row in wanted.items()}, rel=1e-6)


class Wandb(ModuleType):
    """W&B as far as it is called."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ended = 0

    def init(self, **given: Any) -> "Wandb":
        self.begun.append(given)
        return self

    def log(self, row: dict[str, float], *, step: int) -> None:
        self.rows.append((step, row))

    def __enter__(self) -> "Wandb":
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended += 1


def told(rank: Rank, config: Config, folder: Path) -> tuple[list[Any], list[Any], int]:
    sys.modules["wandb"] = wandb = Wandb()
    make_trainer(rank, config, folder).run()
    return wandb.begun, wandb.rows, wandb.ended


@pytest.mark.parametrize("wanted", [False, True])
def test_wandb_gets_the_numbers_of_metrics_jsonl(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", stub := Wandb())
    stub.__spec__ = ModuleSpec("wandb", None)
    given = "recipe=bf16", "train.steps=2", "parallel.ranks=2", "train.checkpoint_every=null"
    config = make_config(*given, f"train.wandb={str(wanted).lower()}")
    (begun, rows, ended), of_others = run_again(told, (config, tmp_path), world_size=2, timeout=100, device="cpu")
    assert of_others == ([], [], 0), "rank 0 alone"
    if not wanted:
        assert (begun, rows, ended) == ([], [], 0)
        return
    ((project, group, name),) = [(one["project"], one["group"], one["name"]) for one in begun]
    assert (project, group, name) == ("mxep", tmp_path.name, "bf16")
    assert begun[0]["config"] == to_json(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [(line["step"], dict(scalars(line))) for line in lines]
    assert (len(rows), ended) == (2, 1)


@pytest.mark.parametrize("name", ["bf16", "mxfp8_e5m2"])
@pytest.mark.parametrize("kind", ["gpu", "cpu", "unknown gpu"])
def test_the_progress_line_has_speed_and_memory_in_100_columns(name: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """And the counter of steps in 80."""
    row = {"loss": 10.901, "tokens_per_s": 1_174_321.0, "tflops": 412.34, "expert_load": 31.25}
    row |= {"mfu": 0.4172 if kind == "gpu" else None, "peak_gib": None if kind == "cpu" else 115.26}
    rate = "MFU 41.7%" if kind == "gpu" else "412 TFLOP/s"
    memory = "" if kind == "cpu" else " 115.3 GiB"
    said = f"loss 10.901 1174.3k tokens/s {rate}{memory} load 31.25x"
    assert metrics.describe(row) == said
    for width in (100, 80):
        console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
        monkeypatch.setattr("rich.console.Console", lambda console=console, **_: console)
        with metrics.progress(name, 3000, 3.26, shown=True) as advance:
            advance(1234, row)
        shown = console.file.getvalue()
        assert "unigram entropy 3.26" in shown
        assert "1234/3000" in shown
        assert said in shown or (width, kind == "cpu" and name == "bf16") == (80, False), "on one line"
