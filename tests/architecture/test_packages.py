"""Each distribution installs alone, with what it declares and nothing else, and imports; the namespace stays open."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
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
    """Where each environment takes the place of the one before, so that torch's bytecode is made once for all."""
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize("name", PACKAGES)
def test_package_installs_alone_and_imports(name: str, folder: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not on PATH")
    needed = {name} | siblings(name)
    if "VIRTUAL_ENV" not in os.environ and not (ROOT / ".venv").exists():
        pytest.skip("the workspace environment is not managed by uv")
    run = {"check": True, "capture_output": True, "text": True, "cwd": folder}
    shutil.rmtree(folder / "env", ignore_errors=True)
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, "env"], **run)
    python = folder / "env/bin/python"
    # Hard links to uv's cache: the third-party wheels were fetched when the workspace was set up.
    constraints = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]
    (folder / "constraints.txt").write_text("\n".join(constraints))
    install = [uv, "pip", "install", "-q", "--python", str(python), "-c", "constraints.txt"]
    subprocess.run([*install, *(str(PACKAGES[n]) for n in needed)], **run)

    code = f"import mxep.{name}, mxep; assert not hasattr(mxep, '__file__') or mxep.__file__ is None; " + "".join(
        f"import importlib.util as u; assert u.find_spec('mxep.{other}') is None, '{other} came along'; "
        for other in PACKAGES.keys() - needed
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    subprocess.run([python, "-c", code], env=environment, **run)


def test_no_package_claims_the_namespace() -> None:
    assert not [p for path in PACKAGES.values() for p in path.glob("src/mxep/__init__.py")]


def test_every_package_is_versioned_typed_and_documented() -> None:
    for name, path in PACKAGES.items():
        assert project(name)["name"] == f"mxep-{name}"
        assert (path / f"src/mxep/{name}/py.typed").exists()
        assert project(name)["version"] in (path / "CHANGELOG.md").read_text()
        assert "```python" in (path / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(PACKAGES.keys() - {"integration"}))  # which is a command
def test_public_names_are_documented(name: str) -> None:
    module = __import__(f"mxep.{name}", fromlist=["*"])
    for public in module.__all__:
        thing = getattr(module, public)
        if callable(thing) or isinstance(thing, type):
            assert thing.__doc__, f"mxep.{name}.{public} has no docstring"


@pytest.mark.parametrize("folder", ["packages/gemm", "packages/ep", "integration", "."])
def test_readme_examples_run_as_they_stand(folder: str) -> None:
    """quant and comms have tests of theirs."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / folder / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, f"{folder}/README.md", "exec"), {"__name__": "example"})
