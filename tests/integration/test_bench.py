"""task=bench: counts bytes as they are, reports what it measured, and says why it cannot measure."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import quant, script
from benchmarks.quant import CASES, GROUPS, Inputs
from mxep.integration import app
from mxep.integration.config import ConfigError
from mxep.integration.launch import Rank
from mxep.integration.report import Report, Section
from mxep.integration.schema import BENCHES, Config, configs_dir
from mxep.quant.shapes import padded_rows

SHAPES = {"rows": (96, 64), "weights": (2, 32, 192)}

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU")


def arguments(name: str) -> tuple[object, ...]:
    case = CASES[name]
    return case.make(Inputs(SHAPES[case.kind], torch.Generator().manual_seed(3)))


def tensors(*values: object) -> list[Tensor]:
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]


def unmoved(name: str) -> int:
    """Bytes of tensors that a case need not move: rows of padding, columns past what groups take, where these end."""
    rows, width = SHAPES["rows"]
    if name == "fold_for_wgrad":
        return 2 * width * (padded_rows(rows, GROUPS, 128) - rows) + 4 * GROUPS
    return 0


@pytest.mark.parametrize("name", CASES)
def test_what_a_case_moves_are_the_bytes_of_its_tensors(name: str):
    given = arguments(name)
    results = CASES[name].call(*given)
    size = sum(tensor.nbytes for tensor in tensors(*given, results))
    assert CASES[name].moved(*SHAPES[CASES[name].kind]) == size - unmoved(name)


def test_inputs_are_what_the_module_says():
    inputs = Inputs((4096, 64), torch.Generator().manual_seed(0))
    qdata, scale, index = inputs.slots()
    assert qdata.stride() == scale.stride() == (80, 1)  # 64 + 2, rounded up to 16
    assert torch.equal(index.sort().values, torch.arange(4096, dtype=torch.int32))
    offs = inputs.offs()
    assert (offs.dtype, offs.shape, int(offs[-1])) == (torch.int32, (32,), 4096)
    assert torch.equal(offs, offs.sort().values)
    assert not (offs % 32).any()


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_bench_has_a_config_that_fits(make_config: Callable[..., Config], name: str):
    assert sorted(file.stem for file in (configs_dir() / "bench").glob("*.yaml")) == sorted(BENCHES)
    config = make_config("task=bench", f"bench={name}")
    assert config.bench.name == name
    script.load_bench(name)


def test_every_case_of_quant_is_measured_at_its_shapes(make_config):
    config = make_config("task=bench").bench
    lines = list(quant.lines(script.Bench(Rank(0, 1, torch.device("cpu")), config, 0, Report("", {}, {}))))
    assert list(dict.fromkeys(name for name, *_ in lines)) == list(CASES)
    for name, case in CASES.items():
        own = [shape for each, shape in lines if each == name]
        assert len(own) == (1 if case.kind == "weights" else 6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("bench.name=chess", "bench.name: got 'chess': String should match pattern '^(quant|gemm"),
        ("bench.out=/no/such/folder/x.json", "bench.out: no such folder: /no/such/folder"),
        ("bench=gemm bench.device=tpu", "bench.device: got 'tpu': String should match pattern '^(cuda|cpu)"),
        ("bench=quant bench.device=cpu", "bench.device: got 'cpu', and bench=quant measures CUDA devices alone"),
        ("bench=quant bench.cases=[rows,x]", "bench.cases: got 'x', wanted some of rows; columns"),
        ("bench=quant +bench.shapes.cubes=[[1,2]]", "bench.shapes: got 'cubes', wanted some of rows; weights; small"),
        ("bench=quant bench.shapes.rows=[[64]]", "bench.shapes.rows: got [64], wanted 2 sizes, multiples of [32, 64]"),
        ("bench=quant bench.shapes.rows=[[64,96]]", "got [64, 96], wanted 2 sizes, multiples of [32, 64]"),
        ("bench=gemm bench.backend=abacus", "bench.backend: got 'abacus', wanted some of reference; dequant; hopper"),
        ("bench=gemm bench.sections=[x]", "bench.sections: got 'x', wanted some of products; steps"),
        ("bench=comms bench.shapes.skew=[[8,32,4,5]]", "got [8, 32, 4, 5], wanted 4 tokens, dim, experts, top-k"),
        ("bench=layer bench.models=[gpt2]", "bench.models: got 'gpt2', wanted some of deepseek_v3; "),
        ("bench=layer bench.changes=[forced]", "bench.changes: got 'forced', wanted null"),
        ("bench=model bench.changes=[sgd]", "bench.changes: got 'sgd', wanted some of optimize; forced"),
        ("bench=model bench.cases=[mxfp8]", "bench.cases: got 'mxfp8', wanted some of baseline; transformers"),
    ],
)
def test_what_a_config_asks_for_and_there_is_not_is_named(make_config, overrides: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config("task=bench", *overrides.split())


@pytest.mark.parametrize("task", ["bench", "compare", "estimate"])
def test_where_there_are_no_benchmarks_their_tasks_say_where_they_are(mxep, monkeypatch, tmp_path: Path, task: str):
    monkeypatch.setattr("mxep.integration.config.BENCHMARKS", tmp_path / "benchmarks")
    finished = mxep(f"task={task}", "model=tiny", *(["bench=gemm", "bench.device=cpu"] if task == "bench" else []))
    assert finished.code == 1
    (line,) = finished.err.strip().splitlines()
    assert line == (
        f"mxep: task=bench, task=compare and task=estimate: got no {tmp_path / 'benchmarks'}, which no package of mxep "
        "has: run them in a clone of its repository, by uv run mxep"
    )
    assert not (tmp_path / "run").exists()


def test_what_is_measured_is_logged_at_once_with_the_seconds_passed(make_config, monkeypatch, capsys):
    def measure(bench: script.Bench):
        bench.ceilings["copy TB/s"] = 4.0
        yield "skew", {"shape": [1], "us": 1.23456789}

    config = make_config("task=bench", "bench=comms", "bench.device=cpu", "bench.sections=[skew]")
    monkeypatch.setattr("benchmarks.comms.measure", measure)
    results = script.run_bench(None, config)
    assert (results.ceilings, results.lines) == ({"copy TB/s": 4.0}, [{"shape": [1], "us": 1.2346}])
    line = capsys.readouterr().err
    assert re.fullmatch(r' +\d+\.\d s  {"section": "skew", "shape": \[1\], "us": 1\.2346}\n', line)


def test_without_a_cuda_device_there_is_one_message(mxep):
    finished = mxep("task=bench", "bench=quant")
    assert finished.code == 1
    assert finished.err.strip().splitlines()[-1] == "mxep: bench=quant needs a CUDA device, and there is none here"
    assert "Traceback" not in finished.err


def test_a_torch_that_cannot_use_the_gpus_is_told_before_a_rank_starts(make_config, monkeypatch, tmp_path: Path):
    """A driver shows GPUs, so the config passes. Ranks would start, and fail one by one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(app, "_on_ranks", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(script, "run_bench", lambda *_, **__: pytest.fail("started"))
    for bench in ("quant", "layer"):
        with pytest.raises(ConfigError, match=f"bench={bench}: torch {re.escape(torch.__version__)} uses none of"):
            app._check(make_config("task=bench", f"bench={bench}"), {})
    assert not list(tmp_path.iterdir())
    on_cpu = make_config("task=bench", "bench=layer", "bench.device=cpu")
    with pytest.raises(pytest.fail.Exception, match="started"):
        app._run(on_cpu, app._check(on_cpu, {}), tmp_path)


ROWS = [
    {"case": "fast", "shape": [8, 4], "us": 100.0, "of copy": 0.95, "kernels": ["one_kernel"]},
    {"case": "fast", "shape": [16, 4], "us": 100.04, "of copy": None},
    {"case": "plain", "shape": [8, 4], "us": 200.0, "note": "as it is"},
    {"case": "broken", "shape": [2, 8, 4], "error": "OutOfMemoryError: 3 GiB"},
]
MADE_UP = Report(
    "things",
    {"copy TB/s": 4.0},
    {"kernels": Section("Kernels", ("case", "shape"), {"us": ".1f", "of copy": ".2f"}, ROWS)},
    seconds=12.3,
)


def test_the_table_has_labels_once_figures_and_remarks(capsys):
    MADE_UP.show(Console())
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert " ".join(lines[0]) == "things: copy TB/s 4; 12 s"
    assert " ".join(lines[1]) == "Kernels"
    assert " ".join(lines[2]) == "case shape us of copy"
    assert lines[4] == ["fast", "8", "x", "4", "100.0", "0.95"]
    assert lines[5] == ["16", "x", "4", "100.0"]
    assert lines[6] == ["plain", "8", "x", "4", "200.0", "as", "it", "is"]
    assert lines[7] == ["broken", "2", "x", "8", "x", "4", "OutOfMemoryError:", "3", "GiB"]


def test_the_results_say_where_they_were_made_and_a_failed_line_is_an_exit_code(
    make_config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    monkeypatch.setattr(script, "run_bench", lambda *_, **__: MADE_UP)
    out = tmp_path / "out.json"
    config = make_config("task=bench", f"bench.out={out}", "bench.commit=abc123")
    assert app._bench(config, tmp_path, {}) == 1
    assert "1 of 4 lines failed" in capsys.readouterr().err
    assert out.read_text() == (tmp_path / "bench.json").read_text()
    results = json.loads(out.read_text())
    assert (results["what"], results["commit"], results["ceilings"]) == ("things", "abc123", {"copy TB/s": 4.0})
    assert {"what", "device", "driver", "versions", "date", "command", "seconds"} <= results.keys()
    assert results["versions"]["torch"] == torch.__version__
    assert results["sections"] == {"kernels": ROWS}


def test_ctrl_c_leaves_the_rows_so_far_where_they_were_wanted(
    make_config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    def measure(bench: script.Bench):
        bench.ceilings["copy TB/s"] = 4.0
        yield "products", {"shape": [1], "us": 2.0}
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.gemm.measure", measure)
    files = [tmp_path / "bench.json", tmp_path / "out.json"]
    config = make_config("task=bench", "bench=gemm", "bench.device=cpu", f"bench.out={files[1]}", "bench.commit=abc")
    assert app._bench(config, tmp_path, {}) == 130
    assert f"mxep: stopped; the rows so far: {files[0]}, {files[1]}\n" in capsys.readouterr().err
    for kept in (json.loads(file.read_text()) for file in files):
        assert kept["sections"]["products"] == [{"shape": [1], "us": 2.0}]
        assert (kept["commit"], kept["ceilings"]) == ("abc", {"copy TB/s": 4.0})


@needs_cuda
def test_small_shapes_are_measured_from_end_to_end(mxep, tmp_path: Path):
    shapes = "bench.shapes={rows:[[1024,1024]],weights:[[2,256,1024]],small:[[128,1024]]}"
    finished = mxep("task=bench", shapes, "bench.cases=[rows,fold,weights_2d]")
    assert finished.code == 0, finished.out + finished.err
    results = json.loads((tmp_path / "run" / "bench.json").read_text())
    lines = results["sections"]["kernels"]
    assert [line["case"] for line in lines] == ["rows", "rows", "fold", "fold", "weights_2d"]
    for line in lines:
        assert 0 < line["of copy"] < 2
        assert 0 < line["us"] < 1000
