"""What holds for every backend: accuracy, scaled and halved weight gradients, strided vectors, bad ends of groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton  # noqa: F401  # where there is no GPU this sets TRITON_INTERPRET, for which the backend looks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fences import fenced
from fences import fences as fences
from gemm.problem import BACKENDS as PLAIN
from gemm.problem import (
    HALF_ULP_BF16,
    HALF_ULP_FP32,
    QUANTIZED,
    RECIPES,
    Problem,
    Result,
    bound_of_sum,
    indexed,
    problem,
    quantized_weight,
    snr,
)
from gemm.test_blackwell import decoded as decoded
from gemm.test_blackwell import small_tiles as small_tiles
from gemm.test_hopper import BACKEND as HOPPER
from gemm.test_hopper import DEVICE, dense, here
from mxep.gemm import BACKENDS, Recipe, grouped_mm
from mxep.gemm.backends import Backend
from mxep.gemm.backends.hopper import fp8_grouped_wgrad
from mxep.gemm.kernels import HOPPER_BLOCK_K, dot_scaled
from mxep.quant import MXTensor, fold_for_wgrad, quantize


@pytest.mark.parametrize("backend", PLAIN)
def test_bf16_errs_by_the_fp32_sum_and_one_rounding(backend: str) -> None:
    # One rounding to bf16 (8 significant bits) is at most 2**-8 of the value; the sum's error may move it to the next.
    p = problem((64, 0, 160, 37), n=96, k=128)
    exact, got = p.exact(), p.run("bf16", backend=backend)
    for want, x, sum_error in zip(exact, got, bound_of_sum(p)):
        assert ((x.double() - want).abs() <= HALF_ULP_BF16 * want.abs() + 2 * sum_error).all()


@pytest.mark.parametrize("backend", PLAIN)
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
    reference, dequant = (p.run(recipe, backend=backend, out_dtype=out_dtype) for backend in PLAIN)
    for want, got, sum_error in zip(reference, dequant, bound_of_sum(p)):
        assert got.dtype == want.dtype
        bound = 2 * HALF_ULP_BF16 * want.double().abs() * (1 + 2**-8) + 2 * 1.3 * sum_error
        assert ((got.double() - want.double()).abs() <= bound).all()


@pytest.mark.parametrize("backend", PLAIN)
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


@settings(max_examples=12, deadline=None)
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


IN_TURN = [
    *(("reference", recipe) for recipe in ("bf16", "fp8", "mxfp8")),
    *(("dequant", recipe) for recipe in ("bf16", "fp8", "mxfp8_wgrad_bf16")),
    *(("hopper", recipe) for recipe in ("bf16", "fp8", "mxfp8", "mxfp8_wgrad_bf16")),
    *(("triton", "mxfp8"), ("blackwell", "mxfp8")),
]
backends = pytest.mark.parametrize(("backend", "recipe"), IN_TURN)


def run(p: Problem, backend: str, recipe: str, scale: float, main_grad: Tensor | None = None) -> dict[str, Any]:
    a, w = p.a.clone().requires_grad_(), p.w.clone().requires_grad_()
    bias = torch.ones(p.w.shape[:2], device=p.a.device, requires_grad=True)
    chosen = HOPPER if backend == "hopper" else BACKENDS[backend]
    how = {"main_grad": main_grad, "wgrad_scale": scale}
    out = grouped_mm(a, w, p.offs, recipe=recipe, backend=chosen, bias=bias, **how)
    out.backward(p.dy)
    assert a.grad is not None
    return {"out": out[: p.valid], "da": a.grad[: p.valid], "dbias": bias.grad, "dw": w.grad}


@pytest.mark.usefixtures("decoded")
@backends
def test_the_weights_gradient_is_scaled_and_no_other_and_main_grad_takes_the_sum(backend: str, recipe: str) -> None:
    p = problem_of(backend, n=32, k=64)
    device = p.w.device
    plain, quarter, third = (run(p, backend, recipe, scale) for scale in (1.0, 0.25, 1 / 3))
    assert torch.equal(quarter["dw"], plain["dw"] / 4)
    assert snr(plain["dw"].double() / 3, third["dw"]) > 48  # one or two roundings to bf16
    for name in ("out", "da", "dbias"):
        assert torch.equal(quarter[name], plain[name])
    main_grads = torch.zeros(p.w.shape, device=device), torch.zeros(p.w.shape, device=device)
    for main_grad, scale in zip(main_grads, (1.0, 0.25)):
        assert run(p, backend, recipe, scale, main_grad)["dw"] is None
    torch.testing.assert_close(main_grads[0], plain["dw"].float(), rtol=2**-7, atol=2**-7)
    assert torch.equal(main_grads[1], main_grads[0] / 4)
    run(p, backend, recipe, 1.0, main_grads[0])
    assert torch.equal(main_grads[0], 8 * main_grads[1])


@pytest.mark.usefixtures("decoded")
@backends
def test_bias_is_added_in_fp32_to_its_groups_rows_and_gets_their_sum(backend: str, recipe: str) -> None:
    p = problem_of(backend, n=32, k=64)
    bias = torch.randn(p.w.shape[:2], device=p.w.device, requires_grad=True)
    how: dict[str, Any] = {"recipe": recipe, "backend": HOPPER if backend == "hopper" else BACKENDS[backend]}
    plain, biased = (grouped_mm(p.a, p.w, p.offs, bias=b, out_dtype=torch.float32, **how) for b in (None, bias))
    biased.backward(p.dy.float())
    assert bias.grad is not None
    for g, rows in p.groups():
        if backend == "hopper":  # whose kernel scales and adds in one rounding
            torch.testing.assert_close(biased[rows], plain[rows] + bias[g])
        else:
            assert torch.equal(biased[rows], plain[rows] + bias[g])
        assert torch.allclose(bias.grad[g], p.dy[rows].float().sum(0), rtol=0, atol=1e-4)
    assert not bias.grad[1].any()


@pytest.mark.usefixtures("decoded")
@pytest.mark.parametrize("backend", ["hopper", "triton", "blackwell"])
def test_unquantized_products_are_those_of_dequant(backend: str) -> None:
    p, chosen = problem_of(backend, k=128), HOPPER if backend == "hopper" else BACKENDS[backend]
    assert p.run("bf16", backend=chosen).same_as(p.run("bf16", backend="dequant"))
    assert torch.equal(*(p.run("mxfp8_wgrad_bf16", backend=each).dw for each in (chosen, "dequant")))


UNROUNDED = [(b, r) for b, r in IN_TURN if b == "reference" or (b in ("hopper", "triton") and r in ("fp8", "mxfp8"))]


@pytest.mark.parametrize(
    ("backend", "recipe", "strided"),
    [*((*case, False) for case in UNROUNDED), *((b, "mxfp8", True) for b in ("reference", "hopper", "triton"))],
)
def test_what_main_grad_takes_was_not_rounded_before(backend: str, recipe: str, strided: bool) -> None:
    q = problem(n=32, k=64)
    p = Problem(*(x.to(DEVICE) for x in (q.a, q.w.float(), q.dy, q.offs)))
    plain = run(p, backend, recipe, 1.0)["dw"]
    shape = (4, 64, 32) if strided else (4, 32, 64)
    main_grad = torch.zeros(shape, device=DEVICE)
    main_grad = main_grad.mT if strided else main_grad
    run(p, backend, recipe, 1.0, main_grad)
    assert not torch.equal(plain, plain.bfloat16().float())
    assert torch.equal(main_grad, plain)


def joined(halves: Tensor) -> Tensor:
    """(G, N, K)."""
    return torch.cat(tuple(halves), 1)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_bf16"])
@pytest.mark.parametrize("name", ["reference", "dequant", "triton", "hopper"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_every_backend_writes_halves(name: str, recipe: str, out_dtype: torch.dtype) -> None:
    backend: Backend = HOPPER if name == "hopper" else BACKENDS[name]
    p, r = here(problem((64, 0, 96, 32), n=96, k=64)), Recipe.named(recipe)
    dy, a = (p.dy, p.a) if r.wgrad != "mx" or r.scaling == "none" else (quantize(p.dy), quantize(p.a))
    how: dict[str, Any] = {"out_dtype": out_dtype, "scale": 0.5}
    want = backend.wgrad(backend.prepare_wgrad(dy, a, p.offs, r), p.offs, **how)
    halves = torch.full((2, 4, 48, 64), torch.nan, dtype=out_dtype, device=DEVICE)
    assert backend.wgrad(backend.prepare_wgrad(dy, a, p.offs, r), p.offs, halves=halves, **how) is None
    assert want is not None
    assert torch.equal(joined(halves), want)


SHAPES = [
    ((1, 0, 127, 129, 64, 3), 384, 144),  # a tile of 128 rows has some of both
    ((64, 0, 200), 512, 272),
    ((64, 0, 200), 288, 128),  # 64 rows have some of both
    ((3000,), 384, 128),  # one group, cut into parts on a GPU
    ((0, 0), 128, 128),
]


@pytest.mark.parametrize(("sizes", "n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize(("out_dtype", "add"), [(torch.bfloat16, False), (torch.float32, True)], ids=str)
def test_folded_products_write_and_add_to_halves(
    sizes: tuple[int, ...], n: int, k: int, out_dtype: torch.dtype, add: bool
) -> None:
    args, groups = folded(sizes, n, k), len(sizes)
    whole = torch.full((groups, n, k), 3.0 if add else torch.nan, dtype=out_dtype, device=DEVICE)
    halves = torch.full((2, groups, n // 2, k), 3.0 if add else torch.nan, dtype=out_dtype, device=DEVICE)
    for out in (whole, halves):
        fp8_grouped_wgrad(out, *args, 0.5, add)
    assert torch.equal(joined(halves), whole)
    assert not whole.isnan().any()


def folded(sizes: tuple[int, ...], n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = here(problem(sizes, n=n, k=k, unused=64))
    x = fold_for_wgrad(*(quantize(y, block_size=None) for y in (p.a, p.dy)), p.offs, alignment=HOPPER_BLOCK_K)
    return x.y_t, x.x_t, x.exponent, x.offs


@pytest.mark.parametrize(("sizes", "n", "k"), SHAPES, ids=str)
def test_the_kernel_gets_halves_that_no_warpgroup_meets_the_end_of(
    sizes: tuple[int, ...], n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the reference in the kernel's place."""
    from mxep.gemm.kernels import hopper

    given = []

    def instead(out: Tensor, y: Tensor, x: Tensor, e: Tensor, _: None, __: None, offs: Tensor, *sizes: int, **how: Any):
        given.append(how["halves"])
        assert how["halves"] == (out.dim() == 4)
        assert not how["halves"] or sizes[0] % (2 * hopper.HALF_ROWS) == 0
        assert sizes == (*y.shape[:1], *x.shape)
        fp8_grouped_wgrad.reference(out, y, x, e, offs, how["factor"], how["add"])

    monkeypatch.setattr(hopper, "_launch", instead)
    monkeypatch.setattr(hopper, "num_sms_of", lambda device: 1)
    args = folded(sizes, n, k)
    whole, halves = (torch.full(shape, torch.nan) for shape in ((len(sizes), n, k), (2, len(sizes), n // 2, k)))
    fp8_grouped_wgrad.reference(whole, *(x.cpu() for x in args), 0.5, False)
    hopper.grouped_wgrad(halves, *(x.cpu() for x in args), 0.5)
    assert torch.equal(joined(halves), whole)
    assert given == ([False] if len(sizes) == 1 else [True] if n // 2 % 64 == 0 else [False, False])


def column(x: Tensor) -> Tensor:
    """x as the first column of a table whose second would be read as the next element, were it packed."""
    return torch.stack((x, torch.full_like(x, 7)), -1)[..., 0]


def problem_of(backend: str, n: int = 96, k: int = 160) -> Problem:
    p, device = problem(n=n, k=k), torch.device("cpu") if backend == "blackwell" else DEVICE
    return Problem(*(x.to(device) for x in (p.a, p.w, p.dy, p.offs)))


@pytest.mark.usefixtures("decoded")
@pytest.mark.parametrize("backend", [*BACKENDS])
def test_ends_and_bias_and_index_may_be_strided(backend: str) -> None:
    p = problem_of(backend)
    p.a[70:75], p.dy[70:75] = 0, 0
    chosen = HOPPER if backend == "hopper" else BACKENDS[backend]
    bias = torch.randn(p.w.shape[:2], device=p.a.device)
    a, dy = (indexed(quantize(x.cpu()), valid=p.valid).to(p.a.device) for x in (p.a, p.dy))
    assert isinstance(a, MXTensor)
    assert isinstance(dy, MXTensor)
    packed = Problem(a, p.w, dy, p.offs)
    strided = Problem(with_column(a), p.w, with_column(dy), column(p.offs))
    results = []
    for q, b in ((packed, bias), (strided, column(bias))):
        w = q.w.clone().requires_grad_()
        x = q.a.detach().requires_grad_()
        out = grouped_mm(x, w, q.offs, recipe="mxfp8", backend=chosen, bias=b)
        results.append([out[: p.valid], *torch.autograd.grad(out, (x, w), q.dy)])
        results[-1][1] = results[-1][1][: p.valid]
    assert all(torch.equal(x, y) for x, y in zip(*results))


def with_column(x: MXTensor) -> MXTensor:
    assert x.row_index is not None
    options: dict[str, Any] = {"block_size": x.block_size, "row_index": column(x.row_index)}
    return MXTensor.from_qdata_and_scales(x.qdata, x.scale, x.dtype, **options)


def wgrad(y: MXTensor, x: MXTensor, offs: Tensor) -> Tensor:
    dw = torch.empty((len(offs), y.shape[1], x.shape[1]), device=DEVICE)
    dot_scaled.grouped_wgrad(dw, y.qdata, y.scale, x.qdata, x.scale, offs)
    return dw


def test_the_launchers_of_dot_scaled_take_strided_vectors() -> None:
    p = problem_of("triton")
    a, dy, w = quantize(p.a), quantize(p.dy), quantize(p.w)
    y, x = (Recipe.mxfp8().along_tokens(each, p.offs) for each in (dy, a))
    assert isinstance(w, MXTensor)
    assert isinstance(x, MXTensor)
    assert isinstance(y, MXTensor)
    index = torch.arange(len(p.a), device=DEVICE, dtype=torch.int32).flip(0)
    for products in zip(
        *(
            (
                dot_scaled.grouped_mm(a.qdata, a.scale, of(index), w.qdata, w.scale, of(p.offs), None, torch.float32)[
                    : p.valid
                ],
                wgrad(y, x, of(p.offs)),
            )
            for of in (lambda v: v, column)
        )
    ):
        assert torch.equal(*(each.view(torch.int32) for each in products))


M, N, K = 64, 32, 64
Fences = Callable[[], list[tuple[int, ...]]]

bad_ends = pytest.mark.parametrize("ends", [(32, 64, 160), (-64, 160, 32)], ids=str)


def ends_here(ends: tuple[int, ...]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def ones(*shape: int) -> tuple[Tensor, Tensor]:
    """qdata and scales between fences of NaN."""
    x = quantize(torch.ones(shape, device=DEVICE))
    return fenced(x.qdata.view(torch.uint8)).view(x.qdata.dtype), fenced(x.scale)


@bad_ends
@pytest.mark.parametrize("indexed", [False, True], ids=["rows", "index"])
def test_products_of_rows(
    ends: tuple[int, ...], indexed: bool, small_tiles: None, fences: Fences, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = fenced(torch.arange(M, dtype=torch.int32, device=DEVICE)) if indexed else None
    operands = *ones(M, K), index, *ones(3, N, K), ends_here(ends), None
    monkeypatch.setattr(torch, "empty", torch.zeros)  # between fences; what is not written is finite
    out = dot_scaled.grouped_mm(*operands, torch.float32)
    assert fences() == []
    assert out.isfinite().all()


@bad_ends
def test_products_of_columns(ends: tuple[int, ...], small_tiles: None, fences: Fences) -> None:
    (x, x_scale), (y, y_scale) = ones(N, M), ones(K, M)
    out = torch.empty((len(ends), N, K), device=x.device)
    dot_scaled.grouped_wgrad(out, x.mT, x_scale.mT, y.mT, y_scale.mT, ends_here(ends))
    assert fences() == []
    assert out.isfinite().all()
