"""What bench=gemm compares: the three products of ragged groups, whole steps and their stages, by ours and by peers.

    forward  out = a w^T    dgrad  da = dy w    wgrad  dw = dy^T a     2 M N K flop each, of valid rows
    step     all three from bf16 operands, every quantization included, the weights' too

An alternative is a function of a Problem that makes everything ready and returns the call to be timed. It raises
ImportError or NotImplementedError where it cannot run. Peers are torch's own grouped mm: bf16; FP8 with a scale a row,
whose sums stay in the tensor cores (fast) or leave them now and then (slow); torchao's on top of that; and a dense FP8
product of the same M, N, K, with a scale a row or a tensor, as ceiling.

M rows, N out features, K in features, G groups.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.gemm import Backend, Guard, Hopper, Recipe, grouped_mm
from mxep.gemm.backends.hopper import STEP, fp8_grouped_wgrad
from mxep.quant import BLOCK, MXTensor, quantize, fold_for_wgrad

from .timing import Call, describe

PRODUCTS = ("forward", "dgrad", "wgrad")
RECIPES = ("mxfp8", "fp8", "mxfp8_e5m2", "mxfp8_wgrad_bf16", "mxfp8_32x32")
SKEWS: Mapping[str, Callable[[int], list[float]]] = {
    "balanced": lambda groups: [1.0] * groups,
    "one has all": lambda groups: [1.0] + [0.0] * (groups - 1),
    "Zipf(1)": lambda groups: [1 / (g + 1) for g in range(groups)],
    "half empty": lambda groups: [float(g % 2 == 0) for g in range(groups)],
}
"""How groups share the rows: their weights."""


def group_sizes(weights: Sequence[float], rows: int, alignment: int = BLOCK) -> list[int]:
    """Multiples of `alignment` that sum up to `rows` (one, too), shared out by weight; what rounding leaves, from the
    first group on. Example: weights 1, 1/2, 1/3 and 96 rows: 64, 32, 0."""
    units = rows // alignment
    sizes = [int(units * weight / sum(weights)) for weight in weights]
    some = [g for g, weight in enumerate(weights) if weight]
    for i in range(units - sum(sizes)):
        sizes[some[i % len(some)]] += 1
    return [size * alignment for size in sizes]


@dataclass(frozen=True)
class Problem:
    """a (M, K), w (G, N, K), dy (M, N) bf16; sizes of the groups, and ends (G,). M may exceed what they sum up to."""

    a: Tensor
    w: Tensor
    dy: Tensor
    sizes: tuple[int, ...]
    ends: Tensor

    @classmethod
    def of(cls, a: Tensor, w: Tensor, dy: Tensor, sizes: Sequence[int]) -> Problem:
        return cls(a, w, dy, tuple(sizes), torch.tensor(sizes, device=a.device).cumsum(0, dtype=torch.int32))

    @classmethod
    def gaussian(cls, shape: Sequence[int], generator: torch.Generator) -> Problem:
        """M, N, K, G of balanced groups."""
        m, n, k, g = shape

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, generator=generator, device=generator.device)

        return cls.of(draw(m, k), draw(g, n, k), draw(m, n), group_sizes(SKEWS["balanced"](g), m))

    def skewed(self, skew: str) -> Problem:
        """The same rows in groups of other sizes."""
        return Problem.of(self.a, self.w, self.dy, group_sizes(SKEWS[skew](len(self.sizes)), len(self.a)))

    def oversized(self, times: int) -> Problem:
        """The same groups in `times` as many rows."""
        return Problem(self.a.repeat(times, 1), self.w, self.dy.repeat(times, 1), self.sizes, self.ends)

    @property
    def flop(self) -> int:
        """Of one product."""
        return 2 * sum(self.sizes) * self.w[0].numel()

    def least_bytes(self, product: str, element: int) -> int:
        """That a product must move: operands of `element` bytes read once, bf16 results written once."""
        valid = sum(self.sizes)
        a, dy, w = valid * self.a.shape[1], valid * self.dy.shape[1], self.w.numel()
        read, written = {"forward": (a + w, dy), "dgrad": (dy + w, a), "wgrad": (dy + a, w)}[product]
        return element * read + 2 * written


Alternative = Callable[[Problem], Call]


def need_cuda(x: Tensor) -> None:
    """NotImplementedError elsewhere."""
    if not x.is_cuda:
        raise NotImplementedError(f"needs CUDA, got {x.device}")


def bf16_product(product: str, p: Problem) -> Call:
    left, right = {"forward": (p.a, p.w.mT), "dgrad": (p.dy, p.w), "wgrad": (p.dy.mT, p.a)}[product]
    return lambda: torch._grouped_mm(left, right, offs=p.ends)


def _row_scaled(product: str, p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (rows, C), (C, columns) or (G, C, columns), C contiguous in both, and fp32 scales a row, a column."""
    left: Tensor
    right: Tensor
    if product == "forward":
        left, right = quantize(p.a, block_size=None), quantize(p.w, block_size=None).mT
    elif product == "dgrad":
        left, right = quantize(p.dy, block_size=None), quantize(p.w, axis=-2, block_size=None)
    else:
        left, right = quantize(p.dy, axis=-2, block_size=None).mT, quantize(p.a, axis=-2, block_size=None)
    assert isinstance(left, MXTensor)
    assert isinstance(right, MXTensor)
    return left.qdata, right.qdata, left.scale.float().squeeze(-1), right.scale.float().squeeze(-2)


def row_product(product: str, fast: bool, p: Problem) -> Call:
    need_cuda(p.a)
    left, right, left_scale, right_scale = _row_scaled(product, p)
    if product == "wgrad":  # one scale for all groups, but an entry for each
        left_scale, right_scale = (scale.repeat(len(p.sizes)) for scale in (left_scale, right_scale))
    scales = left_scale.contiguous(), right_scale.contiguous()
    return lambda: torch._scaled_grouped_mm(
        left, right, *scales, offs=p.ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def dense_product(product: str, rows: bool, p: Problem) -> Call:
    """All rows with the first group's weight; scales a row, or one a tensor."""
    left, right, left_scale, right_scale = _row_scaled(product, p)
    if product != "wgrad":
        right, right_scale = right[0], right_scale[0]
    scales = left_scale[:, None].contiguous(), right_scale[None].contiguous()
    if not rows:
        scales = left_scale.new_ones(()), left_scale.new_ones(())
    return lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def our_product(product: str, backend: Backend, p: Problem) -> Call:
    """Of operands that are as the backend wants them; for wgrad on Hopper: folded and transposed."""
    return _stages(backend, p)[product]


def _stages(backend: Backend, p: Problem) -> dict[str, Call]:
    recipe = Recipe.mxfp8()
    quantize_a = functools.partial(backend.quantize_rows, p.a, recipe.fmt, recipe)
    quantize_dy = functools.partial(backend.quantize_rows, p.dy, recipe.grad_fmt, recipe)
    quantize_w = functools.partial(backend.quantize_weight, p.w, recipe, cols=True)
    a, dy, w = quantize_a(), quantize_dy(), quantize_w()
    assert isinstance(a, MXTensor)
    assert isinstance(dy, MXTensor)
    assert w.cols is not None
    out_dtype = torch.bfloat16
    forward = functools.partial(backend.forward, a, w.rows, p.ends, bias=None, out_dtype=out_dtype)
    dgrad = functools.partial(backend.dgrad, dy, w.cols, p.ends, out_dtype=out_dtype)
    calls: dict[str, Call] = {
        "quantize a": quantize_a,
        "quantize w, both ways": quantize_w,
        "forward": forward,
        "quantize dy": quantize_dy,
        "dgrad": dgrad,
    }
    if backend.name != "hopper":
        calls["wgrad"] = functools.partial(backend.wgrad, dy, a, p.ends, recipe=recipe, out_dtype=out_dtype)
        return calls
    calls["split fold"] = functools.partial(fold_for_wgrad, a, dy, p.ends, align=STEP)
    split = fold_for_wgrad(a, dy, p.ends, align=STEP)
    operands = split.y_t, split.x_t, split.exponent, split.ends
    calls["wgrad"] = functools.partial(fp8_grouped_wgrad, *operands, out_dtype)
    return calls


def stages(backend: Backend, p: Problem) -> dict[str, tuple[Call, int]]:
    """What a step of ours consists of, in order, with the bytes that a stage must move, 0 for products."""
    m, n, k, weights = sum(p.sizes), p.dy.shape[1], p.a.shape[1], p.w.numel()
    moved = {  # bf16 in, qdata and scales out; a scale a row, and for weights also a column
        "quantize a": 3 * m * k + m,
        "quantize w, both ways": 4 * weights + len(p.sizes) * (n + k),
        "quantize dy": 3 * m * n + m,
        "split fold": 2 * m * (k + n) + 2 * m,
    }
    return {name: (call, moved.get(name, 0)) for name, call in _stages(backend, p).items()}


def _step(
    product: Callable[[Tensor, Tensor], Tensor], p: Problem, a: Tensor | None = None, dy: Tensor | None = None
) -> Call:
    """Forward and backward of product(a, w); the result is both gradients."""
    leaves = (p.a if a is None else a).detach().requires_grad_(), p.w.detach().requires_grad_()
    gradient = p.dy if dy is None else dy
    return lambda: torch.autograd.grad(product(*leaves), leaves, gradient)


def bf16_step(p: Problem) -> Call:
    return _step(lambda a, w: torch._grouped_mm(a, w.mT, offs=p.ends), p)


def torchao_step(p: Problem) -> Call:
    product = torchao_product()
    need_cuda(p.a)
    return _step(lambda a, w: product(a, w.mT, p.ends, pad_token_groups_for_grouped_mm=False), p)


def torchao_product() -> Callable[..., Tensor]:
    """torchao's fp8 rowwise grouped mm, differentiable. ImportError, which says why, without it."""
    try:
        module: Any = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
        product: Callable[..., Tensor] = module._to_fp8_rowwise_then_scaled_grouped_mm
    except ModuleNotFoundError as error:
        raise ImportError(f"not installed: {error}") from None
    except Exception as error:
        raise ImportError(f"does not import: {describe(error)}") from None
    return product


def our_step(recipe: str, backend: Backend, p: Problem) -> Call:
    return _step(lambda a, w: grouped_mm(a, w, p.ends, recipe=recipe, backend=backend), p)


def prequantized_step(backend: Backend, p: Problem) -> Call:
    """a and dy arrive as MXTensors; weights are quantized before, as those of further micro-batches are."""
    recipe = Recipe.mxfp8()
    weight = backend.quantize_weight(p.w, recipe, cols=True)

    def product(a: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(a, w, p.ends, recipe=recipe, backend=backend, quantized_weight=weight)

    return _step(product, p, recipe.quantize_activation(p.a), recipe.quantize_gradient(p.dy))


def products(product: str, backend: Backend) -> dict[str, Alternative]:
    """By name. The first is what others are compared with."""
    return {
        "bf16": functools.partial(bf16_product, product),
        "fp8 row, fast": functools.partial(row_product, product, True),
        "fp8 row, slow": functools.partial(row_product, product, False),
        "ours": functools.partial(our_product, product, backend),
        "dense fp8, row": functools.partial(dense_product, product, True),
        "dense fp8, tensor": functools.partial(dense_product, product, False),
    }


def steps(backend: Backend) -> dict[str, Alternative]:
    """By name."""
    guarded = {"ours mxfp8, guarded": functools.partial(our_step, "mxfp8", Hopper(Guard()))}
    return {
        "bf16": bf16_step,
        "torchao fp8 row": torchao_step,
        **{f"ours {recipe}": functools.partial(our_step, recipe, backend) for recipe in RECIPES},
        "ours mxfp8, pre-quantized": functools.partial(prequantized_step, backend),
        **(guarded if backend.name == "hopper" else {}),
    }


def skewed(product: str, backend: Backend) -> dict[str, Alternative]:
    """bf16 and ours, of a product or of "step"."""
    if product == "step":
        return {"bf16": bf16_step, "ours": functools.partial(our_step, "mxfp8", backend)}
    return {name: products(product, backend)[name] for name in ("bf16", "ours")}
