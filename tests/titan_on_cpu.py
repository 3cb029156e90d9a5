"""torchtitan's trainer on CPU processes. Import this before torchtitan.

torchtitan asks once, when it is imported, which accelerator there is, and takes CUDA for granted. This answers for it,
also where GPUs are visible, and for what gloo does not have. Nothing of torchtitan is changed.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_memory = {"memory_stats": lambda *_: {}, "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None}
_names = {"get_device_name": lambda *_: "CPU", "get_device_properties": lambda *_: SimpleNamespace(total_memory=1)}
_calls = {name: getattr(torch.cpu, name) for name in ("device_count", "set_device", "synchronize")}
_module: Any = SimpleNamespace(current_device=lambda: 0, **_memory, **_names, **_calls)

with mock.patch.multiple(
    "torch._utils", _get_available_device_type=lambda: "cpu", _get_device_module=lambda _: _module
):
    import torchtitan.tools.utils  # noqa: F401

import mxep.integration.torchtitan  # noqa: E402, F401


def reduce_over_gloo(model: nn.Module) -> None:
    """FSDP2 scales gradients in the reduction, which gloo can not, unless it is told."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
