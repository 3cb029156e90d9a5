"""Workspace: two symmetric buffers that moves take turns in, and the proof that one barrier a move is enough.

The buffers are the transport's, its *arena*: workspaces of other sizes share them, and count their moves together, so
below "move i" is the i-th of all. A workspace is the arena and a layout. One that is larger than all before it brings
two larger buffers; who holds views of the old ones keeps them.

    move        0        1        2        3
    buffer      0        1        0        1
    rank p   put|B0|read put|B1|read put|B2|read ...

Move i: stores into the peers' buffer i % 2, barrier B_i, reads of the own buffer i % 2. Every rank makes the same moves
in the same order, and a move begins after the one before has ended (on a device: in the order of the current stream; a
stream that was not the last move's waits for that one first, so they are as one).

**No read sees a later move's stores.** Rank p stores move i + 2 into rank q's buffer i % 2 only after it left
B_{i+1}. It left B_{i+1} only after q entered it, and q enters B_{i+1} (in program order, on a device in stream order)
after its last read of buffer i % 2, which is borrowed until q's move i + 1.

**No read misses its own move's stores.** q reads buffer i % 2 after B_i, which every p enters after its stores.

**No stale row is read.** What a move reads was written in the same move: a reader looks only where the tables say that
a sender wrote, and the tables of all W ranks are written whole in the move that they describe.

**One buffer would not do.** p leaves B_i as soon as q has entered it, and may store move i + 1 while q still reads what
move i brought. It takes two buffers, or a second barrier a move.

Tables have a barrier of their own, in the same move and in other words of the buffer: with rows on the transport's
stream, a plan is made of them while rows are under way. A rank enters the barrier of tables of move i + 2 after it left
that of move i + 1, so the proof holds for them as it stands. `return_rows` cuts B_i into chunks of tokens: rank p sums
a chunk that all ranks have stored, and has left B_i when it has left the last.

**A captured graph** may be replayed at any time, twice in a row with an odd number of moves, too: then a buffer's turn
comes twice. So its first move begins with a barrier that moves nothing, after the reads of all that ran before; and so
does every move outside of a graph once there has been a capture, as nobody tells the host of a replay.
"""

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from .layout import ALIGNMENT, Layout, round_up
from .moves import Move
from .transport import SymmetricBuffer, Transport, check_agreement, pad_bytes


class Workspace:
    """The buffers that moves use, of one layout. Several layers may share one; it shares the transport's buffers with
    all others. Over all of them, every rank makes the same moves in one order.

    Args:
        transport: how ranks reach each other.
        max_tokens: T_max, the most tokens a rank sends at once. top_k: K. dim: D, elements of a row on the way home.
        row_bytes: bytes of the widest row in either direction; None is 2 * dim (bf16 home, bf16 or MXFP8 out).
        num_experts: E, a multiple of W; rank r owns experts r * E/W .. (r + 1) * E/W - 1.
        direct_rows: R_max of the direct variant, 0 where it is not used.
        num_sms: how many multiprocessors of the device a move may take, the same on all ranks, which cut rows into
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
        direct_rows: int = 0,
        num_sms: int | None = None,
    ) -> None:
        if transport.stream is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Workspace: made while a CUDA graph is captured, wanted one run of the layer before that"
            )
        row_bytes = 2 * dim if row_bytes is None else row_bytes
        sizes = {"max_tokens": max_tokens, "top_k": top_k, "dim": dim, "row_bytes": row_bytes}
        sizes |= {"num_experts": num_experts, "direct_rows": direct_rows}
        agreed = {**sizes, "num_sms": num_sms, "moves made before": transport.arena.moves}
        check_agreement("Workspace", agreed, transport.group)
        for name, size in sizes.items():
            least = 0 if name in ("max_tokens", "direct_rows") else 1
            if size < least:
                raise ValueError(f"Workspace: {name}: got {size}, wanted at least {least}")
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"Workspace: num_sms: got {num_sms}, wanted at least 1")
        if num_experts % transport.world_size:
            raise ValueError(f"num_experts: got {num_experts}, wanted a multiple of {transport.world_size} ranks")
        if row_bytes >= 2**24:
            raise ValueError(f"row_bytes: got {row_bytes}, wanted less than {2**24}")
        num_rows = max(transport.world_size * max_tokens, direct_rows)
        if num_rows * top_k >= 2**31:
            raise ValueError(f"Workspace: got {num_rows} rows of {top_k} experts, wanted an index that fits int32")

        self.transport = transport
        self.arena = transport.arena
        self.max_tokens = max_tokens
        self.top_k = top_k
        self.dim = dim
        self.num_experts = num_experts
        self.direct_rows = direct_rows
        self.layout = Layout(transport.world_size, max_tokens, top_k, round_up(row_bytes, ALIGNMENT), num_rows)
        self.num_sms = num_sms
        self._make_room()

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.transport.world_size

    @property
    def device(self) -> torch.device:
        return self.transport.device

    @property
    def buffers(self) -> tuple[SymmetricBuffer, ...]:
        return self.arena.buffers

    @property
    def moves(self) -> int:
        """Made so far, by all workspaces of the transport."""
        return self.arena.moves

    def begin(self, verb: str) -> Move:
        """The next move's buffer; the views of the move before the last end here, those of the last one at its end.

        Raises PeerTimeout or PeersDisagree if an earlier move is known to have failed, RuntimeError if one is under way
        across the start or the end of a CUDA graph's capture, or if this rank has refused one.
        """
        arena = self.arena
        self.transport.check()
        if arena.refused is not None:
            raise RuntimeError(f"rank {self.transport.rank} refused a move ({arena.refused}): make the layers again")
        name = f"{verb}, move {arena.moves}"
        unknown = False
        if self.transport.stream is not None:
            stream = torch.cuda.current_stream(self.device)
            unknown = self._turn_is_unknown(capture_of(stream))
            self._join(stream)
            if arena.stream is not None and arena.stream != stream:
                stream.wait_stream(arena.stream)  # after all that reads what earlier moves brought
            arena.stream = stream
        if unknown:
            # After it: all ranks have read what any earlier move brought.
            self.transport.barrier(name, arena.pad)
        buffer = arena.buffers[arena.moves % 2]
        arena.moves += 1
        return Move(buffer, self.layout, self.num_local_experts, name, self.num_sms)

    def refuse(self, why: str, *, tokens: int = 0) -> None:
        """Do not come to the next move, and tell the peers: they raise PeersDisagree. A rank alone just goes on."""
        if self.transport.world_size > 1 and self.arena.refused is None:
            self.transport.refuse(self.begin("refused"), min(tokens, 2**24 - 1))
            self.arena.refused = why

    @contextlib.contextmanager
    def aside(self, keep: object) -> Iterator[None]:
        """Work on the transport's stream, after all that the one was given on which the move began; ``join`` brings it
        back.

        keep: what that work uses, held until then.
        """
        self.arena.under_way = keep
        stream, begun_on = self.transport.stream, self.arena.stream
        if stream is None or begun_on is None:
            yield
            return
        stream.wait_stream(begun_on)
        with torch.cuda.stream(stream):
            yield
        self.arena.done = stream.record_event()

    def join(self) -> None:
        """The current stream waits for the move that was last aside, if there is one; the host does not."""
        self._join(None)

    def _join(self, stream: torch.cuda.Stream | None) -> None:
        """stream: the current one, if that is known: to ask costs 4 us."""
        arena = self.arena
        if arena.done is not None:
            stream = stream or torch.cuda.current_stream(self.device)
            stream.wait_event(arena.done)
            if arena.under_way is not None and arena.stream is not None and arena.stream != stream:
                arena.stream.wait_event(arena.done)  # it owns the memory that is let go now
        arena.under_way = None

    def _make_room(self) -> None:
        """Buffers that hold the layout. All ranks' devices are idle once new ones are there, see ``allocate``."""
        arena, transport = self.arena, self.transport
        if arena.buffers and arena.buffers[0].local.numel() >= self.layout.nbytes:
            return
        if arena.pad is None and transport.stream is not None:
            arena.pad = transport.allocate(pad_bytes(transport.world_size))
        old, arena.buffers = arena.buffers, tuple(transport.allocate(self.layout.nbytes) for _ in range(2))
        if arena.was_captured:
            arena.replaced += old
        else:
            for buffer in old:
                transport.free(buffer)

    def _turn_is_unknown(self, capture: int) -> bool:
        """Whether the move that runs before this one on the device may be another than the one that was made before it.

        capture: the one that this move is part of, 0 if none.
        """
        arena = self.arena
        changed = capture != arena.capture
        if changed and arena.under_way is not None:
            if arena.capture:  # is over, and its events with it
                arena.under_way = arena.done = arena.stream = None
            move = f"move {arena.moves - 1}"
            raise RuntimeError(f"{move}: under way while a capture starts or ends, wanted wait() before")
        if changed:
            arena.capture, arena.done, arena.stream = capture, None, None  # events do not cross
        arena.was_captured |= capture != 0
        return arena.was_captured and (changed or capture == 0)


def capture_of(stream: torch.cuda.Stream) -> int:
    """A number for the capture that the current stream is part of, 0 outside of one."""
    with torch.cuda.device(stream.device):
        if not torch.cuda.is_current_stream_capturing():
            return 0
    # torch tells whether, not which; the driver does.
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    failed = ask(ctypes.c_void_p(stream.cuda_stream), *map(ctypes.byref, (status, number)), None, None, None)
    if failed:
        raise RuntimeError(f"cuStreamGetCaptureInfo: got error {failed}, wanted the number of the capture")
    return number.value + 1
