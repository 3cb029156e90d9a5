"""What a product computes, forward and backward: functions of lists of tensors, which are replayed
(`mxep.runtime.replay`).

M rows, N out features, K in features, G groups.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.quantize_once import SavedWeight, is_held, rowwise_and_saved
from mxep.gemm.recipe import Recipe
from mxep.gemm.several import tensors_of, weight_of
from mxep.quant import MXTensor, group_sums
from mxep.quant.parts import MXParts
from mxep.runtime.replay import Tensors, replayed


@replayed
def forward(
    tensors: Tensors, recipe: Recipe, backend: Backend, out_dtype: torch.dtype, needs: tuple[bool, bool]
) -> Tensors:
    """[a (M, K), bias, offs, then w (G, N, K), its parts, or what is rowwise of it] -> [out (M, N), a for wgrad,
    w in 2-D blocks, w's amax]: of the last three what backward needs, or None.

    needs: whether a and w have gradients.
    """
    a, bias, offs, *ws = tensors
    w = weight_of(ws)
    qdata = a if isinstance(a, MXTensor) else backend.quantize_rows(a, recipe.fmt, recipe)
    given = isinstance(w, MXTensor)
    rowwise, saved = (w, SavedWeight(w, None)) if given else rowwise_and_saved(w, recipe, backend, dgrad=needs[0])
    out = backend.forward(qdata, rowwise, offs, bias=bias, out_dtype=out_dtype)
    kept = (qdata if recipe.wgrad == "mx" else a) if needs[1] else None
    blocks = saved.weight if needs[0] and not given and isinstance(saved.weight, MXTensor) else None
    return [out, kept, blocks, saved.amax if needs[0] else None]


@partial(replayed, donated=range(3))
def backward(
    tensors: Tensors,
    recipe: Recipe,
    backend: Backend,
    wanted: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    quantized: bool,
    widths: tuple[int, ...],
) -> Tensors:
    """[a, w's amax, offs, a main_grad and then a dy (M, N of each) for each of w's parts, w or its parts or what is
    colwise of it] -> [da (M, K), dw (G, N, K), dy quantized].

    wanted: whether da and dw are; they are None else, and where dw was added to main_grads. dtypes: theirs. quantized:
    the first dy is all of them, already as it was quantized here. widths: N of the parts.
    """
    parts = len(widths)
    a, amax, offs, *rest = tensors
    tensors.clear()
    main_grads, dys, ws = rest[:parts], rest[parts : 2 * parts], rest[2 * parts :]
    da = dw = None
    dy = qdata = dys[0]
    if not quantized and (wanted[0] or recipe.wgrad == "mx"):
        qdata = quantized_gradient(dys, recipe, backend)
    if recipe.wgrad != "mx" and parts > 1:
        dy = torch.cat([*map(plain, dys)], 1)
    del dys, rest
    if wanted[0]:
        colwise = SavedWeight(weight_of(ws), amax).colwise(recipe, backend)
        da = backend.dgrad(qdata, colwise, offs, out_dtype=dtypes[0])
        del colwise
    if wanted[1]:
        if recipe.wgrad != "mx":
            a, qdata = plain(a), plain(dy)
        operands = backend.prepare_wgrad(qdata, a, offs, recipe)
        del a
        if parts == 1:
            dw = backend.wgrad(operands, offs, out_dtype=dtypes[1], scale=scale, accumulate_into=main_grads[0])
        else:
            held = any(main_grad is not None for main_grad in main_grads)
            dw = backend.wgrad(operands, offs, out_dtype=torch.float32 if held else dtypes[1], scale=scale)
            if held:
                dw = _added(dw, main_grads, widths, dtypes[1])
    return [da, dw, qdata]


def _added(dw: Any, main_grads: Tensors, widths: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """dw (G, N, K) fp32, whose parts are added to their main_grads; in dtype if there are parts without one."""
    for main_grad, part in zip(main_grads, dw.split(widths, 1)):
        if main_grad is not None:
            main_grad.add_(part)
    return dw.to(dtype) if any(main_grad is None for main_grad in main_grads) else None


def plain(x: Tensor) -> Tensor:
    """x, or what an MXTensor stands for."""
    return x.dequantize() if isinstance(x, MXTensor) else x


def quantized_gradient(dys: Tensors, recipe: Recipe, backend: Backend) -> Tensor:
    """Gradients, side by side, as the products of backward take them: one as it is if it has the recipe's blocks."""
    if len(dys) > 1:
        return backend.quantize_parts([*map(plain, dys)], recipe.grad_fmt, recipe)
    dy = dys[0]
    if isinstance(dy, MXTensor) and recipe.fits(dy):
        return dy
    return backend.quantize_rows(plain(dy), recipe.grad_fmt, recipe)


def joined_sums(dys: Sequence[Tensor], offs: Tensor | None) -> Tensor:
    """(G, N) fp32 (fp64 of fp64): the sum of each group's rows of dys (M, N) side by side; no host sync."""
    if offs is not None:
        sums = [group_sums(dy, offs) for dy in dys]
    else:
        sums = [dy.sum(0, keepdim=True, dtype=torch.promote_types(dy.dtype, torch.float32)) for dy in map(plain, dys)]
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


def run_forward(
    a: Any,
    ws: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor | None,
    recipe: Recipe,
    backend: Backend,
    out_dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Any, tuple[Any, ...], Tensor | None]:
    """`forward`, with what is held of the weight, if anything is: out, a for wgrad, w for dgrad, its amax."""
    found, saved = ws, None
    if is_held(whole := weight_of(ws), recipe):
        rowwise, saved = rowwise_and_saved(whole, recipe, backend, dgrad=needs[0])
        found = (rowwise,)
    tensors = [parts_of(a), bias, offs, *map(parts_of, found)]
    out, kept, blocks, amax = forward(tensors, recipe, backend, out_dtype, needs)
    if saved is not None:
        return out, kept, tensors_of(saved.weight), saved.amax
    return out, kept, tuple(ws) if blocks is None else (blocks,), amax


def colwise_if_held(ws: Sequence[Any], amax: Tensor | None, recipe: Recipe, backend: Backend) -> tuple[list[Any], Any]:
    """A saved weight and its amax as `backward` takes them: what is held of it, if anything is."""
    if isinstance(ws[0], Tensor) and is_held(whole := weight_of(ws), recipe):
        return [parts_of(SavedWeight(whole, amax).colwise(recipe, backend))], None
    return [*ws], amax


def parts_of(x: Any) -> Any:
    """An MXTensor as a replayed function takes it."""
    return MXParts.of(x) if isinstance(x, MXTensor) else x
