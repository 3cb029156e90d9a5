"""mxep.quant: MX block-scaled numbers for PyTorch. See README.md; start with `quantize` and `MXTensor`."""

from mxep.quant.formats import BLOCK, E4M3, E5M2, MXFormat, ScaleMode, format_of
from mxep.quant.quantize import quantize, quantize_both
from mxep.quant.tensor import MXTensor

__all__ = [
    "BLOCK",
    "E4M3",
    "E5M2",
    "MXFormat",
    "MXTensor",
    "ScaleMode",
    "format_of",
    "quantize",
    "quantize_both",
]
