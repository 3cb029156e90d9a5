"""The layer for torch.compile(fullgraph=True): two ops that a graph calls and does not look into.

    mxep::layer_forward    x, weights, gate_up_proj, down_proj, ids, gate_up_bias -> out, what backward needs
                           (`saved.py`), the plan
    mxep::layer_backward   d_out and these -> dx, d_weights and, of those that need one, d_gate_up_proj, d_down_proj and
                           d_gate_up_bias

Both run `passes.py`; the compiler gets the shapes. What decides these is in the graph, as the dispatcher's key, the
recipe's name and the backend's: graphs, and what inductor keeps of them on disk, serve all layers that agree in these,
and no others. A dispatcher must know its sizes beforehand: the symmetric one with ``max_tokens``, the local one.

Exchanges have to happen in one order on all ranks: as graphs chain layers by their data, in forward and backward, they
do. Layers that are checkpointed are not chained where they are computed again: compile each by itself, or bring tokens
on all ranks.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from mxep.comms import RoutingPlan, make_plan
from mxep.gemm import Recipe
from mxep.gemm.backends import BACKENDS, select
from mxep.gemm.quantize_once import weights_are_held
from mxep.gemm.several import Weight, tensors_of, weight_of
from mxep.quant import E4M3, SwiGLU
from mxep.runtime.modes import count_flops, offer_flops

from .checks import check_weights
from .dispatchers.base import find_dispatcher
from .functional import checked_tokens
from .passes import PLAN, LayerConfig, layer_backward, layer_forward, tensors_of_plan
from .saved import Needs, Saved, num_parts
from .shares import local_weight


def unsupported_reason(config: LayerConfig) -> str | None:
    """None if `compiled_layer` can: all is known by name, and its sizes before it runs. Else why not."""
    dispatcher, recipe, backend = config.dispatcher, config.recipe, config.backend
    if config.main_grads[0] is not None or config.main_grads[1] is not None:
        return "main_grad is memory that backward adds to, which a graph does not: leave it out, or compile around"
    if dispatcher.capacity.kind == "exact" or dispatcher.static_tokens(0) is None:
        return "the dispatcher learns its sizes at run time: give max_tokens, and no Capacity.exact()"
    if recipe.wgrad != "mx":
        return f"recipe {recipe.name} has weight gradients of unquantized operands, which several functions compute"
    if recipe.fmt.name != E4M3.name or BACKENDS.get(backend.name) is not backend:
        return "recipe and backend must be what their names give: Recipe.named, mxep.gemm.backends.BACKENDS"
    return None


def compiled_layer(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Weight,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    config: LayerConfig,
    drops: bool,
) -> tuple[Tensor, Tensor | None]:
    """out (T, D), as of `run_experts`, where there is no `unsupported_reason`; if `drops`, which pairs have a row."""
    expert_ids = checked_tokens(x, expert_ids, weights, config.dispatcher)
    proj, down_proj = tuple(local_weight(half) for half in tensors_of(gate_up_proj)), local_weight(down_proj)
    bias = None if gate_up_bias is None else local_weight(gate_up_bias)
    check_weights(x, weight_of(proj), down_proj, bias, config)
    needs = [any(half.requires_grad for half in proj), down_proj.requires_grad, bias is not None and bias.requires_grad]
    backward = torch.is_grad_enabled() and (any(needs) or x.requires_grad or weights.requires_grad)
    names = config.dispatcher.key, config.recipe.name, config.backend.name
    how = *names, config.wgrad_scale, config.activation.packed, needs, backward
    out, *others = forward_op(x, weights, list(proj), down_proj, expert_ids, bias, *how, drops)
    return out, others[-1].detach() if drops else None


@torch.library.custom_op("mxep::layer_forward", mutates_args=())
def forward_op(
    x: Tensor,
    weights: Tensor,
    gate_up_proj: list[Tensor],
    down_proj: Tensor,
    expert_ids: Tensor,
    gate_up_bias: Tensor | None,
    dispatcher: str,
    recipe: str,
    backend: str,
    wgrad_scale: float,
    activation: list[float] | None,
    needs: list[bool],
    backward: bool,
    drops: bool,
) -> list[Tensor]:
    config = _config(x.device, dispatcher, recipe, backend, wgrad_scale, activation)
    config.dispatcher.begin(0)  # one graph serves many layers
    with config.dispatcher.watched(), torch.no_grad():
        tensors = [x, weights, expert_ids, gate_up_bias, *_halves(gate_up_proj), down_proj]
        _, made = layer_forward(tensors, *config.of_passes, backward, _needs(needs), drops)
    kept = [made.pop()] if drops else []
    if not backward:
        return made[:1] + kept
    saved = made[1 + len(PLAN) :]
    if weights_are_held():
        # An output is the graph's to write over: what is held for others, which comes last, goes out as a copy.
        own = sum(num_parts(config.recipe, _needs(needs)))
        saved[own:] = [part.clone() for part in saved[own:]]
    return [made[0], *saved, *made[1 : 1 + len(PLAN)], *kept]


@forward_op.register_fake
def _(x: Tensor, weights: Tensor, proj: list[Tensor], down_proj: Tensor, ids: Tensor, *how: Any) -> list[Tensor]:
    _, *names, needs, backward, drops = how
    out, kept = x.new_empty(x.shape), [weights.new_empty(weights.shape)] if drops else []
    if not backward:
        return [out, *kept]
    config = _config(x.device, *names)
    plan, recipe = _plan_of_shapes(ids, weights, config), config.recipe
    experts, copied = (weight_of(proj), down_proj), config.dispatcher.borrows
    saved = Saved.shapes(x, plan, experts, recipe, config.backend, _needs(needs), copied=copied)
    return [out, *saved, *tensors_of_plan(plan), *kept]


@torch.library.custom_op("mxep::layer_backward", mutates_args=())
def backward_op(
    d_out: Tensor,
    saved: list[Tensor],
    gate_up_proj: list[Tensor],
    down_proj: Tensor,
    expert_ids: Tensor,
    dispatcher: str,
    recipe: str,
    backend: str,
    wgrad_scale: float,
    activation: list[float] | None,
    needs: list[bool],
) -> list[Tensor]:
    config = _config(d_out.device, dispatcher, recipe, backend, wgrad_scale, activation)
    with config.dispatcher.watched(), torch.no_grad():
        experts = *_halves(gate_up_proj), down_proj, *config.main_grads
        tensors = [d_out, expert_ids, *experts, *saved[-len(PLAN) :], *saved[: -len(PLAN)]]
        _, grads = layer_backward(tensors, *config.of_passes, wgrad_scale, _needs(needs))
    return [grad for grad in grads if grad is not None]


@backward_op.register_fake
def _(
    d_out: Tensor, saved: list[Tensor], gate_up_proj: list[Tensor], down_proj: Tensor, ids: Tensor, *how: Any
) -> list[Tensor]:
    d_weights = d_out.new_empty(ids.shape, dtype=torch.float32)
    e, dim, hidden_dim = down_proj.shape
    bias = d_weights.new_empty(e, 2 * hidden_dim)
    of_proj = (2, e, hidden_dim, dim) if len(gate_up_proj) == 2 else (e, 2 * hidden_dim, dim)
    grads = down_proj.new_empty(of_proj), down_proj.new_empty(down_proj.shape), bias
    return [d_out.new_empty(d_out.shape), d_weights, *(grad for grad, need in zip(grads, how[-1]) if need)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, gate_up_proj, down_proj, expert_ids, bias, *ctx.names, _, drops = inputs
    saved = output[1:-1] if drops else output[1:]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.halves = len(gate_up_proj)
    ctx.save_for_backward(*gate_up_proj, down_proj, expert_ids, *saved)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    found = ctx.saved_tensors  # to be asked for once
    proj, (down_proj, expert_ids, *saved) = found[: ctx.halves], found[ctx.halves :]
    del found
    dx, d_weights, *rest = backward_op(grads[0], saved, proj, down_proj, expert_ids, *ctx.names)
    *_, needs = ctx.names
    d_proj = [None] * ctx.halves
    if needs[0]:
        d_proj = list(rest.pop(0)) if ctx.halves == 2 else [rest.pop(0)]
    d_down = rest.pop(0) if needs[1] else None
    d_bias = rest.pop(0).to(ctx.bias_dtype) if needs[2] else None
    return dx, d_weights, d_proj, d_down, None, d_bias, *[None] * 8


forward_op.register_autograd(_differentiate, setup_context=_setup_context)
# Peers wait for the exchanges of a rank without tokens, too, whose empty results a compiler would not compute.
for _op in (torch.ops.mxep.layer_forward.default, torch.ops.mxep.layer_backward.default):
    has_side_effect(_op)


def _config(
    device: torch.device, dispatcher: str, recipe: str, backend: str, scale: float, activation: Sequence[float] | None
) -> LayerConfig:
    of, how = (find_dispatcher(dispatcher), _recipe(recipe), select(backend, device)), SwiGLU.unpacked(activation)
    return LayerConfig(*of, how, wgrad_scale=scale)


def _needs(needs: list[bool]) -> Needs:
    gate_up, down, bias = needs
    return gate_up, down, bias


_recipe = functools.cache(Recipe.named)


def _halves(proj: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The weight, or its first half; its other half."""
    return proj[0], proj[1] if len(proj) == 2 else None


def _plan_of_shapes(expert_ids: Tensor, weights: Tensor, config: LayerConfig) -> RoutingPlan:
    """What `dispatch` would plan, from fake tensors."""
    dispatcher, alignment, top_k = config.dispatcher, config.recipe.group_alignment, expert_ids.shape[1]
    sizes = dispatcher.static_tokens(expert_ids.shape[0])
    assert sizes is not None
    plan = make_plan(
        expert_ids.new_empty(*sizes, top_k),
        weights.new_empty(*sizes, top_k),
        expert_ids.new_empty(sizes[0]),
        first_expert=0,
        num_local_experts=dispatcher.num_local_experts,
        alignment=alignment,
        capacity=dispatcher.capacity,
        num_experts=dispatcher.num_experts,
    )
    return dataclasses.replace(plan, dispatch=expert_ids.new_empty(1))


@count_flops(torch.ops.mxep.layer_forward)
def _flops_forward(
    x: Tensor, weights: Tensor, gate_up_proj: list[Tensor], down_proj: Tensor, *_: Any, out_val: Any
) -> int:
    """2 M N K of both products, of T * K rows: what this rank's tokens cost, wherever their experts are."""
    elements = sum(w[0].numel() for w in (*gate_up_proj, down_proj))
    return 2 * weights.numel() * elements


@count_flops(torch.ops.mxep.layer_backward)
def _flops_backward(
    d_out: Tensor, saved: Any, gate_up_proj: list[Tensor], down_proj: Tensor, ids: Tensor, *how: Any, out_val: Any
) -> int:
    """Two dgrads, and a wgrad of each weight that needs one."""
    of_gate_up, of_down = 2 * sum(w[0].numel() for w in gate_up_proj), 2 * down_proj[0].numel()
    needs: list[bool] = how[-1]
    return ids.numel() * (of_gate_up * (1 + needs[0]) + of_down * (1 + needs[1]))


offer_flops()
