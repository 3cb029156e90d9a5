"""What a layer computes between its exchanges: functions of lists, which `mxep.runtime.replay` replays.

    pack_rows        x or d_out (T, D)            -> the parts of its rows
    rowwise_weights  gate_up_proj, down_proj      -> each as forward wants it, and its amax
    mlp_forward      slots, plan, weights         -> y, and what backward needs
    colwise_weights  gate_up_proj, down_proj, ... -> each as dgrad wants it
    mlp_backward     slots of d_out, plan, ...    -> d_rows, d_row_weight, d_gate_up, the gradient of down_proj
    wgrad            dy, a, offs                  -> the gradient of a weight
    bias_gradient    d_gate_up, offs              -> the gradient of gate_up's bias

They own their lists, and drop what they have used, so that its memory serves what comes next. h is not kept: the
backward kernel of SwiGLU, which reads gate_up anyway, writes it again for the gradient of down_proj.
R_max rows, D model dim, F hidden dim, e local experts.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxep.gemm import Recipe
from mxep.gemm.backends import Backend
from mxep.gemm.quantize_once import SavedWeight, rowwise_and_saved
from mxep.quant import SwiGLU, group_sums
from mxep.runtime.replay import Tensors, replayed

from .functional import saved_gate_up, swiglu_backward, swiglu_forward
from .wire_format import WireFormat, pack

pack_rows = replayed(pack)


@replayed
def rowwise_weights(tensors: Tensors, recipe: Recipe, backend: Backend, dgrad: bool) -> Tensors:
    """[gate_up_proj, its other half or None, down_proj] -> [rowwise, amax] of both. dgrad: colwise is wanted later."""
    weights = whole(*tensors[:2]), tensors[2]
    made = (rowwise_and_saved(w, recipe, backend, dgrad=dgrad) for w in weights)
    return [part for rowwise, saved in made for part in (rowwise, saved.amax)]


@replayed
def colwise_weights(tensors: Tensors, recipe: Recipe, backend: Backend) -> Tensors:
    """[down_proj, its amax, gate_up_proj, its other half or None, its amax] -> [colwise] of both.

    A weight may be 2-D blocks, which serve as they are.
    """
    down_proj, amax2, *gate_up_proj, amax13 = tensors
    weights = SavedWeight(down_proj, amax2), SavedWeight(whole(*gate_up_proj), amax13)
    return [saved.colwise(recipe, backend) for saved in weights]


def whole(w: Any, other: Tensor | None) -> Any:
    """The weight of both halves, or itself without another."""
    return w if other is None else (w, other)


@replayed
def mlp_forward(
    tensors: Tensors,
    wire: WireFormat,
    recipe: Recipe,
    backend: Backend,
    copy: bool,
    keep: tuple[bool, bool],
    activation: SwiGLU,
) -> Tensors:
    """[row_slot, row_weight, offs, w13, bias of gate_up or None, w2, *slots] -> [y (R_max, D), rows, gate_up as
    `saved_gate_up` has it]: those to keep, or None. keep: whether rows are, gate_up is."""
    row_slot, row_weight, offs, w13, bias, w2, *slots = tensors
    rows = wire.rows(slots, row_slot, offs, copy=copy)
    gate_up = backend.forward(rows, w13, offs, bias=bias, out_dtype=wire.dtype)
    h = swiglu_forward(gate_up, row_weight, offs, recipe, activation, folded=backend.wants_rowwise)
    kept = saved_gate_up(gate_up, recipe) if keep[1] else None
    del gate_up
    y = backend.forward(h, w2, offs, bias=None, out_dtype=wire.dtype)
    return [y, rows if keep[0] else None, kept]


@partial(replayed, donated=range(3, 5))
def mlp_backward(
    tensors: Tensors,
    wire: WireFormat,
    recipe: Recipe,
    backend: Backend,
    with_h: bool,
    later: bool,
    scale: float,
    dtype: torch.dtype,
    copy: bool,
    activation: SwiGLU,
) -> Tensors:
    """[row_slot, row_weight, offs, gate_up, w2, w13, main_grad of down_proj, *slots of d_out] -> [d_rows (R_max, D),
    d_row_weight (R_max,), d_gate_up (R_max, 2F), the gradient of down_proj, d_y, h].

    with_h: down_proj has a gradient. later: it is not wanted now, but d_y and h are, else they are None.
    """
    row_slot, row_weight, offs, gate_up, w2, w13, main_grad, *slots = tensors
    tensors.clear()
    d_y = wire.rows(slots, row_slot, offs, copy=copy)
    del slots
    d_h = backend.dgrad(d_y, w2, offs, out_dtype=wire.dtype)
    del w2
    options = {"folded": backend.wants_rowwise, "overwrite": True, "with_h": with_h}
    d_gate_up, d_row_weight, h = swiglu_backward(d_h, gate_up, row_weight, offs, recipe, activation, **options)
    del d_h, gate_up
    pending, d_down_proj = [d_y, h] if later else [None, None], None
    if with_h and not later:  # d_y is borrowed until the next exchange
        operands = [d_y, h, offs, main_grad]
        del d_y, h
        (d_down_proj,) = wgrad.function(operands, recipe, backend, scale, dtype)
    else:
        del d_y, h
    d_rows = backend.dgrad(d_gate_up, w13, offs, out_dtype=wire.dtype)
    return [d_rows, d_row_weight, d_gate_up, d_down_proj, *pending]


@partial(replayed, donated=range(6))
def wgrad(
    tensors: Tensors, recipe: Recipe, backend: Backend, scale: float, dtype: torch.dtype, halves: bool = False
) -> Tensors:
    """[dy, a, offs, main_grad] -> [the gradient, or None where it was added to main_grad].

    halves: it is (2, e, F, D), both halves' gradients, and there is no main_grad.
    """
    dy, a, offs, main_grad = tensors
    tensors.clear()
    shape = 2, len(offs), dy.shape[1] // 2, a.shape[1]
    operands = backend.prepare_wgrad(dy, a, offs, recipe)
    del dy, a
    both = offs.new_empty(shape, dtype=dtype) if halves else None
    how: dict[str, Any] = {"out_dtype": dtype, "scale": scale, "accumulate_into": main_grad, "halves": both}
    gradient: Tensor | None = backend.wgrad(operands, offs, **how)
    return [gradient if both is None else both]


@replayed
def bias_gradient(tensors: Tensors, scale: float) -> Tensors:
    """[d_gate_up (R_max, 2F), offs] -> [scale * the sum of each expert's rows, (e, 2F) fp32]."""
    d_gate_up, offs = tensors
    return [group_sums(d_gate_up, offs).mul_(scale)]
