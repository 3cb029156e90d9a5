"""Parts of both torchtitan adapters: options, the routed experts' computation, the hook before steps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchtitan.components.optimizer import OptimizersContainer

from mxep.comms import Capacity
from mxep.ep import Dispatch, TokenDispatcher, make_dispatcher, run_experts
from mxep.ep.moe import pick_recipe
from mxep.gemm import Recipe, quantize_weights_once_a_step
from mxep.gemm.backends import BACKENDS
from mxep.gemm.recipe import recipe_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """How routed experts run.

    Attributes:
        recipe: "mxfp8", "fp8", "bf16" or another name of :class:`mxep.gemm.Recipe`. "auto" is MXFP8 if it pays for
            max_tokens, else bf16.
        dispatcher, max_tokens, timeout, ranks_per_node, nodes_per_token: as in :class:`mxep.ep.Dispatch`, for the
            ranks of the ep mesh. Without EP nothing travels. Set max_tokens to local_batch_size * seq_len / context
            parallel degree. torch.compile with EP needs max_tokens.
        capacity: rows that fit on a rank, as a multiple of the balanced load. None: the worst case.
        overflow: for rows over the capacity, "raise" before the optimizer steps, "drop", or "recompute", which drops
            none and saves less for backward than the worst case.
        dtype: of activations: "bfloat16", or "float32" if training.mixed_precision_param is float32.
        backend: of the grouped GEMM.
        quantize_once: whether the micro-batches of a step share quantized weights.
    """

    recipe: str = "mxfp8"
    dispatcher: str = "symmetric"
    capacity: float | None = None
    overflow: Literal["raise", "drop", "recompute"] = "raise"
    max_tokens: int | None = None
    timeout: float | None = None
    ranks_per_node: int | None = None
    nodes_per_token: int | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    backend: str = "auto"
    quantize_once: bool = False

    def check(self, dim: int, hidden_dim: int) -> None:
        """Raise ValueError for invalid values, and for sizes that the recipe cannot quantize."""
        recipe = recipe_of(self.recipe)
        if not isinstance(recipe, Recipe):
            if self.max_tokens is None:
                raise ValueError("recipe: got 'auto' without max_tokens, want both, as it is picked by that")
        elif dim % recipe.group_alignment or hidden_dim % recipe.group_alignment:
            raise ValueError(
                f"recipe {recipe.name} wants dim and hidden_dim in {recipe.group_alignment}s, got {dim}, {hidden_dim}"
            )
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: got {self.dtype!r}, wanted 'bfloat16' or 'float32'")
        check_backend(self.backend)
        if not isinstance(self.quantize_once, bool):
            raise ValueError(f"quantize_once: got {self.quantize_once!r}, want true or false")
        if self.capacity is None and self.overflow != "raise":
            raise ValueError(f"overflow={self.overflow!r} needs a capacity, such as 1.5")
        self.dispatch()

    def dispatch(self) -> Dispatch:
        """The options as a `Dispatch`. Raises ValueError as it does."""
        capacity: Capacity | float | None = self.capacity
        if self.overflow != "raise" and isinstance(capacity, int | float):
            capacity = Capacity.factor(capacity, self.overflow)
        names = "dispatcher", "max_tokens", "timeout", "ranks_per_node", "nodes_per_token"
        return Dispatch(capacity=capacity, **{name: getattr(self, name) for name in names})

    def make_dispatcher(self, num_experts: int, dim: int, group: dist.ProcessGroup | None) -> TokenDispatcher:
        """Make a group's dispatcher, which equal layers share. It is checked before each optimizer step."""
        dispatch = self.dispatch()
        if group is None:
            dispatch = Dispatch("local", dispatch.capacity, dispatch.max_tokens)
        made = make_dispatcher(dispatch, num_experts, dim=dim, dtype=getattr(torch, self.dtype), group=group)
        check_before_steps(made)
        if self.quantize_once:
            quantize_weights_once_a_step()
        return made

    def run(
        self,
        recipe: Recipe | str,
        x: Tensor,
        expert_ids: Tensor,
        scores: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        dispatcher: TokenDispatcher,
        layer: int,
    ) -> Tensor:
        """x (T, D) -> (T, D).

        expert_ids, scores: (T, K). weights: w1 (e, F, D), w2 (e, D, F), w3 (e, F, D), or DTensors of them. layer: from
        ``dispatcher.number_layer()``; 0 if compiled, as one graph serves all layers.

        Gradients of weights are sums over all ranks' tokens, because torchtitan divides the loss by all tokens.
        """
        if torch.compiler.is_compiling() and self.max_tokens is None and dispatcher.world_size > 1:
            raise ValueError("torch.compile with expert parallelism needs mxep's max_tokens")
        w1, w2, w3 = weights
        if not isinstance(recipe, Recipe):
            sizes = w2.shape[1], w2.shape[2], expert_ids.shape[1]
            picked = pick_recipe(None, *sizes, dispatcher, max_tokens=self.max_tokens)
            assert picked is not None
            recipe = picked
        how: dict[str, Any] = {"dispatcher": dispatcher, "recipe": recipe, "backend": self.backend, "layer": layer}
        return run_experts(x, expert_ids, scores.float(), (w1, w3), w2, **how)[0]


def check_backend(backend: str) -> None:
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend: got {backend!r}, want one of auto, {', '.join(BACKENDS)}")


_checked: weakref.WeakSet[TokenDispatcher] = weakref.WeakSet()


def check_before_steps(dispatcher: TokenDispatcher) -> None:
    """While the dispatcher lives, call its `check` before each step of torchtitan's optimizers."""
    if dispatcher in _checked:
        return
    _checked.add(dispatcher)
    here = weakref.ref(dispatcher)

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The container's step calls its optimizers' steps, which need no check.
        if isinstance(optimizer, OptimizersContainer) and (alive := here()) is not None:
            alive.check()

    weakref.finalize(dispatcher, register_optimizer_step_pre_hook(check).remove)
