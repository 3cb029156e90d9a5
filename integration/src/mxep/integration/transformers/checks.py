"""Checks of a model in training: device errors, expert load, and whether mxep computes its experts.

transformers takes `experts_implementation="mxep_mxfp8"` for every model, but reaches only experts that
`@use_experts_implementation` decorates. Others run their own code, and so do those with a forward of
another library. So modules and calls count here, not the name in a config.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxep.comms import PeersDisagree

from .implementation import Implementation
from .layer import KEY, Layer, is_experts, layers, say_where_max_tokens_is_set
from .versions import ALL_EXPERTS_FUNCTIONS

_OF_EXPERTS = re.compile(r"(Experts?|M[oO][eEA])$")
"""Ends of class names of modules that hold experts, as `DbrxExperts`, `JetMoeMoE` and `DogeCDMoE`."""

_CURES = {
    "Llama4": "mxep.integration.transformers.route_llama4(model, {name!r})",
    "Step3p7Experts": "mxep.integration.transformers.route_experts(model, {name!r})",
    "LongcatFlash": "mxep.integration.transformers.route_experts(model, {name!r})",
}
_REPLACED = (
    "leave out what replaced them or their block (Trainer: use_liger_kernel=False; Liger: swiglu=False; transformers: "
    "use_kernels=False)"
)
_NO_WAY = (
    "load the model without a name of mxep, which has no way to compute these; or, if another library put them there, "
    "as Liger does, leave that out"
)


def check(model: nn.Module) -> None:
    """Raise what went wrong on the device since the last check, as `MoE.check`: once a step, before the optimizer.

    RuntimeError if a module of experts runs code of its own though its config names mxep.
    """
    raise_unserved(model)
    for dispatcher in {id(layer.dispatcher): layer.dispatcher for _, layer in layers(model)}.values():
        try:
            dispatcher.check()
        except PeersDisagree as error:
            say_where_max_tokens_is_set(error)
            raise


@torch.no_grad()
def load_report(model: nn.Module) -> dict[str, dict[str, float]]:
    """By name of each module of experts, of its last forward in training (eager, with gradients on):

    ``rows``: that this rank's experts computed, padding included. ``padding``: of these. ``busiest``: tokens of the
    busiest expert over the mean, of all ranks that share the experts. ``dead``: experts without a token.

    It reads from the device once. Ranks that share experts must call it together. Modules that have no such forward are
    left out; where all are, it warns and says why. RuntimeError as of `check`, and before mxep has computed any.
    """
    raise_unserved(model, ran=True)
    names, counted = [], []
    for name, layer in layers(model):
        if layer.trained_routing is None:
            continue
        stats, ids = layer.trained_routing.stats(), layer.trained_routing.expert_ids.flatten().long()
        tokens = torch.zeros(layer.dispatcher.num_experts + 1, dtype=torch.int64, device=ids.device)
        tokens.scatter_add_(0, ids.clamp_min(-1) + 1, torch.ones_like(ids))
        tokens = tokens[1:]
        if layer.dispatcher.group is not None:
            dist.all_reduce(tokens, group=layer.dispatcher.group)
        busiest = tokens.max() / tokens.double().mean().clamp_min(1e-9)
        names.append(name)
        counted.append(torch.stack((stats["valid"], stats["padding"], busiest, (tokens == 0).sum())))
    if not counted:
        if why := _why_no_load(model):
            warnings.warn(f"load_report: {why}", stacklevel=2)
        return {}
    keys = "rows", "padding", "busiest", "dead"
    return {name: dict(zip(keys, values)) for name, values in zip(names, torch.stack(counted).tolist())}


def _why_no_load(model: nn.Module) -> str | None:
    """None of a model that mxep never ran."""
    if not (found := list(layers(model))):
        return None
    configs = [model.get_submodule(name).config for name, layer in found if not layer.parallel]
    if configs and not any(map(_implementation, configs)):
        name = getattr(configs[0], "_experts_implementation", None)
        return f"experts_implementation is {name!r} now, of whose forwards mxep knows nothing"
    if all(layer.last_routing is None for _, layer in found):
        return "the last forwards were compiled, and a graph keeps no routing: call the model uncompiled for a report"
    return "there was no forward in training, with gradients on"


def raise_unserved(model: nn.Module, *, ran: bool = False) -> None:
    """RuntimeError if mxep does not compute a module of experts though its config names it; the message has the cure.

    ran: whether a forward of the model ran for certain.
    """
    found = list(_unserved(model, ran))
    if not found:
        return
    modules = ", ".join(f"{name} ({kind})" for name, kind, _, _ in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    name, cure = found[0][2:]
    raise RuntimeError(
        f"experts_implementation: got {name!r}, but mxep does not compute {modules}{more}, want it to: "
        f"{cure.format(name=name)}"
    )


def _unserved(model: nn.Module, ran: bool) -> Iterator[tuple[str, str, str, str]]:
    """(module's name, its class, the implementation that its config names, the cure) of each that is not ours."""
    none_called = not any(layer.called for _, layer in layers(model))
    for name, module, config in _modules_of_experts(model):
        layer: Layer | None = module.__dict__.get(KEY)
        if layer is not None and layer.called and _reaches_mxep(module.forward):
            continue
        own = getattr(module, "config", config)
        wanted, named = _implementation(config), _implementation(own)
        kind = type(module).__name__
        if not is_experts(module):
            if named is not None:
                yield name, kind, named.name, next((cure for of, cure in _CURES.items() if of in kind), _NO_WAY)
        elif named is None and (layer is None or not layer.parallel):
            if wanted is not None:
                got = getattr(own, "_experts_implementation", None)
                yield name, kind, wanted.name, f"its config names {got!r}: model.set_experts_implementation({{name!r}})"
        else:
            has_gradients = any(p.grad is not None for p in module.parameters())
            of = named or (layer and layer.made_for)
            assert isinstance(of, Implementation)
            if not _reaches_mxep(module.forward) or has_gradients:
                yield name, kind, of.name, _REPLACED
            elif ran and none_called:
                yield name, kind, of.name, f"run a forward first, or {_REPLACED}"


def _modules_of_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Each outermost module that holds experts, with the config of the model around it."""
    configs: dict[str, Any] = {}
    inside: list[str] = []
    decorated = [name for name, module in model.named_modules() if is_experts(module)]
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        config = configs.get(parent) if name else None
        configs[name] = config
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if is_experts(module):
            yield name, module, config
            continue
        own = getattr(module, "config", None)
        if hasattr(own, "_experts_implementation"):
            configs[name] = own
        holds = name.rpartition(".")[2] == "experts" or _OF_EXPERTS.search(type(module).__name__)
        if holds and name and not any(inner.startswith(f"{name}.") for inner in decorated):
            inside.append(name)
            yield name, module, configs[name]


def _implementation(config: Any) -> Implementation | None:
    found = ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None), None)
    return found if isinstance(found, Implementation) else None


def _reaches_mxep(forward: Any, depth: int = 6) -> bool:
    """Whether a forward is transformers' decorated one, or mxep's, or a wrapper of either.

    It follows what functools, accelerate, torch.compile and transformers' expert parallelism wrap by.
    """
    if forward is ALL_EXPERTS_FUNCTIONS or isinstance(forward, Layer):
        return True
    if str(getattr(forward, "__module__", "")).startswith("mxep."):
        return True
    if depth == 0 or isinstance(forward, nn.Module | Tensor | type) or not hasattr(forward, "__dict__"):
        return False
    inner = [getattr(forward, name, None) for name in ("__func__", "func", "__wrapped__", "_torchdynamo_orig_callable")]
    inner += [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
    inner += vars(forward).values()
    return any(_reaches_mxep(each, depth - 1) for each in inner if each is not None)
