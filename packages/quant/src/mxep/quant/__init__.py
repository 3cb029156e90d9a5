"""mxep.quant: MX block-scaled numbers for PyTorch. See README.md; start with `quantize` and `MXTensor`."""

from mxep.quant.formats import BLOCK, E4M3, E5M2, MXFormat, ScaleMode, format_of
from mxep.quant.groups import PaddedGroups, live_rows, pad_groups, unpad_groups
from mxep.quant.quantize import quantize, quantize_both
from mxep.quant.requantize import requantize
from mxep.quant.tensor import MXTensor

__all__ = [
    "BLOCK",
    "E4M3",
    "E5M2",
    "MXFormat",
    "MXTensor",
    "PaddedGroups",
    "ScaleMode",
    "format_of",
    "live_rows",
    "pad_groups",
    "quantize",
    "quantize_both",
    "requantize",
    "unpad_groups",
]
