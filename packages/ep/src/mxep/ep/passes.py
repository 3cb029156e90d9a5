"""The layer's two passes, over plain tensors: each is one record where the dispatcher can be in one.

    layer_forward    x, weights, expert_ids, experts -> out, the routing, what backward needs (`saved.py`)
    layer_backward   d_out and these                 -> dx, d_weights, and the gradients of the experts

A pass is replayed as a whole (`mxep.runtime.replay`) with a dispatcher that needs nothing of the host; with one that
does, its steps between exchanges are (`steps.py`). Weights that `quantize_weights_once` holds are arguments of a pass.

T tokens of this rank, K experts a token, D model dim, F hidden dim, R_max rows that fit, e local experts.
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxep.comms import RoutingPlan
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.quantize_once import SavedWeight, is_held, saved_weight
from mxep.gemm.several import Weight
from mxep.quant import SwiGLU
from mxep.runtime.replay import Replayed, Tensors

from .dispatchers.base import Routing, TokenDispatcher
from .saved import Needs, Saved
from .steps import bias_gradient, colwise_weights, mlp_backward, mlp_forward, pack_rows, rowwise_weights, wgrad, whole
from .wire_format import WireFormat


@dataclass(frozen=True)
class LayerConfig:
    """How a layer computes.

    Attributes:
        backend: one that can run where its tensors are. activation: of gate and up.
        main_grads: (e, 2F, D) and (e, D, F) fp32, or None each: weight gradients are added there and not returned.
        wgrad_scale: factor of weight gradients.
    """

    dispatcher: TokenDispatcher
    recipe: Recipe
    backend: Backend
    activation: SwiGLU
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None)
    wgrad_scale: float = 1.0

    @property
    def of_passes(self) -> tuple[TokenDispatcher, Recipe, Backend, SwiGLU]:
        """Of both."""
        return self.dispatcher, self.recipe, self.backend, self.activation


PLAN = tuple(field.name for field in dataclasses.fields(RoutingPlan) if field.name != "alignment")
"""The plan's tensors."""
AFTER_PLAN = 7 + len(PLAN)
"""What `layer_backward` gets before `saved`."""
Pending = dict[int, tuple[Any, Any]]
"""Of gate_up_proj (0) and down_proj (1): the gradient of their rows and the rows, for a weight gradient to come."""


def layer_forward(
    tensors: Tensors,
    dispatcher: TokenDispatcher,
    recipe: Recipe,
    backend: Backend,
    activation: SwiGLU,
    backward: bool,
    needs: Needs,
    drops: bool = False,
    room: int | None = None,
    *,
    replays: bool = True,
) -> tuple[Routing, Tensors]:
    """[x, weights, expert_ids, gate_up's bias or None, gate_up_proj, its other half or None, down_proj] -> the routing,
    [out, *plan, and if backward will be what it needs, as `Saved` lists it]. The list is emptied.

    drops: which pairs have a row is the last result, too: (T, K) fp32, 1 or 0. room: of the dispatcher's `room_for`.
    Then results of T rows have so many, of which the first T count, and x, weights and ids are dense.

    needs: whether the parameters have gradients, if backward will be. The exchanges and dx are made in any case, as
    ranks do not know what the others need. replays: as a graph, if the dispatcher can be in one; such a graph is of
    this function without, to which come [both weights rowwise and their amax], or None, too.

    No autograd, no checks but of products.
    """
    x, weights, expert_ids, bias, *experts = tensors[:7]
    if replays:
        held = is_held(whole(*experts[:2]), recipe)
        tensors += rowwise_weights.direct(list(experts), recipe, backend, backward) if held else [None] * 4
        if dispatcher.in_graphs:
            how = recipe, backend, activation, backward, needs, drops, room
            results = _Pass.of(dispatcher, layer_forward).replay(tensors, *how)
            if results is not None:
                return routing_of(results[1 : 1 + len(PLAN)], expert_ids, dispatcher, recipe, room), results
    w13, amax13, w2, amax2 = tensors[7:]
    tensors.clear()
    wire, payload = WireFormat.of(x, recipe, recipe.fmt), tuple(pack_rows([x], recipe, recipe.fmt, room))
    options: dict[str, Any] = {} if room is None else {"room": room}
    options |= {"alignment": recipe.group_alignment, "overlap": True}
    handle = dispatcher.dispatch(payload, expert_ids, weights, **options)
    try:
        if w13 is None:  # while rows are in flight
            w13, amax13, w2, amax2 = rowwise_weights(list(experts), recipe, backend, backward)
    finally:
        slots, routing = handle.wait()  # nothing stays in flight
    plan = routing.plan
    # The next exchange writes to the slots again, which the gradient of gate_up_proj needs.
    copy, keep = backward and needs[0] and dispatcher.borrows, (backward and needs[0], backward)
    of_mlp = [plan.row_slot, plan.row_weight, plan.offs, w13, bias, w2, *slots]
    y, rows, gate_up = mlp_forward(of_mlp, wire, recipe, backend, copy, keep, activation)
    out, kept = dispatcher.combine(y, routing, torch.ones_like(plan.row_weight) if drops else None).wait()
    made = [out, *tensors_of_plan(plan)]
    if backward:
        gate, up, down_proj = experts
        later = saved_weight(w13, whole(gate, up), amax13), saved_weight(w2, down_proj, amax2)
        made += Saved(rows, gate_up, later).flat()
    if drops:
        assert kept is not None
        made.append(kept)
    return routing, made


def layer_backward(
    tensors: Tensors,
    dispatcher: TokenDispatcher,
    recipe: Recipe,
    backend: Backend,
    activation: SwiGLU,
    scale: float,
    needs: Needs,
    room: int | None = None,
    routing: Routing | None = None,
    *,
    wanted: Needs = (True, True, True),
    left: Pending | None = None,
    replays: bool = True,
) -> tuple[Routing, Tensors]:
    """[d_out, expert_ids, gate_up_proj, its other half or None, down_proj, main_grads of both, *plan, *saved] -> the
    routing, gradients of [x, weights, gate_up_proj (of its halves: (2, e, F, D)), down_proj and, fp32, gate_up's bias]:
    the last three None where they are not wanted or are in main_grads. The list is emptied, so that its memory serves
    the gradients of weights.

    scale: factor of weight gradients. needs: whether these parameters have any. room: forward's; then d_out is dense.
    wanted: whether those are computed now. left: receives the operands of weight gradients that are computed later.
    routing: the dispatcher's own, if it is more than the plan. replays: as for `layer_forward`; without, [down_proj and
    gate_up_proj colwise], or None, follow.
    """
    gate, up, down_proj = tensors[2:5]
    experts: tuple[Weight, Tensor] = whole(gate, up), down_proj
    routing = routing or routing_of(tensors[7:AFTER_PLAN], tensors[1], dispatcher, recipe, room)
    plan, borrows = routing.plan, dispatcher.borrows
    of_saved = tensors[0].dtype, recipe, needs
    if replays:
        held: Tensors = [None] * 2
        if is_held(experts[0], recipe):
            later = Saved.of(tensors[AFTER_PLAN:], plan, experts, *of_saved, copied=borrows).later
            held = colwise_weights.direct(_of_both(*later), recipe, backend)
        tensors += held
        if dispatcher.in_graphs and left is None and all(want or not need for want, need in zip(wanted, needs)):
            how = recipe, backend, activation, scale, needs, room
            results = _Pass.of(dispatcher, layer_backward).replay(tensors, *how)
            if results is not None:
                return routing, results
    d_out, *_, main_grad13, main_grad2 = tensors[:7]
    *saved, w2, w13 = tensors[AFTER_PLAN:]
    tensors.clear()
    rows, gate_up, (later13, later2) = Saved.of(saved, plan, experts, *of_saved, copied=borrows)
    saved.clear()

    wire = WireFormat.of(d_out, recipe, recipe.grad_fmt)
    handle = dispatcher.redispatch(tuple(pack_rows([d_out], recipe, recipe.grad_fmt, room)), routing, overlap=True)
    if w2 is None:  # while rows are in flight
        w2, w13 = colwise_weights(_of_both(later13, later2), recipe, backend)
    del later2, later13
    waits = left is not None and needs[1] and not wanted[1]
    copy, with_h = waits and borrows, needs[1] and (wanted[1] or waits)
    of_mlp = [plan.row_slot, plan.row_weight, plan.offs, gate_up, w2, w13, main_grad2, *handle.wait()]
    del gate_up, w2, w13, handle
    of_step = wire, recipe, backend, with_h, waits, scale, down_proj.dtype, copy, activation
    d_rows, d_row_weight, d_gate_up, d_down_proj, *pending = mlp_backward(of_mlp, *of_step)
    if waits and left is not None:
        left[1] = pending[0], pending[1]
    combined = dispatcher.combine(d_rows, routing, d_row_weight, overlap=True)
    del d_rows, pending
    d_bias = bias_gradient([d_gate_up, plan.offs], scale)[0] if needs[2] and wanted[2] else None
    d_gate_up_proj = None
    if rows is not None and wanted[0]:
        operands = [d_gate_up, rows, plan.offs, main_grad13]
        del d_gate_up, rows
        (d_gate_up_proj,) = wgrad(operands, recipe, backend, scale, gate.dtype, up is not None)
    elif rows is not None and left is not None:
        left[0] = d_gate_up, rows
    dx, d_weights = combined.wait()
    return routing, [dx, d_weights, d_gate_up_proj, d_down_proj, d_bias]


def _of_both(later13: SavedWeight, later2: SavedWeight) -> Tensors:
    """For `colwise_weights`."""
    halves = later13.weight if type(later13.weight) is tuple else (later13.weight, None)
    return [*later2, *halves, later13.amax]


def tensors_of_plan(plan: RoutingPlan) -> list[Tensor]:
    return [getattr(plan, name) for name in PLAN]


def routing_of(
    plan: list[Tensor], expert_ids: Tensor, dispatcher: TokenDispatcher, recipe: Recipe, room: int | None
) -> Routing:
    """Of a plan's tensors."""
    fields: Any = dict(zip(PLAN, plan))
    made = RoutingPlan(**fields, alignment=recipe.group_alignment)
    return Routing(made, expert_ids, dispatcher.num_local_experts, room=room)


class _Pass(Replayed):
    """Of two exchanges. The dispatcher has the pass's graphs, and a pass knows it by a weak reference: it goes with its
    users, not when garbage is collected."""

    def __init__(self, function: Callable[..., tuple[Routing, Tensors]], dispatcher: TokenDispatcher) -> None:
        donated = range(7, 64) if function is layer_backward else ()  # what forward saved
        super().__init__(function, donated=donated)  # type: ignore[arg-type]  # which `direct` calls
        self._of_tokens = (0, 1) if function is layer_backward else (0, 1, 2)
        self.dispatcher: TokenDispatcher = weakref.proxy(dispatcher)

    @staticmethod
    def of(dispatcher: TokenDispatcher, function: Callable[..., tuple[Routing, Tensors]]) -> Replayed:
        if function not in dispatcher.passes:
            dispatcher.passes[function] = _Pass(function, dispatcher)
        return dispatcher.passes[function]

    def state(self, *_: Any) -> Hashable | None:
        return self.dispatcher.graph_state()

    def moving(self, *how: Any) -> tuple[int, ...]:
        """x, weights and ids, or d_out and ids, if there is room for more tokens."""
        return () if how[-1] is None else self._of_tokens

    def launched(self, *_: Any) -> None:
        self.dispatcher.launched(2)

    def direct(self, tensors: Tensors, *how: Any) -> Tensors:
        results: Tensors = self.function(tensors, self.dispatcher, *how, replays=False)[1]
        return results
