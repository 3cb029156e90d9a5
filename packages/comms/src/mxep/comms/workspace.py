"""Workspace: two symmetric buffers that moves take turns in, and the proof that one barrier a move is enough.

    move        0        1        2        3
    buffer      0        1        0        1
    rank p   put|B0|read put|B1|read put|B2|read ...

Move i: stores into the peers' buffer i % 2, barrier B_i, reads of the own buffer i % 2.

**No read sees a later move's stores.** Rank p stores move i + 2 into rank q's buffer i % 2 only after it left
B_{i+1}. It left B_{i+1} only after q entered it, and q enters B_{i+1} (in program order, on a device in stream order)
after its last read of buffer i % 2, which is borrowed until q's move i + 1.

**No read misses its own move's stores.** q reads buffer i % 2 after B_i, which every p enters after its stores.

**No stale row is read.** What a move reads was written in the same move: a reader looks only where the tables say that
a sender wrote, and the tables of all W ranks are written whole in the move that they describe.
"""

import torch

from .layout import ALIGNMENT, Layout, round_up
from .transport import SymmetricBuffer, Transport, check_agreement


class Workspace:
    """The buffers that moves use. Several layers may share one as long as every rank makes the same moves in one order.

    Args:
        transport: how ranks reach each other.
        max_tokens: T_max, the most tokens a rank sends at once. top_k: K. dim: D, elements of a row on the way home.
        row_bytes: bytes of the widest row in either direction; None is 2 * dim (bf16 home, bf16 or MXFP8 out).
        num_experts: E, a multiple of W; rank r owns experts r * E/W .. (r + 1) * E/W - 1.
        direct_rows: R_max of the direct variant, 0 where it is not used.

    Collective. Raises ValueError on every rank if the ranks' arguments differ, or if one makes no sense.
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
    ) -> None:
        row_bytes = 2 * dim if row_bytes is None else row_bytes
        sizes = {"max_tokens": max_tokens, "top_k": top_k, "dim": dim, "row_bytes": row_bytes}
        sizes |= {"num_experts": num_experts, "direct_rows": direct_rows}
        check_agreement("Workspace", sizes, transport.group)
        for name, size in sizes.items():
            least = 0 if name in ("max_tokens", "direct_rows") else 1
            if size < least:
                raise ValueError(f"Workspace: {name}: got {size}, wanted at least {least}")
        if num_experts % transport.world_size:
            raise ValueError(f"num_experts: got {num_experts}, wanted a multiple of {transport.world_size} ranks")
        num_rows = max(transport.world_size * max_tokens, direct_rows)
        if num_rows * top_k >= 2**31:
            raise ValueError(f"Workspace: got {num_rows} rows of {top_k} experts, wanted an index that fits int32")

        self.transport = transport
        self.max_tokens = max_tokens
        self.top_k = top_k
        self.dim = dim
        self.num_experts = num_experts
        self.direct_rows = direct_rows
        self.layout = Layout(transport.world_size, max_tokens, top_k, round_up(row_bytes, ALIGNMENT), num_rows)
        self.buffers = tuple(transport.allocate(self.layout.nbytes) for _ in range(2))
        self.moves = 0

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.transport.world_size

    @property
    def device(self) -> torch.device:
        return self.transport.device

    def begin(self, verb: str) -> "Move":
        """The next move's buffer; the views of the move before the last end here, those of the last one at its end."""
        move = Move(self.transport, self.buffers[self.moves % 2], f"{verb}, move {self.moves}")
        self.moves += 1
        return move


class Move:
    """One move under way: store into ``buffer.peers``, call :meth:`finish`, read ``buffer.local``."""

    def __init__(self, transport: Transport, buffer: SymmetricBuffer, name: str) -> None:
        self.transport = transport
        self.buffer = buffer
        self.name = name

    def finish(self) -> None:
        """After it, all ranks' stores of this move are visible here, and ours there."""
        self.transport.barrier(self.name)
