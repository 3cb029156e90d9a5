"""Workspace: two symmetric buffers that exchanges use in turn, and the proof that one barrier per exchange is enough.

The buffers belong to the transport. All workspaces of a transport share them, each with its
own layout. If a workspace needs larger buffers, it allocates two new ones for all workspaces. Exchanges are counted
over all workspaces of a transport; exchange i below is the i-th of them.

    exchange    0        1        2        3
    buffer      0        1        0        1
    rank p   put|B0|read put|B1|read put|B2|read ...

In exchange i a rank stores into buffer i % 2 of its peers, passes barrier B_i, and reads its own buffer i % 2. Every
rank makes the same exchanges in the same order, each after the previous one has ended. On a GPU the current stream
keeps this order. If the current stream changes, the new stream first waits for that of the last exchange.

**No read sees the stores of a later exchange.** Rank p stores exchange i + 2 into buffer i % 2 of rank q only after p
has left B_{i+1}. By then q has entered B_{i+1}, and so q has finished reading buffer i % 2: what it received in
exchange i is valid only until its exchange i + 1.

**No read misses stores of its own exchange.** q reads buffer i % 2 after B_i, and every rank enters B_i after its
stores.

**No stale row is read.** A reader reads only slots that the routing tables name. Each exchange writes all these slots.
All W ranks write their tables in the same exchange as the rows.

**One buffer is not enough.** p leaves B_i as soon as q has entered it. Then p may store exchange i + 1 while q still
reads the rows of exchange i. A second buffer prevents this; a second barrier would, too.

Tables have a separate barrier in the same exchange, with its own signals and its own region of the buffer. So a plan
can be computed from the tables while rows are in flight on the transport's stream. A rank enters the table barrier of
exchange i + 2 after it left that of exchange i + 1, so the proof holds for tables, too. `combine` has one barrier per
chunk of tokens. Rank p sums a chunk once all ranks have stored it, and leaves B_i with the last chunk.

**A captured graph** may be replayed at any time. If it has an odd number of exchanges, two replays use the same buffer
twice in a row. So the first exchange of a graph begins with an extra barrier, which follows all earlier reads. After a
capture, each exchange outside of graphs also begins with this barrier, because the host does not know of replays.
Records replayed by `mxep.runtime.replay` need no extra barrier: their exchanges are counted, and keep the order.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.runtime.record import record_event, set_up, wait_event

from .layout import ALIGNMENT, Layout, round_up
from .transport import SymmetricBuffer, Transport, check_agreement, current_stream

Tables = tuple[Tensor, Tensor, Tensor]


class Workspace:
    """Exchanges with one layout, over the transport's buffers. Several layers may share a workspace.

    Every rank must make the same exchanges in the same order, over all workspaces of a transport.

    Args:
        transport: access to the memory of the other ranks.
        max_tokens: T_max, the maximum tokens of a rank in one dispatch.
        top_k: K, experts per token.
        dim: D, elements per row of a combine.
        row_bytes: maximum bytes per row of any exchange. None: 2 * dim, enough for bf16 and MXFP8.
        num_experts: E, a multiple of the W ranks. Rank r owns experts r * E/W to (r + 1) * E/W - 1.
        num_sms: maximum multiprocessors that an exchange may use. None: all. All ranks need the same number, because it
            decides how the rows of a combine are cut into chunks. A few multiprocessors can fill the links: see the
            docs.

    Collective. Raises ValueError on every rank if arguments are invalid or differ between ranks. Raises RuntimeError
    while a CUDA graph is captured.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        max_tokens: int,
        top_k: int,
        dim: int,
        row_bytes: int | None = None,
        num_experts: int,
        num_sms: int | None = None,
    ) -> None:
        if transport.stream is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Workspace: made while a CUDA graph is captured, wanted one run of the layer before that"
            )
        row_bytes = 2 * dim if row_bytes is None else row_bytes
        sizes = {"max_tokens": max_tokens, "top_k": top_k, "dim": dim, "row_bytes": row_bytes}
        sizes["num_experts"] = num_experts
        agreed = {**sizes, "num_sms": num_sms, "exchanges made before": transport.exchanges}
        check_agreement("Workspace", agreed, transport.group)
        for name, size in sizes.items():
            least = 0 if name == "max_tokens" else 1
            if not hasattr(size, "__index__") or size < least:
                raise ValueError(f"Workspace: {name}: got {size}, wanted a whole number, at least {least}")
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"Workspace: num_sms: got {num_sms}, wanted at least 1")
        if num_experts % transport.world_size:
            raise ValueError(f"num_experts: got {num_experts}, wanted a multiple of {transport.world_size} ranks")
        if row_bytes > (most := 2**24 - ALIGNMENT):  # rounded up, it is a number in `Layout.op_id`
            raise ValueError(f"row_bytes: got {row_bytes}, wanted at most {most}")
        if (num_slots := transport.world_size * max_tokens) * top_k >= 2**31:
            raise ValueError(f"Workspace: got {num_slots} rows of {top_k} experts, wanted an index that fits int32")

        self.transport = transport
        self.max_tokens = max_tokens
        self.top_k = top_k
        self.dim = dim
        self.num_experts = num_experts
        self.layout = Layout(transport.world_size, max_tokens, top_k, round_up(row_bytes, ALIGNMENT))
        self.num_sms = num_sms
        self.num_local_experts = num_experts // transport.world_size
        self.device = transport.device
        self._device_index: Any = None if transport.stream is None else transport.device.index
        self.exchange = transport.exchange(self.layout, self.num_local_experts, num_sms)
        self._make_room()

    def is_on_other_device(self) -> bool:
        return self._device_index is not None and torch._C._cuda_getDevice() != self._device_index

    def begin(self, step: str) -> SymmetricBuffer:
        """Return the buffer of the next exchange.

        From now on, views of the exchange before the last one are invalid. An exchange is counted when its signals are
        sent to the peers. If it fails before, it can be repeated with the same buffer.

        Raises PeerTimeout or PeersDisagree if an earlier exchange is known to have failed. Raises RuntimeError on a
        second thread, after this rank refused an exchange, and if an exchange is in flight when a capture starts or
        ends.
        """
        transport = self.transport
        transport.thread.claim()
        transport.check()
        if transport.refused is not None:
            cure = "make the layers again, or call reserve() of each, on all ranks"
            raise RuntimeError(f"rank {transport.rank} refused an exchange ({transport.refused}): {cure}")
        if transport.stream is not None:
            stream = current_stream(self._device_index)
            unknown = self._is_order_unknown(capture_of(stream))
            self.join(stream)
            if transport.last_stream is not None and transport.last_stream != stream:
                stream.wait_stream(transport.last_stream)  # after all reads of earlier exchanges' rows
            transport.last_stream = stream
            if unknown:
                # After this: all ranks have read the rows of all earlier exchanges.
                transport.barrier(f"{step}, exchange {transport.exchanges}")
        return transport.buffers[transport.exchanges % 2]

    def refuse(self, why: str, *, tokens: int = 0) -> None:
        """Tell the peers that this rank skips the next exchange, so that they raise PeersDisagree.

        why: the reason. tokens: size of a batch that is too large, 0 for other reasons. Does nothing with one rank.
        """
        if self.transport.world_size > 1 and self.transport.refused is None:
            self.exchange.refuse(self.begin("refused"), min(tokens, 2**24 - 1))
            self.transport.refused = why

    def new_dispatch(self) -> Tensor:
        """(1,) int32 dispatch number that a new dispatch sends. Call it after `begin`."""
        number = self.transport.new_dispatch
        with set_up():  # not part of a record, which layers may share: `announce` writes the number before each replay
            number.fill_(self.transport.next_dispatch)
        return number

    def slots(self, buffer: SymmetricBuffer, payload: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Views of the buffer's slots, one tensor (S, n_i) per part (T, n_i) of the payload."""
        widths = tuple(part.shape[1] for part in payload)
        key = self.layout, widths
        if key not in buffer.views:
            rows = self.layout.rows(buffer.local)[:, : sum(widths)]
            buffer.views[key] = torch.split(rows, list(widths), 1)
        found: tuple[Tensor, ...] = buffer.views[key]
        return found

    def tables(self, buffer: SymmetricBuffer) -> Tables:
        """The tables of all senders in a buffer: expert_ids (W, T_max, K), weights (W, T_max, K), num_tokens (W,)."""
        if self.layout not in buffer.views:
            layout, local = self.layout, buffer.local
            buffer.views[layout] = layout.ids(local), layout.values(local), layout.num_tokens(local)
        ids, weights, num_tokens = buffer.views[self.layout]
        return ids, weights.detach(), num_tokens  # detach gives a new tensor, which may get an autograd history

    @contextlib.contextmanager
    def stream(self, in_flight: object) -> Iterator[None]:
        """Context: launches of an exchange go to the transport's stream, after the earlier work of the current stream.

        in_flight: tensors that the exchange uses. They are held until `join`.
        """
        transport, stream = self.transport, self.transport.stream
        transport.in_flight = in_flight
        if stream is None or transport.last_stream is None:
            yield
            return
        begun, done = self._events
        record_event(begun, transport.last_stream)
        wait_event(stream, begun)
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(transport.last_stream)
            record_event(done, stream)
            transport.done = done

    def join(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make the current stream wait for the last exchange, if that is in flight.

        stream: the current stream, if known.
        """
        transport = self.transport
        if transport.done is not None:
            stream = stream or current_stream(self._device_index)
            wait_event(stream, transport.done)
            begun = transport.last_stream
            if transport.in_flight is not None and begun is not None and begun != stream:
                wait_event(begun, transport.done)  # the tensors released below were allocated on this stream
        transport.in_flight = None

    @functools.cached_property
    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(), torch.cuda.Event()

    def _make_room(self) -> None:
        """Allocate larger buffers if the layout needs them, and free the old ones.

        `allocate` synchronizes all devices, so no exchange uses the old buffers any more.
        """
        transport = self.transport
        if transport.buffers and transport.buffers[0].local.numel() >= self.layout.nbytes:
            return
        old, transport.buffers = transport.buffers, tuple(transport.allocate(self.layout.nbytes) for _ in range(2))
        if transport.was_captured:
            transport.replaced += old
        else:
            for buffer in old:
                transport.free(buffer)

    def _is_order_unknown(self, capture: int) -> bool:
        """True if a captured graph may be replayed between the last exchange and this one.

        capture: result of `capture_of` for the current stream.
        """
        transport = self.transport
        changed = capture != transport.capture
        if changed and transport.in_flight is not None:
            if transport.capture:  # the capture has ended, and its events are not valid outside of it
                transport.in_flight = transport.done = transport.last_stream = None
            last = f"exchange {transport.exchanges - 1}"
            raise RuntimeError(f"{last}: in flight while a capture starts or ends, wanted wait() before")
        if changed:
            transport.capture = capture
            transport.done = transport.last_stream = None  # events are valid only inside their capture
        transport.was_captured |= capture != 0
        return transport.was_captured and (changed or capture == 0)


def capture_of(stream: torch.cuda.Stream) -> int:
    """Id of the CUDA graph capture that the current stream is part of, or 0. stream: the current stream."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    # Torch does not return the id, so the driver is asked.
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    failed = ask(ctypes.c_void_p(stream.cuda_stream), *map(ctypes.byref, (status, number)), None, None, None)
    if failed:
        raise RuntimeError(f"cuStreamGetCaptureInfo: got error {failed}, wanted the number of the capture")
    return number.value + 1
