"""The command line: what it says of itself, how soon a mistake is told, and that a mistake leaves nothing behind."""

import importlib.metadata
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from composed import composed
from integration.conftest import TINY
from mxep import ep, gemm
from mxep.integration import __main__, app, schema, verify
from mxep.integration import data as data_module
from mxep.integration.config import prepare
from mxep.integration.report import show_sweep
from mxep.integration.schema import Config, DataConfig, configs_dir
from mxep.integration.verify import Check


def python(folder: Path, *arguments: str) -> str:
    """What a process of its own prints in `folder`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    how = {"env": environment, "cwd": folder, "capture_output": True, "text": True, "timeout": 200}
    return subprocess.run([sys.executable, *arguments], check=True, **how).stdout


WITHOUT_TORCH = """
import json, os, sys
sys.modules["torch"] = None  # whoever imports it fails
from mxep.integration.app import main
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        os.mkdir(str(number))
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}-{number}", os.O_CREAT | os.O_WRONLY), stream)
        os.chdir(str(number))
        sys.argv = ["mxep", *arguments]
        main()
        sys.exit(0)
    print(f"code {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
"""
MISTAKES = [
    (["parallel.ranks=3"], "model.experts must be a multiple of 3 (parallel.ep), got 8: try parallel.ep=1 or "),
    (["task=bench", "bench=layer"], "needs a CUDA device, and there is none here; bench.device=cpu tries"),
    (["optimizer.beta1=1"], "optimizer.beta1: got 1.0: Input should be less than 1"),
    (["data=text", "data.path=."], "data.path: no file in . ends in any of .c, "),
    (["resume=."], "no checkpoint in .: wanted a run folder"),
    (["-m", "seed=0,1", "train.steps=0"], "train.steps: got 0: Input should be greater than or equal to 1"),
]
"""Arguments, and the message."""
OTHERS = ["--help"], ["--version"]


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A folder with what the command says of each of MISTAKES, --help and --version, and exit codes: of forks of one
    process that cannot import torch."""
    folder, given = tmp_path_factory.mktemp("said"), [*(arguments for arguments, _ in MISTAKES), *OTHERS]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = python(folder, "-c", WITHOUT_TORCH, json.dumps(given))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 2 * len(given)  # seconds of a core, whatever else runs here
    return folder, [int(code) for code in re.findall(r"^code (\d+)$", said, re.MULTILINE)]


@pytest.fixture
def said_of_help(without_torch: tuple[Path, list[int]]) -> str:
    return (without_torch[0] / f"out-{len(MISTAKES)}").read_text()


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[message for _, message in MISTAKES])
def test_a_mistake_is_told_before_torch_is_imported_and_leaves_no_folder(
    without_torch: tuple[Path, list[int]], number: int
):
    folder, codes = without_torch
    said = (folder / f"err-{number}").read_text()
    assert codes[number] == 1
    assert MISTAKES[number][1] in said
    assert "Traceback" not in said
    assert not (folder / str(number) / "outputs").exists()


def test_help_names_every_group_and_choice(said_of_help: str):
    groups = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in configs_dir().glob("*/")}
    assert len(groups) == 8
    for group, choices in groups.items():
        (lines,) = re.findall(rf"^ +{group} +(.*(?:\n {{6,}}.*)*)$", said_of_help, re.MULTILINE)
        assert all(re.search(rf"\b{choice}\b", lines) for choice in choices), lines
    assert all(len(line) <= 120 for line in said_of_help.splitlines())


def test_the_module_is_the_command_and_help_needs_no_dashes(said_of_help: str, tmp_path: Path):
    assert python(tmp_path, "-m", "mxep.integration", "help") == said_of_help
    assert not list(tmp_path.iterdir())


def test_version_is_that_of_the_distribution(without_torch: tuple[Path, list[int]]):
    wanted = f"mxep {importlib.metadata.version('mxep-integration')}, torch {importlib.metadata.version('torch')}"
    folder, codes = without_torch
    assert (folder / f"out-{len(MISTAKES) + 1}").read_text().strip() == wanted
    assert codes[len(MISTAKES) :] == [0, 0]


def test_names_known_without_torch_are_those_of_the_tables():
    assert tuple(gemm.BACKENDS) == schema.BACKENDS
    assert ep.DISPATCHERS == schema.DISPATCHERS
    assert tuple(app.RUN) == schema.TASKS
    wanted = {recipe: gemm.Recipe.named(recipe).group_alignment for recipe in schema.RECIPES}
    assert wanted == schema.ALIGNMENT


def prepared(*overrides: str) -> Config:
    return prepare(composed(*overrides), list(overrides))[0]


@pytest.mark.parametrize("bench", ["gemm", "comms", "layer"])
def test_on_a_cpu_a_bench_has_small_shapes_and_those_that_the_command_line_names(bench: str):
    on_cpu = prepared("task=bench", f"bench={bench}", "bench.device=cpu").bench
    assert on_cpu.shapes == on_cpu.cpu_shapes
    assert max(size for shapes in on_cpu.shapes.values() for shape in shapes for size in shape) <= 512
    kind = next(iter(on_cpu.shapes))
    plus = "+" if kind == "small" else ""
    other = [2 * size for size in on_cpu.shapes[kind][0]]
    named = prepared("task=bench", f"bench={bench}", "bench.device=cpu", f"{plus}bench.shapes.{kind}=[{other}]").bench
    assert named.shapes == on_cpu.shapes | {kind: [other]}


def test_models_whose_shapes_the_command_line_names_are_measured():
    of_model, named = ("task=bench", "bench=model", "bench.device=cpu"), "bench.shapes.gpt_oss_20b=[[1,2,2,32]]"
    both = "bench.models=[gpt_oss_20b,qwen3_30b]"
    assert prepared(*of_model, named).bench.models == ["gpt_oss_20b"]
    assert prepared(*of_model, named, both).bench.models == ["gpt_oss_20b", "qwen3_30b"]


def test_a_table_of_verification_fits_80_columns_and_names_what_failed(make_config: Callable[..., Config], capsys):
    checks = ("out", "dx", "d_weights", "d_gate_up_proj", "d_down_proj")
    good = [Check(name, 55.25, 45.0, 1) for name in checks]
    results = dict.fromkeys(schema.CASES, good)
    results["mxfp8/symmetric"] = [*good[:-1], Check("d_down_proj", float("nan"), 45.0, 3)]
    verify.report(make_config(), results).show(Console(width=80))
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "…" not in out
    assert len(re.findall(r"\+10\.2 +pass *$", out, re.MULTILINE)) == len(schema.CASES) - 1
    assert "mxfp8/symmetric: d_down_proj: nan dB on rank 3, wanted 45.00" in out


def test_a_sweep_ends_with_one_table(tmp_path: Path, capsys):
    for index, loss in enumerate((1.5, 2.5)):
        (tmp_path / str(index)).mkdir()
        run = f'{{"name": "bf16", "valid_loss": {loss}, "train_loss": 2.0, "tokens_per_s": 1234.0}}'
        (tmp_path / str(index) / "summary.json").write_text(f'{{"runs": [{run}]}}')
    (tmp_path / "2").mkdir()
    show_sweep([(tmp_path / str(index), ["model=tiny", f"seed={index}"]) for index in range(3)], Console(width=80))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0:", "seed=0", "bf16", "1.5000", "2.0000", "1,234"] in rows
    assert ["1:", "seed=1", "bf16", "2.5000", "2.0000", "1,234"] in rows
    assert ["2:", "seed=2", "done"] in rows


def data(path: Path, **changes: int) -> DataConfig:
    return DataConfig(str(path), **({"max_bytes": 10**6, "batch": 1, "length": 8} | changes))


def test_sequences_of_half_a_chunk_are_refused(tmp_path: Path):
    assert "data.length: got 40000, wanted at most 32767" in str(data_module.complaint(data(tmp_path, length=40000)))


def test_a_resumed_run_keeps_its_recipe_and_text_or_says_so_and_a_crash_says_how_to_go_on(
    mxep, text: Path, tmp_path: Path
):
    def run_in(name: str, *arguments: str):
        return mxep(*arguments, f"hydra.run.dir={tmp_path / name}", "parallel.ranks=1")

    first = run_in("first", *TINY, f"data.path={text}", "train.steps=2", "train.compare=false")
    assert first.code == 0, first.err
    whole = f"resume={tmp_path / 'first'}"
    step = tmp_path / "first" / "mxfp8" / "step-000002"

    refused = run_in("refused", whole, "recipe=fp8")
    assert refused.code == 1
    assert "trained mxfp8, and recipe.name=fp8 is another recipe: leave it out, or go on from" in refused.err
    assert f"resume={step}" in refused.err
    assert not (tmp_path / "refused").exists()

    other = tmp_path / "other.txt"
    other.write_text("another text " * 1000)
    taken = run_in("taken", f"resume={step}", "recipe=fp8", f"data.path={other}", "train.steps=3")
    assert taken.code == 0, taken.err
    assert (tmp_path / "taken" / "fp8" / "step-000003").exists()
    assert "steps are done" not in taken.err
    assert "difference" not in taken.out
    assert "mxep: all 2 steps are done: train.steps=N asks for more" in run_in("again", whole).err

    lost = "dispatcher.capacity=factor", "dispatcher.factor=0.3"  # some of its rows
    crashed = run_in("first", f"resume={step}", "train.steps=3", *lost)
    assert crashed.code == 1
    for said in ("CapacityExceeded", "rows did not fit"):
        assert said in crashed.err
    assert "Traceback" not in crashed.err
    assert f"go on from {step} with: mxep resume={tmp_path / 'first'} {' '.join(lost)} parallel.ranks=1" in crashed.err


def test_without_its_extra_the_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)
    monkeypatch.delitem(sys.modules, "mxep.integration.app", raising=False)
    with pytest.raises(SystemExit, match=r"hydra is missing: pip install 'mxep-integration\[command\]'"):
        __main__.main()
