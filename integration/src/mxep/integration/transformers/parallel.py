"""Spread experts over ranks, by transformers itself or by a call on a loaded model.

    DistributedConfig(fsdp_size=8, ep_size=4, ep_implementation="mxep_mxfp8")    transformers 5.23 and newer
    expert_parallel(model, mesh["ep"], "mxep_mxfp8")                             any version, any loaded model

E experts in all, W ranks of the mesh.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mxep.ep import TokenDispatcher, make_dispatcher
from mxep.ep.dtensors import group_of

from .experts import (
    ALL_EXPERTS_FUNCTIONS,
    KEY,
    WEIGHTS,
    Implementation,
    check_experts,
    experts_in,
    is_experts,
    own_expert_parallel,
    registered,
)


def register(implementation: Implementation) -> None:
    """Make `experts_implementation=` and, where transformers has it, `ep_implementation=` accept its name.

    To change a recipe's defaults, register before the model is built:

        register(Implementation("mxep_8k", Recipe.mxfp8(), max_tokens=8192, capacity=Capacity.factor(1.25)))
    """
    ALL_EXPERTS_FUNCTIONS.register(implementation.name, implementation)
    if own_expert_parallel is not None:
        own_expert_parallel.EPImplementationInterface.register(implementation.name, _own(implementation))


def _own(implementation: Implementation) -> type:
    """The class that transformers instantiates for each module of experts that it spreads over ranks."""

    class MxepEP(own_expert_parallel.EPImplementation):  # type: ignore[misc]
        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if tp_mesh.size() > 1:
                raise ValueError(
                    f"{implementation.name}: got tp_size {tp_mesh.size()}, want 1, as ranks of a tensor-parallel group "
                    'hold the same tokens: give its ranks to fsdp_size, or use ep_implementation="all_to_all" and '
                    f"experts_implementation={implementation.name!r}"
                )
            check_experts(experts, implementation.name, implementation.recipe, spread=True)
            dispatcher = _dispatcher(experts, self.num_local_experts * ep_mesh.size(), ep_mesh, implementation)
            # FSDP divides these gradients by the number of batches.
            self.layer = implementation.layer_of(experts, dispatcher)
            self.experts = experts

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **lora: Any) -> Tensor:
            return self.layer.forward(self.experts, hidden_states, top_k_index, top_k_weights, **lora)

    return MxepEP


def _dispatcher(experts: Any, num_experts: int, mesh: DeviceMesh, how: Implementation) -> TokenDispatcher:
    weight = experts.down_proj
    return make_dispatcher(
        replace(how.dispatch, max_tokens=how.most_tokens()),
        num_experts,
        dim=weight.shape[2 if experts.is_transposed else 1],
        dtype=weight.dtype,
        group=group_of(mesh),
    )


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    implementation: str = "mxep_mxfp8",
    *,
    gradient_reduction: Literal["mean", "sum"] = "mean",
) -> list[str]:
    """Spread the experts of a model over a 1-D mesh. Returns their modules' names.

    Every rank has the whole model, or has it on meta. A rank keeps E / W experts of each weight and bias (E, ...), as a
    DTensor sharded on its first dimension. Call this before `fully_shard` and before the optimizer is made. Other
    parameters are left to `fully_shard` or `mxep.ep.data_parallel`. `mxep.ep.parameter_groups` makes groups for
    optimizers. If the mesh has all ranks of the world, plain DistributedDataParallel, and so a Trainer, leaves the
    experts alone.

    Afterwards `save_pretrained` raises ValueError unless it is given whole weights (from `get_model_state_dict`), and
    `generate` defaults to `synced_gpus=True`: all ranks of the world must call it, and each goes on until the last is
    done. PEFT's adapters on the experts become replicated DTensors.

    implementation: a registered name. gradient_reduction: as for `mxep.ep.MoE`.

    Raises ValueError, before any change, for a mesh that is not 1-D, an unknown name, a model without experts
    that transformers' registry reaches, experts that the ranks do not divide or mxep cannot compute, and adapters on
    experts if the mesh lacks ranks of the world.
    """
    how = registered(implementation)
    group_of(mesh)
    found = experts_in(model, "expert_parallel")
    check_in_memory(model, "expert_parallel")
    for name, module in found.items():
        stacked = _stacked(module)
        read_apart = isinstance(stacked, DTensor) and stacked.device_mesh == mesh  # as `load_quantized` does
        check_experts(module, how.name, how.recipe, spread=read_apart)
        num_experts = stacked.shape[0]
        if zero_experts := getattr(module, "zero_expert_num", 0):
            raise ValueError(f"{name}: got {zero_experts} zero experts, want none to spread: leave out expert_parallel")
        if num_experts % mesh.size():
            raise ValueError(f"{name}: got {num_experts} experts, want a multiple of the {mesh.size()} ranks")
    adapters, everywhere = adapters_on_experts(model), mesh.size() == dist.get_world_size()
    if adapters:
        check_adapters(mesh)
    for module in found.values():
        _spread(module, mesh, how, 1 / mesh.size() if gradient_reduction == "mean" else 1.0)
    for linear in adapters:
        replicate(linear, mesh)
    if everywhere:  # else experts have copies to reduce: let DistributedDataParallel refuse the DTensors
        leave_to_ranks(model)
    for part in model.modules():  # PEFT's wrapper, and the model in it
        if hasattr(type(part), "generate") and hasattr(part, "config"):
            part.generate = functools.partial(_generate, part.generate)  # type: ignore[assignment]
            part.save_pretrained = functools.partial(_save_pretrained, part.save_pretrained)  # type: ignore[assignment]
    return list(found)


def _save_pretrained(own: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> Any:
    """`save_pretrained` that needs whole weights. Otherwise a rank would write its own experts alone, or hang."""
    if state_dict is None or any(isinstance(value, DTensor) for value in state_dict.values()):
        raise ValueError(
            "state_dict: got none, or one of DTensors, want whole weights after expert_parallel: on all ranks state = "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
            "torch.distributed.checkpoint.state_dict, then on rank 0 save_pretrained(FOLDER, state_dict=state)"
        )
    return own(*args, state_dict=state_dict, **kwargs)


def _generate(own: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
    """`generate` in which ranks continue until all are done, because others need their experts."""
    return own(*args, synced_gpus=True if synced_gpus is None else synced_gpus, **kwargs)


def leave_to_ranks(model: Any) -> None:
    """Make DistributedDataParallel ignore a model's DTensors, by name. Call it again for a wrapper of the model."""
    spread = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, spread)


def adapters_on_experts(model: nn.Module) -> list[nn.Linear]:
    """Linears A and B of PEFT's adapters on experts (`target_parameters`). Each serves all experts."""
    wrappers: list[Any] = [module for module in model.modules() if hasattr(module, "parameter_name")]
    wrappers = [module for module in wrappers if hasattr(module, "lora_A") and is_experts(module.get_base_layer())]
    return [linear for module in wrappers for pair in (module.lora_A, module.lora_B) for linear in pair.values()]


def check_in_memory(model: nn.Module, who: str) -> None:
    """Raise ValueError if accelerate holds weights back until a forward: nothing else can read or replace them."""
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") and any(weight.is_meta for weight in module.parameters(recurse=False)):
            raise ValueError(
                f"{who}: expected all weights in memory, got those of {name} offloaded by device_map: load without it, "
                "on the CPU"
            )


def check_adapters(mesh: DeviceMesh) -> None:
    """Raise ValueError if adapters on experts cannot be replicated over the mesh."""
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh: got {mesh.size()} of {dist.get_world_size()} ranks, want all for a model with adapters on experts: "
            "nobody would average their gradients over the copies"
        )
    if torch.__version__ < "2.13":  # 2.12 was not tried
        raise ValueError(
            f"adapters on experts: got torch {torch.__version__}, want 2.13, for what PEFT does to DTensors"
        )


def replicate(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Replicate an adapter's linear. PEFT adds B @ A to sharded weights, so a hook must sum the ranks' gradients."""
    source = None if linear.weight.is_meta else 0
    whole = distribute_tensor(linear.weight.detach(), mesh, [Replicate()], src_data_rank=source)
    linear.weight = nn.Parameter(whole, requires_grad=linear.weight.requires_grad)
    if linear.weight.requires_grad:
        linear.weight.register_hook(lambda grad: grad.redistribute(mesh, [Replicate()]))


def _stacked(experts: Any) -> Tensor:
    """A parameter of all experts, (E, ...)."""
    return experts._parameters.get("down_proj_qdata", experts.down_proj)  # type: ignore[no-any-return]


def _spread(experts: Any, mesh: DeviceMesh, how: Implementation, wgrad_scale: float) -> None:
    dispatcher = _dispatcher(experts, _stacked(experts).shape[0], mesh, how)
    for name, weight in list(experts._parameters.items()):
        if name in WEIGHTS and weight is not None and not isinstance(weight, DTensor):
            source = None if weight.is_meta else 0
            sharded: DTensor = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=source)
            experts.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))
    experts.__dict__.pop(KEY, None)
    how.layer_of(experts, dispatcher, wgrad_scale=wgrad_scale)
    experts.config._experts_implementation = how.name
