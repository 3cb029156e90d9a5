"""What a product computes, forward and backward: functions that are replayed (`mxep.runtime.replay`).

M rows, N out features, K in features, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.quantize_once import SavedWeight, is_held, rowwise_and_saved
from mxep.gemm.recipe import Recipe
from mxep.gemm.several import join_parts, weight_parts
from mxep.quant import MXTensor, group_sums
from mxep.runtime.bundle import Operands, as_parts
from mxep.runtime.replay import replayed


class Product(NamedTuple):
    """out (M, N), and what backward needs: a for wgrad, w in 2-D blocks, the amax of w's columns; or None."""

    out: Tensor
    a: Any
    blocks: Any
    amax: Tensor | None


@replayed
def forward(
    a: Any,
    w: Any,
    bias: Tensor | None,
    offs: Tensor | None,
    *,
    recipe: Recipe,
    backend: Backend,
    out_dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> Product:
    """a (M, K), w (G, N, K) or its parts, or as forward multiplies it. needs: whether a and w have gradients."""
    qdata = a if isinstance(a, MXTensor) else backend.quantize_rows(a, recipe.fmt, recipe)
    given = isinstance(w, MXTensor)
    rowwise, saved = (w, SavedWeight(w, None)) if given else rowwise_and_saved(w, recipe, backend, dgrad=needs[0])
    if isinstance(rowwise, FrozenWeight):
        rowwise = backend.expand_rowwise(rowwise)
    out = backend.forward(qdata, rowwise, offs, bias=bias, out_dtype=out_dtype)
    kept = (qdata if recipe.wgrad == "mx" else a) if needs[1] else None
    blocks = saved.weight if needs[0] and not given and isinstance(saved.weight, MXTensor) else None
    return Product(out, kept, blocks, saved.amax if needs[0] else None)


@dataclass(frozen=True)
class BackwardInput(Operands):
    """Operands of backward.

    Attributes:
        a: (M, K), as forward kept it, or None without dw. offs: (G,) or None.
        w: the weight, its parts, or as dgrad multiplies it; None without da. amax: (G, K) of its columns, or None.
        dys: (M, N of each) for each of w's parts. main_grads: fp32 or None for each.
    """

    a: Any
    offs: Tensor | None
    w: Any
    amax: Tensor | None
    dys: tuple[Any, ...]
    main_grads: tuple[Tensor | None, ...]


class ProductGradients(NamedTuple):
    """da (M, K), dw (G, N, K), and dy quantized; or None."""

    da: Tensor | None
    dw: Tensor | None
    dy: Any


@replayed
def backward(
    given: BackwardInput,
    *,
    recipe: Recipe,
    backend: Backend,
    wanted: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    quantized: bool,
    widths: tuple[int, ...],
) -> ProductGradients:
    """The gradients of a and w, and what becomes of dy. It uses up a.

    wanted: whether da and dw are; they are None else, and where dw was added to main_grads. dtypes: theirs. quantized:
    the first dy is all of them, already as it was quantized here. widths: N of the parts.
    """
    a, offs, dys, main_grads = given.a, given.offs, given.dys, given.main_grads
    given.release("a", "dys")
    da = dw = None
    dy = qdata = dys[0]
    if not quantized and (wanted[0] or recipe.wgrad == "mx"):
        qdata = quantized_gradient(dys, recipe, backend)
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
            dw = backend.wgrad(operands, offs, out_dtype=dtypes[1], scale=scale, accumulate_into=main_grads[0])
        else:
            held = any(main_grad is not None for main_grad in main_grads)
            dw = backend.wgrad(operands, offs, out_dtype=torch.float32 if held else dtypes[1], scale=scale)
            if held:
                dw = _added(dw, main_grads, widths, dtypes[1])
    return ProductGradients(da, dw, qdata)


def _added(dw: Any, main_grads: Sequence[Tensor | None], widths: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Add the parts of dw (G, N, K) fp32 to their main_grads. Returns dw in dtype if a part has none."""
    for main_grad, part in zip(main_grads, dw.split(widths, 1)):
        if main_grad is not None:
            main_grad.add_(part)
    return dw.to(dtype) if any(main_grad is None for main_grad in main_grads) else None


def plain(x: Tensor) -> Tensor:
    """x, dequantized if it is an MXTensor."""
    return x.dequantize() if isinstance(x, MXTensor) else x


def quantized_gradient(dys: Sequence[Any], recipe: Recipe, backend: Backend) -> Tensor:
    """Join gradients and quantize them for backward's GEMMs. A single one with the recipe's blocks stays as it is."""
    if len(dys) > 1:
        return backend.quantize_parts([*map(plain, dys)], recipe.grad_fmt, recipe)
    dy = dys[0]
    if isinstance(dy, MXTensor) and recipe.fits(dy):
        return dy
    return backend.quantize_rows(plain(dy), recipe.grad_fmt, recipe)


def joined_sums(dys: Sequence[Tensor], offs: Tensor | None) -> Tensor:
    """(G, N) fp32 (fp64 for fp64): sums of each group's rows of the joined dys (M, N). No host sync."""
    if offs is not None:
        sums = [group_sums(dy, offs) for dy in dys]
    else:
        sums = [dy.sum(0, keepdim=True, dtype=torch.promote_types(dy.dtype, torch.float32)) for dy in map(plain, dys)]
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


class SavedProduct(NamedTuple):
    """out (M, N), and what backward needs: a for wgrad; w for dgrad, or its parts; the amax of w's columns, or None."""

    out: Tensor
    a: Any
    ws: Any
    amax: Tensor | None


def run_forward(
    a: Any,
    ws: Sequence[Tensor],
    bias: Tensor | None,
    offs: Tensor | None,
    recipe: Recipe,
    backend: Backend,
    out_dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> SavedProduct:
    """Run `forward`, with the held weight if there is one."""
    whole, saved = join_parts(ws), None
    w: Any = whole
    if is_held(whole, recipe):
        w, saved = rowwise_and_saved(whole, recipe, backend, dgrad=needs[0])
    how: dict[str, Any] = {"recipe": recipe, "backend": backend, "out_dtype": out_dtype, "needs": needs}
    made: Product = forward(as_parts(a), as_parts(w), bias, offs, **how)
    if saved is not None:
        return SavedProduct(made.out, made.a, weight_parts(saved.weight), saved.amax)
    return SavedProduct(made.out, made.a, tuple(ws) if made.blocks is None else (made.blocks,), made.amax)


def colwise_if_held(ws: Sequence[Any], amax: Tensor | None, recipe: Recipe, backend: Backend) -> tuple[Any, Any]:
    """A saved weight and its amax for `backward`; the held colwise form if there is one."""
    whole = join_parts(ws)
    if isinstance(ws[0], Tensor) and is_held(whole, recipe):
        return as_parts(SavedWeight(whole, amax).colwise(recipe, backend)), None
    return whole, amax
