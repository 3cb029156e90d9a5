"""Recipe "auto": MXFP8 where it pays, bf16 elsewhere, by shape alone. Nothing is measured at run time.

Products of T rows, K in and N out features save time in proportion to T K N. What that costs goes with the elements
that are quantized, T K + T N + K N, and with launches, which take as long as FIXED elements more. So the gain goes with

    size = T K N / (T K + T N + K N + FIXED)

and the measured gains of docs/guides/linear.md rise with it. LEAST has where it begins to pay.
"""

import math
from typing import Final

from torch import Tensor

from mxep.gemm.recipe import Recipe

AUTO: Final = "auto"
LEAST: Final = {"linear": 470, "grouped_mm": 470, "experts": 240}
"""Sizes from which on MXFP8 pays on an H200, in time of the device, forward and backward, every quantization included.

linear: a product of one weight, of q, k and v together say: 535 is 1.23 times as fast, 362 1.04 times, 209 0.70 times.
grouped_mm: T rows a group; the smallest that was measured has 473 and gains 1.18.
experts: a layer of mxep.ep, T rows an expert, K its model dim, N its hidden dim: 267 gains 1.14, 176 nothing.
"""
FIXED: Final = {"linear": 26e6, "grouped_mm": 0.0, "experts": 0.0}
"""Elements. Groups share their launches; the rule does not know how many they are."""

_BF16, _MXFP8 = Recipe.bf16(), Recipe.mxfp8()  # torch.compile makes none


def auto_recipe(rows: float, in_features: int, out_features: int, *, of: str = "linear") -> Recipe:
    """mxfp8 if it pays for a shape, else bf16; the same on every device.

    rows: T, of an expert or a group on average. in_features: K. out_features: N. of: a key of LEAST.
    Example: 4096 tokens of 4096 features to 2048 have size 572, above 470: mxfp8; 2048 tokens have 362: bf16.
    Sizes that are no multiple of MXFP8's blocks get bf16. ValueError for another `of`.
    """
    return _MXFP8 if rows > least_rows(in_features, out_features, of=of) else _BF16


def least_rows(in_features: int, out_features: int, *, of: str) -> float:
    """T that has LEAST's size: above it MXFP8 pays. inf: it never does.

    Example: of experts with 2048 and 768 features, 240 * 2048 * 768 / (2048 * 768 - 240 * (2048 + 768)) = 420.9.
    """
    if of not in LEAST:
        raise ValueError(f"of: got {of!r}, want one of {', '.join(LEAST)}")
    saved = in_features * out_features - LEAST[of] * (in_features + out_features)  # a row more
    if saved <= 0 or in_features % _MXFP8.group_alignment or out_features % _MXFP8.group_alignment:
        return math.inf
    return LEAST[of] * (in_features * out_features + FIXED[of]) / saved


def recipe_of_experts(rows: float, dim: int, hidden_dim: int) -> tuple[Recipe, str]:
    """`auto_recipe` of a layer's experts, of which one gets so many rows on average, and what it is and why."""
    recipe, least = auto_recipe(rows, dim, hidden_dim, of="experts"), least_rows(dim, hidden_dim, of="experts")
    pays = "never pays" if least == math.inf else f"pays from {math.floor(least) + 1} on"
    return recipe, f"{recipe.name}, as an expert gets {rows:.0f} rows: with D {dim} and F {hidden_dim} MXFP8 {pays}"


def recipe_of(recipe: Recipe | str) -> Recipe | str:
    """A Recipe for its name; "auto" stays, as it waits for a shape. ValueError for names that are none."""
    return Recipe.named(recipe) if isinstance(recipe, str) and recipe != AUTO else recipe


def recipe_for(recipe: Recipe | str, x: Tensor, out_features: int) -> Recipe:
    """The recipe of a linear of x (..., K)."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe != AUTO:
        return Recipe.named(recipe)
    features = x.shape[-1] if x.dim() else 1
    return auto_recipe(x.numel() // max(features, 1), features, out_features)


def recipe_name(recipe: Recipe | str) -> str:
    """What it is called."""
    return recipe if isinstance(recipe, str) else recipe.name
