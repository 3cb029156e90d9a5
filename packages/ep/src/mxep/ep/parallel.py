"""Expert parallelism together with torch's other kinds.

    ExpertParallel      an entry of a `parallelize_module` plan: shards an MoE layer that was built whole, also on meta
    parameter_groups    parameter groups for optimizers, if some parameters are DTensors
    data_parallel       DistributedDataParallel over a model with experts

Expert weights (E, ...) are DTensors sharded on their first dimension. So torch.distributed.checkpoint saves them at one
degree and loads them at another. The router and the shared expert stay as they are.
"""

from typing import Any, Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from mxep.gemm.auto import AUTO

from .dispatchers import Dispatch, DispatchFields, make_dispatcher
from .moe import MoE
from .shares import group_of, mesh_of


class ExpertParallel(ParallelStyle):
    """Spread the experts of an :class:`MoE` built with ``dispatcher="local"`` over a 1-D mesh.

        parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})

    For a model too large for one rank: build it on meta, shard it, ``to_empty(device=...)``, then call the
    ``reset_parameters`` of its modules. A rank draws only its own experts, the same for every degree.

    Args:
        dispatch: a :class:`Dispatch`, or any of its fields by keyword, as for :class:`MoE`.

    Rank 0's weights win. Raises ValueError for another module, a mesh of more dimensions, experts that do not divide.
    """

    def __init__(
        self,
        dispatch: Dispatch | None = None,
        **fields: Unpack[DispatchFields],
    ) -> None:
        super().__init__()
        self.dispatch = Dispatch.of(dispatch, fields)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE) or isinstance(module.experts.gate_up_proj, DTensor):
            raise ValueError(f"ExpertParallel wants an MoE that holds all its experts, got {type(module).__name__}")
        experts, how = module.experts, self.dispatch
        dispatcher = make_dispatcher(
            how.times(module.rows_per_token),
            experts.num_experts,
            dim=module.dim,
            dtype=experts.gate_up_proj.dtype,
            group=group_of(device_mesh),
        )
        if dispatcher.world_size != device_mesh.size():
            raise ValueError(f"the dispatcher serves {dispatcher.world_size} ranks, the mesh has {device_mesh.size()}")
        module.dispatcher, module.number = dispatcher, dispatcher.number_layer()
        module.dispatch = None if dispatcher is how.dispatcher else how
        if module.auto:
            module.max_tokens = how.max_tokens or module.max_tokens
            module.recipe = module._pick(None) or AUTO
        for owner, name, weight in [(m, n, p) for m in experts.modules() for n, p in m.named_parameters(recurse=False)]:
            sharded = nn.Parameter(
                distribute_tensor(weight.detach(), device_mesh, [Shard(0)]), requires_grad=weight.requires_grad
            )
            owner.register_parameter(name, sharded)
        return module


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters as an optimizer's groups: plain ones, and DTensors of each mesh.

    On GPUs torch's optimizers run one kernel per group. It takes no mix of these and raises RuntimeError.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(mesh_of(parameter), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """DistributedDataParallel(model, **options) that leaves experts alone. It averages the rest over its group.

    Experts that are spread over all ranks of that group need nothing more: their gradients are means.
    DistributedDataParallel itself refuses DTensors ("got mixed torch.Tensor and DTensor", or "c10d.broadcast_ does
    not have a sharding strategy").

    Raises ValueError if a mesh lacks ranks of the group. Several ranks then hold such an expert, and nobody would
    average its gradients. Use FSDP2's `fully_shard` of the experts over the mesh's dp dimension instead.
    """
    group = options.get("process_group") or dist.group.WORLD
    ranks = set(dist.get_process_group_ranks(group))
    experts = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for name, parameter in experts.items():
        held_by = set(parameter.device_mesh.mesh.flatten().tolist())
        if not ranks <= held_by:
            raise ValueError(
                f"{name} is spread over ranks {sorted(held_by)}, but data parallelism over {sorted(ranks)}: nobody "
                "would average its gradients; use FSDP2, fully_shard(moe.experts, mesh=mesh['dp']), for the experts"
            )
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
    return DistributedDataParallel(model, **options)
