"""FlopCounterMode counts of products what it counts of the same products of torch: 2 M N K each."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from gemm.problem import quantized_weight
from mxep.ep import MoE
from mxep.gemm import BACKENDS, Recipe, convert, fp32_linear, grouped_mm, join_linears, linear, linear_together
from mxep.gemm.router_ops import dgrad_op, linear_op, wgrad_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
RECIPES = ["bf16", "fp8", "mxfp8", "mxfp8_wgrad_bf16", "mxfp8_32x32"]
T, D, N = 64, 96, 160


def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)


def flops(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["auto", "reference", "dequant"])
def test_linears_count_as_torchs(recipe: str, backend: str) -> None:
    x, w, v = drawn(2, T // 2, D), drawn(N, D), drawn(N, D)
    how: dict[str, Any] = {"recipe": recipe, "backend": backend}
    plain = flops(lambda: F.linear(x, w).sum().backward())
    assert plain == 3 * 2 * T * D * N
    assert flops(lambda: linear(x, w, **how).sum().backward()) == plain
    assert flops(lambda: sum(out.sum() for out in linear_together(x, [w, v], **how)).backward()) == 2 * plain
    assert flops(lambda: linear(x.detach(), w, **how).sum().backward()) == 2 * plain // 3, "no dgrad"
    with torch.no_grad():
        assert flops(lambda: linear(x, w, **how)) == plain // 3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["auto", "reference", "dequant"])
def test_grouped_products_count_their_valid_rows(recipe: str, backend: str) -> None:
    a, w = drawn(T + 64, D), drawn(3, N, D)
    offs = torch.tensor([32, 32, T], dtype=torch.int32, device=DEVICE)
    got = flops(lambda: grouped_mm(a, w, offs, recipe=recipe, backend=backend)[:T].sum().backward())
    assert got == 3 * 2 * T * D * N


def test_converted_models_count_as_they_did() -> None:
    model = nn.Sequential(nn.Linear(D, N), nn.Linear(N, D)).to(DEVICE, BF16)
    x = drawn(T, D)
    plain = flops(lambda: model(x).sum().backward())
    convert(model, "mxfp8")
    assert flops(lambda: model(x).sum().backward()) == plain
    pair = nn.Module()
    pair.w1, pair.w3 = nn.Linear(D, N).to(DEVICE, BF16), nn.Linear(D, N).to(DEVICE, BF16)
    join_linears(convert(pair, "mxfp8"))
    assert flops(lambda: (pair.w1(x) + pair.w3(x)).sum().backward()) == 2 * 3 * 2 * T * D * N


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_every_backends_products_are_counted(name: str) -> None:
    """Called as they are, on a CPU too, where "auto" takes none of them."""
    backend, recipe = BACKENDS[name], Recipe.mxfp8()
    a, dy, w = (x.detach() for x in (drawn(T, D), drawn(T, N), drawn(2, N, D)))
    offs = torch.tensor([32, T], dtype=torch.int32, device=DEVICE)
    rowwise, colwise = quantized_weight(w, recipe, name)
    rows, grads = (backend.quantize_rows(x, recipe.fmt, recipe) for x in (a, dy))
    one = 2 * T * D * N
    assert flops(lambda: backend.forward(rows, rowwise, offs, bias=None, out_dtype=BF16)) == one
    assert flops(lambda: backend.dgrad(grads, colwise, offs, out_dtype=BF16)) == one
    for into in (None, torch.zeros(2, N, D, device=DEVICE)):

        def wgrad(into: Tensor | None = into) -> None:
            operands = backend.prepare_wgrad(grads, rows, offs, recipe)
            backend.wgrad(operands, offs, out_dtype=BF16, accumulate_into=into)

        assert flops(wgrad) == one


def test_router_products_are_counted() -> None:
    x, w = drawn(T, D).detach(), drawn(8, D, dtype=torch.float32).detach()
    dy, one = x.new_zeros(T, 8, dtype=torch.float32), 2 * T * D * 8
    assert flops(lambda: fp32_linear(x, w)) == one
    assert [
        flops(f) for f in (lambda: linear_op(x, w), lambda: dgrad_op(dy, w, BF16), lambda: wgrad_op(dy, x, BF16))
    ] == [one] * 3


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
def test_a_layer_counts_its_rows(recipe: str) -> None:
    """Those of its plan: padding of a group counts, so every expert gets 32 tokens here."""
    moe = MoE(64, 32, 4, 2, recipe=recipe, dispatcher="local", device=DEVICE)
    x, ids = drawn(T, 64), torch.arange(2 * T, device=DEVICE).view(T, 2) % 4
    weights = torch.rand(T, 2, device=DEVICE)
    got = flops(lambda: moe(x, expert_ids=ids, weights=weights).sum().backward())
    assert got == 3 * 2 * (2 * T) * (64 * 64 + 32 * 64)


@pytest.mark.slow
def test_compiled_products_and_layers_are_counted() -> None:
    x, w = drawn(T, D), drawn(N, D)
    moe = MoE(64, 32, 4, 2, recipe="mxfp8", dispatcher="local", max_tokens=T, device=DEVICE)
    ids, weights = torch.arange(2 * T, device=DEVICE).view(T, 2) % 4, torch.rand(T, 2, device=DEVICE)
    tokens = drawn(T, 64)
    torch._dynamo.reset()
    product = torch.compile(lambda: linear(x, w, recipe="mxfp8").sum(), backend="aot_eager")
    layer = torch.compile(lambda: moe(tokens, expert_ids=ids, weights=weights).sum(), backend="aot_eager")
    for function, wanted in ((product, 3 * 2 * T * D * N), (layer, 3 * 2 * (2 * T) * (64 * 64 + 32 * 64))):
        function().backward()  # traced
        assert flops(lambda: function().backward()) == wanted  # noqa: B023


def test_formulas_are_torchs_to_use_and_none_of_torchs_is_changed() -> None:
    assert torch.ops.mxep.product_forward in flop_registry
    assert flop_registry[torch.ops.aten.mm].__module__ == "torch.utils.flop_counter"
