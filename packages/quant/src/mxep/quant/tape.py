"""A tape: what ran on a device, as straight-line Python that does it again with other memory."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from mxep.quant.checks import Axis
from mxep.quant.tensor import MXTensor

Tensors = list[Any]
"""Tensors, MXTensors or their parts, and None."""
Tape = Callable[[Tensors], Tensors]
"""Takes plain tensors, and empties their list."""
_EMPTY = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like"}
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class MXParts(NamedTuple):
    """An MXTensor, taken apart: a wrapper costs the host as much as a launch."""

    qdata: Tensor
    scale: Tensor
    row_index: Tensor | None
    axis: Axis
    block_size: int
    dtype: torch.dtype

    @staticmethod
    def of(x: MXTensor) -> "MXParts":
        """Its parts."""
        return MXParts(x.qdata, x.scale, x.row_index, x.axis, x.block_size, x.dtype)

    def join(self) -> MXTensor:
        """The MXTensor."""
        return MXTensor(*self, trusted=True)


class Recorder(TorchDispatchMode):
    """Writes down what runs within it.

    Attributes:
        failed: why that cannot be replayed, or None.
        compiled: whether a kernel was compiled, whose launch was not seen.
    """

    records_launches = True
    """For `mxep.quant.recorder`."""

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._constants: dict[str, Any] = {
            "torch": torch,
            "device": device,
            "MXParts": MXParts,
            "Address": _Address,
            "view": _view,
            "stream_of": _stream_of,
            "wrote": torch.autograd.graph.increment_version,
        }
        self._lines: list[_Line] = []
        self._addressed: set[int] = set()
        self._slots: list[_Slot] = []
        self._by_storage: dict[int, list[int]] = {}
        self._storages: list[StorageWeakRef] = []  # so that no address of one is used again
        self._paused = False
        self.failed: str | None = None
        self.compiled = False
        self._inputs = [None if x is None else self._new_slot(x) for x in tensors]
        self._given = {slot: weakref.ref(x) for slot, x in zip(self._inputs, tensors) if slot is not None}
        addresses = [slot.start for slot in self._slots if slot.start]
        if len(set(addresses)) < len(addresses):
            self.failed = "two arguments are one"

    def fail(self, why: str) -> None:
        """What runs cannot be replayed."""
        self.failed = self.failed or why

    def provide(self, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """For `each_time`."""
        if any(isinstance(x, Tensor) for x in args):
            self.fail("each_time got a tensor, which would be the same at each replay")
        self._paused = True
        try:
            made = function(*args)
        finally:
            self._paused = False
        slot = self._new_slot(made)
        self._lines.append(_Line(f"s{slot} = {self._constant(function)}(*{self._constant(args)})", set(), [slot]))
        return made

    def wrote(self, x: Tensor) -> None:
        """A kernel writes to x, whose version was counted."""
        used: set[int] = set()
        slot, _ = self._slot_of(x, used)
        if slot in self._given:
            self._lines.append(_Line(f"wrote(s{slot})", used))

    def launched(self, compiled: Any, grid: tuple[int, int, int], args: Iterable[Any], constants: Any) -> None:
        """A kernel was launched."""
        used: set[int] = set()
        parts = [self._argument(x, used) for x in args]
        how = ", ".join(map(self._constant, (compiled.function, compiled.packed_metadata)))
        values = "".join(f"{part}, " for part in parts)
        run, rest = self._constant(compiled.run), self._constant(constants)
        text = f"{run}({', '.join(map(str, grid))}, stream, {how}, None, None, None, {values}*{rest})"
        self._lines.append(_Line(text, used))

    def tape(self, results: Tensors) -> Tape | None:
        """The straight-line code; None if it cannot be."""
        out: set[int] = set()
        values = [self._result(x, out) for x in results]
        if self.failed is not None:
            return None
        device = self._device
        given = [slot for slot in self._inputs if slot is not None]
        names = "".join("_, " if slot is None else f"s{slot}, " for slot in self._inputs)
        start = _Line(f"{names}= tensors; tensors.clear(); stream = stream_of({device.index})", set(), given)
        lines: list[str] = []
        last = {slot: i for i, line in enumerate([start, *self._lines]) for slot in (*line.used, *line.made)}
        for i, line in enumerate([start, *self._lines]):
            lines.append(line.text or self._empty(line.made[0]))
            lines += [f"p{slot} = s{slot}.data_ptr()" for slot in line.made if slot in self._addressed]
            gone = [f"s{slot}" for slot in (*line.used, *line.made) if last[slot] == i and slot not in out]
            lines += [f"del {', '.join(gone)}"] * bool(gone)
        lines.append(f"return [{', '.join(values)}]")
        exec("def replay(tensors):\n    " + "\n    ".join(lines), self._constants)
        made: Tape = self._constants["replay"]
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not Tensor and kind is not Parameter for kind in types):
            return NotImplemented  # a subclass, which says what it does with plain ones
        out = func(*args, **(kwargs or {}))
        if not self._paused and self.failed is None:
            try:
                self._saw(func, args, kwargs or {}, out)
            except Exception as error:  # of ours, not of the function, which goes on
                self.fail(f"{func}: {error}")
        return out

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        results = list(out) if isinstance(out, list | tuple) else [] if out is None else [out]
        if _NEVER & set(func.tags) or not all(isinstance(x, Tensor) and x.device == self._device for x in results):
            self.fail(f"{func} reads from the device, changes what a tensor is, or makes what is not there")
            return
        new = {x.untyped_storage()._cdata: i for i, x in enumerate(results) if not self._knows(x)}
        if not new and not func._schema.is_mutable:
            return  # views
        if func._schema.name in _EMPTY and out.is_contiguous():
            slot = self._new_slot(out)
            self._slots[slot].is_empty = True
            self._lines.append(_Line("", set(), [slot]))  # in what form will be known in the end
            return
        used: set[int] = set()
        values = [self._any(x, used) for x in args] + [f"{name}={self._any(x, used)}" for name, x in kwargs.items()]
        call = self._constant(torch.zeros if func._schema.name == "aten::zeros" else getattr(func, "_op", func))
        text, made = f"{call}({', '.join(values)})", [self._new_slot(results[i]) for i in new.values()]
        if made:
            names = iter(made)
            targets = [f"s{next(names)}" if i in new.values() else "_" for i in range(len(results))]
            text = f"{', '.join(targets)}{'' if isinstance(out, Tensor) else ','} = {text}"
        self._lines.append(_Line(text, used, made))

    def _empty(self, slot: int) -> str:
        dtype, shape, _ = self._slots[slot].form
        return f"s{slot} = torch.empty({shape}, dtype={self._constant(dtype)}, device=device)"

    def _new_slot(self, x: Tensor) -> int:
        storage, slot = x.untyped_storage(), len(self._slots)
        self._slots.append(_Slot(x))
        self._by_storage.setdefault(storage._cdata, []).append(slot)
        self._storages.append(StorageWeakRef(storage))
        return slot

    def _knows(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._by_storage

    def _slot_of(self, x: Tensor, used: set[int]) -> tuple[int, int]:
        """(slot, bytes from its first to x's first)."""
        place, slots = _Slot(x), self._by_storage.get(x.untyped_storage()._cdata, [])
        found = [i for i in slots if self._slots[i].start <= place.start and place.end <= self._slots[i].end]
        if len(found) != 1:
            self.fail(f"a tensor {tuple(x.shape)} comes from elsewhere, or lies in several")
            return -1, 0
        used.add(found[0])
        return found[0], place.start - self._slots[found[0]].start

    def _form(self, x: Tensor, used: set[int]) -> str:
        """Of a tensor as an argument of torch, or a result."""
        slot, start = self._slot_of(x, used)
        form = x.dtype, tuple(x.shape), x.stride()
        if slot >= 0:
            self._slots[slot].is_used = True
            same = slot not in self._given or self._given[slot]() is x  # not another tensor of the same memory
            if same and start == 0 and form == self._slots[slot].form:
                return f"s{slot}"
        return f"view(s{slot}, {self._constant(form)}, {start})"

    def _result(self, x: Tensor | None, used: set[int]) -> str:
        if isinstance(x, MXParts):
            parts = ", ".join(self._result(part, used) for part in x[:3])
            return f"MXParts({parts}, {', '.join(map(self._constant, x[3:]))})"
        if x is None:
            return "None"
        slot, start = self._slot_of(x, used)
        made = self._slots[slot] if slot >= 0 else _Slot(x)
        if made.is_empty and not made.is_used and start == 0 and x.is_contiguous() and x.nbytes == made.nbytes:
            made.form = x.dtype, tuple(x.shape), x.stride()  # it is made so, then
        return self._form(x, used)

    def _argument(self, x: Any, used: set[int]) -> str:
        """Of a kernel."""
        if isinstance(x, Tensor):
            slot, start = self._slot_of(x, used)
            self._addressed.add(slot)
            return f"p{slot} + {start}" if start else f"p{slot}"
        if hasattr(x, "for_triton"):
            base, *rest = x
            return f"{self._constant(type(x))}(Address({self._argument(base, used)}), *{self._constant(rest)})"
        return self._constant(x)

    def _any(self, x: Any, used: set[int]) -> str:
        if isinstance(x, Tensor):
            return self._form(x, used)
        if isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x):
            return f"[{', '.join(self._any(part, used) for part in x)}]"
        return self._constant(x)

    def _constant(self, x: Any) -> str:
        if x is None or type(x) in (int, bool):
            return repr(x)
        name = f"c{len(self._constants)}"
        self._constants[name] = x
        return name


class _Line(NamedTuple):
    """A line of the code, which slots it uses, and which it makes."""

    text: str
    used: set[int]
    made: Sequence[int] = ()


class _Slot:
    """Where a tensor of the recording lies, and its form: dtype, shape and strides."""

    def __init__(self, x: Tensor) -> None:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) if x.numel() else 0
        self.start = x.data_ptr()
        self.end = self.start + elements * x.itemsize
        self.nbytes = x.nbytes
        self.form = x.dtype, tuple(x.shape), x.stride()
        self.is_empty = False  # made uninitialised
        self.is_used = False  # by torch, not only by address


class _Address:
    """The base of a tensor descriptor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _stream_of(index: int | None) -> int:
    """Of a device without streams 0."""
    return 0 if index is None else torch._C._cuda_getCurrentRawStream(index)


def _view(x: Tensor, form: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], start: int) -> Tensor:
    """A view of x's memory, `start` bytes behind its first."""
    dtype, shape, strides = form
    first = x.storage_offset() * x.itemsize + start
    if dtype.itemsize == x.dtype.itemsize:
        x = x if x.dtype == dtype else x.view(dtype)
        return x.as_strided(shape, strides, first // dtype.itemsize)
    empty = torch.empty(0, dtype=dtype, device=x.device)
    return empty.set_(x.untyped_storage(), first // dtype.itemsize, shape, strides)
