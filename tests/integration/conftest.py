"""The command in this process, and small configs."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from composed import composed
from mxep.integration import app
from mxep.integration.config import prepare, resolve
from mxep.integration.launch import start_fork_server
from mxep.integration.schema import Config
from ranks import PRELOAD, PRELOAD_OF_INTEGRATION  # sets TRITON_INTERPRET, which the fork server must know

ON_TEXT = ("data=text", "data.batch=4", "data.length=32", "train.valid_batches=1")
TINY = ("model=tiny", *ON_TEXT, "optimizer.warmup=5")


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


def pytest_collectstart() -> None:
    """Nearly all files start ranks: the fork server imports torch while tests are collected."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        start_fork_server(*PRELOAD, *PRELOAD_OF_INTEGRATION)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: threads that wait for a busy core take a hundred times as long as the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`optimize` traces alone, as compilers have no part in most tests of it. Its parameter: another backend."""
    import torch
    from torch._dynamo.utils import counters

    from mxep.integration.transformers.optimize import _compiled_class

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=getattr(request, "param", "eager")))
    _compiled_class.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    _compiled_class.cache_clear()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of text that is easy to learn."""
    file = tmp_path_factory.mktemp("text") / "lines.txt"
    file.write_text("".join(f"line {i % 100} of the text: abc {i % 7}\n" for i in range(3000)))
    return file


@pytest.fixture(scope="session")
def make_config(text: Path) -> Callable[..., Config]:
    """make_config(*overrides, ranks=None) -> a tiny config."""

    def make(*overrides: str, ranks: int | None = None) -> Config:
        return resolve(composed(*TINY, f"data.path={text}", *overrides), ranks=ranks)

    return make


@pytest.fixture(scope="session")
def prepared(text: Path) -> Callable[..., Config]:
    """prepared(*arguments) -> the config of a command on the text."""

    def make(*arguments: str) -> Config:
        given = [*ON_TEXT, f"data.path={text}", *arguments]
        return prepare(composed(*given), given)[0]

    return make


@pytest.fixture
def mxep(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Finished]:
    """mxep(*arguments) -> Finished: the command, run folder tmp_path / "run" unless one is given."""

    def run(*arguments: str) -> Finished:
        given = any(argument.startswith("hydra.run.dir=") for argument in arguments)
        folder = [] if given else [f"hydra.run.dir={tmp_path / 'run'}"]
        monkeypatch.setattr(sys, "argv", ["mxep", *arguments, *folder])
        capfd.readouterr()
        code: str | int | None = 0
        try:
            app.main()
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        assert code is None or isinstance(code, int)
        return Finished(code or 0, out, err)

    return run
