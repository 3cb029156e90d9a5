"""Forward and backward of the layer, without autograd.

    forward                                              backward
    x (T, D)                                             d_out (T, D)
      pack: quantize, as bytes      -> payload             pack                             -> payload
      dispatch                      -> slots (S, .)        redispatch, by forward's plan    -> slots (S, .)
      meanwhile: quantize weights rowwise                  meanwhile: quantize weights colwise
    rows (R_max, D): slots read by the plan's index      d_y (R_max, D)
      GEMM with gate_up_proj        -> gate_up             GEMM with down_proj              -> d_h
      SwiGLU * row_weight, quantize -> h                   SwiGLU backward, quantize        -> d_gate_up, and h again
      GEMM with down_proj           -> y                   GEMM d_y^T h                     -> d_down_proj
      combine: sum each token's rows                       GEMM with gate_up_proj           -> d_rows
    out (T, D)                                             combine: sum each token's rows
                                                           meanwhile: GEMM d_gate_up^T rows -> d_gate_up_proj
                                                         dx (T, D), d_weights (T, K)

Forward does not save h, because the backward kernel of SwiGLU reads gate_up anyway, and recomputes h. With a capacity
of overflow="recompute", forward saves only the first rows of gate_up, and backward repeats the first GEMM for the rest.
Functions release tensors after use, so that later allocations reuse their memory.

If the dispatcher needs nothing from the host, `mxep.runtime.replay` records a whole pass as one CUDA graph. Otherwise
it records each function between two exchanges. Autograd is in `autograd.py`, quantization in `formats.py`.

T tokens of this rank, K experts per token, S slots (rows of the receive buffer), R_max maximum rows of this rank's
experts, padding included, D model dim, F hidden dim, e local experts, r LoRA's rank.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.comms import RoutingPlan, gather_rows
from mxep.gemm.frozen import expanded
from mxep.quant import MXParts, group_sums
from mxep.runtime.bundle import Bundle, Operands
from mxep.runtime.replay import Replayed, replayed

from .dispatchers.base import Payload, Routing, TokenDispatcher
from .formats import (
    NONE,
    AnyWeight,
    ColwiseWeights,
    GateUp,
    GradientForm,
    LayerConfig,
    Needs,
    RowwiseWeights,
    Saved,
    Wire,
    keeps_rows,
    pack,
    quantize_colwise,
    quantize_rowwise,
    rows_of_tokens,
    saved_columns,
    saved_gate_up,
    saved_weights,
    swiglu_backward,
    swiglu_forward,
)
from .lora import LoRAGradients, LoRAWeights, add_lora, gradient_of_A, lora_backward

MainGrads = tuple[Tensor | None, Tensor | None]
"""main_grads of gate_up_proj and down_proj, fp32 (e, 2F, D) and (e, D, F). If not None, backward adds to them."""


# ── forward ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ForwardInput(Operands):
    """Tensors of forward.

    Attributes:
        x: (T, D). weights: (T, K) fp32, the routing weights. expert_ids: (T, K).
        gate_up_proj: (e, 2F, D), or a pair of gate and up, (e, F, D) each. May be frozen.
        down_proj: (e, D, F). May be frozen. gate_up_bias: (e, 2F) or None. lora: LoRA of both weights, or None.
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
    """out: (T, D). saved: tensors for backward, or None. kept: (T, K) fp32, 1 if a (token, expert) pair was computed, 0
    if it was dropped; None without `drops`. With `room`, out and kept have `room` rows, of which the first T are valid.
    """

    out: Tensor
    routing: Routing
    saved: Saved | None
    kept: Tensor | None


def forward_pass(
    given: ForwardInput,
    rowwise: RowwiseWeights | None,
    *,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    needs: Needs | None,
    rows_again: bool = False,
    drops: bool = False,
    room: int | None = None,
) -> ForwardOutput:
    """Forward without autograd or checks.

    rowwise: quantized weights held by `quantize_weights_once`, or None.
    needs: parameters that get gradients. If None, there is no backward. Otherwise backward always computes dx, because
        a rank does not know if its peers need the exchanges.
    rows_again: see `makes_rows_again`. drops: True to return `kept`.
    room: from the dispatcher's `room_for`. If it is given, x and weights must be contiguous.
    """
    recipe, keep_rows = config.recipe, needs is not None and needs.keep_rows(rows_again, dispatcher.recomputes)
    payload, wire = pack(given.x, recipe=recipe, fmt=recipe.fmt, room=room), Wire.of(given.x, recipe, recipe.fmt)
    how: dict[str, Any] = {"alignment": recipe.group_alignment} | ({} if room is None else {"room": room})
    arriving = dispatcher.dispatch(payload, given.expert_ids, given.weights, overlap=True, **how)
    del payload
    try:
        if rowwise is None:
            rowwise = quantize_rowwise(given.gate_up_proj, given.down_proj, config=config, dgrad=needs is not None)
    finally:
        slots, routing = arriving.wait()  # also after an error, so that no exchange stays in flight
    plan = routing.plan
    weights = rowwise.gate_up, given.gate_up_bias, rowwise.down, given.lora
    into_mlp = MLPInput(slots, plan.row_slot, plan.row_weight, plan.offs, *weights)
    del arriving, slots
    # The gradients of gate_up_proj and its LoRA need the slots, but the next exchange overwrites borrowed ones.
    keep: dict[str, Any] = {"copy": keep_rows and dispatcher.borrows, "keep_rows": keep_rows}
    keep["keep_gate_up"] = None if needs is None else dispatcher.kept_rows(routing)
    mlp = mlp_forward(into_mlp, config=config, wire=wire, **keep)
    out, kept = dispatcher.combine(mlp.y, routing, torch.ones_like(plan.row_weight) if drops else None).wait()
    saved = None
    if needs is not None:
        inner = (mlp.gate_up_inner, mlp.down_inner) if needs.lora else (None, None)
        saved = Saved(_under(None, mlp.rows), mlp.gate_up, *saved_columns(rowwise), *inner)
    return ForwardOutput(out, routing, saved, kept)


@dataclass(frozen=True)
class MLPInput(Operands):
    """slots: (S, .), which `mlp_forward` frees. row_slot, row_weight, offs: the plan's. gate_up_proj, down_proj:
    quantized for forward, or frozen."""

    slots: Payload
    row_slot: Tensor
    row_weight: Tensor
    offs: Tensor
    gate_up_proj: Any
    gate_up_bias: Tensor | None
    down_proj: Any
    lora: LoRAWeights | None


class MLPOutput(NamedTuple):
    """y: (R_max, D). Tensors for backward, each or None: rows as in `Saved`, gate_up from `saved_gate_up`, and LoRA's
    inner (R_max, r) of each weight."""

    y: Tensor
    rows: Any
    gate_up: Any
    gate_up_inner: Tensor | None
    down_inner: Tensor | None


@replayed
def mlp_forward(
    given: MLPInput, *, config: LayerConfig, wire: Wire, copy: bool, keep_rows: bool, keep_gate_up: int | None
) -> MLPOutput:
    """Run both GEMMs and SwiGLU. copy: see `Wire.rows`. keep_gate_up: number of rows of gate_up to save, or None."""
    recipe, backend, offs, lora = config.recipe, config.backend, given.offs, given.lora
    rows: Any = wire.rows(given.slots, given.row_slot, offs, copy=copy)
    w = expanded(given.gate_up_proj, backend.expand_rowwise)
    product = GateUp(w, given.gate_up_bias, lora, config, wire.dtype)
    gate_up, rest, gate_up_inner = product.first_rows(rows, offs, len(rows) if keep_gate_up is None else keep_gate_up)
    del w, product
    if keep_rows and rest is not None and wire.qdata is None:
        rows = gather_rows(given.slots, None)[0].view(wire.dtype)  # slots (S, D)
    given.release("slots")
    rows = rows if keep_rows else None
    how: dict[str, Any] = {"folded": backend.wants_rowwise, "rest": rest}
    h = swiglu_forward(gate_up, given.row_weight, offs, recipe, config.activation, **how)
    del rest, how
    kept = saved_gate_up(gate_up, recipe) if keep_gate_up is not None else None
    del gate_up
    y = backend.forward(h, expanded(given.down_proj, backend.expand_rowwise), offs, bias=None, out_dtype=wire.dtype)
    down_inner = None if lora is None else add_lora(y, h, lora.down_A, lora.down_B, offs, scale=lora.scale)
    return MLPOutput(y, rows, kept, gate_up_inner, down_inner)


# ── backward ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class BackwardInput(Operands):
    """d_out: (T, D). x: forward's, if backward makes rows again, else None. Main grads: shaped like the weights; the
    gradient is added in their dtype. gate_up_bias: only needed if gate_up is recomputed. Others: as in `ForwardInput`.
    """

    d_out: Tensor
    x: Tensor | None
    routing: Routing
    saved: Saved
    gate_up_proj: AnyWeight
    down_proj: AnyWeight
    gate_up_main_grad: Tensor | None = None
    down_main_grad: Tensor | None = None
    lora: LoRAWeights | None = None
    gate_up_bias: Tensor | None = None


class DeferredWgrads(NamedTuple):
    """Operands (dy, a) of each weight gradient that is left to a later backward pass, else None."""

    gate_up: tuple[Tensor, Tensor] | None = None
    down: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Gradients(Bundle):
    """Gradients of x, the routing weights and the parameters. A gradient is None if it is not wanted, or was added to a
    main_grad. gate_up_proj: (2, e, F, D) if gate and up are two weights. gate_up_bias: fp32."""

    x: Tensor
    weights: Tensor
    gate_up_proj: Tensor | None
    down_proj: Tensor | None
    gate_up_bias: Tensor | None
    lora: LoRAGradients | None
    deferred: DeferredWgrads


def backward_pass(
    given: BackwardInput,
    colwise: ColwiseWeights | None,
    *,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    wanted: Needs,
    later: Needs = NONE,
    rows_again: bool = False,
    wgrad_scale: float = 1.0,
    room: int | None = None,
) -> Gradients:
    """Backward of `forward_pass`. It releases the tensors of `given`, so that their memory is reused.

    colwise: quantized weights held by `quantize_weights_once`, or None. wanted: gradients to compute, among forward's
    `needs`. later: gradients to leave to a later backward pass. Their operands are returned in `Gradients.deferred`.
    rows_again: True if x is given (read only by `_Pass.moving`). wgrad_scale: factor for the parameters' gradients.
    room: the routing's. If it is given, d_out and x must be contiguous.
    """
    recipe, routing, saved, borrows = config.recipe, given.routing, given.saved, dispatcher.borrows
    plan = routing.plan
    payload = pack(given.d_out, recipe=recipe, fmt=recipe.grad_fmt, room=room)
    wire = Wire.of(given.d_out, recipe, recipe.grad_fmt)
    arriving = dispatcher.redispatch(payload, routing, overlap=True)
    del payload
    recompute = saved.lacks_rows(plan)
    if colwise is None:
        both = saved_weights(given.gate_up_proj, given.down_proj, saved)
        colwise = quantize_colwise(*both, config=config, recompute=recompute)
    index = None if keeps_rows(plan.max_rows, plan.slot_rows.shape[0], copied=borrows) else plan.row_slot
    rows, gate_up_main_grad = _under(index, saved.rows), given.gate_up_main_grad
    if recompute and (given.x is not None or type(rows) is Tensor):
        tokens, of_x = (rows, None) if given.x is None else (given.x, room)
        rows = rows_of_tokens(tokens, plan.row_slot, plan.offs, config=config, room=of_x)
    forms = GradientForm.of(given.gate_up_proj), GradientForm.of(given.down_proj)
    into_mlp = [
        MLPGradientInput(
            arriving.wait(),
            plan.row_slot,
            plan.row_weight,
            plan.offs,
            saved.gate_up,
            colwise.down,
            colwise.gate_up,
            given.down_main_grad,
            given.lora,
            rows if wanted.lora or recompute else None,
            *((saved.gate_up_inner, saved.down_inner) if wanted.lora else (None, None)),
            *((colwise.gate_up_rowwise, given.gate_up_bias) if recompute else ()),
        )
    ]
    given.release("saved")
    del saved, colwise, arriving
    of_down: dict[str, Any] = {"down_grad": wanted.down_proj, "later": later.down_proj, "form": forms[1]}
    how: dict[str, Any] = {"config": config, "scale": wgrad_scale}
    # Copy d_y if it is kept for a later backward pass: the next exchange overwrites borrowed slots.
    mlp = mlp_backward(into_mlp.pop(), wire=wire, copy=later.down_proj and borrows, **of_down, **how)
    arriving_home = dispatcher.combine(mlp.d_rows, routing, mlp.d_row_weight, overlap=True)
    d_gate_up, d_down_proj, d_lora, down_operands = mlp.d_gate_up, mlp.d_down_proj, mlp.d_lora, mlp.operands
    del mlp
    if given.x is not None and not recompute and (wanted.gate_up_proj or later.gate_up_proj):
        # x is not released, because the caller still holds it, and a record would count its bytes as freed here.
        rows = rows_of_tokens(given.x, plan.row_slot, plan.offs, config=config, room=room)
    gate_up_operands = (d_gate_up, rows) if later.gate_up_proj else None
    d_bias = bias_gradient(d_gate_up, plan.offs, scale=wgrad_scale) if wanted.gate_up_bias else None
    d_gate_up_proj = None
    if wanted.gate_up_proj:
        operands = WgradInput(d_gate_up, rows, plan.offs, gate_up_main_grad)
        del d_gate_up, rows
        d_gate_up_proj = wgrad(operands, form=forms[0], **how)
    else:
        del d_gate_up, rows
    dx, d_weights = arriving_home.wait()
    assert d_weights is not None
    deferred = DeferredWgrads(gate_up_operands, down_operands)
    return Gradients(dx, d_weights, d_gate_up_proj, d_down_proj, d_bias, d_lora, deferred)


@dataclass(frozen=True)
class MLPGradientInput(Operands):
    """slots: of d_out. gate_up: saved by forward. gate_up_proj, down_proj: quantized for dgrad, or frozen.
    For LoRA's gradients: rows, gate_up_inner and down_inner, saved by forward, else None.
    To recompute the rows of gate_up that forward did not save: rows, gate_up_rowwise and gate_up_bias, else None."""

    slots: Payload
    row_slot: Tensor
    row_weight: Tensor
    offs: Tensor
    gate_up: Any
    down_proj: Any
    gate_up_proj: Any
    down_main_grad: Tensor | None
    lora: LoRAWeights | None = None
    rows: Any = None
    gate_up_inner: Tensor | None = None
    down_inner: Tensor | None = None
    gate_up_rowwise: Any = None
    gate_up_bias: Tensor | None = None


class MLPGradients(NamedTuple):
    """d_rows: (R_max, D). d_row_weight: (R_max,). d_gate_up: (R_max, 2F). d_down_proj, d_lora: gradients, or None.
    operands: (d_y, h) if the gradient of down_proj is left to a later backward pass, else None."""

    d_rows: Tensor
    d_row_weight: Tensor
    d_gate_up: Any
    d_down_proj: Tensor | None
    d_lora: LoRAGradients | None
    operands: tuple[Any, Any] | None


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
    form: GradientForm,
) -> MLPGradients:
    """Backward of `mlp_forward`, except for the gradient of gate_up_proj. It frees gate_up and the weights.

    down_grad: True to compute the gradient of down_proj, in `form`. later: True to return its operands.
    """
    backend, offs, lora, gate_up = config.backend, given.offs, given.lora, given.gate_up
    lora_grads, d_inner, d_down_A, d_down_B, d_lora, rest = given.down_inner is not None, None, None, None, None, None
    of_lora: dict[str, Any] = {"scale": 0.0 if lora is None else lora.scale, "wgrad_scale": scale}
    d_y = wire.rows(given.slots, given.row_slot, offs, copy=copy)
    d_h = backend.dgrad(d_y, expanded(given.down_proj, backend.expand_colwise), offs, out_dtype=wire.dtype)
    if lora is not None:
        d_inner, d_down_B = lora_backward(d_y, d_h, lora.down_A, lora.down_B, given.down_inner, offs, **of_lora)
    given.release("slots", "down_proj", "gate_up", "down_inner")
    if given.gate_up_rowwise is not None:
        w = expanded(given.gate_up_rowwise, backend.expand_rowwise)
        product = GateUp(w, given.gate_up_bias, lora, config, wire.dtype)
        rest = product.last_rows(given.rows, offs, len(gate_up))
        del w, product
        given.release("gate_up_rowwise")
    with_h = down_grad or later or lora_grads
    how: dict[str, Any] = {"folded": backend.wants_rowwise, "overwrite": True, "with_h": with_h, "rest": rest}
    d_gate_up, d_row_weight, h = swiglu_backward(
        d_h, gate_up, given.row_weight, offs, config.recipe, config.activation, **how
    )
    del d_h, gate_up, rest, how
    if lora is not None and lora_grads:
        assert d_inner is not None
        assert h is not None
        d_down_A = gradient_of_A(d_inner, h, lora.down_A, offs, wgrad_scale=scale)
    operands, d_down_proj = (d_y, h) if later else None, None
    if down_grad:
        of_wgrad = WgradInput(d_y, h, offs, given.down_main_grad)
        del d_y, h, d_inner
        d_down_proj = wgrad.function(of_wgrad, config=config, scale=scale, form=form)
    else:
        del d_y, h, d_inner
    w = expanded(given.gate_up_proj, backend.expand_colwise)
    d_rows = backend.dgrad(d_gate_up, w, offs, out_dtype=wire.dtype)
    del w
    if lora is not None:
        of_gate_up = lora.gate_up_A, lora.gate_up_B, given.gate_up_inner
        d_inner, d_gate_up_B = lora_backward(d_gate_up, d_rows, *of_gate_up, offs, **of_lora)
        if lora_grads:
            d_gate_up_A = gradient_of_A(d_inner, given.rows, lora.gate_up_A, offs, wgrad_scale=scale)
            d_lora = LoRAGradients(d_gate_up_A, d_gate_up_B, d_down_A, d_down_B)
    return MLPGradients(d_rows, d_row_weight, d_gate_up, d_down_proj, d_lora, operands)


@dataclass(frozen=True)
class WgradInput(Operands):
    """dy: (R_max, N). a: (R_max, K). offs: (e,). main_grad: (e, N, K) or None. (N, K: the weight's sizes.)"""

    dy: Any
    a: Any
    offs: Tensor
    main_grad: Tensor | None


@replayed
def wgrad(
    given: WgradInput,
    *,
    config: LayerConfig,
    scale: float,
    form: GradientForm,
) -> Tensor | None:
    """Compute a weight's gradient dy^T a (e, N, K) in `form`; None if it was added to main_grad. Frees dy and a.

    If form.halves, main_grad must be None.
    """
    dy, a, offs = given.dy, given.a, given.offs
    given.release("dy", "a")
    halves = None
    if form.halves:
        halves = offs.new_empty((2, len(offs), dy.shape[1] // 2, a.shape[1]), dtype=form.dtype)
    operands = config.backend.prepare_wgrad(dy, a, offs, config.recipe)
    del dy, a
    how: dict[str, Any] = {"out_dtype": form.dtype, "scale": scale, "transposed": form.transposed, "halves": halves}
    gradient: Tensor | None = config.backend.wgrad(operands, offs, accumulate_into=given.main_grad, **how)
    return gradient if halves is None else halves


@replayed
def bias_gradient(d_gate_up: Tensor, offs: Tensor, *, scale: float) -> Tensor:
    """Sum each expert's rows of d_gate_up (R_max, 2F), times scale. Returns (e, 2F) fp32."""
    return group_sums(d_gate_up, offs).mul_(scale)


# ── a pass as a record ────────────────────────────────────────────────────────────────────────────────────────────

PLAN = tuple(field.name for field in dataclasses.fields(RoutingPlan) if field.name != "alignment")
"""Names of the tensors of a RoutingPlan."""


def pass_of(dispatcher: TokenDispatcher, function: Callable[..., Any], *, whole: bool = True) -> Callable[..., Any]:
    """Bind this dispatcher to `forward_pass` or `backward_pass`. If the dispatcher allows it, the pass is replayed as
    one CUDA graph. whole: False if the pass leaves out a gradient that forward prepared, which is not replayed so."""
    if not (dispatcher.in_graphs and whole):
        return functools.partial(function, dispatcher=dispatcher)
    if function not in dispatcher.passes:
        dispatcher.passes[function] = _Pass(function, dispatcher)
    return dispatcher.passes[function]


class _Pass(Replayed):
    """A replayed pass, with two exchanges. The dispatcher owns the pass, which refers to the dispatcher only weakly:
    so both are freed with the dispatcher's last user, without a garbage collection."""

    def __init__(self, function: Callable[..., Any], dispatcher: TokenDispatcher) -> None:
        super().__init__(function)
        self._dispatcher: TokenDispatcher = weakref.proxy(dispatcher)
        self._is_forward = function is forward_pass
        # Replayed.direct would join MXParts to MXTensors. The functions of the pass do that themselves.
        self.direct = functools.partial(function, dispatcher=self._dispatcher)  # type: ignore[method-assign]

    def state(self) -> Hashable | None:
        return self._dispatcher.graph_state()

    def moving(self, **how: Any) -> tuple[int, ...]:
        if how.get("room") is None:
            return ()
        if self._is_forward:  # x, weights, expert_ids
            return 0, 1, 2
        # d_out, x if rows are made again, and the routing's expert_ids, which follow the plan's tensors
        return (0, 1, 2 + len(PLAN)) if how.get("rows_again") else (0, 1 + len(PLAN))

    def launched(self) -> None:
        self._dispatcher.launched(2)


def _under(index: Tensor | None, rows: Any) -> Any:
    """Quantized `rows` with this row index. Plain rows are returned unchanged."""
    return rows._replace(row_index=index) if type(rows) is MXParts else rows
