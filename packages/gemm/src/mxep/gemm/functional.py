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

linear_together computes several linears of one input, such as q, k and v, as one GEMM with weights [wq; wk; wv].
Weights stay separate parameters. If scales cover 32 elements, results and weight gradients equal those of separate
GEMMs bit for bit. If scales cover a row ("fp8", and every recipe on "hopper"), dq, dk and dv of a row share the scale
of the largest of them. Elements far below it then lose bits, as in folding. The gradient of x is rounded once, not
once per weight.

M rows (capacity), N out features, K in features, G groups.
"""

import itertools
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
from mxep.gemm.product import How, SavedOperands, for_anomaly_mode, graph_is_retained, is_wanted
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
from mxep.quant import Axis, MXParts, MXTensor
from mxep.runtime.bundle import as_parts
from mxep.runtime.op import check_no_tangent, check_no_transform

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
            backward that does not need the gradient of w adds nothing, except under compiled autograd. It is added in
            fp32, or in bf16 if torch's GEMM computes it: on "dequant" and "blackwell"; of unquantized operands also on
            "triton", and in `linear` on "hopper".
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
    out: Tensor = multiply(a, (w,), bias, offs, How(recipe, chosen, out_dtype, wgrad_scale), (main_grad,), watched)
    return out


def multiply(
    a: Tensor,
    ws: Sequence[Tensor | FrozenWeight],
    bias: Tensor | None,
    offs: Tensor | None,
    how: How,
    main_grads: Sequence[Tensor | None],
    watched: Watched | None = None,
) -> Any:
    """`grouped_mm` without its checks, for one or several weights, which are multiplied as one with concatenated rows.

    If offs is None, there is one group of any number of rows, and weights and main_grads are (N, K). bias covers all
    rows. With several weights, the result is a tuple of views, (M, N of the weight).
    """
    if not torch.compiler.is_compiling():
        check_no_transform()
        check_no_tangent(a, bias, *(w for w in ws if isinstance(w, Tensor)))
    plain = watched is None and all(main_grad is None for main_grad in main_grads)
    if plain and torch.compiler.is_compiling() and product.is_known_by_name(a, how):
        return product.product(a, ws, bias, offs, how)
    if offs is None:
        ws, main_grads = ([x if x is None else x.unsqueeze(0) for x in given] for given in (ws, main_grads))  # type: ignore[assignment, union-attr]
    return _GroupedMM.apply(a, bias, offs, how, watched, *ws, *main_grads)  # type: ignore[no-untyped-call]


_T = TypeVar("_T")


# torch._disable_dynamo is torch.compiler.disable without importing dynamo, which takes seconds.
@torch._disable_dynamo  # type: ignore[attr-defined]
def between_graphs(function: Callable[..., _T], *tensors: Any, **options: Any) -> _T:
    """Call `function` outside of torch.compile's graphs: it breaks the graph."""
    return function(*tensors, **options)


_FIRST_WEIGHT = 5
"""Position of the first weight among the arguments of `_GroupedMM`."""


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # named arguments plus *more would be miscounted by torch.compile
        a, bias, offs, how, watched, *more = given
        ws, ctx.main_grads = more[: len(more) // 2], more[len(more) // 2 :]
        needs_a, *needs_w = (ctx.needs_input_grad[i] for i in (0, *_weights(ws)))
        out, a_saved, ws_saved, amax = product.run_forward(a, ws, bias, offs, how, (needs_a, any(needs_w)))
        ctx.how, ctx.watched = how, watched
        ctx.frozen = ws[0] if isinstance(ws[0], FrozenWeight) else None  # hooks on saved tensors must not see it
        first, *others = ws_saved if needs_a and ctx.frozen is None else (None,)
        (a_parts, ctx.a_rest), (w_parts, ctx.w_rest) = _split(a_saved), _split(first)
        ctx.save_for_backward(offs, *a_parts, *w_parts, amax, *others)
        ctx.saved_operands = None
        ctx.dtypes = a.dtype, ws[0].dtype, bias.dtype if bias is not None else None
        ctx.widths = tuple(x.shape[1] for x in ws)
        ctx.transposed = len(ws) == 1 and isinstance(ws[0], Tensor) and is_transposed(ws[0])
        ctx.before_weights = sum(isinstance(x, Tensor) for x in (a, bias, offs))
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
        recipe, kept, widths, places = ctx.how.recipe, ctx.saved_operands, ctx.widths, _weights(ctx.widths)
        needs_a, needs_bias, *needs = (
            ctx.needs_input_grad[argument] and is_wanted(ctx, tensor)
            for argument, tensor in ((0, 0), (1, 1), *zip(places, itertools.count(ctx.before_weights)))
        )
        needs_w = any(needs)
        w = amax = None
        gradients = as_parts(dys)
        quantized = kept is not None and not needs_a and kept.fits(*dys)
        if quantized:
            offs, gradients, a = kept.operands
        else:
            offs, *parts = ctx.saved_tensors
            amax, *others = parts[6:]
            a, ws = _joined(parts[:3], ctx.a_rest), (ctx.frozen or _joined(parts[3:6], ctx.w_rest), *others)
        if needs_a:
            w, amax = product.colwise_if_held(ws, amax, ctx.how)
        main_grads = tuple(main_grad if need else None for main_grad, need in zip(ctx.main_grads, needs))
        *dtypes, bias_dtype = ctx.dtypes
        da = dw = qdata = None
        if needs_a or needs_w:
            da, dw, qdata = product.backward(
                product.BackwardInput(a if needs_w else None, offs, w, amax, gradients, main_grads),
                how=ctx.how,
                wanted=(needs_a, needs_w),
                dtypes=tuple(dtypes),
                quantized=quantized and recipe.wgrad == "mx",
                widths=widths,
                transposed=ctx.transposed,
            )
        if not graph_is_retained():
            ctx.saved_operands = None
        elif needs_a and any(ctx.needs_input_grad[i] for i in places) and not needs_w:
            left = (qdata, *[None] * (len(widths) - 1)) if recipe.wgrad == "mx" else as_parts(dys)
            ctx.saved_operands = SavedOperands.of((offs, left, a), *dys)
        dbias = product.joined_sums(dys, offs).to(bias_dtype) if needs_bias else None
        dws = [None] * len(widths) if dw is None else [dw] if len(widths) == 1 else dw.split(widths, 1)
        dws = [x if need and held is None else None for x, need, held in zip(dws, needs, main_grads)]
        return for_anomaly_mode(da, offs), dbias, *[None] * (_FIRST_WEIGHT - 2), *dws, *[None] * len(widths)


_Parts = tuple[Tensor | None, Tensor | None, Tensor | None]
_Settings = tuple[Axis, int, torch.dtype] | None


def _split(x: Any) -> tuple[_Parts, _Settings]:
    """Tensors and settings of x. Saved as an MXTensor, hooks such as `save_on_cpu`'s would dequantize it."""
    x = MXParts.of(x) if isinstance(x, MXTensor) else x
    return (x[:3], x[3:]) if isinstance(x, MXParts) else ((x, None, None), None)


def _joined(parts: Sequence[Any], settings: _Settings) -> Any:
    qdata, scale, row_index = parts
    return qdata if settings is None else MXParts(qdata, scale, row_index, *settings)


def _weights(ws: Sequence[Any]) -> range:
    """Positions of the weights among the arguments of `_GroupedMM`."""
    return range(_FIRST_WEIGHT, _FIRST_WEIGHT + len(ws))


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
    how = How(recipe, select(backend, x.device), out_dtype or x.dtype, wgrad_scale)
    return _linears(x, (w,), (bias,), (main_grad,), how)[0]


def _linears(
    x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], main_grads: Sequence[Tensor | None], how: How
) -> tuple[Tensor, ...]:
    for w, bias, main_grad in zip(ws, biases, main_grads):
        options: dict[str, Any] = {"out_dtype": how.out_dtype, "main_grad": main_grad}
        check_linear(x, w, bias, recipe=how.recipe, rowwise=how.backend.wants_rowwise, **options)
    plain = how.recipe.scaling == "none" and x.dtype == ws[0].dtype == how.out_dtype == torch.bfloat16
    if plain and len(ws) == 1 and main_grads[0] is None and how.wgrad_scale == 1 and how.backend.bf16_is_torchs:
        return (nn.functional.linear(x, ws[0], biases[0]),)  # the same GEMMs, for a third of the host time
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    joined = None
    if given := [bias for bias in biases if bias is not None]:
        rows_of_bias = [given[0].new_zeros(len(w)) if bias is None else bias for w, bias in zip(ws, biases)]
        joined = (given[0] if len(ws) == 1 else torch.cat(rows_of_bias)).unsqueeze(0)
    outs = multiply(rows, ws, joined, None, how, main_grads)
    outs = outs if len(ws) > 1 else (outs,)
    return outs if x.dim() == 2 else tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)


def quantize_input(x: Tensor, *, recipe: Recipe | str, backend: str | Backend = "auto") -> Tensor:
    """Quantize x (..., K) bf16 or fp32 once, for several calls of `linear` with this recipe and backend.

    Returns an MXTensor (..., K), on "hopper" with one scale per row. With recipe "bf16" returns x itself. The gradient
    passes through unchanged.
    """
    recipe = Recipe.named(recipe)
    return select(backend, x.device).quantize_rows(x, recipe.fmt, recipe)


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

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return module_forward(self, input, self.recipe, self.backend)

    def extra_repr(self) -> str:
        backend = "" if self.backend == "auto" else f", backend={getattr(self.backend, 'name', self.backend)}"
        return f"{super().extra_repr()}, recipe={recipe_name(self.recipe)}{backend}"


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
    return _linears(x, weights, biases, main_grads, How(recipe, select(backend, x.device), out_dtype or x.dtype))
