"""Layout: where things lie in a workspace's buffer, and the op ids that ranks compare in an exchange.

    signals     (CHANNELS, W) int64                the signal pad: one for each sender, see `kernels/signals.py`
    counters    (NUM_COUNTERS,) int64              the rank's local counters, which no peer touches
    dispatches  (W,) int64                         which dispatch each sender's rows belong to, see `RoutingPlan`
    rows        (W * T_max, row_bytes) uint8       slots (source rank, token)
    ids         (W, T_max, K) int32                the senders' tables
    values      (W, T_max, K) fp32                 routing weights of a dispatch, row values of a combine
    num_tokens  (W,) int32                         T of each sender

Signals come first, then counters and dispatches, at the same offset whatever the layout: layouts may share buffers.
Every region starts on a multiple of 16 bytes, and so does every row.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mxep.runtime.lengths import room_for

ALIGNMENT = 16
ROWS_ALIGNMENT = 128
CHUNKS = 16
"""Pieces that rows travel in at most, each with a signal of its own."""
CHANNELS = 1 + CHUNKS
"""Signals of a buffer: one for tables, one for each chunk of rows."""
NUM_COUNTERS = 2 + CHANNELS + 2
"""Exchanges of tables and of rows; programs that arrived at each signal, and at the end; the tile counter."""
STEPS = ("barrier", "dispatch_tables", "dispatch", "combine", "refused")
"""Kinds of exchanges; op ids hold their index. "refused": by this rank, whose peers should not wait for it."""

PE_SHIFT = 40
"""A destination of a put is one int64: PE (the number NVSHMEM gives a process) << 40 | byte in its buffer; -1: none."""
TABLES, ROWS = 0, 1
"""Channels of tables and of the first rows."""

NEW = -1
"""What ranks send with a new dispatch of a layer without a number; it is like any other new one."""
LAYERS, FAILURES = 2**16, 2**12
"""Numbers of layers and of failures start again there: headers of 32 bits hold both, and two bits more."""


def new_dispatch(layer: int, failures: int) -> int:
    """What ranks send with a new dispatch, which has no number yet: -1 - (layer + failures * 2^16).

    layer: its number among the layers of the group, from 1 on; 0: not known. failures: passes that raised on this rank
    after they had sent something.
    """
    return NEW - ((layer - 1) % (LAYERS - 1) + 1 + failures % FAILURES * LAYERS) if layer else NEW


def differ(number: int, other: int) -> bool:
    """Whether two ranks are in different dispatches, as far as they know: `kernels/signals.py` has the same."""
    return number != other and max(number, other) != NEW


def describe_dispatch(number: int) -> str:
    """For an error."""
    if number >= NEW:
        return f"dispatch {number}" if number > 0 else "a new one"
    failures, layer = divmod(NEW - number, LAYERS)
    again = f", after {failures} of its passes failed" if failures else ""
    return f"a new one of layer {layer}{again}"


def round_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def step_of(op_id: int) -> str:
    return STEPS[(op_id >> 24) & 7]


@dataclass(frozen=True)
class Layout:
    """Sizes of a buffer.

    Attributes:
        world_size: W. max_tokens: T_max. top_k: K. row_bytes: a multiple of 16.
    """

    world_size: int
    max_tokens: int
    top_k: int
    row_bytes: int

    def room_for(self, tokens: int) -> int:
        """Rows that a batch of this rank has room for."""
        return max(tokens, min(room_for(tokens), self.max_tokens))

    @cached_property
    def num_slots(self) -> int:
        return self.world_size * self.max_tokens

    @cached_property
    def counters_start(self) -> int:
        return round_up(CHANNELS * self.world_size * 8, ALIGNMENT)

    @cached_property
    def rows_start(self) -> int:
        return round_up(self.dispatches_start + self.world_size * 8, ROWS_ALIGNMENT)

    @cached_property
    def dispatches_start(self) -> int:
        return self.counters_start + NUM_COUNTERS * 8

    @cached_property
    def ids_start(self) -> int:
        return self.rows_start + self.num_slots * self.row_bytes

    @cached_property
    def values_start(self) -> int:
        return self.ids_start + round_up(self._table_bytes, ALIGNMENT)

    @cached_property
    def num_tokens_start(self) -> int:
        return self.values_start + round_up(self._table_bytes, ALIGNMENT)

    @cached_property
    def nbytes(self) -> int:
        return self.num_tokens_start + round_up(self.world_size * 4, ALIGNMENT)

    @cached_property
    def mark(self) -> int:
        """A number below 16 that tells most layouts apart."""
        sizes = (self.max_tokens, self.top_k, self.row_bytes)
        return sum(size * prime for size, prime in zip(sizes, (3, 5, 7))) % 13

    def op_id(self, step: str, number: int) -> int:
        """What all ranks of an exchange must have alike: the step, the bytes of its rows and the layout's mark.

        number: less than 2^24. Of dispatch_tables it is K; of a refusal the tokens that there is no room for, 0 for
        wrong ids.
        """
        return self.mark << 27 | STEPS.index(step) << 24 | number

    def dispatches(self, buffer: Tensor) -> Tensor:
        return buffer[self.dispatches_start :][: self.world_size * 8].view(torch.int64)

    def rows(self, buffer: Tensor) -> Tensor:
        return buffer[self.rows_start : self.ids_start].view(-1, self.row_bytes)

    def ids(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self.ids_start).view(torch.int32).view(self._table_shape)

    def values(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self.values_start).view(torch.float32).view(self._table_shape)

    def num_tokens(self, buffer: Tensor) -> Tensor:
        return buffer[self.num_tokens_start :][: self.world_size * 4].view(torch.int32)

    @cached_property
    def _table_shape(self) -> tuple[int, int, int]:
        return self.world_size, self.max_tokens, self.top_k

    @cached_property
    def _table_bytes(self) -> int:
        return self.num_slots * self.top_k * 4

    def _table(self, buffer: Tensor, start: int) -> Tensor:
        return buffer[start : start + self._table_bytes]
