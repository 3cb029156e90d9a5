"""How each recipe stores the layer's tensors: rows that are sent, weights, and the operands of SwiGLU.

    x (T, D), d_out     -> payload: bytes that the dispatcher sends
    slots (S, .)        -> rows (R_max, D), see `Wire.rows`
    weights (e, N, K)   -> quantized rowwise for forward, colwise for dgrad
    gate_up (R_max, 2F) -> h (R_max, F), and gate_up as saved for backward

T tokens of this rank, S slots (rows of the receive buffer), R_max maximum rows of this rank's experts, padding
included, D model dim, F hidden dim, e local experts, r LoRA's rank.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep import quant
from mxep.comms import RoutingPlan, gather_rows, make_plan
from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.backends.base import is_transposed
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.quantize_once import SavedWeight, Weight, is_held, remembered, rowwise_and_saved
from mxep.quant import MXFormat, MXParts, MXTensor, SwiGLU
from mxep.runtime.bundle import Bundle, Operands
from mxep.runtime.replay import replayed

from .dispatchers.base import Payload, TokenDispatcher
from .lora import LoRAWeights, add_lora


@replayed
def pack(x: Tensor, *, recipe: Recipe, fmt: MXFormat, room: int | None = None) -> Payload:
    """Convert x (T, D) to the bytes to send, quantized to `fmt` if the recipe quantizes.

    Returns uint8 tensors: (T, 2 * D) for unquantized bf16; qdata (T, D) and scales (T, D / block size) if quantized.
    room: if given, the number of rows to return, of which the first T are valid.
    """
    rows = recipe.quantize_rows(x, fmt, room)
    return (_bytes(rows.qdata), _bytes(rows.scale)) if isinstance(rows, MXTensor) else (_bytes(rows),)


def _bytes(x: Tensor) -> Tensor:
    # view(uint8) needs stride 1. contiguous() does not ensure that: an empty tensor with any strides is contiguous.
    x = x.contiguous() if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


@dataclass(frozen=True)
class Wire(Bundle):
    """How to read a payload.

    Attributes:
        dtype: dtype of the rows before quantization.
        qdata: dtype of the qdata; None if rows are unquantized.
        block_size: elements per scale; unused if rows are unquantized.
    """

    dtype: torch.dtype
    qdata: torch.dtype | None = None
    block_size: int = 0

    @staticmethod
    def of(x: Tensor, recipe: Recipe, fmt: MXFormat) -> "Wire":
        """The Wire of `pack`'s result for x (T, D)."""
        if recipe.scaling == "none":
            return Wire(x.dtype)
        return Wire(x.dtype, fmt.dtype, recipe.block_size or x.shape[1])

    def rows(self, slots: Payload, row_slot: Tensor, offs: Tensor, *, copy: bool) -> Tensor:
        """Return the plan's rows (R_max, D) in expert-major order, with zero padding, from slots (S, .).

        Unquantized rows are gathered. Quantized rows stay in their slots and get a row index.

        row_slot, offs: the plan's. copy: True if rows are needed after the next exchange, which may overwrite the
        slots. Quantized slots are then copied, or their rows gathered if `keeps_rows`.
        """
        if self.qdata is None:
            (gathered,) = gather_rows(slots, row_slot, offs)
            return gathered.view(self.dtype)
        index: Tensor | None = row_slot
        if keeps_rows(len(row_slot), len(slots[0]), copied=copy):
            slots, index = gather_rows(slots, row_slot, offs), None
        elif copy:
            slots = gather_rows(slots, None)
        qdata, scale = slots
        return MXTensor.from_qdata_and_scales(
            qdata.view(self.qdata),
            scale.view(torch.float8_e8m0fnu),
            self.dtype,
            block_size=self.block_size,
            row_index=index,
        )


def keeps_rows(max_rows: int, num_slots: int, *, copied: bool) -> bool:
    """True if forward saves gathered quantized rows, False if it saves slots and a row index.

    Gathering pays if the slots must be copied anyway (`copied`), and there are no more rows than slots (top-1).
    """
    return copied and max_rows <= num_slots


PLAIN = SwiGLU()
AnyWeight = Weight | FrozenWeight


@dataclass(frozen=True)
class LayerConfig(Bundle):
    """How a layer computes. The backend can run on the layer's device. The activation is applied to gate and up."""

    recipe: Recipe
    backend: Backend
    activation: SwiGLU  # no default, because Dynamo of torch 2.11 cannot read one


class Needs(NamedTuple):
    """A set of parameters, such as those that need gradients: True for each that is in the set."""

    gate_up_proj: bool = False
    down_proj: bool = False
    gate_up_bias: bool = False
    lora: bool = False

    def keep_rows(self, rows_again: bool, recomputes: bool) -> bool:
        """True if forward must save rows: for the gradients of gate_up_proj and LoRA, or to recompute gate_up.

        rows_again: result of `makes_rows_again`. recomputes: True if backward recomputes a part of gate_up.
        """
        return (self.gate_up_proj or self.lora or recomputes) and not rows_again


NONE = Needs()


def makes_rows_again(dispatcher: TokenDispatcher, recipe: Recipe, needs: Needs | None, top_k: int) -> bool:
    """True if backward makes rows again from x for the gradient of gate_up_proj, so that forward saves no rows.

    This works on one rank, where the slots are the tokens. Saving x costs no memory, because the router saves x, too.
    The exception is top-1 with a quantizing recipe: there forward saves the quantized slots, because x may be a
    temporary tensor (``score_before_experts``), and is twice as large.
    """
    if needs is None or needs.lora or not needs.gate_up_proj:
        return False
    return dispatcher.slots_are_tokens and (recipe.scaling == "none" or top_k > 1)


@dataclass(frozen=True)
class Saved(Operands):
    """Tensors that forward saves for backward, besides the weights.

    Attributes:
        rows: None if not `Needs.keep_rows`. If the recipe quantizes: slots (S, D), or rows (R_max, D) if `keeps_rows`.
            Otherwise: rows (R_max, D), or slots (S, D) if only a part of gate_up is saved.
        gate_up: (R_max, 2F), with one scale per row if the recipe saves it in FP8. With a capacity of
            overflow="recompute" it has only the first `TokenDispatcher.kept_rows` rows.
        gate_up_columns, down_columns: see `saved_columns`.
        gate_up_inner, down_inner: (R_max, r), `add_lora`'s results, if LoRA has gradients.
    """

    rows: Any
    gate_up: Any
    gate_up_columns: Any
    down_columns: Any
    gate_up_inner: Tensor | None = None
    down_inner: Tensor | None = None

    def lacks_rows(self, plan: RoutingPlan) -> bool:
        """True if only the first rows of gate_up were saved, so that backward recomputes the rest."""
        return len(self.gate_up.qdata if isinstance(self.gate_up, MXParts) else self.gate_up) < plan.max_rows


@replayed
def rows_of_tokens(x: Tensor, row_slot: Tensor, offs: Tensor, *, config: LayerConfig, room: int | None) -> Any:
    """Recompute forward's rows (R_max, D). x: the tokens (T, D), if slots are tokens; or unquantized slots (S, D)."""
    payload = pack.function(x, recipe=config.recipe, fmt=config.recipe.fmt, room=room)
    return Wire.of(x, config.recipe, config.recipe.fmt).rows(payload, row_slot, offs, copy=False)


def fake_plan(expert_ids: Tensor, weights: Tensor, dispatcher: TokenDispatcher, config: LayerConfig) -> RoutingPlan:
    """The plan that `dispatch` would make, with fake tensors."""
    sizes = dispatcher.static_tokens(expert_ids.shape[0])
    assert sizes is not None
    top_k = expert_ids.shape[1]
    plan = make_plan(
        expert_ids.new_empty(*sizes, top_k),
        weights.new_empty(*sizes, top_k),
        expert_ids.new_empty(sizes[0]),
        first_expert=0,
        num_local_experts=dispatcher.num_local_experts,
        alignment=config.recipe.group_alignment,
        capacity=dispatcher.capacity,
        num_experts=dispatcher.num_experts,
    )
    return replace(plan, dispatch=expert_ids.new_empty(1))


def fake_saved(
    x: Tensor,
    plan: RoutingPlan,
    weights: tuple[AnyWeight, Tensor | FrozenWeight],
    config: LayerConfig,
    keep_rows: bool,
    *,
    kept_rows: int | None = None,
    copied: bool,
    lora: LoRAWeights | None = None,
) -> Saved:
    """The tensors that forward would save, as fake tensors.

    kept_rows: number of saved rows of gate_up, default all. copied: True if slots are copied because the dispatcher
    `borrows` them. lora: None if LoRA has no gradients.
    """
    recipe, dtype, (dim, hidden_dim) = config.recipe, x.dtype, weights[1].shape[1:]
    kept_rows = plan.max_rows if kept_rows is None else kept_rows
    slots = not keeps_rows(plan.max_rows, plan.slot_rows.shape[0], copied=copied)
    slots = kept_rows < plan.max_rows if recipe.scaling == "none" else slots
    num_rows, wide = plan.slot_rows.shape[0] if slots else plan.max_rows, 2 * hidden_dim

    def quantized(rows: int, width: int, block: int) -> MXParts:
        scale = x.new_empty(rows, width // block, dtype=torch.float8_e8m0fnu)
        return MXParts(x.new_empty(rows, width, dtype=recipe.fmt.dtype), scale, None, -1, block, dtype)

    rows: Any = None
    if keep_rows:
        plain = recipe.scaling == "none"
        rows = x.new_empty(num_rows, dim) if plain else quantized(num_rows, dim, recipe.block_size or dim)
    fp8 = recipe.saved_gate_up == "fp8"
    gate_up = quantized(kept_rows, wide, wide) if fp8 else x.new_empty(kept_rows, wide)
    later = (rowwise_and_saved(w, recipe, config.backend, dgrad=True)[1] for w in weights)
    columns = (w.weight if isinstance(w.weight, MXTensor) else w.amax for w in later)
    inner = () if lora is None else (x.new_empty(plan.max_rows, A.shape[1]) for A in (lora.gate_up_A, lora.down_A))
    return Saved(rows, gate_up, *columns, *inner)


def num_parts(recipe: Recipe, keep_rows: bool) -> tuple[int, int]:
    """(number of tensors in `Saved.rows`, number of tensors in `Saved.gate_up`)."""
    return keep_rows * (1 if recipe.scaling == "none" else 2), 2 if recipe.saved_gate_up == "fp8" else 1


def join_saved(
    tensors: list[Tensor],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    recipe: Recipe,
    *,
    keep_rows: bool,
    lora: bool,
) -> Saved:
    """Make a `Saved` of its tensors. dtype: dtype of x. lora: True if LoRA has gradients."""
    inner = [tensors.pop() for _ in range(2 * lora)][::-1]
    of_rows, of_gate_up = num_parts(recipe, keep_rows)
    rows, gate_up, columns = tensors[:of_rows], tensors[of_rows:][:of_gate_up], tensors[of_rows + of_gate_up :]
    half = len(columns) // 2
    of_columns = (_joined(part, (-2, -1), weight_dtype) for part in (columns[:half], columns[half:]))
    return Saved(_joined(rows, -1, dtype), _joined(gate_up, -1, dtype), *of_columns, *inner)


def _joined(parts: list[Tensor], axis: Any, dtype: torch.dtype) -> Any:
    if len(parts) < 2:
        return parts[0] if parts else None
    qdata, scale = parts
    return MXParts(qdata, scale, None, axis, qdata.shape[-1] // scale.shape[-1], dtype)


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RowwiseWeights(Bundle):
    """Both weights quantized for forward, and for each the amax of its columns, (e, D) or (e, F), or None."""

    gate_up: Any
    down: Any
    gate_up_amax: Tensor | None
    down_amax: Tensor | None


@dataclass(frozen=True)
class ColwiseWeights(Bundle):
    """Both weights quantized for dgrad. gate_up_rowwise: gate_up_proj quantized for forward, to recompute gate_up."""

    gate_up: Any
    down: Any
    gate_up_rowwise: Any = None


@replayed
def quantize_rowwise(
    gate_up_proj: AnyWeight, down_proj: AnyWeight, *, config: LayerConfig, dgrad: bool
) -> RowwiseWeights:
    """Quantize both weights for forward. dgrad: True if backward will call `quantize_colwise`."""
    gate_up, gate_up_saved = rowwise_and_saved(gate_up_proj, config.recipe, config.backend, dgrad=dgrad)
    down, down_saved = rowwise_and_saved(down_proj, config.recipe, config.backend, dgrad=dgrad)
    return RowwiseWeights(gate_up, down, gate_up_saved.amax, down_saved.amax)


@replayed
def quantize_colwise(
    gate_up_proj: SavedWeight, down_proj: SavedWeight, *, config: LayerConfig, recompute: bool = False
) -> ColwiseWeights:
    """Quantize both weights for dgrad. Weights in 2-D blocks are used as they are.

    recompute: True to quantize gate_up_proj for forward, too.
    """
    down, rowwise = down_proj.colwise(config.recipe, config.backend), None
    if recompute:
        rowwise = gate_up_proj.weight
        if not isinstance(rowwise, MXTensor):
            rowwise, _ = rowwise_and_saved(rowwise, config.recipe, config.backend, dgrad=False)
    return ColwiseWeights(gate_up_proj.colwise(config.recipe, config.backend), down, rowwise)


def held_rowwise(
    gate_up_proj: AnyWeight, down_proj: AnyWeight, config: LayerConfig, *, dgrad: bool
) -> RowwiseWeights | None:
    """Both weights quantized for forward, if `quantize_weights_once` holds them; else None."""
    if not is_held(gate_up_proj, config.recipe):
        return None
    make = functools.partial(quantize_rowwise.direct, gate_up_proj, down_proj, config=config, dgrad=dgrad)
    return remembered(make, (gate_up_proj, down_proj), "rowwise", config, dgrad)  # type: ignore[no-any-return,arg-type]


def held_colwise(
    gate_up_proj: AnyWeight, down_proj: AnyWeight, saved: Saved, config: LayerConfig, *, recompute: bool = False
) -> ColwiseWeights | None:
    """Both weights quantized for dgrad, if `quantize_weights_once` holds them; else None."""
    if not is_held(gate_up_proj, config.recipe):
        return None

    def make() -> ColwiseWeights:
        both = saved_weights(gate_up_proj, down_proj, saved)
        return quantize_colwise.direct(*both, config=config, recompute=recompute)  # type: ignore[no-any-return]

    if isinstance(saved.gate_up_columns, MXParts | MXTensor):
        return make()  # 2-D blocks: `saved` has them, maybe in memory that compiled code uses again afterwards
    return remembered(make, (gate_up_proj, down_proj), "colwise", config, recompute)  # type: ignore[no-any-return,arg-type]


class GradientForm(NamedTuple):
    """Dtype and memory layout of a weight's gradient (e, N, K).

    halves: True if gate and up are two weights; their gradients are one tensor (2, e, F, D).
    transposed: True if the gradient lies (e, K, N) in memory, because the weight does.
    """

    dtype: torch.dtype
    halves: bool
    transposed: bool

    @classmethod
    def of(cls, w: AnyWeight) -> "GradientForm":
        if type(w) is tuple:
            return cls(w[0].dtype, True, False)
        return cls(w.dtype, False, isinstance(w, Tensor) and is_transposed(w))  # type: ignore[union-attr]


def saved_columns(weights: RowwiseWeights) -> tuple[Any, Any]:
    """For each of the two weights, what forward saves to make `quantize_colwise` cheaper.

    It is the weight quantized in 2-D blocks, or the amax of its columns, (e, D) or (e, F) fp32, or None.
    """
    pairs = (weights.gate_up, weights.gate_up_amax), (weights.down, weights.down_amax)
    gate_up, down = (w if getattr(w, "axis", None) == (-2, -1) else amax for w, amax in pairs)
    return gate_up, down


def saved_weights(gate_up_proj: AnyWeight, down_proj: AnyWeight, saved: Saved) -> tuple[SavedWeight, SavedWeight]:
    """The arguments of `quantize_colwise`: each weight with the amax of its columns, or quantized in 2-D blocks."""
    pairs = (gate_up_proj, saved.gate_up_columns), (down_proj, saved.down_columns)
    gate_up, down = (SavedWeight(x, None) if isinstance(x, MXParts | MXTensor) else SavedWeight(w, x) for w, x in pairs)
    return gate_up, down


# ── gate_up, all of it or in two parts ────────────────────────────────────────────────────────────────────────────


class GateUp(NamedTuple):
    """The GEMM that computes gate_up (R_max, 2F), with all operands but rows. w: gate_up_proj, expanded if frozen."""

    w: Any
    bias: Tensor | None
    lora: LoRAWeights | None
    config: LayerConfig
    dtype: torch.dtype

    def first_rows(self, rows: Tensor, offs: Tensor, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute gate_up of all rows, and split it after `count` rows.

        Returns (gate_up of the first rows, gate_up of the rest or None, LoRA's inner (R_max, r) or None).
        """
        if count == len(rows):
            gate_up, inner = self._of(rows, offs)
            return gate_up, None, inner
        before, behind = quant.split_ends(offs, count)
        (gate_up, inner), (rest, others) = self._of(rows[:count], before), self._of(rows[count:], behind)
        return gate_up, rest, None if inner is None or others is None else torch.cat((inner, others))

    def last_rows(self, rows: Tensor, offs: Tensor, first: int) -> Tensor:
        """Compute gate_up of the rows from `first` on, and convert it with `saved_gate_up`."""
        gate_up, _ = self._of(rows[first:], quant.split_ends(offs, first)[1])
        return saved_gate_up(gate_up, self.config.recipe)

    def _of(self, rows: Tensor, offs: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up = self.config.backend.forward(rows, self.w, offs, bias=self.bias, out_dtype=self.dtype)
        if self.lora is None:
            return gate_up, None
        return gate_up, add_lora(gate_up, rows, self.lora.gate_up_A, self.lora.gate_up_B, offs, scale=self.lora.scale)


# ── SwiGLU in the recipe's formats ────────────────────────────────────────────────────────────────────────────────


def saved_gate_up(gate_up: Tensor, recipe: Recipe) -> Tensor:
    """Convert gate_up (R, 2F) to what is saved for backward: unchanged, or quantized with one scale per row.

    Rows past the valid ones are unspecified.
    """
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
    rest: Tensor | None = None,
) -> Tensor:
    """Compute h = SwiGLU(gate_up) * row_weight, and quantize it if the recipe does. Returns h (R_max, F).

    folded: True to quantize with one scale per row although the recipe is MX, for a backend that `wants_rowwise`.
    rest: the last rows of gate_up, if they are a separate tensor.
    """
    if recipe.scaling == "none":
        return quant.swiglu(gate_up, row_weight, offs=offs, rest=rest, activation=activation)
    options: dict[str, Any] = {"fmt": recipe.fmt, "mode": recipe.mode, "block_size": recipe.block_size}
    options |= {"folded": folded and recipe.scaling == "mx", "activation": activation}
    return quant.swiglu_quantize(gate_up, row_weight, offs=offs, rest=rest, **options)


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
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Backward of :func:`swiglu_forward`.

    Args:
        gate_up: from `saved_gate_up`.
        overwrite: True if d_h may be overwritten.
        with_h: True to recompute h.
        rest: the last rows of gate_up, if they are a separate tensor.

    Returns:
        d_gate_up: (R_max, 2F), quantized as the recipe quantizes gradients.
        d_row_weight: (R_max,).
        h: with the bits of forward's h if with_h, else None.
    """
    if recipe.scaling == "none":
        how: dict[str, Any] = {"offs": offs, "with_h": with_h, "rest": rest, "activation": activation}
        return quant.swiglu_backward(d_h, gate_up, row_weight, **how)
    options: dict[str, Any] = {"fmt": recipe.grad_fmt, "mode": recipe.mode, "block_size": recipe.block_size}
    options |= {"activation": activation, "folded": folded and recipe.scaling == "mx"}
    options |= {"h_fmt": recipe.fmt if with_h else None, "rest": rest}
    return quant.swiglu_backward_quantize(d_h, gate_up, row_weight, offs=offs, overwrite=overwrite, **options)
