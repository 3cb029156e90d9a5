"""What torch's pipeline schedules can do in this version."""

from typing import Any

import pytest
import torch


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


def _take_functions() -> bool:
    """Whether a backward may start at a node that is a function written in Python; torch 2.11 raises."""
    node: Any = _Same.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


splits_functions = pytest.mark.skipif(not _take_functions(), reason="this torch splits no function written in Python")
