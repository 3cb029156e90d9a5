"""Recipe "auto": it follows what was measured, and everything that takes a recipe for linears takes it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemm.test_linear import draw
from mxep.gemm import Linear, Recipe, auto_recipe, convert, converted, linear, linear_together
from mxep.gemm.recipe import FIXED, LEAST, least_rows, recipe_of_experts

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
BF16, MXFP8 = Recipe.bf16(), Recipe.mxfp8()
Found = Iterator[tuple[tuple[float, int, int], float]]
"""(T, K, N), how many times as fast as bf16."""


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}-h200.json").read_text())


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
    runs = [run["sections"].get("layer", []) for run in read("layer")["runs"]]
    small = [
        run for run in read("small-batches")["runs"] if run["commit"] != "fc6b43c"
    ]  # of a slower kernel for weights
    for rows in runs + [run["sections"]["eager"] for run in small]:
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
    assert min(picked)[0] >= 1.1, min(picked)
    assert not [(shape, gain) for recipe, gain, shape in found if recipe == BF16 and gain > 1.1], "it would have paid"


def test_it_pays_from_a_size_on_whichever_side_grows() -> None:
    assert auto_recipe(4096, 4096, 2048) == MXFP8
    assert auto_recipe(1024, 4096, 2048) == BF16
    assert auto_recipe(4096, 4096, 1024) == BF16
    assert (auto_recipe(1024, 5120, 16384), auto_recipe(2048, 4096, 2048)) == (MXFP8, BF16), "launches cost, too"
    assert auto_recipe(8192, 2048, 512) == BF16
    assert auto_recipe(8192, 2048, 4096 + 512 + 512) == MXFP8
    assert auto_recipe(0, 4096, 4096) == BF16
    assert auto_recipe(2**20, 8192, 8208) == BF16, "no multiple of 32"
    assert [auto_recipe(rows, 2048, 768, of="experts") for rows in (256, 512)] == [BF16, MXFP8]
    with pytest.raises(ValueError, match="of: got 'lines', want one of linear, grouped_mm, experts"):
        auto_recipe(1, 32, 32, of="lines")


def test_it_pays_from_the_row_after_the_least_ones() -> None:
    for of, k, n in (("linear", 4096, 2048), ("grouped_mm", 2048, 1536), ("experts", 2048, 768)):
        least = math.floor(least_rows(k, n, of=of))
        assert [auto_recipe(rows, k, n, of=of) for rows in (least, least + 1)] == [BF16, MXFP8]
    assert least == 420
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


def test_it_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    layer, x = Linear(64, 96, recipe="auto", backend="reference"), draw(40, 64, dtype=torch.float32)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
