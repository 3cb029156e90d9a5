"""FSDP2 beside expert parallelism: who holds what of a model of transformers, and who reduces its gradients.

    what is not expert    sharded over all ranks, gathered block by block, gradients averaged over all ranks
    experts, dp > 1       of an ep rank's experts each of its dp copies keeps a part; gradients averaged over the copies
    experts, dp = 1       left alone: each rank holds its own, whose gradients are done

With `bf16-mixed` the parameters stay fp32, and what is not expert is gathered in bf16, in which blocks compute: this
takes the place of autocast. Gradients are reduced in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..mesh import Mesh


def shard(model: nn.Module, blocks: Iterable[nn.Module], experts: Iterable[nn.Module], mesh: Mesh, mixed: bool) -> None:
    """Shard ``model``, whose ``experts`` are spread over ``mesh.grid["ep"]`` already. mixed: compute in bf16.

    Call it before the optimizer is made.
    """
    copies, world = mesh.grid["dp"], init_device_mesh(mesh.grid.device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32)
    alone: set[nn.Parameter] = set()
    for module in experts:
        if copies.size() > 1:
            fully_shard(module, mesh=copies)
        else:
            alone |= set(module.parameters())
    for module in (*blocks, model):
        fully_shard(module, mesh=world, mp_policy=policy, ignored_params=alone)
