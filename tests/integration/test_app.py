"""The command: what a run leaves behind, and how it ends when it is stopped, killed or started by torchrun."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest

from integration.conftest import TINY
from mxep.integration import app, checkpoint
from mxep.integration.train import Outcome, Run

MARK = "MXEP_TEST_MARK"
LINES = 8  # of metrics.jsonl, before a test interferes
START = 150  # seconds that a job may take to get there, on a machine that is busy


def processes(mark: str) -> list[Path]:
    """Live processes that were started with the mark in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append(environment.parent)
    return found


def wait_until(condition: Callable[[], bool], *, within: float) -> bool:
    limit = time.monotonic() + within
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def steps_of(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_bytes().splitlines()) if (folder / "metrics.jsonl").exists() else 0


def command(*arguments: str, folder: Path) -> list[str]:
    """The console script with a run folder."""
    return [str(Path(sys.executable).with_name("mxep")), *arguments, f"hydra.run.dir={folder}"]


def test_recipe_auto_says_once_what_it_is_and_trains_that(mxep, text: Path, tmp_path: Path):
    finished = mxep(*TINY, f"data.path={text}", "recipe=auto", "train.steps=1", "parallel.ranks=1")
    assert finished.code == 0, finished.err
    # dim 32, of which no number of rows is enough
    said = "mxep: recipe=auto is bf16, as an expert gets 64 rows: with D 32 and F 32 MXFP8 never pays\n"
    assert finished.err.count(said) == 1, finished.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == ["bf16"], "no baseline beside itself"


def test_ctrl_c_leaves_a_checkpoint_says_how_to_go_on_and_leaves_no_process(text: Path, tmp_path: Path):
    folder = tmp_path / "run"
    here = "dispatcher=symmetric", "parallel.ranks=2"  # which no checkpoint knows
    learns = *TINY, f"data.path={text}", "train.steps=100000", "train.checkpoint_every=0"
    arguments = command(*learns, *here, folder=folder)
    environment = {**os.environ, MARK: "ctrl-c"}
    with subprocess.Popen(
        arguments, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert wait_until(lambda: steps_of(folder) > LINES, within=START)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, err = process.communicate(timeout=60)
        except BaseException:
            for one in processes("ctrl-c"):
                os.kill(int(one.name), signal.SIGKILL)
            raise
    assert process.returncode == 130
    steps = steps_of(folder)
    assert f"mxep: stopped (bf16, step {steps} of 100000); go on with: mxep resume={folder} {' '.join(here)}\n" in err
    assert "Traceback" not in err
    assert wait_until(lambda: not processes("ctrl-c"), within=1)
    (step,) = checkpoint.find(folder).values()
    assert checkpoint.read_state(step).step == steps
    assert json.loads((folder / "summary.json").read_text())["runs"][0]["stopped"]


def test_ctrl_c_during_start_is_one_line_of_the_command_and_ends_all_of_it(tmp_path: Path):
    """The fork server imports torch for seconds; a terminal's Ctrl-C reaches it, too."""
    environment = {**os.environ, MARK: "start"}
    with subprocess.Popen(
        command("model=tiny", folder=tmp_path / "run"),
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            imports = lambda: any(b"forkserver" in one.joinpath("cmdline").read_bytes() for one in processes("start"))  # noqa: E731
            assert wait_until(imports, within=START)
            time.sleep(0.3)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=20)
        finally:
            for one in processes("start"):
                os.kill(int(one.name), signal.SIGKILL)
    assert (process.returncode, err) == (130, "mxep: stopped before there was anything to save\n")
    assert not (tmp_path / "run").exists()


LOSES = """
import sys, time
from mxep.integration import app

def check(*_):  # imports torch, and callbacks in imports may lose an exception
    print("checks", flush=True)
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)

app._check = check
app.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_imports_is_not_lost(tmp_path: Path, number: signal.Signals):
    arguments = [sys.executable, "-c", LOSES, *command("model=tiny", folder=tmp_path / "run")[1:]]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "checks\n"
            process.send_signal(number)
            _, err = process.communicate(timeout=10)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "mxep: stopped before there was anything to save\n")
    assert not (tmp_path / "run").exists()


def test_a_sigterm_during_the_loss_on_held_out_text_ends_the_run_which_goes_on_there(mxep, text: Path, tmp_path: Path):
    def end() -> None:
        wait_until(lambda: bool(list((tmp_path / "run" / "mxfp8").glob("step-*"))), within=START)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    given = *TINY, f"data.path={text}", "train.compare=false", "train.steps=2", "parallel.ranks=2"
    finished = mxep(*given, "train.valid_batches=1000000")
    assert finished.code == 130, finished.err
    assert "mxep: stopped (mxfp8, step 2 of 2); go on with: mxep resume=" in finished.err
    went_on = mxep(f"resume={tmp_path / 'run'}", "train.valid_batches=1", "parallel.ranks=2")
    assert went_on.code == 0, went_on.err
    (run,) = json.loads((tmp_path / "run" / "summary.json").read_text())["runs"]
    assert (run["steps"], run["stopped"]) == (2, False)
    assert run["valid_loss"] > 0


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_stops_before_its_first_checkpoint_names_none(
    mxep, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
):
    given = *TINY, f"data.path={text}", "train.compare=false", "train.steps=1", "parallel.ranks=1"
    if resumed:
        before = tmp_path / "before"
        assert mxep(*given, f"hydra.run.dir={before}").code == 0
        given = f"resume={before}", "parallel.ranks=1"
    stopped = Outcome([Run("mxfp8", 0, True, [], None)], "text", 3.0)
    monkeypatch.setattr(app, "_on_ranks", lambda *rest, **options: stopped)
    finished = mxep(*given)
    assert finished.code == 130
    how = f"go on with: mxep resume={before} parallel.ranks=1" if resumed else "there is no checkpoint to go on from"
    assert f"mxep: stopped (mxfp8, step 0 of 1); {how}\n" in finished.err


def test_a_killed_rank_is_named_in_one_message_and_ends_the_job(mxep, text: Path, tmp_path: Path):
    def kill_rank_1() -> None:
        wait_until(lambda: steps_of(tmp_path / "run") > LINES, within=START)
        next(rank for rank in multiprocessing.active_children() if rank.name == "rank 1").kill()

    killer = threading.Thread(target=kill_rank_1)
    killer.start()
    finished = mxep(*TINY, f"data.path={text}", "train.steps=100000")
    killer.join()
    assert finished.code == 1
    said = ("step", "backend", "starting")
    messages = [line for line in finished.err.splitlines() if not any(word in line for word in said)]
    assert messages[0] == "mxep: rank 1 was killed by SIGKILL before it returned"
    assert messages[1].startswith("(most likely out of memory: ")
    assert len(messages) == 2
    assert not multiprocessing.active_children()


def test_a_sigterm_to_the_whole_process_group_leaves_a_checkpoint_too(mxep, text: Path, tmp_path: Path):
    def end_all() -> None:
        wait_until(lambda: steps_of(tmp_path / "run") > LINES, within=START)
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_all).start()
    finished = mxep(*TINY, f"data.path={text}", "train.steps=100000", "train.checkpoint_every=0")
    assert finished.code == 130, finished.err
    assert checkpoint.find(tmp_path / "run").keys() == {"bf16"}


def test_minus_m_runs_one_job_after_the_other(mxep, text: Path, tmp_path: Path):
    where = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    finished = mxep(
        "-m", "seed=0,1", *TINY, f"data.path={text}", "train.steps=2", "recipe=bf16", where, "parallel.ranks=1"
    )
    assert finished.code == 0, finished.err
    curves = [json.loads((tmp_path / "sweep" / str(i) / "summary.json").read_text())["runs"] for i in range(2)]
    assert curves[0][0]["train_loss"] != curves[1][0]["train_loss"]
    table = finished.out.partition("Sweep: ")[2]
    for i, (run,) in enumerate(curves):
        assert re.search(rf"^ *{i}: seed={i} +bf16 +{run['valid_loss']:.4f} ", table, re.MULTILINE), finished.out
