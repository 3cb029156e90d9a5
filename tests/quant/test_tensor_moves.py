"""MXTensor where it is stored away and brought back: offload, pinned memory, pickles, split and joined."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxep.quant import E5M2, MXTensor, quantize
from quant.test_tensor import assert_same, gaussian, index

TILES = (-2, -1)
axes = pytest.mark.parametrize("axis", [-1, -2, TILES])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def indexed(*rows: int) -> MXTensor:
    mx = quantize(gaussian(8, 64))
    return MXTensor.from_qdata_and_scales(mx.qdata, mx.scale, row_index=index(*rows))


@axes
def test_empty_like_has_parts_of_its_own_and_copy_fills_them(axis: Any) -> None:
    mx = quantize(gaussian(64, 96), axis=axis)
    to = torch.empty_like(mx)
    assert to.qdata.data_ptr() != mx.qdata.data_ptr()
    assert to.qdata.stride() == mx.qdata.stride()
    assert to.copy_(mx) is to
    assert_same(to, mx)
    assert not mx.is_pinned()


def test_empty_like_of_an_indexed_tensor_has_an_index() -> None:
    mx = indexed(3, -1, 5)
    to = torch.empty_like(mx, device="cpu").copy_(mx)
    assert to.row_index.tolist() == [3, -1, 5]
    assert torch.equal(to.dequantize(), mx.dequantize())


def test_copying_into_a_plain_tensor_gives_the_values() -> None:
    mx = indexed(3, -1, 5)
    assert torch.equal(torch.empty(mx.shape, dtype=torch.bfloat16).copy_(mx), mx.dequantize())


def test_copies_between_tensors_that_differ_are_refused() -> None:
    mx = quantize(gaussian(64, 96))
    for other in (
        quantize(gaussian(64, 96), axis=-2),
        quantize(gaussian(64, 96), fmt=E5M2),
        quantize(gaussian(32, 96)),
    ):
        with pytest.raises(NotImplementedError, match="want shape, format, axis, block and rows alike"):
            other.copy_(mx)
    with pytest.raises(NotImplementedError, match="of a plain tensor into an MXTensor: quantize it first"):
        mx.copy_(gaussian(64, 96))
    with pytest.raises(NotImplementedError, match=r"as torch\.float\w+: want torch\.bfloat16"):
        torch.empty_like(mx, dtype=torch.float32)


class Doubled(torch.autograd.Function):
    """Saves an MXTensor for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mx = quantize(x)
        ctx.save_for_backward(mx)
        return 2 * mx.dequantize()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (mx,) = ctx.saved_tensors
        return grads[0] * (mx.dequantize() if isinstance(mx, MXTensor) else mx)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_saved_tensors_may_be_offloaded(pin_memory: bool) -> None:
    """With pin_memory torch copies into a plain tensor of the outer dtype, so what comes back is plain: its values."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = gaussian(32, 64).to(device).requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        y = Doubled.apply(x)
    y.sum().backward()
    assert torch.equal(x.grad, quantize(x.detach()).dequantize())


@needs_gpu
def test_pinned_memory_goes_to_a_gpu_without_waiting() -> None:
    mx = indexed(3, -1, 5).pin_memory()
    assert mx.is_pinned()
    assert mx.qdata.is_pinned()
    assert mx.row_index.is_pinned()
    there = torch.empty_like(mx, device="cuda").copy_(mx, non_blocking=True)
    back = torch.empty_like(there, device="cpu", pin_memory=True)
    assert back.is_pinned()
    assert torch.equal(back.copy_(there).dequantize(), mx.dequantize())


@axes
def test_split_and_chunk_cut_and_cat_joins(axis: Any) -> None:
    mx = quantize(gaussian(64, 96), axis=axis)
    for pieces, dim in ((mx.split(32), 0), (mx.split([32, 64], 1), 1), (mx.chunk(3, dim=-1), -1), (mx.chunk(2), 0)):
        assert torch.equal(pieces[0].dequantize(), mx.dequantize().narrow(dim, 0, pieces[0].shape[dim]))
        assert_same(torch.cat(pieces, dim), mx)
    assert [len(piece) for piece in mx.split(64)] == [64]
    if axis != -1:
        with pytest.raises(ValueError, match="multiples of its block, 32"):
            mx.split(16)


@pytest.mark.parametrize("sizes", [[32, 32], [64, 64], [-32, 128], 0, -5])
def test_sizes_that_do_not_split_it_are_refused_as_torch_does(sizes: Any) -> None:
    for x in (gaussian(96, 64), quantize(gaussian(96, 64))):
        with pytest.raises(RuntimeError, match="split_size"):
            x.split(sizes)
    assert [piece.shape for piece in quantize(gaussian(96, 64))[:0].split(4)] == [(0, 64)]


def test_cat_applies_row_indices_and_refuses_what_differs() -> None:
    a, b = indexed(3, -1), indexed(7)
    assert torch.equal(torch.cat([a, b]).dequantize(), torch.cat([a.dequantize(), b.dequantize()]))
    for other in (quantize(gaussian(8, 64), fmt=E5M2), quantize(gaussian(32, 64), axis=-2), gaussian(8, 64)):
        with pytest.raises(NotImplementedError, match=r"aten.cat.*want MXTensors of one format, axis, block"):
            torch.cat([a, other])


def test_index_select_picks_rows_experts_and_places_of_an_index() -> None:
    picks = torch.tensor([5, 0, 5])
    mx, w = quantize(gaussian(8, 64)), quantize(gaussian(6, 64, 96), axis=-2)
    for got, want in (
        (mx.index_select(0, picks), mx.dequantize()[picks]),
        (w.index_select(0, picks), w.dequantize()[picks]),
        (indexed(1, 2, 3, 4, 5, -1).index_select(0, picks), indexed(-1, 1, -1).dequantize()),
    ):
        assert torch.equal(got.dequantize(), want)
    with pytest.raises(NotImplementedError, match="along its blocked axis -1"):
        mx.index_select(1, picks)


@axes
def test_a_view_of_the_same_shape_is_the_same_tensor(axis: Any) -> None:
    mx = quantize(gaussian(2, 64, 96), axis=axis)
    for same in (mx.view(2, 64, 96), mx.view(-1, 64, 96), mx.view(2, 64, -1), mx.reshape(2, 64, 96), mx.view_as(mx)):
        assert_same(same, mx)
        assert same.qdata.data_ptr() == mx.qdata.data_ptr()
    picked = indexed(3, -1, 5)
    assert picked.view(3, 64).row_index.tolist() == [3, -1, 5]


def test_a_parameter_stays_one_in_pickles_and_copies() -> None:
    module = nn.Module()
    module.w = nn.Parameter(quantize(gaussian(32, 64)), requires_grad=False)
    for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert isinstance(again.w, nn.Parameter)
        assert isinstance(again.w, MXTensor)
        assert not again.w.requires_grad
        assert_same(again.w, module.w)
    assert not isinstance(pickle.loads(pickle.dumps(quantize(gaussian(2, 64)))), nn.Parameter)


def test_it_moves_to_shared_memory_with_its_module() -> None:
    module = nn.Module()
    module.w = nn.Parameter(quantize(gaussian(32, 64)), requires_grad=False)
    before = module.w.dequantize()
    assert not module.w.is_shared()
    module.share_memory()
    assert module.w.is_shared()
    assert module.w.scale.is_shared()
    assert torch.equal(module.w.dequantize(), before)
