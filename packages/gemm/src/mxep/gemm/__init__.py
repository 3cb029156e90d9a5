"""Grouped GEMM over bf16, row-scaled FP8 and MXFP8, differentiable.

from mxep.gemm import grouped_mm, linear
out = grouped_mm(rows, weights, offs, recipe="mxfp8")     # (M, K), (G, N, K), (G,) -> (M, N)
out = linear(x, weight, bias, recipe="mxfp8")             # (..., K), (N, K), (N,) -> (..., N)
"""

import importlib.metadata

from mxep.gemm.backends import BACKENDS, Backend
from mxep.gemm.convert import convert, converted, join_linears, revert
from mxep.gemm.convert_mode import Converted
from mxep.gemm.diagnostics import FoldReport, fold_report
from mxep.gemm.frozen import FrozenWeight, freeze
from mxep.gemm.functional import Linear, grouped_mm, linear, linear_together, quantize_input
from mxep.gemm.quantize_once import QuantizedOnce, quantize_weights_once, quantize_weights_once_a_step
from mxep.gemm.recipe import GROUP_ALIGNMENT, Recipe, auto_recipe
from mxep.gemm.router_ops import fp32_linear, top_k

try:
    __version__ = importlib.metadata.version("mxep-gemm")
except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "BACKENDS",
    "GROUP_ALIGNMENT",
    "Backend",
    "Converted",
    "FoldReport",
    "FrozenWeight",
    "Linear",
    "QuantizedOnce",
    "Recipe",
    "auto_recipe",
    "convert",
    "converted",
    "fold_report",
    "fp32_linear",
    "freeze",
    "grouped_mm",
    "join_linears",
    "linear",
    "linear_together",
    "quantize_input",
    "quantize_weights_once",
    "quantize_weights_once_a_step",
    "revert",
    "top_k",
]
