"""Backward passes that need only some gradients: which ones, and operands kept for a pass that needs the others.

    dx, = torch.autograd.grad(out, x, dy, retain_graph=True)     dgrad; the operands of wgrad are kept
    dw, = torch.autograd.grad(out, w, dy)                        wgrad of these; nothing is computed or moved again

Pipeline schedules that split backward (zero bubble) do so. `ctx.needs_input_grad` does not help: it tells which inputs
required a gradient in forward. A weight gradient that is added to main_grad must be computed only if it is wanted, or
it is added twice.

Under `torch.autograd.set_detect_anomaly(True)` torch checks everything that a backward returns for NaN. Rows past the
groups are unspecified, memory that nobody reads: they are zeros then.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.quant import MXTensor


def is_wanted(ctx: Any, i: int) -> bool:
    """True if the running backward uses the gradient of a function's i-th tensor argument.

    ctx: of that function, in its backward. Always True in a compiled graph, which computes all required gradients.
    """
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[i][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf that torch.autograd.grad was asked about, and only for that
        return True


def graph_is_retained() -> bool:
    """True if the graph can be used again after the running backward."""
    return not torch.compiler.is_compiling() and bool(torch._C._autograd._get_current_graph_task_keep_graph())


@dataclass(frozen=True)
class SavedOperands:
    """Operands that one backward kept for another with the same incoming gradients.

    dys: those gradients. versions: their versions at that time. operands: operands of the weight gradients.
    """

    dys: tuple[Tensor, ...]
    versions: tuple[int, ...]
    operands: Any

    @classmethod
    def of(cls, operands: Any, *dys: Tensor) -> "SavedOperands":
        return cls(dys, tuple(dy._version for dy in dys), operands)

    def fits(self, *dys: Tensor) -> bool:
        """True if these are the same tensors, unchanged."""
        return all(dy is old and dy._version == was for dy, old, was in zip(dys, self.dys, self.versions))


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
