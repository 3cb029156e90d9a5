"""Each distribution installs alone, with what it declares and nothing else, and imports; the namespace stays open."""

import email
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import unittest.mock
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "runtime": ROOT / "packages/runtime",
    "quant": ROOT / "packages/quant",
    "comms": ROOT / "packages/comms",
    "gemm": ROOT / "packages/gemm",
    "ep": ROOT / "packages/ep",
    "integration": ROOT / "integration",
}


def project(name: str) -> dict:
    return tomllib.loads((PACKAGES[name] / "pyproject.toml").read_text())["project"]


def siblings(name: str) -> set[str]:
    """The mxep packages that `name` needs, its needs' needs included."""
    direct = {m[1] for d in project(name)["dependencies"] if (m := re.match(r"mxep-(\w+)", d))}
    return direct.union(*(siblings(d) for d in direct))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one environment becomes that of each package in turn: what both need stays, torch's bytecode too."""
    return tmp_path_factory.mktemp("alone")


def uv(folder: Path, *arguments: object, cwd: Path | None = None) -> None:
    program = shutil.which("uv")
    if program is None:
        pytest.skip("uv is not on PATH")
    if "VIRTUAL_ENV" not in os.environ and not (ROOT / ".venv").exists():
        pytest.skip("the workspace environment is not managed by uv")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, cwd=cwd or folder)
    assert done.returncode == 0, done.stderr


def install(folder: Path, what: list[Path | str]) -> None:
    """The environment ``folder / "env"`` gets these packages and what they need, and loses what else it has."""
    if not (folder / "env").exists():
        uv(folder, "venv", "-q", "--python", sys.executable, "env")
    # Hard links to uv's cache: the third-party wheels were fetched when the workspace was set up.
    constraints = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    (folder / "constraints.txt").write_text("\n".join(constraints))
    where = "--python", folder / "env/bin/python"
    uv(folder, "pip", "install", "-q", "--exact", *where, "-c", "constraints.txt", *what)
    if not (folder / "bytecode").exists():
        share_bytecode(folder)


def share_bytecode(folder: Path) -> None:
    """Of torch and what it imports: these tests' own, which Python takes where a source is the same file of uv's cache.

    Each process would compile them again, for 5 s.
    """
    ours, theirs = (Path(sysconfig.get_path("purelib", vars=base)) for base in ({}, {"base": str(folder / "env")}))
    for source in (path for name in ("torch", "sympy", "triton", "numpy") for path in ours.glob(f"{name}/**/*.py")):
        made = Path(importlib.util.cache_from_source(str(source)))
        if made.exists():
            wanted = folder / "bytecode" / theirs.relative_to("/") / source.relative_to(ours).with_name(made.name)
            wanted.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(made, wanted)


def environment(folder: Path) -> dict[str, str]:
    """For programs of the environment in ``folder``: nothing of this checkout is on their path."""
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | bytecode


FORKS = """
import importlib, json, os, sys, traceback
import torch  # once, for all packages
for line in sys.stdin:
    if os.fork() == 0:
        importlib.invalidate_caches()
        try:
            exec(json.loads(line))
        except BaseException:
            print(json.dumps(traceback.format_exc()), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def evaluate(folder: Path) -> Iterator[Callable[[str, str], str]]:
    """evaluate(code, expression) -> the value, a str, or a traceback: in a fork of one process of the environment."""
    started: list[subprocess.Popen[str]] = []

    def ask(code: str, expression: str) -> str:
        if not started:
            command = [str(folder / "env/bin/python"), "-c", FORKS]
            how = {"cwd": folder, "env": environment(folder), "text": True}
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how))
        (process,) = started
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(f"{code}\nprint(json.dumps({expression}), flush=True)") + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    for process in started:
        process.communicate()


@pytest.fixture(scope="module")
def wheels(folder: Path) -> dict[str, Path]:
    """Made of sdists, which lie beside them."""
    uv(folder, "build", "-q", "--all-packages", "-o", folder / "dist", cwd=ROOT)
    return {name: next((folder / "dist").glob(f"mxep_{name}-*.whl")) for name in PACKAGES}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "integration"])  # which needs all: the next test
def test_package_installs_alone_and_imports(
    name: str, folder: Path, wheels: dict[str, Path], evaluate: Callable[[str, str], str]
) -> None:
    needed = {name} | siblings(name)
    install(folder, [wheels[n] for n in needed])
    code = f"import mxep.{name}, mxep; assert not hasattr(mxep, '__file__') or mxep.__file__ is None; " + "".join(
        f"import importlib.util as u; assert u.find_spec('mxep.{other}') is None, '{other} came along'; "
        for other in PACKAGES.keys() - needed
    )
    assert evaluate(code, f"mxep.{name}.__version__") == project(name)["version"]


@pytest.mark.slow
def test_wheels_made_of_sdists_carry_licence_and_configs_and_train(folder: Path, wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as file:
            (licence,) = (name for name in file.namelist() if name.endswith("dist-info/licenses/LICENSE"))
            assert file.read(licence) == (ROOT / "LICENSE").read_bytes()
            (metadata,) = (name for name in file.namelist() if name.endswith("dist-info/METADATA"))
            said = email.message_from_bytes(file.read(metadata))
        assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
        assert said.get_all("Classifier") == project(name)["classifiers"]
        assert said["Description-Content-Type"] == "text/markdown"
        (sdist,) = (folder / "dist").glob(f"mxep_{name}-*.tar.gz")
        with tarfile.open(sdist) as file:
            files = {member.partition("/")[2] for member in file.getnames()}
        assert files >= {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"src/mxep/{name}/py.typed"}
    with zipfile.ZipFile(wheels["integration"]) as file:
        carried = {name.partition("/configs/")[2]: file.read(name) for name in file.namelist() if "/configs/" in name}
    assert carried == {
        str(path.relative_to(ROOT / "configs")): path.read_bytes() for path in ROOT.glob("configs/**/*.yaml")
    }
    install(folder, [*wheels.values(), f"{wheels['integration']}[command]"])
    small = ("model=tiny", "parallel=single", "data.max_bytes=100000", "data.batch=2", "train.valid_batches=1")
    command = [str(folder / "env/bin/mxep"), *small, "train.steps=1", "train.compare=false", "hydra.run.dir=trained"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment(folder))
    assert done.returncode == 0, done.stderr
    assert "held-out text" in done.stdout
    assert list((folder / "trained/mxfp8/step-000001/model").glob("*.safetensors"))


def test_no_package_claims_the_namespace() -> None:
    assert not [p for path in PACKAGES.values() for p in path.glob("src/mxep/__init__.py")]


def test_every_package_is_versioned_typed_and_documented() -> None:
    for name, path in PACKAGES.items():
        assert project(name)["name"] == f"mxep-{name}"
        assert (path / f"src/mxep/{name}/py.typed").exists()
        assert project(name)["version"] in (path / "CHANGELOG.md").read_text()
        assert "```python" in (path / "README.md").read_text()
        pythons = {c for c in project(name)["classifiers"] if c.startswith("Programming Language")}
        assert project(name)["requires-python"] == ">=3.11,<3.14"
        assert pythons == {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
        cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
        assert (cited["version"], cited["license"]) == (project(name)["version"], project(name)["license"])
        (author,) = cited["authors"]
        assert project(name)["authors"] == [author]
        assert any(c.startswith("Development Status") for c in project(name)["classifiers"])


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_says_its_version(name: str) -> None:
    """That of the installed distribution; sources that are only on the path import, too."""
    package = importlib.import_module(f"mxep.{name}")
    not_installed = {"side_effect": importlib.metadata.PackageNotFoundError}
    with unittest.mock.patch("importlib.metadata.version", **not_installed):
        assert importlib.reload(package).__version__ == "0+unknown"
    assert importlib.reload(package).__version__ == importlib.metadata.version(f"mxep-{name}")
    assert package.__version__ == project(name)["version"]


def test_commits_are_checked_as_ci_checks_before_its_tests() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    ci = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("uv run ")]
    assert [*(hook["entry"] for hook in local["hooks"]), 'uv run pytest -m ""'] == ci


@pytest.mark.parametrize("name", sorted(PACKAGES.keys() - {"integration"}))  # which is a command
def test_public_names_are_documented(name: str) -> None:
    module = __import__(f"mxep.{name}", fromlist=["*"])
    for public in module.__all__:
        thing = getattr(module, public)
        if callable(thing) or isinstance(thing, type):
            assert thing.__doc__, f"mxep.{name}.{public} has no docstring"
