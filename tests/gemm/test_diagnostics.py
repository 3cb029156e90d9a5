"""fold_report tells what folding costs, and torch counts the FLOPs of every GEMM."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from gemm.problem import Problem, problem, quantized_weight
from gemm.test_hopper import BACKEND as HOPPER
from mxep.ep import MoE
from mxep.gemm import (
    BACKENDS,
    Backend,
    Recipe,
    convert,
    fold_report,
    fp32_linear,
    grouped_mm,
    join_linears,
    linear,
    linear_together,
    quantize_weights_once,
)
from mxep.gemm.backends.hopper import Hopper
from mxep.gemm.diagnostics import FoldedProduct
from mxep.gemm.router_ops import dgrad_op, linear_op, wgrad_op
from mxep.quant import fold_with_stats, quantize

SHAPE = (2, 64, 128)
every_backend = pytest.mark.parametrize(
    "backend", [BACKENDS["reference"], BACKENDS["dequant"], HOPPER], ids=lambda backend: backend.name
)


class Experts(nn.Module):
    def __init__(self, p: Problem, backend: str | Backend) -> None:
        super().__init__()
        self.w, self.offs, self.backend = nn.Parameter(p.w.clone()), p.offs, backend

    def forward(self, x: Tensor) -> Tensor:
        return grouped_mm(x, self.w, self.offs, recipe="mxfp8", backend=self.backend)


def small() -> Problem:
    return problem((64, 32), n=64, k=128, unused=32)


def anti_aligned() -> Problem:
    """Half of the columns 2^20 larger in a, as much smaller in w: folding flushes what the other half needs."""
    p = small()
    up = torch.where(torch.arange(128) < 64, 2.0**10, 2.0**-10).bfloat16()
    p.a.mul_(up)
    p.w.div_(up)
    return p


@every_backend
def test_products_are_counted_by_module_forward_and_backward(backend: Backend) -> None:
    p = small()
    model = nn.ModuleDict({name: Experts(p, backend) for name in ("first", "second")})
    with fold_report(model) as report:
        for experts in model.values():
            for _ in range(2):
                experts(p.a.clone().requires_grad_()).backward(p.dy)
    assert set(report) == {(name, SHAPE, x) for name in model for x in ("forward", "dgrad", "wgrad")}
    assert all(found.calls == 2 and found.snr_db > 60 and found.flushed <= found.rounded for found in report.values())
    assert report["first", SHAPE, "forward"].elements == 2 * (p.valid * 128 + p.w.numel())
    assert "first 2x64x128 wgrad" in str(report)
    assert "exact" not in str(report)


@every_backend
def test_what_folding_loses_is_found_and_exact_backends_are_named(backend: Backend) -> None:
    p = anti_aligned()
    with fold_report() as report:
        Experts(p, backend)(p.a)
    (found,) = report.values()
    assert (found.module, found.product, found.weight) == ("Experts", "forward", SHAPE)
    stats = [fold_with_stats(quantize(p.a), offs=p.offs)[1], fold_with_stats(quantize(p.w))[1]]
    assert found.rounded == sum(int(x.changed) for x in stats)
    assert found.flushed == sum(int(x.flushed) for x in stats) > 0
    assert 19 <= found.spread <= 23
    assert found.snr_db < 20
    assert "exact: dequant or triton" in str(report)


def test_columns_of_a_weight_gradient_that_are_lost_show() -> None:
    p = anti_aligned()
    p.w.fill_(1)
    with fold_report() as report:
        Experts(p, "reference")(p.a.clone().requires_grad_()).backward(p.dy)
    assert report["Experts", SHAPE, "wgrad"].flushed >= p.valid * 64 * 0.9
    assert report["Experts", SHAPE, "wgrad"].snr_db < 20
    assert report["Experts", SHAPE, "dgrad"].snr_db > 60


class Plain(nn.Module):
    """Knows nothing of mxep."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.w.mT, offs=offs)


@pytest.mark.parametrize("once", [False, True])
def test_products_of_converted_modules_have_their_names(once: bool) -> None:
    p = problem((64, 32), n=64, k=128, unused=0)
    model = convert(nn.Sequential(nn.Identity(), Plain(p.w)), "mxfp8")
    with fold_report(model) as report, quantize_weights_once() if once else contextlib.nullcontext():
        for _ in range(2):
            model[1](p.a.clone().requires_grad_(), p.offs).backward(p.dy)
    found = [(product.module, product.product, product.calls) for product in report.values()]
    assert found == [("1", "forward", 2), ("1", "dgrad", 2), ("1", "wgrad", 2)]


def test_nothing_stays_behind_and_unquantized_products_are_not_recorded() -> None:
    before = {name: vars(Hopper)[name] for name in ("forward", "dgrad", "prepare_wgrad", "wants_rowwise")}
    with contextlib.suppress(ZeroDivisionError), fold_report() as report:
        problem().run("bf16")
        assert not HOPPER.wants_rowwise
        raise ZeroDivisionError
    assert not report
    assert before == {name: vars(Hopper)[name] for name in before}


class Idle(Backend):
    """Multiplies nothing: all memory that is taken while it is watched is the report's."""

    name = "idle"

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None

    def forward(self, a: Tensor, w: Tensor, *_: Any, **options: Any) -> Tensor:
        return a

    def prepare_wgrad(self, dy: Tensor, a: Tensor, *_: Any) -> None:
        pass


def report_of(groups: int, trace: Path) -> tuple[list[FoldedProduct], int]:
    """Of groups that are alike: forward and wgrad, and the most bytes held at a time."""
    p = problem([64], n=96, unused=0)
    a, dy = (quantize(x.repeat(groups, 1)) for x in (p.a * torch.logspace(-6, 6, 128), p.dy))
    w, offs = quantize(p.w.repeat(groups, 1, 1)), 64 * torch.arange(1, groups + 1, dtype=torch.int32)
    with fold_report() as report, torch.profiler.profile(profile_memory=True) as profiler:
        Idle().forward(a, w, offs)
        Idle().prepare_wgrad(dy, a, offs)
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return list(report.values()), max(itertools.accumulate(sizes))


def test_it_takes_memory_for_one_group_at_a_time(tmp_path: Path) -> None:
    one, of_one = report_of(1, tmp_path / "1.json")
    four, of_four = report_of(4, tmp_path / "4.json")
    for single, several in zip(one, four, strict=True):
        counts = {"elements", "rounded", "flushed"}
        assert {name: 4 * getattr(single, name) for name in counts} == {name: getattr(several, name) for name in counts}
        assert (single.spread, single.snr_db) == (several.spread, several.snr_db)
        assert single.flushed
    assert of_four < 1.1 * of_one


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
