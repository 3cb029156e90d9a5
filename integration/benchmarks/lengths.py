"""Cost of sequence lengths that never repeat: ms per step (forward + backward) of a layer in MXFP8 on one GPU.

    python integration/benchmarks/lengths.py [FILE.json]

D 2048, F 768, 64 experts, top-8, T drawn from 512 to 4096.

- "called", "recorded", "first play", "second play": the first four steps of a length, with the device idle before
  each. Medians over lengths.

The others are ms per step over 100 lengths in a row:

- "without records": replays are off. Median of three times.
- "never before": the first 100 lengths of a new layer.
- "others, never before": 100 other lengths, right after.
- "these again": the same other lengths once more. Median of three times.
"""

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.script import run, seconds
from mxep.ep import MoE
from mxep.runtime.lengths import room_for
from mxep.runtime.replay import no_replays

LENGTHS, LEAST, MOST = 100, 512, 4096


class Case:
    """A new layer, without records, and its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = MoE(2048, 768, 64, 8, recipe="mxfp8", device="cuda", dispatcher="local")

    def step(self, length: int) -> None:
        x = torch.randn(length, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.layer(x).backward(x.detach())
        self.layer.zero_grad(set_to_none=True)

    def milliseconds(self, lengths: Sequence[int]) -> float:
        """Mean ms of a step over these lengths."""

        def steps() -> None:
            for length in lengths:
                self.step(length)

        return 1e3 * seconds(steps) / len(lengths)


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    drawn = random.Random(0).sample(range(LEAST, MOST + 1), 2 * LENGTHS)
    drawn, others = drawn[:LENGTHS], drawn[LENGTHS:]
    case = Case()
    with no_replays():
        case.milliseconds(drawn)  # kernels compile
        row = {"without records": statistics.median(case.milliseconds(others) for _ in range(3))}
    rooms = sorted({room_for(tokens) for tokens in range(LEAST, MOST + 1)})
    random.Random(1).shuffle(rooms)
    times = [[case.milliseconds([tokens]) for _ in range(4)] for tokens in rooms]
    row |= zip(("called", "recorded", "first play", "second play"), map(statistics.median, zip(*times)))
    case = Case()
    row |= {"never before": case.milliseconds(drawn), "others, never before": case.milliseconds(others)}
    row["these again"] = statistics.median(case.milliseconds(others) for _ in range(3))
    yield row | {"rooms": len(rooms)}


if __name__ == "__main__":
    run(measure)
