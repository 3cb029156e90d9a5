"""Layers, their parts and products under torch.autograd.set_detect_anomaly: the same gradients, and no false alarm.

What nobody reads may hold NaN, but torch looks there, too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxep.ep import LocalDispatcher, MoE, combine, dispatch, expert_mlp
from mxep.gemm import Recipe, convert, grouped_mm, linear, linear_together, quantize_input, quantize_weights_once
from quant.poison import fill_allocations
from ranks import Context, distributed

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
RECIPES = ["bf16", "fp8", "mxfp8", "mxfp8_wgrad_bf16", "mxfp8_e5m2_32x32_gate_up_fp8"]


@pytest.fixture(autouse=True)
def nan_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated holds NaN until it is written."""
    fill_allocations(monkeypatch, 0xFF)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16).requires_grad_()


def layer(recipe: str, **options: Any) -> Iterator[Tensor]:
    torch.manual_seed(0)
    moe, x = MoE(64, 32, 8, 2, recipe=recipe, dispatcher="local", device=DEVICE, **options), drawn(9, 64)
    moe(x).float().square().sum().backward()
    yield from (p.grad for p in (x, *moe.parameters()) if p.grad is not None)


def parts(recipe: str) -> Iterator[Tensor]:
    dispatcher, how = LocalDispatcher(8), Recipe.named(recipe)
    x, gate_up, down = drawn(9, 64), drawn(8, 64, 64, seed=1), drawn(8, 64, 32, seed=2)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    ids = torch.arange(18, device=DEVICE).view(9, 2) % 5
    rows, row_weight, routing = dispatch(x, ids, weights, dispatcher=dispatcher, recipe=how)
    y = expert_mlp(rows, gate_up, down, routing.plan.offs, row_weight=row_weight, recipe=how)
    combine(y, routing, dispatcher=dispatcher, recipe=how).sum().backward()
    yield from (p.grad for p in (x, gate_up, down, weights) if p.grad is not None)


def products(recipe: str) -> Iterator[Tensor]:
    a, w, offs = drawn(96, 64), drawn(2, 64, 64, seed=1), torch.tensor([32, 64], dtype=torch.int32, device=DEVICE)
    grouped_mm(a, w, offs, recipe=recipe)[:64].sum().backward()
    x, v = drawn(5, 64), drawn(64, 64, seed=2)
    shared = quantize_input(x, recipe=recipe)
    (linear(shared, v, recipe=recipe) + linear(shared, v, recipe=recipe)).sum().backward()
    q, k = linear_together(x, [v, v], recipe=recipe)
    (q + k).sum().backward()
    for tensor in (a[:64], w, x, v):
        if tensor.grad is not None:
            yield tensor.grad
    assert a.grad is not None
    yield a.grad[:64]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(drawn(2, 64, 64).detach())

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = torch._grouped_mm(x, self.w1.mT, offs=offs)
        return out


def converted(recipe: str) -> Iterator[Tensor]:
    model, x = convert(Grouped(), recipe), drawn(40, 64)
    model(x, torch.tensor([8, 40], dtype=torch.int32, device=DEVICE)).sum().backward()
    assert model.w1.grad is not None
    assert x.grad is not None
    yield from (model.w1.grad, x.grad)


WORK: dict[str, Callable[[str], Iterator[Tensor]]] = {
    "layer": layer,
    "layer with biases": lambda recipe: layer(recipe, bias=True),
    "layer with a shared expert": lambda recipe: layer(recipe, num_shared_experts=1, shared_expert_gate=True),
    "layer of weighted tokens": lambda recipe: layer(recipe, score_before_experts=True),
    "parts": parts,
    "products": products,
    "converted": converted,
}


@pytest.mark.parametrize(
    ("work", "recipe"),
    [
        *(("layer", recipe) for recipe in RECIPES),
        *((work, "mxfp8") for work in WORK if work != "layer"),
        *((work, "mxfp8_wgrad_bf16") for work in ("layer with biases", "parts", "products")),
    ],
)
def test_anomaly_mode_changes_no_gradient(work: str, recipe: str) -> None:
    wanted = [*WORK[work](recipe)]
    # Weights quantized once and again; where it is no layer, one of both, by its recipe.
    for open_once in (False, True) if work == "layer" else (recipe != "mxfp8",):
        with torch.autograd.set_detect_anomaly(True):
            if open_once:
                with quantize_weights_once():
                    got = [*WORK[work](recipe)]
            else:
                got = [*WORK[work](recipe)]
        assert len(got) == len(wanted) > 0
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_bf16"])
def test_anomaly_mode_finds_the_nan_of_a_token(recipe: str) -> None:
    x, w = drawn(32, 64), drawn(64, 64, seed=1)
    with torch.autograd.set_detect_anomaly(True):
        out = linear(x, w, recipe=recipe)
        with pytest.raises(RuntimeError, match="returned nan values in its 0th output"):
            (out.float() / torch.zeros_like(out)).log().sum().backward()


@distributed(2, dispatcher=["symmetric", "all_to_all", "hierarchical"])
def test_exchanges_run_under_anomaly_mode(ctx: Context, dispatcher: str) -> None:
    options = {"ranks_per_node": 1} if dispatcher == "hierarchical" else {}
    for recipe in ("mxfp8", "mxfp8_wgrad_bf16"):
        torch.manual_seed(0)
        moe = MoE(64, 32, 8, 2, group=ctx.group, recipe=recipe, dispatcher=dispatcher, device=ctx.device, **options)
        x = torch.randn(9, 64, dtype=BF16, device=ctx.device, requires_grad=True)
        found = []
        for anomaly in (False, True):
            x.grad = None
            # torch looks for NaN in no DTensor's gradient, which experts of several ranks have.
            with torch.autograd.set_detect_anomaly(anomaly, check_nan=False):
                moe(x).sum().backward()
            assert x.grad is not None
            found.append(x.grad.clone())
        assert torch.equal(*found)
