"""Launch a Triton kernel at a third of what `kernel[grid](...)` costs the host.

Triton works out at every call what a kernel is specialized for, and looks for the compiled kernel by that: 16 to 19 us of an
H200's host. Here the same facts are a short key to kernels that Triton has compiled and launched once: 6 to 8 us.
"""

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...], Any]] = {}
"""By the key: what was compiled, its constexprs in order, and the kernel, whose id is part of the key."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the current device and stream.

    args: all parameters but the constexprs, in order: tensors, tensor descriptors, ints, floats, None.
    constants: constexprs, which follow them in the kernel's signature, and options such as num_warps.
    """
    hooks = knobs.runtime.launch_enter_hook
    if not isinstance(kernel, JITFunction) or getattr(hooks, "calls", hooks):  # interpreted, or profiled
        kernel[grid](*args, **constants)
        return
    device = torch._C._cuda_getDevice()
    key = (id(kernel), device, *map(_specialized, args), *constants.items())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        if isinstance(compiled, CompiledKernel):
            _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]), kernel
        return
    compiled, constexprs, _ = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    how = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(x, y, z, stream, *how, *args, *constexprs)


def _specialized(x: Any) -> Any:
    """What Triton compiles different kernels for: dtypes, addresses in 16 bytes or not, ints by size, 1, in 16s or not."""
    kind = type(x)
    if kind is int:
        return 1 if x == 1 else (x & 15 == 0, -(2**31) <= x < 2**31, x < 2**63)
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    base = getattr(x, "base", None)
    return kind if base is None else (kind, base.dtype, *x.block_shape)
