"""linear: close to float64, bit for bit what grouped_mm gives for one group, and of any number of rows and axes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from gemm.problem import BACKENDS, QUANTIZED, RECIPES, snr
from gemm.test_hopper import BACKEND as HOPPER
from gemm.test_hopper import needs_hopper
from host_sync import no_host_sync
from mxep.gemm import Linear, Recipe, fold_report, grouped_mm, linear, quantize_input
from mxep.gemm.backends import Backend
from mxep.gemm.backends.reference import Reference
from mxep.quant import MXTensor

N, K = 96, 64
every_backend = pytest.mark.parametrize("backend", [*BACKENDS, HOPPER], ids=[*BACKENDS, "hopper"])
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(*leading: int, dtype: torch.dtype = torch.bfloat16, n: int = N, k: int = K) -> list[Tensor]:
    """x (*leading, K), w (N, K), bias (N,), all of them leaves, and dy (*leading, N)."""
    leaves = [draw(*leading, k, dtype=dtype), draw(n, k, seed=1, dtype=dtype) / k**0.5, draw(n, seed=2, dtype=dtype)]
    return [*(x.requires_grad_() for x in leaves), draw(*leading, n, seed=3, dtype=dtype)]


def step(run: Callable[..., Tensor], x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    """Output and gradients of all leaves."""
    leaves = [leaf for leaf in (x, w, bias) if leaf is not None]
    out = run(x, w, bias)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


def one_group(recipe: str, backend: str | Backend) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        offs = torch.tensor([x.shape[0]], dtype=torch.int32)
        return grouped_mm(x, w[None], offs, recipe=recipe, backend=backend, bias=bias[None])

    return run


def by(recipe: str | Recipe, **options: Any) -> Callable[..., Tensor]:
    return lambda x, w, bias=None: linear(x, w, bias, recipe=recipe, **options)


@every_backend
@every_recipe
def test_it_is_grouped_mm_of_one_group(recipe: str, backend: str | Backend) -> None:
    given = operands(160)
    *wanted, d_bias = step(one_group(recipe, backend), *given)
    *got, d_bias_here = step(by(recipe, backend=backend), *given)
    # torch's grouped mm and its plain one may sum in another order, and the latter rounds once, after the bias.
    torch_sums = backend == "dequant" or (backend is HOPPER and (recipe == "bf16" or "wgrad_bf16" in recipe))
    for want, x in zip(wanted, got):
        if torch_sums:
            torch.testing.assert_close(x, want, rtol=2**-7, atol=2**-6)
        else:
            assert torch.equal(x, want)
    torch.testing.assert_close(d_bias_here, d_bias, rtol=2**-7, atol=0)


@every_backend
@every_recipe
@pytest.mark.parametrize("rows", [1, 75])
def test_rows_that_are_no_whole_blocks_are_as_if_followed_by_zeros(
    recipe: str, rows: int, backend: str | Backend
) -> None:
    x, w, _, dy = operands(rows)
    zeros = [F.pad(t.detach(), (0, 0, 0, 96 - rows)) for t in (x, dy)]
    out, dx, dw = step(by(recipe, backend=backend), zeros[0].requires_grad_(), w, None, zeros[1])
    got = step(by(recipe, backend=backend), x, w, None, dy)
    for want, here in zip((out[:rows], dx[:rows], dw), got):
        torch.testing.assert_close(here, want, rtol=2**-7, atol=1e-5)


@every_backend
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_no_rows_give_no_rows_and_zero_gradients(recipe: str, backend: str | Backend) -> None:
    out, dx, dw, d_bias = step(by(recipe, backend=backend), *operands(2, 0))
    assert (out.shape, dx.shape) == ((2, 0, N), (2, 0, K))
    assert not dw.any()
    assert not d_bias.any()


@pytest.mark.parametrize("leading", [(), (5,), (2, 3, 4)])
@pytest.mark.parametrize("coded", [False, True])
def test_any_number_of_leading_axes(leading: tuple[int, ...], coded: bool) -> None:
    x, w, bias, dy = operands(*leading)
    if coded and not leading:
        pytest.skip("an MXTensor has two axes or more")
    flat = [t.detach().reshape(-1, t.shape[-1]).requires_grad_(t.requires_grad) for t in (x, dy)]
    wanted = step(by("mxfp8"), flat[0], w, bias, flat[1])
    quantize = Recipe.mxfp8().quantize_rows
    got = step(lambda x, w, b: linear(quantize(x) if coded else x, w, b, recipe="mxfp8"), x, w, bias, dy)
    assert got[0].shape == (*leading, N)
    assert all(torch.equal(here, want.view_as(here)) for here, want in zip(got, wanted))


@every_backend
@pytest.mark.parametrize("recipe", [name for name in QUANTIZED if "wgrad_bf16" not in name])
def test_q_k_and_v_of_one_quantization_are_those_of_three(recipe: str, backend: str | Backend) -> None:
    r, (x, *_), weights = Recipe.named(recipe), operands(2, 37), [draw(n, K, seed=n) for n in (96, 32, 64)]
    gradients = [draw(2, 37, len(w), seed=9) for w in weights]

    def all_of(source: Tensor, shared: bool) -> tuple[list[Tensor], Tensor]:
        codes = quantize_input(source, recipe=r, backend=backend) if shared else source
        outs = [linear(codes, w, recipe=r, backend=backend) for w in weights]
        return outs, torch.autograd.grad(outs, source, gradients)[0]

    (outs, dx), (wanted, dx_wanted) = all_of(x, True), all_of(x, False)
    assert all(torch.equal(a, b) for a, b in zip((*outs, dx), (*wanted, dx_wanted)))


def test_one_scale_a_row_is_for_backends_that_want_it() -> None:
    x, w, *_ = operands(40)
    rows = quantize_input(x, recipe="mxfp8", backend=HOPPER)
    assert isinstance(rows, MXTensor)
    assert rows.block_size == K
    with pytest.raises(ValueError, match=r"x: got MXTensor.*want axis -1 and one scale for each 32"):
        linear(rows, w, recipe="mxfp8", backend="reference")
    assert quantize_input(x, recipe="bf16") is x


def test_a_gradient_may_come_quantized() -> None:
    x, w, _, dy = operands(2, 37)
    want = step(by("mxfp8"), x, w, None, dy)
    got = step(by("mxfp8"), x, w, None, Recipe.mxfp8().quantize_rows(dy, Recipe.mxfp8().grad_fmt))
    assert all(torch.equal(a, b) for a, b in zip(want, got))


@every_backend
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_bf16"])
def test_main_grad_takes_the_gradient_and_leaves_none(recipe: str, backend: str | Backend) -> None:
    x, w, bias, dy = operands(75)
    (dw,) = torch.autograd.grad(linear(x, w.float(), bias, recipe=recipe, backend=backend), w, dy)
    main_grad = torch.ones(N, K)
    for times in (1, 2):
        out = linear(x, w, bias, recipe=recipe, backend=backend, main_grad=main_grad, wgrad_scale=0.5)
        out.backward(dy)
        assert w.grad is None
        torch.testing.assert_close(main_grad, 1 + 0.5 * times * dw.float(), rtol=2**-7, atol=1e-2)


def test_the_module_is_an_nn_linear_with_its_parameters() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(K, N)
    torch.manual_seed(0)
    fresh, shared = Linear(K, N, recipe="fp8_e5m2"), Linear.from_linear(plain.eval(), "mxfp8", backend="dequant")
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), plain.parameters()))
    assert (shared.weight is plain.weight, shared.bias is plain.bias, shared.training) == (True, True, False)
    assert shared.state_dict().keys() == plain.state_dict().keys()
    assert Linear.from_linear(nn.Linear(K, N, bias=False)).bias is None
    assert repr(fresh) == "Linear(in_features=64, out_features=96, bias=True, recipe=fp8_e5m2)"
    named = Linear(64, 96, recipe="bf16", backend="dequant")
    assert repr(named) == "Linear(in_features=64, out_features=96, bias=True, recipe=bf16, backend=dequant)"
    x = draw(3, 7, K, dtype=torch.float32)
    assert snr(plain(x).double(), shared(x)) > 26
    assert torch.equal(copy.deepcopy(shared)(x), shared(x))
    main_grad = plain.weight.main_grad = torch.zeros(N, K)  # type: ignore[attr-defined]
    shared(x).sum().backward()
    assert main_grad.any()
    assert plain.weight.grad is None


@pytest.mark.parametrize("given", [None, torch.float32])
def test_autocast_gives_its_dtype_as_it_does_for_f_linear(given: torch.dtype | None) -> None:
    x, w, bias, dy = operands(40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear(x, w, bias, recipe="mxfp8", out_dtype=given)
        assert out.dtype == (given or F.linear(x, w, bias).dtype)
    assert torch.equal(out, linear(x, w, bias, recipe="mxfp8", out_dtype=out.dtype))
    assert torch.autograd.grad(out, x, dy.to(out.dtype))[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": draw(4, 32)}, r"shapes: got x \(4, 32\), w \(96, 64\), want x \(..., K\) and w \(N, K\)"),
        ({"w": draw(2, 96, 64)}, r"shapes: .* want x \(..., K\) and w \(N, K\)"),
        ({"x": draw(4, 64).half()}, "x: got torch.float16, want one of"),
        ({"w": draw(96, 64).half()}, "w: got torch.float16, want one of"),
        ({"bias": draw(64)}, r"bias: got torch.bfloat16 \(64,\), want floating point \(N,\) = \(96,\)"),
        ({"main_grad": draw(96, 32)}, r"main_grad: got torch.bfloat16 \(96, 32\), want torch.float32 \(96, 64\)"),
        ({"main_grad": draw(96, 64)}, "main_grad: got torch.bfloat16"),
        ({"w": draw(40, 64)}, "N: got 40, want a multiple of 32 for recipe mxfp8: pad it or use recipe bf16"),
        ({"x": (draw(4, 64), draw(4, 2))}, "x: got a tuple, want a tensor"),
        ({"x": Recipe.fp8().quantize_rows(draw(4, 64))}, "x: got MXTensor.*block_size=64.* want axis -1 and one"),
        ({"recipe": "mx4"}, "recipe: got 'mx4'"),
        ({"backend": "cublas"}, "backend: got 'cublas'"),
        ({"out_dtype": torch.float16}, "out_dtype: got torch.float16"),
    ],
)
def test_wrong_operands_say_what_is_wanted(change: dict[str, Any], says: str) -> None:
    given = {"x": draw(4, 64), "w": draw(96, 64), "bias": None, "recipe": "mxfp8"} | change
    with pytest.raises(ValueError, match=says):
        linear(given.pop("x"), given.pop("w"), given.pop("bias"), **given)


def test_tokens_of_a_small_weight_gradient_are_cut_into_parts_that_fill_the_gpu() -> None:
    from mxep.gemm.kernels.hopper import parts_of_wgrad

    assert parts_of_wgrad(1, 512, 2048, 8320, 132) == 4
    assert parts_of_wgrad(1, 4096, 2048, 8320, 132) == 1, "256 tiles"
    assert parts_of_wgrad(1, 128, 256, 2048, 132) == 2, "1024 tokens a part at least"
    assert parts_of_wgrad(1, 128, 256, 100, 132) == 1
    assert parts_of_wgrad(2, 512, 2048, 8320, 132) == 1, "several groups have tiles enough"


@pytest.mark.parametrize(("columns", "valid", "parts"), [(700, 600, 3), (8320, 8320, 4), (2048, 100, 2), (9001, 0, 8)])
def test_parts_cover_all_valid_tokens_in_whole_blocks(columns: int, valid: int, parts: int) -> None:
    from mxep.gemm.kernels.hopper import BLOCK_K, cuts_of_parts

    cuts = cuts_of_parts(torch.tensor([valid], dtype=torch.int32), columns, parts)
    assert cuts.dtype == torch.int32
    sizes = cuts.diff(prepend=cuts.new_zeros(1)).tolist()
    assert (len(sizes), sum(sizes)) == (parts, valid)
    assert 0 <= min(sizes) <= max(sizes) < columns / parts + BLOCK_K, "none has much more than its share"
    assert all(cut % BLOCK_K == 0 or cut == valid for cut in cuts.tolist())
    if (columns, parts) == (700, 3):
        assert cuts.tolist() == [256, 512, 600], "as its docstring says"


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 100, 4096, 8192, 9001])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_e5m2", "fp8", "bf16", "mxfp8_wgrad_bf16"])
def test_on_hopper_it_is_the_reference(recipe: str, tokens: int) -> None:
    given = [x.detach().cuda().requires_grad_(x.requires_grad) for x in operands(tokens, n=512, k=1024)]
    wanted, got = (step(by(recipe, backend=backend), *given) for backend in ("reference", "hopper"))
    # bf16 results: 52 dB between two roundings of the same value.
    assert all(snr(want.double(), x) > 50 for want, x in zip(wanted, got))
    again = step(by(recipe, backend="hopper"), *given)
    assert all(torch.equal(a, b) for a, b in zip(got, again)), "bit for bit, from run to run"
    main_grad = torch.zeros(512, 1024, device="cuda")
    linear(given[0], given[1], recipe=recipe, backend="hopper", main_grad=main_grad).backward(given[3])
    assert snr(wanted[2].double(), main_grad) > 50


@needs_hopper
def test_on_hopper_nothing_waits_for_the_host_and_a_graph_captures_it() -> None:
    given = [x.detach().cuda().requires_grad_(x.requires_grad) for x in operands(2, 2050, n=512, k=1024)]
    want = step(by("mxfp8"), *given)
    torch.cuda.synchronize()
    with no_host_sync():
        got = step(by("mxfp8"), *given)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(by("mxfp8"), *given)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@every_backend
def test_fold_report_has_linears_of_any_number_of_rows(backend: str | Backend) -> None:
    x, w, _, dy = operands(2, 37)
    with fold_report() as report:
        step(by("mxfp8", backend=backend), x, w, None, dy)
    assert [(p.weight, p.product) for p in report.values()] == [
        ((1, N, K), product) for product in ("forward", "dgrad", "wgrad")
    ]
    assert all(p.snr_db > 60 and p.elements for p in report.values())


def test_in_bf16_it_is_torchs_linear() -> None:
    """Which costs the host a third, and is differentiable twice."""
    x, w, bias = draw(5, 64).requires_grad_(), draw(96, 64, seed=1), draw(96, seed=2)
    out = linear(x, w, bias, recipe="bf16", backend="dequant")
    assert torch.equal(out, F.linear(x, w, bias))
    assert type(out.grad_fn) is type(F.linear(x, w, bias).grad_fn)
    summed = torch.zeros(96, 64)
    linear(x, w.requires_grad_(), recipe="bf16", backend="dequant", main_grad=summed).sum().backward()
    assert w.grad is None
    assert summed.any()


def test_in_bf16_a_backend_that_derives_from_reference_multiplies_itself() -> None:
    class Doubling(Reference):
        name = "doubling"

        def forward(self, *args: Any, **options: Any) -> Tensor:
            return 2 * super().forward(*args, **options)

    x, w = draw(5, 64), draw(96, 64, seed=1)
    want = 2 * linear(x, w, recipe="bf16", backend="reference")
    assert torch.equal(linear(x, w, recipe="bf16", backend=Doubling()), want)


def test_dequant_multiplies_fp32_operands_as_bf16() -> None:
    """As it says: fp32 sums of operands rounded to bf16, forward and backward; not fp32 products."""
    random = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=random) for shape in ((64, 32), (48, 32), (64, 48)))
    rounded = [each.bfloat16().float() for each in (x, w, dy)]
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = linear(a, b, recipe="bf16", backend="dequant")
    grads = torch.autograd.grad(out, (a, b), dy)
    wanted = rounded[0] @ rounded[1].T, rounded[2] @ rounded[1], rounded[2].T @ rounded[0]
    for got, want in zip((out, *grads), wanted):
        assert got.dtype == torch.float32
        assert torch.equal(got, got.bfloat16().float()), "rounded to bf16, which comes out of it"
        torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("wanted", [True, False])
def test_transforms_of_torch_func_and_forward_mode_are_refused_by_name(wanted: bool) -> None:
    module, x = Linear(64, 32, recipe="mxfp8").requires_grad_(wanted), torch.randn(4, 8, 64)
    for transformed in (torch.vmap(module), torch.func.grad(lambda x: module(x).sum()), torch.func.jacrev(module)):
        with pytest.raises(NotImplementedError, match=r"within torch.func \(vmap, grad"):
            transformed(x)
    refused = pytest.raises(NotImplementedError, match="want a plain one")
    with forward_ad.dual_level(), refused:
        module(forward_ad.make_dual(x, x))
