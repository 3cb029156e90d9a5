"""Triton kernels behind the ops of mxep.comms: one file a subject, each with its launchers.

A launcher has its op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter). Its result equals
that of the op's plain-torch reference bit for bit.

    launch      what every launch of a move is told
    signals     device functions: how the programs of all ranks meet; the barrier
    put         tokens to slots or to expert-major rows on the ranks that need them; tables
    sums        rows home: summed, sent, summed over ranks
    nvshmem     puts by PE and how ranks meet without addresses
    staged      what moves by puts need besides: sums staged, sums at home, padding
    plan        which slot feeds which row, and where a rank's own pairs go
    gather      rows by an index
"""

import importlib
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef


def on_cuda(op: CustomOpDef, module: str, launcher: str) -> None:
    """Make `launcher` of this package's `module` the CUDA kernel of `op`. It imports Triton when first called."""

    def launch(*args: Any) -> Any:
        flat = (each for arg in args for each in (arg if isinstance(arg, list) else [arg]))
        with torch.cuda.device(next(each.device for each in flat if isinstance(each, torch.Tensor))):
            return getattr(importlib.import_module(f"{__name__}.{module}"), launcher)(*args)

    op.register_kernel("cuda")(launch)
