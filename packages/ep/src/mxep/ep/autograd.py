"""The layer's autograd: one autograd function in eager mode, two ops under torch.compile. Both run `layer.py`.

The autograd function gives the same bits as the functions of `functional.py` in sequence. It costs less, because
several fusions and the overlap of exchanges cross the steps. torch.compile does not trace into the ops:

    mxep::layer_forward    x, weights, ids, parameters -> out, `Saved`, the plan, kept
    mxep::layer_backward   d_out and forward's tensors -> dx, d_weights and the gradients of parameters that need one

The compiled graph contains only the dispatcher's key and the names of recipe and backend. So all layers with the same
three share one graph and one entry of inductor's disk cache. The dispatcher must know its sizes beforehand: local, or
symmetric with ``max_tokens``. All ranks must make exchanges in one order. The data flow between layers ensures this,
except if checkpointed layers are recomputed: compile each of these by itself, or bring tokens on all ranks.

T tokens of this rank, K experts per token, D model dim, F hidden dim, R_max rows (`layer.py`), e local experts.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.fx.node import has_side_effect

from mxep.comms import RoutingPlan
from mxep.gemm import Recipe
from mxep.gemm.backends import BACKENDS, select
from mxep.gemm.backends.base import empty_gradient
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.product import SavedOperands, graph_is_retained, is_wanted
from mxep.gemm.quantize_once import join_parts, weight_parts, weights_are_held
from mxep.quant import E4M3, SwiGLU
from mxep.runtime.bundle import build, take_apart, tensors_in
from mxep.runtime.lengths import first_rows

from .dispatchers.base import Routing, TokenDispatcher, find_dispatcher
from .dtensors import Share, local_tensor, weight_behind
from .formats import (
    NONE,
    AnyWeight,
    GradientForm,
    LayerConfig,
    Needs,
    fake_plan,
    fake_saved,
    held_colwise,
    held_rowwise,
    join_saved,
    makes_rows_again,
    num_parts,
)
from .layer import (
    PLAN,
    BackwardInput,
    DeferredWgrads,
    ForwardInput,
    ForwardOutput,
    MainGrads,
    WgradInput,
    backward_pass,
    bias_gradient,
    forward_pass,
    pass_of,
    wgrad,
)
from .lora import LoRAGradients, LoRAWeights
from .rehearse import rehearse_once


class Parameters(NamedTuple):
    """A layer's unfrozen parameters, plain or DTensors. If up_proj is given, gate_up_proj is the gate alone."""

    gate_up_proj: Tensor | None = None
    down_proj: Tensor | None = None
    up_proj: Tensor | None = None
    gate_up_bias: Tensor | None = None
    gate_up_A: Tensor | None = None
    gate_up_B: Tensor | None = None
    down_A: Tensor | None = None
    down_B: Tensor | None = None

    def local(self) -> "Parameters":
        return Parameters(*map(local_tensor, self))


def parameter_needs(each: Sequence[bool]) -> Needs:
    """Sum up which parameters need gradients. each: True or False for each field of `Parameters`."""
    gate_up, down, up, bias, *lora = each
    return Needs(gate_up or up, down, bias, any(lora))


def join_lora(parameters: Parameters, scale: float) -> LoRAWeights | None:
    """LoRA's A and B, from this rank's `parameters`; None if there is no LoRA."""
    four = parameters.gate_up_A, parameters.gate_up_B, parameters.down_A, parameters.down_B
    return None if four[0] is None else LoRAWeights(*four, scale)  # type: ignore[arg-type]


_accumulating = False
"""True while `accumulate_in_place` is open. Compiled code is guarded by this value."""


@contextlib.contextmanager
def accumulate_in_place() -> Iterator[None]:
    """Let the GEMM that computes an expert weight's gradient add it to an existing ``.grad`` itself.

        with accumulate_in_place():
            for x in micro_batches:
                model(x).sum().backward()
        optimizer.step()

    On `hopper` this has the bits of autograd's sum, with half the memory traffic. Other backends have the same bits if
    1 / ranks is a power of two. (`triton` rounds once instead of twice.) A layer is affected if its forward runs in
    this context. Use `.backward()`: `torch.autograd.grad` of an expert weight would change ``.grad``, too. If there is
    a ``main_grad``, it is used instead. Autograd sums as usual for gate and up as two parameters, weights with hooks,
    views or casts of parameters, a ``.grad`` of another dtype or layout, and recipes ``*_wgrad_bf16``. In a
    compiled layer, this context breaks the graph.
    """
    global _accumulating
    before, _accumulating = _accumulating, True
    try:
        yield
    finally:
        _accumulating = before


def _accumulator(ctx: Any, i: int) -> Tensor | None:
    """The tensor to which backward's GEMM adds the gradient of gate_up_proj (i = 0) or down_proj (i = 1), or None."""
    if (main_grad := ctx.main_grads[i]) is not None or not ctx.in_place:
        return main_grad  # type: ignore[no-any-return]
    leaf, transposed = weight_behind(ctx.next_functions[ctx.places[2 + i]][0])
    grad = None if leaf is None else leaf.grad
    if grad is None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return None
    fits = type(grad) is type(leaf.data) and grad.dtype == leaf.dtype and grad.is_contiguous()
    fits = fits and (not isinstance(grad, DTensor) or grad.placements == leaf.placements)
    local: Tensor | None = local_tensor(grad) if fits and not grad.requires_grad else None
    return local.mT if transposed and local is not None else local


class NodeState(NamedTuple):
    """The arguments of `Layer` other than tensors with gradients."""

    dispatcher: TokenDispatcher
    config: LayerConfig
    main_grads: MainGrads
    wgrad_scale: float
    rows_again: bool
    made: ForwardOutput
    frozen: tuple[FrozenWeight, FrozenWeight] | None
    lora_scale: float


class Layer(torch.autograd.Function):
    """Autograd function of a layer. `forward_pass` ran before: forward only records what backward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        """rest: the fields of `Parameters`, then a `NodeState`."""
        parameters, state = Parameters(*rest[:-1]), rest[-1]
        mine, made = parameters.local(), state.made
        gate, up = mine.gate_up_proj, mine.up_proj
        proj = state.frozen or (gate if up is None else (gate, up), mine.down_proj)
        again, bias = x if state.rows_again else None, mine.gate_up_bias if state.dispatcher.recomputes else None
        tensors, ctx.form = take_apart((again, proj, made.saved, join_lora(mine, state.lora_scale), bias))
        ctx.save_for_backward(*tensors)
        given = x, weights, *parameters
        ctx.places = [0, *itertools.accumulate(each is not None for each in given[:-1])]
        ctx.shares = Parameters(*(None if each is None else Share(each) for each in parameters))  # type: ignore[arg-type]
        ctx.dispatcher, ctx.config, ctx.main_grads = state.dispatcher, state.config, state.main_grads
        ctx.wgrad_scale, ctx.routing, ctx.saved_operands = state.wgrad_scale, made.routing, None
        ctx.forms = [GradientForm.of(w) for w in proj]  # type: ignore[arg-type]
        ctx.in_place = _accumulating and state.frozen is None and mine.up_proj is None
        return made.out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        routing, dispatcher, config, retained = ctx.routing, ctx.dispatcher, ctx.config, graph_is_retained()
        main_grads = _accumulator(ctx, 0), _accumulator(ctx, 1)
        asked = [need and is_wanted(ctx, place) for need, place in zip(ctx.needs_input_grad, ctx.places)]
        needs, wanted = parameter_needs(ctx.needs_input_grad[2:-1]), parameter_needs(asked[2:])
        kept = ctx.saved_operands
        if not retained:
            ctx.saved_operands = None
        if kept is not None and not (asked[0] or asked[1]) and kept.fits(d_out) and _has(kept.operands, wanted):
            return None, None, *_parameter_gradients(ctx, *_deferred_gradients(ctx, kept.operands, wanted, *main_grads))
        later = NONE
        if retained and not needs.lora:
            later = Needs(*(need and not want for need, want in zip(needs, wanted)))
        x, (gate_up, down), saved, lora, bias = build(ctx.form, iter(ctx.saved_tensors))
        rows_again, dense = x is not None, d_out
        if routing.room is not None:
            dense, x = d_out.contiguous(), x if x is None else x.contiguous()
        given = BackwardInput(dense, x, routing, saved, gate_up, down, *main_grads, lora, bias)
        del gate_up, down, saved, lora, dense, x
        ctx.maybe_clear_saved_tensors()  # tensors are freed after use, unless the graph is retained
        for share in ctx.shares:
            if share is not None and (share is not ctx.shares.gate_up_bias or bias is not None):
                share.check()
        backward = pass_of(dispatcher, backward_pass, whole=wanted == needs)
        how: dict[str, Any] = {"config": config, "wanted": wanted, "later": later, "rows_again": rows_again}
        with dispatcher.watched():
            again = given.saved.lacks_rows(routing.plan)
            colwise = held_colwise(given.gate_up_proj, given.down_proj, given.saved, config, recompute=again)
            grads = backward(given, colwise, **how, wgrad_scale=ctx.wgrad_scale, room=routing.room)
        if grads.deferred != (None, None):
            ctx.saved_operands = SavedOperands.of(grads.deferred, d_out)
        dx, d_weights = first_rows(grads.x, len(d_out)), first_rows(grads.weights, len(d_out))
        of_parameters = grads.gate_up_proj, grads.down_proj, grads.gate_up_bias, grads.lora
        return dx, d_weights, *_parameter_gradients(ctx, *of_parameters)


def _has(deferred: DeferredWgrads, wanted: Needs) -> bool:
    """True if `deferred` has the operands of these gradients. (The bias needs gate_up's dy. LoRA is never deferred.)"""
    gate_up = deferred.gate_up is not None or not (wanted.gate_up_proj or wanted.gate_up_bias)
    return gate_up and (deferred.down is not None or not wanted.down_proj)


def _deferred_gradients(
    ctx: Any, deferred: DeferredWgrads, wanted: Needs, gate_up_main_grad: Tensor | None, down_main_grad: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(gradient of gate_up_proj, of down_proj, of the bias), which an earlier backward deferred. Exchanges nothing."""
    offs, scale = ctx.routing.plan.offs, ctx.wgrad_scale
    gate_up = down = bias = None
    how: dict[str, Any] = {"config": ctx.config, "scale": scale}
    if wanted.gate_up_bias and deferred.gate_up is not None:
        bias = bias_gradient(deferred.gate_up[0], offs, scale=scale)
    if wanted.gate_up_proj and deferred.gate_up is not None:
        given = WgradInput(*deferred.gate_up, offs, gate_up_main_grad)
        gate_up = wgrad(given, form=ctx.forms[0], **how)
    if wanted.down_proj and deferred.down is not None:
        given = WgradInput(*deferred.down, offs, down_main_grad)
        down = wgrad(given, form=ctx.forms[1], **how)
    return gate_up, down, bias


def _parameter_gradients(
    ctx: Any, gate_up: Any, down: Tensor | None, bias: Tensor | None, lora: LoRAGradients | None = None
) -> tuple[Tensor | None, ...]:
    """The results of `Layer.backward` that follow dx and d_weights."""
    shares, up = ctx.shares, None
    if gate_up is not None and shares.up_proj is not None:
        gate_up, up = gate_up
    if bias is not None:
        bias = bias.to(shares.gate_up_bias.dtype)
    gradients = Parameters(gate_up, down, up, bias, *(lora or ()))
    return *(None if share is None else share.gradient(grad) for share, grad in zip(shares, gradients)), None


# ── torch.compile ─────────────────────────────────────────────────────────────────────────────────────────────────


def unsupported_reason(dispatcher: TokenDispatcher, config: LayerConfig, main_grads: MainGrads) -> str | None:
    """The reason why `compiled_layer` cannot be used, or None if it can."""
    recipe, backend = config.recipe, config.backend
    if _accumulating:
        return "accumulate_in_place is open, and a graph adds to no .grad: leave it out, or compile around"
    if main_grads[0] is not None or main_grads[1] is not None:
        return "main_grad is memory that backward adds to, which a graph does not: leave it out, or compile around"
    if dispatcher.static_tokens(0) is None:
        return "the dispatcher learns its sizes at run time: give max_tokens"
    if recipe.wgrad != "mx":
        return f"recipe {recipe.name} has weight gradients of unquantized operands, which several functions compute"
    if recipe.fmt.name != E4M3.name or BACKENDS.get(backend.name) is not backend:
        return "recipe and backend must be what their names give: Recipe.named, mxep.gemm.backends.BACKENDS"
    return None


def compiled_layer(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    proj: tuple[AnyWeight, Tensor | FrozenWeight],
    parameters: Parameters,
    *,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    wgrad_scale: float,
    lora_scale: float,
    drops: bool,
) -> tuple[Tensor, Tensor | None]:
    """`run_experts` by the op, if there is no `unsupported_reason`. Returns out (T, D), and kept (T, K) or None.

    proj: gate_up_proj and down_proj. They and the bias and LoRA in `parameters` are this rank's, already checked.
    """
    gate_up, down = ([*(w.parts if isinstance(w, FrozenWeight) else weight_parts(w))] for w in proj)
    bias = [] if parameters.gate_up_bias is None else [parameters.gate_up_bias]
    kinds = gate_up, down, bias, [each for each in parameters[4:] if each is not None]
    needs = [any(each.requires_grad for each in kind) for kind in kinds]
    backward = torch.is_grad_enabled() and (any(needs) or x.requires_grad or weights.requires_grad)
    again = makes_rows_again(dispatcher, config.recipe, Needs(*needs) if backward else None, ids.shape[1])
    names = dispatcher.key, config.recipe.name, config.backend.name
    how = *names, wgrad_scale, config.activation.packed, lora_scale, needs, backward, again
    tensors = [each for kind in kinds for each in kind]
    out, *others = forward_op(x, weights, ids, tensors, [len(kind) for kind in kinds], *how, drops)
    return out, others[-1].detach() if drops else None


class _OpParameters(NamedTuple):
    """The parameters of an op, which gets them as one list of tensors. `counts`: number of tensors per field."""

    gate_up_proj: AnyWeight
    down_proj: Tensor | FrozenWeight
    gate_up_bias: Tensor | None
    lora: LoRAWeights | None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], counts: Sequence[int], lora_scale: float = 0.0) -> "_OpParameters":
        one_by_one = iter(tensors)
        gate_up, down, bias, four = ([*itertools.islice(one_by_one, count)] for count in counts)
        gate_up_proj, down_proj = (
            FrozenWeight(*w) if w[0].dtype == torch.uint8 else join_parts(w) for w in (gate_up, down)
        )
        lora = LoRAWeights(four[0], four[1], four[2], four[3], lora_scale) if four else None
        return cls(gate_up_proj, down_proj, bias[0] if bias else None, lora)

    @property
    def elements(self) -> tuple[int, int]:
        """Number of elements of one expert's gate_up_proj, and of its down_proj."""
        gate_up = self.gate_up_proj if isinstance(self.gate_up_proj, tuple) else (self.gate_up_proj,)
        return sum(w.shape[1:].numel() for w in gate_up), self.down_proj.shape[1:].numel()


@torch.library.custom_op("mxep::layer_forward", mutates_args=())
def forward_op(
    x: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    parameters: list[Tensor],
    counts: list[int],
    dispatcher: str,
    recipe: str,
    backend: str,
    wgrad_scale: float,
    activation: list[float] | None,
    lora_scale: float,
    needs: list[bool],
    backward: bool,
    rows_again: bool,
    drops: bool,
) -> list[Tensor]:
    found, config = find_dispatcher(dispatcher), _config(x.device, recipe, backend, activation)
    found.begin(0)  # no layer number: one graph serves many layers
    given = ForwardInput(x, weights, expert_ids, *_OpParameters.of(parameters, counts, lora_scale))
    with found.watched(), torch.no_grad():
        which = Needs(*needs) if backward else None
        rehearse_once(given, found, config, which, rows_again=rows_again)
        rowwise = held_rowwise(given.gate_up_proj, given.down_proj, config, dgrad=backward)
        how: dict[str, Any] = {"config": config, "needs": which, "rows_again": rows_again, "drops": drops}
        made = pass_of(found, forward_pass)(given, rowwise, **how)
    kept = [] if made.kept is None else [made.kept]
    if which is None:
        return [made.out, *kept]
    saved = tensors_in(made.saved)
    if weights_are_held():
        # The graph may overwrite its outputs, so held tensors, which come last, are returned as copies.
        own = sum(num_parts(config.recipe, which.keep_rows(rows_again, found.recomputes)))
        saved[own:] = [part.clone() for part in saved[own:]]
    return [made.out, *saved, *(getattr(made.routing.plan, name) for name in PLAN), *kept]


@forward_op.register_fake
def _(x: Tensor, weights: Tensor, ids: Tensor, parameters: list[Tensor], counts: list[int], *how: Any) -> list[Tensor]:
    dispatcher, recipe, backend, _, activation, lora_scale, needs, backward, rows_again, drops = how
    out, kept = x.new_empty(x.shape), [weights.new_empty(weights.shape)] if drops else []
    if not backward:
        return [out, *kept]
    found, config = find_dispatcher(dispatcher), _config(x.device, recipe, backend, activation)
    plan, which = fake_plan(ids, weights, found, config), Needs(*needs)
    of = _OpParameters.of(parameters, counts, lora_scale)
    lora = of.lora if which.lora else None
    both = of.gate_up_proj, of.down_proj
    keep_rows, kept_rows = which.keep_rows(rows_again, found.recomputes), found.kept_rows(Routing(plan, ids, 0))
    saved = fake_saved(x, plan, both, config, keep_rows, kept_rows=kept_rows, copied=found.borrows, lora=lora)
    return [out, *tensors_in(saved), *(getattr(plan, name) for name in PLAN), *kept]


@torch.library.custom_op("mxep::layer_backward", mutates_args=())
def backward_op(
    d_out: Tensor,
    x: Tensor | None,
    saved: list[Tensor],
    expert_ids: Tensor,
    parameters: list[Tensor],
    counts: list[int],
    dispatcher: str,
    recipe: str,
    backend: str,
    wgrad_scale: float,
    activation: list[float] | None,
    lora_scale: float,
    needs: list[bool],
) -> list[Tensor]:
    found, config = find_dispatcher(dispatcher), _config(d_out.device, recipe, backend, activation)
    fields: Any = dict(zip(PLAN, saved[-len(PLAN) :]))
    plan = RoutingPlan(**fields, alignment=config.recipe.group_alignment)
    routing, which = Routing(plan, expert_ids, found.num_local_experts), Needs(*needs)
    rows_again, of = x is not None, _OpParameters.of(parameters, counts, lora_scale)
    how: dict[str, Any] = {"keep_rows": which.keep_rows(rows_again, found.recomputes), "lora": which.lora}
    kept = join_saved(saved[: -len(PLAN)], d_out.dtype, of.down_proj.dtype, config.recipe, **how)
    with found.watched(), torch.no_grad():
        bias = of.gate_up_bias if found.recomputes else None
        given = BackwardInput(d_out, x, routing, kept, of.gate_up_proj, of.down_proj, None, None, of.lora, bias)
        colwise = held_colwise(of.gate_up_proj, of.down_proj, kept, config, recompute=kept.lacks_rows(plan))
        how = {"config": config, "wanted": which, "rows_again": rows_again}
        made = pass_of(found, backward_pass)(given, colwise, **how, wgrad_scale=wgrad_scale)
    return tensors_in(made)


@backward_op.register_fake
def _(
    d_out: Tensor, x: Any, saved: Any, ids: Tensor, parameters: list[Tensor], counts: list[int], *how: Any
) -> list[Tensor]:
    d_weights, needs = d_out.new_empty(ids.shape, dtype=torch.float32), Needs(*how[-1])
    grads, of = [d_out.new_empty(d_out.shape), d_weights], _OpParameters.of(parameters, counts)
    halves: Any = of.gate_up_proj if isinstance(of.gate_up_proj, tuple) else (of.gate_up_proj,)
    if needs.gate_up_proj:
        grads.append(halves[0].new_empty((2, *halves[0].shape)) if len(halves) == 2 else empty_gradient(halves[0]))
    if needs.down_proj:
        grads.append(empty_gradient(of.down_proj))  # type: ignore[arg-type]  # frozen weights need none
    if needs.gate_up_bias:
        grads.append(d_weights.new_empty(halves[0].shape[0], sum(half.shape[1] for half in halves)))
    if needs.lora and of.lora is not None:
        grads += [each.new_empty(each.shape) for each in of.lora.tensors]
    return grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, _, expert_ids, parameters, counts, *ctx.names, _, rows_again, drops = inputs
    saved = output[1:-1] if drops else output[1:]
    ctx.bias_dtype, ctx.counts = parameters[sum(counts[:2])].dtype if counts[2] else None, counts
    ctx.save_for_backward(x if rows_again else None, expert_ids, *parameters, *saved)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, expert_ids, *found = ctx.saved_tensors  # may be read only once
    counts, needs = ctx.counts, ctx.names[-1]
    parameters, saved = found[: sum(counts)], found[sum(counts) :]
    del found
    dx, d_weights, *rest = backward_op(grads[0], x, saved, expert_ids, parameters, counts, *ctx.names)
    made: list[Any] = []
    for need, count in zip(needs, counts):
        if not need:
            made += [None] * count
        elif count == 2:  # gate and up are two parameters
            made += rest.pop(0)
        else:
            made += [rest.pop(0) for _ in range(count)]
    if needs[2]:
        made[sum(counts[:2])] = made[sum(counts[:2])].to(ctx.bias_dtype)
    return dx, d_weights, None, made, *[None] * 11


forward_op.register_autograd(_differentiate, setup_context=_setup_context)
# Otherwise a compiler would drop ops with empty results. Peers need the exchanges of a rank without tokens, too.
for _op in (torch.ops.mxep.layer_forward.default, torch.ops.mxep.layer_backward.default):
    has_side_effect(_op)


def _config(device: torch.device, recipe: str, backend: str, activation: Sequence[float] | None) -> LayerConfig:
    return LayerConfig(_recipe(recipe), select(backend, device), SwiGLU.unpacked(activation))


_recipe = functools.cache(Recipe.named)
