"""The two exchanges between ranks, `dispatch` and `combine`. Each has one barrier.

    dispatch   stores token t into slot (this rank, t) of every rank that owns one of its experts, once per rank; also
               stores this rank's routing tables on all ranks
    combine    sums the rows of slot (r, t), the token t of rank r, and stores the sum into slot (this rank, t) of rank
               r; rank r then adds up the sums of all ranks, in rank order

The backward of `combine` is a `dispatch`, and the backward of `dispatch` is a `combine`.
Letters: T tokens on this rank, T_max the largest T of a rank, K experts per token, W ranks, S = W * T_max slots,
E experts, D elements per row.

Both functions return a handle. Its ``wait`` returns the received data without blocking the host. A CUDA exchange runs
on the transport's own stream if ``async_op=True``, or if it is a dispatch with tables. Then ``wait`` makes the current
stream wait for it. Other exchanges run on the current stream.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .plan import RoutingPlan, check_ids
from .transport import batch_too_large
from .workspace import Tables, Workspace

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Handle(Generic[T]):
    """An exchange that has begun.

    tables: for a dispatch with weights, the senders' tables: expert_ids (W, T_max, K) int32, weights (W, T_max, K) fp32
        and num_tokens (W,) int32. Entries past num_tokens are unspecified. They may be used before ``wait``. Like the
        slots, they are valid until the workspace's next exchange. None for other exchanges.
    number: (1,) int32 number of a dispatch with weights, for `RoutingPlan.dispatch`.
    """

    _in_flight: Workspace | None
    _result: T
    tables: Tables | None = None
    number: Tensor | None = None

    def wait(self) -> T:
        """Return the result of the exchange, for use on the current stream. Does not block the host.

        The result is the slots of a dispatch, or the sums and values of a combine.
        """
        if self._in_flight is not None:
            self._in_flight.join()
        return self._result


def dispatch(
    workspace: Workspace,
    payload: Sequence[Tensor],
    expert_ids: Tensor,
    weights: Tensor | None = None,
    *,
    plan: RoutingPlan | None = None,
    async_op: bool = False,
    num_sms: int | None = None,
    room: int | None = None,
) -> Handle[tuple[Tensor, ...]]:
    """Send each token once to every rank that owns one of its experts. Collective.

    Args:
        payload: uint8 tensors (T, n_i), concatenated per row.
        expert_ids: (T, K) int32 or int64, -1 is not routed.
        weights: (T, K) fp32 routing weights. None: this is a redispatch with the ids of ``plan``, and no tables are
            sent.
        plan: plan of a redispatch. Ranks compare its `dispatch` number.
        async_op: True: work on the current stream may overlap the exchange until ``wait``.
        num_sms: maximum multiprocessors for sending rows, at most the workspace's num_sms. None: the workspace's. Lower
            it to leave multiprocessors for overlapping kernels: on H200s no other kernel was seen to start on a
            multiprocessor that an exchange used.
        room: rows of the payload tensors, if they have more than T. Rows from T on are ignored.
    Returns:
        A handle. Its ``wait`` returns the slots: one uint8 tensor (S, n_i) per payload tensor. Slot
        s = rank * T_max + token holds the payload of that token. Slots that no table names are unspecified. The tensors
        are strided views into the workspace, valid until its next exchange.

    Raises ValueError for wrong shapes, dtypes or devices, before anything is sent. Ids outside [-1, E) raise ValueError
    on the CPU. On CUDA such a pair is not sent, and make_plan counts it.

    Raises PeerTimeout if a peer does not arrive. Raises PeersDisagree if a peer has invalid ids or more than max_tokens
    tokens, if the ranks' plans come from different dispatches, or if the ranks begin new dispatches of different
    layers. On CUDA a later exchange or ``workspace.transport.check()`` raises them. The transport is unusable then.
    """
    if workspace.is_on_other_device():
        with torch.cuda.device(workspace.device):
            how = {"plan": plan, "async_op": async_op, "num_sms": num_sms, "room": room}
            return dispatch(workspace, payload, expert_ids, weights, **how)  # type: ignore[arg-type]
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"num_sms: got {num_sms}, wanted at least 1, or None")
    expert_ids, weights = _check_tokens(workspace, payload, expert_ids, weights, room)
    number = None if plan is None else plan.dispatch
    buffer = workspace.begin("dispatch")
    if weights is not None:
        number = workspace.new_dispatch()
    in_flight = async_op or weights is not None
    with workspace.stream((payload, expert_ids)) if in_flight else contextlib.nullcontext():
        # After this: this rank's slots hold every rank's tokens for it.
        workspace.exchange.dispatch(buffer, payload, expert_ids, num_sms, number)
    tables = None
    if weights is not None:
        # After this: this rank has the tables of all W ranks.
        number = expert_ids.new_empty(1, dtype=torch.int32)
        workspace.exchange.dispatch_tables(buffer, expert_ids, weights, number)
        tables = workspace.tables(buffer)
    return Handle(workspace if in_flight else None, workspace.slots(buffer, payload), tables, number)


def combine(
    workspace: Workspace,
    rows: Tensor,
    plan: RoutingPlan,
    expert_ids: Tensor,
    row_values: Tensor | None = None,
    *,
    async_op: bool = False,
    room: int | None = None,
) -> Handle[tuple[Tensor, Tensor | None]]:
    """Send each token's rows back to the token's rank, summed. Collective.

    Each rank sums its rows of a token in fp32, in the order of the token's expert list, and rounds the sum to the dtype
    of rows. The token's rank adds up these sums in fp32, in rank order, and rounds once.

    Args:
        rows: (R_max, D) bf16 or fp32, in the order of ``plan``. Rows past the plan's last group are not read.
        plan: plan of the dispatch that brought the tokens. Ranks with different `dispatch` numbers raise.
        expert_ids: (T, K), this rank's expert ids in that dispatch.
        row_values: (R_max,) fp32, one number to send back with each row.
        async_op: True: work on the current stream may overlap the exchange until ``wait``.
        room: rows of the results, at least T. None: T. Rows from T on are unspecified.
    Returns:
        A handle. Its ``wait`` returns two tensors:
        sums: (T, D) in the dtype of rows, zero for tokens without a row.
        values: (T, K) fp32, the row value of each pair, 0 for a pair without a row. None without row_values.
    Raises as :func:`dispatch` does.
    """
    if workspace.is_on_other_device():
        with torch.cuda.device(workspace.device):
            return combine(workspace, rows, plan, expert_ids, row_values, async_op=async_op, room=room)
    tokens = expert_ids.shape[0]
    expert_ids = _check_expert_ids(workspace, expert_ids, tokens)
    if expert_ids.is_cpu:
        check_ids(expert_ids, workspace.num_experts)
    _check_rows(workspace, rows, plan, row_values)
    room = max(tokens, room or 0)
    out = rows.new_empty(room, workspace.dim)  # allocated on the current stream, which uses it after the exchange
    values = None if row_values is None else row_values.new_empty(room, workspace.top_k)
    buffer = workspace.begin("combine")
    in_flight = (rows, plan, expert_ids, row_values, out, values)
    with workspace.stream(in_flight) if async_op else contextlib.nullcontext():
        workspace.exchange.combine(buffer, rows, row_values, plan, expert_ids, out, values)
    return Handle(workspace if async_op else None, (out, values))


_INTS, _ROWS, _FP32 = (torch.int32, torch.int64), (torch.bfloat16, torch.float32), (torch.float32,)


def _check_tokens(
    workspace: Workspace, payload: Sequence[Tensor], expert_ids: Tensor, weights: Tensor | None, room: int | None
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments. Returns contiguous ids (T, K) and weights.

    If the batch is too large or has invalid ids, peers are told to raise, too. They cannot see these errors themselves.
    """
    if not payload:
        raise ValueError("payload: got no tensor, wanted at least one")
    rows, width = payload[0].shape[0], 0
    tokens = expert_ids.shape[0] if rows == room else rows
    for part in payload:
        if part.dtype != torch.uint8 or part.ndim != 2 or part.shape[0] != rows or not part.shape[1]:
            got = f"{part.dtype} {tuple(part.shape)}"
            raise ValueError(f"payload: got {got}, wanted torch.uint8 ({rows}, bytes), at least one byte")
        _check_device("payload", part, workspace)
        width += part.shape[1]
    if width > (most := workspace.layout.row_bytes):
        raise ValueError(f"payload: got {width} bytes a row, wanted 1 to {most} as the workspace has")
    if tokens > workspace.max_tokens:
        why = batch_too_large(tokens, workspace.max_tokens)
        workspace.refuse(why, tokens=tokens)
        raise ValueError(why)
    expert_ids = _check_expert_ids(workspace, expert_ids, tokens)
    if weights is not None:
        _check("weights", weights, (tokens, workspace.top_k), _FP32, workspace)
        weights = (weights.detach() if weights.requires_grad else weights).contiguous()
    if expert_ids.is_cpu:
        try:
            check_ids(expert_ids, workspace.num_experts)
        except ValueError as error:
            workspace.refuse(str(error))
            raise
    return expert_ids, weights


def _check_expert_ids(workspace: Workspace, expert_ids: Tensor, tokens: int) -> Tensor:
    _check("expert_ids", expert_ids, (tokens, workspace.top_k), _INTS, workspace)
    if tokens > workspace.max_tokens:
        raise ValueError(f"expert_ids: got {tokens} tokens, wanted at most max_tokens = {workspace.max_tokens}")
    return expert_ids.contiguous()


def _check_rows(workspace: Workspace, rows: Tensor, plan: RoutingPlan, row_values: Tensor | None) -> None:
    _check("rows", rows, (plan.max_rows, workspace.dim), _ROWS, workspace)
    if (width := workspace.dim * rows.itemsize) > (most := workspace.layout.row_bytes):
        raise ValueError(f"rows: got {width} bytes a row, wanted at most {most} (row_bytes)")
    if plan.slot_rows.shape != (slots := (workspace.layout.num_slots, workspace.top_k)):
        raise ValueError(f"plan.slot_rows: got {tuple(plan.slot_rows.shape)}, wanted {slots} as the workspace has")
    if row_values is not None:
        _check("row_values", row_values, (plan.max_rows,), _FP32, workspace)


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], workspace: Workspace
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)}, wanted {wanted} {shape}")
    _check_device(name, tensor, workspace)


def _check_device(name: str, tensor: Tensor, workspace: Workspace) -> None:
    if tensor.device != workspace.device:
        raise ValueError(f"{name}: got device {tensor.device}, wanted {workspace.device} as the transport has")
