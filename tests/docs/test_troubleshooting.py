"""docs/troubleshooting.md has every error message that a user can meet: sources are read with ast, not imported.

A message is the string of a `raise`, with `…` for each value in it. It is found in the `raise` itself, in a variable of
the same function, in what an exception's class gives to `super().__init__` or `cls`, in what is given to a function of
TELLERS, and in what a function of MAKERS returns or yields. On the page it is a code span that begins an item
of a list, or a line of a text block. There `…` stands for anything: a line covers all messages that differ in a
name or a size.

Not looked for are INTERNAL exceptions, a `raise` that passes another's message on with no words of its own, assertions,
and what integration's benchmarks (TOOLS) raise, except for a ConfigError.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("integration/**/*.py")]
INTERNAL = ("NotCaptured", "NotCapturedNow", "KeyboardInterrupt")
"""NotCaptured: caught where it is raised, and the function runs without a graph."""
TOOLS = ("integration/benchmarks/",)
TELLERS = ("refuse", "report", "tell")
"""Functions that raise what they are given, or let others raise it."""
MAKERS = (
    *("_complaints", "_check_own_model", "_check_ranks", "_check_transformers", "out_of_bounds"),
    *("complaint", "tokenizer_complaint"),
    *("unknown", "_difference", "_unlike", "complaints"),
    *("_what_did_not_fit", "unsupported_reason", "changed", "_taken"),
)
"""Functions that return, or yield, what others raise."""
VALUE = "…"
LEAST_WORDS = 3
"""That a line has, to cover more than itself."""


def text_of(node: ast.AST | None) -> str | None:
    """A string's text, with `…` for values; None if it is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) or VALUE for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right) if text_of(left) or text_of(right):
            return (text_of(left) or VALUE) + (text_of(right) or VALUE)
    return None


def name_of(node: ast.AST) -> str:
    """`f` of f, a.f and a().f."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Messages(ast.NodeVisitor):
    """`found`: (line, message) of each in a module."""

    def __init__(self, source: str, *, tool: bool = False) -> None:
        self.found: list[tuple[int, str]] = []
        self.tool = tool
        self.functions: list[ast.FunctionDef] = []
        self.exceptions = [False]
        self.visit(ast.parse(source))

    def add(self, node: ast.AST | None, *, follow: bool = True) -> None:
        text = text_of(node)
        if node is None or (text is None and not isinstance(node, ast.Name | ast.BinOp | ast.IfExp)):
            return
        if text is not None and re.search(r"\w", text):
            # `{recipe}` in a plain string is filled in by str.format
            self.found.append((node.lineno, re.sub(r"\{\w+\}", VALUE, text)))
        elif isinstance(node, ast.IfExp):
            self.add(node.body)
            self.add(node.orelse)
        elif follow:  # no words of its own: what the function assigns to its names
            names = {name_of(one) for one in ast.walk(node)} - {""}
            for one in ast.walk(self.functions[-1]) if self.functions else ():
                if isinstance(one, ast.Assign) and names.intersection(map(name_of, one.targets)):
                    text = text_of(one.value)
                    self.found += [(one.lineno, text)] if text and re.search(r"\w", text) else []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.exceptions.append(any(re.search("Error|Exception|Disagree", name_of(base)) for base in node.bases))
        self.generic_visit(node)
        self.exceptions.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node)
        self.generic_visit(node)
        self.functions.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call) and node.exc.args:
            kind = name_of(node.exc.func)
            if kind not in INTERNAL and (kind == "ConfigError" or not self.tool):
                self.add(node.exc.args[0])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = name_of(node.func)
        if name in TELLERS or (self.exceptions[-1] and name in ("__init__", "cls")):
            for argument in node.args:
                self.add(argument)
        elif self.functions and name_of(node.func).endswith(("Exceeded", "Error")):  # made here, raised by a caller
            for argument in node.args[:1] if not self.tool else ():
                self.add(argument, follow=False)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return | ast.Yield) -> None:
        if self.functions and self.functions[-1].name in MAKERS:
            self.add(node.value)
        self.generic_visit(node)

    visit_Yield = visit_Return


@cache
def messages() -> dict[str, str]:
    """Message -> where it is."""
    found = {}
    for path in sorted(SOURCES):
        where = path.relative_to(ROOT).as_posix()
        tool = any(part in where for part in TOOLS)
        found |= {text: f"{where}:{line}" for line, text in Messages(path.read_text(), tool=tool).found}
    return found


def lines_of(page: str) -> list[str]:
    """What the page says of messages, with `…` for anything; its first section has messages of others, too."""
    page = page.partition("## In any package")[2]
    items = re.findall(r"^- `([^`]+)`:", page, re.MULTILINE)
    return items + [
        line for block in re.findall(r"^```text\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()
    ]


@cache
def pattern_of(line: str) -> re.Pattern[str] | None:
    if len(re.findall(r"[A-Za-z]\w*", line)) < LEAST_WORDS:
        return None
    return re.compile(".*".join(map(re.escape, line.split(VALUE))), re.DOTALL)


def covers(line: str, message: str) -> bool:
    """With two words or fewer a line covers itself alone."""
    if line == message:
        return True
    return (pattern := pattern_of(line)) is not None and pattern.fullmatch(message) is not None


def missing_from(lines: list[str], found: dict[str, str]) -> list[str]:
    return [f"{where}: {text}" for text, where in found.items() if not any(covers(line, text) for line in lines)]


def test_every_message_is_on_the_page() -> None:
    missing = missing_from(lines_of(PAGE.read_text()), messages())
    assert not missing, "docs/troubleshooting.md lacks:\n" + "\n".join(missing)


def test_every_line_is_a_message() -> None:
    stale = [line for line in lines_of(PAGE.read_text()) if not any(covers(line, text) for text in messages())]
    assert not stale, "docs/troubleshooting.md has what nothing raises:\n" + "\n".join(stale)


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError('never heard of this')",
        "raise ValueError(f'{x}: never heard of {y}') from None",
        "raise NotImplementedError('never heard ' + x)",
        "def f():\n    why = f'never heard of {x}'\n    raise ValueError(why)",
        "def f():\n    late = f'{x} never heard'\n    raise Failed(f'{late}\\n{stacks}', x)",
        "class E(RuntimeError):\n    def __init__(self, x):\n        super().__init__(f'never heard of {x}')",
        "class E(RuntimeError):\n    def of(cls, x):\n        return cls(f'never heard of {x}')",
        "report([x], 'never heard of {recipe}')",
        "def unsupported_reason(x):\n    return None if x else 'never heard of this'",
        "def _complaints(x):\n    yield f'{x}: never heard of this'",
    ],
)
def test_a_new_message_is_missed(source: str) -> None:
    (found,) = {text for _, text in Messages(source).found}
    assert "never heard" in found
    assert missing_from(lines_of(PAGE.read_text()), {found: "here"}) == [f"here: {found}"]


def test_what_is_internal_is_not_looked_for() -> None:
    assert not Messages("raise NotCaptured('arguments overlap')\nraise\nraise error\nraise E(f'{x}: {y}')").found
    assert not Messages("raise ValueError('of a tool')", tool=True).found
    assert Messages("raise ConfigError('of a tool')", tool=True).found


def test_values_stand_for_themselves() -> None:
    assert covers("…: got …, want …", "…: got …, want …")
    assert not covers("…: got …, want …", "size: got …, want more")
    assert covers("…got shape …, want …", "x: got shape …, want (M, D)")
    assert not covers("axis: got …", "axis: wants -1")
