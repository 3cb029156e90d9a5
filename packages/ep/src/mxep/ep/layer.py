"""The layer, forward and backward, in reading order.

    forward                                              backward
    x (T, D)                                             d_out (T, D)
      pack: quantize, as bytes      -> payload             pack                             -> payload
      dispatch                      -> slots (S, .)        redispatch, by forward's plan    -> slots (S, .)
      meanwhile: quantize weights rowwise                  meanwhile: quantize weights colwise
    rows (R_max, D): slots under the plan's index        d_y (R_max, D)
      GEMM with gate_up_proj        -> gate_up             GEMM with down_proj              -> d_h
      SwiGLU * row_weight, quantize -> h                   SwiGLU backward, quantize        -> d_gate_up, and h again
      GEMM with down_proj           -> y                   GEMM d_y^T h                     -> d_down_proj
      combine: sum each token's rows                       GEMM with gate_up_proj           -> d_rows
    out (T, D)                                             combine: sum each token's rows
                                                           meanwhile: GEMM d_gate_up^T rows -> d_gate_up_proj
                                                         dx (T, D), d_weights (T, K)

A pass is one record (`mxep.runtime.replay`) if its dispatcher needs nothing from the host. With other dispatchers each
function between two exchanges is a record. Autograd is in `autograd.py`.

T tokens of this rank, K experts a token, S slots, R_max rows that fit, D model dim, F hidden dim, e local experts.
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.comms import RoutingPlan
from mxep.gemm.quantize_once import is_held
from mxep.quant import MXParts
from mxep.runtime.bundle import Bundle, Operands
from mxep.runtime.replay import Replayed

from .dispatchers.base import Routing, TokenDispatcher
from .lora import LoRAGradients, LoRAWeights
from .mlp import (
    AnyWeight,
    ColwiseWeights,
    LayerConfig,
    MLPGradientInput,
    MLPInput,
    RowwiseWeights,
    Saved,
    WgradInput,
    bias_gradient,
    mlp_backward,
    mlp_forward,
    quantize_colwise,
    quantize_rowwise,
    saved_columns,
    saved_weights,
    wgrad,
)
from .wire import Wire, keeps_rows, pack


class Needs(NamedTuple):
    """The parameters that have gradients."""

    gate_up_proj: bool
    down_proj: bool
    gate_up_bias: bool
    lora: bool = False


ALL = Needs(True, True, True, True)


@dataclass(frozen=True)
class ForwardInput(Operands):
    """Tensors of forward.

    Attributes:
        x: (T, D). weights: (T, K) fp32. expert_ids: (T, K).
        gate_up_proj: (e, 2F, D), or gate and up, (e, F, D) each. down_proj: (e, D, F). Or both frozen.
        gate_up_bias: (e, 2F) or None. lora: of both weights, or None.
    """

    x: Tensor
    weights: Tensor
    expert_ids: Tensor
    gate_up_proj: AnyWeight
    down_proj: AnyWeight
    gate_up_bias: Tensor | None = None
    lora: LoRAWeights | None = None


@dataclass(frozen=True)
class ForwardOutput(Bundle):
    """Results of forward: out (T, D). saved: for backward, if it will be. kept: (T, K) fp32, 1 for pairs with a row,
    else 0, if asked for. With a room, T is the room's size, and only the tokens' rows count."""

    out: Tensor
    routing: Routing
    saved: Saved | None
    kept: Tensor | None


@dataclass(frozen=True)
class BackwardInput(Operands):
    """Tensors of backward: d_out (T, D), the weights and LoRA as in `ForwardInput`, and fp32 main_grads of the weights'
    shapes. Weight gradients are added to a main_grad and not returned."""

    d_out: Tensor
    routing: Routing
    saved: Saved
    gate_up_proj: AnyWeight
    down_proj: AnyWeight
    gate_up_main_grad: Tensor | None = None
    down_main_grad: Tensor | None = None
    lora: LoRAWeights | None = None


@dataclass(frozen=True)
class Gradients(Bundle):
    """Gradients of x, the routing weights, and parameters. If gate and up are apart, gate_up_proj's is (2, e, F, D).
    The bias's is fp32. None: not wanted, or added to a main_grad."""

    x: Tensor
    weights: Tensor
    gate_up_proj: Tensor | None
    down_proj: Tensor | None
    gate_up_bias: Tensor | None
    lora: LoRAGradients | None = None


@dataclass
class DeferredWgrads:
    """Operands of weight gradients that a later backward computes: (dy, a) of each weight, or None."""

    gate_up: tuple[Any, Any] | None = None
    down: tuple[Any, Any] | None = None


# ── the two passes ────────────────────────────────────────────────────────────────────────────────────────────────


def layer_forward(
    given: ForwardInput,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    *,
    needs: Needs | None,
    drops: bool = False,
    room: int | None = None,
) -> ForwardOutput:
    """Forward without autograd or checks, as one record if the dispatcher can be in one.

    needs: of backward; None: there will be none. The exchanges and dx are made in any case, as ranks do not know what
    the others need. drops: return `kept`. room: of the dispatcher's `room_for`; then tokens are contiguous.
    """
    held = is_held(given.gate_up_proj, config.recipe)
    rowwise = quantize_rowwise.direct(*_weights(given), config=config, dgrad=needs is not None) if held else None
    how: dict[str, Any] = {"config": config, "needs": needs, "drops": drops, "room": room}
    if dispatcher.in_graphs:
        return _Pass.of(dispatcher, forward_pass)(given, rowwise, **how)  # type: ignore[no-any-return]
    return forward_pass(given, rowwise, dispatcher=dispatcher, **how)


def forward_pass(
    given: ForwardInput,
    rowwise: RowwiseWeights | None,
    *,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    needs: Needs | None,
    drops: bool,
    room: int | None,
) -> ForwardOutput:
    """`layer_forward` itself. rowwise: the weights, if `quantize_weights_once` holds them."""
    recipe, keep_rows = config.recipe, needs is not None and (needs.gate_up_proj or needs.lora)
    payload, wire = pack(given.x, recipe=recipe, fmt=recipe.fmt, room=room), Wire.of(given.x, recipe, recipe.fmt)
    of_room: dict[str, Any] = {} if room is None else {"room": room}
    alignment = recipe.group_alignment
    arriving = dispatcher.dispatch(
        payload, given.expert_ids, given.weights, alignment=alignment, overlap=True, **of_room
    )
    try:
        if rowwise is None:
            rowwise = quantize_rowwise(*_weights(given), config=config, dgrad=needs is not None)
    finally:
        slots, routing = arriving.wait()  # nothing stays in flight
    plan = routing.plan
    # The next exchange overwrites the slots, and the gradients of gate_up_proj and its LoRA need them.
    copy = keep_rows and dispatcher.borrows
    weights = rowwise.gate_up, given.gate_up_bias, rowwise.down
    into_mlp = MLPInput(slots, plan.row_slot, plan.row_weight, plan.offs, *weights, given.lora)
    mlp = mlp_forward(
        into_mlp, config=config, wire=wire, copy=copy, keep_rows=keep_rows, keep_gate_up=needs is not None
    )
    out, kept = dispatcher.combine(mlp.y, routing, torch.ones_like(plan.row_weight) if drops else None).wait()
    saved = None
    if needs is not None:
        inner = (mlp.gate_up_inner, mlp.down_inner) if needs.lora else (None, None)
        saved = Saved(_under(None, mlp.rows), mlp.gate_up, *saved_columns(rowwise), *inner)
    return ForwardOutput(out, routing, saved, kept)


def layer_backward(
    given: BackwardInput,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    *,
    needs: Needs,
    wgrad_scale: float = 1.0,
    wanted: Needs = ALL,
    deferred: DeferredWgrads | None = None,
) -> Gradients:
    """Backward, as one record if the dispatcher can be in one. `given` is emptied, and its memory used again.

    needs: forward's. wgrad_scale: factor of gradients of parameters. wanted: which of these are computed now. deferred:
    receives the operands of weight gradients that are computed later. With a room d_out is contiguous.
    """
    colwise = None
    if is_held(given.gate_up_proj, config.recipe):
        colwise = quantize_colwise.direct(
            *saved_weights(given.gate_up_proj, given.down_proj, given.saved), config=config
        )
    how: dict[str, Any] = {"config": config, "needs": needs, "wgrad_scale": wgrad_scale}
    now = all(want or not need for want, need in zip(wanted, needs))
    if dispatcher.in_graphs and deferred is None and now:
        return _Pass.of(dispatcher, backward_pass)(given, colwise, **how, room=given.routing.room)  # type: ignore[no-any-return]
    return backward_pass(given, colwise, dispatcher=dispatcher, **how, wanted=wanted, deferred=deferred)


def backward_pass(
    given: BackwardInput,
    colwise: ColwiseWeights | None,
    *,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    needs: Needs,
    wgrad_scale: float,
    room: int | None = None,
    wanted: Needs = ALL,
    deferred: DeferredWgrads | None = None,
) -> Gradients:
    """`layer_backward` itself. colwise: the weights, if `quantize_weights_once` holds them."""
    recipe, routing, plan, borrows = config.recipe, given.routing, given.routing.plan, dispatcher.borrows
    payload = pack(given.d_out, recipe=recipe, fmt=recipe.grad_fmt, room=routing.room)
    wire = Wire.of(given.d_out, recipe, recipe.grad_fmt)
    arriving = dispatcher.redispatch(payload, routing, overlap=True)
    del payload
    if colwise is None:
        colwise = quantize_colwise(*saved_weights(given.gate_up_proj, given.down_proj, given.saved), config=config)
    index = None if keeps_rows(plan.max_rows, plan.slot_rows.shape[0], copied=borrows) else plan.row_slot
    rows, gate_up, main_grad = _under(index, given.saved.rows), given.saved.gate_up, given.gate_up_main_grad
    halves, dtypes = type(given.gate_up_proj) is tuple, (_dtype(given.gate_up_proj), _dtype(given.down_proj))
    later = deferred is not None and needs.down_proj and not wanted.down_proj
    weights = colwise.down, colwise.gate_up, given.down_main_grad
    lora: dict[str, Any] = {"lora": given.lora}
    if needs.lora and wanted.lora:
        lora |= {"rows": rows, "gate_up_inner": given.saved.gate_up_inner, "down_inner": given.saved.down_inner}
    slots = arriving.wait()
    into_mlp = [MLPGradientInput(slots, plan.row_slot, plan.row_weight, plan.offs, gate_up, *weights, **lora)]
    given.release("saved")
    del gate_up, weights, colwise, arriving, slots, lora
    of_mlp: dict[str, Any] = {"down_grad": needs.down_proj and (later or wanted.down_proj), "copy": later and borrows}
    of_mlp |= {"config": config, "wire": wire, "later": later, "scale": wgrad_scale, "dtype": dtypes[1]}
    mlp = mlp_backward(into_mlp.pop(), **of_mlp)
    if later and deferred is not None:
        deferred.down = mlp.d_y, mlp.h
    arriving_home = dispatcher.combine(mlp.d_rows, routing, mlp.d_row_weight, overlap=True)
    d_gate_up, d_down_proj, d_lora = mlp.d_gate_up, mlp.d_down_proj, mlp.d_lora
    del mlp
    d_bias = d_gate_up_proj = None
    if needs.gate_up_bias and wanted.gate_up_bias:
        d_bias = bias_gradient(d_gate_up, plan.offs, scale=wgrad_scale)
    if not needs.gate_up_proj:
        del d_gate_up, rows
    elif wanted.gate_up_proj:
        operands = WgradInput(d_gate_up, rows, plan.offs, main_grad)
        del d_gate_up, rows
        d_gate_up_proj = wgrad(operands, config=config, scale=wgrad_scale, dtype=dtypes[0], halves=halves)
    elif deferred is not None:
        deferred.gate_up = d_gate_up, rows
    dx, d_weights = arriving_home.wait()
    assert d_weights is not None
    return Gradients(dx, d_weights, d_gate_up_proj, d_down_proj, d_bias, d_lora)


class _Pass(Replayed):
    """A pass of two exchanges. The dispatcher owns it, with its records. It knows the dispatcher by a weak reference,
    so that both go with the dispatcher's users, not when garbage is collected."""

    def __init__(self, function: Callable[..., Any], dispatcher: TokenDispatcher) -> None:
        super().__init__(function)
        self._dispatcher: TokenDispatcher = weakref.proxy(dispatcher)
        # x, weights and expert_ids; or d_out, and the expert_ids behind the plan of its routing.
        self._of_tokens = (0, 1, 2) if function is forward_pass else (0, 1 + len(PLAN))

    @staticmethod
    def of(dispatcher: TokenDispatcher, function: Callable[..., Any]) -> "_Pass":
        if function not in dispatcher.passes:
            dispatcher.passes[function] = _Pass(function, dispatcher)
        return dispatcher.passes[function]  # type: ignore[return-value]

    def state(self) -> Hashable | None:
        return self._dispatcher.graph_state()

    def moving(self, **how: Any) -> tuple[int, ...]:
        return () if how["room"] is None else self._of_tokens

    def launched(self) -> None:
        self._dispatcher.launched(2)

    def direct(self, *args: Any, **how: Any) -> Any:
        return self.function(*args, dispatcher=self._dispatcher, **how)  # its functions join parts


PLAN = tuple(field.name for field in dataclasses.fields(RoutingPlan) if field.name != "alignment")
"""Names of the plan's tensors."""


def _under(index: Tensor | None, rows: Any) -> Any:
    """Quantized rows under this index; others as they are."""
    return rows._replace(row_index=index) if type(rows) is MXParts else rows


def _weights(given: ForwardInput) -> tuple[AnyWeight, AnyWeight]:
    return given.gate_up_proj, given.down_proj


def _dtype(w: AnyWeight) -> torch.dtype:
    return (w[0] if isinstance(w, tuple) else w).dtype
