"""`@op`: a plain-torch reference, its fake and its Triton launcher as one custom op.

On plain eager tensors a call goes to the reference (CPU) or the launcher (CUDA) directly: a custom op costs the host
about 40 us. In graphs, with fake tensors, subclasses or gradients it goes through `torch.ops.mxep`.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .modes import mode_listens


class Op:
    """What `@op` makes. It takes the op's arguments by position.

    Attributes:
        reference: the plain-torch function. opdef: the op of `torch.library`.
    """

    def __init__(
        self, name: str, fake: Callable[..., Any], launcher: str, mutates_args: Sequence[str], reference: Any
    ) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.opdef = torch.library.custom_op(name, reference, mutates_args=mutates_args)
        self.opdef.register_fake(fake)
        self.opdef.register_kernel("cuda")(self._launch)
        self._name = launcher
        self._launcher: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or mode_listens():
            return self.opdef(*args)
        tensors = _tensors_of(args)
        for x in tensors:
            if type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled()):
                return self.opdef(*args)
        return self._launch(*args) if tensors[0].is_cuda else self.reference(*args)

    def _launch(self, *args: Any) -> Any:
        if self._launcher is None:
            module, function = self._name.split(":")
            self._launcher = getattr(importlib.import_module(f"{__package__}.kernels.{module}"), function)
        first, *others = _tensors_of(args)
        index = first.get_device()
        for x in others:
            if x.get_device() != index:  # kernels get addresses, and nobody looks whose
                raise ValueError(f"{self.opdef._name}: got tensors on {first.device} and {x.device}, wanted one device")
        if index == torch._C._cuda_getDevice():
            return self._launcher(*args)
        with torch.cuda.device(first.device):
            return self._launcher(*args)


def _tensors_of(args: tuple[Any, ...]) -> list[Tensor]:
    flat = (x for arg in args for x in (arg if type(arg) is list else (arg,)))
    return [x for x in flat if isinstance(x, Tensor)]


def op(
    name: str, fake: Callable[..., Any], launcher: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Op]:
    """Make a function of tensors, its reference, an :class:`Op`.

    name: ``"mxep::..."``. fake: the shapes of its results. launcher: ``"module:function"`` of `kernels`, imported (with
    Triton) at the first call on CUDA. The first argument, or its first element, is a tensor and says where to run.
    """
    return lambda reference: Op(name, fake, launcher, mutates_args, reference)
