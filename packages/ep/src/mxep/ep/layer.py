"""What a layer leaves to its backward, as one node of autograd: of dispatch, expert MLP and combine together.

What that buys over the composed functions of `functional.py`, which it equals bit for bit:

    SwiGLU and its backward fold what they quantize, for a backend that folds: one pass less over h and d_gate_up
    d_out's slots are used where they lie, before the next exchange
    weights are quantized while rows are under way, each way as it is needed: nothing of them is kept for backward
    dx is combined while the gradient of gate_up_proj computes, between nodes

Weight gradients that a backward does not want are left to a later one, which exchanges nothing and computes them alone.

T tokens of this rank, K experts a token, D model dim, F hidden dim, R_max rows that fit, e local experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxep.gemm.partial_backward import SavedOperands, graph_is_retained, is_wanted
from mxep.runtime.lengths import first_rows

from .dispatchers.base import Routing
from .passes import PLAN, LayerConfig, Pending, layer_backward, tensors_of_plan
from .saved import Needs
from .shares import Share, local_tensor
from .steps import bias_gradient, wgrad


def needs_of(each: Sequence[bool]) -> Needs:
    """Of gate_up_proj, whole or in halves, down_proj and gate_up's bias: of `Layer`'s first six arguments."""
    return each[2] or each[4], each[3], each[5]


class Layer(torch.autograd.Function):
    """The node of a forward that was: `layer_forward` has made the routing, and [out, *plan, *saved]. Gives out."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        up_proj: Tensor | None,
        gate_up_bias: Tensor | None,
        config: LayerConfig,
        routing: Routing,
        made: list[Tensor],
    ) -> Tensor:
        out, saved = made[0], made[1 + len(PLAN) :]
        parameters = gate_up_proj, down_proj, up_proj, gate_up_bias
        gate, down, up, _ = (None if each is None else local_tensor(each) for each in parameters)
        ctx.save_for_backward(gate, up, down, *saved)
        ctx.shares = [None if each is None else Share(each) for each in parameters]
        ctx.config, ctx.routing, ctx.saved_operands = config, routing, None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        config, routing, halves = ctx.config, ctx.routing, ctx.shares[2] is not None
        # Only tensors count there, and up_proj is none where gate_up_proj is whole.
        last = 5 if halves else 4
        asked = [need and is_wanted(ctx, min(i, last)) for i, need in enumerate(ctx.needs_input_grad[:6])]
        wanted, offs = needs_of(asked), routing.plan.offs
        kept, retained = ctx.saved_operands, graph_is_retained()
        if not retained:
            ctx.saved_operands = None
        if kept is not None and not (asked[0] or asked[1]) and kept.fits(d_out):
            pending: Pending = kept.operands
            # What the bias's gradient sums is an operand of gate_up_proj's.
            if all(i in pending for i in (0, 1) if wanted[i]) and (0 in pending or not wanted[2]):
                grads = list[Tensor | None]((None, None, None))
                if wanted[2]:
                    (grads[2],) = bias_gradient([pending[0][0], offs], config.wgrad_scale)
                for i, operands in pending.items():
                    if wanted[i]:
                        tensors = [*operands, offs, config.main_grads[i]]
                        dtype, in_two = ctx.shares[i].dtype, halves and i == 0
                        (grads[i],) = wgrad(tensors, config.recipe, config.backend, config.wgrad_scale, dtype, in_two)
                return None, None, *_of_parameters(ctx, grads)
        gate, up, down, *saved = ctx.saved_tensors
        d_rows = d_out if routing.room is None else d_out.contiguous()
        tensors = [d_rows, routing.expert_ids, gate, up, down, *config.main_grads, *tensors_of_plan(routing.plan)]
        tensors += saved
        del saved, d_rows
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained, they go as they have been used
        left: Pending | None = {} if retained else None
        for share in ctx.shares[:3]:  # the bias is not read
            if share is not None:
                share.check()
        how = *config.of_passes, config.wgrad_scale, needs_of(ctx.needs_input_grad), routing.room, routing
        with config.dispatcher.watched():
            _, (dx, d_weights, *grads) = layer_backward(tensors, *how, wanted=wanted, left=left)
        dx, d_weights = (first_rows(grad, len(d_out)) for grad in (dx, d_weights))
        if left:
            ctx.saved_operands = SavedOperands.of(left, d_out)
        return dx, d_weights, *_of_parameters(ctx, grads)


def _of_parameters(ctx: Any, grads: list[Any]) -> tuple[Tensor | None, ...]:
    """What `Layer.backward` returns after dx and d_weights."""
    gate, down, bias = grads
    up = None
    if gate is not None and ctx.shares[2] is not None:
        gate, up = gate
    if bias is not None:
        bias = bias.to(ctx.shares[3].dtype)
    found = zip(ctx.shares, (gate, down, up, bias))
    return *(None if share is None else share.gradient(grad) for share, grad in found), None, None, None
