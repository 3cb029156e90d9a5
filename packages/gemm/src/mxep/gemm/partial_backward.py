"""Backward passes that need only some gradients: which ones, and operands kept for a pass that needs the others.

    dx, = torch.autograd.grad(out, x, dy, retain_graph=True)     dgrad; the operands of wgrad are kept
    dw, = torch.autograd.grad(out, w, dy)                        wgrad of these; nothing is computed or moved again

Pipeline schedules that split backward (zero bubble) do so. `ctx.needs_input_grad` does not help: it tells which inputs
required a gradient in forward. A weight gradient that is added to main_grad must be computed only if it is wanted, or
it is added twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
