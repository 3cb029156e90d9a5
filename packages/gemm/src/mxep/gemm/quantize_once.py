"""Lifetime of quantized weights, and the state of a weight that forward saves for backward.

By default GEMMs quantize a weight at each call: rowwise (blocks along K) in forward, colwise (blocks along N) in
backward. `quantize_weights_once` lets the micro-batches of a step share one quantization of each.

A weight may be several parameters with concatenated rows, such as gate and up, or q, k and v. These are its parts:

    (G, N1, K) --quantize--> qdata, scales of (G, N1 + N2, K), rowwise or colwise
    (G, N2, K) ------^

The result has the bits of quantizing the joined weight. If each row or column has one scale, two or three parts are
read in place and written into the joined result. Blocks of 32 never cross parts, so with these the parts are quantized
first, and their qdata joined, a byte per element. If the recipe does not quantize, the parts are joined as they are.

G groups, N out features, K in features.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mxep.gemm.backends.base import Backend
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize_columns_with_amax, quantize_with_amax
from mxep.runtime.bundle import Bundle, as_whole, remember_form, tensors_in
from mxep.runtime.replay import Replayed, replayed

Weight = Tensor | tuple[Tensor, ...]
"""A weight (G, N, K), or a tuple of its parts, (G, N of the part, K), which are joined when they are quantized."""


class SavedWeight(NamedTuple):
    """What forward saves of a weight, so that backward can quantize it colwise.

    weight: the weight or its parts, or the quantized weight if it has 2-D blocks. amax: (G, K) of its columns, or None.
    """

    weight: Any
    amax: Tensor | None

    def colwise(self, recipe: Recipe, backend: Backend) -> Tensor:
        """Return the weight quantized for dgrad. A frozen weight is returned as it is."""
        if isinstance(self.weight, MXTensor | FrozenWeight):
            return self.weight  # type: ignore[return-value]  # each GEMM expands a frozen weight
        colwise: Tensor = _once(quantize_colwise, self.weight, recipe, backend, amax=self.amax)
        return colwise


def rowwise_and_saved(
    w: Weight | FrozenWeight, recipe: Recipe, backend: Backend, *, dgrad: bool
) -> tuple[Any, SavedWeight]:
    """(w quantized for forward, what to save for backward). A frozen w stays as it is. dgrad: backward needs w."""
    if isinstance(w, FrozenWeight):
        return w, SavedWeight(w, None)
    # A weight that quantize_weights_once holds serves other calls, too, which may need dgrad.
    rowwise, amax = _once(quantize_rowwise, w, recipe, backend, with_amax=dgrad or weights_are_held())
    return rowwise, SavedWeight(rowwise if getattr(rowwise, "axis", None) == (-2, -1) else w, amax)


@contextlib.contextmanager
def quantize_weights_once() -> "Iterator[QuantizedOnce]":
    """Context manager in which each weight is quantized only once: rowwise and colwise, each when first needed.

        with quantize_weights_once():
            for x in micro_batches:
                model(x).sum().backward()
        optimizer.step()

    The context covers the whole process: every `grouped_mm`, MoE layer and converted module, on all threads and
    streams. Nested contexts share one cache. Open the context outside of compiled code.

    Weights must not change while the context is open. RuntimeError is raised if a torch optimizer steps, and at the
    next use of a weight whose values were changed in place. To find out, a weight that was written to (as by PEFT,
    which restores it) is quantized again and compared, which waits for the device. Writes that do not increase the
    tensor's version counter are not noticed: through `.data`, raw pointers, a replayed CUDA graph, or
    `torch._foreach_...` functions of DTensors, and any to a weight that was made in inference mode.

    Memory: one byte per element rowwise, another colwise, and scales. Under FSDP2 these are all gathered weights.

    A weight is identified by its memory, so views of it share its quantization. These are quantized at each call
    nevertheless: weights that forward casts, tensor subclasses, weights under torch.compile's mode="reduce-overhead",
    and those of GEMMs that torch.compile traces (wgrad "bf16", `main_grad`, or a custom backend).

    CUDA graphs: qdata made during a capture are used only during captures, and each replay computes them again. Open
    the context within one capture, or around the captures of all micro-batches of a step. The graph that quantizes must
    be kept, and replayed before the others. Capture nothing else into its memory pool after closing the context.
    """
    global _open
    with _lock:
        once = _open = _open or QuantizedOnce()
        once._users += 1
    try:
        yield once
    finally:
        with _lock:
            once._users -= 1
            if not once._users:
                once._close()
                _open = None


def quantize_weights_once_a_step() -> "QuantizedOnce":
    """Open `quantize_weights_once` until the result's `close()`. Each step of a torch optimizer clears the cache.

    This is for third-party training loops, which have no place for a `with` statement. Weights may change only within
    an optimizer's step, including between the closure calls of LBFGS. If a checkpoint is loaded afterwards, the next
    forward raises. Raises RuntimeError if `quantize_weights_once` is already open.
    """
    global _open
    with _lock:
        if _open is None:
            _open = QuantizedOnce(steps=True)
            _open._users = 1
        elif not _open._steps:
            raise RuntimeError("quantize_weights_once() is open, which ends before a step: close it first")
        return _open


class QuantizedOnce:
    """Cache of an open `quantize_weights_once`. quantizations: number of quantizations so far."""

    def __init__(self, *, steps: bool = False) -> None:
        self.quantizations = 0
        self._users = 0
        self._steps = steps
        self._stepping = False  # True during an optimizer's step: its closures see weights change
        self._held: dict[tuple[Any, ...], _Held] = {}
        self._remembered: dict[tuple[Any, ...], _Remembered] = {}
        self._versions = WeakIdKeyDictionary()  # versions of DTensors at their last use
        self._hooks = [register_optimizer_step_pre_hook(_before_step)]
        if steps:
            self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    @property
    def nbytes(self) -> int:
        """Bytes of the qdata and scales that the cache holds now."""
        return sum(part.nbytes for held in list(self._held.values()) for part in tensors_in(held.made))

    def _get(self, quantize: Replayed, w: Weight, recipe: Recipe, backend: Backend, **how: Any) -> Any:
        parts = weight_parts(w)
        first, version = parts[0], [None if x.is_inference() else x._version for x in parts]
        if first.is_meta:  # a stand-in for a weight, used in a rehearsal
            return _made(quantize, w, recipe=recipe, backend=backend, **how)
        capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
        places = tuple((x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype) for x in parts)
        how_recipe = recipe.scaling, recipe.fmt, recipe.mode, recipe.weight_block, recipe.weight_rounding
        key = quantize, *places, capturing, *how_recipe, id(backend)
        with _lock:
            held = self._held.get(key)
            if held is None or (self._stepping and held.version != version):
                # Drop weights that are gone. Weak references keep their storages' addresses from being reused.
                for gone in [key for key, held in self._held.items() if any(x.expired() for x in held.storages)]:
                    del self._held[gone]
                made = _made(quantize, w, recipe=recipe, backend=backend, **how)
                storages = [StorageWeakRef(x.untyped_storage()) for x in parts]
                stream = torch.cuda.current_stream(first.device) if first.is_cuda else None
                # No event during a capture: another capture could not wait for it.
                event = None if stream is None or capturing else stream.record_event()
                held = self._held[key] = _Held(made, storages, version, backend, stream, event)
                self.quantizations += 1
        held.wait()
        if held.version != version:
            again = None if capturing else _made(quantize, w, recipe=recipe, backend=backend, **how)
            if again is not None:  # the weight was written to, perhaps with the same values, as by PEFT
                pairs = zip(tensors_in(again), tensors_in(held.made), strict=True)
                if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                    held.version = version
                    return held.made
            raise RuntimeError(
                f"a weight {tuple(first.shape)} was written to within quantize_weights_once(), which has its old "
                "values: close it before weights change"
            )
        return held.made

    def _forget(self) -> None:
        self._held.clear()
        self._remembered.clear()

    def _after_step(self, *_: Any) -> None:
        with _lock:
            self._stepping = False
            self._forget()  # the step's closures may have quantized weights that changed afterwards

    def close(self) -> None:
        """End `quantize_weights_once_a_step`. A second call does nothing."""
        global _open
        with _lock:
            if not self._steps:
                return
            self._steps = False
            self._users -= 1
            if not self._users:
                self._close()
                _open = None

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._forget()


_lock = threading.RLock()
_open: QuantizedOnce | None = None


def _made(quantize: Replayed, w: Weight, *, amax: Tensor | None = None, **how: Any) -> Any:
    given = (w,) if amax is None else (w, amax)
    with torch.inference_mode(False), torch.no_grad():  # autograd must be able to save the result
        return as_whole(quantize(*given, **how))


@dataclass
class _Held:
    """Cache entry of a weight.

    made: the quantized weight. storages, version: of its parts. stream: that made it. event: recorded after that.
    backend: kept alive, because the entry's key contains its id.
    """

    made: Any
    storages: list[StorageWeakRef]
    version: list[int | None]
    backend: Backend
    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Make the current stream wait until `made` is computed. Keep its memory until the stream's work is done."""
        if self.stream is None:
            return
        if torch._C._cuda_getCurrentRawStream(self.stream.device_index) == self.stream.cuda_stream:
            return  # raw handles are compared, because making a torch.cuda.Stream takes 4 us
        stream = torch.cuda.current_stream(self.stream.device)
        if self.event is not None:
            stream.wait_event(self.event)
        else:
            with torch.cuda.stream(self.stream):
                captures = torch.cuda.is_current_stream_capturing()
            if captures:  # otherwise an earlier capture made it, and that graph is replayed first
                stream.wait_stream(self.stream)
        for x in tensors_in(self.made):
            x.record_stream(stream)


def is_held(w: Weight | FrozenWeight, recipe: Recipe) -> bool:
    """True if an open `quantize_weights_once` caches w. Replayed functions then get the quantized w as an argument.

    If they looked it up themselves, a replayed graph would read the quantization that was cached at its recording.
    """
    if not weights_are_held() or torch.compiler.is_compiling() or recipe.scaling == "none":
        return False
    if isinstance(w, FrozenWeight) or any(type(x) not in (Tensor, nn.Parameter) for x in weight_parts(w)):
        return False
    return not in_graph_tree(weight_parts(w)[0].device)


class _Remembered(NamedTuple):
    """A result of `remembered`, of these weights in this state: (storage, offset, version) of each.

    Weak references to storages keep their numbers from being reused.
    """

    made: Any
    weights: list[weakref.ref[Tensor]]
    storages: list[StorageWeakRef]
    state: list[tuple[Any, ...]]


def remembered(make: Callable[[], Bundle], weights: Sequence[Weight], *key: Hashable) -> Any:
    """Return make(), or its result of an earlier call with the same weights and key, if no weight was written since.

    For weights that `is_held`. It saves the host the lookup of each quantization.
    """
    parts, once = [x for w in weights for x in weight_parts(w)], _open
    if once is None or parts[0].is_meta:
        return make()
    place = None
    if parts[0].is_cuda:  # on another stream, or in a capture, a lookup does more
        place = torch._C._cuda_getCurrentRawStream(parts[0].get_device()), torch.cuda.is_current_stream_capturing()
    whose = *map(id, parts), place, *key
    state = [(x.untyped_storage()._cdata, x.storage_offset(), None if x.is_inference() else x._version) for x in parts]
    found = once._remembered.get(whose)
    if found is None or found.state != state or any(ref() is not x for ref, x in zip(found.weights, parts)):
        remember_form(made := make())
        with _lock:
            for gone in [k for k, each in once._remembered.items() if any(ref() is None for ref in each.weights)]:
                del once._remembered[gone]
            storages = [StorageWeakRef(x.untyped_storage()) for x in parts]
            once._remembered[whose] = found = _Remembered(made, [weakref.ref(x) for x in parts], storages, state)
    return found.made


def weights_are_held() -> bool:
    """True if `quantize_weights_once` is open."""
    return _open is not None


def see_writes(w: Tensor) -> None:
    """Let `quantize_weights_once` notice in-place writes to w, a DTensor. Call it before w's local tensor is used.

    They change the version counter of w only. This changes the local tensor's, too, if there was a write since the last
    call.
    """
    local = w._local_tensor  # type: ignore[attr-defined]
    if (once := _open) is None or torch.compiler.is_compiling() or w.is_inference() or local.is_inference():
        return
    if once._versions.get(w, w._version) != w._version:
        torch.autograd.graph.increment_version(local)
    once._versions[w] = w._version


def _once(quantize: Replayed, w: Weight, recipe: Recipe, backend: Backend, **how: Any) -> Any:
    """Return quantize(w), from the cache if `quantize_weights_once` is open and caches w."""
    if (once := _open) is None or not is_held(w, recipe):
        return quantize.function(w, recipe=recipe, backend=backend, **how)
    return once._get(quantize, w, recipe, backend, **how)


def in_graph_tree(device: torch.device) -> bool:
    """True if torch.compile's mode="reduce-overhead" may be active. In this mode only outputs may outlive a call."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees") if device.type == "cuda" else None
    key = "tree_manager_containers"
    if trees is None or not (hasattr(trees.local, key) or torch._C._is_key_in_tls(key)):
        return False
    manager = trees.get_manager(device.index, create_if_none_exists=False)
    # torch's manager of CUDA graph trees reports a recording only after the first recording is over.
    return manager is not None and (manager.in_warmup or torch.cuda.is_current_stream_capturing())


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _open is None:
        return
    if not _open._steps:
        raise RuntimeError(
            f"{type(optimizer).__name__} stepped within quantize_weights_once(), which would go on with weights "
            "quantized before: close it before the optimizer steps"
        )
    with _lock:
        _open._stepping = True
        _open._forget()


def joined(w: Weight) -> Tensor:
    """The weight as one tensor, a copy if it has several parts."""
    return w if isinstance(w, Tensor) else torch.cat(w, 1)


def weight_parts(w: Weight) -> tuple[Tensor, ...]:
    """The parts of a weight, as a tuple of tensors."""
    return (w,) if isinstance(w, Tensor) else w


def join_parts(parts: Sequence[Any]) -> Any:
    """Make a weight of these parts, the inverse of `weight_parts`. If there is one part, it is the weight itself."""
    return parts[0] if len(parts) == 1 else tuple(parts)


@replayed
def quantize_rowwise(w: Weight, *, recipe: Recipe, backend: Backend, with_amax: bool) -> tuple[Tensor, Tensor | None]:
    """Quantize a weight, joined if it has parts, as `Backend.quantize_weight_rowwise` does."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe, backend):
        return backend.quantize_weight_rowwise(joined(w), recipe, with_amax=with_amax)
    if not with_amax or backend.block_size(recipe) is not None:
        return _join([backend.quantize_weight_rowwise(part, recipe)[0] for part in w]), None
    return quantize_with_amax(w, fmt=recipe.fmt, mode=recipe.mode)


@replayed
def quantize_colwise(w: Weight, amax: Tensor | None = None, *, recipe: Recipe, backend: Backend) -> Tensor:
    """Quantize a weight, joined if it has parts, as `Backend.quantize_weight_colwise` does. amax: over all parts."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe, backend):
        return backend.quantize_weight_colwise(joined(w), recipe, amax)
    if backend.block_size(recipe) is not None:
        return _join([backend.quantize_weight_colwise(part, recipe) for part in w])
    if amax is None:
        return backend.quantize_weight_colwise(joined(w), recipe)
    return quantize_columns_with_amax(w, amax, fmt=recipe.fmt, mode=recipe.mode)


def _as_they_lie(parts: Sequence[Tensor], recipe: Recipe, backend: Backend) -> bool:
    """True if parts are quantized before they are joined.

    Not if they are stored (G, K, N), are rounded before, or if a custom backend overrides quantization.
    """
    if recipe.scaling == "none" or recipe.weight_rounding != "none":
        return False
    if not all(part.is_contiguous() for part in parts):
        return False
    kind = type(backend)  # torch.compile can trace __module__ of a function, but not of a bound method
    methods = (getattr(kind, name, None) for name in ("quantize_weight_rowwise", "quantize_weight_colwise"))
    return all(method is not None and method.__module__.startswith("mxep.gemm.backends.") for method in methods)


def _join(parts: Sequence[Any]) -> MXTensor:
    """Join quantized parts along N. Parts with blocks along N stay (G, K, N) in memory."""
    first: MXTensor = parts[0]
    if first.axis == -2:
        qdata = _cat([part.qdata.mT for part in parts], -1).mT
    else:
        qdata = _cat([part.qdata for part in parts], -2)
    return first.with_parts(qdata, _cat([part.scale for part in parts], -2))


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors of bytes. If aligned, 8 bytes count as an element: torch's kernel moves one per thread."""
    wide = not torch.compiler.is_compiling() and all(
        part.is_contiguous() and part.shape[-1] % 8 == 0 and part.storage_offset() % 8 == 0 for part in parts
    )
    moved = torch.int64 if wide else torch.uint8
    return torch.cat([part.view(moved) for part in parts], dim).view(parts[0].dtype)
