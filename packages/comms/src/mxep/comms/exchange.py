"""The two moves, each with one barrier.

    send_rows     token t -> slot (my rank, t) of every rank that owns one of its experts, once; tables to all
    return_rows   rows of slot (r, t), summed -> slot (my rank, t) of rank r, which sums over ranks in their order

Dispatch forward and combine backward are `send_rows`; combine forward and dispatch backward are `return_rows`.
T tokens here, T_max slots a sender, K experts a token, W ranks, S = W * T_max slots, D elements of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import ALIGNMENT, Layout, round_up
from .plan import RoutingPlan, check_ids
from .rows import sum_slots
from .workspace import Workspace


@dataclass(frozen=True)
class Slots:
    """What arrived. Slot s = (source rank, token), s = rank * T_max + token.

    Attributes:
        parts: uint8 (S, n_i) strided views into the workspace, borrowed until its next move. Slots that no table leads
            to hold anything.
        expert_ids: (W, T_max, K) int32, weights: (W, T_max, K) fp32, num_tokens: (W,) int32: the senders' tables, owned
            by the caller; rows past num_tokens hold anything. None where the move was sent without weights.
    """

    parts: tuple[Tensor, ...]
    expert_ids: Tensor | None
    weights: Tensor | None
    num_tokens: Tensor | None


def send_rows(
    workspace: Workspace, parts: Sequence[Tensor], expert_ids: Tensor, weights: Tensor | None = None
) -> Slots:
    """Send each token once to every rank that owns one of its experts. Collective.

    Args:
        parts: uint8 (T, n_i) each; they travel side by side in one row.
        expert_ids: (T, K) int32 or int64, -1 is not routed.
        weights: (T, K) fp32. None repeats a move that is planned already, with the same ids: tables stay home.

    Raises ValueError on wrong shapes, dtypes or devices and, on CPU, on ids outside [-1, E), before anything moves (on
    CUDA such a pair is not sent, and make_plan counts it); PeerTimeout.
    """
    check_parts(workspace, parts)
    expert_ids = checked_ids(workspace, expert_ids, len(parts[0]))
    if weights is not None:
        weights = checked_weights(workspace, weights, expert_ids)
    layout, rank = workspace.layout, workspace.transport.rank
    move = workspace.begin("send_rows")
    put_rows(
        move.buffer.peers,
        move.buffer.pointers,
        list(parts),
        expert_ids,
        weights,
        layout.ints(),
        rank,
        workspace.num_local_experts,
    )
    # After it: every rank's tokens for this rank lie in its slots, and all W tables lie here.
    move.finish()
    local = move.buffer.local
    arrived = split_parts(layout.rows(local)[: layout.num_slots], parts)
    return Slots(arrived, *(copy_tables(layout, local) if weights is not None else (None, None, None)))


def return_rows(
    workspace: Workspace, rows: Tensor, plan: RoutingPlan, expert_ids: Tensor, *, row_values: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Send rows home and sum them there. Collective.

    For each slot its rows are summed in fp32, in the order of the token's list, and rounded to the rows' dtype; the
    owner sums the ranks' results in fp32, in rank order, and rounds once.

    Args:
        rows: (R_max, D) bf16 or fp32, expert-major as ``plan`` has them; rows past its last group are not read.
        plan: of the send_rows that brought them.
        expert_ids: (T, K) of that send_rows, this rank's own tokens.
        row_values: (R_max,) fp32, one number a row that goes home with it.

    Returns the sums (T, D), rows.dtype, zero for a token that was routed nowhere; and (T, K) fp32, the value of each
    pair's row, 0 for a pair without one (None without row_values). Raises ValueError as send_rows does; PeerTimeout.
    """
    expert_ids = checked_ids(workspace, expert_ids, len(expert_ids))
    _check_return(workspace, rows, plan, row_values)
    layout, rank, e = workspace.layout, workspace.transport.rank, workspace.num_local_experts
    move = workspace.begin("return_rows")
    buffer = move.buffer
    put_sums(buffer.peers, buffer.pointers, rows, plan.slot_rows, row_values, layout.ints(), rank)
    # After it: every rank that got one of our tokens has put its sum into our slots (that rank, token).
    move.finish()
    slots = home_slots(layout, expert_ids, e)
    out = sum_slots(layout.rows(buffer.local)[:, : rows.shape[1] * rows.dtype.itemsize].view(rows.dtype), slots)
    if row_values is None:
        return out, None
    return out, values_home(buffer.local, expert_ids, layout.ints(), e)


# ── ops: the stores of a move, and what the owner makes of them ──────────────────────────────────────────────────────


@torch.library.custom_op("mxep::put_rows", mutates_args=("peers",))
def put_rows(
    peers: list[Tensor],
    pointers: Tensor,
    parts: list[Tensor],
    expert_ids: Tensor,
    weights: Tensor | None,
    layout: list[int],
    rank: int,
    experts_per_rank: int,
) -> None:
    """Store token t into slot (rank, t) of each peer that owns one of its experts; with weights, the tables into all.

    peers: the buffers, each as ``layout`` says. pointers: (W,) int64, their addresses, for kernels.
    parts: uint8 (T, n_i). expert_ids: (T, K) int32. weights: (T, K) fp32.
    """
    place = Layout(*layout)
    packed = pack(parts)
    slot = rank * place.max_tokens + torch.arange(len(packed), device=packed.device)
    owner = owners(expert_ids, experts_per_rank)
    for destination, peer in enumerate(peers):
        needed = (owner == destination).any(1)
        store(place, peer, torch.where(needed, slot, place.spare_row(rank)), packed)
        if weights is not None:
            store_tables(place, peer, expert_ids, weights, rank)


@torch.library.custom_op("mxep::put_sums", mutates_args=("peers",))
def put_sums(
    peers: list[Tensor],
    pointers: Tensor,
    rows: Tensor,
    slot_rows: Tensor,
    row_values: Tensor | None,
    layout: list[int],
    rank: int,
) -> None:
    """Sum the rows of slot (r, t) and store the sum into slot (rank, t) of peer r, if any pair of it was for this rank.

    rows: (R_max, D). slot_rows: (S, K) int32. row_values: (R_max,) fp32, stored into the peers' (rank, t, k).
    """
    place = Layout(*layout)
    packed = pack([sum_slots(rows, slot_rows).view(torch.uint8)])
    slot = rank * place.max_tokens + torch.arange(place.max_tokens, device=rows.device)
    # A slot whose rows were all dropped sends its zeroes: the owner, who cannot know, waits for a sum from here.
    was_sent = (slot_rows != -1).any(1)
    values = None if row_values is None else torch.cat((row_values, row_values.new_zeros(1)))
    for owner, peer in enumerate(peers):
        mine = slice(owner * place.max_tokens, (owner + 1) * place.max_tokens)
        store(place, peer, torch.where(was_sent[mine], slot, place.spare_row(rank)), packed[mine])
        if values is not None:
            place.values(peer)[rank].copy_(values[torch.where(slot_rows[mine] >= 0, slot_rows[mine], len(values) - 1)])


@torch.library.custom_op("mxep::values_home", mutates_args=())
def values_home(local: Tensor, expert_ids: Tensor, layout: list[int], experts_per_rank: int) -> Tensor:
    """(T, K) fp32: the value that the owner of each pair's expert stored, 0 for a pair without one."""
    place = Layout(*layout)
    owner = owners(expert_ids, experts_per_rank)
    exists = (owner >= 0) & (owner < place.world_size)
    table = place.values(local)[:, : len(expert_ids)]
    values = table.gather(0, torch.where(exists, owner, 0).long()[None])[0]
    return torch.where(exists, values, 0.0)


@values_home.register_fake
def _(local: Tensor, expert_ids: Tensor, layout: list[int], experts_per_rank: int) -> Tensor:
    return local.new_empty(expert_ids.shape, dtype=torch.float32)


# ── pieces that the moves share ──────────────────────────────────────────────────────────────────────────────────────


def owners(expert_ids: Tensor, experts_per_rank: int) -> Tensor:
    """The rank of each id. Not a rank: -1 for -1, and anything for an invalid id."""
    return expert_ids.div(experts_per_rank, rounding_mode="floor")


def home_slots(layout: Layout, expert_ids: Tensor, experts_per_rank: int) -> Tensor:
    """(T, W) int32: where rank r's sum of own token t arrives; -1 if no expert of t is on r."""
    ranks = torch.arange(layout.world_size, dtype=torch.int32, device=expert_ids.device)
    token = torch.arange(len(expert_ids), dtype=torch.int32, device=expert_ids.device)
    was_there = (owners(expert_ids, experts_per_rank)[:, :, None] == ranks).any(1)
    return torch.where(was_there, ranks * layout.max_tokens + token[:, None], -1)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Parts (N, n_i) uint8 -> (N, n) uint8, side by side, n rounded up to 16 bytes."""
    width = sum(part.shape[1] for part in parts)
    gap = parts[0].new_zeros(len(parts[0]), round_up(width, ALIGNMENT) - width)
    return torch.cat((*parts, gap), 1)


def split_parts(rows: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of the parts that :func:`pack` laid side by side."""
    widths = [part.shape[1] for part in like]
    return torch.split(rows[:, : sum(widths)], widths, 1)


def store(place: Layout, peer: Tensor, index: Tensor, packed: Tensor) -> None:
    """Row i of ``packed`` (N, n) into row ``index[i]`` of a peer, in words of 8 bytes."""
    rows = place.rows(peer)[:, : packed.shape[1]]
    rows.view(torch.int64).index_copy_(0, index, packed.view(torch.int64))


def store_tables(place: Layout, peer: Tensor, expert_ids: Tensor, weights: Tensor, rank: int) -> None:
    count = len(expert_ids)
    place.ids(peer)[rank, :count].copy_(expert_ids)
    place.values(peer)[rank, :count].copy_(weights)
    place.num_tokens(peer)[rank].fill_(count)


def copy_tables(layout: Layout, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The senders' (expert_ids, weights, num_tokens), out of a buffer that will be written again."""
    return layout.ids(local).clone(), layout.values(local).clone(), layout.num_tokens(local).clone()


def check_parts(workspace: Workspace, parts: Sequence[Tensor]) -> None:
    for part in parts:
        if part.dtype != torch.uint8 or part.dim() != 2 or len(part) != len(parts[0]):
            got = f"{part.dtype} {tuple(part.shape)}"
            raise ValueError(f"parts: got {got}, wanted torch.uint8 ({len(parts[0])}, bytes)")
        _check_device("parts", part, workspace)
    width = sum(part.shape[1] for part in parts)
    if not 0 < width <= workspace.layout.row_bytes:
        raise ValueError(
            f"parts: got {width} bytes a row, wanted 1 to {workspace.layout.row_bytes} as the workspace has"
        )
    if len(parts[0]) > workspace.max_tokens:
        raise ValueError(f"parts: got {len(parts[0])} tokens, wanted at most max_tokens = {workspace.max_tokens}")


def checked_ids(workspace: Workspace, expert_ids: Tensor, num_tokens: int) -> Tensor:
    """Ids as contiguous int32 (T, K); on CPU none is invalid."""
    wanted = (num_tokens, workspace.top_k)
    if expert_ids.shape != wanted or expert_ids.dtype not in (torch.int32, torch.int64):
        got = f"{expert_ids.dtype} {tuple(expert_ids.shape)}"
        raise ValueError(f"expert_ids: got {got}, wanted torch.int32 or torch.int64 {wanted}")
    _check_device("expert_ids", expert_ids, workspace)
    if num_tokens > workspace.max_tokens:
        raise ValueError(f"expert_ids: got {num_tokens} tokens, wanted at most max_tokens = {workspace.max_tokens}")
    if expert_ids.device.type == "cpu":
        check_ids(expert_ids, workspace.num_experts)
    # Clamped so that no invalid int64 wraps around into a valid int32.
    return expert_ids.clamp(-2, workspace.num_experts).int().contiguous()


def checked_weights(workspace: Workspace, weights: Tensor, expert_ids: Tensor) -> Tensor:
    if weights.shape != expert_ids.shape or weights.dtype != torch.float32:
        got = f"{weights.dtype} {tuple(weights.shape)}"
        raise ValueError(f"weights: got {got}, wanted torch.float32 {tuple(expert_ids.shape)}")
    _check_device("weights", weights, workspace)
    return weights.detach().contiguous()


def _check_return(workspace: Workspace, rows: Tensor, plan: RoutingPlan, row_values: Tensor | None) -> None:
    wanted = (plan.max_rows, workspace.dim)
    if rows.shape != wanted or rows.dtype not in (torch.bfloat16, torch.float32):
        got = f"{rows.dtype} {tuple(rows.shape)}"
        raise ValueError(f"rows: got {got}, wanted torch.bfloat16 or torch.float32 {wanted}")
    width = rows.shape[1] * rows.dtype.itemsize
    if width > workspace.layout.row_bytes:
        raise ValueError(f"rows: got {width} bytes a row, wanted at most {workspace.layout.row_bytes} (row_bytes)")
    slots = (workspace.layout.num_slots, workspace.top_k)
    if plan.slot_rows.shape != slots:
        raise ValueError(f"plan.slot_rows: got {tuple(plan.slot_rows.shape)}, wanted {slots} as the workspace has")
    _check_device("rows", rows, workspace)
    if row_values is not None:
        if row_values.shape != wanted[:1] or row_values.dtype != torch.float32:
            got = f"{row_values.dtype} {tuple(row_values.shape)}"
            raise ValueError(f"row_values: got {got}, wanted torch.float32 {wanted[:1]}")
        _check_device("row_values", row_values, workspace)


def _check_device(name: str, tensor: Tensor, workspace: Workspace) -> None:
    if tensor.device != workspace.device:
        raise ValueError(f"{name}: got device {tensor.device}, wanted {workspace.device} as the transport has")
