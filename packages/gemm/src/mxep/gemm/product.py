"""A GEMM and its gradients: `forward` and `backward`, which are replayed as CUDA graphs, and two ops for torch.compile.

    mxep::product_forward     a, weights (G, N, K) or (N, K), bias, offs -> out, tensors to save for backward
    mxep::product_backward    dy and the saved tensors -> da and dw, if needed

A compiled graph calls the two ops without tracing into them. They run the eager code, with its replays and with weights
that `quantize_weights_once` holds. So a compiled GEMM costs the host as much as an eager one.

A backward pass may need da or dw only. It then keeps the operands of the other gradient for a later pass:

    dx, = torch.autograd.grad(out, x, dy, retain_graph=True)     runs dgrad, and keeps the operands of wgrad
    dw, = torch.autograd.grad(out, w, dy)                        runs wgrad with the kept operands, without quantizing

Pipeline schedules that split backward (zero bubble) make these two calls. `ctx.needs_input_grad` cannot tell them
apart, because it says which inputs required a gradient in forward. If backward computed dw in both calls, dw would be
added to main_grad twice. So `is_wanted` asks autograd.

M rows, N out features of all weights, K in features, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.gemm.backends import BACKENDS, Backend, select
from mxep.gemm.backends.base import empty_gradient, is_transposed
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.quantize_once import SavedWeight, is_held, join_parts, rowwise_and_saved, weight_parts, weights_are_held
from mxep.gemm.recipe import Recipe
from mxep.quant import BLOCK, E4M3, MXParts, MXTensor, group_sums
from mxep.runtime.bundle import Operands, as_parts
from mxep.runtime.replay import replayed


class How(NamedTuple):
    """Settings of a GEMM and its gradients. out_dtype: of the result. wgrad_scale: factor for the weight gradient."""

    recipe: Recipe
    backend: Backend
    out_dtype: torch.dtype
    wgrad_scale: float = 1.0


class Product(NamedTuple):
    """out (M, N), a (M, K) for wgrad, w in 2-D blocks for dgrad, and amax (G, K) of w's columns; None if not needed."""

    out: Tensor
    a: Any
    blocks: Any
    amax: Tensor | None


@replayed
def forward(a: Any, w: Any, bias: Tensor | None, offs: Tensor | None, *, how: How, needs: tuple[bool, bool]) -> Product:
    """Quantize a and w, and multiply them as `Backend.forward` does.

    a: (M, K), plain or quantized. w: (G, N, K), plain, quantized or frozen, or a tuple of weights with concatenated
    rows. needs: (True if a needs a gradient, True if w does).
    """
    recipe, backend = how.recipe, how.backend
    qdata = a if isinstance(a, MXTensor) else backend.quantize_rows(a, recipe.fmt, recipe)
    given = isinstance(w, MXTensor)
    rowwise, saved = (w, SavedWeight(w, None)) if given else rowwise_and_saved(w, recipe, backend, dgrad=needs[0])
    if isinstance(rowwise, FrozenWeight):
        rowwise = backend.expand_rowwise(rowwise)
    out = backend.forward(qdata, rowwise, offs, bias=bias, out_dtype=how.out_dtype)
    kept = (qdata if recipe.wgrad == "mx" else a) if needs[1] else None
    blocks = saved.weight if needs[0] and not given and isinstance(saved.weight, MXTensor) else None
    return Product(out, kept, blocks, saved.amax if needs[0] else None)


@dataclass(frozen=True)
class BackwardInput(Operands):
    """Operands of backward.

    a: (M, K), as forward saved it; None if dw is not wanted.
    w: the weight, plain, quantized or frozen, or a tuple of weights; None if da is not wanted.
    amax: (G, K) amax of w's columns, or None.
    dys, main_grads: the incoming gradient (M, N), and fp32 or None, of each weight.
    """

    a: Any
    offs: Tensor | None
    w: Any
    amax: Tensor | None
    dys: tuple[Any, ...]
    main_grads: tuple[Tensor | None, ...]


class ProductGradients(NamedTuple):
    """da (M, K) or None, dw (G, N, K) or None, and dy (M, N): dys as the last GEMM multiplied them."""

    da: Tensor | None
    dw: Tensor | None
    dy: Any


@replayed
def backward(
    given: BackwardInput,
    *,
    how: How,
    wanted: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    quantized: bool,
    widths: tuple[int, ...],
    transposed: bool,
) -> ProductGradients:
    """Compute the gradients of a and w. Drops the references to a and dys in `given`, so that they may be freed.

    Args:
        wanted: (True to compute da, True to compute dw). A gradient that is not wanted is None. dw is also None if all
            of it was added to main_grads.
        dtypes: (dtype of da, dtype of dw).
        quantized: True if dys is one tensor for all weights, joined and quantized by an earlier call.
        widths: N of each weight.
        transposed: as for `Backend.wgrad`, if there is one weight.
    """
    recipe, backend, scale = how.recipe, how.backend, how.wgrad_scale
    a, offs, dys, main_grads = given.a, given.offs, given.dys, given.main_grads
    given.release("a", "dys")
    da = dw = None
    dy = qdata = dys[0]
    if not quantized and (wanted[0] or recipe.wgrad == "mx"):
        if len(dys) > 1:
            qdata = backend.quantize_parts([*map(plain, dys)], recipe.grad_fmt, recipe)
        elif not (isinstance(dy, MXTensor) and recipe.fits(dy)):  # a gradient with the recipe's blocks stays as it is
            qdata = backend.quantize_rows(plain(dy), recipe.grad_fmt, recipe)
    if recipe.wgrad != "mx" and len(widths) > 1:
        dy = torch.cat([*map(plain, dys)], 1)
    del dys
    if wanted[0]:
        colwise = SavedWeight(given.w, given.amax).colwise(recipe, backend)
        if isinstance(colwise, FrozenWeight):
            colwise = backend.expand_colwise(colwise)
        da = backend.dgrad(qdata, colwise, offs, out_dtype=dtypes[0])
        del colwise
    if wanted[1]:
        if recipe.wgrad != "mx":
            a, qdata = plain(a), plain(dy)
        operands = backend.prepare_wgrad(qdata, a, offs, recipe)
        del a
        if len(widths) == 1:
            where: dict[str, Any] = {"accumulate_into": main_grads[0], "transposed": transposed}
            dw = backend.wgrad(operands, offs, out_dtype=dtypes[1], scale=scale, **where)
        else:
            added = [main_grad is not None for main_grad in main_grads]
            dw = backend.wgrad(operands, offs, out_dtype=torch.float32 if any(added) else dtypes[1], scale=scale)
            assert dw is not None
            for main_grad, part in zip(main_grads, dw.split(widths, 1)):
                if main_grad is not None:
                    main_grad.add_(part)
            dw = None if all(added) else dw.to(dtypes[1])
    return ProductGradients(da, dw, qdata)


def plain(x: Tensor) -> Tensor:
    """x itself, or its dequantized values if x is an MXTensor."""
    return x.dequantize() if isinstance(x, MXTensor) else x


def joined_sums(dys: Sequence[Tensor], offs: Tensor | None) -> Tensor:
    """Sum dys, joined to (M, N), over each group's rows. Returns (G, N) fp32, or fp64 for fp64. No host sync."""
    if offs is not None:
        sums = [group_sums(dy, offs) for dy in dys]
    else:
        sums = [dy.sum(0, keepdim=True, dtype=torch.promote_types(dy.dtype, torch.float32)) for dy in map(plain, dys)]
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


class SavedProduct(NamedTuple):
    """Result of `run_forward`: out, a and amax as in Product.

    ws: tuple of weights for dgrad, or of one weight that is already quantized in 2-D blocks.
    """

    out: Tensor
    a: Any
    ws: tuple[Any, ...]
    amax: Tensor | None


def run_forward(
    a: Any, ws: Sequence[Any], bias: Tensor | None, offs: Tensor | None, how: How, needs: tuple[bool, bool]
) -> SavedProduct:
    """Run `forward`, with the quantized weight that `quantize_weights_once` holds, if there is one."""
    whole, saved = join_parts(ws), None
    w: Any = whole
    if is_held(whole, how.recipe):
        w, saved = rowwise_and_saved(whole, how.recipe, how.backend, dgrad=needs[0])
    if how.wgrad_scale != 1.0:  # records of forward need not differ by it
        how = how._replace(wgrad_scale=1.0)
    made: Product = forward(as_parts(a), as_parts(w), bias, offs, how=how, needs=needs)
    if saved is not None:
        return SavedProduct(made.out, made.a, weight_parts(saved.weight), saved.amax)
    return SavedProduct(made.out, made.a, tuple(ws) if made.blocks is None else (made.blocks,), made.amax)


def colwise_if_held(ws: Sequence[Any], amax: Tensor | None, how: How) -> tuple[Any, Any]:
    """(weight, amax) for `backward`; the weight is quantized for dgrad if `quantize_weights_once` holds it."""
    whole = join_parts(ws)
    if isinstance(ws[0], Tensor) and is_held(whole, how.recipe):
        return as_parts(SavedWeight(whole, amax).colwise(how.recipe, how.backend)), None
    return whole, amax


def is_known_by_name(a: Tensor, how: How) -> bool:
    """True if `product` may be called: a is plain, wgrad uses qdata, and recipe and backend can be found by name."""
    recipe = how.recipe
    named = recipe.fmt == E4M3 and BACKENDS.get(how.backend.name) is how.backend
    return named and recipe.scaling != "none" and recipe.wgrad == "mx" and not isinstance(a, MXTensor)


def product(a: Tensor, ws: Sequence[Any], bias: Tensor | None, offs: Tensor | None, how: How) -> Any:
    """Compute what `multiply` does, through the op for torch.compile. `is_known_by_name` must be True."""
    needs = [a.requires_grad, any(w.requires_grad for w in ws), bias is not None and bias.requires_grad]
    needs = [need and torch.is_grad_enabled() for need in needs]
    out = forward_op(a, [*ws], bias, offs, how.recipe.name, how.backend.name, how.out_dtype, how.wgrad_scale, needs)[0]
    return out if len(ws) == 1 else out.split([w.shape[-2] for w in ws], 1)


def _forward(
    a: Tensor, ws: list[Tensor], bias: Tensor | None, offs: Tensor | None, recipe: str, backend: str,
    out_dtype: torch.dtype, wgrad_scale: float, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns [out (M, N), qdata and scales of a, those of w if it has 2-D blocks, amax of w's columns].

    Missing tensors are 0-d.
    """
    how = How(Recipe.named(recipe), select(backend, a.device), out_dtype)
    with torch.no_grad():
        ws = _grouped(ws)
        out, rows, w, amax = run_forward(a, ws, bias, offs, how, (needs[0], needs[1]))
        saved = [*_parts(rows), *(_parts(w[0]) if needs[0] else (None, None)), amax if needs[0] else None]
        if is_held(join_parts(ws), how.recipe):  # copy held tensors, because a compiled graph may overwrite outputs
            saved[2:] = [x if x is None else x.clone() for x in saved[2:]]
    return [out, *(a.new_empty(()) if x is None else x for x in saved)]


forward_op = torch.library.custom_op("mxep::product_forward", _forward, mutates_args=())
forward_op.register_fake(_forward)  # the function itself: fake tensors are never replayed or held


@torch.library.custom_op("mxep::product_backward", mutates_args=())
def backward_op(
    dy: Tensor, saved: list[Tensor], ws: list[Tensor], offs: Tensor | None, recipe: str, backend: str,
    dtype: torch.dtype, wgrad_scale: float, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Returns [da (M, K) in dtype, dw (G, N, K)]. A gradient that `needs` excludes is left out of the list."""
    ws = _grouped(ws)
    qdata, scale, w_qdata, w_scale, amax = (x if x.dim() else None for x in saved)
    rows = None
    if qdata is not None and scale is not None:
        rows = MXParts(qdata, scale, None, -1, qdata.shape[-1] // scale.shape[-1], dtype)
    found: list[Any] = ws
    if w_qdata is not None and w_scale is not None:
        found = [MXParts(w_qdata, w_scale, None, (-2, -1), BLOCK, ws[0].dtype)]
    how = How(Recipe.named(recipe), select(backend, dy.device), dtype, wgrad_scale)
    with torch.no_grad():
        w, amax = colwise_if_held(found, amax, how) if needs[0] else (None, None)
        da, dw, _ = backward(
            BackwardInput(rows, offs, w, amax, (dy,), (None,)),
            how=how,
            wanted=(needs[0], needs[1]),
            dtypes=(dtype, ws[0].dtype),
            quantized=False,
            widths=(dy.shape[1],),
            transposed=len(ws) == 1 and is_transposed(ws[0]),
        )
    return [grad for grad in (da, dw) if grad is not None]


@backward_op.register_fake
def _(dy: Tensor, saved: list[Tensor], ws: list[Tensor], offs: Tensor | None, *how: Any) -> list[Tensor]:
    *_, dtype, _, needs = how
    first, *others = _grouped(ws)
    groups, _, width = first.shape
    da = dy.new_empty(dy.shape[0], width, dtype=dtype)
    dw = first.new_empty(groups, dy.shape[1], width) if others else empty_gradient(first)
    return [grad for grad, need in zip((da, dw), needs) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, ws, bias, offs, *names, _, wgrad_scale, needs = inputs
    ctx.weights, ctx.how, ctx.needs = len(ws), (*names, a.dtype, wgrad_scale, needs[:2]), needs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(offs, *ws, *output[1:])


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    offs, *rest = ctx.saved_tensors
    dy, ws, saved = grads[0], rest[: ctx.weights], rest[ctx.weights :]
    assert dy is not None
    found = backward_op(dy, saved, ws, offs, *ctx.how) if any(ctx.needs[:2]) else []
    da = found.pop(0) if ctx.needs[0] else None
    dws: Any = [None] * len(ws)
    if ctx.needs[1]:
        dw = found.pop(0) if ws[0].dim() == 3 else found.pop(0).squeeze(0)
        dws = dw.split([w.shape[-2] for w in ws], -2)
    dbias = joined_sums([dy], offs).to(ctx.bias_dtype) if ctx.needs[2] else None
    return da, [*dws], dbias, *[None] * 6


forward_op.register_autograd(_differentiate, setup_context=_setup_context)


def _parts(x: Any) -> tuple[Tensor | None, Tensor | None]:
    """(qdata, scales) of an MXTensor, to be saved. (None, None) for a plain tensor, which is an argument of the op."""
    return (x.qdata, x.scale) if isinstance(x, MXTensor | MXParts) else (None, None)


def _grouped(ws: list[Tensor]) -> list[Tensor]:
    """View weights (N, K) as (1, N, K). The views share the weights' version counters.

    `quantize_weights_once` compares versions. An ordinary view made inside an op, or by a compiler, has a new counter.
    """
    grouped = [w if w.dim() == 3 else w.unsqueeze(0) for w in ws]
    if weights_are_held():
        torch._C._autograd._unsafe_set_version_counter((*grouped,), tuple(w._version for w in ws))
    return grouped


def is_wanted(ctx: Any, i: int) -> bool:
    """True if the running backward pass uses the gradient of the i-th tensor argument of an autograd function.

    ctx: the context that the function's backward was given. Under torch.compile the result is always True, because
    compiled graphs compute all required gradients.
    """
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[i][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises it only if torch.autograd.grad was asked for this leaf's gradient
        return True


def graph_is_retained() -> bool:
    """True if the running backward pass keeps the autograd graph (retain_graph=True)."""
    return not torch.compiler.is_compiling() and bool(torch._C._autograd._get_current_graph_task_keep_graph())


@dataclass(frozen=True)
class SavedOperands:
    """Operands of the weight gradient that one backward pass kept for a later one with the same gradients dys."""

    dys: tuple[Tensor, ...]
    versions: tuple[int, ...]
    operands: Any

    @classmethod
    def of(cls, operands: Any, *dys: Tensor) -> "SavedOperands":
        return cls(dys, tuple(dy._version for dy in dys), operands)

    def fits(self, *dys: Tensor) -> bool:
        """True if dys are the tensors of the earlier backward pass, and were not written to since."""
        return all(dy is old and dy._version == was for dy, old, was in zip(dys, self.dys, self.versions))


def for_anomaly_mode(grad: Any, offs: Tensor | None) -> Any:
    """Return grad (R, ...) or None unchanged. If torch's anomaly mode is on, return a copy with zeros from offs[-1] on.

    `torch.autograd.set_detect_anomaly(True)` checks all rows for NaN. Rows past the groups are unspecified, and may be
    NaN.
    """
    if grad is None or offs is None or torch.compiler.is_compiling():
        return grad
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return grad
    past = torch.arange(grad.shape[0], device=offs.device, dtype=torch.int32) >= offs[-1]
    if not isinstance(grad, MXTensor):
        return grad.masked_fill(past.view(-1, *[1] * (grad.dim() - 1)), 0)
    if grad.row_index is not None:
        return grad.with_parts(grad.qdata, grad.scale, grad.row_index.masked_fill(past, -1))
    qdata, scale = (x.view(torch.uint8).masked_fill(past[:, None], 0).view(x.dtype) for x in (grad.qdata, grad.scale))
    return grad.with_parts(qdata, scale)
