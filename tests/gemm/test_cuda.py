"""On a GPU: the host waits for nothing, a captured graph follows new groups, results are those of the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.problem import HALF_ULP_BF16, RECIPES, Problem, bound_of_sum, indexed, problem
from host_sync import no_host_sync
from mxep.gemm import Recipe, grouped_mm
from mxep.gemm.backends import select

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZES = (64, 0, 160, 32, 0)


def on_gpu(p: Problem) -> Problem:
    return Problem(*(x.cuda() for x in (p.a, p.w, p.dy, p.offs)))


@pytest.mark.parametrize("backend", ["reference", "dequant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_results_are_those_of_the_cpu(recipe: str, backend: str) -> None:
    p = problem(SIZES)
    cpu, gpu = p.run(recipe, backend="reference"), on_gpu(p).run(recipe, backend=backend)
    for want, got, sum_error in zip(cpu, gpu, bound_of_sum(p)):
        bound = 2 * HALF_ULP_BF16 * want.double().abs() * (1 + 2**-8) + 2 * 1.3 * sum_error
        assert ((got.cpu().double() - want.double()).abs() <= bound).all()


def step(a: Tensor, w: Tensor, bias: Tensor, offs: Tensor, dy: Tensor, recipe: Recipe) -> list[Tensor]:
    out = grouped_mm(a, w, offs, recipe=recipe, bias=bias)
    return [out.detach(), *torch.autograd.grad(out, (a, w, bias), dy)]


def arguments(p: Problem, recipe: str, *, coded: bool) -> list[Any]:
    """Arguments of `step` on the GPU; coded: `a` and `dy` as MXTensors under a row index."""
    r, q = Recipe.named(recipe), on_gpu(p)
    a, dy = p.a, p.dy
    if coded:
        a, dy = (indexed(x, valid=p.valid).to("cuda") for x in (r.quantize_rows(a), r.quantize_rows(dy, r.grad_fmt)))
    bias = torch.ones(q.w.shape[:2], device="cuda")
    a, w, b = (x.detach().requires_grad_() for x in (a.cuda(), q.w, bias))
    return [a, w, b, q.offs, dy.cuda(), r]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_waits_for_nothing(recipe: str, coded: bool) -> None:
    given = arguments(problem(SIZES), recipe, coded=coded and recipe != "bf16")
    want = step(*given)
    torch.cuda.synchronize()
    with no_host_sync():
        got = step(*given)
    valid = slice(0, sum(SIZES))
    assert all(torch.equal(x[valid], y[valid]) for x, y in zip(want, got))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_graph_follows_new_groups(recipe: str) -> None:
    p = problem(SIZES)
    given = arguments(p, recipe, coded=False)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(*given)
    for sizes in (SIZES, (0, 32, 0, 64, 160), (256, 0, 0, 0, 0), (0, 0, 0, 0, 32), (0, 0, 0, 0, 0)):
        ends = torch.tensor(sizes).cumsum(0).int()
        given[3].copy_(ends)
        graph.replay()
        q = replace(p, offs=ends)
        want = step(*arguments(q, recipe, coded=False))
        assert all(torch.equal(x[: q.valid], y[: q.valid]) for x, y in zip(want[:2], got[:2]))
        assert all(torch.equal(x, y) for x, y in zip(want[2:], got[2:]))
        assert all(not got[2][g].any() for g, size in enumerate(sizes) if not size)


def test_auto_picks_hopper_where_it_runs() -> None:
    device = torch.device("cuda")
    wanted = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "dequant"
    assert select("auto", device).name == wanted
