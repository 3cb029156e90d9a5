"""An MoE built whole and sharded by a parallelize plan is the layer built in shares."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from mxep.ep import ExpertParallel, MoE
from ranks import distributed


@distributed(2)
def test_sharded_layer_equals_the_whole_one_and_its_weights_are_dtensors(ctx) -> None:
    def whole() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({"moe": MoE(64, 32, 8, 2, recipe="bf16", dispatcher="local", device=ctx.device)})

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    sharded = parallelize_module(whole(), mesh, {"moe": ExpertParallel(max_tokens=16)})["moe"]
    weight = sharded.experts.gate_up_proj
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape[0] == 8 // ctx.world_size

    x = torch.randn(16, 64, dtype=torch.bfloat16).to(ctx.device)  # one seed: all ranks bring the same tokens
    wanted, got = whole()["moe"], sharded
    out, out_sharded = wanted(x), got(x)
    torch.testing.assert_close(out_sharded, out, rtol=2**-6, atol=2**-6)
    out.sum().backward()
    out_sharded.sum().backward()
    grad = got.experts.gate_up_proj.grad.full_tensor()
    torch.testing.assert_close(grad, wanted.experts.gate_up_proj.grad, rtol=2**-5, atol=2**-5)


@distributed(1)
def test_only_whole_layers_are_sharded(ctx) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    with pytest.raises(ValueError, match="holds all its experts, got Linear"):
        parallelize_module(nn.ModuleDict({"moe": nn.Linear(2, 2)}), mesh, {"moe": ExpertParallel()})
