"""The weights of routed experts (`Experts`), and the layer without its router (`run_experts`).

The first F rows of gate_up_proj are the gate, the next F the up part. If the activation is interleaved, gate and up
rows alternate.

T tokens of this rank, K experts per token, E experts in all, e local experts, D model dim, F hidden dim.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mxep.gemm import Recipe
from mxep.gemm.backends import Backend, select
from mxep.gemm.frozen import FrozenWeight
from mxep.gemm.functional import between_graphs
from mxep.gemm.quantize_once import Weight, joined, weight_parts
from mxep.gemm.recipe import check_weight
from mxep.quant import SwiGLU
from mxep.runtime.lengths import first_rows
from mxep.runtime.op import check_no_tangent, check_no_transform

from .autograd import (
    Layer,
    NodeState,
    Parameters,
    compiled_layer,
    join_lora,
    parameter_needs,
    unsupported_reason,
)
from .dispatchers.base import Routing, TokenDispatcher
from .dtensors import empty_share, init_normal_, local_tensor, local_weight
from .formats import PLAIN, AnyWeight, LayerConfig, held_rowwise, makes_rows_again
from .functional import Combine, Weighted, add_down_bias, checked_tokens, dispatch, expert_mlp
from .layer import ForwardInput, MainGrads, forward_pass, pass_of
from .lora import LoRAWeights
from .rehearse import rehearse_once


class Experts(nn.Module):
    """All experts of a layer. With a 1-D mesh, each rank holds its share of them.

    Parameters: ``gate_up_proj`` (E, 2F, D), ``down_proj`` (E, D, F). With ``bias`` also ``gate_up_bias`` (E, 2F) and
    ``down_bias`` (E, D), which are None otherwise. Weights are normal with std 1/sqrt(fan-in), biases are zero.

    With a mesh, parameters are DTensors sharded on dimension 0, and a rank allocates and draws only its own experts.
    Each expert has its own seed, so the weights do not depend on the number of ranks.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        bias: bool = False,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        gate_up, down = (num_experts, 2 * hidden_dim, dim), (num_experts, dim, hidden_dim)
        self.gate_up_proj = nn.Parameter(empty_share(gate_up, mesh, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(empty_share(down, mesh, device=device, dtype=dtype))
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = nn.Parameter(empty_share(gate_up[:2], mesh, device=device, dtype=dtype))
            self.down_bias = nn.Parameter(empty_share(down[:2], mesh, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights and set biases to zero. This also works after FSDP2 has sharded them."""
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for weight in (self.gate_up_proj, self.down_proj):
            init_normal_(weight, weight.shape[2] ** -0.5, per_expert=True)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, **how: Any) -> tuple[Tensor, Routing | None]:
        """:func:`run_experts` with these weights."""
        how |= {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return run_experts(x, expert_ids, weights, self.gate_up_proj, self.down_proj, **how)

    def extra_repr(self) -> str:
        num_experts, dim, hidden_dim = self.down_proj.shape
        local = local_tensor(self.down_proj.data).shape[0]
        here = "" if local == num_experts else f", local_experts={local}"
        return f"num_experts={num_experts}{here}, dim={dim}, hidden_dim={hidden_dim}, dtype={self.down_proj.dtype}"


def run_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Weight | FrozenWeight,
    down_proj: Tensor | FrozenWeight,
    *,
    dispatcher: TokenDispatcher,
    recipe: Recipe | str,
    backend: str | Backend = "auto",
    wgrad_scale: float = 1.0,
    activation: SwiGLU = PLAIN,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    score_before_experts: bool = False,
    lora: LoRAWeights | None = None,
    layer: int = 0,
) -> tuple[Tensor, Routing | None]:
    """Send tokens to their experts, run the experts, and sum each token's results. Differentiable.

    Args:
        x: (T, D) bf16 or fp32.
        expert_ids: (T, K) int32 or int64, -1 for "not routed".
        weights: (T, K) fp32, the routing weights.
        gate_up_proj: (e, 2F, D), gate rows first; or a pair of gate and up, (e, F, D) each; or a FrozenWeight.
        down_proj: (e, D, F), or a FrozenWeight. Either both weights are frozen or none.
        dispatcher: moves the tokens.
        recipe: a Recipe or its name.
        backend: backend of the grouped GEMM.
        wgrad_scale: factor for gradients of weights and biases.
        activation: a `mxep.quant.SwiGLU`.
        gate_up_bias: (e, 2F), also as a DTensor, or None.
        down_bias: (e, D), also as a DTensor, or None. It is multiplied by the routing weight. Each rank gathers the
            down biases of all experts.
        score_before_experts: True to multiply an expert's input by the routing weight, instead of its output (Llama 4).
            Dispatcher, routing and ``max_tokens`` then count T * K tokens.
        lora: A and B of this rank's experts, also as DTensors, as `LoRAExperts` has them. None: no LoRA.
        layer: from ``dispatcher.number_layer()``. If two ranks call numbered layers in different orders, they raise
            PeersDisagree. 0: no number, as always under torch.compile.

    Returns:
        out: (T, D), summed over each token's experts.
        routing: a Routing, or None under torch.compile.

    Weights may be DTensors with this rank's share, as in `Experts`; their gradients are DTensors, too. If a weight has
    an attribute ``main_grad``, its gradient is added to main_grad, not to `.grad`. main_grad is fp32, with the shape of
    the weight or of this rank's share. A pair of weights ignores it. Frozen weights (`mxep.gemm.freeze`) get no
    gradients, and each is expanded for one GEMM at a time.

    Under torch.compile this function is one op in the graph. These cases break the graph instead. With `fullgraph=True`
    and in torch.export they raise, with the reason:

    - a `main_grad`, or an open `accumulate_in_place`;
    - a dispatcher that learns its sizes at run time, as without ``max_tokens``;
    - a recipe or a backend without a name;
    - wgrad "bf16", for which the functions of `functional.py` are used.

    Raises ValueError as `dispatch` and `grouped_mm` do, before any exchange.
    """
    if not torch.compiler.is_compiling():
        check_no_transform()
    recipe = Recipe.named(recipe)
    main_grads = _main_grad(gate_up_proj), _main_grad(down_proj)
    config = LayerConfig(recipe, select(backend, x.device), activation)
    frozen = frozen_pair(gate_up_proj, down_proj)
    dense: Any = gate_up_proj, down_proj  # used only if they are not frozen
    reason: str | None = None
    if torch.compiler.is_compiling():
        reason = unsupported_reason(dispatcher, config, main_grads)
    if reason is not None:
        if not torch.compiler.is_dynamo_compiling():  # under torch.export, which allows no graph breaks
            raise RuntimeError(f"run_experts is in no exported graph: {reason}")
        torch._dynamo.graph_break(msg=f"run_experts is in no graph: {reason}")
        how: dict[str, Any] = {"dispatcher": dispatcher, "recipe": recipe, "backend": backend, "activation": activation}
        how |= {"wgrad_scale": wgrad_scale, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
        how |= {"score_before_experts": score_before_experts, "lora": lora}
        return between_graphs(run_experts, x, expert_ids, weights, gate_up_proj, down_proj, **how)
    if not torch.compiler.is_compiling():
        dispatcher.begin(layer)
    per_token = expert_ids.shape[-1] if score_before_experts else 1
    if score_before_experts:
        routed = (expert_ids >= 0) & (expert_ids < dispatcher.num_experts)
        weights = torch.where(routed, weights, 0.0)  # a weight of -1 may be NaN, and NaN * 0 is NaN
        if dispatcher.capacity.overflow == "drop":
            x = Weighted.apply(x, weights).flatten(0, 1)  # type: ignore[no-untyped-call]
        else:
            x = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)  # fp32 product, rounded once
        shape, expert_ids = expert_ids.shape, expert_ids.reshape(-1, 1)
        weights = torch.ones_like(expert_ids, dtype=weights.dtype)
    bias = local_weight(down_bias)
    if bias is not None and bias.shape != (wanted := (dispatcher.num_local_experts, x.shape[1])):
        raise ValueError(f"down_bias: got shape {tuple(bias.shape)}, want (experts here, D) = {wanted}")
    drops = bias is not None and dispatcher.capacity.overflow == "drop"
    unquantized_wgrad = recipe.wgrad == "bf16" and frozen is None and lora is None
    ids = expert_ids if unquantized_wgrad else checked_tokens(x, expert_ids, weights, dispatcher)
    if lora is not None:
        _check_lora(x, lora, dispatcher.num_local_experts, gate_up_proj, down_proj)
    gate = up = down = None
    if frozen is None:
        (gate, up, *_), down = (*weight_parts(dense[0]), None), dense[1]
    parameters = Parameters(gate, down, up, gate_up_bias, *(() if lora is None else lora.tensors))
    mine = parameters.local()
    proj: tuple[Any, Any] = frozen or (
        mine.gate_up_proj if mine.up_proj is None else (mine.gate_up_proj, mine.up_proj),
        mine.down_proj,
    )
    _check_parameters(x, *proj, mine.gate_up_bias, dispatcher, config, main_grads)
    if lora is not None and recipe.wgrad == "bf16" and frozen is None and any(w.requires_grad for w in dense):
        raise ValueError(f"lora: expected weights without gradients for recipe {recipe.name}: freeze them")
    of_layer: dict[str, Any] = {"dispatcher": dispatcher, "config": config, "wgrad_scale": wgrad_scale, "drops": drops}
    scale = 0.0 if lora is None else lora.scale
    routing: Routing | None = None
    kept: Tensor | None = None
    if unquantized_wgrad:
        with dispatcher.watched():
            given = x, ids, weights, *dense, gate_up_bias
            out, kept, routing = _compose(*given, main_grads=main_grads, **of_layer)
    elif torch.compiler.is_compiling():
        out, kept = compiled_layer(x, ids, weights, proj, mine, lora_scale=scale, **of_layer)
    else:
        grads = [each is not None and each.requires_grad for each in parameters]
        backward = torch.is_grad_enabled() and (any(grads) or x.requires_grad or weights.requires_grad)
        check_no_tangent(x, weights, *mine)
        with dispatcher.watched(), torch.no_grad():
            # With room, a replayed graph reads tokens where they lie, so they must be dense.
            room = dispatcher.room_for(x, per_token)
            of_tokens = (x, weights) if room is None else (x.contiguous(), weights.contiguous())
            into = ForwardInput(*of_tokens, ids, *proj, mine.gate_up_bias, join_lora(mine, scale))
            needs = parameter_needs(grads) if backward else None
            again = makes_rows_again(dispatcher, recipe, needs, ids.shape[1])
            rehearse_once(into, dispatcher, config, needs, main_grads, rows_again=again, room=room)
            rowwise = held_rowwise(*proj, config, dgrad=backward)
            forward = pass_of(dispatcher, forward_pass)
            made = forward(into, rowwise, config=config, needs=needs, rows_again=again, drops=drops, room=room)
            made = dataclasses.replace(made, out=first_rows(made.out, len(x)))
        routing, out = made.routing, made.out
        kept = None if made.kept is None else first_rows(made.kept, len(x))
        if backward:
            state = NodeState(dispatcher, config, main_grads, wgrad_scale, again, made, frozen, scale)
            out = Layer.apply(x, weights, *parameters, state)  # type: ignore[no-untyped-call]
        del made
    if bias is not None:
        group = dispatcher.group if dispatcher.spans_ranks else None
        if kept is not None:  # dropped pairs are not routed
            expert_ids = torch.where(kept > 0, expert_ids, -1)
        out = add_down_bias(out, expert_ids, weights, bias, scale=wgrad_scale, group=group)
    if score_before_experts and shape[1] > 1:
        out = out.unflatten(0, shape).sum(1)
    return out, routing


def _compose(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    proj: Weight,
    down: Tensor,
    gate_up_bias: Tensor | None,
    *,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    main_grads: MainGrads,
    wgrad_scale: float,
    drops: bool,
) -> tuple[Tensor, Tensor | None, Routing]:
    """`run_experts` with unquantized weight gradients (wgrad "bf16").

    Returns out (T, D), kept (T, K) or None, and the routing. kept: 1 for pairs that were computed, 0 for dropped ones.
    drops: True to return kept.
    """
    rows, row_weight, routing = dispatch(x, expert_ids, weights, dispatcher=dispatcher, recipe=config.recipe)
    y = expert_mlp(
        rows,
        local_weight(joined(proj)),
        local_weight(down),
        routing.plan.offs,
        row_weight=row_weight,
        recipe=config.recipe,
        backend=config.backend,
        main_grads=main_grads,
        wgrad_scale=wgrad_scale,
        activation=config.activation,
        gate_up_bias=local_weight(gate_up_bias),
        dispatcher=dispatcher,
    )
    out, kept = Combine.apply(y, routing, dispatcher, config.recipe, drops)  # type: ignore[no-untyped-call]
    return out, kept, routing


def _check_parameters(
    x: Tensor,
    gate_up_proj: AnyWeight,
    down_proj: Tensor | FrozenWeight,
    gate_up_bias: Tensor | None,
    dispatcher: TokenDispatcher,
    config: LayerConfig,
    main_grads: MainGrads,
) -> None:
    """Raise ValueError if parameters do not fit x, each other, the dispatcher or the recipe."""
    e, dim, hidden_dim = dispatcher.num_local_experts, x.shape[1], down_proj.shape[-1] if len(down_proj.shape) else 0
    wanted: list[Any] = [("down_proj", down_proj, main_grads[1], "(experts here, D, F)", (e, dim, hidden_dim))]
    if not isinstance(gate_up_proj, tuple):
        shape = e, 2 * hidden_dim, dim
        wanted.append(("gate_up_proj", gate_up_proj, main_grads[0], "(experts here, 2 F, D)", shape))
    else:
        if config.activation.interleaved:
            raise ValueError("activation: got interleaved gate and up, which are apart; join them, or not interleaved")
        if main_grads[0] is not None:
            raise ValueError("main_grad: got one of gate and up, which are apart; none, or join them")
        shape = e, hidden_dim, dim
        wanted += [(name, w, None, "(experts here, F, D)", shape) for name, w in zip(("gate", "up"), gate_up_proj)]
    for name, w, main_grad, meant, shape in wanted:
        if w.shape != shape:
            raise ValueError(f"{name}: got shape {tuple(w.shape)}, want {meant} = {shape}")
        check_weight(w, recipe=config.recipe, device=x.device, main_grad=main_grad, name=name)
    expected = e, 2 * hidden_dim
    if gate_up_bias is not None and (gate_up_bias.shape != expected or gate_up_bias.device != x.device):
        got = f"{tuple(gate_up_bias.shape)} on {gate_up_bias.device}"
        raise ValueError(f"gate_up_bias: got {got}, want (experts here, 2 F) = {expected} on {x.device}")


def _check_lora(x: Tensor, lora: LoRAWeights, experts: int, gate_up_proj: Any, down_proj: Any) -> None:
    """Raise ValueError if A or B does not fit the weights. experts: number of experts on this rank."""
    pairs = ("gate_up", gate_up_proj, lora.gate_up_A, lora.gate_up_B), ("down", down_proj, lora.down_A, lora.down_B)
    for name, weight, *both in pairs:
        if isinstance(weight, tuple):
            raise ValueError("lora: expected one gate_up_proj, got gate and up apart: join them")
        A, B = map(local_tensor, both)
        expected = (experts, A.shape[1], weight.shape[2]), (experts, weight.shape[1], A.shape[1])
        if (tuple(A.shape), tuple(B.shape)) != expected or {A.device, B.device} != {x.device}:
            got = f"{tuple(A.shape)} and {tuple(B.shape)} on {A.device}"
            raise ValueError(f"lora: expected A and B of {name} {expected} on {x.device}, got {got}")


def frozen_pair(gate_up_proj: object, down_proj: object) -> tuple[FrozenWeight, FrozenWeight] | None:
    """Return both weights if both are frozen, None if neither is. Raises ValueError if only one is."""
    if isinstance(gate_up_proj, FrozenWeight) and isinstance(down_proj, FrozenWeight):
        return gate_up_proj, down_proj
    if isinstance(gate_up_proj, FrozenWeight) or isinstance(down_proj, FrozenWeight):
        kinds = f"{type(gate_up_proj).__name__} and {type(down_proj).__name__}"
        raise ValueError(f"run_experts: expected both weights frozen or neither, got {kinds}: freeze the other")
    return None


def _main_grad(weight: Any) -> Tensor | None:
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return local_tensor(main_grad)
