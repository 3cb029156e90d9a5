"""Converted linears that read one input, as one product: `linear_together` under the model's own forward.

    q = self.q_proj(x)    computes q, k and v, and leaves k and v for
    k = self.k_proj(x)    which takes k, and
    v = self.v_proj(x)    which takes v

An input is known by its identity: who calls a sibling with another tensor, or with the same one written to in between,
gets products of their own. That is why it is a call of its own, `join_linears`, and not part of `convert`: whether
siblings read one input is for their forward to say, and in cross-attention they do not.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from mxep.gemm.convert import state_of
from mxep.gemm.convert_linear import by_pattern
from mxep.gemm.convert_mode import Converted, tell
from mxep.gemm.together import linear_together

Module = TypeVar("Module", bound=nn.Module)

SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of linears that read one input in most models."""


def join_linears(model: Module, siblings: Sequence[Sequence[str]] = SIBLINGS, *, copies: bool = False) -> Module:
    """Compute converted linears that read one input together, in place; returns the model. Which ones is logged.

    siblings: names that children of one module have. Where all of them are linears that `convert` converted alike, of
    one dtype and as many in_features, they are joined; the first that is called computes for all. Say it only of those
    that are called with the same tensor: others are computed for nothing, and the first such call warns.
    Where weights are DTensors in forward (tensor parallelism, FSDP2 around each of them) they are separate, as before.
    copies: each result is a tensor of its own. Without, results are views of one tensor. torch then refuses to write to
    them in place, and a `.view` that joins their last two axes, as q.view(-1, head_dim). Models that do either need
    copies, which cost a read and a write of the results.
    Before PEFT, whose layers take the names. `revert` undoes it.

    ValueError: there are none.
    """
    found = []
    for prefix, parent in model.named_modules():
        for names in siblings:
            modules = [parent._modules.get(name) for name in names]
            if len(names) > 1 and _alike(modules):
                joined = Joined(modules, ", ".join(f"{prefix}.{name}".lstrip(".") for name in names), copies)
                for module in modules:
                    state_of(module).joined = joined  # type: ignore[union-attr]
                found.append(f"{prefix}.{' + '.join(names)}".lstrip("."))
    if not found:
        wanted = "; ".join(", ".join(names) for names in siblings)
        raise ValueError(f"join_linears: got no converted siblings, want nn.Linear modules named {wanted}, converted")
    results = "copies" if copies else "views of one, which no forward may write to (copies=True gives it tensors)"
    logging.getLogger("mxep.gemm").info("join_linears: %s; results are %s", by_pattern(found), results)
    return model


class Joined:
    """Siblings, and what was computed for those that have not been called yet."""

    def __init__(self, modules: Sequence[Any], names: str, copies: bool) -> None:
        self.modules = tuple(modules)
        self.names, self.copies = names, copies
        self.held: tuple[Tensor, Any, dict[int, Tensor]] | None = None
        self.warned = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"held": None}

    def forward(self, module: nn.Module, how: Converted, x: Tensor) -> Tensor | None:
        """What `module` makes of x; None: it has to compute it by itself."""
        place = next((i for i, each in enumerate(self.modules) if each is module), None)
        weights = [each.weight for each in self.modules]
        if place is None or any(hasattr(w, "device_mesh") for w in weights):  # None: a replica
            return None
        held, circumstances = self.held, _circumstances(x, *weights)
        if held is not None and held[0] is x and held[1] == circumstances and place in held[2]:
            out = held[2].pop(place)
            if not held[2]:
                self.held = None
            return out.clone() if self.copies else out
        if held is not None and held[0] is not x and not self.warned:
            self.warned = True
            tell(
                f"{self.names}: joined, but not all were called with one tensor: the others were computed for nothing",
                how.strict,
            )
        main_grads = [getattr(w, "main_grad", None) for w in weights]
        biases = [each.bias for each in self.modules]
        options: dict[str, Any] = {"recipe": how.recipe, "backend": how.backend, "main_grads": main_grads}
        outs = dict(enumerate(linear_together(x, weights, biases, **options)))
        out = outs.pop(place)
        self.held = (x, circumstances, outs)
        return out.clone() if self.copies else out


def _circumstances(x: Tensor, *weights: Tensor) -> Any:
    """What must be as it was for a result to be what a call would compute."""
    if torch.compiler.is_compiling():
        return None
    versions = [None if each.is_inference() else each._version for each in (x, *weights)]
    autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)
    return versions, torch.is_grad_enabled(), autocast


def _alike(modules: Sequence[Any]) -> bool:
    states = [None if module is None else state_of(module) for module in modules]
    if not all(state is not None and state.linear for state in states):
        return False
    hows = [state.weights["weight"] for state in states]  # type: ignore[union-attr]
    kinds = {(how.recipe, id(how.backend)) for how in hows}
    return len(kinds) == 1 and len({(module.in_features, module.weight.dtype) for module in modules}) == 1
