"""The reference backend, which every other backend must equal. Group by group, in fp32, from dequantized operands.

    rows of g -> fp32 (K)   w[g] -> fp32 (N, K)   ->   rows @ w[g].T in fp32, + bias[g]   ->   rounded once to out_dtype

fp32 holds every qdata number times its scale exactly. The only errors are those of the fp32 sum and of the last
rounding. With fp64 operands (recipe "bf16" only) everything is fp64. dgrad is the forward with w transposed.

It reads offs on the host. This is free on a CPU and a sync on a GPU, so use it there only to check other backends.
The two ops take the parts of an MXTensor: qdata, scale and row index, or a plain tensor and None, None.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mxep.gemm.backends.base import AlongTokens, Backend
from mxep.quant import MXTensor
from mxep.runtime.op import op

Parts = tuple[Tensor, Tensor | None, Tensor | None]


class Reference(Backend):
    """See the module's docstring; `Backend` has the contract."""

    name = "reference"
    recordable = True
    bf16_is_torchs = False

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None

    def forward(
        self, a: Tensor, w: Tensor, offs: Tensor | None, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        out: Tensor = grouped_mm_reference(*parts_of(a), *parts_of(w)[:2], offs, bias, out_dtype)
        return out

    def wgrad_product(self, operands: AlongTokens, offs: Tensor | None, out_dtype: torch.dtype, scale: float) -> Tensor:
        dw: Tensor = grouped_wgrad_reference(*parts_of(operands.dy), *parts_of(operands.a), offs, out_dtype, scale)
        return dw


def parts_of(x: Tensor) -> Parts:
    """(qdata, scale, row_index) of an MXTensor; (x, None, None) of a plain tensor."""
    return (x.qdata, x.scale, x.row_index) if isinstance(x, MXTensor) else (x, None, None)


@op(
    "mxep::grouped_mm_reference",
    fake=lambda a, a_scale, a_index, w, w_scale, offs, bias, out_dtype: a.new_empty(
        (num_rows(a, a_index), w.shape[1]), dtype=out_dtype
    ),
)
def grouped_mm_reference(
    a: Tensor,
    a_scale: Tensor | None,
    a_index: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """a (M, K), w (G, N, K), offs int32 (G,) or None, bias (G, N) or None -> (M, N) out_dtype."""
    out = a.new_empty((num_rows(a, a_index), w.shape[1]), dtype=out_dtype)
    bounds = _bounds(offs, len(out))
    values = values_of_rows((a, a_scale, a_index), bounds[-1])
    for g, rows in _groups(bounds):
        w_g = values_of_rows((w[g], None if w_scale is None else w_scale[g], None), w.shape[1]).to(values.dtype)
        product = _product(values[rows], w_g.mT)
        out[rows] = product if bias is None else product + bias[g]
    return out


@op(
    "mxep::grouped_wgrad_reference",
    fake=lambda dy, dy_scale, dy_index, a, a_scale, a_index, offs, out_dtype, scale: a.new_empty(
        (_num_groups(offs), dy.shape[1], a.shape[1]), dtype=out_dtype
    ),
)
def grouped_wgrad_reference(
    dy: Tensor,
    dy_scale: Tensor | None,
    dy_index: Tensor | None,
    a: Tensor,
    a_scale: Tensor | None,
    a_index: Tensor | None,
    offs: Tensor | None,
    out_dtype: torch.dtype,
    scale: float,
) -> Tensor:
    """dy (M, N), a (M, K), offs int32 (G,) or None -> scale * (G, N, K) out_dtype, zero where a group is empty."""
    dw = a.new_zeros((_num_groups(offs), dy.shape[1], a.shape[1]), dtype=out_dtype)
    bounds = _bounds(offs, num_rows(a, a_index))
    a_values = values_of_rows((a, a_scale, a_index), bounds[-1])
    dy_values = values_of_rows((dy, dy_scale, dy_index), bounds[-1]).to(a_values.dtype)
    for g, rows in _groups(bounds):
        dw[g] = _product(dy_values[rows].mT, a_values[rows]) * scale
    return dw


def values_of_rows(parts: Parts, rows: int) -> Tensor:
    """The first `rows` rows of a 2-D operand, dequantized to fp32; fp64 stays fp64."""
    x, scale, index = parts
    if scale is None:
        return x[:rows] if x.dtype == torch.float64 else x[:rows].float()
    block_rows = 1 if index is not None or rows == 0 else x.shape[0] // scale.shape[0]
    block_cols = x.shape[1] // scale.shape[1]
    if index is not None:
        index = index[:rows]
    else:
        x, scale = x[:rows], scale[: rows // block_rows]
    axis = -1 if block_rows == 1 else -2 if block_cols == 1 else (-2, -1)
    return MXTensor(x, scale, index, axis, max(block_rows, block_cols), torch.float32).dequantize()


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # it would round the operands to bf16
        return a @ b


def num_rows(x: Tensor, index: Tensor | None) -> int:
    """Rows of an operand, or of its index."""
    return x.shape[0] if index is None else index.shape[0]


def _num_groups(offs: Tensor | None) -> int:
    return 1 if offs is None else offs.shape[0]


def _bounds(offs: Tensor | None, rows: int) -> list[int]:
    """Ends of the groups; [rows] without offs."""
    return [rows] if offs is None else offs.tolist()


def _groups(bounds: list[int]) -> Iterator[tuple[int, slice]]:
    """(g, its rows) of every group with rows."""
    start = 0
    for g, end in enumerate(bounds):
        if end > start:
            yield g, slice(start, end)
        start = end
