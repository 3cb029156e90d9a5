"""docs/reference has all public names: read with ast, as the site's builder reads them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {name: ROOT / f"packages/{name}/src/mxep/{name}" for name in ("runtime", "quant", "comms", "gemm", "ep")}


def public_names(package: Path) -> list[str]:
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    raise AssertionError(f"{package} has no __all__")


@pytest.mark.parametrize("name", PACKAGES)
def test_names_are_in_the_reference(name: str) -> None:
    """The package's line brings all of `__all__`, but for functions named as their modules, which want a line each."""
    lines = re.findall(r"^::: (\S+)$", (ROOT / f"docs/reference/{name}.md").read_text(), re.MULTILINE)
    package = PACKAGES[name]
    named_as_modules = {each for each in public_names(package) if (package / f"{each}.py").exists()}
    wanted = {f"mxep.{name}", *(f"mxep.{name}.{each}.{each}" for each in named_as_modules)}
    assert wanted <= set(lines)
