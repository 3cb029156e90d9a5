"""linear_together: several linears of one input as one GEMM: q, k and v, or gate and up.

    forward   x --quantize once--> x [wq; wk; wv]^T --> views of one result: q, k, v
    dgrad     [dq, dk, dv] --quantize once--> one GEMM that sums over the out features of all
    wgrad     the same qdata of both --> one GEMM, whose rows are dwq, dwk, dwv

Weights stay separate parameters: each is quantized in place, and their qdata are joined. With scales of 32 elements,
results and weight gradients have the bits of separate GEMMs. With one scale per row ("fp8", and every recipe on
"hopper") a row of [dq, dk, dv] has the scale of its largest part, so smaller parts lose the bits that folding loses.
The gradient of x is rounded once. Separate GEMMs would round each part and then sum.

M rows, N out features of each, K in features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.gemm.auto import recipe_for
from mxep.gemm.backends import Backend, select
from mxep.gemm.checks import check_linear, check_plain, check_tensors
from mxep.gemm.functional import between_graphs, multiply
from mxep.gemm.linear import linear
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor


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
    """(..., N) for each of weights: x @ w.T + bias. Differentiable in x, weights and biases, once.

    x: (..., K), as for `linear`. weights: (N, K) each, of one dtype, N any multiple of recipe.group_alignment.
    biases: (N,) or None for each. main_grads: (N, K) fp32 or None for each, as for `linear`, added after the product.
    recipe: also "auto", by the sum of all N. out_dtype, backend, autocast, torch.compile: as for `linear`.

    Returns views of one result, which must not be written to in place. With recipe "bf16" there are separate GEMMs.
    Raises ValueError as `linear` does, and for weights of several dtypes, DTensors, or another number of biases or
    main_grads than of weights. Raises RuntimeError if the backend cannot run here.
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
    bias = _joined_bias(weights, biases)
    outs = multiply(rows, first, bias, None, recipe, chosen, out_dtype, held, 1.0, *more, *more_held)
    outs = outs if more else (outs,)
    return outs if x.dim() == 2 else tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)


def _joined_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """(1, N of all), zeros for missing biases; None if all are missing."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    return torch.cat([given[0].new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases)]).unsqueeze(0)
