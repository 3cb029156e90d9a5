"""Who writes down what runs: a dispatch mode that ops and launches tell, instead of hiding from it in one custom op."""

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


def recorder() -> Any:
    """The current dispatch mode if it wants to know of launches, else None."""
    if not torch._C._len_torch_dispatch_stack():
        return None
    mode = _get_current_dispatch_mode()
    return mode if getattr(mode, "records_launches", False) else None
