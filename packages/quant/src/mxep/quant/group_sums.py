"""Sum of each group's rows, plain or quantized. It is the gradient of a bias.

    x (R, N), offs (G,)   ->   (G, N) fp32, each group's rows in a fixed order; no host sync, and no copy of x

Row r of a group is added to lane r mod 32, rows in order. Then lanes 16 to 31 go onto 0 to 15, 8 to 15 onto 0 to 7, ...
"""

import torch
from torch import Tensor

from mxep.quant.formats import E2M1
from mxep.quant.groups import check_offs, group_of_rows
from mxep.quant.ops import decode
from mxep.quant.shapes import GROUP_SUMS_LANES as LANES
from mxep.quant.shapes import empty_group_sums
from mxep.quant.tensor import MXTensor
from mxep.runtime.op import op


def group_sums(x: Tensor, offs: Tensor) -> Tensor:
    """(G, N) fp32 (fp64 for fp64): sums of rows offs[g-1] .. offs[g] - 1 of x, zeros for an empty group.

    x: (R, N) bf16 | fp32 | fp16 | fp64, or an MXTensor. offs: (G,) int32 inclusive ends. Rows from offs[-1] on are not
    read. No autograd. Raises ValueError for other offs or shapes.
    """
    check_offs(offs, x)
    if not isinstance(x, MXTensor):
        sums: Tensor = _group_sums(x, None, 1, offs)
    elif x.axis != -1 or x.row_index is not None or x.qdata.dtype == E2M1.dtype:
        sums = _group_sums(x.dequantize(), None, 1, offs)
    else:
        sums = _group_sums(x.qdata, x.scale, x.block_size, offs)
    return sums


@op(
    "mxep::group_sums",
    fake=lambda x, scale, block_size, offs: empty_group_sums(x, offs),
    launcher="mxep.quant.kernels.group_sums:group_sums",
)
def _group_sums(x: Tensor, scale: Tensor | None, block_size: int, offs: Tensor) -> Tensor:
    """x (R, N), scale (R, N / block_size) e8m0 or None."""
    values = x.to(empty_group_sums(x, offs).dtype) if scale is None else decode(x, scale, (1, block_size), None)
    groups, (rows, width) = offs.shape[0], x.shape
    group = group_of_rows(offs, rows)
    first = torch.cat((offs.new_zeros(1), offs))[group]
    lane = (torch.arange(rows, device=x.device, dtype=torch.int64) - first) % LANES
    lanes = values.new_zeros((groups + 1) * LANES, width).index_add_(0, group * LANES + lane, values)
    lanes = lanes.view(groups + 1, LANES, width)[:groups]
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.squeeze(1)
