"""How far a layer's output and gradients are from the standard layer's: signal to noise, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from ..reference import Results
from .comms_timing import gathered, together

CHUNK = 1 << 26  # elements that a comparison takes at a time
LIMIT = 200.0  # dB, of equal tensors


def compared(reference: Results, got: Results) -> dict[str, float]:
    """Signal to noise of each tensor in dB, of the rank where it is least; at most LIMIT. Collective."""

    def mine() -> dict[str, float]:
        names = [field.name for field in dataclasses.fields(Results)]
        return {name: signal_to_noise(getattr(reference, name), getattr(got, name)) for name in names}

    everyone = gathered(together(mine))
    return {name: min(theirs[name] for theirs in everyone) for name in everyone[0]}


def signal_to_noise(reference: Tensor, got: Tensor) -> float:
    """dB, at most LIMIT and, of what is not finite, -LIMIT. In pieces: weight gradients are large."""
    if reference.shape != got.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, wanted {tuple(reference.shape)}")
    signal = noise = 0.0
    for one, other in zip(reference.flatten().split(CHUNK), got.flatten().split(CHUNK)):
        exact = one.double()
        signal += float(exact.square().sum())
        noise += float((exact - other.double()).square().sum())
    if not math.isfinite(signal + noise):
        return -LIMIT
    if noise == 0.0:
        return LIMIT
    return max(-LIMIT, min(LIMIT, 10 * math.log10(signal / noise))) if signal else -LIMIT
