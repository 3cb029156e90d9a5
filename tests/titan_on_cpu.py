"""torchtitan's trainer, 0.2 and 0.3, on CPU processes. Import this before torchtitan.

torchtitan asks once, when it is imported, which accelerator there is, and takes CUDA for granted. This answers for it,
also where GPUs are visible, and for what gloo and torch 2.13 do not have. Nothing of torchtitan is changed.
"""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

_memory = {"memory_stats": lambda *_: {}, "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None}
_names = {"get_device_name": lambda *_: "CPU", "get_device_properties": lambda *_: SimpleNamespace(total_memory=1)}
_calls = {name: getattr(torch.cpu, name) for name in ("device_count", "set_device", "synchronize")}
_module: Any = SimpleNamespace(current_device=lambda: 0, **_memory, **_names, **_calls)

with mock.patch.multiple(
    "torch._utils", _get_available_device_type=lambda: "cpu", _get_device_module=lambda _: _module
):
    import torchtitan.tools.utils as tools

tools.has_cuda_capability = lambda *_: False  # by which 0.2 takes other products where GPUs are visible

with contextlib.suppress(ImportError):  # of 0.2, whose Triton kernel wants a GPU, or Triton's interpreter
    from torchtitan.models.moe import utils as moe

    moe.generate_permute_indices = functools.partial(moe.generate_permute_indices, use_cpu=True)

if not hasattr(dist, "set_timeout"):  # torch 2.13 has it under this name
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


def reduce_over_gloo(model: nn.Module) -> None:
    """FSDP2 scales gradients in the reduction, which gloo can not, unless it is told."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


_histc = torch.histc


def _histc_of_any(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return _histc(x.float(), **options).to(x.dtype)


torch.histc = _histc_of_any  # torchtitan 0.2 counts ids with it, which CPUs can not
