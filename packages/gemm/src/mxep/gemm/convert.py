"""An existing model in one call: its calls of torch's grouped mm on expert weights become `mxep.gemm.grouped_mm`.

    convert(model, "mxfp8")     torch._grouped_mm(x, self.w1.bfloat16().mT, offs=offs) quantizes, forward and backward
    revert(model)               it is torch's own again

Parameters stay what and where they are, and reading one gives it. What changes is the class of the modules that own
them: one derived from their own, of the same name, whose forward runs under a mode that watches torch's functions. It
knows a converted weight, and what is made of it, by its memory, and multiplies by it with `grouped_mm`.

Groups may have any size: they are padded with zero rows to the recipe's multiple, multiplied, and unpadded, without a
host sync. All other products stay torch's: a converted weight without a product of ours is reported.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.overrides import TorchFunctionMode

from mxep.gemm.backends import BACKENDS, Backend
from mxep.gemm.functional import grouped_mm
from mxep.gemm.recipe import Recipe
from mxep.quant import pad_groups, unpad_groups

Module = TypeVar("Module", bound=nn.Module)
Filter = Callable[[str, nn.Parameter], bool]

_KEY: Final = "_mxep_converted"
_GROUPED_MM: Final[Callable[..., Any]] = torch._grouped_mm


@dataclass(eq=False)
class Converted:
    """How one parameter is multiplied.

    fqn: its name in the model. recipe, backend: as for `grouped_mm`. strict: what would warn raises.
    """

    fqn: str
    recipe: Recipe
    backend: str | Backend
    strict: bool
    _told: bool = field(default=False, repr=False)
    _entered: bool = field(default=False, repr=False)


@dataclass(eq=False)
class _State:
    """A module's part. weights: whose products its forward runs, by their names in it. alike: they are all its 3-D ones
    and have one recipe and backend. watched: all of the model that `convert` got, if this is it."""

    weights: dict[str, Converted] = field(default_factory=dict)
    alike: bool = False
    watched: list[Converted] = field(default_factory=list)


def convert(
    model: Module,
    recipe: Recipe | str = "mxfp8",
    filter: Filter | None = None,
    *,
    backend: str | Backend = "auto",
    strict: bool = False,
) -> Module:
    """Make torch's grouped mm on the model's expert weights run ours, in place; returns the model.

    recipe, backend: as for `grouped_mm`. filter(fqn, parameter): which parameters; default every floating 3-D one but
    those of torch's own modules. A converted parameter without a product of ours in a forward is named in a warning,
    once, and so is one whose `main_grad` cannot be heeded. strict: RuntimeError instead.
    A model may be converted in several calls, with other recipes for other parameters. Convert before `torch.compile`,
    before or after `fully_shard`; optimizers may be made before or after.

    What counts are products within the forward of the module that owns the weight: a `checkpoint` goes around that.

    ValueError: unknown recipe or backend, no parameter passes the filter, one that does is not 3-D floating or is
    converted already, or its module is parametrized or has a forward of its own, not its class's. At a product, with
    the parameter's name: K or N that do not fit the recipe, wrong dtypes or offs.
    """
    recipe = Recipe.named(recipe) if isinstance(recipe, str) else recipe
    if isinstance(backend, str) and backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend: got {backend!r}, want auto, {', '.join(BACKENDS)} or a Backend")
    chosen = [
        (module, name, fqn)
        for module, name, fqn, parameter in _parameters(model)
        if (filter(fqn, parameter) if filter else _is_expert(module, parameter))
        and _check(module, name, fqn, parameter)
    ]
    if not chosen:
        raise ValueError("convert: got no parameter that passes the filter, want a 3-D floating one (experts, ., .)")
    _prepare_dynamo()
    for module, name, fqn in chosen:
        how = _state(module).weights[name] = Converted(fqn, recipe, backend, strict)
        _state(model).watched.append(how)
    for module in {id(module): module for module, *_ in chosen}.values():
        state = _state(module)
        names = {name for owner, name, _, p in _parameters(module) if owner is module and _is_weight(p)}
        kinds = {(how.recipe, id(how.backend)) for how in state.weights.values()}
        state.alike = names == set(state.weights) and len(kinds) == 1
    return model


def revert(model: Module) -> Module:
    """Undo every `convert` of this model or of parts of it, in place; returns the model. Parameters are untouched."""
    for module in model.modules():
        if module.__dict__.pop(_KEY, None) is not None and (base := type(module).__dict__.get("_mxep_base")):
            module.__class__ = base  # else somebody has put a class of their own over ours, which does nothing now
    return model


def converted(model: nn.Module) -> dict[str, Converted]:
    """What `convert` has converted, by the parameter's name in `model`."""
    found = ((fqn, _weights(module).get(name)) for module, name, fqn, _ in _parameters(model))
    return {fqn: how for fqn, how in found if how is not None}


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module whose forward uses it, name there, name in the model, parameter); tied ones for every module.

    That is who has it, or, where that is a list or another module without a forward, the next one around it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owner = prefix
            while owner and _only_holds(modules[owner]):
                owner = owner.rpartition(".")[0]
            fqn = f"{prefix}.{name}" if prefix else name
            yield modules[owner], fqn[len(owner) + 1 if owner else 0 :], fqn, parameter


def _only_holds(module: nn.Module) -> bool:
    parametrization = isinstance(module, ParametrizationList)
    return parametrization or getattr(type(module).forward, "__name__", "") == "_forward_unimplemented"


def _weights(module: nn.Module) -> dict[str, Converted]:
    state: _State | None = module.__dict__.get(_KEY)
    return state.weights if state else {}


def _is_weight(parameter: Tensor) -> bool:
    return parameter.dim() == 3 and parameter.is_floating_point()


def _is_expert(module: nn.Module, parameter: Tensor) -> bool:
    """torch's own modules, such as convolutions, call no grouped mm."""
    return _is_weight(parameter) and not type(module).__module__.startswith("torch.nn.modules.")


def _check(module: nn.Module, name: str, fqn: str, parameter: nn.Parameter) -> bool:
    if not _is_weight(parameter):
        raise ValueError(f"{fqn}: got {parameter.dtype} {tuple(parameter.shape)}, want a 3-D floating parameter")
    if name in _weights(module):
        raise ValueError(f"{fqn}: already converted, want a plain parameter: revert(model) first")
    if is_parametrized(module):
        raise ValueError(f"{fqn}: got a parametrized {type(module).__name__}, want it plain: convert before")
    if "forward" in module.__dict__:
        raise ValueError(
            f"{fqn}: got a {type(module).__name__} whose forward was replaced (accelerate's hooks do that), want its "
            "class's: convert before"
        )
    return True


def _state(module: nn.Module) -> _State:
    """The module's part; a module that has none yet gets one, and the class that heeds it."""
    if _KEY not in module.__dict__:
        module.__dict__[_KEY] = _State()
        if not any("_mxep_base" in cls.__dict__ for cls in type(module).__mro__):
            own: Any = type(module)
            module.__class__ = _converted_class(own)
    state: _State = module.__dict__[_KEY]
    return state


@functools.cache
def _prepare_dynamo() -> None:
    """torch.compile asks modes only about functions it knows as overridable, and _grouped_mm is not listed."""
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().add(torch._grouped_mm)
    torch.compiler.assume_constant_result(_tell)  # calls it when a graph is traced


@functools.cache
def _converted_class(base: Any) -> Any:
    """`base` with another forward; the same class for all layers, so one compilation."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _State | None = self.__dict__.get(_KEY)
        if state is None:
            return base.forward(self, *args, **kwargs)
        watched = [] if torch.compiler.is_compiling() else state.watched
        for how in watched:
            how._entered = False
        if state.weights:
            products = _Products(self, state)
            with products:
                out = base.forward(self, *args, **kwargs)
            products.report_missing((*args, *kwargs.values()))
        else:
            out = base.forward(self, *args, **kwargs)
        if any(not how._entered for how in watched):
            _report_elsewhere(self, watched)
        return out

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super(made, self).__reduce_ex__(max(int(protocol), 2))
        _, (_, *args), *rest = reduced
        return _new, (base, *args), *rest

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made: Any = type(
        base.__name__, (base,), {**names, "_mxep_base": base, "forward": forward, "__reduce_ex__": __reduce_ex__}
    )
    return made


def _new(base: Any, *args: Any) -> nn.Module:
    """What copying and unpickling a converted module begins with."""
    made = _converted_class(base)
    module: nn.Module = made.__new__(made, *args)
    _prepare_dynamo()
    return module


class _Products(TorchFunctionMode):
    """Runs ours within one forward of a module.

    What is made of a weight by any function of torch, a cast or a sum with an adapter's delta, stands for it, too. It
    is known by its storage; torch.compile, which has none, by identity, and where it does not show, as behind .mT, any
    3-D operand is a weight, if the module's weights are alike.
    """

    def __init__(self, module: nn.Module, state: _State) -> None:
        super().__init__()
        self.module, self.state, self.compiling = module, state, torch.compiler.is_compiling()
        self.names = list(state.weights)
        self.missing = list(state.weights)
        self.tensors: list[tuple[Tensor, list[str]]] = []
        self.storages: dict[int, tuple[StorageWeakRef, list[str]]] | None = None
        for how in state.weights.values():
            how._entered = True  # a side effect that compiled code has, too

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _GROUPED_MM:
            return self.multiply(*args, **kwargs)
        names = self.names_of((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        if names:
            for made in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(made, Tensor) and made.dim() > 2:
                    self.know(made, names)
        return out

    def names_of(self, x: Any) -> list[str]:
        """The weights that x, or its items, are made of."""
        if isinstance(x, (tuple, list)):
            names: list[str] = []
            for item in x:
                if isinstance(item, (Tensor, tuple, list)):
                    names += [name for name in self.names_of(item) if name not in names]
            return names
        if not isinstance(x, Tensor):
            return []
        if self.compiling:
            for name in self.names:
                if x is _parameter(self.module, name):
                    return [name]
            for tensor, found in self.tensors:
                if x is tensor:
                    return found
            return []
        if self.storages is None:
            self.storages = {}
            for name in self.names:
                if (parameter := _parameter(self.module, name)) is not None:
                    self.know(parameter, [name])
        _, known = self.storages.get(_local(x).untyped_storage()._cdata, (None, []))
        return known

    def know(self, x: Tensor, names: list[str]) -> None:
        if self.compiling:
            self.tensors.append((x, names))
        elif self.storages is not None:
            storage = StorageWeakRef(_local(x).untyped_storage())  # its address stays its own
            self.storages.setdefault(storage.cdata, (storage, names))

    def multiply(
        self,
        input: Tensor,
        mat2: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """torch's grouped mm: input (M, K), mat2 (G, K, N), offs (G,) -> (M, N), ours; other cases are torch's own."""
        names = self.names_of(mat2)
        two_by_three = input.dim() == 2 and mat2.dim() == 3 and bias is None and not hasattr(mat2, "device_mesh")
        if self.compiling and not names and two_by_three:
            names = [self.guess()]
        if offs is None or not names or not two_by_three:
            return _GROUPED_MM(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
        self.missing = [name for name in self.missing if name not in names]
        how = self.state.weights[names[0]]
        main_grads = [self.main_grad(name, mat2.mT) for name in names]
        main_grad = main_grads[0] if len(names) == 1 else None
        try:
            return _grouped_mm_any_size(input, mat2.mT, offs, how, main_grad, out_dtype)
        except ValueError as error:
            raise ValueError(f"{how.fqn}: {error}") from None

    def guess(self) -> str:
        if not self.state.alike:
            fqns = ", ".join(how.fqn for how in self.state.weights.values())
            raise RuntimeError(
                f"{fqns}: torch.compile does not show which weight is multiplied, and not all of the module's are "
                "converted alike: convert all 3-D ones with one recipe, or transpose by .transpose(-2, -1)"
            )
        return self.missing[0] if self.missing else self.names[0]

    def main_grad(self, name: str, w: Tensor) -> Tensor | None:
        """The part of the weight's main_grad that belongs to w, a view of the weight."""
        weight, how = _parameter(self.module, name), self.state.weights[name]
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None or weight is None:
            return None
        main_grad, weight = _local(main_grad), _local(weight)
        view = not self.compiling and w.untyped_storage()._cdata == weight.untyped_storage()._cdata
        if not view or main_grad.stride() != weight.stride():
            _report([how], "its main_grad gets nothing, .grad does: it is for weights used as they are, not compiled")
            return None
        offset = w.storage_offset() - weight.storage_offset() + main_grad.storage_offset()
        return main_grad.as_strided(w.shape, w.stride(), offset)

    def report_missing(self, inputs: tuple[Any, ...]) -> None:
        if self.missing and not any(isinstance(x, Tensor) and x.numel() == 0 for x in inputs):
            _report(
                [self.state.weights[name] for name in self.missing],
                "no product of this forward ran in {recipe}: torch's grouped mm of (M, K) x (G, K, N) with offs does, "
                "F.linear, bmm and others do not (in transformers: experts_implementation='grouped_mm')",
            )


def _report_elsewhere(model: nn.Module, watched: list[Converted]) -> None:
    there = {id(how) for how in converted(model).values()}  # parts may have been taken out
    _report(
        [how for how in watched if not how._entered and id(how) in there],
        "no product of this forward ran in {recipe}: the forward of the module that owns it was not called",
    )


def _report(hows: list[Converted], what: str) -> None:
    """Warn of those that were not warned of, or raise."""
    new = [how for how in hows if how.strict or not how._told]
    for how in new:
        how._told = True
    if new:
        _tell(f"{', '.join(how.fqn for how in new)}: {what.format(recipe=new[0].recipe.name)}", new[0].strict)


def _tell(message: str, strict: bool) -> None:
    if strict:
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """The parameter, wherever FSDP2, a functional call or a parametrization has put it now."""
    path, _, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    parameter = module._parameters.get(leaf)
    if parameter is None and "parametrizations" in module._modules:
        lists: Any = module._modules["parametrizations"]
        return getattr(lists[leaf], "original", None) if leaf in lists else None
    return parameter


def _local(x: Any) -> Tensor:
    """What a DTensor has here, or x."""
    local: Tensor = getattr(x, "_local_tensor", x)
    return local


def _grouped_mm_any_size(
    x: Tensor, w: Tensor, ends: Tensor, how: Converted, main_grad: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """grouped_mm of groups of any size: x (M, K), w (G, N, K), ends int32 (G,) -> (M, N); rows in no group are zero."""
    alignment = how.recipe.group_alignment
    options: dict[str, Any] = {
        "recipe": how.recipe,
        "backend": how.backend,
        "main_grad": main_grad,
        "out_dtype": out_dtype,
    }
    if alignment == 1:
        return grouped_mm(x, w, ends, **options)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = pad_groups(x, sizes, alignment=alignment)
    rows = grouped_mm(padded.rows, w, padded.offs, **options)
    return unpad_groups(rows, padded.row_index, num_rows=x.shape[0])
