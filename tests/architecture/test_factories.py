"""Every call that makes a tensor says its dtype, and in packages its device: torch's defaults are the user's to set.

A script that calls `torch.set_default_dtype(torch.bfloat16)` would otherwise sum in bf16, and one that calls
`torch.set_default_device("cuda")` would read a constant of the CPU's path from a GPU. Read with ast, not imported.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = "lengths", "titan"
"""Of integration/benchmarks: they run alone, with torch's defaults."""
SOURCES = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("integration/**/*.py")]
SOURCES = [path for path in SOURCES if not (path.parent.name == "benchmarks" and path.stem in SCRIPTS)]
FACTORIES = {
    *("arange", "asarray", "as_tensor", "bartlett_window", "blackman_window", "empty", "empty_permuted"),
    *("empty_strided", "eye", "full", "hamming_window", "hann_window", "linspace", "logspace", "ones", "rand"),
    *("randn", "scalar_tensor", "tensor", "zeros"),
}
"""Functions of torch whose dtype is by default torch's, at least for some arguments."""
NAMELESS = {"Tensor", "FloatTensor", "complex", "polar", "normal", "get_default_dtype", "set_default_dtype"}
"""Functions and classes of torch that take no dtype, or use and change the default: not used here."""
ALIASES = {"torch", "th"}


def faults(source: str, *, device: bool) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of each call. A `**` may not stand for a dtype: nobody sees what is in it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in FACTORIES | NAMELESS - {"Tensor"}:
                    yield node.lineno, f"import of torch.{alias.name}: call it by this name"
        if not isinstance(node, ast.Call):
            continue
        partial = node.args and ast.unparse(node.func) in ("functools.partial", "partial")
        name = _of_torch(node.args[0] if partial else node.func)
        if name in NAMELESS:
            yield node.lineno, f"torch.{name}"
        if name in FACTORIES:
            given = {keyword.arg for keyword in node.keywords}
            if "dtype" not in given:
                yield node.lineno, f"torch.{name} without dtype"
            if device and not given & {"device", None}:
                yield node.lineno, f"torch.{name} without device"


def _of_torch(node: ast.expr) -> str | None:
    """`name` of torch.name."""
    named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ALIASES
    return node.attr if named else None  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_tensor_has_a_dtype(path: Path) -> None:
    found = [
        f"{path}:{line}: {what}"
        for line, what in faults(path.read_text(), device=path.is_relative_to(ROOT / "packages"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3)", ["torch.zeros without dtype", "torch.zeros without device"]),
        ("torch.tensor(1.0, **how)", ["torch.tensor without dtype"]),
        ("functools.partial(torch.rand, 3, device=d)", ["torch.rand without dtype"]),
        ("from torch import arange", ["import of torch.arange: call it by this name"]),
        ("torch.Tensor(3)", ["torch.Tensor"]),
        ("torch.full((), 1.0, dtype=torch.float32, device=d); x.new_zeros(3)", []),
    ],
)
def test_what_is_found(source: str, found: list[str]) -> None:
    assert [what for _, what in faults(source, device=True)] == found
