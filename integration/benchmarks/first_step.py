"""Seconds of a first step without compiled kernels on disk, and of the next process's first step.

    python integration/benchmarks/first_step.py RANKS [FILE.json]

Eight MoE layers with residuals, Qwen3-30B's sizes: D 2048, F 768, 128 experts, top-8, 4096 tokens a rank, eager,
forward and backward. Imports and the process group do not count. "one by one": without `mxep.ep.rehearse`. "full
cache": the step of a second process. Each row has ranks of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from triton import knobs

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.script import rank, save, seconds, started_ranks
from mxep.ep import MoE, rehearse

ROWS = [(recipe, how) for recipe in ("mxfp8", "bf16") for how in ("one by one", "side by side", "full cache")]
SIZES = {"dim": 2048, "hidden_dim": 768, "num_experts": 128, "top_k": 8}
TOKENS, LAYERS = 4096, 8


def step(recipe: str, how: str) -> None:
    """Print rank 0's row."""
    if how == "one by one":
        rehearse._rehearse = lambda *_: None
    compiled: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **_: compiled.append(not cache_hit)
    torch.manual_seed(0)
    layers = [MoE(*SIZES.values(), recipe=recipe, device="cuda", max_tokens=TOKENS) for _ in range(LAYERS)]
    out = x = torch.randn(TOKENS, SIZES["dim"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    row: dict[str, object] = {"recipe": recipe, "how": how}

    def forward() -> None:
        nonlocal out
        began = time.perf_counter()
        for layer in layers:
            out = out + layer(out)
        torch.cuda.synchronize()
        row["forward"] = round(time.perf_counter() - began, 2)

    def whole() -> None:
        forward()
        out.backward(x.detach())

    row["seconds"] = round(seconds(whole), 2)
    digest = hashlib.sha256()
    for each in (out, x.grad, *(weight.grad for layer in layers for weight in layer.experts.parameters())):
        assert each is not None
        local = each.to_local() if hasattr(each, "to_local") else each
        digest.update(local.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    if rank() == 0:
        print("row", json.dumps(row | {"compiled": sum(compiled), "digest": digest.hexdigest()[:16]}), flush=True)


def main() -> None:
    ranks, rows = int(sys.argv[1]), []
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        for recipe, how in ROWS:
            # A full cache is that of the row before.
            cache = Path(folder, recipe + (" one by one" if how == "one by one" else ""))
            command = [*start, __file__, "--step", recipe, how]
            where = os.environ | {"TRITON_CACHE_DIR": str(cache)}
            done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=200)
            found = [line[4:] for line in done.stdout.splitlines() if line.startswith("row ")]
            rows.append(json.loads(found[0]) if found else {"recipe": recipe, "how": how, "error": done.stderr[-400:]})
            print(rows[-1], flush=True)
    save(next(iter(sys.argv[2:]), None), rows, ranks=ranks)


if __name__ == "__main__":
    if sys.argv[1] == "--step":
        with started_ranks():
            step(*sys.argv[2:4])
    else:
        main()
