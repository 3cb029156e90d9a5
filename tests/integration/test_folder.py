"""Run folders: two runs never share one, whenever they start, and what a run left is never written over."""

import json
import threading
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from mxep.integration.app import register
from mxep.integration.checkpoint import new_folder, take
from mxep.integration.schema import configs_dir

TINY = ("model=tiny", "data=text", "data.batch=4", "data.length=32", "train.valid_batches=1", "train.compare=false")


def test_runs_that_start_at_one_time_get_a_folder_each(tmp_path: Path):
    wanted, found = str(tmp_path / "outputs" / "today" / "12-00-00"), []
    threads = [threading.Thread(target=lambda: found.append(new_folder(wanted))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [wanted, *(f"{wanted}-{number}" for number in range(2, 9))]


@pytest.mark.parametrize("key", ["run", "sweep"])
def test_a_config_names_its_own_folder_and_always_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.chdir(tmp_path)
    register()
    found = []
    for _ in range(2):
        with initialize_config_dir(str(configs_dir()), version_base="1.3"):
            hydra = compose("config", return_hydra_config=True).hydra
        names = [hydra[key].dir for _ in range(2)]
        assert names[0] == names[1]
        found.append(names[0])
    assert found[0] != found[1]
    assert sorted(str(path) for path in Path().glob("*/*/*")) == sorted(found)


def test_a_folder_is_one_runs_while_it_goes_on_and_after(tmp_path: Path):
    with take(tmp_path, "seed: 1\n", resumed=None):
        for resumed in (None, tmp_path, tmp_path / "mxfp8" / "step-000001"):
            with pytest.raises(ValueError, match="which has a run, wanted a folder of its own"):
                take(tmp_path, "seed: 2\n", resumed=resumed)
    for resumed in (None, tmp_path.parent):
        with pytest.raises(ValueError, match=r"hydra\.run\.dir: got .*, which has a run"):
            take(tmp_path, "seed: 2\n", resumed=resumed)
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    with take(tmp_path, "seed: 3\n", resumed=tmp_path / "mxfp8"):  # it goes on in its own
        assert (tmp_path / "config.yaml").read_text() == "seed: 3\n"


def test_a_run_in_a_folder_with_a_run_is_refused_and_one_that_resumes_there_has_one_line_a_step(
    mxep, text: Path, tmp_path: Path
):
    given = *TINY, f"data.path={text}", "parallel.ranks=1", "train.steps=2", "train.compare=true"
    assert mxep(*given).code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = mxep(*given, "seed=1")
    assert (again.code, "which has a run, wanted a folder of its own" in again.err) == (1, True)
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    resumed = mxep(f"resume={tmp_path / 'run'}", "train.steps=3", "parallel.ranks=1")
    assert resumed.code == 0, resumed.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["run"], row["step"]) for row in rows] == [(run, i) for run in ("bf16", "mxfp8") for i in (1, 2, 3)]
