"""bench=quant: kernels of mxep.quant, compared with a plain copy.

A case calls ops of `torch.ops.mxep`. `moved` is the least number of bytes to move: inputs read once and outputs written
once, scales, indices and offs included.

of copy    bytes per second / those of a plain copy, which is measured before and after the cases

Rows are Gaussian, E4M3, RCEIL, blocks of 32. A gathered case takes every stored row once, in random order, from slots
that hold qdata and then scales. Groups have random sizes, some are empty; all rows are valid.

r rows, k width (of gate and up together, for SwiGLU), e experts, n rows of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.integration.report import Row
from mxep.quant import BLOCK, E4M3, ScaleMode
from mxep.quant.shapes import round_up

from .script import Bench, free_memory, table
from .timer import Alternative, Timer, copy_tb_s, rotations

HOW = (E4M3.dtype, ScaleMode.RCEIL.value)
GROUPS = 32
SHAPES = {"rows": (32, 64), "weights": (1, 32, 64), "small": (32, 64)}
SIZES = "sizes"
SECTIONS = {"kernels": table("Kernels beside a plain copy", "case, shape", "us, TB/s, of copy")}

ops = torch.ops.mxep


@dataclass(frozen=True)
class Inputs:
    """Draws inputs of the cases for one shape, on the generator's device."""

    shape: tuple[int, ...]
    generator: torch.Generator

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def _where(self) -> dict[str, Any]:
        return {"generator": self.generator, "device": self.generator.device}

    def values(self, *shape: int) -> Tensor:
        """Gaussian, bf16. shape: the inputs' if not given."""
        return torch.randn(shape or self.shape, dtype=torch.bfloat16, **self._where)

    def mx(self) -> tuple[Tensor, Tensor]:
        """Qdata and scales, in blocks along a row."""
        qdata, scale = ops.quantize_rows(self.values(), *HOW, BLOCK)
        return qdata, scale

    def slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Qdata and scales as parts of rows padded to 16 bytes, and an index of all rows in random order."""
        qdata, scale = self.mx()
        k, scales = qdata.shape[1], scale.shape[1]
        buffer = qdata.new_empty((self.rows, round_up(k + scales, 16)), dtype=torch.uint8)
        slot_qdata, slot_scale = buffer[:, :k], buffer[:, k : k + scales]
        slot_qdata.copy_(qdata.view(torch.uint8))
        slot_scale.copy_(scale.view(torch.uint8))
        index = torch.randperm(self.rows, dtype=torch.int32, **self._where)
        return slot_qdata.view(qdata.dtype), slot_scale.view(scale.dtype), index

    def offs(self, alignment: int = BLOCK) -> Tensor:
        """Ends of GROUPS groups over all rows, in multiples of `alignment`."""
        cuts = torch.randint(0, self.rows // alignment + 1, (GROUPS - 1,), **self._where).sort().values * alignment
        return torch.nn.functional.pad(cuts, (0, 1), value=self.rows).int()

    def weight(self) -> Tensor:
        """Routing weights, one per row."""
        return torch.rand(self.rows, **self._where, dtype=torch.float32)


def mx(elements: int) -> int:
    """Bytes of qdata and their scales."""
    return elements + elements // BLOCK


def swizzled(rows: int, width: int) -> int:
    """Bytes of swizzled scales."""
    return round_up(rows, 128) * round_up(width // BLOCK, 4)


def _both_per_row(x: Tensor) -> tuple[Tensor, ...]:
    *rows, amax = ops.quantize_per_row(x, None, None, *HOW)
    return *rows, *ops.quantize_per_column(x, None, None, amax, *HOW)


@dataclass(frozen=True)
class Case:
    """kind: of shapes. moved(*shape): bytes. make(Inputs): arguments of call. call: the measured call."""

    kind: str
    moved: Callable[..., int]
    make: Callable[[Inputs], tuple[Any, ...]]
    call: Callable[..., Any]


def _values(i: Inputs) -> tuple[Tensor]:
    return (i.values(),)


def _gathered(i: Inputs) -> tuple[Tensor, ...]:
    return *i.slots(), i.offs()


def _gate_up(i: Inputs) -> tuple[Tensor, ...]:
    return i.values(), i.weight(), i.offs()


def _d_h(i: Inputs) -> tuple[Tensor, ...]:
    qdata = torch.empty(i.shape, dtype=E4M3.dtype, device=i.generator.device)
    return i.values(i.rows, i.shape[1] // 2), *_gate_up(i), qdata


def _swiglu_backward(folded: bool, with_h: bool = False) -> Callable[..., Any]:
    how = HOW[1], BLOCK, folded, E4M3.dtype if with_h else None, *[None] * 4
    return lambda *args: ops.swiglu_backward(*args, *how)


CASES = {
    "rows": Case("rows", lambda r, k: 2 * r * k + mx(r * k), _values,
                 lambda x: ops.quantize_rows(x, *HOW, BLOCK)),
    "columns": Case("rows", lambda r, k: 2 * r * k + mx(r * k), _values,
                    lambda x: ops.quantize_columns(x, *HOW, BLOCK)),
    # A column's scale needs all rows before its first element: x is read twice, and the share is 0.67 at most.
    "weights_per_row": Case("weights", lambda e, n, k: 4 * e * n * k + e * (n + k), _values, _both_per_row),
    "weights_2d": Case("weights", lambda e, n, k: 3 * e * n * k + e * n * k // BLOCK**2, _values,
                          lambda x: ops.quantize_2d(x, *HOW, BLOCK)),
    "requantize": Case("rows", lambda r, k: 2 * mx(r * k), Inputs.mx,
                       lambda qdata, scale: ops.requantize(qdata, scale, 1, BLOCK, None, None, *HOW)),
    "fold": Case("rows", lambda r, k: mx(r * k) + 4 * (r + GROUPS) + r * k + r, _gathered,
                 lambda qdata, *rest: ops.fold(qdata, *rest)),
    "fold_for_wgrad": Case("rows", lambda r, k: 2 * (mx(r * k) + 4 * r + r * k) + 8 * GROUPS,
                       lambda i: (*i.slots(), *_gathered(i)), lambda *args: ops.fold_for_wgrad(*args, 128)),
    "swiglu": Case("rows", lambda r, k: 2 * r * k + 4 * (r + GROUPS) + mx(r * k // 2), _gate_up,
                   lambda *args: ops.swiglu(*args, *HOW, BLOCK, False, None, None)),
    "swiglu_folded": Case("rows", lambda r, k: 2 * r * k + 4 * (r + GROUPS) + r * k // 2 + r, _gate_up,
                          lambda *args: ops.swiglu(*args, *HOW, BLOCK, True, None, None)),
    "swiglu_backward": Case("rows", lambda r, k: 3 * r * k + 4 * (2 * r + GROUPS) + mx(r * k), _d_h,
                            _swiglu_backward(False)),
    "swiglu_backward_folded": Case("rows", lambda r, k: 3 * r * k + 4 * (2 * r + GROUPS) + r * k + r, _d_h,
                                   _swiglu_backward(True)),
    "swiglu_backward_and_h": Case("rows", lambda r, k: 9 * r * k // 2 + 4 * (2 * r + GROUPS) + 2 * r,
                                  _d_h, _swiglu_backward(True, with_h=True)),
    "gather_swizzled": Case("rows", lambda r, k: mx(r * k) + 4 * r + r * k + swizzled(r, k), Inputs.slots,
                            lambda *args: ops.gather_swizzled(*args, None)),
}  # fmt: skip


def measure(bench: Bench) -> Iterator[tuple[str, Row]]:
    """Measure all cases at all their shapes, case by case."""
    timer = Timer(bench.device, seconds=0.02, rounds=7)
    bench.ceilings["copy TB/s"] = copy_tb_s(timer)
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    for name, shape in lines(bench):
        case, moved = CASES[name], CASES[name].moved(*shape)
        inputs, sets = Inputs(shape, generator), rotations(moved, bench.device)
        calls = Alternative(lambda: [functools.partial(case.call, *case.make(inputs)) for _ in range(sets)])  # noqa: B023
        row: Row = {"case": name, "shape": list(shape), **timer.compare({name: calls})[name], "bytes": moved}
        torch.cuda.synchronize()  # raises if a failure left the device unusable
        if "us" in row:
            row["TB/s"] = moved / row["us"] / 1e6
            row["of copy"] = row["TB/s"] / bench.ceilings["copy TB/s"]
        yield "kernels", row
        free_memory()
    bench.ceilings["copy TB/s, after"] = copy_tb_s(timer)


def lines(bench: Bench) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (case, shape) for each row."""
    for name in bench.config.cases or CASES:
        for kind, shapes in bench.config.shapes.items():
            if (CASES[name].kind == "weights") == (kind == "weights"):
                yield from ((name, tuple(shape)) for shape in shapes)
