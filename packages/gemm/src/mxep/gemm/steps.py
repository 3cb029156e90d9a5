"""What a product computes, forward and backward: functions of lists of tensors, which are replayed
(`mxep.quant.replay`).

M rows, N out features, K in features, G groups.
"""

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.quantize_once import SavedWeight, rowwise_and_saved
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor
from mxep.quant.replay import Tensors, replayed


@replayed
def forward(
    tensors: Tensors, recipe: Recipe, backend: Backend, out_dtype: torch.dtype, needs: tuple[bool, bool]
) -> Tensors:
    """[a (M, K), w (G, N, K) or what is rowwise of it, bias, offs] -> [out (M, N), a for wgrad, w in 2-D blocks,
    w's amax]: of the last three what backward needs, or None.

    needs: whether a and w have gradients.
    """
    a, w, bias, offs = tensors
    qdata = a if isinstance(a, MXTensor) else backend.quantize_rows(a, recipe.fmt, recipe)
    given = isinstance(w, MXTensor)
    rowwise, saved = (w, SavedWeight(w, None)) if given else rowwise_and_saved(w, recipe, backend, dgrad=needs[0])
    out = backend.forward(qdata, rowwise, offs, bias=bias, out_dtype=out_dtype)
    kept = (qdata if recipe.wgrad == "mx" else a) if needs[1] else None
    blocks = saved.weight if needs[0] and not given and isinstance(saved.weight, MXTensor) else None
    return [out, kept, blocks, saved.amax if needs[0] else None]


@replayed
def backward(
    tensors: Tensors,
    recipe: Recipe,
    backend: Backend,
    wanted: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    quantized: bool,
) -> Tensors:
    """[dy (M, N), a, w or what is colwise of it, its amax, offs, main_grad] -> [da (M, K), dw (G, N, K), dy quantized].

    wanted: whether da and dw are; they are None else, and where dw was added to main_grad. dtypes: theirs. quantized:
    dy is already as it was quantized here.
    """
    dy, a, w, amax, offs, main_grad = tensors
    tensors.clear()
    da = dw = None
    qdata = dy
    if not quantized and (wanted[0] or recipe.wgrad == "mx"):
        qdata = quantized_gradient(dy, recipe, backend)
    if wanted[0]:
        da = backend.dgrad(qdata, SavedWeight(w, amax).colwise(recipe, backend), offs, out_dtype=dtypes[0])
    if wanted[1]:
        if recipe.wgrad != "mx":
            a, qdata = plain(a), plain(dy)
        operands = backend.prepare_wgrad(qdata, a, offs, recipe)
        del a
        dw = backend.wgrad(operands, offs, out_dtype=dtypes[1], scale=scale, accumulate_into=main_grad)
    return [da, dw, qdata]


def plain(x: Tensor) -> Tensor:
    """x, or what an MXTensor stands for."""
    return x.dequantize() if isinstance(x, MXTensor) else x


def quantized_gradient(dy: Tensor, recipe: Recipe, backend: Backend) -> Tensor:
    """dy as the products of backward take it: as it is if it has the recipe's blocks."""
    if isinstance(dy, MXTensor) and recipe.fits(dy):
        return dy
    return backend.quantize_rows(plain(dy), recipe.grad_fmt, recipe)
