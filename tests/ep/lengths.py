"""Steps of lengths that never come twice, ms: what records cost at first, beside steps that are called and warm ones.

    PYTHONPATH=$(ls -d packages/*/src | tr '\n' ':') python tests/ep/lengths.py [FILE.json]

One layer on one GPU, all experts on it, forward + backward, called eagerly: D 2048, F 768, 64 experts, top-8, T drawn
from 512 to 4096. "first" to "fourth" are the steps of a length: called, recorded, played for the first time, and warm.
They are medians over the lengths, each with the device idle before it. "drawn" is a step's time where all lengths
follow each other.
"""

import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import triton

from mxep.ep import MoE
from mxep.runtime.replay import no_replays

LENGTHS = 20


def milliseconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def measure(recipe: str) -> dict[str, float]:
    torch.manual_seed(0)
    layer = MoE(2048, 768, 64, 8, recipe=recipe, dispatcher="local", device="cuda")

    def step(tokens: int) -> None:
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).backward(x.detach())
        layer.zero_grad(set_to_none=True)

    drawn = random.Random(0).sample(range(512, 4097), 3 * LENGTHS)
    with no_replays():
        for tokens in drawn[:LENGTHS]:  # kernels compile
            step(tokens)
        called = [milliseconds(partial(step, tokens)) for tokens in drawn[LENGTHS : 2 * LENGTHS] for _ in range(2)][
            1::2
        ]
        all_called = milliseconds(lambda: [step(tokens) for tokens in drawn[LENGTHS : 2 * LENGTHS]])
    times = [[milliseconds(partial(step, tokens)) for _ in range(4)] for tokens in drawn[LENGTHS : 2 * LENGTHS]]
    first, second, third, fourth = (statistics.median(each) for each in zip(*times))
    fresh = milliseconds(lambda: [step(tokens) for tokens in drawn[2 * LENGTHS :]])
    again, play, warm = (milliseconds(lambda: [step(tokens) for tokens in drawn[2 * LENGTHS :]]) for _ in range(3))
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    watched = [milliseconds(partial(step, tokens)) for tokens in range(4097, 4097 + LENGTHS) for _ in range(2)][1::2]
    torch.cuda.memory._record_memory_history(enabled=None)
    others = range(4200, 4200 + LENGTHS)
    unwatched = [milliseconds(partial(step, tokens)) for tokens in others for _ in range(2)][1::2]
    found = {"called": statistics.median(called), "first": first, "second": second}
    found |= {"third": third, "fourth": fourth}
    found |= {"drawn, called": all_called / LENGTHS, "drawn, never before": fresh / LENGTHS}
    found |= {"drawn, the second time": again / LENGTHS, "drawn, the third": play / LENGTHS}
    found |= {"drawn, warm": warm / LENGTHS}
    found |= {"second, memory history on": statistics.median(watched), "second, off": statistics.median(unwatched)}
    fixed = [milliseconds(lambda: [step(2048) for _ in range(LENGTHS)]) for _ in range(3)][-1]
    return found | {"fixed 2048": fixed / LENGTHS}


def main() -> None:
    rows = []
    for recipe in ("mxfp8", "bf16"):
        rows.append({"recipe": recipe, **{name: round(ms, 3) for name, ms in measure(recipe).items()}})
        print(rows[-1], flush=True)
    if len(sys.argv) > 1:
        of = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        of |= {"command": "python tests/ep/lengths.py", "rows": rows}
        with contextlib.closing(open(sys.argv[1], "w")) as file:
            json.dump(of, file, indent=1)


if __name__ == "__main__":
    main()
