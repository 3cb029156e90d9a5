"""Routing replay for RL: a forward sends tokens to the experts of an earlier forward.

    rollout, or the old policy's forward          training
    ids of each token's experts            ->     with replay_routing(model, ids):   loss and backward within
                                                      weights are the router's own, with gradients

Only the choice is replayed: the router computes its scores, and takes those of the given experts instead of the top k.
Normalization, scaling and selection bias are the model's own code. In the MoE block, and only there, the call of
`torch.topk` over (T, E) is replaced.

T tokens (batch times length), E experts, K experts a token, L layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mxep.ep.router import recomputing

from .experts import experts_in, is_experts
from .optimize import eagerly

Ids = Tensor | Sequence[Tensor]


@contextmanager
def replay_routing(model: nn.Module, ids: Ids) -> Iterator[None]:
    """While open, forwards of `model`, and their recomputation in backward, send tokens to the experts `ids`.

    ids: (..., L, K) of any integer dtype, tokens in the model's order, as (batch, length, L, K) or (T, L, K). L is
        the number of MoE layers, or of all layers; ids of dense layers are then ignored. Or a sequence of (..., K), one
        for each MoE layer. -1: the router chooses for this token, for example the last one, which has no ids.

    Layers that choose experts by the token alone (DeepSeek-V4's first three) ignore their ids.
    An id that a token has twice runs that expert twice, with both weights. Outputs are summed in the order of ids, so
    two forwards are bitwise equal only for the same order.

    Raises ValueError for other shapes and dtypes, and for ids that are no experts. A forward raises ValueError for
    another number of tokens, or if the router does not use `torch.topk`. Syncs with the device once. Compiled layers
    run eagerly.
    """
    blocks = _blocks(model)
    own: dict[Any, Any] = {}
    for (name, block), chosen in zip(blocks.items(), _ids_by_layer(model, ids, blocks)):
        if not getattr(block, "is_hash", False):
            own[block] = block.__dict__.get("forward")
            block.forward = functools.partial(_replay, block.forward, name, _num_experts(block), chosen)
    try:
        with eagerly(model):
            yield
    finally:
        for block, forward in own.items():
            if forward is None:
                del block.forward
            else:
                block.forward = forward


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """While open, each MoE layer appends a forward's ids (T, K) to its list. `joined_routing` joins them.

    Compiled layers run eagerly. Checkpoints of the last forward recompute eagerly, even after this is closed.
    """
    blocks = _blocks(model)
    found: list[list[Tensor]] = [[] for _ in blocks]
    hooks = []
    for block, into in zip(blocks.values(), found):
        experts = next(module for module in block.modules() if is_experts(module))

        def keep(module: nn.Module, given: Any, how: Any, into: list[Tensor] = into) -> None:
            if not recomputing():
                into.append((given[1] if len(given) > 1 else how["top_k_index"]).detach())

        hooks.append(experts.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with eagerly(model):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def joined_routing(found: list[list[Tensor]], batch: int) -> Tensor:
    """Join the ids that `record_routing` kept in a `generate`: int32 (batch, length, L, K), for L MoE layers.

    The last generated token was never an input, so length is one less than that of `generate`'s result. Raises
    ValueError if there was no forward, or one with another number of sequences.
    """
    if not found or not all(found):
        raise ValueError("joined_routing: expected forwards within record_routing, got none of some layers")
    for ids in found[0]:
        if batch < 1 or len(ids) % batch:
            raise ValueError(f"batch: expected the number of sequences of {len(ids)} tokens, got {batch}")
    layers = [torch.cat([ids.view(batch, -1, ids.shape[-1]) for ids in calls], 1) for calls in found]
    return torch.stack(layers, 2).int()


def _replay(forward: Any, name: str, num_experts: int, ids: Tensor, *given: Any, **how: Any) -> Any:
    """Forward of an MoE block with the router's choice replaced."""
    with (mode := _Chosen(name, num_experts, ids)):
        out = forward(*given, **how)
    if not mode.done and mode.other_k is not None:
        raise ValueError(f"{name}: expected ids of {mode.other_k} experts per token, got {ids.shape[-1]}")
    if not mode.done:
        raise ValueError(f"{name}: expected a router that calls torch.topk over {num_experts} experts")
    return out


class _Chosen(TorchFunctionMode):
    """Makes top k over experts return the given ids (T, K) and their scores.

    done: True after that. other_k: the last K of a top k over experts that was left alone.
    """

    def __init__(self, name: str, num_experts: int, ids: Tensor) -> None:
        super().__init__()
        self.name, self.num_experts, self.ids, self.done = name, num_experts, ids, False
        self.other_k: int | None = None
        self.masked: tuple[Any, Any] = (None, None)  # the last masked tensor, and what it was before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.masked_fill, Tensor.masked_fill, torch.topk, Tensor.topk):
            return out
        scores = args[0] if args else kwargs["input"]
        if func in (torch.masked_fill, Tensor.masked_fill):
            self.masked = out, scores
            return out
        if scores.shape[-1] != self.num_experts or scores.dim() != 2:
            return out  # top k over groups of experts
        if (k := out.indices.shape[-1]) != self.ids.shape[-1]:
            self.other_k = k
            return out  # in an auxiliary loss
        if scores is self.masked[0]:  # DeepSeek-V2 takes weights from scores that are 0 in groups it did not choose
            scores = self.masked[1]
        if len(scores) != len(self.ids):
            raise ValueError(f"{self.name}: expected ids of {len(scores)} tokens, got {len(self.ids)}")
        self.done = True
        ids = self.ids.to(scores.device)
        ids = torch.where((ids < 0).any(-1, keepdim=True), out.indices, ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _blocks(model: nn.Module) -> dict[str, Any]:
    """The modules around routers and experts, by name."""
    names = list(experts_in(model, "routing"))
    while wrapped := [name for name in names if name.endswith(".base_layer")]:  # wrapped by PEFT
        names = [name.removesuffix(".base_layer") if name in wrapped else name for name in names]
    return {parent: model.get_submodule(parent) for parent in (name.rpartition(".")[0] for name in names)}


def _num_experts(block: nn.Module) -> int:
    experts: Any = next(module for module in block.modules() if is_experts(module))
    return int(experts.num_experts)


def _ids_by_layer(model: nn.Module, ids: Ids, blocks: dict[str, Any]) -> list[Tensor]:
    """Check ids, and return them as int64 (T, K) for each MoE layer."""
    if isinstance(ids, Tensor):
        layers = ids.shape[-2] if ids.dim() > 2 else 0
        numbers = [int(found[1]) for name in blocks if (found := re.search(r"\.layers\.(\d+)\.", f".{name}."))]
        config: Any = getattr(model, "config", None)
        depth = None if config is None else config.get_text_config().num_hidden_layers
        if layers == len(blocks):
            numbers = list(range(layers))
        elif layers != depth or len(numbers) != len(blocks):
            raise ValueError(
                f"ids: expected (..., L, K) with L {len(blocks)} MoE layers or {depth} layers, got {tuple(ids.shape)}"
            )
        given = [ids[..., number, :] for number in numbers]
    else:
        given = list(ids)
        if len(given) != len(blocks):
            raise ValueError(f"ids: expected (T, K) for each of {len(blocks)} MoE layers, got {len(given)}")
    chosen = []
    for each in given:
        if each.is_floating_point() or each.is_complex() or each.dtype == torch.bool:
            raise ValueError(f"ids: expected integers, got {each.dtype}")
        chosen.append(each.reshape(-1, each.shape[-1]).long())
    if not all(each.numel() for each in chosen):
        return chosen
    bounds = torch.stack([torch.stack(each.aminmax()) for each in chosen])
    for (name, block), (low, high) in zip(blocks.items(), bounds.tolist()):
        num_experts = _num_experts(block)
        if low < -1 or high >= num_experts:
            raise ValueError(f"{name}: expected ids from -1 to {num_experts - 1}, got {low} to {high}")
    return chosen
