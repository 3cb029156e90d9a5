"""Recipe "auto": MXFP8 if it pays, else bf16. Only the shape decides; nothing is measured at run time.

A GEMM of T rows, K in and N out features saves time in proportion to T K N. Its cost grows with the quantized elements,
T K + T N + K N, and with launches, which take as long as FIXED more elements. So the gain grows with

    size = T K N / (T K + T N + K N + FIXED)

and so do the measured gains of docs/lab/linear.md. LEAST has the sizes at which MXFP8 begins to pay.
"""

import math
from typing import Final

from torch import Tensor

from mxep.gemm.recipe import Recipe

AUTO: Final = "auto"
LEAST: Final = {"linear": 470, "grouped_mm": 470, "experts": 240}
"""Sizes above which MXFP8 pays on an H200, in device time of forward and backward with every quantization.

linear: a GEMM with one weight, or with q, k and v together. Size 535 gains 1.23, 362 gains 1.04, 209 loses (0.70).
grouped_mm: T rows per group. The smallest measured size is 473 and gains 1.18.
experts: a layer of mxep.ep, T rows per expert, model dim K, hidden dim N. Size 267 gains 1.14, 176 nothing.
"""
FIXED: Final = {"linear": 26e6, "grouped_mm": 0.0, "experts": 0.0}
"""Elements that take as long as the launches. Groups share launches, but the rule does not know their number."""

_BF16, _MXFP8 = Recipe.bf16(), Recipe.mxfp8()  # made here, because code under torch.compile makes none


def auto_recipe(rows: float, in_features: int, out_features: int, *, of: str = "linear") -> Recipe:
    """mxfp8 if it pays for the shape, else bf16; the same on every device.

    rows: T, per expert or group on average. in_features: K. out_features: N. of: a key of LEAST.
    Example: 4096 tokens of 4096 features to 2048 have size 572, above 470: mxfp8. 2048 tokens have 362: bf16.
    Sizes that are no multiple of MXFP8's blocks get bf16. Raises ValueError for another `of`.
    """
    return _MXFP8 if rows > least_rows(in_features, out_features, of=of) else _BF16


def least_rows(in_features: int, out_features: int, *, of: str) -> float:
    """Rows T that give size LEAST[of]. MXFP8 pays above it. inf if it never pays.

    Example: of experts with 2048 and 768 features, 240 * 2048 * 768 / (2048 * 768 - 240 * (2048 + 768)) = 420.9.
    """
    if of not in LEAST:
        raise ValueError(f"of: got {of!r}, want one of {', '.join(LEAST)}")
    saved = in_features * out_features - LEAST[of] * (in_features + out_features)  # per further row
    if saved <= 0 or in_features % _MXFP8.group_alignment or out_features % _MXFP8.group_alignment:
        return math.inf
    return LEAST[of] * (in_features * out_features + FIXED[of]) / saved


def recipe_of_experts(rows: float, dim: int, hidden_dim: int) -> tuple[Recipe, str]:
    """`auto_recipe` of a layer's experts for this average number of rows per expert, and its reason in words."""
    recipe, least = auto_recipe(rows, dim, hidden_dim, of="experts"), least_rows(dim, hidden_dim, of="experts")
    pays = "never pays" if least == math.inf else f"pays from {math.floor(least) + 1} on"
    return recipe, f"{recipe.name}, as an expert gets {rows:.0f} rows: with D {dim} and F {hidden_dim} MXFP8 {pays}"


def recipe_of(recipe: Recipe | str) -> Recipe | str:
    """The Recipe of a name. "auto" stays, because it needs a shape. Raises ValueError for unknown names."""
    return Recipe.named(recipe) if isinstance(recipe, str) and recipe != AUTO else recipe


def recipe_for(recipe: Recipe | str, x: Tensor, out_features: int) -> Recipe:
    """The recipe for a linear of x (..., K)."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe != AUTO:
        return Recipe.named(recipe)
    features = x.shape[-1] if x.dim() else 1
    return auto_recipe(x.numel() // max(features, 1), features, out_features)


def recipe_name(recipe: Recipe | str) -> str:
    """Name of a recipe, or "auto"."""
    return recipe if isinstance(recipe, str) else recipe.name
