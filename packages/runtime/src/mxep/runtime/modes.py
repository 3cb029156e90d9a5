"""Dispatch modes, from which a kernel that is launched past torch's dispatcher would be hidden, and what one counts."""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

FLOPS: Final[dict[Any, Callable[..., int]]] = {}
"""Formulas for the floating-point operations of a call, by op as in torch.ops. See `count_flops`."""


def mode_listens() -> bool:
    """Whether ops have to go through torch's dispatcher: a mode wants to know of them, and not only of allocations."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    for mode in modes:
        # FlopCounterMode copies torch's formulas when it is made. Importing it, to add ours there, would import Triton.
        formulas = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(formulas, dict):
            _add_formulas(formulas)
            offer_flops()
    return not getattr(modes[-1], "wants_torch_ops_alone", False)


def _add_formulas(registry: dict[Any, Any]) -> None:
    for op, formula in FLOPS.items():
        registry.setdefault(op, formula)


def offer_flops() -> None:
    """Add our formulas to torch's, if its counter is imported: for modes that are made from now on."""
    counter: Any = sys.modules.get("torch.utils.flop_counter")
    if counter is not None:
        _add_formulas(counter.flop_registry)


def count_flops(*ops: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function what torch.utils.flop_counter counts of these ops, where torch has no formula itself.

    It gets the op's arguments, and the op's result as `out_val`.
    """

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        formula._get_raw = True  # type: ignore[attr-defined]
        FLOPS.update(dict.fromkeys(ops, formula))
        return formula

    return register
