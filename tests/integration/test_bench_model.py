"""bench=model: every case takes the same training steps, and its figures follow from its times."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import model as bench_model
from benchmarks.model import CASES, MODELS, NONE, QWEN3, USUAL, Shape, Subject, config_of, measure
from benchmarks.script import Bench
from mxep.integration.flops import flops_per_token
from mxep.integration.launch import Rank
from mxep.integration.report import Report
from ranks import Context, distributed

CPU = torch.device("cpu")
ON_CPU = ("task=bench", "bench=model", "bench.device=cpu")
SHAPE = Shape(1, 2, 2, 32)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rows_of(make_config) -> Any:
    """rows_of(*overrides) -> rows by section, measured in this process."""

    def rows(*overrides: str) -> dict[str, list[dict[str, Any]]]:
        config = make_config(*ON_CPU, *overrides).bench
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in bench_model.SECTIONS}
        for section, row in measure(Bench(Rank(0, 1, CPU), config, 0, Report("", {}, {}))):
            found[section].append(row)
        return found

    return rows


def test_cases_take_the_same_steps_and_are_counted(rows_of) -> None:
    shapes = "bench.shapes.qwen3_30b=[[1,1,2,32],[2,1,2,32]]"
    found = rows_of(shapes, "bench.changes=[]", 'bench.cases=[baseline,"mxep mxfp8"]')
    for layers in (1, 2):
        rows = [row for row in found["model"] if row["layers"] == layers]
        flops = sum(flops_per_token(config_of("qwen3_30b", Shape(layers, 1, 2, 32), CPU), 32).values())
        assert [row["what"] for row in rows] == ["baseline", "mxep mxfp8"]
        for row in rows:
            assert row["losses"] == pytest.approx(rows[0]["losses"], rel=5e-3)
            assert row["losses"][1] < row["losses"][0] + 1e-2
            assert row["tokens/s a GPU"] == pytest.approx(64 / row["ms"] * 1e3)
            assert row["TFLOP/s"] * 1e12 == pytest.approx(flops * row["tokens/s a GPU"])
            assert row["x baseline"] == pytest.approx(rows[0]["ms"] / row["ms"])
            assert row["most of mean by layer"] == [1.0] * layers
    assert [row["layers"] for row in found["shares"]] == [1] * 2 + [2] * 2
    assert all(row.keys() >= {*bench_model.SHARES, bench_model.REST, bench_model.IDLE} for row in found["shares"])


@pytest.mark.parametrize("model", [name for name in MODELS if name != "qwen3_30b"])
def test_other_models_run_what_they_can(rows_of, model: str) -> None:
    shape = f"bench.shapes.{model}=[[2,2,2,32]]"
    found = rows_of(f"bench.models=[{model}]", shape, "bench.changes=[]", "bench.sections=[model]")
    assert not found["shares"]
    rows = found["model"]
    assert [row["what"] for row in rows] == list(USUAL)
    if model == "gpt_oss_20b":
        assert "no biases" in rows.pop(0)["note"]
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=5e-3), row["what"]


def test_forced_routing_gives_each_expert_as_many_tokens() -> None:
    gate = Subject("qwen3_30b", SHAPE, NONE, ("forced",), CPU).model.model.layers[0].mlp.gate
    logits, weights, ids = gate(torch.randn(1, 64, 64, dtype=torch.bfloat16))
    assert ids.flatten().bincount(minlength=8).tolist() == [16] * 8
    chosen = logits.float().softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, (chosen / chosen.sum(-1, keepdim=True)).bfloat16())


def test_what_a_model_does_not_have_is_a_note_and_its_next_case_runs(rows_of) -> None:
    given = "bench.models=[deepseek_v3_16b]", "bench.changes=[forced]", "bench.cases=[none]", "bench.sections=[model]"
    (row,) = rows_of(*given)["model"]
    assert "forced: wants Qwen3's router, got deepseek_v3's" in row["note"]
    given = 'bench.cases=["mxep bf16, linears"]', "bench.changes=[]", "bench.sections=[model]"
    assert "linears: wants bench.changes=[optimize]" in rows_of(*given)["model"][0]["note"]


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("experts GEMM", ("grouped_mm_kernel", "mxep::layer_forward")),
        ("experts GEMM", ("void cutlass::device_kernel<cutlass::gemm::GroupProblemShape>", "aten::_grouped_mm")),
        ("experts other", ("swiglu_kernel",)),
        ("communication", ("ncclDevKernel_AllGather",)),
        ("communication", ("dispatch_kernel",)),
        ("attention", ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop",)),
        ("linears", ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "aten::mm", "CompiledFunctionBackward")),
        ("head and loss", ("nvjet_tst_128x256", "aten::mm", "_LinearCrossEntropy")),
        ("optimizer", ("elementwise_kernel", "aten::add_", "torch::autograd::AccumulateGrad")),
        ("rest", ("triton_red_fused_mul_3", "CompiledFunction")),
    ],
)
def test_a_kernels_part_is_told_by_names(part: str, names: tuple[str, ...]) -> None:
    assert bench_model.part_of(*names) == part


def test_the_sizes_are_those_of_the_models_it_names() -> None:
    cuda = torch.device("cuda")
    per_token = {
        name: sum(flops_per_token(config_of(name, Shape(sizes["num_hidden_layers"], 1, 1, 4096), cuda), 4096).values())
        for name, (_, sizes) in MODELS.items()
    }
    assert {name: round(flops / 1e9, 1) for name, flops in per_token.items()} == {
        "qwen3_30b": 23.0,  # NVIDIA's count
        "deepseek_v3_16b": 17.2,
        "gpt_oss_20b": 22.9,
    }
    assert QWEN3["num_hidden_layers"] == 48


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_two_ranks_with_fsdp2_take_steps_of_the_same_losses(ctx: Context) -> None:
    losses = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # a compiler has no part
        for case, changes in (
            ("baseline", ()),
            ("baseline", ("optimize",)),
            ("mxep mxfp8, linears", ("optimize",)),
        ):
            subject = Subject("qwen3_30b", SHAPE, case, changes, CPU)
            losses[case, changes] = [float(subject.step()) for _ in range(2)]
            assert len(subject.most_of_mean()) == 1
            assert ("compile" in subject.changed) == (case.startswith("mxep"))
            subject.close()
    for each in losses.values():
        assert each == pytest.approx(losses["baseline", ()], rel=1e-2)


@pytest.mark.slow
def test_the_command_runs_it_and_keeps_its_rows(mxep, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = "bench.changes=[]", "bench.cases=[none]", "parallel.ranks=2", f"bench.out={out}", "parallel.timeout=300"
    finished = mxep(*ON_CPU, *given)
    assert finished.code == 0, finished.out + finished.err
    sections = json.loads(out.read_text())["sections"]
    assert [row["what"] for row in sections["model"]] == [NONE]
    assert sections["model"][0]["ranks"] == 2
    assert set(CASES) >= set(USUAL)
