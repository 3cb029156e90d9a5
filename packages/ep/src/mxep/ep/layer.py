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

h is not kept for backward: the backward kernel of SwiGLU reads gate_up anyway, and writes h again. Functions release
tensors after use, so that later allocations reuse their memory.

A pass is one record (`mxep.runtime.replay`) if its dispatcher needs nothing from the host. With other dispatchers each
function between two exchanges is a record. Autograd is in `autograd.py`, quantization in `formats.py`.

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
from mxep.gemm.frozen import expanded
from mxep.gemm.quantize_once import SavedWeight, is_held
from mxep.quant import MXParts, MXTensor, group_sums
from mxep.runtime.bundle import Bundle, Operands
from mxep.runtime.replay import Replayed, replayed

from .dispatchers.base import Payload, Routing, TokenDispatcher
from .formats import (
    AnyWeight,
    ColwiseWeights,
    LayerConfig,
    RowwiseWeights,
    Wire,
    keeps_rows,
    pack,
    quantize_colwise,
    quantize_rowwise,
    saved_gate_up,
    swiglu_backward,
    swiglu_forward,
)
from .lora import LoRAGradients, LoRAWeights, add_lora, gradient_of_A, lora_backward


class Needs(NamedTuple):
    """The parameters that have gradients."""

    gate_up_proj: bool
    down_proj: bool
    gate_up_bias: bool
    lora: bool = False


ALL = Needs(True, True, True, True)


@dataclass(frozen=True)
class Saved(Operands):
    """The tensors that forward leaves to backward besides the weights themselves.

    Attributes:
        rows: (S, D) slots, or (R_max, D) where `keeps_rows`; None if neither gate_up_proj nor LoRA has a gradient.
        gate_up: (R_max, 2F), with one scale a row if the recipe keeps it in FP8.
        gate_up_columns, down_columns: what helps to quantize the weights colwise. The amax of their columns, (e, D) and
            (e, F) fp32, for a backend with one scale a column. 2-D blocks serve as they are. Else None.
        gate_up_inner, down_inner: (R_max, r) inner rows of LoRA, if it has gradients.
    """

    rows: Any
    gate_up: Any
    gate_up_columns: Any
    down_columns: Any
    gate_up_inner: Tensor | None = None
    down_inner: Tensor | None = None


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


@dataclass(frozen=True)
class MLPInput(Operands):
    """Slots (S, .), the plan's row_slot, row_weight and offs, weights as forward multiplies them, and their LoRA."""

    slots: Payload
    row_slot: Tensor
    row_weight: Tensor
    offs: Tensor
    gate_up_proj: Any
    gate_up_bias: Tensor | None
    down_proj: Any
    lora: LoRAWeights | None = None


class MLPOutput(NamedTuple):
    """y (R_max, D), and what backward needs: rows, gate_up (R_max, 2F) as `saved_gate_up` has it, and LoRA's inner
    rows (R_max, r) of both weights; or None."""

    y: Tensor
    rows: Any
    gate_up: Any
    gate_up_inner: Tensor | None
    down_inner: Tensor | None


@replayed
def mlp_forward(
    given: MLPInput, *, config: LayerConfig, wire: Wire, copy: bool, keep_rows: bool, keep_gate_up: bool
) -> MLPOutput:
    """Both GEMMs and SwiGLU. copy: as in `Wire.rows`."""
    backend, offs, lora = config.backend, given.offs, given.lora
    rows = wire.rows(given.slots, given.row_slot, offs, copy=copy)
    w = expanded(given.gate_up_proj, backend.expand_rowwise)
    gate_up = backend.forward(rows, w, offs, bias=given.gate_up_bias, out_dtype=wire.dtype)
    del w
    inner = down_inner = None
    if lora is not None:
        inner = add_lora(gate_up, rows, lora.gate_up_A, lora.gate_up_B, offs, scale=lora.scale)
    h = swiglu_forward(gate_up, given.row_weight, offs, config.recipe, config.activation, folded=backend.wants_rowwise)
    kept = saved_gate_up(gate_up, config.recipe) if keep_gate_up else None
    del gate_up
    w = expanded(given.down_proj, backend.expand_rowwise)
    y = backend.forward(h, w, offs, bias=None, out_dtype=wire.dtype)
    if lora is not None:
        down_inner = add_lora(y, h, lora.down_A, lora.down_B, offs, scale=lora.scale)
    return MLPOutput(y, rows if keep_rows else None, kept, inner, down_inner)


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


@dataclass(frozen=True)
class MLPGradientInput(Operands):
    """Slots of d_out, the plan's row_slot, row_weight and offs, forward's gate_up, weights as dgrad multiplies them and
    their LoRA. gate_up_inner, down_inner, rows: of forward, if the gradients of LoRA are wanted."""

    slots: Payload
    row_slot: Tensor
    row_weight: Tensor
    offs: Tensor
    gate_up: Any
    down_proj: Any
    gate_up_proj: Any
    down_main_grad: Tensor | None
    lora: LoRAWeights | None = None
    gate_up_inner: Tensor | None = None
    down_inner: Tensor | None = None
    rows: Any = None


class MLPGradients(NamedTuple):
    """d_rows (R_max, D), d_row_weight (R_max,), d_gate_up (R_max, 2F), the gradients of down_proj and of LoRA or None;
    and d_y and h if the gradient of down_proj is computed later."""

    d_rows: Tensor
    d_row_weight: Tensor
    d_gate_up: Any
    d_down_proj: Tensor | None
    d_lora: LoRAGradients | None
    d_y: Any
    h: Any


@replayed
def mlp_backward(
    given: MLPGradientInput,
    *,
    config: LayerConfig,
    wire: Wire,
    copy: bool,
    down_grad: bool,
    later: bool,
    scale: float,
    dtype: torch.dtype,
) -> MLPGradients:
    """Backward of `mlp_forward`, but for the gradient of gate_up_proj. It is given gate_up and the weights to use up.

    down_grad: down_proj has a gradient, of `dtype`. later: return its operands instead.
    """
    backend, offs, row_weight, lora = config.backend, given.offs, given.row_weight, given.lora
    d_y = wire.rows(given.slots, given.row_slot, offs, copy=copy)
    w = expanded(given.down_proj, backend.expand_colwise)
    d_h = backend.dgrad(d_y, w, offs, out_dtype=wire.dtype)
    del w
    d_inner: Tensor | None = None
    d_lora = d_A = d_B = None
    of_lora: dict[str, Any] = {"scale": 0.0 if lora is None else lora.scale, "wgrad_scale": scale}
    lora_grads = given.down_inner is not None
    if lora is not None:
        d_inner, d_B = lora_backward(d_y, d_h, lora.down_A, lora.down_B, given.down_inner, offs, **of_lora)
    gate_up = given.gate_up
    given.release("slots", "down_proj", "gate_up", "down_inner")
    with_h = down_grad or lora_grads
    options: dict[str, Any] = {"folded": backend.wants_rowwise, "overwrite": True, "with_h": with_h}
    how = config.recipe, config.activation
    d_gate_up, d_row_weight, h = swiglu_backward(d_h, gate_up, row_weight, offs, *how, **options)
    del d_h, gate_up
    if lora_grads:
        assert lora is not None
        assert d_inner is not None
        assert h is not None
        d_A = gradient_of_A(d_inner, h, lora.down_A, offs, wgrad_scale=scale)
    del d_inner
    d_down_proj, operands = None, (d_y, h) if later else (None, None)
    if down_grad and not later:  # d_y is borrowed until the next exchange
        of_wgrad = WgradInput(d_y, h, offs, given.down_main_grad)
        del d_y, h
        d_down_proj = wgrad.function(of_wgrad, config=config, scale=scale, dtype=dtype)
    else:
        del d_y, h
    w = expanded(given.gate_up_proj, backend.expand_colwise)
    d_rows = backend.dgrad(d_gate_up, w, offs, out_dtype=wire.dtype)
    del w
    if lora is not None:
        pair = lora.gate_up_A, lora.gate_up_B
        d_inner, d_gate_up_B = lora_backward(d_gate_up, d_rows, *pair, given.gate_up_inner, offs, **of_lora)
        if lora_grads:
            d_gate_up_A = gradient_of_A(d_inner, given.rows, lora.gate_up_A, offs, wgrad_scale=scale)
            d_lora = LoRAGradients(d_gate_up_A, d_gate_up_B, d_A, d_B)
    return MLPGradients(d_rows, d_row_weight, d_gate_up, d_down_proj, d_lora, *operands)


@dataclass(frozen=True)
class WgradInput(Operands):
    """dy (R_max, N), a (R_max, K), offs, and an fp32 main_grad (e, N, K) or None."""

    dy: Any
    a: Any
    offs: Tensor
    main_grad: Tensor | None


@replayed
def wgrad(
    given: WgradInput, *, config: LayerConfig, scale: float, dtype: torch.dtype, halves: bool = False
) -> Tensor | None:
    """The gradient dy^T a of a weight (e, N, K); None where it was added to main_grad. It uses up dy and a.

    halves: of gate and up apart, as (2, e, F, D); there is no main_grad.
    """
    dy, a, offs = given.dy, given.a, given.offs
    given.release("dy", "a")
    shape = 2, len(offs), dy.shape[1] // 2, a.shape[1]
    operands = config.backend.prepare_wgrad(dy, a, offs, config.recipe)
    del dy, a
    both = offs.new_empty(shape, dtype=dtype) if halves else None
    gradient: Tensor | None = config.backend.wgrad(
        operands, offs, out_dtype=dtype, scale=scale, accumulate_into=given.main_grad, halves=both
    )
    return gradient if both is None else both


@replayed
def bias_gradient(d_gate_up: Tensor, offs: Tensor, *, scale: float) -> Tensor:
    """scale * the sum of each expert's rows of d_gate_up (R_max, 2F): (e, 2F) fp32."""
    return group_sums(d_gate_up, offs).mul_(scale)


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


def _weights(given: ForwardInput) -> tuple[AnyWeight, AnyWeight]:
    return given.gate_up_proj, given.down_proj


def saved_columns(weights: RowwiseWeights) -> tuple[Any, Any]:
    """The columns that `Saved` keeps of both weights: 2-D blocks, or the amax of columns."""
    pairs = (weights.gate_up, weights.gate_up_amax), (weights.down, weights.down_amax)
    gate_up, down = (w if getattr(w, "axis", None) == (-2, -1) else amax for w, amax in pairs)
    return gate_up, down


def saved_weights(gate_up_proj: AnyWeight, down_proj: AnyWeight, saved: Saved) -> tuple[SavedWeight, SavedWeight]:
    """The weights as backward finds them: themselves with the amax of their columns, or 2-D blocks."""
    pairs = (gate_up_proj, saved.gate_up_columns), (down_proj, saved.down_columns)
    gate_up, down = (SavedWeight(x, None) if isinstance(x, MXParts | MXTensor) else SavedWeight(w, x) for w, x in pairs)
    return gate_up, down


def _under(index: Tensor | None, rows: Any) -> Any:
    """Quantized rows under this index; others as they are."""
    return rows._replace(row_index=index) if type(rows) is MXParts else rows


def _dtype(w: AnyWeight) -> torch.dtype:
    return (w[0] if isinstance(w, tuple) else w).dtype
