"""Triton kernels behind the ops of mxep.quant: one file a subject, each with its launchers.

A launcher has its op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter). Its result equals
that of the op's plain-torch reference bit for bit, where the reference specifies it.

    numbers     device functions: scale bytes, powers of two, what they are made of
    bounds      device functions: where groups of rows lie
    turn        device functions: a tile's codes stored transposed
    rows        quantize along rows, square tiles
    tile        device functions: a tile quantized along its columns or rows
    columns     quantize along columns, both ways of one read
    whole       one scale a row and one a column, of two reads
    requantize  codes blocked anew
    fold        rows by an index, folded
    split_fold  both operands of a wgrad, folded and turned
    swiglu      SwiGLU with quantization, forward and backward
    gather      rows by an index: materialize, pad, unpad; scales swizzled
"""

import importlib
import os
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef


def on_cuda(op: CustomOpDef, module: str, launcher: str, *, package: str = __name__) -> None:
    """Make `launcher` of `<package>.<module>` the CUDA kernel of `op`. It imports Triton when first called."""

    def launch(*args: Any) -> Any:
        with torch.cuda.device(next(arg.device for arg in args if isinstance(arg, torch.Tensor))):
            return getattr(importlib.import_module(f"{package}.{module}"), launcher)(*args)

    op.register_kernel("cuda")(launch)


def on_hopper(**options: int) -> dict[str, int]:
    """Launch options measured on sm_90, for that target alone."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return {}
    from triton.runtime import driver

    return options if driver.active.get_current_target().arch == 90 else {}
