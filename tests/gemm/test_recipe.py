"""Recipes: what they allow, their names, and what "auto" chooses."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemm.test_functional_linear import draw
from mxep.gemm import (
    GROUP_ALIGNMENT,
    Linear,
    Recipe,
    auto_recipe,
    convert,
    converted,
    grouped_mm,
    linear,
    linear_together,
    quantize_once,
)
from mxep.gemm.backends import BACKENDS
from mxep.gemm.backends.reference import Reference
from mxep.gemm.recipe import FIXED, LEAST, least_rows, recipe_of_experts
from mxep.quant import E4M3, E5M2, MXTensor, ScaleMode, quantize

NAMES = ["bf16"] + [
    "_".join((base, *changes))
    for base, tiles in (("fp8", ("",)), ("mxfp8", ("", "32x32", "mxfp4_weights")))
    for combination in itertools.product(("", "e5m2"), tiles, ("", "wgrad_bf16"), ("", "gate_up_fp8"), ("", "floor"))
    for changes in [[c for c in combination if c]]
]


def test_every_name_finds_the_recipe_of_that_name() -> None:
    assert len(NAMES) == 65
    assert [Recipe.named(name).name for name in NAMES] == NAMES


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


def test_an_unknown_name_lists_the_known_ones() -> None:
    names = (
        "",
        "mx",
        "mxfp4",
        "mxfp8_",
        "mxfp8_e4m3",
        "bf16_e5m2",
        "bf16_gate_up_fp8",
        "fp8_32x32",
        "fp8_mxfp4_weights",
    )
    names += (
        "mxfp8_32x32_mxfp4_weights",
        "MXFP8",
        "mxfp8_ceil",
        "mxfp8_floor_e5m2",
        "mxfp8_e5m2_e5m2",
        "mxfp8_wgrad_bf16_e5m2",
    )
    for name in names:
        with pytest.raises(ValueError, match=r"bf16, fp8, mxfp8.*_e5m2.*32x32 or mxfp4_weights after mxfp8 alone"):
            Recipe.named(name)


@pytest.mark.parametrize("recipe", [None, 8, ["mxfp8"]], ids=str)
def test_what_is_no_recipe_is_not_auto(recipe: Any) -> None:
    w = torch.zeros(32, 32)
    for make in (lambda: Linear(32, 32, recipe=recipe), lambda: linear(w, w, recipe=recipe)):
        with pytest.raises(ValueError, match=r"recipe: got .*, want bf16, fp8, mxfp8"):
            make()


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


RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
BF16, MXFP8 = Recipe.bf16(), Recipe.mxfp8()
Found = Iterator[tuple[tuple[float, int, int], float]]
"""(T, K, N), how many times as fast as bf16."""


def read(name: str, device: str = "h200") -> Any:
    return json.loads((RESULTS / f"{name}-{device}.json").read_text())


def of_linear() -> Found:
    for sections in [run["sections"] for run in read("linear")["runs"]]:
        for row in sections.get("linear", []) + sections.get("qkv", []):
            tokens, k, *widths = row["shape"]
            if row["what"] == ("mxep mxfp8, together" if widths[1:] else "mxep mxfp8"):
                yield (tokens, k, sum(widths + widths[1:])), row["x bf16"]


def of_grouped_mm() -> Found:
    for row in read("gemm")["sections"]["steps"]:
        if row["what"].endswith(" mxfp8"):
            rows, n, k, groups = row["shape"]
            yield (rows / groups, k, n), row["x bf16"]


def of_experts() -> Found:
    of_own_bf16 = [run for run in read("bf16-layers", "h100")["runs"] if run["commit"] != "8eb5b761"]
    runs = [run["sections"] for run in (read("auto"), read("torch213"), *of_own_bf16)]
    for rows in [rows for sections in runs for name, rows in sections.items() if name in ("layer", "eager")]:
        ms = {(tuple(row["shape"]), row["ranks"], row["what"]): row["ms"] for row in rows if "ms" in row}
        for (shape, ranks, what), plain in ms.items():
            recipe, _, dispatcher = what.partition("/")
            if recipe == "bf16" and (ours := ms.get((shape, ranks, f"mxfp8/{dispatcher}"))):
                tokens, dim, hidden, experts, top_k = shape
                yield (tokens * top_k * ranks / experts, dim, hidden), plain / ours


MEASURED = {"linear": of_linear, "grouped_mm": of_grouped_mm, "experts": of_experts}


@pytest.mark.parametrize("of", LEAST)
def test_mxfp8_was_faster_wherever_it_is_picked(of: str) -> None:
    found = [(auto_recipe(*shape, of=of), gain, shape) for shape, gain in MEASURED[of]()]
    picked = [(gain, shape) for recipe, gain, shape in found if recipe == MXFP8]
    assert len(picked) >= 6
    least = 1.05 if of == "experts" else 1.1
    assert min(picked)[0] >= least, min(picked)
    assert not [(shape, gain) for recipe, gain, shape in found if recipe == BF16 and gain > least], "it would have paid"


def test_it_pays_from_a_size_on_whichever_side_grows() -> None:
    assert auto_recipe(4096, 4096, 2048) == MXFP8
    assert auto_recipe(1024, 4096, 2048) == BF16
    assert auto_recipe(4096, 4096, 1024) == BF16
    assert (auto_recipe(1024, 5120, 16384), auto_recipe(2048, 4096, 2048)) == (MXFP8, BF16), "launches cost, too"
    assert auto_recipe(8192, 2048, 512) == BF16
    assert auto_recipe(8192, 2048, 4096 + 512 + 512) == MXFP8
    assert auto_recipe(0, 4096, 4096) == BF16
    assert auto_recipe(2**20, 8192, 8208) == BF16, "no multiple of 32"
    assert [auto_recipe(rows, 2048, 768, of="experts") for rows in (512, 640)] == [BF16, MXFP8]
    with pytest.raises(ValueError, match="of: got 'lines', want one of linear, grouped_mm, experts"):
        auto_recipe(1, 32, 32, of="lines")


def test_it_pays_from_the_row_after_the_least_ones() -> None:
    for of, k, n in (("linear", 4096, 2048), ("grouped_mm", 2048, 1536), ("experts", 2048, 768)):
        least = math.floor(least_rows(k, n, of=of))
        assert [auto_recipe(rows, k, n, of=of) for rows in (least, least + 1)] == [BF16, MXFP8]
    assert least == 603
    assert least_rows(2048, 256, of="experts") == math.inf
    recipe, why = recipe_of_experts(1e9, 2048, 256)
    assert (recipe, why) == (BF16, "bf16, as an expert gets 1000000000 rows: with D 2048 and F 256 MXFP8 never pays")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """LEAST sizes that 32 rows of 64 to 96 features have, but not 31."""
    for of in LEAST:
        monkeypatch.setitem(FIXED, of, 0)
        monkeypatch.setitem(LEAST, of, 0.999 / (1 / 32 + 1 / 64 + 1 / 96))


@pytest.mark.usefixtures("small")
def test_a_linear_of_recipe_auto_is_that_of_the_recipe_it_picks() -> None:
    w, layer = draw(96, 64, seed=1), Linear(64, 96, recipe="auto", dtype=torch.bfloat16)
    assert repr(layer) == "Linear(in_features=64, out_features=96, bias=True, recipe=auto)"
    for rows, recipe in ((31, "bf16"), (32, "mxfp8")):
        x = draw(rows, 64)
        assert torch.equal(linear(x, w, recipe="auto"), linear(x, w, recipe=recipe))
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias, recipe=recipe))


@pytest.mark.usefixtures("small")
def test_several_together_count_all_their_features() -> None:
    x, weights = draw(32, 64), [draw(n, 64, seed=n) for n in (32, 64)]
    together = linear_together(x, weights, recipe="auto")
    assert all(torch.equal(out, linear(x, w, recipe="mxfp8")) for out, w in zip(together, weights))
    assert torch.equal(linear(x, weights[1], recipe="auto"), linear(x, weights[1], recipe="bf16")), "one alone is small"


@pytest.mark.usefixtures("small")
def test_convert_decides_at_each_product() -> None:
    model = convert(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 40)).bfloat16(), "auto")
    assert list(converted(model)) == ["0.weight"], "40 is no multiple of 32"
    for rows, recipe in ((31, "bf16"), (32, "mxfp8")):
        x = draw(rows, 64)
        assert torch.equal(model[0](x), linear(x, model[0].weight, model[0].bias, recipe=recipe))


@pytest.mark.usefixtures("small")
def test_convert_decides_for_experts_by_the_rows_of_one() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(draw(2, 96, 64))

        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch._grouped_mm(x, self.w.mT, offs=offs)
            return out

    found = {}
    for recipe in ("auto", "bf16", "mxfp8"):
        experts = convert(Experts(), recipe)
        for rows in (62, 64):
            found[recipe, rows] = experts(draw(rows, 64), torch.tensor([rows // 2, rows], dtype=torch.int32))
    assert torch.equal(found["auto", 62], found["bf16", 62])
    assert torch.equal(found["auto", 64], found["mxfp8", 64])
    assert not torch.equal(found["bf16", 64], found["mxfp8", 64])
