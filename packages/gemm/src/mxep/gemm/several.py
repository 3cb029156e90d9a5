"""A weight made of several parameters: gate and up, or q, k and v. Their rows, out features, follow each other.

    (G, N1, K) --quantize--> qdata, scales of (G, N1 + N2, K), rowwise or colwise
    (G, N2, K) ------^

The bits are those of the joined weight. With one scale per row or column, two or three parts are read in place and
written straight into the joined result. Blocks of 32 do not depend on where a part ends, so parts are quantized first
and joined after that, a byte per element. Unquantized weights are joined as they are.

G groups, N out features, K in features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize_columns_with_amax, quantize_with_amax

Weight = Tensor | tuple[Tensor, ...]
"""(G, N, K), or its parts (G, N of each, K), which are joined only when they are quantized."""


def joined(w: Weight) -> Tensor:
    """The whole weight; a copy if it has parts."""
    return w if isinstance(w, Tensor) else torch.cat(w, 1)


def weight_parts(w: Weight) -> tuple[Tensor, ...]:
    """Tensors that a weight consists of."""
    return (w,) if isinstance(w, Tensor) else w


def join_parts(parts: Sequence[Any]) -> Any:
    """The weight made of these tensors, the inverse of `weight_parts`. A single tensor (or stand-in) is the weight."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def quantize_rowwise(w: Weight, recipe: Recipe, backend: Backend, *, with_amax: bool) -> tuple[Tensor, Tensor | None]:
    """Quantize the whole weight as `Backend.quantize_weight_rowwise` does."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe, backend):
        return backend.quantize_weight_rowwise(joined(w), recipe, with_amax=with_amax)
    if not with_amax or backend.block_size(recipe) is not None:
        return _join([backend.quantize_weight_rowwise(part, recipe)[0] for part in w]), None
    return quantize_with_amax(w, fmt=recipe.fmt, mode=recipe.mode)


def quantize_colwise(w: Weight, recipe: Recipe, backend: Backend, amax: Tensor | None) -> Tensor:
    """Quantize the whole weight as `Backend.quantize_weight_colwise` does. amax: of the columns of all parts."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe, backend):
        return backend.quantize_weight_colwise(joined(w), recipe, amax)
    if backend.block_size(recipe) is not None:
        return _join([backend.quantize_weight_colwise(part, recipe) for part in w])
    if amax is None:
        return backend.quantize_weight_colwise(joined(w), recipe)
    return quantize_columns_with_amax(w, amax, fmt=recipe.fmt, mode=recipe.mode)


def _as_they_lie(parts: Sequence[Tensor], recipe: Recipe, backend: Backend) -> bool:
    """True if parts are quantized before they are joined. False if they are stored (G, K, N), so that a column is a
    row, if they are rounded first, and for custom backends that quantize differently."""
    if recipe.scaling == "none" or recipe.weight_rounding != "none":
        return False
    if not all(part.is_contiguous() for part in parts):
        return False
    kind = type(backend)  # torch.compile knows the modules of functions, not of methods
    methods = (getattr(kind, name, None) for name in ("quantize_weight_rowwise", "quantize_weight_colwise"))
    return all(method is not None and method.__module__.startswith("mxep.gemm.backends.") for method in methods)


def _join(parts: Sequence[Any]) -> MXTensor:
    """Join quantized parts along N. qdata keep their memory order: (G, K, N) if blocked along N."""
    first: MXTensor = parts[0]
    if first.axis == -2:
        qdata = _cat([part.qdata.mT for part in parts], -1).mT
    else:
        qdata = _cat([part.qdata for part in parts], -2)
    return first.with_parts(qdata, _cat([part.scale for part in parts], -2))


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate bytes, eight at once if they are aligned: torch's kernel moves one element per thread."""
    wide = not torch.compiler.is_compiling() and all(
        part.is_contiguous() and part.shape[-1] % 8 == 0 and part.storage_offset() % 8 == 0 for part in parts
    )
    moved = torch.int64 if wide else torch.uint8
    return torch.cat([part.view(moved) for part in parts], dim).view(parts[0].dtype)
