"""Layout: where things lie in a workspace's buffer. One place that both ends of a move compute offsets from.

    signals     (CHANNELS, W) int64                a word for each sender, see `kernels/signals.py`
    own         (OWN_WORDS,) int64                 the rank's own counters, which no peer touches
    rows        (num_rows, row_bytes) uint8        slots (source rank, token), or expert-major rows in the direct move
    ids         (W, T_max, K) int32                the senders' tables
    values      (W, T_max, K) fp32                 routing weights on the way out, row values on the way home
    num_tokens  (W,) int32                         T of each sender

Signals and counters come first: they lie at the same place whatever the layout, so layouts may share buffers.
Every region starts on a multiple of 16 bytes, and so does every row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
ROWS_ALIGNMENT = 128
CHUNKS = 16
"""Pieces that rows travel in at most, each with a signal of its own."""
CHANNELS = 1 + CHUNKS
"""Signals of a buffer: one for tables, one for each chunk of rows."""
OWN_WORDS = 2 + CHANNELS + 2
"""How often tables and rows have moved; programs that arrived at each signal, and at the end; tiles handed out."""


def round_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


@dataclass(frozen=True)
class Layout:
    """Sizes of a buffer.

    Attributes:
        world_size: W. max_tokens: T_max. top_k: K. row_bytes: a multiple of 16. num_rows: at least W * T_max.
    """

    world_size: int
    max_tokens: int
    top_k: int
    row_bytes: int
    num_rows: int

    @property
    def num_slots(self) -> int:
        return self.world_size * self.max_tokens

    @property
    def signals_start(self) -> int:
        return 0

    @property
    def own_start(self) -> int:
        return round_up(CHANNELS * self.world_size * 8, ALIGNMENT)

    @property
    def rows_start(self) -> int:
        return round_up(self.own_start + OWN_WORDS * 8, ROWS_ALIGNMENT)

    @property
    def ids_start(self) -> int:
        return self.rows_start + self.num_rows * self.row_bytes

    @property
    def values_start(self) -> int:
        return self.ids_start + round_up(self._table_bytes, ALIGNMENT)

    @property
    def num_tokens_start(self) -> int:
        return self.values_start + round_up(self._table_bytes, ALIGNMENT)

    @property
    def nbytes(self) -> int:
        return self.num_tokens_start + round_up(self.world_size * 4, ALIGNMENT)

    @property
    def mark(self) -> int:
        """A number below 16 that tells most layouts apart."""
        sizes = (self.max_tokens, self.top_k, self.row_bytes, self.num_rows)
        return sum(size * prime for size, prime in zip(sizes, (3, 5, 7, 11))) % 13

    def rows(self, buffer: Tensor) -> Tensor:
        return buffer[self.rows_start : self.ids_start].view(-1, self.row_bytes)

    def ids(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self.ids_start).view(torch.int32).view(self._table_shape)

    def values(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self.values_start).view(torch.float32).view(self._table_shape)

    def num_tokens(self, buffer: Tensor) -> Tensor:
        return buffer[self.num_tokens_start :][: self.world_size * 4].view(torch.int32)

    @property
    def _table_shape(self) -> tuple[int, int, int]:
        return self.world_size, self.max_tokens, self.top_k

    @property
    def _table_bytes(self) -> int:
        return self.num_slots * self.top_k * 4

    def _table(self, buffer: Tensor, start: int) -> Tensor:
        return buffer[start : start + self._table_bytes]
