"""A backward computes what it is asked for; what is split into two computes each part once, with the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from gemm.problem import problem
from gemm.test_grouped_mm import Counting
from mxep.gemm import grouped_mm
from schedules_of_torch import splits_functions

RECIPES = ("bf16", "mxfp8", "mxfp8_wgrad_bf16")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


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
