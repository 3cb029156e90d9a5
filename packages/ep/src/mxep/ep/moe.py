"""MoE: a drop-in mixture-of-experts layer with expert parallelism.

x (..., D) -> router -> dispatch -> experts -> combine (+ shared expert) -> (..., D)

Recipe "auto" means MXFP8 if it pays for the number of routed tokens per expert, else bf16 (`mxep.gemm.auto_recipe`).
The layer picks once, and all ranks pick the same. The pick depends on ``max_tokens``. If max_tokens is not given, it
depends on the most tokens that any rank brings to the first training call, which takes one collective. Until then the
layer computes in bf16.

T tokens of this rank, D model dim, F hidden dim, E experts in all, e local experts, K experts per token, B sequences of
S tokens.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, Self, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mxep.gemm import Recipe
from mxep.gemm.functional import between_graphs
from mxep.gemm.recipe import AUTO, recipe_name, recipe_of, recipe_of_experts
from mxep.quant import SwiGLU

from .dispatchers import Dispatch, DispatchFields, Routing, TokenDispatcher, make_dispatcher
from .dispatchers.symmetric import most_tokens
from .dtensors import ep_mesh, group_of
from .experts import Experts
from .formats import PLAIN
from .functional import FLOATS
from .router import Router, check_sizes, checked_mask, recomputing
from .shared_expert import SharedExpert

BF16 = Recipe.bf16()


def rows_per_expert(tokens: int, top_k: int, ranks: int, num_experts: int) -> float:
    """Average number of routed tokens per expert. tokens: per rank. ranks: the number of ranks that share the experts.

    Example: 4096 tokens, top-8, 2 ranks, 128 experts: 512.
    """
    return tokens * top_k * ranks / num_experts


def recipe_of_call(pick: Callable[..., Recipe | None], *given: Any) -> tuple[Recipe | Literal["auto"], Recipe]:
    """For recipe "auto": (recipe of the layer from now on, recipe of this call).

    pick: `pick_recipe`, which is called with ``given``. While it returns None, the layer's recipe stays "auto".
    """
    picked: Recipe | None = between_graphs(pick, *given)
    return picked or AUTO, picked or BF16


def pick_recipe(
    x: Tensor | None,
    dim: int,
    hidden_dim: int,
    top_k: int,
    dispatcher: TokenDispatcher,
    *,
    max_tokens: int | None,
    training: bool = True,
) -> Recipe | None:
    """Return the recipe that "auto" picks for a layer. None: not known yet, use bf16.

    x: (T, D), the tokens of this call; None if there is no call yet. training: True if the layer is in training mode.
    If max_tokens is None, this is collective over the dispatcher's group. It then raises ValueError if there are ranks
    outside the group, because these might pick another recipe.
    """
    if max_tokens is None:
        if x is None or not (training or torch.is_grad_enabled()):  # grad is off in a reentrant checkpoint's forward
            return None
        if dist.is_initialized() and dist.get_world_size() > dispatcher.world_size:
            raise ValueError(
                f'recipe "auto": got {dist.get_world_size()} ranks, {dispatcher.world_size} of which share experts, '
                f"want the same pick on all of them: set max_tokens={len(x)} or more, or name a recipe"
            )
        max_tokens = most_tokens(len(x), x.device, dispatcher.group)
        if not max_tokens:
            return None
    rows = rows_per_expert(max_tokens, top_k, dispatcher.world_size, dispatcher.num_experts)
    recipe, why = recipe_of_experts(rows, dim, hidden_dim)
    if not torch.compiler.is_compiling():
        _log(why)
    return recipe


@functools.cache
def _log(why: str) -> None:
    """Log once per process, because all layers would log the same."""
    logging.getLogger("mxep.ep").info("recipe auto: %s", why)


class MoE(nn.Module):
    """A mixture-of-experts layer: takes ``(T, D)`` or ``(B, S, D)``, returns the same shape.

    Args:
        dim: D. With an MX recipe, a multiple of 32.
        hidden_dim: F. With an MX recipe, a multiple of 32.
        num_experts: E over all ranks, a multiple of the group's size.
        top_k: K, experts per token.
        group: the expert-parallel group, or a 1-D mesh, such as ``mesh["ep"]`` of a mesh with another dimension for
            FSDP2. All its ranks must call forward and backward together, with any number of tokens each. None: the
            default group if one is initialised, else this process alone.
        recipe: a :class:`mxep.gemm.Recipe` or its name, such as ``"bf16"``, ``"fp8"`` or ``"mxfp8"``. ``"auto"`` picks
            MXFP8 if it pays, else bf16 (:func:`mxep.gemm.auto_recipe`). If max_tokens is given, it picks at once,
            otherwise at the first training call. After the pick, the attribute ``recipe`` is a Recipe.
        dispatch: a :class:`Dispatch`: how tokens travel, and the limits. Instead, any of its fields may be given by
            keyword: ``dispatcher="local", max_tokens=64``.
        num_shared_experts: width of the shared expert, in units of F. It is a dense MLP in the layer's recipe, which
            every token takes. 0: none.
        shared_expert_gate: True to multiply the shared expert's output by sigmoid(x gate^T), one number per token
            (Qwen2-MoE).
        router: a module ``x (T, D) -> (expert_ids (T, K) int32, weights (T, K) fp32)``. Default: softmax over all
            experts, top-k, weights normalised to sum to 1.
        backend: backend of the grouped GEMM.
        activation: :class:`mxep.quant.SwiGLU`, clamped or not. Shared experts use it, too.
        bias: True to give routed experts biases.
        score_before_experts: True to multiply a routed expert's input by the routing weight, instead of its output
            (Llama 4). If top_k > 1, each of a token's top_k inputs then travels by itself, even to the same rank. They
            count as tokens in error messages, and in the ``max_tokens`` of a dispatcher that is shared.
        gradient_reduction: ``"mean"`` averages expert gradients over the group's ranks, as data parallelism does for
            all other gradients: do not divide again. ``"sum"`` sums them.
        device: device of the parameters.
        dtype: dtype of all parameters but the router's.

    Parameters:

    - ``router.weight`` (E, D), ``experts.gate_up_proj`` (E, 2F, D), ``experts.down_proj`` (E, D, F);
    - with ``bias``: ``experts.gate_up_bias`` (E, 2F), ``experts.down_bias`` (E, D);
    - with shared experts: ``shared.gate_up_proj``, ``shared.down_proj``; with their gate ``shared.gate`` (1, D).

    With a mesh or a group of W > 1 ranks, expert parameters are DTensors, and each rank holds E / W experts. If a
    weight has an attribute ``main_grad`` (fp32), its gradient is added to main_grad, not to `.grad`. Biases and the
    gate ignore main_grad.

    After forward, the attribute ``last_routing`` tells where tokens went. It is None for a compiled layer, after a
    failed forward, and in a copy of the layer. A checkpoint's recomputation does not set it.

    Raises ValueError on sizes that do not fit.
    """

    last_routing: Routing | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        recipe: str | Recipe = "mxfp8",
        dispatch: Dispatch | None = None,
        num_shared_experts: int = 0,
        shared_expert_gate: bool = False,
        router: nn.Module | None = None,
        backend: str = "auto",
        activation: SwiGLU = PLAIN,
        bias: bool = False,
        score_before_experts: bool = False,
        gradient_reduction: Literal["mean", "sum"] = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        **fields: Unpack[DispatchFields],
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts, top_k=top_k)
        check_sizes(0, num_shared_experts=num_shared_experts)
        if router is not None and not callable(router):
            raise ValueError(f"router: expected a module, such as mxep.ep.Router(...), got {router!r}")
        if not isinstance(activation, SwiGLU):
            raise ValueError(f"activation: got {activation!r}, want a mxep.quant.SwiGLU")
        recipe = recipe_of(recipe)
        if isinstance(recipe, Recipe) and recipe.scaling == "mx" and (dim % 32 or hidden_dim % 32):
            raise ValueError(f"recipe {recipe.name} wants dim and hidden_dim in 32s, got {dim}, {hidden_dim}")
        if dtype not in FLOATS:
            raise ValueError(f"dtype: got {dtype}, want one of {FLOATS}")
        if gradient_reduction not in ("mean", "sum"):
            raise ValueError(f"gradient_reduction must be 'mean' or 'sum', got {gradient_reduction!r}")
        if shared_expert_gate and not num_shared_experts:
            raise ValueError("shared_expert_gate: got num_shared_experts 0, want at least 1")
        self.score_before_experts = score_before_experts
        self.rows_per_token = top_k if score_before_experts else 1
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.top_k = top_k
        how = Dispatch.of(dispatch, fields)
        self._use_dispatch(how, num_experts, dtype, group)
        dispatcher, mesh = self.dispatcher, group if isinstance(group, DeviceMesh) else None
        if mesh is None and dispatcher.group is not None and dispatcher.world_size > 1:
            mesh = ep_mesh(dispatcher.group, torch.empty(0, device=device, dtype=torch.float32).device)
        self.max_tokens = how.max_tokens
        if self.dispatch is None and (sent := getattr(dispatcher, "max_tokens", None)) is not None:
            self.max_tokens = sent // self.rows_per_token
        self.auto = not isinstance(recipe, Recipe)
        self.recipe = self._pick(None) or recipe if self.auto else recipe
        self.backend = backend
        self.activation = activation
        self.gradient_reduction = gradient_reduction
        self.router = Router(dim, num_experts, top_k, device=device) if router is None else router
        self.experts = Experts(dim, hidden_dim, num_experts, bias=bias, mesh=mesh, device=device, dtype=dtype)
        self.shared = None
        if num_shared_experts:
            shared_dim = num_shared_experts * hidden_dim
            self.shared = SharedExpert(dim, shared_dim, gate=shared_expert_gate, device=device, dtype=dtype)
        self.last_routing = None
        self.register_load_state_dict_post_hook(_follow_dtype)  # type: ignore[no-untyped-call]

    def _use_dispatch(
        self, how: Dispatch, num_experts: int, dtype: torch.dtype, group: dist.ProcessGroup | DeviceMesh | None
    ) -> None:
        """Make the dispatcher and number the layer. Raises ValueError for a mesh of another size than the dispatcher's.

        num_experts: E. dtype: widest dtype of rows that are sent.
        """
        mesh, ranks = (group, group_of(group)) if isinstance(group, DeviceMesh) else (None, group)
        made = make_dispatcher(how.times(self.rows_per_token), num_experts, dim=self.dim, dtype=dtype, group=ranks)
        if mesh is not None and mesh.size() != made.world_size:
            raise ValueError(f"the dispatcher serves {made.world_size} ranks, the mesh has {mesh.size()}")
        self.dispatcher, self.number = made, made.number_layer()
        self.dispatch = None if made is how.dispatcher else how

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        expert_ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer.

        Args:
            x: (T, D) or (B, S, D), bf16 or fp32.
            mask: (T,) or (B, S) bool, False for padding, like attention masks. Padding goes to no expert, not even a
                shared one. Its output and gradient are 0, even if it holds NaN. It does not count in loads, losses and
                capacities, but it does count in max_tokens.
            expert_ids: (T, K) int32 or int64, with T the tokens of all B sequences. If given, these experts are used
                instead of the router's.
            weights: (T, K) fp32, the routing weights of expert_ids. If only one of both is given, raises ValueError.

        Returns the shape of x, in x's dtype, within torch.autocast in the autocast dtype.
        """
        keeps = torch.compiler.is_compiling() or not recomputing()
        router = self.router if isinstance(self.router, Router) else None
        if keeps:
            self.last_routing = None
            if router is not None and router.keep_logits:  # a routing from outside has no logits
                router.last_logits = router.last_expert_ids = None
        if x.dim() not in (2, 3) or x.shape[-1] != self.dim:
            raise ValueError(f"x must be (T, {self.dim}) or (B, S, {self.dim}), got {tuple(x.shape)}")
        tokens = x.reshape(-1, self.dim)
        padding = None
        if mask is not None:
            mask = checked_mask(mask, x)
            padding = ~mask[:, None]
            tokens = tokens.masked_fill(padding, 0.0)
        if expert_ids is None and weights is None:
            masked = mask is not None and router is not None
            expert_ids, weights = self.router(tokens, mask) if masked else self.router(tokens)
        if expert_ids is None or weights is None:
            raise ValueError("a routing from outside is expert_ids and weights, got one of them")
        # Ids or weights of another length would be broadcast here. The experts refuse them.
        if padding is not None and expert_ids.shape[:1] == weights.shape[:1] == tokens.shape[:1]:
            expert_ids, weights = expert_ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
        if torch.is_autocast_enabled(x.device.type):  # cast x as a linear does; the router has seen it uncast
            tokens = tokens.to(torch.get_autocast_dtype(x.device.type))
        recipe = self.recipe
        if not isinstance(recipe, Recipe):
            self.recipe, recipe = recipe_of_call(self._pick, tokens)
        options: dict[str, Any] = {"dispatcher": self.dispatcher, "recipe": recipe, "backend": self.backend}
        options["wgrad_scale"] = 1 / self.dispatcher.world_size if self.gradient_reduction == "mean" else 1.0
        options |= {"activation": self.activation, "score_before_experts": self.score_before_experts}
        if not torch.compiler.is_compiling():  # a graph with a number would not serve other layers
            options["layer"] = self.number
        out: Tensor
        out, routing = self.experts(tokens, expert_ids, weights, **options)
        if keeps:
            self.last_routing = routing
        if self.shared is not None:
            out = out + self.shared(tokens, recipe=recipe, backend=self.backend, activation=self.activation)
        if padding is not None:  # padding's incoming gradient may be NaN
            out = out.masked_fill(padding, 0.0)
        out = torch.ops.aten._unsafe_view.default(out, x.shape)  # not a view, as FSDP2 warns of views
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        _follow_dtype(self)
        return self

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "last_routing": None}

    def _pick(self, x: Tensor | None) -> Recipe | None:
        """The recipe that "auto" picks for this layer, or None if it is not known yet."""
        sizes = self.dim, self.hidden_dim, self.top_k
        return pick_recipe(x, *sizes, self.dispatcher, max_tokens=self.max_tokens, training=self.training)

    def check(self) -> None:
        """Raise errors that were found on the device since the last check. Call it once per step, before the optimizer.

        Raises CapacityExceeded if rows did not fit a capacity with overflow="raise". Raises ValueError if expert ids
        were out of range. All ranks raise the same error, so that all can skip the step. check syncs with the device.
        With the hierarchical dispatcher it is collective.
        """
        self.dispatcher.check()

    def reserve(self, max_tokens: int, device: torch.device | str | None = None) -> None:
        """Make room for calls with up to this many tokens of this rank (``x.shape[:-1].numel()``).

        Call it for layers made without ``max_tokens``, before a batch that is larger than all earlier ones, such as an
        evaluation's. It is collective over the group, and all ranks get room for the largest number that any rank
        passes. Raises ValueError on all ranks if the number exceeds the layer's max_tokens.

        device: the tokens' device. Only needed if experts lie on another device between calls, as when FSDP2 offloads
            them.
        """
        self.dispatcher.reserve(max_tokens * self.rows_per_token, device or self.experts.down_proj.device)

    def close(self) -> None:
        """End the use of this layer. All ranks must call it, once. When the group's last layer is closed, the memory
        shared with peers is freed. If layers are not closed, later layers reuse this memory."""
        self.dispatcher.close()

    def extra_repr(self) -> str:
        sizes = f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.experts.num_experts}"
        backend = "" if self.backend == "auto" else f", backend={getattr(self.backend, 'name', self.backend)}"
        return (
            f"{sizes}, top_k={self.top_k}, recipe={recipe_name(self.recipe)}, dispatcher={self.dispatcher!r}{backend}"
        )


def _follow_dtype(moe: MoE, _: object = None) -> None:
    """Make another dispatcher if the experts' dtype has become wider than the old one's buffers allow.

    A dispatcher that the user passed in is kept.
    """
    old, dtype = moe.dispatcher, moe.experts.down_proj.dtype
    if moe.dispatch is None or old.row_dtype is None or dtype not in FLOATS or dtype.itemsize <= old.row_dtype.itemsize:
        return
    how, sizes = moe.dispatch.times(moe.rows_per_token), {"dim": moe.dim, "dtype": dtype, "group": old.group}
    moe.dispatcher = make_dispatcher(how, old.num_experts, **sizes)  # type: ignore[arg-type]
    old.close()
