"""The benchmark of torchtitan, all cases in turn: what a case that fails or hangs costs. No torchtitan is needed."""

import json
import sys
import time
from pathlib import Path

import pytest

from mxep.integration.bench.titan import print_table
from mxep.integration.bench.titan_cases import Job, run_cases

CASE = """
import os, pathlib, sys, time
what, _, go = sys.argv[1:]
print("imported")
while not pathlib.Path(go).exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    if what == "fails":
        sys.exit("the experts are lost")
if what != "ends":
    time.sleep(60)
"""


def make_jobs(folder: Path, *cases: str) -> dict[tuple[str, bool], Job]:
    return {
        (case, False): Job([sys.executable, "-S", "-c", CASE, case], 2, folder / str(i)) for i, case in enumerate(cases)
    }


def test_a_case_that_fails_or_hangs_costs_its_row_alone(tmp_path: Path):
    jobs = make_jobs(tmp_path, "fails", "hangs", "ends")
    wrong = run_cases(jobs, seconds=100, limit=2)
    assert set(wrong) == {("fails", False), ("hangs", False)}
    assert wrong["fails", False] == "rank 1 exited with 1\nimported\nthe experts are lost\n"
    assert wrong["hangs", False].startswith("not over after 2 s")
    assert all(process.poll() is not None for job in jobs.values() for process in job.processes)


def test_cases_for_which_no_time_is_left_are_named(tmp_path: Path):
    begun = time.monotonic()
    wrong = run_cases(make_jobs(tmp_path, "hangs", "ends"), seconds=31, limit=2)
    assert wrong["ends", False] == "no time was left"
    assert time.monotonic() - begun < 20


def test_the_table_has_a_row_for_a_case_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = {"model": "m", "compile": False, "checkpoint": "none", "batch": 1, "length": 8, "layers": 2, "ranks": 2}
    runs = [
        run | {"case": "torchtitan", "tokens_per_second": 100.0, "gib": 1.0, "losses": {"1": 3.0, "10": 2.5}},
        run | {"case": "mxfp8", "tokens_per_second": 150.0, "gib": 1.0, "losses": {"1": 3.0, "10": 2.5}},
        {"model": "m", "case": "torchtitan-fp8", "compile": False, "error": "rank 1 exited with 1\nlog\nlast words\n"},
    ]
    file = tmp_path / "titan.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in runs))
    print_table(file)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert "| 150 | 1.50 |" in rows[1]
    assert rows[2].endswith("| rank 1 exited with 1: last words |")
