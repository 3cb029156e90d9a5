"""What a row is on the wire: its bytes, cut into parts that travel side by side.

    bf16 (T, D)           -> one part  (T, 2 D)
    MXTensor (T, D)       -> two parts (T, D) qdata and (T, D / block) scale bytes

comms transports the parts without knowing what they mean; `WireFormat.rows` puts them together on the other side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.comms import RoutingPlan, gather_rows
from mxep.quant import MXTensor

from .dispatchers.base import Payload
from .saved import keeps_rows


@dataclass(frozen=True)
class WireFormat:
    """How to read the payload of one exchange.

    Attributes:
        dtype: the rows' (outer) dtype.
        qdata: dtype of the qdata, or None where rows travel unquantized.
        block_size: elements per scale; unused without qdata.
    """

    dtype: torch.dtype
    qdata: torch.dtype | None = None
    block_size: int = 0

    @staticmethod
    def pack(rows: Tensor) -> tuple[Payload, WireFormat]:
        """``rows`` (T, D), plain or MXTensor blocked along D -> uint8 parts and how to read them."""
        if isinstance(rows, MXTensor):
            return (_bytes(rows.qdata), _bytes(rows.scale)), WireFormat(rows.dtype, rows.qdata.dtype, rows.block_size)
        return (_bytes(rows),), WireFormat(rows.dtype)

    def rows(self, slots: Payload, plan: RoutingPlan, *, copy: bool) -> Tensor:
        """Slot parts (S, ...) -> the plan's expert-major rows (R_max, D).

        Codes stay where they lie, under an index (the GEMM gathers them). With ``copy``, for who keeps them beyond the
        next exchange, they are copied: the slots, or the rows, as `keeps_rows` says. Plain rows are gathered here,
        which copies them anyway. Padding is zero.
        """
        if self.qdata is None:
            (gathered,) = gather_rows(slots, plan.row_slot, plan.offs)
            return gathered.view(self.dtype)
        index: Tensor | None = plan.row_slot
        if keeps_rows(plan, copied=copy):
            slots, index = gather_rows(slots, index, plan.offs), None
        elif copy:
            slots = gather_rows(slots, None)
        qdata, scale = slots
        return MXTensor.from_qdata_and_scales(
            qdata.view(self.qdata),
            scale.view(torch.float8_e8m0fnu),
            self.dtype,
            block_size=self.block_size,
            row_index=index,
        )


def _bytes(x: Tensor) -> Tensor:
    # An empty tensor counts as contiguous whatever its strides, and an expanded one cannot be viewed as bytes.
    x = x.contiguous() if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)
