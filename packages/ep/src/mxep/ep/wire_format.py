"""What a row is on the wire: its bytes, cut into parts that travel side by side.

    bf16 (T, D)           -> one part  (T, 2 D)
    MXTensor (T, D)       -> two parts (T, D) qdata and (T, D / block) scale bytes

comms transports the parts without knowing what they mean; `WireFormat.rows` puts them together on the other side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.comms import gather_rows
from mxep.gemm import Recipe
from mxep.quant import MXFormat, MXTensor

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
    def of(x: Tensor, recipe: Recipe, fmt: MXFormat) -> "WireFormat":
        """Of x (T, D) as the recipe quantizes it to `fmt`."""
        if recipe.scaling == "none":
            return WireFormat(x.dtype)
        return WireFormat(x.dtype, fmt.dtype, recipe.block_size or x.shape[1])

    def rows(self, slots: Sequence[Tensor], row_slot: Tensor, offs: Tensor, *, copy: bool) -> Tensor:
        """Slot parts (S, ...) -> the plan's expert-major rows (R_max, D).

        row_slot, offs: the plan's. qdata are not copied; the row index says where each row lies. With ``copy``, for who
        keeps them beyond the next exchange, they are copied: the slots, or the rows, as `keeps_rows` says.
        Plain rows are gathered here, which copies them anyway. Padding is zero.
        """
        if self.qdata is None:
            (gathered,) = gather_rows(slots, row_slot, offs)
            return gathered.view(self.dtype)
        index: Tensor | None = row_slot
        if keeps_rows(len(row_slot), len(slots[0]), copied=copy):
            slots, index = gather_rows(slots, row_slot, offs), None
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


def pack(tensors: list[Tensor], recipe: Recipe, fmt: MXFormat, room: int | None = None) -> list[Tensor]:
    """[x (T, D)] -> the parts of its rows, quantized to `fmt` if the recipe quantizes. Then they have `room` rows."""
    (x,) = tensors
    rows = recipe.quantize_rows(x, fmt, room)
    return [_bytes(rows.qdata), _bytes(rows.scale)] if isinstance(rows, MXTensor) else [_bytes(rows)]


def _bytes(x: Tensor) -> Tensor:
    # An empty tensor counts as contiguous whatever its strides, and an expanded one cannot be viewed as bytes.
    x = x.contiguous() if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)
