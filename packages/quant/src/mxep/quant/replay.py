"""`@replayed`: a function of tensors whose allocations and launches are written down once, and then done without it.

The Python between two launches costs the host more than the launches. It does the same at every call with tensors of
the same shapes, so the third such call and all later ones run straight-line code made from what the second one did:

    s3 = empty((256, 2048), dtype=..., device=...)
    p3 = s3.data_ptr()
    run0(264, 1, 1, stream, function0, metadata0, None, None, None, p0, p3, 256, 2048, *constants0)
    del s0

Addresses are taken anew at each call, so it is no CUDA graph: memory comes from torch's allocator and goes back after
its last use, weights may move, calls may overlap, and a graph can be captured of it.
"""

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mxep.quant.recorder import recorder
from mxep.quant.tape import MXParts, Recorder, Tape, Tensors
from mxep.quant.tensor import MXTensor

__all__ = ["MXParts", "Replayed", "Tensors", "each_time", "replayed"]
MOST_TAPES = 256
"""Of a function."""
LEAST_DEVICE = 0
"""Index of the first device that replays; -1 is the CPU."""


class Replayed:
    """What :func:`replayed` makes.

    Attributes:
        function: the function itself. replays: how many calls ran without it.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.replays = 0
        self._tapes: dict[Hashable, Tape | str | None] = {}
        """By what decides the course; None of what was seen once, and why not of what cannot be replayed."""
        self._lock = threading.Lock()

    @property
    def refused(self) -> list[str]:
        """Why not, of the kinds of calls that cannot be replayed."""
        return [tape for tape in self._tapes.values() if isinstance(tape, str)]

    def __call__(self, tensors: Tensors, *static: Any) -> Tensors:
        if torch.compiler.is_compiling():
            return self.direct(tensors, *static)
        key, flat = _taken_apart(tensors, static)
        if key is None:
            return self.direct(tensors, *static)
        tape = self._tapes.get(key, self)
        if callable(tape) and tape is not self:
            tensors.clear()
            self.replays += 1
            if not torch._C._is_any_autocast_enabled():
                return tape(flat)
            with torch._C._DisableAutocast():  # what it casts was written down
                return tape(flat)
        if tape is not None:
            if tape is self:
                self._keep(key, None)
            flat.clear()
            return self.direct(tensors, *static)
        recording = Recorder(flat, next(x.device for x in flat if x is not None))
        flat.clear()
        with recording:
            results = self.direct(tensors, *static)
        if not recording.compiled:  # else the next call is written down
            self._keep(key, recording.tape(results) or recording.failed)
        return results

    def _keep(self, key: Hashable, tape: Tape | str | None) -> None:
        with self._lock:
            if key not in self._tapes and len(self._tapes) >= MOST_TAPES:
                # Shapes that came once go before those that come again.
                once = (other for other, kept in self._tapes.items() if kept is None)
                del self._tapes[next(once, next(iter(self._tapes)))]
            self._tapes[key] = tape

    def direct(self, tensors: Tensors, *static: Any) -> Tensors:
        """The function itself, called as it would be replayed."""
        whole = [x.join() if type(x) is MXParts else x for x in tensors]
        tensors.clear()
        return [MXParts.of(x) if type(x) is MXTensor else x for x in self.function(whole, *static)]


def replayed(function: Callable[..., Tensors]) -> Replayed:
    """Replay a function (tensors, *static) -> tensors on CUDA; elsewhere it is called as ever.

    tensors, and what it returns: lists of tensors, MXTensors and None; it returns what it made, views of that, or what
    it got. It owns the list, and may empty it so that memory goes early; a replay does. static: hashable; with shapes,
    strides and dtypes it decides all that the function does. Its callers give and get an MXTensor as `MXParts`.

    It must not read from the device, nor decide by anything but its arguments. State it may use by :func:`each_time`.
    Not replayed: CPU tensors, other subclasses, with gradients enabled, under torch.compile or a dispatch mode, when a
    profiler hooks Triton's launches, and functions that do what cannot be written down.
    """
    return Replayed(function)


def each_time(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), a tensor that a replay gets by calling it again: for what others hand out. args: no tensors."""
    mode = None if torch.compiler.is_compiling() else recorder()
    return function(*args) if mode is None else mode.provide(function, args)


def _taken_apart(tensors: Tensors, static: tuple[Any, ...]) -> tuple[Hashable | None, Tensors]:
    """What decides the function's course, None where it is not replayed; and the plain tensors."""
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return None, []
    if torch._C._is_any_autocast_enabled():
        static = *static, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    flat: Tensors = []
    for x in tensors:
        if type(x) is MXParts:
            flat += x[:3]
            static = *static, len(flat), x[3:]
        else:
            flat.append(x)
    read = _reader(*map(type, flat))
    facts = None if read is None else read(*flat)
    if facts is None or facts[0] != torch._C._cuda_getDevice() or _launch().is_profiled():
        return None, []
    return (static, torch.is_inference_mode_enabled(), facts), flat


@functools.cache
def _reader(*kinds: type) -> Callable[..., tuple[Hashable, ...] | None] | None:
    """A function of tensors of these types: their device, and what else decides; None unless they are on one GPU."""
    names = [f"x{i}" for i, kind in enumerate(kinds) if kind is not type(None)]
    if not names or {*kinds} - {Tensor, Parameter, type(None)}:
        return None
    lines = [f"here = {names[0]}.get_device()"]
    others = " or ".join([f"here < {LEAST_DEVICE}", *(f"{name}.get_device() != here" for name in names[1:])])
    lines += [f"if {others}:", "    return None"]
    lines += [f"p_{name} = {name}.data_ptr()" for name in names]
    lines += [f"aligned = not ({' | '.join(f'p_{name}' for name in names)}) & 15"]
    lines += [f"aligned = aligned or ({', '.join(f'p_{name} & 15' for name in names)},)"]
    facts = (f"{name}.shape, {name}.is_contiguous() or {name}.stride(), {name}.dtype" for name in names)
    lines += [f"return here, {tuple(kind is type(None) for kind in kinds)}, aligned, {', '.join(facts)}"]
    found: dict[str, Any] = {}
    exec(f"def read({', '.join(f'x{i}' for i in range(len(kinds)))}):\n    " + "\n    ".join(lines), found)
    read: Callable[..., tuple[Hashable, ...] | None] = found["read"]
    return read


@functools.cache
def _launch() -> Any:
    from mxep.quant import launch  # imports Triton: only where there is CUDA

    return launch
