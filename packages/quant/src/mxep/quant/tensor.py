"""MXTensor: quantized elements ("qdata") and scales in one tensor, for autograd, torch.compile and checkpoints.

Its outer dtype is that of the tensor before quantization (bf16 by default), so gradients have that dtype. Autograd
would cast the gradient of a raw fp8 tensor to fp8. An MXTensor holds two or three plain tensors:

    qdata      fp8, 1 byte per element         (..., N, K)
               E2M1, 2 elements per byte       (..., N, K/2) for axis -1, (..., N/2, K) for axis -2
    scale      e8m0, 1 byte per block          (..., N, K/block_size) for axis -1, (..., N/block_size, K) for axis
                                               -2, (..., N/block_size, K/block_size) for axis (-2, -1)
    row_index  (R,) int32 or None              row r of the MXTensor is row row_index[r] of qdata and scale;
                                               -1 is a row of zeros

The transpose of an MXTensor holds transposed views of qdata and scale, with axes -1 and -2 swapped. `quantize` and
`requantize` return qdata contiguous along the blocked axis: for axis -2, qdata is the `.mT` view of contiguous
(..., K, N) bytes. scale may have any strides.

A row index gives rows another order without a copy. For example, received rows stay in receive slots, qdata (S, D) and
scale (S, D/block_size), and the MXTensor (R, D) has them in expert order. qdata and scale may be strided views of one
buffer. Example: stored rows a, b with row_index [1, -1, 1] are an MXTensor with rows b, 0, b.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import canonicalize_dim
from torch.autograd.function import FunctionCtx

from mxep.quant import ops
from mxep.quant.formats import BLOCK, E2M1, SCALE_DTYPE, MXFormat, format_of
from mxep.quant.ops import bytewise
from mxep.quant.shapes import BLOCKS_2D, VALUE_DTYPES, Axis, check_axis, check_block, check_parts, shape_of
from mxep.runtime.bundle import register_parts, tensors_in
from mxep.runtime.op import check_no_tangent


class MXParts(NamedTuple):
    """The fields of an MXTensor without the tensor subclass, which costs the host as much time as a kernel launch."""

    qdata: Tensor
    scale: Tensor
    row_index: Tensor | None
    axis: Axis
    block_size: int
    dtype: torch.dtype

    @staticmethod
    def of(x: "MXTensor") -> "MXParts":
        return MXParts(x.qdata, x.scale, x.row_index, x.axis, x.block_size, x.dtype)

    def join(self) -> "MXTensor":
        return MXTensor(*self, trusted=True)


class MXTensor(Tensor):
    """An 8-bit or 4-bit tensor with block scales, (..., N, K). `quantize` and `from_qdata_and_scales` create one.

    Attributes:
        qdata, scale, row_index: the plain tensors of the module's docstring.
        axis: the blocked axis, -1 or -2, or (-2, -1) for square 2-D blocks.
        block_size: elements per scale along each blocked axis. For row-scaled FP8 it is the length of the axis.
        dtype: the outer dtype.

    The constructor checks its arguments (ValueError), unless they are `trusted`.

    MXTensor implements the ops behind detach, clone, transpose, slices, select, index_select, split, cat, view, copy_,
    pin_memory, to(device) and torch.save. Other aten ops raise NotImplementedError.
    """

    qdata: Tensor
    scale: Tensor
    row_index: Tensor | None
    axis: Axis
    block_size: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type["MXTensor"],
        qdata: Tensor,
        scale: Tensor,
        row_index: Tensor | None,
        axis: Axis,
        block_size: int,
        orig_dtype: torch.dtype,
        *,
        trusted: bool = False,
    ) -> "MXTensor":
        if not trusted:
            check_parts(qdata, scale, row_index, axis, block_size, orig_dtype)
        shape, strides = qdata.shape, qdata.stride()
        if qdata.dtype == E2M1.dtype:
            shape = shape_of(qdata, axis)
            strides = tuple(n if i - qdata.ndim == axis else 2 * n for i, n in enumerate(strides))
        if row_index is not None:
            shape, strides = torch.Size((row_index.shape[0], shape[1])), (shape[1], 1)
        self = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=orig_dtype, device=qdata.device)
        self.qdata, self.scale, self.row_index, self.axis, self.block_size = qdata, scale, row_index, axis, block_size
        return self

    @staticmethod
    def from_qdata_and_scales(
        qdata: Tensor,
        scales: Tensor,
        orig_dtype: torch.dtype = torch.bfloat16,
        *,
        axis: Axis = -1,
        block_size: int | None = BLOCK,
        row_index: Tensor | None = None,
    ) -> "MXTensor":
        """Wrap given qdata and scales, without a copy.

        qdata: (..., N, K) float8_e4m3fn or float8_e5m2, any strides. For E2M1: float4_e2m1fn_x2 with half that length
            along the blocked axis.
        scales: float8_e8m0fnu, or its bytes as uint8. Shape (..., N, K) with each blocked axis divided by `block_size`.
        orig_dtype: bf16, fp32 or fp16, the outer dtype and the dtype of gradients.
        axis, block_size: as in `quantize`.
        row_index: (R,) int32 indices of rows of qdata (S, K); -1 gives a row of zeros. Needs axis -1.

        Raises ValueError for other dtypes, shapes, axes or devices.
        """
        format_of(qdata.dtype)
        axis = check_axis(axis, qdata)
        block_size = check_block(block_size, axis, shape_of(qdata, axis))
        if scales.dtype == torch.uint8:
            scales = scales.view(SCALE_DTYPE)
        return MXTensor(qdata, scales, row_index, axis, block_size, orig_dtype)

    @property
    def format(self) -> MXFormat:
        """The element format. Inside torch.compile use `format_of(mx.qdata.dtype)` instead."""
        return format_of(self.qdata.dtype)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns per scale, as a tuple (rows, columns)."""
        return 1 if self.axis == -1 else self.block_size, 1 if self.axis == -2 else self.block_size

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a contiguous tensor (..., N, K), with the row index applied.

        dtype: bf16, fp32 or fp16. None: the outer dtype. Raises ValueError for others.
        A value is q * 2**(scale - 127), or NaN for scale 255. In fp32 it is exact, or Inf past fp32's range. For bf16
        and fp16 the fp32 value is rounded once.
        Differentiable: the gradient is passed on unchanged, cast to the outer dtype.
        """
        dtype = self.dtype if dtype is None else dtype
        if dtype not in VALUE_DTYPES:
            raise ValueError(f"dequantize: got dtype {dtype}, want one of {VALUE_DTYPES}")
        values: Tensor = _Dequantize.apply(self, dtype)  # type: ignore[no-untyped-call]
        return values

    def materialize(self) -> "MXTensor":
        """Apply the row index and make qdata contiguous along the blocked axis (for 2-D blocks: along rows).

        Returns `self` if nothing has to be copied. A row with index -1 gets qdata 0 and scale 0.
        Differentiable (straight through).
        """
        if self.axis == -2:
            return self._transposed().materialize()._transposed()
        dense_scale = self.scale.is_contiguous() or self.scale.mT.is_contiguous()
        if self.row_index is None and self.qdata.is_contiguous() and dense_scale:
            return self
        # The kernel needs one byte per element.
        materialize = ops.materialize.reference if self.qdata.dtype == E2M1.dtype else ops.materialize
        qdata, scale = materialize(self.qdata, self.scale, self.row_index)
        return wrap(self, MXParts(qdata, scale, None, self.axis, self.block_size, self.dtype))

    def along(self, axis: int) -> "MXTensor":
        """View 2-D blocks as blocks along one axis (-1 or -2). qdata are shared; scales are repeated.

        So one quantization of a weight W (N, K) serves both W (blocks along K) and W^T (blocks along N). qdata keep
        their strides: `materialize` makes them contiguous along the blocked axis. Differentiable (straight through).
        A tensor that is already blocked along `axis` is returned itself. Raises ValueError if it has no 2-D blocks.
        """
        axis_ = check_axis(axis, self.qdata)
        if self.axis == axis_:
            return self
        if self.axis != BLOCKS_2D or axis_ == BLOCKS_2D:
            raise ValueError(f"along: got blocks along {self.axis}, want 2-D blocks or axis {axis}: requantize it")
        if axis_ == -2:
            return self._transposed().along(-1)._transposed()
        scale = ops.expand_scale(self.scale, self.block_size)
        return wrap(self, MXParts(self.qdata, scale, None, -1, self.block_size, self.dtype))

    def _transposed(self) -> "MXTensor":
        return self.transpose(-2, -1)  # type: ignore[return-value]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [f"shape={tuple(self.shape)}", str(self.format), f"axis={self.axis}", f"block_size={self.block_size}"]
        if self.row_index is not None:
            parts.append(f"rows of {self.qdata.shape[0]}")
        parts += [f"dtype={self.dtype}", f"device={self.device}"]
        if self.requires_grad:
            parts.append("requires_grad=True")
        return f"MXTensor({', '.join(parts)})"

    def with_parts(
        self, qdata: Tensor, scale: Tensor, row_index: Tensor | None = None, axis: Axis | None = None
    ) -> "MXTensor":
        """New MXTensor of these parts, with the block size and outer dtype of `self`. No autograd, no checks.

        axis: None for the axis of `self`.
        """
        axis = self.axis if axis is None else axis
        return MXTensor(qdata, scale, row_index, axis, self.block_size, self.dtype, trusted=True)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Axis, int, torch.dtype]]:
        names = ["qdata", "scale"] if self.row_index is None else ["qdata", "scale", "row_index"]
        return names, (self.axis, self.block_size, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Axis, int, torch.dtype], outer_size: object, outer_stride: object
    ) -> "MXTensor":
        return MXTensor(inner["qdata"], inner["scale"], inner.get("row_index"), *context, trusted=True)

    def __coerce_tangent_metadata__(self) -> Tensor:
        # AOTAutograd needs an output's gradient to have the output's type. The gradient of an MXTensor is plain.
        raise NotImplementedError(
            "a compiled graph cannot return an MXTensor that requires grad: dequantize inside, or return mx.detach(); "
            "at grouped_mm, which breaks the graph for one, give it the plain tensor"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (handler := HANDLERS.get(func)) is not None:
            return handler(func, *args, **(kwargs or {}))
        # Composite functions such as `mT` are not decomposed yet if they are called inside a torch.library op.
        result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented:
            raise NotImplementedError(f"MXTensor does not implement {func}: call .dequantize() first")
        return result

    def share_memory_(self) -> "MXTensor":
        """Move qdata, scale and row_index to memory shared between processes, as `Tensor.share_memory_` does."""
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(getattr(self, name).is_shared() for name in self.__tensor_flatten__()[0])

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., "MXTensor"], tuple[Any, ...]]:
        # Saved as bytes, because torch cannot load its own pickles of 8-bit floats.
        parts = self.qdata.view(torch.uint8), self.scale.view(torch.uint8), self.row_index
        how = self.qdata.dtype, self.axis, self.block_size, self.dtype
        return rebuild_mxtensor, (*parts, *how, self.requires_grad, isinstance(self, torch.nn.Parameter))


def rebuild_mxtensor(
    raw: Tensor, scale: Tensor, row_index: Tensor | None, dtype: torch.dtype, axis: Axis, block_size: int,
    orig_dtype: torch.dtype, requires_grad: bool, is_parameter: bool,
) -> MXTensor:  # fmt: skip
    """Rebuild a saved MXTensor, called by `torch.load(weights_only=True)`. Raises ValueError for invalid parts."""
    qdata = raw.view(dtype)
    mx = MXTensor.from_qdata_and_scales(qdata, scale, orig_dtype, axis=axis, block_size=block_size, row_index=row_index)
    if is_parameter:
        return torch.nn.Parameter(mx, requires_grad)  # type: ignore[return-value]
    return mx.requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals([rebuild_mxtensor])


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mx: MXTensor, dtype: torch.dtype) -> Tensor:
        ctx.outer_dtype = mx.dtype
        values: Tensor
        if mx.qdata.dtype == E2M1.dtype and mx.axis == -2:  # two rows share a byte
            values = ops.dequantize(mx.qdata.mT, mx.scale.mT, 1, mx.block_size, None, dtype).mT.contiguous()
        else:
            values = ops.dequantize(mx.qdata, mx.scale, *mx.block_shape, mx.row_index, dtype)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.outer_dtype), None


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, source: Tensor, *parts: Any) -> MXTensor:
        return MXTensor(*parts, trusted=True)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *[None] * 6


def wrap(source: Tensor, parts: MXParts) -> MXTensor:
    """MXTensor of `parts` with straight-through autograd: its gradient is passed to `source` unchanged.

    source: tensor of the MXTensor's shape.
    """
    if not (source.requires_grad and torch.is_grad_enabled()) and not torch.compiler.is_compiling():
        check_no_tangent(source)
        return parts.join()
    mx: MXTensor = _Wrap.apply(source, *parts)  # type: ignore[no-untyped-call]
    return mx


register_parts(MXParts, MXTensor)


aten = torch.ops.aten


def _each(mx: MXTensor, function: Callable[[Tensor], Tensor]) -> MXTensor:
    index = None if mx.row_index is None else function(mx.row_index)
    return mx.with_parts(function(mx.qdata), function(mx.scale), index)


def _same_parts(func: Any, mx: MXTensor, *_: Any, **kwargs: Any) -> MXTensor:
    return _each(mx, lambda part: func(part, **kwargs))


def _copy_(func: Any, to: Tensor, source: Tensor, *how: Any, **kwargs: Any) -> Tensor:
    """Copy bytes into an MXTensor of the same format, axis and shapes, or dequantized values into a plain tensor."""
    if not isinstance(to, MXTensor):
        copied: Tensor = func(to, source.dequantize(), *how, **kwargs)
        return copied
    if not isinstance(source, MXTensor):
        raise NotImplementedError(f"{func} of a plain tensor into an MXTensor: quantize it first")
    kinds = [(mx.shape, mx.format, mx.axis, mx.block_size, mx.row_index is None, mx.qdata.shape) for mx in (to, source)]
    if kinds[0] != kinds[1]:
        raise NotImplementedError(f"{func} into {to!r} from {source!r}: want shape, format, axis, block and rows alike")
    for name in to.__tensor_flatten__()[0]:
        func(getattr(to, name), getattr(source, name), *how, **kwargs)
    return to


def _view(func: Any, mx: MXTensor, size: Sequence[int]) -> MXTensor:
    if -1 in size and mx.numel():
        known = math.prod(n for n in size if n != -1)
        size = [mx.numel() // known if n == -1 else n for n in size]
    if tuple(size) == tuple(mx.shape):
        return _each(mx, aten.alias.default)
    if mx.row_index is not None or mx.axis != -1 or len(size) < 2 or size[-1] != mx.shape[-1]:
        raise NotImplementedError(
            f"{func} of an MXTensor {tuple(mx.shape)} as {tuple(size)}: its blocks have no such shape; "
            "call .dequantize() first"
        )
    qdata = mx.qdata.view(*size[:-1], mx.qdata.shape[-1])
    return mx.with_parts(qdata, mx.scale.reshape(*size[:-1], mx.scale.shape[-1]))


def _in_memory(func: Any, mx: MXTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> MXTensor:
    """Copy qdata, scale and row_index to the requested device or memory. `empty_like` only allocates them there."""
    if dtype not in (None, mx.dtype):
        raise NotImplementedError(f"{func} of an MXTensor as {dtype}: want {mx.dtype}; or call .dequantize({dtype})")
    names = {"device", "non_blocking", "pin_memory", "memory_format"} & kwargs.keys()
    how = {name: kwargs[name] for name in names}
    return _each(mx, lambda part: bytewise(lambda bytes_: func(bytes_, **how), part))


def _from_end(mx: MXTensor, dim: int) -> int:
    """`dim` as a negative number. Raises torch's IndexError if mx has no such axis."""
    return canonicalize_dim(mx.ndim, dim) - mx.ndim


def _transpose(func: Any, mx: MXTensor, *dims: Any) -> MXTensor:
    """t, transpose(i, j) and permute(order), if they swap only the last two axes or nothing."""
    *rest, a, b = order = [*range(mx.ndim)]
    if func is aten.permute.default:
        order = [order[_from_end(mx, dim)] for dim in dims[0]]
    else:
        i, j = (_from_end(mx, dim) for dim in dims or (-2, -1))
        order[i], order[j] = order[j], order[i]
    if order == [*rest, a, b]:
        return _each(mx, aten.alias.default)
    if order != [*rest, b, a]:
        raise NotImplementedError(f"{func} of an MXTensor along {dims}: only its last two axes can be transposed")
    if mx.row_index is not None:
        raise NotImplementedError("an MXTensor with a row index cannot be transposed: call .materialize() first")
    return mx.with_parts(mx.qdata.mT, mx.scale.mT, None, -3 - mx.axis if isinstance(mx.axis, int) else mx.axis)


def _blocked(mx: MXTensor, dim: int) -> bool:
    return dim in ((mx.axis,) if isinstance(mx.axis, int) else mx.axis)


def _slice(
    func: Any, mx: MXTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> MXTensor:
    """Slice along any axis. Raises ValueError if a slice along a blocked axis does not consist of whole blocks."""
    dim = _from_end(mx, dim)
    if mx.row_index is not None and dim == -2:
        return mx.with_parts(mx.qdata, mx.scale, func(mx.row_index, 0, start, end, step))
    if not _blocked(mx, dim):
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


def _split(func: Any, mx: MXTensor, sizes: int | Sequence[int], dim: int = 0) -> list[MXTensor]:
    """split and split_with_sizes: consecutive slices. Torch's own op on a meta tensor checks the sizes."""
    like = torch.empty(mx.shape[_from_end(mx, dim)], device="meta", dtype=torch.uint8)
    sizes = [part.shape[0] for part in func(like, sizes)]
    ends = itertools.accumulate(sizes)
    return [_slice(aten.slice.Tensor, mx, dim, end - size, end) for size, end in zip(sizes, ends)]


def _cat(func: Any, tensors: list[Tensor], dim: int = 0) -> MXTensor:
    """Concatenate MXTensors of equal format, axis, block size and dtype along any axis. Applies row indices."""
    dense = [mx.materialize() if mx.row_index is not None else mx for mx in tensors if isinstance(mx, MXTensor)]
    kinds = {(mx.format, mx.axis, mx.block_size, mx.dtype, mx.ndim) for mx in dense}
    if len(kinds) > 1 or len(dense) < len(tensors):
        got = ", ".join(repr(x) if isinstance(x, MXTensor) else f"a {type(x).__name__}" for x in tensors)
        raise NotImplementedError(f"{func} of {got}: want MXTensors of one format, axis, block and dtype")
    qdata = func([mx.qdata.view(torch.uint8) for mx in dense], dim).view(dense[0].qdata.dtype)
    scale = func([mx.scale.view(torch.uint8) for mx in dense], dim).view(SCALE_DTYPE)
    return dense[0].with_parts(qdata, scale)


def _index_select(func: Any, mx: MXTensor, dim: int, index: Tensor) -> MXTensor:
    dim = _from_end(mx, dim)
    if _blocked(mx, dim):
        raise NotImplementedError(f"{func} of an MXTensor along its blocked axis {dim}: call .dequantize() first")
    if mx.row_index is not None and dim == -2:
        return mx.with_parts(mx.qdata, mx.scale, func(mx.row_index, 0, index))
    qdata, scale = (bytewise(lambda part: func(part, dim, index), part) for part in (mx.qdata, mx.scale))
    return mx.with_parts(qdata, scale, mx.row_index)


def _select(func: Any, mx: MXTensor, dim: int, index: int) -> MXTensor:
    if _from_end(mx, dim) >= -2:
        raise NotImplementedError(f"{func} of an MXTensor along {dim}: slice rows, or call .dequantize() first")
    return mx.with_parts(func(mx.qdata, dim, index), func(mx.scale, dim, index))


HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten._pin_memory.default), _same_parts),
    **dict.fromkeys((aten._to_copy.default, aten.clone.default, aten.empty_like.default), _in_memory),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _transpose),
    aten.is_pinned.default: lambda func, mx, *_: all(part.is_pinned() for part in tensors_in(mx)),
    aten.isnan.default: lambda func, mx: func(mx.dequantize()),  # for torch's anomaly mode
    aten.copy_.default: _copy_,
    aten.cat.default: _cat,
    aten.index_select.default: _index_select,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
}
"""aten op -> its implementation for MXTensors."""
