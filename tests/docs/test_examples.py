"""Code of READMEs, the tutorial and the page of linears runs in order, and prints what its comments say."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mxep.quant
from mxep.integration.launch import Rank, run_ranks

ROOT = Path(__file__).resolve().parents[2]
QUANT, COMMS, GEMM = (f"packages/{name}/README.md" for name in ("quant", "comms", "gemm"))


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(page: str, *code: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """Its names, the lines that it prints, and those that comments behind its prints say."""
    names: dict[str, Any] = {"__name__": "example"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in code:
            exec(compile(block, page, "exec"), names)
    said = re.findall(r"print\(.*\)  # (.*)$", "\n".join(code), re.MULTILINE)
    return names, printed.getvalue().splitlines(), said


@pytest.mark.parametrize("page", ["packages/ep/README.md", "integration/README.md"])
def test_examples_run_as_they_stand(page: str) -> None:
    """Each by itself. The front page: integration/test_front_page.py."""
    assert blocks(page)
    for block in blocks(page):
        run(page, block)


def test_the_tutorial_prints_what_it_says() -> None:
    _, printed, said = run("docs/tutorial.md", *blocks("docs/tutorial.md"))
    assert len(said) == 6
    assert printed == said


def test_the_page_of_linears_prints_what_it_says() -> None:
    names, printed, said = run("docs/guides/linear.md", *blocks("docs/guides/linear.md"))
    assert names["same"](names["x"].float()).shape == (2, 100, 96)
    assert printed[1:] == said


def test_the_example_of_quant_prints_a_tensor() -> None:
    (example,) = blocks(QUANT)
    _, printed, _ = run(QUANT, example)
    wanted = "MXTensor(shape=(64, 128), E4M3, axis=-1, block_size=32, dtype=torch.bfloat16, device=cpu"
    assert wanted in "\n".join(printed)


def test_the_page_of_quant_names_everything_public() -> None:
    text = (ROOT / QUANT).read_text()
    assert [name for name in mxep.quant.__all__ if not re.search(rf"`[^`]*\b{name}\b", text)] == []


def test_the_examples_of_gemm_run() -> None:
    product, model, diagnostic = blocks(GEMM)
    names, *_ = run(GEMM, product)
    assert names["out"].shape == (100, 256)
    assert names["tokens"].grad.isfinite().all()
    assert not names["weights"].grad[1].any()
    assert names["once"].quantizations == 2
    _, printed, said = run(GEMM, model)
    assert printed == said
    _, printed, _ = run(GEMM, diagnostic)
    assert [line.split()[1] for line in printed[1:]] == ["forward", "wgrad"]


def run_example_of_comms(rank: Rank) -> list[str]:
    # run_ranks has brought the group up and takes it down.
    dist.init_process_group = lambda backend: None
    dist.destroy_process_group, destroy = (lambda: None), dist.destroy_process_group
    (example,) = blocks(COMMS)
    _, printed, _ = run(COMMS, example.replace("__main__", "example"))
    dist.destroy_process_group = destroy
    return printed


def test_the_example_of_comms_prints_what_its_comment_says() -> None:
    (wanted,) = re.findall(r"# 0: (\[.*?\]) +1: (\[.*?\])", (ROOT / COMMS).read_text())
    printed = run_ranks(run_example_of_comms, world_size=2, timeout=60, device="cpu")
    assert printed == [[f"{rank} {line}"] for rank, line in enumerate(wanted)]
