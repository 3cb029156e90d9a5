"""linear: a GEMM with one weight, forward and backward, by the recipes and backends of `grouped_mm`.

    x (..., K) --as rows--> (M, K) --one group of all rows of `grouped_mm`, w (1, N, K)--> (M, N) --> (..., N)

There are no offs: kernels take M as the only group's end, and M may be any number. A contraction over tokens in blocks
of 32 sees the last block filled up with zero rows by a row index, so nothing is copied.

    qdata = quantize_input(x, recipe=recipe)
    q, k, v = (linear(qdata, w, recipe=recipe) for w in (wq, wk, wv))

quantizes x once for three GEMMs, and sums their gradients in x's outer dtype.

M rows, N out features, K in features.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from mxep.gemm.auto import recipe_for, recipe_name, recipe_of
from mxep.gemm.backends import Backend, select
from mxep.gemm.checks import check_linear, check_plain, check_tensors
from mxep.gemm.functional import between_graphs, multiply
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str,
    backend: str | Backend = "auto",
    out_dtype: torch.dtype | None = None,
    main_grad: Tensor | None = None,
    wgrad_scale: float = 1.0,
) -> Tensor:
    """(..., N): x @ w.T + bias. Differentiable in x, w and bias, once.

    x: (..., K) bf16 or fp32, or an MXTensor with the recipe's blocks along K or from `quantize_input`, which several
        GEMMs may share. Any number of leading axes, and of rows. Recipe "bf16" also takes fp64, on "reference".
    w: (N, K) bf16 or fp32, quantized as for `grouped_mm`. bias: (N,) or None. Gradients have their dtypes.
    out_dtype: bf16 or fp32, default x.dtype, or within torch.autocast its dtype. The gradient of x has x.dtype.
    recipe: a Recipe, its name, or "auto": `auto_recipe` of this GEMM's rows, K and N, with a plain x.
    backend, main_grad (N, K) fp32, wgrad_scale, gradients as MXTensors, and torch.compile: as for `grouped_mm`.

    If w is a DTensor (tensor parallelism), x must be one, see `mxep.gemm.tensor_parallel`.
    Raises ValueError for wrong shapes, dtypes or devices, and for K or N that is no multiple of recipe.group_alignment.
    Raises RuntimeError if the backend cannot run here.
    """
    check_tensors(x=x, w=w)
    options: dict[str, Any] = {"recipe": recipe, "backend": backend, "out_dtype": out_dtype}
    options |= {"main_grad": main_grad, "wgrad_scale": wgrad_scale}
    if torch.is_autocast_enabled(x.device.type):
        options["out_dtype"] = out_dtype or torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, w, bias, **options)
    if hasattr(w, "device_mesh"):
        from mxep.gemm.tensor_parallel import sharded_linear  # only DTensors need torch.distributed

        return sharded_linear(linear, x, w, bias, **options)
    check_plain(x=x)
    recipe = options["recipe"] = recipe_for(recipe, x, w.shape[0] if w.dim() else 1)
    if torch.compiler.is_compiling() and isinstance(x, MXTensor) and x.requires_grad:
        return between_graphs(linear, x, w, bias, **options)
    out_dtype = out_dtype or x.dtype
    chosen = select(backend, x.device)
    rowwise = chosen.wants_rowwise
    check_linear(x, w, bias, recipe=recipe, out_dtype=out_dtype, main_grad=main_grad, rowwise=rowwise)
    plain = recipe.scaling == "none" and not isinstance(x, MXTensor) and x.dtype == w.dtype == out_dtype
    asks_nothing = main_grad is None and wgrad_scale == 1
    if plain and asks_nothing and x.dtype == torch.bfloat16 and chosen.bf16_is_torchs:
        return nn.functional.linear(x, w, bias)  # the same GEMMs, for a third of the host time
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    bias = None if bias is None else bias.unsqueeze(0)
    out: Tensor = multiply(rows, w, bias, None, recipe, chosen, out_dtype, main_grad, wgrad_scale)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], w.shape[0])


def quantize_input(x: Tensor, *, recipe: Recipe | str, backend: str | Backend = "auto") -> Tensor:
    """Quantize x (..., K) bf16 or fp32 as `linear` would with this recipe and backend, to share it between several.

    Returns x itself with recipe "bf16". The gradient passes unchanged. On "hopper" each row has one scale.
    """
    recipe = Recipe.named(recipe) if isinstance(recipe, str) else recipe
    return select(backend, x.device).quantize_rows(x, recipe.fmt, recipe)


class MarkOfTransformers:
    """`_is_hooked`, which transformers' tensor parallelism sets on each module that it shards, past
    `register_parameter`. Setting it raises ValueError for a linear with shards that do not fit. It is a descriptor,
    because FSDP2 shards differently if there is a `__setattr__`.

    how: gives a module's weight name and recipe; None if it is not a converted linear.
    """

    def __init__(self, how: Callable[[Any], tuple[str, Recipe | str] | None]) -> None:
        self.how = how

    def __get__(self, module: nn.Module | None, _: type | None = None) -> bool:
        if module is None or "_is_hooked" not in module.__dict__:
            raise AttributeError  # torch writes the message
        return bool(module.__dict__["_is_hooked"])

    def __set__(self, module: nn.Module, value: bool) -> None:
        module.__dict__["_is_hooked"] = value
        weight: Any = module._parameters.get("weight")
        if hasattr(weight, "device_mesh") and (how := self.how(module)) is not None:
            from mxep.gemm.tensor_parallel import check_shards

            check_shards(how[0], weight, how[1])


class Linear(nn.Linear):
    """nn.Linear by a recipe: the same parameters, names and initialization, computed by `linear`.

    recipe: a Recipe, its name, or "auto", which decides at each call by its shape.
    The weight is quantized at each call, or once within `quantize_weights_once`. If the weight has an attribute
    `main_grad`, its gradient is added there and not to `.grad`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "mxfp8",
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipe_of(recipe)
        self.backend = backend

    @classmethod
    def from_linear(cls, module: nn.Linear, recipe: Recipe | str = "mxfp8", *, backend: str | Backend = "auto") -> Self:
        """Make one that holds the parameters of `module`: the same objects, not copies. Hooks are not moved."""
        sizes = module.in_features, module.out_features, module.bias is not None
        made = cls(*sizes, device="meta", recipe=recipe, backend=backend)
        made.weight, made.bias = module.weight, module.bias
        return made.train(module.training)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as any module. Raises ValueError for a newly sharded weight, if its shards do not fit the recipe."""
        if name == "weight" and "recipe" in self.__dict__:
            check_parallelized(name, self, name, param, self.recipe)
        super().register_parameter(name, param)

    _is_hooked = MarkOfTransformers(lambda self: ("weight", self.recipe))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return module_forward(self, input, self.recipe, self.backend)

    def extra_repr(self) -> str:
        backend = "" if self.backend == "auto" else f", backend={getattr(self.backend, 'name', self.backend)}"
        return f"{super().extra_repr()}, recipe={recipe_name(self.recipe)}{backend}"


def check_parallelized(fqn: str, module: nn.Module, name: str, parameter: Any, recipe: Recipe | str) -> None:
    """Raise ValueError if shards do not fit the recipe and replace a plain parameter, as `parallelize_module` does. A
    parameter that was a DTensor before may be FSDP2's, which is whole in a GEMM."""
    if hasattr(parameter, "device_mesh") and not hasattr(module._parameters.get(name), "device_mesh"):
        from mxep.gemm.tensor_parallel import check_shards

        check_shards(fqn, parameter, recipe)


def module_forward(module: nn.Linear, x: Tensor, recipe: Recipe | str, backend: str | Backend) -> Tensor:
    """Compute an nn.Linear by a recipe."""
    main_grad = getattr(module.weight, "main_grad", None)
    return linear(x, module.weight, module.bias, recipe=recipe, backend=backend, main_grad=main_grad)
