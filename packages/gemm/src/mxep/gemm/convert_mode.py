"""The torch function mode under which a converted module's forward runs: it replaces torch's grouped mm by mxep's.

Groups may have any size: they are padded with zero rows to the recipe's alignment, multiplied and unpadded, without a
host sync.
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
    """Settings for the GEMMs of one converted parameter, as given to `convert`. fqn: its name in the model."""

    fqn: str
    recipe: Recipe | str
    backend: str | Backend
    strict: bool
    _reported: bool = field(default=False, repr=False)
    _used: bool = field(default=False, repr=False)


@dataclass(eq=False)
class State:
    """Conversion state of a module.

    weights: settings of the converted weights that the module's forward uses, by their names in the module.
    alike: True if `weights` are all 3-D parameters of the module, with one recipe and backend.
    linear: True for an nn.Linear.
    joined: the linears that are computed together with this one, or None.
    """

    weights: dict[str, Converted] = field(default_factory=dict)
    alike: bool = False
    linear: bool = False
    joined: Any = None


class Products(TorchFunctionMode):
    """Torch function mode for one forward of a module, which runs mxep's GEMMs with the module's converted weights.

    If a torch function computes a tensor from a weight, the result counts as the weight, too: a cast, or the sum with
    an adapter's delta. Tensors are recognized by their storage, or under torch.compile by identity. Identity fails
    behind .mT in torch 2.13. If so, any 3-D operand counts as a weight, if those of the module are converted `alike`.
    """

    def __init__(self, module: nn.Module, state: State) -> None:
        super().__init__()
        self.module, self.state, self.compiling = module, state, torch.compiler.is_compiling()
        self.names = list(state.weights)
        self.missing = list(state.weights)
        self.tensors: list[tuple[Tensor, list[str]]] = []
        self.storages: dict[int, tuple[StorageWeakRef, list[str]]] | None = None

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
        """Names of the converted weights that x was made from. If x is a sequence, those of its items."""
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
            storage = StorageWeakRef(local_part(x).untyped_storage())  # its address is not reused while this exists
            self.storages.setdefault(storage.cdata, (storage, names))

    def multiply(
        self,
        input: Tensor,
        mat2: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Replace torch's grouped mm of input (M, K), mat2 (G, K, N), made from a converted weight, and offs (G,)."""
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
        """The view of the weight's main_grad that corresponds to w, a view of the weight."""
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
    """Warn about the parameters, once for each. Raise instead if one is strict."""
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
    """The parameter `name` of a module. It is also found if FSDP2, a functional call or a parametrization moved it."""
    path, _, leaf = name.rpartition(".")
    for part in path.split(".") if path else ():
        module = module._modules[part]  # type: ignore[assignment]
    parameter = module._parameters.get(leaf)
    if parameter is None and "parametrizations" in module._modules:
        lists: Any = module._modules["parametrizations"]
        return getattr(lists[leaf], "original", None) if leaf in lists else None
    return parameter


def local_part(x: Any) -> Tensor:
    """The local part of x if x is a DTensor, else x itself."""
    local: Tensor = getattr(x, "_local_tensor", x)
    return local


def _grouped_mm_any_size(
    x: Tensor, w: Tensor, offs: Tensor, how: Converted, main_grad: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """grouped_mm for groups of any size. Rows past the last group are zeros."""
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
