"""The experts' gated MLP over expert-major rows, its weights, and its gradients. `layer.py` calls it between exchanges.

    forward                                     backward
    rows (R_max, D)                             d_y (R_max, D)
      GEMM gate_up_proj  -> gate_up (R_max, 2F)   GEMM down_proj     -> d_h (R_max, F)
      SwiGLU * row_weight, quantize -> h          SwiGLU backward    -> d_gate_up, and h again
      GEMM down_proj     -> y (R_max, D)          wgrad d_y^T h      -> d_down_proj
                                                  GEMM gate_up_proj  -> d_rows (R_max, D)
                                                wgrad d_gate_up^T rows -> d_gate_up_proj

h is not kept for backward: the backward kernel of SwiGLU reads gate_up anyway, and writes h again. Functions release
tensors after use, so that later allocations reuse their memory.

R_max rows, S slots, D model dim, F hidden dim, e local experts.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep import quant
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.frozen import FrozenWeight, expanded
from mxep.gemm.quantize_once import SavedWeight, rowwise_and_saved
from mxep.gemm.several import Weight
from mxep.quant import MXParts, MXTensor, SwiGLU, group_sums
from mxep.runtime.bundle import Bundle, Operands
from mxep.runtime.replay import replayed

from .dispatchers.base import Payload
from .lora import LoRAGradients, LoRAWeights, add_lora, gradient_of_A, lora_backward
from .wire import Wire

PLAIN = SwiGLU()
AnyWeight = Weight | FrozenWeight


@dataclass(frozen=True)
class LayerConfig(Bundle):
    """How a layer computes. backend: one that can run where its tensors are. activation: of gate and up."""

    recipe: Recipe
    backend: Backend
    activation: SwiGLU  # without a default, which Dynamo of torch 2.11 cannot read


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


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RowwiseWeights(Bundle):
    """Both weights as forward multiplies them, and the amax (e, .) of their columns or None."""

    gate_up: Any
    down: Any
    gate_up_amax: Tensor | None
    down_amax: Tensor | None


@dataclass(frozen=True)
class ColwiseWeights(Bundle):
    """Both weights as dgrad multiplies them."""

    gate_up: Any
    down: Any


@replayed
def quantize_rowwise(
    gate_up_proj: AnyWeight, down_proj: AnyWeight, *, config: LayerConfig, dgrad: bool
) -> RowwiseWeights:
    """The weights for forward. dgrad: `quantize_colwise` will follow."""
    gate_up, gate_up_saved = rowwise_and_saved(gate_up_proj, config.recipe, config.backend, dgrad=dgrad)
    down, down_saved = rowwise_and_saved(down_proj, config.recipe, config.backend, dgrad=dgrad)
    return RowwiseWeights(gate_up, down, gate_up_saved.amax, down_saved.amax)


@replayed
def quantize_colwise(gate_up_proj: SavedWeight, down_proj: SavedWeight, *, config: LayerConfig) -> ColwiseWeights:
    """The weights for dgrad. 2-D blocks serve as they are."""
    down = down_proj.colwise(config.recipe, config.backend)
    return ColwiseWeights(gate_up_proj.colwise(config.recipe, config.backend), down)


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


# ── SwiGLU in the recipe's formats ────────────────────────────────────────────────────────────────────────────────


def saved_gate_up(gate_up: Tensor, recipe: Recipe) -> Tensor:
    """gate_up (R_max, 2F) as it is kept for backward: as it is, or with one scale a row. Rows past the valid ones may
    hold anything. Each row is quantized by itself."""
    if recipe.saved_gate_up == "unquantized":
        return gate_up
    return quant.quantize(gate_up, fmt=recipe.fmt, mode=recipe.mode, block_size=None)


def swiglu_forward(
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    recipe: Recipe,
    activation: SwiGLU = PLAIN,
    *,
    folded: bool = False,
) -> Tensor:
    """h (R_max, F), times row_weight, as the recipe quantizes it. folded: MX rows with one scale each, for a backend
    that `wants_rowwise`."""
    if recipe.scaling == "none":
        return quant.swiglu(gate_up, row_weight, offs=offs, activation=activation)
    options: dict[str, Any] = {"fmt": recipe.fmt, "mode": recipe.mode, "block_size": recipe.block_size}
    folded = folded and recipe.scaling == "mx"
    return quant.swiglu_quantize(gate_up, row_weight, offs=offs, folded=folded, activation=activation, **options)


def swiglu_backward(
    d_h: Tensor,
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    recipe: Recipe,
    activation: SwiGLU = PLAIN,
    *,
    folded: bool = False,
    overwrite: bool = False,
    with_h: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(d_gate_up (R_max, 2F) as the recipe quantizes gradients, d_row_weight (R_max,), h) of :func:`swiglu_forward`.

    gate_up: of `saved_gate_up`. overwrite: d_h is not needed any more. with_h: h is what :func:`swiglu_forward` returns
    of this gate_up, bit for bit, else None. It is not kept since forward: this kernel reads gate_up anyway.
    """
    if recipe.scaling == "none":
        return quant.swiglu_backward(d_h, gate_up, row_weight, offs=offs, with_h=with_h, activation=activation)
    options: dict[str, Any] = {"fmt": recipe.grad_fmt, "mode": recipe.mode, "block_size": recipe.block_size}
    options |= {"activation": activation, "folded": folded and recipe.scaling == "mx"}
    options |= {"h_fmt": recipe.fmt if with_h else None}
    return quant.swiglu_backward_quantize(d_h, gate_up, row_weight, offs=offs, overwrite=overwrite, **options)
