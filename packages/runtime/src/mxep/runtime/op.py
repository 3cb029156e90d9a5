"""`@op`: make one op of a plain-torch reference, a fake and a Triton launcher.

A call of an Op takes one of two ways:

    plain tensors, no gradient      call the launcher (CUDA) or the reference (CPU) directly
    torch.compile, fake tensors,    call the custom op `torch.ops.mxep.<name>`, which calls the launcher, the reference
    subclasses, modes, gradients    or the fake

The first way exists because a call of a custom op takes about 40 us of host time, longer than most of our kernels run.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .record import here

E4M3_CAPABILITY, ANY_GPU = (8, 9), (0, 0)
"""Values for `capability`. Triton's conversions to E4M3 need compute capability 8.9. An A100 has 8.0."""
_INDEX_DTYPES = (torch.int32,)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Op:
    """The result of `@op`. Call it with the op's arguments by position.

    Attributes:
        reference: the plain-torch function that defines the op.
        opdef: the custom op of `torch.library`.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        launcher: str | None,
        mutates_args: Sequence[str],
        index_dtypes: tuple[torch.dtype, ...],
        capability: tuple[int, int],
    ) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.opdef = torch.library.custom_op(name, reference, mutates_args=mutates_args)
        self.opdef.register_fake(fake)
        if launcher is not None:
            self.opdef.register_kernel("cuda")(self._launch)
        self._overload = self.opdef._opoverload
        self._arguments = self._overload._schema.arguments
        self._tensors = [i for i, a in enumerate(self._arguments) if "Tensor" in str(a.type)]
        assert not any(a.has_default_value() for a in self._arguments), "torch leaves out what has its default"
        self._written = {i for i in self._tensors if self._arguments[i].alias_info}
        self._index_dtypes, self._capability = index_dtypes, capability
        self._name = launcher
        self._launcher: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or mode_listens():
            return self._overload(*args)
        on_cuda, graded = False, torch.is_grad_enabled()
        for i in self._tensors:
            x = args[i]
            if x is None:
                continue
            kind = type(x)
            if (kind is not Tensor and kind is not Parameter) or (graded and x.requires_grad):
                return self._overload(*args)
            on_cuda = on_cuda or x.is_cuda
        if self._name is None or not (on_cuda or _is_rehearsed()):
            return self.reference(*args)
        for i in self._written:
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])
        return self._launch(*args)

    def _launch(self, *args: Any) -> Any:
        """Make 1-D tensors (row_index, offs, bias, ...) contiguous and call the launcher."""
        index = None
        for i in self._tensors:
            x = args[i]
            if x is None:
                continue
            place = x.get_device()
            if index is None:
                index = place
            elif place != index:  # kernels cannot check this, because they get only addresses
                raise ValueError(f"{self._arguments[i].name}: got device {x.device}, want one for all tensors")
            if x.ndim == 1 and i not in self._written:
                if x.dtype in _INTEGERS and x.dtype not in self._index_dtypes:
                    wanted = " or ".join(map(str, self._index_dtypes))
                    raise ValueError(f"{self._arguments[i].name}: got {x.dtype}, want {wanted}")
                if not x.is_contiguous():
                    args = (*args[:i], x.contiguous(), *args[i + 1 :])
        assert index is not None
        if _is_rehearsed():  # the tensors are on the meta device
            index = torch.cuda.current_device()
        if not runs_on(index, self._capability):
            _log_that_it_is_slow(index)
            return self.reference(*args)
        if self._launcher is None:
            assert self._name is not None
            module, function = self._name.split(":")
            self._launcher = getattr(importlib.import_module(module), function)
        if index == torch._C._cuda_getDevice():
            return self._launcher(*args)
        with torch.cuda.device(index):
            return self._launcher(*args)


def op(
    name: str,
    *,
    fake: Callable[..., Any],
    launcher: str | None = None,
    mutates_args: Sequence[str] = (),
    index_dtypes: tuple[torch.dtype, ...] = _INDEX_DTYPES,
    capability: tuple[int, int] = E4M3_CAPABILITY,
) -> Callable[[Callable[..., Any]], Op]:
    """Decorate a plain-torch function, which becomes the reference of an :class:`Op`.

    name: ``"mxep::..."``.
    fake: function of the op's arguments that returns uninitialized results.
    launcher: ``"module:function"``, imported (with Triton) at the first call on CUDA. None: the reference runs on CUDA,
        too.
    mutates_args: names of the arguments that the op writes.
    index_dtypes: dtypes allowed for 1-D integer tensors. On CUDA others raise ValueError.
    capability: lowest compute capability on which the launcher runs. On older GPUs the reference runs instead.
    """
    return lambda reference: Op(name, reference, fake, launcher, mutates_args, index_dtypes, capability)


def _is_rehearsed() -> bool:
    """True inside `launch.rehearsal`, where launchers get meta tensors."""
    return here.recorder is not None and here.recorder.rehearses


@functools.cache
def runs_on(index: int, capability: tuple[int, int]) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= capability


@functools.cache
def _log_that_it_is_slow(index: int) -> None:
    name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    logging.getLogger(__package__).warning(
        "cuda:%d (%s, capability %d.%d): no E4M3 conversions in Triton before 8.9, so MX ops run as plain torch",
        index, name, major, minor,
    )  # fmt: skip


def check_no_tangent(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor is a dual tensor of `torch.autograd.forward_ad`.

    Kernel launches would silently lose its tangent.
    """
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "got a dual tensor of forward-mode AD, want a plain one: mxep differentiates backward: torch.autograd.grad"
        )


def check_no_transform() -> None:
    """Raise NotImplementedError inside a transform of torch.func, because transforms cannot see kernel launches."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "got a call within torch.func (vmap, grad, jvp, ...), want one outside: mxep differentiates backward: "
            "torch.autograd.grad"
        )


def mode_listens() -> bool:
    """True if ops must go through torch's dispatcher, because an active dispatch mode must see them."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not getattr(_get_current_dispatch_mode_stack()[-1], "wants_torch_ops_alone", False)
