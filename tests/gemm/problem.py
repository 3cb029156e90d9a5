"""A grouped product with everything known about it: operands, the float64 answer, and runs of `grouped_mm` on it.

Rows past the last group hold NaN, so whatever reads them shows itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.gemm import BACKENDS as ALL
from mxep.gemm import Recipe, grouped_mm
from mxep.quant import MXTensor

BACKENDS = ("reference", "dequant")
RECIPES = ("bf16", "fp8", "mxfp8", "mxfp8_e5m2", "mxfp8_32x32", "mxfp8_wgrad_bf16", "fp8_e5m2_wgrad_bf16")
QUANTIZED = RECIPES[1:]


@dataclass(frozen=True)
class Result:
    """out (R, N), da (R, K) of the valid rows, dw (G, N, K)."""

    out: Tensor
    da: Tensor
    dw: Tensor

    def __iter__(self) -> Any:
        return iter((self.out, self.da, self.dw))

    def same_as(self, other: "Result") -> bool:
        """Bit for bit."""
        return all(torch.equal(x, y) for x, y in zip(self, other))


@dataclass(frozen=True)
class Problem:
    """a (M, K), w (G, N, K), dy (M, N) bf16, offs (G,); the first R rows are valid."""

    a: Tensor
    w: Tensor
    dy: Tensor
    offs: Tensor

    @property
    def valid(self) -> int:
        return int(self.offs[-1])

    def groups(self) -> list[tuple[int, slice]]:
        ends = self.offs.tolist()
        return [(g, slice(start, end)) for g, (start, end) in enumerate(zip([0, *ends], ends))]

    def product(self, a: Tensor, w: Tensor, dy: Tensor) -> Result:
        """The three products of these operands, in float64."""
        a, w, dy = a.double(), w.double(), dy.double()
        out, da, dw = dy.new_zeros(self.valid, w.shape[1]), dy.new_zeros(self.valid, w.shape[2]), torch.zeros_like(w)
        for g, rows in self.groups():
            out[rows], da[rows], dw[g] = a[rows] @ w[g].mT, dy[rows] @ w[g], dy[rows].mT @ a[rows]
        return Result(out, da, dw)

    def exact(self) -> Result:
        return self.product(self.a, self.w, self.dy)

    def magnitude(self) -> Result:
        """Sums of absolute products, what the rounding of a sum is proportional to."""
        return self.product(self.a.abs(), self.w.abs(), self.dy.abs())

    def terms(self) -> Result:
        """How many products each element sums."""
        return self.product(*(torch.ones_like(x) for x in (self.a, self.w, self.dy)))

    def run(self, recipe: str | Recipe, *, a: Tensor | None = None, dy: Tensor | None = None, **options: Any) -> Result:
        """grouped_mm forward and backward, with `a` and `dy` replaced by what is given."""
        a = (self.a if a is None else a).detach().requires_grad_()
        w = self.w.detach().clone().requires_grad_()
        out = grouped_mm(a, w, self.offs, recipe=recipe, **options)
        torch.autograd.backward(out, self.dy.to(out.dtype) if dy is None else dy)
        assert a.grad is not None
        assert w.grad is not None
        return Result(out.detach()[: self.valid], a.grad[: self.valid], w.grad)


def problem(
    sizes: Sequence[int] = (64, 0, 160, 32), *, n: int = 96, k: int = 128, unused: int = 64, seed: int = 0
) -> Problem:
    """Gaussian operands for groups of these sizes, followed by `unused` rows of NaN."""
    random = torch.Generator().manual_seed(seed)
    rows, ends = sum(sizes), torch.tensor(sizes).cumsum(0).int()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    def draw_rows(width: int) -> Tensor:
        return torch.cat((draw(rows, width), torch.full((unused, width), torch.nan, dtype=torch.bfloat16)))

    return Problem(draw_rows(k), draw(len(sizes), n, k), draw_rows(n), ends)


def quantized_weight(w: Tensor, recipe: Recipe, backend: str = "reference") -> tuple[Tensor, Tensor]:
    """w (G, N, K) as forward and as dgrad want it."""
    chosen = ALL[backend]
    return chosen.quantize_weight_rowwise(w, recipe)[0], chosen.quantize_weight_colwise(w, recipe)


def snr(exact: Tensor, x: Tensor) -> float:
    """20 log10(|exact| / |exact - x|) in dB."""
    return float(20 * torch.log10(exact.norm() / (exact - x.double()).norm()))


def indexed(mx: MXTensor, *, valid: int, seed: int = 1, poison: int = -1) -> MXTensor:
    """The rows of `mx` out of order in a larger buffer of wider rows, under a row index that puts them right.

    Every fifth valid row that holds only zeros is found by -1. Index entries past `valid` are `poison`.
    """
    random = torch.Generator().manual_seed(seed)
    num_rows = mx.shape[0]
    slots = torch.randperm(num_rows + 7, generator=random)[:num_rows]

    def scatter(part: Tensor) -> Tensor:
        wide = torch.full((num_rows + 7, part.shape[1] + 16), 0x7F, dtype=torch.uint8)
        wide[slots, : part.shape[1]] = part.view(torch.uint8)
        return wide[:, : part.shape[1]].view(part.dtype)

    index = slots.int()
    index[valid:] = poison
    zero = (mx.qdata.view(torch.uint8)[:valid] == 0).all(1)
    index[:valid][zero] = -1
    return MXTensor.from_qdata_and_scales(
        scatter(mx.qdata), scatter(mx.scale), mx.dtype, block_size=mx.block_size, row_index=index
    )


HALF_ULP_BF16 = 2.0**-8
HALF_ULP_FP32 = 2.0**-24


def bound_of_sum(p: Problem) -> list[torch.Tensor]:
    """n additions in fp32, in any order, err by at most n * 2**-24 * sum |products| (first order)."""
    return [n * HALF_ULP_FP32 * m for n, m in zip(p.terms(), p.magnitude())]
