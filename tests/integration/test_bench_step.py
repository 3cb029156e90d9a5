"""The benchmark of a whole training step: every kind takes the same steps, on tiny sizes, without hydra."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import step
from ranks import Context, distributed

TINY = ("--sizes", "tiny", "--layers", "1", "--micro-batches", "2", "--tokens", "64", "--length", "32")
QUICK = ("--seconds", "0.01")
FP32 = ("--moments", "fp32")
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("one_thread")


def test_kinds_take_the_same_steps_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, kinds = tmp_path / "step.json", ("baseline", "mxep_bf16", "mxep_mxfp8")
    rows = step.main([*TINY, *QUICK, "--layers", "1", "2", "--kinds", *kinds, "--profile", "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == rows
    assert [(row["layers"], row["kind"]) for row in rows] == [(depth, kind) for depth in (1, 2) for kind in kinds]
    for row in rows:
        assert row["losses"] == pytest.approx(rows[row["layers"] * 3 - 3]["losses"], rel=5e-3)
        assert row["losses"][1] < row["losses"][0] + 1e-2
        assert row["tokens/s a GPU"] == pytest.approx(128 / row["ms"] * 1e3, rel=1e-3)
        assert row["count"] == f"Megatron's count, {row['layers']} layers, vocabulary 512, sequence 32"
        assert row["shares"].keys() == {*step.SHARES, step.REST, "idle", "other than communication, ms by rank"}
        assert row["most of mean"] == [1.0] * row["layers"]
    said = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["kind"] for line in said if line.startswith("{")] == list(kinds) * 2
    assert sum("t(48) = " in line for line in said) == len(kinds)


def test_forced_routing_gives_each_expert_as_many_tokens() -> None:
    gate = step.ForcedRouter(step.Qwen3MoeConfig(**step.SIZES["tiny"]))
    torch.nn.init.normal_(gate.weight)
    logits, weights, ids = gate(torch.randn(1, 64, 64))
    assert ids.flatten().bincount(minlength=8).tolist() == [16] * 8
    chosen = logits.float().softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))


@pytest.mark.parametrize("more", [FP32, ("--after-step",)])
def test_moments_in_fp32_and_weights_quantized_after_a_step_are_choices(more: tuple[str, ...]) -> None:
    plain, changed = (step.main([*TINY, *QUICK, "--kinds", "mxep_mxfp8", *how])[0] for how in ((), more))
    assert changed["losses"] == pytest.approx(plain["losses"], rel=1e-3)


def test_fp32_moments_take_adamws_step() -> None:
    torch.manual_seed(0)
    ours, exact = (torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    mine = step.AdamWFP32([ours], lr=1e-2, weight_decay=0.1)
    torchs = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(3):
        grad = torch.randn(64)
        for parameter, optimizer in ((ours, mine), (exact, torchs)):
            parameter.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(ours, exact)


def test_layers_are_extrapolated_from_two_numbers_of_them() -> None:
    rows = [
        {"kind": "a", "layers": 8, "ms": 100.0},
        {"kind": "a", "layers": 16, "ms": 180.0},
        {"kind": "b", "layers": 8},
    ]
    (line,) = step.extrapolated(rows, 8192, 4096, "qwen3")
    assert line == "a: t(48) = 500.0 ms, 376.9 TFLOP/s, 16384 tokens/s a GPU, from 8 and 16 layers"


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
        ("optimizer, clip, accumulation", ("elementwise_kernel", "aten::add_", "torch::autograd::AccumulateGrad")),
        ("norms, element-wise", ("triton_red_fused_mul_3", "CompiledFunction")),
    ],
)
def test_a_kernels_part_is_told_by_names(part: str, names: tuple[str, ...]) -> None:
    assert step.part_of(*names) == part


def test_a_kind_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.arguments(["--kinds", "mxep_mxfp8 + linears"])
    assert "expected as one of baseline, baseline + optimize" in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_a_script_that_runs_an_optimized_kind_without_hydra(tmp_path: Path) -> None:
    """An optimized baseline: the next test."""
    given = [*TINY, *QUICK, "--kinds", "mxep_mxfp8 + optimize + linears"]
    code = "import functools, runpy, sys, torch; sys.modules |= {'hydra': None, 'omegaconf': None}; "
    code += "torch.compile = functools.partial(torch.compile, backend='aot_eager'); "  # inductor has no part in this
    code += f"sys.argv[1:] = {given!r}; runpy.run_path('integration/benchmarks/step.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "ms" in row
    assert row["optimize"]["compile"]
    assert row["optimize"]["linears"]


@pytest.mark.slow
@distributed(2, device="cpu", timeout=280)
def test_two_ranks_with_fsdp2_take_steps_of_the_same_losses(ctx: Context, tmp_path: Path) -> None:
    kinds = "baseline", "mxep_mxfp8", "baseline + optimize", "mxep_mxfp8 + optimize"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # as above
        rows = step.main([*TINY, *QUICK, "--kinds", *kinds])
    assert [row["kind"] for row in rows] == list(kinds)
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=5e-3)
