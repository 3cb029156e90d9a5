"""MXFP4 and block FP8 as MXFP8: the same values, exactly, in E4M3 with one power-of-two scale per block of a row.

    E2M1, scale 2^s                     q * 2^6 in E4M3, scale 2^(s-6)         384 is the largest element
    E4M3, blocks of 128 x 128, e8m0     qdata as they are, scales repeated     4 a block along K, 128 along N

Everything that takes MXFP8 takes the result: `fold`, `requantize`, `swizzle_scales`. It has twice the bytes of MXFP4.
"""

import torch

from mxep.quant import e2m1
from mxep.quant.block_fp8 import BlockFP8
from mxep.quant.checks import VALUE_DTYPES
from mxep.quant.formats import BLOCK, E2M1
from mxep.quant.tensor import MXTensor


def to_mxfp8(x: MXTensor | BlockFP8, *, dtype: torch.dtype | None = None) -> MXTensor:
    """The values of x, exactly, as an MXTensor of E4M3 (an MXTensor of 8-bit elements is returned as it is).

    x: an MXTensor (..., N, K); its axis, block size and row index stay. Or BlockFP8 (..., N, K); the result has blocks
        of 32 along K.
    dtype: the outer dtype, bf16, fp32 or fp16; default: that of the MXTensor, or bf16.
    No autograd. Raises ValueError for BlockFP8 if its scales are not powers of two, or if K or its block columns are no
    multiple of 32.
    """
    if dtype is not None and dtype not in VALUE_DTYPES:
        raise ValueError(f"to_mxfp8: expected dtype {VALUE_DTYPES}, got {dtype}")
    if isinstance(x, BlockFP8):
        return _of_blocks(x, torch.bfloat16 if dtype is None else dtype)
    if not isinstance(x, MXTensor):
        raise ValueError(f"to_mxfp8: expected an MXTensor or BlockFP8, got a {type(x).__name__}")
    dtype = x.dtype if dtype is None else dtype
    qdata, scale = x.qdata, x.scale
    if qdata.dtype == E2M1.dtype and x.axis == -1:
        qdata, scale = e2m1.widen(qdata, scale)
    elif qdata.dtype == E2M1.dtype:
        qdata, scale = (part.mT for part in e2m1.widen(qdata.mT, scale.mT))
    return MXTensor(qdata, scale, x.row_index, x.axis, x.block_size, dtype, trusted=True)


def _of_blocks(x: BlockFP8, dtype: torch.dtype) -> MXTensor:
    n, k = x.shape[-2:]
    columns = min(x.block_size[1], k)
    if k % BLOCK or columns % BLOCK:
        raise ValueError(f"to_mxfp8: expected K and block columns in multiples of {BLOCK}, got {k} and {columns}")
    exponents = x.scale_exponents()
    if exponents is None:
        raise ValueError(f"to_mxfp8: expected power-of-two scales, got others in {x.scale.dtype}: dequantize() them")
    rows = min(x.block_size[0], n)
    scale = exponents.view(torch.uint8).repeat_interleave(rows, -2)[..., :n, :]
    scale = scale.repeat_interleave(columns // BLOCK, -1)[..., : k // BLOCK]
    return MXTensor.from_qdata_and_scales(x.qdata, scale, dtype)
