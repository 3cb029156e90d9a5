"""The first row of each block of an all-to-all: which exchange it belongs to. Ranks compare what came with their own.

    header   number of the dispatch * 4 + step (1 dispatch, 2 redispatch, 3 combine), int32; other bytes are 0. A new
             dispatch has no number yet: it sends which layer's it is (`TokenDispatcher.begin`)

A rank that leaves out an exchange, or makes it in another order, would else be taken at its word: blocks have one size
whatever they hold. The number comes from the plan on the device, so that graphs may hold all this. CPUs raise at once;
a GPU's host reads what was found without waiting for it, at the next exchange or `check()`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.comms import NEW, PeersDisagree, describe_dispatch
from mxep.runtime.replay import replayed

from .memory import made_to_stay

STEPS = "", "dispatch", "redispatch", "combine"
ANY_NEW = NEW * 4 + STEPS.index("dispatch")


class Headers:
    """Of a dispatcher. ranks: of the group, by block."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._found: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """On each device (1 + W,) int32: whether headers differed, and the first that did; and a copy for the host."""
        self._new: dict[tuple[torch.device, int], Tensor] = {}

    def new(self, number: int, device: torch.device) -> Tensor:
        """(1,) int32: what a dispatch sends for a number."""
        if (device, number) not in self._new:
            made = made_to_stay(device, lambda: torch.full((1,), number, dtype=torch.int32, device=device))
            self._new[device, number] = made
        return self._new[device, number]

    def mark(self, rows: Tensor, heads: Tensor, number: Tensor, step: str) -> None:
        """Write them into rows (R, n) uint8. heads: (W,) int64 the first row of each block. number: (1,) int32."""
        _mark([rows, heads, number], STEPS.index(step))

    def compare(self, rows: Tensor, heads: Tensor, number: Tensor, step: str) -> None:
        """Those that came with what this rank is at. Raises PeersDisagree, on CUDA at a later :meth:`check`."""
        device = rows.device
        if device not in self._found:
            self._found[device] = made_to_stay(device, lambda: self._make(device))
        found, seen = self._found[device]
        _compare([rows, heads, number, found], STEPS.index(step))
        if device.type == "cuda":
            seen.copy_(found, non_blocking=True)
        else:
            self.check()

    def check(self) -> None:
        """Raise what is known. Waits for nothing."""
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


def _word(number: Tensor, step: int, size: int) -> Tensor:
    return (number * 4 + step).view(torch.uint8)[:size]


def _padded(rows: Tensor) -> Tensor:
    """(N, 1 to 4) uint8 -> (N,) int32."""
    return F.pad(rows, (0, 4 - rows.shape[1])).view(torch.int32)[:, 0]


@replayed
def _mark(tensors: list[Any], step: int) -> list[Tensor]:
    rows, heads, number = tensors
    size = min(4, rows.shape[1])
    rows[:, :size].index_copy_(0, heads, _word(number, step, size).expand(len(heads), size))
    return [rows]


@replayed
def _compare(tensors: list[Any], step: int) -> list[Tensor]:
    """[rows, heads, number, found (1 + W,), which is updated once]."""
    rows, heads, number, found = tensors
    size = min(4, rows.shape[1])
    seen, own = _padded(rows[:, :size].index_select(0, heads)), _padded(_word(number, step, size)[None])
    differ = ((seen != own) & (torch.maximum(seen, own) != ANY_NEW)).any().int()
    words = torch.cat((differ[None], seen))
    found.copy_(torch.where(found[0] > 0, found, words * differ))
    return [found]
