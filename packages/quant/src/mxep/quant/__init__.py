"""mxep.quant: MX block-scaled numbers for PyTorch. See README.md; start with `quantize` and `MXTensor`."""

from mxep.quant.fold import FoldStats, fold, fold_with_stats
from mxep.quant.fold_for_wgrad import WgradOperands, fold_for_wgrad
from mxep.quant.formats import BLOCK, E4M3, E5M2, MXFormat, ScaleMode, format_of
from mxep.quant.groups import PaddedGroups, pad_groups, pad_quantize, unpad_groups, valid_rows
from mxep.quant.quantize import quantize, quantize_both, quantize_with_amax
from mxep.quant.requantize import requantize
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
    "WgradOperands",
    "fold",
    "fold_for_wgrad",
    "fold_with_stats",
    "format_of",
    "gather_swizzled",
    "pad_groups",
    "pad_quantize",
    "quantize",
    "quantize_both",
    "quantize_swizzled",
    "quantize_with_amax",
    "requantize",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_quantize",
    "swizzle_scales",
    "unpad_groups",
    "unswizzle_scales",
    "valid_rows",
]
