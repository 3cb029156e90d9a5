"""Launch a Triton kernel for less of the host's time than `kernel[grid](...)` takes.

At every call Triton works out what a kernel is specialized for, and looks for what it compiled by that. Here the same
facts are a short key to the kernels that Triton has launched once.
"""

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...], Any]] = {}
"""By the key: what was compiled, its constexprs in order, and the kernel, whose id is part of the key."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's function, which kernels can call as well, takes ten times as long.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the current device and stream.

    args: all parameters but the constexprs, in order: tensors, ints, floats, None, and tensor descriptors: objects with
        `base`, `block_shape`, what else Triton's launcher reads, and a method `for_triton` that makes Triton's own.
    constants: constexprs, which follow them in the kernel's signature, and options such as num_warps.
    """
    hooks = knobs.runtime.launch_enter_hook
    if not isinstance(kernel, JITFunction) or getattr(hooks, "calls", hooks):  # interpreted, or profiled
        kernel[grid](*map(_for_triton, args), **constants)
        return
    device = torch._C._cuda_getDevice()
    key: list[Any] = [id(kernel), device, *constants.items()]
    values: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is int:
            # Triton compiles different kernels for ints by size, for 1, and for multiples of 16.
            key.append(1 if x == 1 else (x & 15 == 0, -(2**31) <= x < 2**31, x < 2**63))
        elif isinstance(x, Tensor):
            address = x.data_ptr()  # costs the launch less than a tensor
            key.append((x.dtype, address & 15 == 0))
            x = address
        elif hasattr(x, "for_triton"):
            key.append((kind, x.base.dtype, x.block_shape))
        else:
            key.append(kind)
        values.append(x)
    found = _compiled.get(tuple(key))
    if found is None:
        compiled = kernel[grid](*map(_for_triton, args), **constants)
        if isinstance(compiled, CompiledKernel):
            constexprs = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            _compiled[tuple(key)] = compiled, constexprs, kernel
        return
    compiled, constexprs, _ = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    how = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(x, y, z, stream, *how, *values, *constexprs)


def _for_triton(x: Any) -> Any:
    return x.for_triton() if hasattr(x, "for_triton") else x
