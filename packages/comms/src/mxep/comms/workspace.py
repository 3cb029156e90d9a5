"""Workspace: two symmetric buffers that exchanges alternate between, and the proof that one barrier each is enough.

The buffers are the transport's, its *arena*: workspaces of other sizes share them, and count their exchanges together,
so below "exchange i" is the i-th of all. A workspace is the arena and a layout. One that is larger than all before it
brings two larger buffers; who holds views of the old ones keeps them.

    exchange    0        1        2        3
    buffer      0        1        0        1
    rank p   put|B0|read put|B1|read put|B2|read ...

Exchange i: stores into the peers' buffer i % 2, barrier B_i, reads of the own buffer i % 2. Every rank makes the same
exchanges in the same order, and one begins after the one before has ended (on a device: in the order of the current
stream; a stream that was not the last exchange's waits for that one first, so they are as one).

**No read sees a later exchange's stores.** Rank p stores exchange i + 2 into rank q's buffer i % 2 only after it left
B_{i+1}. It left B_{i+1} only after q entered it, and q enters B_{i+1} (in program order, on a device in stream order)
after its last read of buffer i % 2, which is borrowed until q's exchange i + 1.

**No read misses its own exchange's stores.** q reads buffer i % 2 after B_i, which every p enters after its stores.

**No stale row is read.** What an exchange reads was written in the same exchange: a reader looks only where the tables
say that a sender wrote, and the tables of all W ranks are written whole in the exchange that they describe.

**One buffer would not do.** p leaves B_i as soon as q has entered it, and may store exchange i + 1 while q still reads
what exchange i brought. It takes two buffers, or a second barrier.

Tables have a barrier of their own, in the same exchange and in other words of the buffer: with rows on the transport's
stream, a plan is made of them while rows are in flight. A rank enters the barrier of tables of exchange i + 2 after it
left that of exchange i + 1, so the proof holds for them as it stands. `combine` cuts B_i into chunks of tokens: rank p
sums a chunk that all ranks have stored, and has left B_i when it has left the last.

**A captured graph** may be replayed by its owner at any time, twice in a row with an odd number of exchanges, too: then
a buffer is used twice in a row. So its first exchange begins with a barrier that moves no rows, after the reads of all
that ran before; and so does every exchange outside of a graph once there has been a capture, as nobody tells the host
of a replay. Who plays exchanges of a record (`mxep.runtime.replay`) does so in the order of all exchanges, and says so.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxep.runtime.record import record_event, set_up, wait_event

from .arena import current_stream
from .layout import ALIGNMENT, Layout, round_up
from .plain import PlainExchange
from .transport import SymmetricBuffer, Transport, check_agreement, signal_pad_bytes

Tables = tuple[Tensor, Tensor, Tensor]


class Workspace:
    """The buffers of exchanges, of one layout. Several layers may share one; it shares the transport's buffers with all
    others. Over all of them, every rank makes the same exchanges in one order.

    Args:
        transport: how ranks reach each other.
        max_tokens: T_max, the most tokens a rank dispatches at once. top_k: K. dim: D, elements of a row of a combine.
        row_bytes: bytes of the widest row in either direction; None is 2 * dim (enough for bf16 and MXFP8).
        num_experts: E, a multiple of W; rank r owns experts r * E/W .. (r + 1) * E/W - 1.
        num_sms: how many multiprocessors of the device an exchange may take, the same on all ranks, which cut rows into
            chunks by it; None: all. Links need few: see the docs.

    Collective. Raises ValueError on every rank if the ranks' arguments differ, or if one makes no sense; RuntimeError
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
        agreed = {**sizes, "num_sms": num_sms, "exchanges made before": transport.arena.exchanges}
        check_agreement("Workspace", agreed, transport.group)
        for name, size in sizes.items():
            least = 0 if name == "max_tokens" else 1
            if size < least:
                raise ValueError(f"Workspace: {name}: got {size}, wanted at least {least}")
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"Workspace: num_sms: got {num_sms}, wanted at least 1")
        if num_experts % transport.world_size:
            raise ValueError(f"num_experts: got {num_experts}, wanted a multiple of {transport.world_size} ranks")
        if row_bytes >= 2**24:
            raise ValueError(f"row_bytes: got {row_bytes}, wanted less than {2**24}")
        if (num_slots := transport.world_size * max_tokens) * top_k >= 2**31:
            raise ValueError(f"Workspace: got {num_slots} rows of {top_k} experts, wanted an index that fits int32")

        self.transport = transport
        self.arena = transport.arena
        self.max_tokens = max_tokens
        self.top_k = top_k
        self.dim = dim
        self.num_experts = num_experts
        self.layout = Layout(transport.world_size, max_tokens, top_k, round_up(row_bytes, ALIGNMENT))
        self.num_sms = num_sms
        self.num_local_experts = num_experts // transport.world_size
        self.device = transport.device
        self._device_index: Any = None if transport.stream is None else transport.device.index
        self.steps = _make_exchange(transport, self.layout, self.num_local_experts, num_sms)
        self._make_room()

    def is_on_other_device(self) -> bool:
        """Whether the current device is not the transport's."""
        return self._device_index is not None and torch._C._cuda_getDevice() != self._device_index

    def begin(self, step: str) -> SymmetricBuffer:
        """The next exchange's buffer; views of the last exchange but one end here, those of the last at this one's end.

        `steps` count it once peers are told of it: what failed before that may be made again, in the same buffer.

        Raises PeerTimeout or PeersDisagree if an earlier exchange is known to have failed, RuntimeError if one is in
        flight across the start or the end of a CUDA graph's capture, if this rank has refused one, or on a second
        thread.
        """
        arena, transport = self.arena, self.transport
        arena.thread.claim()
        transport.check()
        if arena.refused is not None:
            cure = "make the layers again, or call reserve() of each, on all ranks"
            raise RuntimeError(f"rank {transport.rank} refused an exchange ({arena.refused}): {cure}")
        if transport.stream is not None:
            stream = current_stream(self._device_index)
            unknown = self._is_order_unknown(capture_of(stream))
            self.join(stream)
            if arena.stream is not None and arena.stream != stream:
                stream.wait_stream(arena.stream)  # after all that reads what earlier exchanges brought
            arena.stream = stream
            if unknown:
                # After it: all ranks have read what any earlier exchange brought.
                transport.barrier(f"{step}, exchange {arena.exchanges}", arena.signal_pad)
        return arena.buffers[arena.exchanges % 2]

    def refuse(self, why: str, *, tokens: int = 0) -> None:
        """Do not come to the next exchange, and tell the peers: they raise PeersDisagree. A rank alone just goes on."""
        if self.transport.world_size > 1 and self.arena.refused is None:
            self.steps.refuse(self.begin("refused"), min(tokens, 2**24 - 1))
            self.arena.refused = why

    def new_dispatch(self) -> Tensor:
        """(1,) int32, what peers compare of a dispatch that has no number yet. To be asked for after `begin`."""
        number = self.transport.new_dispatch
        with set_up():  # a record serves many layers: `announce` writes it before each play
            number.fill_(self.arena.new_dispatch)
        return number

    def slots(self, buffer: SymmetricBuffer, payload: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Views of the parts that lie side by side in the buffer's slots, (S, n_i) each."""
        widths = tuple(part.shape[1] for part in payload)
        key = self.layout, widths
        if key not in buffer.views:
            rows = self.layout.rows(buffer.local)[:, : sum(widths)]
            buffer.views[key] = torch.split(rows, list(widths), 1)
        found: tuple[Tensor, ...] = buffer.views[key]
        return found

    def tables(self, buffer: SymmetricBuffer) -> Tables:
        """The senders' (expert_ids, weights, num_tokens) in a buffer."""
        if self.layout not in buffer.views:
            layout, local = self.layout, buffer.local
            buffer.views[layout] = layout.ids(local), layout.values(local), layout.num_tokens(local)
        ids, weights, num_tokens = buffer.views[self.layout]
        return ids, weights.detach(), num_tokens  # callers may give a tensor of floats a gradient's history

    def enter_stream(self, in_flight: object) -> None:
        """Work on the transport's stream, after all that was given to the stream on which the exchange began.

        in_flight: what that work uses, held until `join`.
        """
        arena, stream = self.arena, self.transport.stream
        arena.in_flight = in_flight
        if stream is not None and arena.stream is not None:
            record_event(self._begun, arena.stream)
            wait_event(stream, self._begun)
            torch.cuda.set_stream(stream)

    def leave_stream(self) -> None:
        """Work on the stream again on which the exchange began; `join` waits for what was given to the transport's."""
        arena, stream = self.arena, self.transport.stream
        if stream is not None and arena.stream is not None:
            torch.cuda.set_stream(arena.stream)
            record_event(self._done, stream)
            arena.done = self._done

    def join(self, stream: torch.cuda.Stream | None = None) -> None:
        """The current stream waits for the exchange that was last in flight, if there is one; the host does not.

        stream: the current one, if that is known.
        """
        arena = self.arena
        if arena.done is not None:
            stream = stream or current_stream(self._device_index)
            wait_event(stream, arena.done)
            if arena.in_flight is not None and arena.stream is not None and arena.stream != stream:
                wait_event(arena.stream, arena.done)  # it owns the memory that is let go now
        arena.in_flight = None

    @functools.cached_property
    def _begun(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    @functools.cached_property
    def _done(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def _make_room(self) -> None:
        """Buffers that hold the layout. All ranks' devices are idle once new ones are there, see ``allocate``."""
        arena, transport = self.arena, self.transport
        if arena.buffers and arena.buffers[0].local.numel() >= self.layout.nbytes:
            return
        if arena.signal_pad is None and transport.stream is not None:
            arena.signal_pad = transport.allocate(signal_pad_bytes(transport.world_size))
        old, arena.buffers = arena.buffers, tuple(transport.allocate(self.layout.nbytes) for _ in range(2))
        if arena.was_captured:
            arena.replaced += old
        else:
            for buffer in old:
                transport.free(buffer)

    def _is_order_unknown(self, capture: int) -> bool:
        """Whether another exchange may run before this one on the device than the one that was made before it.

        capture: the one that this exchange is part of, 0 if none.
        """
        arena = self.arena
        changed = capture != arena.capture
        if changed and arena.in_flight is not None:
            if arena.capture:  # is over, and its events with it
                arena.in_flight = arena.done = arena.stream = None
            last = f"exchange {arena.exchanges - 1}"
            raise RuntimeError(f"{last}: in flight while a capture starts or ends, wanted wait() before")
        if changed:
            arena.capture, arena.done, arena.stream = capture, None, None  # events do not cross
        arena.was_captured |= capture != 0
        return arena.was_captured and (changed or capture == 0)


def _make_exchange(transport: Any, layout: Layout, experts_per_rank: int, num_sms: int | None) -> Any:
    """Who makes the stores of this transport: plain torch, kernels or puts. The last two import Triton."""
    if transport.access == "host":
        return PlainExchange(transport, layout, experts_per_rank)
    if transport.access == "puts":
        from .puts import PutExchange

        return PutExchange(transport, layout, experts_per_rank, num_sms)
    from .kernels.exchange import KernelExchange

    return KernelExchange(transport, layout, experts_per_rank, num_sms)


def capture_of(stream: torch.cuda.Stream) -> int:
    """A number for the capture that the current stream is part of, 0 outside of one."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    # torch tells whether, not which; the driver does.
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    failed = ask(ctypes.c_void_p(stream.cuda_stream), *map(ctypes.byref, (status, number)), None, None, None)
    if failed:
        raise RuntimeError(f"cuStreamGetCaptureInfo: got error {failed}, wanted the number of the capture")
    return number.value + 1
