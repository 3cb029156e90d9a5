"""State crosses functions by name, in dataclasses and arguments, never in lists whose places mean something."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))
POSITIONAL = "list[Any]", "list[Tensor | None]", "tuple[Any, ...]"
BORDERS = {
    "runtime": "the recorder takes objects of tensors apart",
    "ep/autograd.py": "torch.library's ops, and autograd's",
    "gemm/product.py": "torch.library's ops",
}
"""Packages and files where lists are another's form."""
NAMES = {"__torch_function__", "__torch_dispatch__", "__reduce_ex__", "forward", "backward"}
"""Methods that torch calls with a tuple of arguments, or whose result it takes by place."""
ALLOWED = {
    ("gemm/convert_mode.py", "report_missing"),  # a hook of torch's modules
    ("quant/quantize.py", "_parts"),  # of one tensor, all alike
}


def annotations(function: ast.FunctionDef) -> Iterator[str]:
    given = function.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
        if each.annotation is not None:
            yield ast.unparse(each.annotation)
    if function.returns is not None:
        yield ast.unparse(function.returns)


def positional(tree: ast.AST) -> Iterator[str]:
    """Functions that take or return such a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(form in each for each in annotations(node) for form in POSITIONAL):
            yield node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_takes_or_returns_tensors_by_place(path: Path) -> None:
    file = str(path).partition("/mxep/")[2]
    if any(file.startswith(border) for border in BORDERS):
        return
    found = {name for name in positional(ast.parse(path.read_text())) if name not in NAMES}
    assert not {name for name in found if (file, name) not in ALLOWED}


def test_it_finds_them() -> None:
    tree = ast.parse("def f(tensors: list[Any]): ...\ndef g() -> tuple[Any, ...]: ...\ndef h(x: list[Tensor]): ...")
    assert list(positional(tree)) == ["f", "g"]


def test_what_is_allowed_is_still_there() -> None:
    files = {str(path).partition("/mxep/")[2]: path for path in SOURCES}
    for file, name in ALLOWED:
        assert name in set(positional(ast.parse(files[file].read_text())))
