"""Launch Triton kernels with less host time than `kernel[grid](...)`.

Triton specializes a kernel for facts about its arguments, such as dtypes and alignment. At every call it derives these
facts and looks up the compiled kernel by them. Here the facts form a short key, and a dict holds every compiled kernel
after its first launch.
"""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .graph import FORMATS, for_triton, keep_captures
from .lengths import Length
from .record import Rehearsal, here

_IS_HIP = torch.version.hip is not None
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...], Any]] = {}
"""Key -> (compiled kernel, its constexprs in order, the kernel). The key contains the kernel's id."""
_ahead: dict[tuple[Any, ...], Future[Any]] = {}
"""Key -> compilation that `rehearsal` started, until the kernel's first launch."""
MOST_THREADS = 16
"""Maximum threads that compile at once."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's cdiv takes ten times as long on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on the current device and stream.

    args: all kernel parameters before the constexprs, in order. Each is a tensor, int, float, None or tensor
        descriptor. A tensor descriptor is a named tuple with the fields that Triton's launcher reads, and with a method
        `for_triton` that returns Triton's own descriptor. Kernels get tensors of e8m0 and E2M1 as uint8.
    constants: constexprs by name, and launch options such as num_warps.
    """
    recorder = here.recorder
    # Triton itself launches under the interpreter, under a profiler, and on AMD GPUs, where it specializes for more.
    if not isinstance(kernel, JITFunction) or is_profiled() or _IS_HIP:
        if recorder is None or not recorder.rehearses:
            kernel[grid](*map(for_triton, args), **constants)
        if recorder is not None:
            recorder.launch(kernel, None, grid, args, constants)
        return
    device = torch._C._cuda_getDevice()
    facts, values = _reader(*map(type, args))(*args)
    key = id(kernel), device, facts, *constants.items()
    found = _compiled.get(key)
    if type(recorder) is Rehearsal:
        if found is None:
            recorder.wanted.setdefault(key, (kernel, grid, list(map(for_triton, args)), constants))
        return
    if found is None:
        if Length in map(type, args):
            lengths = [p for p, x in zip(kernel.params, args) if type(x) is Length and not p.do_not_specialize]
            if lengths:
                name = lengths[0].name
                raise TypeError(f"{kernel.__name__}: got a Length as {name}, want {name} in its do_not_specialize")
        # If a compilation started by a rehearsal failed, it fails again below and raises there.
        wait([_ahead.pop(key)] if key in _ahead else [each for other, each in _ahead.items() if other[0] == id(kernel)])
        compiled = kernel[grid](*map(for_triton, args), **constants)
        if isinstance(compiled, CompiledKernel):
            found = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]), kernel
            _compiled[key] = found
    else:
        compiled, constexprs, _ = found
        x, y, z = (*grid, 1, 1)[:3]
        how = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(x, y, z, torch._C._cuda_getCurrentRawStream(device), *how, *values, *constexprs)
    if recorder is not None:
        recorder.launch(kernel, compiled, grid, args, constants)
        if why := "it was compiled alone" if found is None else _unlike_a_node(compiled, len(args)):
            recorder.refuse(why)


@functools.cache
def _unlike_a_node(compiled: Any, num_args: int) -> str:
    """Reason why a compiled kernel with num_args arguments cannot be a node of a record's graph, or "" if it can."""
    metadata = compiled.metadata
    for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, name, 0):
            return f"{metadata.name} has {name}"
    if getattr(metadata, "num_ctas", 1) != 1:
        return f"{metadata.name} runs in clusters"
    kinds = list(compiled.src.signature.values())[:num_args]
    if unknown := [kind for kind in kinds if kind not in ("constexpr", *FORMATS) and str(kind)[:1] not in ("*", "t")]:
        return f"{metadata.name} takes {unknown}"
    descriptors = sum(str(kind).startswith("tensordesc") for kind in kinds)
    if descriptors != len(getattr(metadata, "tensordesc_meta", None) or ()):
        return f"{metadata.name} takes descriptors apart"
    return ""


@contextmanager
def rehearsal() -> Iterator[None]:
    """Context: code inside runs on meta tensors and launches nothing. At the end, threads start to compile its kernels.

    The first real launch of a kernel waits for its compilation. Without a rehearsal, Triton compiles kernels one after
    another, each at its first launch.
    """
    before, here.recorder = here.recorder, (mine := Rehearsal())
    try:
        yield
    finally:
        here.recorder = before
        if wanted := {key: job for key, job in mine.wanted.items() if key not in _ahead}:
            _compile(wanted)


def _compile(wanted: dict[tuple[Any, ...], tuple[Any, tuple[int, ...], list[Any], dict[str, Any]]]) -> None:
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    driver.active.get_current_device()  # creates the driver object here, because threads share it
    device = torch.cuda.current_device()
    pool = ThreadPoolExecutor(max(1, min(MOST_THREADS, cores)), "mxep-compile", _begin_thread, (device,))
    gemms = {key for key, job in wanted.items() if any(hasattr(x, "block_shape") for x in job[2])}
    for key in sorted(wanted, key=lambda key: key not in gemms):  # GEMMs first, because they take longest
        _ahead[key] = pool.submit(_compiled_kernel, *wanted[key])
    pool.shutdown(wait=False)


def _compiled_kernel(kernel: Any, grid: tuple[int, ...], args: list[Any], constants: dict[str, Any]) -> object:
    return kernel.warmup(*args, grid=grid, **constants).run  # `run` compiles the kernel's launcher as well


def _begin_thread(device: int) -> None:
    torch.cuda.set_device(device)
    keep_captures()  # because loading a kernel could otherwise end the capture of another thread


def is_profiled() -> bool:
    """True if a hook for Triton's launches is set, for example by a profiler."""
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks))


@functools.cache
def _reader(*kinds: type) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Generate the code of a function that reads the arguments of a launch. kinds: types of the arguments.

    The generated function takes the arguments and returns two tuples:
        facts: what Triton specializes kernels for. For a tensor: its dtype, and whether its address is a multiple of
            16. For an int: the type that can hold it, and whether it is 1 or a multiple of 16. For a `Length`: nothing.
        values: the arguments, with tensors replaced by their addresses.
    Generated code, because a loop over the arguments would take three times as long.
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
            values[-1] = f"p{i}"  # Triton's launcher handles an address faster than a tensor
        elif hasattr(kind, "for_triton"):
            facts.append(f"{x}.base.dtype, {x}.block_shape")
    arguments = ", ".join(f"x{i}" for i in range(len(kinds)))
    lines.append(f"return ({', '.join(facts)},), ({', '.join(values)},)")
    found: dict[str, Any] = {}
    exec(f"def read({arguments}):\n    " + "\n    ".join(lines), found)
    read: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] = found["read"]
    return read
