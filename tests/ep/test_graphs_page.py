"""The examples of docs/guides/graphs.md run: on a GPU as they stand, on a CPU with stand-ins for graphs."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "graphs.md"
MODEL, *EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def without_graphs(monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]) -> None:
    """What a graph would replay runs again."""

    class Graph:
        def replay(self) -> None:
            names["loss"].copy_(names["step"]())

        def reset(self) -> None: ...

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    stand_ins: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph": lambda graph, **options: contextlib.nullcontext(),
        "Stream": Stream,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "make_graphed_callables": lambda module, sample_args: module,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.slow
@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="torchrun made a process group")
@pytest.mark.parametrize("example", EXAMPLES, ids=["compile", "make_graphed_callables", "step"])
def test_the_example_trains(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    names: dict[str, Any] = {"__name__": "example"}
    model = MODEL
    if not torch.cuda.is_available():
        without_graphs(monkeypatch, names)
        # Inductor compiles such layers as C++ in test_compiled.py and test_graphs.py; here it would take half a minute.
        example = example.replace('mode="reduce-overhead"', 'backend="aot_eager"')
        assert "torch.compile(" not in example or "aot_eager" in example
        model = MODEL.replace('"cuda", 256', '"cpu", 32')
        assert model != MODEL
    exec(compile(model, str(PAGE), "exec"), names)
    exec(compile(example, str(PAGE), "exec"), names)
    assert names["loss"].isfinite()
    torch.manual_seed(0)  # as the page does before it makes the model
    before = dict(names["make_model"]().named_parameters())
    after = {name: p for name, p in names["model"].named_parameters() if "norm" not in name}  # lr is small in bf16
    assert len(after) == 6
    assert not any(torch.equal(p, before[name]) for name, p in after.items())
