"""What every launch of a move is told: where the buffers are, who we are, how many programs may run."""

from dataclasses import dataclass

import triton
from torch import Tensor

from mxep.comms.layout import Layout
from mxep.comms.moves import signature


@dataclass(frozen=True)
class Launch:
    """One move's launch.

    Attributes:
        layout: of the buffer. rank: ours. pointers: (W,) int64, the buffer's address on each rank.
        state: (3,) int64, see `signals.py`. step: the move's kind, of ``STEPS``.
        max_sms: how many multiprocessors may be used.
        clock: whether there is a GPU's clock to wait by.
    """

    layout: Layout
    rank: int
    pointers: Tensor
    state: Tensor
    step: str
    max_sms: int
    clock: bool

    def signature(self, number: int) -> int:
        return signature(self.step, number, self.layout.mark)


def rows_at_once(tile_bytes: int, row_bytes: int, rows: int, programs: int) -> int:
    """Rows that a program takes at a time, a power of two: a tile full, but fewer where programs would go idle."""
    count = max(1, tile_bytes // triton.next_power_of_2(row_bytes))
    while count > 1 and rows < count * programs:
        count //= 2
    return int(count)
