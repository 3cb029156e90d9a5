"""The differentiable parts of an expert-parallel layer: called one after another, they compute the layer.

    dispatch      x (T, D), weights (T, K) -> rows (R_max, D), row_weight (R_max,)       backward: combine
    expert_mlp    rows, weights of experts -> y (R_max, D)                               backward: dgrads, wgrads
    combine       y -> out (T, D)                                                        backward: redispatch

`layer.py` has the same steps in one pass. SwiGLU multiplies h by the routing weight, which gives the same result as
weighting y, because the down-projection is linear. So combine is a plain sum, and its backward sends one unscaled copy
of each token. If the recipe quantizes, rows, h and the gradients between these functions are MXTensors, so that nothing
is quantized twice.

Under torch.compile these functions break the graph. The exceptions are `expert_mlp` and `swiglu` with recipe "bf16".

T tokens of this rank, K experts per token, E experts in all, D model dim, F hidden dim, R_max maximum rows of this
rank's experts, padding included, e local experts.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import wait_tensor

from mxep.comms import narrow_ids
from mxep.gemm import Recipe, grouped_mm
from mxep.gemm.backends import Backend
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.functional import between_graphs
from mxep.gemm.product import for_anomaly_mode
from mxep.quant import MXParts, MXTensor, SwiGLU

from .dispatchers.base import Routing, TokenDispatcher
from .formats import PLAIN, Wire, pack, saved_gate_up, swiglu_backward, swiglu_forward

FLOATS = torch.bfloat16, torch.float32
"""Dtypes that tokens and parameters of a layer may have."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _between_graphs(function: _Function) -> _Function:
    """Decorator that breaks torch.compile's graph around a function which exchanges rows, or has MXTensor gradients."""

    @functools.wraps(function)
    def call(*tensors: Any, **options: Any) -> Any:
        quantizes = Recipe.named(options["recipe"]).scaling != "none"
        if torch.compiler.is_compiling() and ("dispatcher" in options or quantizes):
            if not torch.compiler.is_dynamo_compiling():  # under torch.export, which allows no graph breaks
                raise RuntimeError(f"{function.__name__} is in no exported graph: export run_experts, or an MoE")
            return between_graphs(function, *tensors, **options)
        return function(*tensors, **options)

    return cast(_Function, call)


def checked_tokens(x: Tensor, expert_ids: Tensor, weights: Tensor, dispatcher: TokenDispatcher) -> Tensor:
    """Check a layer's input. Returns a copy of expert_ids: as int32, or if eager and on a CPU in its own dtype."""
    # Not len(x): torch.export would make the number of tokens a constant.
    fits = x.dim() == expert_ids.dim() == 2 and weights.shape == expert_ids.shape and x.shape[0] == expert_ids.shape[0]
    if not fits or expert_ids.shape[1] == 0:
        raise ValueError(
            "dispatch wants x (T, D), expert_ids (T, K), weights (T, K), K at least 1, "
            f"got {tuple(x.shape)}, {tuple(expert_ids.shape)}, {tuple(weights.shape)}"
        )
    if x.dtype not in FLOATS:
        raise ValueError(f"x: got {x.dtype}, want one of {FLOATS} (torch.autocast wants dtype=torch.bfloat16)")
    if weights.dtype != torch.float32 or expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"weights must be float32 and ids int32 or int64, got {weights.dtype}, {expert_ids.dtype} "
                         "(of FSDP2's MixedPrecisionPolicy: cast_forward_inputs=False)")  # fmt: skip
    widest = dispatcher.row_dtype
    if widest is not None and x.dtype.itemsize > widest.itemsize:
        raise ValueError(
            f"the dispatcher has room for rows of {widest}, got {x.dtype}: cast x, or make the layer "
            f"(or its dispatcher) with dtype={x.dtype}"
        )
    if expert_ids.is_cpu and not torch.compiler.is_compiling():
        return expert_ids.clone(memory_format=torch.contiguous_format)  # the dispatcher's errors quote them
    ids = narrow_ids(expert_ids)
    # A copy, because backward reads the ids, and the caller may overwrite them before.
    return ids.clone(memory_format=torch.contiguous_format) if ids is expert_ids else ids


@_between_graphs
def dispatch(
    x: Tensor, expert_ids: Tensor, weights: Tensor, *, dispatcher: TokenDispatcher, recipe: Recipe | str
) -> tuple[Tensor, Tensor, Routing]:
    """Dispatch tokens to their experts.

    Args:
        x: (T, D) bf16 or fp32. If the recipe quantizes, x is quantized before it is sent.
        expert_ids: (T, K) int32 or int64, -1 for "not routed".
        weights: (T, K) fp32, the routing weights.
        recipe: a Recipe or its name, as in all functions here.

    Returns:
        rows: (R_max, D) in expert-major order. An MXTensor with a row index if the recipe quantizes, else plain.
        row_weight: (R_max,) fp32, the routing weight of each row.
        routing: :func:`combine` takes it, and :func:`expert_mlp` takes its ``plan.offs``.

    Raises ValueError on wrong shapes or dtypes, and on CPU for expert ids outside -1 .. E-1.
    """
    recipe = Recipe.named(recipe)
    ids = checked_tokens(x, expert_ids, weights, dispatcher)
    rows, row_weight, routing = _Dispatch.apply(x, weights, ids, dispatcher, recipe)  # type: ignore[no-untyped-call]
    return rows, row_weight, routing


@_between_graphs
def combine(y: Tensor, routing: Routing, *, dispatcher: TokenDispatcher, recipe: Recipe | str) -> Tensor:
    """Send the experts' results y (R_max, D) back, and sum each token's rows. Returns (T, D) in y's dtype.

    Sums are fp32, in a fixed order. Raises ValueError if y and the routing have different numbers of rows.
    """
    max_rows = routing.plan.max_rows
    if y.dim() != 2 or len(y) != max_rows:
        raise ValueError(f"combine: expected y ({max_rows}, D), the rows of this routing, got {tuple(y.shape)}")
    out: Tensor = Combine.apply(y, routing, dispatcher, Recipe.named(recipe), False)[0]  # type: ignore[no-untyped-call]
    return out


@_between_graphs
def swiglu(
    gate_up: Tensor,
    row_weight: Tensor | None,
    offs: Tensor | None,
    *,
    recipe: Recipe | str,
    activation: SwiGLU = PLAIN,
    dispatcher: TokenDispatcher | None = None,
) -> Tensor:
    """Compute SwiGLU, multiply by row_weight, and quantize as the recipe says, in one kernel.

    Args:
        gate_up: (R_max, 2F). If the recipe quantizes, its gradient is an MXTensor.
        row_weight: (R_max,) fp32, or None.
        offs: (e,) int32, inclusive cumulative padded group sizes. None: all rows are valid.
        dispatcher: the layer's. If given, it tells peers of errors in backward.

    Returns h (R_max, F).
    """
    how = Recipe.named(recipe), activation, dispatcher
    h: Tensor = _SwiGLU.apply(gate_up, row_weight, offs, *how)  # type: ignore[no-untyped-call]
    return h


@_between_graphs
def expert_mlp(
    rows: Tensor,
    gate_up_proj: Tensor | FrozenWeight,
    down_proj: Tensor | FrozenWeight,
    offs: Tensor,
    *,
    row_weight: Tensor | None = None,
    recipe: Recipe | str,
    backend: str | Backend = "auto",
    main_grads: tuple[Tensor | None, Tensor | None] = (None, None),
    wgrad_scale: float = 1.0,
    activation: SwiGLU = PLAIN,
    gate_up_bias: Tensor | None = None,
    dispatcher: TokenDispatcher | None = None,
) -> Tensor:
    """The experts' gated MLP over rows in expert-major order.

    Args:
        rows: (R_max, D), plain or MXTensor.
        gate_up_proj: (e, 2F, D), gate rows first, or alternating if the activation is interleaved.
        down_proj: (e, D, F).
        offs: (e,) int32, inclusive cumulative padded group sizes. Rows from offs[-1] on are not read.
        row_weight: (R_max,) fp32, by which h is multiplied, or None.
        recipe: a Recipe or its name.
        backend: backend of the grouped GEMM.
        main_grads: for each weight, fp32 of its shape, or None. If given, backward adds the weight's gradient to it.
        wgrad_scale: factor for weight gradients. With 1 / W, gradients are averaged over W ranks instead of summed.
        activation: a `mxep.quant.SwiGLU`.
        gate_up_bias: (e, 2F) or None.
        dispatcher: the layer's. If given, it tells peers of errors in backward.

    Returns y (R_max, D) in the rows' dtype.
    """
    options: dict[str, Any] = {"recipe": recipe, "backend": backend, "wgrad_scale": wgrad_scale}
    options["watched"] = None if dispatcher is None else dispatcher.watched
    of_layer: dict[str, Any] = {} if dispatcher is None else {"dispatcher": dispatcher}
    bias = None if gate_up_bias is None else scaled_gradient(gate_up_bias, wgrad_scale)
    gate_up = grouped_mm(rows, gate_up_proj, offs, bias=bias, out_dtype=rows.dtype, main_grad=main_grads[0], **options)
    h = swiglu(gate_up, row_weight, offs, recipe=recipe, activation=activation, **of_layer)
    return grouped_mm(h, down_proj, offs, out_dtype=rows.dtype, main_grad=main_grads[1], **options)


class Weighted(torch.autograd.Function):
    """Multiply x (T, D) by each of the token's weights (T, K) fp32. Returns (T, K, D) in x's dtype.

    Rows may be dropped. A dropped row has gradient 0, and adds nothing to x's gradient even if its weight is NaN.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return (x[:, None] * weights[..., None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        counted = torch.where(d_out.any(-1), weights, 0.0)
        dx = (d_out * counted[..., None]).sum(1).to(x.dtype)
        return dx, (d_out * x[:, None].float()).sum(-1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, expert_ids: Tensor, dispatcher: TokenDispatcher, recipe: Recipe
    ) -> tuple[Tensor, Tensor, Routing]:
        payload = pack.function(x, recipe=recipe, fmt=recipe.fmt)
        alignment = recipe.group_alignment
        slots, routing = dispatcher.dispatch(payload, expert_ids, weights, alignment=alignment).wait()
        ctx.dispatcher, ctx.routing, ctx.dtype = dispatcher, routing, x.dtype
        # Detached: this node keeps the plan, and the plan would otherwise refer to an output of this node, a cycle.
        plan, wire = routing.plan, Wire.of(x, recipe, recipe.fmt)
        rows = wire.rows(slots, plan.row_slot, plan.offs, copy=dispatcher.borrows)
        return rows, plan.row_weight.detach(), routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_row_weight: Tensor, _: None) -> tuple[Tensor | None, ...]:
        with ctx.dispatcher.watched():
            dx, d_weights = ctx.dispatcher.combine(d_rows.to(ctx.dtype), ctx.routing, d_row_weight).wait()
        return dx, d_weights, None, None, None


class Combine(torch.autograd.Function):
    """:func:`combine`, and with `drops` also kept: (T, K) fp32, 1 for a (token, expert) pair that has a row, else 0."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, routing: Routing, dispatcher: TokenDispatcher, recipe: Recipe, drops: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.dispatcher, ctx.routing, ctx.recipe = dispatcher, routing, recipe
        values = torch.ones_like(routing.plan.row_weight) if drops else None
        out, kept = dispatcher.combine(y, routing, values).wait()
        if kept is not None:
            ctx.mark_non_differentiable(kept)
        return out, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
        recipe, plan, dispatcher = ctx.recipe, ctx.routing.plan, ctx.dispatcher
        with dispatcher.watched():
            payload = pack.function(d_out, recipe=recipe, fmt=recipe.grad_fmt)
            slots = dispatcher.redispatch(payload, ctx.routing).wait()
            wire = Wire.of(d_out, recipe, recipe.grad_fmt)
            d_rows = wire.rows(slots, plan.row_slot, plan.offs, copy=dispatcher.borrows)
        return for_anomaly_mode(d_rows, plan.offs), None, None, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        row_weight: Tensor | None,
        offs: Tensor | None,
        recipe: Recipe,
        activation: SwiGLU,
        dispatcher: TokenDispatcher | None,
    ) -> Tensor:
        saved = saved_gate_up(gate_up, recipe)  # not saved as an MXTensor, because hooks would dequantize it
        qdata, scale, row_index, *ctx.settings = (
            MXParts.of(saved) if isinstance(saved, MXTensor) else (saved, None, None)
        )
        ctx.save_for_backward(qdata, scale, row_index, row_weight, offs)
        ctx.how, ctx.dispatcher = (recipe, activation), dispatcher
        return swiglu_forward(gate_up, row_weight, offs, *ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, scale, row_index, row_weight, offs = ctx.saved_tensors
        if ctx.settings:
            gate_up = MXParts(gate_up, scale, row_index, *ctx.settings).join()
        with nullcontext() if ctx.dispatcher is None else ctx.dispatcher.watched():
            d_gate_up, d_row_weight, _ = swiglu_backward(d_h, gate_up, row_weight, offs, *ctx.how)
        d_weight = None if row_weight is None else for_anomaly_mode(d_row_weight, offs)
        return for_anomaly_mode(d_gate_up, offs), d_weight, *[None] * 4


def add_down_bias(
    out: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    bias: Tensor,
    *,
    scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Add to each token the weighted sum of its experts' down biases, after combine. Differentiable.

    out (T, D) = sum over k of weights[t, k] * (down_proj[id] h + down_bias[id])

    Args:
        out: (T, D), the result of combine.
        expert_ids: (T, K). Ids outside 0 .. E-1 add nothing.
        weights: (T, K) fp32, the routing weights.
        bias: (e, D), of this rank's experts.
        scale: factor for the bias's gradient.
        group: the ranks that share the experts. None: this process has all of them.

    Returns (T, D), the sum. It is computed by one GEMM, S @ bias, with S (T, E) the routing weights by expert. Ranks
    that share experts gather the bias to (E, D), and reduce its gradient, by torch's own collectives. A bias or d_out
    that is not finite makes NaN only in the tokens, or experts, that it belongs to.
    """
    whole = scaled_gradient(bias, scale).float()
    if group is not None:
        whole = _Gathered.apply(whole, group)  # type: ignore[no-untyped-call]
    num_experts = whole.shape[0]
    here = (expert_ids >= 0) & (expert_ids < num_experts)
    by_expert = weights.new_zeros(len(weights), num_experts)
    ids = expert_ids.clamp(0, num_experts - 1).long()
    by_expert = by_expert.scatter_add(1, ids, torch.where(here, weights, 0.0))
    operands = out, by_expert.to(out.dtype), whole.to(out.dtype), ids, here
    return _AddBias.apply(*operands)  # type: ignore[no-any-return,no-untyped-call]


def scaled_gradient(x: Tensor, scale: float) -> Tensor:
    """Return x. Backward multiplies its gradient by scale."""
    if scale == 1.0:
        return x
    scaled: Tensor = _ScaledGradient.apply(x, scale)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class _AddBias(torch.autograd.Function):
    """out (T, D) + by_expert (T, E) @ bias (E, D). ids: (T, K) expert ids. routed: (T, K), True if an id is valid.

    0 * NaN is NaN, so one NaN would spread in a GEMM. Therefore the GEMMs exclude rows that are not finite.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, by_expert: Tensor, bias: Tensor, ids: Tensor, routed: Tensor) -> Tensor:
        ctx.save_for_backward(by_expert, bias, ids, routed)
        bad = ~bias.isfinite().all(1)
        tokens = (bad[ids] & routed).any(1, keepdim=True)
        operands = by_expert.masked_fill(tokens, math.nan), bias.masked_fill(bad[:, None], 0.0)
        with torch.autocast(out.device.type, enabled=False):  # autocast would round out, too
            return torch.addmm(out, *operands)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        by_expert, bias, ids, routed = ctx.saved_tensors
        _, needs_weights, needs_bias, *_ = ctx.needs_input_grad
        bad = ~d_out.isfinite().all(1, keepdim=True)
        d_by_expert = d_bias = None
        with torch.autocast(d_out.device.type, enabled=False):
            if needs_weights:  # only elements of routed pairs are read
                d_by_expert = d_out @ bias.t()
            if needs_bias:
                spoilt = ids.new_zeros(len(bias)).scatter_add(0, ids.flatten(), (bad & routed).flatten().long())
                d_bias = by_expert.t() @ d_out.masked_fill(bad, 0.0)
                d_bias = d_bias.masked_fill(spoilt[:, None] > 0, math.nan)
        return d_out, d_by_expert, d_bias, None, None


class _Gathered(torch.autograd.Function):
    """Gather (e, D) of each rank to (E, D). It calls torch's ops, because their wrappers' names differ by version."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
        return wait_tensor(gathered)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        to = "sum", ctx.group.size(), ctx.group.group_name
        return wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(grad.contiguous(), *to)), None
