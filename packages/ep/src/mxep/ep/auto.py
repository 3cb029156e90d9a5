"""Recipe "auto" of a layer: MXFP8 if it pays, else bf16. It is picked once, alike on all ranks.

    rows of an expert (`rows_per_expert`) -> `mxep.gemm.auto_recipe`, of="experts"

tokens: ``max_tokens`` if it is given. Otherwise it is the most tokens that a rank of the group brings to the first
training call, for which ranks communicate once. Until then, as in an earlier evaluation, the layer computes in bf16.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mxep.gemm import Recipe
from mxep.gemm.auto import AUTO, recipe_of_experts
from mxep.gemm.functional import between_graphs

from .dispatchers import TokenDispatcher
from .dispatchers.symmetric import most_tokens

BF16 = Recipe.bf16()


def rows_per_expert(tokens: int, top_k: int, ranks: int, num_experts: int) -> float:
    """Average rows of an expert if each rank that shares the experts has this many tokens.

    Example: 4096 tokens, top-8, 2 ranks, 128 experts: 512 rows.
    """
    return tokens * top_k * ranks / num_experts


def recipe_of_call(pick: Callable[..., Recipe | None], *given: Any) -> tuple[Recipe | Literal["auto"], Recipe]:
    """(recipe from this call on, recipe of this call) for "auto". pick: `pick_recipe`, called with ``given``."""
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
    """The recipe of "auto" for a layer from now on; None: not known yet, use bf16.

    x: (T, D), the tokens of a first call; None before it. training: True if the layer is in training mode.
    Without max_tokens it is collective over the dispatcher's group. It then raises ValueError if there are more ranks:
    ranks with other experts, or other copies of them, would pick by batches of their own.
    """
    if max_tokens is None:
        if x is None or not (training or torch.is_grad_enabled()):  # a reentrant checkpoint's forward has no grad
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
    """Log once per process, because layers are alike."""
    logging.getLogger("mxep.ep").info("recipe auto: %s", why)
