"""Lifetime of quantized weights, and the state of a weight that forward saves for backward.

By default GEMMs quantize a weight at each call: rowwise in forward, colwise in backward.
`quantize_weights_once` lets the micro-batches of a step share one quantization.

A weight may be several parameters with concatenated rows, such as gate and up, or q, k and v:

    (G, N1, K) --quantize--> qdata, scales of (G, N1 + N2, K), rowwise or colwise
    (G, N2, K) ------^

The bits are those of the joined weight. With one scale per row or column, two or three parts are read in place and
written into the joined result. Blocks of 32 do not depend on where a part ends, so parts are quantized first and joined
after that, a byte per element. Unquantized weights are joined as they are.

G groups, N out features, K in features.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mxep.gemm.backends.base import Backend
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.recipe import Recipe
from mxep.quant import MXTensor, quantize_columns_with_amax, quantize_with_amax
from mxep.runtime.bundle import as_whole, tensors_in
from mxep.runtime.replay import Replayed, replayed

Weight = Tensor | tuple[Tensor, ...]
"""(G, N, K), or its parts (G, N of each, K), which are joined only when they are quantized."""


class SavedWeight(NamedTuple):
    """State that forward saves to quantize a weight colwise in backward, so that no qdata wait in between.

    weight: the weight or its parts, to be quantized for dgrad; or its 2-D blocks, already quantized, which dgrad uses
        as they are.
    amax: (G, K) amax of its columns, or None.
    """

    weight: Any
    amax: Tensor | None

    def colwise(self, recipe: Recipe, backend: Backend) -> Tensor:
        """The weight quantized for dgrad."""
        if isinstance(self.weight, MXTensor | FrozenWeight):
            return self.weight  # type: ignore[return-value]  # each GEMM expands a frozen weight
        colwise: Tensor = _once(quantize_colwise, self.weight, recipe, backend, amax=self.amax)
        return colwise


def rowwise_and_saved(
    w: Weight | FrozenWeight, recipe: Recipe, backend: Backend, *, dgrad: bool
) -> tuple[Any, SavedWeight]:
    """The weight quantized for forward, and its state to save for backward. A frozen one stays as it is.

    dgrad: True if that state will be used."""
    if isinstance(w, FrozenWeight):
        return w, SavedWeight(w, None)
    # A held weight serves other calls, too, which may have a dgrad.
    rowwise, amax = _once(quantize_rowwise, w, recipe, backend, with_amax=dgrad or weights_are_held())
    return rowwise, SavedWeight(rowwise if getattr(rowwise, "axis", None) == (-2, -1) else w, amax)


@contextlib.contextmanager
def quantize_weights_once() -> "Iterator[QuantizedOnce]":
    """While it is open, each weight is quantized once, each way when it is first needed. Closing it frees everything.

        with quantize_weights_once():
            for x in micro_batches:
                model(x).sum().backward()
        optimizer.step()

    It holds for the process: every `grouped_mm`, MoE layer and converted module shares it, on all threads (autograd's,
    too) and streams. Nested contexts share one cache, which is freed when the last one closes.
    Weights must not change while it is open. RuntimeError is raised if a torch optimizer steps, and at the next use of
    a weight that was written to in place and has other values. To compare values, a weight that was written to is
    quantized again, which waits for the device. PEFT causes this: it adds adapters to experts' weights and restores
    them. Writes that count no version are not seen: through `.data`, raw pointers, or a replayed CUDA graph.

    It holds a byte per element and way, and scales. Under FSDP2 these are the gathered weights, all of them. A weight
    is identified by its memory: views share. Other memory under the same parameter (`.data =`, `.to()`) is another
    weight. So is the new tensor that a cast in forward makes at each call, so it is quantized at each call.
    Three more kinds are quantized at each call: tensor subclasses, weights under torch.compile's
    mode="reduce-overhead", and weights of GEMMs that torch.compile traces (recipes with bf16 weight gradients,
    `main_grad`, custom backends). Other compiled GEMMs and MoE layers share like eager ones. Open it outside of
    compiled code.

    CUDA graphs: qdata made in a capture serve only captures, and each replay makes them again. Open it within a
    capture, or around captures of first and further micro-batches. Then the memory of the qdata belongs to the pool of
    the graph that quantizes. That graph must live and be replayed before the others, and nothing else may be captured
    into that pool after closing.
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
    """Open `quantize_weights_once` until `close()` of the result. Each step of a torch optimizer frees the quantized
    weights.

    For third-party training loops, which have no place to open and close it. Weights may change only in a step, also
    between its closures (LBFGS). A checkpoint that is loaded later raises at the next forward. Raises RuntimeError
    within `quantize_weights_once`.
    """
    global _open
    with _lock:
        if _open is None:
            _open = QuantizedOnce(steps=True)
            _open._users = 1
        elif not _open._steps:
            raise RuntimeError("quantize_weights_once() is open, which ends before a step: close it first")
        return _open


def quantize_after_step(optimizer: torch.optim.Optimizer) -> "QuantizedOnce":
    """Open `quantize_weights_once_a_step`, and quantize the optimizer's weights anew right after each of its steps.

    So no micro-batch quantizes, from the second step on. Weights are quantized as the step before used them. Weights
    in other memory than the optimizer's, such as those that FSDP2 gathers, are quantized at their next use. With
    several optimizers, pass the one that steps last. `close()` of the result ends it.
    """
    once = quantize_weights_once_a_step()
    once._optimizers.add(optimizer)
    return once


class QuantizedOnce:
    """Cache of an open `quantize_weights_once`. quantizations: number of quantizations made."""

    def __init__(self, *, steps: bool = False) -> None:
        self.quantizations = 0
        self._users = 0
        self._steps = steps
        self._stepping = False  # between the hooks of a step, whose closures see weights change
        self._held: dict[tuple[Any, ...], _Held] = {}
        self._used: dict[tuple[Any, ...], _Used] = {}  # in the last step
        self._optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # quantize their weights after steps
        self._hooks = [register_optimizer_step_pre_hook(_before_step)]
        if steps:
            self._hooks.append(register_optimizer_step_post_hook(self._after_step))

    @property
    def nbytes(self) -> int:
        """Bytes of qdata and scales held now."""
        return sum(part.nbytes for held in list(self._held.values()) for part in tensors_in(held.made))

    def _get(self, quantize: Replayed, w: Weight, recipe: Recipe, backend: Backend, **how: Any) -> Any:
        parts = weight_parts(w)
        first, version = parts[0], [None if x.is_inference() else x._version for x in parts]
        if first.is_meta:  # a rehearsal's, which stands in for a weight
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
                # Another capture could not wait for an event of this one.
                event = None if stream is None or capturing else stream.record_event()
                held = self._held[key] = _Held(made, places, storages, version, recipe, backend, stream, event)
                self.quantizations += 1
        held.wait()
        if held.version != version:
            again = None if capturing else _made(quantize, w, recipe=recipe, backend=backend, **how)
            if again is not None:  # written to, but perhaps with the same values, as by PEFT
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
        """Free all that is held, before and after a step; `_after_step` quantizes it again."""
        for (quantize, *_), held in self._held.items() if self._optimizers else ():
            key = held.places, held.recipe, id(held.backend)
            used = self._used.setdefault(key, _Used(held.places, held.recipe, held.backend))
            used.colwise |= quantize is quantize_colwise
        self._held.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with _lock:
            self._stepping = False
            self._forget()  # a closure has quantized the weights before they changed
        if optimizer not in self._optimizers:
            return
        own: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        local = [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in own]
        storages = {x.untyped_storage()._cdata: x for x in local}
        used, self._used = self._used, {}
        for each in used.values():
            if all(storage in storages for storage, *_ in each.places):
                parts = [storages[at].as_strided(shape, stride, offset) for at, offset, shape, stride, _ in each.places]
                _, saved = rowwise_and_saved(join_parts(parts), each.recipe, each.backend, dgrad=each.colwise)
                if each.colwise:
                    saved.colwise(each.recipe, each.backend)

    def close(self) -> None:
        """Close what `quantize_weights_once_a_step` or `quantize_after_step` opened. A second call does nothing."""
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
        self._held.clear()
        self._used.clear()
        self._optimizers.clear()


_lock = threading.RLock()
_open: QuantizedOnce | None = None


def _made(quantize: Replayed, w: Weight, *, amax: Tensor | None = None, **how: Any) -> Any:
    given = (w,) if amax is None else (w, amax)
    with torch.inference_mode(False), torch.no_grad():  # others may save them for backward
        return as_whole(quantize(*given, **how))


@dataclass
class _Used:
    """A weight that a step quantized. places: storage, offset, shape, stride, dtype of parts. colwise: both ways."""

    places: tuple[Any, ...]
    recipe: Recipe
    backend: Backend
    colwise: bool = False


@dataclass
class _Held:
    """Held tensors of a weight. places: as in _Used. backend: kept alive, because the key has its id. stream, event:
    where and when made."""

    made: Any
    places: tuple[Any, ...]
    storages: list[StorageWeakRef]
    version: list[int | None]
    recipe: Recipe
    backend: Backend
    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Make the current stream wait for the tensors, and keep their memory until its work is done."""
        if self.stream is None:
            return
        if torch._C._cuda_getCurrentRawStream(self.stream.device_index) == self.stream.cuda_stream:
            return  # compared without a torch.cuda.Stream, which takes 4 us
        stream = torch.cuda.current_stream(self.stream.device)
        if self.event is not None:
            stream.wait_event(self.event)
        else:
            with torch.cuda.stream(self.stream):
                captures = torch.cuda.is_current_stream_capturing()
            if captures:  # otherwise another capture made it, and its graph is replayed first
                stream.wait_stream(self.stream)
        for x in tensors_in(self.made):
            x.record_stream(stream)


def is_held(w: Weight | FrozenWeight, recipe: Recipe) -> bool:
    """True if an open `quantize_weights_once` holds quantized forms of w. They are then arguments of replayed
    functions: a form looked up inside one would be as old as its graph."""
    if not weights_are_held() or torch.compiler.is_compiling() or recipe.scaling == "none":
        return False
    if isinstance(w, FrozenWeight) or any(type(x) not in (Tensor, nn.Parameter) for x in weight_parts(w)):
        return False
    return not in_graph_tree(weight_parts(w)[0].device)


def weights_are_held() -> bool:
    """True if `quantize_weights_once` is open, so that other GEMMs may use the same quantized weights."""
    return _open is not None


def _once(quantize: Replayed, w: Weight, recipe: Recipe, backend: Backend, **how: Any) -> Any:
    """`quantize` of w, or its result held by an open `quantize_weights_once`."""
    if (once := _open) is None or not is_held(w, recipe):
        return quantize.function(w, recipe=recipe, backend=backend, **how)
    return once._get(quantize, w, recipe, backend, **how)


def in_graph_tree(device: torch.device) -> bool:
    """True if torch.compile's mode="reduce-overhead" may be at work. In that mode only outputs may outlive a call."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees") if device.type == "cuda" else None
    key = "tree_manager_containers"
    if trees is None or not (hasattr(trees.local, key) or torch._C._is_key_in_tls(key)):
        return False
    manager = trees.get_manager(device.index, create_if_none_exists=False)
    # A manager reports a recording only after the first one is over.
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
    """The whole weight; a copy if it has parts."""
    return w if isinstance(w, Tensor) else torch.cat(w, 1)


def weight_parts(w: Weight) -> tuple[Tensor, ...]:
    """Tensors that a weight consists of."""
    return (w,) if isinstance(w, Tensor) else w


def join_parts(parts: Sequence[Any]) -> Any:
    """The weight made of these tensors, the inverse of `weight_parts`. A single tensor (or stand-in) is the weight."""
    return parts[0] if len(parts) == 1 else tuple(parts)


@replayed
def quantize_rowwise(w: Weight, *, recipe: Recipe, backend: Backend, with_amax: bool) -> tuple[Tensor, Tensor | None]:
    """Quantize the whole weight as `Backend.quantize_weight_rowwise` does."""
    if isinstance(w, Tensor) or not _as_they_lie(w, recipe, backend):
        return backend.quantize_weight_rowwise(joined(w), recipe, with_amax=with_amax)
    if not with_amax or backend.block_size(recipe) is not None:
        return _join([backend.quantize_weight_rowwise(part, recipe)[0] for part in w]), None
    return quantize_with_amax(w, fmt=recipe.fmt, mode=recipe.mode)


@replayed
def quantize_colwise(w: Weight, amax: Tensor | None = None, *, recipe: Recipe, backend: Backend) -> Tensor:
    """Quantize the whole weight as `Backend.quantize_weight_colwise` does. amax: per column, over all parts."""
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
