"""FrozenWeight: what it stores, that nothing casts it, and that its bytes come back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import snr
from mxep.gemm import FrozenWeight, Recipe, freeze, grouped_mm
from mxep.gemm.backends import BACKENDS
from mxep.quant import BLOCK, BlockFP8, MXTensor, fold, fold_for_dgrad, quantize, quantize_blocks
from mxep.quant.fold import column_scales
from mxep.runtime.bundle import tensors_in
from quant.inputs import ends_of

GROUPS, N, K = 3, 64, 96


def weight(seed: int = 0, *, spread: int = 0) -> Tensor:
    """Rows of norms up to 2^spread apart, and columns: blocks of a row then do not fold exactly."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(GROUPS, N, K, generator=generator)
    blocks = 2.0 ** torch.randint(0, spread + 1, (GROUPS, N, K // BLOCK, 1), generator=generator)
    return (w.view(GROUPS, N, -1, BLOCK) * blocks).view(GROUPS, N, K).bfloat16()


@pytest.mark.parametrize(("fmt", "bytes_an_element"), [("mxfp8", 1 + 1 / 32 + 5 / 1024), ("mxfp4", 0.5 + 1 / 32)])
def test_it_has_the_values_of_quantize_and_few_bytes(fmt: str, bytes_an_element: float) -> None:
    w = weight()
    frozen, quantized = freeze(w, fmt), quantize(w, fmt={"mxfp8": "E4M3", "mxfp4": "E2M1"}[fmt])
    assert (frozen.format, tuple(frozen.shape)) == (fmt, (GROUPS, N, K))
    exact = freeze(w, fmt, folded=False)
    assert torch.equal(exact.dequantize(), quantized.dequantize())
    error = (frozen.dequantize().float() - exact.dequantize().float()).abs().amax(-1) / w.abs().amax(-1)
    assert float(error.max()) < 2.0**-17
    assert frozen.nbytes <= w.numel() * bytes_an_element + GROUPS * (N + K // 32 + 5)
    assert torch.equal(frozen[1:2].dequantize(), frozen.dequantize()[1:2])


@pytest.mark.parametrize(("fmt", "folded"), [("mxfp8", True), ("mxfp8", False), ("mxfp4", True)])
@pytest.mark.parametrize("lossy", [False, True])
def test_shipped_bytes_come_back(fmt: str, folded: bool, lossy: bool) -> None:
    shipped = quantize(weight(), fmt={"mxfp8": "E4M3", "mxfp4": "E2M1"}[fmt])
    if lossy:  # odd multiples of the smallest number, in blocks three binades below their row's largest
        qdata, scale = (part.clone().view(torch.uint8) for part in (shipped.qdata, shipped.scale))
        scale[1:, 7, 1] = int(scale[1:, 7].amax()) - 3
        if fmt == "mxfp8":
            qdata[1, 7, 40:42], qdata[2, 7, 50] = 0x85, 0x01
        shipped = MXTensor.from_qdata_and_scales(qdata.view(shipped.qdata.dtype), scale)
    frozen = freeze(shipped, fmt, folded=folded)
    back = frozen.shipped()
    assert torch.equal(back.qdata.view(torch.uint8), shipped.qdata.view(torch.uint8))
    assert torch.equal(back.scale.view(torch.uint8), shipped.scale.view(torch.uint8))
    assert (frozen.row_scale is not None) == (frozen.lost_index is not None) == (fmt == "mxfp8" and folded)
    if frozen.lost_index is not None and lossy:
        assert (frozen.lost_index >= 0).sum(1).tolist() == [0, 2, 1]


def test_rows_that_lose_much_are_refused_or_stored_as_shipped() -> None:
    shipped = quantize(weight(spread=20), fmt="E4M3")
    with pytest.raises(ValueError, match=r"at most 6 of 6144 elements of group 0.* got \d+: pass folded=False"):
        freeze(shipped)
    frozen = freeze(shipped, folded=False)
    assert frozen.row_scale is None
    assert torch.equal(frozen.dequantize(), shipped.dequantize())


def test_signs_of_zeros_and_nan_blocks_come_back() -> None:
    qdata = quantize(weight()).qdata.clone().view(torch.uint8)
    scale = quantize(weight()).scale.clone().view(torch.uint8)
    qdata[0, 0, :32] = 0x80
    shipped = MXTensor.from_qdata_and_scales(qdata.view(torch.float8_e4m3fn), scale)
    assert torch.equal(freeze(shipped).shipped().qdata.view(torch.uint8), qdata)
    scale[1, 2, 1] = 255
    shipped = MXTensor.from_qdata_and_scales(qdata.view(torch.float8_e4m3fn), scale)
    # A NaN block makes NaN of its row.
    with pytest.raises(ValueError, match=r"group 1 .*, in 1 of its rows for a NaN or Inf: pass folded=False"):
        freeze(shipped)
    frozen = freeze(shipped, folded=False)
    assert torch.equal(frozen.shipped().qdata.view(torch.uint8), qdata)
    assert frozen.dequantize()[1, 2, 32:64].isnan().all()


@pytest.mark.parametrize(("fmt", "block_size"), [("fp8_block", (128, 128)), ("fp8_row", (1, K))])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fp32_scales_that_are_not_finite_are_refused(fmt: Any, block_size: tuple[int, int], bad: float) -> None:
    blocks = quantize_blocks(weight(), block_size=block_size)
    blocks.scale[1, 0, 0] = bad
    with pytest.raises(ValueError, match="expected finite weights and scales, got 1 scales that are NaN or Inf"):
        freeze(blocks, fmt)


def test_block_fp8_freezes_with_its_values() -> None:
    blocks = quantize_blocks(weight(), block_size=(32, 32), scale_dtype=torch.float8_e8m0fnu)
    assert torch.equal(freeze(blocks, folded=False).dequantize(), blocks.dequantize(torch.bfloat16))
    assert torch.equal(freeze(blocks).shipped().dequantize(), blocks.dequantize(torch.bfloat16))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_block_fp8_with_scales_that_do_not_fold_keeps_its_bytes(scale_dtype: torch.dtype) -> None:
    w = torch.randn(GROUPS, 160, 288, generator=torch.Generator().manual_seed(0)).bfloat16()  # ragged blocks
    blocks = quantize_blocks(w, scale_dtype=scale_dtype)
    frozen = freeze(blocks, "fp8_block")
    assert (frozen.format, tuple(frozen.shape), len(frozen.parts)) == ("fp8_block", (GROUPS, 160, 288), 2)
    assert frozen.nbytes == w.numel() + GROUPS * 2 * 3 * 4
    shipped = frozen.shipped()
    assert torch.equal(shipped.qdata.view(torch.uint8), blocks.qdata.view(torch.uint8))
    assert torch.equal(shipped.scale, blocks.scale.float())
    assert torch.equal(frozen[1:].dequantize(torch.float32), blocks.dequantize(torch.float32)[1:])
    assert torch.equal(freeze(w, "fp8_block").dequantize(), quantize_blocks(w).dequantize())


@pytest.mark.parametrize("n", [32, 160])
def test_transposed_blocks_freeze_and_are_transposed_for_dgrad(n: int) -> None:
    blocks = quantize_blocks(torch.randn(2, 2048, n)).mT  # views; K > 32 N once
    frozen = freeze(blocks, "fp8_block")
    assert torch.equal(frozen.dequantize(), blocks.dequantize())
    assert torch.equal(fold_for_dgrad(frozen.along_k()).dequantize(), blocks.dequantize())


@pytest.mark.parametrize("name", ["reference", "hopper"])
def test_products_with_block_fp8_are_those_of_its_values_both_ways(name: str) -> None:
    """hopper by the reference of its kernels."""
    n, k = 160, 288
    frozen, backend = freeze(quantize_blocks(torch.randn(2, n, k)), "fp8_block"), BACKENDS[name]
    values, offs = frozen.dequantize(torch.float32), torch.tensor([32, 96], dtype=torch.int32)
    rowwise, colwise = backend.expand_rowwise(frozen), backend.expand_colwise(frozen)
    assert torch.equal(colwise.dequantize(torch.float32), values)
    assert colwise.qdata.mT.is_contiguous() is (name == "hopper")
    a, dy = (quantize(torch.randn(96, width)) for width in (k, n))
    out = backend.forward(a, rowwise, offs, bias=None, out_dtype=torch.float32)
    da = backend.dgrad(dy, colwise, offs, out_dtype=torch.float32)
    for g, rows in enumerate((slice(0, 32), slice(32, 96))):
        for got, x, w in ((out, a, values[g].mT), (da, dy, values[g])):
            assert snr(x.dequantize(torch.float32)[rows] @ w, got[rows]) > 90


def rows(seed: int = 0, *, n: int = 160, k: int = 288) -> BlockFP8:
    """E4M3 with one scale per row, not powers of two. Scales of rows lie up to 2^8 apart."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(GROUPS, n, k, generator=generator) * 2.0 ** torch.randint(-4, 5, (1, n, 1), generator=generator)
    return quantize_blocks(w, block_size=(1, k), scale_dtype=torch.bfloat16)


def test_row_scaled_fp8_keeps_its_bytes() -> None:
    shipped = rows()
    frozen = freeze(shipped, "fp8_row")
    assert (frozen.format, tuple(frozen.shape), len(frozen.parts)) == ("fp8_row", (GROUPS, 160, 288), 2)
    assert frozen.nbytes == GROUPS * 160 * (288 + 4)
    back = frozen.shipped()
    assert torch.equal(back.qdata.view(torch.uint8), shipped.qdata.view(torch.uint8))
    assert torch.equal(back.scale, shipped.scale.float())
    assert torch.equal(frozen[1:].dequantize(torch.float32), shipped.dequantize(torch.float32)[1:])


@pytest.mark.parametrize("shape", [(2, 1, 64), (2, 4, 32), (2, 160, 128)])
def test_values_and_matrices_of_one_scale_freeze_to_rows(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    want = quantize_blocks(w, block_size=(1, shape[-1]))
    frozen = freeze(w, "fp8_row")
    assert frozen.format == "fp8_row"
    assert torch.equal(frozen.along_k().qdata.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(frozen.along_k().scale, w.abs().amax(-1, keepdim=True) / 448)
    tensor = quantize_blocks(w, block_size=shape[1:])
    got = freeze(tensor, "fp8_row")
    assert got.format == "fp8_row"
    assert torch.equal(got.dequantize(torch.float32), tensor.dequantize(torch.float32))


@pytest.mark.parametrize("name", ["reference", "dequant", "hopper"])
@pytest.mark.parametrize("block_size", [BLOCK, None])
def test_products_with_row_scaled_fp8_are_those_of_its_values_both_ways(name: str, block_size: int | None) -> None:
    """hopper by the reference of its kernels: dgrad rounds dy times the scales once more, to E4M3."""
    frozen, backend = freeze(rows(k=2880), "fp8_row"), BACKENDS[name]
    values, offs = frozen.dequantize(torch.float32), ends_of(32, 0, 61)
    bias = torch.randn(GROUPS, 160, generator=torch.Generator().manual_seed(3))
    a, dy = (
        quantize(torch.randn(96, width, generator=torch.Generator().manual_seed(1)), block_size=block_size)
        for width in (2880, 160)
    )
    out = backend.forward(a, backend.expand_rowwise(frozen), offs, bias=bias, out_dtype=torch.float32)
    da = backend.dgrad(dy, backend.expand_colwise(frozen), offs, out_dtype=torch.float32)
    group = torch.tensor([0] * 32 + [2] * 61)
    x, d = (each.dequantize(torch.float32)[:93].double() for each in (a, dy))

    def products(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat((x[:32] @ w[0].double(), x[32:] @ w[2].double()))

    exact = 45 if name == "dequant" else 90  # dB: bf16 weights and results
    assert snr(products(x, values.mT) + bias.double()[group], out[:93].double()) > exact
    assert snr(products(d, values), da[:93].double()) > (28 if name == "hopper" else exact)
    if name == "hopper":
        scale = frozen.along_k().scale.double()
        scaled = quantize((d * scale[group, :, 0]).float(), block_size=None).dequantize(torch.float32).double()
        assert snr(products(scaled, frozen.along_k().qdata), da[:93].double()) > 90
        assert backend.expand_rowwise(frozen).qdata.data_ptr() == frozen.qdata.data_ptr(), "no copy"
        assert backend.expand_colwise(frozen).qdata.mT.is_contiguous()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_e5m2", "fp8", "bf16"])
@pytest.mark.parametrize("name", ["reference", "hopper"])
def test_grouped_mm_takes_row_scaled_fp8(recipe: str, name: str) -> None:
    if name == "hopper" and not torch.cuda.is_available():
        name = "dequant"
    device = "cuda" if name == "hopper" else "cpu"
    frozen = freeze(rows().by_rows().dequantize(torch.float32).to(device), "fp8_row")
    offs, values = ends_of(32, 0, 64).to(device), frozen.dequantize(torch.float32)
    x = torch.randn(96, 288, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = grouped_mm(x, frozen, offs, recipe=recipe, backend=name)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    group = torch.tensor([0] * 32 + [2] * 64, device=device)
    assert snr(torch.einsum("mk,mnk->mn", x.detach().float(), values[group]), out.float()) > 25
    assert snr(torch.einsum("mn,mnk->mk", d_out.float(), values[group]), x.grad.float()) > 20


@pytest.mark.parametrize("fmt", ["fp8_block", "fp8_row"])
@pytest.mark.parametrize("name", ["triton", "blackwell"])
def test_backends_without_such_blocks_quantize_them_for_mxfp8_alone(name: str, fmt: str) -> None:
    n, k = 160, 96
    device = "cuda" if torch.cuda.is_available() and name == "triton" else "cpu"
    frozen, backend = freeze(torch.randn(2, n, k, device=device), fmt), BACKENDS[name]
    values, offs = frozen.dequantize(torch.float32), torch.tensor([32, 96], dtype=torch.int32, device=device)

    def products(a: Tensor, dy: Tensor) -> list[float]:
        out = backend.forward(a, backend.expand_rowwise(frozen), offs, bias=None, out_dtype=torch.float32)
        da = backend.dgrad(dy, backend.expand_colwise(frozen), offs, out_dtype=torch.float32)
        a, dy = (x.dequantize(torch.float32) if isinstance(x, MXTensor) else x.float() for x in (a, dy))
        group = torch.arange(96, device=device) >= 32
        want = torch.einsum("mk,mnk->mn", a, values[group.int()]), torch.einsum("mn,mnk->mk", dy, values[group.int()])
        return [snr(*pair) for pair in zip(want, (out, da))]

    plain = torch.randn(96, k, device=device).bfloat16(), torch.randn(96, n, device=device).bfloat16()
    assert min(products(*plain)) > 45, "rounded to bf16"
    if name == "triton":
        assert all(28 < each < 35 for each in products(*map(quantize, plain)))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("name", ["reference", "dequant"])
def test_forward_and_dgrad_are_those_of_the_values(fmt: str, name: str) -> None:
    frozen, backend = freeze(weight(), fmt), BACKENDS[name]
    offs, recipe = torch.tensor([32, 32, 96], dtype=torch.int32), Recipe.mxfp8()
    values = frozen.dequantize().float()
    generator = torch.Generator().manual_seed(1)
    for width, expand, product, transposed in (
        (K, backend.expand_rowwise, backend.forward, values.mT),
        (N, backend.expand_colwise, backend.dgrad, values),
    ):
        rows = recipe.quantize_rows(torch.randn(96, width, generator=generator).bfloat16())
        bias = {"bias": None} if product == backend.forward else {}
        got = product(rows, expand(frozen), offs, out_dtype=torch.float32, **bias)
        want = torch.cat(
            [rows.dequantize().float()[a:b] @ transposed[g] for g, (a, b) in enumerate([(0, 32), (32, 32), (32, 96)])]
        )
        tolerance = 1e-5 if name == "reference" else 1e-2  # dequant rounds results to bf16
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 30)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("spread", [0, 20])
def test_on_hopper_both_orientations_are_folds_of_the_same_bytes(fmt: str, spread: int) -> None:
    shipped = quantize(weight(spread=spread), fmt={"mxfp8": "E4M3", "mxfp4": "E2M1"}[fmt])
    frozen, hopper = freeze(shipped, fmt, folded=spread == 0), BACKENDS["hopper"]
    rowwise, colwise = hopper.expand_rowwise(frozen), hopper.expand_colwise(frozen)
    assert (rowwise.block_size, colwise.axis, colwise.block_size) == (K, -2, N)
    want = fold_for_dgrad(shipped)
    assert torch.equal(colwise.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(frozen.column_scale, column_scales(shipped).view(torch.uint8))
    assert torch.equal(rowwise.qdata.view(torch.uint8), fold(shipped).qdata.view(torch.uint8))


def test_no_cast_changes_a_byte() -> None:
    frozen = freeze(weight())
    for part in tensors_in(frozen):
        assert not part.is_floating_point()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: freeze(weight(), "fp8"), "expected fmt mxfp8 or mxfp4 or fp8_block or fp8_row, got 'fp8'"),
        (lambda: freeze(weight()[0]), r"expected w \(G, N, K\) with K a multiple of 32, got \(64, 96\)"),
        (lambda: freeze(quantize(weight()), "mxfp4"), "expected mxfp4, blocks of 32 along K, got MXTensor"),
        (lambda: freeze(quantize(weight()), "fp8_block"), r"expected fp8_block, blocks of \(128, 128\), got MXTensor"),
        (lambda: freeze(quantize_blocks(weight(), block_size=(64, 64)), "fp8_block"), "fp8_block, .* got BlockFP8"),
        (lambda: freeze(quantize(weight()), "fp8_row"), r"expected fp8_row, blocks of \(1, 96\), got MXTensor"),
        (lambda: freeze(quantize_blocks(weight(), block_size=(1, 32)), "fp8_row"), "fp8_row, .* got BlockFP8"),
        (lambda: freeze(quantize(weight(), axis=-2)), "expected mxfp8, blocks of 32 along K, got MXTensor"),
    ],
)
def test_what_it_does_not_take(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_types() -> None:
    assert isinstance(freeze(weight()), FrozenWeight)
