"""bench=linear: `mxep.gemm.linear`, F.linear and float8 peers, forward and backward, all quantization included.

linear   x (T, K) -> (T, N): both gradients of one weight                                  shapes "linear"
qkv      x (T, K) -> (T, Nq), (T, Nkv), (T, Nkv): gradients of x and three weights         shapes "qkv"
host     host time of a linear, with an idle GPU                                           shapes "host"

Operands are bf16. A weight is quantized in each call, once along K and once along N.

- `together` is `linear_together`.
- `scaled_mm row` is torch's three dense FP8 GEMMs with a scale per row, without the time to quantize operands.
- `torchao rowwise` is torchao's float8 training linear, compiled.

T tokens, K in features, N out features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxep.gemm import Backend, Recipe, linear, linear_together
from mxep.integration.report import Row

from . import gemm
from .gemm import At, sweep
from .script import gradients, table
from .timer import Call, Timer

STEP = "us, TF, x bf16"
SHAPES = {"linear": (1, 32, 32), "qkv": (1, 32, 32, 32), "host": (1, 32, 32)}
SIZES = "tokens, K, N (of q), N of k and v"
BACKENDS = gemm.BACKENDS
SECTIONS = {
    "linear": table("Forward and backward of a linear", "shape, what", STEP),
    "qkv": table("Forward and backward of q, k and v", "shape, what", STEP),
    "host": table("Host, a forward and backward", "shape, what", "us"),
}


@dataclass(frozen=True)
class Problem:
    """x (T, K), one or several weights (N, K), and an output gradient (T, N) for each, bf16."""

    x: Tensor
    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @staticmethod
    def gaussian(shape: Sequence[int], generator: torch.Generator) -> Problem:
        """shape: T, K, N or T, K, Nq, Nkv."""
        tokens, k, *widths = shape
        draw = functools.partial(torch.randn, dtype=torch.bfloat16, generator=generator, device=generator.device)
        widths += widths[1:]  # v is as wide as k
        weights = tuple(draw(n, k) for n in widths)
        return Problem(draw(tokens, k), weights, tuple(draw(tokens, n) for n in widths))

    @property
    def flop(self) -> int:
        """Floating-point operations of all GEMMs of a forward and backward."""
        return 6 * len(self.x) * sum(w.numel() for w in self.weights)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.x, *self.weights, *self.gradients))

    def step(self, product: Callable[..., Sequence[Tensor]]) -> Call:
        """Forward and backward of product(x, *weights), which returns an output for each weight. Returns gradients."""
        leaves = [tensor.detach().requires_grad_() for tensor in (self.x, *self.weights)]
        return lambda: gradients(product(*leaves), leaves, self.gradients)


Maker = Callable[[Problem], Call]


def scaled_mm(p: Problem) -> Call:
    """torch's FP8 GEMMs with a scale per row, operands ready."""
    gemm.need_cuda(p.x.device)
    calls = [
        gemm.dense_product(product, gemm.Problem.of(p.x, w[None], dy), rows=True)
        for w, dy in zip(p.weights, p.gradients)
        for product in gemm.PRODUCTS
    ]
    return lambda: [call() for call in calls]


def torchao(p: Problem) -> Call:
    """torchao's float8 linears, rowwise, compiled. Raises ImportError, with the reason, without it."""
    module = gemm.import_torchao("float8", p.x.device)
    config = module.Float8LinearConfig.from_recipe_name("rowwise")
    layers = nn.ModuleList(nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta") for w in p.weights)
    for layer, w in zip(layers, p.weights):
        layer.weight = nn.Parameter(w.detach())
    layers = module.convert_to_float8_training(layers, config=config)
    x = p.x.detach().requires_grad_()
    leaves = [x, *(layer.weight for layer in layers)]
    torch.compiler.reset()  # else a second shape makes a program for any shape
    forward = torch.compile(lambda x: [layer(x) for layer in layers], dynamic=False)
    return lambda: gradients(forward(x), leaves, p.gradients)


def steps(backend: Backend, several: bool) -> dict[str, Maker]:
    """Makers by name, the baseline first. several: also `linear_together`."""

    def mxep(recipe: str, *, together: bool = False) -> Maker:
        how: dict[str, Any] = {"recipe": Recipe.named(recipe), "backend": backend}
        if together:
            return lambda p: p.step(lambda x, *ws: linear_together(x, ws, **how))
        return lambda p: p.step(lambda x, *ws: [linear(x, w, **how) for w in ws])

    makers: dict[str, Maker] = {"bf16": lambda p: p.step(lambda x, *ws: [F.linear(x, w) for w in ws])}
    makers |= {f"mxep {recipe}": mxep(recipe) for recipe in ("mxfp8", "fp8", "bf16")}
    makers |= {f"mxep {recipe}, together": mxep(recipe, together=True) for recipe in ("mxfp8", "fp8") if several}
    return makers | {"torchao rowwise": torchao, "scaled_mm row, products": scaled_mm}


def _steps(at: At) -> Iterator[Row]:
    problems = at.problems(Problem.gaussian)
    makers = steps(at.backend, several=len(problems[0].weights) > 1)
    yield from at.compare(makers, problems, problems[0].flop, **{"x bf16": "bf16"}).values()


def _host(at: At) -> Iterator[Row]:
    clock, p = Timer(at.timer.device, seconds=0.0, rounds=7, host=True), Problem.gaussian(at.shape, at.generator)
    yield from replace(at, timer=clock).compare(steps(at.backend, several=False), [p], p.flop).values()


measure = functools.partial(sweep, measured={"linear": _steps, "qkv": _steps, "host": _host})
