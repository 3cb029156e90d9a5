"""Headers of all-to-alls: the first row of each block names its exchange. Ranks compare them with their own.

    header   number of the dispatch * 4 + step (1 dispatch, 2 redispatch, 3 combine), int32; other bytes are 0. A new
             dispatch has no number yet: it sends its layer's (`TokenDispatcher.begin`)

Blocks have one size whatever they hold. So without headers nobody would notice a rank that leaves out an exchange, or
makes it in another order. The number comes from the plan on the device, so graphs may hold all this. CPUs raise at
once. A GPU's host reads the findings without a sync, at the next exchange or `check()`.
"""

import torch
from torch import Tensor

from mxep.comms import PeersDisagree, compare_headers, describe_dispatch, mark_headers
from mxep.runtime.replay import replayed

from .memory import made_to_stay

STEPS = "", "dispatch", "redispatch", "combine"


class Headers:
    """Headers of a dispatcher. ranks: ranks of the group, by block."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._found: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """By device: (1 + W,) int32, 1 after a mismatch, then the headers of the first one; and a copy for the host."""
        self._new: dict[tuple[torch.device, int], Tensor] = {}

    def new(self, number: int, device: torch.device) -> Tensor:
        """(1,) int32 that a dispatch sends for a number."""
        if (device, number) not in self._new:
            made = made_to_stay(device, lambda: torch.full((1,), number, dtype=torch.int32, device=device))
            self._new[device, number] = made
        return self._new[device, number]

    def mark(self, rows: Tensor, sizes: Tensor, number: Tensor, step: str) -> None:
        """Write headers into rows (R, n) uint8. sizes: (W, any) int64, rows of blocks first. number: (1,) int32."""
        _mark(rows, sizes, number, step=STEPS.index(step))

    def compare(self, rows: Tensor, sizes: Tensor, number: Tensor, step: str) -> None:
        """Compare received headers with this rank's. Raises PeersDisagree, on CUDA in a later :meth:`check`."""
        device = rows.device
        if device not in self._found:
            self._found[device] = made_to_stay(device, lambda: self._make(device))
        found, seen = self._found[device]
        _compare(rows, sizes, number, found, step=STEPS.index(step))
        if device.type == "cuda":
            seen.copy_(found, non_blocking=True)
        else:
            self.check()

    def check(self) -> None:
        """Raise known mismatches. Waits for nothing."""
        for _, seen in self._found.values():
            differ, *words = seen.tolist() if int(seen.numpy()[0]) else [0]
            if differ:
                found = (f"rank {rank} at {_said(word)}" for rank, word in zip(self.ranks, words))
                raise PeersDisagree(f"rank {self.rank} met peers in other exchanges: {', '.join(found)}")

    def _make(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found = torch.zeros(1 + len(self.ranks), dtype=torch.int32, device=device)
        return found, torch.zeros_like(found, device="cpu", pin_memory=True) if device.type == "cuda" else found


def _said(word: int) -> str:
    number, step = word >> 2, word & 3
    return f"{STEPS[step]} of {describe_dispatch(number)}" if STEPS[step] else "none of this layer's"


@replayed
def _mark(rows: Tensor, sizes: Tensor, number: Tensor, *, step: int) -> Tensor:
    mark_headers(rows, sizes, number, step)
    return rows


@replayed
def _compare(rows: Tensor, sizes: Tensor, number: Tensor, found: Tensor, *, step: int) -> Tensor:
    """found: (1 + W,), which is updated once."""
    compare_headers(rows, sizes, number, found, step)
    return found
