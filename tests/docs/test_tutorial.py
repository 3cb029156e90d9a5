"""The code of docs/tutorial.md runs in order, on a CPU, and prints what its comments say."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def test_the_tutorial_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "tutorial"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    said = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks), re.MULTILINE)
    assert len(said) == 6
    assert capsys.readouterr().out.splitlines() == said
