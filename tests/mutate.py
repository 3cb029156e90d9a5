"""Mutation run: change one line at a time, and see whether its tests notice.

    uv run python tests/mutate.py                   # 40 statements, in place: use a clean checkout of its own
    uv run python tests/mutate.py --share 1/2       # every second of them; --list only shows them

A statement is drawn if the hash of (seed, file, its text) is among the smallest, so edits elsewhere leave the draw as
it is. All statements of shipped source with an operator, a constant or a call's argument take part. Docstrings,
annotations and texts do not. The tests of a file are those named after it, those that import it, and those that use
what it defines. A test file notices a mutant if it fails with it and passes without.
"""

import argparse
import ast
import functools
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("integration/src/**/*.py")])
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARE |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
ARITHMETIC |= {ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift}
ARITHMETIC |= {ast.RShift: ast.LShift, ast.BitXor: ast.BitOr, ast.MatMult: ast.Add, ast.Pow: ast.Mult}
NOT_ITS_OWN = {"body", "orelse", "finalbody", "handlers", "cases", "annotation", "returns", "decorator_list", "bases"}
SECONDS = 280
MOST_FILES = 7


class Mutant(NamedTuple):
    """One changed expression: where it is, how it reads, how it reads then."""

    path: Path
    line: int
    first: int
    last: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.before!r} -> {self.after!r}"


def draw(number: int, seed: int) -> list[Mutant]:
    """The mutants, one a statement, in the order of their hashes."""
    found = []
    for path in SOURCES:
        text = path.read_text()
        for statement in statements(ast.parse(text)):
            segment = ast.get_source_segment(text, statement) or ""
            name = f"{seed} {path.relative_to(ROOT)} {segment}"
            rank = hashlib.sha256(name.encode()).hexdigest()
            if choices := list(mutants(path, text, statement)):
                found.append((rank, choices[int(rank[-8:], 16) % len(choices)]))
    return [mutant for _, mutant in sorted(found)[:number]]


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Simple statements, and the heads of others, but imports and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def mutants(path: Path, text: str, statement: ast.stmt) -> Iterator[Mutant]:
    """All mutants of a statement's own expressions."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in expressions(statement):
        for after in changed(node):
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = text.encode()[first:last].decode()
            yield Mutant(path, node.lineno, first, last, before, f"({after})")


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement, without those of statements within it, annotations, texts and f-strings."""
    for field, value in ast.iter_fields(statement):
        if field in NOT_ITS_OWN:
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from inner(part)


def inner(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return
    if isinstance(node, ast.expr):
        yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from inner(part)


def changed(node: ast.expr) -> Iterator[str]:
    """How an expression may read instead."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        yield ast.unparse(ast.Compare(node.left, [COMPARE[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        yield ast.unparse(ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values))
    elif isinstance(node, ast.UnaryOp):
        yield ast.unparse(node.operand)
    elif isinstance(node, ast.IfExp):
        yield ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1)
    elif isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield ast.unparse(ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :]))
        if len(node.args) > 1 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            swapped = [node.args[1], node.args[0], *node.args[2:]]
            yield ast.unparse(ast.Call(node.func, swapped, node.keywords))


def tests_of(path: Path) -> list[Path]:
    """Test files of a source file, those that say most of it first; the names of its importers count a tenth."""
    package = path.relative_to(ROOT).parts[1] if path.is_relative_to(ROOT / "packages") else "integration"
    names = dict.fromkeys(defined(path), 1.0)
    for other in SOURCES:
        if other != path and module_of(path) in imported(other):
            names = {**dict.fromkeys(defined(other), 0.1), **names}
    scores = {}
    for test in ROOT.glob("tests/**/test_*.py"):
        text = test.read_text()
        words = set(re.findall(r"\w+", text))
        score = sum(weight for name, weight in names.items() if name in words)
        score += 3 * (module_of(path) in imported(test))
        score += 10 * (test.stem in (f"test_{path.stem}", f"test_{path.stem}_kernels"))
        score += 4 * test.stem.startswith(f"test_{path.stem}") + 2 * (test.parent.name == package and score > 0)
        if score:
            scores[test] = score
    return sorted(scores, key=lambda test: (-scores[test], str(test)))[:MOST_FILES]


@functools.cache
def defined(path: Path) -> frozenset[str]:
    """Names of a file's functions, classes and `@op`s."""
    body = ast.parse(path.read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef))


def module_of(path: Path) -> str:
    """mxep.quant.fold, of a file of sources."""
    return ".".join(path.with_suffix("").parts[path.parts.index("mxep", path.parts.index("src")) :])


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Modules that a file imports, each with those that a `from` may name."""
    found = set()
    here = module_of(path).split(".") if "src" in path.parts else []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*here[: len(here) - node.level], *filter(None, [node.module])] if node.level else [node.module or ""]
            )
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def survives(mutant: Mutant) -> str:
    """What is said of a mutant: which tests noticed, or that none did."""
    for test in tests_of(mutant.path):
        if not passes(test, mutant) and passes(test):
            return f"noticed by {test.name}"
    return f"SURVIVES {[test.name for test in tests_of(mutant.path)]}"


@functools.cache
def passes(test: Path, mutant: Mutant | None = None) -> bool:
    """Whether a test file passes, in a while, with a mutant or without."""
    whole = mutant.path.read_bytes() if mutant else b""
    if mutant:
        mutant.path.write_bytes(whole[: mutant.first] + mutant.after.encode() + whole[mutant.last :])
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", "", str(test)]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS).returncode in (0, 5)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if mutant:
            mutant.path.write_bytes(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--share", default="1/1", help="i/n: the i-th of every n")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="mutants whose line holds this text")
    given = parser.parse_args()
    share, of = map(int, given.share.split("/"))
    for mutant in [m for m in draw(given.number, given.seed) if given.only in str(m)][share - 1 :: of]:
        began = time.monotonic()
        said = [test.name for test in tests_of(mutant.path)] if given.list else survives(mutant)
        print(f"{mutant}\n    {said} ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
