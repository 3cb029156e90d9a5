"""What a layer's forward leaves to its backward: one flat list of plain tensors, the same eager and compiled.

    rows      (S, D) slots, or (R_max, D) where these are no more   if gate_up_proj has a gradient
    gate_up   (R_max, 2F)
    later     of both weights, what helps to quantize them colwise: their amax (e, D) and (e, F) fp32 for a backend that
              wants one scale a column, 2-D blocks, which serve both ways, or nothing

rows and 2-D blocks are qdata and scales, two tensors; with a recipe that quantizes nothing rows are one, in x's dtype.
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
from mxep.quant.replay import MXParts

Needs = tuple[bool, bool, bool]
"""Whether gate_up_proj, down_proj and gate_up's bias have gradients."""


class Saved(NamedTuple):
    """The list, put together: rows as the steps take them, None where no gradient needs them."""

    rows: Tensor | MXParts | None
    gate_up: Tensor
    later: tuple[SavedWeight, SavedWeight]

    def flat(self) -> list[Tensor]:
        of_weights = (part for later in self.later for part in _of_weight(later))
        return [*_parts(self.rows), self.gate_up, *of_weights]

    @staticmethod
    def of(
        flat: list[Tensor],
        plan: RoutingPlan,
        weights: tuple[Weight, Tensor],
        recipe: Recipe,
        needs: Needs,
        *,
        copied: bool,
    ) -> "Saved":
        """`flat`'s tensors. weights: gate_up_proj, down_proj. copied: as for `keeps_rows`."""
        parts = num_parts(recipe) * needs[0]
        gate_up, *of_weights = flat[parts:]
        index = None if keeps_rows(plan.max_rows, plan.slot_rows.shape[0], copied=copied) else plan.row_slot
        half = len(of_weights) // 2
        later = _later(weights[0], of_weights[:half]), _later(weights[1], of_weights[half:])
        return Saved(_joined(flat[:parts], gate_up.dtype, index), gate_up, later)

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
        flat.append(x.new_empty(plan.max_rows, 2 * hidden_dim))
        for w in weights:
            flat += _of_weight(rowwise_and_saved(w, recipe, backend, dgrad=True)[1])
        return flat


def num_parts(recipe: Recipe) -> int:
    """Tensors that rows are."""
    return 1 if recipe.scaling == "none" else 2


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
