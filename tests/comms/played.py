"""Moves by puts on a machine without NVSHMEM: puts are copies into the shared memory of CPU processes."""

from dataclasses import fields

import torch
from torch import Tensor

from mxep.comms import SharedMemoryTransport
from mxep.comms.moves import Move
from mxep.comms.puts import PE_SHIFT, PutMoves, StagedBuffer


class PlayedTransport(PutMoves, SharedMemoryTransport):
    """Rank r is PE W - 1 - r: whoever takes one for the other misroutes. Staging starts as NaN."""

    def allocate(self, nbytes: int) -> StagedBuffer:
        buffer = super().allocate(nbytes)
        self.bases = torch.arange(self.world_size).flip(0) << PE_SHIFT
        staging = torch.full((nbytes,), 255, dtype=torch.uint8)
        return StagedBuffer(**{f.name: getattr(buffer, f.name) for f in fields(buffer)}, staging=staging)

    def _put(self, move: Move, source: Tensor, destinations: Tensor, *, groups: int = 1) -> None:
        assert source.dtype == torch.uint8
        assert len(source) == len(destinations)
        assert len(source) % groups == 0
        for row, everywhere in zip(source, destinations.tolist()):
            for there in everywhere:
                if there >= 0:
                    rank, byte = self.world_size - 1 - (there >> PE_SHIFT), there % (1 << PE_SHIFT)
                    move.buffer.peers[rank][byte : byte + len(row)] = row

    def _meet(self, move: Move, channel: int, signature: int) -> None:
        self.barrier(move.name, signature=signature)
