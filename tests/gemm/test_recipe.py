"""Recipes: names, fields, what they quantize."""

import itertools

import pytest
import torch

from mxep.gemm import GROUP_ALIGNMENT, Recipe, grouped_mm, quantize_once
from mxep.gemm.backends import BACKENDS
from mxep.gemm.backends.reference import Reference
from mxep.quant import E4M3, E5M2, MXTensor, ScaleMode, quantize

NAMES = ["bf16"] + [
    "_".join((base, *changes))
    for base, tiles in (("fp8", ("",)), ("mxfp8", ("", "32x32", "mxfp4_weights")))
    for combination in itertools.product(
        ("", "e5m2"), tiles, ("", "wgrad_bf16"), ("", "gate_up_fp8"), ("", "floor", "ceil", "even")
    )
    for changes in [[c for c in combination if c]]
]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_finds_the_recipe_of_that_name(name: str) -> None:
    assert Recipe.named(name).name == name


def test_names_mean_what_they_say() -> None:
    assert Recipe.named("bf16") == Recipe.bf16() == Recipe("none")
    assert Recipe.named("fp8") == Recipe.fp8() == Recipe("row")
    assert Recipe.named("mxfp8") == Recipe.mxfp8() == Recipe("mx", E4M3, E4M3, ScaleMode.RCEIL, "1x32", "mx")
    assert Recipe.named("mxfp8_e5m2") == Recipe.mxfp8(grad_fmt=E5M2)
    assert Recipe.named("mxfp8_32x32") == Recipe.mxfp8(weight_block="32x32")
    assert Recipe.named("mxfp8_wgrad_bf16") == Recipe.mxfp8(wgrad="bf16")
    assert Recipe.named("mxfp8_mxfp4_weights") == Recipe.mxfp8(weight_rounding="mxfp4")
    assert Recipe.named("fp8_gate_up_fp8") == Recipe.fp8(saved_gate_up="fp8")
    assert Recipe.named("fp8_floor") == Recipe.fp8(mode=ScaleMode.FLOOR)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mx",
        "mxfp4",
        "mxfp8_",
        "mxfp8_e4m3",
        "bf16_e5m2",
        "bf16_gate_up_fp8",
        "fp8_32x32",
        "fp8_mxfp4_weights",
        "mxfp8_32x32_mxfp4_weights",
        "MXFP8",
        "mxfp8_ceil_even",
        "mxfp8_e5m2_e5m2",
        "mxfp8_wgrad_bf16_e5m2",
    ],
)
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"bf16, fp8, mxfp8.*_e5m2.*32x32 or mxfp4_weights after mxfp8 alone"):
        Recipe.named(name)


def test_the_name_with_the_same_changes_in_order_is_named() -> None:
    with pytest.raises(ValueError, match=r"as in 'mxfp8_e5m2'; did you mean mxfp8_e5m2_wgrad_bf16_floor\?$"):
        Recipe.named("mxfp8_wgrad_bf16_floor_e5m2")


def test_wrong_fields_are_named() -> None:
    with pytest.raises(ValueError, match="scaling: got 'mxfp8', want one of none, row, mx"):
        Recipe("mxfp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wgrad: got 'fp8'"):
        Recipe.mxfp8(wgrad="fp8")
    with pytest.raises(ValueError, match="weight_block 32x32: got scaling 'row', want 'mx'"):
        Recipe.fp8(weight_block="32x32")
    for wrong in (Recipe.fp8, lambda **how: Recipe.mxfp8(weight_block="32x32", **how)):
        with pytest.raises(ValueError, match="weight_rounding mxfp4: expected scaling 'mx' and weight_block '1x32'"):
            wrong(weight_rounding="mxfp4")


def test_multiples_come_from_one_table() -> None:
    assert GROUP_ALIGNMENT == {"none": 1, "row": 16, "mx": 32}
    assert [Recipe.named(name).group_alignment for name in ("bf16", "fp8", "mxfp8")] == [1, 16, 32]
    assert [Recipe.named(name).block_size for name in ("bf16", "fp8", "mxfp8")] == [None, None, 32]


def test_activations_and_gradients_are_quantized_by_the_recipe() -> None:
    x = torch.randn(4, 64)
    r = Recipe.mxfp8(grad_fmt=E5M2, mode=ScaleMode.FLOOR)
    for got, fmt in ((r.quantize_rows(x), E4M3), (r.quantize_rows(x, r.grad_fmt), E5M2)):
        want = quantize(x, fmt=fmt, mode=ScaleMode.FLOOR)
        assert isinstance(got, MXTensor)
        assert torch.equal(got.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
        assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
        assert r.fits(got)
        assert not Recipe.fp8().fits(got)
        assert not Recipe.bf16().fits(got)
    row = Recipe.fp8().quantize_rows(x)
    assert isinstance(row, MXTensor)
    assert row.block_size == 64
    assert Recipe.fp8().fits(row)
    assert not r.fits(row)
    assert not r.fits(quantize(torch.randn(32, 64), axis=-2))
    assert Recipe.bf16().quantize_rows(x) is x
    assert Recipe.bf16().quantize_rows(x, Recipe.bf16().grad_fmt) is x


@pytest.mark.parametrize("backend", ["rows in blocks", "a scale a row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_weights_are_multiplied_as_they_are_exported(backend: str, dtype: torch.dtype) -> None:
    """Both quantizations of a weight hold the values of `quantize(w, fmt="E2M1")` exactly, where scales allow it."""

    class Rows(Reference):
        wants_rowwise = True

    recipe, chosen = Recipe.named("mxfp8_mxfp4_weights"), Rows() if backend == "a scale a row" else Reference()
    w = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    exported = quantize(w.bfloat16(), fmt="E2M1").dequantize(torch.float32)
    rowwise, amax = chosen.quantize_weight_rowwise(w, recipe, with_amax=True)
    colwise = chosen.quantize_weight_colwise(w, recipe, amax)
    assert torch.equal(rowwise.dequantize(torch.float32), exported)
    assert torch.equal(colwise.dequantize(torch.float32), exported)
    again = quantize(exported.bfloat16(), fmt="E2M1").dequantize(torch.float32)
    assert torch.equal(again, exported), "weights of an MXFP4 checkpoint stay as they are"


@pytest.mark.parametrize("backend", BACKENDS)
def test_mxfp4_weights_in_parts_are_those_of_the_joined_weight(backend: str) -> None:
    recipe, chosen = Recipe.named("mxfp8_mxfp4_weights"), BACKENDS[backend]
    gate, up = torch.randn(2, 2, 64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for weight in ((gate, up), torch.cat([gate, up], 1)):
        rowwise, amax = quantize_once.quantize_rowwise.function(weight, recipe=recipe, backend=chosen, with_amax=True)
        found.append([rowwise, quantize_once.quantize_colwise.function(weight, amax, recipe=recipe, backend=chosen)])
    for apart, joined in zip(*found):
        assert torch.equal(apart.dequantize(torch.float32), joined.dequantize(torch.float32))
    exported = quantize(torch.cat([gate, up], 1), fmt="E2M1").dequantize(torch.float32)
    assert torch.equal(found[0][0].dequantize(torch.float32), exported)


def test_gradients_of_mxfp4_weights_pass_unchanged() -> None:
    """Those of the rounded weight, at the weight; dgrad multiplies the rounded one."""
    a, w = torch.randn(64, 96), torch.randn(2, 64, 96)
    offs = torch.tensor([32, 64], dtype=torch.int32)
    rounded = quantize(w.bfloat16(), fmt="E2M1").dequantize(torch.float32)
    found = []
    for weight, recipe in ((w, "mxfp8_mxfp4_weights"), (rounded, "mxfp8")):
        x, p = a.clone().requires_grad_(), weight.clone().requires_grad_()
        out = grouped_mm(x, p, offs, recipe=Recipe.named(recipe), backend="reference")
        out.backward(torch.ones_like(out))
        found.append([out.detach(), x.grad, p.grad])
    assert all(torch.equal(got, want) for got, want in zip(*found))
