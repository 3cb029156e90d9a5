"""FLOPs that torch.utils.flop_counter.FlopCounterMode counts for GEMMs: 2 M N K each, as for torch's plain GEMM.

M is the number of valid rows, offs[-1], read from the device. Padding rows of a group count, rows past the groups do
not. With fake tensors or in a CUDA graph's capture nothing can be read, so M is the capacity.

M rows, N out features, K in features, G groups.
"""

from typing import Any

import torch
from torch import Tensor

import mxep.gemm.backends
import mxep.gemm.product
import mxep.gemm.router_ops  # noqa: F401  these define the ops
from mxep.runtime.op import count_flops, offer_flops

ops = torch.ops.mxep


def rows_of(offs: Tensor | None, capacity: int) -> int:
    """Number of valid rows in a buffer."""
    if offs is None or type(offs) is not Tensor or offs.is_meta:
        return capacity
    if offs.is_cuda and torch.cuda.is_current_stream_capturing():
        return capacity
    return min(max(int(offs[-1]), 0), capacity) if len(offs) else 0


@count_flops(ops.grouped_mm_reference, ops.grouped_mm_dot_scaled)
def _forward(
    a: Tensor, a_scale: Any, a_index: Any, w: Tensor, w_scale: Any, offs: Tensor | None, *_: Any, out_val: Tensor
) -> int:
    return 2 * rows_of(offs, out_val.shape[0]) * w.shape[1] * w.shape[2]


@count_flops(ops.fp8_grouped_mm)
def _fp8_forward(
    a: Tensor, a_scale: Any, w: Tensor, w_scale: Any, offs: Tensor | None, *_: Any, out_val: Tensor
) -> int:
    return 2 * rows_of(offs, out_val.shape[0]) * w.shape[1] * w.shape[2]


@count_flops(ops.grouped_wgrad_reference)
def _wgrad(
    dy: Tensor, dy_scale: Any, dy_index: Any, a: Tensor, a_scale: Any, a_index: Any, offs: Tensor | None, *_: Any,
    out_val: Tensor,
) -> int:  # fmt: skip
    capacity = (a if a_index is None else a_index).shape[0]
    return 2 * rows_of(offs, capacity) * dy.shape[1] * a.shape[1]


@count_flops(ops.grouped_wgrad_dot_scaled)
def _wgrad_dot_scaled(
    out: Tensor, y: Tensor, y_scale: Any, x: Tensor, x_scale: Any, offs: Tensor, *_: Any, out_val: Any
) -> int:
    return 2 * rows_of(offs, y.shape[0]) * y.shape[1] * x.shape[1]


@count_flops(ops.fold_for_wgrad)
def _fp8_wgrad(
    x: Tensor, x_scale: Any, x_index: Any, y: Tensor, y_scale: Any, y_index: Any, offs: Tensor, *_: Any, out_val: Any
) -> int:
    """FLOPs of the fp8_grouped_wgrad that follows. Its own operands have zeros between groups."""
    capacity = (x if x_index is None else x_index).shape[0]
    return 2 * rows_of(offs, capacity) * x.shape[1] * y.shape[1]


@count_flops(ops.fp32_linear)
def _fp32_linear(x: Tensor, w: Tensor, out_val: Tensor) -> int:
    return 2 * x.shape[0] * w.shape[0] * w.shape[1]


@count_flops(ops.fp32_dgrad)
def _fp32_dgrad(dy: Tensor, w: Tensor, *_: Any, out_val: Tensor) -> int:
    return 2 * dy.shape[0] * w.shape[0] * w.shape[1]


@count_flops(ops.fp32_wgrad)
def _fp32_wgrad(dy: Tensor, x: Tensor, *_: Any, out_val: Tensor) -> int:
    return 2 * dy.shape[0] * dy.shape[1] * x.shape[1]


@count_flops(ops.product_forward)
def _product_forward(a: Tensor, ws: list[Tensor], bias: Any, offs: Tensor | None, *_: Any, out_val: Any) -> int:
    return 2 * rows_of(offs, a.shape[0]) * a.shape[1] * sum(w.shape[-2] for w in ws)


@count_flops(ops.product_backward)
def _product_backward(dy: Tensor, saved: Any, ws: list[Tensor], offs: Tensor | None, *how: Any, out_val: Any) -> int:
    products: int = sum(how[-1][:2])
    return products * 2 * rows_of(offs, dy.shape[0]) * dy.shape[1] * ws[0].shape[-1]


@count_flops(torch.ops.aten._grouped_mm, torch.ops.aten._scaled_grouped_mm)
def _torchs(a: Tensor, b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """FLOPs of torch's grouped GEMMs of a (M, K) and b (G, K, N), or a (N, M) and b (M, K)."""
    offs = kwargs.get("offs")
    if offs is None:
        offs = next((x for x in args if isinstance(x, Tensor) and x.dtype == torch.int32 and x.dim() == 1), None)
    if a.dim() == 2 and b.dim() == 2:
        return 2 * rows_of(offs, a.shape[1]) * a.shape[0] * b.shape[1]
    if a.dim() == 2:
        return 2 * rows_of(offs, a.shape[0]) * a.shape[1] * b.shape[-1]
    return 2 * out_val.numel() * a.shape[-1]


offer_flops()
