"""The aten ops an MXTensor knows: those that move, turn, slice or copy codes and scales together. No arithmetic.

Every handler takes (func, args, kwargs) as `__torch_dispatch__` gets them, args[0] being the MXTensor.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mxep.quant.tensor import MXTensor

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _map(mx: "MXTensor", fn: Callable[[Tensor], Tensor]) -> "MXTensor":
    index = None if mx.row_index is None else fn(mx.row_index)
    return mx.with_parts(fn(mx.qdata), fn(mx.scale), index)


def _same_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    return _map(args[0], lambda part: func(part, **kwargs))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    mx, size = args
    if tuple(size) != tuple(mx.shape):
        raise NotImplementedError(
            f"{func} of an MXTensor {tuple(mx.shape)} as {tuple(size)}: its blocks have no such shape; "
            "call .dequantize() first"
        )
    return _map(mx, aten.alias.default)


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    mx = args[0]
    if kwargs.get("dtype") not in (None, mx.dtype):
        raise NotImplementedError(f"{func} of an MXTensor to {kwargs['dtype']}: call .dequantize({kwargs['dtype']})")
    kwargs = {name: kwargs[name] for name in ("device", "non_blocking", "memory_format") if name in kwargs}
    return _map(mx, lambda part: func(part, **kwargs))


def _turned(mx: "MXTensor") -> "MXTensor":
    if mx.row_index is not None:
        raise NotImplementedError("an MXTensor with a row index cannot be turned: call .materialize() first")
    axis = -3 - mx.axis if isinstance(mx.axis, int) else mx.axis
    return mx.with_parts(mx.qdata.mT, mx.scale.mT, None, axis)


def _t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    return _turned(args[0])


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    mx: MXTensor = args[0]
    dims = args[1:]
    if sorted(dim % mx.ndim for dim in dims) != [mx.ndim - 2, mx.ndim - 1]:
        raise NotImplementedError(f"{func} of an MXTensor along {dims}: only its last two axes can be turned")
    return _turned(mx)


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    mx: MXTensor = args[0]
    dims = args[1]
    *rest, a, b = range(mx.ndim)
    if [dim % mx.ndim for dim in dims] != [*rest, b, a]:
        raise NotImplementedError(f"{func} of an MXTensor to {dims}: only its last two axes can be turned")
    return _turned(mx)


def _slice_arguments(
    dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, int | None, int | None, int]:
    return dim, start, end, step


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    """Rows anywhere; along a blocked axis whole blocks only (ValueError)."""
    mx: MXTensor = args[0]
    dim, start, end, step = _slice_arguments(*args[1:])
    dim = dim % mx.ndim - mx.ndim
    axes = (mx.axis,) if isinstance(mx.axis, int) else mx.axis
    if mx.row_index is not None and dim == -2:
        return mx.with_parts(mx.qdata, mx.scale, func(mx.row_index, 0, start, end, step))
    if dim not in axes:
        return mx.with_parts(func(mx.qdata, dim, start, end, step), func(mx.scale, dim, start, end, step), mx.row_index)
    first, last, _ = slice(start, end).indices(mx.shape[dim])
    if first % mx.block or last % mx.block or step != 1:
        raise ValueError(
            f"slice of an MXTensor along its blocked axis {dim}: got [{first}:{last}:{step}], "
            f"want multiples of its block, {mx.block}"
        )
    qdata = func(mx.qdata, dim, first, last)
    return mx.with_parts(qdata, func(mx.scale, dim, first // mx.block, last // mx.block), mx.row_index)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "MXTensor":
    mx: MXTensor = args[0]
    dim, index = args[1:]
    if dim % mx.ndim >= mx.ndim - 2:
        raise NotImplementedError(f"{func} of an MXTensor along {dim}: slice rows, or call .dequantize() first")
    return mx.with_parts(func(mx.qdata, dim, index), func(mx.scale, dim, index))


HANDLERS: dict[Any, Handler] = {
    aten.alias.default: _same_parts,
    aten.detach.default: _same_parts,
    aten.clone.default: _same_parts,
    aten._to_copy.default: _to_copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
}
