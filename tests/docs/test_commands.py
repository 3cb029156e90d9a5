"""Command lines of the pages make a job: each `mxep ...` in a ```bash block composes and is checked, and nothing runs.

As on a machine of 8 GPUs. Words in capitals, as FOLDER, stand for what a reader has: a model's folder with a text.
"""

import importlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from composed import composed
from docs.test_links import PAGES, ROOT
from mxep.integration import config

GPUS = 8
LAUNCHED = "mxep.integration.app"
FLAGS = ("-m", "--help", "--version")
"""That a command of the pages may have; Hydra has others."""


def commands_of(page: str) -> list[list[str]]:
    """The words of each command line that starts `mxep`, or launches it with torchrun."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["mxep"] or words[:3] == ["uv", "run", "mxep"] or LAUNCHED in words:
                found.append(words)
    return found


def parted(words: list[str]) -> tuple[list[str], int | None]:
    """The command's arguments, and how many ranks a launcher starts, or None; on 2 nodes where a shell knows."""
    if LAUNCHED not in words:
        return words[words.index("mxep") + 1 :], None
    options = dict(itertools.pairwise(words))
    nodes = options.get("--nnodes", "1")
    ranks = (int(nodes) if nodes.isdigit() else 2) * int(options["--nproc-per-node"])
    return words[words.index(LAUNCHED) + 1 :], ranks


def jobs_of(overrides: list[str]) -> Iterator[list[str]]:
    """The overrides of each job of a sweep, or of the one job."""
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        key, line = override.get_key_element(), str(override.input_line)
        choices.append(
            [f"{key}={v}" for v in override.sweep_string_iterator()] if override.is_sweep_override() else [line]
        )
    return map(list, itertools.product(*choices))


def complaint(words: list[str], stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why the command makes no job."""
    overrides, ranks = parted([re.sub(r"\b[A-Z][A-Z_]{3,}\b", str(stand_in), word) for word in words])
    sweeps = "-m" in overrides
    if wrong := [word for word in overrides if word.startswith("-") and word not in FLAGS]:
        return f"no such flag: {wrong}"
    overrides = [word for word in overrides if not word.startswith("-")]
    for name in ("WORLD_SIZE", "RANK"):
        if ranks is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(ranks if name == "WORLD_SIZE" else 0))
    jobs = list(jobs_of(overrides))
    if len(jobs) > 1 and not sweeps:
        return "a sweep without -m"
    try:
        for job in jobs:
            raw = composed(*job)
            if raw.resume is None:
                config.prepare(raw, job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model as save_pretrained writes it, with a tokenizer and a text; GPUs, and the packages that models want."""
    importlib.import_module("benchmarks.model")  # transformers would miss packages that are only said to be there
    monkeypatch.setattr(config, "gpu_count", lambda: GPUS)
    installed = config.importlib.metadata.version
    monkeypatch.setattr(
        config.importlib.metadata, "version", lambda name: "5.17.0" if name == "transformers" else installed(name)
    )
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda name: name)
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = OmegaConf.to_container(composed("model=qwen3_moe_tiny"), resolve=True)["model"]["transformers"]
    (folder / "config.json").write_text(json.dumps(sizes))
    tokens = {"model": {"vocab": {chr(97 + i): i for i in range(26)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (folder / "text.py").write_text("line of the text\n" * 200_000)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page.read_text())], ids=lambda page: page.stem)
def test_every_command_of_a_page_makes_a_job(page: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        shlex.join(words): said
        for words in commands_of(page.read_text())
        if (said := complaint(words, stand_in, monkeypatch)) is not None
    }
    assert not wrong, "\n".join(f"{command}\n    {said}" for command, said in wrong.items())


def test_commands_are_found_in_bash_blocks_alone_with_their_comments_cut() -> None:
    page = "```bash\nuv run mxep a=1 \\\n  b=2  # c=3\npip install mxep-ep\nmxep\n```\n```text\nmxep d=4\n```\n"
    page += "```bash\nsrun torchrun --nnodes 3 --nproc-per-node 4 -m mxep.integration.app e=5\n```\n"
    assert [parted(words) for words in commands_of(page)[:1]] == [(["a=1", "b=2"], None)]
    assert len(commands_of(page)) == 3
    assert parted(commands_of(page)[2]) == (["e=5"], 12)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mxep modle=tiny", "Could not override 'modle'"),
        ("mxep model=huge", "Could not find 'model/huge'"),
        ("mxep train.steps=many", "train.steps"),
        ("mxep bench=layer", "task=train does not read it"),
        ("mxep parallel.ranks=3", "model.experts must be a multiple of 3"),
        ("mxep recipe=bf16,mxfp8", "a sweep without -m"),
        ("mxep -m recipe=bf16,fp4", "Could not find 'recipe/fp4'"),
        ("mxep --multi-run", "no such flag"),
        ("mxep task=bench bench=layer 'bench.sections=[x]'", "bench.sections: got 'x'"),
        ("torchrun --nproc-per-node 6 -m mxep.integration.app", "model.experts must be a multiple of 6"),
    ],
)
def test_a_command_that_makes_no_job_is_noticed(
    command: str, said: str, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said in str(complaint(shlex.split(command), stand_in, monkeypatch))
