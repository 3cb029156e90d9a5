"""Converted linears under tensor parallelism, sequence parallelism and FSDP2 are those of one process.

On CPUs, and on GPUs where there are two, by the backend that "auto" picks there.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gemm.problem import snr
from mxep.gemm import Linear, Recipe, convert, grouped_mm, linear, linear_together, quantize_weights_once
from mxep.gemm.backends import select
from mxep.gemm.tensor_parallel import QuantizedColwiseParallel
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


def join_parts(device: torch.device) -> Tensor:
    return torch.randn(H, D, generator=torch.Generator().manual_seed(2)).to(device)


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


@distributed(2)
def test_colwise_and_rowwise_are_one_process(ctx: Context) -> None:

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

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    x, weight = inputs(ctx.device)[0], join_parts(ctx.device)
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

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    x, weight = inputs(ctx.device)[0], join_parts(ctx.device).requires_grad_()
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
def test_a_write_to_a_sharded_weight_is_noticed(ctx: Context) -> None:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    w = distribute_tensor(torch.randn(64, 64, device=ctx.device), mesh, [Shard(0)])
    x = DTensor.from_local(torch.randn(4, 64, device=ctx.device, requires_grad=True), mesh, [Replicate()])
    with quantize_weights_once():
        linear(x, w, recipe="mxfp8")
        w.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"was written to within"):
            linear(x, w, recipe="mxfp8")
    w.mul_(1.5)
    out = linear(x, w, recipe="bf16")
    with quantize_weights_once():
        linear(x, w, recipe="mxfp8")
    out.sum().backward()  # of the weight as it is: the write came before


@distributed(2)
def test_what_is_not_supported_says_so(ctx: Context) -> None:

    mesh = init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    x, weight = inputs(ctx.device)[0], join_parts(ctx.device)
    with pytest.raises(ValueError, match=r"w: got a DTensor on a mesh of 2 dimensions, want one, such as mesh\['tp'\]"):
        linear(x, distribute_tensor(weight, mesh, [Replicate(), Shard(0)]), recipe="mxfp8")
    w = distribute_tensor(weight, mesh["tp"], [Shard(0)])
    with pytest.raises(ValueError, match=r"x: got a Tensor, want a DTensor on w's mesh.*ColwiseParallel"):
        linear(x, w, recipe="mxfp8")
    narrow = distribute_tensor(weight[:, :32].contiguous(), mesh["tp"], [Shard(1)])  # 16 features a rank
    with pytest.raises(ValueError, match="K: got 16, want a multiple of 32"):
        linear(distribute_tensor(x[..., :32].contiguous(), mesh["tp"], [Shard(2)]), narrow, recipe="mxfp8")


@pytest.mark.slow
@distributed(2, first=["convert", "fully_shard"])
def test_fsdp2_gathers_weights_of_converted_linears(ctx: Context, first: str) -> None:

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


def shard(x: Tensor, mesh: Any, placement: Any) -> Any:

    return distribute_tensor(x.detach().clone(), mesh, [placement]).requires_grad_()


@distributed(3, timeout=120, sizes=[(5, 64, 5), (0, 64, 32), (5, 1, 1), (6, 3, 6)])
def test_a_linear_of_any_sizes_is_the_dense_one(ctx: Context, sizes: tuple[int, int, int]) -> None:

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    tokens, K, N = sizes
    random = torch.Generator().manual_seed(3)
    # Small integers: sums are exact in any order. torch adds a part of the bias to each rank's part of a sum.
    x, dy, weight, bias = (
        (factor * torch.randint(-3, 4, shape, generator=random)).float().to(ctx.device).requires_grad_()
        for shape, factor in (((2, tokens, K), 1), ((2, tokens, N), 1), ((N, K), 1), ((N,), ctx.world_size))
    )
    wanted = nn.functional.linear(x, weight, bias)
    grads = torch.autograd.grad(wanted, (x, weight, bias), dy.detach())
    for weights, biases, of_x in (
        (Shard(0), Shard(0), (Replicate(), Shard(0), Shard(1), Shard(2), Shard(-2))),
        (Shard(1), Replicate(), (Replicate(), Shard(1), Shard(-1))),
        (Replicate(), Replicate(), (Replicate(), Shard(0), Shard(1), Shard(2))),
    ):
        for placement in of_x:
            given = shard(x, mesh, placement), shard(weight, mesh, weights), shard(bias, mesh, biases)
            out: Any = linear(*given, recipe="bf16")
            assert out.shape == wanted.shape, (weights, placement)
            assert torch.equal(whole(out), wanted), (weights, placement)
            out.redistribute(mesh, [Replicate()]).backward(shard(dy, mesh, Replicate()).detach())
            for got, right in zip(given, grads):
                assert got.grad is not None
                assert got.grad.shape == right.shape
                assert torch.equal(whole(got.grad), right), (weights, placement)
    out = linear(shard(x, mesh, Replicate()), shard(weight, mesh, Shard(1)), recipe="bf16")
    assert out.placements == (Partial(),)


@distributed(3, timeout=120, tokens=[5, 1, 0], recipe=["mxfp8", "fp8", "mxfp8_wgrad_bf16"])
def test_uneven_tokens_are_gathered_and_quantized_as_by_one_process(ctx: Context, tokens: int, recipe: str) -> None:

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    random = torch.Generator().manual_seed(4)
    N = 32 * ctx.world_size
    x, dy, weight = (torch.randn(shape, generator=random) for shape in ((2, tokens, D), (2, tokens, N), (N, D)))
    x, dy, weight = x.to(ctx.device), dy.to(ctx.device), weight.to(ctx.device).requires_grad_()
    wanted = linear(x, weight, recipe=recipe)
    (dw,) = torch.autograd.grad(wanted, weight, dy)
    for placement in (Shard(1), Replicate()):
        part, w = shard(x, mesh, placement), shard(weight, mesh, Shard(0))
        out: Any = linear(part, w, recipe=recipe)
        assert out.shape == wanted.shape
        assert torch.equal(whole(out), wanted), "each rank computes its features of all tokens"
        out.redistribute(mesh, [Replicate()]).backward(dy_of := shard(dy, mesh, Replicate()).detach())
        assert dy_of.shape == wanted.shape
        assert part.grad is not None
        assert part.grad.shape == x.shape
        assert w.grad is not None
        if recipe == "mxfp8" and tokens:
            assert snr(dw.double(), whole(w.grad)) > min(LEAST[select("auto", ctx.device).name], 50)


@distributed(2)
def test_shards_that_do_not_fit_are_refused_on_every_rank(ctx: Context) -> None:

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    says = "want a multiple of 32 for recipe mxfp8, of the 96 features of 2 ranks on each: use fewer ranks, or leave"

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).to(ctx.device)

    x = torch.randn(4, 64, device=ctx.device)
    for plan, named in (
        ({"0": ColwiseParallel()}, "w: N: got 48"),
        ({"1": RowwiseParallel(input_layouts=Replicate())}, "w: K: got 48"),
    ):
        ours = nn.Sequential(Linear(64, 96, recipe="mxfp8"), Linear(96, 64, recipe="mxfp8")).to(ctx.device)
        for sharded, name in (
            (parallelize_module(convert(model(), "mxfp8"), mesh, plan), rf"^{next(iter(plan))}\.weight: "),
            (convert(parallelize_module(model(), mesh, plan), "mxfp8"), rf"^{next(iter(plan))}\.weight: "),
            (parallelize_module(ours, mesh, plan), "^"),
        ):
            with pytest.raises(ValueError, match=f"{name}{named}, {says}"):
                sharded(x)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    for recipe in ("fp8", "auto"):  # shards of 48 fit 16; "auto" computes others in bf16
        assert parallelize_module(convert(model(), recipe), mesh, plan)(x).shape == x.shape
    whole_ones = convert(model(), "mxfp8")
    fully_shard(whole_ones, mesh=mesh)  # shards of weights that are gathered before a product may have any size
    assert whole_ones(x).shape == x.shape
    assert convert(fully_shard(model(), mesh=mesh), "mxfp8")(x).shape == x.shape


@distributed(2)
def test_operands_of_which_only_one_is_a_dtensor_are_refused(ctx: Context) -> None:

    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    x, weight = inputs(ctx.device)[0], join_parts(ctx.device)
    sharded = shard(x, mesh, Shard(1))
    for function in (linear, lambda x, w, **how: linear_together(x, [w], **how)):
        with pytest.raises(ValueError, match=r"x: got a DTensor, want a plain tensor: .to_local\(\), or for `linear`"):
            function(sharded, weight, recipe="mxfp8")
    offs, stacked = torch.tensor([32], dtype=torch.int32, device=ctx.device), shard(weight[None], mesh, Replicate())
    with pytest.raises(ValueError, match="w: got a DTensor, want a plain tensor"):
        grouped_mm(x.new_zeros(32, D), stacked, offs, recipe="mxfp8")
    with pytest.raises(ValueError, match="bias: got a Tensor, want a DTensor as w is"):
        linear(sharded, shard(weight, mesh, Shard(1)), x.new_zeros(H), recipe="mxfp8")
    with pytest.raises(ValueError, match="main_grad: got one for a replicated w whose tokens are sharded"):
        linear(sharded, shard(weight, mesh, Replicate()), recipe="mxfp8", main_grad=torch.zeros_like(weight))
