"""Grouped matrix multiplication over bf16, row-scaled FP8 and MXFP8, differentiable, one file per backend.

    from mxep.gemm import grouped_mm
    out = grouped_mm(rows, weights, offs, recipe="mxfp8")     # (M, K), (G, N, K), (G,) -> (M, N)

`functional` has the product and its calculus, `recipe` what is quantized and how, `quantize_once` how long quantized
weights live, `backends` who multiplies, `convert` puts all of it under a model that calls torch's grouped mm,
`diagnostics` tells what folding costs.
"""

from mxep.gemm.backends import BACKENDS, Backend
from mxep.gemm.convert import convert, converted, revert
from mxep.gemm.convert_mode import Converted
from mxep.gemm.diagnostics import FoldReport, fold_report
from mxep.gemm.functional import grouped_mm
from mxep.gemm.quantize_once import QuantizedOnce, quantize_weights_once, quantize_weights_once_a_step
from mxep.gemm.recipe import GROUP_MULTIPLE, Recipe
from mxep.gemm.weights import QuantizedWeight, quantize_weight

__all__ = [
    "BACKENDS",
    "GROUP_MULTIPLE",
    "Backend",
    "Converted",
    "FoldReport",
    "QuantizedOnce",
    "QuantizedWeight",
    "Recipe",
    "convert",
    "converted",
    "fold_report",
    "grouped_mm",
    "quantize_weight",
    "quantize_weights_once",
    "quantize_weights_once_a_step",
    "revert",
]
