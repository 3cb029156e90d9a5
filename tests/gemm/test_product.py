"""Products compiled, replayed, and backward in parts: the bits of one eager pass."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from gemm.problem import problem
from gemm.test_functional import Counting
from gemm.test_hopper import BACKEND as HOPPER
from gemm.test_hopper import needs_hopper
from mxep.gemm import Recipe, grouped_mm, linear, linear_together, product, quantize_weights_once
from mxep.gemm.backends import BACKENDS
from mxep.gemm.product import backward_op, forward_op
from mxep.runtime.bundle import tensors_in
from records_on_cpu import assert_replays_are_alike, replays_on_the_cpu
from schedules_of_torch import splits_functions

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


@pytest.mark.parametrize(
    ("recipe", "wanted", "backend"),
    [
        ("fp8", (1, 1, 1), "dequant"),
        ("mxfp8_e5m2", (1, 1, 1), "reference"),
        ("mxfp8_32x32", (1, 0, 0), "reference"),
        ("mxfp8", (0, 1, 0), "dequant"),
        ("mxfp8", (0, 0, 0), "reference"),
        ("bf16", (1, 1, 1), "reference"),
        ("bf16", (1, 1, 1), "dequant"),
        pytest.param(
            "mxfp8", (1, 1, 1), "triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs")
        ),
        ("mxfp8", (1, 1, 1), HOPPER),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_compiled_grouped_product_has_the_bits_of_an_eager_one(
    wanted: tuple[bool, ...], recipe: str, backend: Any
) -> None:
    p, how = problem((64, 0, 32), n=32, k=64, unused=0), Recipe.named(recipe)
    bias = torch.randn(p.w.shape[:2])

    def product(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return grouped_mm(a, w, p.offs, bias=bias, recipe=how, backend=backend, wgrad_scale=0.5)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    results = [step(each, p.a, p.w, bias, wanted=tuple(map(bool, wanted))) for each in (product, compiled)]
    assert len(results[0]) == 1 + sum(wanted)
    for eager, other in zip(*results):
        # torch 2.11 compiles its grouped mm to other sums, which may round to a neighbour in bf16.
        torchs = (recipe, backend) == ("bf16", "dequant")
        assert torch.allclose(eager, other, rtol=2**-7, atol=1e-4) if torchs else torch.equal(eager, other)


def test_a_product_is_two_ops_whatever_it_is_made_of() -> None:
    p, x = problem(unused=0), torch.randn(5, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    a, w = p.a.clone().requires_grad_(), p.w.clone().requires_grad_()
    two = ["mxep::product_forward", "mxep::product_backward"]
    assert ops_of(lambda a, w: grouped_mm(a, w, p.offs, recipe=MX), a, w) == two
    weights = [torch.randn(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (96, 32, 32)]
    assert ops_of(lambda x, w: linear(x, w, recipe=MX), x, weights[0]) == two
    assert ops_of(lambda x, *ws: linear_together(x, ws, recipe=MX), x, *weights) == two


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
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
    [("fp8", "together", "aot_eager"), ("mxfp8_32x32", "linear", "aot_eager"), ("mxfp8", "grouped", "inductor")],
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


@pytest.mark.parametrize("recipe", ["mxfp8_e5m2_wgrad_bf16", "auto"])
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


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32"])
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


PARTIAL_RECIPES = ("bf16", "mxfp8", "mxfp8_wgrad_bf16")
every_recipe = pytest.mark.parametrize("recipe", PARTIAL_RECIPES)


class Case:
    def __init__(self, recipe: str, *, leaf: bool = True, **options: Any) -> None:
        self.p, self.backend = problem(unused=0), Counting()
        self.x = self.p.a.clone().requires_grad_()
        self.w = self.p.w.clone().requires_grad_()
        self.main_grad = torch.zeros(self.w.shape)
        options = {"recipe": recipe, "backend": self.backend, "main_grad": self.main_grad} | options
        a, w = (self.x, self.w) if leaf else (self.x * 1, self.w * 1)
        self.out = grouped_mm(a, w, self.p.offs, **options)
        self.dy = self.p.dy.clone()
        self.backend.asked.clear()

    def asked(self) -> list[str]:
        found = [name for name in self.backend.asked if name in ("dgrad", "prepare_wgrad", "wgrad", "quantize_rows")]
        self.backend.asked.clear()
        return found


@every_recipe
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("retain", [True, False])
def test_a_gradient_of_the_activation_alone_leaves_main_grad_as_it_is(recipe: str, leaf: bool, retain: bool) -> None:
    case = Case(recipe, leaf=leaf)
    torch.autograd.grad(case.out, case.x, case.dy, retain_graph=retain)
    assert not case.main_grad.any()
    assert case.asked() == ["quantize_rows", "dgrad"]


def test_backward_with_inputs_computes_their_gradients_alone() -> None:
    for name, asked in (("x", ["dgrad"]), ("w", ["prepare_wgrad", "wgrad"])):
        case = Case("mxfp8")
        case.out.backward(case.dy, inputs=[getattr(case, name)])
        assert case.asked() == ["quantize_rows", *asked]


@every_recipe
@pytest.mark.parametrize("leaf", [True, False])
def test_x_then_w_is_one_backward_each_part_computed_once(recipe: str, leaf: bool) -> None:
    one = Case(recipe, leaf=leaf)
    one.out.backward(one.dy)
    both = one.asked()
    case = Case(recipe, leaf=leaf)
    (dx,) = torch.autograd.grad(case.out, case.x, case.dy, retain_graph=True)
    first = case.asked()
    case.out.backward(case.dy, inputs=[case.w])
    assert first + case.asked() == both
    assert one.x.grad is not None
    assert torch.equal(dx, one.x.grad)
    assert torch.equal(case.main_grad, one.main_grad)
    with pytest.raises(RuntimeError, match="second time"):
        case.out.backward(case.dy, inputs=[case.w])


def test_what_is_kept_serves_the_same_incoming_gradient_only() -> None:
    for changed in ("another", "in place", "x again"):
        case, want = Case("mxfp8", main_grad=None), Case("mxfp8", main_grad=None)
        torch.autograd.grad(case.out, case.x, case.dy, retain_graph=True)
        dy = case.dy * 2 if changed == "another" else case.dy
        if changed == "in place":
            dy.mul_(2)
        case.asked()
        inputs = [case.w] if changed != "x again" else [case.x, case.w]
        (*_, dw) = torch.autograd.grad(case.out, inputs, dy)
        assert case.asked() == ["quantize_rows", *(["dgrad"] if len(inputs) == 2 else []), "prepare_wgrad", "wgrad"]
        (*_, wanted) = torch.autograd.grad(want.out, [want.w], dy)
        assert torch.equal(dw, wanted)


def test_a_bias_that_is_not_asked_for_costs_nothing() -> None:
    bias = torch.zeros(4, 96, requires_grad=True)
    case = Case("mxfp8", bias=bias)
    torch.autograd.grad(case.out, bias, case.dy, retain_graph=True)
    assert case.asked() == []
    torch.autograd.grad(case.out, case.x, case.dy)
    assert case.asked() == ["quantize_rows", "dgrad"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing_the_gradients_are_the_same(reentrant: bool) -> None:
    one = Case("mxfp8")
    one.out.backward(one.dy)
    p, main_grad = problem(unused=0), torch.zeros_like(one.main_grad)
    x, w = p.a.clone().requires_grad_(), p.w.clone().requires_grad_()

    def run(x: Tensor) -> Tensor:
        return grouped_mm(x, w, p.offs, recipe="mxfp8", main_grad=main_grad)

    if not reentrant:  # torch refuses torch.autograd.grad otherwise
        torch.autograd.grad(checkpoint(run, x, use_reentrant=False), x, p.dy)
        assert not main_grad.any()
    checkpoint(run, x, use_reentrant=reentrant).backward(p.dy)
    assert one.x.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, one.x.grad)
    assert torch.equal(main_grad, one.main_grad)


@splits_functions
@every_recipe
def test_torchs_zero_bubble_schedule_computes_each_part_once(recipe: str) -> None:
    one, case = (Case(recipe, main_grad=None) for _ in range(2))
    one.out.backward(one.dy)
    both = one.asked()
    weights: list[Any] = [case.w]
    (dx,), groups = stage_backward_input([case.out], [case.dy], [case.x], iter(weights))
    first = case.asked()
    stage_backward_weight(iter(weights), groups)
    assert first + case.asked() == both
    assert case.w.grad is not None
    for got, want in ((dx, one.x.grad), (case.w.grad, one.w.grad)):
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


M, N, K, GROUPS = 64, 32, 64, 2


@pytest.fixture
def replays_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with replays_on_the_cpu(monkeypatch):
        yield


@pytest.mark.usefixtures("replays_on_cpu")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_32x32", "fp8", "bf16"])
@pytest.mark.parametrize("held", [False, True])
def test_replayed_products_have_the_bits_of_the_others(recipe: str, held: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(GROUPS, N, K).bfloat16().requires_grad_()
    offs = torch.tensor([32, 64], dtype=torch.int32)
    before = product.forward.replays, product.backward.replays

    def step(a: Tensor) -> list[Tensor]:
        a = a.clone().requires_grad_()
        out = grouped_mm(a, w, offs, recipe=recipe)
        return [out.detach(), *torch.autograd.grad(out, (a, w), torch.ones_like(out))]

    assert_replays_are_alike(step, [torch.randn(M, K).bfloat16() for _ in range(5)], held=held)
    assert product.forward.replays >= before[0] + 3  # or 4, of a kind that was seen before
    assert product.backward.replays >= before[1] + 3


@pytest.mark.usefixtures("replays_on_cpu")
def test_forwards_are_replayed_whatever_the_weight_gradient_is_scaled_by() -> None:
    a, w, offs = torch.randn(M, K).bfloat16(), torch.randn(GROUPS, N, K).bfloat16(), torch.tensor([32, 64]).int()
    before = product.forward.replays
    for scale in (1.0, 0.5, 0.25, 0.125, 0.1):
        grouped_mm(a, w, offs, recipe="mxfp8", wgrad_scale=scale)
    assert product.forward.replays >= before + 3
