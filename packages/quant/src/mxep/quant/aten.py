"""The aten ops of an MXTensor. They move, transpose, slice, join or copy qdata and scales together, and do no
arithmetic.

Handlers take (func, args, kwargs) as `__torch_dispatch__` gets them. args[0] is the MXTensor, unless stated.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxep.quant.formats import format_of
from mxep.quant.ops import bytewise

aten = torch.ops.aten
MX = Any
"""An MXTensor. Its module imports this one."""
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _map(mx: MX, fn: Callable[[Tensor], Tensor]) -> MX:
    index = None if mx.row_index is None else fn(mx.row_index)
    return mx.with_parts(fn(mx.qdata), fn(mx.scale), index)


def _same_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    return _map(args[0], lambda part: func(part, **kwargs))


def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    mx = args[0]
    return all(part.is_pinned() for part in (mx.qdata, mx.scale, mx.row_index) if part is not None)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy between MXTensors that agree in all but their bytes. A plain tensor takes the values."""
    to, source = args[:2]
    if not hasattr(to, "qdata"):
        return func(to, source.dequantize(), *args[2:], **kwargs)
    if not hasattr(source, "qdata"):
        raise NotImplementedError(f"{func} of a plain tensor into an MXTensor: quantize it first")
    kinds = [(mx.shape, mx.format, mx.axis, mx.block_size, mx.row_index is None, mx.qdata.shape) for mx in (to, source)]
    if kinds[0] != kinds[1]:
        raise NotImplementedError(f"{func} into {to!r} from {source!r}: want shape, format, axis, block and rows alike")
    for name in to.__tensor_flatten__()[0]:
        func(getattr(to, name), getattr(source, name), *args[2:], **kwargs)
    return to


def _isnan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A plain tensor, computed from the values. torch's anomaly mode asks for it."""
    result: Tensor = func(args[0].dequantize(), **kwargs)
    return result


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    mx, size = args
    if -1 in size and mx.numel():
        known = math.prod(n for n in size if n != -1)
        size = [mx.numel() // known if n == -1 else n for n in size]
    if tuple(size) == tuple(mx.shape):
        return _map(mx, aten.alias.default)
    if mx.row_index is not None or mx.axis != -1 or len(size) < 2 or size[-1] != mx.shape[-1]:
        raise NotImplementedError(
            f"{func} of an MXTensor {tuple(mx.shape)} as {tuple(size)}: its blocks have no such shape; "
            "call .dequantize() first"
        )
    bytes_of_row = mx.qdata.shape[-1]
    return mx.with_parts(mx.qdata.view(*size[:-1], bytes_of_row), mx.scale.reshape(*size[:-1], mx.scale.shape[-1]))


def _in_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    """qdata, scales and index in the requested memory, copied or of any value."""
    mx, dtype = args[0], kwargs.get("dtype")
    if dtype not in (None, mx.dtype):
        raise NotImplementedError(f"{func} of an MXTensor as {dtype}: want {mx.dtype}; or call .dequantize({dtype})")
    names = {"device", "non_blocking", "pin_memory", "memory_format"} & kwargs.keys()
    return _map(mx, lambda part: func(part, **{name: kwargs[name] for name in names}))


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    """Transpose the last two axes: t, transpose(i, j) or permute(order)."""
    mx, *dims = args
    *rest, a, b = order = [*range(mx.ndim)]
    if func is aten.permute.default:
        order = [dim % mx.ndim for dim in dims[0]]
    else:
        i, j = (dim % mx.ndim for dim in dims or (-2, -1))
        order[i], order[j] = j, i
    if order != [*rest, b, a]:
        raise NotImplementedError(f"{func} of an MXTensor along {dims}: only its last two axes can be transposed")
    if mx.row_index is not None:
        raise NotImplementedError("an MXTensor with a row index cannot be transposed: call .materialize() first")
    axis = -3 - mx.axis if isinstance(mx.axis, int) else mx.axis
    return mx.with_parts(mx.qdata.mT, mx.scale.mT, None, axis)


def _blocked(mx: MX) -> tuple[int, ...]:
    """Its blocked axes."""
    return (mx.axis,) if isinstance(mx.axis, int) else mx.axis


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    """Slice rows anywhere. A blocked axis takes whole blocks only (ValueError)."""
    mx = args[0]
    given: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
    dim, start, end, step = given
    dim = dim % mx.ndim - mx.ndim
    if mx.row_index is not None and dim == -2:
        return mx.with_parts(mx.qdata, mx.scale, func(mx.row_index, 0, start, end, step))
    if dim not in _blocked(mx):
        return mx.with_parts(func(mx.qdata, dim, start, end, step), func(mx.scale, dim, start, end, step), mx.row_index)
    first, last, _ = slice(start, end).indices(mx.shape[dim])
    if first % mx.block_size or last % mx.block_size or step != 1:
        raise ValueError(
            f"slice of an MXTensor along its blocked axis {dim}: got [{first}:{last}:{step}], "
            f"want multiples of its block, {mx.block_size}"
        )
    per_byte = format_of(mx.qdata.dtype).elements_per_byte
    qdata = func(mx.qdata, dim, first // per_byte, last // per_byte)
    return mx.with_parts(qdata, func(mx.scale, dim, first // mx.block_size, last // mx.block_size), mx.row_index)


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MX]:
    """Consecutive slices, of one size or of the sizes given."""
    mx, sizes, dim = args if len(args) == 3 else (*args, 0)
    length = mx.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - first) for first in range(0, length, sizes)]
    ends = list(itertools.accumulate(sizes))
    return [_slice(aten.slice.Tensor, (mx, dim, end - size, end), {}) for size, end in zip(sizes, ends)]


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    """Join MXTensors of one format, axis, block and dtype along any axis. A row index is applied."""
    tensors, dim = args[0], (args[1] if len(args) > 1 else 0)
    kinds = {(mx.format, mx.axis, mx.block_size, mx.dtype, mx.ndim) if hasattr(mx, "qdata") else None for mx in tensors}
    if len(kinds) > 1 or None in kinds:
        got = ", ".join(repr(mx) if hasattr(mx, "qdata") else f"a {type(mx).__name__}" for mx in tensors)
        raise NotImplementedError(f"{func} of {got}: want MXTensors of one format, axis, block and dtype")
    dense = [mx.materialize() if mx.row_index is not None else mx for mx in tensors]
    parts = [[part.view(torch.uint8) for part in same] for same in zip(*((mx.qdata, mx.scale) for mx in dense))]
    qdata, scale = (func(same, dim) for same in parts)
    first = dense[0]
    return first.with_parts(qdata.view(first.qdata.dtype), scale.view(first.scale.dtype))


def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    mx, dim, index = args
    dim = dim % mx.ndim - mx.ndim
    if dim in _blocked(mx):
        raise NotImplementedError(f"{func} of an MXTensor along its blocked axis {dim}: call .dequantize() first")
    if mx.row_index is not None and dim == -2:
        return mx.with_parts(mx.qdata, mx.scale, func(mx.row_index, 0, index))
    picked = [bytewise(lambda part: func(part, dim, index), part) for part in (mx.qdata, mx.scale)]
    return mx.with_parts(*picked, mx.row_index)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MX:
    mx = args[0]
    dim, index = args[1:]
    if dim % mx.ndim >= mx.ndim - 2:
        raise NotImplementedError(f"{func} of an MXTensor along {dim}: slice rows, or call .dequantize() first")
    return mx.with_parts(func(mx.qdata, dim, index), func(mx.scale, dim, index))


HANDLERS: dict[Any, Handler] = {
    aten.alias.default: _same_parts,
    aten.detach.default: _same_parts,
    aten.clone.default: _same_parts,
    aten._to_copy.default: _in_memory,
    aten.empty_like.default: _in_memory,
    aten.is_pinned.default: _is_pinned,
    aten.isnan.default: _isnan,
    aten._pin_memory.default: _same_parts,
    aten.copy_.default: _copy_,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.index_select.default: _index_select,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
}
