"""The README's example runs as printed."""

import re
from pathlib import Path

import pytest

import mxep.quant

README = Path(__file__).parents[2] / "packages" / "quant" / "README.md"


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 1
    exec(compile(examples[0], str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "MXTensor(shape=(64, 128), E4M3, axis=-1, block_size=32, dtype=torch.bfloat16, device=cpu" in printed


def test_the_readme_names_everything_public() -> None:
    text = README.read_text()
    assert [name for name in mxep.quant.__all__ if not re.search(rf"`[^`]*\b{name}\b", text)] == []
