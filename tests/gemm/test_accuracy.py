"""How close the products are: to float64, to each other, and to the product of their own qdata."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemm.problem import BACKENDS, QUANTIZED, RECIPES, Problem, Result, problem, quantized_weight, snr
from mxep.gemm import Recipe
from mxep.quant import MXTensor, quantize

HALF_ULP_BF16 = 2.0**-8
HALF_ULP_FP32 = 2.0**-24


def bound_of_sum(p: Problem) -> list[torch.Tensor]:
    """n additions in fp32, in any order, err by at most n * 2**-24 * sum |products| (first order)."""
    return [n * HALF_ULP_FP32 * m for n, m in zip(p.terms(), p.magnitude())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_errs_by_the_fp32_sum_and_one_rounding(backend: str) -> None:
    # One rounding to bf16 (8 significant bits) is at most 2**-8 of the value; the sum's error may move it to the next.
    p = problem((64, 0, 160, 37), n=96, k=128)
    exact, got = p.exact(), p.run("bf16", backend=backend)
    for want, x, sum_error in zip(exact, got, bound_of_sum(p)):
        assert ((x.double() - want).abs() <= HALF_ULP_BF16 * want.abs() + 2 * sum_error).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("recipe", "out", "da", "dw"),
    [
        ("mxfp8", 27, 25, 24),
        ("mxfp8_32x32", 27, 25, 24),
        ("fp8", 27, 25, 24),
        # An E5M2 operand has half the resolution, 6 dB: 31.5 (E4M3) and 25.5 dB together are 24.5.
        ("mxfp8_e5m2", 27, 24, 24),
        ("fp8_e5m2", 27, 24, 24),
        # Only the result is rounded, by at most half a step of 2**-7: 6.02 * 7 + 10.8 + 3 (mantissas 1 to 2) = 56 dB.
        ("mxfp8_wgrad_bf16", 27, 25, 54),
    ],
)
def test_quantized_products_of_gaussian_data_reach_their_snr(
    recipe: str, backend: str, out: float, da: float, dw: float
) -> None:
    p = problem((256, 96, 0, 160), n=256, k=256)
    reached = [snr(want, got) for want, got in zip(p.exact(), p.run(recipe, backend=backend))]
    assert all(got >= want for got, want in zip(reached, (out, da, dw))), reached


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dequant_differs_from_reference_by_rounding_alone(recipe: str, out_dtype: torch.dtype) -> None:
    # Same qdata, sums in another order, and one rounding to bf16 more in each result (two roundings of the same value
    # differ by at most 2 * 2**-8 of it). Codes are at most 1 + 2**-3 times their values: 1.3 covers two of them.
    p = problem()
    reference, dequant = (p.run(recipe, backend=backend, out_dtype=out_dtype) for backend in BACKENDS)
    for want, got, sum_error in zip(reference, dequant, bound_of_sum(p)):
        assert got.dtype == want.dtype
        bound = 2 * HALF_ULP_BF16 * want.double().abs() * (1 + 2**-8) + 2 * 1.3 * sum_error
        assert ((got.double() - want.double()).abs() <= bound).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradients_contract_operands_requantized_along_tokens(backend: str) -> None:
    # Of every other token a is 2^16 smaller and dy as much larger: it counts as much, but along tokens its qdata are
    # subnormal. Gaussian tokens' qdata do not change, and show nothing.
    p, recipe = problem((64, 0, 96), n=96, k=128), Recipe.mxfp8()
    factor = torch.where(torch.arange(len(p.a)) % 2 == 0, 1.0, 2.0**-16).view(-1, 1)
    p = Problem(p.a * factor, p.w, p.dy / factor, p.offs)
    rows = [recipe.quantize_rows(x[: p.valid], recipe.fmt) for x in (p.dy, p.a)]
    dy, a = (dense(recipe.along_tokens(x, p.offs)) for x in rows)
    want, other = p.product(a, p.w, dy).dw, p.product(dense(rows[1]), p.w, dense(rows[0])).dw
    p = Problem(p.a, p.w.float(), p.dy, p.offs)
    got = p.run(recipe, backend=backend).dw
    assert snr(want, got) > 50  # one rounding to bf16 at most
    assert snr(other, got) < 20


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    n=st.integers(1, 4),
    k=st.integers(1, 4),
    unused=st.integers(0, 2),
    recipe=st.sampled_from(QUANTIZED),
)
def test_reference_is_the_product_of_its_codes(sizes: list[int], n: int, k: int, unused: int, recipe: str) -> None:
    p = problem([32 * s for s in sizes], n=32 * n, k=32 * k, unused=32 * unused, seed=sum(sizes))
    r = Recipe.named(recipe)
    got = p.run(r, backend="reference", out_dtype=torch.float32, a=p.a.float())
    a, dy = dense(r.quantize_rows(p.a)), dense(r.quantize_rows(p.dy, r.grad_fmt))
    forward, dgrad = (p.product(a, dense(w), dy) for w in quantized_weight(p.w, r))
    if r.wgrad == "bf16":
        wgrad = p.product(p.a, p.w, p.dy)
    elif r.scaling == "row":
        wgrad = forward
    else:
        valid = slice(0, p.valid)
        wgrad = p.product(
            dense(quantize(a[valid], axis=-2, fmt=r.fmt)), p.w, dense(quantize(dy[valid], axis=-2, fmt=r.grad_fmt))
        )
    want = Result(forward.out, dgrad.da, wgrad.dw)
    assert got.out.dtype == got.da.dtype == torch.float32
    for x, exact, sum_error, rounding in zip(got, want, bound_of_sum(p), (HALF_ULP_FP32, HALF_ULP_FP32, HALF_ULP_BF16)):
        assert ((x.double() - exact).abs() <= rounding * exact.abs() + 2 * 1.7 * sum_error).all()


def dense(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize(torch.float32) if isinstance(x, MXTensor) else x
