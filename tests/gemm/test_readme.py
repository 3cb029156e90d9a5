"""The README's example runs, and shows what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "packages" / "gemm" / "README.md"


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    product, model, diagnostic = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(product, names)
    assert names["out"].shape == (100, 256)
    assert names["tokens"].grad.isfinite().all()
    assert not names["weights"].grad[1].any()
    assert names["once"].quantizations == 2
    capsys.readouterr()
    exec(model, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", model)
    exec(diagnostic, {})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["forward", "wgrad"]


def test_the_page_of_linears_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = README.parents[2] / "docs" / "guides" / "linear.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["same"](names["x"].float()).shape == (2, 100, 96)
    assert capsys.readouterr().out.splitlines()[1:] == re.findall(r"print\(.*\)  # (.*)", example)
