"""MXTensor where PyTorch carries it: autograd, torch.compile, torch.save, DTensor."""

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

from mxep.quant import E5M2, MXTensor, ScaleMode, quantize, requantize, swiglu_quantize
from quant import inputs
from quant.test_tensor import assert_same

TILES = (-2, -1)

gaussian = functools.partial(inputs.gaussian, dtype=torch.bfloat16)


def indexed(mx: MXTensor, *rows: int) -> MXTensor:
    return MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=torch.tensor(rows, dtype=torch.int32))


class Product(torch.autograd.Function):
    """x @ w with x an MXTensor, as a GEMM of this kind is written: qdata are saved, the gradient is plain."""

    @staticmethod
    def forward(ctx: Any, x: MXTensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.dequantize() @ w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        assert isinstance(x, MXTensor)
        return dy @ w.mT, requantize(x).dequantize().mT @ dy


class Exchange(torch.autograd.Function):
    """A move of quantized rows: an MXTensor in, an MXTensor out."""

    @staticmethod
    def forward(ctx: Any, x: MXTensor) -> MXTensor:
        return MXTensor.from_qdata_and_scales(x.qdata.clone(), x.scale.clone(), x.dtype)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        assert type(dx) is Tensor
        assert dx.dtype == torch.bfloat16
        return dx


class QuantizedGradient(torch.autograd.Function):
    """Identity whose gradient arrives quantized."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return quantize(dy)


class WantsQuantizedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        assert isinstance(dy, MXTensor)
        assert dy.dtype == torch.bfloat16
        return 2 * dy.dequantize()


def test_it_is_input_and_output_of_autograd_functions_and_its_gradient_stays_bf16() -> None:
    x, w = gaussian(32, 64).requires_grad_(), gaussian(64, 32, seed=1).requires_grad_()
    assert isinstance(Exchange.apply(quantize(x)), MXTensor)
    y = Product.apply(Exchange.apply(quantize(x)), w)
    dy = gaussian(32, 32, seed=2)
    y.backward(dy)
    assert torch.equal(x.grad, dy @ w.detach().mT)
    assert torch.equal(w.grad, requantize(quantize(x.detach())).dequantize().mT @ dy)


def test_a_gradient_may_arrive_as_mxtensor() -> None:
    x = gaussian(4, 64).requires_grad_()
    dy = gaussian(4, 64, seed=1)
    QuantizedGradient.apply(WantsQuantizedGradient.apply(x)).backward(dy)
    assert type(x.grad) is Tensor
    assert torch.equal(x.grad, 2 * quantize(dy).dequantize())


@pytest.mark.parametrize("axis", [-1, -2, TILES])
def test_a_leaf_gets_a_plain_bf16_gradient_that_accumulates(axis: int) -> None:
    leaf = quantize(gaussian(32, 64), axis=axis).requires_grad_()
    assert leaf.is_leaf
    for times in (1, 2):
        leaf.dequantize(torch.float32).sum().backward()
        assert type(leaf.grad) is Tensor
        assert leaf.grad.dtype == torch.bfloat16
        assert torch.equal(leaf.grad, torch.full((32, 64), float(times), dtype=torch.bfloat16))


def test_gradients_pass_through_every_way_of_looking_at_it() -> None:
    leaf = quantize(gaussian(64, 96), axis=TILES).requires_grad_()
    weight = gaussian(96, 64, seed=1)
    views: list[Callable[[MXTensor], Tensor]] = [
        lambda mx: mx.mT,
        lambda mx: mx.along(-1).mT,
        lambda mx: mx.along(-2).t().materialize(),
        lambda mx: mx.clone().transpose(0, 1).view(96, 64),
        lambda mx: requantize(mx).mT,
    ]
    for view in views:
        leaf.grad = None
        (view(leaf).dequantize() * weight).sum().backward()
        assert torch.equal(leaf.grad, weight.mT)


def test_the_gradient_of_a_slice_is_zero_elsewhere() -> None:
    leaf = quantize(gaussian(8, 64)).requires_grad_()
    leaf[2:4, 32:].dequantize().sum().backward()
    want = torch.zeros(8, 64, dtype=torch.bfloat16)
    want[2:4, 32:] = 1
    assert torch.equal(leaf.grad, want)


def test_the_gradient_of_an_indexed_leaf_is_that_of_its_logical_rows() -> None:
    leaf = indexed(quantize(gaussian(8, 64)), 3, -1, 3).requires_grad_()
    weight = gaussian(3, 64, seed=1)
    (leaf.materialize().dequantize() * weight).sum().backward()
    assert torch.equal(leaf.grad, weight)


def test_detach_and_no_grad_cut_the_graph() -> None:
    x = gaussian(4, 64).requires_grad_()
    assert quantize(x).requires_grad
    assert not quantize(x).detach().requires_grad
    with torch.no_grad():
        assert not quantize(x).requires_grad


def test_it_can_be_recomputed_in_activation_checkpointing() -> None:
    x = gaussian(4, 64).requires_grad_()
    checkpoint(lambda x: quantize(x).dequantize().square(), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, 2 * quantize(x.detach()).dequantize())


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("axis", [-1, -2, TILES])
def test_it_saves_and_loads_without_executing_code(axis: int) -> None:
    mx = quantize(gaussian(64, 96), axis=axis, fmt=E5M2)
    assert_same(saved_and_loaded({"w": mx})["w"], mx)
    assert_same(copy.deepcopy(mx), mx)


def test_saving_keeps_the_index_the_block_and_requires_grad() -> None:
    picked = indexed(quantize(gaussian(8, 64)), 3, -1, 3)
    assert_same(saved_and_loaded(picked), picked)
    row_scaled = quantize(gaussian(8, 40).float(), block_size=None).requires_grad_()
    again = saved_and_loaded(row_scaled)
    assert_same(again, row_scaled)
    assert again.requires_grad


def test_loading_checks_the_bytes_like_any_caller() -> None:
    mx = quantize(gaussian(8, 64))
    bad = mx.with_parts(mx.qdata, mx.scale[:4])
    with pytest.raises(ValueError, match=r"scales: got .* of shape \(4, 2\) on .*, want .* of shape \(8, 2\)"):
        saved_and_loaded(bad)


def test_it_is_a_parameter_in_a_state_dict() -> None:
    module = nn.Module()
    module.w = nn.Parameter(quantize(gaussian(32, 64)))
    other = nn.Module()
    other.w = nn.Parameter(quantize(gaussian(32, 64, seed=1)))
    other.load_state_dict(saved_and_loaded(module.state_dict()), assign=True)
    assert_same(other.w, module.w)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=options.pop("backend", "aot_eager"), **options)


def test_compiled_quantization_has_the_same_bytes_and_gradients() -> None:
    def layer(x: Tensor) -> Tensor:
        rows, columns = quantize(x), quantize(x, axis=-2)
        w = quantize(x, axis=TILES, mode=ScaleMode.FLOOR)
        again = requantize(rows, fmt=E5M2)
        values = columns.mT.mT.dequantize() + w.along(-2).dequantize() + again.dequantize()
        return rows[4:].dequantize() + values[4:]

    x = gaussian(64, 96).requires_grad_()
    y = compiled(layer)(x)
    y.sum().backward()
    assert torch.equal(y, layer(x))
    assert torch.equal(x.grad[:, 0], torch.tensor([0.0] * 4 + [4.0] * 60, dtype=torch.bfloat16))


def test_what_swiglu_makes_is_requantized_where_shapes_are_symbols() -> None:
    def step(x: Tensor, ends: Tensor) -> Tensor:
        return requantize(swiglu_quantize(x, offs=ends), offs=ends).qdata

    move = compiled(step, dynamic=True)
    for rows in (64, 96):
        x, ends = gaussian(rows, 128), torch.tensor([32, rows], dtype=torch.int32)
        assert torch.equal(move(x, ends).view(torch.uint8), step(x, ends).view(torch.uint8))


def test_it_goes_into_compiled_graphs_and_comes_out() -> None:
    def move(mx: MXTensor, picked: MXTensor) -> tuple[Any, ...]:
        return mx.mT, mx[32:], mx.detach(), mx.qdata, requantize(picked), picked[1:], picked.dequantize()

    mx = quantize(gaussian(64, 96))
    picked = indexed(mx, *range(-1, 31))
    for got, want in zip(compiled(move)(mx, picked), move(mx, picked)):
        assert type(got) is type(want)
        if isinstance(want, MXTensor):
            assert_same(got, want)
        else:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_a_quantized_leaf_gets_its_gradient_through_a_compiled_graph() -> None:
    leaf, w = quantize(gaussian(32, 64)).requires_grad_(), gaussian(64, 32, seed=1).requires_grad_()
    dy = gaussian(32, 32, seed=2)

    def backward(product: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        leaf.grad = w.grad = None
        product(leaf, w).backward(dy)
        return leaf.grad, w.grad

    got, want = backward(compiled(lambda x, w: Product.apply(x, w))), backward(Product.apply)
    assert type(got[0]) is Tensor
    assert got[0].dtype == torch.bfloat16
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_compiled_graphs_take_any_number_of_rows() -> None:
    def both_ways(x: Tensor, mx: MXTensor) -> tuple[Tensor, Tensor]:
        return quantize(x).dequantize() + mx.dequantize(), quantize(x).chunk(2)[0].dequantize()

    run = compiled(both_ways, dynamic=True)
    for rows in (6, 8, 14, 10):
        x = gaussian(rows, 64)
        with torch._dynamo.config.patch(error_on_recompile=rows > 8):
            got = run(x, quantize(x))
        for one, other in zip(got, both_ways(x, quantize(x))):
            assert torch.equal(one, other)


def test_a_compiled_graph_that_would_have_to_differentiate_an_mxtensor_output_says_so() -> None:
    x = gaussian(4, 64).requires_grad_()
    with pytest.raises(Exception, match=r"cannot return an MXTensor that requires grad: dequantize inside"):
        compiled(quantize)(x)
    with torch.no_grad():
        assert_same(compiled(quantize)(x), quantize(x))


def test_inductor_runs_it() -> None:
    x = gaussian(4, 64)
    mx = compiled(lambda x: quantize(x), backend="inductor")(x)
    assert_same(mx, quantize(x))


def test_dtensors_hold_it() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        leaf = quantize(gaussian(32, 64)).requires_grad_()
        local = DTensor.from_local(leaf, mesh, [Shard(0)]).to_local()
        assert_same(local, leaf)
        local.dequantize().sum().backward()
        assert torch.equal(leaf.grad, torch.ones(32, 64, dtype=torch.bfloat16))
        for axis in (-1, -2, TILES):
            whole = quantize(gaussian(4, 64, 96), axis=axis)
            sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            assert_same(sharded.to_local(), whole)
            assert_same(sharded[1:3].mT.to_local(), whole[1:3].mT)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("graded", [True, False])
def test_a_tangent_of_forward_mode_ad_is_refused(graded: bool) -> None:
    x = torch.randn(32, 64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(graded), x.detach())
        with pytest.raises(NotImplementedError, match="jvp" if graded else "want a plain one"):
            quantize(dual)
        quantize(forward_ad.unpack_dual(dual).primal)
    with pytest.raises(NotImplementedError, match="want a plain one"):
        torch.func.jvp(quantize, (x.detach(),), (x.detach(),))
