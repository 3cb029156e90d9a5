"""The signal-to-noise ratio of all that integration measures."""

from __future__ import annotations

import math

from torch import Tensor

LIMIT = 300.0  # dB, of equal tensors
CHUNK = 1 << 26  # elements compared at a time: weight gradients are large


def snr(reference: Tensor, got: Tensor) -> float:
    """10 log10(sum reference^2 / sum (reference - got)^2) in dB, within -LIMIT and LIMIT; -LIMIT where not finite.

    ValueError for tensors of other shapes.
    """
    if reference.shape != got.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, wanted {tuple(reference.shape)}")
    signal = noise = 0.0
    for one, other in zip(reference.flatten().split(CHUNK), got.flatten().split(CHUNK)):
        exact = one.double()
        signal += float(exact.square().sum())
        noise += float((exact - other.double()).square().sum())
    if noise == 0.0:
        return LIMIT
    if not math.isfinite(signal + noise) or signal == 0.0:
        return -LIMIT
    return max(-LIMIT, min(LIMIT, 10 * math.log10(signal / noise)))
