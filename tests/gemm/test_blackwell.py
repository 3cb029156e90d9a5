"""What the blackwell backend hands to torch: bytes where the published layout wants them, shapes that torch accepts.

No product of torch's kernel is computed here: it needs the hardware. `decoded_product` reads the operands as the layout
is published and multiplies what it reads, so that a wrong byte, order or orientation shows in the result.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import Problem, indexed, problem, quantized_weight
from gemm.test_accuracy import HALF_ULP_BF16, bound_of_sum
from mxep.gemm import BACKENDS, Recipe, grouped_mm
from mxep.gemm.backends import blackwell
from mxep.gemm.backends.blackwell import rows_operand, swizzle_along_tokens, tokens_operand, weight_operand
from mxep.quant import E5M2, MXTensor, quantize

BACKEND: Any = BACKENDS["blackwell"]
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


def ends_of(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


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
def test_products_of_unquantized_operands_are_those_of_dequant() -> None:
    p = problem()
    assert p.run("bf16", backend="blackwell").same_as(p.run("bf16", backend="dequant"))


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


@pytest.mark.usefixtures("decoded")
def test_bias_is_added_to_its_groups_rows() -> None:
    p, bias = problem(n=96, k=160), torch.randn(4, 96)
    plain, biased = (
        grouped_mm(p.a, p.w, p.offs, recipe="mxfp8", backend="blackwell", bias=b, out_dtype=torch.float32)
        for b in (None, bias)
    )
    for g, rows in p.groups():
        assert torch.equal(biased[rows], plain[rows] + bias[g])


def test_without_rows_no_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    p, recipe = problem((0, 0), unused=0), Recipe.mxfp8()
    rowwise, colwise = quantized_weight(p.w, recipe, "blackwell")
    a, dy = quantize(p.a), quantize(p.dy)
    for name in ("gather_swizzled", "pad_groups", "swizzle_scales", "multiply"):
        monkeypatch.setattr(blackwell, name, None)
    assert BACKEND.forward(a, rowwise, p.offs, bias=None, out_dtype=torch.bfloat16).shape == (0, 96)
    assert BACKEND.dgrad(dy, colwise, p.offs, out_dtype=torch.bfloat16).shape == (0, 128)
    dw = BACKEND.wgrad(BACKEND.prepare_wgrad(dy, a, p.offs, recipe), p.offs, out_dtype=torch.float32)
    assert torch.equal(dw, torch.zeros(2, 96, 128))


def test_what_torchs_kernel_cannot_do_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    with pytest.raises(RuntimeError, match=r"'blackwell' cannot run on cpu: want a CUDA device of compute .* 10\.x"):
        grouped_mm(p.a, p.w, p.offs, recipe="mxfp8", backend="blackwell")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "wants compute capability 10.x, got (9, 0); use backend" in str(
        BACKEND.unsupported_reason(torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert BACKEND.unsupported_reason(torch.device("cuda")) is None
    w = BACKEND.quantize_weight_rowwise(p.w, Recipe.mxfp8())[0]
    how: dict[str, Any] = {"bias": None, "out_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=r"'blackwell': a: got MXTensor\(.*E5M2.*want E4M3.*backend 'triton'"):
        BACKEND.forward(quantize(p.a, fmt=E5M2), w, p.offs, **how)
    with pytest.raises(ValueError, match=r"'blackwell': a: got MXTensor\(.*block_size=.*backend 'dequant'"):
        BACKEND.forward(quantize(p.a, block_size=None), w, p.offs, **how)


@pytest.mark.skipif(not IS_BLACKWELL, reason="no GPU of compute capability 10.x")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32"])
@pytest.mark.parametrize("sizes", [(64, 0, 160, 32), (0, 0, 128)], ids=str)
def test_on_blackwell_products_are_those_of_the_reference(sizes: tuple[int, ...], recipe: str) -> None:
    p = problem(sizes, n=96, k=160)
    assert_products_of_reference(Problem(*(x.cuda() for x in (p.a, p.w, p.dy, p.offs))), recipe)
