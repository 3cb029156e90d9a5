"""A weight that several parameters are: gate and up, or q, k and v. Their rows, out features, follow each other.

    (G, N1, K) --quantize--> qdata, scales \\
    (G, N2, K) --quantize--> qdata, scales --> joined, a byte an element: (G, N1 + N2, K), rowwise or colwise

The bits are those of the joined weight: a scale of one row or of 32 elements does not see where a part ends, and parts
share the scale of a column by the largest of their amax. Unquantized weights are joined as they are.

G groups, N out features, K in features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.gemm.backends.base import Backend
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor

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
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe):
        return backend.quantize_weight_rowwise(joined(w), recipe, with_amax=with_amax)
    made = [backend.quantize_weight_rowwise(part, recipe, with_amax=with_amax) for part in w]
    amaxes = [amax for _, amax in made if amax is not None]
    return _join([x for x, _ in made], False), torch.stack(amaxes).amax(0) if amaxes else None


def quantize_colwise(w: Weight, recipe: Recipe, backend: Backend, amax: Tensor | None) -> Tensor:
    """What `Backend.quantize_weight_colwise` makes of the whole weight. amax: of the columns of all parts."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe):
        return backend.quantize_weight_colwise(joined(w), recipe, amax)
    one_scale = recipe.block_size is None or backend.wants_rowwise
    if one_scale and amax is None:
        return backend.quantize_weight_colwise(joined(w), recipe, amax)
    return _join([backend.quantize_weight_colwise(part, recipe, amax) for part in w], one_scale)


def _as_they_lie(parts: Sequence[Tensor], recipe: Recipe) -> bool:
    """Whether parts are quantized one by one; not if they are stored (G, K, N), where a column is a row."""
    return recipe.scaling != "none" and all(part.is_contiguous() for part in parts)


def _join(parts: Sequence[Any], one_scale: bool) -> MXTensor:
    """Quantized parts one after another along N, qdata as they lie: (G, K, N) if blocked along N.

    one_scale: all parts have the same scale a column.
    """
    first: MXTensor = parts[0]
    if first.axis == -2:
        qdata = _cat([part.qdata.mT for part in parts], -1).mT
    else:
        qdata = _cat([part.qdata for part in parts], -2)
    if one_scale and first.axis == -2:
        return MXTensor(qdata, first.scale, None, -2, qdata.shape[-2], first.dtype, trusted=True)
    return first.with_parts(qdata, _cat([part.scale for part in parts], -2))


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Of bytes, eight at once where they lie so: torch's kernel moves an element a thread."""
    wide = not torch.compiler.is_compiling() and all(
        part.is_contiguous() and part.shape[-1] % 8 == 0 and part.storage_offset() % 8 == 0 for part in parts
    )
    moved = torch.int64 if wide else torch.uint8
    return torch.cat([part.view(moved) for part in parts], dim).view(parts[0].dtype)
