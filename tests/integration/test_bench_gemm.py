"""bench=gemm: compares equal things, counts what it says, and reports what could not be measured."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import gemm, script, timer
from benchmarks.gemm import PRODUCTS, Problem
from benchmarks.timer import Alternative, Timer
from mxep.gemm import BACKENDS, Backend
from mxep.integration.metrics import snr

CPU = torch.device("cpu")
SHAPE = 96, 64, 128, 2
ON_CPU = ("task=bench", "bench=gemm", "bench.device=cpu", "bench.backend=reference")
SHAPES = "bench.shapes={layers:[[96,64,128,2]]}"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU")
needs_row_scales = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="torch 2.11's _scaled_mm takes one scale a tensor on a CPU, not one a row",
)


@pytest.fixture(autouse=True)
def _no_torchao(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed


def problem(shape: tuple[int, ...] = SHAPE) -> Problem:
    return Problem.gaussian(shape, torch.Generator().manual_seed(0))


def exact(p: Problem) -> dict[str, Tensor]:
    a, w, dy = p.a.double(), p.w.double(), p.dy.double()
    rows = [range(start, end) for start, end in itertools.pairwise([0, *p.offs.tolist()])]
    return {
        "forward": torch.cat([a[r] @ w[g].mT for g, r in enumerate(rows)]),
        "dgrad": torch.cat([dy[r] @ w[g] for g, r in enumerate(rows)]),
        "wgrad": torch.stack([dy[r].mT @ a[r] for r in rows]),
    }


@pytest.mark.parametrize(("rows", "groups"), [(4096, 32), (65536, 7), (32, 3)])
def test_groups_are_multiples_of_32_that_sum_up_and_differ_by_32_at_most(rows: int, groups: int):
    offs = problem((rows, 32, 32, groups)).offs
    sizes = offs.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert (offs[-1], len(offs)) == (rows, groups)
    assert not (sizes % 32).any()
    assert sizes.max() - sizes.min() <= 32


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("backend", ["reference", "hopper"])
def test_alternatives_compute_the_same_product(product: str, backend: str):
    p = problem()
    wanted = exact(p)[product]
    bf16 = gemm.bf16_product(product, p)()
    assert snr(wanted, bf16) > 50  # a result rounded to 9 bits: 55 dB
    mxep = gemm.mxep_product(product, p, backend=BACKENDS[backend], name="mxfp8")()
    assert snr(wanted, mxep) > 27  # two operands in E4M3
    assert mxep.dtype == bf16.dtype == torch.bfloat16


@pytest.mark.parametrize("product", PRODUCTS)
def test_row_scaled_peers_get_the_same_product_in_the_layouts_that_torch_wants(product: str):
    p = problem((64, 64, 96, 1))
    left, right, left_scale, right_scale = gemm._row_scaled(product, p)
    assert left.stride(-1) == right.stride(-2) == 1
    values = left.double() * left_scale[:, None], right.double() * right_scale.unsqueeze(-2)
    assert snr(exact(p)[product], (values[0] @ values[1]).reshape(exact(p)[product].shape)) > 27


@needs_row_scales
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_dense_row_scaled_product_is_the_same_product(product: str):
    p = problem((64, 64, 96, 1))
    dense = gemm.dense_product(product, p, rows=True)()
    assert snr(exact(p)[product].reshape(dense.shape), dense) > 27


def test_steps_give_both_gradients_pre_quantized_or_not():
    p = problem()
    wanted = exact(p)
    for name, make in gemm.steps(BACKENDS["reference"]).items():
        if name != "torchao fp8 row":
            da, dw = make(p)()
            assert snr(wanted["dgrad"], da) > 24, name
            assert snr(wanted["wgrad"], dw) > 24, name


def test_a_pre_quantized_step_quantizes_no_weight(monkeypatch: pytest.MonkeyPatch):
    step = gemm.prequantized_step(BACKENDS["reference"], problem())
    wanted = step()
    for name in ("quantize_weight_rowwise", "quantize_weight_colwise"):
        monkeypatch.setattr(Backend, name, None)
    assert all(map(torch.equal, step(), wanted))


def test_a_round_robin_changes_neighbours_and_keeps_what_fails_apart():
    order: list[str] = []

    def alternative(name: str) -> Alternative:
        return Alternative(lambda: [lambda: order.append(name)])

    def broken() -> list[timer.Call]:
        raise KeyError("broken")

    def missing() -> list[timer.Call]:
        raise ImportError("not installed")

    alternatives = {"a": alternative("a"), "x": Alternative(broken), "b": alternative("b"), "y": Alternative(missing)}
    found = Timer(CPU, seconds=0.1, rounds=4).compare(alternatives)
    assert order[:4] == ["a", "a", "b", "b"]  # one that compiles, one whose result counts
    rounds = ["".join(order[i : i + 2]) for i in range(4, len(order), 2)]
    assert len(rounds) == 4
    assert set(rounds) == {"ab", "ba"}
    assert list(found) == ["a", "x", "b", "y"]
    assert (found["x"], found["y"]) == ({"error": "KeyError: 'broken'"}, {"note": "not installed"})
    assert list(found["a"]) == ["us", "spread"]


def test_what_fails_late_has_no_more_turns_and_what_is_shared_ends_all():
    calls: list[int] = []

    def fails() -> None:
        calls.append(0)
        if len(calls) > 3:
            raise ValueError("worn out")

    alternatives = {"fails": Alternative(lambda: [fails]), "works": Alternative(lambda: [lambda: None])}
    found = Timer(CPU, seconds=0.1, rounds=4).compare(alternatives)
    assert (found["fails"], list(found["works"])) == ({"error": "ValueError: worn out"}, ["us", "spread"])
    assert len(calls) == 4
    calls.clear()
    with pytest.raises(timer.FailedOnRanks, match="worn out"):
        Timer(CPU, seconds=0.1, rounds=4, shared=True).compare(alternatives)


def test_the_result_of_a_call_is_inspected_before_it_is_timed():
    total, seen = torch.zeros(()), []
    accumulating = Alternative(lambda: [lambda: total.add_(1)], inspect=lambda x: seen.append(float(x)))
    Timer(CPU, seconds=0.1, rounds=2).compare({"accumulating": accumulating})
    assert seen == [2.0]  # the first one compiles
    assert total == 4  # two rounds more


@needs_row_scales
def test_all_sections_are_measured_on_a_cpu_from_end_to_end(mxep, tmp_path: Path):
    out = tmp_path / "out.json"
    finished = mxep(*ON_CPU, SHAPES, f"bench.out={out}", "bench.commit=abc1234")
    assert finished.code == 0, finished.out + finished.err
    results = json.loads(out.read_text())
    assert {"what", "device", "versions", "date", "command", "seconds", "ceilings"} <= results.keys()
    assert results["commit"] == "abc1234"
    assert list(results["sections"]) == list(gemm.SECTIONS)
    for name, rows in results["sections"].items():
        section = gemm.SECTIONS[name]
        assert rows
        assert all(set(section.labels) <= row.keys() and "error" not in row for row in rows), name
        assert all("note" in row or row.keys() & section.figures.keys() for row in rows), name
    steps = {row["what"]: row for row in results["sections"]["steps"]}
    assert steps["torchao fp8 row"]["note"].startswith("not installed: ")
    assert "us" not in steps["torchao fp8 row"]
    assert steps["bf16"]["x bf16"] == 1
    mxep = steps["mxep mxfp8"]
    assert mxep["x bf16"] == pytest.approx(steps["bf16"]["us"] / mxep["us"], rel=1e-3)
    assert mxep["TF"] == pytest.approx(6 * 96 * 64 * 128 / mxep["us"] / 1e6, rel=1e-3)
    assert "deep_gemm" in next(row["note"] for row in results["sections"]["products"] if row["what"] == "DeepGEMM")
    products = {(row["product"], row["what"]): row for row in results["sections"]["products"]}
    assert max(row.get("of dense", 0) for (_, what), row in products.items() if what.startswith("dense")) == 1
    assert "mxep mxfp8, pre-quantized" in finished.out


def test_a_shape_that_fails_leaves_the_others(make_config, monkeypatch: pytest.MonkeyPatch):
    make = Problem.gaussian

    def fail(shape: tuple[int, ...], generator: torch.Generator) -> Problem:
        if shape[0] == 64:
            raise RuntimeError("the device is gone\nand more")
        return make(shape, generator)

    monkeypatch.setattr(Problem, "gaussian", fail)
    shapes = "bench.shapes.layers=[[64,32,64,2],[96,64,128,2]]"
    results = script.run_bench(None, make_config(*ON_CPU, shapes, "bench.sections=[steps]"), quiet=True)
    assert results.failed == 1
    ended, *others = results.sections["steps"].rows
    assert (ended["shape"], ended["error"]) == ([64, 32, 64, 2], "ended early: RuntimeError: the device is gone")
    assert {"bf16", "mxep mxfp8"} <= {row["what"] for row in others if "us" in row}


def test_ratios_are_to_each_of_the_others_whichever_came_first():
    rows = {"bf16": {"us": 10.0}, "torchao": {"us": 40.0}, "mxep": {"note": "no"}}
    bf16, torchao, mxep = (gemm.beside(row, {"x bf16": rows["bf16"], "x ao": rows["torchao"]}) for row in rows.values())
    assert (bf16["x bf16"], bf16["x ao"], torchao["x bf16"], torchao["x ao"]) == (1, 4, 0.25, 1)
    assert mxep == {"note": "no"}


@needs_cuda
def test_on_a_gpu_everything_has_figures(mxep, tmp_path: Path):
    shapes = "{layers:[[2048,512,1024,4]]}"
    backend = "hopper" if BACKENDS["hopper"].unsupported_reason(torch.device("cuda")) is None else "dequant"
    finished = mxep("task=bench", "bench=gemm", f"bench.backend={backend}", f"bench.shapes={shapes}")
    results = json.loads((tmp_path / "run" / "bench.json").read_text())
    errors = [row for rows in results["sections"].values() for row in rows if "error" in row]
    assert backend != "hopper" or not errors
    assert finished.code == bool(errors)
    for row in results["sections"]["steps"]:
        assert row["what"] == "torchao fp8 row" or 0 < row["us"] < 1e5
