"""grouped_mm, linear and linear_together: differentiable GEMMs whose operands are quantized as a recipe says.

    forward                                   backward
    a (M, K)  bf16, or MXTensor               dy (M, N)  bf16, or MXTensor
      quantize along K if bf16                  quantize along N if bf16
    out = a w^T, w quantized along K          da = dy w, w quantized along N
                                              dw = dy^T a, from the qdata of both (wgrad "mx")

Forward saves qdata and scales of `a`, which have half the bytes of bf16. Only with wgrad "bf16" it saves a plain `a`.
An MXTensor is saved without a copy. If its bytes lie in a receive slot that will be overwritten, the caller must copy
them first. Forward saves the unquantized weight, and backward quantizes it along N, unless `quantize_weights_once`
holds that quantization already.

linear treats x (..., K) as one group of M rows, (M, K). M may be any number: the weight gradient, which contracts over
tokens, fills its last block of 32 with zero rows.

linear_together computes several linears of one input as one GEMM: q, k and v, or gate and up.

    forward   x --quantize once--> x [wq; wk; wv]^T --> views of one result: q, k, v
    dgrad     [dq, dk, dv] --quantize once--> one GEMM that contracts over all their out features
    wgrad     the qdata of x and of [dq, dk, dv] --> one GEMM with rows dwq, dwk, dwv

Weights stay separate parameters. If scales cover 32 elements, results and weight gradients equal those of separate
GEMMs bit for bit. If scales cover a row ("fp8", and every recipe on "hopper"), dq, dk and dv of a row share the scale
of the largest of them. Elements far below it then lose bits, as in folding. The gradient of x is rounded once, not
once per weight.

M rows (capacity), N out features, K in features, G groups.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import mxep.gemm.product as product
from mxep.gemm.backends import Backend, select
from mxep.gemm.backends.base import is_transposed
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.product import SavedOperands, for_anomaly_mode, graph_is_retained, is_wanted
from mxep.gemm.recipe import (
    Recipe,
    check_linear,
    check_operands,
    check_plain,
    check_tensors,
    recipe_for,
    recipe_name,
    recipe_of,
)
from mxep.quant import MXParts, MXTensor
from mxep.runtime.bundle import as_parts

Watched = Callable[[], AbstractContextManager[None]]


def grouped_mm(
    a: Tensor,
    w: Tensor | FrozenWeight,
    offs: Tensor,
    *,
    recipe: Recipe | str,
    backend: str | Backend = "auto",
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    main_grad: Tensor | None = None,
    wgrad_scale: float = 1.0,
    watched: Watched | None = None,
) -> Tensor:
    """Compute a[rows of g] @ w[g].T + bias[g] for every group g. Differentiable once, in a, w and bias.

    Args:
        a: (M, K) bf16 or fp32, or an MXTensor with the recipe's blocks along K. Rows may be strided. An MXTensor may
            have a row_index. With recipe "bf16" on backend "reference", a may be fp64.
        w: (G, N, K) bf16 or fp32. It is quantized at each call, or once within `quantize_weights_once`. Its gradient
            has w's dtype, and is zero for empty groups. w may also be a FrozenWeight, which has no gradient and is
            expanded at each call.
        offs: (G,) int32, inclusive cumulative group sizes. Each size is a multiple of recipe.group_alignment. Rows from
            offs[-1] on are not read. They are unspecified in the result and in the gradient of a.
        recipe: a Recipe or its name.
        backend: "auto", a name in `mxep.gemm.backends.BACKENDS`, or a Backend.
        bias: (G, N) or None. Its gradient is summed from the incoming gradient before that is quantized.
        out_dtype: bf16 or fp32, default a.dtype (an MXTensor's outer dtype). The gradient of a always has a.dtype.
        main_grad: (G, N, K) fp32 or None. If given, backward adds the gradient of w to it, and leaves w.grad alone. A
            backward that does not need the gradient of w, such as torch.autograd.grad(out, a), adds nothing, except
            under compiled autograd. The gradient is rounded to bf16 before it is added if torch's GEMM computes it: on
            "dequant" and "blackwell"; with unquantized operands also on "triton", and in `linear` on "hopper".
            Otherwise it is added in fp32.
        wgrad_scale: factor for the gradient of w, applied before it is rounded or added. Other gradients are unscaled.
        watched: function that returns a context manager. Backward runs inside it, so that callers see exceptions.

    Returns (M, N) in out_dtype. Raises ValueError for wrong shapes, dtypes, devices or alignment; on CPU also for
    unordered, too long or unaligned offs. Raises RuntimeError if the backend cannot run here.

    The incoming gradient may be an MXTensor with outer dtype out_dtype. If it has the recipe's blocks, it is used
    unchanged, in its own element format. If not, it is dequantized and quantized again.

    torch.compile traces grouped_mm into its graph, but an MXTensor `a` that requires a gradient, or a FrozenWeight,
    breaks the graph. An MXTensor that is made inside the graph and requires a gradient raises. Pass the plain tensor
    instead: it is quantized to the same qdata.
    """
    recipe = Recipe.named(recipe)
    frozen = isinstance(w, FrozenWeight)
    check_tensors(a=a, **({} if frozen else {"w": w}))
    if torch.compiler.is_compiling() and (frozen or (isinstance(a, MXTensor) and a.requires_grad)):
        options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype}
        options |= {"main_grad": main_grad, "wgrad_scale": wgrad_scale, "watched": watched}
        return between_graphs(grouped_mm, a, w, offs, recipe=recipe, backend=backend, **options)
    out_dtype = out_dtype or a.dtype
    check_operands(a, w, offs, recipe=recipe, bias=bias, out_dtype=out_dtype, main_grad=main_grad)
    offs = offs.contiguous()  # all kernels assume stride 1, torch's, too
    chosen = select(backend, a.device)
    out: Tensor = multiply(a, w, bias, offs, recipe, chosen, out_dtype, main_grad, wgrad_scale, watched=watched)
    return out


def multiply(
    a: Tensor,
    w: Tensor | FrozenWeight,
    bias: Tensor | None,
    offs: Tensor | None,
    recipe: Recipe,
    backend: Backend,
    out_dtype: torch.dtype,
    main_grad: Tensor | None,
    wgrad_scale: float,
    *more: Tensor | None,
    watched: Watched | None = None,
) -> Any:
    """`grouped_mm` without its checks, for one or several weights.

    If offs is None, there is one group of any number of rows, and weights and main_grads are (N, K).

    more: further weights, then a main_grad for each of them. All weights are multiplied as one with concatenated rows,
    w's first. bias covers all these rows. With several weights, the result is a tuple of views, (M, N of the weight).
    """
    given: Any = watched, main_grad, *more[len(more) // 2 :]
    plain = torch.compiler.is_compiling() and all(x is None for x in given)
    if plain and product.is_known_by_name(a, recipe, backend):
        ws: Any = w, *more[: len(more) // 2]
        return product.product(a, ws, bias, offs, recipe, backend, out_dtype, wgrad_scale)
    if offs is None:
        w, main_grad, *more = (x if x is None else x.unsqueeze(0) for x in (w, main_grad, *more))  # type: ignore[assignment, union-attr]
    how = recipe, backend, out_dtype, main_grad, wgrad_scale, watched
    return _GroupedMM.apply(a, w, bias, offs, *how, *more)  # type: ignore[no-untyped-call]


_T = TypeVar("_T")


# torch._disable_dynamo is torch.compiler.disable without importing dynamo, which takes seconds.
@torch._disable_dynamo  # type: ignore[attr-defined]
def between_graphs(function: Callable[..., _T], *tensors: Any, **options: Any) -> _T:
    """Call `function` outside of torch.compile's graphs: it breaks the graph."""
    return function(*tensors, **options)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # named arguments plus *more would be miscounted by torch.compile
        a, w, bias, offs, recipe, backend, out_dtype, main_grad, wgrad_scale, watched, *more = given
        ws: Any = (w, *more[: len(more) // 2])
        needs = ctx.needs_input_grad[0], any(ctx.needs_input_grad[i] for i in _places(len(ws)))
        how = recipe, backend, out_dtype, needs
        out, a_saved, (first, *others), amax = product.run_forward(a, ws, bias, offs, *how)
        a_parts, ctx.a_rest = taken_apart(a_saved)
        ctx.frozen = first if isinstance(first, FrozenWeight) else None
        w_parts, ctx.w_rest = taken_apart(first if needs[0] and ctx.frozen is None else None)
        ctx.save_for_backward(offs, *a_parts, *w_parts, amax, *(others if needs[0] else ()))
        ctx.recipe, ctx.backend, ctx.wgrad_scale, ctx.watched = recipe, backend, wgrad_scale, watched
        ctx.main_grads = main_grad, *more[len(more) // 2 :]
        ctx.saved_operands = None
        ctx.dtypes = a.dtype, w.dtype, bias.dtype if bias is not None else None
        ctx.widths = tuple(x.shape[1] for x in ws)
        ctx.transposed = len(ws) == 1 and isinstance(w, Tensor) and is_transposed(w)
        ctx.before_others = sum(isinstance(x, Tensor) for x in (a, w, bias, offs, main_grad))
        return out if len(ws) == 1 else out.split(ctx.widths, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.watched is None:
            return _GroupedMM._backward(ctx, *dys)
        with ctx.watched():
            return _GroupedMM._backward(ctx, *dys)

    @staticmethod
    def _backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        recipe, backend, kept, widths = ctx.recipe, ctx.backend, ctx.saved_operands, ctx.widths
        before = 0, 1, 2 if ctx.frozen is None else 1  # tensors before a, w and bias
        need_a, need_w, need_bias = (
            need and is_wanted(ctx, i) for i, need in zip(before, ctx.needs_input_grad, strict=False)
        )
        needs = [need_w] + [
            ctx.needs_input_grad[i] and is_wanted(ctx, ctx.before_others + j)
            for j, i in enumerate(_places(len(widths))[1:])
        ]
        need_w = any(needs)
        *dtypes, bias_dtype = ctx.dtypes
        w: Any = None
        amax, gradients = None, as_parts(dys)
        quantized = kept is not None and not need_a and kept.fits(*dys)
        if quantized:
            offs, gradients, a = kept.operands
        else:
            offs, *parts = ctx.saved_tensors
            amax, *others = parts[6:]
            a, ws = _joined(parts[:3], ctx.a_rest), [ctx.frozen or _joined(parts[3:6], ctx.w_rest), *others]
        if need_a:
            w, amax = product.colwise_if_held(ws, amax, recipe, backend)
        main_grads = tuple(main_grad if need else None for main_grad, need in zip(ctx.main_grads, needs))
        da = dw = qdata = None
        if need_a or need_w:
            how: dict[str, Any] = {"recipe": recipe, "backend": backend, "wanted": (need_a, need_w), "widths": widths}
            how |= {"dtypes": tuple(dtypes), "scale": ctx.wgrad_scale, "quantized": quantized and recipe.wgrad == "mx"}
            how["transposed"] = ctx.transposed
            given = product.BackwardInput(a if need_w else None, offs, w, amax, gradients, main_grads)
            da, dw, qdata = product.backward(given, **how)
        if not graph_is_retained():
            ctx.saved_operands = None
        elif need_a and any(ctx.needs_input_grad[i] for i in _places(len(widths))) and not need_w:
            left = (qdata, *[None] * (len(widths) - 1)) if recipe.wgrad == "mx" else as_parts(dys)
            ctx.saved_operands = SavedOperands.of((offs, left, a), *dys)
        dbias = product.joined_sums(dys, offs).to(bias_dtype) if need_bias else None
        da = for_anomaly_mode(da, offs)
        if len(widths) == 1:
            return da, dw, dbias, *[None] * 7
        dws = [None] * len(widths) if dw is None else dw.split(widths, 1)
        dw, *others = (x if need and held is None else None for x, need, held in zip(dws, needs, ctx.main_grads))
        return da, dw, dbias, *[None] * 7, *others, *[None] * len(others)


def _places(weights: int) -> tuple[int, ...]:
    """Positions of the weights among the arguments of `_GroupedMM`."""
    return (1, *range(10, 9 + weights))


_Rest = tuple[int | tuple[int, int], int, torch.dtype] | None
_Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


def taken_apart(x: Any) -> tuple[_Parts, _Rest]:
    """Split x into plain tensors to save for backward, and the settings from which `joined` rebuilds x.

    An MXTensor itself is not saved, because hooks on saved tensors, such as `save_on_cpu`'s, would dequantize it.
    """
    if not isinstance(x, MXTensor | MXParts):
        return (x, None, None), None
    return (x.qdata, x.scale, x.row_index), (x.axis, x.block_size, x.dtype)


def joined(parts: Sequence[Tensor | None], rest: _Rest) -> Any:
    """Rebuild x from the result of `taken_apart(x)`: an MXTensor, or the plain tensor."""
    found = _joined(parts, rest)
    return found.join() if isinstance(found, MXParts) else found


def _joined(parts: Sequence[Tensor | None], rest: _Rest) -> Any:
    qdata, scale, row_index = parts
    if rest is None or qdata is None or scale is None:
        return qdata
    return MXParts(qdata, scale, row_index, *rest)


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
    """Compute x @ w.T + bias. Differentiable once, in x, w and bias.

    Args:
        x: (..., K) bf16 or fp32, with any leading axes and any number of rows. Or an MXTensor, from `quantize_input` or
            with the recipe's blocks along K. With recipe "bf16" on backend "reference", x may be fp64.
        w: (N, K) bf16 or fp32, quantized as for `grouped_mm`. The gradient has w's dtype.
        bias: (N,) or None. The gradient has bias's dtype.
        recipe: a Recipe, its name, or "auto". "auto" applies `auto_recipe` to the number of rows, K and N. If it
            chooses bf16, x must be plain.
        out_dtype: bf16 or fp32. The default is x.dtype, within torch.autocast the autocast dtype. The gradient of x
            always has x.dtype.
        main_grad: (N, K) fp32 or None, as for `grouped_mm`.
        backend, wgrad_scale: as for `grouped_mm`.

    Returns (..., N) in out_dtype. Incoming gradients that are MXTensors, and torch.compile: as for `grouped_mm`.

    If w is a DTensor (tensor parallelism), x must be a DTensor, too: see `mxep.gemm.tensor_parallel`.

    Raises ValueError for wrong shapes, dtypes or devices, and if K or N is no multiple of recipe.group_alignment.
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
    """Quantize x (..., K) bf16 or fp32 once, for several calls of `linear` with this recipe and backend.

    Returns an MXTensor (..., K), on "hopper" with one scale per row. With recipe "bf16" returns x itself. The gradient
    passes through unchanged.
    """
    recipe = Recipe.named(recipe)
    return select(backend, x.device).quantize_rows(x, recipe.fmt, recipe)


class MarkOfTransformers:
    """Descriptor for a linear's attribute `_is_hooked`, which transformers sets on each module that it shards.

    transformers' tensor parallelism bypasses `register_parameter`, where shards are otherwise checked. Setting the
    attribute raises ValueError if the shards do not fit the recipe. This is a descriptor and not a `__setattr__`,
    because FSDP2 shards modules with a `__setattr__` differently.

    how: function of a module that returns its weight's name and recipe; None if it is not a converted linear.
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
    """nn.Linear that computes with `linear`. Parameters, their names and their initialization are nn.Linear's.

    recipe: a Recipe, its name, or "auto", which decides at each call by the shape.
    backend: as for `grouped_mm`.

    If the weight has an attribute `main_grad`, backward adds the weight's gradient to `main_grad`, not to `.grad`.
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
        """Make a Linear that shares the parameters of `module` (no copies). Hooks of `module` are not taken over."""
        sizes = module.in_features, module.out_features, module.bias is not None
        made = cls(*sizes, device="meta", recipe=recipe, backend=backend)
        made.weight, made.bias = module.weight, module.bias
        return made.train(module.training)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as nn.Module does. Raise ValueError if `param` is a sharded weight that does not fit the recipe."""
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
    """Raise ValueError if `parameter` is sharded for tensor parallelism and its shards do not fit the recipe.

    Only a DTensor that replaces a plain parameter is checked, as `parallelize_module` does. A DTensor that replaces a
    DTensor may be FSDP2's, which is gathered before a GEMM.
    """
    if hasattr(parameter, "device_mesh") and not hasattr(module._parameters.get(name), "device_mesh"):
        from mxep.gemm.tensor_parallel import check_shards

        check_shards(fqn, parameter, recipe)


def module_forward(module: nn.Linear, x: Tensor, recipe: Recipe | str, backend: str | Backend) -> Tensor:
    weight = module.weight  # read once, as a parametrization computes it at each read
    main_grad = getattr(weight, "main_grad", None)
    return linear(x, weight, module.bias, recipe=recipe, backend=backend, main_grad=main_grad)


def linear_together(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    recipe: Recipe | str,
    backend: str | Backend = "auto",
    out_dtype: torch.dtype | None = None,
    main_grads: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, ...]:
    """Compute x @ w.T + bias for each of several weights, as one GEMM. Differentiable once, in x, weights and biases.

    Args:
        x: (..., K), as for `linear`.
        weights: (N, K) each. All have one dtype. Each N may be another multiple of recipe.group_alignment.
        biases: None, or (N,) or None for each weight.
        main_grads: None, or (N, K) fp32 or None for each weight.
        recipe: as for `linear`. "auto" decides by the sum of all N.
        backend, out_dtype: as for `linear`, and so are autocast and torch.compile.

    Returns (..., N) for each weight. The results are views of one tensor, and must not be written to in place. With
    recipe "bf16" each weight has its own GEMM and result.

    Raises ValueError as `linear` does. Also raises it if weights have several dtypes or are DTensors, or if the numbers
    of weights, biases and main_grads differ. Raises RuntimeError if the backend cannot run here.
    """
    check_plain(x=x)
    check_tensors(x=x, **{f"weights[{i}]": w for i, w in enumerate(weights)})
    biases, main_grads = (given or [None] * len(weights) for given in (biases, main_grads))
    if not weights or {len(biases), len(main_grads)} != {len(weights)}:
        got = f"{len(weights)} weights, {len(biases)} biases, {len(main_grads)} main_grads"
        raise ValueError(f"linear_together: got {got}, want one weight at least, and as many of all")
    if len({w.dtype for w in weights}) > 1 or any(hasattr(w, "device_mesh") for w in weights):
        got = ", ".join(f"{type(w).__name__} {w.dtype}" for w in weights)
        raise ValueError(f"linear_together: got {got}, want plain weights of one dtype: call linear for each")
    recipe = recipe_for(recipe, x, sum(w.shape[0] for w in weights if w.dim()))
    options: dict[str, Any] = {"recipe": recipe, "backend": backend, "out_dtype": out_dtype}
    if recipe.scaling == "none":
        each = zip(weights, biases, main_grads)
        return tuple(linear(x, w, bias, main_grad=main_grad, **options) for w, bias, main_grad in each)
    if torch.is_autocast_enabled(x.device.type):
        options["out_dtype"] = out_dtype or torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            return linear_together(x, weights, biases, main_grads=main_grads, **options)
    if torch.compiler.is_compiling() and isinstance(x, MXTensor) and x.requires_grad:
        return between_graphs(linear_together, x, weights, biases, main_grads=main_grads, **options)
    out_dtype = out_dtype or x.dtype
    chosen = select(backend, x.device)
    for w, bias, main_grad in zip(weights, biases, main_grads):
        how: dict[str, Any] = {"out_dtype": out_dtype, "main_grad": main_grad, "rowwise": chosen.wants_rowwise}
        check_linear(x, w, bias, recipe=recipe, **how)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    (first, *more), (held, *more_held) = weights, main_grads
    bias = None
    if given := [bias for bias in biases if bias is not None]:
        rows_of_bias = [given[0].new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases)]
        bias = torch.cat(rows_of_bias).unsqueeze(0)
    outs = multiply(rows, first, bias, None, recipe, chosen, out_dtype, held, 1.0, *more, *more_held)
    outs = outs if more else (outs,)
    return outs if x.dim() == 2 else tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)
