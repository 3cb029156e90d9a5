"""SwiGLU and its clamped variants: one activation with parameters, its torch reference, and a portable sigmoid.

Parameters (fields of `SwiGLU`) of some models:

                                 alpha   limit   shift   interleaved
Qwen3-MoE, Mixtral, DeepSeek-V3  1       None    0       no             silu(gate) * up
DeepSeek-V4                      1       given   0       no             clamped
gpt-oss                          1.702   7       1       yes            clamped, (up + 1) * gate * sigmoid(alpha * gate)

The activation h (R, F) of gate and up (R, F), and its gradients d_gate and d_up, given d_h:

gate' = min(gate, limit)                  up' = clamp(up, -limit, limit) + shift
s = sigmoid(alpha * gate')                glu = gate' * s
h = glu * up'                             d_up = d_h * glu                                          0 where clamped
                                          d_gate = d_h * up' * s * (1 + alpha * gate' * (1 - s))    0 where clamped

The sigmoid has the same bits on every device. Library exponentials differ by device, vector lane and version, so values
that are quantized after a library exponential could differ in a byte. This sigmoid consists of fp32 multiplications and
additions, each rounded separately, and of integer arithmetic on the bits of fp32. A kernel equals it bit for bit if it
does the same operations in the same order, without FMAs. A subnormal intermediate value is always added to a number so
large that the sum does not change. So a device that flushes subnormals to zero gets the same bits.

Steps, with x the argument and the constants of this file in capitals:

    t = -log2(e) / 4 * clamp(x, -86, 86)            exp(-x) = 2^(4t)
    u = t + ROUND                                   rounds t to n / 4, n an integer; the last bits of u are n
    f = t - (u - ROUND)                             exact, |f| <= 1/8, so exp(-x) = 2^n * 2^(4f)
    p, q = (f^2 + C0) + C1 * f, (f^2 + C0) - C1 * f         2^(4f) = p / q * (1 +- 4.4e-7), minimax
    p = p * 2^n                                     exp(-x) = p / q; n is added to p's exponent bits
    r = 1 / (p + q)                                 by `reciprocal`
    sigmoid(x), sigmoid(-x) = q * r, p * r

`reciprocal` of d starts from MAGIC minus the bits of d as an integer. Read as fp32, this r is off by at most 5%. Then
it refines r in two Newton steps: of third order, r = r * (3 - t * (3 - t)) with t = d * r, and of second order,
r = r * (2 - d * r). The relative error is 1.4 * 2^-23. A sigmoid takes 21 instructions without a branch. On a GPU an
IEEE division alone takes two thirds as many, with branches.

Relative error of sigmoid(x) and sigmoid(-x), in units of 2^-23: at most 6 for |x| <= 1, at most 10 for |x| <= 8, 14 at
|x| = 20, and 38 at |x| = 86. It comes from the rounding of t. If |x| > 86, the results are those of +-86: 1 and
4.5e-38. NaN stays NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 86.0
"""The sigmoid's argument is clamped to +-LIMIT, so that exp(x) and exp(-x) are normal fp32 numbers."""

SCALE = -0.25 / math.log(2)
ROUND = 1.5 * 2.0**21
C0, C1 = 1.5649444, 2.1694605
MAGIC = 0x7EF32000


def sigmoid_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid(x), sigmoid(-x)) for x fp32 of any shape. sigmoid(-x) is more accurate than 1 - sigmoid(x)."""
    # In-place operations take half the time on a CPU.
    t = x.clamp(-LIMIT, LIMIT).mul_(SCALE)
    u = t + ROUND
    f = t.sub_(u - ROUND)
    even, odd = (f * f).add_(C0), f.mul_(C1)
    p, q = even + odd, even.sub_(odd)
    p = p.view(torch.int32).add_(u.view(torch.int32) << 23).view(torch.float32)
    r = reciprocal(p + q)
    return q.mul_(r), p.mul_(r)


def reciprocal(d: Tensor) -> Tensor:
    """1 / d for d (fp32) between 2^-126 and 2^125."""
    r = (MAGIC - d.view(torch.int32)).view(torch.float32)
    t = d * r
    r.mul_((3.0 - t).mul_(t).neg_().add_(3.0))
    return r.mul_(2.0 - d * r)


@dataclass(frozen=True)
class SwiGLU:
    """(clamp(up, -limit, limit) + shift) * g * sigmoid(alpha * g), with g = min(gate, limit).

    With the default values this is plain SwiGLU, silu(gate) * up. The gradient of gate or up is zero where `limit`
    clamps it. For a value equal to the limit the gradient is not zeroed, as in torch.clamp before version 2.15.
    Raises ValueError for an alpha or a limit that is not positive and finite.

    Attributes:
        alpha, shift: constants of the formula.
        limit: constant of the formula. None: no clamping.
        interleaved: True if the columns of gate_up are gate, up, gate, up, ... False if all columns of gate come first.
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
        """All fields as a list of floats, the form in which ops take an activation. None for plain SwiGLU."""
        if self == PLAIN:
            return None
        return [self.alpha, math.inf if self.limit is None else self.limit, self.shift, float(self.interleaved)]

    @staticmethod
    def unpacked(packed: Sequence[float] | None) -> "SwiGLU":
        if packed is None:
            return PLAIN
        alpha, limit, shift, interleaved = packed
        return SwiGLU(alpha, None if limit == math.inf else limit, shift, bool(interleaved))

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up (R, F), views of gate_up (R, 2F)."""
        gate, up = gate_up.unflatten(1, (-1, 2)).unbind(2) if self.interleaved else gate_up.chunk(2, dim=1)
        return gate, up

    def join(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack((gate, up), 2).flatten(1) if self.interleaved else torch.cat((gate, up), 1)

    def glu(self, gate: Tensor, up: Tensor) -> "Glu":
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        x = gate * self.alpha if self.alpha != 1.0 else gate
        s, one_minus_s = sigmoid_pair(x)
        # Clamp gate where the sigmoid is clamped: -inf * s would be -inf, but silu there is almost 0.
        glu = gate.clamp(min=-LIMIT / self.alpha).mul_(s)
        return Glu(glu, up + self.shift if self.shift else up, x, s, one_minus_s)

    def unclamped(self, d: Tensor, x: Tensor, *, both: bool) -> Tensor:
        """Backward of the clamp of x. Returns the gradient of x.

        d: gradient of the clamped x. both: True if x is clamped on both sides (up), False if only from above (gate).
        """
        if self.limit is None:
            return d
        return d.masked_fill((x.abs() if both else x) > self.limit, 0.0)


class Glu(NamedTuple):
    """Intermediate values of the activation, each (R, F) fp32; names as in the module's docstring.

    glu: gate' * sigmoid(x). up: up'. x: alpha * gate'. s: sigmoid(x). one_minus_s: sigmoid(-x).
    """

    glu: Tensor
    up: Tensor
    x: Tensor
    s: Tensor
    one_minus_s: Tensor

    def slope(self) -> Tensor:
        """Derivative of glu with respect to gate'."""
        return self.x.clamp(-LIMIT, LIMIT).mul_(self.one_minus_s).add_(1.0).mul_(self.s)


PLAIN = SwiGLU()
