"""Gradients under `torch.autograd.set_detect_anomaly(True)`, which looks for NaN in all that a backward returns.

Rows past the groups are unspecified: memory as it was, that nobody reads. There they are zeros while torch looks.
"""

from typing import Any

import torch
from torch import Tensor

from mxep.quant import MXTensor


def for_anomaly_mode(grad: Any, offs: Tensor | None) -> Any:
    """A gradient (R, ...), or None, as it is; where torch looks for NaN a copy with zeros in rows from offs[-1] on."""
    if grad is None or offs is None or torch.compiler.is_compiling():
        return grad
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return grad
    past = torch.arange(grad.shape[0], device=offs.device, dtype=torch.int32) >= offs[-1]
    if not isinstance(grad, MXTensor):
        return grad.masked_fill(past.view(-1, *[1] * (grad.dim() - 1)), 0)
    if grad.row_index is not None:
        return grad.with_parts(grad.qdata, grad.scale, grad.row_index.masked_fill(past, -1))
    qdata, scale = (x.view(torch.uint8).masked_fill(past[:, None], 0).view(x.dtype) for x in (grad.qdata, grad.scale))
    return grad.with_parts(qdata, scale)
