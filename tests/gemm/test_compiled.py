"""Products under torch.compile: two ops of what an eager call runs, to the last bit."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from gemm.problem import problem
from gemm.test_hopper import needs_hopper
from mxep.gemm import Recipe, grouped_mm, linear, linear_together, product, quantize_weights_once
from mxep.gemm.backends import BACKENDS
from mxep.gemm.product import backward_op, forward_op
from mxep.runtime.bundle import tensors_in

RECIPES = ("fp8", "mxfp8", "mxfp8_e5m2", "mxfp8_32x32")
MX = Recipe.mxfp8()
TESTS = ("test_autograd_registration", "test_faketensor")  # the others compare by allclose, which fp8 has not


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def ops_of(function: Callable[..., Any], *tensors: Tensor) -> list[str]:
    """mxep's ops in the graphs of forward and backward, in their order."""
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target._schema.name for node in graph.graph.nodes if str(node.target).startswith("mxep."))
        return graph.forward

    out = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=look))(*tensors)
    sum(each.float().sum() for each in ([out] if isinstance(out, Tensor) else out)).backward()
    return seen


def step(function: Callable[..., Tensor], *tensors: Tensor | None, wanted: tuple[bool, ...]) -> list[Tensor]:
    given = [x if x is None else x.detach().clone().requires_grad_(want) for x, want in zip(tensors, wanted)]
    out = function(*given)
    if any(x is not None and x.requires_grad for x in given):
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape))
    return [out.detach(), *(x.grad for x in given if x is not None and x.grad is not None)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("wanted", "backend"),
    [
        ((1, 1, 1), "reference"),
        ((1, 1, 1), "dequant"),
        ((1, 0, 0), "reference"),
        ((0, 1, 0), "dequant"),
        ((0, 0, 0), "reference"),
    ],
    ids=str,
)
def test_a_grouped_product_has_the_bits_of_an_eager_one(wanted: tuple[bool, ...], recipe: str, backend: str) -> None:
    p, how = problem(unused=0), Recipe.named(recipe)
    bias = torch.randn(p.w.shape[:2])

    def product(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return grouped_mm(a, w, p.offs, bias=bias, recipe=how, backend=backend, wgrad_scale=0.5)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    results = [step(each, p.a, p.w, bias, wanted=tuple(map(bool, wanted))) for each in (product, compiled)]
    assert len(results[0]) == 1 + sum(wanted)
    assert all(torch.equal(eager, other) for eager, other in zip(*results))


def test_a_product_is_two_ops_whatever_it_is_made_of() -> None:
    p, x = problem(unused=0), torch.randn(5, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    a, w = p.a.clone().requires_grad_(), p.w.clone().requires_grad_()
    two = ["mxep::product_forward", "mxep::product_backward"]
    assert ops_of(lambda a, w: grouped_mm(a, w, p.offs, recipe=MX), a, w) == two
    weights = [torch.randn(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (96, 32, 32)]
    assert ops_of(lambda x, w: linear(x, w, recipe=MX), x, weights[0]) == two
    assert ops_of(lambda x, *ws: linear_together(x, ws, recipe=MX), x, *weights) == two


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_rows_is_one_graph(recipe: str) -> None:
    how, graphs = Recipe.named(recipe), []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    w = torch.randn(96, 64, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x, w: linear(x, w, recipe=how), fullgraph=True, dynamic=True, backend=look)
    for rows in (40, 33, 64):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        wanted = step(lambda x, w: linear(x, w, recipe=how), x, w, wanted=(True, True))
        assert all(torch.equal(a, b) for a, b in zip(step(compiled, x, w, wanted=(True, True)), wanted))
    assert len(graphs) == 1


def test_what_has_no_name_or_keeps_plain_rows_is_traced() -> None:
    p = problem(unused=0)
    a, w = p.a.clone().requires_grad_(), p.w.clone().requires_grad_()
    own = type(BACKENDS["reference"])()
    for how in ({"recipe": Recipe.mxfp8(wgrad="bf16")}, {"recipe": MX, "backend": own}):
        ops = ops_of(lambda a, w, how=how: grouped_mm(a, w, p.offs, **how), a, w)
        assert ops
        assert not any("product" in op for op in ops)


def product_of(kind: str, recipe: Recipe, offs: Tensor) -> Callable[..., Tensor]:
    if kind == "grouped":
        return lambda a, w: grouped_mm(a, w, offs, recipe=recipe, backend="reference")
    if kind == "linear":
        return lambda a, w: linear(a, w[0], recipe=recipe, backend="reference")
    return lambda a, w: sum(linear_together(a, [w[0], w[1]], recipe=recipe, backend="reference"))


@pytest.mark.parametrize(
    ("recipe", "kind", "compiler"),
    [
        *itertools.product(("fp8", "mxfp8", "mxfp8_32x32"), ("grouped", "linear", "together"), ("aot_eager",)),
        *(("fp8", "together", "inductor"), ("mxfp8", "grouped", "inductor"), ("mxfp8_32x32", "linear", "inductor")),
    ],
)
def test_compiled_products_share_the_weights_that_are_held(recipe: str, kind: str, compiler: str) -> None:
    p = problem(unused=0)
    product = product_of(kind, Recipe.named(recipe), p.offs)
    compiled = torch.compile(product, fullgraph=True, backend=compiler)
    w = [x.clone().mul_(2) for x in p.w] if kind != "grouped" else p.w.clone().mul_(2)  # written to before
    for wanted in ((True,), (False,)):
        found = step(lambda a: product(a, w), p.a, wanted=wanted)
        with quantize_weights_once() as once:
            for each in (compiled, compiled, product):
                again = step(lambda a, each=each: each(a, w), p.a, wanted=wanted)
                assert all(torch.equal(x, y) for x, y in zip(again, found))
            assert once.quantizations == (2 if wanted[0] and recipe != "mxfp8_32x32" else 1)
            (w[0] if kind != "grouped" else w).mul_(2)
            with pytest.raises(RuntimeError, match="was written to within quantize_weights_once"):
                compiled(p.a, w)


def test_a_backend_of_ones_own_quantizes_parts_of_a_weight_itself() -> None:
    class Own(type(BACKENDS["reference"])):  # type: ignore[misc]
        calls = 0

        def quantize_weight_rowwise(self, w: Tensor, recipe: Recipe, *, with_amax: bool = False) -> Any:
            Own.calls += 1
            return super().quantize_weight_rowwise(2 * w, recipe, with_amax=with_amax)

    x, w = torch.randn(40, 64), [torch.randn(32, 64), torch.randn(96, 64)]
    twice = linear_together(x, [2 * each for each in w], recipe="fp8", backend="reference")
    assert all(torch.equal(a, b) for a, b in zip(linear_together(x, w, recipe="fp8", backend=Own()), twice))
    assert Own.calls


@needs_hopper
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_hopper_replays_in_a_compiled_graph_have_the_bits_of_eager_calls(recipe: str) -> None:
    how = Recipe.named(recipe)

    def block(x: Tensor, wq: Tensor, wk: Tensor, wo: Tensor) -> Tensor:
        q, k = linear_together(x, [wq, wk], recipe=how, backend="hopper")
        return linear(q + k.repeat(1, 2), wo, recipe=how, backend="hopper")

    compiled, before = torch.compile(block, fullgraph=True), product.forward.replays
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        sizes = (1000, 256), (512, 256), (256, 256), (128, 512)
        given = [torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for size in sizes]
        wanted, found = (step(each, *given, wanted=(True,) * 4) for each in (block, compiled))
        assert all(torch.equal(x, y) for x, y in zip(wanted, found))
    assert product.forward.replays - before >= 12, "2 products in 5 calls of each, but the first of a kind or two"


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_e5m2_wgrad_bf16", "auto"])
def test_a_graph_finds_a_recipe_by_its_name(recipe: str) -> None:
    x, w, offs, how = (
        torch.randn(32, 64),
        torch.randn(32, 64),
        torch.tensor([32], dtype=torch.int32),
        {"recipe": recipe},
    )

    def products(x: Tensor) -> tuple[Tensor, ...]:
        grouped = () if recipe == "auto" else (grouped_mm(x, w[None], offs, **how),)
        return linear(x, w, **how), *linear_together(x, [w, w], **how), *grouped

    compiled = torch.compile(products, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(products(x), compiled(x), strict=True))


@needs_hopper
@pytest.mark.parametrize("held", [False, True])
def test_on_hopper_graph_trees_of_torch_compile_have_the_bits_of_eager_calls(held: bool) -> None:
    ws = [
        torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in ((512, 256), (256, 512))
    ]

    def block(x: Tensor) -> Tensor:
        return linear(linear(x, ws[0], recipe="mxfp8", backend="hopper"), ws[1], recipe="mxfp8", backend="hopper")

    def micro_batches(function: Callable[[Tensor], Tensor], step: int) -> list[Tensor]:
        found = []
        with quantize_weights_once() if held else contextlib.nullcontext():
            for seed in (2 * step, 2 * step + 1):
                x = torch.randn(1000, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
                x = x.bfloat16().requires_grad_()
                out = function(x)
                out.backward(out.detach().sin())
                found += [each.detach().clone() for each in (out, x.grad, *(w.grad for w in ws))]
                for w in ws:
                    w.grad = None  # it lies in the graphs' memory
        return found

    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for step in range(4):
        wanted, found = micro_batches(block, step), micro_batches(compiled, step)
        assert all(torch.equal(x, y) for x, y in zip(wanted, found, strict=True))
        with torch.no_grad():
            for w in ws:
                w.mul_(1.1)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp8_32x32"])
def test_the_ops_pass_opcheck(recipe: str) -> None:
    p = problem(unused=0)
    given = p.a, [p.w], None, p.offs, recipe, "reference"
    torch.library.opcheck(forward_op, (*given, torch.bfloat16, 1.0, [True, True, False]), test_utils=TESTS)
    _, *saved = forward_op(*given, torch.bfloat16, 1.0, [True, True, False])
    args = p.dy, saved, [p.w], p.offs, recipe, "reference", torch.bfloat16, 1.0, [True, True]
    torch.library.opcheck(backward_op, args, test_utils=TESTS)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "mxfp8_32x32"])
def test_no_output_of_an_op_is_what_is_held_for_others(recipe: str) -> None:
    """A graph may write over its outputs."""
    a, w = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(1, 96, 64, dtype=torch.bfloat16)
    given = a, [w], None, torch.tensor([64], dtype=torch.int32), recipe, "reference", a.dtype, 1.0, [True, True, False]
    with quantize_weights_once() as once:
        for _ in range(2):
            made = torch.ops.mxep.product_forward(*given)
            held = {x.untyped_storage().data_ptr() for each in once._held.values() for x in tensors_in(each.made)}
            assert held
            assert not held & {x.untyped_storage().data_ptr() for x in made}
            wanted = [x.clone() for x in made]
            for x in (x for x in made if x.dim()):  # what there is not has no axes
                x.view(torch.uint8).zero_()
            again = zip(torch.ops.mxep.product_forward(*given), wanted)
            assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in again if x.dim())
