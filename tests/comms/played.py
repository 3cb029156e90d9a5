"""Exchanges by puts on a machine without NVSHMEM: puts are copies into the shared memory of CPU processes."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from mxep.comms import NvshmemTransport, SharedMemoryTransport
from mxep.comms.layout import PE_SHIFT, step_of
from mxep.comms.nvshmem import StagedBuffer
from mxep.comms.symmetric_memory import FaultRecord


class PlayedTransport(SharedMemoryTransport):
    """Rank r is PE W - 1 - r: whoever takes one for the other misroutes. Staging starts as NaN."""

    access = "puts"
    exchange = NvshmemTransport.exchange

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.record = FaultRecord(self.world_size, pinned=False)
        self.state = self.record.state(self.timeout, self.device)

    def check(self) -> None:
        super().check()
        if hasattr(self, "record"):
            self.record.check(self.rank, self.timeout)

    @property
    def bases(self) -> Tensor:
        return torch.arange(self.world_size).flip(0) << PE_SHIFT

    def _allocate(self, nbytes: int) -> StagedBuffer:
        buffer = super()._allocate(nbytes)
        staging = torch.full((nbytes,), 255, dtype=torch.uint8)
        return StagedBuffer(**{f.name: getattr(buffer, f.name) for f in fields(buffer)}, staging=staging)

    def put(
        self, buffer: StagedBuffer, source: Tensor, destinations: Tensor, num_sms: int | None, groups: int = 1
    ) -> None:
        assert source.dtype == torch.uint8
        assert len(source) == len(destinations)
        assert len(source) % groups == 0
        for row, of_row in zip(source, destinations.tolist()):
            for destination in of_row:
                if destination >= 0:
                    rank, byte = self.world_size - 1 - (destination >> PE_SHIFT), destination % (1 << PE_SHIFT)
                    buffer.peers[rank][byte : byte + len(row)] = row

    def meet(self, buffer: StagedBuffer, channel: int, op_id: int, counters_start: int) -> None:
        self.barrier(step_of(op_id), op_id=op_id)
