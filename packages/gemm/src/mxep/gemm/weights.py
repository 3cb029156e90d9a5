"""Weights quantized once per change, in both orientations, and kept while micro-batches come and go.

    w (G, N, K) bf16  --one read-->  rows: blocked along K, what the forward contracts
                                     cols: blocked along N, what dgrad contracts

An entry is valid while the weight is the same tensor at the same address with the same version: optimizers that update
in place bump the version. An entry keeps the weight's storage alive, so that no other tensor can come to lie there.
Writes that hide from the version (`w.data.copy_()`, raw pointers, FSDP's all-gather into a kept parameter, an in-place
op on a DTensor whose local tensor is passed here) need `clear()`.

G groups, N out features, K in features.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize, quantize_both

if TYPE_CHECKING:
    from mxep.gemm.backends.base import Backend


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight (G, N, K) as the products want it: MXTensors, or the weight itself where the recipe quantizes nothing.

    rows: blocked along K, for the forward. cols: blocked along N, for dgrad; None if nobody asked for it.
    With 32x32 tiles both are the same tensor.
    """

    rows: Tensor
    cols: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        parts = {id(mx): mx.qdata.nbytes + mx.scale.nbytes for mx in (self.rows, self.cols) if isinstance(mx, MXTensor)}
        return sum(parts.values())


def quantize_weight(w: Tensor, recipe: Recipe, *, cols: bool = True) -> QuantizedWeight:
    """Quantize w (G, N, K) bf16 or fp32 by the recipe, along K and, with `cols`, along N. No gradient."""
    w_ = w.detach()
    fmt, mode = recipe.fmt, recipe.mode
    if recipe.scaling == "none":
        return QuantizedWeight(w, w)
    if recipe.weight_block == "32x32":
        tiles = quantize(w_, fmt=fmt, mode=mode, axis=(-2, -1))
        return QuantizedWeight(tiles, tiles)
    if cols and recipe.scaling == "mx":
        return QuantizedWeight(*quantize_both(w_, fmt=fmt, mode=mode))
    rows = quantize(w_, fmt=fmt, mode=mode, block=recipe.block)
    return QuantizedWeight(rows, quantize(w_, fmt=fmt, mode=mode, axis=-2, block=recipe.block) if cols else None)


@dataclass(frozen=True)
class _Entry:
    owner: "weakref.ref[Tensor]"
    storage: "torch.UntypedStorage"
    version: int
    weight: QuantizedWeight


class WeightCache:
    """Quantized weights, until the parameter changes or goes away.

    hits, misses: lookups that found, or had to make, a quantized weight. nbytes: bytes of codes and scales held.
    A weight may be a view, new at each call: what counts is the tensor it is a view of, and where it lies.
    Copies and pickles of a cache are empty caches. Not for several threads at once.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self._entries: dict[tuple[Any, ...], _Entry] = {}

    def get(self, w: Tensor, recipe: Recipe, backend: "Backend", *, cols: bool = True) -> QuantizedWeight:
        """w (G, N, K) as backend.quantize_weight gives it; cols=False where only the forward needs it.

        Not kept, and not counted: weights of a recipe without scales, inference tensors (they count no versions), and
        anything under torch.compile, whose graph quantizes at each call.
        """
        if recipe.scaling == "none" or torch.compiler.is_compiling() or w.is_inference():
            return backend.quantize_weight(w, recipe, cols=cols)
        owner = w if w._base is None else w._base
        key = (
            *(id(owner), w.storage_offset(), w.shape, w.stride(), w.dtype),
            *(recipe.scaling, recipe.fmt, recipe.mode, recipe.weight_block, backend.name),
        )
        entry = self._entries.get(key)
        storage = w.untyped_storage()
        same = entry is not None and (entry.storage.data_ptr(), entry.version) == (storage.data_ptr(), w._version)
        if entry and same and (entry.weight.cols is not None or not cols):
            self.hits += 1
            return entry.weight
        self.misses += 1
        weight = backend.quantize_weight(w, recipe, cols=cols)
        forget = weakref.ref(owner, lambda _: self._entries.pop(key, None))
        self._entries[key] = _Entry(forget, storage, w._version, weight)
        return weight

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales held now."""
        return sum(entry.weight.nbytes for entry in self._entries.values())

    def clear(self) -> None:
        """Forget all weights and counts."""
        self._entries.clear()
        self.hits = self.misses = 0

    def __reduce__(self) -> tuple[type["WeightCache"], tuple[()]]:
        return WeightCache, ()
