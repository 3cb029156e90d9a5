"""linear_together: what separate linears compute, bit for bit where scales cover blocks, in one product each way."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gemm.problem import BACKENDS, QUANTIZED, snr
from gemm.test_functional import Counting
from gemm.test_functional_linear import draw
from gemm.test_hopper import BACKEND as HOPPER
from gemm.test_hopper import needs_hopper
from mxep.gemm import Recipe, linear, linear_together, quantize_input, quantize_once, quantize_weights_once
from mxep.gemm.backends import BACKENDS as ALL
from mxep.gemm.backends import Backend
from mxep.gemm.quantize_once import rowwise_and_saved
from mxep.quant import MXTensor, ops

K, WIDTHS = 64, (96, 32, 32)
every_backend = pytest.mark.parametrize("backend", [*BACKENDS, HOPPER], ids=[*BACKENDS, "hopper"])


class Case:
    """x (2, 37, K), weights (N, K) and biases (N,) of q, k and v, and a gradient for each."""

    def __init__(self, k: int = K, widths: Sequence[int] = WIDTHS, rows: tuple[int, ...] = (2, 37)) -> None:
        self.x = draw(*rows, k).requires_grad_()
        self.weights = [(draw(n, k, seed=i + 1) / k**0.5).requires_grad_() for i, n in enumerate(widths)]
        self.biases = [draw(n, seed=i + 5).requires_grad_() for i, n in enumerate(widths)]
        self.gradients = [draw(*rows, n, seed=i + 9) for i, n in enumerate(widths)]

    def to(self, device: str, dtype: torch.dtype | None = None) -> "Case":
        for name in ("weights", "biases", "gradients"):
            setattr(self, name, [t.detach().to(device, dtype).requires_grad_() for t in getattr(self, name)])
        self.x = self.x.detach().to(device, dtype).requires_grad_()
        return self

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.weights, *self.biases]

    def step(self, product: Callable[..., Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and gradients of all leaves."""
        outs = product(self.x, self.weights, self.biases)
        return [out.detach() for out in outs], list(torch.autograd.grad(outs, self.leaves, self.gradients))


def apart(**options: Any) -> Callable[..., list[Tensor]]:
    return lambda x, ws, biases: [linear(x, w, bias, **options) for w, bias in zip(ws, biases)]


def together(**options: Any) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, ws, biases: linear_together(x, ws, biases, **options)


@every_backend
@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_they_are_separate_linears_of_one_input(recipe: str, backend: str | Backend) -> None:
    case, how = Case(), {"recipe": recipe, "backend": backend}
    wanted, (dx_wanted, *d_wanted) = case.step(apart(**how))
    got, (dx, *d_got) = case.step(together(**how))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip((*got, dx, *d_got), (*wanted, dx, *d_wanted)))
    blocks = recipe.startswith("mxfp8") and backend is not HOPPER
    if backend == "reference" or (backend is HOPPER and recipe != "bf16"):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted)), "a row's scales are its own"
        # One scale for a row of all gradients: what is 2^9 below the largest would lose bits, and Gaussians are not.
        assert all(torch.equal(a, b) if blocks else snr(b.double(), a) > 45 for a, b in zip(d_got, d_wanted))
    assert all(snr(b.double(), a) > 45 for a, b in zip((*got, *d_got), (*wanted, *d_wanted)))
    assert snr(dx_wanted.double(), dx) > 35, "separate ones round three times"


@every_backend
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_the_gradient_of_x_is_closer_to_exact_than_that_of_three_products(recipe: str, backend: str | Backend) -> None:
    case, how = Case(k=256, widths=(512, 64, 64)), {"recipe": recipe, "backend": backend}
    exact = Case(k=256, widths=(512, 64, 64)).to("cpu", torch.float64)
    _, (want, *_) = exact.step(lambda x, ws, biases: [F.linear(x, w, b) for w, b in zip(ws, biases)])
    reached = {name: snr(want, case.step(way(**how))[1][0]) for name, way in (("apart", apart), ("one", together))}
    assert reached["one"] > 26
    assert reached["one"] > reached["apart"] - 0.1


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("backend", [ALL["reference"], HOPPER], ids=["reference", "hopper"])
@pytest.mark.parametrize(("groups", "widths"), [(3, WIDTHS), (2, (32, 96)), (1, (32, 64, 32, 96))], ids=str)
def test_qdata_of_parts_are_those_of_the_joined_weight_both_ways(
    recipe: str, backend: Backend, groups: int, widths: tuple[int, ...]
) -> None:
    r, parts = Recipe.named(recipe), tuple(draw(groups, n, K, seed=n + i) * 2**i for i, n in enumerate(widths))
    for stored in (parts, tuple(part.mT.contiguous().mT for part in parts)):
        found = []
        for w in (stored, torch.cat(stored, 1)):
            rowwise, saved = rowwise_and_saved(w, r, backend, dgrad=True)
            assert isinstance(saved.weight, MXTensor) == (rowwise.axis == (-2, -1))  # type: ignore[attr-defined]
            found.append((rowwise, saved.colwise(r, backend)))
        for one, whole in zip(*found):
            assert isinstance(one, MXTensor)
            assert isinstance(whole, MXTensor)
            assert (one.axis, one.block_size, one.shape) == (whole.axis, whole.block_size, whole.shape)
            assert torch.equal(one.qdata.view(torch.uint8), whole.qdata.view(torch.uint8))
            assert torch.equal(one.scale.view(torch.uint8), whole.scale.view(torch.uint8))


def test_it_is_one_product_each_way_and_one_quantization_of_x() -> None:
    case, backend = Case(), Counting()
    case.step(together(recipe="mxfp8", backend=backend))
    asked = "forward", "dgrad", "wgrad", "quantize_rows", "quantize_parts"
    products = [name for name in backend.asked if name in asked]
    assert products == ["quantize_rows", "forward", "quantize_parts", "dgrad", "wgrad"]


def test_no_bf16_copy_of_weights_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    case, joined, cat = Case(), [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, dim=0: joined.append([*parts]) or cat(parts, dim))  # type: ignore[func-returns-value]
    outs = linear_together(case.x, case.weights, recipe="mxfp8", backend="reference")
    torch.autograd.backward(outs, case.gradients)
    assert {part.dtype for parts in joined for part in parts if part.dim() == 3} == {torch.int64, torch.uint8}


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_parts_of_one_scale_a_row_are_not_joined_at_all(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = Case(), []
    for name in ("joined", "_join"):
        monkeypatch.setattr(quantize_once, name, None)  # not to be called
    for name in ("quantize_per_row", "quantize_per_column"):
        op = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *args, op=op: given.append(args[:3]) or op(*args))
    outs = linear_together(case.x, case.weights, recipe=recipe, backend=HOPPER)
    torch.autograd.backward(outs, case.gradients)
    assert [[part.data_ptr() for part in parts] for parts in given] == 2 * [[w.data_ptr() for w in case.weights]]


@every_backend
def test_an_input_may_come_quantized_and_some_biases_be_missing(backend: str | Backend) -> None:
    case, how = Case(), {"recipe": "mxfp8", "backend": backend}
    biases = [None, case.biases[1], None]
    want = linear_together(case.x, case.weights, biases, **how)  # type: ignore[arg-type]
    got = linear_together(quantize_input(case.x, **how), case.weights, biases, **how)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    dx, d_bias = torch.autograd.grad(got, (case.x, case.biases[1]), case.gradients)
    assert torch.equal(dx, torch.autograd.grad(want, case.x, case.gradients)[0])
    torch.testing.assert_close(d_bias, case.gradients[1].sum((0, 1)), rtol=2**-7, atol=2**-6)


@every_backend
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_bf16"])
def test_main_grads_take_the_gradients_of_theirs(recipe: str, backend: str | Backend) -> None:
    case, how = Case(), {"recipe": recipe, "backend": backend}
    wanted = torch.autograd.grad(linear_together(case.x, case.weights, **how), case.weights, case.gradients)  # type: ignore[arg-type]
    main_grads = [torch.ones(w.shape) if i != 1 else None for i, w in enumerate(case.weights)]
    outs = linear_together(case.x, case.weights, main_grads=main_grads, **how)  # type: ignore[arg-type]
    torch.autograd.backward(outs, case.gradients)
    for w, main_grad, want in zip(case.weights, main_grads, wanted):
        assert (w.grad is None) == (main_grad is not None)
        got = w.grad if main_grad is None else main_grad - 1
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-2)  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_bf16"])
def test_gradients_that_are_not_asked_for_are_not_computed(recipe: str) -> None:
    case, backend = Case(rows=(37,)), Counting()
    case.weights[0].requires_grad_(False)
    outs = linear_together(case.x, case.weights, recipe=recipe, backend=backend)
    wanted = torch.autograd.grad(outs, [case.x, *case.weights[1:]], case.gradients, retain_graph=True)
    backend.asked.clear()
    (dx,) = torch.autograd.grad(outs, case.x, case.gradients, retain_graph=True)
    assert "dgrad" in backend.asked
    assert "wgrad" not in backend.asked
    backend.asked.clear()
    dws = torch.autograd.grad(outs, case.weights[1:], case.gradients)
    assert "wgrad" in backend.asked
    assert not {"dgrad", "quantize_parts"} & {*backend.asked}, "what the first quantized is used"
    assert all(torch.equal(a, b) for a, b in zip((dx, *dws), wanted))


def test_an_output_that_nobody_uses_gives_zero_gradients() -> None:
    case = Case()
    q, *_ = linear_together(case.x, case.weights, recipe="mxfp8")
    dx, *dws = torch.autograd.grad(q, [case.x, *case.weights], case.gradients[0])
    (want,) = torch.autograd.grad(linear(case.x, case.weights[0], recipe="mxfp8"), case.x, case.gradients[0])
    assert torch.equal(dx, want)
    assert dws[0].any()
    assert not dws[1].any()


@every_backend
def test_weights_are_quantized_once_where_they_are_told_to_be(backend: str | Backend) -> None:
    case, how = Case(), {"recipe": "mxfp8", "backend": backend}
    wanted = case.step(together(**how))
    with quantize_weights_once() as once:
        for _ in range(2):
            got = case.step(together(**how))
            assert all(torch.equal(a, b) for a, b in zip((*got[0], *got[1]), (*wanted[0], *wanted[1])))
        assert once.quantizations == 2


def test_autocast_gives_its_dtype() -> None:
    case = Case().to("cpu", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = linear_together(case.x, case.weights, recipe="mxfp8")
    assert {out.dtype for out in outs} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": []}, "linear_together: got 0 weights, .* want one weight at least"),
        ({"biases": [None]}, "linear_together: got 2 weights, 1 biases, 2 main_grads"),
        ({"weights": [draw(96, 64), draw(32, 64).float()]}, "Tensor torch.float32, want plain weights of one dtype"),
        ({"weights": [draw(96, 64), draw(40, 64)]}, "N: got 40, want a multiple of 32"),
        ({"weights": [draw(96, 64), None]}, r"weights\[1\]: got a NoneType, want a tensor"),
        ({"recipe": "mx4"}, "recipe: got 'mx4'"),
    ],
)
def test_wrong_operands_say_what_is_wanted(change: dict[str, Any], says: str) -> None:
    given = {"weights": [draw(96, 64), draw(32, 64)], "recipe": "mxfp8"} | change
    with pytest.raises(ValueError, match=says):
        linear_together(draw(4, 64), given.pop("weights"), **given)


@needs_hopper
@pytest.mark.parametrize("rows", [(1,), (100,), (8192,), (2, 4500)])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_e5m2", "fp8", "mxfp8_wgrad_bf16"])
def test_on_hopper_it_is_the_reference(recipe: str, rows: tuple[int, ...]) -> None:
    case = Case(k=2048, widths=(4096, 512, 512), rows=rows).to("cuda")
    for _ in range(3):  # seen, captured, replayed
        got = case.step(together(recipe=recipe, backend="hopper"))
    wanted = case.step(together(recipe=recipe, backend="reference"))
    floor = 50 if recipe == "fp8" else 25  # folded, so other scales
    assert all(snr(b.double(), a) > floor for a, b in zip((*got[0], *got[1]), (*wanted[0], *wanted[1])))
    whole = torch.cat(case.gradients, -1)
    case.gradients = list(whole.split([4096, 512, 512], -1))  # as the backward of a torch.cat gives them
    for _ in range(3):
        again = case.step(together(recipe=recipe, backend="hopper"))
    assert all(torch.equal(a, b) for a, b in zip((*again[0], *again[1]), (*got[0], *got[1])))
    apart_ = case.step(apart(recipe=recipe, backend="hopper"))
    assert all(torch.equal(a, b) for a, b in zip(got[0], apart_[0]))


def test_a_main_grad_whose_gradient_was_not_asked_for_gets_nothing() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    main_grads = [None, torch.zeros(32, 64), torch.zeros(32, 64)]
    for recipe in ("fp8", "mxfp8", "mxfp8_wgrad_bf16"):
        outs = linear_together(x, weights, recipe=recipe, backend="reference", main_grads=main_grads)
        (asked,) = torch.autograd.grad(sum(out.sum() for out in outs), weights[0], retain_graph=True)
        assert asked.any()
        assert not any(main_grad.any() for main_grad in main_grads if main_grad is not None), recipe
        (dx,) = torch.autograd.grad(sum(out.sum() for out in outs), x)
        assert dx.any()
        assert not any(main_grad.any() for main_grad in main_grads if main_grad is not None), recipe
