"""What a layer's forward leaves to its backward: one flat list of plain tensors, the same eager and compiled.

    rows      (S, D) slots, or (R_max, D) where these are no more   if gate_up_proj has a gradient
    gate_up   (R_max, 2F)                                           one scale a row if the recipe keeps it in FP8
    later     of both weights, what helps to quantize them colwise: their amax (e, D) and (e, F) fp32 for a backend that
              wants one scale a column, 2-D blocks, which serve both ways, or nothing

rows, 2-D blocks and gate_up in FP8 are qdata and scales, two tensors; with a recipe that quantizes nothing rows are
one, in x's dtype.
Slots lie under the plan's index. All of it follows from the recipe, the backend, what has gradients, and sizes: nobody
remembers what a list holds, and a compiler learns its shapes without running anything.

R_max rows that fit, S slots, D model dim, F hidden dim, e local experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mxep.comms import RoutingPlan
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.quantize_once import SavedWeight, rowwise_and_saved
from mxep.gemm.several import Weight, tensors_of
from mxep.quant import MXTensor
from mxep.quant.parts import MXParts

Needs = tuple[bool, bool, bool]
"""Whether gate_up_proj, down_proj and gate_up's bias have gradients."""


class Saved(NamedTuple):
    """The list, put together: rows as the steps take them, None where no gradient needs them."""

    rows: Tensor | MXParts | None
    gate_up: Tensor | MXParts
    later: tuple[SavedWeight, SavedWeight]

    def flat(self) -> list[Tensor]:
        of_weights = (part for later in self.later for part in _of_weight(later))
        return [*_parts(self.rows), *_parts(self.gate_up), *of_weights]

    @staticmethod
    def of(
        flat: list[Tensor],
        plan: RoutingPlan,
        weights: tuple[Weight, Tensor],
        dtype: torch.dtype,
        recipe: Recipe,
        needs: Needs,
        *,
        copied: bool,
    ) -> "Saved":
        """`flat`'s tensors. weights: gate_up_proj, down_proj. dtype: x's. copied: as for `keeps_rows`."""
        of_rows, of_gate_up = num_parts(recipe, needs)
        rows, gate_up, of_weights = flat[:of_rows], flat[of_rows:][:of_gate_up], flat[of_rows + of_gate_up :]
        index = None if keeps_rows(plan.max_rows, plan.slot_rows.shape[0], copied=copied) else plan.row_slot
        half = len(of_weights) // 2
        later = _later(weights[0], of_weights[:half]), _later(weights[1], of_weights[half:])
        found = _joined(gate_up, dtype, None)
        assert found is not None
        return Saved(_joined(rows, dtype, index), found, later)

    @staticmethod
    def shapes(
        x: Tensor,
        plan: RoutingPlan,
        weights: tuple[Weight, Tensor],
        recipe: Recipe,
        backend: Backend,
        needs: Needs,
        *,
        copied: bool,
    ) -> list[Tensor]:
        """A list of the shapes and dtypes that forward would leave, from fake tensors."""
        dim, hidden_dim = weights[1].shape[1:]
        slots = recipe.scaling != "none" and not keeps_rows(plan.max_rows, plan.slot_rows.shape[0], copied=copied)
        rows, flat = plan.slot_rows.shape[0] if slots else plan.max_rows, []
        if needs[0] and recipe.scaling == "none":
            flat.append(x.new_empty(rows, dim))
        elif needs[0]:
            flat.append(x.new_empty(rows, dim, dtype=recipe.fmt.dtype))
            flat.append(x.new_empty(rows, dim // (recipe.block_size or dim), dtype=torch.float8_e8m0fnu))
        if recipe.saved_gate_up == "fp8":
            flat.append(x.new_empty(plan.max_rows, 2 * hidden_dim, dtype=recipe.fmt.dtype))
            flat.append(x.new_empty(plan.max_rows, 1, dtype=torch.float8_e8m0fnu))
        else:
            flat.append(x.new_empty(plan.max_rows, 2 * hidden_dim))
        for w in weights:
            flat += _of_weight(rowwise_and_saved(w, recipe, backend, dgrad=True)[1])
        return flat


def num_parts(recipe: Recipe, needs: Needs) -> tuple[int, int]:
    """Tensors that rows are, and gate_up is."""
    return needs[0] * (1 if recipe.scaling == "none" else 2), 2 if recipe.saved_gate_up == "fp8" else 1


def keeps_rows(max_rows: int, num_slots: int, *, copied: bool) -> bool:
    """Whether quantized rows are kept, instead of slots under an index: where they have to be `copied`, as slots are
    the dispatcher's, and there can be no more of them (top-1, say)."""
    return copied and max_rows <= num_slots


def _parts(x: Tensor | MXParts | None) -> list[Tensor]:
    if isinstance(x, MXTensor | MXParts):
        return [x.qdata, x.scale]
    return [] if x is None else [x]


def _joined(parts: list[Tensor], dtype: torch.dtype, index: Tensor | None) -> Tensor | MXParts | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    qdata, scale = parts
    return MXParts(qdata, scale, index, -1, qdata.shape[1] // scale.shape[1], dtype)


def _of_weight(later: SavedWeight) -> list[Tensor]:
    return _parts(later.weight) if isinstance(later.weight, MXTensor | MXParts) else _parts(later.amax)


def _later(w: Weight, parts: list[Tensor]) -> SavedWeight:
    if len(parts) < 2:
        return SavedWeight(w, parts[0] if parts else None)
    qdata, scale = parts
    dtype = tensors_of(w)[0].dtype
    return SavedWeight(MXParts(qdata, scale, None, (-2, -1), qdata.shape[-1] // scale.shape[-1], dtype), None)
