"""bench=gemm: mxep.gemm beside its peers and ceilings, in one run, and how exact it is.

    products      the three products alone, operands ready               shapes "layers"
    steps         forward and backward, every quantization included      shapes "layers"
    stages        what a step of ours consists of                        shapes "layers"
    skew          ours and bf16 where groups differ in size              shapes "skew"
    numerics      SNR on kind and unkind data                            shapes "numerics"
    accumulation  SNR and bias of FP8 sums                               shapes "accumulation"

Alternatives of one table are timed round robin: a chip at its power limit is as fast as it is cool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxep.gemm import BACKENDS, Backend
from mxep.gemm.backends import select
from mxep.quant import BLOCK

from ..config import ConfigError
from ..schema import BenchConfig
from . import gemm_numerics as numerics
from .gemm_cases import PRODUCTS, SKEWS, Alternative, Problem, products, skewed, stages, steps
from .tables import Results, Row, Section
from .timing import Call, Timing, copy_tb_s, describe, rotations, round_robin

DENSE = 8192  # of the square products that are ceilings
CAPACITY = 4  # how many times as many rows as are live, in section skew
DEEPGEMM = {
    (65536, 4096, 7168, 32): 1211,
    (65536, 7168, 2048, 32): 1144,
    (65536, 2048, 7168, 32): 1175,
    (131072, 2048, 7168, 8): 1182,
    (131072, 8192, 5120, 8): 1234,
    (32768, 1536, 2048, 32): 1086,
}
"""TF of DeepGEMM's forward with scales of 1 x 128, of an earlier run on an H200; not run here."""

SHAPES = {"products": "layers", "steps": "layers", "stages": "layers"}
"""Section -> kind of its shapes, where that is not its own name."""


Shape = tuple[int, ...]
Measured = Callable[["Bench", Shape], Iterator[Row]]


@dataclass(frozen=True)
class Bench:
    """What sections need. ceilings: TB/s of a copy, TF of dense products."""

    backend: Backend
    generator: torch.Generator
    ceilings: Mapping[str, float]

    @property
    def device(self) -> torch.device:
        return self.generator.device

    def problems(self, shape: Shape) -> list[Problem]:
        """As many as it takes for none to be in L2 when its turn comes again."""
        first = Problem.gaussian(shape, self.generator)
        sets = rotations(first.least_bytes("forward", 1)) if self.device.type == "cuda" else 1
        return [first, *(Problem.gaussian(shape, self.generator) for _ in range(sets - 1))]

    def compare(self, alternatives: Mapping[str, Alternative], problems: Sequence[Problem]) -> dict[str, Row]:
        """The figures of each, timed together."""
        calls = {name: functools.partial(_calls, make, problems) for name, make in alternatives.items()}
        return {name: _figures(timing) for name, timing in round_robin(calls, self.device).items()}


def _calls(make: Alternative, problems: Sequence[Problem]) -> list[Call]:
    return [make(p) for p in problems]


def _figures(timing: Timing | Exception) -> Row:
    if isinstance(timing, (ImportError, NotImplementedError)):
        return {"note": str(timing)}
    if isinstance(timing, Exception):
        return {"error": describe(timing)}
    return {"us": timing.us, "MHz": timing.mhz, "W": timing.watts}


def check(config: BenchConfig) -> None:
    """ConfigError for devices, backends, sections, shapes or folders that there are not."""
    _known("bench.device", [config.device], ("cuda", "cpu"))
    _known("bench.backend", [str(config.backend)], BACKENDS)
    _known("bench.sections", config.sections or (), SECTIONS)
    _known("bench.shapes", config.shapes, {SHAPES.get(name, name): None for name in SECTIONS})
    for kind, shapes in config.shapes.items():
        for shape in shapes:
            if len(shape) != 4 or min(shape) < 1 or any(size % BLOCK for size in shape[:3]):
                raise ConfigError(f"bench.shapes.{kind}: got {list(shape)}, wanted rows, N, K in {BLOCK}s and groups")
    if config.picture is not None and not Path(config.picture).absolute().parent.is_dir():
        raise ConfigError(f"bench.picture: no such folder: {Path(config.picture).parent}")
    if config.picture is not None and "products" not in (config.sections or SECTIONS):
        raise ConfigError("bench.picture: wants section products, which bench.sections leaves out")


def _known(key: str, got: Any, known: Any) -> None:
    for name in got:
        if name not in known:
            raise ConfigError(f"{key}: got {name!r}, wanted some of {', '.join(known)}")


def measure(config: BenchConfig, seed: int, say: Callable[[str], None]) -> Results:
    """All sections, one after the other; `say` gets each row when it is there. A shape that fails leaves others."""
    device = torch.device(config.device)
    backend = select(str(config.backend), device)
    generator = torch.Generator(device).manual_seed(seed)
    bench = Bench(backend, generator, ceilings(device))
    sections: dict[str, Section] = {}
    for name in config.sections or SECTIONS:
        section, measured = SECTIONS[name]
        sections[name] = section = Section(section.title, section.labels, section.figures)
        for shape in map(tuple, config.shapes.get(SHAPES.get(name, name), ())):
            for row in _contained(measured, bench, shape):
                row |= {"shape": list(shape)}
                section.rows.append({**{label: row.get(label) for label in section.labels}, **row})
                say(section.line(section.rows[-1]))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return Results("mxep.gemm", dict(bench.ceilings), sections)


def _contained(measured: Measured, bench: Bench, shape: Shape) -> Iterator[Row]:
    """What `measured` yields, and why it ended early if it did."""
    try:
        yield from measured(bench, shape)
    except Exception as error:
        yield {"error": f"ended early: {describe(error)}"}


def ceilings(device: torch.device) -> dict[str, float]:
    """TB/s of a copy on a GPU, TF of square dense products."""
    size = DENSE if device.type == "cuda" else BLOCK
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    qdata, one = [x.to(torch.float8_e4m3fn) for x in (a, b)], torch.ones((), device=device)
    alternatives: dict[str, Callable[[], list[Call]]] = {
        "dense bf16 TF": lambda: [lambda: a @ b.mT],
        "dense fp8 TF": lambda: [
            lambda: torch._scaled_mm(qdata[0], qdata[1].mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        ],
    }
    timings = round_robin(alternatives, device).items()
    dense = {name: 2 * size**3 / t.us / 1e6 for name, t in timings if isinstance(t, Timing)}
    return {"copy TB/s": copy_tb_s(), **dense} if device.type == "cuda" else dense


def _products(bench: Bench, shape: Shape) -> Iterator[Row]:
    problems = bench.problems(shape)
    for product in PRODUCTS:
        rows = bench.compare(products(product, bench.backend), problems)
        for what, row in rows.items():
            moved = problems[0].least_bytes(product, 2 if what == "bf16" else 1)
            row |= {"product": product, "what": what, "flop": problems[0].flop, "bytes": moved}
        dense = [rate for what, row in rows.items() if what.startswith("dense") and (rate := _rate(row))]
        for row in rows.values():
            row = _beside(row, {"x bf16": rows["bf16"], "x fp8 row": rows["fp8 row, fast"]})
            yield {**row, "of dense": row["TF"] / max(dense)} if dense and "TF" in row else row
        if product == "forward" and shape in DEEPGEMM:
            note = "of an earlier run on an H200, not of this one"
            yield {"product": product, "what": "DeepGEMM", "TF": DEEPGEMM[shape], "note": note}


def _steps(bench: Bench, shape: Shape) -> Iterator[Row]:
    problems = bench.problems(shape)
    rows = bench.compare(steps(bench.backend), problems)
    for what, row in rows.items():
        row |= {"what": what, "flop": 3 * problems[0].flop}
    for row in rows.values():
        yield _beside(row, {"x bf16": rows["bf16"], "x torchao": rows["torchao fp8 row"]})


def _stages(bench: Bench, shape: Shape) -> Iterator[Row]:
    problem = Problem.gaussian(shape, bench.generator)
    work = stages(bench.backend, problem)
    alternatives = {name: functools.partial(_given, call) for name, (call, _) in work.items()}
    for name, row in bench.compare(alternatives, [problem]).items():
        row["stage"], moved = name, work[name][1]
        if "us" in row:
            work_name, unit, ceiling = ("bytes", "TB/s", "copy TB/s") if moved else ("flop", "TF", "dense fp8 TF")
            row[work_name] = moved or problem.flop
            row[unit] = row[work_name] / row["us"] / 1e6
            row["share"] = row[unit] / bench.ceilings[ceiling] if ceiling in bench.ceilings else None
        yield row


def _given(call: Call, _: Problem) -> Call:
    return call


def _skew(bench: Bench, shape: Shape) -> Iterator[Row]:
    balanced = Problem.gaussian(shape, bench.generator)
    cases = {name: balanced.skewed(name) for name in SKEWS}
    cases[f"capacity x{CAPACITY}"] = balanced.oversized(CAPACITY)
    for product in (*PRODUCTS, "step"):
        alternatives = {
            f"{who}: {case}": functools.partial(_on, p, make)
            for who, make in skewed(product, bench.backend).items()
            for case, p in cases.items()
        }
        rows = bench.compare(alternatives, [balanced])
        for what, row in rows.items():
            row |= {"product": product, "what": what, "flop": balanced.flop * (3 if product == "step" else 1)}
        for what, row in rows.items():
            yield _beside(row, {"x balanced": rows[f"{what.split(':')[0]}: balanced"]})


def _on(p: Problem, make: Alternative, _: Problem) -> Call:
    return make(p)


def _numerics(bench: Bench, shape: Shape) -> Iterator[Row]:
    for data in numerics.DATA:
        yield from numerics.compare(data, shape, bench.backend, bench.generator)


def _accumulation(bench: Bench, shape: Shape) -> Iterator[Row]:
    for data in ("Gaussian", "same sign"):
        yield from numerics.accumulation(data, shape, bench.generator)


def _rate(row: Row) -> float | None:
    return row["flop"] / row["us"] / 1e6 if "us" in row else None


def _beside(row: Row, others: Mapping[str, Row]) -> Row:
    """The row with its TF, and how many times faster it is than others."""
    if (rate := _rate(row)) is None:
        return row
    ratios = {name: rate / base for name, other in others.items() if (base := _rate(other))}
    return {**row, "TF": rate, **ratios}


def _section(title: str, labels: Sequence[str], figures: Sequence[str]) -> Section:
    special = {"us": ".1f", "TF": ".0f", "MHz": ".0f", "W": ".0f", "bias": ".2%"}
    return Section(title, tuple(labels), {name: special.get(name, ".2f") for name in figures})


SECTIONS: dict[str, tuple[Section, Measured]] = {
    "products": (
        _section(
            "Products alone, operands ready",
            ("product", "shape", "what"),
            ("us", "TF", "x bf16", "x fp8 row", "of dense", "MHz", "W"),
        ),
        _products,
    ),
    "steps": (
        _section(
            "Forward and backward from bf16, every quantization included",
            ("shape", "what"),
            ("us", "TF", "x bf16", "x torchao", "MHz", "W"),
        ),
        _steps,
    ),
    "stages": (
        _section(
            "Stages of a step of ours, mxfp8; share of the rate of a copy or of a dense FP8 product",
            ("shape", "stage"),
            ("us", "TF", "TB/s", "share", "MHz", "W"),
        ),
        _stages,
    ),
    "skew": (
        _section("Groups of unequal size", ("product", "shape", "what"), ("us", "TF", "x balanced", "MHz", "W")),
        _skew,
    ),
    "numerics": (
        _section(
            "SNR of mxfp8 against float64, and x / y: of x against y, dB; wire: operands came as MX",
            ("shape", "data", "result"),
            ("MX", "dequant", "ours", "wire", "ours / MX", "wire / MX", "wire / ours"),
        ),
        _numerics,
    ),
    "accumulation": (
        _section("FP8 sums against float64", ("shape", "data", "what"), ("dB", "bias")),
        _accumulation,
    ),
}
"""By name: what the table looks like, and what measures its rows, at a shape."""
