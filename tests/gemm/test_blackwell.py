"""The backends for Blackwell: triton, interpreted, and the layouts of operands that blackwell gives to torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import HALF_ULP_BF16, Problem, Result, bound_of_sum, indexed, problem, quantized_weight
from host_sync import no_host_sync
from mxep.gemm import BACKENDS, Recipe, grouped_mm
from mxep.gemm.backends import blackwell
from mxep.gemm.backends.blackwell import rows_operand, swizzle_along_tokens, tokens_operand, weight_operand
from mxep.gemm.kernels import dot_scaled
from mxep.quant import E5M2, MXTensor, quantize
from quant.inputs import ends_of

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
        (blackwell.grouped_mm_dot_scaled, (*product, torch.bfloat16)),
        (blackwell.grouped_wgrad_dot_scaled, (torch.zeros(p.w.shape, device=DEVICE), *parts, 1.0, False)),
        (blackwell.grouped_wgrad_dot_scaled, (torch.zeros(p.w.shape, device=DEVICE), *parts, 1.0, True)),
    ):
        torch.library.opcheck(op.opdef, args, test_utils=utils)


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
    with no_host_sync():
        step(p, given, main_grad)
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


BLACKWELL: Any = BACKENDS["blackwell"]
IS_BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def offsets(rows: int, cols: int) -> Tensor:
    """cuBLAS: where the scale of (row, col) lies: tiles of 128 x 4 row-major; in a tile
    (row % 32) * 16 + row % 128 // 32 * 4 + col % 4."""
    row, col = torch.arange(rows).view(-1, 1), torch.arange(cols)
    tile = row // 128 * (up(cols, 4) // 4) + col // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def published(scale: Tensor) -> Tensor:
    """The bytes of one matrix of scales (rows, cols) in the published layout, padding 0."""
    rows, cols = scale.shape
    out = torch.zeros(up(rows, 128) * up(cols, 4), dtype=torch.uint8)
    out[offsets(rows, cols).flatten()] = scale.reshape(-1).view(torch.uint8)
    return out


def noise(*shape: int) -> Tensor:
    return torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sizes", [(32, 160), (0, 128, 0, 288, 32, 0), (0, 0), (512,)], ids=str)
@pytest.mark.parametrize("n", [32, 128, 160, 300])
def test_scales_along_tokens_are_each_groups_published_layout_one_after_another(sizes: tuple[int, ...], n: int) -> None:
    blocks = sum(sizes) // 32
    scale = torch.cat((noise(blocks, n), torch.full((5, n), 255, dtype=torch.uint8)))
    swizzled = swizzle_along_tokens(scale, ends_of(*sizes))
    assert swizzled.shape == (up(n, 128), up(blocks + 5 + 3 * len(sizes), 4))
    want = [published(part.mT) for part in scale[:blocks].split([size // 32 for size in sizes]) if len(part)]
    used = sum(map(len, want))
    assert torch.equal(swizzled.flatten()[:used], torch.cat([*want, torch.empty(0, dtype=torch.uint8)]))


def test_the_layout_is_that_of_torchs_own_helper() -> None:
    common_quantized = pytest.importorskip("torch.testing._internal.common_quantized")
    scale = noise(300, 9)
    assert torch.equal(published(scale), common_quantized.to_blocked(scale))
    a = quantize(torch.randn(96, 288))
    assert torch.equal(
        rows_operand(a, ends_of(96))[1].flatten()[: 128 * 12].view(torch.uint8),
        common_quantized.to_blocked(a.scale).view(torch.uint8),
    )


def test_rows_and_weights_have_the_published_layout_group_by_group() -> None:
    p = problem((64, 0, 160, 32), n=96, k=160)
    a, w = quantize(p.a), quantize(p.w)
    qdata, scale = rows_operand(a, p.offs)
    want = torch.cat([published(a.scale[rows]) for _, rows in p.groups() if rows.stop > rows.start])
    assert torch.equal(scale.view(torch.uint8).flatten()[: len(want)], want)
    assert qdata.data_ptr() == a.qdata.data_ptr()  # no copy of what lies there already
    _, w_scale = weight_operand(w)
    assert torch.equal(w_scale.view(torch.uint8), torch.stack([published(part) for part in w.scale]))


def test_torch_accepts_dtypes_shapes_and_strides() -> None:
    """torch's own checks, which it makes of tensors without data, too."""
    p = problem((64, 0, 160, 32), n=96, k=160)
    recipe = Recipe.mxfp8()
    rowwise, colwise = quantized_weight(p.w, recipe, "blackwell")
    for x, w, n in ((p.a, rowwise, 96), (p.dy, colwise.mT, 160)):
        a, a_scale = rows_operand(quantize(x), p.offs)
        b, b_scale = weight_operand(w)
        assert scaled_grouped_mm_of_meta(a, b, a_scale, b_scale, p.offs).shape == (len(p.a), n)
    dy, a = (recipe.along_tokens(quantize(x), p.offs) for x in (p.dy, p.a))
    assert isinstance(dy, MXTensor)
    assert isinstance(a, MXTensor)
    (y, y_scale), (x, x_scale) = tokens_operand(dy, p.offs), tokens_operand(a, p.offs)
    assert scaled_grouped_mm_of_meta(y, x.mT, y_scale, x_scale, p.offs).shape == (4, 96, 160)
    # Checks of torch's CUDA code that the ones above leave out: room for the scales of all rows.
    assert y_scale.shape[0] >= y.shape[0]
    assert x_scale.shape[0] >= x.shape[0]


def scaled_grouped_mm_of_meta(*operands: Tensor) -> Tensor:
    a, b, a_scale, b_scale, ends = (x.to("meta") for x in operands)
    out: Tensor = torch._scaled_grouped_mm(a, b, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16)
    return out


def decoded_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor) -> Tensor:
    """What `multiply` asks of torch, from the bytes as published: values in fp64, the product rounded to bf16."""
    ends = offs.tolist()
    groups = list(enumerate(zip([0, *ends], ends)))

    def values(qdata: Tensor, scale: Tensor) -> Tensor:
        """qdata (rows, cols) whose swizzled scales `scale` starts with."""
        byte = scale[offsets(qdata.shape[0], qdata.shape[1] // 32)]
        return qdata.double() * torch.exp2(byte.double() - 127).repeat_interleave(32, 1)

    a_bytes, b_bytes = (x.view(torch.uint8).reshape(-1) for x in (a_scale, b_scale))
    if b.ndim == 3:
        out = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=torch.bfloat16)
        place, blocks = 0, up(a.shape[1] // 32, 4)
        for g, (start, end) in groups:
            w = values(b[g].mT, b_scale.view(torch.uint8)[g])
            out[start:end] = (values(a[start:end], a_bytes[place:]) @ w.mT).bfloat16()
            place += up(end - start, 128) * blocks
        return out
    dw = torch.full((len(ends), a.shape[0], b.shape[1]), torch.nan, dtype=torch.bfloat16)
    blocks = 0
    for g, (start, end) in groups:
        if end > start:  # what torch writes for an empty group, nobody promises
            x = values(a[:, start:end], a_bytes[blocks * up(a.shape[0], 128) :])
            y = values(b.mT[:, start:end], b_bytes[blocks * up(b.shape[1], 128) :])
            dw[g] = (x @ y.mT).bfloat16()
            blocks += up((end - start) // 32, 4)
    return dw


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blackwell, "multiply", decoded_product)
    monkeypatch.setattr(blackwell.Blackwell, "unsupported_reason", lambda self, device: None)


@pytest.mark.usefixtures("decoded")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32", "mxfp8_wgrad_bf16"])
@pytest.mark.parametrize("sizes", [(64, 0, 160, 32), (0, 0, 128)], ids=str)
def test_operands_read_as_published_give_the_products_of_the_reference(sizes: tuple[int, ...], recipe: str) -> None:
    p = problem(sizes, n=96, k=160)
    assert_products_of_reference(p, recipe)


@pytest.mark.usefixtures("decoded")
def test_operands_under_an_index_too() -> None:
    p = problem((64, 0, 160, 32), n=96, k=160)
    a, dy = (indexed(quantize(x), valid=p.valid, poison=2**30) for x in (p.a, p.dy))
    assert_products_of_reference(p, "mxfp8", a=a, dy=dy)


def assert_products_of_reference(p: Problem, recipe: str, **operands: Tensor) -> None:
    got = p.run(recipe, backend="blackwell", **operands)
    for x, y, sum_error in zip(got, p.run(recipe, backend="reference"), bound_of_sum(p)):
        rounding = 2 * HALF_ULP_BF16 * (1 + 2**-8) * y.double().abs()
        assert ((x.double() - y.double()).abs() <= rounding + 2 * 1.3 * sum_error).all()


def test_without_rows_no_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    p, recipe = problem((0, 0), unused=0), Recipe.mxfp8()
    rowwise, colwise = quantized_weight(p.w, recipe, "blackwell")
    a, dy = quantize(p.a), quantize(p.dy)
    for name in ("gather_swizzled", "pad_groups", "swizzle_scales", "multiply"):
        monkeypatch.setattr(blackwell, name, None)
    assert BLACKWELL.forward(a, rowwise, p.offs, bias=None, out_dtype=torch.bfloat16).shape == (0, 96)
    assert BLACKWELL.dgrad(dy, colwise, p.offs, out_dtype=torch.bfloat16).shape == (0, 128)
    dw = BLACKWELL.wgrad(BLACKWELL.prepare_wgrad(dy, a, p.offs, recipe), p.offs, out_dtype=torch.float32)
    assert torch.equal(dw, torch.zeros(2, 96, 128))


def test_what_torchs_kernel_cannot_do_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    with pytest.raises(RuntimeError, match=r"'blackwell' cannot run on cpu: want a CUDA device of compute .* 10\.x"):
        grouped_mm(p.a, p.w, p.offs, recipe="mxfp8", backend="blackwell")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "wants compute capability 10.x, got (9, 0); use backend" in str(
        BLACKWELL.unsupported_reason(torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert BLACKWELL.unsupported_reason(torch.device("cuda")) is None
    w = BLACKWELL.quantize_weight_rowwise(p.w, Recipe.mxfp8())[0]
    how: dict[str, Any] = {"bias": None, "out_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=r"'blackwell': a: got MXTensor\(.*E5M2.*want E4M3.*backend 'triton'"):
        BLACKWELL.forward(quantize(p.a, fmt=E5M2), w, p.offs, **how)
    with pytest.raises(ValueError, match=r"'blackwell': a: got MXTensor\(.*block_size=.*backend 'dequant'"):
        BLACKWELL.forward(quantize(p.a, block_size=None), w, p.offs, **how)


@pytest.mark.skipif(not IS_BLACKWELL, reason="no GPU of compute capability 10.x")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32"])
@pytest.mark.parametrize("sizes", [(64, 0, 160, 32), (0, 0, 128)], ids=str)
def test_on_blackwell_products_are_those_of_the_reference(sizes: tuple[int, ...], recipe: str) -> None:
    p = problem(sizes, n=96, k=160)
    assert_products_of_reference(Problem(*(x.cuda() for x in (p.a, p.w, p.dy, p.offs))), recipe)
