"""Dispatch modes, from which a kernel that is launched past torch's dispatcher would be hidden."""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


def mode_listens() -> bool:
    """Whether ops have to go through torch's dispatcher: a mode wants to know of them, and not only of allocations."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not getattr(_get_current_dispatch_mode(), "wants_allocations_alone", False)
