"""What bench=quant measures: ops of mxep.quant, each with its inputs and the bytes that it must move.

A case calls ops by name, from one of two places: `torch.ops.mxep`, whose CUDA kernels are the Triton launchers, or
`Plain`, the references behind them. `moved` is what has to move at least: inputs read once and outputs written once,
scales, indices and group ends included. What a kernel reads twice, or leaves for the next one to read, does not count.

Rows are Gaussian, E4M3, RCEIL, blocks of 32. A gathered case takes every stored row once, in random order, from slots
where qdata and scales lie side by side. Groups are of random size, some empty; all rows are live.

r rows, k width (of gate and up together, for SwiGLU), e experts, n rows of an expert, c rows once they are padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from mxep.quant import BLOCK, E4M3, ScaleMode

HOW = (E4M3.dtype, ScaleMode.RCEIL.value)
GROUPS = 32


def _plain(op: str) -> Any:
    return staticmethod(OPDEFS[f"mxep::{op}"]._init_fn)


def _both_whole(ops: Any, x: Tensor) -> tuple[Tensor, ...]:
    *rows, amax = ops.quantize_rows_whole(x, *HOW)
    return *rows, *ops.quantize_columns_whole(x, amax, *HOW)


class Plain:
    """The plain-torch functions behind the ops, under the ops' names; no op is called inside, so all can compile."""

    quantize_rows = _plain("quantize_rows")
    quantize_columns = _plain("quantize_columns")
    quantize_both = _plain("quantize_both")
    quantize_rows_whole = _plain("quantize_rows_whole")
    quantize_columns_whole = _plain("quantize_columns_whole")
    quantize_tiles = _plain("quantize_tiles")
    requantize = _plain("requantize")
    fold = _plain("fold")
    fold_for_wgrad = _plain("fold_for_wgrad")
    pad_rows = _plain("pad_rows")
    unpad_rows = _plain("unpad_rows")
    pad_quantize = _plain("pad_quantize")
    quantize_swizzled = _plain("quantize_swizzled")
    gather_swizzled = _plain("gather_swizzled")
    unfolded_swiglu = _plain("swiglu_quantize")
    unfolded_swiglu_backward = _plain("swiglu_backward_quantize")

    @staticmethod
    def swiglu_quantize(*args: Any) -> tuple[Tensor, ...]:
        *same, folded = args
        qdata, scale = Plain.unfolded_swiglu(*same, False)
        return Plain.fold(qdata, scale, None, None, BLOCK, qdata.shape[1]) if folded else (qdata, scale)

    @staticmethod
    def swiglu_backward_quantize(*args: Any) -> tuple[Tensor, ...]:
        *same, folded = args
        qdata, scale, d_row_weight = Plain.unfolded_swiglu_backward(*same, False)
        if folded:
            qdata, scale = Plain.fold(qdata, scale, None, None, BLOCK, qdata.shape[1])
        return qdata, scale, d_row_weight


@dataclass(frozen=True)
class Inputs:
    """What cases take, of one shape, on the generator's device."""

    shape: tuple[int, ...]
    generator: torch.Generator

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def _where(self) -> dict[str, Any]:
        return {"generator": self.generator, "device": self.generator.device}

    def values(self, *shape: int) -> Tensor:
        """Gaussian, bf16, of another shape if given."""
        return torch.randn(shape or self.shape, dtype=torch.bfloat16, **self._where)

    def mx(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of values, blocked along rows."""
        qdata, scale = torch.ops.mxep.quantize_rows(self.values(), *HOW, BLOCK)
        return qdata, scale

    def slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes and scales side by side in rows of 16-byte multiples, and an index of all rows in random order."""
        qdata, scale = self.mx()
        k, scales = qdata.shape[1], scale.shape[1]
        buffer = qdata.new_empty((self.rows, round_up(k + scales, 16)), dtype=torch.uint8)
        slot_codes, slot_scale = buffer[:, :k], buffer[:, k : k + scales]
        slot_codes.copy_(qdata.view(torch.uint8))
        slot_scale.copy_(scale.view(torch.uint8))
        index = torch.randperm(self.rows, dtype=torch.int32, **self._where)
        return slot_codes.view(qdata.dtype), slot_scale.view(scale.dtype), index

    def ends(self, alignment: int = BLOCK) -> Tensor:
        """Ends of GROUPS groups over all rows, in multiples of `alignment`."""
        cuts = torch.randint(0, self.rows // alignment + 1, (GROUPS - 1,), **self._where).sort().values * alignment
        return torch.nn.functional.pad(cuts, (0, 1), value=self.rows).int()

    def weight(self) -> Tensor:
        """One per row."""
        return torch.rand(self.rows, **self._where)

    def padding(self) -> Tensor:
        """The row index of groups padded to 32."""
        sizes = torch.diff(self.ends(1), prepend=torch.zeros(1, dtype=torch.int32, device=self.generator.device))
        index: Tensor = torch.ops.mxep.pad_index(sizes, self.rows, BLOCK)[1]
        return index


@dataclass(frozen=True)
class Case:
    """kind: of its shapes. target: share of the copy ceiling to reach, if one is set. moved(*shape): bytes.
    make(Inputs): arguments.
    call(ops, *arguments): what is measured; ops is torch.ops.mxep or Plain."""

    kind: str
    target: float | None
    moved: Callable[..., int]
    make: Callable[[Inputs], tuple[Any, ...]]
    call: Callable[..., Any]


def bf16(elements: int) -> int:
    """Bytes of values."""
    return 2 * elements


def mx(elements: int) -> int:
    """Bytes of qdata and their scales."""
    return elements + elements // BLOCK


def words(*counts: int) -> int:
    """Bytes of int32 or fp32 numbers."""
    return 4 * sum(counts)


def round_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def padded(rows: int) -> int:
    """C: the capacity of `pad_groups`."""
    return round_up(rows + GROUPS * (BLOCK - 1), BLOCK)


def swizzled(rows: int, columns: int) -> int:
    """Bytes of swizzled scales."""
    return round_up(rows, 128) * round_up(columns // BLOCK, 4)


CASES = {
    "rows": Case(
        "rows", 0.95,
        lambda r, k: bf16(r * k) + mx(r * k),
        lambda i: (i.values(),),
        lambda ops, x: ops.quantize_rows(x, *HOW, BLOCK),
    ),
    "rows_whole": Case(  # row-scaled FP8
        "rows", 0.95,
        lambda r, k: bf16(r * k) + r * k + r,
        lambda i: (i.values(),),
        lambda ops, x: ops.quantize_rows(x, *HOW, x.shape[1]),
    ),
    "columns": Case(
        "rows", 0.90,
        lambda r, k: bf16(r * k) + mx(r * k),
        lambda i: (i.values(),),
        lambda ops, x: ops.quantize_columns(x, *HOW, BLOCK),
    ),
    "both": Case(
        "rows", 0.90,
        lambda r, k: bf16(r * k) + 2 * mx(r * k),
        lambda i: (i.values(),),
        lambda ops, x: ops.quantize_both(x, *HOW, BLOCK),
    ),
    "weights_both": Case(
        "weights", 0.90,
        lambda e, n, k: bf16(e * n * k) + 2 * mx(e * n * k),
        lambda i: (i.values(),),
        lambda ops, x: ops.quantize_both(x, *HOW, BLOCK),
    ),
    "weights_both_whole": Case(  # a column's scale needs every row before its first code: x is read twice, 0.67 is all
        "weights", None,
        lambda e, n, k: bf16(e * n * k) + 2 * e * n * k + e * (n + k),
        lambda i: (i.values(),),
        lambda ops, x: _both_whole(ops, x),
    ),
    "weights_tiles": Case(
        "weights", 0.90,
        lambda e, n, k: bf16(e * n * k) + e * n * k + e * n * k // BLOCK**2,
        lambda i: (i.values(),),
        lambda ops, x: ops.quantize_tiles(x, *HOW, BLOCK),
    ),
    "requantize": Case(
        "rows", 0.85,
        lambda r, k: 2 * mx(r * k),
        lambda i: i.mx(),
        lambda ops, qdata, scale: ops.requantize(qdata, scale, 1, BLOCK, None, None, *HOW),
    ),
    "requantize_gathered": Case(
        "rows", 0.85,
        lambda r, k: 2 * mx(r * k) + words(r, GROUPS),
        lambda i: (*i.slots(), i.ends()),
        lambda ops, qdata, scale, index, ends: ops.requantize(qdata, scale, 1, BLOCK, index, ends, *HOW),
    ),
    "fold": Case(
        "rows", 0.93,
        lambda r, k: mx(r * k) + words(r, GROUPS) + r * k + r,
        lambda i: (*i.slots(), i.ends()),
        lambda ops, qdata, scale, index, ends: ops.fold(qdata, scale, index, ends, BLOCK, qdata.shape[1]),
    ),
    "fold_for_wgrad": Case(
        "rows", 0.85,
        lambda r, k: 2 * (mx(r * k) + words(r) + r * k) + words(GROUPS, GROUPS),
        lambda i: (*i.slots(), *i.slots(), i.ends()),
        lambda ops, *args: ops.fold_for_wgrad(*args, 128),
    ),
    "swiglu": Case(
        "rows", 0.90,
        lambda r, k: bf16(r * k) + words(r, GROUPS) + mx(r * k // 2),
        lambda i: (i.values(), i.weight(), i.ends()),
        lambda ops, *args: ops.swiglu_quantize(*args, *HOW, BLOCK, False),
    ),
    "swiglu_folded": Case(
        "rows", 0.90,
        lambda r, k: bf16(r * k) + words(r, GROUPS) + r * k // 2 + r,
        lambda i: (i.values(), i.weight(), i.ends()),
        lambda ops, *args: ops.swiglu_quantize(*args, *HOW, BLOCK, True),
    ),
    "swiglu_backward": Case(
        "rows", 0.88,
        lambda r, k: bf16(r * k // 2) + bf16(r * k) + words(r, GROUPS) + mx(r * k) + words(r),
        lambda i: (i.values(i.rows, i.shape[1] // 2), i.values(), i.weight(), i.ends()),
        lambda ops, *args: ops.swiglu_backward_quantize(*args, *HOW, BLOCK, False),
    ),
    "swiglu_backward_folded": Case(
        "rows", 0.88,
        lambda r, k: bf16(r * k // 2) + bf16(r * k) + words(r, GROUPS) + r * k + r + words(r),
        lambda i: (i.values(i.rows, i.shape[1] // 2), i.values(), i.weight(), i.ends()),
        lambda ops, *args: ops.swiglu_backward_quantize(*args, *HOW, BLOCK, True),
    ),
    "pad": Case(
        "rows", 0.90,
        lambda r, k: bf16(r * k) + words(padded(r)) + bf16(padded(r) * k),
        lambda i: (i.values(), i.padding()),
        lambda ops, x, index: ops.pad_rows(x, index),
    ),
    "unpad": Case(  # rows of padding are not read
        "rows", 0.90,
        lambda r, k: bf16(r * k) + words(padded(r)) + bf16(r * k),
        lambda i: (i.values(padded(i.rows), i.shape[1]), i.padding(), i.rows),
        lambda ops, y, index, rows: ops.unpad_rows(y, index, rows),
    ),
    "pad_quantize": Case(
        "rows", 0.90,
        lambda r, k: bf16(r * k) + words(padded(r)) + mx(padded(r) * k),
        lambda i: (i.values(), i.padding()),
        lambda ops, x, index: ops.pad_quantize(x, index, *HOW),
    ),
    "quantize_swizzled": Case(
        "rows", 0.90,
        lambda r, k: bf16(r * k) + r * k + swizzled(r, k),
        lambda i: (i.values(),),
        lambda ops, x: ops.quantize_swizzled(x, None, None, *HOW),
    ),
    "gather_swizzled": Case(
        "rows", 0.90,
        lambda r, k: mx(r * k) + words(r) + r * k + swizzled(r, k),
        lambda i: i.slots(),
        lambda ops, qdata, scale, index: ops.gather_swizzled(qdata, scale, index, None),
    ),
    "cast": Case(  # torch's own cast, without a scale: what a small shape takes at least
        "rows", None,
        lambda r, k: bf16(r * k) + r * k,
        lambda i: (i.values(),),
        lambda ops, x: (x.to(E4M3.dtype),),
    ),
}  # fmt: skip
