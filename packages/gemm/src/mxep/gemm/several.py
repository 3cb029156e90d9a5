"""A weight that several parameters are: gate and up, or q, k and v. Their rows, out features, follow each other.

    (G, N1, K) --quantize--> qdata, scales of (G, N1 + N2, K), rowwise or colwise
    (G, N2, K) ------^

The bits are those of the joined weight. Two or three parts with one scale a row, or a column, are read where they lie
and written where they belong. Blocks of 32, whose scales do not see where a part ends, are joined when they are
quantized, a byte an element. Unquantized weights are joined as they are.

G groups, N out features, K in features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize_columns_of_amax, quantize_with_amax

Weight = Tensor | tuple[Tensor, ...]
"""(G, N, K), or its parts, (G, N of each, K), which are joined where they are quantized and nowhere else."""


def joined(w: Weight) -> Tensor:
    """The whole weight: a copy of parts."""
    return w if isinstance(w, Tensor) else torch.cat(w, 1)


def tensors_of(w: Weight) -> tuple[Tensor, ...]:
    """The tensors that a weight is."""
    return (w,) if isinstance(w, Tensor) else w


def weight_of(parts: Sequence[Any]) -> Any:
    """The weight whose `tensors_of` these are: one tensor (or what stands for it) is the weight itself."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def quantize_rowwise(w: Weight, recipe: Recipe, backend: Backend, *, with_amax: bool) -> tuple[Tensor, Tensor | None]:
    """What `Backend.quantize_weight_rowwise` makes of the whole weight."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe, backend):
        return backend.quantize_weight_rowwise(joined(w), recipe, with_amax=with_amax)
    if not with_amax or backend.block_size(recipe) is not None:
        return _join([backend.quantize_weight_rowwise(part, recipe)[0] for part in w]), None
    return quantize_with_amax(w, fmt=recipe.fmt, mode=recipe.mode)


def quantize_colwise(w: Weight, recipe: Recipe, backend: Backend, amax: Tensor | None) -> Tensor:
    """What `Backend.quantize_weight_colwise` makes of the whole weight. amax: of the columns of all parts."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe, backend):
        return backend.quantize_weight_colwise(joined(w), recipe, amax)
    if backend.block_size(recipe) is not None:
        return _join([backend.quantize_weight_colwise(part, recipe) for part in w])
    if amax is None:
        return backend.quantize_weight_colwise(joined(w), recipe)
    return quantize_columns_of_amax(w, amax, fmt=recipe.fmt, mode=recipe.mode)


def _as_they_lie(parts: Sequence[Tensor], recipe: Recipe, backend: Backend) -> bool:
    """Whether parts are quantized before they are joined. Not if they are stored (G, K, N), where a column is a row,
    nor by a backend of one's own that quantizes otherwise."""
    if recipe.scaling == "none" or not all(part.is_contiguous() for part in parts):
        return False
    kind = type(backend)  # torch.compile knows the modules of functions, not of methods
    methods = (getattr(kind, name, None) for name in ("quantize_weight_rowwise", "quantize_weight_colwise"))
    return all(method is not None and method.__module__.startswith("mxep.gemm.backends.") for method in methods)


def _join(parts: Sequence[Any]) -> MXTensor:
    """Quantized parts one after another along N, qdata as they lie: (G, K, N) if blocked along N."""
    first: MXTensor = parts[0]
    if first.axis == -2:
        qdata = _cat([part.qdata.mT for part in parts], -1).mT
    else:
        qdata = _cat([part.qdata for part in parts], -2)
    return first.with_parts(qdata, _cat([part.scale for part in parts], -2))


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Of bytes, eight at once where they lie so: torch's kernel moves an element a thread."""
    wide = not torch.compiler.is_compiling() and all(
        part.is_contiguous() and part.shape[-1] % 8 == 0 and part.storage_offset() % 8 == 0 for part in parts
    )
    moved = torch.int64 if wide else torch.uint8
    return torch.cat([part.view(moved) for part in parts], dim).view(parts[0].dtype)
