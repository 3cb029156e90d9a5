"""ExpertParallel: shard an MoE layer that was built whole over a device mesh, as a plan entry of `parallelize_module`.

    parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})

Expert weights (E, ...) become DTensors sharded on their first dimension, so that torch.distributed.checkpoint saves
them at one degree and loads them at another; the router and the shared expert stay as they are.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mxep.comms import Capacity

from .dispatchers import make_dispatcher
from .moe import MoE


class ExpertParallel(ParallelStyle):
    """Spread the experts of an :class:`MoE` built with ``dispatcher="local"`` over a 1-D mesh.

    Args:
        dispatcher: ``"symmetric"`` or ``"all_to_all"``.
        capacity, max_tokens, timeout: as for :class:`MoE`.

    Rank 0's weights win. Raises ValueError for another module, a mesh of more dimensions, experts that do not divide.
    """

    def __init__(
        self,
        *,
        dispatcher: str = "symmetric",
        capacity: Capacity | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.capacity = capacity
        self.max_tokens = max_tokens
        self.timeout = timeout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE) or module.experts.gate_up_proj.shape[0] != module.experts.num_experts:
            raise ValueError(f"ExpertParallel wants an MoE that holds all its experts, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"ExpertParallel wants a 1-D mesh, got {device_mesh.ndim} dimensions")
        experts = module.experts
        module.dispatcher = make_dispatcher(
            self.dispatcher,
            experts.num_experts,
            dim=module.dim,
            dtype=experts.gate_up_proj.dtype,
            group=device_mesh.get_group(),
            capacity=self.capacity,
            max_tokens=self.max_tokens,
            timeout=self.timeout,
        )
        experts.first_expert = module.dispatcher.rank * module.dispatcher.num_local_experts
        for name, weight in list(experts.named_parameters(recurse=False)):
            sharded = nn.Parameter(
                distribute_tensor(weight.detach(), device_mesh, [Shard(0)]), requires_grad=weight.requires_grad
            )
            experts.register_parameter(name, sharded)
        return module
