"""The README's example runs, and shows what it says."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "packages" / "gemm" / "README.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["out"].shape == (100, 256)
    assert names["tokens"].grad.isfinite().all()
    assert not names["weights"].grad[1].any()
    assert names["cache"].misses == 1
