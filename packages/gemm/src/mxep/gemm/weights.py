"""Weights quantized once per change, in both orientations, and kept while micro-batches come and go.

    w (G, N, K) bf16  --one read-->  rows: blocked along K, what the forward contracts
                                     cols: blocked along N, what dgrad contracts

An entry is valid while the weight is the same tensor at the same address with the same version and no torch optimizer
has stepped since: in-place updates bump the version, and a step of any `torch.optim.Optimizer` counts for all weights,
however it writes (`p.data`, raw pointers, DTensors, whose local tensors count no versions). An entry keeps the weight's
storage alive, so that no other tensor can come to lie there.

What cannot be seen, and needs `clear()` or no cache: writes outside an optimizer through `w.data`, raw pointers, or a
DTensor whose local tensor is passed here, writes to a tensor whose `.data` is passed here, and memory that FSDP2
gathers into again (`convert` does not cache that).

G groups, N out features, K in features.
"""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize, quantize_both, quantize_with_magnitudes

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


def quantize_weight(w: Tensor, recipe: Recipe, *, cols: bool = True, whole: bool = False) -> QuantizedWeight:
    """Quantize w (G, N, K) bf16 or fp32 by the recipe, along K and, with `cols`, along N. No gradient.

    whole: one scale for each row, and for each column, whatever the recipe's blocks.
    """
    w_ = w.detach()
    if recipe.scaling == "none":
        return QuantizedWeight(w, w)
    fmt, mode, block = recipe.fmt, recipe.mode, None if whole else recipe.block
    if recipe.weight_block == "32x32" and not whole:
        tiles = quantize(w_, fmt=fmt, mode=mode, axis=(-2, -1))
        return QuantizedWeight(tiles, tiles)
    if cols:
        return QuantizedWeight(*quantize_both(w_, fmt=fmt, mode=mode, block=block))
    return QuantizedWeight(quantize(w_, fmt=fmt, mode=mode, block=block), None)


def quantize_weight_rows(w: Tensor, recipe: Recipe, *, whole: bool = False) -> tuple[Tensor, Tensor | None]:
    """`quantize_weight`'s rows, and what saves `quantize_weight_cols` a read: whole rows alone know such a thing."""
    if recipe.scaling == "row" or (whole and recipe.scaling == "mx"):
        return quantize_with_magnitudes(w.detach(), fmt=recipe.fmt, mode=recipe.mode)
    return quantize_weight(w, recipe, cols=False).rows, None


def quantize_weight_cols(w: Tensor, recipe: Recipe, magnitudes: Tensor | None, *, whole: bool = False) -> Tensor:
    """`quantize_weight`'s cols, later. magnitudes: what `quantize_weight_rows` said."""
    if recipe.scaling == "none" or (recipe.weight_block == "32x32" and not whole):
        return quantize_weight(w, recipe, cols=False).rows
    block = None if whole else recipe.block
    return quantize(w.detach(), fmt=recipe.fmt, mode=recipe.mode, axis=-2, block=block, magnitudes=magnitudes)


class Later(NamedTuple):
    """What a forward keeps of a weight for its backward: cols that a cache has, or the weight and what helps to make
    them of it, so that no codes wait from forward to backward."""

    kept: Tensor | None
    weight: Tensor | None
    magnitudes: Tensor | None

    def cols(self, recipe: Recipe, backend: "Backend") -> Tensor:
        if self.kept is not None:
            return self.kept
        assert self.weight is not None
        return backend.quantize_weight_cols(self.weight, recipe, self.magnitudes)


def rows_and_later(
    w: Tensor, cached: QuantizedWeight | None, recipe: Recipe, backend: "Backend", *, later: bool
) -> tuple[Tensor, Later]:
    """A weight's rows, from the cache if that has it, and what to keep if dgrad comes later."""
    if cached is not None:
        return cached.rows, Later(cached.cols, None, None)
    if not later:
        return backend.quantize_weight(w, recipe, cols=False).rows, Later(None, None, None)
    rows, magnitudes = backend.quantize_weight_rows(w, recipe)
    if isinstance(rows, MXTensor) and rows.axis == (-2, -1):
        return rows, Later(rows, None, None)  # tiles serve both ways
    return rows, Later(None, w, magnitudes)


def mark_derived(w: Tensor, source: Tensor, path: Hashable) -> None:
    """Tell caches that w holds what the calls in `path` make of `source` as it is now, as a cast does: a new
    tensor every time, the same values until source changes. Caches leave alone a copy that has been written to."""
    w._mxep_derived = (source, path)  # type: ignore[attr-defined]


def _written_copy(w: Tensor) -> bool:
    """Whether w is a copy that `mark_derived` has marked, and was written to: a new one has version 0."""
    derived = getattr(w, "_mxep_derived", None)
    return derived is not None and w._version > 0 and w.untyped_storage()._cdata != derived[0].untyped_storage()._cdata


def _capturing(w: Tensor) -> bool:
    """Whether what is done to w now is recorded for a CUDA graph, to run when that is replayed."""
    return w.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class _Entry:
    source: "weakref.ref[Tensor]"
    storage: "torch.UntypedStorage"
    state: tuple[int, ...]
    weight: QuantizedWeight


class WeightCache:
    """Quantized weights, until the parameter changes or goes away.

    hits, misses: lookups that found, or had to make, a quantized weight. hit_rate: their share, 0 before the first.
    nbytes: bytes of codes and scales held. The repr shows all of them.
    A weight may be a view, new at each call: what counts is the tensor it is a view of, and where it lies. A cast or a
    copy is new data unless `mark_derived` says whose.
    While a CUDA graph is captured nothing is looked up, kept or counted: the graph quantizes at each replay, each way
    as it is needed, so that it follows the weight, and its memory stays its own.
    Copies and pickles of a cache are empty caches. Not for several threads at once.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._optimizer_steps = 0
        _after_optimizer_steps(self)

    def get(self, w: Tensor, recipe: Recipe, backend: "Backend", *, cols: bool = True) -> QuantizedWeight | None:
        """w (G, N, K) as backend.quantize_weight gives it; cols=False where only the forward needs it.

        None, and not counted, where nothing can be kept: weights of a recipe without scales, inference tensors (they
        count no versions), copies that were written to, and anything under torch.compile or in a CUDA graph, which
        quantize at each call.
        """
        recorded = torch.compiler.is_compiling() or _capturing(w)
        if recipe.scaling == "none" or recorded or w.is_inference() or _written_copy(w):
            return None
        derived = getattr(w, "_mxep_derived", None)
        lies = (w.storage_offset(), w.shape, w.stride())
        source, path = derived or (w if w._base is None else w._base, lies)
        key = (
            *(id(source), path, w.dtype),
            *(recipe.scaling, recipe.fmt, recipe.mode, recipe.weight_block, type(backend), backend.name),
        )
        entry = self._entries.get(key)
        storage = (source if derived else w).untyped_storage()
        state = (storage.data_ptr(), source._version, w._version, self._optimizer_steps)
        if entry and entry.state == state and (entry.weight.cols is not None or not cols):
            self.hits += 1
            return entry.weight
        self.misses += 1
        weight = backend.quantize_weight(w, recipe, cols=cols)
        forget = weakref.ref(source, lambda _: self._entries.pop(key, None))
        self._entries[key] = _Entry(forget, storage, state, weight)
        return weight

    def stamp(self, source: Tensor) -> tuple[int, ...]:
        """Changes when source changes: a copy of it, for `mark_derived`, holds its values while this is what it was."""
        return source.untyped_storage()._cdata, source._version, self._optimizer_steps

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales held now."""
        return sum(entry.weight.nbytes for entry in self._entries.values())

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses), 0 before the first lookup."""
        return self.hits / max(self.hits + self.misses, 1)

    def clear(self) -> None:
        """Forget all weights and counts."""
        self._entries.clear()
        self.hits = self.misses = 0

    def __repr__(self) -> str:
        lookups = f"{self.hits} hits, {self.misses} misses ({self.hit_rate:.0%})"
        return f"WeightCache({len(self._entries)} weights, {self.nbytes} bytes, {lookups})"

    def __reduce__(self) -> tuple[type["WeightCache"], tuple[()]]:
        return WeightCache, ()


def _after_optimizer_steps(cache: WeightCache) -> None:
    """Count the steps of all optimizers in `cache` while it lives; a compiled step counts versions itself."""
    this = weakref.ref(cache)

    def count(*_: Any) -> None:
        if not torch.compiler.is_compiling() and (cache := this()) is not None:
            cache._optimizer_steps += 1

    handle = register_optimizer_step_post_hook(count)
    weakref.finalize(cache, handle.remove)
