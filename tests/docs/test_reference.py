"""docs/reference has all public names: read with ast, as the site's builder reads them."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    **{f"mxep.{name}": f"packages/{name}/src" for name in ("runtime", "quant", "comms", "gemm", "ep")},
    "mxep.integration.transformers": "integration/src",
}
SOURCES = tuple(ROOT / source for source in {*PACKAGES.values()})


def directives(page: str) -> dict[str, list[str] | None]:
    """What a page has a line `::: name` for -> the members that its options list."""
    found = {}
    for name, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", page, re.MULTILINE):
        found[name] = (yaml.safe_load(options) or {}).get("options", {}).get("members")
    return found


PAGES = {page.stem: directives(page.read_text()) for page in (ROOT / "docs/reference").glob("*.md")}


def names_of(module: str) -> list[str] | None:
    """Names that a module defines or imports, without importing it; None if there is no such module."""
    for source in SOURCES:
        for file in (source / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")):
            if file.exists():
                return [name for node in ast.walk(ast.parse(file.read_text())) for name in _named(node)]
    return None


def _named(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [each.asname or each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []


def public_names(package: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((package / "__init__.py").read_text())):
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == "__all__":
                found |= {name for name in ast.literal_eval(node.value) if not name.startswith("__")}
    assert found, f"{package} has no __all__"
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_names_are_in_the_reference(name: str) -> None:
    """A package's line lists its names, the most used first. Functions named as their modules have own lines."""
    package = ROOT / PACKAGES[name] / name.replace(".", "/")
    names = public_names(package)
    as_modules = {each for each in names if (package / f"{each}.py").exists()}
    page = PAGES[name.split(".")[1]]
    assert set(page[name] or names - as_modules) == names - as_modules
    own = [line.rpartition(".")[2] for line in page if line.startswith(f"{name}.")]
    assert as_modules <= set(own)


@pytest.mark.parametrize("page", PAGES)
def test_the_reference_names_what_there_is(page: str) -> None:
    for line in PAGES[page]:
        module, _, name = line.rpartition(".")
        assert names_of(line) is not None or name in (names_of(module) or ()), line
