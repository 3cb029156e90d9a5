"""Launch a Triton kernel for less of the host's time than `kernel[grid](...)` takes.

At every call Triton works out the facts that a kernel is specialized for, and looks up the compiled kernel by them.
Here the same facts are a short key to the kernels that Triton has launched once.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from .graph import for_triton, unlike_a_node
from .lengths import Length
from .record import here

_IS_HIP = torch.version.hip is not None
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...], Any]] = {}
"""Key to (compiled kernel, its constexprs in order, the kernel). The key holds the kernel's id."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's function, which kernels can call as well, takes ten times as long.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the current device and stream.

    args: all parameters but the constexprs, in order: tensors, ints, floats, None, and tensor descriptors. These have
        `base`, `block_shape`, the other fields that Triton's launcher reads, and a method `for_triton` that makes
        Triton's own.

    constants: constexprs, which follow them in the kernel's signature, and options such as num_warps.
    """
    # Interpreted, profiled, or on an AMD GPU, where kernels are specialized for the bytes of a storage, too.
    if not isinstance(kernel, JITFunction) or is_profiled() or _IS_HIP:
        kernel[grid](*map(for_triton, args), **constants)
        if here.recorder is not None:
            here.recorder.launch(kernel, None, grid, args, constants)
        return
    device = torch._C._cuda_getDevice()
    facts, values = _reader(*map(type, args))(*args)
    key = id(kernel), device, facts, *constants.items()
    found = _compiled.get(key)
    if found is None:
        if Length in map(type, args):
            lengths = [p for p, x in zip(kernel.params, args) if type(x) is Length and not p.do_not_specialize]
            if lengths:
                name = lengths[0].name
                raise TypeError(f"{kernel.__name__}: got a Length as {name}, want {name} in its do_not_specialize")
        compiled = kernel[grid](*map(for_triton, args), **constants)
        if isinstance(compiled, CompiledKernel):
            found = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]), kernel
            _compiled[key] = found
    else:
        compiled, constexprs, _ = found
        x, y, z = (*grid, 1, 1)[:3]
        how = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(x, y, z, torch._C._cuda_getCurrentRawStream(device), *how, *values, *constexprs)
    if (recorder := here.recorder) is not None:
        recorder.launch(kernel, compiled, grid, args, constants)
        if why := "it was compiled alone" if found is None else unlike_a_node(compiled, len(args)):
            recorder.refuse(why)


def is_profiled() -> bool:
    """Whether somebody hooks Triton's launches."""
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks))


@functools.cache
def _reader(*kinds: type) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """A function of arguments of these types: what Triton compiles different kernels for, and the values to launch.

    These facts are a tensor's dtype, and whether its address is a multiple of 16. For an int they are its size, and
    whether it is 1 or a multiple of 16. A `Length` has none. A loop over the arguments would take three times as long
    as the function written for them.
    """
    facts, values, lines = [repr(tuple(kind.__name__ for kind in kinds))], [], []
    for i, kind in enumerate(kinds):
        x = f"x{i}"
        values.append(x)
        if kind is int:
            facts.append(f"{x} == 1, not {x} & 15, -2147483648 <= {x} < 2147483648, {x} < 9223372036854775808")
        elif issubclass(kind, Tensor):
            lines.append(f"p{i} = {x}.data_ptr()")
            facts.append(f"{x}.dtype, not p{i} & 15")
            values[-1] = f"p{i}"  # an address costs the launch less than a tensor
        elif hasattr(kind, "for_triton"):
            facts.append(f"{x}.base.dtype, {x}.block_shape")
    arguments = ", ".join(f"x{i}" for i in range(len(kinds)))
    lines.append(f"return ({', '.join(facts)},), ({', '.join(values)},)")
    found: dict[str, Any] = {}
    exec(f"def read({arguments}):\n    " + "\n    ".join(lines), found)
    read: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] = found["read"]
    return read
