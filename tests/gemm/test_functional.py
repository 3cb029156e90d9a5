"""Laws of grouped_mm: what must be the same bit for bit, what must not be read, kept or computed, and its calculus."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gemm.problem import BACKENDS, QUANTIZED, RECIPES, Problem, Result, indexed, problem
from gemm.test_blackwell import DEVICE as TRITON_DEVICE
from gemm.test_hopper import BACKEND as HOPPER
from gemm.test_hopper import DEVICE as HOPPER_DEVICE
from mxep.gemm import BACKENDS as ALL
from mxep.gemm import Recipe, grouped_mm, quantize_weights_once
from mxep.gemm.backends.reference import grouped_mm_reference, grouped_wgrad_reference
from mxep.quant import E4M3, E5M2, MXTensor, quantize

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
FROM_CODES = tuple(name for name in QUANTIZED if "wgrad_bf16" not in name)
DEVICES = {"hopper": HOPPER_DEVICE, "triton": TRITON_DEVICE}
LAWS = [*itertools.product(BACKENDS, RECIPES), ("hopper", "mxfp8"), ("triton", "mxfp8")]
every_kind = pytest.mark.parametrize(("backend", "recipe"), LAWS)


def runs(p: Problem, recipe: str, backend: str) -> Callable[..., Result]:
    """`p.run` of a recipe and backend, on the backend's GPU if there is one."""
    device = DEVICES.get(backend, "cpu")
    q = Problem(*(x.to(device) for x in (p.a, p.w, p.dy, p.offs)))
    return lambda **given: q.run(
        recipe, backend=HOPPER if backend == "hopper" else backend, **{n: x.to(device) for n, x in given.items()}
    )


@every_backend
@pytest.mark.parametrize("recipe", FROM_CODES)
def test_quantizing_before_or_inside_is_the_same(recipe: str, backend: str) -> None:
    p = problem()
    r = Recipe.named(recipe)
    a, dy = r.quantize_rows(p.a), r.quantize_rows(p.dy, r.grad_fmt)
    dynamic = p.run(recipe, backend=backend)
    assert dynamic.same_as(p.run(recipe, a=a, backend=backend))
    assert dynamic.same_as(p.run(recipe, a=a, dy=dy, backend=backend))


@every_backend
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_bf16", "fp8_wgrad_bf16"])
def test_wgrad_bf16_of_codes_is_the_product_of_their_values(recipe: str, backend: str) -> None:
    p = problem()
    r = Recipe.named(recipe)
    a, dy = r.quantize_rows(p.a), r.quantize_rows(p.dy, r.grad_fmt)
    assert isinstance(a, MXTensor)
    assert isinstance(dy, MXTensor)
    from_codes = p.run(recipe, a=a, dy=dy, backend=backend)
    plain = p.run("bf16", a=a.dequantize(), dy=dy.dequantize(), backend=backend)
    assert torch.equal(from_codes.dw, plain.dw)


@pytest.mark.parametrize(("backend", "recipe"), [law for law in LAWS if law[1] != "bf16"])
def test_rows_under_an_index_equal_materialized_rows(recipe: str, backend: str) -> None:
    p = problem()
    p.a[70:75], p.dy[70:75] = 0, 0
    r = Recipe.named(recipe)
    a, dy = r.quantize_rows(p.a), r.quantize_rows(p.dy, r.grad_fmt)
    assert isinstance(a, MXTensor)
    assert isinstance(dy, MXTensor)
    unread = backend in ("reference", "triton") and recipe == "mxfp8"  # the index past the last group
    how = {"valid": p.valid, "poison": 2**30 if unread else -1}
    run = runs(p, recipe, backend)
    assert run(a=a, dy=dy).same_as(run(a=indexed(a, **how), dy=indexed(dy, seed=2, **how)))


@every_backend
def test_rows_of_a_wider_buffer_are_taken_as_they_lie(backend: str) -> None:
    p = problem()
    a, dy = (torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, : x.shape[1]] for x in (p.a, p.dy))
    assert p.run("mxfp8", backend=backend).same_as(p.run("mxfp8", a=a, dy=dy, backend=backend))
    assert p.run("bf16", backend=backend).same_as(p.run("bf16", a=a, dy=dy, backend=backend))


@every_backend
@every_recipe
def test_rows_past_the_last_group_change_nothing(recipe: str, backend: str) -> None:
    p, bare = problem(unused=96), problem(unused=0)
    poisoned = p.run(recipe, backend=backend)
    assert all(x.isfinite().all() for x in poisoned)
    assert poisoned.same_as(bare.run(recipe, backend=backend))


@every_kind
def test_nan_stays_with_its_token_and_its_expert(recipe: str, backend: str) -> None:
    p, clean = problem((64, 64, 64)), runs(problem((64, 64, 64)), recipe, backend)()
    p.a[70, 3] = torch.nan
    p.dy[130, 5] = torch.nan
    got = runs(p, recipe, backend)()
    others = torch.arange(p.valid, device=got.out.device)
    assert got.out[70].isnan().all()
    assert torch.equal(got.out[others != 70], clean.out[others != 70])
    assert got.da[130].isnan().all()
    assert torch.equal(got.da[others != 130], clean.da[others != 130])
    assert got.dw[1, :, 3].isnan().all()
    assert got.dw[2, 5].isnan().all()
    assert torch.equal(got.dw[0], clean.dw[0])


@every_kind
@pytest.mark.parametrize("sizes", [(0, 96, 0), (0, 0, 0)])
def test_empty_groups_have_zero_weight_gradients(recipe: str, sizes: tuple[int, ...], backend: str) -> None:
    p = problem(sizes, unused=32)
    got = runs(p, recipe, backend)()
    assert all(x.isfinite().all() for x in got)
    for g, rows in p.groups():
        assert bool(got.dw[g].any()) == (rows.stop > rows.start)


@every_kind
def test_no_rows_at_all(recipe: str, backend: str) -> None:
    got = runs(problem((0, 0), unused=0), recipe, backend)()
    assert got.out.shape == (0, 96)
    assert got.da.shape == (0, 128)
    assert not got.dw.any()


@every_backend
@every_recipe
def test_groups_do_not_see_each_other(recipe: str, backend: str) -> None:
    p = problem((64, 32))
    both = p.run(recipe, backend=backend)
    for g, rows in p.groups():
        one = problem((rows.stop - rows.start,), unused=0)
        one.a[:], one.dy[:], one.w[:] = p.a[rows], p.dy[rows], p.w[g]
        alone = one.run(recipe, backend=backend)
        assert torch.equal(alone.out, both.out[rows])
        assert torch.equal(alone.da, both.da[rows])
        assert torch.equal(alone.dw[0], both.dw[g])


@every_backend
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_a_gradient_that_arrives_in_codes_is_used_as_it_is(fmt: Any, backend: str) -> None:
    p = problem()
    dy = quantize(p.dy, fmt=fmt)
    got = p.run("mxfp8", dy=dy, backend=backend)
    assert got.same_as(p.run(Recipe.mxfp8(grad_fmt=fmt), backend=backend))


def test_a_gradient_in_other_blocks_is_quantized_again() -> None:
    p = problem()
    row_scaled = quantize(p.dy, block_size=None)
    assert p.run("mxfp8", dy=row_scaled).same_as(p.run("mxfp8", dy=row_scaled.dequantize()))
    assert p.run("bf16", dy=row_scaled).same_as(p.run("bf16", dy=row_scaled.dequantize()))


def test_an_expanded_gradient_is_fine() -> None:
    p = problem(unused=0)
    for recipe in ("bf16", "mxfp8"):
        for backend in BACKENDS:
            dense = p.run(recipe, dy=torch.ones(p.valid, 96, dtype=torch.bfloat16), backend=backend)
            expanded = p.run(recipe, dy=torch.ones((), dtype=torch.bfloat16).expand(p.valid, 96), backend=backend)
            assert dense.same_as(expanded)


@every_backend
@every_recipe
def test_gradients_have_the_dtypes_of_their_tensors(recipe: str, backend: str) -> None:
    p = problem()
    a = p.a.float().requires_grad_()
    w = p.w.detach().requires_grad_()
    bias = torch.zeros(4, 96, requires_grad=True)
    out = grouped_mm(a, w, p.offs, recipe=recipe, backend=backend, bias=bias, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.backward(p.dy)
    for x in (a, w, bias):
        assert x.grad is not None
        assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
    assert grouped_mm(a, w, p.offs, recipe=recipe, backend=backend).dtype == torch.float32
    assert grouped_mm(p.a, w, p.offs, recipe=recipe, out_dtype=torch.float32).dtype == torch.float32


def test_gradcheck() -> None:
    torch.manual_seed(0)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    a, w, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (3, 4, 3), (3, 4)))

    def product(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return grouped_mm(a, w, offs, recipe="bf16", bias=bias)

    assert torch.autograd.gradcheck(product, (a, w, bias))


class Counting:
    """The reference backend that remembers what it was asked for."""

    name = "counting"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None

    def __getattr__(self, product: str) -> Callable[..., Tensor]:
        self.asked.append(product)
        compute: Callable[..., Tensor] = getattr(ALL["reference"], product)
        return compute


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("wanted", [("a",), ("w",), ("bias",), ("a", "w"), ()])
def test_only_gradients_that_are_needed_are_computed(wanted: tuple[str, ...], recipe: str) -> None:
    p, backend = problem(), Counting()
    inputs = {"a": p.a.clone(), "w": p.w.clone(), "bias": torch.zeros(4, 96)}
    for name in wanted:
        inputs[name].requires_grad_()
    out = grouped_mm(**inputs, offs=p.offs, recipe=recipe, backend=backend)
    assert out.requires_grad == bool(wanted)
    if wanted:
        out.backward(p.dy)
    products = [asked for asked in backend.asked if not asked.startswith("quantize")]
    assert products == [
        "forward",
        *(["dgrad"] if "a" in wanted else []),
        *(["prepare_wgrad", "wgrad"] if "w" in wanted else []),
    ]
    assert all((x.grad is not None) == (name in wanted) for name, x in inputs.items())


def kept_for_backward(recipe: str, a: Tensor) -> list[Tensor]:
    p, kept = problem(), []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        grouped_mm(a, p.w.detach().requires_grad_(), p.offs, recipe=recipe)
    return [x for x in kept if x is not None and x.dtype != torch.int32]


@pytest.mark.parametrize("recipe", [name for name in FROM_CODES if "32x32" not in name])
def test_backward_keeps_codes_of_the_activation_and_none_of_the_weight(recipe: str) -> None:
    a = problem().a.requires_grad_()
    qdata, scale, w, *amax = kept_for_backward(recipe, a)
    assert (qdata.shape, qdata.dtype.itemsize) == (a.shape, 1)
    assert (len(scale), scale.dtype) == (len(a), torch.float8_e8m0fnu)
    assert torch.equal(w, problem().w)
    assert all(x.shape == w[:, 0].shape for x in amax)  # a row less than a matrix
    assert len(kept_for_backward(recipe, a.detach())) == 2


def test_tiles_of_a_weight_are_quantized_once_and_kept() -> None:
    a = problem().a.requires_grad_()
    *_, qdata, scale = kept_for_backward("mxfp8_32x32", a)
    groups, n, k = qdata.shape
    assert (qdata.dtype.itemsize, scale.shape) == (1, (groups, n // 32, k // 32))


def test_wgrad_bf16_keeps_a_plain_activation_but_no_copy_of_a_quantized_one() -> None:
    p = problem()
    assert [x.dtype for x in kept_for_backward("mxfp8_wgrad_bf16", p.a)] == [torch.bfloat16]
    qdata, scale = kept_for_backward("mxfp8_wgrad_bf16", quantize(p.a))
    assert (qdata.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp8_32x32", "mxfp8_wgrad_bf16"])
@pytest.mark.parametrize("given", ["plain", "qdata", "indexed qdata", "qdata, and weight held"])
def test_offloaded_tensors_come_back_as_they_were(recipe: str, given: str) -> None:
    """With pin_memory torch copies into plain tensors: an MXTensor that is saved as such would come back as values, and
    a weight gradient of these has other bits."""
    named, p = Recipe.named(recipe), problem(unused=0)
    spread = torch.exp2(torch.randint(-20, 20, p.a.shape, generator=torch.Generator().manual_seed(0)))
    results = []
    for offload in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu(pin_memory=True)):
        a, w = (p.a * spread).bfloat16().requires_grad_(), p.w.clone().requires_grad_()
        operand = a if given == "plain" else named.quantize_rows(a)
        if given == "indexed qdata":
            index = torch.arange(len(a), dtype=torch.int32).flip(0)
            operand = MXTensor.from_qdata_and_scales(
                operand.qdata, operand.scale, operand.dtype, block_size=operand.block_size, row_index=index
            ).requires_grad_()
        source = operand if given == "indexed qdata" else a
        with quantize_weights_once() if given == "qdata, and weight held" else contextlib.nullcontext():
            with offload:
                out = grouped_mm(operand, w, p.offs, recipe=named)
            results.append(torch.autograd.grad(out, (source, w), p.dy))
    (da, dw), (da_offloaded, dw_offloaded) = results
    assert torch.equal(da, da_offloaded)
    assert torch.equal(dw, dw_offloaded)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_weight_changed_between_forward_and_backward_is_noticed(recipe: str) -> None:
    p = problem()
    a, w = p.a.clone().requires_grad_(), p.w.clone()
    out = grouped_mm(a, w, p.offs, recipe=recipe)
    w.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(p.dy)


def test_a_second_derivative_raises() -> None:
    p = problem(unused=0)
    a, dy = p.a.requires_grad_(), p.dy.requires_grad_()
    (da,) = torch.autograd.grad(grouped_mm(a, p.w, p.offs, recipe="mxfp8"), a, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        da.sum().backward()


def test_ops_pass_opcheck() -> None:
    p = problem(unused=0)
    a, w, dy = quantize(p.a), quantize(p.w), indexed(quantize(p.dy), valid=p.valid)
    forward, wgrad = grouped_mm_reference.opdef, grouped_wgrad_reference.opdef
    torch.library.opcheck(forward, (p.a, None, None, p.w, None, p.offs, torch.zeros(4, 96), torch.float32))
    torch.library.opcheck(wgrad, (p.dy, None, None, p.a, None, None, p.offs, torch.float32, 1.0))
    # test_schema compares inputs by allclose, which fp8 has not
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    parts = (a.qdata, a.scale, None, w.qdata, w.scale, p.offs, None, torch.bfloat16)
    torch.library.opcheck(forward, parts, test_utils=tests)
    parts = (dy.qdata, dy.scale, dy.row_index, a.qdata, a.scale, None, p.offs, torch.bfloat16, 1.0)
    torch.library.opcheck(wgrad, parts, test_utils=tests)


class Copies(TorchDispatchMode):
    """How many tensors of `size` elements were made by copying."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copies = (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten.copy_)
        self.count += func.overloadpacket in copies and out.numel() == self.size
        return out


@every_backend
def test_weights_stored_the_other_way_round_are_multiplied_as_they_lie(backend: str) -> None:
    p = problem()
    stored = p.w.mT.contiguous()
    want = p.run("bf16", backend=backend)
    a, w = p.a.clone().requires_grad_(), stored.mT.requires_grad_()
    with Copies(w.numel()) as copies:
        out = grouped_mm(a, w, p.offs, recipe="bf16", backend=backend)
        (da,) = torch.autograd.grad(out, a, p.dy)
    assert copies.count == 0
    # Some CPUs' bf16 products add up in another order where a weight lies otherwise.
    bits = {"rtol": 0.0, "atol": 0.0} if backend == "reference" else {"rtol": 2**-7, "atol": 2**-6}
    torch.testing.assert_close(out[: p.valid], want.out, **bits)
    torch.testing.assert_close(da[: p.valid], want.da, **bits)


@every_backend
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_bf16"])
def test_the_gradient_of_a_weight_stored_the_other_way_round_lies_as_it_does(backend: str, recipe: str) -> None:
    p = problem()
    lying = [p.w.clone().requires_grad_(), p.w.mT.contiguous().mT.requires_grad_()]
    grads = [torch.autograd.grad(grouped_mm(p.a, w, p.offs, recipe=recipe, backend=backend), w, p.dy)[0] for w in lying]
    assert grads[1].stride() == lying[1].stride()
    assert grads[0].any()
    bits = {"rtol": 0.0, "atol": 0.0} if backend == "reference" else {"rtol": 2**-7, "atol": 2**-6}
    torch.testing.assert_close(*grads, **bits)
