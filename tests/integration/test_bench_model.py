"""bench=model: rows of every kind of experts, compared with the baseline's before they are timed."""

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.qwen3_moe import modeling_qwen3_moe

from benchmarks import runner
from benchmarks.model import BASELINE, CASES, LEAST_SNR, PLAIN, Shape, Subject, _config, measure
from mxep.integration.flops import flops_per_token
from mxep.integration.launch import Rank
from mxep.integration.report import Report
from mxep.integration.transformers.experts import own_expert_parallel

SHAPE = [32, 1, 64, 32, 8, 2]
ON_CPU = ("task=bench", "bench=model", "bench.device=cpu", "parallel.timeout=300")
QWEN3, DEEPSEEK = "qwen3_30b_16_layers", "deepseek_v3_16b"


def rows_of(mxep: Any, folder: Path, *overrides: str) -> dict[str, Any]:
    """Rows of the bench by what they measure."""
    out = folder / "out.json"
    finished = mxep(*ON_CPU, *overrides, f"bench.out={out}", "bench.commit=abc1234")
    assert finished.code == 0, finished.out + finished.err
    return {row["what"]: row for row in json.loads(out.read_text())["sections"]["model"]}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_kind_of_experts_is_compared_and_timed(mxep, tmp_path: Path, ranks: int) -> None:
    shape = f"+bench.shapes.tiny={json.dumps([SHAPE])}", "bench.models=[tiny]"
    before = modeling_qwen3_moe.create_causal_mask
    rows = rows_of(mxep, tmp_path, *shape, f"parallel.ranks={ranks}")
    assert modeling_qwen3_moe.create_causal_mask is before, "other models of the process have their masks"
    assert list(rows) == list(CASES)
    if ranks > 1 and own_expert_parallel is None:
        assert rows.pop("transformers bf16")["note"] == "wants transformers 5.23"
    flops = sum(flops_per_token(_config("tiny", Shape(*SHAPE)), SHAPE[0] // 2).values())
    for name, row in rows.items():
        assert row["tokens/s"] == pytest.approx(32 * ranks / row["ms"] * 1e3, rel=1e-3)
        assert row["TFLOP/s"] * 1e12 * ranks == pytest.approx(flops * row["tokens/s"], rel=1e-3)
        assert row["x bf16"] == pytest.approx(rows[BASELINE]["ms"] / row["ms"], rel=1e-3)
        assert (row["dB"] >= LEAST_SNR) == (name != PLAIN), "the check would find experts that do nothing"
    assert rows[BASELINE]["dB"] > rows["mxep bf16"]["dB"] > rows["mxep mxfp8"]["dB"] > rows["mxep mxfp8, linear"]["dB"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK])
def test_a_model_takes_optimizer_steps_with_its_experts_over_ranks(mxep, tmp_path: Path, model: str) -> None:
    steps = "bench.optimizer=adamw", "bench.activation_checkpointing=true", 'bench.cases=["mxep mxfp8, linear"]'
    rows = rows_of(mxep, tmp_path, f"bench.models=[{model}]", *steps, "parallel.ranks=2")
    assert list(rows) == [BASELINE, PLAIN, "mxep mxfp8, linear"]
    assert all("ms" in row for row in rows.values()), rows


def test_without_a_choice_one_model_is_measured(make_config) -> None:
    bench = make_config("task=bench", "bench=model").bench
    assert bench.models == [QWEN3]
    assert len(bench.shapes) > 1


@pytest.fixture
def make_bench(make_config, one_thread: None) -> Callable[..., runner.Bench]:
    """make_bench(*overrides) -> a Bench of one CPU rank."""

    def make(*overrides: str) -> runner.Bench:
        config = make_config(*ON_CPU, *overrides).bench
        return runner.Bench(Rank(0, 1, torch.device("cpu")), config, 0, Report("", {}, {}))

    return make


@pytest.fixture
def make_subject(make_bench) -> Iterator[Any]:
    """make_subject(*overrides, model=QWEN3) -> a Subject of two layers."""
    made = []

    def make(*overrides: str, model: str = QWEN3) -> Subject:
        made.append(Subject.make(make_bench(*overrides), model, Shape(32, 2, 64, 32, 8, 2)))
        return made[-1]

    yield make
    for subject in made:
        subject.close()


def test_a_model_is_gone_before_the_next_is_made(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    make = Subject.make

    def recording(*args: Any) -> Subject:
        assert all(ref() is None for ref in made)
        subject = make(*args)
        made.append(weakref.ref(subject.model))
        return subject

    monkeypatch.setattr(Subject, "make", recording)
    shapes = f"bench.shapes.{QWEN3}={json.dumps([SHAPE, SHAPE])}"
    keys = "bench.optimizer=adamw", "bench.activation_checkpointing=true", 'bench.cases=["mxep mxfp8, linear"]'
    assert all("ms" in row for _, row in measure(make_bench(shapes, *keys)))
    assert len(made) == 2


def test_adamw_holds_moments_of_all_parameters_and_changes_none(make_subject) -> None:
    plain, subject = make_subject(), make_subject("bench.optimizer=adamw")
    before = [parameter.detach().clone() for parameter in subject.model.parameters()]
    held = subject.held
    loss, gradient = subject.step(BASELINE)()
    assert plain.held == sum(parameter.nbytes for parameter in before)
    assert 0 <= held - 3 * plain.held <= 4 * len(before), "bf16 moments, and a number of steps in fp32"
    assert subject.held == held, "a case's first step adds nothing"
    states = subject.optimizer.state
    assert states.keys() == set(subject.model.parameters())
    assert all(int(state["step"]) == 2 for state in states.values())
    assert any(state["exp_avg"].any() for state in states.values()), "it took the gradients"
    assert all(map(torch.equal, subject.model.parameters(), before))
    for one, other in zip(plain.step(BASELINE)(), (loss, gradient)):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["null", "adamw"])
def test_no_gradient_is_left_behind_a_step(make_subject, optimizer: str) -> None:
    subject = make_subject(f"bench.optimizer={optimizer}")
    _, gradient = subject.step("mxep bf16")()
    assert gradient.isfinite().all()
    assert gradient.any()
    assert all(parameter.grad is None for parameter in subject.model.parameters())


@pytest.mark.parametrize("model", [QWEN3, DEEPSEEK])
def test_checkpointing_computes_each_layer_twice_and_changes_no_bit(make_subject, model: str) -> None:
    found = []
    for wanted in ("false", "true"):
        subject, calls = make_subject(f"bench.activation_checkpointing={wanted}", model=model), []
        for layer in subject.model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found.append((*subject.step("mxep mxfp8")(), len(calls)))
    (loss, gradient, once), (same_loss, same_gradient, twice) = found
    assert (once, twice) == (2, 4)
    torch.testing.assert_close((loss, gradient), (same_loss, same_gradient), rtol=0, atol=0)


def test_a_model_named_deepseek_has_shared_experts_and_a_dense_first_layer(make_subject) -> None:
    first, second = make_subject(model=DEEPSEEK).model.model.layers
    assert not hasattr(first.mlp, "experts")
    assert second.mlp.shared_experts.gate_proj.weight.shape == (2 * 32, 64)
    assert second.mlp.experts.down_proj.shape == (8, 64, 32)
    assert not second.mlp.gate.e_score_correction_bias.any()
    assert all(hasattr(layer.mlp.gate, "top_k") for layer in make_subject().model.model.layers)
