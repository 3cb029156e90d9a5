"""bench=quant: the kernels of mxep.quant beside the copy ceiling, and beside their plain references compiled.

    quant_cases.CASES x bench.shapes -> a Line each: us, the bytes that must move, share of the copy ceiling

Shapes of kind "small" go through the cases of "rows" without a target: there, starting is what takes the time, and the
empty kernels are what to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mxep.quant import BLOCK

from ..config import ConfigError
from ..schema import BenchConfig
from .quant_cases import CASES, Inputs, Plain
from .report import Ceiling, Line, Report
from .timing import compiled_us, copy_tb_s, describe, empty_us, recorded, rotations, time_us

KINDS = {"rows": (2, "rows"), "weights": (3, "weights"), "small": (2, "rows")}
"""Kind of shape -> how many numbers it has, and of which kind the cases are that take it."""


def check(config: BenchConfig) -> None:
    """ConfigError for cases, kinds of shapes or shapes that there are not, and for another device than CUDA's."""
    if config.device != "cuda":
        raise ConfigError(f"bench.device: got {config.device!r}, wanted cuda, whose kernels are measured")
    for name in config.cases or ():
        if name not in CASES:
            raise ConfigError(f"bench.cases: got {name!r}, wanted some of {', '.join(CASES)}")
    for kind, shapes in config.shapes.items():
        if kind not in KINDS:
            raise ConfigError(f"bench.shapes: got {kind!r}, wanted some of {', '.join(KINDS)}")
        for shape in shapes:
            numbers = KINDS[kind][0]
            if len(shape) != numbers or min(shape) < 1 or shape[-1] % (2 * BLOCK) or shape[-2] % BLOCK:
                raise ConfigError(
                    f"bench.shapes.{kind}: got {list(shape)}, "
                    f"wanted {numbers} numbers, the last in {2 * BLOCK}s, the one before in {BLOCK}s"
                )


def measure(config: BenchConfig, seed: int, say: Callable[[str], None]) -> Report:
    """All cases at all their shapes, case by case; `say` gets each line when it is there."""
    before = copy_tb_s()
    lines = []
    for line in _lines(config, torch.Generator("cuda").manual_seed(seed)):
        lines.append(line)
        say(line.summary)
        torch.cuda.empty_cache()
    return Report("mxep.quant", Ceiling("copy", "bytes", "TB/s", before, copy_tb_s()), lines)


def _lines(config: BenchConfig, generator: torch.Generator) -> Iterator[Line]:
    for name in config.cases or CASES:
        for kind, shapes in config.shapes.items():
            if CASES[name].kind == KINDS[kind][1]:
                for shape in map(tuple, shapes):
                    target = None if kind == "small" else CASES[name].target
                    yield _line(name, shape, target, list(shape) in config.compiled, generator)


def _line(name: str, shape: tuple[int, ...], target: float | None, compiled: bool, generator: torch.Generator) -> Line:
    """One case at one shape. What fails fails alone, unless it leaves the device unusable: RuntimeError."""
    case = CASES[name]
    moved = case.moved(*shape)
    try:
        inputs = [case.make(Inputs(shape, generator)) for _ in range(rotations(moved))]
        with recorded() as launches:
            case.call(torch.ops.mxep, *inputs[0])
        us = time_us(lambda *args: case.call(torch.ops.mxep, *args), inputs)
        empty = empty_us(launches) if launches else None
        peers = {"torch.compile": compiled_us(lambda *args: case.call(Plain, *args), inputs)} if compiled else {}
        kernels = tuple(launch.kernel for launch in launches)
        return Line(name, shape, us, moved, target, kernels, empty, peers)
    except Exception as error:
        failure = describe(error)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise RuntimeError(f"{name} at {shape}: {failure}") from error
        return Line(name, shape, failure, moved, target)
