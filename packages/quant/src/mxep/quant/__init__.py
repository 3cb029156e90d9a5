"""mxep.quant: MX block-scaled numbers for PyTorch. See README.md; start with `quantize` and `MXTensor`."""

import importlib.metadata

from mxep.quant.activation import SwiGLU
from mxep.quant.block_fp8 import BlockFP8, quantize_blocks, rescale_blocks
from mxep.quant.fold import (
    FoldStats,
    WgradOperands,
    column_scales,
    fold,
    fold_for_dgrad,
    fold_for_wgrad,
    fold_with_stats,
)
from mxep.quant.formats import BLOCK, E2M1, E4M3, E5M2, MXFormat, ScaleMode, format_of
from mxep.quant.groups import (
    PaddedGroups,
    gather_swizzled,
    group_of_rows,
    group_sums,
    pad_groups,
    split_ends,
    swizzle_scales,
    unpad_groups,
    valid_rows,
)
from mxep.quant.quantize import (
    quantize,
    quantize_columns_with_amax,
    quantize_joined,
    quantize_with_amax,
    requantize,
    scale_columns,
    to_mxfp8,
)
from mxep.quant.shapes import Axis
from mxep.quant.swiglu import swiglu, swiglu_backward, swiglu_backward_quantize, swiglu_quantize
from mxep.quant.tensor import MXParts, MXTensor

try:
    __version__ = importlib.metadata.version("mxep-quant")
except importlib.metadata.PackageNotFoundError:  # sources on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "BLOCK",
    "E2M1",
    "E4M3",
    "E5M2",
    "Axis",
    "BlockFP8",
    "FoldStats",
    "MXFormat",
    "MXParts",
    "MXTensor",
    "PaddedGroups",
    "ScaleMode",
    "SwiGLU",
    "WgradOperands",
    "column_scales",
    "fold",
    "fold_for_dgrad",
    "fold_for_wgrad",
    "fold_with_stats",
    "format_of",
    "gather_swizzled",
    "group_of_rows",
    "group_sums",
    "pad_groups",
    "quantize",
    "quantize_blocks",
    "quantize_columns_with_amax",
    "quantize_joined",
    "quantize_with_amax",
    "requantize",
    "rescale_blocks",
    "scale_columns",
    "split_ends",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_quantize",
    "swizzle_scales",
    "to_mxfp8",
    "unpad_groups",
    "valid_rows",
]
