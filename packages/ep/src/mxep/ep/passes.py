"""The layer's two passes, over plain tensors: each is a CUDA graph where the dispatcher can be in one.

    layer_forward    x, weights, expert_ids, experts -> out, the routing, what backward needs (`saved.py`)
    layer_backward   d_out and these                 -> dx, d_weights, and the gradients of the experts

A pass is replayed as a whole (`mxep.quant.replay`) with a dispatcher that needs nothing of the host; with one that
does, its steps between exchanges are (`steps.py`). Weights that `quantize_weights_once` holds are arguments of a pass.

T tokens of this rank, K experts a token, D model dim, F hidden dim, R_max rows that fit, e local experts.
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
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
from mxep.quant.replay import Replayed, Tensors

from .dispatchers.base import Routing, TokenDispatcher
from .functional import PLAIN
from .saved import Needs, Saved
from .steps import bias_gradient, colwise_weights, mlp_backward, mlp_forward, pack_rows, rowwise_weights, wgrad
from .wire_format import WireFormat


@dataclass(frozen=True)
class LayerConfig:
    """How a layer computes.

    Attributes:
        backend: one that can run where its tensors are.
        main_grads: (e, 2F, D) and (e, D, F) fp32, or None each: weight gradients are added there and not returned.
        wgrad_scale: factor of weight gradients.
        activation: of gate and up; None: plain SwiGLU, as torch 2.11 compiles no default that is an object.
    """

    dispatcher: TokenDispatcher
    recipe: Recipe
    backend: Backend
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None)
    wgrad_scale: float = 1.0
    activation: SwiGLU | None = None

    @property
    def swiglu(self) -> SwiGLU:
        """The activation."""
        return self.activation or PLAIN


PLAN = tuple(field.name for field in dataclasses.fields(RoutingPlan) if field.name != "alignment")
"""The plan's tensors."""
Pending = dict[int, tuple[Any, Any]]
"""Of gate_up_proj (0) and down_proj (1): the gradient of their rows and the rows, for a weight gradient to come."""


def layer_forward(
    x: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    gate_up_proj: Weight,
    down_proj: Tensor,
    config: LayerConfig,
    backward: bool,
    needs: Needs,
    bias: Tensor | None = None,
) -> tuple[Tensor, Routing, list[Tensor]]:
    """(out, routing, what backward needs, if it will be, as `Saved` lists it): no autograd, no checks but of products.

    bias: of gate_up, (e, 2F). needs: whether these parameters have gradients, if backward will be. The exchanges and dx
    are made in any case, as ranks do not know what the others need.
    """
    experts = [*_two(gate_up_proj), down_proj]
    held: Tensors = [None] * 4
    if is_held(gate_up_proj, config.recipe):
        held = rowwise_weights.direct(list(experts), config.recipe, config.backend, backward)
    tensors = [x, weights, expert_ids, bias, *experts, *held]
    how = config.recipe, config.backend, config.swiglu, backward, needs
    results = _Pass.of(config.dispatcher, _forward).replay(tensors, *how) if config.dispatcher.in_graphs else None
    if results is None:
        routing, results = _forward(tensors, config.dispatcher, *how)
    else:
        routing = _routing(results[1 : 1 + len(PLAN)], expert_ids, config)
    return results[0], routing, results[1 + len(PLAN) :]


def layer_backward(
    d_out: Tensor,
    saved: list[Tensor],
    gate_up_proj: Weight,
    down_proj: Tensor,
    routing: Routing,
    config: LayerConfig,
    needs: Needs,
    *,
    wanted: Needs = (True, True, True),
    left: Pending | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weights, gate_up_proj (of its halves: (2, e, F, D)), down_proj and, fp32, gate_up's bias.

    saved: emptied, so that its memory serves the gradients of weights. needs: whether these parameters have any.
    wanted: whether those are computed now. left: receives the operands of weight gradients that are computed later.
    """
    how = config.recipe, config.backend, config.swiglu, config.wgrad_scale, needs
    plan, experts = [getattr(routing.plan, name) for name in PLAN], (gate_up_proj, down_proj)
    held: Tensors = [None] * 2
    if is_held(gate_up_proj, config.recipe):
        copied = config.dispatcher.borrows
        later13, later2 = Saved.of(saved, routing.plan, experts, config.recipe, needs, copied=copied).later
        held = colwise_weights.direct(_of_both(later13, later2), config.recipe, config.backend)
    tensors = [d_out, routing.expert_ids, *_two(gate_up_proj), down_proj, *config.main_grads, *held, *plan, *saved]
    saved.clear()
    whole = left is None and all(want or not need for want, need in zip(wanted, needs))
    in_graph = whole and config.dispatcher.in_graphs
    results = _Pass.of(config.dispatcher, _backward).replay(tensors, *how) if in_graph else None
    if results is None:
        _, results = _backward(tensors, config.dispatcher, *how, routing, wanted, left)
    dx, d_weights, d_gate_up_proj, d_down_proj, d_bias = results
    return dx, d_weights, d_gate_up_proj, d_down_proj, d_bias


# ── the two passes, which are graphs where the dispatcher can be in one ──────────────────────────────────────────────


class _Pass(Replayed):
    """Of two exchanges. The dispatcher has the pass's graphs, and a pass knows it by a weak reference: it goes with its
    users, not when garbage is collected."""

    def __init__(self, function: Callable[..., tuple[Routing, Tensors]], dispatcher: TokenDispatcher) -> None:
        super().__init__(function)  # type: ignore[arg-type]  # which `direct` calls
        self.dispatcher: TokenDispatcher = weakref.proxy(dispatcher)

    @staticmethod
    def of(dispatcher: TokenDispatcher, function: Callable[..., tuple[Routing, Tensors]]) -> Replayed:
        if function not in dispatcher.passes:
            dispatcher.passes[function] = _Pass(function, dispatcher)
        return dispatcher.passes[function]

    def state(self, *_: Any) -> Hashable | None:
        return self.dispatcher.graph_state()

    def capturing(self, *_: Any) -> AbstractContextManager[object]:
        return self.dispatcher.capturing()

    def launched(self, *_: Any) -> None:
        self.dispatcher.launched(2)

    def direct(self, tensors: Tensors, *how: Any) -> Tensors:
        results: Tensors = self.function(tensors, self.dispatcher, *how)[1]
        return results


def _forward(
    tensors: Tensors,
    dispatcher: TokenDispatcher,
    recipe: Recipe,
    backend: Backend,
    activation: SwiGLU,
    backward: bool,
    needs: Needs,
) -> tuple[Routing, Tensors]:
    """[x, weights, expert_ids, gate_up's bias or None, gate_up_proj, its other half or None, down_proj, both rowwise
    and their amax, or None] -> routing, [out, *plan, *saved]."""
    x, weights, expert_ids, bias, *experts, w13, amax13, w2, amax2 = tensors
    tensors.clear()
    wire, payload = WireFormat.of(x, recipe, recipe.fmt), tuple(pack_rows([x], recipe, recipe.fmt))
    handle = dispatcher.dispatch(payload, expert_ids, weights, alignment=recipe.group_alignment, overlap=True)
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
    out, _ = dispatcher.combine(y, routing).wait()
    made = [out, *(getattr(plan, name) for name in PLAN)]
    if not backward:
        return routing, made
    gate, up, down_proj = experts
    later = saved_weight(w13, gate if up is None else (gate, up), amax13), saved_weight(w2, down_proj, amax2)
    return routing, [*made, *Saved(rows, gate_up, later).flat()]


def _backward(
    tensors: Tensors,
    dispatcher: TokenDispatcher,
    recipe: Recipe,
    backend: Backend,
    activation: SwiGLU,
    scale: float,
    needs: Needs,
    routing: Routing | None = None,
    wanted: Needs = (True, True, True),
    left: Pending | None = None,
) -> tuple[Routing, Tensors]:
    """[d_out, expert_ids, gate_up_proj, its other half or None, down_proj, main_grads of both, both colwise or None,
    *plan, *saved] -> the routing, [dx, d_weights, d_gate_up_proj, d_down_proj, d_bias]: the last three None where they
    are not wanted or are in main_grads.

    routing: the dispatcher's own, if it is more than the plan.
    """
    (d_out, expert_ids, gate, up, down_proj, *main_grads, w2, w13), rest = tensors[:9], tensors[9:]
    proj: Weight = gate if up is None else (gate, up)
    config = LayerConfig(dispatcher, recipe, backend, (main_grads[0], main_grads[1]), scale)
    saved = rest[len(PLAN) :]
    routing = routing or _routing(rest[: len(PLAN)], expert_ids, config)
    tensors.clear()
    rest.clear()
    plan = routing.plan
    rows, gate_up, (later13, later2) = Saved.of(
        saved, plan, (proj, down_proj), recipe, needs, copied=dispatcher.borrows
    )
    saved.clear()

    wire = WireFormat.of(d_out, recipe, recipe.grad_fmt)
    handle = dispatcher.redispatch(tuple(pack_rows([d_out], recipe, recipe.grad_fmt)), routing, overlap=True)
    if w2 is None:  # while rows are in flight
        w2, w13 = colwise_weights(_of_both(later13, later2), recipe, backend)
    del later2, later13
    waits = left is not None and needs[1] and not wanted[1]
    copy, with_h = waits and dispatcher.borrows, needs[1] and (wanted[1] or waits)
    of_mlp = [plan.row_slot, plan.row_weight, plan.offs, gate_up, w2, w13, main_grads[1], *handle.wait()]
    del gate_up, w2, w13, handle
    how = wire, recipe, backend, with_h, waits, scale, down_proj.dtype, copy, activation
    d_rows, d_row_weight, d_gate_up, d_down_proj, *pending = mlp_backward(of_mlp, *how)
    if waits and left is not None:
        left[1] = pending[0], pending[1]
    combined = dispatcher.combine(d_rows, routing, d_row_weight, overlap=True)
    del d_rows, pending
    d_bias = bias_gradient([d_gate_up, plan.offs], scale)[0] if needs[2] and wanted[2] else None
    d_gate_up_proj = None
    if rows is not None and wanted[0]:
        operands = [d_gate_up, rows]
        del d_gate_up, rows
        d_gate_up_proj = weight_gradient(0, gate.dtype, operands, plan.offs, config, halves=up is not None)
    elif rows is not None and left is not None:
        left[0] = d_gate_up, rows
    dx, d_weights = combined.wait()
    return routing, [dx, d_weights, d_gate_up_proj, d_down_proj, d_bias]


def _of_both(later13: SavedWeight, later2: SavedWeight) -> Tensors:
    """For `colwise_weights`."""
    return [*later2, *_two(later13.weight), later13.amax]


def _two(w: Any) -> tuple[Any, Any]:
    """The halves of a weight; itself and None if it is whole."""
    return w if type(w) is tuple else (w, None)


def _routing(plan: list[Tensor], expert_ids: Tensor, config: LayerConfig) -> Routing:
    fields: Any = dict(zip(PLAN, plan))
    alignment = config.recipe.group_alignment
    return Routing(RoutingPlan(**fields, alignment=alignment), expert_ids, config.dispatcher.num_local_experts)


def weight_gradient(
    i: int, dtype: torch.dtype, operands: list[Any], offs: Tensor, config: LayerConfig, *, halves: bool
) -> Tensor | None:
    """Of gate_up_proj (0) or down_proj (1): the gradient, or None where it was added to main_grad.

    operands: the gradient of the product's rows, and its rows; the list is emptied. halves: as for `wgrad`.
    """
    tensors = [*operands, offs, config.main_grads[i]]
    operands.clear()
    gradient: Tensor | None = wgrad(tensors, config.recipe, config.backend, config.wgrad_scale, dtype, halves)[0]
    return gradient
