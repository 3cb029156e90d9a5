"""How exact products are: SNR against float64 on kind and unkind data, and what accumulating in tensor cores costs.

    bias  sum(error * sign(ref)) / sum|ref|: negative where sums come out too small

Results are taken in fp32 where that can be had, as bf16 alone ends at 55 dB. Unkind data gives one block of 32 channels
of a and of dy other magnitudes, so that the MX product itself is still exact, and scales that differ within a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mxep.gemm import BACKENDS, Backend, Recipe, quantize_weight
from mxep.gemm.backends.hopper import fp8_grouped_mm
from mxep.quant import BLOCK, MXTensor, quantize

from ..collective import FailedOnRanks, on_all_ranks
from ..results import Row
from ..snr import snr
from ..timer import failure
from .gemm_cases import Problem, backend_products, need_cuda

Draw = Callable[..., Tensor]
Products = tuple[Tensor, ...]


def student_t(normal: Draw, *shape: int) -> Tensor:
    """With 3 degrees of freedom: finite variance, no kurtosis."""
    chi2 = sum((normal(*shape) ** 2 for _ in range(3)), torch.zeros(()))
    return normal(*shape) / (chi2 / 3).sqrt()


DATA: Mapping[str, tuple[Callable[..., Tensor], float, bool]] = {
    "Gaussian": (lambda normal, *shape: normal(*shape), 1, False),
    "Student t(3)": (student_t, 1, False),
    "outlier channels x1000": (lambda normal, *shape: normal(*shape), 1e3, False),
    "same sign": (lambda normal, *shape: 1 + normal(*shape), 1, False),
    "anti-aligned x30000": (lambda normal, *shape: normal(*shape), 3e4, True),
}
"""Name -> how values are drawn, how much larger some channels of a and dy are, whether weights are smaller there."""


def problem(data: str, shape: Sequence[int], generator: torch.Generator) -> Problem:
    """M, N, K, G of balanced groups, of a kind of DATA, in bf16."""
    how, factor, aligned = DATA[data]
    m, n, k, g = shape
    draw = functools.partial(how, functools.partial(torch.randn, generator=generator, device=generator.device))
    a, w, dy = draw(m, k), draw(g, n, k), draw(m, n)
    a[:, -BLOCK:] *= factor
    dy[:, -BLOCK:] *= factor
    if aligned:
        w[:, :, -BLOCK:] /= factor
        w[:, -BLOCK:] /= factor
    return Problem.of(a.bfloat16(), w.bfloat16(), dy.bfloat16())


def products(p: Problem, *operands: Tensor) -> Products:
    """out, dx, dw in float64 of operands a and w, dy and w, dy and a."""
    rows = list(enumerate(torch.arange(sum(p.sizes), device=p.a.device).split(p.sizes)))
    a, w, dy, w_, dy_, a_ = operands
    out = torch.cat([a[r].double() @ w[g].double().mT for g, r in rows])
    dx = torch.cat([dy[r].double() @ w_[g].double() for g, r in rows])
    return out, dx, torch.stack([dy_[r].double().mT @ a_[r].double() for _, r in rows])


def exact_mx(p: Problem, recipe: Recipe) -> Products:
    """What the recipe defines, in float64: products of dequantized operands."""
    a, dy, w = recipe.quantize_activation(p.a), recipe.quantize_gradient(p.dy), quantize_weight(p.w, recipe)
    assert w.colwise is not None
    operands = a, w.rowwise, dy, w.colwise, recipe.along_tokens(dy, p.offs), recipe.along_tokens(a, p.offs)
    return products(p, *(x.dequantize(torch.float32) if isinstance(x, MXTensor) else x for x in operands))


def multiply(backend: Backend, p: Problem, recipe: Recipe, *, quantized: bool = False) -> Products:
    """The three products of a backend, in fp32, from bf16 operands or from MX ones."""
    a, dy = recipe.quantize_activation(p.a), recipe.quantize_gradient(p.dy)
    if not quantized:
        a = backend.quantize_rows(p.a, recipe.fmt, recipe)
        dy = backend.quantize_rows(p.dy, recipe.grad_fmt, recipe)
    w = backend.quantize_weight(p.w, recipe)
    return tuple(call() for call in backend_products(backend, p, a, dy, w, torch.float32).values())


def compare(data: str, shape: Sequence[int], backend: Backend, generator: torch.Generator) -> Iterator[Row]:
    """A row for each result of MXFP8 products on such data: dB against float64, and "x / y", x against y.

    MX: what the recipe defines. mxep: from bf16 operands. wire: mxep, from operands that came as MX.
    """
    p, recipe = problem(data, shape, generator), Recipe.mxfp8()
    exact = products(p, p.a, p.w, p.dy, p.w, p.dy, p.a)
    found = {
        "MX": exact_mx(p, recipe),
        "dequant": multiply(BACKENDS["dequant"], p, recipe),
        "mxep": multiply(backend, p, recipe),
        "wire": multiply(backend, p, recipe, quantized=True),
    }
    for i, result in enumerate(("out", "dx", "dw")):
        row: Row = {"data": data, "result": result}
        row |= {name: snr(exact[i], tensors[i][: len(exact[i])]) for name, tensors in found.items()}
        for x, y in (("mxep", "MX"), ("wire", "MX"), ("wire", "mxep")):
            row[f"{x} / {y}"] = snr(found[y][i], found[x][i])
        yield row


def accumulation(data: str, shape: Sequence[int], generator: torch.Generator) -> Iterator[Row]:
    """A row for each way to sum the same FP8 products: SNR and bias against float64, which has no other error."""
    p = problem(data, shape, generator)
    a, w = (
        quantize(p.a, block_size=None).qdata,
        quantize(p.w[0], block_size=None).qdata,
    )  # multiplied as they are, scales 1
    exact = a.double() @ w.double().mT
    for name, sums in SUMS.items():
        row: Row = {"data": data, "what": name}
        try:
            got = on_all_ranks(lambda sums=sums: sums(a, w, p.offs))  # type: ignore[misc]
            bias = float(((got.double() - exact) * exact.sign()).sum() / exact.abs().sum())
            yield {**row, "result": str(got.dtype).removeprefix("torch."), "dB": snr(exact, got), "bias": bias}
        except FailedOnRanks as error:
            yield row | failure(error)


def _dense(fast: bool, a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, w.mT, one, one, out_dtype=torch.float32, use_fast_accum=fast)


def _grouped(fast: bool, a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    need_cuda(a.device)
    ones = torch.ones(len(a), device=a.device), torch.ones(1, len(w), device=a.device)
    return torch._scaled_grouped_mm(a, w[None].mT, *ones, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _mxep(interval: int | None, a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """interval: of the Hopper kernel's promotion to fp32, in its stages of 128; None: the backend's own."""
    one = torch.full((max(len(a), len(w)), 1), 127, dtype=torch.uint8, device=a.device).view(torch.float8_e8m0fnu)
    operands = a, one[: len(a)], w[None], one[None, : len(w)], offs, None, torch.float32
    if interval is None:
        out: Tensor = fp8_grouped_mm(*operands)
        return out
    need_cuda(a.device)
    from mxep.gemm.kernels import hopper

    return hopper.grouped_mm(*operands, interval=interval)


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dense, fast": functools.partial(_dense, True),
    "dense, slow": functools.partial(_dense, False),
    "grouped, fast": functools.partial(_grouped, True),
    "grouped, slow": functools.partial(_grouped, False),
    "mxep": functools.partial(_mxep, None),
    "mxep, every 128": functools.partial(_mxep, 1),
    "mxep, every 256": functools.partial(_mxep, 2),
}
"""dense and grouped are torch's; fast leaves sums in the tensor cores, slow takes them out now and then."""
