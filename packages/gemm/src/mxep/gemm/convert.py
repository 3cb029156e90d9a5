"""Converts a model in one call: its nn.Linear modules and its calls of torch's grouped mm on expert weights quantize.

    convert(model, "mxfp8")     nn.Linear(...)(x) runs `mxep.gemm.linear`, forward and backward, and
                                torch._grouped_mm(x, self.w1.bfloat16().mT, offs=offs) runs `mxep.gemm.grouped_mm`
    revert(model)               both are torch's own again

Parameters stay the same objects in the same places. The modules that own them get another class, derived from their own
and of the same name. The forward of an nn.Linear becomes `linear`. Other forwards run under a mode that watches torch's
functions. The mode recognizes a converted weight, and tensors made from it, by memory, and multiplies by it with
`grouped_mm`.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from mxep.gemm.auto import recipe_name, recipe_of
from mxep.gemm.backends import BACKENDS, Backend
from mxep.gemm.convert_linear import by_pattern, is_linear, reason_to_leave, vocabulary_of
from mxep.gemm.convert_mode import Converted, Products, State, parameter_of, report, tell
from mxep.gemm.linear import MarkOfTransformers, check_parallelized, module_forward
from mxep.gemm.recipe import Recipe

Module = TypeVar("Module", bound=nn.Module)
Filter = Callable[[str, nn.Parameter], bool]

_KEY: Final = "_mxep_converted"


def convert(
    model: Module,
    recipe: Recipe | str = "mxfp8",
    filter: Filter | None = None,
    *,
    backend: str | Backend = "auto",
    strict: bool = False,
) -> Module:
    """Make the model's nn.Linear modules, and torch's grouped mm on its expert weights, run mxep's GEMMs, in place.

    recipe: a Recipe, its name, or "auto", which applies `auto_recipe` to the shape of each GEMM. backend: as for
    `grouped_mm`. filter(fqn, parameter): True to convert; asked about all parameters except biases of nn.Linear. By
    default it selects floating 3-D parameters outside torch's own modules, and weights of nn.Linear except routers,
    heads, adapters and sizes that do not fit the recipe (`convert_linear.reason_to_leave`).
    Returns the model. The log ("mxep.gemm", level INFO) lists converted and skipped parameters, with reasons.

    A warning names, once, each converted parameter that no GEMM of mxep used in a forward. So does one for a gradient
    that arrives before any GEMM of mxep, as when other code has replaced the forward, and one for an unusable
    `main_grad`. strict: RuntimeError instead.
    A model may be converted in several calls, with other recipes for other parameters. Convert before `torch.compile`,
    before or after `fully_shard` and `parallelize_module`. Optimizers may be made before or after.
    Only GEMMs within the forward of the module that owns the weight count: put a `checkpoint` around that module.

    Raises ValueError for an unknown recipe or backend, if no parameter passes the filter, and for a selected parameter
    that

    - is neither 3-D floating nor the weight of an nn.Linear, or is already converted;
    - belongs to a module that is parametrized, computes the weight in a hook (weight_norm, spectral_norm, pruning), has
      no shape yet, or has a forward of its own instead of its class's;
    - is a shard of tensor parallelism that does not fit the recipe.

    A GEMM raises it, with the parameter's name, if K or N does not fit the recipe, or dtypes or offs are wrong.
    """
    recipe = recipe_of(recipe)
    if isinstance(backend, str) and backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend: got {backend!r}, want auto, {', '.join(BACKENDS)} or a Backend")
    chosen, left = _chosen(model, recipe, filter)
    if not chosen:
        raise ValueError(
            "convert: got no parameter that passes the filter, want a 3-D floating one (experts, ., .) or the weight "
            f"of an nn.Linear; left alone: {left or 'none'}"
        )
    if not all(is_linear(module) for module, *_ in chosen):
        _prepare_dynamo()
    for module, name, fqn in chosen:
        how = _state(module).weights[name] = Converted(fqn, recipe, backend, strict)
        _state(model).watched.append(how)
        if (parameter := parameter_of(module, name)) is not None and parameter.requires_grad:
            _watch_first_gradient(how, parameter)
    for module in {id(module): module for module, *_ in chosen}.values():
        state = _state(module)
        names = {name for owner, name, _, p in _parameters(module) if owner is module and _is_weight(p)}
        kinds = {(how.recipe, id(how.backend)) for how in state.weights.values()}
        state.alike = names == set(state.weights) and len(kinds) == 1
        state.linear = is_linear(module)
    logger = logging.getLogger("mxep.gemm")
    logger.info("convert: %s: %s", recipe_name(recipe), by_pattern([fqn for *_, fqn in chosen]))
    for reason, fqns in left.items():
        logger.info("convert: left alone (%s): %s", reason, by_pattern(fqns))
    return model


def revert(model: Module) -> Module:
    """Undo every `convert` of this model or of its parts, in place. Returns the model. Parameters are untouched."""
    for module in model.modules():
        for how in _weights(module).values():
            how._used = True  # ends the watch for its first gradient
        if module.__dict__.pop(_KEY, None) is not None and (base := type(module).__dict__.get("_mxep_base")):
            module.__class__ = base  # else another class derives from ours, which does nothing now
    return model


def converted(model: nn.Module) -> dict[str, Converted]:
    """Converted parameters by their names in `model`."""
    found = ((fqn, _weights(module).get(name)) for module, name, fqn, _ in _parameters(model))
    return {fqn: how for fqn, how in found if how is not None}


Chosen = tuple[nn.Module, str, str]
"""(module, name in it, name in the model)."""


def _chosen(model: nn.Module, recipe: Recipe | str, filter: Filter | None) -> tuple[list[Chosen], dict[str, list[str]]]:
    """Parameters to convert, and skipped ones of nn.Linear by reason. Raises ValueError for unsuitable ones."""
    chosen, left, vocabulary = list[Chosen](), dict[str, list[str]](), vocabulary_of(model)
    largest = recipe if isinstance(recipe, Recipe) else Recipe.mxfp8()
    for module, name, fqn, parameter in _parameters(model):
        linear = is_linear(module)
        if linear and name == "bias":
            continue
        if filter is None and (linear or _is_computed(module, name)):
            if is_parametrized(module):
                reason: str | None = "parametrized"
            elif _is_computed(module, name):
                reason = "its weight is computed before each forward, as by weight_norm, spectral_norm or pruning"
            elif name != "weight":
                reason = "not the weight of its linear"
            else:
                assert isinstance(module, nn.Linear)
                reason = reason_to_leave(fqn.removesuffix(".weight"), module, vocabulary, largest)
            if reason is not None:
                left.setdefault(reason, []).append(fqn)
                continue
        elif filter is None and isinstance(module, nn.Linear) and not _is_weight(parameter) and name != "bias":
            left.setdefault(f"a {type(module).__name__}, which has a forward of its own", []).append(fqn)
            continue
        elif filter is not None:
            if not filter(fqn, parameter):
                continue
        elif not _is_weight(parameter) or type(module).__module__.startswith("torch.nn.modules."):
            continue  # torch's own modules, such as convolutions, call no grouped mm
        _check(module, name, fqn, parameter, recipe)
        chosen.append((module, name, fqn))
    return chosen, left


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module that uses it in forward, name there, name in the model, parameter). Tied ones appear for every module.

    The module is the parameter's owner. If the owner has no forward, as a list, it is the next module around it.
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


def state_of(module: nn.Module) -> State | None:
    """The module's conversion state, if it has one."""
    state: State | None = module.__dict__.get(_KEY)
    return state


def _weights(module: nn.Module) -> dict[str, Converted]:
    state = state_of(module)
    return state.weights if state else {}


def _is_weight(parameter: Tensor) -> bool:
    return parameter.dim() == 3 and parameter.is_floating_point()


def _is_computed(module: nn.Module, name: str) -> bool:
    """True if a hook computes this parameter's attribute before each forward, such as `weight` from `weight_orig`."""
    attribute, _, suffix = name.rpartition("_")
    return suffix in ("orig", "g", "v") and isinstance(module.__dict__.get(attribute), Tensor)


def _check(module: nn.Module, name: str, fqn: str, parameter: nn.Parameter, recipe: Recipe | str) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{fqn}: got a parameter without a shape, want one: run the model once, then convert")
    if _is_computed(module, name):
        raise ValueError(
            f"{fqn}: got a {type(module).__name__} whose weight is computed before each forward (weight_norm, "
            "spectral_norm, pruning), want it plain: convert before, or make it permanent (remove_weight_norm, "
            "remove_spectral_norm, prune.remove)"
        )
    if is_linear(module) and name != "weight" and not is_parametrized(module):
        raise ValueError(f"{fqn}: got a parameter of a linear, want its weight: take it out of the filter")
    if not _is_weight(parameter) and not (is_linear(module) and parameter.is_floating_point()):
        got = f"{parameter.dtype} {tuple(parameter.shape)} of a {type(module).__name__}"
        raise ValueError(
            f"{fqn}: got {got}, want a 3-D floating parameter, or the weight of an nn.Linear (not of a class with a "
            "forward of its own)"
        )
    if name in _weights(module):
        raise ValueError(f"{fqn}: already converted, want a plain parameter: revert(model) first")
    if is_parametrized(module):
        raise ValueError(f"{fqn}: got a parametrized {type(module).__name__}, want it plain: convert before")
    if "forward" in module.__dict__:
        raise ValueError(
            f"{fqn}: got a {type(module).__name__} whose forward was replaced (accelerate's hooks and transformers' "
            "tp_plan do that), want its class's: convert before"
        )
    if getattr(module, "_distribute_module_applied", False) and hasattr(parameter, "device_mesh") and name == "weight":
        from mxep.gemm.tensor_parallel import check_shards

        # A tensor-parallel style has sharded it. FSDP2's shards may have any size, as they are gathered before a GEMM.
        check_shards(fqn, parameter, recipe)


def _watch_first_gradient(how: Converted, parameter: Tensor) -> None:
    """Report a parameter that gets a gradient without a GEMM of mxep. A replaced forward cannot report it itself."""

    def look(_: Tensor) -> None:
        handle.remove()
        if not how._used:
            report([how], "it has a gradient, but no forward ran a product in {recipe}: its module has another forward")

    handle = parameter.register_post_accumulate_grad_hook(look)


def _state(module: nn.Module) -> State:
    """The module's conversion state. A module without one gets it, and a class that uses it."""
    if _KEY not in module.__dict__:
        module.__dict__[_KEY] = State()
        if not any("_mxep_base" in cls.__dict__ for cls in type(module).__mro__):
            own: Any = type(module)
            module.__class__ = _converted_class(own)
    state: State = module.__dict__[_KEY]
    return state


@functools.cache
def _prepare_dynamo() -> None:
    """Let torch.compile ask modes about _grouped_mm. It asks only about functions that it lists as overridable."""
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().add(torch._grouped_mm)
    torch.compiler.assume_constant_result(tell)  # runs it when a graph is traced


@functools.cache
def _converted_class(base: Any) -> Any:
    """`base` with another forward. Cached: all layers share the class, so there is one compilation."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: State | None = self.__dict__.get(_KEY)
        if state is None:
            return base.forward(self, *args, **kwargs)
        watched = [] if torch.compiler.is_compiling() else state.watched
        for how in watched:
            how._entered = False
        if state.linear:
            return _linear_forward(self, state, *args, **kwargs)
        if state.weights:
            products = Products(self, state)
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

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if (how := _weights(self).get(name)) is not None:
            check_parallelized(how.fqn, self, name, param, how.recipe)
        super(made, self).register_parameter(name, param)

    def linear(self: nn.Module) -> tuple[str, Recipe | str] | None:
        how = _weights(self).get("weight") if is_linear(self) else None
        return None if how is None else (how.fqn, how.recipe)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    methods = {"forward": forward, "__reduce_ex__": __reduce_ex__, "register_parameter": register_parameter}
    methods["_is_hooked"] = MarkOfTransformers(linear)
    made: Any = type(base.__name__, (base,), {**names, "_mxep_base": base, **methods})
    return made


def _linear_forward(module: Any, state: State, input: Tensor) -> Tensor:
    how = state.weights["weight"]
    how._entered = how._used = True
    try:
        out = None if state.joined is None else state.joined.forward(module, how, input)
        return module_forward(module, input, how.recipe, how.backend) if out is None else out
    except ValueError as error:
        raise ValueError(f"{how.fqn}: {error}") from None


def _new(base: Any, *args: Any) -> nn.Module:
    """First step of copying and of unpickling a converted module."""
    made = _converted_class(base)
    module: nn.Module = made.__new__(made, *args)
    _prepare_dynamo()
    return module


def _report_elsewhere(model: nn.Module, watched: list[Converted]) -> None:
    present = {id(how) for how in converted(model).values()}  # parts may have been removed
    report(
        [how for how in watched if not how._entered and id(how) in present],
        "no product of this forward ran in {recipe}: the forward of the module that owns it was not called",
    )
