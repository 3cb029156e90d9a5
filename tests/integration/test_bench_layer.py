"""bench=layer: a baseline that is right, counts by hand, and rows that say what was measured or why not."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._subclasses import FakeTensorMode

from benchmarks import baseline, layer, layer_cases, script
from benchmarks.baseline import BaselineLayer, Groups
from benchmarks.comms import Traffic
from benchmarks.layer import breakdown
from benchmarks.layer_cases import BASELINE, MX, Case, Problem, Shape
from benchmarks.script import all_gather_tensor
from mxep.integration import metrics as snr_module
from mxep.integration.launch import Rank
from mxep.integration.metrics import snr
from mxep.integration.report import Report
from mxep.integration.schema import BenchConfig
from mxep.integration.verify import Problem as Dense
from mxep.integration.verify import Results, moe_layer
from ranks import run_again

TINY = Shape(24, 64, 32, 8, 2)
FEW = TINY._replace(experts=4)  # experts are operators, which the profiler takes long to list
TINY_SHAPE = "bench.shapes.tiny=[[24,64,32,4,2]]"
HOST_SHAPE = "bench.shapes.host=[[24,64,32,2,2]]"
ON_CPU = ("task=bench", "bench=layer", "bench.device=cpu", "parallel.timeout=300", f"+{TINY_SHAPE}", HOST_SHAPE)
TIMED, COUNTED = ("layer", "memory", "skew"), ("stages", "host")
CASES = (
    *("baseline fp8", "baseline mxfp8", MX, f"{MX}, kept", f"{MX}, gate_up_fp8"),
    "bf16/all_to_all",
)


def test_everything_is_measured_on_two_cpu_ranks_from_end_to_end(mxep, tmp_path: Path):
    """Stages and what calls cost the host of few cases: torch's profiler takes a second a case to list operators."""
    sections = {}
    for names, cases in ((TIMED, CASES), (COUNTED, ("baseline fp8", MX))):
        out = (
            f"bench.out={tmp_path / 'out.json'}",
            f"hydra.run.dir={tmp_path / names[0]}",
            "bench.commit=abc1234",
            f"bench.sections=[{','.join(names)}]",
        )
        wanted = f"bench.cases=[{','.join(json.dumps(case) for case in cases)}]"
        finished = mxep(*ON_CPU, "parallel.ranks=2", "bench.models=[tiny,host]", wanted, *out)
        assert finished.code == 0, finished.out + finished.err
        results = json.loads((tmp_path / "out.json").read_text())
        assert results["what"] == "mxep layer, 2 ranks"
        assert max(map(len, finished.out.partition("results: ")[0].splitlines())) <= 120
        assert set(results["ceilings"]) == {"dense bf16 TF", "dense fp8 TF"}
        sections |= {name: results["sections"][name] for name in names}
    for name in ("layer", "stages", "memory", "skew"):
        for row in sections[name]:
            assert (row["model"], row["shape"], row["ranks"], row["skew"]) == ("tiny", list(FEW), 2, name == "skew")
    for name in ("layer", "skew"):
        rows = {row["what"]: row for row in sections[name]}
        assert list(rows) == [BASELINE, *CASES]
        assert rows.pop("baseline fp8")["note"].startswith(("not installed", "does not import", "needs CUDA"))
        for what, row in rows.items():
            assert row["TF"] == pytest.approx(18 * 24 * 2 * 64 * 32 / row["ms"] / 1e9, rel=1e-3)
            assert row["x bf16"] == pytest.approx(rows[BASELINE]["ms"] / row["ms"], rel=1e-3)
            assert row["x fwd"] == pytest.approx(rows[BASELINE]["fwd ms"] / row["fwd ms"], rel=1e-3)
            if what != BASELINE:
                assert row["dB"] == min(row["snr dB"].values()) >= Case(what).least_snr
                assert row["snr dB"].keys() == {field.name for field in dataclasses.fields(Results)}
                assert what.startswith("baseline") or row["capacity"] >= 1.25
    assert [row["what"] for row in sections["memory"]] == [BASELINE, *CASES]
    assert all("note" in row for row in sections["memory"])
    host = {row["what"]: row for row in sections["host"]}
    assert list(host) == [BASELINE, "baseline fp8", MX]
    assert host.pop("baseline fp8").keys() >= {"note"}
    assert all(min(row["fwd ms"], row["ms"]) > 0 == row["launches"] for row in host.values())
    for what in (MX, BASELINE):
        us = {row["stage"]: row["us"] for row in sections["stages"] if row["what"] == what}
        totals = {total: us.pop(total) for total in layer.TOTALS}
        assert sum(us.values()) == pytest.approx(totals["sum"], rel=1e-3)
        assert totals["busy"] <= totals["whole"] * 1.001


def compare_with_dense(rank: Rank) -> list[float]:
    """dB of the standard layer's output and gradients in fp32 against the dense layer; expert 5 gets nothing."""
    p = Problem(rank, TINY, 0.0, 0)
    p.ids = torch.where(p.ids == 5, (p.ids.sum(1, keepdim=True) - p.ids + 1) % 5, p.ids)
    leaves = [each.float().detach().requires_grad_() for each in (p.x, p.weights, p.w13, p.w2)]
    out = BaselineLayer(*leaves[2:], group=dist.group.WORLD)(leaves[0], p.ids, leaves[1])
    got = Results(out.detach(), *torch.autograd.grad(out, leaves, p.d_out.float()))
    operands = p.x, p.d_out, p.ids, p.weights, p.w13, p.w2
    x, d_out, ids, weights, w13, w2 = map(all_gather_tensor, operands)
    floats = [each.flatten(0, 1).float() for each in (x, d_out, weights, w13, w2)]
    dense = moe_layer(Dense(floats[0], floats[1], ids.flatten(0, 1), *floats[2:]))
    tokens = slice(rank.rank * len(p.x), (rank.rank + 1) * len(p.x))
    experts = slice(rank.rank * len(p.w2), (rank.rank + 1) * len(p.w2))
    wanted = [dense.out[tokens], dense.dx[tokens], dense.d_weights[tokens]]
    wanted += [dense.d_gate_up_proj[experts], dense.d_down_proj[experts]]
    return [snr(one, other) for one, other in zip(wanted, vars(got).values())]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_standard_layer_is_the_dense_layer(ranks: int):
    # fp32 rounds at 2^-24: 150 dB a sum of one; sums of 64 terms in another order lose up to 10 log10(64) = 18 dB.
    for found in run_again(compare_with_dense, world_size=ranks, device="cpu", timeout=60):
        assert min(found) > 120, found


def test_a_function_of_the_baseline_raises_at_dynamos_limit_instead_of_running_eagerly(monkeypatch):
    """As on a GPU, but for Inductor, which wants one: a fake tensor is there."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, *, options, **how: compile_(fn, backend="eager", **how))

    @baseline.compiled
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2), FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16):
            twice(torch.empty(8, 16, dtype=dtype, device="cuda"))
        with pytest.raises(FailOnRecompileLimitHit):
            twice(torch.empty(8, 16, dtype=torch.float64, device="cuda"))


def test_groups_lie_as_the_docstring_says():
    groups = Groups.of(torch.tensor([[1, 2], [2, 0]]), 5, 8, [], [], alignment=4)
    assert groups.index.tolist() == [0, 3, 4, -1, 1, 2, -1, -1]
    assert groups.position.tolist() == [0, 4, 5, 1, 2]
    assert groups.offs.tolist() == [4, 8]


TRAFFIC = Traffic(tokens=[[3, 3], [2, 4]], pairs=[[3, 5], [2, 6]])


def test_flops_bytes_and_floor_are_those_counted_by_hand():
    # Rank 0 sends 3 of 4 tokens to rank 1, 5 pairs; rank 1 sends 2 tokens, 2 pairs. Rank 1 computes 5 + 6 rows.
    p = Shape(4, 32, 64, 4, 2), 2, TRAFFIC
    mx, baseline, bf16 = Case(MX), Case(BASELINE), Case("bf16/all_to_all")
    assert layer_cases.flop(p[0], 8) == 3 * 2 * 8 * 3 * 32 * 64
    assert layer_cases.wire_bytes(p[0], TRAFFIC, "mxfp8") == (2 * 3 * 33, 2 * 3 * 64)
    assert layer_cases.work(*p, baseline)["NCCL"] == ("wire bytes", 2 * 5 * 64 + 2 * 5 * 64)
    weights = 2 * 3 * 64 * 32
    ceilings = {"copy TB/s": 4.0, "dense fp8 TF": 1000.0, "dense bf16 TF": 500.0}
    wanted = 18 * 11 * 32 * 64 / 1e15 + 582 / 450e9 + (1024 + 4 * weights) / 4e12
    assert layer_cases.floor_ms(*p, mx, ceilings) == pytest.approx(wanted * 1e3)
    assert layer_cases.floor_ms(*p, bf16, ceilings) > layer_cases.floor_ms(*p, mx, ceilings)
    assert layer_cases.floor_ms(*p, mx, {"dense fp8 TF": 1.0}) is None
    kept = layer_cases.work(*p, Case(f"{MX}, kept"))
    assert kept["quantize weights"][1] * 4 == layer_cases.work(*p, mx)["quantize weights"][1] == 6 * weights


def test_stages_are_summed_by_name_and_overlap_shows():
    events = [
        (100, 110, "dispatch_kernel"),
        (105, 125, "void cutlass::device_kernel<gemm>"),  # overlaps by 5
        (130, 140, "grouped_mm_kernel"),  # after 5 of nothing
        (140, 144, "what_is_this"),
    ]
    found = breakdown(reversed(events), steps=2)
    us = {"dispatch": 5, "GEMMs": 15, "other": 2, "sum": 22, "busy": 19.5, "whole": 22}
    assert found == (us, ["what_is_this"])
    p = SimpleNamespace(shape=Shape(4, 32, 64, 4, 2), ranks=2, traffic=TRAFFIC)
    rows = {row["stage"]: row for row in layer.stage_rows(p, Case(MX), [found, found], {"dense fp8 TF": 1e-3})}
    assert list(rows) == ["GEMMs", "dispatch", "other", *layer.TOTALS]
    assert rows["GEMMs"]["share"] == pytest.approx(18 * 11 * 32 * 64 / 1e9 / 15e-6)
    assert rows["dispatch"]["left us"] == pytest.approx(5 - 2 * 3 * 33 / 450e3)
    assert rows["other"]["note"] == "what_is_this"
    with pytest.raises(ValueError, match="saw no kernels"):
        breakdown([])


@pytest.mark.parametrize(
    ("kernel", "stage"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("triton_poi_fused_mul_silu_split_0", "SwiGLU"),
        ("swiglu_kernel", "SwiGLU"),
        ("quantize_rows_with_amax_kernel", "quantize weights"),
        ("quantize_blocks_kernel", "quantize"),
        ("shift_transpose_kernel", "fold for wgrad"),
        ("fold_kernel", "gather + fold"),
        ("combine_kernel", "combine"),
        ("triton_poi_fused_index_where_0", "permute + pointwise"),
        ("void at::native::index_elementwise_kernel<128, 4>", "permute + pointwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("_triton_fp8_rowwise_2d_scale_and_cast", "quantize"),
    ],
)
def test_a_kernel_has_the_stage_of_its_name(kernel: str, stage: str):
    assert layer.stage_of(kernel) == stage


def test_signal_to_noise_is_that_of_the_reference_and_finite(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snr_module, "CHUNK", 10)
    one = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    other = one + 0.01 * torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
    assert snr(one, other) == pytest.approx(20 * math.log10(one.norm() / (one - other).norm()))
    assert snr(one, one) == snr_module.LIMIT
    assert snr(one, torch.full_like(one, math.nan)) == -snr_module.LIMIT
    with pytest.raises(ValueError, match=r"got shape \(9, 7\), wanted \(7, 9\)"):
        snr(one, one.T)


@pytest.mark.parametrize(
    ("name", "in_graph"),
    [(MX, True), ("mxfp8/hierarchical", True), ("bf16/all_to_all", False), (BASELINE, False)],
)
def test_layers_that_read_no_size_on_the_host_are_timed_in_a_graph(name: str, in_graph: bool) -> None:
    assert Case(name).in_graph is in_graph


def spoil(rank: Rank, config: BenchConfig) -> list[dict[str, object]]:
    """Rows on one rank where a layer forgets a gradient's factor, and where one fails."""
    original = layer_cases.Layer.step

    def step(self: layer_cases.Layer) -> Results:
        if self.micro_batches > 1:
            raise RuntimeError("no step")
        found = original(self)
        return dataclasses.replace(found, dx=2 * found.dx) if self.in_graph else found

    layer_cases.Layer.step = step
    sections = {"layer": layer.SECTIONS["layer"].empty()}
    return [row for _, row in layer.measure(script.Bench(rank, config, 0, Report("", {}, sections)))]


def test_a_step_is_charged_for_what_it_adds(monkeypatch: pytest.MonkeyPatch):
    """2 GiB of tensors and 1 outside before; a step adds 3 and 0.5."""
    gib, called = layer.GIB, []
    outside = iter([gib, 3 * gib // 2])
    monkeypatch.setattr(layer, "_outside", lambda: next(outside))
    monkeypatch.setattr(layer, "free_memory", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * gib)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5 * gib)
    forward, device = functools.partial(torch.empty, 0), torch.device("cuda")
    row = layer.memory_of(forward, lambda: called.append("step"), device)
    assert row == {"peak GiB": 3.5, "outside GiB": 0.5, "kept GiB": 0.0}
    assert called == ["step"] * 4


def test_a_layer_that_is_wrong_or_fails_has_no_figures_but_an_error(make_config):
    config = make_config(*ON_CPU, "bench.models=[tiny]", f'bench.cases=["{MX}","{MX}, kept"]').bench
    (found,) = run_again(spoil, (config,), world_size=1, device="cpu", timeout=60)
    rows = {row["what"]: row for row in found}
    assert rows[BASELINE]["ms"] > 0
    assert "wanted 20 dB at least" in rows[MX]["error"]
    assert rows[MX]["snr dB"]["dx"] < 1 < 20 < rows[MX]["snr dB"]["out"]
    assert rows[f"{MX}, kept"]["error"] == "rank 0: RuntimeError: no step"
    assert "ms" not in rows[MX]
    assert "ms" not in rows[f"{MX}, kept"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures GPUs")
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus_everything_has_figures(mxep, tmp_path: Path, ranks: int):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs wanted")
    shapes = "+bench.shapes.small=[[256,512,256,8,2]]", "bench.models=[small]"
    cases = f'bench.cases=["{MX}","{MX}, kept","bf16/all_to_all"]', "bench.sections=[layer,stages,memory]"
    finished = mxep("task=bench", "bench=layer", f"parallel.ranks={ranks}", *shapes, *cases)
    assert finished.code == 0, finished.out + finished.err
    sections = json.loads((tmp_path / "run" / "bench.json").read_text())["sections"]
    for row in sections["layer"]:
        assert row["ms"] > row["fwd ms"] > 0
    assert all(row["peak GiB"] > row["kept GiB"] > 0 for row in sections["memory"])
    assert {"GEMMs", "SwiGLU", "whole"} <= {row["stage"] for row in sections["stages"]}
