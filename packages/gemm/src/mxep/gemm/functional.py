"""grouped_mm: one differentiable GEMM per group of rows, with operands quantized by a recipe.

    forward                                   backward
    a (M, K)  bf16, or MXTensor as it comes   dy (M, N)  bf16, or MXTensor as it comes
      quantize along K unless it is             quantize along N unless it is
    out = a w^T, w quantized along K          da = dy w, w quantized along N
      saved for backward: the qdata of a      dw = dy^T a, both from their qdata (wgrad "mx")

Forward saves the weight itself, not its qdata along N. Backward makes these, unless `quantize_weights_once` holds them.
Of `a`, backward keeps qdata and scales, half the bytes of bf16. Only wgrad "bf16" keeps a plain `a`.
An MXTensor is kept by reference: the lender of a receive slot must copy borrowed bytes.

M rows (capacity), N out features, K in features, G groups.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import mxep.gemm.compiled as compiled
import mxep.gemm.steps as steps
from mxep.gemm.anomaly import for_anomaly_mode
from mxep.gemm.backends import Backend, select
from mxep.gemm.checks import check_operands, check_tensors
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.partial_backward import SavedOperands, graph_is_retained, is_wanted
from mxep.gemm.recipe import Recipe
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
    """(M, N): a[rows of g] @ w[g].T + bias[g] for every group g. Differentiable in a, w and bias, once.

    a: (M, K) bf16 or fp32, or an MXTensor with the recipe's blocks along K. Its rows may be strided or have a
        row_index. Recipe "bf16" also takes fp64, on backend "reference".
    w: (G, N, K) bf16 or fp32. Its gradient has its dtype and is zero for empty groups. It is quantized at each call,
        along K in forward and along N in backward, or once within `quantize_weights_once`. Or a FrozenWeight, which has
        no gradient and is expanded at each call.
    offs: (G,) int32, inclusive cumulative group sizes, each a multiple of recipe.group_alignment. Rows from offs[-1] on
        are not read. In the result, and in the gradient of a, they are unspecified.
    recipe: a Recipe or its name. backend: "auto", a name of `mxep.gemm.backends.BACKENDS`, or a Backend.
    bias: (G, N) or None. Its gradient sums the incoming gradient as it is, unquantized if that is plain.
    out_dtype: bf16 or fp32, default a.dtype (an MXTensor's outer dtype). The gradient of a has a.dtype.
    main_grad: (G, N, K) fp32. Backward adds the gradient of w to it and leaves w.grad alone. A backward without that
        gradient, such as torch.autograd.grad(out, a), adds nothing. Compiled autograd computes all gradients, so it
        always adds. Gradients of unquantized operands are rounded to bf16 first, except on backend "reference". All
        others are added in fp32.
    wgrad_scale: factor of the gradient of w (not of a and bias), applied before it is rounded or added.
    watched: makes a context that backward runs in, for callers that have to know its exceptions.

    The incoming gradient may be an MXTensor of outer dtype out_dtype. With the recipe's blocks it is used as it is, in
    its own element format. Other blocks are dequantized and quantized again.
    Raises ValueError for wrong shapes, dtypes, devices or alignment; on CPU also for unordered, too long or unaligned
    offs. Raises RuntimeError if the backend cannot run here.
    Under torch.compile it is part of the graph. Only an MXTensor with a gradient breaks the graph, and it must not be
    made inside the graph, which raises. Pass the plain tensor instead: its qdata are the same.
    """
    recipe = Recipe.named(recipe) if isinstance(recipe, str) else recipe
    frozen = isinstance(w, FrozenWeight)
    check_tensors(a=a, **({} if frozen else {"w": w}))
    if torch.compiler.is_compiling() and (frozen or (isinstance(a, MXTensor) and a.requires_grad)):
        options: dict[str, Any] = {"bias": bias, "out_dtype": out_dtype}
        options |= {"main_grad": main_grad, "wgrad_scale": wgrad_scale, "watched": watched}
        return between_graphs(grouped_mm, a, w, offs, recipe=recipe, backend=backend, **options)
    out_dtype = out_dtype or a.dtype
    check_operands(a, w, offs, recipe=recipe, bias=bias, out_dtype=out_dtype, main_grad=main_grad)
    offs = offs.contiguous()  # kernels, torch's too, read it as packed
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
    """`grouped_mm` without its checks. With offs None there is one group of any number of rows, and weights and
    main_grads are (N, K).

    more: further weights, then their main_grads. All weights act as one, w's rows first, and bias covers all of them.
    The result is then a tuple with a view for each weight.
    """
    given: Any = watched, main_grad, *more[len(more) // 2 :]
    plain = torch.compiler.is_compiling() and all(x is None for x in given)
    if plain and compiled.is_known_by_name(a, recipe, backend):
        ws: Any = w, *more[: len(more) // 2]
        return compiled.product(a, ws, bias, offs, recipe, backend, out_dtype, wgrad_scale)
    if offs is None:
        w, main_grad, *more = (x if x is None else x.unsqueeze(0) for x in (w, main_grad, *more))  # type: ignore[assignment, union-attr]
    how = recipe, backend, out_dtype, main_grad, wgrad_scale, watched
    return _GroupedMM.apply(a, w, bias, offs, *how, *more)  # type: ignore[no-untyped-call]


_T = TypeVar("_T")


# The private name of torch.compiler.disable: the public one imports dynamo, which takes seconds.
@torch._disable_dynamo  # type: ignore[attr-defined]
def between_graphs(function: Callable[..., _T], *tensors: Any, **options: Any) -> _T:
    """Call a function outside of torch.compile's graphs."""
    return function(*tensors, **options)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # named arguments plus *more would be miscounted by torch.compile
        a, w, bias, offs, recipe, backend, out_dtype, main_grad, wgrad_scale, watched, *more = given
        ws: Any = (w, *more[: len(more) // 2])
        needs = ctx.needs_input_grad[0], any(ctx.needs_input_grad[i] for i in _places(len(ws)))
        how = recipe, backend, out_dtype, needs
        out, a_saved, (first, *others), amax = steps.run_forward(a, ws, bias, offs, *how)
        a_parts, ctx.a_rest = taken_apart(a_saved)
        ctx.frozen = first if isinstance(first, FrozenWeight) else None
        w_parts, ctx.w_rest = taken_apart(first if needs[0] and ctx.frozen is None else None)
        ctx.save_for_backward(offs, *a_parts, *w_parts, amax, *(others if needs[0] else ()))
        ctx.recipe, ctx.backend, ctx.wgrad_scale, ctx.watched = recipe, backend, wgrad_scale, watched
        ctx.main_grads = main_grad, *more[len(more) // 2 :]
        ctx.saved_operands = None
        ctx.dtypes = a.dtype, w.dtype, bias.dtype if bias is not None else None
        ctx.widths = tuple(x.shape[1] for x in ws)
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
            w, amax = steps.colwise_if_held(ws, amax, recipe, backend)
        main_grads = tuple(main_grad if need else None for main_grad, need in zip(ctx.main_grads, needs))
        da = dw = qdata = None
        if need_a or need_w:
            how: dict[str, Any] = {"recipe": recipe, "backend": backend, "wanted": (need_a, need_w), "widths": widths}
            how |= {"dtypes": tuple(dtypes), "scale": ctx.wgrad_scale, "quantized": quantized and recipe.wgrad == "mx"}
            given = steps.BackwardInput(a if need_w else None, offs, w, amax, gradients, main_grads)
            da, dw, qdata = steps.backward(given, **how)
        if not graph_is_retained():
            ctx.saved_operands = None
        elif need_a and any(ctx.needs_input_grad[i] for i in _places(len(widths))) and not need_w:
            left = (qdata, *[None] * (len(widths) - 1)) if recipe.wgrad == "mx" else as_parts(dys)
            ctx.saved_operands = SavedOperands.of((offs, left, a), *dys)
        dbias = steps.joined_sums(dys, offs).to(bias_dtype) if need_bias else None
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
    """Tensors of x to save, and the rest that `joined` needs. Hooks on saved tensors, as `save_on_cpu` sets them, would
    turn an MXTensor into plain values."""
    if not isinstance(x, MXTensor | MXParts):
        return (x, None, None), None
    return (x.qdata, x.scale, x.row_index), (x.axis, x.block_size, x.dtype)


def joined(parts: Sequence[Tensor | None], rest: _Rest) -> Any:
    """Rebuild the MXTensor, or return the plain tensor."""
    found = _joined(parts, rest)
    return found.join() if isinstance(found, MXParts) else found


def _joined(parts: Sequence[Tensor | None], rest: _Rest) -> Any:
    qdata, scale, row_index = parts
    if rest is None or qdata is None or scale is None:
        return qdata
    return MXParts(qdata, scale, row_index, *rest)
