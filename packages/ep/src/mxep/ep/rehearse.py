"""Rehearsal: compile the kernels of a layer's first step in parallel, before the step needs them.

Forward and backward run on meta tensors (`mxep.runtime.launch.rehearsal`), through a dispatcher that sends nothing.
Other threads then compile the kernels that were called, while the step itself begins.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mxep.comms import Workspace, narrow_ids
from mxep.gemm.router_ops import dgrad_op, linear_op, top_k_backward_op, top_k_op, wgrad_op
from mxep.runtime.bundle import build, take_apart
from mxep.runtime.replay import is_recordable

from .dispatchers.all_to_all import split_columns, widths_of
from .dispatchers.base import Done, Handle, Payload, Routing, TokenDispatcher
from .dispatchers.local import LocalDispatcher
from .dispatchers.symmetric import OVERLAP_SMS, SymmetricDispatcher
from .formats import LayerConfig, Needs
from .layer import BackwardInput, ForwardInput, MainGrads, backward_pass, forward_pass

_rehearsed: set[Hashable] = set()


def rehearse_once(
    given: ForwardInput,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    needs: Needs | None,
    main_grads: MainGrads = (None, None),
    *,
    rows_again: bool,
    room: int | None = None,
) -> None:
    """Compile the kernels of this forward, and of its backward if `needs` is given, in other threads. Only on CUDA.

    It does so at a dispatcher's first call, and only once in a process for each layer signature.
    """
    if dispatcher.rehearsed:
        return
    dispatcher.rehearsed = True
    tensors, form = take_apart((given, main_grads))
    # Backends that are not ours may launch kernels in another way, and fail on meta tensors.
    if not is_recordable(type(config.backend)) or not _are_plain(*tensors):
        return
    stand_in = stand_in_for(dispatcher, given.expert_ids)  # even if not used: it makes the buffers
    weights, _ = take_apart((given.gate_up_proj, given.down_proj, given.lora))
    sizes = *(x.shape for x in weights), *(x.dtype for x in tensors)

    def passes() -> None:
        meta, grads = build(form, iter([_meta(x) for x in tensors]))
        _both_passes(meta, grads, stand_in, config, needs, rows_again, room)

    _rehearse((given.x.device, config, needs, dispatcher.borrows, form, sizes), passes)


def rehearse_router(x: Tensor, w: Tensor, k: int, score: str, *, has_choice: bool) -> None:
    """Compile the kernels of a router with logits x w^T in other threads, before its first forward."""
    needs = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    kind = x.device, x.dtype, w.dtype, w.shape, k, score, has_choice, needs
    if _are_plain(x, w):
        _rehearse(kind, lambda: _router_passes(_meta(x), _meta(w), k, score == "softmax", has_choice, needs))


def _are_plain(*tensors: Tensor) -> bool:
    """True if these tensors are on CUDA and no subclasses, and no graph is being captured."""
    is_cuda = tensors[0].is_cuda and not {*map(type, tensors)} - {Tensor, Parameter}
    return is_cuda and not torch.cuda.is_current_stream_capturing()


def _rehearse(kind: Hashable, passes: Callable[[], None]) -> None:
    """Rehearse `passes`, if no passes of this `kind` were rehearsed in this process."""
    # Dispatch modes, such as flop counters and checkpoints, must not see the passes.
    if kind in _rehearsed or torch._C._len_torch_dispatch_stack():
        return
    _rehearsed.add(kind)
    from mxep.runtime.launch import rehearsal  # imported only on CUDA, because it imports Triton

    try:
        with rehearsal(), torch.no_grad():
            passes()
    except Exception as error:  # if it is a real error, the step itself raises it again
        logging.getLogger("mxep.ep").debug("kernels are compiled one by one: %s: %s", type(error).__name__, error)


def _meta(x: Tensor) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return Parameter(made, requires_grad=False) if type(x) is Parameter else made  # launches distinguish these


def stand_in_for(dispatcher: TokenDispatcher, expert_ids: Tensor) -> TokenDispatcher:
    """Make a dispatcher for a rehearsal. Collective if `dispatcher`'s first dispatch of these ids is collective."""
    if isinstance(dispatcher, SymmetricDispatcher):
        workspace = dispatcher.workspace(expert_ids)
        if workspace.transport.access == "kernels":
            return Unsent(dispatcher, workspace)
    made = LocalDispatcher(dispatcher.num_local_experts)
    made.borrows = dispatcher.borrows
    return made


def _both_passes(
    given: ForwardInput,
    main_grads: MainGrads,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    needs: Needs | None,
    rows_again: bool,
    room: int | None,
) -> None:
    how: dict[str, Any] = {"dispatcher": dispatcher, "config": config, "rows_again": rows_again, "room": room}
    made = forward_pass(given, None, needs=needs, **how)
    if needs is None or made.saved is None:
        return
    x = given.x if rows_again else None
    weights = given.gate_up_proj, given.down_proj
    back = BackwardInput(torch.empty_like(given.x), x, made.routing, made.saved, *weights, *main_grads, given.lora)
    backward_pass(back, None, wanted=needs, **how)


def _router_passes(x: Tensor, w: Tensor, k: int, softmax: bool, has_choice: bool, needs: bool) -> None:
    """Run the router's ops without autograd. A checkpoint would expect tensors saved here in its recomputation, too."""
    logits = linear_op(x, w)
    ids, weights, chosen = top_k_op(logits, torch.empty_like(logits) if has_choice else None, k, softmax)
    if needs:
        d_logits = top_k_backward_op(weights, weights, ids, chosen, w.shape[0], softmax)
        dgrad_op(d_logits, w, x.dtype)
        wgrad_op(d_logits, x, w.dtype)


class Unsent(LocalDispatcher):
    """Replaces a symmetric dispatcher in a rehearsal. It launches the same kernels, but counts no exchange.

    All tensors are meta tensors, except those of the workspace.
    """

    def __init__(self, of: SymmetricDispatcher, workspace: Workspace) -> None:
        super().__init__(of.num_local_experts, capacity=of.capacity)
        self.num_experts, self.rank, self.world_size = of.num_experts, of.rank, of.world_size
        self.borrows = of.borrows
        self._buffer, self._layout = workspace.transport.buffers[0], workspace.layout
        self._exchange = copy.copy(workspace.exchange)
        self._exchange.transport = copy.copy(workspace.transport)  # a copy, because it counts exchanges

    def dispatch(
        self,
        payload: Payload,
        expert_ids: Tensor,
        weights: Tensor,
        *,
        alignment: int,
        overlap: bool = False,
        room: int | None = None,
    ) -> Handle[tuple[Payload, Routing]]:
        expert_ids = narrow_ids(expert_ids)
        number = expert_ids.new_empty(1)
        pairs = self.world_size, self._layout.max_tokens, self._layout.top_k
        self._exchange.dispatch(self._buffer, payload, expert_ids, OVERLAP_SMS if overlap else None, number)
        self._exchange.dispatch_tables(self._buffer, expert_ids, weights, number)
        tables = expert_ids.new_empty(pairs), weights.new_empty(pairs), expert_ids.new_empty(self.world_size)
        plan = self._plan(*tables, alignment=alignment, capacity=self.capacity)
        plan = dataclasses.replace(plan, dispatch=number)
        return Done((self._received(payload), Routing(plan, expert_ids, self.num_local_experts, room=room)))

    def redispatch(self, payload: Payload, routing: Routing, *, overlap: bool = False) -> Handle[Payload]:
        how = OVERLAP_SMS if overlap else None, routing.plan.dispatch
        self._exchange.dispatch(self._buffer, payload, routing.expert_ids, *how)
        return Done(self._received(payload))

    def combine(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None, *, overlap: bool = False
    ) -> Handle[tuple[Tensor, Tensor | None]]:
        plan, ids = routing.plan, routing.expert_ids
        out = rows.new_empty(routing.room or len(ids), rows.shape[1])
        values = None if row_values is None else row_values.new_empty(len(out), ids.shape[1])
        self._exchange.combine(self._buffer, rows, row_values, plan, ids, out, values)
        return Done((out, values))

    def _received(self, payload: Payload) -> Payload:
        """Meta tensors like the received parts of `payload`: columns of a buffer, with the buffer's strides."""
        slots = payload[0].new_empty(self._layout.num_slots, self._layout.row_bytes)
        return split_columns(slots, widths_of(payload))
