"""Workspaces, the exchanges `dispatch` and `combine` between ranks, and the proof that one barrier each is enough.

    dispatch   stores token t into slot (this rank, t) of every rank that owns one of its experts, once per rank; also
               stores this rank's routing tables on all ranks
    combine    sums the rows of slot (r, t), the token t of rank r, and stores the sum into slot (this rank, t) of rank
               r; rank r then adds up the sums of all ranks, in rank order

The backward of `combine` is a `dispatch`, and the backward of `dispatch` is a `combine`. A CUDA exchange runs on the
transport's own stream if ``async_op=True``, or if it is a dispatch with tables. Others run on the current stream.
Letters: T tokens on this rank, T_max the largest T of a rank, K experts per token, W ranks, S = W * T_max slots,
E experts, D elements per row.

Two symmetric buffers, used in turn, belong to the transport. Its workspaces share them, each with its own layout. If a
workspace needs larger buffers, it allocates two new ones for all. Exchanges are counted over all workspaces of a
transport: exchange i is the i-th of them.

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
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mxep.runtime.record import record_event, set_up, wait_event

from .layout import ALIGNMENT, Layout, round_up
from .plan import RoutingPlan, check_ids
from .transport import SymmetricBuffer, Transport, batch_too_large, check_agreement, current_stream

Tables = tuple[Tensor, Tensor, Tensor]
T = TypeVar("T")
_INTS, _ROWS, _FP32 = (torch.int32, torch.int64), (torch.bfloat16, torch.float32), (torch.float32,)


class Workspace:
    """Exchanges with one layout, over the transport's buffers. Several layers may share a workspace.

    Every rank must make the same exchanges in the same order, over all workspaces of a transport. So they must come
    from one thread at a time, which is not checked.

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

        Raises PeerTimeout or PeersDisagree if an earlier exchange is known to have failed. Raises RuntimeError
        after this rank refused an exchange, and if an exchange is in flight when a capture starts or ends.
        """
        transport = self.transport
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
    _check_rows(workspace, rows, plan, expert_ids, row_values)
    expert_ids, room = expert_ids.contiguous(), max(expert_ids.shape[0], room or 0)
    out = rows.new_empty(room, workspace.dim)  # allocated on the current stream, which uses it after the exchange
    values = None if row_values is None else row_values.new_empty(room, workspace.top_k)
    buffer = workspace.begin("combine")
    in_flight = (rows, plan, expert_ids, row_values, out, values)
    with workspace.stream(in_flight) if async_op else contextlib.nullcontext():
        workspace.exchange.combine(buffer, rows, row_values, plan, expert_ids, out, values)
    return Handle(workspace if async_op else None, (out, values))


def _check_tokens(
    workspace: Workspace, payload: Sequence[Tensor], expert_ids: Tensor, weights: Tensor | None, room: int | None
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments of a dispatch. Returns contiguous ids (T, K) and weights.

    If the batch is too large or has invalid ids, peers are told to raise, too. They cannot see these errors themselves.
    """
    if not payload:
        raise ValueError("payload: got no tensor, wanted at least one")
    rows = payload[0].shape[0]
    for part in payload:
        _check("payload", part, (rows, part.shape[-1]), (torch.uint8,), workspace)
    widths, most = [part.shape[1] for part in payload], workspace.layout.row_bytes
    if min(widths) < 1 or sum(widths) > most:
        raise ValueError(f"payload: got {widths} bytes a row, wanted at least 1 of each part, at most {most} of all")
    tokens = expert_ids.shape[0] if rows == room else rows
    if tokens > workspace.max_tokens:
        why = batch_too_large(tokens, workspace.max_tokens)
        workspace.refuse(why, tokens=tokens)
        raise ValueError(why)
    _check("expert_ids", expert_ids, (tokens, workspace.top_k), _INTS, workspace)
    if weights is not None:
        _check("weights", weights, (tokens, workspace.top_k), _FP32, workspace)
        weights = (weights.detach() if weights.requires_grad else weights).contiguous()
    if expert_ids.is_cpu:
        try:
            check_ids(expert_ids, workspace.num_experts)
        except ValueError as error:
            workspace.refuse(str(error))
            raise
    return expert_ids.contiguous(), weights


def _check_rows(
    workspace: Workspace, rows: Tensor, plan: RoutingPlan, expert_ids: Tensor, row_values: Tensor | None
) -> None:
    """Check the arguments of a combine."""
    tokens = expert_ids.shape[0]
    _check("expert_ids", expert_ids, (tokens, workspace.top_k), _INTS, workspace)
    if tokens > workspace.max_tokens:
        raise ValueError(f"expert_ids: got {tokens} tokens, wanted at most max_tokens = {workspace.max_tokens}")
    if expert_ids.is_cpu:
        check_ids(expert_ids, workspace.num_experts)
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
    if tensor.device != workspace.device:
        raise ValueError(f"{name}: got device {tensor.device}, wanted {workspace.device} as the transport has")
