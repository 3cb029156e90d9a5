"""SwiGLU and its clamped relatives: one activation with parameters, and its elementwise reference.

                                 alpha   limit   shift   interleaved
Qwen3-MoE, Mixtral, DeepSeek-V3  1       None    0       no             silu(gate) * up
DeepSeek-V4                      1       given   0       no             clamped
gpt-oss                          1.702   7       1       yes            clamped, (up + 1) * gate * sigmoid(alpha * gate)

gate' = min(gate, limit)                  up' = clamp(up, -limit, limit) + shift
s = sigmoid(alpha * gate')                glu = gate' * s
h = glu * up'                             d_up = d_h * glu                                          0 where clamped
                                          d_gate = d_h * up' * s * (1 + alpha * gate' * (1 - s))    0 where clamped
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.quant.sigmoid import LIMIT, sigmoid_pair


@dataclass(frozen=True)
class SwiGLU:
    """(clamp(up, -limit, limit) + shift) * g * sigmoid(alpha * g), with g = min(gate, limit). Plain SwiGLU by default.

    A gradient is zero if its input was beyond limit. At limit it passes, as in torch's clamp before 2.15.
    Raises ValueError for an alpha or a limit that is not positive and finite.

    Attributes:
        limit: None: nothing is clamped.
        interleaved: columns are gate, up, gate, up, ... By default all of gate come first, then all of up.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("limit", self.limit)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"SwiGLU: got {name} {value}, want a positive number")

    @property
    def packed(self) -> list[float] | None:
        """All fields as numbers, the form that ops take; None for plain SwiGLU."""
        if self == PLAIN:
            return None
        return [self.alpha, math.inf if self.limit is None else self.limit, self.shift, float(self.interleaved)]

    @staticmethod
    def unpacked(packed: Sequence[float] | None) -> "SwiGLU":
        """Rebuild it from the form that ops take."""
        if packed is None:
            return PLAIN
        alpha, limit, shift, interleaved = packed
        return SwiGLU(alpha, None if limit == math.inf else limit, shift, bool(interleaved))

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up (R, F), views of gate_up (R, 2F)."""
        gate, up = gate_up.unflatten(1, (-1, 2)).unbind(2) if self.interleaved else gate_up.chunk(2, dim=1)
        return gate, up

    def join(self, gate: Tensor, up: Tensor) -> Tensor:
        """The inverse of `split`."""
        return torch.stack((gate, up), 2).flatten(1) if self.interleaved else torch.cat((gate, up), 1)

    def glu(self, gate: Tensor, up: Tensor) -> "Glu":
        """Compute `Glu` of gate and up (R, F) fp32. Each operation is rounded by itself, as in the kernel."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        x = gate * self.alpha if self.alpha != 1.0 else gate
        s, one_minus_s = sigmoid_pair(x)
        # Once s has stopped falling, gate stops, too, so that a gate of -inf makes h as good as 0.
        glu = gate.clamp(min=-LIMIT / self.alpha).mul_(s)
        return Glu(glu, up + self.shift if self.shift else up, x, s, one_minus_s)

    def unclamped(self, d: Tensor, x: Tensor, *, both: bool) -> Tensor:
        """Turn the gradient d of a clamped x into that of x. x is gate, or up with `both`."""
        if self.limit is None:
            return d
        return d.masked_fill((x.abs() if both else x) > self.limit, 0.0)


class Glu(NamedTuple):
    """glu, up' and the terms of the slope: x = alpha * gate', sigmoid(x), sigmoid(-x)."""

    glu: Tensor
    up: Tensor
    x: Tensor
    s: Tensor
    one_minus_s: Tensor

    def slope(self) -> Tensor:
        """Derivative of glu by gate'."""
        return self.x.clamp(-LIMIT, LIMIT).mul_(self.one_minus_s).add_(1.0).mul_(self.s)


PLAIN = SwiGLU()
