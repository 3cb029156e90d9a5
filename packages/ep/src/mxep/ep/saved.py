"""What a layer's forward leaves to its backward: one flat list of plain tensors, the same eager and compiled.

    rows         (S, D) slots, or (R_max, D) where these are no more   if gate_up_proj has a gradient
    gate_up      (R_max, 2F)
    h            (R_max, F)                                            if down_proj has a gradient
    magnitudes   (e, D) and (e, F) fp32, the largest of the weights' columns: for a backend that folds

rows and h are one tensor each, in x's dtype, or two with a recipe that quantizes: codes and scales. Slots lie under the
plan's index. All of it follows from the recipe, the backend, what has gradients, and sizes: nobody remembers what a
list holds, and a compiler learns its shapes without running anything.

R_max rows that fit, S slots, D model dim, F hidden dim, e local experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxep.comms import RoutingPlan
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.quant import MXTensor


class Saved(NamedTuple):
    """The list, put together: rows and h as products take them, None where no gradient needs them."""

    rows: Tensor | None
    gate_up: Tensor
    h: Tensor | None
    magnitudes: tuple[Tensor | None, Tensor | None]

    def flat(self) -> list[Tensor]:
        return [*_parts(self.rows), self.gate_up, *_parts(self.h), *(m for m in self.magnitudes if m is not None)]

    @staticmethod
    def of(flat: list[Tensor], plan: RoutingPlan, recipe: Recipe, needs: tuple[bool, bool], *, copied: bool) -> Saved:
        """`flat`'s tensors. needs: whether gate_up_proj and down_proj have gradients. copied: as for `keeps_rows`."""
        parts = 1 if recipe.scaling == "none" else 2
        num_rows, num_h = (parts if need else 0 for need in needs)
        rows, (gate_up, *rest) = flat[:num_rows], flat[num_rows:]
        h, magnitudes = rest[:num_h], rest[num_h:]
        index = None if keeps_rows(plan, copied=copied) else plan.row_slot
        w13, w2 = magnitudes or (None, None)
        return Saved(_joined(rows, gate_up.dtype, index), gate_up, _joined(h, gate_up.dtype), (w13, w2))

    @staticmethod
    def shapes(
        x: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        plan: RoutingPlan,
        recipe: Recipe,
        backend: Backend,
        needs: tuple[bool, bool],
        *,
        copied: bool,
    ) -> list[Tensor]:
        """A list of the shapes and dtypes that forward would leave, from fake tensors."""
        dim, hidden_dim = down_proj.shape[1:]
        slots = not keeps_rows(plan, copied=copied) and recipe.scaling != "none"

        def rows(count: int, width: int, block: int | None) -> list[Tensor]:
            if recipe.scaling == "none":
                return [x.new_empty(count, width)]
            codes = x.new_empty(count, width, dtype=recipe.fmt.dtype)
            return [codes, x.new_empty(count, width // (block or width), dtype=torch.float8_e8m0fnu)]

        flat = rows(plan.slot_rows.shape[0] if slots else plan.max_rows, dim, recipe.block) if needs[0] else []
        flat.append(x.new_empty(plan.max_rows, 2 * hidden_dim))
        flat += rows(plan.max_rows, hidden_dim, None if backend.folds else recipe.block) if needs[1] else []
        magnitudes = (backend.quantize_weight_rows(w, recipe)[1] for w in (gate_up_proj, down_proj))
        return [*flat, *(m for m in magnitudes if m is not None)]


def keeps_rows(plan: RoutingPlan, *, copied: bool) -> bool:
    """Whether quantized rows are kept, instead of slots under an index: where they have to be `copied`, as slots are
    the dispatcher's, and there can be no more of them (top-1, say)."""
    return copied and plan.max_rows <= plan.slot_rows.shape[0]


def _parts(x: Tensor | None) -> tuple[Tensor, ...]:
    if isinstance(x, MXTensor):
        return x.qdata, x.scale
    return () if x is None else (x,)


def _joined(parts: list[Tensor], dtype: torch.dtype, index: Tensor | None = None) -> Tensor | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    codes, scale = parts
    return MXTensor(codes, scale, index, -1, codes.shape[1] // scale.shape[1], dtype)
