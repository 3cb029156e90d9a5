"""The triton backend computes the product of the qdata: on a GPU, or interpreted without one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import Problem, Result, indexed, problem
from gemm.test_accuracy import HALF_ULP_BF16, bound_of_sum
from mxep.gemm import BACKENDS, Recipe, grouped_mm
from mxep.gemm.backends import triton as ops
from mxep.gemm.kernels import dot_scaled
from mxep.quant import E5M2, MXTensor, quantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND: Any = BACKENDS["triton"]

needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that small operands make many."""
    small = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 2, "num_warps": 4}
    options = dot_scaled.launch_options() | small
    monkeypatch.setattr(dot_scaled, "launch_options", lambda: options)


def here(sizes: tuple[int, ...] = (64, 0, 160, 32), **options: Any) -> Problem:
    p = problem(sizes, **({"n": 96, "k": 160} | options))
    return Problem(*(x.to(DEVICE) for x in (p.a, p.w, p.dy, p.offs)))


def bounds(p: Problem) -> list[Tensor]:
    """How far two fp32 sums of the same qdata may be apart: two errors of a sum; a code is at most 1 + 2**-2 (E5M2)
    times its value, a product of two 1.6 times."""
    return [2 * 1.6 * sum_error for sum_error in bound_of_sum(p)]


def assert_close(got: Result, want: Result, p: Problem) -> None:
    """Equal up to the order of sums, and up to two roundings where results are bf16."""
    for x, y, bound in zip(got, want, bounds(p)):
        assert x.dtype == y.dtype
        rounding = 2 * HALF_ULP_BF16 * (1 + 2**-8) * y.double().abs() if x.dtype == torch.bfloat16 else 0.0
        assert ((x.double() - y.double()).abs() <= bound + rounding).all()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_e5m2_32x32", Recipe.mxfp8(fmt=E5M2)], ids=str)
def test_products_are_those_of_the_reference_up_to_the_order_of_sums(recipe: str | Recipe) -> None:
    p = here()
    got, want = (p.run(recipe, backend=name, out_dtype=torch.float32) for name in ("triton", "reference"))
    assert_close(got, want, p)
    assert all(x.isfinite().all() for x in got)  # rows past the last group are NaN


def test_operands_under_an_index_equal_materialized_ones() -> None:
    p = here()
    p.a[70:75], p.dy[70:75] = 0, 0
    a, dy = quantize(p.a), quantize(p.dy)
    in_slots = (indexed(x.to("cpu"), valid=p.valid, poison=2**30).to(DEVICE) for x in (a, dy))
    a_in_slots, dy_in_slots = in_slots
    dense = p.run("mxfp8", a=a, dy=dy, backend="triton")
    assert dense.same_as(p.run("mxfp8", a=a_in_slots, dy=dy_in_slots, backend="triton"))


@pytest.mark.parametrize("sizes", [(0, 0, 128), (0, 0, 0), (32,)], ids=str)
def test_empty_groups(sizes: tuple[int, ...]) -> None:
    p = here(sizes, unused=32)
    got, want = (p.run("mxfp8", backend=name) for name in ("triton", "reference"))
    assert_close(got, want, p)
    for g, rows in p.groups():
        assert bool(got.dw[g].any()) == (rows.stop > rows.start)


def test_no_rows_at_all() -> None:
    got = here((0, 0), unused=0).run("mxfp8", backend="triton")
    assert (got.out.shape, got.da.shape) == ((0, 96), (0, 160))
    assert not got.dw.any()


def test_bias_is_added_before_the_rounding() -> None:
    p = here()
    bias = torch.randn(4, 96, device=DEVICE)
    got, want = (
        grouped_mm(p.a, p.w, p.offs, recipe="mxfp8", backend=name, bias=bias, out_dtype=torch.float32)[: p.valid]
        for name in ("triton", "reference")
    )
    assert ((got - want).abs() <= bounds(p)[0] + 2.0**-22 * bias.abs().max()).all()


def test_main_grad_is_added_to_and_empty_groups_are_left_alone() -> None:
    p = here()
    main_grad = torch.randn(p.w.shape, device=DEVICE)
    main_grad[1] = -0.0  # an empty group's is not written: -0 + 0 would be +0
    before, a, w = main_grad.clone(), p.a.clone().requires_grad_(), p.w.clone().requires_grad_()
    grouped_mm(a, w, p.offs, recipe="mxfp8", backend="triton", main_grad=main_grad).backward(p.dy)
    dw = p.run("mxfp8", backend="triton").dw
    valid = torch.tensor([0, 2, 3], device=DEVICE)
    assert torch.equal(main_grad[1].view(torch.int32), before[1].view(torch.int32))
    error = (main_grad - before - dw.float())[valid].abs()
    assert (error <= 2.0**-7 * dw[valid].float().abs() + 2.0**-22 * (before[valid].abs() + 1)).all()


def test_main_grad_may_be_strided() -> None:
    p = here((32,))
    dy, a = quantize(p.dy), quantize(p.a)
    dense, transposed = torch.zeros(1, 96, 160, device=DEVICE), torch.zeros(1, 160, 96, device=DEVICE).mT
    for to in (dense, transposed):
        wgrad(dy, a, p.offs, accumulate_into=to)
    assert dense.any()
    assert torch.equal(dense, transposed)


def test_a_nan_stays_in_its_row_and_its_group() -> None:
    p, clean = here((64, 64)), here((64, 64)).run("mxfp8", backend="triton")
    p.a[70, 3] = p.dy[100, 5] = torch.nan
    got = p.run("mxfp8", backend="triton")
    others = torch.arange(p.valid, device=DEVICE) != 70
    assert got.out[70].isnan().all()
    assert torch.equal(got.out[others], clean.out[others])
    assert got.da[100].isnan().all()
    assert torch.equal(got.da[:64], clean.da[:64])
    assert torch.equal(got.dw[0], clean.dw[0])
    assert got.dw[1, :, 3].isnan().all()
    assert got.dw[1, 5].isnan().all()


def test_products_of_unquantized_operands_are_those_of_dequant() -> None:
    p = here()
    (_, _, dw), (_, _, wanted) = (p.run("mxfp8_wgrad_bf16", backend=name) for name in ("triton", "dequant"))
    assert torch.equal(dw, wanted)
    assert p.run("bf16", backend="triton").same_as(p.run("bf16", backend="dequant"))


def operands(p: Problem) -> tuple[MXTensor, MXTensor]:
    return quantize(p.a), quantize(p.w)


def wgrad(dy: Tensor, a: Tensor, offs: Tensor, backend: Any = BACKEND, **options: Any) -> Any:
    options = {"out_dtype": torch.float32} | options
    return backend.wgrad(backend.prepare_wgrad(dy, a, offs, Recipe.mxfp8()), offs, **options)


def test_every_tile_of_every_group_is_computed_once_and_out_of_order(
    small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 13 row tiles in groups of 3, 0, 6, 1, 3 and 4 column tiles; GROUP_M 2 leaves one row tile over in odd groups.
    p = here((96, 0, 192, 32, 96), n=128, k=64)
    a, w = operands(p)
    args = a.qdata, a.scale, None, w.qdata, w.scale, p.offs, None, torch.float32
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(*shape, 7.0, **options))
    out = dot_scaled.grouped_mm(*args)
    want = BACKENDS["reference"].forward(a, w, p.offs, bias=None, out_dtype=torch.float32)[: p.valid]
    assert ((out[: p.valid] - want).abs() <= bounds(p)[0]).all()
    assert (out[p.valid :] == 7).all()  # rows past the last group are not written


def test_weight_gradients_in_many_tiles(small_tiles: None) -> None:
    p, recipe = here((96, 0, 160), n=96, k=64), Recipe.mxfp8()
    dy, a = quantize(p.dy), quantize(p.a)
    x, y = (recipe.along_tokens(each, p.offs) for each in (dy, a))
    want = wgrad(dy, a, p.offs, BACKENDS["reference"])
    got = torch.full_like(want, torch.nan)
    dot_scaled.grouped_wgrad(got, x.qdata, x.scale, y.qdata, y.scale, p.offs)
    assert ((got - want).abs() <= bounds(p)[2]).all()


def test_operands_may_lie_more_than_2_to_the_31_bytes_apart(small_tiles: None) -> None:
    p = here((32, 32), n=32, k=32, unused=0)
    a, w = operands(p)
    far = 2**31 + 32

    def apart(x: Tensor, dim: int) -> Tensor:
        """x, its last row along `dim` moved far away; most of the memory between is never touched."""
        count = x.shape[dim]
        strides = list(x.contiguous().stride())
        strides[dim] = -(-far // (count - 1) // 32) * 32
        moved = torch.empty(far + 2**20, dtype=torch.uint8, device=DEVICE).as_strided(x.shape, strides)
        return moved.copy_(x.view(torch.uint8)).view(x.dtype)

    args = a.scale, None, w.qdata, w.scale, p.offs, None, torch.float32
    near = dot_scaled.grouped_mm(a.qdata, *args)
    assert torch.equal(near, dot_scaled.grouped_mm(apart(a.qdata, 0), *args))
    w_far = apart(w.qdata, 0)
    assert torch.equal(near, dot_scaled.grouped_mm(a.qdata, a.scale, None, w_far, w.scale, p.offs, None, near.dtype))


@needs_cuda
def test_results_may_lie_more_than_2_to_the_31_elements_apart() -> None:
    p = here((0,) * 4099 + (32,), n=512, k=1024)
    dy, a = quantize(p.dy), quantize(p.a)
    got, want = (wgrad(dy, a, offs, out_dtype=torch.bfloat16) for offs in (p.offs, p.offs[-1:]))
    assert torch.equal(got[-1:], want)
    assert not got[:-1].any()


def test_the_ops_declare_what_they_do() -> None:
    p = here((32, 32), n=32, k=32, unused=0)  # rows past the last group differ from run to run
    a, w = operands(p)
    dy, recipe = quantize(p.dy), Recipe.mxfp8()
    x, y = (recipe.along_tokens(each, p.offs) for each in (dy, a))
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    product = a.qdata, a.scale, None, w.qdata, w.scale, p.offs, None
    parts = x.qdata, x.scale, y.qdata, y.scale, p.offs
    for op, args in (
        (ops.grouped_mm_dot_scaled, (*product, torch.bfloat16)),
        (ops.grouped_wgrad_dot_scaled, (torch.zeros(p.w.shape, device=DEVICE), *parts, 1.0, False)),
        (ops.grouped_wgrad_dot_scaled, (torch.zeros(p.w.shape, device=DEVICE), *parts, 1.0, True)),
    ):
        torch.library.opcheck(op.opdef, args, test_utils=utils)


def test_a_compiled_graph_has_no_breaks() -> None:
    p, recipe = here((32, 32), n=32, k=32), Recipe.mxfp8()

    def product(a: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return grouped_mm(a, w, offs, recipe=recipe, backend="triton")

    results = []
    for run in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        a, w = p.a.clone().requires_grad_(), p.w.clone().requires_grad_()
        out = run(a, w, p.offs)
        da, dw = torch.autograd.grad(out, (a, w), p.dy)
        results.append(Result(out.detach()[: p.valid], da[: p.valid], dw))
    assert results[0].same_as(results[1])


def test_other_recipes_are_refused_with_a_way_out() -> None:
    p = here()
    message = r"backend 'triton': a: got MXTensor\(.*block_size=160.*use a recipe 'mxfp8.*backend 'dequant'"
    with pytest.raises(ValueError, match=message):
        grouped_mm(p.a, p.w, p.offs, recipe="fp8", backend="triton")
    with pytest.raises(ValueError, match=r"backend 'triton': a: got MXTensor\(.*E4M3, axis=-2"):
        BACKEND.forward(quantize(p.a, axis=-2), operands(p)[1], p.offs, bias=None, out_dtype=torch.float32)


def test_without_gpu_and_interpreter_it_says_unsupported_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    p = problem((32,))
    with pytest.raises(RuntimeError, match=r"'triton' cannot run on cpu: want a CUDA device, or TRITON_INTERPRET=1"):
        grouped_mm(p.a, p.w, p.offs, recipe="mxfp8", backend="triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "got compute capability (8, 0), want (8, 9)" in str(BACKEND.unsupported_reason(torch.device("cuda")))


def step(p: Problem, given: list[Tensor], main_grad: Tensor) -> list[Tensor]:
    a, w, dy = given
    options: dict[str, Any] = {"recipe": "mxfp8_e5m2", "backend": "triton"}
    out = grouped_mm(a, w, p.offs, **options)
    da, dw = torch.autograd.grad(out, (a, w), dy)
    again = grouped_mm(a.detach(), w, p.offs, main_grad=main_grad, **options)
    again.backward(dy)
    return [out.detach()[: len(a)], da, dw]


@needs_cuda
def test_the_host_waits_for_nothing_and_a_captured_graph_follows_new_groups() -> None:
    p = here((64, 0, 160, 32, 0))
    given = [p.a.clone().requires_grad_(), p.w.clone().requires_grad_(), p.dy]
    main_grad = torch.zeros(p.w.shape, device=DEVICE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(p, given, main_grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(p, given, main_grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(p, given, main_grad)
    for sizes in ((0, 32, 0, 64, 160), (256, 0, 0, 0, 0), (0, 0, 0, 0, 0)):
        p.offs.copy_(torch.tensor(sizes).cumsum(0).int())
        valid = sum(sizes)
        graph.replay()
        want = step(p, given, main_grad)
        assert all(torch.equal(x[:valid], y[:valid]) for x, y in zip(got[:2], want[:2]))
        assert torch.equal(got[2], want[2])
