"""Modules form no circle, take only public names of other packages, and stay short: read with ast, not imported."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    name: ROOT / folder / "src/mxep" / name
    for name, folder in {
        "runtime": "packages/runtime",
        "quant": "packages/quant",
        "comms": "packages/comms",
        "gemm": "packages/gemm",
        "ep": "packages/ep",
        "integration": "integration",
    }.items()
}
MOST_LINES = 500
# Besides a package's `__all__`, with a line each in its README.
PUBLIC_MODULES = {"mxep.quant.device"}
RUNTIME = "bundle", "launch", "lengths", "op", "record", "replay"
PUBLIC_MODULES |= {f"mxep.runtime.{name}" for name in RUNTIME}


def name_of(path: Path) -> str:
    """The dotted name: `.../src/mxep/ep/moe.py` is `mxep.ep.moe`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[len(parts) - parts[::-1].index("src") :]).removesuffix(".__init__")


MODULES = {name_of(path): path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))}


@cache
def bound_in(package: str) -> set[str]:
    """Names that its __init__ imports: `mxep.quant.quantize` is the function, though there is a module of this name."""
    tree = ast.parse(MODULES[package].read_text() if package in MODULES else "")
    return {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


class Imports(ast.NodeVisitor):
    """What a module imports, as {module: names}: in functions and as launchers of ops, too; not for type checkers."""

    def __init__(self, module: str, source: str, *, is_package: bool = False) -> None:
        self.package = module if is_package else module.rpartition(".")[0]
        self.found: dict[str, set[str]] = {}
        self.visit(ast.parse(source))

    def add(self, module: str, *names: str) -> None:
        self.found.setdefault(module, set()).update(names)

    def visit_If(self, node: ast.If) -> None:
        for_type_checkers = ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"
        for child in node.orelse if for_type_checkers else ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = importlib.util.resolve_name("." * node.level + (node.module or ""), self.package)
        for name in (alias.name for alias in node.names):
            if f"{source}.{name}" in MODULES and name not in bound_in(source):  # a module, without its package
                self.add(f"{source}.{name}")
            else:
                self.add(source, name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """`quant.swiglu` after `from mxep import quant`."""
        source = f"mxep.{ast.unparse(node.value)}"
        if source in self.found:
            self.add(source, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`@op(..., launcher="module:function")`."""
        if isinstance(node.func, ast.Name) and node.func.id == "op":
            for launcher in (each.value for each in node.keywords if each.arg == "launcher"):
                module, function = ast.literal_eval(launcher).split(":")  # ValueError unless it is a plain string
                self.add(module, function)
        self.generic_visit(node)


def imports_of(module: str) -> dict[str, set[str]]:
    """Of the project's modules."""
    path = MODULES[module]
    found = Imports(module, path.read_text(), is_package=path.name == "__init__.py").found
    return {source: names for source, names in found.items() if source in MODULES}


def circle_in(imports: dict[str, Iterable[str]]) -> str:
    """The path of a circle, as `a -> b -> a` where a imports b; "" if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def test_modules_form_no_circle() -> None:
    """No import waits in a function because the file above it would fail: the shared part has a module of its own."""
    circle = circle_in({module: imports_of(module) for module in MODULES})
    assert not circle, f"modules import each other: {circle}"


@pytest.mark.parametrize(
    "source",
    [
        "from .b import f",
        "from mxep.x import b",
        "import mxep.x.b",
        "def f():\n    from .b import f",
        "if not TYPE_CHECKING:\n    from .b import f",
        "@op('mxep::f', fake=f, launcher='mxep.x.b:f')\ndef f(x): ...",
    ],
)
def test_circle_is_found(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "mxep.x.b", Path())
    imports = {"mxep.x.a": Imports("mxep.x.a", source).found, "mxep.x.b": Imports("mxep.x.b", "from . import a").found}
    assert circle_in(imports) == "", "`a` of a package is no module here"
    imports["mxep.x.b"] = Imports("mxep.x.b", "from .a import g").found
    assert circle_in(imports) in ("mxep.x.a -> mxep.x.b -> mxep.x.a", "mxep.x.b -> mxep.x.a -> mxep.x.b")


def test_imports_for_type_checkers_make_no_circle() -> None:
    assert Imports("mxep.x.a", "if TYPE_CHECKING:\n    from .b import f\nelse:\n    import c").found == {"c": set()}


@pytest.mark.parametrize("package", ["runtime", "quant", "comms"])
def test_gemm_and_ep_take_public_names_only(package: str) -> None:
    """Those of `__all__`, or of the modules that the package's README names."""
    public = set(importlib.import_module(f"mxep.{package}").__all__)
    users = [module for module in MODULES if module.startswith(("mxep.gemm", "mxep.ep"))]
    private = []
    for user in users:
        for source, names in imports_of(user).items():
            if source == f"mxep.{package}":
                private += [f"{user}: {source}.{name}" for name in names - public]
            elif source.startswith(f"mxep.{package}.") and source not in PUBLIC_MODULES:
                private.append(f"{user}: {source}")
            elif source in PUBLIC_MODULES:
                private += [f"{user}: {source}.{name}" for name in names if name.startswith("_")]
    assert not private


@pytest.mark.parametrize("module", sorted(PUBLIC_MODULES))
def test_public_modules_are_in_the_readme(module: str) -> None:
    package = PACKAGES[module.split(".")[1]]
    assert f"| `{module}` |" in (package.parents[2] / "README.md").read_text()


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES.values()}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_import_contracts_hold() -> None:
    """As CI checks them, so that a plain pytest run sees a broken one."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
