"""How ranks reach each other's memory: buffers that every peer can write, moves that store into them, a barrier.

allocate(n)     rank 0: [ n bytes ]   rank 1: [ n bytes ]   ...   each rank maps all of them
put_..., return_sums(move, ...)      stores of one move (`moves.py`), over when all ranks' stores have landed
barrier(step)   no rank leaves before all have entered; what was stored before it is visible after it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .moves import Move
    from .plan import RoutingPlan

T = TypeVar("T")


@dataclass(frozen=True)
class SymmetricBuffer:
    """The same number of bytes on every rank, all of them mapped here.

    Attributes:
        rank: this rank.
        peers: uint8 (nbytes,) one for each rank; ``peers[rank]`` is local. Empty once the transport is closed.
        pointers: int64 (W,) on the transport's device, the peers' addresses, for kernels.
    """

    rank: int
    peers: list[Tensor]
    pointers: Tensor

    @property
    def local(self) -> Tensor:
        return self.peers[self.rank]


@dataclass(eq=False)
class Arena:
    """What all workspaces of a transport share; `workspace.py` says how.

    Attributes:
        buffers: two, of one size, that moves take turns in; none before the first workspace. moves: made so far.
        pad: of a barrier that moves nothing, where moves run on a stream.
        stream: that the last move began on. under_way: what it uses, until it is over. done: when it is.
        capture: the CUDA graph's that the last move is part of, 0 if none. was_captured: whether any was.
        replaced: smaller buffers that graphs store to.
        refused: why this rank refused a move, after which there are no more.
        users: who opened the transport together and have not closed it, counted by whoever shares it.
    """

    buffers: tuple[SymmetricBuffer, ...] = ()
    moves: int = 0
    pad: SymmetricBuffer | None = None
    stream: torch.cuda.Stream | None = None
    under_way: object = None
    done: torch.cuda.Event | None = None
    capture: int = 0
    was_captured: bool = False
    replaced: tuple[SymmetricBuffer, ...] = ()
    refused: str | None = None
    users: int = 0


class Transport(Protocol):
    """What verbs ask of a medium. Every method but check, free, refuse and close is collective: all ranks call it, in
    one order.

    Attributes:
        rank, world_size: of ``group``. device: where buffers live. group: None for a process alone.
        stream: where moves run that the caller does not wait for, those of all its workspaces one after the other: a
            kernel that waits on every multiprocessor must never keep out the one that its peers wait for. None on CPU.
        timeout: seconds that a wait for a peer takes at most. arena: what its workspaces share.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None
    stream: torch.cuda.Stream | None
    timeout: float
    arena: "Arena"

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """A zeroed buffer. Raises ValueError if the ranks ask for different sizes."""
        ...

    def free(self, buffer: SymmetricBuffer) -> None:
        """Let go of a buffer that no move is under way in. Local; views that are still held stay valid."""
        ...

    def barrier(self, step: str, pad: SymmetricBuffer | None = None) -> None:
        """Wait for all ranks; ``step`` says in an error what they were doing. Raises PeerTimeout.

        pad: of :func:`pad_bytes`, to meet over. Barriers that may run at once, on two streams, need a pad each.
        """
        ...

    def refuse(self, move: "Move", tokens: int) -> None:
        """Tell the peers that this rank will not come to the move: PeersDisagree there. Waits for nobody.

        tokens: that there is no room for; 0 if that is not why.
        """
        ...

    def put_tables(self, move: "Move", expert_ids: Tensor, weights: Tensor) -> None: ...

    def put_rows(self, move: "Move", payload: Sequence[Tensor], expert_ids: Tensor) -> None: ...

    def put_rows_to_groups(
        self, move: "Move", payload: Sequence[Tensor], expert_ids: Tensor, rows: Tensor, plan: "RoutingPlan"
    ) -> None: ...

    def return_sums(
        self,
        move: "Move",
        rows: Tensor,
        row_values: Tensor | None,
        plan: "RoutingPlan",
        expert_ids: Tensor,
        out: Tensor,
        values: Tensor | None,
    ) -> None: ...

    def check(self) -> None:
        """Raise PeerTimeout or PeersDisagree if that is known of a barrier that is past. Waits for nothing."""
        ...

    def close(self) -> None:
        """Let go of all buffers. Local; views that are still held stay valid."""
        ...


class PeerTimeout(RuntimeError):
    """Some ranks did not enter a barrier in time. The transport cannot be used any more.

    Attributes:
        missing: ranks of the group that did not arrive. step: what the others were doing.
        counter: number of the barrier. limit: seconds that were waited.
    """

    def __init__(self, rank: int, missing: Mapping[int, int], step: str, counter: int, limit: float) -> None:
        late = ", ".join(f"rank {peer} (last seen at barrier {seen})" for peer, seen in missing.items())
        super().__init__(f"rank {rank} waited {limit:g} s at {step}, barrier {counter}, for {late}")
        self.missing = tuple(missing)
        self.step, self.counter, self.limit = step, counter, limit


class PeersDisagree(RuntimeError):
    """Ranks met in different moves, or with rows of different widths. The transport cannot be used any more."""


def pad_bytes(world_size: int) -> int:
    """What a barrier meets over: a word for each rank, and the own counter."""
    return (world_size + 1) * 8


def cuda_device(device: torch.device | str | None) -> torch.device:
    """With an index, as tensors have it; the current one if none is said."""
    given = torch.device("cuda" if device is None else device)
    return torch.device("cuda", torch.cuda.current_device()) if given.index is None else given


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in rank order; just this one where there is no process group. For set-up, not for moves."""
    if not dist.is_initialized():
        return [value]
    everyone: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def check_agreement(what: str, mine: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Raise the same ValueError on every rank if the ranks do not hold the same values."""
    first, *others = gather_objects(dict(mine), group)
    for rank, theirs in enumerate(others, start=1):
        for name, wanted in first.items():
            if theirs[name] != wanted:
                raise ValueError(
                    f"{what}: ranks disagree on {name}: got {theirs[name]} on rank {rank}, wanted {wanted} as on rank 0"
                )
