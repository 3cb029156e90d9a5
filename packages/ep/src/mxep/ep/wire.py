"""Tokens on the wire: their bytes, cut into parts that travel side by side.

    bf16 (T, D)           -> one part  (T, 2 D)
    MXTensor (T, D)       -> two parts (T, D) qdata and (T, D / block) scale bytes

comms transports the parts without interpreting them; `Wire.rows` reads them on the other side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxep.comms import gather_rows
from mxep.gemm import Recipe
from mxep.quant import MXFormat, MXTensor
from mxep.runtime.bundle import Bundle
from mxep.runtime.replay import replayed

from .dispatchers.base import Payload


@replayed
def pack(x: Tensor, *, recipe: Recipe, fmt: MXFormat, room: int | None = None) -> Payload:
    """x (T, D) as bytes to send, quantized to `fmt` if the recipe quantizes: (T, 2 D) of bf16; or (T, D) qdata and
    (T, D / block) scales. With a room, so many rows, of which the first T count."""
    rows = recipe.quantize_rows(x, fmt, room)
    return (_bytes(rows.qdata), _bytes(rows.scale)) if isinstance(rows, MXTensor) else (_bytes(rows),)


def _bytes(x: Tensor) -> Tensor:
    # An empty tensor counts as contiguous whatever its strides, and an expanded one cannot be viewed as bytes.
    x = x.contiguous() if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


@dataclass(frozen=True)
class Wire(Bundle):
    """How to read a payload.

    Attributes:
        dtype: the rows' (outer) dtype. qdata: dtype of the qdata, or None where rows travel unquantized. block_size:
            elements per scale; unused without qdata.
    """

    dtype: torch.dtype
    qdata: torch.dtype | None = None
    block_size: int = 0

    @staticmethod
    def of(x: Tensor, recipe: Recipe, fmt: MXFormat) -> "Wire":
        """The format of x (T, D) after `pack`."""
        if recipe.scaling == "none":
            return Wire(x.dtype)
        return Wire(x.dtype, fmt.dtype, recipe.block_size or x.shape[1])

    def rows(self, slots: Payload, row_slot: Tensor, offs: Tensor, *, copy: bool) -> Tensor:
        """Slots (S, .) -> the plan's expert-major rows (R_max, D) with zero padding.

        row_slot, offs: the plan's. Quantized rows are not copied; a row index says where each lies. copy: they are kept
        beyond the next exchange, so slots are copied, or rows where `keeps_rows`. Plain rows are always gathered.
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


def keeps_rows(max_rows: int, num_slots: int, *, copied: bool) -> bool:
    """Whether backward gets quantized rows instead of slots under an index: if they must be `copied`, as the slots are
    the dispatcher's, and there are no more rows than slots (top-1)."""
    return copied and max_rows <= num_slots
