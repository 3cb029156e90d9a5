"""Backward split in two: dx first, with all moves, weight gradients later, with none; each computed once, same bits."""

from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ep.problem import composed, inputs, make_ranks
from mxep.ep import MoE, make_dispatcher, run_experts
from mxep.gemm import Recipe
from mxep.gemm.backends import select
from mxep.gemm.backends.reference import Reference
from ranks import distributed
from schedules_of_torch import splits_functions


class Counted:
    """Calls of a dispatcher's moves and a backend's products, by name."""

    def __init__(self, of: Any, seen: list[str], names: tuple[str, ...]) -> None:
        self._of, self._seen, self._names = of, seen, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name not in self._names:
            return found
        return lambda *args, **kwargs: (self._seen.append(name), found(*args, **kwargs))[1]


EXCHANGES = ("dispatch", "redispatch", "combine")
PRODUCTS = ("dgrad", "prepare_wgrad", "wgrad", "quantize_rows", "quantize_weight_colwise")


class Case:
    def __init__(self, ctx, ranks, *, layer: str, recipe: str, main_grads: bool = False, name: str = "symmetric"):
        *given, self.d_out = inputs(ranks, ctx)
        self.x, self.ids, self.weights, self.proj, self.down = given
        self.seen: list[str] = []
        dispatcher = make_dispatcher(name, len(ranks.whole.down_proj), dim=self.x.shape[1], group=ctx.group)
        counted: Any = Counted(dispatcher, self.seen, EXCHANGES)
        self.main_grads = tuple(torch.zeros(w.shape, device=w.device) if main_grads else None for w in given[3:])
        how: dict[str, Any] = {"recipe": Recipe.named(recipe), "main_grads": self.main_grads}
        if layer == "composed":
            self.out = composed(*given, dispatcher=counted, **how)
        else:
            backend: Any = Counted(select("auto", self.x.device), self.seen, PRODUCTS)
            self.proj.main_grad, self.down.main_grad = how.pop("main_grads")
            self.out = run_experts(*given, dispatcher=counted, backend=backend, **how)[0]
        self.seen.clear()

    def took(self) -> list[str]:
        seen = sorted(self.seen)
        self.seen.clear()
        return seen


LAYERS = pytest.mark.parametrize("layer", [pytest.param("composed", marks=splits_functions), "in one"])


@distributed(2, recipe=["bf16", "mxfp8"])
@LAYERS
def test_dx_then_weights_is_one_backward_bit_for_bit_each_move_made_once(ctx, recipe: str, layer: str) -> None:
    ranks = make_ranks([70, 45], seed=4)
    one, case = (Case(ctx, ranks, layer=layer, recipe=recipe) for _ in range(2))
    wanted = torch.autograd.grad(one.out, (one.x, one.weights, one.proj, one.down), one.d_out)
    whole = one.took()
    assert any("redispatch" in name for name in whole)
    got = torch.autograd.grad(case.out, (case.x, case.weights), case.d_out, retain_graph=True)
    first = case.took()
    assert not [name for name in first if "wgrad" in name]
    if layer == "composed":  # from where the gradients of the rows of each product lie, as a schedule does
        _, case = case, Case(ctx, ranks, layer=layer, recipe=recipe)
        parameters: list[Any] = [case.proj, case.down]
        _, groups = stage_backward_input([case.out], [case.d_out], [case.x, case.weights], iter(parameters))
        first = case.took()
        stage_backward_weight(iter(parameters), groups)
        got += case.proj.grad, case.down.grad
    else:
        got += torch.autograd.grad(case.out, (case.proj, case.down), case.d_out)
    second = case.took()
    assert sorted(first + second) == whole
    assert set(second) <= {"prepare_wgrad", "wgrad"}
    assert all(torch.equal(a, b) for a, b in zip(wanted, got))


@distributed(2)
@LAYERS
def test_main_grads_take_nothing_from_a_backward_for_dx_and_once_from_the_one_for_weights(ctx, layer: str) -> None:
    ranks = make_ranks([70, 45], seed=5)
    one, case = (Case(ctx, ranks, layer=layer, recipe="mxfp8", main_grads=True) for _ in range(2))
    one.out.backward(one.d_out)
    torch.autograd.grad(case.out, case.x, case.d_out, retain_graph=True)
    assert not any(main_grad.any() for main_grad in case.main_grads)
    case.out.backward(case.d_out, inputs=[case.proj, case.down])
    assert all(torch.equal(a, b) for a, b in zip(one.main_grads, case.main_grads))
    assert one.main_grads[0].any()


@distributed(1, device="cpu")
def test_another_gradient_of_the_output_is_not_taken_for_the_first(ctx) -> None:
    case = Case(ctx, make_ranks([60], seed=6), layer="in one", recipe="mxfp8")
    torch.autograd.grad(case.out, case.x, case.d_out, retain_graph=True)
    case.took()
    (down,) = torch.autograd.grad(case.out, case.down, case.d_out.clone(), retain_graph=True)
    assert any("redispatch" in name for name in case.took())
    torch.autograd.grad(case.out, case.x, case.d_out, retain_graph=True)
    case.took()
    (again,) = torch.autograd.grad(case.out, case.down, case.d_out, retain_graph=True)
    (proj,) = torch.autograd.grad(case.out, case.proj, case.d_out)
    assert case.took() == ["prepare_wgrad", "prepare_wgrad", "wgrad", "wgrad"]
    assert torch.equal(down, again)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(case.out, case.proj, case.d_out)
    assert proj.any()


@distributed(2)
@splits_functions
def test_torchs_zero_bubble_schedule_on_a_model_of_two_layers(ctx) -> None:
    def model() -> torch.nn.ModuleList:
        torch.manual_seed(0)
        layers = (MoE(64, 64, 8, top_k=2, recipe="mxfp8", group=ctx.group) for _ in range(2))
        return torch.nn.ModuleList(layers).to(ctx.device, torch.bfloat16)

    def forward(layers: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = x + layer(x)
        return x

    whole, split = model(), model()
    torch.manual_seed(1 + ctx.rank)
    x = torch.randn(40, 64, device=ctx.device, dtype=torch.bfloat16)
    x_whole, x_split = (x.clone().requires_grad_() for _ in range(2))
    out = forward(whole, x_whole)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    wgrads, prepare = [], Reference.prepare_wgrad
    monkey = pytest.MonkeyPatch()
    monkey.setattr(Reference, "prepare_wgrad", lambda *args: (wgrads.append(1), prepare(*args))[1])
    try:
        out = forward(split, x_split)
        _, groups = stage_backward_input([out], [d_out], [x_split], split.parameters())
        assert not wgrads
        stage_backward_weight(split.parameters(), groups)
        assert len(wgrads) == (4 if x.device.type == "cpu" else 0)
    finally:
        monkey.undo()
    assert torch.equal(x_whole.grad, x_split.grad)
    for (name, a), b in zip(whole.named_parameters(), split.parameters()):
        a_grad, b_grad = (getattr(g, "_local_tensor", g) for g in (a.grad, b.grad))
        assert torch.equal(a_grad, b_grad), name
