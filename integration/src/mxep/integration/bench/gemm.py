"""bench=gemm: mxep.gemm beside its peers and ceilings, in one run.

products   the three products alone, operands ready
steps      forward and backward, every quantization included

What a step does besides is in bench=quant: rows_per_row, weights_per_row, fold_for_wgrad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mxep.gemm import Backend, backends
from mxep.quant import BLOCK

from ..collective import describe
from ..results import Row
from ..timer import Alternative, Call, Timer, copy_tb_s, free_memory, rotations
from .gemm_cases import PRODUCTS, Problem, products, steps
from .run import Bench, table

T = TypeVar("T")
DENSE = 8192  # of the square products that are ceilings
SECTIONS = {
    "products": table("Products alone", "product, shape, what", "us, TF, x bf16, x fp8 row, of dense, MHz, W"),
    "steps": table("Steps, from and to bf16", "shape, what", "us, TF, x bf16, x torchao, MHz, W"),
}


@dataclass(frozen=True)
class At:
    """A shape, and what sections need."""

    shape: tuple[int, ...]
    backend: Backend
    generator: torch.Generator
    timer: Timer

    def problems(self, make: Callable[[Sequence[int], torch.Generator], T], nbytes: Callable[[T], int]) -> list[T]:
        """As many as it takes for none to be in L2 when its turn comes again. nbytes: of one."""
        first = make(self.shape, self.generator)
        sets = rotations(nbytes(first), self.timer.device)
        return [first, *(make(self.shape, self.generator) for _ in range(sets - 1))]

    def compare(
        self, makers: Mapping[str, Callable[[Any], Call]], problems: Sequence[Any], flop: int
    ) -> dict[str, Row]:
        """The rows of each, timed together."""

        def calls(make: Callable[[Any], Call]) -> list[Call]:
            return [make(p) for p in problems]

        rows = self.timer.compare({name: Alternative(functools.partial(calls, make)) for name, make in makers.items()})
        for name, row in rows.items():
            row |= {"what": name, "flop": flop} | ({"TF": flop / row["us"] / 1e6} if "us" in row else {})
        return rows


def beside(row: Row, others: Mapping[str, Row]) -> Row:
    """The row, and how many times faster it is than others."""
    return row | {name: other["us"] / row["us"] for name, other in others.items() if "us" in row and "us" in other}


def sweep(bench: Bench, measured: Mapping[str, Callable[[At], Iterator[Row]]]) -> Iterator[tuple[str, Row]]:
    """All sections at the shapes of their name, or of kind "layers". A shape that fails leaves the others."""
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
            free_memory(bench.device)


def ceilings(timer: Timer) -> dict[str, float]:
    """TB/s of a copy on a GPU, TF of square dense products."""
    size = DENSE if timer.cuda else BLOCK
    a, b = torch.randn(2, size, size, device=timer.device, dtype=torch.bfloat16)
    qdata, one = [x.to(torch.float8_e4m3fn) for x in (a, b)], torch.ones((), device=timer.device, dtype=torch.float32)

    def fp8() -> torch.Tensor:
        return torch._scaled_mm(qdata[0], qdata[1].mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    dense = {"dense bf16 TF": Alternative(lambda: [lambda: a @ b.mT]), "dense fp8 TF": Alternative(lambda: [fp8])}
    rates = {name: 2 * size**3 / row["us"] / 1e6 for name, row in timer.compare(dense).items() if "us" in row}
    return {"copy TB/s": copy_tb_s(timer), **rates} if timer.cuda else rates


def _products(at: At) -> Iterator[Row]:
    problems = at.problems(Problem.gaussian, lambda p: p.least_bytes("forward", 1))
    for product in PRODUCTS:
        rows = at.compare(products(product, at.backend), problems, problems[0].flop)
        dense = [row["TF"] for what, row in rows.items() if what.startswith("dense") and "TF" in row]
        for what, row in rows.items():
            row |= {"product": product, "bytes": problems[0].least_bytes(product, 2 if what == "bf16" else 1)}
            if dense and "TF" in row:
                row["of dense"] = row["TF"] / max(dense)
            yield beside(row, {"x bf16": rows["bf16"], "x fp8 row": rows["fp8 row, fast"]})


def _steps(at: At) -> Iterator[Row]:
    problems = at.problems(Problem.gaussian, lambda p: p.least_bytes("forward", 1))
    rows = at.compare(steps(at.backend), problems, 3 * problems[0].flop)
    for row in rows.values():
        yield beside(row, {"x bf16": rows["bf16"], "x torchao": rows["torchao fp8 row"]})


MEASURED: dict[str, Callable[[At], Iterator[Row]]] = {"products": _products, "steps": _steps}
"""Section -> what measures its rows, at a shape."""
measure = functools.partial(sweep, measured=MEASURED)
