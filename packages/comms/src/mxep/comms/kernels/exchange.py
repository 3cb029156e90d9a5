"""KernelExchange: launches of the exchange's kernels, which store to the peers' addresses and meet at their end.

What does not change from call to call is worked out once: a call costs the host the launch and a few lines around it.
The current device is the transport's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.comms.cuda import CudaTransport
from mxep.comms.kernels import combine, dispatch, signals
from mxep.comms.launch import launch, next_power_of_2
from mxep.comms.layout import CHUNKS, Layout, round_up
from mxep.comms.plan import RoutingPlan
from mxep.comms.transport import SymmetricBuffer


class KernelExchange:
    """Of one workspace; `plain.py` says what each method does.

    num_sms: how many multiprocessors an exchange may use at most, None: the transport's.
    """

    def __init__(self, transport: CudaTransport, layout: Layout, experts_per_rank: int, num_sms: int | None) -> None:
        self.rank, self.state = transport.rank, transport.state
        self.layout, self.experts_per_rank = layout, experts_per_rank
        self.max_sms = min(num_sms or transport.max_sms, transport.max_sms)
        world_size, top_k = layout.world_size, layout.top_k
        self._ranks = {"W": world_size, "WP": next_power_of_2(world_size)}
        self._sizes = {**self._ranks, "K": top_k, "KP": next_power_of_2(top_k)}
        self._clock = {"CLOCK": transport.clock}
        self._tables = (
            layout.op_id("dispatch_tables", top_k), layout.ids_start, layout.values_start, layout.num_tokens_start,
            layout.counters_start,
        )  # fmt: skip
        self._dispatches: dict[Any, tuple[int, int, dict[str, Any]]] = {}
        self._combines: dict[Any, tuple[int, tuple[int, ...], dict[str, Any]]] = {}

    def refuse(self, buffer: SymmetricBuffer, tokens: int) -> None:
        scalars = self.rank, self.layout.op_id("refused", tokens), self.layout.counters_start
        launch(signals.refuse_kernel, (1,), buffer.pointers, *scalars, **self._ranks, num_warps=1)

    def dispatch_tables(self, buffer: SymmetricBuffer, expert_ids: Tensor, weights: Tensor) -> None:
        tokens, top_k = expert_ids.shape
        programs = max(1, min(-(-tokens * top_k // dispatch.TABLE_PAIRS), self.max_sms))
        launch(dispatch.dispatch_tables_kernel, (programs,),
            expert_ids, weights, buffer.pointers, self.state, tokens, self.layout.max_tokens, self.rank,
            self.experts_per_rank, *self._tables,
            **self._ranks, K=top_k, BLOCK=dispatch.TABLE_PAIRS, **self._clock, num_warps=8,
        )  # fmt: skip

    def dispatch(
        self, buffer: SymmetricBuffer, payload: Sequence[Tensor], expert_ids: Tensor, num_sms: int | None = None
    ) -> None:
        if len(payload) > dispatch.MOST_PARTS:
            payload = (torch.cat(tuple(payload), 1),)
        part0, part1 = dispatch.as_words(payload[0], 0), None
        sms = min(num_sms or self.max_sms, self.max_sms)
        key: tuple[Any, ...] = sms, part0.dtype, part0.shape[1]
        if len(payload) > 1:
            part1 = dispatch.as_words(payload[1], payload[0].shape[1])
            key = *key, part1.dtype, part1.shape[1]
        if key not in self._dispatches:
            self._dispatches[key] = self._dispatch_constants(sms, part0, part1)
        op_id, tile_tokens, constants = self._dispatches[key]
        tokens, layout = expert_ids.shape[0], self.layout
        block_t = dispatch.tokens_per_tile(tile_tokens, tokens, sms)
        launch(dispatch.dispatch_kernel, (max(1, min(-(-tokens // block_t), sms)),),
            expert_ids, part0, part1, buffer.pointers, self.state, tokens, layout.max_tokens, self.rank,
            self.experts_per_rank, op_id, layout.counters_start, layout.rows_start,
            **constants, BLOCK_T=block_t, **self._clock, num_warps=dispatch.NUM_WARPS,
        )  # fmt: skip

    def _dispatch_constants(self, sms: int, part0: Tensor, part1: Tensor | None) -> tuple[int, int, dict[str, Any]]:
        """(op id, tokens of the largest tile, constexprs)."""
        last = part0 if part1 is None else part1
        block0 = next_power_of_2(part0.shape[1])
        bytes0 = part0.shape[1] * part0.itemsize
        row_bytes = bytes0 + (0 if part1 is None else part1.shape[1] * part1.itemsize)
        tile_bytes = dispatch.TILE_BYTES * (4 if sms <= dispatch.FEW_PROGRAMS else 1)
        constants = {
            **self._sizes,
            "ROW_BYTES": self.layout.row_bytes,
            "WIDTH0": part0.shape[1],
            "BLOCK0": block0,
            "OFFSET1": bytes0,
            "WIDTH1": last.shape[1],
            "BLOCK1": next_power_of_2(last.shape[1]),
        }
        return self.layout.op_id("dispatch", row_bytes), tile_bytes // (block0 * part0.itemsize), constants

    def combine(
        self,
        buffer: SymmetricBuffer,
        rows: Tensor,
        row_values: Tensor | None,
        plan: RoutingPlan,
        expert_ids: Tensor,
        out: Tensor,
        values: Tensor | None,
    ) -> None:
        key = rows.dtype, rows.shape[1]
        if key not in self._combines:
            self._combines[key] = self._combine_constants(*key)
        programs, scalars, constants = self._combines[key]
        launch(combine.combine_kernel, (programs,),
            rows.contiguous(), None if row_values is None else row_values.contiguous(), plan.slot_rows,
            plan.num_tokens, expert_ids, out, values, buffer.pointers, self.state, expert_ids.shape[0],
            self.layout.max_tokens, self.rank, self.experts_per_rank, *scalars,
            **constants, **self._clock, num_warps=combine.NUM_WARPS, maxnreg=combine.MAX_REGISTERS,
        )  # fmt: skip

    def _combine_constants(self, dtype: torch.dtype, dim: int) -> tuple[int, tuple[int, ...], dict[str, Any]]:
        """(programs, scalars, constexprs)."""
        layout, block = self.layout, next_power_of_2(dim)
        programs = combine.PER_SM * self.max_sms
        most = combine.TILE_BYTES // (block * dtype.itemsize)
        block_t = dispatch.tokens_per_tile(most, layout.max_tokens, programs)
        tiles = max(1, -(-layout.max_tokens // block_t))
        tile_bytes = block_t * min(layout.top_k, layout.world_size) * dim * dtype.itemsize
        ticket_tiles = max(1, min(combine.TICKET_BYTES // tile_bytes, tiles // programs))
        chunk_tiles = -(-tiles // max(1, min(CHUNKS, tiles * tile_bytes // combine.CHUNK_BYTES)))
        chunk_tiles = round_up(chunk_tiles, ticket_tiles)
        chunks = -(-tiles // chunk_tiles)
        lag = max(1, min(combine.LAG, chunks // 2))
        op_id = layout.op_id("combine", dim * dtype.itemsize)
        starts = layout.values_start, layout.counters_start, layout.rows_start
        constants = {
            **self._sizes,
            "D": dim,
            "BLOCK": block,
            "ROW_ELEMENTS": layout.row_bytes // dtype.itemsize,
            "BLOCK_T": block_t,
            "TICKET_TILES": ticket_tiles,
        }
        return max(1, min(programs, tiles)), (chunk_tiles, chunks, lag, op_id, *starts), constants
