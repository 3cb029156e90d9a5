"""The experts' part of a layer as one autograd function: dispatch, expert MLP and combine, forward and backward.

What that buys over the composed functions of `functional.py`, which it equals bit for bit:

    SwiGLU and its backward fold what they quantize, for a backend that folds: one pass less over h and d_gate_up
    d_out's slots are used where they lie, before the next move
    weights are quantized while rows are under way, each way as it is needed: nothing of them is kept for backward
    dx goes home while the gradient of gate_up_proj computes

T tokens of this rank, K experts a token, D model dim, F hidden dim, R_max rows that fit, e local experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.checks import check_weight
from mxep.gemm.weights import Later, rows_and_later

from .dispatchers.base import Parts, Routing, TokenDispatcher
from .functional import checked_tokens, hidden, hidden_backward
from .wire import Wire


@dataclass(frozen=True)
class Setup:
    """How a layer computes.

    Attributes:
        backend: one that can run where its tensors are.
        main_grads: (e, 2F, D) and (e, D, F) fp32, or None each: weight gradients are added there and not returned.
    """

    dispatcher: TokenDispatcher
    recipe: Recipe
    backend: Backend
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None)


def route_through_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    setup: Setup,
) -> tuple[Tensor, Routing]:
    """out (T, D), the weighted sum over each token's experts of their MLPs, and where the rows went.

    Args:
        x: (T, D) bf16 or fp32. expert_ids: (T, K) int32 or int64, -1 for "not routed". weights: (T, K) fp32.
        gate_up_proj: (e, 2F, D), gate rows first. down_proj: (e, D, F).

    Raises ValueError as `dispatch` and `grouped_mm` do, and for a recipe with wgrad "bf16", which keeps unquantized
    operands: compose it from `functional.py`.
    """
    if setup.recipe.wgrad != "mx":
        raise ValueError(f"recipe {setup.recipe.name}: got wgrad {setup.recipe.wgrad!r}, wanted 'mx'")
    expert_ids = checked_tokens(x, expert_ids, weights, setup.dispatcher)
    check_weights(x, gate_up_proj, down_proj, setup.dispatcher, setup.recipe, setup.main_grads)
    tensors = x, weights, gate_up_proj, down_proj
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    sending = start_send(x, weights, expert_ids, setup)
    try:
        out, routing = _Layer.apply(*tensors, expert_ids, setup, backward, sending)  # type: ignore[no-untyped-call]
    except BaseException:
        sending[0]()  # no move stays under way
        raise
    return out, routing


def check_weights(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    dispatcher: TokenDispatcher,
    recipe: Recipe,
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """ValueError for weights that do not fit x, each other, the dispatcher or the recipe: before anything moves."""
    e, dim, hidden_dim = dispatcher.num_local_experts, x.shape[1], down_proj.shape[-1] if down_proj.dim() else 0
    for name, w, main_grad, meant, shape in (
        ("gate_up_proj", gate_up_proj, main_grads[0], "(experts here, 2 F, D)", (e, 2 * hidden_dim, dim)),
        ("down_proj", down_proj, main_grads[1], "(experts here, D, F)", (e, dim, hidden_dim)),
    ):
        if w.shape != shape:
            raise ValueError(f"{name}: got shape {tuple(w.shape)}, want {meant} = {shape}")
        check_weight(w, recipe=recipe, device=x.device, main_grad=main_grad, name=name)


Sending = tuple[Callable[[], tuple[Parts, Routing]], Wire]
"""A send that has begun, and how to read what comes."""
Kept = tuple[Tensor | None, ...]
"""What backward needs: rows (for the gradient of gate_up_proj), gate_up, h (for that of down_proj), and of both weights
what is there of a `Later`."""


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        expert_ids: Tensor,
        setup: Setup,
        backward: bool,
        sending: Sending,
    ) -> tuple[Tensor, Routing]:
        needs = ctx.needs_input_grad[2:4]
        out, routing, kept = layer_forward(sending, gate_up_proj, down_proj, setup, backward, needs)
        ctx.save_for_backward(*kept)
        ctx.setup, ctx.routing = setup, routing
        ctx.dtypes = x.dtype, gate_up_proj.dtype, down_proj.dtype
        return out, routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
        needs, kept = ctx.needs_input_grad[2:4], list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained, they go as they have been used
        grads = layer_backward(d_out, kept, ctx.routing, ctx.setup, ctx.dtypes, needs)
        return *grads, None, None, None, None


@torch.no_grad()
def start_send(x: Tensor, weights: Tensor, expert_ids: Tensor, setup: Setup) -> Sending:
    """Begin to send x (T, D), quantized if the recipe says so, to the experts."""
    parts, wire = Wire.pack(setup.recipe.quantize_activation(x))
    return setup.dispatcher.start_send(parts, expert_ids, weights, multiple=setup.recipe.group_multiple), wire


def layer_forward(
    sending: Sending, gate_up_proj: Tensor, down_proj: Tensor, setup: Setup, backward: bool, needs: tuple[bool, bool]
) -> tuple[Tensor, Routing, Kept]:
    """(out, routing, what backward needs, if it will be): no autograd, no checks but those of products.

    needs: whether the two weights have gradients, if backward will be. The moves and dx are made in any case, as ranks
    do not know what the others need.
    """
    dispatcher, recipe, backend = setup.dispatcher, setup.recipe, setup.backend
    coming, wire = sending
    dtype = wire.dtype
    (w13, w13_later), (w2, w2_later) = (
        rows_and_later(weight, recipe, backend, later=backward) for weight in (gate_up_proj, down_proj)
    )
    slots, routing = coming()
    plan = routing.plan
    # The next move takes the slots back, which the gradient of gate_up_proj needs.
    rows = wire.rows(slots, plan, copy=backward and needs[0] and dispatcher.borrows)
    gate_up = backend.forward(rows, w13, plan.group_ends, bias=None, out_dtype=dtype)
    h = hidden(gate_up, plan.row_weight, plan.group_ends, recipe, folded=backend.folds)
    y = backend.forward(h, w2, plan.group_ends, bias=None, out_dtype=dtype)
    out, _ = dispatcher.give_back(y, routing)
    if not backward:
        return out, routing, ()
    return out, routing, (rows if needs[0] else None, gate_up, h if needs[1] else None, *w13_later, *w2_later)


def layer_backward(
    d_out: Tensor,
    kept: list[Tensor | None],
    routing: Routing,
    setup: Setup,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weights, gate_up_proj, down_proj.

    kept: emptied, so that its memory serves the gradients of weights. dtypes: of x and the two. needs: whether the two
    have any.
    """
    rows, gate_up, h = cast(list[Tensor], kept[:3])  # or None, if not needed
    w13_later, w2_later = Later(*cast(Any, kept[3:5])), Later(*cast(Any, kept[5:]))
    kept.clear()
    dispatcher, recipe, backend = setup.dispatcher, setup.recipe, setup.backend
    plan, ends = routing.plan, routing.plan.group_ends

    def start_weight_gradient(i: int, dy: Tensor, a: Tensor) -> Callable[[], Tensor | None]:
        if not needs[i]:
            return lambda: None
        return backend.start_wgrad(dy, a, ends, recipe=recipe, out_dtype=dtypes[1 + i], to=setup.main_grads[i])

    parts, wire = Wire.pack(recipe.quantize_gradient(d_out))
    coming = dispatcher.start_resend(parts, routing)
    w2, w13 = w2_later.cols(recipe, backend), w13_later.cols(recipe, backend)
    # Borrowed until dx goes home: the gradient of down_proj comes before that, and before d_h, which takes memory.
    d_y = wire.rows(coming(), plan, copy=False)
    multiply = start_weight_gradient(1, d_y, h)
    del h, parts, coming
    d_down_proj = multiply()
    del multiply
    d_h = backend.dgrad(d_y, w2, ends, out_dtype=dtypes[0])
    del d_y, w2, w2_later
    how = {"folded": backend.folds, "overwrite": True}
    d_gate_up, d_row_weight = hidden_backward(d_h, gate_up, plan.row_weight, ends, recipe, **how)
    del d_h, gate_up
    d_rows = backend.dgrad(d_gate_up, w13, ends, out_dtype=dtypes[0])
    del w13, w13_later
    going_home = dispatcher.start_give_back(d_rows, routing, d_row_weight)
    multiply = start_weight_gradient(0, d_gate_up, rows)
    del d_rows, d_gate_up, rows
    d_gate_up_proj = multiply()
    dx, d_weights = going_home()
    return dx, d_weights, d_gate_up_proj, d_down_proj
