"""The example in the package's README does what it says."""

import contextlib
import io
import re
from pathlib import Path

import torch.distributed as dist

from mxep.integration.launch import Rank, run_ranks

README = Path(__file__).parents[2] / "packages" / "comms" / "README.md"


def run_example(rank: Rank) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    # run_ranks has brought the group up and takes it down.
    dist.init_process_group = lambda backend: None
    dist.destroy_process_group, destroy = (lambda: None), dist.destroy_process_group
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    dist.destroy_process_group = destroy
    return printed.getvalue().strip()


def test_the_example_prints_what_its_comment_says():
    (wanted,) = re.findall(r"# 0: (\[.*?\]) +1: (\[.*?\])", README.read_text())
    printed = run_ranks(run_example, world_size=2, timeout=60, device="cpu")
    assert printed == [f"{rank} {line}" for rank, line in enumerate(wanted)]
