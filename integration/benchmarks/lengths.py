"""Cost of sequence lengths that never come twice: ms a step (forward + backward) of a layer.

    python integration/benchmarks/lengths.py [FILE.json]
    torchrun --nproc-per-node 2 integration/benchmarks/lengths.py [FILE.json]

D 2048, F 768, 64 experts, top-8, T drawn from 512 to 4096. Over several GPUs each rank draws its own lengths, and
`max_tokens` is 4096. Times are rank 0's.

- "called", "recorded", "first play", "second play": four steps of one length, for which there is no record yet. The
  device is idle before each. Medians over lengths.

The others are ms a step over 100 lengths in a row:

- "without records": replays are off. Median of three times.
- "never before": the first 100 lengths of a new layer.
- "others, never before": 100 other lengths, right after.
- "these again": the same other lengths once more. Median of three times.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mxep.ep import MoE
from mxep.integration.report import provenance, write_json
from mxep.runtime.lengths import room_for
from mxep.runtime.replay import no_replays

LENGTHS, LEAST, MOST = 100, 512, 4096
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def milliseconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    if RANKS > 1:
        dist.barrier()
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


class Case:
    """A layer of which nothing is known yet, and its steps."""

    def __init__(self, recipe: str) -> None:
        torch.manual_seed(0)
        where: dict[str, Any] = {"dispatcher": "local"}
        if RANKS > 1:
            where = {"group": dist.group.WORLD, "max_tokens": MOST}
        self.layer = MoE(2048, 768, 64, 8, recipe=recipe, device="cuda", **where)

    def step(self, length: int) -> None:
        x = torch.randn(length, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.layer(x).backward(x.detach())
        self.layer.zero_grad(set_to_none=True)

    def each(self, lengths: Sequence[int]) -> float:
        """Milliseconds a step over these lengths, one after the other."""
        return milliseconds(lambda: [self.step(length) for length in lengths]) / len(lengths)


def measure(recipe: str) -> dict[str, float]:
    drawn = random.Random(RANK).sample(range(LEAST, MOST + 1), 2 * LENGTHS)
    drawn, others = drawn[:LENGTHS], drawn[LENGTHS:]
    case, found = Case(recipe), {}
    with no_replays():
        case.each(drawn)  # kernels compile
        found["without records"] = statistics.median(case.each(others) for _ in range(3))
    rooms = sorted({room_for(tokens) for tokens in range(LEAST, MOST + 1)})
    random.Random(1).shuffle(rooms)
    times = [[milliseconds(lambda tokens=tokens: case.step(tokens)) for _ in range(4)] for tokens in rooms]  # type: ignore[misc]
    found |= dict(zip(("called", "recorded", "first play", "second play"), map(statistics.median, zip(*times))))
    case = Case(recipe)
    found["never before"] = case.each(drawn)
    found["others, never before"] = case.each(others)
    found["these again"] = statistics.median(case.each(others) for _ in range(3))
    found["rooms"] = len(rooms)
    found["replays"] = sum(each.replays for each in case.layer.dispatcher.passes.values())
    return found


def main() -> None:
    if RANKS > 1:
        torch.cuda.set_device(RANK)
        dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    rows = []
    for recipe in ("mxfp8", "bf16"):
        found = measure(recipe)
        rows.append({"recipe": recipe} | {name: round(ms, 3) for name, ms in found.items()})
        if RANK == 0:
            print(rows[-1], flush=True)
    if RANK == 0 and sys.argv[1:]:
        write_json(provenance("lengths.py", None) | {"ranks": RANKS, "rows": rows}, [Path(sys.argv[1])])
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
