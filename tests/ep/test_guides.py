"""The pages of docs/guides: their code runs on a CPU and prints what they say.

Pages without Python are left out, and so are those of OWN_TESTS.

Blocks fenced as ```python run in order, a page at a time; those that begin with "# torchrun" on 4 ranks, in order, too.
Where a line is ``print(...)  # something: why``, something is a line of what the page prints, up to a colon.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep.problem import whole
from ranks import Context, distributed

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
OWN_TESTS = ("graphs.md", "transformers.md", "fine-tune-one-gpu.md")
"""graphs.md: below; the others: integration/test_transformers_page.py and test_transformers_lora_page.py."""
PAGES = sorted(page.name for page in GUIDES.glob("*.md") if "```python" in page.read_text())
PAGES = [page for page in PAGES if page not in OWN_TESTS]


def blocks(page: str, *, on_ranks: bool = False) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (GUIDES / page).read_text(), re.DOTALL)
    return [block for block in found if block.startswith("# torchrun") is on_ranks]


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="torchrun made a process group")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_and_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    names: dict[str, Any] = {"__name__": "example"}
    for block in found:
        exec(compile(block, page, "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    for said in re.findall(r"^ *print\(.*\)  # ([^:\n]+)", "\n".join(found), re.MULTILINE):
        assert said in printed


MODEL, *EXAMPLES = blocks("graphs.md")


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
def test_an_example_of_graphs_trains(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    names: dict[str, Any] = {"__name__": "example"}
    model = MODEL
    if not torch.cuda.is_available():
        without_graphs(monkeypatch, names)
        # Inductor compiles such layers as C++ in test_autograd_compiled.py; here it would take half a minute.
        example = example.replace('mode="reduce-overhead"', 'backend="aot_eager"')
        assert "torch.compile(" not in example or "aot_eager" in example
        model = MODEL.replace('"cuda", 256', '"cpu", 32')
        assert model != MODEL
    exec(compile(model, "graphs.md", "exec"), names)
    exec(compile(example, "graphs.md", "exec"), names)
    assert names["loss"].isfinite()
    torch.manual_seed(0)  # as the page does before it makes the model
    before = dict(names["make_model"]().named_parameters())
    after = {name: p for name, p in names["model"].named_parameters() if "norm" not in name}  # lr is small in bf16
    assert len(after) == 6
    assert not any(torch.equal(p, before[name]) for name, p in after.items())


@pytest.mark.slow
@distributed(4, device="cpu")
def test_a_checkpoint_of_fsdp2_goes_on_at_another_degree(ctx: Context, tmp_path: Path) -> None:
    def state(names: dict[str, Any], model: str, optimizer: str) -> list[torch.Tensor]:
        parameters = list(names[model].parameters())
        moments = [names[optimizer].state[p][kind] for p in parameters for kind in ("exp_avg", "exp_avg_sq", "step")]
        return [whole(x) for x in (*parameters, *moments)]

    names: dict[str, Any] = {"FOLDER": str(tmp_path), "DEVICE": ctx.device.type}
    save, load = blocks("checkpoints.md", on_ranks=True)
    exec(compile(save, "checkpoints.md", "exec"), names)
    before_last_step = state(names, "model", "optimizer")
    load, _, last = load.rpartition("print(")
    exec(compile(load, "checkpoints.md", "exec"), names)
    for saved, loaded in zip(before_last_step, state(names, "again", "other"), strict=True):
        assert torch.equal(saved, loaded)
    assert names["again"].moe.experts.down_proj.to_local().shape[0] == 2
    exec(compile(f"losses = ({last}", "checkpoints.md", "exec"), names)
    torch.testing.assert_close(*names["losses"], rtol=2**-7, atol=0.0)
    dist.barrier(ctx.group)
