"""Layout: offsets within a workspace's buffer, and the op ids that ranks compare in an exchange.

A buffer has these regions, for W ranks, T_max tokens per rank and K experts per token:

    signals     (CHANNELS, W) int64                signal pad: one signal per channel and sender, `kernels/signals.py`
    counters    (NUM_COUNTERS,) int64              counters of this rank, which no peer touches
    dispatches  (W,) int64                         dispatch number of each sender, see `RoutingPlan.dispatch`
    rows        (W * T_max, row_bytes) uint8       slots (source rank, token)
    ids         (W, T_max, K) int32                expert ids of each sender
    values      (W, T_max, K) fp32                 routing weights of a dispatch, row values of a combine
    num_tokens  (W,) int32                         number of tokens of each sender

Signals, counters and dispatches come first and have the same offsets in every layout. So workspaces with different
layouts can share buffers. Every region and every row starts at a multiple of 16 bytes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mxep.runtime.lengths import room_for

ALIGNMENT = 16
ROWS_ALIGNMENT = 128
CHUNKS = 16
"""Maximum number of chunks into which an exchange's rows are cut. Each chunk has its own signal."""
CHANNELS = 1 + CHUNKS
"""Signals per sender: one for its tables, and one for each chunk of rows."""
NUM_COUNTERS = 2 + CHANNELS + 2
"""Counters, in this order: exchanges of tables; exchanges of rows; programs that arrived, per channel; programs that
arrived at the end of a combine; tickets drawn by programs of a combine."""
STEPS = ("barrier", "dispatch_tables", "dispatch", "combine", "refused")
"""Kinds of exchange. An op id holds the index. A rank that cannot dispatch sends "refused", so that its peers raise."""

PE_SHIFT = 40
"""A put's destination is one int64: PE (process rank of NVSHMEM) << 40 | byte in the buffer of that PE. -1: no put."""
TABLES, ROWS = 0, 1
"""Index of the channel for tables, and of the channel for the first chunk of rows."""
ANY_ID = 2**31 - 1
"""Value of num_experts if E, the number of experts, is unknown. Any nonnegative id is valid then."""

NEW = -1
"""Dispatch number that a layer without a layer number sends in a new dispatch. It matches all new dispatches."""
LAYERS, FAILURES = 2**16, 2**12
"""Layer numbers and failure counts wrap around at these values. So a 32-bit header word holds both and a 2-bit step."""


def new_dispatch(layer: int, failures: int) -> int:
    """Dispatch number that a new dispatch sends, which gets its own number only with its tables.

    It is -1 - (layer + failures * 2**16), or -1 for an unknown layer.
    layer: number of the layer in its group, from 1. 0: unknown.
    failures: number of forwards and backwards of this rank that raised after they had sent something.
    """
    return NEW - ((layer - 1) % (LAYERS - 1) + 1 + failures % FAILURES * LAYERS) if layer else NEW


def differ(number: int, other: int) -> bool:
    """True if the dispatch numbers of two ranks show that they are in different dispatches.

    The kernels' `compare_dispatches` has the same rule.
    """
    return number != other and max(number, other) != NEW


def describe_dispatch(number: int) -> str:
    """Describe a dispatch number in words, for error messages."""
    if number >= NEW:
        return f"dispatch {number}" if number > 0 else "a new one"
    failures, layer = divmod(NEW - number, LAYERS)
    again = f", after {failures} of its passes failed" if failures else ""
    return f"a new one of layer {layer}{again}"


def round_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def num_owners(num_experts: int, num_local_experts: int) -> int:
    """O, the number of ranks for which a plan counts rows.

    All ranks if the number of experts is known and a multiple of num_local_experts. Otherwise 1, only this rank.
    """
    known = num_experts != ANY_ID and num_experts % num_local_experts == 0
    return num_experts // num_local_experts if known else 1


def step_of(op_id: int) -> str:
    return STEPS[(op_id >> 24) & 7]


@dataclass(frozen=True)
class Layout:
    """Sizes of a buffer, and the byte offsets of its regions (`*_start`).

    world_size: W. max_tokens: T_max. top_k: K. row_bytes: bytes per row, a multiple of 16. num_slots: W * T_max.
    mark: a hash of the sizes from 0 to 12, part of op ids. It shows if ranks use different layouts.
    """

    world_size: int
    max_tokens: int
    top_k: int
    row_bytes: int
    num_slots: int = field(init=False, compare=False)
    mark: int = field(init=False, compare=False)
    counters_start: int = field(init=False, compare=False)
    dispatches_start: int = field(init=False, compare=False)
    rows_start: int = field(init=False, compare=False)
    ids_start: int = field(init=False, compare=False)
    values_start: int = field(init=False, compare=False)
    num_tokens_start: int = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        found = {"num_slots": self.world_size * self.max_tokens}
        found["mark"] = (3 * self.max_tokens + 5 * self.top_k + 7 * self.row_bytes) % 13
        table_bytes = round_up(found["num_slots"] * self.top_k * 4, ALIGNMENT)
        found["counters_start"] = round_up(CHANNELS * self.world_size * 8, ALIGNMENT)
        found["dispatches_start"] = found["counters_start"] + NUM_COUNTERS * 8
        found["rows_start"] = round_up(found["dispatches_start"] + self.world_size * 8, ROWS_ALIGNMENT)
        found["ids_start"] = found["rows_start"] + found["num_slots"] * self.row_bytes
        found["values_start"] = found["ids_start"] + table_bytes
        found["num_tokens_start"] = found["values_start"] + table_bytes
        found["nbytes"] = found["num_tokens_start"] + round_up(self.world_size * 4, ALIGNMENT)
        self.__dict__.update(found)  # past `frozen`

    def room_for(self, tokens: int) -> int:
        """Number of rows to allocate for a batch: ``tokens`` rounded up so that shapes repeat, at most T_max."""
        return max(tokens, min(room_for(tokens), self.max_tokens))

    def op_id(self, step: str, number: int) -> int:
        """Op id of an exchange: the step, a number below 2**24 and the layout's mark. It must be equal on all ranks.

        number: for rows, the bytes of a row. For "dispatch_tables", K. For "refused", the tokens of a batch that is too
            large, or 0 if the batch has invalid ids.
        """
        assert 0 <= number < 1 << 24, number
        return self.mark << 27 | STEPS.index(step) << 24 | number

    def dispatches(self, buffer: Tensor) -> Tensor:
        return buffer[self.dispatches_start :][: self.world_size * 8].view(torch.int64)

    def rows(self, buffer: Tensor) -> Tensor:
        return buffer[self.rows_start : self.ids_start].view(-1, self.row_bytes)

    def ids(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self.ids_start, torch.int32)

    def values(self, buffer: Tensor) -> Tensor:
        return self._table(buffer, self.values_start, torch.float32)

    def num_tokens(self, buffer: Tensor) -> Tensor:
        return buffer[self.num_tokens_start :][: self.world_size * 4].view(torch.int32)

    def _table(self, buffer: Tensor, start: int, dtype: torch.dtype) -> Tensor:
        shape = self.world_size, self.max_tokens, self.top_k
        return buffer[start:][: self.num_slots * self.top_k * 4].view(dtype).view(shape)
