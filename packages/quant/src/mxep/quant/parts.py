"""MXParts: the form of an MXTensor in replayed functions."""

from typing import NamedTuple

import torch
from torch import Tensor

from mxep.runtime.bundle import register_parts

from .checks import Axis
from .tensor import MXTensor


class MXParts(NamedTuple):
    """The parts of an MXTensor: a wrapper costs the host as much as a launch."""

    qdata: Tensor
    scale: Tensor
    row_index: Tensor | None
    axis: Axis
    block_size: int
    dtype: torch.dtype

    @staticmethod
    def of(x: MXTensor) -> "MXParts":
        """The parts of x."""
        return MXParts(x.qdata, x.scale, x.row_index, x.axis, x.block_size, x.dtype)

    def join(self) -> MXTensor:
        """The MXTensor of these parts."""
        return MXTensor(*self, trusted=True)


register_parts(MXParts, MXTensor)
