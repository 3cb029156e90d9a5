"""bench=gemm: compares equal things, counts what it says, and reports what could not be measured."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from mxep.gemm import BACKENDS
from mxep.integration import timer
from mxep.integration.bench import gemm, gemm_cases, gemm_numerics, picture, run
from mxep.integration.bench.gemm_cases import PRODUCTS, SKEWS, Problem, group_sizes
from mxep.integration.config import ConfigError
from mxep.integration.snr import snr
from mxep.integration.timer import Alternative, Timer

CPU = torch.device("cpu")
SHAPE = 96, 64, 128, 2
ON_CPU = ("task=bench", "bench=gemm", "bench.device=cpu", "bench.backend=reference")
SHAPES = (
    "bench.shapes={layers:[[96,64,128,2]],skew:[[128,32,64,4]],numerics:[[64,32,64,2]],accumulation:[[32,32,256,1]]}"
)

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
    out, dx, dw = gemm_numerics.products(p, p.a, p.w, p.dy, p.w, p.dy, p.a)
    return {"forward": out, "dgrad": dx, "wgrad": dw}


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize(("rows", "groups"), [(4096, 32), (65536, 7), (32, 3)])
def test_group_sizes_are_multiples_that_sum_up(skew: str, rows: int, groups: int):
    weights = SKEWS[skew](groups)
    sizes = group_sizes(weights, rows)
    assert (sum(sizes), len(sizes)) == (rows, groups)
    assert all(size % 32 == 0 for size in sizes)
    for size, weight in zip(sizes, weights):
        assert abs(size - rows * weight / sum(weights)) <= 32 * groups
        assert size == 0 or weight > 0


def test_zipf_gives_the_first_group_most_and_half_empty_leaves_every_other_one():
    assert group_sizes([1, 1 / 2, 1 / 3], 96) == [64, 32, 0]
    zipf = group_sizes(SKEWS["Zipf(1)"](32), 65536)
    assert zipf == sorted(zipf, reverse=True)
    assert zipf[0] / zipf[31] == pytest.approx(32, rel=0.1)
    assert group_sizes(SKEWS["half empty"](4), 128) == [64, 0, 64, 0]
    assert group_sizes(SKEWS["one has all"](3), 96) == [96, 0, 0]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("backend", ["reference", "hopper"])
def test_alternatives_compute_the_same_product(product: str, backend: str):
    p = problem()
    wanted = exact(p)[product]
    bf16 = gemm_cases.bf16_product(product, p)()
    assert snr(wanted, bf16) > 50  # a result rounded to 9 bits: 55 dB
    mxep = gemm_cases.stages(BACKENDS[backend], p)[product][0]()
    assert snr(wanted, mxep) > 27  # two operands in E4M3
    assert mxep.dtype == bf16.dtype == torch.bfloat16


@pytest.mark.parametrize("product", PRODUCTS)
def test_row_scaled_peers_get_the_same_product_in_the_layouts_that_torch_wants(product: str):
    p = problem((64, 64, 96, 1))
    left, right, left_scale, right_scale = gemm_cases._row_scaled(product, p)
    assert left.stride(-1) == right.stride(-2) == 1
    values = left.double() * left_scale[:, None], right.double() * right_scale.unsqueeze(-2)
    assert snr(exact(p)[product], (values[0] @ values[1]).reshape(exact(p)[product].shape)) > 27


@needs_row_scales
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_dense_row_scaled_product_is_the_same_product(product: str):
    p = problem((64, 64, 96, 1))
    dense = gemm_cases.dense_product(product, True, p)()
    assert snr(exact(p)[product].reshape(dense.shape), dense) > 27


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_least_bytes_of_a_bf16_product_are_those_of_its_tensors(product: str):
    p = problem()
    used = {"forward": (p.a, p.w, p.dy), "dgrad": (p.dy, p.w, p.a), "wgrad": (p.dy, p.a, p.w)}[product]
    assert p.least_bytes(product, 2) == sum(tensor.nbytes for tensor in used)
    assert p.oversized(4).least_bytes(product, 2) == p.least_bytes(product, 2)
    assert (p.oversized(4).flop, p.skewed("one has all").flop) == (p.flop, p.flop)


@pytest.mark.parametrize("backend", ["reference", "hopper"])
def test_stages_are_those_of_the_backend_and_move_the_bytes_of_their_results(backend: str):
    p = problem((96, 64, 128, 1))  # of one group, so that a scale a column is one for the weight
    found = gemm_cases.stages(BACKENDS[backend], p)
    assert ("fold for wgrad" in found) == (backend == "hopper")
    if backend == "hopper":
        qdata = found["quantize a"][0]()
        assert found["quantize a"][1] == p.a.nbytes + qdata.qdata.nbytes + qdata.scale.nbytes
        weight = found["quantize w, both ways"][0]()
        assert found["quantize w, both ways"][1] == p.w.nbytes + weight.nbytes
    assert {name for name, (_, moved) in found.items() if moved == 0} == set(PRODUCTS)


def test_steps_give_both_gradients_pre_quantized_or_not():
    p = problem()
    wanted = exact(p)
    for name, make in gemm_cases.steps(BACKENDS["reference"]).items():
        if name != "torchao fp8 row":
            da, dw = make(p)()
            assert snr(wanted["dgrad"], da) > 24, name
            assert snr(wanted["wgrad"], dw) > 24, name


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
    assert list(found["a"]) == ["us"]
    assert timer.open_meter(CPU) is None


def test_what_fails_late_has_no_more_turns_and_what_is_shared_ends_all():
    calls: list[int] = []

    def fails() -> None:
        calls.append(0)
        if len(calls) > 3:
            raise ValueError("worn out")

    alternatives = {"fails": Alternative(lambda: [fails]), "works": Alternative(lambda: [lambda: None])}
    found = Timer(CPU, seconds=0.1, rounds=4).compare(alternatives)
    assert (found["fails"], list(found["works"])) == ({"error": "ValueError: worn out"}, ["us"])
    assert len(calls) == 4
    calls.clear()
    with pytest.raises(timer.FailedOnRanks, match="worn out"):
        Timer(CPU, seconds=0.1, rounds=4, shared=True).compare(alternatives)


def test_what_is_inspected_is_the_first_result_after_a_reset():
    total, seen = torch.zeros(()), []
    accumulating = Alternative(
        lambda: [lambda: total.add_(1)], reset=total.zero_, inspect=lambda x: seen.append(float(x))
    )
    Timer(CPU, seconds=0.1, rounds=2).compare({"accumulating": accumulating})
    assert seen == [1.0]
    assert total == 3  # two rounds more


def test_folding_is_near_mx_on_ordinary_data_and_far_from_it_where_magnitudes_are_anti_aligned():
    random = torch.Generator().manual_seed(0)
    hopper = BACKENDS["hopper"]
    for row in gemm_numerics.compare("Gaussian", (128, 64, 256, 2), hopper, random):
        assert min(row["MX"], row["mxep"], row["wire"], row["dequant"]) > 27
        assert min(row["mxep / MX"], row["wire / MX"], row["wire / mxep"]) > 60
    out, *_ = gemm_numerics.compare("anti-aligned x30000", (128, 64, 256, 2), hopper, random)
    assert out["MX"] > 27
    assert out["mxep / MX"] < 40


def test_sums_that_come_out_small_show_as_bias(monkeypatch: pytest.MonkeyPatch):
    def shrunk(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return 0.9 * (a.double() @ w.double().mT)

    monkeypatch.setattr(gemm_numerics, "SUMS", {"shrunk": shrunk})
    for data in ("Gaussian", "same sign"):
        (row,) = gemm_numerics.accumulation(data, (32, 32, 64, 1), torch.Generator().manual_seed(0))
        assert (row["bias"], row["dB"]) == (pytest.approx(-0.1), pytest.approx(20))


@needs_row_scales
def test_all_sections_are_measured_on_a_cpu_from_end_to_end(mxep, tmp_path: Path):
    out, picture = tmp_path / "out.json", tmp_path / "roofline.svg"
    finished = mxep(*ON_CPU, SHAPES, f"bench.out={out}", f"bench.picture={picture}", "bench.commit=abc1234")
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
    products = {(row["product"], row["what"]): row for row in results["sections"]["products"]}
    assert max(row.get("of dense", 0) for (_, what), row in products.items() if what.startswith("dense")) == 1
    assert "mxep mxfp8, pre-quantized" in finished.out
    assert "<svg" in picture.read_text()


def test_a_shape_that_fails_leaves_the_others(make_config, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> list[object]:
        raise RuntimeError("the device is gone\nand more")

    monkeypatch.setattr(gemm_numerics, "compare", fail)
    config = make_config(*ON_CPU, SHAPES, "bench.sections=[numerics,accumulation]")
    results = run.run(config.bench, 0, Console(quiet=True))
    assert results.failed == 1
    (ended,) = results.sections["numerics"].rows
    assert (ended["shape"], ended["error"]) == ([64, 32, 64, 2], "ended early: RuntimeError: the device is gone")
    assert len(results.sections["accumulation"].rows) == 2 * len(gemm_numerics.SUMS)


def test_ratios_are_to_each_of_the_others_whichever_came_first():
    rows = {"bf16": {"us": 10.0}, "torchao": {"us": 40.0}, "mxep": {"note": "no"}}
    bf16, torchao, mxep = (gemm.beside(row, {"x bf16": rows["bf16"], "x ao": rows["torchao"]}) for row in rows.values())
    assert (bf16["x bf16"], bf16["x ao"], torchao["x bf16"], torchao["x ao"]) == (1, 4, 0.25, 1)
    assert mxep == {"note": "no"}


def test_a_roofline_is_drawn_from_results_alone(tmp_path: Path):
    row = {"product": "wgrad", "shape": [1, 1, 1, 1], "what": "mxep", "us": 1.0, "flop": 4e12, "bytes": 2e9, "TF": 1200}
    dense = {**row, "what": "dense fp8, row", "TF": 1300.0}
    broken = {"product": "dgrad", "what": "mxep", "error": "RuntimeError"}
    results = {"device": "NVIDIA H200", "ceilings": {"copy TB/s": 4.2}, "sections": {"products": [row, dense, broken]}}
    file = tmp_path / "picture.svg"
    picture.draw(results, file)
    assert "<svg" in file.read_text()
    with pytest.raises(ValueError, match="needs section products, sweep, headline or stages: got no figures"):
        picture.draw({"sections": {"products": [broken]}}, file)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["bench.device=tpu"], "bench.device: got 'tpu', wanted some of cuda; cpu"),
        (["bench.backend=abacus"], "bench.backend: got 'abacus', wanted some of reference; dequant; hopper"),
        (["bench.sections=[products,colors]"], "bench.sections: got 'colors', wanted some of products; steps; stages"),
        (["+bench.shapes.cubes=[[1,2]]"], "bench.shapes: got 'cubes', wanted some of layers; skew"),
        (["bench.shapes.skew=[[64,64,32]]"], "bench.shapes.skew: got [64, 64, 32], wanted 4 rows, N, K, groups, mul"),
        (["bench.shapes.layers=[[64,48,32,2]]"], "bench.shapes.layers: got [64, 48, 32, 2], wanted 4 rows, N, K, gro"),
        (["bench.picture=/no/such/folder/x.svg"], "bench.picture: no such folder: /no/such/folder"),
        (["bench.picture=x.svg", "bench.sections=[steps]"], "bench.picture: wants section products"),
    ],
)
def test_what_a_config_asks_for_and_there_is_not_is_named(make_config, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run.run(make_config("task=bench", "bench=gemm", *overrides).bench, 0, Console(quiet=True))


def test_bench_quant_measures_cuda_alone(make_config):
    with pytest.raises(ConfigError, match=r"bench\.device: got 'cpu', wanted some of cuda"):
        run.run(make_config("task=bench", "bench=quant", "bench.device=cpu").bench, 0, Console(quiet=True))


@needs_cuda
def test_on_a_gpu_everything_has_figures(mxep, tmp_path: Path):
    layer = "[[2048,512,1024,4]]"
    shapes = f"{{layers:{layer},skew:{layer},numerics:[[512,256,512,2]],accumulation:[[256,256,2048,1]]}}"
    backend = "hopper" if BACKENDS["hopper"].unsupported_reason(torch.device("cuda")) is None else "dequant"
    finished = mxep("task=bench", "bench=gemm", f"bench.backend={backend}", f"bench.shapes={shapes}")
    results = json.loads((tmp_path / "run" / "bench.json").read_text())
    errors = [row for rows in results["sections"].values() for row in rows if "error" in row]
    assert backend != "hopper" or not errors
    assert finished.code == bool(errors)
    for row in results["sections"]["steps"]:
        assert row["what"] == "torchao fp8 row" or 0 < row["us"] < 1e5
