"""Computes converted linears that read one input as one GEMM: `linear_together` under the model's own forward.

    q = self.q_proj(x)    computes q, k and v, and keeps k and v
    k = self.k_proj(x)    returns the kept k
    v = self.v_proj(x)    returns the kept v

An input is recognized by its identity. A sibling called with another tensor, or with the same one after a write, gets a
GEMM of its own. `convert` does not join by itself: only the model's forward decides if siblings read one input, and in
cross-attention they do not. So `join_linears` is a call of its own.
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
    """Compute converted linears that read one input together, in place. Returns the model and logs the names.

    siblings: names of children of one module. They are joined if `convert` converted all of them alike as linears, with
    one dtype and equal in_features. The first call computes all results. Name only siblings that are called with the
    same tensor: other results are computed in vain, and the first such call warns.
    Weights that are DTensors in forward (tensor parallelism, FSDP2 around each of them) stay separate.
    copies: return each result as a tensor of its own. By default results are views of one tensor. torch then refuses
    in-place writes, and a `.view` that joins their last two axes, such as q.view(-1, head_dim). Models that do either
    need copies, which cost a read and a write of the results.
    Call it before PEFT, because PEFT's layers take over the names. `revert` undoes it.

    Raises ValueError if no siblings are found.
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
    """Siblings, and the results of those that have not been called yet."""

    def __init__(self, modules: Sequence[Any], names: str, copies: bool) -> None:
        self.modules = tuple(modules)
        self.names, self.copies = names, copies
        self.held: tuple[Tensor, Any, dict[int, Tensor]] | None = None
        self.warned = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"held": None}

    def forward(self, module: nn.Module, how: Converted, x: Tensor) -> Tensor | None:
        """Result of `module` for x; None if the module has to compute it itself."""
        place = next((i for i, each in enumerate(self.modules) if each is module), None)
        weights = [each.weight for each in self.modules]
        if place is None or any(hasattr(w, "device_mesh") for w in weights):  # no place: a replica
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
    """State that must be unchanged for a kept result to be valid."""
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
