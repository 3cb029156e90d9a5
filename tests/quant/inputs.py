"""Inputs that tests of several files share, and how they compare MXTensors."""

import numpy as np
import torch
from torch import Tensor

from mxep.quant import FoldStats, MXFormat, MXTensor, fold_for_dgrad, fold_with_stats, to_mxfp8
from quant.exact import assert_bytes, raw


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends_of(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def hostile(
    fmt: MXFormat, shape: tuple[int, ...], block: int = 32, seed: int = 0, spread: int = 24
) -> tuple[Tensor, Tensor]:
    """Any qdata, with scales `spread` binades apart, blocks of byte 0, zero ones of that or any, a few NaN blocks."""
    rng = np.random.default_rng(seed)
    *rest, d = shape
    qdata = rng.integers(0, 256, (*rest, d // block, block), dtype=np.uint8)
    scale = rng.integers(120 - spread, 120, qdata.shape[:-1], dtype=np.uint8)
    zero = rng.random(scale.shape) < 0.2
    qdata[zero] &= 0x80
    scale[zero & (rng.random(scale.shape) < 0.5)] = 0
    scale[zero & (rng.random(scale.shape) < 0.3)] = 200
    scale[rng.random(scale.shape) < 0.02] = 0
    scale[rng.random(scale.shape) < 0.3 / qdata.shape[-2]] = 255
    return torch.from_numpy(qdata.reshape(shape)).view(fmt.dtype), torch.from_numpy(scale).view(torch.float8_e8m0fnu)


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


def fold_for_dgrad_with_stats(mx: MXTensor) -> tuple[MXTensor, FoldStats]:
    """`fold_for_dgrad`, and what `fold_with_stats` counts in rows that hold block j of all N rows, (..., K/32)."""
    wide = to_mxfp8(mx)
    qdata = wide.qdata.view(torch.uint8).unflatten(-1, (-1, 32)).transpose(-3, -2).flatten(-2)
    columns = MXTensor.from_qdata_and_scales(qdata.view(wide.qdata.dtype), wide.scale.mT, mx.dtype)
    return fold_for_dgrad(mx), fold_with_stats(columns)[1]
