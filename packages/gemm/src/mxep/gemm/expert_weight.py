"""ExpertWeight: what reading a converted parameter gives; torch's grouped mm with it runs `mxep.gemm.grouped_mm`.

    w = module.w1                               stands for the parameter: what is done to it is done to the parameter
    w[:, :F], w.mT, w.bfloat16(), w.chunk(2)    views and casts are ExpertWeights again
    torch._grouped_mm(x, w.mT, offs=offs)       ours; so is F.grouped_mm, which calls it
    w @ x, F.linear(x, w[0]), ...               torch's own, and plain tensors

Its data are the parameter's, so below Python it is an ordinary tensor, also for autograd.

M rows, N out features, K in features, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mxep.gemm.backends import Backend
from mxep.gemm.functional import grouped_mm
from mxep.gemm.recipe import Recipe
from mxep.gemm.weights import WeightCache, mark_derived
from mxep.quant import pad_groups, unpad_groups

__all__ = ["Converted", "ExpertWeight"]

_GROUPED_MM: Final[Callable[..., Any]] = torch._grouped_mm

_VIEWS_AND_CASTS: Final = """transpose swapaxes swapdims permute movedim moveaxis __getitem__ narrow select chunk split
    tensor_split unbind squeeze unsqueeze view view_as reshape flatten unflatten expand expand_as contiguous clone
    detach to type type_as bfloat16 float half double cpu cuda"""
_tensor: Any = Tensor  # its attributes are descriptors
_GET_MT, _GET_DATA = _tensor.mT.__get__, _tensor.data.__get__
_STAY_WEIGHTS: Final = {_GET_MT, _GET_DATA} | {
    getattr(namespace, name)
    for name in _VIEWS_AND_CASTS.split()
    for namespace in (torch, Tensor)
    if callable(getattr(namespace, name, None))
}
_EXACT_REPR: Final = {
    int,
    bool,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}


@dataclass(frozen=True)
class Converted:
    """How one parameter is multiplied.

    fqn: its name in the model. recipe, backend: as for `grouped_mm`. cache: the model's quantized weights.
    """

    fqn: str
    recipe: Recipe
    backend: str | Backend
    cache: WeightCache


class ExpertWeight(Tensor):
    """A parameter of a converted module, or a view or cast of it; the module's docstring says what it does.

    how: the conversion. parameter: where it comes from, by the calls in `path`: none for the parameter itself. cached:
    whether parameter and path told what the values are when it was made; copied: None if its data are the
    parameter's, else its storage and the parameter's stamp then. `_still_told` says whether that still holds. Under
    torch.compile only `how` is set.
    """

    how: Converted
    parameter: Tensor | None
    path: tuple[tuple[Any, ...], ...]
    cached: bool
    copied: tuple[int, ...] | None

    @staticmethod
    def of(x: Tensor, how: Converted) -> "ExpertWeight":
        """x as a weight, the same data."""
        weight: ExpertWeight = x.as_subclass(ExpertWeight)
        weight.how, weight.parameter, weight.path, weight.cached, weight.copied = how, None, (), False, None
        return weight

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _GROUPED_MM:
            return _multiply(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                # torch.compile lets nothing be set on what a property of a tensor returns.
                out = args[0].transpose(-2, -1) if func == _GET_MT else func(*args, **kwargs)
            else:
                out = func(*_plain(args), **{name: _plain(arg) for name, arg in kwargs.items()})
            if func in _STAY_WEIGHTS and args and isinstance(args[0], ExpertWeight):
                return _wrap(out, args[0], func, args[1:], kwargs)
        return out


def _plain(x: Any) -> Any:
    """x, or its items, with the parameter itself in place of what stands for it."""
    if isinstance(x, ExpertWeight):
        return x if x.parameter is None or x.path else x.parameter
    return type(x)(map(_plain, x)) if type(x) in (tuple, list) else x


def _wrap(out: Any, weight: ExpertWeight, func: Any, args: Any, kwargs: dict[str, Any], place: int = 0) -> Any:
    """What a view or cast of `weight` returned, as ExpertWeight; a no-op gives `weight` itself."""
    if isinstance(out, (tuple, list)):
        return type(out)(_wrap(part, weight, func, args, kwargs, i) for i, part in enumerate(out))
    if not isinstance(out, Tensor) or isinstance(out, ExpertWeight):
        return out
    if out is weight.parameter:
        return weight
    view = ExpertWeight.of(out, weight.how)
    if weight.parameter is not None:
        if func == _GET_DATA and weight.copied is not None:
            weight.cached = False  # its version no longer tells of all writes
        view.parameter = weight.parameter
        view.cached = _still_told(weight) and _repr_is_exact((args, *kwargs.values()))
        view.path = (*weight.path, (func, place, repr((args, kwargs)) if view.cached else ""))
        if view.cached:
            same = _storage(out) == _storage(_plain(weight))
            view.copied = weight.copied if same else (_storage(out), *weight.how.cache.stamp(weight.parameter))
    return view


def _still_told(weight: ExpertWeight) -> bool:
    """Whether parameter and path tell what the values are: a copy was not written to, nor the parameter since then."""
    w, parameter = _plain(weight), weight.parameter
    if not weight.cached or parameter is None or parameter.is_inference() or w.is_inference():
        return False
    if weight.copied is None:  # the parameter's data, whose changes the cache sees
        return _storage(w) == _storage(parameter)
    return w._version == 0 and weight.copied == (_storage(w), *weight.how.cache.stamp(parameter))


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _repr_is_exact(x: Any) -> bool:
    """Whether repr(x) tells all of x; those of tensors and arrays do not."""
    if type(x) in (tuple, list, torch.Size):
        return all(map(_repr_is_exact, x))
    return all(map(_repr_is_exact, (x.start, x.stop, x.step))) if type(x) is slice else type(x) in _EXACT_REPR


def _multiply(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """torch's grouped mm: input (M, K), mat2 (G, K, N), offs (G,) -> (M, N), ours; other cases are torch's own."""
    with torch._C.DisableTorchFunctionSubclass():
        two_by_three = input.dim() == 2 and mat2.dim() == 3 and offs is not None and bias is None
        if offs is None or not two_by_three or not isinstance(mat2, ExpertWeight):
            return _GROUPED_MM(_plain(input), _plain(mat2), offs=offs, bias=bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
        w = _plain(mat2).mT
        how, cache = mat2.how, None
        if mat2.parameter is not None and _still_told(mat2):
            cache = how.cache
            mark_derived(w, mat2.parameter, mat2.path)
    try:
        return _grouped_mm_any_size(input, w, offs, how, cache, out_dtype)
    except ValueError as error:
        raise ValueError(f"{how.fqn}: {error}") from None


def _grouped_mm_any_size(
    x: Tensor, w: Tensor, ends: Tensor, how: Converted, cache: WeightCache | None, out_dtype: torch.dtype | None
) -> Tensor:
    """grouped_mm of groups of any size: x (M, K), w (G, N, K), ends int32 (G,) -> (M, N); rows in no group are zero."""
    multiple = how.recipe.group_multiple
    options: dict[str, Any] = {
        "recipe": how.recipe,
        "backend": how.backend,
        "weight_cache": cache,
        "out_dtype": out_dtype,
    }
    if multiple == 1:
        return grouped_mm(x, w, ends, **options)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = pad_groups(x, sizes, multiple=multiple)
    rows = grouped_mm(padded.rows, w, padded.group_ends, **options)
    return unpad_groups(rows, padded.row_index, num_rows=x.shape[0])
