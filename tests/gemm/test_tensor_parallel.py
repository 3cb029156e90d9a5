"""Converted linears under tensor parallelism, sequence parallelism and FSDP2 are those of one process.

On CPUs, and on GPUs where there are two, by the backend that "auto" picks there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemm.problem import snr
from mxep.gemm import Recipe, convert, linear
from mxep.gemm.backends import select
from ranks import Context, distributed

D, H = 64, 128
LEAST = {"reference": 100.0, "hopper": 60.0, "dequant": 45.0}
"""dB between a sum over ranks and one product. reference adds in fp32, 24 bits. Hopper's tensor cores cut off what is
2^-13 below the largest of 33 addends: 1 / (sqrt(33 / 3) 2^-13) is 68 dB, and a row's scale covers a rank's part, which
matters to what is 2^-14 below its largest. dequant rounds products to bf16: 55.6 dB, here twice."""
HALF_ULP_BF16 = 2.0**-9


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


def made(device: torch.device) -> Any:
    torch.manual_seed(0)
    return convert(MLP().to(device))


def inputs(device: torch.device) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 2, 10, D, generator=random).to(device)
    return x, dy


def weight_of(device: torch.device) -> Tensor:
    return torch.randn(H, D, generator=torch.Generator().manual_seed(2)).to(device)


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


@distributed(2)
def test_colwise_and_rowwise_are_one_process(ctx: Context) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from mxep.gemm.tensor_parallel import QuantizedColwiseParallel

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    (x, dy), single = inputs(ctx.device), made(ctx.device)
    least = LEAST[select("auto", ctx.device).name]
    wanted = single(x.requires_grad_())
    wanted.backward(dy)
    for first, tokens in (
        (ColwiseParallel(), False),
        (ColwiseParallel(input_layouts=Shard(1)), True),
        (QuantizedColwiseParallel(input_layouts=Shard(1)), True),
    ):
        last = RowwiseParallel(output_layouts=Shard(1)) if tokens else RowwiseParallel()
        model = parallelize_module(made(ctx.device), mesh, {"up": first, "down": last})
        part = slice(5 * ctx.rank, 5 * ctx.rank + 5) if tokens else slice(None)
        here = x[:, part].detach().requires_grad_()
        out = model(here)
        out.backward(dy[:, part])
        # MX blocks of the contraction lie on one rank: only sums over ranks are in another order.
        assert snr(wanted[:, part].double(), out) > least
        assert x.grad is not None
        assert here.grad is not None
        # Gradients of x are sums of what ranks quantized by themselves; blocks do not cross ranks.
        assert snr(x.grad[:, part].double(), here.grad) > least
        for name, p in single.named_parameters():
            assert p.grad is not None
            got = whole(model.get_parameter(name).grad)
            # Of another order of sums dy of `up` may round to other qdata here and there.
            assert snr(p.grad.double(), got) > min(least, 50), name


@distributed(2)
def test_quantized_tokens_travel_as_bytes(ctx: Context) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    x, weight = inputs(ctx.device)[0], weight_of(ctx.device)
    w = distribute_tensor(weight, mesh, [Shard(0)])
    part = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    with CommDebugMode() as comm:
        out = linear(part, w, recipe="mxfp8")
    assert isinstance(out, DTensor)
    assert comm.get_total_counts() == 2, "qdata and scales"
    assert torch.equal(whole(out), linear(Recipe.mxfp8().quantize_rows(x), weight, recipe="mxfp8"))
    (dx,) = torch.autograd.grad(out.sum(), part)
    assert dx.placements == (Shard(1),)


@distributed(2)
def test_replicated_weights_take_tokens_of_every_rank(ctx: Context) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    x, weight = inputs(ctx.device)[0], weight_of(ctx.device).requires_grad_()
    (wanted,) = torch.autograd.grad(linear(x, weight, recipe="mxfp8_wgrad_bf16").sum(), weight)
    w = distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_()
    for placement in (Shard(1), Shard(2), Replicate()):
        out = linear(distribute_tensor(x, mesh, [placement]), w, recipe="mxfp8_wgrad_bf16")
        assert torch.equal(whole(out), linear(x, weight, recipe="mxfp8_wgrad_bf16"))
        (dw,) = torch.autograd.grad(out.sum(), w)
        # Unquantized products come rounded to bf16, but from "reference", where 20 sums are rounded to fp32.
        error = 20 * 2.0**-24 if select("auto", ctx.device).name == "reference" else HALF_ULP_BF16
        bound = 2 * error * x.abs().sum((0, 1))  # a rank's part, both, and one product
        assert ((whole(dw) - wanted).abs() <= bound).all()


@distributed(2)
def test_what_is_not_supported_says_so(ctx: Context) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    x, weight = inputs(ctx.device)[0], weight_of(ctx.device)
    with pytest.raises(ValueError, match=r"w: got a DTensor on a mesh of 2 dimensions, want one, such as mesh\['tp'\]"):
        linear(x, distribute_tensor(weight, mesh, [Replicate(), Shard(0)]), recipe="mxfp8")
    w = distribute_tensor(weight, mesh["tp"], [Shard(0)])
    with pytest.raises(ValueError, match=r"x: got a Tensor, want a DTensor on w's mesh.*ColwiseParallel"):
        linear(x, w, recipe="mxfp8")
    narrow = distribute_tensor(weight[:, :32].contiguous(), mesh["tp"], [Shard(1)])  # 16 features a rank
    with pytest.raises(ValueError, match="K: got 16, want a multiple of 32"):
        linear(distribute_tensor(x[..., :32].contiguous(), mesh["tp"], [Shard(2)]), narrow, recipe="mxfp8")


@pytest.mark.slow
@distributed(2)
@pytest.mark.parametrize("first", ["convert", "fully_shard"])
def test_fsdp2_gathers_weights_of_converted_linears(ctx: Context, first: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    torch.manual_seed(0)
    model, single, (x, dy) = MLP().to(ctx.device), made(ctx.device), inputs(ctx.device)
    if first == "convert":
        convert(model)
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    if first == "fully_shard":
        convert(model)
    # foreach would be what GPUs take for tensors, but not for DTensors.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in (model, single)]
    for _ in range(2):
        outs = [m(x) for m in (model, single)]
        assert torch.equal(*outs)
        for out, optimizer in zip(outs, optimizers):
            optimizer.zero_grad()
            out.backward(dy)
        for name, p in single.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(whole(model.get_parameter(name).grad), p.grad)
        for optimizer in optimizers:
            optimizer.step()
