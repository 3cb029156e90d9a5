"""The mode around a converted module's forward: it recognizes the module's weights, and multiplies by them with mxep.

Groups may have any size: they are padded with zero rows to the recipe's alignment, multiplied and unpadded, without a
host sync. All other functions stay torch's. A converted weight without a GEMM of mxep is reported.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from mxep.gemm.backends import Backend
from mxep.gemm.functional import grouped_mm
from mxep.gemm.recipe import Recipe, auto_recipe, recipe_name
from mxep.quant import pad_groups, unpad_groups

GROUPED_MM: Final[Callable[..., Any]] = torch._grouped_mm


@dataclass(eq=False)
class Converted:
    """Settings for one parameter's GEMMs.

    fqn: its name in the model. recipe: may be "auto". backend: as for `grouped_mm`. strict: raise instead of warn.
    """

    fqn: str
    recipe: Recipe | str
    backend: str | Backend
    strict: bool
    _reported: bool = field(default=False, repr=False)
    _entered: bool = field(default=False, repr=False)
    _used: bool = field(default=False, repr=False)


@dataclass(eq=False)
class State:
    """Conversion state of a module.

    weights: name in the module -> weight that its forward multiplies by. alike: True if these are all its 3-D
    parameters and share recipe and backend. linear: True for an nn.Linear. watched: all weights of the model, if this
    is the module passed to `convert`. joined: `convert.Joined` of a linear's siblings, or None.
    """

    weights: dict[str, Converted] = field(default_factory=dict)
    alike: bool = False
    linear: bool = False
    watched: list[Converted] = field(default_factory=list)
    joined: Any = None


class Products(TorchFunctionMode):
    """Runs mxep's GEMMs within one forward of a module.

    A tensor that a torch function makes from a weight counts as the weight: a cast, or a sum with an adapter's delta.
    Tensors are recognized by storage, or under torch.compile, which has no storages, by identity. If identity fails, as
    behind .mT in torch 2.13, any 3-D operand counts as a weight, provided the module's weights are alike.
    """

    def __init__(self, module: nn.Module, state: State) -> None:
        super().__init__()
        self.module, self.state, self.compiling = module, state, torch.compiler.is_compiling()
        self.names = list(state.weights)
        self.missing = list(state.weights)
        self.tensors: list[tuple[Tensor, list[str]]] = []
        self.storages: dict[int, tuple[StorageWeakRef, list[str]]] | None = None
        for how in state.weights.values():
            how._entered = True  # compiled code has this side effect, too

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is GROUPED_MM:
            return self.multiply(*args, **kwargs)
        names = self.names_of((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        if names:
            for made in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(made, Tensor) and made.dim() > 2:
                    self.know(made, names)
        return out

    def names_of(self, x: Any) -> list[str]:
        """Names of the weights that x, or its items, were made from."""
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
                if x is parameter_of(self.module, name):
                    return [name]
            for tensor, found in self.tensors:
                if x is tensor:
                    return found
            return []
        if self.storages is None:
            self.storages = {}
            for name in self.names:
                if (parameter := parameter_of(self.module, name)) is not None:
                    self.know(parameter, [name])
        _, known = self.storages.get(local_part(x).untyped_storage()._cdata, (None, []))
        return known

    def know(self, x: Tensor, names: list[str]) -> None:
        if self.compiling:
            self.tensors.append((x, names))
        elif self.storages is not None:
            storage = StorageWeakRef(local_part(x).untyped_storage())  # keeps its address from being reused
            self.storages.setdefault(storage.cdata, (storage, names))

    def multiply(
        self,
        input: Tensor,
        mat2: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """torch's grouped mm. It runs mxep's for input (M, K), mat2 (G, K, N) of a weight, and offs (G,)."""
        names = self.names_of(mat2)
        two_by_three = input.dim() == 2 and mat2.dim() == 3 and bias is None and not hasattr(mat2, "device_mesh")
        if self.compiling and not names and two_by_three:
            names = [self.guess()]
        if offs is None or not names or not two_by_three:
            return GROUPED_MM(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
        self.missing = [name for name in self.missing if name not in names]
        how = self.state.weights[names[0]]
        for name in names:
            self.state.weights[name]._used = True
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
        weight, how = parameter_of(self.module, name), self.state.weights[name]
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None or weight is None:
            return None
        main_grad, weight = local_part(main_grad), local_part(weight)
        view = not self.compiling and w.untyped_storage()._cdata == weight.untyped_storage()._cdata
        if not view or main_grad.stride() != weight.stride():
            report([how], "its main_grad gets nothing, .grad does: it is for weights used as they are, not compiled")
            return None
        offset = w.storage_offset() - weight.storage_offset() + main_grad.storage_offset()
        return main_grad.as_strided(w.shape, w.stride(), offset)

    def report_missing(self, inputs: tuple[Any, ...]) -> None:
        if self.missing and not any(isinstance(x, Tensor) and x.numel() == 0 for x in inputs):
            report(
                [self.state.weights[name] for name in self.missing],
                "no product of this forward ran in {recipe}: torch's grouped mm of (M, K) x (G, K, N) with offs does, "
                "F.linear, bmm and others do not (in transformers: experts_implementation='grouped_mm')",
            )


def report(found: list[Converted], what: str) -> None:
    """Warn once per parameter, or raise if strict."""
    new = [how for how in found if how.strict or not how._reported]
    for how in new:
        how._reported = True
    if new:
        tell(f"{', '.join(how.fqn for how in new)}: {what.format(recipe=recipe_name(new[0].recipe))}", new[0].strict)


def tell(message: str, strict: bool) -> None:
    if strict:
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def parameter_of(module: nn.Module, name: str) -> Tensor | None:
    """The parameter, also if FSDP2, a functional call or a parametrization has moved it."""
    path, _, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    parameter = module._parameters.get(leaf)
    if parameter is None and "parametrizations" in module._modules:
        lists: Any = module._modules["parametrizations"]
        return getattr(lists[leaf], "original", None) if leaf in lists else None
    return parameter


def local_part(x: Any) -> Tensor:
    """A DTensor's local part, or a plain x."""
    local: Tensor = getattr(x, "_local_tensor", x)
    return local


def _grouped_mm_any_size(
    x: Tensor, w: Tensor, offs: Tensor, how: Converted, main_grad: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """grouped_mm for groups of any size: x (M, K), w (G, N, K), offs (G,) int32 -> (M, N). Rows in no group are
    zero."""
    recipe = how.recipe
    if not isinstance(recipe, Recipe):
        recipe = auto_recipe(x.shape[0] / w.shape[0], w.shape[2], w.shape[1], of="grouped_mm")
    alignment = recipe.group_alignment
    options: dict[str, Any] = {"recipe": recipe, "backend": how.backend}
    options |= {"main_grad": main_grad, "out_dtype": out_dtype}
    if alignment == 1:
        return grouped_mm(x, w, offs, **options)
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    padded = pad_groups(x, sizes, alignment=alignment)
    rows = grouped_mm(padded.rows, w, padded.offs, **options)
    return unpad_groups(rows, padded.row_index, num_rows=x.shape[0])
