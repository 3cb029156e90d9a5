"""Grouped matrix multiplication over bf16, row-scaled FP8 and MXFP8, differentiable, one file per backend.

    from mxep.gemm import grouped_mm
    out = grouped_mm(rows, weights, offs, recipe="mxfp8")     # (M, K), (G, N, K), (G,) -> (M, N)

`functional` has the product and its calculus, `recipe` what is quantized and how, `weights` how long
quantized weights are kept, `backends` who multiplies, `convert` puts all of it under a model that calls torch's
grouped mm.
"""

from mxep.gemm.backends import BACKENDS, Backend, Hopper
from mxep.gemm.convert import Converted, convert, converted, revert
from mxep.gemm.functional import grouped_mm
from mxep.gemm.guard import Guard, GuardReport
from mxep.gemm.recipe import GROUP_MULTIPLE, Recipe
from mxep.gemm.weights import QuantizedOnce, QuantizedWeight, quantize_weight, quantize_weights_once

__all__ = [
    "BACKENDS",
    "GROUP_MULTIPLE",
    "Backend",
    "Converted",
    "Guard",
    "GuardReport",
    "Hopper",
    "QuantizedOnce",
    "QuantizedWeight",
    "Recipe",
    "convert",
    "converted",
    "grouped_mm",
    "quantize_weight",
    "quantize_weights_once",
    "revert",
]
