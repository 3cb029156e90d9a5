"""Backwards that want some gradients only: which ones, and what is kept for a later one that wants the others.

    dx, = torch.autograd.grad(out, x, dy, retain_graph=True)     dgrad; the operands of wgrad are kept
    dw, = torch.autograd.grad(out, w, dy)                        wgrad of these; nothing is computed or moved again

So do schedules of pipelines that split backward (zero bubble). `ctx.needs_input_grad` does not help: it says what
requires a gradient, as it was in forward. A weight gradient that is added to main_grad must be computed only where
it is wanted, or it is added twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def is_wanted(ctx: Any, i: int) -> bool:
    """Whether the backward that runs uses the gradient of the i-th tensor that a function was applied to.

    ctx: of that function, in its backward. In a compiled graph always True: it computes all that require one.
    """
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[i][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # how torch answers for a leaf that torch.autograd.grad was asked about, and only for that
        return True


def graph_is_retained() -> bool:
    """Whether the graph can be used again after the backward that runs."""
    return not torch.compiler.is_compiling() and bool(torch._C._autograd._get_current_graph_task_keep_graph())


@dataclass(frozen=True)
class SavedOperands:
    """What a backward left for another one of the same incoming gradients.

    dys: those gradients. versions: theirs then. operands: of the weight gradients.
    """

    dys: tuple[Tensor, ...]
    versions: tuple[int, ...]
    operands: Any

    @classmethod
    def of(cls, operands: Any, *dys: Tensor) -> "SavedOperands":
        return cls(dys, tuple(dy._version for dy in dys), operands)

    def fits(self, *dys: Tensor) -> bool:
        """Whether these are the same tensors, unchanged."""
        return all(dy is old and dy._version == was for dy, old, was in zip(dys, self.dys, self.versions))
