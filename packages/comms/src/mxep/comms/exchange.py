"""The two moves, each with one barrier.

    send_rows     token t -> slot (my rank, t) of every rank that owns one of its experts, once; tables to all
    return_rows   rows of slot (r, t), summed -> slot (my rank, t) of rank r, which sums over ranks in their order

Dispatch forward and combine backward are `send_rows`; combine forward and dispatch backward are `return_rows`.
T tokens here, T_max slots a sender, K experts a token, W ranks, S = W * T_max slots, D elements of a row.

`start_send_rows` and `start_return_rows` begin a move and return what waits for it: on CUDA the move runs on the
transport's stream meanwhile, and waiting makes the current stream wait, not the host.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Layout
from .moves import Move
from .plan import RoutingPlan, check_ids
from .workspace import Workspace

Tables = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Slots:
    """What arrived. Slot s = (source rank, token), s = rank * T_max + token.

    Attributes:
        payload: uint8 (S, n_i) strided views into the workspace. Slots that no table leads to hold anything.
        expert_ids: (W, T_max, K) int32, weights: (W, T_max, K) fp32, num_tokens: (W,) int32: the senders' tables; rows
            past num_tokens hold anything. None where the move was sent without weights.

    All are borrowed until the workspace's next move.
    """

    payload: tuple[Tensor, ...]
    expert_ids: Tensor | None
    weights: Tensor | None
    num_tokens: Tensor | None


class Sending:
    """Rows under way. ``tables``: the senders' (expert_ids, weights, num_tokens), here already, or None."""

    def __init__(self, workspace: Workspace, slots: Slots) -> None:
        self.tables: Tables | None = None
        if slots.expert_ids is not None and slots.weights is not None and slots.num_tokens is not None:
            self.tables = slots.expert_ids, slots.weights, slots.num_tokens
        self._workspace = workspace
        self._slots = slots

    def wait(self) -> Slots:
        self._workspace.join()
        return self._slots


class Returning:
    """Sums under way."""

    def __init__(self, workspace: Workspace, out: Tensor, values: Tensor | None) -> None:
        self._workspace = workspace
        self._result = out, values

    def wait(self) -> tuple[Tensor, Tensor | None]:
        self._workspace.join()
        return self._result


def send_rows(
    workspace: Workspace, payload: Sequence[Tensor], expert_ids: Tensor, weights: Tensor | None = None
) -> Slots:
    """Send each token once to every rank that owns one of its experts. Collective.

    Args:
        payload: uint8 (T, n_i) each; they travel side by side in one row.
        expert_ids: (T, K) int32 or int64, -1 is not routed.
        weights: (T, K) fp32. None repeats a move that is planned already, with the same ids: tables stay home.

    Raises ValueError on wrong shapes, dtypes or devices and, on CPU, on ids outside [-1, E), before anything moves (on
    CUDA such a pair is not sent, and make_plan counts it); PeerTimeout and PeersDisagree (on CUDA at a later move, or
    by ``workspace.transport.check()``). Peers of a rank with more tokens than max_tokens, or with ids that are none,
    get PeersDisagree that says so; the transport is of no use then.
    """
    return start_send_rows(workspace, payload, expert_ids, weights).wait()


def start_send_rows(
    workspace: Workspace,
    payload: Sequence[Tensor],
    expert_ids: Tensor,
    weights: Tensor | None = None,
    *,
    num_sms: int | None = None,
) -> Sending:
    """As :func:`send_rows`; make the plan of ``.tables`` while the rows are under way, then ``.wait()``.

    num_sms: how many multiprocessors the rows may take, at most the workspace's; None: as many as it has. Bound it
    where work runs beside them: on H200s no other kernel was seen to start on a multiprocessor that a move was on.
    """
    _check_num_programs(num_sms)
    expert_ids, weights = checked_tokens(workspace, payload, expert_ids, weights)
    transport, layout = workspace.transport, workspace.layout
    move = workspace.begin("send_rows")
    with workspace.aside((payload, expert_ids)):
        # After it: every rank's tokens for this rank lie in its slots.
        transport.put_rows(_bound(move, num_sms), payload, expert_ids)
    local = move.buffer.local
    arrived = split_parts(layout.rows(local)[: layout.num_slots], payload)
    if weights is None:
        return Sending(workspace, Slots(arrived, None, None, None))
    # After it: the tables of all W ranks lie here.
    transport.put_tables(move, expert_ids, weights)
    return Sending(workspace, Slots(arrived, *tables(layout, local)))


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
    pair's row, 0 for a pair without one (None without row_values). Raises as send_rows does.
    """
    return start_return_rows(workspace, rows, plan, expert_ids, row_values=row_values).wait()


def start_return_rows(
    workspace: Workspace,
    rows: Tensor,
    plan: RoutingPlan,
    expert_ids: Tensor,
    *,
    row_values: Tensor | None = None,
    num_sms: int | None = None,
) -> Returning:
    """As :func:`return_rows`; what does not need the sums may be computed before ``.wait()``.

    num_sms: as of :func:`start_send_rows`, and the same on all ranks.
    """
    expert_ids = checked_shape(workspace, expert_ids, len(expert_ids))
    if expert_ids.device.type == "cpu":
        check_ids(expert_ids, workspace.num_experts)
    _check_return(workspace, rows, plan, row_values)
    _check_num_programs(num_sms)
    # Of the current stream, which goes on with them.
    out = rows.new_empty(len(expert_ids), rows.shape[1])
    values = None if row_values is None else row_values.new_empty(expert_ids.shape)
    move = workspace.begin("return_rows")
    with workspace.aside((rows, plan, expert_ids, row_values, out, values)):
        # Every rank that got one of our tokens puts its sum into our slots (that rank, token), and we sum over ranks.
        workspace.transport.return_sums(_bound(move, num_sms), rows, row_values, plan, expert_ids, out, values)
    return Returning(workspace, out, values)


# ── pieces that the moves share ──────────────────────────────────────────────────────────────────────────────────────


def _bound(move: Move, num_sms: int | None) -> Move:
    if num_sms is None:
        return move
    return dataclasses.replace(move, num_sms=min(num_sms, move.num_sms or num_sms))


def _check_num_programs(num_sms: int | None) -> None:
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"num_sms: got {num_sms}, wanted at least 1, or None")


def split_parts(rows: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of the parts that lie side by side in ``rows``."""
    widths = [part.shape[1] for part in like]
    return torch.split(rows[:, : sum(widths)], widths, 1)


def tables(layout: Layout, local: Tensor) -> Tables:
    """The senders' (expert_ids, weights, num_tokens) in a buffer."""
    return layout.ids(local), layout.values(local), layout.num_tokens(local)


def check_parts(workspace: Workspace, payload: Sequence[Tensor]) -> None:
    for part in payload:
        if part.dtype != torch.uint8 or part.dim() != 2 or len(part) != len(payload[0]) or not part.shape[1]:
            got = f"{part.dtype} {tuple(part.shape)}"
            raise ValueError(f"payload: got {got}, wanted torch.uint8 ({len(payload[0])}, bytes), at least one byte")
        _check_device("payload", part, workspace)
    width = sum(part.shape[1] for part in payload)
    if not 0 < width <= workspace.layout.row_bytes:
        raise ValueError(
            f"payload: got {width} bytes a row, wanted 1 to {workspace.layout.row_bytes} as the workspace has"
        )


def checked_tokens(
    workspace: Workspace, payload: Sequence[Tensor], expert_ids: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Contiguous ids (T, K) and weights. What only this rank can know to be wrong, its peers are told."""
    check_parts(workspace, payload)
    tokens = len(payload[0])
    if tokens > workspace.max_tokens:
        most = f"at most max_tokens = {workspace.max_tokens}"
        why = f"payload: got {tokens} tokens, wanted {most}: set max_tokens={tokens} or more, on all ranks"
        workspace.refuse(why, tokens=tokens)
        raise ValueError(why)
    expert_ids = checked_shape(workspace, expert_ids, tokens)
    if weights is not None:
        weights = checked_weights(workspace, weights, expert_ids)
    if expert_ids.device.type == "cpu":
        try:
            check_ids(expert_ids, workspace.num_experts)
        except ValueError as error:
            workspace.refuse(str(error))
            raise
    return expert_ids, weights


def checked_shape(workspace: Workspace, expert_ids: Tensor, num_tokens: int) -> Tensor:
    """Contiguous ids (T, K)."""
    wanted = (num_tokens, workspace.top_k)
    if expert_ids.shape != wanted or expert_ids.dtype not in (torch.int32, torch.int64):
        got = f"{expert_ids.dtype} {tuple(expert_ids.shape)}"
        raise ValueError(f"expert_ids: got {got}, wanted torch.int32 or torch.int64 {wanted}")
    _check_device("expert_ids", expert_ids, workspace)
    if num_tokens > workspace.max_tokens:
        raise ValueError(f"expert_ids: got {num_tokens} tokens, wanted at most max_tokens = {workspace.max_tokens}")
    return expert_ids.contiguous()


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
