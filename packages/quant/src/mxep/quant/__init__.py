"""mxep.quant: MX block-scaled numbers for PyTorch. See README.md; start with `quantize` and `MXTensor`."""

from mxep.quant.fold import FoldStats, fold, fold_with_stats
from mxep.quant.formats import BLOCK, E4M3, E5M2, MXFormat, ScaleMode, format_of
from mxep.quant.groups import PaddedGroups, live_rows, pad_groups, pad_quantize, unpad_groups
from mxep.quant.quantize import quantize, quantize_both, quantize_with_magnitudes
from mxep.quant.requantize import requantize
from mxep.quant.split_fold import SplitFold, split_fold
from mxep.quant.swiglu import swiglu, swiglu_backward, swiglu_backward_quantize, swiglu_quantize
from mxep.quant.swizzle import gather_swizzled, quantize_swizzled, swizzle_scales, unswizzle_scales
from mxep.quant.tensor import MXTensor

__all__ = [
    "BLOCK",
    "E4M3",
    "E5M2",
    "FoldStats",
    "MXFormat",
    "MXTensor",
    "PaddedGroups",
    "ScaleMode",
    "SplitFold",
    "fold",
    "fold_with_stats",
    "format_of",
    "gather_swizzled",
    "live_rows",
    "pad_groups",
    "pad_quantize",
    "quantize",
    "quantize_both",
    "quantize_swizzled",
    "quantize_with_magnitudes",
    "requantize",
    "split_fold",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_quantize",
    "swizzle_scales",
    "unpad_groups",
    "unswizzle_scales",
]
