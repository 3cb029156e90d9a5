"""Layout: where things lie in a workspace's buffer. One place that both ends of a move compute offsets from.

    rows        (num_rows + W, row_bytes) uint8    slots (source rank, token), or expert-major rows in the direct move;
                                                   then one spare row a rank, for what it must not send
    ids         (W, T_max, K) int32                the senders' tables
    values      (W, T_max, K) fp32                 routing weights on the way out, row values on the way home
    num_tokens  (W,) int32                         T of each sender

Every region starts on a multiple of 16 bytes, and so does every row.
"""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

ALIGNMENT = 16


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Sizes of a buffer; ops take it as a list of ints, :meth:`ints`.

    Attributes:
        world_size: W. max_tokens: T_max. top_k: K. row_bytes: a multiple of 16. num_rows: at least W * T_max.
    """

    world_size: int
    max_tokens: int
    top_k: int
    row_bytes: int
    num_rows: int

    def ints(self) -> list[int]:
        return list(astuple(self))

    @property
    def num_slots(self) -> int:
        return self.world_size * self.max_tokens

    @property
    def nbytes(self) -> int:
        return self._num_tokens_start + round_up(self.world_size * 4, ALIGNMENT)

    def rows(self, buffer: Tensor) -> Tensor:
        size = (self.num_rows + self.world_size) * self.row_bytes
        return buffer[:size].view(-1, self.row_bytes)

    def spare_row(self, rank: int) -> int:
        return self.num_rows + rank

    def ids(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self._ids_start).view(torch.int32).view(self._table_shape)

    def values(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self._values_start).view(torch.float32).view(self._table_shape)

    def num_tokens(self, buffer: Tensor) -> Tensor:
        return buffer[self._num_tokens_start :][: self.world_size * 4].view(torch.int32)

    @property
    def _table_shape(self) -> tuple[int, int, int]:
        return self.world_size, self.max_tokens, self.top_k

    @property
    def _table_bytes(self) -> int:
        return self.num_slots * self.top_k * 4

    @property
    def _ids_start(self) -> int:
        return (self.num_rows + self.world_size) * self.row_bytes

    @property
    def _values_start(self) -> int:
        return self._ids_start + round_up(self._table_bytes, ALIGNMENT)

    @property
    def _num_tokens_start(self) -> int:
        return self._values_start + round_up(self._table_bytes, ALIGNMENT)

    def _table(self, buffer: Tensor, start: int) -> Tensor:
        return buffer[start : start + self._table_bytes]
