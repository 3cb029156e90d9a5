"""Requantization: qdata blocked along rows become qdata blocked along columns, in one pass, without bf16 in between.

    qdata, scale (R, D) blocked along D, in slots or expert-major
      | rows picked by the index, if any
      v
    values in fp32 (registers of a kernel), exact: an element times a power of two
      | new blocks of 32, scale bytes and elements by the rules of `quantize`
      v
    qdata (D, R), scale (R/32, D) blocked along R       contracted by a wgrad

So it equals quantizing the dequantized fp32 values, bit for bit. This includes values past fp32's range: they
dequantize to Inf, and a block that holds one becomes NaN. (E4M3 reaches that range from scale 247 on. `quantize`
reaches it only for values next to fp32's maximum, which are rounded to 2**128.)

R rows, D columns.
"""

import torch
from torch import Tensor

from mxep.quant.checks import check_block, check_byte_elements, check_format, check_mode
from mxep.quant.formats import BLOCK, MXFormat, ScaleMode
from mxep.quant.groups import check_offs, fill_rows, valid_rows
from mxep.quant.ops import bytewise, decode, quantize_columns
from mxep.quant.shapes import empty_columns, num_rows, picked_shape, round_up
from mxep.quant.tensor import MXTensor, wrap
from mxep.runtime.op import op


def requantize(
    mx: MXTensor,
    *,
    fmt: MXFormat | str | None = None,
    mode: ScaleMode | str = ScaleMode.RCEIL,
    offs: Tensor | None = None,
) -> MXTensor:
    """`mx` (..., N, K), blocked in any way, indexed or not, blocked anew: 32 elements along N, without a row index.

    The result has axis -2. Its bytes are contiguous along N, as from `quantize(x, axis=-2)`.
    fmt: element format of the result; default: the same. mode: scale mode of the result.
    offs: int32 (G,) inclusive ends of the row groups of a 2-D `mx` over a capacity buffer, multiples of 32. Rows
        from offs[-1] on are not read, and unspecified in the result.
    A new block with NaN or Inf in it becomes NaN as a whole. Differentiable: the gradient passes unchanged.
    Raises ValueError if N is no multiple of 32, and for a wrong offs.
    """
    if not isinstance(mx, MXTensor):
        raise ValueError(f"requantize: got a {type(mx).__name__}, want an MXTensor: quantize it")
    check_byte_elements("requantize", mx)
    check_block(BLOCK, -2, mx)
    check_offs(offs, mx)
    dtype = mx.qdata.dtype if fmt is None else check_format(fmt)
    qdata, scale = _requantize(mx.qdata, mx.scale, *mx.block_shape, mx.row_index, offs, dtype, check_mode(mode))
    return wrap(mx, qdata.mT, scale, None, -2, BLOCK, mx.dtype)


@op(
    "mxep::requantize",
    fake=lambda qdata, scale, block_rows, block_columns, row_index, offs, dtype, mode: empty_columns(
        qdata, dtype, BLOCK, picked_shape(qdata, row_index)
    ),
    launcher="mxep.quant.kernels.requantize:requantize",
)
def _requantize(
    qdata: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    row_index: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    mode: str,
) -> tuple[Tensor, Tensor]:
    """qdata (..., N, K), scale (..., N/block_rows, K/block_columns) e8m0, row_index int32 (R,) or None (then R is N)
    -> qdata (..., K, R) `dtype`, scale (..., R/32, K)."""
    capacity = num_rows(qdata, row_index)
    valid = valid_rows(offs, capacity)
    if valid % BLOCK:
        raise ValueError(f"requantize: got offs[-1] {valid}, want a multiple of {BLOCK}")
    if row_index is None:
        read = round_up(valid, block_rows)
        qdata, scale = qdata[..., :read, :], scale[..., : read // block_rows, :]
    else:
        row_index = row_index[:valid]
    values = decode(qdata, scale, (block_rows, block_columns), row_index)[..., :valid, :]
    transposed, new_scale = quantize_columns.reference(values, dtype, mode, BLOCK)
    if valid < capacity:
        transposed = bytewise(lambda x: torch.nn.functional.pad(x, (0, capacity - valid)), transposed)
    return transposed, fill_rows(new_scale, capacity // BLOCK)
