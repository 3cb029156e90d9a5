"""A GEMM for torch.compile: two ops that a graph calls without tracing into them.

    mxep::product_forward     a, weights (G, N, K) or (N, K), bias, offs -> out, what backward needs
    mxep::product_backward    dy and these -> da and dw, of those that need one

Both run the eager code, with its replays and held weights (`steps.py`), so a compiled GEMM costs the host as much as an
eager one. The compiler gets the shapes. The graph holds recipe and backend by name.

M rows, N out features of all weights, K in features, G groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mxep.gemm.steps as steps
from mxep.gemm.backends import BACKENDS, Backend, select
from mxep.gemm.quantize_once import is_held, weights_are_held
from mxep.gemm.recipe import Recipe
from mxep.gemm.several import join_parts
from mxep.quant import BLOCK, E4M3, MXParts, MXTensor


def is_known_by_name(a: Tensor, recipe: Recipe, backend: Backend) -> bool:
    """True if `product` applies: a is plain, backward needs no plain a, names identify recipe and backend."""
    named = recipe.fmt == E4M3 and BACKENDS.get(backend.name) is backend
    return named and recipe.scaling != "none" and recipe.wgrad == "mx" and not isinstance(a, MXTensor)


def product(
    a: Tensor,
    ws: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor | None,
    recipe: Recipe,
    backend: Backend,
    out_dtype: torch.dtype,
    wgrad_scale: float,
) -> Any:
    """The result of `multiply`, for operands that pass `is_known_by_name`."""
    needs = [a.requires_grad, any(w.requires_grad for w in ws), bias is not None and bias.requires_grad]
    needs = [need and torch.is_grad_enabled() for need in needs]
    out = forward_op(a, [*ws], bias, offs, recipe.name, backend.name, out_dtype, wgrad_scale, needs)[0]
    return out if len(ws) == 1 else out.split([w.shape[-2] for w in ws], 1)


def _forward(
    a: Tensor,
    ws: list[Tensor],
    bias: Tensor | None,
    offs: Tensor | None,
    recipe: str,
    backend: str,
    out_dtype: torch.dtype,
    wgrad_scale: float,
    needs: list[bool],
) -> list[Tensor]:
    """[out (M, N), qdata and scales of a and of w in 2-D blocks, amax of w's columns]. Missing tensors are 0-d."""
    how = Recipe.named(recipe), select(backend, a.device)
    with torch.no_grad():
        ws = _grouped(ws)
        out, rows, w, amax = steps.run_forward(a, ws, bias, offs, *how, out_dtype, (needs[0], needs[1]))
        saved = [*_parts(rows), *(_parts(w[0]) if needs[0] else (None, None)), amax if needs[0] else None]
        if is_held(join_parts(ws), how[0]):  # the graph may overwrite outputs
            saved[2:] = [x if x is None else x.clone() for x in saved[2:]]
    return [out, *(a.new_empty(()) if x is None else x for x in saved)]


forward_op = torch.library.custom_op("mxep::product_forward", _forward, mutates_args=())
forward_op.register_fake(_forward)  # the function itself: fake tensors are never replayed or held


@torch.library.custom_op("mxep::product_backward", mutates_args=())
def backward_op(
    dy: Tensor,
    saved: list[Tensor],
    ws: list[Tensor],
    offs: Tensor | None,
    recipe: str,
    backend: str,
    dtype: torch.dtype,
    wgrad_scale: float,
    needs: list[bool],
) -> list[Tensor]:
    """[da (M, K) in dtype, dw (G, N, K)], without those that `needs` excludes."""
    ws = _grouped(ws)
    qdata, scale, w_qdata, w_scale, amax = (x if x.dim() else None for x in saved)
    rows = None
    if qdata is not None and scale is not None:
        rows = MXParts(qdata, scale, None, -1, qdata.shape[-1] // scale.shape[-1], dtype)
    found: list[Any] = ws
    if w_qdata is not None and w_scale is not None:
        found = [MXParts(w_qdata, w_scale, None, (-2, -1), BLOCK, ws[0].dtype)]
    how, want = (Recipe.named(recipe), select(backend, dy.device)), (needs[0], needs[1])
    with torch.no_grad():
        w, amax = steps.colwise_if_held(found, amax, *how) if needs[0] else (None, None)
        da, dw, _ = steps.backward(
            steps.BackwardInput(rows, offs, w, amax, (dy,), (None,)),
            recipe=how[0],
            backend=how[1],
            wanted=want,
            dtypes=(dtype, ws[0].dtype),
            scale=wgrad_scale,
            quantized=False,
            widths=(dy.shape[1],),
        )
    return [grad for grad in (da, dw) if grad is not None]


@backward_op.register_fake
def _(dy: Tensor, saved: list[Tensor], ws: list[Tensor], offs: Tensor | None, *how: Any) -> list[Tensor]:
    *_, dtype, _, needs = how
    groups, _, width = _grouped(ws)[0].shape
    da = dy.new_empty(dy.shape[0], width, dtype=dtype)
    grads = da, ws[0].new_empty(groups, dy.shape[1], width)
    return [grad for grad, need in zip(grads, needs) if need]


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
    dbias = steps.joined_sums([dy], offs).to(ctx.bias_dtype) if ctx.needs[2] else None
    return da, [*dws], dbias, *[None] * 6


forward_op.register_autograd(_differentiate, setup_context=_setup_context)


def _parts(x: Any) -> tuple[Tensor | None, Tensor | None]:
    """qdata and scales of an MXTensor; None for a plain tensor, which is an argument anyway."""
    return (x.qdata, x.scale) if isinstance(x, MXTensor | MXParts) else (None, None)


def _grouped(ws: list[Tensor]) -> list[Tensor]:
    """View weights (N, K) as (1, N, K) with the same version counter, which identifies held weights. Views made within
    an op, or by a compiler, would have a counter of their own."""
    grouped = [w if w.dim() == 3 else w.unsqueeze(0) for w in ws]
    if weights_are_held():
        torch._C._autograd._unsafe_set_version_counter((*grouped,), tuple(w._version for w in ws))
    return grouped
