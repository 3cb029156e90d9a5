"""Seconds of a first step with no compiled kernel on disk, and of the next process's.

    python integration/benchmarks/first_step.py RANKS [FILE.json]

Eight MoE layers with residuals, Qwen3-30B's sizes: D 2048, F 768, 128 experts, top-8, 4096 tokens a rank, eager,
forward and backward. Imports and the process group come before the clock starts. "one by one": as it would be without
`mxep.ep.rehearse`. "full cache": the step of a second process. Times are rank 0's. Each row has ranks of its own.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = [(recipe, how) for recipe in ("mxfp8", "bf16") for how in ("one by one", "side by side", "full cache")]
SIZES = {"dim": 2048, "hidden_dim": 768, "num_experts": 128, "top_k": 8}
TOKENS, LAYERS = 4096, 8


def step(recipe: str, how: str) -> None:
    """Print rank 0's row."""
    import torch
    import torch.distributed as dist
    from triton import knobs

    from mxep.ep import MoE, rehearse

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(rank)
    if ranks > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    if how == "one by one":
        rehearse._rehearse = lambda *_: None
    compiled: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **_: compiled.append(not cache_hit)
    torch.manual_seed(0)
    layers = [MoE(*SIZES.values(), recipe=recipe, device="cuda", max_tokens=TOKENS) for _ in range(LAYERS)]
    x = torch.randn(TOKENS, SIZES["dim"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if ranks > 1:
        dist.barrier()
    torch.cuda.synchronize()
    began, out = time.perf_counter(), x
    for layer in layers:
        out = out + layer(out)
    torch.cuda.synchronize()
    forward = time.perf_counter() - began
    out.backward(x.detach())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for each in (out, x.grad, *(weight.grad for layer in layers for weight in layer.experts.parameters())):
        assert each is not None
        local = each.to_local() if hasattr(each, "to_local") else each
        digest.update(local.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    if rank == 0:
        row = {"recipe": recipe, "how": how, "seconds": round(seconds, 2), "forward": round(forward, 2)}
        print("row", json.dumps(row | {"compiled": sum(compiled), "digest": digest.hexdigest()[:16]}), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    from mxep.integration.report import provenance, write_json

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
    if sys.argv[2:]:
        write_json(provenance(f"first_step.py {ranks}", None) | {"ranks": ranks, "rows": rows}, [Path(sys.argv[2])])


if __name__ == "__main__":
    step(*sys.argv[2:4]) if sys.argv[1] == "--step" else main()
