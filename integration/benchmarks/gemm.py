"""bench=gemm: mxep.gemm compared with its peers and ceilings, in one run.

    products   the three GEMMs alone, operands ready            forward  out = a w^T
    steps      all three from bf16 operands, every              dgrad    da = dy w
               quantization included, the weights' too          wgrad    dw = dy^T a       2 M N K flop each

- bf16 is torch's grouped mm, mxep bf16 ours on Hopper. fp8 row is torch's with a scale per row, with use_fast_accum
  (fast) or without (slow). torchao's grouped mm builds on it.
- DeepGEMM has scales for 1 x 128 elements of rows and 128 x 128 of weights. Its wgrad adds to fp32.
- The ceiling is a dense FP8 GEMM of the same M, N, K, with a scale per row or per tensor.

M rows, N out features, K in features, G groups.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mxep.gemm import Backend, Recipe, backends, grouped_mm
from mxep.integration.report import Row
from mxep.quant import BLOCK, MXTensor, quantize

from . import baseline
from .script import Bench, describe, free_memory, gradients, table
from .timer import Alternative, Call, Timer, copy_tb_s, rotations

DENSE = 8192  # size of the square GEMMs that are ceilings
SHAPES = {"layers": (32, 32, 32, 1)}
SIZES = "rows, N, K, groups"
BACKENDS = tuple(backends.BACKENDS)
SECTIONS = {
    "products": table("Products alone", "product, shape, what", "us, TF, x bf16, x fp8 row, of dense"),
    "steps": table("Steps, from and to bf16", "shape, what", "us, TF, x bf16, x torchao"),
}


@dataclass(frozen=True)
class At:
    """A shape, and the tools to measure it."""

    shape: tuple[int, ...]
    backend: Backend
    generator: torch.Generator
    timer: Timer

    def problems(self, make: Callable[[Sequence[int], torch.Generator], Any]) -> list[Any]:
        """Make enough problems that each has left L2 when it is used again."""
        first = make(self.shape, self.generator)
        sets = rotations(first.nbytes, self.timer.device)
        return [first, *(make(self.shape, self.generator) for _ in range(sets - 1))]

    def compare(
        self, makers: Mapping[str, Callable[[Any], Call]], problems: Sequence[Any], flop: int, **others: str
    ) -> dict[str, Row]:
        """Time all makers together. Returns a row for each. others: column -> maker that the row is compared with."""

        def calls(make: Callable[[Any], Call]) -> list[Call]:
            return [make(p) for p in problems]

        rows = self.timer.compare({name: Alternative(functools.partial(calls, make)) for name, make in makers.items()})
        for name, row in rows.items():
            row |= {"what": name, "flop": flop} | ({"TF": flop / row["us"] / 1e6} if "us" in row else {})
        return {name: beside(row, {key: rows[other] for key, other in others.items()}) for name, row in rows.items()}


def beside(row: Row, others: Mapping[str, Row]) -> Row:
    """Add to the row how many times as fast it is as the others."""
    return row | {name: other["us"] / row["us"] for name, other in others.items() if "us" in row and "us" in other}


def sweep(bench: Bench, measured: Mapping[str, Callable[[At], Iterator[Row]]]) -> Iterator[tuple[str, Row]]:
    """Yield (section, row) at the shapes named as the section, else at "layers". A failed shape stops no others."""
    backend = backends.select(bench.config.backend or "auto", bench.device)
    timer = Timer(bench.device, seconds=0.15, rounds=4)
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    bench.ceilings.update(ceilings(timer))
    shapes = bench.config.shapes
    for name in bench.report.sections:
        for shape in map(tuple, shapes.get(name, shapes.get("layers", ()))):
            labels = dict.fromkeys(bench.report.sections[name].labels) | {"shape": list(shape)}
            try:
                for row in measured[name](At(shape, backend, generator, timer)):
                    yield name, labels | row
            except Exception as error:
                yield name, labels | {"error": f"ended early: {describe(error)}"}
            free_memory()


def ceilings(timer: Timer) -> dict[str, float]:
    """TF of square dense GEMMs, and on a GPU also TB/s of a copy."""
    size = DENSE if timer.cuda else BLOCK
    a, b = torch.randn(2, size, size, device=timer.device, dtype=torch.bfloat16)
    qdata, one = [x.to(torch.float8_e4m3fn) for x in (a, b)], torch.ones((), device=timer.device, dtype=torch.float32)

    def fp8() -> torch.Tensor:
        return torch._scaled_mm(qdata[0], qdata[1].mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    dense = {"dense bf16 TF": Alternative(lambda: [lambda: a @ b.mT]), "dense fp8 TF": Alternative(lambda: [fp8])}
    rates = {name: 2 * size**3 / row["us"] / 1e6 for name, row in timer.compare(dense).items() if "us" in row}
    return {"copy TB/s": copy_tb_s(timer), **rates} if timer.cuda else rates


def _products(at: At) -> Iterator[Row]:
    problems = at.problems(Problem.gaussian)
    for product in PRODUCTS:
        compared = {"x bf16": "bf16", "x fp8 row": "fp8 row, fast"}
        rows = at.compare(products(product, at.backend), problems, problems[0].flop, **compared)
        dense = [row["TF"] for what, row in rows.items() if what.startswith("dense") and "TF" in row]
        for row in rows.values():
            yield row | {"product": product} | ({"of dense": row["TF"] / max(dense)} if dense and "TF" in row else {})


def _steps(at: At) -> Iterator[Row]:
    problems = at.problems(Problem.gaussian)
    compared = {"x bf16": "bf16", "x torchao": "torchao fp8 row"}
    yield from at.compare(steps(at.backend), problems, 3 * problems[0].flop, **compared).values()


measure = functools.partial(sweep, measured={"products": _products, "steps": _steps})


PRODUCTS = ("forward", "dgrad", "wgrad")
RECIPES = ("bf16", "mxfp8", "fp8")


@dataclass(frozen=True)
class Problem:
    """a (M, K), w (G, N, K), dy (M, N) bf16; offs (G,): ends of groups, with equal sizes up to multiples of 32 rows."""

    a: Tensor
    w: Tensor
    dy: Tensor
    offs: Tensor

    @staticmethod
    def of(a: Tensor, w: Tensor, dy: Tensor) -> Problem:
        units, groups = len(a) // BLOCK, len(w)
        sizes = [BLOCK * (units // groups + (g < units % groups)) for g in range(groups)]
        return Problem(a, w, dy, torch.tensor(sizes, device=a.device, dtype=torch.int64).cumsum(0, dtype=torch.int32))

    @staticmethod
    def gaussian(shape: Sequence[int], generator: torch.Generator) -> Problem:
        """Draw a problem. shape: M, N, K, G."""
        m, n, k, g = shape
        draw = functools.partial(torch.randn, dtype=torch.bfloat16, generator=generator, device=generator.device)
        return Problem.of(draw(m, k), draw(g, n, k), draw(m, n))

    @property
    def flop(self) -> int:
        """Floating-point operations of one GEMM."""
        return 2 * len(self.a) * self.w[0].numel()

    @property
    def nbytes(self) -> int:
        """Bytes that a forward in FP8 must move."""
        return self.a.numel() + self.w.numel() + 2 * self.dy.numel()


Maker = Callable[[Problem], Call]


def need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotImplementedError(f"needs CUDA, got {device}")


def bf16_product(product: str, p: Problem) -> Call:
    left, right = {"forward": (p.a, p.w.mT), "dgrad": (p.dy, p.w), "wgrad": (p.dy.mT, p.a)}[product]
    return lambda: torch._grouped_mm(left, right, offs=p.offs)


def _row_scaled(product: str, p: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qdata of the left and right operand, then their fp32 scales. Left: (rows, C), a scale per row. Right: (C, n) or
    (G, C, n), a scale per column. C is contiguous in both."""
    one, other = {"forward": (p.a, p.w), "dgrad": (p.dy, p.w), "wgrad": (p.dy, p.a)}[product]
    left = quantize(one, axis=-2, block_size=None).mT if product == "wgrad" else quantize(one, block_size=None)
    right = quantize(other, block_size=None).mT if product == "forward" else quantize(other, axis=-2, block_size=None)
    assert isinstance(left, MXTensor)
    assert isinstance(right, MXTensor)
    return left.qdata, right.qdata, left.scale.float().squeeze(-1), right.scale.float().squeeze(-2)


def row_product(product: str, p: Problem, *, fast: bool) -> Call:
    need_cuda(p.a.device)
    left, right, left_scale, right_scale = _row_scaled(product, p)
    if product == "wgrad":  # all groups have the same scales, but each needs a copy
        left_scale, right_scale = left_scale.repeat(len(p.w)), right_scale.repeat(len(p.w))
    scales = left_scale.contiguous(), right_scale.contiguous()
    return lambda: torch._scaled_grouped_mm(
        left, right, *scales, offs=p.offs, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def dense_product(product: str, p: Problem, *, rows: bool) -> Call:
    """One GEMM of all rows with the first group's weight. rows: a scale per row, else per tensor."""
    left, right, left_scale, right_scale = _row_scaled(product, p)
    if product != "wgrad":
        right, right_scale = right[0], right_scale[0]
    one = left_scale.new_ones(())
    scales = (left_scale[:, None].contiguous(), right_scale[None].contiguous()) if rows else (one, one)
    return lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def deepgemm_product(product: str, p: Problem) -> Call:
    """m-grouped for forward and dgrad, k-grouped for wgrad. Raises ImportError without DeepGEMM."""
    deep_gemm, utils = (importlib.import_module(name) for name in ("deep_gemm", "deep_gemm.utils"))
    counts = p.offs.diff(prepend=p.offs.new_zeros(1))
    sizes = counts.tolist()
    if product == "wgrad":

        def columns(x: Tensor) -> tuple[Tensor, Tensor]:
            """Groups of (features, rows), flattened and concatenated; scales (features, row blocks of all groups)."""
            parts = [utils.per_token_cast_to_fp8(part.T.contiguous(), False) for part in x.split(sizes)]
            return torch.cat([qdata.flatten() for qdata, _ in parts]), torch.cat([scale for _, scale in parts], 1)

        operands = columns(p.dy), columns(p.a)
        dw, zero = torch.zeros(2, *p.w.shape, dtype=torch.float32, device=p.w.device)
        wgrad = deep_gemm.k_grouped_fp8_gemm_nt_contiguous
        return lambda: wgrad(*operands, dw, sizes, counts, zero, recipe=(1, 1, 128))
    rows, weight = (p.a, p.w) if product == "forward" else (p.dy, p.w.mT.contiguous())
    blocks = [utils.per_block_cast_to_fp8(each, False) for each in weight]
    right = torch.stack([qdata for qdata, _ in blocks]), torch.stack([scale for _, scale in blocks])
    left, out = utils.per_token_cast_to_fp8(rows, False), rows.new_empty(len(rows), weight.shape[1])
    groups = torch.arange(len(sizes), dtype=torch.int32, device=rows.device).repeat_interleave(counts)
    multiply = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    how = {"recipe_a": (1, 128), "recipe_b": (128, 128), "disable_ue8m0_cast": True}
    return lambda: multiply(left, right, out, groups, **how)


def mxep_product(product: str, p: Problem, *, backend: Backend, name: str) -> Call:
    """A GEMM in the recipe `name`, with operands in the backend's form: on Hopper MXFP8 is folded."""
    recipe = Recipe.named(name)
    how: dict[str, Any] = {"offs": p.offs, "out_dtype": torch.bfloat16}
    a = backend.quantize_rows(p.a, recipe.fmt, recipe)
    if product == "forward":
        return functools.partial(backend.forward, a, backend.quantize_weight_rowwise(p.w, recipe)[0], bias=None, **how)
    dy = backend.quantize_rows(p.dy, recipe.grad_fmt, recipe)
    if product == "dgrad":
        return functools.partial(backend.dgrad, dy, backend.quantize_weight_colwise(p.w, recipe), **how)
    operands = backend.prepare_wgrad(dy, a, p.offs, recipe)
    return functools.partial(backend.wgrad, operands, **how)


def _step(product: Callable[[Tensor, Tensor], Tensor], p: Problem) -> Call:
    """A call that runs forward and backward of product(a, w), and returns both gradients."""
    leaves = p.a.detach().requires_grad_(), p.w.detach().requires_grad_()
    return lambda: gradients(product(*leaves), leaves, p.dy)


def import_torchao(name: str, device: torch.device) -> Any:
    """Import a module of torchao. Raises ImportError with the reason, or NotImplementedError on a CPU."""
    try:
        module = importlib.import_module(f"torchao.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(f"not installed: {error}") from None
    except Exception as error:
        raise ImportError(f"does not import: {describe(error)}") from None
    need_cuda(device)
    return module


def torchao_product(device: torch.device) -> Callable[..., Tensor]:
    """(a, w, offs) -> torchao's fp8 rowwise grouped mm, differentiable. Raises as `import_torchao`."""
    product = import_torchao("prototype.moe_training.fp8_grouped_mm", device)._to_fp8_rowwise_then_scaled_grouped_mm

    def call(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = product(a, w.mT, offs, pad_token_groups_for_grouped_mm=False)
        return out

    return call


def prequantized_step(backend: Backend, p: Problem) -> Call:
    """A step with MXTensors a and dy, and with quantized weights, as in later micro-batches.

    It holds the quantized weights, because `quantize_weights_once` would quantize in each replay of the timer's graph.
    """
    recipe = Recipe.mxfp8()
    rowwise, colwise = backend.quantize_weight_rowwise(p.w, recipe)[0], backend.quantize_weight_colwise(p.w, recipe)
    methods = {
        "quantize_weight_rowwise": lambda *_, **__: (rowwise, None),
        "quantize_weight_colwise": lambda *_: colwise,
    }
    prequantized: Any = type("Prequantized", (type(backend),), methods)()
    p = replace(p, a=recipe.quantize_rows(p.a), dy=recipe.quantize_rows(p.dy, recipe.grad_fmt))
    return _step(functools.partial(grouped_mm, offs=p.offs, recipe=recipe, backend=prequantized), p)


def products(product: str, backend: Backend) -> dict[str, Maker]:
    """Makers of one GEMM by name, the baseline first."""
    makers: dict[str, Callable[..., Call]] = {
        "bf16": bf16_product,
        "fp8 row, fast": functools.partial(row_product, fast=True),
        "fp8 row, slow": functools.partial(row_product, fast=False),
        "DeepGEMM": deepgemm_product,
        "mxep bf16": functools.partial(mxep_product, backend=backend, name="bf16"),
        "mxep": functools.partial(mxep_product, backend=backend, name="mxfp8"),
        "dense fp8, row": functools.partial(dense_product, rows=True),
        "dense fp8, tensor": functools.partial(dense_product, rows=False),
    }
    return {name: functools.partial(make, product) for name, make in makers.items()}


def steps(backend: Backend) -> dict[str, Maker]:
    """Makers of steps by name, the baseline first."""

    def mxep(recipe: str) -> Maker:
        return lambda p: _step(functools.partial(grouped_mm, offs=p.offs, recipe=recipe, backend=backend), p)

    return {
        "bf16": lambda p: _step(functools.partial(baseline.bf16_product, offs=p.offs), p),
        "torchao fp8 row": lambda p: _step(functools.partial(torchao_product(p.a.device), offs=p.offs), p),
        **{f"mxep {recipe}": mxep(recipe) for recipe in RECIPES},
        "mxep mxfp8, pre-quantized": functools.partial(prequantized_step, backend),
    }
