"""MXParts: an MXTensor as functions that are replayed take and give it."""

from typing import NamedTuple

import torch
from torch import Tensor

from mxep.runtime.bundle import register_parts

from .checks import Axis
from .tensor import MXTensor


class MXParts(NamedTuple):
    """An MXTensor, taken apart: a wrapper costs the host as much as a launch."""

    qdata: Tensor
    scale: Tensor
    row_index: Tensor | None
    axis: Axis
    block_size: int
    dtype: torch.dtype

    @staticmethod
    def of(x: MXTensor) -> "MXParts":
        """Its parts."""
        return MXParts(x.qdata, x.scale, x.row_index, x.axis, x.block_size, x.dtype)

    def join(self) -> MXTensor:
        """The MXTensor."""
        return MXTensor(*self, trusted=True)


register_parts(MXParts, MXTensor)
