"""Gradients under `torch.autograd.set_detect_anomaly(True)`, which checks everything a backward returns for NaN.

Rows past the groups are unspecified: uninitialized memory that nobody reads. They are zeros while torch checks.
"""

from typing import Any

import torch
from torch import Tensor

from mxep.quant import MXTensor


def for_anomaly_mode(grad: Any, offs: Tensor | None) -> Any:
    """Return the gradient (R, ...) or None as it is; while torch checks for NaN, a copy with zeros from offs[-1] on."""
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
