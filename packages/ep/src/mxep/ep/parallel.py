"""Expert parallelism together with torch's other kinds.

    ExpertParallel      for `parallelize_module` plans: shards an MoE layer that was built whole, also on meta
    parameter_groups    parameter groups for optimizers, if some parameters are DTensors
    data_parallel       DistributedDataParallel over a model with experts
    clip_grad_norm_     clips by one norm over plain parameters and DTensors, in which each element counts once

Expert weights (E, ...) are DTensors sharded on dimension 0. So torch.distributed.checkpoint can save them with one
number of ranks, and load them with another.
"""

from collections.abc import Iterable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from mxep.gemm.recipe import AUTO

from .dispatchers import Dispatch, DispatchFields
from .dtensors import local_tensor, mesh_of
from .moe import MoE


class ExpertParallel(ParallelStyle):
    """Spread the experts of an :class:`MoE` made with ``dispatcher="local"`` over a 1-D mesh. All ranks get rank 0's
    weights.

        parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})

    If the model is too large for one rank, build it on meta and shard it. Then call ``to_empty(device=...)``, and the
    ``reset_parameters`` of its modules. A rank draws only its own experts. Their weights do not depend on the number of
    ranks.

    Args:
        dispatch: a :class:`Dispatch`. Instead, its fields may be given by keyword, as for :class:`MoE`.

    Raises ValueError for another module, a mesh of more dimensions, or if the mesh's size does not divide the number of
    experts.
    """

    def __init__(
        self,
        dispatch: Dispatch | None = None,
        **fields: Unpack[DispatchFields],
    ) -> None:
        super().__init__()
        self.dispatch = Dispatch.of(dispatch, fields)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE) or any(isinstance(p, DTensor) for p in module.experts.parameters()):
            raise ValueError(f"ExpertParallel wants an MoE that holds all its experts, got {type(module).__name__}")
        experts, how = module.experts, self.dispatch
        module._use_dispatch(how, experts.num_experts, experts.gate_up_proj.dtype, device_mesh)
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
    """Return parameter groups for an optimizer: one of plain parameters, and one of DTensors for each mesh.

    On GPUs torch's optimizers run one kernel per group. If a group mixes plain tensors and DTensors, or DTensors of
    several meshes, they raise RuntimeError.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(mesh_of(parameter), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Make a DistributedDataParallel(model, **options) that ignores experts, and averages all other gradients.

    If experts are spread over all ranks of the process group, their gradients are averages already. Without this
    function, DistributedDataParallel refuses their DTensors ("got mixed torch.Tensor and DTensor", or "c10d.broadcast_
    does not have a sharding strategy").

    Raises ValueError if experts are spread over only some ranks of the group. Several ranks then hold the same expert,
    and nothing would average its gradients. Use FSDP2's `fully_shard` for such experts, over the mesh's dp dimension.
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


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their total 2-norm, over all parameters and ranks, is at most ``max_norm``.

    Call it on every rank with the same parameters in the same order, after gradients are averaged over data-parallel
    ranks.

    Args:
        parameters: plain parameters, which must have the same gradients on every rank, and DTensors, also of several
            meshes: experts over ep, or over dp and ep, other parameters over all ranks. If a parameter has a
            ``main_grad``, that is taken as its gradient.
        max_norm: as in torch, the factor is ``max_norm / (norm + 1e-6)`` if that is below 1.

    Returns the norm before clipping, 0-d fp32 (fp64 for fp64 gradients), equal on every rank. For each mesh dimension
    that shards parameters, one number is all-reduced. The host is not synchronized.

    Raises ValueError for a negative or NaN max_norm, a gradient that is a partial sum, and a parameter whose ``grad``
    and ``main_grad`` are two tensors.
    """
    if not max_norm >= 0:  # such values would reverse gradients, or make them NaN
        raise ValueError(f"clip_grad_norm_: expected a max_norm of at least 0, got {max_norm}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not parameters:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    shares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        main_grad, grad = getattr(parameter, "main_grad", None), parameter.grad
        if main_grad is not None and grad is not None and main_grad is not grad:
            raise ValueError(
                "a parameter has main_grad and grad: clip before one is copied to the other, and give none a main_grad "
                "whose gradients autograd accumulates"
            )
        grad = grad if main_grad is None else main_grad
        # A parameter without a gradient has a share, too, because other ranks wait in the all-reduce of its group.
        share = shares.setdefault(_sharded_over(grad if isinstance(grad, DTensor) else parameter), [])
        if grad is not None:
            share.append(local_tensor(grad))
    grads = [grad for share in shares.values() for grad in share]
    total = _total_norm(shares, parameters[0].device)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for of_a_kind in _by_kind(grads):
        first = of_a_kind[0]
        exact = first.dtype if first.dtype.itemsize >= 4 else factor.dtype  # gradients' dtype: one launch
        torch._foreach_mul_(of_a_kind, factor.to(first.device, exact))
    return total if any(grad.dtype == torch.float64 for grad in grads) else total.float()


def _total_norm(shares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]], device: torch.device) -> Tensor:
    """Compute the total norm, 0-d fp64. shares: this rank's parts of gradients, by the groups that shard them."""
    totals = []
    for groups, share in shares.items():
        norms = [torch.zeros(1, device=device, dtype=torch.float64)]
        for of_a_kind in _by_kind([grad for grad in share if grad.numel()]):
            wide = None if of_a_kind[0].dtype == torch.float64 else torch.float32
            norms.append(torch.stack(torch._foreach_norm(of_a_kind, dtype=wide)).to(norms[0]))
        square = torch.linalg.vector_norm(torch.cat(norms)) ** 2
        for group in groups:
            dist.all_reduce(square, group=group)
        totals.append(square.sqrt())
    total: Tensor = torch.linalg.vector_norm(torch.stack(totals))
    return total


def _sharded_over(x: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks over which `x` is sharded, one per mesh dimension."""
    if not isinstance(x, DTensor):
        return ()
    if any(placement.is_partial() for placement in x.placements):
        raise ValueError(f"a gradient is a partial sum, {x.placements}: redistribute it before clipping")
    mesh = x.device_mesh
    return tuple(mesh.get_group(i) for i, placement in enumerate(x.placements) if not placement.is_replicate())


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
