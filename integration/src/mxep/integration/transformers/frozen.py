"""Experts of a transformers model that stay quantized and are never trained: the base of a LoRA fine-tune.

    freeze_experts(model, "mxfp8")    every module of experts, one after another: bf16 goes as it is replaced

    parameters before       after, uint8 and int32, without gradients          as an attribute
    gate_up_proj            gate_up_proj_qdata, gate_up_proj_scale, ...        experts.gate_up_proj, a FrozenWeight
    down_proj               down_proj_qdata, down_proj_scale, ...              experts.down_proj, a FrozenWeight
    down_proj_bias          down_proj_bias, frozen

The module stays in its place and keeps its gate, biases and config. Its class becomes a subclass of `FrozenExperts` and
of the model's own. A FrozenWeight is (E, N, K) with blocks along K, the input features. So a transposed weight, as
gpt-oss has it (E, K, N), is stored the other way round, and `is_transposed` is then False.

E experts, N out features, K in features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from mxep.ep.dtensors import check_not_fsdp, local_tensor, mesh_of
from mxep.ep.frozen import frozen_weight, register_frozen
from mxep.ep.lora import LoRAWeights
from mxep.gemm import FrozenWeight, freeze
from mxep.gemm.frozen import FORMATS, FrozenFormat
from mxep.quant import BLOCK

from .implementation import Implementation
from .layer import KEY, is_experts, weight_names
from .parallel import adapters_on_experts
from .versions import ALL_EXPERTS_FUNCTIONS


class FrozenExperts(nn.Module):
    """What frozen modules of experts are, besides what they were. `mxep.ep.frozen` lists the parts of a weight.

    Casts leave the weights as they are: `.to(torch.bfloat16)` casts floating-point tensors only. Bytes can have no
    gradients, so `model.requires_grad_(True)` raises.

    A LoRA layer wraps the module, holds A and B, and calls it with ``lora=``: forward and backward are then those of
    `mxep.ep.LoRAExperts`. Shapes are those of the FrozenWeights: (E, out, in).
    """

    config: Any

    @property
    def gate_up_proj(self) -> FrozenWeight:
        """This rank's gate and up weights (e, 2F, D)."""
        return frozen_weight(self, "gate_up_proj")

    @property
    def up_proj(self) -> FrozenWeight:
        """This rank's up weights (e, F, D) of experts without a gate."""
        return frozen_weight(self, "up_proj")

    @property
    def down_proj(self) -> FrozenWeight:
        """This rank's down weights (e, D, F)."""
        return frozen_weight(self, "down_proj")

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, lora: LoRAWeights | None = None
    ) -> Tensor:
        """hidden_states (T, D), top_k_index, top_k_weights (T, K) -> (T, D). lora: as for `mxep.ep.run_experts`.

        ValueError if the config's experts_implementation is none of mxep's: others multiply floating-point weights.
        """
        name = getattr(self.config, "_experts_implementation", None)
        run = ALL_EXPERTS_FUNCTIONS.get(name, None)
        if not isinstance(run, Implementation):
            raise ValueError(
                f"experts_implementation: expected one of mxep for frozen experts, got {name!r}: "
                "model.set_experts_implementation('mxep_mxfp8')"
            )
        return run(self, hidden_states, top_k_index, top_k_weights, lora=lora)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (type(self).__bases__[1],), self.__dict__  # no module has its class by name

    def extra_repr(self) -> str:
        weight = self.down_proj
        local, dim, hidden_dim = weight.shape
        return f"local_experts={local}, dim={dim}, hidden_dim={hidden_dim}, format={weight.format}"


@functools.cache
def _frozen_class(kind: type) -> type:
    return type(f"Frozen{kind.__name__}", (FrozenExperts, kind), {"__doc__": kind.__doc__})


def _empty(kind: type) -> Any:
    """A frozen module of experts without state."""
    frozen: Any = _frozen_class(kind)
    return object.__new__(frozen)


def freeze_experts(model: nn.Module, fmt: FrozenFormat = "mxfp8", *, folded: bool = True) -> list[str]:
    """Freeze every module of experts of a transformers model in `fmt`; returns their names.

    model: weights in bf16 or fp32, computed by an implementation of mxep. One module after another, on the device where
    it is: the weights of one are freed before the next. After `expert_parallel`, each rank freezes its experts. Make
    the optimizer, and call fully_shard, afterwards. folded: as for `mxep.gemm.freeze`.

    Raises ValueError, before anything changed, for a model without experts that transformers' registry reaches, for
    those that FSDP2 has sharded, and for sizes that are no multiples of 32. `freeze` may raise for a module when those
    before it are frozen.
    """
    if fmt not in FORMATS:
        raise ValueError(f"freeze_experts: expected fmt {' or '.join(FORMATS)}, got {fmt!r}")
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise ValueError(f"freeze_experts: expected a model with experts that mxep runs, got {type(model).__name__}")
    if adapters_on_experts(model):
        raise ValueError("freeze_experts: expected experts without adapters, got PEFT's: merge_and_unload() first")
    for name, experts in found.items():
        if isinstance(experts, FrozenExperts):
            raise ValueError(f"{name}: expected experts that are not frozen, got {experts.down_proj.format}")
        check_not_fsdp(experts, "freeze_experts")
        for each in weight_names(experts):
            shape, inputs = getattr(experts, each).shape, 1 if experts.is_transposed else 2
            if shape[inputs] % BLOCK:
                raise ValueError(f"{name}.{each}: expected input features in multiples of {BLOCK}, got {tuple(shape)}")
    for experts in found.values():
        freeze_module(experts, fmt, folded=folded)
    keep_names(model)
    return list(found)


def freeze_module(experts: Any, fmt: FrozenFormat, *, folded: bool = True) -> None:
    """Freeze one module of experts in its place."""
    num_experts = experts.down_proj.shape[0]  # LongCat has rows for zero experts in gate_up_proj
    mesh = mesh_of(experts.down_proj)
    weights = {}
    for each in weight_names(experts):
        w = local_tensor(getattr(experts, each).data)[:num_experts]
        weights[each] = freeze(w.mT.contiguous() if experts.is_transposed else w, fmt, folded=folded)
    strip(experts)
    for each, weight in weights.items():
        register_frozen(experts, each, weight, mesh)


CONVERSIONS = "_mxep_conversions"
"""Attribute of a model: the `_weight_conversions` that it had before `keep_names`."""


def keep_names(model: nn.Module) -> None:
    """Let `save_pretrained`, and so a Trainer's checkpoints, write the model's own names.

    Else transformers 5.17 takes gate_up_proj_qdata for gate_up_proj, and splits it in two for each expert.
    """
    if isinstance(model, PreTrainedModel):
        model.__dict__[CONVERSIONS] = getattr(model, "_weight_conversions", None)
        model._weight_conversions = []


def own_names(model: nn.Module) -> None:
    """Undo `keep_names`: the model has no frozen experts any more."""
    kept = model.__dict__.pop(CONVERSIONS, None)
    if model.__dict__.pop("_weight_conversions", None) is not None and kept is not None:
        model._weight_conversions = kept


def strip(experts: Any) -> None:
    """Take the weights out of a module of experts, whose class becomes that of frozen ones."""
    for name in weight_names(experts):
        del experts._parameters[name]
    experts.requires_grad_(False)  # biases
    experts.__class__ = _frozen_class(type(experts))  # type: ignore[arg-type]  # of mypy, a type is not Hashable
    experts.was_transposed, experts.is_transposed = experts.is_transposed, False
    forget_layer(experts)


def thaw(experts: Any, weights: dict[str, Tensor]) -> None:
    """Give a frozen module its own class back, with weights (e, N, K) of this rank in bf16 that are not trained."""
    mesh = mesh_of(experts.down_proj_qdata)
    for name in weight_names(experts):
        for part in FrozenWeight.field_names:
            del experts._parameters[f"{name}_{part}"]
    experts.__class__ = type(experts).__bases__[1]
    experts.is_transposed = experts.was_transposed
    for name, w in weights.items():
        w = (w.mT if experts.is_transposed else w).to(torch.bfloat16).contiguous()
        w = w if mesh is None else DTensor.from_local(w, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(w, requires_grad=False))
    forget_layer(experts)


def forget_layer(experts: Any) -> None:
    """Let the next forward find out again what the module computes."""
    layer = experts.__dict__.get(KEY)
    if layer is not None and not layer.parallel:
        del experts.__dict__[KEY]
