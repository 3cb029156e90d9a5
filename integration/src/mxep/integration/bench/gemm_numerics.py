"""How exact products are: SNR against float64 on kind and unkind data, and what accumulating in tensor cores costs.

    SNR   20 log10(|ref| / |ref - x|) dB, at most SAME, which stands for no difference
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

from .gemm_cases import SKEWS, Problem, group_sizes, need_cuda
from .tables import Row
from .timing import describe

SAME = 300.0
RESULTS = ("out", "dx", "dw")
INTERVALS = {"every 128": 1, "every 256": 2}
"""Of the Hopper kernel's promotion to fp32: its stages of 128."""

Draw = Callable[..., Tensor]
Products = tuple[Tensor, Tensor, Tensor]


def student_t(normal: Draw, *shape: int) -> Tensor:
    """With 3 degrees of freedom: finite variance, no kurtosis."""
    chi2 = sum((normal(*shape) ** 2 for _ in range(3)), torch.zeros(()))
    return normal(*shape) / (chi2 / 3).sqrt()


def same_sign(normal: Draw, *shape: int) -> Tensor:
    return 1 + normal(*shape)


def gaussian(normal: Draw, *shape: int) -> Tensor:
    return normal(*shape)


DATA: Mapping[str, tuple[Callable[..., Tensor], float, bool]] = {
    "Gaussian": (gaussian, 1, False),
    "Student t(3)": (student_t, 1, False),
    "outlier channels x1000": (gaussian, 1e3, False),
    "same sign": (same_sign, 1, False),
    "anti-aligned x30000": (gaussian, 3e4, True),
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
    a, w, dy = a.bfloat16(), w.bfloat16(), dy.bfloat16()
    return Problem.of(a, w, dy, group_sizes(SKEWS["balanced"](g), m))


def products(
    p: Problem, forward: tuple[Tensor, Tensor], dgrad: tuple[Tensor, Tensor], wgrad: tuple[Tensor, Tensor]
) -> Products:
    """out, dx, dw in float64 of operands (a, w), (dy, w), (dy, a)."""
    rows = list(enumerate(torch.arange(sum(p.sizes), device=p.a.device).split(p.sizes)))
    (a, w), (dy, w_), (dy_, a_) = forward, dgrad, wgrad
    out = torch.cat([_double(a[r]) @ _double(w[g]).mT for g, r in rows])
    dx = torch.cat([_double(dy[r]) @ _double(w_[g]) for g, r in rows])
    dw = torch.stack([_double(dy_[r]).mT @ _double(a_[r]) for _, r in rows])
    return out, dx, dw


def exact_mx(p: Problem, recipe: Recipe) -> Products:
    """What the recipe defines, in float64: products of dequantized operands."""
    a, dy = recipe.quantize_activation(p.a), recipe.quantize_gradient(p.dy)
    w = quantize_weight(p.w, recipe)
    assert w.colwise is not None
    transposed = recipe.along_tokens(dy, p.ends), recipe.along_tokens(a, p.ends)
    values = [_values(x) for x in (a, w.rowwise, dy, w.colwise, *transposed)]
    return products(p, (values[0], values[1]), (values[2], values[3]), (values[4], values[5]))


def run(backend: Backend, p: Problem, recipe: Recipe, *, quantized: bool = False) -> Products:
    """The three products of a backend, in fp32, from bf16 operands or from MX ones."""
    a, dy = recipe.quantize_activation(p.a), recipe.quantize_gradient(p.dy)
    if not quantized:
        a = backend.quantize_rows(p.a, recipe.fmt, recipe)
        dy = backend.quantize_rows(p.dy, recipe.grad_fmt, recipe)
    w = backend.quantize_weight(p.w, recipe)
    assert w.colwise is not None
    kind = torch.float32
    out = backend.forward(a, w.rowwise, p.ends, bias=None, out_dtype=kind)
    dx = backend.dgrad(dy, w.colwise, p.ends, out_dtype=kind)
    dw = backend.wgrad(backend.prepare_wgrad(dy, a, p.ends, recipe), p.ends, out_dtype=kind)
    assert dw is not None
    return out, dx, dw


def compare(data: str, shape: Sequence[int], backend: Backend, generator: torch.Generator) -> list[Row]:
    """A row for each result of MXFP8 products on such data: dB against float64, and "x / y", x against y.

    MX: what the recipe defines. ours: from bf16 operands. wire: ours, from operands that came as MX.
    """
    p, recipe = problem(data, shape, generator), Recipe.mxfp8()
    truth = products(p, (p.a, p.w), (p.dy, p.w), (p.dy, p.a))
    mx = exact_mx(p, recipe)
    ours, wire = run(backend, p, recipe), run(backend, p, recipe, quantized=True)
    dequant = run(BACKENDS["dequant"], p, recipe)
    return [
        {
            "data": data,
            "result": result,
            "MX": snr(truth[i], mx[i]),
            "dequant": snr(truth[i], dequant[i]),
            "ours": snr(truth[i], ours[i]),
            "wire": snr(truth[i], wire[i]),
            "ours / MX": snr(mx[i], ours[i]),
            "wire / MX": snr(mx[i], wire[i]),
            "wire / ours": snr(ours[i], wire[i]),
        }
        for i, result in enumerate(RESULTS)
    ]


def accumulation(data: str, shape: Sequence[int], generator: torch.Generator) -> Iterator[Row]:
    """A row for each way to sum the same FP8 products: SNR and bias against float64, which has no other error."""
    p = problem(data, shape, generator)
    a, w = (
        quantize(p.a, block_size=None).qdata,
        quantize(p.w[0], block_size=None).qdata,
    )  # multiplied as they are, scales 1
    exact = a.double() @ w.double().mT
    for name, sums in _SUMS.items():
        row: Row = {"data": data, "what": name}
        try:
            got = sums(a, w, p.ends)
            error = got.double() - exact
            bias = float((error * exact.sign()).sum() / exact.abs().sum())
            yield {**row, "result": str(got.dtype).removeprefix("torch."), "dB": snr(exact, got), "bias": bias}
        except NotImplementedError as reason:
            yield {**row, "note": str(reason)}
        except Exception as reason:
            yield {**row, "error": describe(reason)}


def _dense(fast: bool, a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, w.mT, one, one, out_dtype=torch.float32, use_fast_accum=fast)


def _grouped(fast: bool, a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    need_cuda(a)
    ones = torch.ones(len(a), device=a.device), torch.ones(1, len(w), device=a.device)
    return torch._scaled_grouped_mm(a, w[None].mT, *ones, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _ours(interval: int | None, a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """interval None: the backend's own."""
    one = torch.full((max(len(a), len(w)), 1), 127, dtype=torch.uint8, device=a.device).view(torch.float8_e8m0fnu)
    operands = a, one[: len(a)], w[None], one[None, : len(w)], ends, None, torch.float32
    if interval is None:
        out: Tensor = fp8_grouped_mm(*operands)
        return out
    need_cuda(a)
    from mxep.gemm.kernels import hopper

    return hopper.grouped_mm(*operands, interval=interval)


_SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "dense, fast": functools.partial(_dense, True),
    "dense, slow": functools.partial(_dense, False),
    "grouped, fast": functools.partial(_grouped, True),
    "grouped, slow": functools.partial(_grouped, False),
    "ours": functools.partial(_ours, None),
    **{f"ours, {name}": functools.partial(_ours, interval) for name, interval in INTERVALS.items()},
}
"""dense and grouped are torch's; fast leaves sums in the tensor cores, slow takes them out now and then."""


def snr(exact: Tensor, x: Tensor) -> float:
    """dB of x against `exact`."""
    exact, x = exact.double(), x[: len(exact)].double()
    value = float(20 * torch.log10(exact.norm() / (exact - x).norm()))
    return SAME if value > SAME else value  # NaN stays NaN


def _values(x: Tensor) -> Tensor:
    return x.dequantize(torch.float32) if isinstance(x, MXTensor) else x


def _double(x: Tensor) -> Tensor:
    return x.double()
