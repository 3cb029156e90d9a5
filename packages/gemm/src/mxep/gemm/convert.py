"""An existing model in one call: its calls of torch's grouped mm on expert weights become `mxep.gemm.grouped_mm`.

    convert(model, "mxfp8")     torch._grouped_mm(x, self.w1.bfloat16().mT, offs=offs) quantizes, forward and backward
    revert(model)               it is torch's own again

Parameters stay what and where they are: the same objects in `parameters()`, `state_dict()`, optimizers and FSDP2,
before and after. What changes is reading one as an attribute: `module.w1` gives an `ExpertWeight` that stands for it.
To that end the module gets a class derived from its own, of the same name, with a property for each such parameter.

Groups may have any size: they are padded with zero rows to the recipe's multiple, multiplied, and unpadded, without a
host sync. torch's grouped mm of other operands (3-D x 3-D, 2-D x 2-D) and all other products stay torch's.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from mxep.gemm.backends import BACKENDS, Backend
from mxep.gemm.expert_weight import Converted, ExpertWeight
from mxep.gemm.recipe import Recipe
from mxep.gemm.weights import WeightCache

Module = TypeVar("Module", bound=nn.Module)
Filter = Callable[[str, nn.Parameter], bool]

_KEY: Final = "_mxep_converted"


def convert(
    model: Module, recipe: Recipe | str = "mxfp8", filter: Filter | None = None, *, backend: str | Backend = "auto"
) -> Module:
    """Make torch's grouped mm on the model's expert weights run ours, in place; returns the model.

    recipe, backend: as for `grouped_mm`. filter(fqn, parameter): which parameters; default every floating 3-D one.
    A model may be converted in several calls, with other recipes for other parameters; all share one `weight_cache`.
    Convert before `torch.compile`, before or after `fully_shard`; optimizers may be made before or after.

    ValueError: unknown recipe or backend, no parameter passes the filter, one that does is not 3-D floating or is
    converted already. At a product, with the parameter's name: K or N that do not fit the recipe, wrong dtypes or offs.
    """
    recipe = Recipe.named(recipe) if isinstance(recipe, str) else recipe
    if isinstance(backend, str) and backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend: got {backend!r}, want auto, {', '.join(BACKENDS)} or a Backend")
    chosen = [
        (module, name, fqn)
        for module, name, fqn, parameter in _parameters(model)
        if (filter(fqn, parameter) if filter else _is_weight(parameter)) and _check(module, name, fqn, parameter)
    ]
    if not chosen:
        raise ValueError("convert: got no parameter that passes the filter, want a 3-D floating one (experts, ., .)")
    _let_dynamo_dispatch()
    cache = next((how.cache for how in converted(model).values()), None) or WeightCache()
    for module, name, fqn in chosen:
        how = Converted(fqn, recipe, backend, cache)
        module.__dict__[_KEY] = {**module.__dict__.get(_KEY, {}), name: how}
        own = type(module).__dict__
        base: Any = own.get("_mxep_base", type(module))
        module.__class__ = _converted_class(base, tuple(sorted({name, *own.get("_mxep_names", ())})))
    return model


def revert(model: Module) -> Module:
    """Undo every `convert` of this model or of parts of it, in place; returns the model. Parameters are untouched."""
    for module in model.modules():
        if _KEY in module.__dict__:
            module.__dict__[_KEY] = {}
            base = type(module).__dict__.get("_mxep_base")
            if base is not None:  # else fully_shard has put a class of its own over ours
                module.__class__ = base
                del module.__dict__[_KEY]
    return model


def converted(model: nn.Module) -> dict[str, Converted]:
    """What `convert` has converted, by the parameter's name in `model`."""
    found = ((fqn, module.__dict__.get(_KEY, {}).get(name)) for module, name, fqn, _ in _parameters(model))
    return {fqn: how for fqn, how in found if how is not None}


def weight_cache(model: nn.Module) -> WeightCache:
    """The quantized weights of a converted model: memory, hits and misses. ValueError if nothing is converted."""
    for how in converted(model).values():
        return how.cache
    raise ValueError(f"weight_cache: got a {type(model).__name__} with nothing converted, want convert(model) first")


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module, name in it, name in the model, parameter); tied parameters once for every module that has them."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, f"{prefix}.{name}" if prefix else name, parameter


def _is_weight(parameter: Tensor) -> bool:
    return parameter.dim() == 3 and parameter.is_floating_point()


def _check(module: nn.Module, name: str, fqn: str, parameter: nn.Parameter) -> bool:
    if not _is_weight(parameter):
        raise ValueError(f"{fqn}: got {parameter.dtype} {tuple(parameter.shape)}, want a 3-D floating parameter")
    if name in module.__dict__.get(_KEY, {}):
        raise ValueError(f"{fqn}: already converted, want a plain parameter: revert(model) first")
    return True


@functools.cache
def _let_dynamo_dispatch() -> None:
    """torch.compile asks __torch_function__ only about functions it knows as overridable; _grouped_mm is not listed."""
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().add(torch._grouped_mm)


@functools.cache
def _converted_class(base: Any, names: tuple[str, ...]) -> Any:
    """`base` with a property for each parameter of these names; the same class for all layers, so one compilation."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super(made, self).__reduce_ex__(max(int(protocol), 2))
        _, (_, *args), *rest = reduced
        return _new, (base, names, *args), *rest

    made: Any = type(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": __reduce_ex__,
            "_mxep_base": base,
            "_mxep_names": names,
            **{name: _attribute(name) for name in names},
        },
    )
    return made


def _new(base: Any, names: tuple[str, ...], *args: Any) -> nn.Module:
    """What copying and unpickling a converted module begins with."""
    made = _converted_class(base, names)
    module: nn.Module = made.__new__(made, *args)
    _let_dynamo_dispatch()
    return module


def _attribute(name: str) -> property:
    def weight(self: nn.Module) -> Any:
        parameter: Any = nn.Module.__getattr__(self, name)
        how = self.__dict__[_KEY].get(name)
        if how is None:
            return parameter
        compiling = torch.compiler.is_compiling()
        if hasattr(parameter, "device_mesh"):  # a DTensor: what is multiplied is its local part
            if compiling:
                return ExpertWeight.of(parameter.to_local(), how)
            parameter.to_local = _ToLocal(self, name, parameter)
            return parameter
        weight = ExpertWeight.of(parameter, how)
        if not compiling:
            weight.parameter = parameter
            # FSDP2 gathers into the same memory without counting a version, and frees it soon: nothing to keep.
            weight.cached = "_is_fsdp_managed_module" not in self.__dict__
        return weight

    return property(weight)


class _ToLocal:
    """`to_local` of a DTensor parameter, giving an ExpertWeight while the parameter `name` of `module` is converted.

    A copy is bound to nothing; reading the attribute of a converted module binds it anew.
    """

    def __init__(self, module: nn.Module, name: str, parameter: Any) -> None:
        self._module, self._name, self._parameter = weakref.ref(module), name, weakref.ref(parameter)

    def __call__(self, **options: Any) -> Any:
        module: nn.Module | None = self._module()
        parameter: Any = self._parameter()
        local = type(parameter).to_local(parameter, **options)
        how = module.__dict__.get(_KEY, {}).get(self._name) if module is not None else None
        return local if how is None else ExpertWeight.of(local, how)

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (_ToLocal,)
