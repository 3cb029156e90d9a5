"""Inputs that tests of several files share, and how they compare MXTensors."""

import torch
from torch import Tensor

from mxep.quant import MXTensor
from quant.exact import assert_bytes, raw


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends_of(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def slots(qdata: Tensor, scale: Tensor, spare: int = 16) -> tuple[Tensor, Tensor]:
    """The same rows, qdata and scales side by side in rows of one buffer, as an exchange receives them."""
    d, n = qdata.shape[1], scale.shape[1]
    buffer = torch.full((qdata.shape[0], d + n + spare), 0x5A, dtype=torch.uint8)
    buffer[:, :d], buffer[:, d : d + n] = qdata.view(torch.uint8), scale.view(torch.uint8)
    return buffer[:, :d].view(qdata.dtype), buffer[:, d : d + n].view(scale.dtype)


def assert_same(a: MXTensor, b: MXTensor) -> None:
    """Same qdata, scales and axis."""
    assert a.axis == b.axis
    assert_bytes(a.qdata, raw(b.qdata))
    assert_bytes(a.scale, raw(b.scale))
