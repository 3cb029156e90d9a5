"""Seconds of a first step without compiled kernels on disk, and of the next process's first step.

    python integration/benchmarks/first_step.py [FILE.json]

Eight MoE layers with residuals, Qwen3-30B's sizes: D 2048, F 768, 128 experts, top-8, 4096 tokens a rank, eager,
forward and backward. Imports and the process group do not count. "one by one": without `mxep.ep.rehearse`. "full
cache": the step of a second process. Each row has ranks of its own, one for each visible GPU.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from triton import knobs

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.script import rank, ranks, run, seconds, started_ranks
from mxep.ep import MoE, rehearse

ROWS = [(recipe, how) for recipe in ("mxfp8", "bf16") for how in ("one by one", "side by side", "full cache")]
SIZES = 2048, 768, 128, 8  # D, F, experts, top-k
TOKENS, LAYERS = 4096, 8


def step(recipe: str, how: str) -> None:
    """Print rank 0's row."""
    if how == "one by one":
        rehearse._rehearse = lambda *_: None
    compiled: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **_: compiled.append(not cache_hit)
    torch.manual_seed(0)
    layers = [MoE(*SIZES, recipe=recipe, device="cuda", max_tokens=TOKENS) for _ in range(LAYERS)]
    out = x = torch.randn(TOKENS, SIZES[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def whole() -> None:
        nonlocal out
        for layer in layers:
            out = out + layer(out)
        out.backward(x.detach())

    row = {"recipe": recipe, "how": how, "ranks": ranks(), "seconds": seconds(whole), "compiled": sum(compiled)}
    if rank() == 0:
        print("row", json.dumps(row), flush=True)


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu"]
    with tempfile.TemporaryDirectory() as folder:
        for recipe, how in ROWS:
            # A full cache is that of the row before.
            cache = Path(folder, recipe + (" one by one" if how == "one by one" else ""))
            command = [*start, __file__, "--step", recipe, how]
            where = os.environ | {"TRITON_CACHE_DIR": str(cache)}
            done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=200)
            found = [line[4:] for line in done.stdout.splitlines() if line.startswith("row ")]
            yield json.loads(found[0]) if found else {"recipe": recipe, "how": how, "error": done.stderr[-400:]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        with started_ranks():
            step(*sys.argv[2:4])
    else:
        run(measure)
