"""The experts' part of a layer as one autograd function: dispatch, expert MLP and combine, forward and backward.

What that buys over the composed functions of `functional.py`, which it equals bit for bit:

    SwiGLU and its backward fold what they quantize, for a backend that folds: one pass less over h and d_gate_up
    d_out's slots are used where they lie, before the next move
    weights are quantized while rows are under way, each way as it is needed: nothing of them is kept for backward
    dx goes home while the gradient of gate_up_proj computes

Weight gradients that a backward does not want are left to a later one, which moves nothing and computes them alone.

T tokens of this rank, K experts a token, D model dim, F hidden dim, R_max rows that fit, e local experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.checks import check_weight
from mxep.gemm.partial_backward import Kept, graph_is_retained, is_wanted
from mxep.gemm.quantize_once import rowwise_and_saved

from .dispatchers.base import Parts, Routing, TokenDispatcher
from .functional import checked_tokens, hidden, hidden_backward
from .saved import Saved
from .wire import Wire


@dataclass(frozen=True)
class Setup:
    """How a layer computes.

    Attributes:
        backend: one that can run where its tensors are.
        main_grads: (e, 2F, D) and (e, D, F) fp32, or None each: weight gradients are added there and not returned.
        wgrad_scale: factor of weight gradients.
    """

    dispatcher: TokenDispatcher
    recipe: Recipe
    backend: Backend
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None)
    wgrad_scale: float = 1.0


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
WgradOperands = dict[int, tuple[Tensor, Tensor]]
"""Of gate_up_proj (0) and down_proj (1): the gradient of their rows and the rows, for a weight gradient to come."""


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
        out, routing, saved = layer_forward(sending, gate_up_proj, down_proj, setup, backward, needs)
        ctx.save_for_backward(gate_up_proj, down_proj, *saved)
        ctx.setup, ctx.routing, ctx.dtypes, ctx.kept = setup, routing, (gate_up_proj.dtype, down_proj.dtype), None
        return out, routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
        asked = [need and is_wanted(ctx, i) for i, need in enumerate(ctx.needs_input_grad[:4])]
        needs, wanted = ctx.needs_input_grad[2:4], (asked[2], asked[3])
        kept, retained = ctx.kept, graph_is_retained()
        if not retained:
            ctx.kept = None
        if kept is not None and not any(asked[:2]) and kept.fits(d_out):
            operands: WgradOperands = kept.operands
            if all(i in operands for i in (0, 1) if wanted[i]):
                ends, grads = ctx.routing.plan.offs, list[Tensor | None]((None, None))
                for i, (dy, a) in operands.items():
                    if wanted[i]:
                        grads[i] = start_weight_gradient(i, ctx.dtypes[i], dy, a, ends, ctx.setup)()
                return None, None, *grads, None, None, None, None
        gate_up_proj, down_proj, *saved = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained, they go as they have been used
        left: WgradOperands | None = {} if retained else None
        all_grads = layer_backward(
            d_out, saved, gate_up_proj, down_proj, ctx.routing, ctx.setup, needs, wanted=wanted, left=left
        )
        if left:
            ctx.kept = Kept.of(d_out, left)
        return *all_grads, None, None, None, None


@torch.no_grad()
def start_send(x: Tensor, weights: Tensor, expert_ids: Tensor, setup: Setup) -> Sending:
    """Begin to send x (T, D), quantized if the recipe says so, to the experts."""
    parts, wire = Wire.pack(setup.recipe.quantize_activation(x))
    return setup.dispatcher.start_send(parts, expert_ids, weights, alignment=setup.recipe.group_alignment), wire


def layer_forward(
    sending: Sending, gate_up_proj: Tensor, down_proj: Tensor, setup: Setup, backward: bool, needs: tuple[bool, bool]
) -> tuple[Tensor, Routing, list[Tensor]]:
    """(out, routing, what backward needs, if it will be, as `Saved` lists it): no autograd, no checks but of products.

    needs: whether the two weights have gradients, if backward will be. The moves and dx are made in any case, as ranks
    do not know what the others need.
    """
    dispatcher, recipe, backend = setup.dispatcher, setup.recipe, setup.backend
    coming, wire = sending
    dtype = wire.dtype
    (w13, later13), (w2, later2) = (
        rowwise_and_saved(w, recipe, backend, dgrad=backward) for w in (gate_up_proj, down_proj)
    )
    slots, routing = coming()
    plan = routing.plan
    # The next move takes the slots back, which the gradient of gate_up_proj needs.
    rows = wire.rows(slots, plan, copy=backward and needs[0] and dispatcher.borrows)
    gate_up = backend.forward(rows, w13, plan.offs, bias=None, out_dtype=dtype)
    h = hidden(gate_up, plan.row_weight, plan.offs, recipe, folded=backend.wants_rowwise)
    y = backend.forward(h, w2, plan.offs, bias=None, out_dtype=dtype)
    out, _ = dispatcher.give_back(y, routing)
    if not backward:
        return out, routing, []
    saved = Saved(rows if needs[0] else None, gate_up, h if needs[1] else None, (later13, later2))
    return out, routing, saved.flat()


def layer_backward(
    d_out: Tensor,
    saved: list[Tensor],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    routing: Routing,
    setup: Setup,
    needs: tuple[bool, bool],
    *,
    wanted: tuple[bool, bool] = (True, True),
    left: WgradOperands | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weights, gate_up_proj, down_proj.

    saved: emptied, so that its memory serves the gradients of weights. needs: whether the two weights have any. wanted:
    whether those are computed now. left: takes the operands of those that are not, which nobody else holds.
    """
    dispatcher, recipe, backend, dtype = setup.dispatcher, setup.recipe, setup.backend, d_out.dtype
    plan, ends = routing.plan, routing.plan.offs
    experts = gate_up_proj, down_proj
    rows, gate_up, h, (later13, later2) = Saved.of(saved, plan, experts, recipe, needs, copied=dispatcher.borrows)
    saved.clear()

    def start(i: int, w: Tensor, dy: Tensor, a: Tensor | None) -> Callable[[], Tensor | None]:
        if a is not None and wanted[i]:
            return start_weight_gradient(i, w.dtype, dy, a, ends, setup)
        if a is not None and left is not None:
            left[i] = dy, a
        return lambda: None

    parts, wire = Wire.pack(recipe.quantize_gradient(d_out))
    coming = dispatcher.start_resend(parts, routing)
    w2, w13 = later2.colwise(recipe, backend), later13.colwise(recipe, backend)
    # Borrowed until dx goes home: the gradient of down_proj comes before that, and before d_h, which takes memory.
    d_y = wire.rows(coming(), plan, copy=left is not None and h is not None and not wanted[1] and dispatcher.borrows)
    multiply = start(1, down_proj, d_y, h)
    del h, parts, coming
    d_down_proj = multiply()
    del multiply
    d_h = backend.dgrad(d_y, w2, ends, out_dtype=dtype)
    del d_y, w2, later2
    how = {"folded": backend.wants_rowwise, "overwrite": True}
    d_gate_up, d_row_weight = hidden_backward(d_h, gate_up, plan.row_weight, ends, recipe, **how)
    del d_h, gate_up
    d_rows = backend.dgrad(d_gate_up, w13, ends, out_dtype=dtype)
    del w13, later13
    going_home = dispatcher.start_give_back(d_rows, routing, d_row_weight)
    multiply = start(0, gate_up_proj, d_gate_up, rows)
    del d_rows, d_gate_up, rows
    d_gate_up_proj = multiply()
    dx, d_weights = going_home()
    return dx, d_weights, d_gate_up_proj, d_down_proj


def start_weight_gradient(
    i: int, dtype: torch.dtype, dy: Tensor, a: Tensor, ends: Tensor, setup: Setup
) -> Callable[[], Tensor | None]:
    """Of gate_up_proj (0) or down_proj (1): what is returned multiplies dy and a, returning or adding the gradient."""
    operands = setup.backend.prepare_wgrad(dy, a, ends, setup.recipe)
    options: dict[str, Any] = {"scale": setup.wgrad_scale, "accumulate_into": setup.main_grads[i]}
    return lambda: setup.backend.wgrad(operands, ends, out_dtype=dtype, **options)
