"""The experts' part of a layer as one autograd function: dispatch, expert MLP and combine, forward and backward.

What that buys over the composed functions of `functional.py`, which it equals bit for bit:

    SwiGLU and its backward fold what they quantize, for a backend that folds: one pass less over h and d_gate_up
    d_out's slots are used where they lie, before the next exchange
    weights are quantized while rows are under way, each way as it is needed: nothing of them is kept for backward
    dx is combined while the gradient of gate_up_proj computes

Weight gradients that a backward does not want are left to a later one, which exchanges nothing and computes them alone.

T tokens of this rank, K experts a token, D model dim, F hidden dim, R_max rows that fit, e local experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxep.gemm.functional import between_graphs
from mxep.gemm.partial_backward import SavedOperands, graph_is_retained, is_wanted
from mxep.gemm.several import Weight, tensors_of, weight_of

from .checks import check_weights
from .compiled import compiled_layer, unsupported_reason
from .dispatchers.base import Routing
from .functional import checked_tokens
from .passes import LayerConfig, Pending, layer_backward, layer_forward, weight_gradient
from .saved import Needs
from .shares import Share, local_tensor, local_weight
from .steps import bias_gradient


def route_through_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Weight,
    down_proj: Tensor,
    *,
    config: LayerConfig,
    gate_up_bias: Tensor | None = None,
) -> tuple[Tensor, Routing | None]:
    """out (T, D), the weighted sum over each token's experts of their MLPs, and where the rows went.

    Under torch.compile it is an op of one graph, with `fullgraph=True` too, and the routing is None. It breaks the
    graph, and fails a full one with the reason, with `main_grads`, with a dispatcher that learns its sizes at run time,
    as with `Capacity.exact()` or without ``max_tokens``, and with a recipe or a backend that has no name.

    Args:
        x: (T, D) bf16 or fp32. expert_ids: (T, K) int32 or int64, -1 for "not routed". weights: (T, K) fp32.
        gate_up_proj: (e, 2F, D), gate rows first, or gate and up, (e, F, D) each, which are quantized into one, each
            way, and have gradients of their own. down_proj: (e, D, F). Or DTensors of which this rank holds that, as
            `Experts` has them; then their gradients are DTensors, too.
        gate_up_bias: (e, 2F), likewise, or None.

    Raises ValueError as `dispatch` and `grouped_mm` do, and for a recipe with wgrad "bf16", which keeps unquantized
    operands: compose it from `functional.py`.
    """
    if config.recipe.wgrad != "mx":
        raise ValueError(f"recipe {config.recipe.name}: got wgrad {config.recipe.wgrad!r}, wanted 'mx'")
    if torch.compiler.is_compiling():
        given = x, expert_ids, weights, gate_up_proj, down_proj
        if (reason := unsupported_reason(config)) is not None:
            torch._dynamo.graph_break(msg=f"route_through_experts is in no graph: {reason}")
            return between_graphs(route_through_experts, *given, config=config, gate_up_bias=gate_up_bias)
        proj = weight_of([local_weight(half) for half in tensors_of(gate_up_proj)])
        bias = None if gate_up_bias is None else local_weight(gate_up_bias)
        return compiled_layer(x, expert_ids, weights, proj, local_weight(down_proj), bias, config), None
    expert_ids = checked_tokens(x, expert_ids, weights, config.dispatcher)
    gate, *up = tensors_of(gate_up_proj)
    bias = None if gate_up_bias is None else local_tensor(gate_up_bias)
    check_weights(x, local_weights(gate, *up), local_tensor(down_proj), bias, config)
    tensors = x, weights, gate, down_proj, up[0] if up else None, gate_up_bias
    backward = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    out, routing = _Layer.apply(*tensors, expert_ids, config, backward)  # type: ignore[no-untyped-call]
    return out, routing


def local_weights(gate: Tensor, up: Tensor | None = None) -> Weight:
    """What this rank holds of gate_up_proj, or of its halves."""
    return local_tensor(gate) if up is None else (local_tensor(gate), local_tensor(up))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        up_proj: Tensor | None,
        gate_up_bias: Tensor | None,
        expert_ids: Tensor,
        config: LayerConfig,
        backward: bool,
    ) -> tuple[Tensor, Routing]:
        proj, down = local_weights(gate_up_proj, up_proj), local_tensor(down_proj)
        ctx.needs = _of_parameters(ctx.needs_input_grad)
        bias = None if gate_up_bias is None else local_tensor(gate_up_bias)
        out, routing, saved = layer_forward(x, weights, expert_ids, proj, down, config, backward, ctx.needs, bias)
        ctx.halves = len(tensors_of(proj))
        ctx.save_for_backward(*tensors_of(proj), down, *saved)
        ctx.config, ctx.routing, ctx.saved_operands = config, routing, None
        ctx.dtypes, ctx.shares = (gate_up_proj.dtype, down_proj.dtype), (Share(gate_up_proj), Share(down_proj))
        ctx.up_share = None if up_proj is None else Share(up_proj)
        ctx.bias = None if gate_up_bias is None else (Share(gate_up_bias), gate_up_bias.dtype)
        return out, routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # Only tensors count there, and up_proj is none where gate_up_proj is whole.
        last = 5 if ctx.halves == 2 else 4
        asked = [need and is_wanted(ctx, min(i, last)) for i, need in enumerate(ctx.needs_input_grad[:6])]
        needs, wanted = ctx.needs, _of_parameters(asked)
        kept, retained = ctx.saved_operands, graph_is_retained()
        if not retained:
            ctx.saved_operands = None
        if kept is not None and not (asked[0] or asked[1]) and kept.fits(d_out):
            pending: Pending = kept.operands
            # What the bias's gradient sums is an operand of gate_up_proj's.
            if all(i in pending for i in (0, 1) if wanted[i]) and (0 in pending or not wanted[2]):
                config, offs, grads = ctx.config, ctx.routing.plan.offs, list[Tensor | None]((None, None, None))
                if wanted[2]:
                    (grads[2],) = bias_gradient([pending[0][0], offs], config.wgrad_scale)
                for i, operands in pending.items():
                    if wanted[i]:
                        halves = i == 0 and ctx.halves == 2
                        grads[i] = weight_gradient(i, ctx.dtypes[i], list(operands), offs, config, halves=halves)
                return None, None, *_gradients_of_weights(ctx, grads)
        found = ctx.saved_tensors  # to be asked for once
        proj, (down_proj, *saved) = found[: ctx.halves], found[ctx.halves :]
        del found
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained, they go as they have been used
        left: Pending | None = {} if retained else None
        for share in (*ctx.shares, ctx.up_share):
            if share is not None:
                share.check()
        dx, d_weights, *grads = layer_backward(
            d_out,
            saved,
            weight_of(proj),
            down_proj,
            ctx.routing,
            ctx.config,
            needs,
            wanted=wanted,
            left=left,
        )
        if left:
            ctx.saved_operands = SavedOperands.of(left, d_out)
        return dx, d_weights, *_gradients_of_weights(ctx, grads)


def _of_parameters(each: Sequence[bool]) -> Needs:
    """Of gate_up_proj, whole or in halves, down_proj and gate_up's bias: `_Layer`'s first six arguments."""
    return each[2] or each[4], each[3], each[5]


def _gradients_of_weights(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What `_Layer.backward` returns after dx and d_weights."""
    proj, down, bias = grads
    if bias is not None:
        share, dtype = ctx.bias
        bias = share.gradient(bias.to(dtype))
    if ctx.up_share is None or proj is None:
        gate, up = proj, None
    else:
        gate, up = proj
        up = ctx.up_share.gradient(up)
    return ctx.shares[0].gradient(gate), ctx.shares[1].gradient(down), up, bias, None, None, None
