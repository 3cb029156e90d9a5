"""The layer for torch.compile(fullgraph=True): two ops that a graph calls and does not look into.

    mxep::layer_forward    x, weights, gate_up_proj, down_proj, ids -> out, and what backward needs, as plain tensors
    mxep::layer_backward   d_out and these -> dx, d_weights and, of those that need one, d_gate_up_proj, d_down_proj

Both run `layer.py`, on tensors as they are; for the compiler they run it on fake tensors, with a dispatcher that moves
nothing and a backend that multiplies nothing but give the shapes. A dispatcher must know its sizes beforehand: the
symmetric one with ``max_tokens``, the local one. Moves have to happen in one order on all ranks: as graphs chain layers
by their data, in forward and backward, they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxep.comms import RoutingPlan
from mxep.comms.plan import PlanTensors, plan_rows
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend, select
from mxep.gemm.weights import QuantizedWeight, weights_are_held
from mxep.quant import MXTensor

from .dispatchers.base import DISPATCHERS_BY_NUMBER, Parts, Routing, TokenDispatcher
from .functional import checked_tokens
from .layer import Setup, check_weights, layer_backward, layer_forward, start_send

SetupOf = Callable[[int, str, str, torch.device], Setup]
PLAN = tuple(field.name for field in dataclasses.fields(RoutingPlan) if field.name != "multiple")

_contexts: dict[tuple[Any, ...], list[Any]] = {}
"""How the tensors of a call are put together again: what `layer_forward` found, by what it depends on."""


def compiled_layer(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    dispatcher: TokenDispatcher,
    recipe: Recipe,
    backend: str,
) -> Tensor:
    """out (T, D), as of `route_through_experts`, with a dispatcher that has ``static_tokens``. backend: its name."""
    expert_ids = checked_tokens(x, expert_ids, weights, dispatcher)
    check_weights(x, gate_up_proj, down_proj, dispatcher, recipe)
    tensors = x, weights, gate_up_proj, down_proj
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    needs = [gate_up_proj.requires_grad, down_proj.requires_grad]
    out: Tensor = forward_op(*tensors, expert_ids, dispatcher.number, recipe.name, backend, needs, backward)[0]
    return out


@torch.library.custom_op("mxep::layer_forward", mutates_args=())
def forward_op(
    x: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    expert_ids: Tensor,
    dispatcher: int,
    recipe: str,
    backend: str,
    needs: list[bool],
    backward: bool,
) -> list[Tensor]:
    names = dispatcher, recipe, backend, needs
    return _forward(_real, x, weights, gate_up_proj, down_proj, expert_ids, *names, backward)


@torch.library.custom_op("mxep::layer_backward", mutates_args=())
def backward_op(
    d_out: Tensor,
    kept: list[Tensor],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    expert_ids: Tensor,
    dispatcher: int,
    recipe: str,
    backend: str,
    needs: list[bool],
) -> list[Tensor]:
    return _backward(_real, d_out, kept, gate_up_proj, down_proj, expert_ids, dispatcher, recipe, backend, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, gate_up_proj, down_proj, expert_ids, *ctx.names, _ = inputs
    _, *kept = output
    ctx.save_for_backward(gate_up_proj, down_proj, expert_ids, *kept)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    gate_up_proj, down_proj, expert_ids, *kept = ctx.saved_tensors
    d_out = grads[0]
    assert d_out is not None
    dx, d_weights, *rest = backward_op(d_out, kept, gate_up_proj, down_proj, expert_ids, *ctx.names)
    *_, needs = ctx.names
    return dx, d_weights, *(rest.pop(0) if need else None for need in needs), *[None] * 6


forward_op.register_autograd(_differentiate, setup_context=_setup_context)


def _forward(
    setup_of: SetupOf,
    x: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    expert_ids: Tensor,
    dispatcher: int,
    recipe: str,
    backend: str,
    needs: list[bool],
    backward: bool,
) -> list[Tensor]:
    setup = setup_of(dispatcher, recipe, backend, x.device)
    sending = start_send(x, weights, expert_ids, setup)
    out, routing, kept = layer_forward(sending, gate_up_proj, down_proj, setup, backward, (needs[0], needs[1]))
    if not backward:
        return [out]
    flat: list[Tensor] = []
    contexts: list[Any] = []
    for i, tensor in enumerate(kept):
        # An output is the graph's to write over, so what is held for others goes out as a copy (weights' come last).
        held = i >= 3 and weights_are_held()
        if tensor is None:
            contexts.append("nothing")
        elif isinstance(tensor, MXTensor):
            names, context = tensor.__tensor_flatten__()
            # The index of rows is the plan's.
            inner = [name for name in names if name != "row_index"]
            flat += [getattr(tensor, name).clone() if held else getattr(tensor, name) for name in inner]
            contexts.append((inner, context, inner != names))
        elif tensor is gate_up_proj or tensor is down_proj:
            contexts.append("gate_up_proj" if tensor is gate_up_proj else "down_proj")  # no output may be an input
        else:
            flat.append(tensor.clone() if held else tensor)
            contexts.append(None)
    _contexts[dispatcher, recipe, backend, *needs, x.dtype] = contexts
    return [out, *flat, *(getattr(routing.plan, name) for name in PLAN)]


def _backward(
    setup_of: SetupOf,
    d_out: Tensor,
    saved: list[Tensor],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    expert_ids: Tensor,
    dispatcher: int,
    recipe: str,
    backend: str,
    needs: list[bool],
) -> list[Tensor]:
    setup = setup_of(dispatcher, recipe, backend, d_out.device)
    flat = iter(saved[: -len(PLAN)])
    fields = dict(zip(PLAN, saved[-len(PLAN) :]))
    plan = RoutingPlan(**fields, multiple=setup.recipe.group_multiple)
    routing = Routing(plan, expert_ids, setup.dispatcher.num_local_experts)
    kept: list[Tensor | None] = []
    for context in _contexts[dispatcher, recipe, backend, *needs, d_out.dtype]:
        if context is None:
            kept.append(next(flat))
        elif isinstance(context, str):
            kept.append({"gate_up_proj": gate_up_proj, "down_proj": down_proj}.get(context))
        else:
            names, inner, indexed = context
            parts = {name: next(flat) for name in names}
            index = {"row_index": plan.row_slot} if indexed else {}
            kept.append(MXTensor.__tensor_unflatten__(parts | index, inner, None, None))
    dtypes = d_out.dtype, gate_up_proj.dtype, down_proj.dtype
    grads = layer_backward(d_out, kept, routing, setup, dtypes, (needs[0], needs[1]))
    return [grad for grad in grads if grad is not None]


def _real(dispatcher: int, recipe: str, backend: str, device: torch.device) -> Setup:
    return Setup(DISPATCHERS_BY_NUMBER[dispatcher], Recipe.named(recipe), select(backend, device))


# ── shapes instead of moves and products, for the compiler ───────────────────────────────────────────────────────────


def _shapes(dispatcher: int, recipe: str, backend: str, device: torch.device) -> Setup:
    real = _real(dispatcher, recipe, backend, device)
    return Setup(_NoMoves(real.dispatcher), real.recipe, _NoProducts(real.backend))  # type: ignore[arg-type]


forward_op.register_fake(lambda *args: _forward(_shapes, *args))
backward_op.register_fake(lambda *args: _backward(_shapes, *args))


class _NoMoves:
    def __init__(self, dispatcher: TokenDispatcher) -> None:
        self.dispatcher = dispatcher
        self.borrows = dispatcher.borrows
        self.num_local_experts = dispatcher.num_local_experts

    def send(self, parts: Parts, expert_ids: Tensor, weights: Tensor, *, multiple: int) -> tuple[Parts, Routing]:
        dispatcher, e = self.dispatcher, self.num_local_experts
        sizes = dispatcher.static_tokens(len(expert_ids))
        assert sizes is not None
        top_k = expert_ids.shape[1]
        max_rows = dispatcher.capacity.rows(*sizes, top_k, num_local_experts=e, multiple=multiple)
        ids, values = expert_ids.new_empty(*sizes, top_k), weights.new_empty(*sizes, top_k)
        num_tokens = expert_ids.new_empty(sizes[0])
        fields: PlanTensors = plan_rows(ids, values, num_tokens, 0, e, multiple, max_rows, dispatcher.num_experts)
        plan = RoutingPlan(*fields, num_tokens=num_tokens, multiple=multiple)
        slots = tuple(part.new_empty(sizes[0] * sizes[1], part.shape[1]) for part in parts)
        return slots, Routing(plan, expert_ids, e)

    def start_send(
        self, parts: Parts, expert_ids: Tensor, weights: Tensor, *, multiple: int
    ) -> Callable[[], tuple[Parts, Routing]]:
        return lambda: self.send(parts, expert_ids, weights, multiple=multiple)

    def start_resend(self, parts: Parts, routing: Routing) -> Callable[[], Parts]:
        slots = routing.plan.slot_rows.shape[0]
        return lambda: tuple(part.new_empty(slots, part.shape[1]) for part in parts)

    def give_back(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        ids = routing.expert_ids
        values = None if row_values is None else row_values.new_empty(ids.shape)
        return rows.new_empty(ids.shape[0], rows.shape[1]), values

    def start_give_back(
        self, rows: Tensor, routing: Routing, row_values: Tensor | None = None
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        return lambda: self.give_back(rows, routing, row_values)


class _NoProducts:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.folds = backend.folds

    def quantize_weight(self, w: Tensor, recipe: Recipe, *, cols: bool) -> QuantizedWeight:
        return self.backend.quantize_weight(w, recipe, cols=cols)

    def quantize_weight_rows(self, w: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
        return self.backend.quantize_weight_rows(w, recipe)

    def quantize_weight_cols(self, w: Tensor, recipe: Recipe, magnitudes: Tensor | None) -> Tensor:
        return self.backend.quantize_weight_cols(w, recipe, magnitudes)

    def forward(self, a: Tensor, w: Tensor, ends: Tensor, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return torch.empty(a.shape[0], w.shape[1], dtype=out_dtype, device=a.device)

    def dgrad(self, dy: Tensor, w: Tensor, ends: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        return torch.empty(dy.shape[0], w.shape[2], dtype=out_dtype, device=dy.device)

    def start_wgrad(
        self,
        dy: Tensor,
        a: Tensor,
        ends: Tensor,
        *,
        recipe: Recipe,
        out_dtype: torch.dtype,
        to: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        return lambda: torch.empty(ends.shape[0], dy.shape[1], a.shape[1], dtype=out_dtype, device=dy.device)
