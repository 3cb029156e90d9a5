"""Triton kernels behind the ops of mxep.quant: one file a subject, each with its launchers.

A launcher has its op's signature and takes CUDA tensors (or CPU tensors under Triton's interpreter), vectors packed:
`on_cuda` sees to that. Its result equals that of the op's plain-torch reference bit for bit, where the reference
specifies it.

    numbers     device functions: scale bytes, powers of two, what they are made of
    bounds      device functions: where groups of rows lie
    turn        device functions: a tile's qdata stored transposed
    rows        quantize along rows, square tiles
    tile        device functions: a tile quantized along its columns or rows
    columns     quantize along columns, both ways of one read
    whole       one scale a row and one a column, of two reads
    requantize  qdata blocked anew
    fold        rows by an index, folded
    fold_for_wgrad  both operands of a wgrad, folded and transposed
    swiglu      SwiGLU with quantization, forward and backward
    gather      rows by an index: materialize, pad, unpad; scales swizzled
"""

import functools
import importlib
import logging
import os
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

_INDEX_DTYPES = (torch.int32,)


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether these kernels run on `device`, which they do where Triton converts to E4M3: on CUDA from capability 8.9
    (Ada, Hopper, Blackwell; not A100). On an older GPU every op runs its plain-torch reference."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


def on_cuda(
    op: CustomOpDef,
    module: str,
    launcher: str,
    *,
    package: str = __name__,
    index_dtypes: tuple[torch.dtype, ...] = _INDEX_DTYPES,
) -> None:
    """Make `launcher` of `<package>.<module>` the CUDA kernel of `op`. It imports Triton when first called.

    This is where vectors (tensors of one axis: row_index, offs, row_weight, bias ...) come in: kernels read them
    one element after another, so the launcher gets strided ones packed, and integers of `index_dtypes` only (else
    ValueError). What the op writes is left as it is.
    """
    arguments = op._opoverload._schema.arguments
    inputs = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type) and not (a.alias_info or a.kwarg_only)]

    def launch(*given: Any) -> Any:
        args = list(given)
        device = None
        for i in inputs:
            x = args[i]
            if x is None:
                continue
            device = device or x.device
            if x.ndim == 1:
                if x.dtype not in index_dtypes and x.dtype.is_signed and not x.dtype.is_floating_point:
                    raise ValueError(f"{arguments[i].name}: got {x.dtype}, want {' or '.join(map(str, index_dtypes))}")
                args[i] = x.contiguous()
        assert device is not None
        if not runs_on(device):
            _say_that_it_is_slow(device)
            return op._init_fn(*args)
        with torch.cuda.device(device):
            return getattr(importlib.import_module(f"{package}.{module}"), launcher)(*args)

    op.register_kernel("cuda")(launch)


@functools.cache
def _say_that_it_is_slow(device: torch.device) -> None:
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    logging.getLogger("mxep.quant").warning(
        "%s (%s, capability %d.%d): no E4M3 conversions in Triton before 8.9, so MX ops run in plain torch, slowly",
        device, name, major, minor,
    )  # fmt: skip


def on_hopper(**options: int) -> dict[str, int]:
    """Launch options measured on sm_90, for that target alone."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return {}
    from triton.runtime import driver

    return options if driver.active.get_current_target().arch == 90 else {}
